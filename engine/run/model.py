"""The Qwen3.5 text backbone in plain classes over `ops`; any dimensions.

Every arithmetic step is an operator of `ops`, so a row's bits are decided there and nowhere else. Formulas:
transformers `models/qwen3_5`. Fused products per layer: mixer input, mixer output, gate and up, down.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine.load.dimensions import ModelDimensions
from engine.load.tensors import AttentionWeights, GdnWeights, LowRank, MlpWeights, Weights
from engine.run.snapshot import AttentionBuffers, GdnBuffers, LayerBuffers
from graphs.regions import Region, compiled, dynamic_rows
from ops.add_rms_norm import add_rms_norm
from ops.add_rows import add_rows
from ops.attention import attention
from ops.attention_prepare import attention_prepare
from ops.delta_rule import delta_rule
from ops.gated_rms_norm import gated_rms_norm
from ops.gdn_conv import gdn_conv
from ops.silu_mul import silu_mul
from ops.tables import READ_ROWS, ROW_TOKEN
from ops.take_rows import take_rows

Linear = Callable[[Tensor, Tensor], Tensor]
"""The GEMM handle: rows [R, K] and a weight [N, K] to [R, N]."""

# Shapes: R packed rows, N read rows, h hidden, C convolved channels, P columns of the fused product.


def _project(
    x_RK: Tensor, weight_NK: Tensor, lora: LowRank | None, linear: Linear, columns: slice | None = None
) -> Tensor:
    """A product, in whole or some of its columns. With a LoRA it is the rounded sum of two rounded products."""
    y_RN = linear(x_RK, weight_NK if columns is None else weight_NK[columns])
    if lora is None:
        return y_RN
    sum_RN: Tensor = add_rows(y_RN, linear(linear(x_RK, lora.down), lora.up if columns is None else lora.up[columns]))
    return sum_RN


def _mlp(x_Rh: Tensor, delta_Rh: Tensor, w: MlpWeights, eps: float, linear: Linear) -> tuple[Tensor, Tensor]:
    x_Rh, normed_Rh = add_rms_norm(x_Rh, delta_Rh, w.norm_h, eps)
    return x_Rh, _project(silu_mul(_project(normed_Rh, w.gate_up, w.gate_up_lora, linear)), w.down, w.down_lora, linear)


def _picked(x_Rh: Tensor, tables: Tensor, reads_N: Tensor) -> Tensor:
    """The rows that are read. Only the size of `reads_N` counts: a number would be a constant to the compiler."""
    picked_Nh: Tensor = take_rows(x_Rh, tables, READ_ROWS, reads_N.shape[0])
    return picked_Nh


class _Layer:
    """A mixer, then the MLP. No module of torch: tracing elsewhere in the process patches those."""

    w: GdnWeights | AttentionWeights
    eps: float
    linear: Linear

    def forward(
        self,
        x_Rh: Tensor,
        delta_Rh: Tensor,
        tables: Tensor,
        buffers: Any,
        last: bool = False,
        reads_N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Takes the residual stream and the last block's output, returns the same two. In the last layer only the N
        rows that are read go on past what a snapshot holds; without `reads_N`, none does."""
        x_Rh, mixed_Rh = self._mix(x_Rh, delta_Rh, tables, buffers, last, reads_N)
        if last and reads_N is None:
            return x_Rh, mixed_Rh
        return _mlp(x_Rh, mixed_Rh, self.w.mlp, self.eps, self.linear)

    def _mix(
        self,
        x_Rh: Tensor,
        delta_Rh: Tensor,
        tables: Tensor,
        buffers: Any,
        last: bool,
        reads_N: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


class GdnLayer(_Layer):
    """Gated DeltaNet block."""

    w: GdnWeights

    def __init__(self, weights: GdnWeights, dimensions: ModelDimensions, linear: Linear) -> None:
        self.w, self.linear = weights, linear
        self.eps, self.z_offset = dimensions.rms_norm_eps, dimensions.conv_dim

    def _mix(
        self,
        x_Rh: Tensor,
        delta_Rh: Tensor,
        tables: Tensor,
        buffers: GdnBuffers,
        last: bool,
        reads_N: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        # A method of its own, so that eager runs drop what the mixer held before the MLP allocates.
        w = self.w
        x_Rh, normed_Rh = add_rms_norm(x_Rh, delta_Rh, w.norm_h, self.eps)
        proj_RP = _project(normed_Rh, w.in_proj, w.in_lora, self.linear)
        qkv_RC, gates_RG = gdn_conv(
            proj_RP, w.conv, w.a_log, w.dt_bias, tables, buffers.history, buffers.tail_kv, buffers.tail_gates
        )
        o_RV = delta_rule(qkv_RC, gates_RG, buffers.tail_kv, buffers.tail_gates, buffers.states, tables)
        if last:
            if reads_N is None:  # a prefix nobody reads: what it leaves behind is all that is wanted
                return x_Rh, o_RV
            x_Rh, o_RV, proj_RP = (_picked(t, tables, reads_N) for t in (x_Rh, o_RV, proj_RP))
        gated_RV = gated_rms_norm(o_RV, proj_RP, w.out_norm, self.eps, self.z_offset)
        return x_Rh, _project(gated_RV, w.out_proj, w.out_lora, self.linear)


class AttentionLayer(_Layer):
    """Gated full attention block. In the last layer all rows give keys and values."""

    w: AttentionWeights

    def __init__(self, weights: AttentionWeights, dimensions: ModelDimensions, rope: Tensor, linear: Linear) -> None:
        self.w, self.rope, self.linear = weights, rope, linear
        self.eps, self.head_dim = dimensions.rms_norm_eps, dimensions.head_dim
        self.q_columns = 2 * dimensions.num_attention_heads * dimensions.head_dim

    def _mix(
        self,
        x_Rh: Tensor,
        delta_Rh: Tensor,
        tables: Tensor,
        cache: AttentionBuffers,
        last: bool,
        reads_N: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        w = self.w
        x_Rh, normed_Rh = add_rms_norm(x_Rh, delta_Rh, w.norm_h, self.eps)
        if last:
            kv_proj = _project(normed_Rh, w.in_proj, w.in_lora, self.linear, slice(self.q_columns, None))
            kv_offset = 0
            if reads_N is None:
                q_proj = kv_proj.new_empty(0, self.q_columns)
            else:
                x_Rh, normed_Rh = (_picked(t, tables, reads_N) for t in (x_Rh, normed_Rh))
                q_proj = _project(normed_Rh, w.in_proj, w.in_lora, self.linear, slice(self.q_columns))
        else:
            q_proj = kv_proj = _project(normed_Rh, w.in_proj, w.in_lora, self.linear)
            kv_offset = self.q_columns
        q, k, v = attention_prepare(
            q_proj, kv_proj, w.q_norm, w.k_norm, self.rope, cache.k_cache, cache.v_cache, tables,
            self.eps, kv_offset, last,
        )  # fmt: skip
        if last and reads_N is None:
            return x_Rh, k
        o = attention(q, q_proj, cache.k_cache, cache.v_cache, k, v, tables, self.head_dim, last)
        return x_Rh, _project(o, w.out_proj, w.out_lora, self.linear)


class Backbone:
    """Tokens in (through the tables), final hidden states of the read rows out."""

    def __init__(
        self, weights: Weights, dimensions: ModelDimensions, linear: Linear, *, compile_layers: bool = False
    ) -> None:
        self.weights, self.dimensions, self.compile_layers = weights, dimensions, compile_layers
        self.layers = [
            GdnLayer(w, dimensions, linear)
            if isinstance(w, GdnWeights)
            else AttentionLayer(w, dimensions, weights.rope, linear)
            for w in weights.layers
        ]
        self._forwards: dict[type[_Layer], Region] = dict.fromkeys((GdnLayer, AttentionLayer), _Layer.forward)
        if compile_layers:
            key = (dimensions, weights.embedding.dtype, weights.embedding.device, linear)
            self._forwards = {kind: compiled(_Layer.forward, (kind, *key)) for kind in self._forwards}

    def forward(self, tables: Tensor, rows: int, reads: int, buffers: list[LayerBuffers]) -> Tensor:
        """One pass over `rows` packed rows (a rung); final-norm hidden states [reads, h] of the first `reads` reads."""
        x_Rh: Tensor = take_rows(self.weights.embedding, tables, ROW_TOKEN, rows)
        delta_Rh = torch.zeros_like(x_Rh)
        reads_N = tables.new_empty(reads) if reads else None
        for i, layer in enumerate(self.layers):
            last = i == len(self.layers) - 1
            if self.compile_layers:
                dynamic_rows(x_Rh, delta_Rh, reads_N, *vars(buffers[i]).values())
            x_Rh, delta_Rh = self._forwards[type(layer)](
                layer, x_Rh, delta_Rh, tables, buffers[i], last, reads_N if last else None
            )
        if reads_N is None:
            return x_Rh[:0]
        hidden_Nh: Tensor = add_rms_norm(x_Rh, delta_Rh, self.weights.norm_h, self.dimensions.rms_norm_eps)[1]
        return hidden_Nh
