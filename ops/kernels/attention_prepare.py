"""Head norms, rotary positions, and keys and values put where they live, in one launch: one program per row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ops import tables as t
from ops.sizes import COLUMN_UNIT, num_query_heads

WARPS = 4

_COLUMN_UNIT = tl.constexpr(COLUMN_UNIT)
_NUM_ROWS = tl.constexpr(t.NUM_ROWS)
_NUM_READS = tl.constexpr(t.NUM_READS)
_ROW_POSITION = tl.constexpr(t.ROW_POSITION)
_ROW_SEGMENT = tl.constexpr(t.ROW_SEGMENT)
_READ_ROWS = tl.constexpr(t.READ_ROWS)
_KV_WRITE = tl.constexpr(t.SEGMENTS + t.SEG_KV_WRITE * t.MAX_SEGMENTS)


@triton.jit
def rounded(x, like):
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def norm_and_rotate(
    source,  # [HEADS] pointers to heads of d elements
    target,
    mask,
    weight,
    rope_row,
    eps,
    poison,  # [HEADS] heads that become NaN
    D: tl.constexpr,
    ROT: tl.constexpr,
):
    HALF: tl.constexpr = ROT // 2
    columns = tl.arange(0, D)[None, :]
    x = tl.load(source[:, None] + columns, mask=mask[:, None], other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)
    scale = tl.where(poison, float("nan"), scale)[:, None]
    w = 1.0 + tl.load(weight + columns).to(tl.float32)
    y = (x * scale * w).to(target.dtype.element_ty)
    tl.store(target[:, None] + columns, y, mask=mask[:, None] & (columns >= ROT))

    half = tl.arange(0, HALF)[None, :]
    w1 = 1.0 + tl.load(weight + half).to(tl.float32)
    w2 = 1.0 + tl.load(weight + HALF + half).to(tl.float32)
    x1 = tl.load(source[:, None] + half, mask=mask[:, None], other=0.0).to(tl.float32)
    x2 = tl.load(source[:, None] + HALF + half, mask=mask[:, None], other=0.0).to(tl.float32)
    x1, x2 = rounded(x1 * scale * w1, target), rounded(x2 * scale * w2, target)
    cos = tl.load(rope_row + half).to(tl.float32)
    sin = tl.load(rope_row + HALF + half).to(tl.float32)
    y1 = rounded(x1 * cos, target) - rounded(x2 * sin, target)
    y2 = rounded(x2 * cos, target) + rounded(x1 * sin, target)
    tl.store(target[:, None] + half, y1.to(target.dtype.element_ty), mask=mask[:, None])
    tl.store(target[:, None] + HALF + half, y2.to(target.dtype.element_ty), mask=mask[:, None])


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
    row = tl.program_id(0).to(tl.int64)
    num_rows = tl.load(tables + _NUM_ROWS)
    num_queries = tl.where(reads != 0, tl.load(tables + _NUM_READS), num_rows)
    if row < num_queries:
        read_row = tl.load(tables + _READ_ROWS + row, mask=reads != 0, other=0)
        position = tl.load(tables + _ROW_POSITION + tl.where(reads != 0, read_row, row)).to(tl.int64)
        head = tl.arange(0, HEADS_P2)
        source = q_proj + row * q_pitch * _COLUMN_UNIT + head * (2 * D)
        target = q + (row * HEADS + head) * D
        norm_and_rotate(source, target, head < HEADS, q_norm, rope + position * ROT, eps, head < 0, D, ROT)
    if row < num_rows:
        PITCH: tl.constexpr = KV_HEADS * D
        position = tl.load(tables + _ROW_POSITION + row).to(tl.int64)
        offset = tl.load(tables + _KV_WRITE + tl.load(tables + _ROW_SEGMENT + row))
        kept = offset >= 0
        to = tl.where(kept, position + offset, row) * PITCH
        head = tl.arange(0, KV_HEADS_P2)
        mask = head < KV_HEADS
        source = kv_proj + row * kv_pitch * _COLUMN_UNIT + kv_offset * _COLUMN_UNIT + head * D
        columns = tl.arange(0, D)[None, :]
        value = tl.load(source[:, None] + PITCH + columns, mask=mask[:, None], other=0.0)
        value32 = value.to(tl.float32)
        poison = tl.max(tl.where(value32 - value32 == 0.0, 0, 1), 1) > 0
        value = tl.where(poison[:, None], 0.0, value)
        v_target = tl.where(kept, v_cache, v) + to + head * D
        tl.store(v_target[:, None] + columns, value.to(v.dtype.element_ty), mask=mask[:, None])
        k_target = tl.where(kept, k_cache, k) + to + head * D
        norm_and_rotate(source, k_target, mask, k_norm, rope + position * ROT, eps, poison, D, ROT)


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
