"""The canonical product: one float32 accumulator per output walks K in order and is rounded once.

One tile shape per weight shape serves every number of rows. From compute capability 9 on tiles come through tensor
descriptors; they are made on the host and passed by value, so that a captured graph holds them with the addresses of
its own buffers and needs no scratch memory on the device. Elsewhere, and in float32, tiles come through pointers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Rows of x, rows of w and depth of one step, and how a program is laid out."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


WIDE = Tile(rows=128, columns=256, depth=64, warps=8, stages=3)
NARROW = Tile(rows=128, columns=128, depth=64, warps=8, stages=4)
NARROW_BELOW = 8192
"""Weights with fewer rows than this get narrow tiles: more of them, which matters while rows are few."""
POINTER = Tile(rows=128, columns=128, depth=32, warps=8, stages=4)
FLOAT32 = Tile(rows=64, columns=64, depth=32, warps=8, stages=2)
GROUP = 8
"""Row tiles that walk the columns together, so that their weights are read once."""

_GROUP = tl.constexpr(GROUP)


@triton.jit
def tile_place(index, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """First row and first column of the index-th tile."""
    row_tiles = tl.cdiv(rows, ROWS)
    band = _GROUP * tl.cdiv(columns, COLUMNS)
    first = index // band * _GROUP
    height = tl.minimum(row_tiles - first, _GROUP)
    return (first + index % band % height) * ROWS, index % band // height * COLUMNS


@triton.jit(do_not_specialize=["rows", "columns", "inputs"])
def descriptor_kernel(x, w, out, rows, columns, inputs, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    tiles = tl.cdiv(rows, ROWS) * tl.cdiv(columns, COLUMNS)
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        row, column = tile_place(index, rows, columns, ROWS, COLUMNS)
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in range(0, inputs, DEPTH):
            acc = tl.dot(x.load([row, k]), w.load([column, k]).T, acc)
        out.store([row, column], acc.to(out.dtype))


@triton.jit(do_not_specialize=["rows"])
def pointer_kernel(
    x,
    w,
    out,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    row, column = tile_place(tl.program_id(0), rows, N, ROWS, COLUMNS)
    row += tl.arange(0, ROWS)
    column += tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    row_mask, column_mask = (row < rows)[:, None], (column < N)[:, None]
    x += row.to(tl.int64)[:, None] * K
    w += column.to(tl.int64)[:, None] * K
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, K, DEPTH):
        inside = (k + depth < K)[None, :]
        b_x = tl.load(x + (k + depth)[None, :], mask=row_mask & inside, other=0.0)
        b_w = tl.load(w + (k + depth)[None, :], mask=column_mask & inside, other=0.0)
        acc = tl.dot(b_x, tl.trans(b_w), acc, input_precision="ieee")
    out += row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(out, acc.to(out.dtype.element_ty), mask=row_mask & (column < N)[None, :])


def launch_linear_fixed(x: Tensor, w: Tensor) -> Tensor:
    rows, inputs, columns = *x.shape, w.shape[0]
    out = x.new_empty(rows, columns)
    if not rows:
        return out
    if x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device) >= (9, 0):
        tile = NARROW if columns < NARROW_BELOW else WIDE
        programs = torch.cuda.get_device_properties(x.device).multi_processor_count
        tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)
        descriptor_kernel[(min(programs, tiles),)](
            TensorDescriptor.from_tensor(x, [tile.rows, tile.depth]),
            TensorDescriptor.from_tensor(w, [tile.columns, tile.depth]),
            TensorDescriptor.from_tensor(out, [tile.rows, tile.columns]),
            rows, columns, inputs, ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth,
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
        )  # fmt: skip
    else:
        tile = FLOAT32 if x.dtype == torch.float32 else POINTER
        pointer_kernel[(triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns),)](
            x, w, out, rows, N=columns, K=inputs, ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth,
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
        )  # fmt: skip
    return out
