"""From a projection to attention's inputs: head norms, rotary positions, keys and values put where they live.

Shape letters: N query rows, R packed rows, H query heads, Hkv key/value heads, d head size, rot rotated dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.checks import (
    STORAGE,
    check_at_least,
    check_head_size,
    check_multiple,
    check_separate,
    check_tables,
    check_tensor,
)
from ops.cpu import by_row_tiles, cpu_kernel
from ops.sizes import COLUMN_UNIT, num_query_heads
from ops.tables import NUM_READS, NUM_ROWS, ROW_POSITION, ROW_SEGMENT, SEG_KV_WRITE, HostTables

_OP = "attention_prepare"


@torch.library.custom_op("forkgraph::attention_prepare", mutates_args=("k_cache", "v_cache"), device_types="cuda")
def attention_prepare(
    q_proj: Tensor,
    kv_proj: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    rope: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    eps: float,
    kv_offset: int,
    reads: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normed and rotated q [N, H * d] and k [R, Hkv * d], and v [R, Hkv * d], in the storage dtype.

    q_proj [N, *] holds per head [query d | gate d]; kv_proj [R, *] holds [k | v] from column `kv_offset` on. One fused
    product serves as both (N = R). With `reads`, query row i stands at the position of packed row READ_ROWS[i].
    q_norm, k_norm [d] are zero-centred RMSNorm weights; rope [positions, rot] has rows [cos rot/2 | sin rot/2] and is
    read at the absolute position. A segment with SEG_KV_WRITE >= 0 puts its keys and values into k_cache, v_cache
    [kv_rows, Hkv * d] at row position + SEG_KV_WRITE, and leaves its rows of k and v undefined.

    A value head that is not finite is put down as zeros under a key of NaN: whoever attends to it reads NaN, and a row
    that masks it is untouched. Raises TypeError for a dtype, ValueError for a shape, stride, alignment or device.
    """
    from ops.kernels.attention_prepare import launch_attention_prepare

    _check(q_proj, kv_proj, q_norm, k_norm, rope, k_cache, v_cache, tables, kv_offset, reads)
    return launch_attention_prepare(
        q_proj, kv_proj, q_norm, k_norm, rope, k_cache, v_cache, tables, eps, kv_offset, reads
    )


@attention_prepare.register_fake
def _(
    q_proj: Tensor,
    kv_proj: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    rope: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    eps: float,
    kv_offset: int,
    reads: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    d = q_norm.shape[0]
    q = q_proj.new_empty(q_proj.shape[0], num_query_heads(q_proj.shape[1], d, kv_offset) * d)
    k = kv_proj.new_empty(kv_proj.shape[0], k_cache.shape[1])
    return q, k, torch.empty_like(k)


@cpu_kernel("attention_prepare")
def _(
    q_proj: Tensor,
    kv_proj: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    rope: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    eps: float,
    kv_offset: int,
    reads: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(q_proj, kv_proj, q_norm, k_norm, rope, k_cache, v_cache, tables, kv_offset, reads)
    d, width = q_norm.shape[0], k_cache.shape[1]
    heads = num_query_heads(q_proj.shape[1], d, kv_offset)
    host = HostTables.of(tables)
    rows = host.count(NUM_ROWS)
    positions = torch.from_numpy(host.rows(ROW_POSITION)).long()
    q_positions = positions[torch.from_numpy(host.read_rows()).long()] if reads else positions
    q_rows = host.count(NUM_READS) if reads else rows

    check_at_least(_OP, "the number of rows of q_proj", q_proj.shape[0], q_rows)
    check_at_least(_OP, "the number of rows of kv_proj", kv_proj.shape[0], rows)

    q = q_proj.new_zeros(q_proj.shape[0], heads * d)
    queries = q_proj[:q_rows, : 2 * heads * d].reshape(-1, heads, 2, d)[:, :, 0]
    q[:q_rows] = _norm_and_rotate(queries, q_norm, rope, q_positions, eps).reshape(q_rows, heads * d)

    keys = kv_proj[:rows, kv_offset : kv_offset + width].reshape(rows, -1, d)
    values = kv_proj[:rows, kv_offset + width : kv_offset + 2 * width].reshape(rows, -1, d)
    finite = values.isfinite().all(-1, keepdim=True)
    keys = torch.where(finite, _norm_and_rotate(keys, k_norm, rope, positions, eps), torch.nan).view(rows, width)
    values = torch.where(finite, values, 0.0).view(rows, width)
    k, v = kv_proj.new_zeros(kv_proj.shape[0], width), kv_proj.new_zeros(kv_proj.shape[0], width)
    offsets = torch.from_numpy(host.field(SEG_KV_WRITE)[host.rows(ROW_SEGMENT)]).long()
    packed = (offsets < 0).nonzero()[:, 0]
    cached = (offsets >= 0).nonzero()[:, 0]
    k[packed], v[packed] = keys[packed], values[packed]
    target = (positions + offsets)[cached]
    k_cache[target], v_cache[target] = keys[cached], values[cached]
    return q, k, v


def _norm_and_rotate(x: Tensor, weight: Tensor, rope: Tensor, positions: Tensor, eps: float) -> Tensor:
    """Heads [R, heads, d] of rows at `positions` [R]."""
    half = rope.shape[1] // 2

    def tile(x: Tensor, angles: Tensor) -> tuple[Tensor]:
        x32 = x.float()
        normed = x32 * torch.rsqrt((x32 * x32).mean(-1, keepdim=True) + eps) * (1 + weight.float())
        normed = normed.to(x.dtype)
        x1, x2, rest = normed[:, :half], normed[:, half : 2 * half], normed[:, 2 * half :]
        cos, sin = angles[:, :half], angles[:, half:]
        return (torch.cat([x1 * cos + -x2 * sin, x2 * cos + x1 * sin, rest], dim=-1),)

    rows, heads, d = x.shape
    angles = rope[positions].repeat_interleave(heads, dim=0)
    return by_row_tiles(tile, x.reshape(rows * heads, d), angles)[0].reshape(rows, heads, d)


def attention_prepare_reference(
    x: Tensor, weight: Tensor, positions: Tensor, theta: float, rot: int, eps: float
) -> Tensor:
    """Float64 norm and rotary of heads x [R, heads, d] at absolute `positions` [R]; nothing is rounded."""
    x = x.double()
    x = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (1 + weight.double())
    frequencies = theta ** (-torch.arange(0, rot, 2, dtype=torch.float64, device=x.device) / rot)
    angles = (positions.double()[:, None] * frequencies)[:, None, :]
    x1, x2 = x[..., : rot // 2], x[..., rot // 2 : rot]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin, x[..., rot:]], dim=-1)


def _check(
    q_proj: Tensor,
    kv_proj: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    rope: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    kv_offset: int,
    reads: bool,
) -> None:
    device, dtype, d = q_proj.device, q_proj.dtype, q_norm.shape[0]
    check_tensor(_OP, "q_proj", q_proj, (None, None), STORAGE, device)
    check_multiple(_OP, "the number of columns of q_proj", q_proj.shape[1], COLUMN_UNIT)
    check_tensor(_OP, "kv_proj", kv_proj, (None if reads else q_proj.shape[0], None), dtype, device)
    check_multiple(_OP, "the number of columns of kv_proj", kv_proj.shape[1], COLUMN_UNIT)
    check_tensor(_OP, "q_norm", q_norm, (None,), dtype, device)
    check_head_size(_OP, d)
    check_tensor(_OP, "k_norm", k_norm, (d,), dtype, device)
    check_tensor(_OP, "rope", rope, (None, None), dtype, device)
    rot = rope.shape[1]
    if rot < 2 or rot > d or rot & (rot - 1):
        raise ValueError(f"{_OP}: rope has {rot} columns, wants a power of two from 2 to the head size {d}")
    check_tensor(_OP, "k_cache", k_cache, (None, None), dtype, device)
    check_multiple(_OP, "the number of columns of k_cache", k_cache.shape[1], d)
    check_tensor(_OP, "v_cache", v_cache, tuple(k_cache.shape), dtype, device)
    check_tables(_OP, tables, device)
    if kv_offset:
        check_multiple(_OP, "kv_offset", kv_offset, 2 * d)
    check_at_least(_OP, "the number of columns of q_proj", q_proj.shape[1], kv_offset or 2 * d)
    check_at_least(_OP, "the number of columns of kv_proj", kv_proj.shape[1], kv_offset + 2 * k_cache.shape[1])
    check_separate(_OP, q_proj=q_proj, k_cache=k_cache, v_cache=v_cache)
    check_separate(_OP, kv_proj=kv_proj, k_cache=k_cache, v_cache=v_cache)
