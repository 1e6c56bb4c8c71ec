"""Convolution, SiLU, gates, norm scalars, history and tail of Gated DeltaNet in one launch.

A program walks packed rows downward over a block of whole heads and keeps the last three inputs in registers, so that
each input is read once; where a segment begins it takes the three before it from their virtual rows. It takes rows in
blocks: one whose rows are of one segment and on one side of a chunk border, as nearly all are, runs without a branch,
any other one row at a time, with the same arithmetic. One more column of programs makes the gates. All of it is
elementwise but the norm of a head, which one fixed set of threads reduces.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops import tables as t
from ops.kernels.rows import sigmoid
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

_PACKED = tl.constexpr(t.PACKED)
_CHUNK = tl.constexpr(CHUNK)
_ROW_POSITION = tl.constexpr(t.ROW_POSITION)
_ROW_SEGMENT = tl.constexpr(t.ROW_SEGMENT)
_START = tl.constexpr(t.SEGMENTS + t.SEG_START * t.MAX_SEGMENTS)
_LENGTH = tl.constexpr(t.SEGMENTS + t.SEG_LENGTH * t.MAX_SEGMENTS)
_SLOT_WRITE = tl.constexpr(t.SEGMENTS + t.SEG_SLOT_WRITE * t.MAX_SEGMENTS)
_QUESTION_FIRST = tl.constexpr(t.SEGMENTS + t.SEG_QUESTION_FIRST * t.MAX_SEGMENTS)
_CONV_REQUEST = tl.constexpr(t.SEGMENTS + t.SEG_CONV_REQUEST * t.MAX_SEGMENTS)
_CONV_QUESTION = tl.constexpr(t.SEGMENTS + t.SEG_CONV_QUESTION * t.MAX_SEGMENTS)
_CONV_OWN = tl.constexpr(t.SEGMENTS + t.SEG_CONV_OWN * t.MAX_SEGMENTS)
_NORM_EPS = tl.constexpr(NORM_EPS)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def tap_weight(weight, columns, J: tl.constexpr):
    """Tap J of each column in float32; bfloat16 weights come as one int64 of four taps, so that loads are vectors."""
    if weight.dtype.element_ty == tl.int64:
        bits = (tl.load(weight + columns) >> (16 * J)).to(tl.int32) << 16
        return bits.to(tl.float32, bitcast=True)
    else:
        return tl.load(weight + columns * 4 + J)


@triton.jit
def input_at(position, segment, tables, proj, history, columns, C: tl.constexpr, P: tl.constexpr):
    """The convolution's input at one position of a segment's path, in float32; zeros before position 0."""
    request = tl.load(tables + _CONV_REQUEST + segment)
    question = tl.load(tables + _CONV_QUESTION + segment)
    own = tl.load(tables + _CONV_OWN + segment)
    start = tl.load(tables + _START + segment)
    question_first = tl.load(tables + _QUESTION_FIRST + segment)
    offset = tl.where(position >= start, own, tl.where(position >= question_first, question, request))
    row = position + offset
    packed = proj + (row - _PACKED).to(tl.int64) * P
    kept = history + row.to(tl.int64) * C
    source = tl.where(row >= _PACKED, packed, kept)
    return tl.load(source + columns, mask=position >= 0, other=0.0).to(tl.float32)


@triton.jit
def softplus(x):
    """log(1 + e^x) to a few ulp everywhere: max(x, 0) + 2 atanh(u / (2 + u)), u = e^-|x|, by its series."""
    u = tl.exp2(tl.abs(x) * -1.4426950408889634)
    s = u / (2.0 + u)
    q = s * s
    series = tl.fma(q, 1.0 / 17.0, 1.0 / 15.0)
    series = tl.fma(q, series, 1.0 / 13.0)
    series = tl.fma(q, series, 1.0 / 11.0)
    series = tl.fma(q, series, 1.0 / 9.0)
    series = tl.fma(q, series, 1.0 / 7.0)
    series = tl.fma(q, series, 1.0 / 5.0)
    series = tl.fma(q, series, 1.0 / 3.0)
    series = tl.fma(q, series, 1.0)
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """x.to(dtype), to the nearest even. In pairs it is one fast instruction, which the compiler only finds for values
    with no second use: the others would go through the unit that the sigmoid keeps busy. The interpreter has neither.
    """
    if dtype == tl.bfloat16 and not _INTERPRETED:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return x.to(dtype)


@triton.jit
def finish_row(
    x0, x1, x2, x3, w0, w1, w2, w3, scale, is_open, p_y, p_norm, p_tail, p_tail_norm, NORM: tl.constexpr
):  # fmt: skip
    """One row of a block of columns from its four inputs, stored; also in the tail where `is_open`."""
    conv = tl.fma(x3, w3, tl.fma(x2, w2, tl.fma(x1, w1, x0 * w0)))
    y = rounded(conv * sigmoid(conv), p_y.dtype.element_ty)
    tl.store(p_y, y)
    tl.store(p_tail, y, mask=is_open)
    if NORM:
        r = y.to(tl.float32)
        rnorm = tl.rsqrt(tl.sum(r * r, axis=1) + _NORM_EPS) * scale
        tl.store(p_norm, rnorm)
        tl.store(p_tail_norm, rnorm, mask=is_open)


@triton.jit
def load_rows(inputs, row, stop, P: tl.constexpr, ROWS: tl.constexpr):
    """ROWS rows of a block of columns, those from `stop` on as zeros."""
    x = tl.tuple([])
    for i in tl.static_range(ROWS):
        x += (tl.load(inputs + i * P, mask=row + i < stop, other=0.0),)
    return x


@triton.jit
def keep_inputs(x0, x1, x2, history, slot, columns, C: tl.constexpr):
    """The last three inputs of a segment, into its slot."""
    kept = history + slot.to(tl.int64) * 3 * C + columns
    tl.store(kept, x0.to(history.dtype.element_ty))
    tl.store(kept + C, x1.to(history.dtype.element_ty))
    tl.store(kept + 2 * C, x2.to(history.dtype.element_ty))


@triton.jit
def enter(row, segment, tables, proj, history, columns, C: tl.constexpr, P: tl.constexpr):
    """A walk's facts of a segment at its packed row `row`: (position, end, slot, border, the three inputs before)."""
    position = tl.load(tables + _ROW_POSITION + row)
    end = tl.load(tables + _START + segment) + tl.load(tables + _LENGTH + segment)
    slot = tl.load(tables + _SLOT_WRITE + segment)
    border = tl.where(slot >= 0, end - end % _CHUNK, _PACKED)  # the tail keeps the rows from here on
    x0 = input_at(position - 3, segment, tables, proj, history, columns, C, P)
    x1 = input_at(position - 2, segment, tables, proj, history, columns, C, P)
    x2 = input_at(position - 1, segment, tables, proj, history, columns, C, P)
    return position, end, slot, border, x0, x1, x2


@triton.jit
def conv_rows(
    tables, proj, weight, history, tail_kv, tail_gates, qkv, gates, head, first, stop, steps,
    NORM: tl.constexpr, C: tl.constexpr, P: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr,
    HEADS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Convolution of HEADS key-head widths of columns, all of q, of k or of v, over packed rows [first, stop)."""
    columns = head * DK + tl.arange(0, HEADS)[:, None] * DK + tl.arange(0, DK)[None, :]
    w0 = tap_weight(weight, columns, 0)
    w1 = tap_weight(weight, columns, 1)
    w2 = tap_weight(weight, columns, 2)
    w3 = tap_weight(weight, columns, 3)
    is_query = head < HK
    scale = tl.where(is_query, DK**-0.5, 1.0)
    norm_columns = 2 * HV + tl.where(is_query, HK + head, head - HK) + tl.arange(0, HEADS)

    x0 = tl.zeros([HEADS, DK], tl.float32)
    x1 = tl.zeros([HEADS, DK], tl.float32)
    x2 = tl.zeros([HEADS, DK], tl.float32)
    held = -2  # the segment whose last inputs are x0, x1, x2
    position = 0
    end = 0
    slot = -1
    border = 0
    p_x = proj + first * P + columns
    p_y = qkv + first * C + columns
    p_norm = gates + first * (2 * HV + 2 * HK) + norm_columns
    row = first.to(tl.int32)
    for _ in range(steps):
        inputs = load_rows(p_x, row, stop, P, ROWS)
        top = tl.load(tables + _ROW_SEGMENT + row, mask=row < stop, other=-1)
        last = tl.load(tables + _ROW_SEGMENT + row + ROWS - 1, mask=row + ROWS - 1 < stop, other=-1)
        if top >= 0:  # nothing to do past the last true row
            if top != held:
                held = top
                position, end, slot, border, x0, x1, x2 = enter(row, top, tables, proj, history, columns, C, P)
            if (top == last) & ((position >= border) | (position + ROWS <= border)):
                is_open = (position >= border) & (is_query == 0)
                tail_row = slot.to(tl.int64) * _CHUNK + position % _CHUNK  # type: ignore[attr-defined]
                p_tail = tail_kv + tail_row * (C - HK * DK) + columns - HK * DK
                p_tail_norm = tail_gates + tail_row * (2 * HV + HK) + norm_columns
                for i in tl.static_range(ROWS):
                    x3 = inputs[i].to(tl.float32)
                    finish_row(
                        x0, x1, x2, x3, w0, w1, w2, w3, scale, is_open, p_y + i * C, p_norm + i * (2 * HV + 2 * HK),
                        p_tail + i * (C - HK * DK), p_tail_norm + i * (2 * HV + HK), NORM,
                    )  # fmt: skip
                    x0 = x1
                    x1 = x2
                    x2 = x3
                position += ROWS
                if (slot >= 0) & (position == end):
                    keep_inputs(x0, x1, x2, history, slot, columns, C)
            else:
                for i in range(ROWS):
                    segment = tl.load(tables + _ROW_SEGMENT + row + i, mask=row + i < stop, other=-1)
                    if segment >= 0:
                        if segment != held:
                            held = segment
                            position, end, slot, border, x0, x1, x2 = enter(
                                row + i, segment, tables, proj, history, columns, C, P
                            )
                        is_open = (position >= border) & (is_query == 0)
                        tail_row = slot.to(tl.int64) * _CHUNK + position % _CHUNK  # type: ignore[attr-defined]
                        x3 = tl.load(p_x + i * P).to(tl.float32)
                        finish_row(
                            x0, x1, x2, x3, w0, w1, w2, w3, scale, is_open, p_y + i * C, p_norm + i * (2 * HV + 2 * HK),
                            tail_kv + tail_row * (C - HK * DK) + columns - HK * DK,
                            tail_gates + tail_row * (2 * HV + HK) + norm_columns, NORM,
                        )  # fmt: skip
                        x0 = x1
                        x1 = x2
                        x2 = x3
                        position += 1
                        if (slot >= 0) & (position == end):
                            keep_inputs(x0, x1, x2, history, slot, columns, C)
        p_x += ROWS * P
        p_y += ROWS * C
        p_norm += ROWS * (2 * HV + 2 * HK)
        row += ROWS


@triton.jit
def gate_rows(
    tables, proj, a_log, dt_bias, tail_gates, gates, rows, first, steps,
    B_OFFSET: tl.constexpr, P: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, BLOCK_HV: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """g and beta of all value heads over steps * ROWS packed rows."""
    heads = tl.arange(0, BLOCK_HV)[None, :]
    real = heads < HV
    decay = -tl.exp(tl.load(a_log + heads, mask=real, other=0.0).to(tl.float32))
    bias = tl.load(dt_bias + heads, mask=real, other=0.0).to(tl.float32)
    for step in range(steps):
        row = first + step * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None]
        segment = tl.load(tables + _ROW_SEGMENT + row, mask=row < rows, other=-1)
        live = segment >= 0
        b_offset = row * P + B_OFFSET + heads
        b = tl.load(proj + b_offset, mask=live & real, other=0.0).to(tl.float32)
        a = tl.load(proj + b_offset + HV, mask=live & real, other=0.0).to(tl.float32)
        g = decay * softplus(a + bias)
        beta = sigmoid(b).to(proj.dtype.element_ty).to(tl.float32)
        out = gates + row * (2 * HV + 2 * HK) + heads
        tl.store(out, g, mask=live & real)
        tl.store(out + HV, beta, mask=live & real)
        position = tl.load(tables + _ROW_POSITION + row, mask=live, other=0)
        slot = tl.load(tables + _SLOT_WRITE + segment, mask=live, other=-1)
        end = tl.load(tables + _START + segment, mask=live, other=0)
        end += tl.load(tables + _LENGTH + segment, mask=live, other=0)
        open_row = (slot >= 0) & (position >= end - end % _CHUNK) & real
        tail = tail_gates + (slot.to(tl.int64) * _CHUNK + position % _CHUNK) * (2 * HV + HK) + heads
        tl.store(tail, g, mask=open_row)
        tl.store(tail + HV, beta, mask=open_row)


@triton.jit(do_not_specialize=["rows", "steps"])
def gdn_conv_kernel(
    tables, proj, weight, a_log, dt_bias, history, tail_kv, tail_gates, qkv, gates, rows, steps,
    C: tl.constexpr, P: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_HV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(1).to(tl.int64) * steps * ROWS
    stop = tl.minimum(first.to(tl.int32) + steps * ROWS, rows)
    head = (tl.program_id(0) - 1) * HEADS
    if head < 0:
        # The columns of z are as many as those of v, and b follows them.
        gate_rows(
            tables, proj, a_log, dt_bias, tail_gates, gates, rows, first, steps,
            2 * (C - HK * DK), P, HK, HV, BLOCK_HV, ROWS,
        )  # fmt: skip
    elif head < 2 * HK:
        conv_rows(
            tables, proj, weight, history, tail_kv, tail_gates, qkv, gates, head, first, stop, steps,
            True, C, P, HK, HV, DK, HEADS, ROWS,
        )  # fmt: skip
    else:
        conv_rows(
            tables, proj, weight, history, tail_kv, tail_gates, qkv, gates, head, first, stop, steps,
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
