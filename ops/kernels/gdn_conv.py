"""Convolution, SiLU, gates, norm scalars, history and tail of Gated DeltaNet in one launch.

A program walks packed rows downward over a block of whole heads and keeps the last three inputs in registers, so that
each input is read once; where a segment begins it takes the three before it from their virtual rows. One more block
of programs makes the gates. All of it is elementwise but the norm of a head, which one fixed set of threads reduces.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops import tables as t
from ops.gdn_conv import NORM_EPS, ConvSizes
from ops.kernels.rows import sigmoid

ROWS = 4
"""Rows a program loads at once."""
MAX_STEPS = 4
"""Most times it does so: more share the weights among more rows, fewer give small passes more programs."""
ROWS_PER_STEP = 512
"""Packed rows for which a program takes one more step."""
COLUMNS = 256
WARPS = 1
"""One warp of 16-byte loads covers the columns, and reduces whole heads without shared memory."""

_PACKED = tl.constexpr(t.PACKED)
_CHUNK = tl.constexpr(t.CHUNK)
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
def finish_row(
    x0, x1, x2, x3, w0, w1, w2, w3, row, live, position, end, slot, head, history, tail_kv, tail_gates, qkv, gates,
    C: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr,
):  # fmt: skip
    """One row of one block of columns, from its four inputs; `head` counts key-head widths from column 0 of q."""
    dim = tl.arange(0, DK)[None, :]
    columns = head * DK + dim
    conv = tl.fma(x3, w3, tl.fma(x2, w2, tl.fma(x1, w1, x0 * w0)))
    y = (conv * sigmoid(conv)).to(qkv.dtype.element_ty)
    tl.store(qkv + row * C + columns, y, mask=live)
    is_query = head < HK
    is_open = (slot >= 0) & (position >= end - end % _CHUNK) & (head >= HK)
    tail_row = slot.to(tl.int64) * _CHUNK + position % _CHUNK
    tl.store(tail_kv + tail_row * (C - HK * DK) + columns - HK * DK, y, mask=is_open)

    r = y.to(tl.float32)
    rnorm = tl.rsqrt(tl.sum(r * r, axis=1, keep_dims=True) + _NORM_EPS)
    rnorm = tl.where(is_query, rnorm * DK**-0.5, rnorm)
    column = 2 * HV + tl.where(is_query, HK + head, head - HK) + dim * 0
    first = (head < 2 * HK) & (dim == 0)
    tl.store(gates + row * (2 * HV + 2 * HK) + column, rnorm, mask=first & live)
    tl.store(tail_gates + tail_row * (2 * HV + HK) + column, rnorm, mask=first & is_open)

    if (slot >= 0) & (position == end - 1):
        kept = history + slot.to(tl.int64) * 3 * C + columns
        tl.store(kept, x1.to(history.dtype.element_ty))
        tl.store(kept + C, x2.to(history.dtype.element_ty))
        tl.store(kept + 2 * C, x3.to(history.dtype.element_ty))


@triton.jit
def conv_rows(
    tables, proj, weight, history, tail_kv, tail_gates, qkv, gates, rows, first, steps,
    C: tl.constexpr, P: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, HEADS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Convolution of one block of columns over steps * ROWS packed rows."""
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)[:, None]
    columns = head * DK + tl.arange(0, DK)[None, :]
    w0 = tap_weight(weight, columns, 0)
    w1 = tap_weight(weight, columns, 1)
    w2 = tap_weight(weight, columns, 2)
    w3 = tap_weight(weight, columns, 3)
    x0 = tl.zeros([HEADS, DK], tl.float32)
    x1 = tl.zeros([HEADS, DK], tl.float32)
    x2 = tl.zeros([HEADS, DK], tl.float32)
    held = -2  # the segment whose last inputs are x0, x1, x2
    position = 0
    end = 0
    slot = -1
    for step in range(steps):
        segments = tl.tuple([])
        inputs = tl.tuple([])
        for i in tl.static_range(ROWS):  # all loads first: their latencies overlap
            row = first + step * ROWS + i
            segments += (tl.load(tables + _ROW_SEGMENT + row, mask=row < rows, other=-1),)
            inputs += (tl.load(proj + row * P + columns, mask=row < rows, other=0.0),)
        if segments[0] >= 0:  # nothing to do past the last true row
            for i in tl.static_range(ROWS):
                row = first + step * ROWS + i
                live = segments[i] >= 0
                if segments[i] != held:
                    held = segments[i]
                    segment = tl.maximum(held, 0)
                    position = tl.load(tables + _ROW_POSITION + row, mask=live, other=0)
                    end = tl.load(tables + _START + segment) + tl.load(tables + _LENGTH + segment)
                    slot = tl.load(tables + _SLOT_WRITE + segment, mask=live, other=-1)
                    x0 = input_at(position - 3, segment, tables, proj, history, columns, C, P)
                    x1 = input_at(position - 2, segment, tables, proj, history, columns, C, P)
                    x2 = input_at(position - 1, segment, tables, proj, history, columns, C, P)
                x3 = inputs[i].to(tl.float32)
                finish_row(
                    x0, x1, x2, x3, w0, w1, w2, w3, row, live, position, end, slot, head,
                    history, tail_kv, tail_gates, qkv, gates, C, HK, HV, DK,
                )  # fmt: skip
                x0 = x1
                x1 = x2
                x2 = x3
                position += 1


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
    if tl.program_id(0) < C // (HEADS * DK):
        conv_rows(
            tables, proj, weight, history, tail_kv, tail_gates, qkv, gates, rows, first, steps,
            C, P, HK, HV, DK, HEADS, ROWS,
        )  # fmt: skip
    else:
        # The columns of z are as many as those of v, and b follows them.
        gate_rows(
            tables, proj, a_log, dt_bias, tail_gates, gates, rows, first, steps,
            2 * (C - HK * DK), P, HK, HV, BLOCK_HV, ROWS,
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
    if rows:
        weight = conv_weight.view(torch.int64) if conv_weight.dtype == torch.bfloat16 else conv_weight
        gdn_conv_kernel[(n.channels // (heads * n.key_dim) + 1, triton.cdiv(rows, ROWS * steps))](
            tables, proj, weight, a_log, dt_bias, history, tail_kv, tail_gates, qkv, gates, rows, steps,
            C=n.channels, P=n.proj, HK=n.key_heads, HV=n.value_heads, DK=n.key_dim, HEADS=heads,
            BLOCK_HV=triton.next_power_of_2(n.value_heads), ROWS=ROWS, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return qkv, gates


def heads_per_block(n: ConvSizes) -> int:
    """Key-head widths in a block of columns: a power of two that divides their number."""
    widths = n.channels // n.key_dim
    return min(widths & -widths, max(COLUMNS // n.key_dim, 1))
