"""Where the delta rule runs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ops.delta_rule import delta_rule
from ops.sizes import DeltaSizes
from tests.ops.delta_paths import Place


@pytest.fixture(params=["operator", "kernel"])
def place(request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Place:
    """The operator's CPU kernel, or the launch function of its Triton kernels (interpreter or GPU)."""
    if request.param == "operator":
        return Place(delta_rule, torch.device("cpu"))
    from ops.kernels import delta_rule as kernels

    request.getfixturevalue("guards")
    monkeypatch.setattr(kernels, "PREPARE_PROGRAMS", 3)
    monkeypatch.setattr(kernels, "SCAN_LANES", 2)

    def launch(
        qkv: Tensor, gates: Tensor, tail_kv: Tensor, tail_gates: Tensor, states: Tensor, tables: Tensor
    ) -> Tensor:
        return kernels.launch_delta_rule(
            qkv, gates, tail_kv, tail_gates, states, tables, DeltaSizes.of(tail_gates, states)
        )

    return Place(launch, device)
