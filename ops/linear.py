"""Projections: `fixed` gives a row the same bits for every number of rows, `default` is whatever the library picks.

Shape letters: R packed rows, K inputs, N outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.checks import STORAGE, check_multiple, check_row_pitch, check_tensor
from ops.cpu import cpu_kernel, pad_rows
from ops.sizes import COLUMN_UNIT

_TILE_ROWS = 64


@torch.library.custom_op("forkgraph::linear_fixed", mutates_args=(), device_types="cuda")
def linear_fixed(x: Tensor, w: Tensor) -> Tensor:
    """x [R, K] times the transpose of w [N, K], both in the storage dtype -> [R, N].

    A row's bits depend on that row and on `w` alone. This defines the canonical bits of a projection: one float32
    accumulator walks K in order and is rounded once. Raises TypeError for a dtype, ValueError for a shape, stride,
    alignment or device.
    """
    from ops.kernels.linear import launch_linear_fixed

    _check(x, w)
    return launch_linear_fixed(x, w)


@cpu_kernel("linear_fixed")
def _(x: Tensor, w: Tensor) -> Tensor:
    _check(x, w)
    out = x.new_empty(x.shape[0], w.shape[0])
    padded = pad_rows(x, _TILE_ROWS)
    for first in range(0, x.shape[0], _TILE_ROWS):
        rows = out[first : first + _TILE_ROWS]
        rows.copy_(F.linear(padded[first : first + _TILE_ROWS], w)[: rows.shape[0]])
    return out


@linear_fixed.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[0])


@torch.library.custom_op("forkgraph::linear_default", mutates_args=(), device_types="cuda")
def linear_default(x: Tensor, w: Tensor) -> Tensor:
    """x [R, K] times the transpose of w [N, K] -> [R, N], by the library's own choice for this number of rows."""
    return F.linear(x, w)


@cpu_kernel("linear_default")
def _(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w)


@linear_default.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[0])


def _check(x: Tensor, w: Tensor) -> None:
    op = "linear_fixed"
    check_tensor(op, "x", x, (None, None), STORAGE, x.device)
    check_row_pitch(op, "x", x)
    check_tensor(op, "w", w, (None, x.shape[1]), x.dtype, x.device)
    check_multiple(op, "the number of rows of w", w.shape[0], COLUMN_UNIT)
