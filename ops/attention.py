"""Gated causal attention of packed segments over their whole paths.

Shape letters: N query rows, R packed rows, H query heads, Hkv key/value heads, d head size, T tokens of one path.
"""

from __future__ import annotations

from collections import defaultdict
from math import sqrt

import numpy as np
import torch
from torch import Tensor

from ops.checks import STORAGE, check_at_least, check_head_size, check_multiple, check_tables, check_tensor
from ops.cpu import cpu_kernel
from ops.sizes import COLUMN_UNIT
from ops.tables import (
    PACKED,
    ROW_POSITION,
    ROW_SEGMENT,
    SEG_KV_OWN,
    SEG_KV_QUESTION,
    SEG_KV_REQUEST,
    SEG_LENGTH,
    SEG_START,
    HostTables,
    virtual_rows,
)

_OP = "attention"
_TILE = 64


@torch.library.custom_op("forkgraph::attention", mutates_args=(), device_types="cuda")
def attention(
    q: Tensor,
    q_proj: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Tensor,
    head_dim: int,
    reads: bool,
) -> Tensor:
    """softmax(q k^T / sqrt(d)) v times sigmoid(gate), causal over the path of each row's segment -> [N, H * d].

    q [N, H * d] is normed and rotated; q_proj [N, *] holds per head [query d | gate d]. Position p of a path is a row
    of k_cache, v_cache [kv_rows, Hkv * d] or of k, v [R, Hkv * d] (the kv virtual rows of `tables`). With `reads`,
    query row i is packed row READ_ROWS[i]. Float32 inside, one rounding to the storage dtype.

    Raises TypeError for a dtype, ValueError for a shape, stride, alignment or device.
    """
    from ops.kernels.attention import launch_attention

    _check(q, q_proj, k_cache, v_cache, k, v, tables, head_dim)
    return launch_attention(q, q_proj, k_cache, v_cache, k, v, tables, head_dim, reads)


@attention.register_fake
def _(
    q: Tensor,
    q_proj: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Tensor,
    head_dim: int,
    reads: bool,
) -> Tensor:
    return torch.empty_like(q)


@cpu_kernel("attention")
def _(
    q: Tensor,
    q_proj: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Tensor,
    head_dim: int,
    reads: bool,
) -> Tensor:
    _check(q, q_proj, k_cache, v_cache, k, v, tables, head_dim)
    d, heads = head_dim, q.shape[1] // head_dim
    host = HostTables.of(tables)
    positions, segments = host.rows(ROW_POSITION), host.rows(ROW_SEGMENT)
    packed_rows = host.read_rows() if reads else np.arange(len(positions))
    check_at_least(_OP, "the number of rows of q", q.shape[0], len(packed_rows))
    check_at_least(_OP, "the number of rows of k", k.shape[0], len(positions))

    # A row stands at place p % 64 of the 64-row tile of its position, and that tile walks key tiles 0 .. p // 64: the
    # shapes of every step and the row's place in them depend on p alone.
    tiles: defaultdict[int, defaultdict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for row, packed_row in enumerate(packed_rows):
        tiles[int(segments[packed_row])][int(positions[packed_row]) // _TILE].append(row)

    out = torch.zeros_like(q)
    for s, segment_tiles in tiles.items():
        keys, values = (_path(cache, packed, host.segment(s), d) for cache, packed in ((k_cache, k), (v_cache, v)))
        for tile, tile_rows in segment_tiles.items():
            source = torch.tensor(tile_rows, dtype=torch.int64, device=q.device)
            place = torch.from_numpy(positions[packed_rows[tile_rows]] % _TILE).long()
            queries, gates = q.new_zeros(_TILE, heads, d), q.new_zeros(_TILE, heads, d)
            queries[place] = q[source].view(-1, heads, d)
            gates[place] = q_proj[source, : 2 * heads * d].view(-1, heads, 2, d)[:, :, 1]
            o = _attend(queries.float(), keys, values, tile) * torch.sigmoid(gates.float())
            out[source] = o[place].to(q.dtype).view(-1, heads * d)
    return out


def _path(cache: Tensor, packed: Tensor, fields: tuple[int, ...], d: int) -> Tensor:
    """Keys or values of one path [Hkv, T up to a multiple of 64, d] in float32, zeros at positions not on it."""
    length = fields[SEG_START] + fields[SEG_LENGTH]
    rows = torch.from_numpy(virtual_rows(np.arange(length), fields, SEG_KV_REQUEST, SEG_KV_QUESTION, SEG_KV_OWN))
    path = packed.new_zeros(length + -length % _TILE, packed.shape[1], dtype=torch.float32)
    is_packed = rows >= PACKED
    path[:length][is_packed] = packed[rows[is_packed] - PACKED].float()
    path[:length][~is_packed] = cache[rows[~is_packed]].float()
    return path.view(path.shape[0], -1, d).transpose(0, 1).contiguous()


def _attend(queries: Tensor, keys: Tensor, values: Tensor, tile: int) -> Tensor:
    """One query tile [64, H, d] at positions 64 * tile .. over key tiles 0 .. tile -> [64, H, d] float32."""
    rows, heads, d = queries.shape
    kv_heads = keys.shape[0]
    q = queries.view(rows, kv_heads, -1, d).permute(1, 2, 0, 3).reshape(kv_heads, -1, d) * d**-0.5
    places = torch.arange(_TILE, dtype=torch.int64, device=q.device)
    q_positions = (tile * _TILE + places).repeat(heads // kv_heads)
    # Every row, unused ones too, sees position 0 in the first tile, so that the maximum is finite from there on.
    top = q.new_full((kv_heads, q.shape[1], 1), float("-inf"))
    total, acc = torch.zeros_like(top), torch.zeros_like(q)
    for start in range(0, (tile + 1) * _TILE, _TILE):
        scores = torch.bmm(q, keys[:, start : start + _TILE].transpose(1, 2))
        scores = torch.where((start + places)[None, :] <= q_positions[:, None], scores, float("-inf"))
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        rescale, weights = torch.exp(top - new_top), torch.exp(scores - new_top)
        total = total * rescale + weights.sum(-1, keepdim=True)
        acc = acc * rescale + torch.bmm(weights, values[:, start : start + _TILE])
        top = new_top
    return (acc / total).view(kv_heads, -1, rows, d).permute(2, 0, 1, 3).reshape(rows, heads, d).contiguous()


def attention_reference(q: Tensor, gate: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One whole path in float64: q, gate [T, H, d], k, v [T, Hkv, d] -> [T, H, d]; nothing is rounded."""
    group = q.shape[1] // k.shape[1]
    q, gate, k, v = q.double(), gate.double(), k.double(), v.double()
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("ihd,jhd->hij", q, k) / sqrt(q.shape[2])
    later = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
    weights = scores.masked_fill(later, float("-inf")).softmax(-1)
    return torch.einsum("hij,jhd->ihd", weights, v) * gate.sigmoid()


def _check(
    q: Tensor, q_proj: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, tables: Tensor, head_dim: int
) -> None:
    device, dtype = q.device, q.dtype
    check_head_size(_OP, head_dim)
    check_tensor(_OP, "q", q, (None, None), STORAGE, device)
    check_tensor(_OP, "q_proj", q_proj, (q.shape[0], None), dtype, device)
    check_multiple(_OP, "the number of columns of q_proj", q_proj.shape[1], COLUMN_UNIT)
    check_at_least(_OP, "the number of columns of q_proj", q_proj.shape[1], 2 * q.shape[1])
    check_tensor(_OP, "k", k, (None, None), dtype, device)
    check_multiple(_OP, "the number of columns of k", k.shape[1], head_dim)
    check_tensor(_OP, "v", v, tuple(k.shape), dtype, device)
    check_tensor(_OP, "k_cache", k_cache, (None, k.shape[1]), dtype, device)
    check_tensor(_OP, "v_cache", v_cache, tuple(k_cache.shape), dtype, device)
    check_tables(_OP, tables, device)
    check_multiple(_OP, "the number of columns of q", q.shape[1], k.shape[1])
