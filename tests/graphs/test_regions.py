"""Compiled layers: few regions, no arithmetic of the compiler's own, no recompile, and the bits of eager."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import metrics

from engine.prompt import Prompt
from engine.run.executor import Executor
from engine.run.model import Backbone
from engine.run.snapshot import AttentionBuffers, GdnBuffers
from graphs import regions
from ops.linear import linear_fixed
from tests.support import random_backbone, run, small_config, tokens

REGIONS = 4
"""Delta-rule layer, attention layer, and the last attention layer with and without read rows."""


@cache
def eager() -> Executor:
    return Executor(random_backbone(small_config(periods=2), dtype=torch.float32))


def compiled(linear: Callable[..., Any] = linear_fixed) -> Executor:
    backbone = eager().backbone
    return Executor(Backbone(backbone.weights, backbone.dimensions, linear, compile_layers=True))


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
    regions.compiled.cache_clear()


def test_compiled_equals_eager_for_every_length_without_a_recompile() -> None:
    """Row counts and read counts from one rung to several, equal and different ones, in any order."""
    own = compiled()
    rng = np.random.default_rng(0)
    found = []
    for prefix, count in ((70, 3), (1, 1), (20, 70), (200, 2)):
        questions = candidates(rng, prefix, count)
        for schedule in ("levels", "batched"):
            expected, _ = run(eager(), questions, schedule=schedule)
            hidden, _ = run(own, questions, schedule=schedule)
            assert torch.equal(expected, hidden), (prefix, count, schedule)
        found.append(counters["stats"]["unique_graphs"])
    assert found == [REGIONS] * 4
    assert metrics.generated_kernel_count == 0


def targets(linear: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of everything that the compiled regions call."""
    called: set[str] = set()

    def record(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        for node in module.graph.nodes:
            if node.op in ("call_function", "call_method", "call_module"):
                called.add(node.target if isinstance(node.target, str) else str(node.target))
        return module.forward

    compile_with = torch.compile
    monkeypatch.setattr(regions.torch, "compile", lambda fn, **kwargs: compile_with(fn, backend=record, **kwargs))
    run(compiled(linear), candidates(np.random.default_rng(1), 70, 3), schedule="levels")
    return {name for name in called if not name.startswith("forkgraph.")}


VIEWS_AND_ALLOCATIONS = {str(operator.getitem), "new_empty", "size"}


def test_regions_call_operators_and_views_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """No product but the handle's, no arithmetic: every other call is an index, a slice or an empty tensor."""
    assert targets(linear_fixed, monkeypatch) <= VIEWS_AND_ALLOCATIONS


def test_a_product_beside_the_handle_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_matmul(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w.t()

    assert not targets(with_matmul, monkeypatch) <= VIEWS_AND_ALLOCATIONS


def test_sizes_of_weights_stay_fixed_whatever_was_compiled_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other kind of layer, and another model, have other sizes; only rows and buffers are dynamic."""
    symbolic: set[str] = set()
    weights: set[str] = set()

    def record(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        for node in module.graph.find_nodes(op="placeholder"):
            value = node.meta["example_value"]
            if isinstance(value, Tensor) and "_w_" in node.name:
                weights.add(node.name)
                symbolic.update(node.name for size in value.shape if not isinstance(size, int))
        return module.forward

    compile_with = torch.compile
    monkeypatch.setattr(regions.torch, "compile", lambda fn, **kwargs: compile_with(fn, backend=record, **kwargs))
    for hidden in (64, 96):
        other = random_backbone(small_config(hidden=hidden), dtype=torch.float32)
        own = Executor(Backbone(other.weights, other.dimensions, linear_fixed, compile_layers=True))
        run(own, candidates(np.random.default_rng(3), 70, 3), schedule="levels")
    assert len(weights) > 10
    assert not symbolic


@pytest.mark.parametrize("schedule", ["independent", "levels", "tree"])
def test_no_view_enters_a_region(schedule: str) -> None:
    """The compiler guards a view's base too: code that was compiled for one base is compiled again for another."""
    own, seen = Executor(Backbone(eager().backbone.weights, eager().backbone.dimensions, linear_fixed)), []
    for kind, forward in own.backbone._forwards.items():

        def region(*arguments: Any, forward: Callable[..., Any] = forward) -> Any:
            for argument in arguments:
                tensors = vars(argument).values() if isinstance(argument, GdnBuffers | AttentionBuffers) else [argument]
                seen.extend(t for t in tensors if isinstance(t, Tensor))
            return forward(*arguments)

        own.backbone._forwards[kind] = region
    run(own, candidates(np.random.default_rng(2), 70, 3), schedule=schedule)
    assert len({t.data_ptr() for t in seen}) > 10
    assert not any(t._is_view() for t in seen)
