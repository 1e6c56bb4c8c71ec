"""The three GEMM handles against each other: all projections of a forward, in one CUDA graph per handle.

`default` multiplies exactly the rows named; `fixed` and `tuned` the rung that holds them, as a forward does. The graphs
take turns, so that they share the clocks of the moment. What `tuned` runs is taken from its tables as an engine start
takes it, or from a new search.

    python profiling/handles.py --models 4b,9b,27b --out profiling/results/handles.jsonl
    python profiling/handles.py --search configs/tuned/nvidia-h200.json
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from cases import Ceilings, add_arguments, ceilings_of, normal, positive, print_table, progress, several, without_cuda
from gemm_only import gemm_only_cost, random_matrices
from measure import Record, Results
from rich.console import Console
from torch import Tensor

from engine.config import default_cache_dir
from engine.load.dimensions import DIMENSIONS
from engine.load.projections import projection_shapes
from engine.run.model import Linear
from graphs.rungs import rung
from graphs.tuning.report import report
from graphs.tuning.table import encode
from graphs.tuning.tuner import prepare, tune
from ops.linear import linear_default, linear_fixed
from ops.linear_tuned import linear_tuned, missed

ROWS = (1, 64, 128, 256, 320, 512, 1_088, 3_136, 8_960, 11_776)
HANDLES: dict[str, Linear] = {"default": linear_default, "fixed": linear_fixed, "tuned": linear_tuned}
MANY = 1_024
"""Rows from which `fixed` is held to a share of the speed of `default`."""
LEAST_REPEATS, MOST_SECONDS = 3, 2.0

Medians = dict[tuple[str, int], dict[str, float]]
"""Microseconds by (model, rows) and handle."""


def graph_of(linear: Linear, rows: int, matrices: Sequence[Tensor]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """One graph of every product at `rows` random rows, and the inputs that it reads."""
    inputs = {k: normal(rows, k, device=matrices[0].device) for k in sorted({w.shape[1] for w in matrices})}

    def forward() -> None:
        for w in matrices:
            linear(inputs[w.shape[1]], w)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        forward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    return graph, list(inputs.values())


def in_turns(rows: int, matrices: Sequence[Tensor], repeats: int) -> dict[str, list[float]]:
    """Microseconds per handle, raw samples; fewer than `repeats` where they would take long."""
    kept = {name: graph_of(linear, multiplied(name, rows), matrices) for name, linear in HANDLES.items()}
    samples: dict[str, list[float]] = {name: [] for name in kept}
    for graph, _ in kept.values():
        graph.replay()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for i in range(repeats):
        if i >= LEAST_REPEATS and time.perf_counter() - begin > MOST_SECONDS:
            break
        for name, (graph, _) in kept.items():
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            samples[name].append(start.elapsed_time(stop) * 1e3)
    return samples


def multiplied(handle: str, rows: int) -> int:
    """The row count that a handle really multiplies."""
    return rows if handle == "default" else rung(rows)


def records_of(model: str, rows: int, samples: dict[str, list[float]], ceilings: Ceilings) -> list[Record]:
    cost = gemm_only_cost(DIMENSIONS[model], rows)
    yardstick = statistics.median(samples["default"])
    return [
        Record(
            kind="handles",
            name=f"{model}/{rows}/{handle}",
            samples_us=times,
            configuration={
                "model": model,
                "rows": rows,
                "multiplied_rows": multiplied(handle, rows),
                "gemm": handle,
                "weights": "random",
                "bytes": cost.bytes,
                "flops": cost.flops,
                "ceilings": vars(ceilings),
            },
            peer="default" if handle != "default" else None,
            ratio=statistics.median(times) / yardstick if handle != "default" else None,
            floor_us=ceilings.floor_us(cost),
        )
        for handle, times in samples.items()
    ]


def table(medians: Medians) -> tuple[list[str], list[list[str]]]:
    """Headers and a line per row count: milliseconds of `default`, then the other handles over it, per model."""
    models = list(dict.fromkeys(model for model, _ in medians))
    headers = ["rows", *(head for model in models for head in (f"{model} ms", "fixed", "tuned"))]
    lines = []
    for rows in dict.fromkeys(rows for _, rows in medians):
        line = [f"{rows:,}"]
        for model in models:
            us = medians[model, rows]
            line += [f"{us['default'] / 1e3:.2f}", *(f"{us[name] / us['default']:.3f}" for name in ("fixed", "tuned"))]
        lines.append(line)
    return headers, lines


def verdicts(medians: Medians) -> list[str]:
    """`tuned` over all cells, and `fixed` where rows are many."""
    ratios = {cell: us["tuned"] / us["default"] for cell, us in medians.items()}
    mean = math.exp(statistics.mean(map(math.log, ratios.values())))
    model, rows = max(ratios, key=lambda cell: ratios[cell])
    lines = [f"tuned over default: geometric mean {mean:.3f}, worst {ratios[model, rows]:.3f} ({model}, {rows:,} rows)"]
    many = {cell: us["default"] / us["fixed"] for cell, us in medians.items() if cell[1] >= MANY}
    if many:
        model, rows = min(many, key=lambda cell: many[cell])
        lines.append(f"fixed from {MANY:,} rows: at least {many[model, rows]:.0%} of default ({model}, {rows:,} rows)")
    return lines


def searched(model: str, cache_dir: Path, table_file: Path) -> None:
    """Search anew for one model, report, and write everything known for this GPU."""
    tenths = set()

    def say(done: int, steps: int) -> None:
        if (tenth := 10 * done // steps) not in tenths:
            tenths.add(tenth)
            progress(f"{model}: {tenth}0 % searched")

    shapes, device = projection_shapes(DIMENSIONS[model]), torch.device("cuda", 0)
    findings, environment, known = tune(shapes, device=device, cache_dir=cache_dir, progress=say)
    Console(file=sys.stderr, width=120).print(report(findings))
    table_file.parent.mkdir(parents=True, exist_ok=True)
    table_file.write_text(encode(environment, known))


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description="Time the three GEMM handles over all projections of a forward.")
    p.add_argument(
        "--models",
        type=several(str, list(DIMENSIONS)),
        default=list(DIMENSIONS),
        metavar="A,B",
        help=f"models ({','.join(DIMENSIONS)})",
    )
    p.add_argument(
        "--rows",
        type=several(positive),
        default=list(ROWS),
        metavar="N,M",
        help=f"row counts ({','.join(map(str, ROWS))})",
    )
    p.add_argument(
        "--cache-dir",
        type=Path,
        default=default_cache_dir(),
        metavar="FOLDER",
        help="where tables are kept (%(default)s)",
    )
    p.add_argument("--search", type=Path, metavar="FILE", help="search anew first, and write the tables to FILE")
    add_arguments(p, repeats=20)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    if without_cuda("handles"):
        return 2
    ceilings = ceilings_of(arguments)
    results = Results(arguments.out) if arguments.out else None
    device, medians = torch.device("cuda", 0), Medians()
    for model in arguments.models:
        begin = time.perf_counter()
        if arguments.search is not None:
            searched(model, arguments.cache_dir, arguments.search)
            progress(f"{model}: searched in {time.perf_counter() - begin:.0f} s")
            begin = time.perf_counter()
        prepare(projection_shapes(DIMENSIONS[model]), device=device, cache_dir=arguments.cache_dir)
        progress(f"{model}: tables ready in {time.perf_counter() - begin:.1f} s")
        matrices = random_matrices(DIMENSIONS[model], device)
        for rows in arguments.rows:
            samples = in_turns(rows, matrices, arguments.repeats)
            medians[model, rows] = {name: statistics.median(times) for name, times in samples.items()}
            for record in records_of(model, rows, samples, ceilings) if results is not None else ():
                results.add(record)
        del matrices
        torch.cuda.empty_cache()
        progress(f"{model}: measured")
    print_table(*table(medians))
    print("\n".join(verdicts(medians)))
    if missed:
        print(f"calls that tuned did not know: {dict(missed)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
