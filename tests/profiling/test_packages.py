"""What the case for packages of real size writes and compares, at tiny dimensions and without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import packages

from engine.load.checkpoint import open_checkpoint
from engine.load.dimensions import ModelDimensions
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
