"""The norm behind the delta rule, per value head, gated by z."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ops.checks import (
    STORAGE,
    VECTOR_BYTES,
    check_at_least,
    check_at_most,
    check_multiple,
    check_row_pitch,
    check_tensor,
)
from ops.cpu import by_row_tiles, cpu_kernel


@torch.library.custom_op("forkgraph::gated_rms_norm", mutates_args=(), device_types="cuda")
def gated_rms_norm(o: Tensor, proj: Tensor, weight: Tensor, eps: float, z_offset: int) -> Tensor:
    """o * rsqrt(mean(o^2) + eps) * weight * silu(z) per value head, float32 inside, rounded once: [R, Vd].

    o [R, Vd] and proj [R, P] share one storage dtype (bfloat16 or float32); z is columns [z_offset, z_offset + Vd) of
    proj. weight [dv] may be float32 in any model. Raises TypeError for a dtype, ValueError for a shape, stride,
    alignment or device.
    """
    from ops.kernels.rows import launch_gated_rms_norm

    _check(o, proj, weight, z_offset)
    return launch_gated_rms_norm(o, proj, weight, eps, z_offset)


@cpu_kernel("gated_rms_norm")
def _cpu(o: Tensor, proj: Tensor, weight: Tensor, eps: float, z_offset: int) -> Tensor:
    _check(o, proj, weight, z_offset)
    dv, w = weight.shape[0], weight.float()

    def tile(o: Tensor, z: Tensor) -> tuple[Tensor]:
        x = o.float()
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w
        return ((normed * F.silu(z.float())).to(o.dtype),)

    # A tile row is one head of one row: every reduction gives a full tile of scalars.
    (gated,) = by_row_tiles(tile, o.view(-1, dv), proj[:, z_offset : z_offset + o.shape[1]].reshape(-1, dv))
    return gated.view(o.shape)


@gated_rms_norm.register_fake
def _fake(o: Tensor, proj: Tensor, weight: Tensor, eps: float, z_offset: int) -> Tensor:
    return torch.empty_like(o)


def gated_rms_norm_reference(o: Tensor, proj: Tensor, weight: Tensor, eps: float, z_offset: int) -> Tensor:
    """[R, Vd] in float64, not rounded."""
    heads = o.double().view(o.shape[0], -1, weight.shape[0])
    z = proj[:, z_offset : z_offset + o.shape[1]].double().reshape(heads.shape)
    normed = heads / torch.sqrt((heads * heads).sum(-1, keepdim=True) / heads.shape[-1] + eps) * weight.double()
    return (normed * z / (1.0 + torch.exp(-z))).view(o.shape)


def _check(o: Tensor, proj: Tensor, weight: Tensor, z_offset: int) -> None:
    op = "gated_rms_norm"
    check_tensor(op, "o", o, (None, None), STORAGE, o.device)
    check_tensor(op, "proj", proj, (o.shape[0], None), o.dtype, o.device)
    check_row_pitch(op, "proj", proj)
    check_tensor(op, "weight", weight, (None,), STORAGE, o.device)
    check_row_pitch(op, "weight", weight)
    check_multiple(op, "the last dimension of o", o.shape[1], weight.shape[0])
    check_at_least(op, "z_offset", z_offset, 0)
    check_at_most(op, "z_offset + the number of columns of o", z_offset + o.shape[1], proj.shape[1])
    if z_offset:
        check_multiple(op, "z_offset", z_offset, VECTOR_BYTES // proj.element_size())
