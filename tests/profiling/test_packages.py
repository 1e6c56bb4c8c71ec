"""What the case for packages of real size writes and compares, at tiny dimensions and without a GPU."""

from __future__ import annotations

import mmap
import time
from pathlib import Path

import pytest
import torch
from cases import packages

from engine.load.checkpoint import RandomWeights, open_checkpoint
from engine.load.dimensions import ModelDimensions
from engine.load.weights import load_weights
from tests.support import small_config

DIMENSIONS = ModelDimensions.from_config(small_config())
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    packages.write_base(tmp_path / "base", DIMENSIONS, CPU, shard_bytes=100_000)
    packages.write_adapter(tmp_path / "adapter", DIMENSIONS)
    return tmp_path


def test_what_is_written_is_what_is_made(folder: Path) -> None:
    assert open_checkpoint(folder / "base").dimensions == DIMENSIONS
    assert len(list((folder / "base").glob("*.safetensors"))) > 3
    records = {r.name: r for r in packages.loads(folder, DIMENSIONS, CPU)}
    assert not any(r.failed for r in records.values())
    apart = {name: r.configuration["distance"] for name, r in records.items()}
    assert apart["base from files"] == apart["merged from files"] == 0
    assert 0 < apart["adapter beside, from files"] < apart["merged, made"] / 2, "no more than rounding"


def test_other_weights_in_files_are_seen(folder: Path) -> None:
    packages.write_base(folder / "base", DIMENSIONS, CPU, seed=1, shard_bytes=100_000)
    failed = {r.name: r.failed for r in packages.loads(folder, DIMENSIONS, CPU) if r.failed}
    assert failed == {
        "base from files": "other bits than base made", "merged from files": "other bits than merged, made"
    }  # fmt: skip


def test_a_layer_has_the_bytes_of_its_weights() -> None:
    source = RandomWeights(DIMENSIONS, seed=0, dtype=torch.bfloat16, device=CPU)
    weights = load_weights(source.tensor, DIMENSIONS, dtype=torch.bfloat16, device=CPU, positions=1)
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
