"""Whole requests under each schedule beside GEMM-only: wall time, rows run, memory, and equal bits.

Token ids go in, so no tokenizer is needed. `executor` runs a plan (tables filled, passes, hidden states back on the
host), `engine` is `Engine.forward` over the same candidates, with planning and the device's queue. All take turns.
`independent` and `batched` read every candidate whole; they run the first few of many, and their time is stated for all
of them (marked ~). Unless `gemm=default`, every candidate that ran must have the same bits everywhere.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from bench_options import BenchConfig
from forwards import Workload, executor_of, last_rows, loaded, num_equal, on_device, plan_of
from record import Record, ms, number, one_line
from timing import Replay, by_the_clock, in_turns
from torch import Tensor

from cases import Case, column
from cases.gemm import gemm_only, gemm_only_cost, matrices_of
from engine.config import RANDOM
from engine.engine import Engine
from engine.errors import CapacityError
from engine.options import Schedule
from engine.prompt import Prompt
from engine.statistics import Counters

SCHEDULES: tuple[Schedule, ...] = ("independent", "batched", "levels", "tree")
YARDSTICK = "GEMM-only"
ENOUGH_S = 5.0

Run = Callable[[], tuple[Tensor, Counters]]
"""Hidden states [candidates, h] of last rows, and what was run."""


@dataclass(kw_only=True)
class Way:
    """One schedule through the executor or the engine, warm: `hidden` of a run after all graphs were captured."""

    schedule: Schedule
    through: str
    run: Run
    hidden: Tensor
    counters: Counters
    peak_bytes: int | None
    """Above what was there before it; None on a CPU."""


Opened = tuple[Run, Callable[[], None]]
"""What is timed, and what captures the graphs that it missed."""


def through_executor(engine: Engine, prompts: list[Prompt], schedule: Schedule, stack: ExitStack) -> Opened:
    executor = executor_of(engine.weights, engine.dimensions, engine.config.gemm, engine.config.graphs)
    stack.callback(executor.release)
    plan = plan_of([prompts], schedule, engine.config.split)
    return lambda: last_rows(executor, plan), executor.capture_missed


def through_engine(engine: Engine, prompts: list[Prompt], schedule: Schedule, stack: ExitStack) -> Opened:
    own = stack.enter_context(engine.like(schedule=schedule))

    def run() -> tuple[Tensor, Counters]:
        forward = own.forward([prompts])
        return torch.stack([rows[-1] for rows in forward.hidden]), forward.counters

    return run, own.settle


THROUGH = {"executor": through_executor, "engine": through_engine}


def opened(engine: Engine, prompts: list[Prompt], schedule: Schedule, through: str, stack: ExitStack) -> Way:
    """Raises CapacityError for a tree that is larger than a pass, and what a forward raises."""
    device, before, peak = engine.config.device, 0, None
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    run, settle = THROUGH[through](engine, prompts, schedule, stack)
    run()
    settle()
    hidden, counters = run()
    if device != "cpu":
        peak = torch.cuda.max_memory_allocated(device) - before
    return Way(schedule=schedule, through=through, run=run, hidden=hidden, counters=counters, peak_bytes=peak)


def measure(config: BenchConfig) -> Iterator[Record]:
    schedules = SCHEDULES if config.schedule == "auto" else (config.schedule,)
    with loaded(config) as engine:
        for text in config.workloads:
            w = Workload.parse(text)
            # One candidate is one pass whatever the schedule.
            yield from of_workload(engine, w, schedules if w.candidates > 1 else schedules[:1], config)
            gc.collect()  # an executor that failed may hang in a traceback
            if engine.config.device != "cpu":
                torch.cuda.empty_cache()


def of_workload(engine: Engine, w: Workload, schedules: Sequence[Schedule], config: BenchConfig) -> Iterator[Record]:
    prompts = w.prompts(engine.dimensions.vocab_size)
    ways: list[Way] = []
    replays: dict[str, Replay] = {}
    with ExitStack() as stack:
        stack.enter_context(on_device(engine))
        if engine.config.device != "cpu" and engine.config.dtype == "bfloat16":
            replays[YARDSTICK] = gemm_only(w.unique_rows, matrices_of(engine.weights))
        for schedule in schedules:
            some = prompts[: w.candidates_run(schedule, config.few)]
            for through in THROUGH:
                try:
                    ways.append(opened(engine, some, schedule, through, stack))
                except Exception as error:
                    record = begun(w, schedule, through, config) | {"not_run": one_line(error)}
                    failed = "" if isinstance(error, CapacityError) else one_line(error)
                    yield Record(case="forward", name=name_of(record), configuration=record, failed=failed)
        replays |= {f"{way.schedule} {way.through}": by_the_clock(way.run) for way in ways}
        times = in_turns(replays, samples=config.samples, seconds=ENOUGH_S)
        yardstick = median(times[YARDSTICK]) if YARDSTICK in times else None
        for way in ways:
            most = max(ways, key=lambda way: len(way.hidden)).hidden[: len(way.hidden)]
            equal = min(num_equal(way.hidden, most), num_equal(way.run()[0], most))
            yield record_of(engine, w, way, times[f"{way.schedule} {way.through}"], equal, yardstick, config)


def begun(w: Workload, schedule: Schedule, through: str, config: BenchConfig) -> dict[str, Any]:
    what = {"model": config.model, "checkpoint": config.checkpoint or RANDOM, "workload": w.name}
    return what | {"schedule": schedule, "through": through}


def name_of(configuration: dict[str, Any]) -> str:
    return "/".join(configuration[key] for key in ("model", "workload", "schedule", "through"))


def record_of(
    engine: Engine, w: Workload, way: Way, samples: list[float], equal: int, yardstick: float | None,
    config: BenchConfig,
) -> Record:  # fmt: skip
    candidates = len(way.hidden)
    whole_us = median(samples) * w.candidates / candidates
    configuration = begun(w, way.schedule, way.through, config) | {
        "candidates": w.candidates, "candidates_run": candidates, "whole_us": whole_us, "rows": way.counters.rows,
        "passes": way.counters.passes, "unique_rows": w.unique_rows, "equal": equal, "gemm_only_us": yardstick,
        "peak_bytes_above_weights": way.peak_bytes, "ceilings": vars(config.ceilings),
        **{name: getattr(engine.config, name) for name in ("gemm", "graphs", "split", "dtype")},
    }  # fmt: skip
    record = Record(case="forward", name=name_of(configuration), samples_us=samples, configuration=configuration)
    if yardstick is not None:
        record.peer, record.ratio = "gemm/default", whole_us / yardstick
        record.floor_us = config.ceilings.floor_us(gemm_only_cost(engine.dimensions, w.unique_rows))
    if equal < candidates and engine.config.gemm != "default":
        record.failed = f"{candidates - equal} of {candidates} candidates have other bits"
    return record


def _total(key: str) -> Callable[[Record], object]:
    return lambda r: f"{sum(r.configuration[key].values()):,}" if key in r.configuration else None


def _run(record: Record) -> str:
    if "not_run" in record.configuration:
        return str(record.configuration["not_run"])
    run, of = record.configuration["candidates_run"], record.configuration["candidates"]
    return str(of) if run == of else f"~{run} of {of}"


CASE = Case(
    measure=measure,
    figures={
        **{name: column(name) for name in ("workload", "schedule", "through")},
        "run": _run,
        "rows": _total("rows"),
        "passes": _total("passes"),
        "ms": lambda r: ms(r.configuration.get("whole_us")),
        f"{YARDSTICK} ms": lambda r: ms(r.configuration.get("gemm_only_us")),
        "ratio": lambda r: number(r.ratio),
        "peak MiB": lambda r: number((b := r.configuration.get("peak_bytes_above_weights")) and b / 2**20, 0),
        "equal": column("equal"),
    },
)
