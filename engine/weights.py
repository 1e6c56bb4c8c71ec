"""From checkpoint tensors, by their Hugging Face names, to the fused device weights of the backbone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.dimensions import ModelDimensions
from engine.model import AttentionWeights, GdnWeights, MlpWeights, Weights, rope_table

Source = Callable[[str], Tensor]
"""A tensor by its text-model name without prefix, for instance ``layers.3.self_attn.q_proj.weight``."""
Progress = Callable[[int, int], None]
"""Layers done, layers in all."""


def load_weights(
    source: Source,
    dimensions: ModelDimensions,
    *,
    dtype: torch.dtype,
    device: torch.device,
    positions: int,
    progress: Progress | None = None,
) -> Weights:
    """Fused weights on `device`, layer by layer, so that at most one layer stands there twice.

    Matrices and norm weights take `dtype`; `A_log` and the gated norm's weight are float32 whatever the file holds,
    which keeps a float32 file bit for bit. `positions` is the length of the rotary table.
    """

    def one(name: str, as_dtype: torch.dtype = dtype) -> Tensor:
        return source(name).to(device=device, dtype=as_dtype).contiguous()

    layers: list[GdnWeights | AttentionWeights] = []
    for n, kind in enumerate(dimensions.layer_types):
        p = f"layers.{n}."
        mlp = MlpWeights(
            norm_h=one(p + "post_attention_layernorm.weight"),
            gate_up=torch.cat([one(p + "mlp.gate_proj.weight"), one(p + "mlp.up_proj.weight")]),
            down=one(p + "mlp.down_proj.weight"),
        )
        norm_h = one(p + "input_layernorm.weight")
        if kind == "full_attention":
            a = p + "self_attn."
            layers.append(
                AttentionWeights(
                    norm_h=norm_h,
                    in_proj=torch.cat([one(f"{a}{name}_proj.weight") for name in "qkv"]),
                    q_norm=one(a + "q_norm.weight"),
                    k_norm=one(a + "k_norm.weight"),
                    out_proj=one(a + "o_proj.weight"),
                    mlp=mlp,
                )
            )
        else:
            g = p + "linear_attn."
            parts = [one(f"{g}in_proj_{name}.weight") for name in ("qkv", "z", "b", "a")]
            padding = dimensions.gdn_proj - sum(len(part) for part in parts)
            layers.append(
                GdnWeights(
                    norm_h=norm_h,
                    in_proj=torch.cat([*parts, parts[0].new_zeros(padding, dimensions.hidden_size)]),
                    conv=one(g + "conv1d.weight").view(dimensions.conv_dim, -1),
                    a_log=one(g + "A_log", torch.float32),
                    dt_bias=one(g + "dt_bias"),
                    out_norm=one(g + "norm.weight", torch.float32),
                    out_proj=one(g + "out_proj.weight"),
                    mlp=mlp,
                )
            )
        if progress is not None:
            progress(n + 1, len(dimensions.layer_types))
    return Weights(
        embedding=one("embed_tokens.weight"),
        layers=tuple(layers),
        norm_h=one("norm.weight"),
        rope=rope_table(dimensions, positions, dtype=dtype, device=device),
    )
