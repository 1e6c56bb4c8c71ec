"""The gate of the MLP."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ops.checks import STORAGE, VECTOR_BYTES, check_multiple, check_tensor
from ops.cpu import by_row_tiles, cpu_kernel


@torch.library.custom_op("forkgraph::silu_mul", mutates_args=(), device_types="cuda")
def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) rounded, times up, rounded: [R, i].

    gate_up [R, 2i] (bfloat16 or float32) holds the gate in its first i columns and up in the rest. Raises TypeError
    for a dtype, ValueError for a shape, stride or alignment.
    """
    from ops.kernels.rows import launch_silu_mul

    _check(gate_up)
    return launch_silu_mul(gate_up)


@cpu_kernel("silu_mul")
def _cpu(gate_up: Tensor) -> Tensor:
    _check(gate_up)

    def tile(gate_up: Tensor) -> tuple[Tensor]:
        gate, up = gate_up.chunk(2, dim=-1)
        return (F.silu(gate.float()).to(gate_up.dtype) * up,)

    return by_row_tiles(tile, gate_up)[0]


@silu_mul.register_fake
def _fake(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """[R, i] in float64, rounded to storage after the silu only."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return (gate / (1.0 + torch.exp(-gate))).to(gate_up.dtype).double() * up


def _check(gate_up: Tensor) -> None:
    op = "silu_mul"
    check_tensor(op, "gate_up", gate_up, (None, None), STORAGE, gate_up.device)
    check_multiple(op, "the last dimension of gate_up", gate_up.shape[1], 2 * VECTOR_BYTES // gate_up.element_size())
