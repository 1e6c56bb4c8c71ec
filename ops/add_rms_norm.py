"""Residual addition and zero-centred RMSNorm in one pass over the rows."""

from __future__ import annotations

import torch
from torch import Tensor

from ops.checks import STORAGE, check_row_pitch, check_tensor
from ops.cpu import by_row_tiles, cpu_kernel


@torch.library.custom_op("forkgraph::add_rms_norm", mutates_args=(), device_types="cuda")
def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual stream after `delta`, and its norm.

    x, delta [R, h] and weight [h] share one storage dtype (bfloat16 or float32). Returns (residual [R, h] = x + delta
    rounded, normed [R, h] = r * rsqrt(mean(r^2) + eps) * (1 + weight) of the rounded residual r, float32 inside and
    rounded once). Raises TypeError for a dtype, ValueError for a shape, stride, alignment or device.
    """
    from ops.kernels.rows import launch_add_rms_norm

    _check(x, delta, weight)
    return launch_add_rms_norm(x, delta, weight, eps)


@cpu_kernel("add_rms_norm")
def _cpu(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    _check(x, delta, weight)
    scale = 1.0 + weight.float()

    def tile(x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        residual = x + delta
        r = residual.float()
        normed = r * torch.rsqrt(r.square().mean(-1, keepdim=True) + eps) * scale
        return residual, normed.to(x.dtype)

    residual, normed = by_row_tiles(tile, x, delta)
    return residual, normed


@add_rms_norm.register_fake
def _fake(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def add_rms_norm_reference(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(residual in storage dtype, normed in float64, not rounded)."""
    residual = (x.double() + delta.double()).to(x.dtype)
    r = residual.double()
    return residual, r / torch.sqrt((r * r).sum(-1, keepdim=True) / x.shape[1] + eps) * (1.0 + weight.double())


def _check(x: Tensor, delta: Tensor, weight: Tensor) -> None:
    op = "add_rms_norm"
    check_tensor(op, "x", x, (None, None), STORAGE, x.device)
    check_row_pitch(op, "x", x)
    check_tensor(op, "delta", delta, tuple(x.shape), x.dtype, x.device)
    check_tensor(op, "weight", weight, (x.shape[1],), x.dtype, x.device)
