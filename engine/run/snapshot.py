"""Snapshot buffers: what prefixes leave behind, in device tensors that live with the engine.

Per delta-rule layer: float32 states at chunk borders, tails of open chunks, raw convolution rows. Per attention layer:
keys and values. Slots and rows are handed out by the plan of one request; nothing outlives it. A prefix pass writes its
slots once, and every later pass of the request only reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.load.dimensions import ModelDimensions
from engine.plan.schedule import BufferSizes
from ops.sizes import CHUNK, CONV_HISTORY

_SMALLEST = BufferSizes(kv_rows=2, slots=2, states=2)  # sizes the compiler does not take for constants
_KV_STEP = 1_024  # K/V rows grow in steps, so that slightly longer requests do not reallocate


@dataclass(frozen=True, kw_only=True)
class GdnBuffers:
    """Buffers of one delta-rule layer.

    history [slots, 3, C], tail_kv [slots, 64, Kd + Vd] model dtype; tail_gates [slots, 64, 2 Hv + Hk] and states
    [states, Hv, dk, dv] float32.
    """

    history: Tensor
    tail_kv: Tensor
    tail_gates: Tensor
    states: Tensor


@dataclass(frozen=True, kw_only=True)
class AttentionBuffers:
    """Keys (normed and rotated) and values [kv_rows, Hkv * d] of one attention layer, model dtype."""

    k_cache: Tensor
    v_cache: Tensor


LayerBuffers = GdnBuffers | AttentionBuffers


class SnapshotBuffers:
    """The buffers of all layers; they grow for a larger request than any before and never shrink."""

    def __init__(self, dimensions: ModelDimensions, *, dtype: torch.dtype, device: torch.device) -> None:
        self.dimensions, self.dtype, self.device = dimensions, dtype, device
        self.sizes = BufferSizes()
        self.layers: list[LayerBuffers] = []
        self.reserve(self.sizes)

    def sizes_for(self, sizes: BufferSizes) -> BufferSizes:
        """The sizes after `reserve(sizes)`."""
        wanted = self.sizes.union(sizes).union(_SMALLEST)
        if wanted.kv_rows > _SMALLEST.kv_rows:
            wanted = replace(wanted, kv_rows=-(-wanted.kv_rows // _KV_STEP) * _KV_STEP)
        return wanted

    def fits(self, sizes: BufferSizes) -> bool:
        """Whether `reserve` would leave the buffers where they are."""
        return self.sizes_for(sizes) == self.sizes

    def reserve(self, sizes: BufferSizes) -> None:
        """Make room for `sizes`. Contents are not kept: no snapshot is alive."""
        if self.fits(sizes):
            return
        wanted = self.sizes_for(sizes)
        self.drop()  # growing never holds both, and when it fails the next `reserve` starts afresh
        self.layers = [self._allocate(kind, wanted) for kind in self.dimensions.layer_types]
        self.sizes = wanted

    def drop(self) -> None:
        """Give the memory back; the next `reserve` allocates again."""
        self.layers, self.sizes = [], BufferSizes()

    def _allocate(self, kind: str, sizes: BufferSizes) -> LayerBuffers:
        d = self.dimensions

        def zeros(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=self.device)

        if kind == "full_attention":
            width = d.num_key_value_heads * d.head_dim
            return AttentionBuffers(k_cache=zeros(sizes.kv_rows, width), v_cache=zeros(sizes.kv_rows, width))
        hk, hv = d.linear_num_key_heads, d.linear_num_value_heads
        f32 = torch.float32
        return GdnBuffers(
            history=zeros(sizes.slots, CONV_HISTORY, d.conv_dim),
            tail_kv=zeros(sizes.slots, CHUNK, d.key_dim + d.value_dim),
            tail_gates=zeros(sizes.slots, CHUNK, 2 * hv + hk, dtype=f32),
            states=zeros(sizes.states, hv, d.linear_key_head_dim, d.linear_value_head_dim, dtype=f32),
        )

    def tensors(self) -> list[Tensor]:
        """Every buffer, for hashing and accounting."""
        return [t for layer in self.layers for t in vars(layer).values()]

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors())
