"""Kernels over rows that stand alone: norms, the MLP gate, sums, gathers.

Every size is a constexpr and every row count a grid dimension, so a model has one binary of each, and a row is reduced
by the same threads in the same order however many rows there are. Arithmetic is float32, whatever the storage.

Sizes: H hidden, I intermediate, N columns, P columns of the projection, HV value heads of DV columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDE_WARPS = 8
"""Warps of a program that owns a whole row of the hidden size."""
HEADS_PER_PROGRAM = 16
HEAD_WARPS = 4
GATE_BLOCK = 2048
GATE_WARPS = 4
SUM_BLOCK = 1024


@triton.jit
def sigmoid(b_x):
    """1 / (1 + e^-x) in float32; exactly zero where the exponential overflows.

    A squared reciprocal root and a base-2 exponential: one instruction each, where a division and exp take several.
    """
    b_root = tl.rsqrt(1.0 + tl.exp2(b_x * -1.4426950408889634))
    return b_root * b_root


@triton.jit
def add_rms_norm_kernel(x, delta, weight, residual, normed, eps, H: tl.constexpr, BLOCK: tl.constexpr):
    o_h = tl.arange(0, BLOCK)
    m_h = o_h < H
    o_x = tl.program_id(0).to(tl.int64) * H + o_h
    b_x = tl.load(x + o_x, mask=m_h, other=0.0).to(tl.float32)
    b_delta = tl.load(delta + o_x, mask=m_h, other=0.0).to(tl.float32)
    b_weight = tl.load(weight + o_h, mask=m_h, other=0.0).to(tl.float32)
    b_residual = (b_x + b_delta).to(residual.dtype.element_ty)
    tl.store(residual + o_x, b_residual, mask=m_h)
    b_r = b_residual.to(tl.float32)
    b_normed = b_r * tl.rsqrt(tl.sum(b_r * b_r, axis=0) / H + eps) * (1.0 + b_weight)
    tl.store(normed + o_x, b_normed.to(normed.dtype.element_ty), mask=m_h)


@triton.jit(do_not_specialize=["heads"])
def gated_rms_norm_kernel(
    o,
    proj,
    weight,
    out,
    heads,  # of all rows together
    eps,
    Z_OFFSET: tl.constexpr,
    P: tl.constexpr,
    HV: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HEADS: tl.constexpr,
):
    i_head = tl.program_id(0).to(tl.int64) * HEADS + tl.arange(0, HEADS)[:, None]
    o_v = tl.arange(0, BLOCK_DV)[None, :]
    m_v = (i_head < heads) & (o_v < DV)
    b_o = tl.load(o + i_head * DV + o_v, mask=m_v, other=0.0).to(tl.float32)
    p_z = proj + (i_head // HV) * P + (Z_OFFSET + (i_head % HV) * DV) + o_v
    b_z = tl.load(p_z, mask=m_v, other=0.0).to(tl.float32)
    p_weight = tl.broadcast_to(weight + o_v, [HEADS, BLOCK_DV])  # loaded in the layout of the rows
    b_weight = tl.load(p_weight, mask=o_v < DV, other=0.0).to(tl.float32)
    b_scale = tl.rsqrt(tl.sum(b_o * b_o, axis=1) / DV + eps)
    b_out = b_o * b_scale[:, None] * b_weight * (b_z * sigmoid(b_z))
    tl.store(out + i_head * DV + o_v, b_out.to(out.dtype.element_ty), mask=m_v)


@triton.jit
def silu_mul_kernel(gate_up, out, I: tl.constexpr, BLOCK: tl.constexpr):
    i_program = tl.program_id(0).to(tl.int64)
    i_row = i_program // (I // BLOCK)
    o_i = (i_program % (I // BLOCK)) * BLOCK + tl.arange(0, BLOCK)
    b_gate = tl.load(gate_up + i_row * (2 * I) + o_i).to(tl.float32)
    b_up = tl.load(gate_up + i_row * (2 * I) + I + o_i).to(tl.float32)
    b_silu = (b_gate * sigmoid(b_gate)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + i_row * I + o_i, (b_silu * b_up).to(out.dtype.element_ty))


@triton.jit
def add_rows_kernel(x, delta, out, N: tl.constexpr, BLOCK: tl.constexpr):
    i_program = tl.program_id(0).to(tl.int64)
    BLOCKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    o_n = (i_program % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    m_n = o_n < N
    o_x = (i_program // BLOCKS) * N + o_n
    b_x = tl.load(x + o_x, mask=m_n, other=0.0).to(tl.float32)
    b_delta = tl.load(delta + o_x, mask=m_n, other=0.0).to(tl.float32)
    tl.store(out + o_x, (b_x + b_delta).to(out.dtype.element_ty), mask=m_n)


@triton.jit(do_not_specialize=["section"])
def take_rows_kernel(source, tables, out, section, H: tl.constexpr, BLOCK: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    o_h = tl.arange(0, BLOCK)
    m_h = o_h < H
    i_picked = tl.load(tables + section + i_row).to(tl.int64)
    tl.store(out + i_row * H + o_h, tl.load(source + i_picked * H + o_h, mask=m_h), mask=m_h)


def launch_add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    rows, width = x.shape
    residual, normed = torch.empty_like(x), torch.empty_like(x)
    if rows:
        add_rms_norm_kernel[(rows,)](
            x, delta, weight, residual, normed, eps,
            H=width, BLOCK=triton.next_power_of_2(width), num_warps=WIDE_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return residual, normed


def launch_gated_rms_norm(o: Tensor, proj: Tensor, weight: Tensor, eps: float, z_offset: int) -> Tensor:
    out = torch.empty_like(o)
    dv = weight.shape[0]
    heads = o.numel() // dv
    if heads:
        gated_rms_norm_kernel[(triton.cdiv(heads, HEADS_PER_PROGRAM),)](
            o, proj, weight, out, heads, eps,
            Z_OFFSET=z_offset, P=proj.shape[1], HV=o.shape[1] // dv, DV=dv, BLOCK_DV=triton.next_power_of_2(dv),
            HEADS=HEADS_PER_PROGRAM, num_warps=HEAD_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def launch_silu_mul(gate_up: Tensor) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    block = min(width & -width, GATE_BLOCK)  # the largest power of two that divides a row
    if rows:
        silu_mul_kernel[(rows * (width // block),)](
            gate_up, out, I=width, BLOCK=block, num_warps=GATE_WARPS, enable_fp_fusion=False
        )
    return out


def launch_add_rows(x: Tensor, delta: Tensor) -> Tensor:
    out = torch.empty_like(x)
    rows, width = x.shape
    if rows:
        add_rows_kernel[(rows * triton.cdiv(width, SUM_BLOCK),)](
            x, delta, out, N=width, BLOCK=SUM_BLOCK, num_warps=GATE_WARPS, enable_fp_fusion=False
        )
    return out


def launch_take_rows(source: Tensor, tables: Tensor, section: int, rows: int) -> Tensor:
    width = source.shape[1]
    out = source.new_empty(rows, width)
    if rows:
        take_rows_kernel[(rows,)](
            source, tables, out, section,
            H=width, BLOCK=triton.next_power_of_2(width), num_warps=GATE_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return out
