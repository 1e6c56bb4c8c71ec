"""Compiled layers: few regions, no arithmetic of the compiler's own, no recompile, and the bits of eager."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import metrics

from engine.executor import Executor
from engine.layout import Prompt
from engine.model import Backbone
from ops.linear import linear_fixed
from tests.support import random_backbone, run, small_config, tokens

REGIONS = 4
"""Delta-rule layer, attention layer, and the last attention layer with and without read rows."""


@cache
def executors() -> tuple[Executor, Executor]:
    """Eager and compiled, over the same weights."""
    eager = random_backbone(small_config(periods=2), dtype=torch.float32)
    compiled = Backbone(eager.weights, eager.dimensions, linear_fixed, compile_layers=True)
    return Executor(eager), Executor(compiled)


def candidates(rng: np.random.Generator, prefix: int, count: int) -> list[list[Prompt]]:
    head = tokens(rng, prefix)
    branches = [tokens(rng, 2 + i % 70) for i in range(count)]
    for i, branch in enumerate(branches):
        branch[0], branch[1] = i % 300, i // 300
    return [[Prompt(np.concatenate([head, branch])) for branch in branches]]


@pytest.fixture(autouse=True)
def _count_afresh() -> None:
    torch._dynamo.reset()
    counters.clear()
    metrics.reset()


def test_compiled_equals_eager_for_every_length_without_a_recompile() -> None:
    """Row counts and read counts from one rung to several, equal and different ones, in any order."""
    eager, compiled = executors()
    rng = np.random.default_rng(0)
    regions = []
    for prefix, count in ((70, 3), (1, 1), (20, 70), (200, 2)):
        questions = candidates(rng, prefix, count)
        for schedule in ("levels", "batched"):
            expected, _ = run(eager, questions, schedule=schedule)
            found, _ = run(compiled, questions, schedule=schedule)
            assert torch.equal(expected, found), (prefix, count, schedule)
        regions.append(counters["stats"]["unique_graphs"])
    assert regions[0] == REGIONS
    assert set(regions) == {REGIONS}
    assert metrics.generated_kernel_count == 0
    products = {key for key in counters["inductor"] if "mm" in key and "pattern" not in key}
    assert not products
