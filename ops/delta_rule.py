"""The gated delta rule over packed segments of a prefix tree: operator, CPU kernel and float64 reference.

Per value head, with key head v // (Hv / Hk), scaled keys k and queries q, log decay g and step beta, the state S
[dk, dv] follows S = exp(g) S; S += k (beta (v - k^T S)); o = q^T S. Kernels evaluate it in chunks of 64 rows anchored
at absolute multiples of 64. With the prefix sum G of g inside a chunk and D_ij = exp(G_i - G_j) for j <= i, else 0:

    A_ij = beta_i (k_i . k_j) D_ij for j < i
    V'   = (I + A)^-1 beta (V - exp(G) K S)
    O    = exp(G) Q S + ((Q K^T) o D) V'
    S    = exp(G_63) S + K^T (exp(G_63 - G) V')        after a complete chunk only

A chunk that a segment's parent left open is computed again from its first row, whose keys, values and gates come from
the parent's tail or packed rows; so the split of a path into segments changes no bit of any row. A log decay below
LEAST_LOG_DECAY, -inf too, counts as that. A row of NaN reaches its own segment from its chunk on and what continues it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.checks import STORAGE, check_at_least, check_at_most, check_separate, check_tables, check_tensor
from ops.cpu import cpu_kernel
from ops.sizes import CHUNK, COLUMN_UNIT, LEAST_LOG_DECAY, DeltaSizes
from ops.tables import (
    MAX_ROWS,
    NUM_ROWS,
    NUM_SEGMENTS,
    PACKED,
    SEG_CHUNK_OWN,
    SEG_CHUNK_QUESTION,
    SEG_CHUNK_REQUEST,
    SEG_LENGTH,
    SEG_ROW,
    SEG_START,
    SEG_STATE_READ,
    SEG_STATE_WRITE,
    HostTables,
    virtual_rows,
)


@torch.library.custom_op("forkgraph::delta_rule", mutates_args=("states",), device_types="cuda")
def delta_rule(
    qkv: Tensor, gates: Tensor, tail_kv: Tensor, tail_gates: Tensor, states: Tensor, tables: Tensor
) -> Tensor:
    """Outputs of every row; states at the last chunk border before each segment's end.

    Hk/Hv key/value heads of dk/dv columns; R packed rows.

        qkv         [R, 2 Hk dk + Hv dv]          q | k | v after the convolution, bfloat16 or float32
        gates       [R, 2 Hv + 2 Hk]              float32: log decay | beta | 1 / |k| | dk^-0.5 / |q|
        tail_kv     [slots, 64, Hk dk + Hv dv]    k | v of the chunk that a finished prefix left open, dtype of qkv
        tail_gates  [slots, 64, 2 Hv + Hk]        the first columns of its gates
        states      [state slots, Hv, dk, dv]     float32; slot SEG_STATE_READ is read (-1: zeros), slot
                                                  SEG_STATE_WRITE written (-1: none), internal segments before leaves
        tables      the block of ops.tables

    Returns [R, Hv dv] in the dtype of qkv. Raises TypeError for a dtype, ValueError for a shape, stride, alignment,
    device or shared memory; on CUDA head sizes are powers of two from 16 on.
    """
    from ops.kernels.delta_rule import launch_delta_rule

    n = _check(qkv, gates, tail_kv, tail_gates, states, tables)
    for name, size in (("key", n.key_dim), ("value", n.value_dim)):
        if size < COLUMN_UNIT or size & (size - 1):
            raise ValueError(f"delta_rule: a {name} head has {size} columns, wants a power of two from {COLUMN_UNIT}")
    return launch_delta_rule(qkv, gates, tail_kv, tail_gates, states, tables, n)


@delta_rule.register_fake
def _fake(qkv: Tensor, gates: Tensor, tail_kv: Tensor, tail_gates: Tensor, states: Tensor, tables: Tensor) -> Tensor:
    return qkv.new_empty(qkv.shape[0], DeltaSizes.of(tail_gates, states).values)


@cpu_kernel("delta_rule")
def _cpu(qkv: Tensor, gates: Tensor, tail_kv: Tensor, tail_gates: Tensor, states: Tensor, tables: Tensor) -> Tensor:
    n = _check(qkv, gates, tail_kv, tail_gates, states, tables)
    host = HostTables.of(tables)
    check_at_most("delta_rule", "the number of rows in tables", host.count(NUM_ROWS), qkv.shape[0])
    out = qkv.new_zeros(qkv.shape[0], n.values)
    tail_rows = (tail_kv.flatten(0, 1), tail_gates.flatten(0, 1))
    for s in range(host.count(NUM_SEGMENTS)):
        fields = host.segment(s)
        start, end = fields[SEG_START], fields[SEG_START] + fields[SEG_LENGTH]
        read, write = fields[SEG_STATE_READ], fields[SEG_STATE_WRITE]
        state = states[read].clone() if read >= 0 else states.new_zeros(states.shape[1:])
        for first in range(start - start % CHUNK, end, CHUNK):
            own_first, own_end = max(first, start), min(first + CHUNK, end)
            row = fields[SEG_ROW] + own_first - start
            own = slice(row, row + own_end - own_first)
            q, kv, gate = _chunk_rows(qkv, gates, *tail_rows, fields, first, own_first, own, n)
            o, next_state = _chunk(q, kv, gate, state, n)
            out[own] = o[own_first - first : own_end - first].to(out.dtype)
            if own_end == first + CHUNK:
                state = next_state
        if write >= 0:
            states[write] = state
    return out


def _chunk_rows(
    qkv: Tensor,
    gates: Tensor,
    tail_kv: Tensor,
    tail_gates: Tensor,
    fields: tuple[int, ...],
    first: int,
    own_first: int,
    own: slice,
    n: DeltaSizes,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k|v and gates [64, ...] of the chunk at position `first` in float32; zeros where the segment has no row."""
    q = gates.new_zeros(CHUNK, n.keys)
    kv = gates.new_zeros(CHUNK, n.keys + n.values)
    gate = gates.new_zeros(CHUNK, gates.shape[1])
    own_at = slice(own_first - first, own_first - first + own.stop - own.start)
    q[own_at] = qkv[own, : n.keys].float()
    kv[own_at] = qkv[own, n.keys :].float()
    gate[own_at] = gates[own]
    before = torch.arange(first, own_first, dtype=torch.int64, device=gates.device)
    spaces = (SEG_CHUNK_REQUEST, SEG_CHUNK_QUESTION, SEG_CHUNK_OWN)
    rows = torch.from_numpy(virtual_rows(before.numpy(), fields, *spaces))
    in_pass = rows >= PACKED
    for mask, source_kv, source_gates, row in (
        (in_pass, qkv[:, n.keys :], gates, rows - PACKED),
        (~in_pass, tail_kv, tail_gates, rows),
    ):
        at = before[mask] - first
        kv[at] = source_kv[row[mask]].float()
        gate[at, : n.tail_gates] = source_gates[row[mask], : n.tail_gates]
    return q, kv, gate


def _chunk(q: Tensor, kv: Tensor, gate: Tensor, state: Tensor, n: DeltaSizes) -> tuple[Tensor, Tensor]:
    """Outputs [64, Hv dv] and the state behind a complete chunk, in float32.

    Every tensor has one shape whatever the segments, so that a row's bits depend on its path alone.
    """

    def heads(rows: Tensor, count: int) -> Tensor:
        """[64, count d] -> [count, 64, d]."""
        return rows.reshape(CHUNK, count, -1).transpose(0, 1).contiguous()

    group = n.value_heads // n.key_heads
    counts = (n.value_heads, n.value_heads, n.key_heads, n.key_heads)
    log_decay, beta, k_norm, q_norm = (x[:, :, None] for x in torch.split_with_sizes(gate.t().contiguous(), counts))
    k = (heads(kv[:, : n.keys], n.key_heads) * k_norm).repeat_interleave(group, 0)
    q = (heads(q, n.key_heads) * q_norm).repeat_interleave(group, 0)
    v = heads(kv[:, n.keys :], n.value_heads)
    total = log_decay.clamp(min=LEAST_LOG_DECAY).cumsum(1)
    future = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=gate.device).triu(1)
    decay = (total - total.transpose(1, 2)).masked_fill(future, -torch.inf).exp()
    carried = total.exp()
    a = beta * torch.bmm(k, k.transpose(1, 2)) * decay  # its diagonal is not read
    change = beta * (v - carried * torch.bmm(k, state))
    change = torch.linalg.solve_triangular(a, change, upper=False, unitriangular=True)
    o = carried * torch.bmm(q, state) + torch.bmm(torch.bmm(q, k.transpose(1, 2)) * decay, change)
    kept = decay[:, CHUNK - 1, :, None]
    next_state = carried[:, CHUNK - 1 :] * state + torch.bmm(k.transpose(1, 2), kept * change)
    return o.transpose(0, 1).reshape(CHUNK, n.values), next_state


def _check(
    qkv: Tensor, gates: Tensor, tail_kv: Tensor, tail_gates: Tensor, states: Tensor, tables: Tensor
) -> DeltaSizes:
    op, device = "delta_rule", qkv.device
    check_tensor(op, "states", states, (None, None, None, None), torch.float32, device)
    check_tensor(op, "tail_gates", tail_gates, (None, CHUNK, None), torch.float32, device)
    n = DeltaSizes.of(tail_gates, states)
    check_at_least(op, "the number of key heads (tail_gates)", n.key_heads, 1)
    if n.value_heads % n.key_heads:
        raise ValueError(f"{op}: {n.value_heads} value heads do not share {n.key_heads} key heads; check tail_gates")
    check_tensor(op, "qkv", qkv, (None, 2 * n.keys + n.values), STORAGE, device)
    check_at_most(op, "the number of rows of qkv", qkv.shape[0], MAX_ROWS)
    check_tensor(op, "gates", gates, (qkv.shape[0], n.tail_gates + n.key_heads), torch.float32, device)
    check_tensor(op, "tail_kv", tail_kv, (tail_gates.shape[0], CHUNK, n.keys + n.values), qkv.dtype, device)
    check_tables(op, tables, device)
    check_separate(op, qkv=qkv, gates=gates, tail_kv=tail_kv, tail_gates=tail_gates, states=states)
    return n


def delta_rule_reference(
    qkv_TC: Tensor,
    gates: Tensor,
    *,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One path, token by token in float64: outputs [T, Hv, dv] and the state [Hv, dk, dv] after its last row.

    `qkv_TC` [T, 2*Hk*dk + Hv*dv] and `gates` [T, 2*Hv + 2*Hk] are rows as `delta_rule` takes them.
    """
    rows, group = qkv_TC.shape[0], value_heads // key_heads
    keys = key_heads * key_dim
    values = qkv_TC.shape[1] - 2 * keys
    q, k, v = torch.split_with_sizes(qkv_TC.double(), (keys, keys, values), 1)
    counts = (value_heads, value_heads, key_heads, key_heads)
    log_decay, beta, k_norm, q_norm = torch.split_with_sizes(gates.double(), counts, 1)
    q = (q.view(rows, key_heads, key_dim) * q_norm[:, :, None]).repeat_interleave(group, 1)
    k = (k.view(rows, key_heads, key_dim) * k_norm[:, :, None]).repeat_interleave(group, 1)
    v = v.view(rows, value_heads, values // value_heads)
    state = v.new_zeros(value_heads, key_dim, v.shape[2]) if initial_state is None else initial_state.double()
    out = torch.empty_like(v)
    for i in range(rows):
        state = log_decay[i].exp()[:, None, None] * state
        change = beta[i, :, None] * (v[i] - torch.einsum("hk,hkv->hv", k[i], state))
        state = state + k[i, :, :, None] * change[:, None, :]
        out[i] = torch.einsum("hk,hkv->hv", q[i], state)
    return out, state
