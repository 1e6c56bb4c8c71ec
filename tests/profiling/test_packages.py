"""What the script for packages of real size writes and compares, at tiny dimensions and without a GPU."""

from __future__ import annotations

import mmap
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "profiling"))  # scripts, not a package

import packages

from engine.load.checkpoint import RandomWeights, open_checkpoint
from engine.load.dimensions import ModelDimensions
from engine.load.lora import Adapter, open_adapter
from engine.load.package import kind_of, read_package
from engine.load.weights import Source, load_weights
from tests.support import small_config

DIMENSIONS = ModelDimensions.from_config(small_config())
CPU = torch.device("cpu")


def answers(source: Source, beside: Adapter | None = None) -> torch.Tensor:
    weights = load_weights(
        source, DIMENSIONS, dtype=torch.bfloat16, device=CPU, positions=packages.POSITIONS, adapter=beside
    )
    return packages.answers(weights, DIMENSIONS)


def test_what_is_written_is_what_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "SHARD_BYTES", 100_000)
    packages.write_base(tmp_path / "base", DIMENSIONS, CPU)
    packages.write_package(tmp_path / "package", DIMENSIONS)
    files = open_checkpoint(tmp_path / "base")
    assert files.dimensions == DIMENSIONS
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 3
    assert kind_of(tmp_path / "package") == "package"
    assert read_package(tmp_path / "package", DIMENSIONS.hidden_size).lora_rank == packages.RANK
    adapter = open_adapter(tmp_path / "package" / "adapter", DIMENSIONS)

    made = RandomWeights(DIMENSIONS, seed=0, dtype=torch.bfloat16, device=CPU)
    base = answers(files.tensor)
    assert torch.equal(base, answers(made.tensor))
    merged = answers(adapter.merged(files.tensor, CPU))
    assert torch.equal(merged, answers(adapter.merged(made.tensor, CPU)))
    changed = packages.distance(merged, base)
    assert packages.distance(answers(files.tensor, adapter), merged) < changed / 2, "no more than rounding"


def test_a_layer_has_the_bytes_of_its_weights() -> None:
    weights = load_weights(
        RandomWeights(DIMENSIONS, seed=0, dtype=torch.bfloat16, device=CPU).tensor,
        DIMENSIONS,
        dtype=torch.bfloat16,
        device=CPU,
        positions=1,
    )
    largest = max(
        sum(t.numel() * 2 for t in [*vars(layer).values(), *vars(layer.mlp).values()] if isinstance(t, torch.Tensor))
        for layer in weights.layers
    )
    assert packages.layer_bytes(DIMENSIONS) == pytest.approx(largest, rel=0.02)  # padded rows are no weights


def test_anonymous_memory_is_seen_while_it_is_held() -> None:
    """Pages of its own: what an allocator hands out may have been resident before."""
    size, deadline = 80 << 20, time.monotonic() + 10
    with packages.anonymous_memory() as most, mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        for page in range(0, size, mmap.PAGESIZE):
            held[page] = 1
        while most() < size // 2 and time.monotonic() < deadline:
            time.sleep(0.001)
    assert most() >= size // 2
