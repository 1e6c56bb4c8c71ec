"""The gated delta rule over packed segments of a prefix tree: operator, CPU kernel and float64 reference.

Per value head, with key head v // (Hv / Hk), scaled keys k and queries q, log decay g and step beta, the state S
[dk, dv] follows S = exp(g) S; S += k (beta (v - k^T S)); o = q^T S. Kernels evaluate it in chunks of 64 rows anchored
at absolute multiples of 64. With the prefix sum G of g inside a chunk and D_ij = exp(G_i - G_j) for j <= i, else 0:

    A_ij = beta_i (k_i . k_j) D_ij for j < i
    V'   = (I + A)^-1 beta (V - exp(G) K S)
    O    = exp(G) Q S + ((Q K^T) o D) V'
    S    = exp(G_63) S + K^T (exp(G_63 - G) V')        after a complete chunk only

A chunk that a segment's parent left open is computed again from its first row, whose keys, values and gates come from
the parent's tail or packed rows; so the split of a path into segments changes no bit of any row.
"""

# Shape suffixes: R packed rows, T rows of one path, C columns of q|k|v, K/V columns of keys/values.

from __future__ import annotations

import torch
from torch import Tensor

from ops.tables import (
    CHUNK,
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
    """Outputs [R, Hv*dv] of every segment's rows; states at last chunk borders are read and written in place.

    qkv [R, 2*Hk*dk + Hv*dv]          rows q | k | v after convolution, in storage dtype (bfloat16 or float32)
    gates [R, 2*Hv + 2*Hk]            float32: log decay | beta | 1/norm of k | dk^-0.5/norm of q
    tail_kv [slots, 64, Hk*dk + Hv*dv], tail_gates [slots, 64, 2*Hv + Hk]   open chunks of finished prefixes
    states [state_slots, Hv, dk, dv]  float32; slot SEG_STATE_READ (-1: zeros) in, slot SEG_STATE_WRITE (-1: none) out
    tables                            the int32 block of ops.tables

    Raises TypeError or ValueError for a tensor of another dtype, shape, device or layout.
    """
    from ops.kernels.delta_rule import launch_delta_rule

    return launch_delta_rule(qkv, gates, tail_kv, tail_gates, states, tables)


@delta_rule.register_fake
def _(
    qkv: Tensor, gates: Tensor, tail_kv: Tensor, tail_gates: Tensor, states: Tensor, tables: Tensor
) -> Tensor:
    _, value_heads, _, dv = states.shape
    return qkv.new_empty(qkv.shape[0], value_heads * dv)


@delta_rule.register_kernel("cpu")
def _delta_rule_cpu(
    qkv: Tensor, gates: Tensor, tail_kv: Tensor, tail_gates: Tensor, states: Tensor, tables: Tensor
) -> Tensor:
    """Every tensor operation has one shape, a whole chunk, whatever the segments: row bits depend on the path alone."""
    host = HostTables.of(tables)
    _, value_heads, dk, dv = states.shape
    key_heads = tail_gates.shape[2] - 2 * value_heads
    group, key_columns = value_heads // key_heads, key_heads * dk
    gate_columns = tail_gates.shape[2]
    flat_tail_kv, flat_tail_gates = tail_kv.flatten(0, 1), tail_gates.flatten(0, 1)
    out = qkv.new_zeros(qkv.shape[0], value_heads * dv)
    row_index = torch.arange(CHUNK)
    future = row_index[None, :] > row_index[:, None]

    def heads(rows: Tensor, count: int) -> Tensor:
        """[64, count * d] -> [count, 64, d]."""
        return rows.view(CHUNK, count, -1).transpose(0, 1).contiguous()

    for s in range(host.count(NUM_SEGMENTS)):
        fields = host.segment(s)
        start, end, read = fields[SEG_START], fields[SEG_START] + fields[SEG_LENGTH], fields[SEG_STATE_READ]
        state = states[read].clone() if read >= 0 else states.new_zeros(states.shape[1:])
        for first in range(start - start % CHUNK, end, CHUNK):
            last = min(first + CHUNK, end)
            own = max(first, start)
            packed_row = fields[SEG_ROW] + own - start
            own_in = slice(packed_row, packed_row + last - own)
            own_at = slice(own - first, last - first)

            # Chunk rows, exact zeros where the segment has none.
            q = torch.zeros(CHUNK, key_columns)
            kv = torch.zeros(CHUNK, tail_kv.shape[2])
            gate = torch.zeros(CHUNK, gates.shape[1])
            q[own_at] = qkv[own_in, :key_columns].float()
            kv[own_at] = qkv[own_in, key_columns:].float()
            gate[own_at] = gates[own_in]
            if own > first:
                before = torch.arange(first, own)
                rows = torch.from_numpy(
                    virtual_rows(before.numpy(), fields, SEG_CHUNK_REQUEST, SEG_CHUNK_QUESTION, SEG_CHUNK_OWN)
                )
                packed = rows >= PACKED
                at, source = before[packed] - first, rows[packed] - PACKED
                kv[at] = qkv[source, key_columns:].float()
                gate[at, :gate_columns] = gates[source, :gate_columns]
                at, source = before[~packed] - first, rows[~packed]
                kv[at] = flat_tail_kv[source].float()
                gate[at, :gate_columns] = flat_tail_gates[source]

            columns = gate.t().contiguous()  # [gate columns, 64]
            decay_log, beta, k_scale, q_scale = columns.split((value_heads, value_heads, key_heads, key_heads))
            k = heads(kv[:, :key_columns].contiguous(), key_heads) * k_scale[:, :, None]
            q_heads = heads(q, key_heads) * q_scale[:, :, None]
            v = heads(kv[:, key_columns:].contiguous(), value_heads)

            total = decay_log.cumsum(1)
            decay = (total[:, :, None] - total[:, None, :]).masked_fill(future, -torch.inf).exp()
            carried = total.exp()[:, :, None]
            kk = torch.bmm(k, k.transpose(1, 2)).repeat_interleave(group, 0)
            qk = torch.bmm(q_heads, k.transpose(1, 2)).repeat_interleave(group, 0)
            k_value = k.repeat_interleave(group, 0)
            q_value = q_heads.repeat_interleave(group, 0)
            step = beta[:, :, None]
            change = torch.linalg.solve_triangular(
                step * kk * decay, step * (v - carried * torch.bmm(k_value, state)), upper=False, unitriangular=True
            )
            o = carried * torch.bmm(q_value, state) + torch.bmm(qk * decay, change)
            out[own_in] = o.transpose(0, 1).reshape(CHUNK, -1)[own_at].to(out.dtype)
            if last == first + CHUNK:
                kept = decay[:, CHUNK - 1, :, None]
                state = carried[:, CHUNK - 1 :] * state + torch.bmm(k_value.transpose(1, 2), kept * change)
        if fields[SEG_STATE_WRITE] >= 0:
            states[fields[SEG_STATE_WRITE]] = state
    return out


def delta_rule_reference(
    qkv_TC: Tensor, gates: Tensor, *, key_heads: int, value_heads: int, key_dim: int, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One path, token by token in float64: outputs [T, Hv, dv] and the state [Hv, dk, dv] after its last row.

    `qkv_TC` [T, 2*Hk*dk + Hv*dv] and `gates` [T, 2*Hv + 2*Hk] are rows as `delta_rule` takes them.
    """
    rows, group = qkv_TC.shape[0], value_heads // key_heads
    keys = key_heads * key_dim
    q, k, v = qkv_TC.double().split((keys, keys, qkv_TC.shape[1] - 2 * keys), dim=1)
    decay_log, beta, k_scale, q_scale = gates.double().split((value_heads, value_heads, key_heads, key_heads), dim=1)
    q = (q.view(rows, key_heads, key_dim) * q_scale[:, :, None]).repeat_interleave(group, 1)
    k = (k.view(rows, key_heads, key_dim) * k_scale[:, :, None]).repeat_interleave(group, 1)
    v = v.view(rows, value_heads, v.shape[1] // value_heads)
    state = v.new_zeros(value_heads, key_dim, v.shape[2]) if initial_state is None else initial_state.double()
    out = torch.empty_like(v)
    for t in range(rows):
        state = decay_log[t].exp()[:, None, None] * state
        change = beta[t, :, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], state))
        state = state + k[t, :, :, None] * change[:, None, :]
        out[t] = torch.einsum("hk,hkv->hv", q[t], state)
    return out, state
