"""Convolution, SiLU, gates, norm scalars, history and tail of Gated DeltaNet in one launch.

A program walks packed rows downward over a block of whole heads and keeps the last three inputs in registers, so that
each input is read once; where a segment begins it takes the three before it from their virtual rows. It takes rows in
blocks: one whose rows are of one segment and on one side of a chunk border, as nearly all are, runs without a branch,
any other one row at a time, with the same arithmetic. One more column of programs makes the gates. All of it is
elementwise but the norm of a head, which one fixed set of threads reduces.

Sizes: C convolved channels, P columns of the projection, HK key heads of DK columns, HV value heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.kernels.rows import sigmoid
from ops.kernels.sources import rows_at, source_at
from ops.kernels.tables import (
    CONV_OWN,
    CONV_QUESTION,
    CONV_REQUEST,
    LENGTH,
    PACKED,
    QUESTION_FIRST,
    ROW_POSITION,
    ROW_SEGMENT,
    SLOT_WRITE,
    START,
)
from ops.sizes import CHUNK, NORM_EPS, ConvSizes

ROWS = 8
"""Rows of a block; they are loaded at once."""
MAX_STEPS = 2
"""Most blocks of a walk: more share the weights among more rows, fewer give small passes more programs."""
ROWS_PER_STEP = 1024
"""Packed rows for which a walk takes one more block."""
COLUMNS = 128
WARPS = 1
"""One warp covers the columns of a program, and reduces whole heads without shared memory."""
REGISTERS = 64
"""Most of a thread on capability 9: 32 warps then fit a multiprocessor, and others work while one waits for its rows.
Elsewhere the cap would spill."""

_CHUNK = tl.constexpr(CHUNK)
_NORM_EPS = tl.constexpr(NORM_EPS)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def tap_weight(p_weight, o_c, J: tl.constexpr):
    """Tap J of each column in float32; bfloat16 weights come as one int64 of four taps, so that loads are vectors."""
    if p_weight.dtype.element_ty == tl.int64:
        b_bits = (tl.load(p_weight + o_c) >> (16 * J)).to(tl.int32) << 16
        return b_bits.to(tl.float32, bitcast=True)
    else:
        return tl.load(p_weight + o_c * 4 + J)


@triton.jit
def input_at(i_position, i_segment, tables, proj, history, o_c, C: tl.constexpr, P: tl.constexpr):
    """The convolution's input at one position of a segment's path, in float32; zeros before position 0."""
    request = tl.load(tables + CONV_REQUEST + i_segment)
    question = tl.load(tables + CONV_QUESTION + i_segment)
    own = tl.load(tables + CONV_OWN + i_segment)
    start = tl.load(tables + START + i_segment)
    question_first = tl.load(tables + QUESTION_FIRST + i_segment)
    i_row = i_position + source_at(i_position, start, question_first, request, question, own)
    return tl.load(rows_at(i_row, proj, P, history, C) + o_c, mask=i_position >= 0, other=0.0).to(tl.float32)


@triton.jit
def softplus(b_x):
    """log(1 + e^x) to a few ulp everywhere: max(x, 0) + 2 atanh(u / (2 + u)), u = e^-|x|, by its series."""
    b_u = tl.exp2(tl.abs(b_x) * -1.4426950408889634)
    b_s = b_u / (2.0 + b_u)
    b_q = b_s * b_s
    b_series = tl.fma(b_q, 1.0 / 17.0, 1.0 / 15.0)
    b_series = tl.fma(b_q, b_series, 1.0 / 13.0)
    b_series = tl.fma(b_q, b_series, 1.0 / 11.0)
    b_series = tl.fma(b_q, b_series, 1.0 / 9.0)
    b_series = tl.fma(b_q, b_series, 1.0 / 7.0)
    b_series = tl.fma(b_q, b_series, 1.0 / 5.0)
    b_series = tl.fma(b_q, b_series, 1.0 / 3.0)
    b_series = tl.fma(b_q, b_series, 1.0)
    return tl.maximum(b_x, 0.0) + 2.0 * b_s * b_series


@triton.jit
def rounded(b_x, dtype: tl.constexpr):
    """x.to(dtype), to the nearest even. In pairs it is one fast instruction, which the compiler only finds for values
    with no second use: the others would go through the unit that the sigmoid keeps busy. The interpreter has neither.
    """
    if dtype == tl.bfloat16 and not _INTERPRETED:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [b_x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return b_x.to(dtype)


@triton.jit
def finish_row(
    b_x0, b_x1, b_x2, b_x3, b_w0, b_w1, b_w2, b_w3, b_scale, m_open, p_y, p_norm, p_tail, p_tail_norm,
    NORM: tl.constexpr,
):  # fmt: skip
    """One row of a block of columns from its four inputs, stored; also in the tail where `m_open`."""
    b_conv = tl.fma(b_x3, b_w3, tl.fma(b_x2, b_w2, tl.fma(b_x1, b_w1, b_x0 * b_w0)))
    b_y = rounded(b_conv * sigmoid(b_conv), p_y.dtype.element_ty)
    tl.store(p_y, b_y)
    tl.store(p_tail, b_y, mask=m_open)
    if NORM:
        b_r = b_y.to(tl.float32)
        b_rnorm = tl.rsqrt(tl.sum(b_r * b_r, axis=1) + _NORM_EPS) * b_scale
        tl.store(p_norm, b_rnorm)
        tl.store(p_tail_norm, b_rnorm, mask=m_open)


@triton.jit
def load_rows(p_x, i_row, stop, P: tl.constexpr, ROWS: tl.constexpr):
    """ROWS rows of a block of columns, those from `stop` on as zeros."""
    b_rows = tl.tuple([])
    for i in tl.static_range(ROWS):
        b_rows += (tl.load(p_x + i * P, mask=i_row + i < stop, other=0.0),)
    return b_rows


@triton.jit
def keep_inputs(b_x0, b_x1, b_x2, history, slot, o_c, C: tl.constexpr):
    """The last three inputs of a segment, into its slot."""
    p_kept = history + slot.to(tl.int64) * 3 * C + o_c
    tl.store(p_kept, b_x0.to(history.dtype.element_ty))
    tl.store(p_kept + C, b_x1.to(history.dtype.element_ty))
    tl.store(p_kept + 2 * C, b_x2.to(history.dtype.element_ty))


@triton.jit
def enter(i_row, i_segment, tables, proj, history, o_c, C: tl.constexpr, P: tl.constexpr):
    """A walk's facts of a segment at its packed row `row`: (position, end, slot, border, the three inputs before)."""
    i_position = tl.load(tables + ROW_POSITION + i_row)
    end = tl.load(tables + START + i_segment) + tl.load(tables + LENGTH + i_segment)
    slot = tl.load(tables + SLOT_WRITE + i_segment)
    border = tl.where(slot >= 0, end - end % _CHUNK, PACKED)  # the tail keeps the rows from here on
    b_x0 = input_at(i_position - 3, i_segment, tables, proj, history, o_c, C, P)
    b_x1 = input_at(i_position - 2, i_segment, tables, proj, history, o_c, C, P)
    b_x2 = input_at(i_position - 1, i_segment, tables, proj, history, o_c, C, P)
    return i_position, end, slot, border, b_x0, b_x1, b_x2


@triton.jit
def conv_rows(
    tables, proj, weight, history, tail_kv, tail_gates, qkv, gates, i_head, i_first, stop, steps,
    NORM: tl.constexpr, C: tl.constexpr, P: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr,
    HEADS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Convolution of HEADS key-head widths of columns, all of q, of k or of v, over packed rows [first, stop)."""
    o_c = i_head * DK + tl.arange(0, HEADS)[:, None] * DK + tl.arange(0, DK)[None, :]
    b_w0 = tap_weight(weight, o_c, 0)
    b_w1 = tap_weight(weight, o_c, 1)
    b_w2 = tap_weight(weight, o_c, 2)
    b_w3 = tap_weight(weight, o_c, 3)
    is_query = i_head < HK
    b_scale = tl.where(is_query, DK**-0.5, 1.0)
    o_norm = 2 * HV + tl.where(is_query, HK + i_head, i_head - HK) + tl.arange(0, HEADS)

    b_x0 = tl.zeros([HEADS, DK], tl.float32)
    b_x1 = tl.zeros([HEADS, DK], tl.float32)
    b_x2 = tl.zeros([HEADS, DK], tl.float32)
    i_held = -2  # the segment whose last inputs are b_x0, b_x1, b_x2
    i_position = 0
    end = 0
    slot = -1
    border = 0
    p_x = proj + i_first * P + o_c
    p_y = qkv + i_first * C + o_c
    p_norm = gates + i_first * (2 * HV + 2 * HK) + o_norm
    i_row = i_first.to(tl.int32)
    for _ in range(steps):
        b_rows = load_rows(p_x, i_row, stop, P, ROWS)
        i_top = tl.load(tables + ROW_SEGMENT + i_row, mask=i_row < stop, other=-1)
        i_last = tl.load(tables + ROW_SEGMENT + i_row + ROWS - 1, mask=i_row + ROWS - 1 < stop, other=-1)
        if i_top >= 0:  # nothing to do past the last true row
            if i_top != i_held:
                i_held = i_top
                i_position, end, slot, border, b_x0, b_x1, b_x2 = enter(i_row, i_top, tables, proj, history, o_c, C, P)
            if (i_top == i_last) & ((i_position >= border) | (i_position + ROWS <= border)):
                m_open = (i_position >= border) & (is_query == 0)
                i_tail_row = slot.to(tl.int64) * _CHUNK + i_position % _CHUNK  # type: ignore[attr-defined]
                p_tail = tail_kv + i_tail_row * (C - HK * DK) + o_c - HK * DK
                p_tail_norm = tail_gates + i_tail_row * (2 * HV + HK) + o_norm
                for i in tl.static_range(ROWS):
                    b_x3 = b_rows[i].to(tl.float32)
                    finish_row(
                        b_x0, b_x1, b_x2, b_x3, b_w0, b_w1, b_w2, b_w3, b_scale, m_open,
                        p_y + i * C, p_norm + i * (2 * HV + 2 * HK),
                        p_tail + i * (C - HK * DK), p_tail_norm + i * (2 * HV + HK), NORM,
                    )  # fmt: skip
                    b_x0 = b_x1
                    b_x1 = b_x2
                    b_x2 = b_x3
                i_position += ROWS
                if (slot >= 0) & (i_position == end):
                    keep_inputs(b_x0, b_x1, b_x2, history, slot, o_c, C)
            else:
                for i in range(ROWS):
                    i_segment = tl.load(tables + ROW_SEGMENT + i_row + i, mask=i_row + i < stop, other=-1)
                    if i_segment >= 0:
                        if i_segment != i_held:
                            i_held = i_segment
                            i_position, end, slot, border, b_x0, b_x1, b_x2 = enter(
                                i_row + i, i_segment, tables, proj, history, o_c, C, P
                            )
                        m_open = (i_position >= border) & (is_query == 0)
                        i_tail_row = slot.to(tl.int64) * _CHUNK + i_position % _CHUNK  # type: ignore[attr-defined]
                        b_x3 = tl.load(p_x + i * P).to(tl.float32)
                        finish_row(
                            b_x0, b_x1, b_x2, b_x3, b_w0, b_w1, b_w2, b_w3, b_scale, m_open,
                        p_y + i * C, p_norm + i * (2 * HV + 2 * HK),
                            tail_kv + i_tail_row * (C - HK * DK) + o_c - HK * DK,
                            tail_gates + i_tail_row * (2 * HV + HK) + o_norm, NORM,
                        )  # fmt: skip
                        b_x0 = b_x1
                        b_x1 = b_x2
                        b_x2 = b_x3
                        i_position += 1
                        if (slot >= 0) & (i_position == end):
                            keep_inputs(b_x0, b_x1, b_x2, history, slot, o_c, C)
        p_x += ROWS * P
        p_y += ROWS * C
        p_norm += ROWS * (2 * HV + 2 * HK)
        i_row += ROWS


@triton.jit
def gate_rows(
    tables, proj, a_log, dt_bias, tail_gates, gates, rows, i_first, steps,
    B_OFFSET: tl.constexpr, P: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, BLOCK_HV: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """g and beta of all value heads over steps * ROWS packed rows."""
    o_head = tl.arange(0, BLOCK_HV)[None, :]
    m_head = o_head < HV
    b_decay = -tl.exp(tl.load(a_log + o_head, mask=m_head, other=0.0).to(tl.float32))
    b_bias = tl.load(dt_bias + o_head, mask=m_head, other=0.0).to(tl.float32)
    for step in range(steps):
        i_row = i_first + step * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None]
        i_segment = tl.load(tables + ROW_SEGMENT + i_row, mask=i_row < rows, other=-1)
        m_row = i_segment >= 0
        o_b = i_row * P + B_OFFSET + o_head
        b_b = tl.load(proj + o_b, mask=m_row & m_head, other=0.0).to(tl.float32)
        b_a = tl.load(proj + o_b + HV, mask=m_row & m_head, other=0.0).to(tl.float32)
        b_g = b_decay * softplus(b_a + b_bias)
        b_beta = sigmoid(b_b).to(proj.dtype.element_ty).to(tl.float32)
        p_out = gates + i_row * (2 * HV + 2 * HK) + o_head
        tl.store(p_out, b_g, mask=m_row & m_head)
        tl.store(p_out + HV, b_beta, mask=m_row & m_head)
        i_position = tl.load(tables + ROW_POSITION + i_row, mask=m_row, other=0)
        i_slot = tl.load(tables + SLOT_WRITE + i_segment, mask=m_row, other=-1)
        b_end = tl.load(tables + START + i_segment, mask=m_row, other=0)
        b_end += tl.load(tables + LENGTH + i_segment, mask=m_row, other=0)
        m_open = (i_slot >= 0) & (i_position >= b_end - b_end % _CHUNK) & m_head
        p_tail = tail_gates + (i_slot.to(tl.int64) * _CHUNK + i_position % _CHUNK) * (2 * HV + HK) + o_head
        tl.store(p_tail, b_g, mask=m_open)
        tl.store(p_tail + HV, b_beta, mask=m_open)


@triton.jit(do_not_specialize=["rows", "steps"])
def gdn_conv_kernel(
    tables, proj, weight, a_log, dt_bias, history, tail_kv, tail_gates, qkv, gates, rows, steps,
    C: tl.constexpr, P: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_HV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    i_first = tl.program_id(1).to(tl.int64) * steps * ROWS
    stop = tl.minimum(i_first.to(tl.int32) + steps * ROWS, rows)
    i_head = (tl.program_id(0) - 1) * HEADS
    if i_head < 0:
        # The columns of z are as many as those of v, and b follows them.
        gate_rows(
            tables, proj, a_log, dt_bias, tail_gates, gates, rows, i_first, steps,
            2 * (C - HK * DK), P, HK, HV, BLOCK_HV, ROWS,
        )  # fmt: skip
    elif i_head < 2 * HK:
        conv_rows(
            tables, proj, weight, history, tail_kv, tail_gates, qkv, gates, i_head, i_first, stop, steps,
            True, C, P, HK, HV, DK, HEADS, ROWS,
        )  # fmt: skip
    else:
        conv_rows(
            tables, proj, weight, history, tail_kv, tail_gates, qkv, gates, i_head, i_first, stop, steps,
            False, C, P, HK, HV, DK, HEADS, ROWS,
        )  # fmt: skip


def launch_gdn_conv(
    proj: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    tables: Tensor,
    history: Tensor,
    tail_kv: Tensor,
    tail_gates: Tensor,
    n: ConvSizes,
) -> tuple[Tensor, Tensor]:
    rows = proj.shape[0]
    qkv, gates = proj.new_empty(rows, n.channels), proj.new_empty(rows, n.gates, dtype=torch.float32)
    heads = heads_per_block(n)
    steps = min(max(rows // ROWS_PER_STEP, 1), MAX_STEPS)
    capped = proj.is_cuda and torch.cuda.get_device_capability(proj.device)[0] == 9
    if rows:
        weight = conv_weight.view(torch.int64) if conv_weight.dtype == torch.bfloat16 else conv_weight
        gdn_conv_kernel[(n.channels // (heads * n.key_dim) + 1, triton.cdiv(rows, ROWS * steps))](
            tables, proj, weight, a_log, dt_bias, history, tail_kv, tail_gates, qkv, gates, rows, steps,
            C=n.channels, P=n.proj, HK=n.key_heads, HV=n.value_heads, DK=n.key_dim, HEADS=heads,
            BLOCK_HV=triton.next_power_of_2(n.value_heads), ROWS=ROWS, num_warps=WARPS,
            maxnreg=REGISTERS if capped else None,
            enable_fp_fusion=False,
        )  # fmt: skip
    return qkv, gates


def heads_per_block(n: ConvSizes) -> int:
    """Key-head widths in a block of columns: a power of two that divides those of q, of k and of v."""
    widths = n.key_heads | n.values // n.key_dim
    return min(widths & -widths, max(COLUMNS // n.key_dim, 1))
