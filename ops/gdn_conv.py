"""Everything between the input projection of Gated DeltaNet and its delta rule, in one launch.

Legend: R packed rows, C = 2 Kd + Vd convolved channels [q | k | v], Hk/Hv key/value heads, Kd = Hk * dk, Vd = Hv * dv,
P projection columns [q | k | v | z Vd | b Hv | a Hv | padding].
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from ops.checks import (
    STORAGE,
    VECTOR_BYTES,
    check_at_least,
    check_at_most,
    check_multiple,
    check_row_pitch,
    check_separate,
    check_tables,
    check_tensor,
)
from ops.cpu import by_row_tiles, cpu_kernel
from ops.sizes import CHUNK, CONV_HISTORY, NORM_EPS, ConvSizes
from ops.tables import (
    MAX_ROWS,
    NUM_ROWS,
    NUM_SEGMENTS,
    PACKED,
    SEG_CONV_OWN,
    SEG_CONV_QUESTION,
    SEG_CONV_REQUEST,
    SEG_LENGTH,
    SEG_ROW,
    SEG_SLOT_WRITE,
    SEG_START,
    HostTables,
    virtual_rows,
)


@torch.library.custom_op("forkgraph::gdn_conv", mutates_args=("history", "tail_kv", "tail_gates"), device_types="cuda")
def gdn_conv(
    proj: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    tables: Tensor,
    history: Tensor,
    tail_kv: Tensor,
    tail_gates: Tensor,
) -> tuple[Tensor, Tensor]:
    """Convolution with SiLU, gates and norm scalars of every row; history and tail of every segment that keeps them.

    proj [R, P] and conv_weight [C, 4] share one storage dtype (bfloat16 or float32); a_log, dt_bias [Hv] may be float32
    in any model. Written: history [slots, 3, C] and tail_kv [slots, 64, Kd + Vd] in storage dtype, tail_gates
    [slots, 64, 2 Hv + Hk] in float32. Returns (qkv [R, C] = silu(conv) rounded once, gates [R, 2 Hv + 2 Hk] float32):

        g [Hv]        -exp(a_log) * softplus(a + dt_bias), natural logarithm of the decay
        beta [Hv]     sigmoid(b) rounded to storage dtype
        k_rnorm [Hk]  rsqrt(sum(k^2) + 1e-6) of the rounded key head
        q_rnorm [Hk]  the same of the query head, times dk^-0.5

    A segment with a slot leaves there its last three inputs (zeros before position 0) and its own rows of the chunk
    that is open at its end, row p at p % 64. Raises TypeError for a dtype, ValueError for a shape, stride, alignment,
    device or shared memory.
    """
    from ops.kernels.gdn_conv import launch_gdn_conv

    sizes = _check(proj, conv_weight, a_log, dt_bias, tables, history, tail_kv, tail_gates)
    return launch_gdn_conv(proj, conv_weight, a_log, dt_bias, tables, history, tail_kv, tail_gates, sizes)


@cpu_kernel("gdn_conv")
def _cpu(
    proj: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    tables: Tensor,
    history: Tensor,
    tail_kv: Tensor,
    tail_gates: Tensor,
) -> tuple[Tensor, Tensor]:
    n = _check(proj, conv_weight, a_log, dt_bias, tables, history, tail_kv, tail_gates)
    host = HostTables.of(tables)
    rows = host.count(NUM_ROWS)
    check_at_most("gdn_conv", "the number of rows in tables", rows, proj.shape[0])

    # taps[j] holds input p - 3 + j of the row at position p.
    taps = [proj.new_empty(rows, n.channels) for _ in range(CONV_HISTORY + 1)]
    kept = []
    for s in range(host.count(NUM_SEGMENTS)):
        fields = host.segment(s)
        start, length, row = fields[SEG_START], fields[SEG_LENGTH], fields[SEG_ROW]
        positions = np.arange(start - CONV_HISTORY, start + length, dtype=np.int64)
        index = virtual_rows(positions, fields, SEG_CONV_REQUEST, SEG_CONV_QUESTION, SEG_CONV_OWN)
        inputs = _gather(positions, index, history.view(-1, n.channels), proj[:, : n.channels])
        for j, tap in enumerate(taps):
            tap[row : row + length] = inputs[j : j + length]
        kept.append(inputs[-CONV_HISTORY:])

    qkv = proj.new_zeros(proj.shape[0], n.channels)
    qkv[:rows] = _convolve(taps, conv_weight)
    gates = proj.new_zeros(proj.shape[0], n.gates, dtype=torch.float32)
    gates[:rows] = _gates(proj[:rows], qkv[:rows], a_log, dt_bias, n)

    for s in range(host.count(NUM_SEGMENTS)):
        fields = host.segment(s)
        slot = fields[SEG_SLOT_WRITE]
        if slot < 0:
            continue
        history[slot] = kept[s]
        end = fields[SEG_START] + fields[SEG_LENGTH]
        first = max(fields[SEG_START], end - end % CHUNK)
        own = slice(fields[SEG_ROW] + first - fields[SEG_START], fields[SEG_ROW] + fields[SEG_LENGTH])
        open_rows = slice(first % CHUNK, first % CHUNK + end - first)
        tail_kv[slot, open_rows] = qkv[own, n.keys :]
        tail_gates[slot, open_rows] = gates[own, : n.tail_gates]
    return qkv, gates


@gdn_conv.register_fake
def _fake(
    proj: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    tables: Tensor,
    history: Tensor,
    tail_kv: Tensor,
    tail_gates: Tensor,
) -> tuple[Tensor, Tensor]:
    n = ConvSizes.of(proj, conv_weight, a_log, tail_kv, tail_gates)
    rows = proj.shape[0]
    return proj.new_empty(rows, n.channels), proj.new_empty(rows, n.gates, dtype=torch.float32)


def _gather(positions: npt.NDArray[np.int64], index: npt.NDArray[np.int64], snapshot: Tensor, packed: Tensor) -> Tensor:
    """Virtual rows of one segment's path: [len(positions), C], zeros where the position is negative."""
    out = packed.new_zeros(len(positions), packed.shape[1])
    in_pass = (positions >= 0) & (index >= PACKED)
    before = (positions >= 0) & (index < PACKED)
    out[torch.from_numpy(in_pass)] = packed[torch.from_numpy(index[in_pass] - PACKED)]
    out[torch.from_numpy(before)] = snapshot[torch.from_numpy(index[before])]
    return out


def _convolve(taps: list[Tensor], conv_weight: Tensor) -> Tensor:
    w = conv_weight.float().t().contiguous()

    def tile(*x: Tensor) -> tuple[Tensor]:
        total = x[0].float() * w[0]
        for j in range(1, len(x)):
            total = total + x[j].float() * w[j]
        return (F.silu(total).to(x[0].dtype),)

    return by_row_tiles(tile, *taps)[0]


def _gates(proj: Tensor, qkv: Tensor, a_log: Tensor, dt_bias: Tensor, n: ConvSizes) -> Tensor:
    decay, bias = -torch.exp(a_log.float()), dt_bias.float()

    def value_heads(b: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        beta = torch.sigmoid(b.float()).to(proj.dtype).float()
        return decay * F.softplus(a.float() + bias), beta

    def norms(heads: Tensor) -> tuple[Tensor]:
        return (torch.rsqrt(heads.float().square().sum(-1) + NORM_EPS),)

    first = n.channels + n.values
    b, a = proj[:, first : first + n.value_heads], proj[:, first + n.value_heads : first + 2 * n.value_heads]
    g, beta = by_row_tiles(value_heads, b, a)
    # A tile row is one head of one row: every reduction gives a full tile of scalars.
    (rnorm,) = by_row_tiles(norms, qkv[:, : 2 * n.keys].reshape(-1, n.key_dim))
    by_head = rnorm.view(-1, 2 * n.key_heads)
    q_rnorm, k_rnorm = by_head[:, : n.key_heads] * n.key_dim**-0.5, by_head[:, n.key_heads :]
    return torch.cat([g, beta, k_rnorm, q_rnorm], dim=1)


def gdn_conv_reference(
    proj: Tensor, conv_weight: Tensor, a_log: Tensor, dt_bias: Tensor, values: int
) -> tuple[Tensor, Tensor, Tensor]:
    """One whole path from position 0, row by row and tap by tap, in float64 and not rounded; `values` is Vd.

    Returns (silu(conv) [T, C], g [T, Hv], beta [T, Hv]); norm scalars depend on rounded rows: `rnorm_reference`.
    """
    channels, heads = conv_weight.shape[0], a_log.shape[0]
    inputs, w = proj[:, :channels].double(), conv_weight.double()
    conv = torch.zeros_like(inputs)
    for t in range(len(proj)):
        for j in range(CONV_HISTORY + 1):
            source = t - CONV_HISTORY + j
            if source >= 0:
                conv[t] += w[:, j] * inputs[source]
    b = proj[:, channels + values : channels + values + heads].double()
    x = proj[:, channels + values + heads : channels + values + 2 * heads].double() + dt_bias.double()
    softplus = x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))
    return conv / (1.0 + torch.exp(-conv)), -torch.exp(a_log.double()) * softplus, 1.0 / (1.0 + torch.exp(-b))


def rnorm_reference(heads: Tensor) -> Tensor:
    """1 / sqrt(sum of squares + 1e-6) over the last dimension, in float64."""
    return 1.0 / torch.sqrt(heads.double().square().sum(-1) + NORM_EPS)


def _check(
    proj: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    tables: Tensor,
    history: Tensor,
    tail_kv: Tensor,
    tail_gates: Tensor,
) -> ConvSizes:
    op, device, dtype = "gdn_conv", proj.device, proj.dtype
    check_tensor(op, "proj", proj, (None, None), STORAGE, device)
    check_row_pitch(op, "proj", proj)
    check_at_most(op, "the number of rows of proj", proj.shape[0], MAX_ROWS)
    check_tensor(op, "conv_weight", conv_weight, (None, CONV_HISTORY + 1), dtype, device)
    check_tensor(op, "a_log", a_log, (None,), STORAGE, device)
    check_tensor(op, "dt_bias", dt_bias, tuple(a_log.shape), STORAGE, device)
    check_tables(op, tables, device)
    slots = history.shape[0]
    check_tensor(op, "history", history, (None, CONV_HISTORY, conv_weight.shape[0]), dtype, device)
    check_tensor(op, "tail_kv", tail_kv, (slots, CHUNK, None), dtype, device)
    check_tensor(op, "tail_gates", tail_gates, (slots, CHUNK, None), torch.float32, device)
    check_separate(op, proj=proj, history=history, tail_kv=tail_kv, tail_gates=tail_gates)
    check_at_least(op, "the number of value heads (a_log)", a_log.shape[0], 1)
    check_at_least(op, "the number of key heads (tail_gates)", tail_gates.shape[2] - 2 * a_log.shape[0], 1)
    n = ConvSizes.of(proj, conv_weight, a_log, tail_kv, tail_gates)
    check_multiple(op, "a key head (key columns / key heads)", n.key_dim, VECTOR_BYTES // proj.element_size())
    if n.key_dim & (n.key_dim - 1):
        raise ValueError(f"{op}: a key head has {n.key_dim} columns, wants a power of two; pad the heads")
    check_multiple(op, "the number of value columns", n.values, n.key_dim)
    if 2 * n.keys + n.values != n.channels:
        raise ValueError(
            f"{op}: {n.channels} channels are not {n.key_heads} key heads twice and {n.value_heads} value heads; "
            "check conv_weight, a_log, tail_kv and tail_gates against each other"
        )
    check_at_least(op, "the number of columns of proj", n.proj, n.channels + n.values + 2 * n.value_heads)
    return n
