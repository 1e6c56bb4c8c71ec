"""Bits of whole forwards: every candidate against itself run alone.

Two sets of requests. `matrix`: every prefix length around the borders of chunks, one, two and three levels, short and
long branches, through all layers. `random`: layouts of 1 to 300 segments, two and three levels, through the first
`layers`. Each is run under every schedule and split, `fixed` and `tuned`, eager, compiled and captured; a captured
forward counts both as it is missed and as it is replayed.

Time is bounded, and what is done first is spread evenly: requests come in a drawn order, and each is run by one handle
and one kind of graph before any is run by a second one. The bits of a candidate alone are those of one executor,
whatever handle is compared with it, since handles must not differ either.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from bench_options import BenchConfig
from forwards import Questions, executor_of, last_rows, loaded, num_equal, plan_of, random_ids, siblings
from record import Record, progress
from torch import Tensor

from cases import Case, column
from engine.config import RANDOM, EngineConfig
from engine.errors import CapacityError, ConfigError
from engine.plan.layout import Split
from engine.run.executor import Executor

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
Handle = tuple[str, str]
"""gemm and graphs."""


@dataclass(kw_only=True)
class Cell:
    """Candidates that equal themselves run alone, and that do not, over the requests that were run this way.

    `too_large` are requests that the schedule refuses: a tree is one pass, and a pass has a limit.
    """

    of: str
    gemm: str
    graphs: str
    schedule: str
    split: Split
    requests: int = 0
    equal: int = 0
    differing: int = 0
    too_large: int = 0


@dataclass(kw_only=True)
class Depth:
    """Executors over the same layers by handle, the one that runs candidates alone, and the cells they fill."""

    alone: Executor
    executors: Mapping[Handle, Executor]
    cells: Sequence[Cell]

    def states_alone(self, questions: Questions) -> Tensor:
        hidden, _ = last_rows(self.alone, plan_of(questions, "independent"))
        self.alone.capture_missed()
        return hidden

    def compare(self, handle: Handle, questions: Questions, alone: Tensor) -> None:
        """Run `questions` in every way and count."""
        executor = self.executors[handle]
        for cell in self.cells:
            if (cell.gemm, cell.graphs) != handle:
                continue
            cell.requests += 1
            try:
                plan = plan_of(questions, cell.schedule, cell.split)
            except CapacityError:
                cell.too_large += 1
                continue
            for _ in range(1 if executor.captured is None else 2):  # as it is missed, and as it is replayed
                equal = num_equal(last_rows(executor, plan)[0], alone)
                cell.equal += equal
                cell.differing += len(alone) - equal
                executor.capture_missed()


def cells_of(name: str, handles: Sequence[Handle], schedule: str = "auto") -> list[Cell]:
    ways = [way for way in WAYS if schedule in ("auto", way[0])]
    return [Cell(of=name, gemm=g, graphs=kind, schedule=s, split=split) for g, kind in handles for s, split in ways]


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
) -> list[Questions]:
    return [tree_of(levels, prefix, lengths, vocabulary) for levels in (1, 2, 3) for prefix in prefixes]


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


def compare_all(tasks: Sequence[tuple[Depth, Questions]], handles: Sequence[Handle], *, seconds: float) -> int:
    """Run each task by every handle, fewer if they take longer than `seconds`; the number of runs. Counts in cells."""
    start, order = time.perf_counter(), np.random.default_rng(0).permutation(len(tasks)).tolist()
    alone: dict[int, Tensor] = {}
    runs = [(task, handles[(i + turn) % len(handles)]) for turn in range(len(handles)) for i, task in enumerate(order)]
    for done, (task, handle) in enumerate(runs):
        if time.perf_counter() - start > seconds:
            return done
        if done % 20 == 0:
            progress(f"run {done} of {len(runs)}")
        depth, questions = tasks[task]
        if task not in alone:
            alone[task] = depth.states_alone(questions)
        depth.compare(handle, questions, alone[task])
    return len(runs)


def handles_of(config: BenchConfig, resolved: EngineConfig) -> list[Handle]:
    """Pairs that `config` asks for and the engine's device runs, the fastest last. Raises ConfigError for `default`.

    Of `auto`, compiled layers are run with one handle: the other's would take as long again to compile.
    """
    if config.gemm == "default":
        raise ConfigError("gemm=default promises no equal bits; use fixed, tuned or auto")
    gemms = list(dict.fromkeys(("fixed", resolved.gemm))) if config.gemm == "auto" else [config.gemm]
    graphs = ["eager", "compiled", "captured"] if resolved.device != "cpu" else ["eager"]
    kinds = graphs if config.graphs == "auto" else [config.graphs]
    return [(gemm, kind) for kind in kinds for gemm in (gemms[-1:] if kind == "compiled" else gemms)]


def measure(config: BenchConfig) -> Iterator[Record]:
    with loaded(config, schedule="auto", graphs="eager", max_length=max(LONGEST, config.max_length)) as engine:
        dimensions, handles = engine.dimensions, handles_of(config, engine.config)
        requests = {"matrix": matrix(dimensions.vocab_size)}
        layers = {"matrix": dimensions.num_hidden_layers, "random": config.layers}
        if config.random:
            requests["random"] = list(random_layouts(dimensions.vocab_size, config.random))
        depths = {}
        for name in requests:
            # The dimensions stay those of all layers, so that a layer compiled for one set serves the other.
            weights = replace(engine.weights, layers=engine.weights.layers[: layers[name]])
            *made, alone = (executor_of(weights, dimensions, *handle) for handle in (*handles, handles[-1]))
            executors = dict(zip(handles, made, strict=True))
            depths[name] = Depth(alone=alone, executors=executors, cells=cells_of(name, handles, config.schedule))
        tasks = [(depths[name], questions) for name in requests for questions in requests[name]]
        how = {"model": config.model, "checkpoint": config.checkpoint or RANDOM, "seed": config.seed}
        try:
            runs = compare_all(tasks, handles, seconds=config.seconds)
            progress(f"{runs} of {len(tasks) * len(handles)} runs in the time given")
        finally:  # whatever ended it, what was counted stands
            for cell in (cell for depth in depths.values() for cell in depth.cells):
                yield record_of(cell, how | {"layers": layers[cell.of], "all_requests": len(requests[cell.of])})
        for depth in depths.values():
            for executor in (depth.alone, *depth.executors.values()):
                executor.release()


def record_of(cell: Cell, how: Mapping[str, object]) -> Record:
    return Record(
        case="equality",
        name="/".join((str(how["model"]), cell.of, cell.gemm, cell.graphs, cell.schedule, cell.split)),
        configuration={**how, **asdict(cell)},
        failed=f"{cell.differing} candidates have other bits than alone" if cell.differing else "",
    )


def summary(records: Sequence[Record]) -> list[str]:
    equal, differing = (sum(r.configuration[key] for r in records) for key in ("equal", "differing"))
    return [f"{differing:,} of {equal + differing:,} comparisons differ"]


CASE = Case(
    measure=measure,
    figures={
        "set": lambda r: r.configuration["of"],
        **{name: column(name) for name in ("gemm", "graphs", "schedule", "split")},
        "requests": lambda r: f"{r.configuration['requests']} of {r.configuration['all_requests']}",
        **{name: column(name) for name in ("equal", "differing", "too_large")},
    },
    summary=summary,
)
