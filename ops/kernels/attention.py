"""Attention of packed segments: one pass over the keys of each path, in tiles anchored at absolute positions.

A query tile is a run of (row, head) pairs of one key/value head, across segment borders. It first walks the keys that
all its segments share, then the rest of each segment's path with the rows of the others masked. A masked tile changes
no bit of a row: its maximum stays, its factor is exp2(0) = 1, its weights are exact zeros, and values are finite
(`attention_prepare` sees to it). So a row's bits depend on its own path alone, whatever stands beside it.

Sizes: M (row, head) pairs of a program, W keys of a step, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import e, log2

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.kernels.rows import sigmoid
from ops.kernels.sources import source_at
from ops.kernels.tables import (
    KV_OWN,
    KV_QUESTION,
    KV_REQUEST,
    NUM_READS,
    NUM_ROWS,
    PACKED,
    QUESTION_FIRST,
    READ_ROWS,
    ROW_POSITION,
    ROW_SEGMENT,
    START,
)
from ops.sizes import COLUMN_UNIT


@dataclass(frozen=True, kw_only=True)
class ProgramShape:
    """The work of one program and how it is laid out; constant for an architecture, never chosen by sizes."""

    queries: int
    """(row, head) pairs"""
    keys: int
    stages: int
    warps: int


SHAPES = {
    8: ProgramShape(queries=64, keys=32, stages=2, warps=8),
    9: ProgramShape(queries=128, keys=64, stages=2, warps=8),
}
"""By major compute capability, for bfloat16: the entry of the largest one not above the device's."""
FLOAT32_SHAPE = ProgramShape(queries=32, keys=16, stages=1, warps=8)

_COLUMN_UNIT = tl.constexpr(COLUMN_UNIT)
_LOG2_E = tl.constexpr(log2(e))
_FAR = tl.constexpr(2**31 - 1)


@triton.jit
def position_zero(p_cache, p_packed, offset, PITCH: tl.constexpr):
    """Where position 0 of a source with this kv offset would lie; position p lies p rows further.

    Offsets lie around 0 for a snapshot and around PACKED for packed rows, on either side of it.
    """
    is_packed = offset >= PACKED // 2
    i_row = tl.where(is_packed, offset - PACKED, offset)
    return tl.where(is_packed, p_packed, p_cache) + i_row.to(tl.int64) * PITCH


@triton.jit
def load_path(i_key, m_key, start, question_first, p_request, p_question, p_own, PITCH: tl.constexpr, D: tl.constexpr):
    """Keys or values [W, D] at the positions `i_key` of one path, exact zeros where the mask is false."""
    p_source = source_at(i_key, start, question_first, p_request, p_question, p_own)
    o_path = i_key.to(tl.int64)[:, None] * PITCH + tl.arange(0, D)[None, :]
    return tl.load(p_source[:, None] + o_path, mask=m_key[:, None], other=0.0)


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
    i_kv_head = tl.program_id(0) % KV_HEADS
    i_first = (tl.num_programs(0) // KV_HEADS - 1 - tl.program_id(0) // KV_HEADS) * M
    count = tl.load(tables + tl.where(reads != 0, NUM_READS, NUM_ROWS)) * GROUP
    if i_first >= count:
        return

    i_flat = i_first + tl.arange(0, M)
    m_row = i_flat < count
    i_row = i_flat // GROUP
    i_head = i_kv_head * GROUP + i_flat % GROUP
    i_read_row = tl.load(tables + READ_ROWS + i_row, mask=m_row & (reads != 0), other=0)
    i_packed_row = tl.where(reads != 0, i_read_row, i_row)
    i_position = tl.load(tables + ROW_POSITION + i_packed_row, mask=m_row, other=-1)
    i_segment = tl.load(tables + ROW_SEGMENT + i_packed_row, mask=m_row, other=-1)
    o_d = tl.arange(0, D)
    o_q = (i_row.to(tl.int64) * HEADS + i_head)[:, None] * D + o_d[None, :]
    b_q = tl.load(q + o_q, mask=m_row[:, None], other=0.0)

    # Keys below `shared` are the same rows for every segment of this tile.
    b_request = tl.load(tables + KV_REQUEST + i_segment, mask=m_row, other=0)
    least, most = tl.min(tl.where(m_row, b_request, _FAR), 0), tl.max(tl.where(m_row, b_request, -_FAR), 0)
    b_request_end = tl.load(tables + QUESTION_FIRST + i_segment, mask=m_row, other=_FAR)
    shared = tl.where(least == most, tl.min(b_request_end, 0) // W * W, 0)
    first_segment = tl.min(tl.where(m_row, i_segment, _FAR), 0)
    last_segment = tl.max(i_segment, 0)

    # Weights wait one step for their values: a step adds the previous tile's product while it makes its own weights.
    SCALE: tl.constexpr = D**-0.5 * _LOG2_E
    b_top = tl.full((M,), -3.0e38, tl.float32)  # finite, so that a row that has seen nothing yet needs no guard
    b_total = tl.zeros((M,), tl.float32)
    b_rescale = tl.full((M,), 1.0, tl.float32)
    b_weights = tl.zeros((M, W), tl.float32)
    b_acc = tl.zeros((M, D), tl.float32)
    for i_s in range(first_segment, last_segment + 1):
        start = tl.load(tables + START + i_s)
        question_first = tl.load(tables + QUESTION_FIRST + i_s)
        request = tl.load(tables + KV_REQUEST + i_s)
        question = tl.load(tables + KV_QUESTION + i_s)
        own = tl.load(tables + KV_OWN + i_s)
        p_k_request = position_zero(k_cache, k, request, PITCH) + i_kv_head * D
        p_k_question = position_zero(k_cache, k, question, PITCH) + i_kv_head * D
        p_k_own = position_zero(k_cache, k, own, PITCH) + i_kv_head * D
        p_v_request = position_zero(v_cache, v, request, PITCH) + i_kv_head * D
        p_v_question = position_zero(v_cache, v, question, PITCH) + i_kv_head * D
        p_v_own = position_zero(v_cache, v, own, PITCH) + i_kv_head * D

        m_mine = i_segment == i_s
        i_last_key = tl.where(m_mine, i_position, tl.where(m_row, shared - 1, -1))
        begin = tl.where(i_s == first_segment, 0, shared)
        end = tl.max(tl.where(m_mine, i_position, -1), 0) + 1
        for at in tl.range(begin, end + W, W, num_stages=STAGES):
            i_key = at + tl.arange(0, W)
            b_k = load_path(i_key, i_key < end, start, question_first, p_k_request, p_k_question, p_k_own, PITCH, D)
            b_scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")

            i_before = i_key - W
            m_before = (i_before >= begin) & (i_before < end)
            b_v = load_path(i_before, m_before, start, question_first, p_v_request, p_v_question, p_v_own, PITCH, D)
            b_acc = b_acc * b_rescale[:, None]
            b_acc = tl.dot(b_weights.to(b_v.dtype), b_v, b_acc, input_precision="ieee")

            b_scores = tl.where(i_key[None, :] <= i_last_key[:, None], b_scores, float("-inf"))
            b_new_top = tl.maximum(b_top, tl.max(b_scores, 1) * SCALE)
            b_weights = tl.exp2(tl.fma(b_scores, SCALE, -b_new_top[:, None]))
            b_rescale = tl.exp2(b_top - b_new_top)
            b_total = b_total * b_rescale + tl.sum(b_weights, 1)
            b_top = b_new_top

    o_gate = i_row.to(tl.int64) * gate_pitch * _COLUMN_UNIT + (2 * i_head + 1) * D
    b_gate = tl.load(q_proj + o_gate[:, None] + o_d[None, :], mask=m_row[:, None], other=0.0)
    b_acc = b_acc * (1.0 / b_total)[:, None] * sigmoid(b_gate.to(tl.float32))
    tl.store(out + o_q, b_acc.to(out.dtype.element_ty), mask=m_row[:, None])


def shape_for(x: Tensor) -> ProgramShape:
    if x.dtype == torch.float32:
        return FLOAT32_SHAPE
    major, _ = torch.cuda.get_device_capability(x.device)
    return SHAPES[max(known for known in SHAPES if known <= major)]


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
    shape = shape_for(q)
    heads, kv_heads = q.shape[1] // head_dim, k.shape[1] // head_dim
    out = torch.empty_like(q)
    if q.shape[0]:
        grid = (triton.cdiv(q.shape[0] * (heads // kv_heads), shape.queries) * kv_heads,)
        attention_kernel[grid](
            q, q_proj, k_cache, v_cache, k, v, out, tables, q_proj.shape[1] // COLUMN_UNIT, int(reads),
            HEADS=heads, KV_HEADS=kv_heads, D=head_dim, M=shape.queries, W=shape.keys, STAGES=shape.stages,
            num_warps=shape.warps, num_stages=shape.stages, enable_fp_fusion=False,
        )  # fmt: skip
    return out
