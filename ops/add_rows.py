"""The sum of two products of the same rows."""

from __future__ import annotations

import torch
from torch import Tensor

from ops.checks import STORAGE, check_row_pitch, check_tensor
from ops.cpu import by_row_tiles, cpu_kernel


@torch.library.custom_op("forkgraph::add_rows", mutates_args=(), device_types="cuda")
def add_rows(x: Tensor, delta: Tensor) -> Tensor:
    """x + delta in float32, rounded once: [R, N].

    Both are [R, N] in the storage dtype (bfloat16 or float32). Raises TypeError for a dtype, ValueError for a shape,
    stride or alignment.
    """
    from ops.kernels.rows import launch_add_rows

    _check(x, delta)
    return launch_add_rows(x, delta)


@cpu_kernel("add_rows")
def _cpu(x: Tensor, delta: Tensor) -> Tensor:
    _check(x, delta)
    return by_row_tiles(lambda x, delta: (x + delta,), x, delta)[0]


@add_rows.register_fake
def _fake(x: Tensor, delta: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def add_rows_reference(x: Tensor, delta: Tensor) -> Tensor:
    """[R, N] in float64."""
    return x.double() + delta.double()


def _check(x: Tensor, delta: Tensor) -> None:
    op = "add_rows"
    check_tensor(op, "x", x, (None, None), STORAGE, x.device)
    check_row_pitch(op, "x", x)
    check_tensor(op, "delta", delta, tuple(x.shape), x.dtype, x.device)
