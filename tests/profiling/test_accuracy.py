"""The comparison with the float32 forward without a GPU: prompts, distances, and a fault it must see."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from bench_options import BenchConfig
from cases import accuracy

from engine.load.checkpoint import RandomWeights
from engine.load.dimensions import ModelDimensions
from engine.load.tensors import Weights
from engine.load.weights import load_weights
from tests.engine.engine_support import cache_dir
from tests.support import small_config

DIMENSIONS = ModelDimensions.from_config(small_config())


@pytest.fixture(scope="module")
def weights() -> Weights:
    device = torch.device("cpu")
    source = RandomWeights(DIMENSIONS, seed=0, dtype=torch.bfloat16, device=device)
    return load_weights(source.tensor, DIMENSIONS, dtype=torch.bfloat16, device=device, positions=256)


def test_prompts_span_the_lengths_and_read_their_last_row() -> None:
    prompts = accuracy.prompts_of(64, 512)
    assert (len(prompts[0]), len(prompts[-1])) == (accuracy.SHORTEST, accuracy.LONGEST)
    assert all(p.reads[-1] == len(p) - 1 and len(p.reads) <= accuracy.ROWS for p in prompts)


def test_bfloat16_moves_both_about_as_far_from_a_reference_that_transformers_confirms(weights: Weights) -> None:
    prompts = [p for p in accuracy.prompts_of(12, 512) if len(p) <= 200]
    exact = accuracy.in_float32(weights, DIMENSIONS)
    found = accuracy.compared(weights, exact, DIMENSIONS, "fixed", "torch", prompts)
    assert found["transformers float32"].max() < 1e-5
    for who in ("engine", "transformers"):
        assert 1e-3 < found[who].min() <= found[who].max() < 5e-2
    assert np.median(found["engine"] / found["transformers"]) < 1.3


def test_a_wrong_weight_is_seen(weights: Weights) -> None:
    spoiled, exact = replace(weights, norm_h=weights.norm_h + 0.1), accuracy.in_float32(weights, DIMENSIONS)
    prompts = accuracy.prompts_of(12, 512)[:3]
    found, good = (accuracy.compared(w, exact, DIMENSIONS, "fixed", "torch", prompts) for w in (spoiled, weights))
    assert (found["engine"] > 2 * good["engine"]).all()


def test_the_case_runs_on_the_tiny_model_and_keeps_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "LONGEST", 64)
    monkeypatch.setattr(accuracy, "BOUNDS", {"median": 0.0, "largest": 9.0})
    config = BenchConfig(case="accuracy", device="cpu", cache_dir=cache_dir().name, prompts=3)
    failed = {r.configuration["who"]: r.failed for r in accuracy.measure(config) if r.failed}
    assert list(failed) == ["ratio"]
    assert failed["ratio"].endswith("above 0.0")
