"""Kernels over rows that stand alone: norms, the MLP gate, sums, gathers.

Every size is a constexpr and every row count a grid dimension, so a model has one binary of each, and a row is reduced
by the same threads in the same order however many rows there are. Arithmetic is
float32, whatever the storage.
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
def sigmoid(x):
    """1 / (1 + e^-x) in float32; exactly zero where the exponential overflows.

    A squared reciprocal root and a base-2 exponential: one instruction each, where a division and exp take several.
    """
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    return root * root


@triton.jit
def add_rms_norm_kernel(x, delta, weight, residual, normed, eps, H: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    mask = columns < H
    offsets = tl.program_id(0).to(tl.int64) * H + columns
    b_x = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    b_delta = tl.load(delta + offsets, mask=mask, other=0.0).to(tl.float32)
    b_weight = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    b_residual = (b_x + b_delta).to(residual.dtype.element_ty)
    tl.store(residual + offsets, b_residual, mask=mask)
    r = b_residual.to(tl.float32)
    b_normed = r * tl.rsqrt(tl.sum(r * r, axis=0) / H + eps) * (1.0 + b_weight)
    tl.store(normed + offsets, b_normed.to(normed.dtype.element_ty), mask=mask)


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
    head = tl.program_id(0).to(tl.int64) * HEADS + tl.arange(0, HEADS)[:, None]
    columns = tl.arange(0, BLOCK_DV)[None, :]
    mask = (head < heads) & (columns < DV)
    b_o = tl.load(o + head * DV + columns, mask=mask, other=0.0).to(tl.float32)
    z = proj + (head // HV) * P + (Z_OFFSET + (head % HV) * DV) + columns
    b_z = tl.load(z, mask=mask, other=0.0).to(tl.float32)
    p_weight = tl.broadcast_to(weight + columns, [HEADS, BLOCK_DV])  # loaded in the layout of the rows
    b_weight = tl.load(p_weight, mask=columns < DV, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(b_o * b_o, axis=1) / DV + eps)
    b_out = b_o * scale[:, None] * b_weight * (b_z * sigmoid(b_z))
    tl.store(out + head * DV + columns, b_out.to(out.dtype.element_ty), mask=mask)


@triton.jit
def silu_mul_kernel(gate_up, out, I: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    row = program // (I // BLOCK)
    columns = (program % (I // BLOCK)) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * (2 * I) + columns).to(tl.float32)
    up = tl.load(gate_up + row * (2 * I) + I + columns).to(tl.float32)
    rounded = (gate * sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * I + columns, (rounded * up).to(out.dtype.element_ty))


@triton.jit
def add_rows_kernel(x, delta, out, N: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    blocks: tl.constexpr = (N + BLOCK - 1) // BLOCK
    columns = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < N
    offsets = (program // blocks) * N + columns
    b_x = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    b_delta = tl.load(delta + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + offsets, (b_x + b_delta).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["section"])
def take_rows_kernel(source, tables, out, section, H: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < H
    picked = tl.load(tables + section + row).to(tl.int64)
    tl.store(out + row * H + columns, tl.load(source + picked * H + columns, mask=mask), mask=mask)


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
