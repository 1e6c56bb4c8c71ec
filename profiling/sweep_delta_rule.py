"""Variants of the delta rule's kernels on this GPU: bits across splits, error against float64, time in a CUDA graph.

    PYTHONPATH=. python profiling/sweep_delta_rule.py [--heads 16,32]

One line per variant: of the preparation (alone, without the scans), of the scan of internal segments, of the scan of
leaves. "split" counts outputs of branches, behind prefixes of several lengths, that differ from the unsplit pass;
"base" outputs of the unsplit pass that differ from those of the launcher's own choices; then the relative L2 error of
the worst head. A variant that fails, or takes its process with it, is a line too; the next one gets a fresh process.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ops.delta_rule import DeltaSizes, delta_rule_reference
from ops.kernels import delta_rule as kernels
from ops.tables import CHUNK, TABLE_WORDS, SegmentEntry, Source, fill

DIM = 128
CUTS = (1, 31, 63, 65, 130, 1000)
LENGTHS = (64, 320, 1_088, 3_136)
Scan = tuple[int, int, int]


@dataclass(frozen=True)
class Variant:
    """What one line runs; what it leaves out is as the launcher has it, for 9B heads."""

    kind: str
    registers: int = kernels.PREPARE_REGISTERS
    warps: int = kernels.PREPARE_WARPS
    programs: int = kernels.PREPARE_PROGRAMS
    internal: Scan = kernels.INTERNAL_SCAN
    leaves: Scan = kernels.LEAF_SCAN
    lanes: int = kernels.SCAN_LANES

    def __str__(self) -> str:
        own = {
            "preparation": f"{self.warps} warps, {self.registers} registers x {self.programs}",
            "internal": f"{self.internal}",
            "leaves": f"{self.leaves} x {self.lanes} lanes",
        }
        return f"{self.kind} {own[self.kind]}"

    def choose(self) -> None:
        """For this thread, but for the numbers of programs, which compile nothing."""
        chosen.variant = self
        kernels.PREPARE_PROGRAMS, kernels.SCAN_LANES = self.programs, self.lanes


VARIANTS = (
    *(Variant("preparation", registers=r, warps=w) for r, w in ((255, 4), (168, 4), (128, 4), (128, 8))),
    *(Variant("preparation", programs=p) for p in (264, 396, 1056)),
    *(Variant("internal", internal=s) for s in ((32, 4, 5), (32, 4, 4), (16, 4, 4), (16, 4, 5), (64, 4, 5))),
    *(
        Variant("leaves", leaves=s, lanes=lanes)
        for s, lanes in (
            ((64, 4, 1), 4), ((64, 4, 5), 2), ((32, 4, 1), 4), ((32, 4, 1), 8), ((32, 4, 3), 2), ((16, 4, 4), 2),
            ((128, 8, 1), 4),
        )
    ),
)  # fmt: skip

chosen = threading.local()


def prepare_options() -> dict[str, Any]:
    return {"num_warps": chosen.variant.warps, "num_stages": 1, "maxnreg": chosen.variant.registers}


def scan_options(qkv: Tensor, n: DeltaSizes, leaves: bool) -> dict[str, Any]:
    block, warps, stages = chosen.variant.leaves if leaves else chosen.variant.internal
    return {"BLOCK": block, "STAGES": stages, "num_warps": warps, "num_stages": stages}


kernels.prepare_options, kernels.scan_options = prepare_options, scan_options


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
    fill(table, entries, [])
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
        add(str(length), [entry(0, length, internal=True)], span(0, length))
    source = Source.snapshot(first=0, length=278, slot=0, kv=0)
    add("255x34", [entry(278, 34, state_read=0, request=source) for _ in range(255)], span(0, 34).repeat(255))
    return calls


class NoScan:
    """Stands in for the scan while the preparation is timed."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def lines(first: int, heads: tuple[int, int]) -> None:
    """Prints "index text" of every variant from `first` on."""
    layer = Layer(max(LENGTHS), *heads)
    whole_rows, whole_entry = span(0, 1_088), [entry(0, 1_088, internal=True)]

    def whole_of(variant: Variant) -> Tensor | str:
        variant.choose()
        try:
            return layer.run(whole_rows, whole_entry, layer.slots(1))
        except Exception as error:  # a variant that this GPU cannot hold
            return type(error).__name__

    with ThreadPoolExecutor(12) as pool:
        base, *_ = pool.map(whole_of, (Variant("internal"), *VARIANTS[first:]))
    exact, _ = delta_rule_reference(
        layer.qkv[:1_088], layer.gates[:1_088], key_heads=heads[0], value_heads=heads[1], key_dim=DIM
    )
    calls = cases(layer)
    scan_kernel = kernels.scan_kernel
    for i, variant in enumerate(VARIANTS[first:], first):
        whole = whole_of(variant)
        if isinstance(whole, str):
            print(i, f"{variant!s:46s}{whole}", flush=True)
            continue
        split, differs = split_differences(layer, whole), int((whole != base).sum())
        error = ((whole.double().view_as(exact) - exact).norm(dim=(0, 2)) / exact.norm(dim=(0, 2))).max().item()
        kernels.scan_kernel = NoScan() if variant.kind == "preparation" else scan_kernel
        named = ["64", "255x34"] if variant.kind == "leaves" else [*calls]
        times = {name: graph_time(calls[name]) for name in named}
        kernels.scan_kernel = scan_kernel
        row = "".join(f"{times[name]:9.1f}" if name in times else f"{'':9s}" for name in calls)
        print(i, f"{variant!s:46s}{row}{split:8d}{differs:7d}   {error:.2e}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", default="16,32", help="key and value heads")
    parser.add_argument("--first", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.first is not None:
        key_heads, value_heads = map(int, options.heads.split(","))
        lines(options.first, (key_heads, value_heads))
        return
    began, following = time.time(), 0
    print(f"{torch.cuda.get_device_name()}, {options.heads} heads, microseconds")
    names = (*map(str, LENGTHS), "255x34")
    print(f"{'':46s}" + "".join(f"{name:>9s}" for name in names) + "   split   base   worst head")
    while following < len(VARIANTS):
        command = [sys.executable, __file__, "--heads", options.heads, "--first", str(following)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
            assert child.stdout
            assert child.stderr
            for line in child.stdout:
                index, text = line.split(" ", 1)
                print(text, end="", flush=True)
                following = int(index) + 1
            said = child.stderr.read().strip().splitlines()
        if child.returncode:
            print(f"{VARIANTS[following]!s:46s}{said[-1] if said else child.returncode}", flush=True)
            following += 1
    print(f"{time.time() - began:.0f} s in all")


if __name__ == "__main__":
    main()
