"""The comparison with the float32 forward without a GPU: prompts, distances, and a fault it must see."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "profiling"))  # scripts, not a package

import accuracy

from engine.load.checkpoint import RandomWeights
from engine.load.dimensions import ModelDimensions
from engine.load.tensors import Weights
from engine.load.weights import load_weights
from ops.linear import linear_fixed
from tests.support import small_config

DIMENSIONS = ModelDimensions.from_config(small_config())


def test_prompts_span_the_lengths_and_read_their_last_row() -> None:
    prompts = accuracy.prompts_of(64, 512)
    assert (len(prompts[0]), len(prompts[-1])) == (accuracy.SHORTEST, accuracy.LONGEST)
    assert all(p.reads[-1] == len(p) - 1 and len(p.reads) <= accuracy.ROWS for p in prompts)


@pytest.fixture(scope="module")
def weights() -> tuple[Weights, Weights]:
    """The same values in bfloat16 and in float32."""
    source = RandomWeights(DIMENSIONS, seed=0, dtype=torch.bfloat16, device=torch.device("cpu"))
    where = {"device": torch.device("cpu"), "positions": 256}
    bf16 = load_weights(source.tensor, DIMENSIONS, dtype=torch.bfloat16, **where)
    return bf16, load_weights(source.tensor, DIMENSIONS, dtype=torch.float32, **where)


def test_bfloat16_moves_both_about_as_far_from_a_reference_that_transformers_confirms(
    weights: tuple[Weights, Weights],
) -> None:
    prompts = [p for p in accuracy.prompts_of(12, 512) if len(p) <= 200]
    found = accuracy.compared(*weights, DIMENSIONS, linear_fixed, "torch", prompts)
    assert found["transformers float32"].max() < 1e-5
    for who in ("engine", "transformers"):
        assert 1e-3 < found[who].min() <= found[who].max() < 5e-2
    assert np.median(found["engine"] / found["transformers"]) < 1.3


def test_a_wrong_weight_is_seen(weights: tuple[Weights, Weights]) -> None:
    bf16, exact = weights
    spoiled = replace(bf16, norm_h=bf16.norm_h + 0.1)
    prompts = accuracy.prompts_of(12, 512)[:3]
    found = accuracy.compared(spoiled, exact, DIMENSIONS, linear_fixed, "torch", prompts)
    good = accuracy.compared(bf16, exact, DIMENSIONS, linear_fixed, "torch", prompts)
    assert (found["engine"] > 2 * good["engine"]).all()
