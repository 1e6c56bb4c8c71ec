"""The fused weights of the backbone as its model takes them, and the rotary table; read-only once loaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.load.dimensions import ModelDimensions

# Shapes: h hidden, i intermediate, C convolved channels, P columns of the fused product, H heads of size d.


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """A LoRA kept beside the weight [N, K] that it changes. `rank` is a multiple of 16."""

    down: Tensor  # [rank, K]
    up: Tensor  # [N, rank], scale included


@dataclass(frozen=True, kw_only=True)
class MlpWeights:
    norm_h: Tensor
    gate_up: Tensor  # [2 i, h]
    down: Tensor  # [h, i]
    gate_up_lora: LowRank | None = None
    down_lora: LowRank | None = None


@dataclass(frozen=True, kw_only=True)
class GdnWeights:
    norm_h: Tensor
    in_proj: Tensor  # [P, h]: q, k, v, z, b, a, zero rows up to a multiple of 16
    conv: Tensor  # [C, 4]
    a_log: Tensor  # [Hv] float32
    dt_bias: Tensor  # [Hv]
    out_norm: Tensor  # [dv] float32
    out_proj: Tensor  # [h, Hv * dv]
    mlp: MlpWeights
    in_lora: LowRank | None = None
    out_lora: LowRank | None = None


@dataclass(frozen=True, kw_only=True)
class AttentionWeights:
    norm_h: Tensor
    in_proj: Tensor  # [2 H d + 2 Hkv d, h]: per head query and gate, then keys, then values
    q_norm: Tensor
    k_norm: Tensor
    out_proj: Tensor  # [h, H d]
    mlp: MlpWeights
    in_lora: LowRank | None = None
    out_lora: LowRank | None = None


@dataclass(frozen=True, kw_only=True)
class Weights:
    """All weights of the backbone on one device. `embedding` is [vocabulary, h], `rope` [positions, rotary dims]."""

    embedding: Tensor
    layers: tuple[GdnWeights | AttentionWeights, ...]
    norm_h: Tensor
    rope: Tensor


def rope_table(dimensions: ModelDimensions, positions: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[positions, rotary dims]: cos then sin of position * theta^(-2i/rotary), float32 rounded once.

    Text positions are equal in all three mrope sections, so plain rotary angles serve.
    """
    rotary = dimensions.rotary_dim
    even = torch.arange(0, rotary, 2, dtype=torch.int64, device="cpu")
    inverse = 1.0 / dimensions.rope_theta ** (even.float() / rotary)
    angles = torch.arange(positions, dtype=torch.float32, device="cpu")[:, None] * inverse
    return torch.cat([angles.cos(), angles.sin()], dim=1).to(dtype).to(device)
