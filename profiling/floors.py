"""The least time that a task can take: each input read once, each output written once, or its operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from forwards import Workload

from engine.load.dimensions import ModelDimensions
from ops.sizes import CHUNK

DTYPE = torch.bfloat16
_BYTES, _F32 = DTYPE.itemsize, 4


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The least a task can move and compute."""

    bytes: int
    flops: int = 0


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What the device reaches at best: TB/s of a large copy, reads plus writes, and TFLOP/s of a large product."""

    tbytes: float = 4.3
    tflops: float = 790.0

    def floor_us(self, cost: Cost) -> float:
        """Microseconds that bytes or operations need, whichever need longer. No launch, no latency."""
        return max(cost.bytes / self.tbytes, cost.flops / self.tflops) / 1e6


def chunks(w: Workload) -> tuple[int, int]:
    """Chunks that the candidates' own rows touch, and how many of them are complete and so change a state."""
    first, end = w.prefix // CHUNK, w.prefix + w.length
    return w.candidates * ((end - 1) // CHUNK - first + 1), w.candidates * (end // CHUNK - first)


def pairs(w: Workload) -> int:
    """(query row, key) pairs that attention looks at, per head."""
    return w.candidates * (w.length * w.prefix + w.length * (w.length + 1) // 2)


def delta_rule(d: ModelDimensions, w: Workload) -> Cost:
    """Rows of the pass and of an open tail, the shared state once, and the products of whole 64-row chunks."""
    hk, hv, dk, dv = d.linear_num_key_heads, d.linear_num_value_heads, d.linear_key_head_dim, d.linear_value_head_dim
    row = (d.conv_dim + d.value_dim) * _BYTES + 2 * (hv + hk) * _F32
    tail = w.prefix % CHUNK * ((d.key_dim + d.value_dim) * _BYTES + (2 * hv + hk) * _F32)
    state = hv * dk * dv * _F32 if w.prefix >= CHUNK else 0
    touched, complete = chunks(w)
    scores = 2 * hk * 2 * CHUNK * CHUNK * dk  # K K^T and Q K^T
    values = 2 * hv * 2 * CHUNK * CHUNK * dv  # T V and P V'
    states = hv * 2 * CHUNK * dk * dv  # K S and Q S in every chunk, the update in complete ones
    flops = touched * (scores + values + 2 * states) + complete * states
    return Cost(bytes=w.own_rows * row + tail + state, flops=flops)


def attention(d: ModelDimensions, w: Workload) -> Cost:
    """Queries, gates, results and every key and value once; two products for every (query, key) pair."""
    elements = w.own_rows * (3 * d.query_dim + 2 * d.kv_dim) + w.prefix * 2 * d.kv_dim
    return Cost(bytes=elements * _BYTES, flops=pairs(w) * d.query_dim * 4)


def _rows(of_row: Callable[[ModelDimensions], int]) -> Callable[[ModelDimensions, Workload], Cost]:
    return lambda d, w: Cost(bytes=w.own_rows * of_row(d))


def _gdn_conv(d: ModelDimensions, w: Workload) -> Cost:
    gates = 2 * (d.linear_num_value_heads + d.linear_num_key_heads)
    row = (2 * d.conv_dim + 2 * d.linear_num_value_heads) * _BYTES + gates * _F32
    return Cost(bytes=w.own_rows * row + 4 * d.conv_dim * _BYTES)


OPERATORS: dict[str, Callable[[ModelDimensions, Workload], Cost]] = {
    "delta_rule": delta_rule,
    "attention": attention,
    "attention_prepare": _rows(lambda d: (2 * (d.query_dim + 2 * d.kv_dim) + d.rotary_dim) * _BYTES),
    "add_rms_norm": _rows(lambda d: 4 * d.hidden_size * _BYTES),
    "gdn_conv": _gdn_conv,
    "gated_rms_norm": _rows(lambda d: 3 * d.value_dim * _BYTES),
    "silu_mul": _rows(lambda d: 3 * d.intermediate_size * _BYTES),
    "take_rows": _rows(lambda d: 2 * d.hidden_size * _BYTES),
}
"""Of each operator in the pass that runs the candidates of a workload."""
