"""Projections: `fixed` gives a row the same bits for every number of rows, `default` is whatever the library picks.

Shape letters: R packed rows, K inputs, N outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.cpu import pad_rows

_TILE_ROWS = 64


@torch.library.custom_op("forkgraph::linear_fixed", mutates_args=(), device_types="cuda")
def linear_fixed(x: Tensor, w: Tensor) -> Tensor:
    """x [R, K] times the transpose of w [N, K], both in the storage dtype -> [R, N].

    A row's bits depend on that row and on `w` alone. This defines the canonical bits of a projection: one float32
    accumulator walks K in order and is rounded once.
    """
    from ops.kernels.linear import launch

    return launch(x, w)


@linear_fixed.register_kernel("cpu")
def _(x: Tensor, w: Tensor) -> Tensor:
    tiles = [F.linear(tile, w) for tile in pad_rows(x, _TILE_ROWS).split(_TILE_ROWS)]
    return torch.cat(tiles)[: x.shape[0]].clone()


@linear_fixed.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[0])


@torch.library.custom_op("forkgraph::linear_default", mutates_args=(), device_types="cuda")
def linear_default(x: Tensor, w: Tensor) -> Tensor:
    """x [R, K] times the transpose of w [N, K] -> [R, N], by the library's own choice for this number of rows."""
    return F.linear(x, w)


@linear_default.register_kernel("cpu")
def _(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w)


@linear_default.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[0])
