"""Gate parameters that would make NaN of a row are refused with file and tensor, when loaded and by a deep check."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.check import run
from engine.errors import CheckpointError
from engine.load.checkpoint import INDEX, open_checkpoint
from engine.load.tiny import tiny_checkpoint
from engine.load.weights import load_weights

A_LOG = "layers.1.linear_attn.A_log"
DT_BIAS = "layers.1.linear_attn.dt_bias"


def put(folder: Path, name: str, value: float) -> Path:
    """A tiny checkpoint with this value in the second place of one tensor; returns the file that holds it."""
    file = folder / json.loads((folder / INDEX).read_bytes())["weight_map"][f"model.{name}"]
    tensors = load_file(file)
    tensors[f"model.{name}"] = tensors[f"model.{name}"].float()
    tensors[f"model.{name}"][1] = value
    save_file(tensors, file, metadata={"format": "pt"})
    return file


def load(folder: Path) -> None:
    source = open_checkpoint(folder)
    load_weights(
        source.tensor, source.dimensions, dtype=torch.bfloat16, device=torch.device("cpu"), positions=64
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (A_LOG, 95.0),
        (A_LOG, 88.73),
        (A_LOG, torch.nan),
        (A_LOG, -torch.inf),
        (DT_BIAS, torch.inf),
        (DT_BIAS, torch.nan),
    ],
)
def test_d50_a_gate_beyond_float32_is_refused_by_name(tmp_path: Path, name: str, value: float) -> None:
    folder = tiny_checkpoint(tmp_path)
    file = put(folder, name, value)
    with pytest.raises(CheckpointError, match=rf"{file.name}: model\.{name} holds {value:g} at 1; .*at most 88\.7"):
        load(folder)
    out, err = io.StringIO(), io.StringIO()
    assert run([str(folder), "--deep"], stdout=out, stderr=err) == 1
    *_, finding, count = out.getvalue().splitlines()
    assert count == "1 finding"
    assert finding.startswith(f"{file}: model.{name} holds {value:g} at 1; ")


@pytest.mark.parametrize(("name", "value"), [(A_LOG, 88.7), (A_LOG, -200.0), (DT_BIAS, 1e4), (DT_BIAS, -1e4)])
def test_d50_extreme_gates_within_float32_are_loaded(tmp_path: Path, name: str, value: float) -> None:
    folder = tiny_checkpoint(tmp_path)
    put(folder, name, value)
    load(folder)
