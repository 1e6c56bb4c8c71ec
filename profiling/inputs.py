"""Passes, inputs and floors of operators at real sizes, without a model.

Shape letters: R packed rows (a rung), C convolved channels q|k|v, Hk/Hv key/value heads of the delta rule.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.load.checkpoint import TensorSpec, random_tensor
from engine.load.dimensions import ModelDimensions
from engine.run.snapshot import AttentionBuffers, GdnBuffers
from graphs.rungs import rung
from ops.sizes import CHUNK, CONV_HISTORY
from ops.tables import TABLE_WORDS, SegmentEntry, Source, fill

DTYPE = torch.bfloat16
_BYTES, _F32 = DTYPE.itemsize, 4


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The least a task can move (each input read once, each output written once) and compute."""

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


@dataclass(frozen=True, kw_only=True)
class PassCase:
    """Segments of equal `lengths` behind one snapshot of `prefix` positions: slot 0, state slot 0, K/V rows from 0.

    Without a prefix the segments are whole sequences and nothing is read from the snapshot buffers.
    """

    prefix: int = 0
    lengths: tuple[int, ...]

    @property
    def name(self) -> str:
        """`3,136`, or `255 x 34 behind 3,093`."""
        count, length = len(self.lengths), self.lengths[0]
        own = f"{length:,}" if count == 1 else f"{count} x {length}"
        return f"{own} behind {self.prefix:,}" if self.prefix else own

    @property
    def rows(self) -> int:
        return sum(self.lengths)

    @property
    def rung(self) -> int:
        """R, what the executor would pad this pass to."""
        return rung(self.rows)

    @property
    def pairs(self) -> int:
        """(query row, key) pairs that attention looks at, per head."""
        return sum(n * self.prefix + n * (n + 1) // 2 for n in self.lengths)

    @property
    def chunks(self) -> tuple[int, int]:
        """Chunks that the segments touch, and how many of them are complete and so change a state."""
        touched = [(self.prefix + n - 1) // CHUNK - self.prefix // CHUNK + 1 for n in self.lengths]
        complete = [(self.prefix + n) // CHUNK - self.prefix // CHUNK for n in self.lengths]
        return sum(touched), sum(complete)

    def tables(self, dimensions: ModelDimensions, device: torch.device, *, seed: int = 0) -> Tensor:
        """The pass's block [TABLE_WORDS] with random tokens; the last row of every segment is read."""
        rng = np.random.default_rng(seed)
        source = Source.snapshot(first=0, length=self.prefix, slot=0, kv=0) if self.prefix else None
        entries = [
            SegmentEntry(
                start=self.prefix,
                token_ids=rng.integers(0, dimensions.vocab_size, n, dtype=np.int32),
                request=source,
                state_read=0 if self.prefix >= CHUNK else -1,
                internal=len(self.lengths) == 1,
            )
            for n in self.lengths
        ]
        block = np.zeros(TABLE_WORDS, dtype=np.int32)
        fill(block, entries, [(s, n - 1) for s, n in enumerate(self.lengths)])
        return torch.from_numpy(block).to(device)


def one_sequence(rows: int) -> PassCase:
    return PassCase(lengths=(rows,))


def branches(count: int, length: int, prefix: int) -> PassCase:
    return PassCase(prefix=prefix, lengths=(length,) * count)


def normal(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(*shape, dtype=DTYPE, device=device)


def gate_weights(dimensions: ModelDimensions, device: torch.device) -> tuple[Tensor, Tensor]:
    """(a_log [Hv] float32, dt_bias [Hv]) with the usual start of the delta rule: memories of a few to 1,000 rows."""
    shape = (dimensions.linear_num_value_heads,)
    a_log = random_tensor("a_log", TensorSpec(shape, "a_log"), dtype=torch.float32, device=device, seed=0)
    return a_log, random_tensor("dt_bias", TensorSpec(shape, "dt_bias"), dtype=DTYPE, device=device, seed=0)


def gdn_inputs(dimensions: ModelDimensions, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """What the convolution would hand the delta rule: (qkv [rows, C], gates [rows, 2 Hv + 2 Hk] float32)."""
    d = dimensions
    qkv = torch.nn.functional.silu(normal(rows, d.conv_dim, device=device))
    heads = qkv[:, : 2 * d.key_dim].float().view(rows, 2 * d.linear_num_key_heads, d.linear_key_head_dim)
    q_rnorm, k_rnorm = (heads.square().sum(-1) + 1e-6).rsqrt().chunk(2, dim=1)
    a_log, dt_bias = gate_weights(d, device)
    a, b = normal(2, rows, d.linear_num_value_heads, device=device)
    g = -a_log.exp() * torch.nn.functional.softplus(a.float() + dt_bias.float())
    gates = [g, b.sigmoid().float(), k_rnorm, q_rnorm * d.linear_key_head_dim**-0.5]
    return qkv, torch.cat(gates, dim=1).contiguous()


def gdn_snapshot(dimensions: ModelDimensions, device: torch.device) -> GdnBuffers:
    """One slot of everything a prefix leaves behind in a delta-rule layer; a full tail serves any prefix."""
    d = dimensions
    qkv, gates = gdn_inputs(d, CHUNK, device)
    state = (d.linear_num_value_heads, d.linear_key_head_dim, d.linear_value_head_dim)
    return GdnBuffers(
        history=normal(1, CONV_HISTORY, d.conv_dim, device=device),
        tail_kv=qkv[None, :, d.key_dim :].contiguous(),
        tail_gates=gates[None, :, : 2 * d.linear_num_value_heads + d.linear_num_key_heads].contiguous(),
        states=0.1 * torch.randn(1, *state, device=device),
    )


def attention_snapshot(dimensions: ModelDimensions, prefix: int, device: torch.device) -> AttentionBuffers:
    """Keys and values of `prefix` positions; one row when there is no prefix."""
    rows, width = max(prefix, 1), dimensions.kv_dim
    return AttentionBuffers(k_cache=normal(rows, width, device=device), v_cache=normal(rows, width, device=device))


def delta_rule_cost(dimensions: ModelDimensions, case: PassCase) -> Cost:
    """Rows of the pass and of an open tail, the shared state once, and the products of whole 64-row chunks."""
    d = dimensions
    hk, hv, dk, dv = d.linear_num_key_heads, d.linear_num_value_heads, d.linear_key_head_dim, d.linear_value_head_dim
    row = (d.conv_dim + d.value_dim) * _BYTES + 2 * (hv + hk) * _F32
    tail = case.prefix % CHUNK * ((d.key_dim + d.value_dim) * _BYTES + (2 * hv + hk) * _F32)
    state = hv * dk * dv * _F32 if case.prefix >= CHUNK else 0
    touched, complete = case.chunks
    scores = 2 * hk * 2 * CHUNK * CHUNK * dk  # K K^T and Q K^T
    values = 2 * hv * 2 * CHUNK * CHUNK * dv  # T V and P V'
    states = hv * 2 * CHUNK * dk * dv  # K S and Q S in every chunk, the update in complete ones
    flops = touched * (scores + values + 2 * states) + complete * states
    return Cost(bytes=case.rows * row + tail + state, flops=flops)


def attention_cost(dimensions: ModelDimensions, case: PassCase) -> Cost:
    """Queries, gates, results and every key and value once; two products for every (query, key) pair."""
    d = dimensions
    elements = case.rows * (3 * d.query_dim + 2 * d.kv_dim) + case.prefix * 2 * d.kv_dim
    return Cost(bytes=elements * _BYTES, flops=case.pairs * d.query_dim * 4)
