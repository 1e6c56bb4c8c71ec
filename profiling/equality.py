"""Bits of whole forwards at real dimensions with random weights: every candidate against itself run alone.

Two sets of requests. `matrix`: every prefix length around the borders of chunks, one, two and three levels, short and
long branches. `random`: layouts of 1 to 300 segments, two and three levels. Each is run by every schedule and split
with eager, compiled and captured forwards; a captured one counts both as it is missed and as it is replayed.

    python profiling/equality.py --model 9b --gemm fixed,tuned
    python profiling/equality.py --model 9b --gemm fixed --layers 4 --random 200
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from cases import positive, print_table, progress, several, without_cuda
from forward import (
    GRAPHS,
    HANDLES,
    Questions,
    executor_of,
    last_rows,
    num_equal,
    plan_of,
    random_ids,
    random_weights,
    siblings,
)
from measure import Record, Results
from torch import Tensor

from engine.config import default_cache_dir
from engine.errors import CapacityError, InferenceError
from engine.load.dimensions import DIMENSIONS
from engine.load.projections import projection_shapes
from engine.plan.layout import Split
from engine.run.executor import Executor
from graphs.tuning.tuner import prepare

PREFIXES = (1, 2, 3, 31, 62, 63, 64, 65, 127, 128, 129, 130, 1_000)
BRANCHES = (1, 2, 5, 64, 65, 200)
QUESTIONS = (5, 70)
"""Tokens of the two question prefixes of a request of three levels."""
MOST_SEGMENTS = 300
LONGEST = 1_300
"""Positions: above any prompt of either set."""
WAYS: tuple[tuple[str, Split], ...] = (
    ("batched", "exact"),
    ("levels", "exact"),
    ("levels", "aligned"),
    ("tree", "exact"),
    ("tree", "aligned"),
)


@dataclass(kw_only=True)
class Cell:
    """Candidates that equal themselves run alone, and that do not, over all requests of one set.

    `too_large` are requests that the schedule refuses: a tree is one pass, and a pass has a limit.
    """

    graphs: str
    schedule: str
    split: Split
    equal: int = 0
    differing: int = 0
    too_large: int = 0

    def count(self, hidden: Tensor, alone: Tensor) -> None:
        equal = num_equal(hidden, alone)
        self.equal += equal
        self.differing += len(alone) - equal


def tree_of(levels: int, prefix: int, lengths: Sequence[int], vocabulary: int) -> Questions:
    """A request of one level (nothing shared), two (`prefix` tokens shared) or three (two questions of their own)."""
    rng = np.random.default_rng(1_000 * levels + prefix)
    if levels == 1:
        return [siblings(rng, [], [prefix + n for n in lengths], vocabulary)]
    head = random_ids(rng, prefix, vocabulary)
    if levels == 2:
        return [siblings(rng, [head], lengths, vocabulary)]
    questions = []
    for q, tokens in enumerate(QUESTIONS):
        own = random_ids(rng, tokens, vocabulary)
        own[0] = q
        questions.append(siblings(rng, [head, own], lengths, vocabulary))
    return questions


def matrix(
    vocabulary: int, *, prefixes: Sequence[int] = PREFIXES, lengths: Sequence[int] = BRANCHES
) -> Iterator[Questions]:
    for levels in (1, 2, 3):
        for prefix in prefixes:
            yield tree_of(levels, prefix, lengths, vocabulary)


def random_layouts(vocabulary: int, count: int) -> Iterator[Questions]:
    """`count` requests of 1 to MOST_SEGMENTS segments, evenly over the logarithm; every other one has three levels."""
    rng = np.random.default_rng(count)
    for i, segments in enumerate(np.geomspace(1, MOST_SEGMENTS, count).round().astype(int).tolist()):
        head = random_ids(rng, int(rng.integers(0, 700)), vocabulary)
        if i % 2 or segments < 8:
            lengths = rng.integers(1, 41, max(1, segments - 1)).tolist()
            yield [siblings(rng, [head], lengths, vocabulary)]
            continue
        number = int(rng.integers(2, min(16, segments // 3) + 1))
        questions = []
        for q in range(number):
            own = random_ids(rng, int(rng.integers(1, 150)), vocabulary)
            own[0] = q
            lengths = rng.integers(1, 41, max(2, segments // number - 1)).tolist()
            questions.append(siblings(rng, [head, own], lengths, vocabulary))
        yield questions


def cells_of(executors: Mapping[str, Executor]) -> list[Cell]:
    return [Cell(graphs=g, schedule=schedule, split=split) for g in executors for schedule, split in WAYS]


def equality(
    requests: Sequence[Questions], executors: Mapping[str, Executor], cells: Sequence[Cell]
) -> tuple[int, int]:
    """Every way to run `requests` with `executors` (by graphs), against `independent` over the last, the fastest.

    Counts in `cells`, also when it ends early. Returns the number of requests done and an exit code: 0, or 130 after
    Ctrl-C, or 1 when a forward failed.
    """
    reference, done = list(executors.values())[-1], 0
    try:
        for questions in requests:
            alone, _ = last_rows(reference, plan_of(questions, "independent"))
            for cell in cells:
                _count(cell, questions, alone, executors[cell.graphs])
            done += 1
            if done % 20 == 0 or done == len(requests):
                progress(f"request {done} of {len(requests)}: {sum(c.differing for c in cells)} differ")
    except KeyboardInterrupt:
        progress(f"interrupted after {done} of {len(requests)} requests")
        return done, 130
    except InferenceError as error:
        progress(f"equality: request {done + 1} of {len(requests)}: {error}")
        return done, 1
    return done, 0


def _count(cell: Cell, questions: Questions, alone: Tensor, executor: Executor) -> None:
    try:
        plan = plan_of(questions, cell.schedule, cell.split)
    except CapacityError:
        cell.too_large += 1
        return
    cell.count(last_rows(executor, plan)[0], alone)
    if executor.has_missed:
        executor.capture_missed()
        cell.count(last_rows(executor, plan)[0], alone)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description="Compare every candidate's bits with those it has alone.")
    p.add_argument("--model", choices=tuple(DIMENSIONS), default="9b", help="whose dimensions (%(default)s)")
    p.add_argument(
        "--gemm",
        type=several(str, tuple(HANDLES)),
        default=["fixed", "tuned"],
        metavar="A,B",
        help=f"of {', '.join(HANDLES)} (fixed,tuned)",
    )
    p.add_argument(
        "--graphs", type=several(str, GRAPHS), default=list(GRAPHS), metavar="A,B", help=f"of {', '.join(GRAPHS)} (all)"
    )
    p.add_argument("--layers", type=positive, metavar="N", help="only the first N layers (all)")
    p.add_argument("--random", type=int, default=0, metavar="N", help="also N random layouts (%(default)s)")
    p.add_argument("--out", type=Path, metavar="FILE", help="append one JSON line per set and handle to FILE")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    if without_cuda("equality"):
        return 2
    dimensions, table, code = DIMENSIONS[arguments.model], [], 0
    dimensions = replace(dimensions, layer_types=dimensions.layer_types[: arguments.layers])
    weights = random_weights(dimensions, positions=LONGEST)
    if "tuned" in arguments.gemm:
        prepare(projection_shapes(dimensions), device=torch.device("cuda", 0), cache_dir=default_cache_dir())
    sets = {"matrix": list(matrix(dimensions.vocab_size))}
    if arguments.random:
        sets["random"] = list(random_layouts(dimensions.vocab_size, arguments.random))
    for gemm, name in itertools.product(arguments.gemm, sets):
        executors = {graphs: executor_of(weights, dimensions, gemm, graphs) for graphs in arguments.graphs}
        start, cells = time.perf_counter(), cells_of(executors)
        done, stopped = equality(sets[name], executors, cells)
        record = record_of(cells, arguments.model, gemm, name, time.perf_counter() - start)
        record.configuration.update(layers=dimensions.num_hidden_layers, requests=len(sets[name]), requests_done=done)
        table += [(gemm, name, c.graphs, c.schedule, c.split, c.equal, c.differing, c.too_large) for c in cells]
        if arguments.out is not None:
            Results(arguments.out).add(record)
        for executor in executors.values():
            executor.release()
        if gemm != "default" and record.configuration["differing"]:
            code = 1
        if stopped:
            code = stopped
            break
    headers = ("gemm", "set", "graphs", "schedule", "split", "equal", "differing", "too large")
    print_table(headers, [[str(value) for value in line] for line in table])
    return code


def record_of(cells: Sequence[Cell], model: str, gemm: str, name: str, seconds: float) -> Record:
    configuration = {
        "model": model, "checkpoint": "random", "gemm": gemm, "set": name, "cells": [vars(c) for c in cells],
        "equal": sum(c.equal for c in cells), "differing": sum(c.differing for c in cells),
    }  # fmt: skip
    return Record(
        kind="equality", name=f"{model}/{gemm}/{name}", samples_us=[seconds * 1e6], configuration=configuration
    )


if __name__ == "__main__":
    sys.exit(main())
