"""Attention of packed segments: one pass over the keys of each path, in tiles anchored at absolute positions.

A query tile is a run of (row, head) pairs of one key/value head, across segment borders. It first walks the keys that
all its segments share, then the rest of each segment's path with the rows of the others masked. A masked tile changes
no bit of a row: its maximum stays, its factor is exp2(0) = 1, its weights are exact zeros, and values are finite
(`attention_prepare` sees to it). So a row's bits depend on its own path alone, whatever stands beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import e, log2

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops import tables as t
from ops.kernels.rows import sigmoid
from ops.sizes import COLUMN_UNIT


@dataclass(frozen=True, kw_only=True)
class Tile:
    """The work of one program and how it is laid out; constant for an architecture, never chosen by sizes."""

    queries: int
    """(row, head) pairs"""
    keys: int
    stages: int
    warps: int


TILES = {8: Tile(queries=64, keys=32, stages=2, warps=8), 9: Tile(queries=128, keys=64, stages=2, warps=8)}
"""By major compute capability, for bfloat16: the entry of the largest one not above the device's."""
FLOAT32_TILE = Tile(queries=32, keys=16, stages=1, warps=8)

_COLUMN_UNIT = tl.constexpr(COLUMN_UNIT)
_PACKED = tl.constexpr(t.PACKED)
_NUM_ROWS = tl.constexpr(t.NUM_ROWS)
_NUM_READS = tl.constexpr(t.NUM_READS)
_ROW_POSITION = tl.constexpr(t.ROW_POSITION)
_ROW_SEGMENT = tl.constexpr(t.ROW_SEGMENT)
_READ_ROWS = tl.constexpr(t.READ_ROWS)
_START = tl.constexpr(t.SEGMENTS + t.SEG_START * t.MAX_SEGMENTS)
_QUESTION_FIRST = tl.constexpr(t.SEGMENTS + t.SEG_QUESTION_FIRST * t.MAX_SEGMENTS)
_KV_REQUEST = tl.constexpr(t.SEGMENTS + t.SEG_KV_REQUEST * t.MAX_SEGMENTS)
_KV_QUESTION = tl.constexpr(t.SEGMENTS + t.SEG_KV_QUESTION * t.MAX_SEGMENTS)
_KV_OWN = tl.constexpr(t.SEGMENTS + t.SEG_KV_OWN * t.MAX_SEGMENTS)
_LOG2_E = tl.constexpr(log2(e))
_FAR = tl.constexpr(2**31 - 1)


@triton.jit
def position_zero(cache, packed, offset, PITCH: tl.constexpr):
    """Where position 0 of a source with this kv offset would lie; position p lies p rows further.

    Offsets lie around 0 for a snapshot and around PACKED for packed rows, on either side of it.
    """
    is_packed = offset >= _PACKED // 2
    row = tl.where(is_packed, offset - _PACKED, offset)
    return tl.where(is_packed, packed, cache) + row.to(tl.int64) * PITCH


@triton.jit
def load_path(key, mask, start, question_first, request, question, own, PITCH: tl.constexpr, D: tl.constexpr):
    """Keys or values [W, D] at the positions `key` of one path, exact zeros where the mask is false."""
    source = tl.where(key >= start, own, tl.where(key >= question_first, question, request))
    offsets = key.to(tl.int64)[:, None] * PITCH + tl.arange(0, D)[None, :]
    return tl.load(source[:, None] + offsets, mask=mask[:, None], other=0.0)


@triton.jit(do_not_specialize=["gate_pitch", "reads"])
def attention_kernel(
    q,
    q_proj,
    k_cache,
    v_cache,
    k,
    v,
    out,
    tables,
    gate_pitch,  # of q_proj, in column units: the compiler then knows that rows are aligned
    reads,  # whether query rows are read rows
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    W: tl.constexpr,
    STAGES: tl.constexpr,
):
    GROUP: tl.constexpr = HEADS // KV_HEADS
    PITCH: tl.constexpr = KV_HEADS * D
    # Later rows tend to have longer paths: they start first.
    kv_head = tl.program_id(0) % KV_HEADS
    first = (tl.num_programs(0) // KV_HEADS - 1 - tl.program_id(0) // KV_HEADS) * M
    count = tl.load(tables + tl.where(reads != 0, _NUM_READS, _NUM_ROWS)) * GROUP
    if first >= count:
        return

    flat = first + tl.arange(0, M)
    valid = flat < count
    row = flat // GROUP
    head = kv_head * GROUP + flat % GROUP
    read_row = tl.load(tables + _READ_ROWS + row, mask=valid & (reads != 0), other=0)
    packed_row = tl.where(reads != 0, read_row, row)
    position = tl.load(tables + _ROW_POSITION + packed_row, mask=valid, other=-1)
    segment = tl.load(tables + _ROW_SEGMENT + packed_row, mask=valid, other=-1)
    columns = tl.arange(0, D)
    q_offsets = (row.to(tl.int64) * HEADS + head)[:, None] * D + columns[None, :]
    b_q = tl.load(q + q_offsets, mask=valid[:, None], other=0.0)

    # Keys below `shared` are the same rows for every segment of this tile.
    request_offset = tl.load(tables + _KV_REQUEST + segment, mask=valid, other=0)
    least, most = tl.min(tl.where(valid, request_offset, _FAR), 0), tl.max(tl.where(valid, request_offset, -_FAR), 0)
    request_ends = tl.load(tables + _QUESTION_FIRST + segment, mask=valid, other=_FAR)
    shared = tl.where(least == most, tl.min(request_ends, 0) // W * W, 0)
    first_segment = tl.min(tl.where(valid, segment, _FAR), 0)
    last_segment = tl.max(segment, 0)

    # Weights wait one step for their values: a step adds the previous tile's product while it makes its own weights.
    SCALE: tl.constexpr = D**-0.5 * _LOG2_E
    top = tl.full((M,), -3.0e38, tl.float32)  # finite, so that a row that has seen nothing yet needs no guard
    total = tl.zeros((M,), tl.float32)
    rescale = tl.full((M,), 1.0, tl.float32)
    weights = tl.zeros((M, W), tl.float32)
    acc = tl.zeros((M, D), tl.float32)
    for s in range(first_segment, last_segment + 1):
        start = tl.load(tables + _START + s)
        question_first = tl.load(tables + _QUESTION_FIRST + s)
        request = tl.load(tables + _KV_REQUEST + s)
        question = tl.load(tables + _KV_QUESTION + s)
        own = tl.load(tables + _KV_OWN + s)
        k_request = position_zero(k_cache, k, request, PITCH) + kv_head * D
        k_question = position_zero(k_cache, k, question, PITCH) + kv_head * D
        k_own = position_zero(k_cache, k, own, PITCH) + kv_head * D
        v_request = position_zero(v_cache, v, request, PITCH) + kv_head * D
        v_question = position_zero(v_cache, v, question, PITCH) + kv_head * D
        v_own = position_zero(v_cache, v, own, PITCH) + kv_head * D

        mine = segment == s
        last_key = tl.where(mine, position, tl.where(valid, shared - 1, -1))
        begin = tl.where(s == first_segment, 0, shared)
        end = tl.max(tl.where(mine, position, -1), 0) + 1
        for at in tl.range(begin, end + W, W, num_stages=STAGES):
            key = at + tl.arange(0, W)
            b_k = load_path(key, key < end, start, question_first, k_request, k_question, k_own, PITCH, D)
            scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")

            before = key - W
            loaded = (before >= begin) & (before < end)
            b_v = load_path(before, loaded, start, question_first, v_request, v_question, v_own, PITCH, D)
            acc = acc * rescale[:, None]
            acc = tl.dot(weights.to(b_v.dtype), b_v, acc, input_precision="ieee")

            scores = tl.where(key[None, :] <= last_key[:, None], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1) * SCALE)
            weights = tl.exp2(tl.fma(scores, SCALE, -new_top[:, None]))
            rescale = tl.exp2(top - new_top)
            total = total * rescale + tl.sum(weights, 1)
            top = new_top

    gate_offsets = row.to(tl.int64) * gate_pitch * _COLUMN_UNIT + (2 * head + 1) * D
    gate = tl.load(q_proj + gate_offsets[:, None] + columns[None, :], mask=valid[:, None], other=0.0)
    acc = acc * (1.0 / total)[:, None] * sigmoid(gate.to(tl.float32))
    tl.store(out + q_offsets, acc.to(out.dtype.element_ty), mask=valid[:, None])


def tile_for(x: Tensor) -> Tile:
    if x.dtype == torch.float32:
        return FLOAT32_TILE
    major, _ = torch.cuda.get_device_capability(x.device)
    return TILES[max(known for known in TILES if known <= major)]


def launch_attention(
    q: Tensor,
    q_proj: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Tensor,
    head_dim: int,
    reads: bool,
) -> Tensor:
    tile = tile_for(q)
    heads, kv_heads = q.shape[1] // head_dim, k.shape[1] // head_dim
    out = torch.empty_like(q)
    if q.shape[0]:
        grid = (triton.cdiv(q.shape[0] * (heads // kv_heads), tile.queries) * kv_heads,)
        attention_kernel[grid](
            q, q_proj, k_cache, v_cache, k, v, out, tables, q_proj.shape[1] // COLUMN_UNIT, int(reads),
            HEADS=heads, KV_HEADS=kv_heads, D=head_dim, M=tile.queries, W=tile.keys, STAGES=tile.stages,
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
        )  # fmt: skip
    return out
