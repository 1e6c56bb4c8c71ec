"""Sizes that operators, their kernels and the planner share. Imports nothing of `ops`, so that all may import it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

CHUNK = 64
"""Rows of a delta-rule chunk; chunks are anchored at absolute multiples of it."""
CONV_HISTORY = 3
"""Rows the width-4 convolution looks back."""
COLUMN_UNIT = 16
"""Columns of a projection, and those before its keys, come in multiples of this; a head has at least as many."""
MAX_GROUP = 8
"""Largest number of query heads per key/value head."""
NORM_EPS = 1e-6
"""Added to the sum of squares of a key or query head; a constant of the model family."""
LEAST_LOG_DECAY = -128.0
"""The delta rule takes a lower log decay for this one. Either multiplies by exactly zero in float32, where e^-104 is
nothing, but in a prefix sum the decays around -1e6 would vanish; with this one 64 rows sum to -8192 at most."""


def num_chunks(start: int, end: int) -> int:
    """Chunks that the positions [start, end) touch, of which there is at least one."""
    return (end - 1) // CHUNK - start // CHUNK + 1


def crosses_border(start: int, end: int) -> bool:
    """Whether the positions [start, end) complete a chunk, and so move the state."""
    return end // CHUNK > start // CHUNK


def num_query_heads(columns: int, head_dim: int, kv_offset: int) -> int:
    """Query and gate columns end where keys begin in a fused product of `columns`, and fill a separate one."""
    return (kv_offset or columns) // (2 * head_dim)


@dataclass(frozen=True)
class ConvSizes:
    """What the shapes of `gdn_conv`'s arguments say about the layer."""

    channels: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    proj: int

    @classmethod
    def of(cls, proj: Tensor, conv_weight: Tensor, a_log: Tensor, tail_kv: Tensor, tail_gates: Tensor) -> ConvSizes:
        channels, value_heads = conv_weight.shape[0], a_log.shape[0]
        key_heads = tail_gates.shape[2] - 2 * value_heads
        keys = channels - tail_kv.shape[2]
        return cls(
            channels=channels,
            key_heads=key_heads,
            value_heads=value_heads,
            key_dim=keys // key_heads,
            value_dim=(channels - 2 * keys) // value_heads,
            proj=proj.shape[1],
        )

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def gates(self) -> int:
        return 2 * self.value_heads + 2 * self.key_heads

    @property
    def tail_gates(self) -> int:
        return 2 * self.value_heads + self.key_heads


@dataclass(frozen=True)
class DeltaSizes:
    """What the shapes of `delta_rule`'s arguments say about the layer."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @classmethod
    def of(cls, tail_gates: Tensor, states: Tensor) -> DeltaSizes:
        _, value_heads, key_dim, value_dim = states.shape
        return cls(tail_gates.shape[2] - 2 * value_heads, value_heads, key_dim, value_dim)

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def tail_gates(self) -> int:
        return 2 * self.value_heads + self.key_heads
