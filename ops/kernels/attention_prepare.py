"""Head norms, rotary positions, and keys and values put where they live, in one launch: one program per row.

Sizes: D head size, ROT of it rotated; _P2 is the next power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ops.kernels.tables import KV_WRITE, NUM_READS, NUM_ROWS, READ_ROWS, ROW_POSITION, ROW_SEGMENT
from ops.sizes import COLUMN_UNIT, num_query_heads

WARPS = 4

_COLUMN_UNIT = tl.constexpr(COLUMN_UNIT)


@triton.jit
def rounded(b_x, p_like):
    return b_x.to(p_like.dtype.element_ty).to(tl.float32)


@triton.jit
def norm_and_rotate(
    p_source,  # [HEADS] pointers to heads of d elements
    p_target,
    m_head,
    weight,
    p_rope,
    eps,
    m_poison,  # [HEADS] heads that become NaN
    D: tl.constexpr,
    ROT: tl.constexpr,
):
    HALF: tl.constexpr = ROT // 2
    o_d = tl.arange(0, D)[None, :]
    b_x = tl.load(p_source[:, None] + o_d, mask=m_head[:, None], other=0.0).to(tl.float32)
    b_scale = tl.rsqrt(tl.sum(b_x * b_x, 1) / D + eps)
    b_scale = tl.where(m_poison, float("nan"), b_scale)[:, None]
    b_w = 1.0 + tl.load(weight + o_d).to(tl.float32)
    b_y = (b_x * b_scale * b_w).to(p_target.dtype.element_ty)
    tl.store(p_target[:, None] + o_d, b_y, mask=m_head[:, None] & (o_d >= ROT))

    o_half = tl.arange(0, HALF)[None, :]
    b_w1 = 1.0 + tl.load(weight + o_half).to(tl.float32)
    b_w2 = 1.0 + tl.load(weight + HALF + o_half).to(tl.float32)
    b_x1 = tl.load(p_source[:, None] + o_half, mask=m_head[:, None], other=0.0).to(tl.float32)
    b_x2 = tl.load(p_source[:, None] + HALF + o_half, mask=m_head[:, None], other=0.0).to(tl.float32)
    b_x1, b_x2 = rounded(b_x1 * b_scale * b_w1, p_target), rounded(b_x2 * b_scale * b_w2, p_target)
    b_cos = tl.load(p_rope + o_half).to(tl.float32)
    b_sin = tl.load(p_rope + HALF + o_half).to(tl.float32)
    b_y1 = rounded(b_x1 * b_cos, p_target) - rounded(b_x2 * b_sin, p_target)
    b_y2 = rounded(b_x2 * b_cos, p_target) + rounded(b_x1 * b_sin, p_target)
    tl.store(p_target[:, None] + o_half, b_y1.to(p_target.dtype.element_ty), mask=m_head[:, None])
    tl.store(p_target[:, None] + HALF + o_half, b_y2.to(p_target.dtype.element_ty), mask=m_head[:, None])


@triton.jit(do_not_specialize=["q_pitch", "kv_pitch", "kv_offset", "reads"])
def attention_prepare_kernel(
    q_proj,
    kv_proj,
    q_norm,
    k_norm,
    rope,
    k_cache,
    v_cache,
    q,
    k,
    v,
    tables,
    q_pitch,  # in column units, as the next two: the compiler then knows that rows are aligned
    kv_pitch,
    kv_offset,
    reads,  # whether query rows are read rows
    eps,
    HEADS: tl.constexpr,
    HEADS_P2: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KV_HEADS_P2: tl.constexpr,
    D: tl.constexpr,
    ROT: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    num_rows = tl.load(tables + NUM_ROWS)
    num_queries = tl.where(reads != 0, tl.load(tables + NUM_READS), num_rows)
    if i_row < num_queries:
        i_read_row = tl.load(tables + READ_ROWS + i_row, mask=reads != 0, other=0)
        i_position = tl.load(tables + ROW_POSITION + tl.where(reads != 0, i_read_row, i_row)).to(tl.int64)
        i_head = tl.arange(0, HEADS_P2)
        p_source = q_proj + i_row * q_pitch * _COLUMN_UNIT + i_head * (2 * D)
        p_target = q + (i_row * HEADS + i_head) * D
        norm_and_rotate(p_source, p_target, i_head < HEADS, q_norm, rope + i_position * ROT, eps, i_head < 0, D, ROT)
    if i_row < num_rows:
        PITCH: tl.constexpr = KV_HEADS * D
        i_position = tl.load(tables + ROW_POSITION + i_row).to(tl.int64)
        offset = tl.load(tables + KV_WRITE + tl.load(tables + ROW_SEGMENT + i_row))
        is_kept = offset >= 0
        o_target = tl.where(is_kept, i_position + offset, i_row) * PITCH
        i_head = tl.arange(0, KV_HEADS_P2)
        m_head = i_head < KV_HEADS
        p_source = kv_proj + i_row * kv_pitch * _COLUMN_UNIT + kv_offset * _COLUMN_UNIT + i_head * D
        o_d = tl.arange(0, D)[None, :]
        b_value = tl.load(p_source[:, None] + PITCH + o_d, mask=m_head[:, None], other=0.0)
        b_value32 = b_value.to(tl.float32)
        m_poison = tl.max(tl.where(b_value32 - b_value32 == 0.0, 0, 1), 1) > 0
        b_value = tl.where(m_poison[:, None], 0.0, b_value)
        p_v_target = tl.where(is_kept, v_cache, v) + o_target + i_head * D
        tl.store(p_v_target[:, None] + o_d, b_value.to(v.dtype.element_ty), mask=m_head[:, None])
        p_k_target = tl.where(is_kept, k_cache, k) + o_target + i_head * D
        norm_and_rotate(p_source, p_k_target, m_head, k_norm, rope + i_position * ROT, eps, m_poison, D, ROT)


def launch_attention_prepare(
    q_proj: Tensor,
    kv_proj: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    rope: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    eps: float,
    kv_offset: int,
    reads: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    d, width = q_norm.shape[0], k_cache.shape[1]
    heads, kv_heads = num_query_heads(q_proj.shape[1], d, kv_offset), width // d
    q = q_proj.new_empty(q_proj.shape[0], heads * d)
    k, v = kv_proj.new_empty(kv_proj.shape[0], width), kv_proj.new_empty(kv_proj.shape[0], width)
    rows = max(q_proj.shape[0], kv_proj.shape[0])
    if rows:
        attention_prepare_kernel[(rows,)](
            q_proj, kv_proj, q_norm, k_norm, rope, k_cache, v_cache, q, k, v, tables,
            q_proj.shape[1] // COLUMN_UNIT, kv_proj.shape[1] // COLUMN_UNIT, kv_offset // COLUMN_UNIT, int(reads), eps,
            HEADS=heads, HEADS_P2=triton.next_power_of_2(heads),
            KV_HEADS=kv_heads, KV_HEADS_P2=triton.next_power_of_2(kv_heads), D=d, ROT=rope.shape[1],
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return q, k, v
