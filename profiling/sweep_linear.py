"""Tiles of the fixed product on this GPU: bits against each other, the library and the row count, and time.

    python profiling/sweep_linear.py [--model 9b]

Times are multiples of the library's own (F.linear) in the same run, each in a CUDA graph over weights that together
exceed the cache. "tiles" counts outputs of 1,000 rows that differ from the first tile's, "rows" those of fewer rows
that differ from them, and "library" those of 4,096 rows that differ from the library's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from cases import projections
from measure import graph_times
from torch import Tensor

from engine.load.dimensions import DIMENSIONS
from ops.kernels import linear as kernels
from ops.kernels.linear import Tile, launch_linear_fixed

TILES = (
    Tile(rows=128, columns=256, depth=64, warps=8, stages=3),
    Tile(rows=128, columns=128, depth=64, warps=8, stages=4),
    Tile(rows=128, columns=128, depth=64, warps=4, stages=4),
    Tile(rows=64, columns=256, depth=64, warps=4, stages=4),
    Tile(rows=64, columns=128, depth=64, warps=4, stages=4),
    Tile(rows=256, columns=128, depth=64, warps=8, stages=3),
)
ROWS = (64, 128, 320, 1_088, 3_136, 8_960)
CHECKED_ROWS = (1, 17, 64, 65, 128, 320)
CACHE_BYTES = 120 << 20


def use(tile: Tile) -> None:
    kernels.WIDE = kernels.NARROW = tile


def over(weights: list[Tensor], x: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> float:
    """Microseconds of one product."""
    samples = graph_times(lambda: [product(x, w) for w in weights], repeats=5)
    return statistics.median(samples) / len(weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(DIMENSIONS), default="9b")
    d = DIMENSIONS[parser.parse_args().model]
    began = time.time()
    torch.manual_seed(0)
    names = [f"{t.rows}x{t.columns}x{t.depth}w{t.warps}s{t.stages}" for t in TILES]
    print(torch.cuda.get_device_name())
    for shape, (outputs, inputs) in projections(d).items():
        count = max(2, -(-CACHE_BYTES // (outputs * inputs * 2)))
        weights = [torch.randn(outputs, inputs, device="cuda").bfloat16() * inputs**-0.5 for _ in range(count)]
        x = torch.randn(max(ROWS), inputs, device="cuda").bfloat16()
        first: Tensor | None = None
        differences = {}
        for name, tile in zip(names, TILES, strict=True):
            use(tile)
            whole = launch_linear_fixed(x[:1_000], weights[0])
            first = whole if first is None else first
            rows = sum(int((launch_linear_fixed(x[:n], weights[0]) != whole[:n]).sum()) for n in CHECKED_ROWS)
            library = launch_linear_fixed(x[:4_096], weights[0]) != F.linear(x[:4_096], weights[0])
            differences[name] = int((whole != first).sum()), rows, int(library.sum())
        print(f"\n{shape}, {inputs} to {outputs}")
        print(f"{'rows':20s}" + "".join(f"{n:>8,}" for n in ROWS) + "     tiles    rows library")
        peers = [over(weights, x[:n], F.linear) for n in ROWS]
        print(f"{'F.linear, us':20s}" + "".join(f"{us:8.1f}" for us in peers), flush=True)
        for name, tile in zip(names, TILES, strict=True):
            use(tile)
            times = [over(weights, x[:n], launch_linear_fixed) for n in ROWS]
            ratios = "".join(f"{us / peer:8.2f}" for us, peer in zip(times, peers, strict=True))
            print(f"{name:20s}" + ratios + "  " + "".join(f"{n:8,}" for n in differences[name]), flush=True)
    print(f"{time.time() - began:.0f} s in all")


if __name__ == "__main__":
    main()
