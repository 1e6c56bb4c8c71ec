"""GEMM-only: all projections of a whole forward in one CUDA graph, the yardstick of every other time.

Four fused products a layer (mixer input, mixer output, gate and up, down) at the same number of rows, by the library's
own choice. Weights and activations are random, never zeros, on which a product runs faster. Every weight is read once
per replay, so none waits in cache; activations are read where the last product left them, as in a forward.

    python profiling/gemm_only.py --models 4b,9b,27b --rows 64,320,1088,3136 --out profiling/results/gemm_only.jsonl
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from cases import (
    DTYPE,
    Ceilings,
    Cost,
    add_arguments,
    ceilings_of,
    normal,
    positive,
    print_table,
    progress,
    several,
    without_cuda,
)
from measure import Record, Results, graph_times
from torch import Tensor

from engine.load.dimensions import DIMENSIONS, ModelDimensions
from engine.load.projections import layer_projections
from engine.run.model import Linear, Weights
from ops.linear import linear_fixed

HANDLES: dict[str, Linear] = {"default": F.linear, "fixed": linear_fixed}


def products(dimensions: ModelDimensions) -> list[tuple[int, int]]:
    """(outputs N, inputs K) of every projection, in the order of a forward, four a layer."""
    return [
        (p.rows, p.columns) for kind in dimensions.layer_types for p in layer_projections(dimensions, kind).values()
    ]


def gemm_only_cost(dimensions: ModelDimensions, rows: int) -> Cost:
    """The weights once, and the operations. Activations stay in cache from one product to the next."""
    elements = sum(n * k for n, k in products(dimensions))
    return Cost(bytes=elements * DTYPE.itemsize, flops=2 * rows * elements)


def random_matrices(dimensions: ModelDimensions, device: torch.device) -> list[Tensor]:
    """A weight [N, K] for every product, fan-in scaled."""
    return [normal(n, k, device=device).mul_(k**-0.5) for n, k in products(dimensions)]


def matrices_of(weights: Weights) -> list[Tensor]:
    """The same list from a backbone's weights; nothing is copied."""
    return [w for layer in weights.layers for w in (layer.in_proj, layer.out_proj, layer.mlp.gate_up, layer.mlp.down)]


def gemm_only_us(
    dimensions: ModelDimensions,
    rows: int,
    *,
    matrices: Sequence[Tensor] | None = None,
    linear: Callable[[Tensor, Tensor], Tensor] = F.linear,
    repeats: int = 20,
) -> list[float]:
    """Microseconds of all projections at `rows` rows, raw samples.

    `matrices` are those of `random_matrices` or `matrices_of`; left out, they are made, and freed on return. `linear`
    is another handle to be timed in place of the yardstick's.
    """
    if matrices is None:
        matrices = random_matrices(dimensions, torch.device("cuda"))
    assert [tuple(w.shape) for w in matrices] == products(dimensions)
    inputs = {k: normal(rows, k, device=matrices[0].device) for k in {w.shape[1] for w in matrices}}

    def forward() -> None:
        for w in matrices:
            linear(inputs[w.shape[1]], w)

    return graph_times(forward, repeats=repeats)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description="Time all projections of a forward in one CUDA graph.")
    p.add_argument(
        "--models", type=several(str, list(DIMENSIONS)), default=["9b"], metavar="A,B", help="4b, 9b, 27b (9b)"
    )
    p.add_argument(
        "--rows",
        type=several(positive),
        default=[64, 320, 1088, 3136],
        metavar="N,M",
        help="row counts (64,320,1088,3136)",
    )
    p.add_argument(
        "--gemm",
        type=several(str, list(HANDLES)),
        default=["default"],
        metavar="A,B",
        help="handles: default, which is the yardstick, and fixed (default)",
    )
    add_arguments(p, repeats=10)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    if without_cuda("gemm_only"):
        return 2
    ceilings = ceilings_of(arguments)
    results = Results(arguments.out) if arguments.out else None
    table = []
    for model in arguments.models:
        dimensions = DIMENSIONS[model]
        progress(f"{model}: making random weights")
        matrices = random_matrices(dimensions, torch.device("cuda"))
        for rows in arguments.rows:
            yardstick = None
            for gemm in sorted(arguments.gemm):  # the yardstick first
                samples = gemm_only_us(
                    dimensions, rows, matrices=matrices, linear=HANDLES[gemm], repeats=arguments.repeats
                )
                record = record_of(model, rows, gemm, samples, yardstick, ceilings)
                if gemm == "default":
                    yardstick = record.median_us
                if results is not None:
                    results.add(record)
                table.append(line(record))
                progress(f"{model} {rows} rows {gemm}: {record.median_us / 1e3:.2f} ms")
        del matrices
        torch.cuda.empty_cache()
    print_table(("model", "rows", "gemm", "ms", "TFLOP/s", "roofline ms", "x roofline", "x default"), table)
    return 0


def record_of(
    model: str, rows: int, gemm: str, samples: list[float], yardstick: float | None, ceilings: Ceilings
) -> Record:
    cost = gemm_only_cost(DIMENSIONS[model], rows)
    compared = yardstick is not None and gemm != "default"
    return Record(
        kind="gemm_only",
        name=f"{model}/{rows}/{gemm}",
        samples_us=samples,
        configuration={
            "model": model,
            "rows": rows,
            "gemm": gemm,
            "weights": "random",
            "bytes": cost.bytes,
            "flops": cost.flops,
            "ceilings": vars(ceilings),
        },
        peer="default" if compared else None,
        ratio=statistics.median(samples) / yardstick if compared else None,
        floor_us=ceilings.floor_us(cost),
    )


def line(record: Record) -> tuple[str, ...]:
    c, us, floor = record.configuration, record.median_us, record.floor_us
    assert floor is not None
    return (
        c["model"],
        f"{c['rows']:,}",
        c["gemm"],
        f"{us / 1e3:.2f}",
        f"{c['flops'] / us / 1e6:.0f}",
        f"{floor / 1e3:.2f}",
        f"{us / floor:.2f}",
        "-" if record.ratio is None else f"{record.ratio:.3f}",
    )


if __name__ == "__main__":
    sys.exit(main())
