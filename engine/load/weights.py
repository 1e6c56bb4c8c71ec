"""From checkpoint tensors, by their Hugging Face names, to the fused device weights of the backbone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.load.dimensions import ModelDimensions
from engine.load.lora import Adapter
from engine.load.projections import FULL, layer_projections
from engine.load.tensors import AttentionWeights, GdnWeights, LowRank, MlpWeights, Weights, rope_table

TensorOf = Callable[[str], Tensor]
"""A tensor by its text-model name without prefix, for instance ``layers.3.self_attn.q_proj.weight``."""
Progress = Callable[[int, int], None]
"""Layers done, layers in all."""


def load_weights(
    source: TensorOf,
    dimensions: ModelDimensions,
    *,
    dtype: torch.dtype,
    device: torch.device,
    positions: int,
    progress: Progress | None = None,
    adapter: Adapter | None = None,
) -> Weights:
    """Fused weights on `device`, layer by layer; what is read is copied straight to its place there.

    Matrices and norm weights take `dtype`; `A_log` and the gated norm's weight are float32 whatever the file holds,
    which keeps a float32 file bit for bit. `positions` is the length of the rotary table. An `adapter` given here
    stays beside the weights; a merged one is part of `source` (`Adapter.merged`).
    """

    def one(name: str, as_dtype: torch.dtype = dtype) -> Tensor:
        """A copy, aligned as allocations are: what a file maps changes with the file, and is aligned to 8 bytes."""
        read = source(name)
        return torch.empty(read.shape, dtype=as_dtype, device=device).copy_(read)

    def fused(rows: int, columns: int, modules: Sequence[str]) -> Tensor:
        """Their weights one below the other, zeros below them."""
        if len(modules) == 1:
            return one(modules[0] + ".weight")
        whole, done = torch.empty(rows, columns, dtype=dtype, device=device), 0
        for module in modules:
            part = source(module + ".weight")
            whole[done : done + len(part)].copy_(part)
            done += len(part)
        whole[done:].zero_()
        return whole

    embedding = one("embed_tokens.weight")  # the largest, read while there is room for two of it
    layers: list[GdnWeights | AttentionWeights] = []
    for n, kind in enumerate(dimensions.layer_types):
        p = f"layers.{n}."
        matrix: dict[str, Tensor] = {}
        lora: dict[str, LowRank | None] = {}
        for projection in layer_projections(dimensions, kind).values():
            modules = [p + module for module in projection.modules]
            weight = fused(projection.rows, projection.columns, modules)
            matrix[projection.name] = weight
            lora[projection.name] = None if adapter is None else adapter.low_rank(modules, weight)
        mlp = MlpWeights(
            norm_h=one(p + "post_attention_layernorm.weight"),
            gate_up=matrix["gate_up"],
            down=matrix["down"],
            gate_up_lora=lora["gate_up"],
            down_lora=lora["down"],
        )
        norm_h = one(p + "input_layernorm.weight")
        if kind == FULL:
            a = p + "self_attn."
            layers.append(
                AttentionWeights(
                    norm_h=norm_h,
                    in_proj=matrix["in_proj"],
                    q_norm=one(a + "q_norm.weight"),
                    k_norm=one(a + "k_norm.weight"),
                    out_proj=matrix["out_proj"],
                    mlp=mlp,
                    in_lora=lora["in_proj"],
                    out_lora=lora["out_proj"],
                )
            )
        else:
            g = p + "linear_attn."
            layers.append(
                GdnWeights(
                    norm_h=norm_h,
                    in_proj=matrix["in_proj"],
                    conv=one(g + "conv1d.weight").view(dimensions.conv_dim, -1),
                    a_log=one(g + "A_log", torch.float32),
                    dt_bias=one(g + "dt_bias"),
                    out_norm=one(g + "norm.weight", torch.float32),
                    out_proj=matrix["out_proj"],
                    mlp=mlp,
                    in_lora=lora["in_proj"],
                    out_lora=lora["out_proj"],
                )
            )
        if progress is not None:
            progress(n + 1, len(dimensions.layer_types))
    return Weights(
        embedding=embedding,
        layers=tuple(layers),
        norm_h=one("norm.weight"),
        rope=rope_table(dimensions, positions, dtype=dtype, device=device),
    )
