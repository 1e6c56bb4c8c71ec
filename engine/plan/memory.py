"""Bytes of an engine on its device, from dimensions alone, before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass, fields

from engine.load.dimensions import ModelDimensions
from engine.plan.schedule import BufferSizes
from ops.sizes import CHUNK
from ops.tables import chunk_capacity

WORKSPACE_BYTES = 96 * 2**20
"""Beside the tensors: 32 MiB of workspace for our own products (`ops.blas`), as much for torch's, and what the
allocator rounds up."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes by purpose. `pass_scratch` is the largest set of activations alive at once in one pass, `results` the final
    hidden states of all reads, `graphs` what captured graphs take, their pool of activations included, `others` what
    other engines on the device hold."""

    weights: int
    snapshots: int
    pass_scratch: int
    results: int
    graphs: int
    workspace: int = WORKSPACE_BYTES
    others: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self))

    @property
    def above_weights(self) -> int:
        return self.total - self.weights - self.others

    def __str__(self) -> str:
        parts = ", ".join(f"{f.name.replace('_', ' ')} {getattr(self, f.name) / 2**30:.2f}" for f in fields(self))
        return f"{self.total / 2**30:.2f} GiB ({parts})"


def plan_memory(
    dimensions: ModelDimensions,
    *,
    dtype_bytes: int,
    rows: int,
    reads: int,
    buffers: BufferSizes,
    graphs_bytes: int = 0,
    pool_rows: int = 0,
    others: int = 0,
) -> MemoryPlan:
    """For `reads` hidden states from passes of up to `rows` rows (a rung) over snapshot buffers of these sizes.

    `graphs_bytes` is the bound on captured graphs, `pool_rows` the rung of the largest of them: the pool that they
    share keeps its activations, and a pass that has no graph yet needs room of its own beside it.
    """
    pool = scratch_bytes(dimensions, pool_rows, dtype_bytes) if pool_rows else 0
    snapshot = dimensions.snapshot_bytes(dtype_bytes)
    return MemoryPlan(
        weights=dimensions.weight_bytes(dtype_bytes).total,
        snapshots=snapshot.buffers(kv_rows=buffers.kv_rows, slots=buffers.slots, states=buffers.states),
        pass_scratch=scratch_bytes(dimensions, rows, dtype_bytes),
        results=reads * dimensions.hidden_size * dtype_bytes,
        graphs=graphs_bytes + pool,
        others=others,
    )


def scratch_bytes(dimensions: ModelDimensions, rows: int, dtype_bytes: int) -> int:
    """The largest set of activations alive at once in a pass of `rows` rows (a rung)."""
    return dimensions.pass_bytes(rows, dtype_bytes) + delta_rule_scratch(dimensions, rows, dtype_bytes)


def delta_rule_scratch(dimensions: ModelDimensions, rows: int, dtype_bytes: int) -> int:
    """The inverse and the scores, 64 x 64 each, of every chunk and value head of one layer."""
    if not dimensions.num_linear_layers:
        return 0
    return chunk_capacity(rows) * dimensions.linear_num_value_heads * 2 * CHUNK * CHUNK * dtype_bytes
