"""Variants of the delta rule's kernels on this GPU: bits across splits, error against float64, time in a CUDA graph.

    PYTHONPATH=. python profiling/sweep_delta_rule.py [--heads 16,32]

Compiles every variant in threads, then runs them one by one. "split" counts outputs of branches, behind prefixes of
several lengths, that differ from the unsplit pass; "base" outputs of the unsplit pass that differ from the first line.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ops.delta_rule import DeltaSizes, delta_rule_reference
from ops.kernels import delta_rule as kernels
from ops.tables import CHUNK, TABLE_WORDS, SegmentEntry, Source, fill

DIM = 128
PREPARE = {
    "4 warps 255 regs": {"num_warps": 4, "num_stages": 1, "maxnreg": 255},
    "4 warps 168 regs": {"num_warps": 4, "num_stages": 1, "maxnreg": 168},
    "4 warps 128 regs": {"num_warps": 4, "num_stages": 1, "maxnreg": 128},
    "8 warps 128 regs": {"num_warps": 8, "num_stages": 1, "maxnreg": 128},
}
SCAN = ((64, 4, 5), (64, 8, 5), (32, 4, 5), (32, 8, 5), (64, 4, 3), (128, 8, 3), (64, 4, 1), (32, 4, 1))
LANES = (1, 2, 4, 8)
CUTS = (1, 31, 63, 65, 130, 1000)
LENGTHS = (64, 320, 1_088, 3_136)

chosen = threading.local()


def scan_variant(block: int, warps: int, stages: int) -> dict[str, Any]:
    return {"BLOCK": block, "STAGES": stages, "num_warps": warps, "num_stages": stages}


kernels.prepare_options = lambda: chosen.prepare
kernels.scan_options = lambda qkv, value_dim: chosen.scan


class Layer:
    """Inputs of one path, with gates as trained models have them."""

    def __init__(self, rows: int, key_heads: int, value_heads: int) -> None:
        self.n = DeltaSizes(key_heads, value_heads, DIM, DIM)
        torch.manual_seed(0)
        n, device = self.n, "cuda"
        self.qkv = F.silu(torch.randn(rows, 2 * n.keys + n.values, device=device)).bfloat16()
        decay = torch.empty(value_heads, device=device).uniform_(1, 16)
        bias = torch.empty(value_heads, device=device).uniform_(-6.9, -2.3)
        g = -decay * F.softplus(torch.randn(rows, value_heads, device=device) + bias)
        beta = torch.randn(rows, value_heads, device=device).sigmoid().bfloat16().float()
        q, k = (
            self.qkv[:, i * n.keys : (i + 1) * n.keys].float().view(rows, key_heads, DIM).square().sum(-1)
            for i in range(2)
        )
        self.gates = torch.cat([g, beta, (k + 1e-6).rsqrt(), (q + 1e-6).rsqrt() * DIM**-0.5], 1)

    def slots(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        n = self.n
        kv = self.qkv.new_full((count, CHUNK, n.keys + n.values), float("nan"))
        gates = self.gates.new_full((count, CHUNK, n.tail_gates), float("nan"))
        return kv, gates, self.gates.new_full((count, n.value_heads, DIM, DIM), float("nan"))

    def run(self, rows: Tensor, entries: list[SegmentEntry], slots: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Outputs of the path's `rows`, packed as `entries` say."""
        args = (self.qkv[rows], self.gates[rows], *slots, block(entries), self.n)
        return kernels.launch_delta_rule(*args)


def block(entries: list[SegmentEntry]) -> Tensor:
    table = np.zeros(TABLE_WORDS, np.int32)
    fill(table, entries, [], group=1)
    return torch.from_numpy(table).cuda()


def entry(start: int, length: int, **kwargs: Any) -> SegmentEntry:
    return SegmentEntry(start=start, token_ids=np.zeros(length, np.int32), **kwargs)


def span(first: int, last: int) -> Tensor:
    return torch.arange(first, last, device="cuda")


def split_differences(layer: Layer, whole: Tensor) -> int:
    """Prefixes in one pass, then branches behind their snapshots in another, then all of it in one."""
    rows, end = whole.shape[0], len(CUTS)
    lengths = [min(100, rows - cut) for cut in CUTS]
    slots = layer.slots(end)
    prefix_rows = torch.cat([span(0, cut) for cut in CUTS])
    branch_rows = torch.cat([span(cut, cut + length) for cut, length in zip(CUTS, lengths, strict=True)])
    prefixes = [entry(0, cut, state_write=i) for i, cut in enumerate(CUTS)]
    different = layer.run(prefix_rows, prefixes, slots) != whole[prefix_rows]
    count = int(different.sum())
    for i, cut in enumerate(CUTS):
        border, keys = cut - cut % CHUNK, layer.n.keys
        slots[0][i, : cut - border] = layer.qkv[border:cut, keys:]
        slots[1][i, : cut - border] = layer.gates[border:cut, : layer.n.tail_gates]
    branches = [
        entry(cut, length, state_read=i, request=Source.snapshot(first=0, length=cut, slot=i, kv=0))
        for i, (cut, length) in enumerate(zip(CUTS, lengths, strict=True))
    ]
    count += int((layer.run(branch_rows, branches, slots) != whole[branch_rows]).sum())
    tree, row = [], 0
    for i, cut in enumerate(CUTS):
        tree.append(entry(0, cut, state_write=i, internal=True))
    for i, (cut, length) in enumerate(zip(CUTS, lengths, strict=True)):
        tree.append(entry(cut, length, state_read=i, request=Source.packed(first=0, row=row)))
        row += cut
    tree_rows = torch.cat([prefix_rows, branch_rows])
    return count + int((layer.run(tree_rows, tree, layer.slots(end)) != whole[tree_rows]).sum())


def graph_time(call: Callable[[], Any], repeats: int = 10) -> float:
    """Microseconds of one call, the median of five replays of a graph that holds `repeats` of them."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    times = []
    for _ in range(6):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / repeats)
    return sorted(times[1:])[2]


def cases(layer: Layer) -> dict[str, Callable[[], Any]]:
    """One sequence of each length, and 255 branches of 34 rows behind one snapshot of 278."""
    calls: dict[str, Callable[[], Any]] = {}
    slots = tuple(x.nan_to_num(0.01) for x in layer.slots(1))

    def add(name: str, entries: list[SegmentEntry], rows: Tensor) -> None:
        args = (layer.qkv[rows], layer.gates[rows], *slots, block(entries), layer.n)
        calls[name] = lambda: kernels.launch_delta_rule(*args)

    for length in LENGTHS:
        add(str(length), [entry(0, length)], span(0, length))
    source = Source.snapshot(first=0, length=278, slot=0, kv=0)
    add("255x34", [entry(278, 34, state_read=0, request=source) for _ in range(255)], span(0, 34).repeat(255))
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", default="16,32", help="key and value heads")
    key_heads, value_heads = map(int, parser.parse_args().heads.split(","))
    began = time.time()
    layer = Layer(max(LENGTHS), key_heads, value_heads)
    pairs = [(p, scan_variant(*SCAN[0])) for p in PREPARE.values()]
    pairs += [(PREPARE["4 warps 255 regs"], scan_variant(*s)) for s in SCAN[1:]]

    def compile_pair(pair: tuple[dict[str, Any], dict[str, Any]]) -> str:
        chosen.prepare, chosen.scan = pair
        try:
            layer.run(span(0, 64), [entry(0, 64)], layer.slots(1))
        except Exception as error:  # a variant that this GPU cannot hold is a line of the table
            return type(error).__name__
        return ""

    chosen.prepare, chosen.scan = pairs[0]
    with ThreadPoolExecutor(12) as pool:
        failures = dict(zip([str(p) for p in pairs], pool.map(compile_pair, pairs), strict=True))
    print(f"{torch.cuda.get_device_name()}, {key_heads}/{value_heads} heads, compiled in {time.time() - began:.0f} s")
    calls = cases(layer)
    scan_kernel = kernels.scan_kernel

    class NoScan:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *args, **kwargs: None

    kernels.scan_kernel = NoScan()
    print(f"{'preparation alone':24s}" + "".join(f"{name:>9s}" for name in calls) + "   us")
    best = ("", float("inf"))
    for name, options in PREPARE.items():
        if failures[str((options, scan_variant(*SCAN[0])))]:
            print(f"{name:24s}   does not compile")
            continue
        chosen.prepare = options
        for programs in (264, 396, 528, 1056):
            kernels.PREPARE_PROGRAMS = programs
            times = {case: graph_time(call) for case, call in calls.items()}
            print(f"{name:16s} x {programs:5d}" + "".join(f"{us:9.1f}" for us in times.values()), flush=True)
            score = times["3136"] + times["255x34"]
            if score < best[1]:
                best = (name, score)
                best_programs = programs
    kernels.scan_kernel = scan_kernel
    kernels.PREPARE_PROGRAMS, chosen.prepare = best_programs, PREPARE[best[0]]
    print(f"preparation: {best[0]} x {best_programs}")

    length = 1_088
    exact, _ = delta_rule_reference(
        layer.qkv[:length], layer.gates[:length], key_heads=key_heads, value_heads=value_heads, key_dim=DIM
    )
    first: Tensor | None = None
    head = f"{'block warps stages lanes':24s}" + "".join(f"{name:>9s}" for name in calls)
    print(head + "   us   split   base   relative L2, worst head")
    for variant in SCAN:
        chosen.scan = scan_variant(*variant)
        failure = failures[str((PREPARE["4 warps 255 regs" if variant != SCAN[0] else best[0]], chosen.scan))]
        if failure:
            print(f"{variant!s:24s}   {failure}")
            continue
        whole = layer.run(span(0, length), [entry(0, length)], layer.slots(1))
        first = whole if first is None else first
        error = (whole.double().view_as(exact) - exact).norm(dim=(0, 2)) / exact.norm(dim=(0, 2))
        split, base = split_differences(layer, whole), int((whole != first).sum())
        for lanes in LANES:
            kernels.SCAN_LANES = lanes
            names = calls if lanes == LANES[0] else ("64", "320", "255x34")
            times = {name: graph_time(calls[name]) for name in names}
            line = "".join(f"{times[name]:9.1f}" if name in times else f"{'':9s}" for name in calls)
            extra = f"   {split:8d}{base:7d}   {error.max().item():.2e}" if lanes == LANES[0] else ""
            print(f"{variant!s:20s}{lanes:4d}" + line + extra, flush=True)
    print(f"{time.time() - began:.0f} s in all")


if __name__ == "__main__":
    main()
