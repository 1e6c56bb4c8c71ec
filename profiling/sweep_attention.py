"""Tiles of the attention kernel on this GPU: bits across splits, error against float64, time in a CUDA graph.

    python profiling/sweep_attention.py [--heads 16,4]

Compiles every tile in threads, then runs them one by one. "split" counts outputs of branches, alone and packed behind
prefixes of several lengths, and of read rows, that differ from the unsplit pass. SDPA runs beside the single sequences.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.nn.functional as F
from measure import graph_times
from torch import Tensor

from ops.attention import attention_reference
from ops.kernels import attention as kernels
from ops.kernels.attention import ProgramShape
from ops.kernels.attention_prepare import launch_attention_prepare
from ops.tables import TABLE_WORDS, SegmentEntry, Source, fill

DIM, ROT, EPS = 256, 64, 1e-6
TILES = (
    ProgramShape(queries=128, keys=32, stages=4, warps=8),
    ProgramShape(queries=128, keys=32, stages=3, warps=8),
    ProgramShape(queries=128, keys=64, stages=2, warps=8),
    ProgramShape(queries=64, keys=32, stages=2, warps=4),
    ProgramShape(queries=64, keys=32, stages=4, warps=4),
    ProgramShape(queries=64, keys=64, stages=2, warps=4),
)
LENGTHS = (64, 320, 1_088, 3_136)
SHARED = ((255, 34, 278), (255, 34, 3_093), (32, 33, 1_048), (255, 5, 3_093))
CUTS = (1, 31, 62, 65, 130, 1_000)
BRANCHES = (1, 3, 65, 200)

chosen = threading.local()
kernels.shape_for = lambda x: chosen.tile


class Layer:
    """Projected rows of one path of 3,400 tokens, prepared as the kernel takes them."""

    def __init__(self, heads: int, kv_heads: int) -> None:
        self.heads, self.kv_heads = heads, kv_heads
        torch.manual_seed(0)
        rows, self.width = 3_400, kv_heads * DIM
        self.columns = 2 * heads * DIM
        self.proj = torch.randn(rows, self.columns + 2 * self.width, device="cuda").bfloat16()
        angles = torch.arange(rows, device="cuda")[:, None] * 1e7 ** (-torch.arange(0, ROT, 2, device="cuda") / ROT)
        self.rope = torch.cat([angles.cos(), angles.sin()], 1).bfloat16()
        self.norm = (0.1 * torch.randn(DIM, device="cuda")).bfloat16()
        self.k_cache = torch.zeros(rows, self.width, device="cuda").bfloat16()
        self.v_cache = self.k_cache.clone()

    def tables(self, entries: list[SegmentEntry], reads: list[tuple[int, int]] | None = None) -> Tensor:
        block = np.zeros(TABLE_WORDS, np.int32)
        fill(block, entries, reads or [])
        return torch.from_numpy(block).cuda()

    def prepare(self, proj: Tensor, tables: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return launch_attention_prepare(
            proj, proj, self.norm, self.norm, self.rope, self.k_cache, self.v_cache, tables, EPS, self.columns, False
        )

    def call(self, proj: Tensor, entries: list[SegmentEntry], ends: list[int] | None = None) -> Callable[[], Tensor]:
        """The kernel over these packed rows, or over the rows `ends` of them as read rows."""
        reads = [(s, entry.length - 1) for s, entry in enumerate(entries)] if ends else []
        tables = self.tables(entries, reads)
        q, k, v = self.prepare(proj, tables)
        if ends:
            q, proj = q[ends].contiguous(), proj[ends, : self.columns].contiguous()
        return lambda: kernels.launch_attention(
            q, proj, self.k_cache, self.v_cache, k, v, tables, DIM, ends is not None
        )

    def keep_prefix(self, rows: int) -> Source:
        self.prepare(self.proj[:rows], self.tables([entry(0, rows, kv_write=0)]))
        return Source.snapshot(first=0, length=rows, slot=0, kv=0)


def entry(start: int, length: int, request: Source | None = None, kv_write: int = -1) -> SegmentEntry:
    return SegmentEntry(start=start, token_ids=np.zeros(length, np.int32), request=request, kv_write=kv_write)


def split_differences(layer: Layer, whole: Tensor) -> int:
    count = 0
    for cut in CUTS:
        source = layer.keep_prefix(cut)
        entries = [entry(cut, n, source) for n in BRANCHES]
        proj = torch.cat([layer.proj[cut : cut + n] for n in BRANCHES])
        wanted = torch.cat([whole[cut : cut + n] for n in BRANCHES])
        ends = [sum(BRANCHES[: i + 1]) - 1 for i in range(len(BRANCHES))]
        count += int((layer.call(proj, entries)() != wanted).sum())
        count += int((layer.call(proj, entries, ends)() != wanted[ends]).sum())
        tree = [entry(0, cut), *(entry(cut, n, Source.packed(first=0, row=0)) for n in BRANCHES)]
        tree_proj, tree_wanted = torch.cat([layer.proj[:cut], proj]), torch.cat([whole[:cut], wanted])
        count += int((layer.call(tree_proj, tree)() != tree_wanted).sum())
    return count


def errors(layer: Layer, whole: Tensor, rows: int) -> tuple[float, float]:
    """Largest error by row maximum, and relative L2, of the unsplit pass."""
    q, k, v = layer.prepare(layer.proj[:rows], layer.tables([entry(0, rows)]))
    gate = layer.proj[:rows, : layer.columns].view(rows, layer.heads, 2, DIM)[:, :, 1]
    exact = attention_reference(q.view(rows, -1, DIM), gate, k.view(rows, -1, DIM), v.view(rows, -1, DIM)).flatten(1)
    error = whole.double() - exact
    return (error.abs().amax(1) / exact.abs().amax(1)).max().item(), (error.norm() / exact.norm()).item()


def flops(layer: Layer, count: int, length: int, prefix: int) -> float:
    return 4.0 * layer.heads * DIM * count * (length * prefix + length * (length + 1) / 2)


def cases(layer: Layer) -> dict[str, tuple[float, Callable[[], Tensor]]]:
    """By name: useful flops and the call."""
    found = {}
    for length in LENGTHS:
        found[str(length)] = flops(layer, 1, length, 0), layer.call(layer.proj[:length], [entry(0, length)])
    for count, length, prefix in SHARED:
        source = layer.keep_prefix(prefix)
        proj = layer.proj[prefix : prefix + length].repeat(count, 1)
        entries = [entry(prefix, length, source)] * count
        found[f"{count}x{length}|{prefix}"] = flops(layer, count, length, prefix), layer.call(proj, entries)
    ends = [(i + 1) * length - 1 for i in range(count)]
    found[f"{count} reads"] = flops(layer, count, 1, prefix + length), layer.call(proj, entries, ends)
    return found


def microseconds(call: Callable[[], object]) -> float:
    return statistics.median(graph_times(call, repeats=7, inner=4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", default="16,4", help="query and key/value heads")
    heads, kv_heads = map(int, parser.parse_args().heads.split(","))
    began = time.time()
    layer = Layer(heads, kv_heads)
    length = max(CUTS) + max(BRANCHES)

    def compiled(tile: ProgramShape) -> str:
        chosen.tile = tile
        try:
            layer.call(layer.proj[:64], [entry(0, 64)])()
            torch.cuda.synchronize()
        except Exception as error:  # a tile that this GPU cannot hold is a line of the table
            return f"{type(error).__name__}: {error}".split("\n")[0][:100]
        return ""

    with ThreadPoolExecutor(8) as pool:
        failures = list(pool.map(compiled, TILES))
    calls = cases(layer)
    print(f"{torch.cuda.get_device_name()}, {heads}/{kv_heads} heads, ready after {time.time() - began:.0f} s")
    print(
        f"{'queries keys stages warps':26s}" + "".join(f"{name:>13s}" for name in calls) + "  split   row max      L2"
    )

    q = torch.randn(1, heads, max(LENGTHS), DIM, device="cuda").bfloat16()
    k = torch.randn(1, kv_heads, max(LENGTHS), DIM, device="cuda").bfloat16()

    def sdpa(rows: int) -> float:
        parts = [x[:, :, :rows].contiguous() for x in (q, k, k)]
        return microseconds(lambda: F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True))

    print(f"{'SDPA, us':26s}" + "".join(f"{sdpa(rows):13.1f}" for rows in LENGTHS), flush=True)
    for tile, failure in zip(TILES, failures, strict=True):
        name = f"{tile.queries:7d} {tile.keys:4d} {tile.stages:6d} {tile.warps:5d}"
        if failure:
            print(f"{name}   {failure}")
            continue
        chosen.tile = tile
        times = [microseconds(call) for _, call in calls.values()]
        whole = layer.call(layer.proj[:length], [entry(0, length)])()
        largest, relative = errors(layer, whole, length)
        tail = f"{split_differences(layer, whole):7d}  {largest:.2e}  {relative:.2e}"
        print(f"{name + ', us':26s}" + "".join(f"{us:13.1f}" for us in times) + tail)
        rates = (work / us * 1e-6 for (work, _), us in zip(calls.values(), times, strict=True))
        print(f"{'  useful TFLOP/s':26s}" + "".join(f"{rate:13.0f}" for rate in rates), flush=True)
        layer.keep_prefix(SHARED[-1][2])
    for rows in (64, 3_136):
        tables = layer.tables([entry(0, rows)])
        us = microseconds(lambda rows=rows, tables=tables: layer.prepare(layer.proj[:rows], tables))
        moved = rows * (2 * heads * DIM + 4 * layer.width) * 2
        print(f"attention_prepare, {rows} rows: {us:.1f} us, {moved / us * 1e-6:.2f} TB/s")
    print(f"{time.time() - began:.0f} s in all")


if __name__ == "__main__":
    main()
