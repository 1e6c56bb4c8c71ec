"""Whole requests under each schedule beside GEMM-only: wall time, rows run, memory, and equal bits.

Token ids go in, so no tokenizer is needed. `executor` runs a plan (tables filled, passes, hidden states back on the
host), `engine` is `Engine.forward` over the same candidates, with planning and the device's queue. All take turns.
`independent` and `batched` read every candidate whole; they run the first few of many, and their time is stated for all
of them (marked ~). Unless `gemm=default`, every candidate that ran must have the same bits everywhere.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from statistics import median

import torch
from bench_options import BenchConfig
from floors import Ceilings
from forwards import Workload, executor_of, last_rows, loaded, num_equal, on_device, plan_of
from record import Record, ms, number, one_line
from timing import Replay, by_the_clock, in_turns
from torch import Tensor

from cases import Case, column
from cases.gemm import gemm_only, gemm_only_cost, matrices_of
from engine.config import RANDOM
from engine.engine import Engine
from engine.errors import CapacityError
from engine.prompt import Prompt
from engine.statistics import Counters
from engine.words import Schedule

SCHEDULES: tuple[Schedule, ...] = ("independent", "batched", "levels", "tree")
YARDSTICK = "GEMM-only"
ENOUGH_S = 5.0

Run = Callable[[], tuple[Tensor, Counters]]
"""Hidden states [candidates, h] of last rows, and what was run."""
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


def measure(config: BenchConfig) -> Iterator[Record]:
    schedules = SCHEDULES if config.schedule == "auto" else (config.schedule,)
    with loaded(config) as engine:
        for w in map(Workload.parse, config.workloads):
            # One candidate is one pass whatever the schedule.
            yield from of_workload(engine, w, schedules if w.candidates > 1 else schedules[:1], config)
            gc.collect()  # an executor that failed may hang in a traceback
            if engine.config.device != "cpu":
                torch.cuda.empty_cache()


def of_workload(engine: Engine, w: Workload, schedules: Sequence[Schedule], config: BenchConfig) -> Iterator[Record]:
    """A record for each schedule and way to run it. All of them are warm before the first is timed."""
    prompts, device = w.prompts(engine.dimensions.vocab_size), engine.config.device
    warm: dict[str, tuple[Record, Run, Tensor]] = {}
    replays: dict[str, Replay] = {}
    with ExitStack() as stack:
        stack.enter_context(on_device(engine))
        if device != "cpu" and engine.config.dtype == "bfloat16":
            replays[YARDSTICK] = gemm_only(w.unique_rows, matrices_of(engine.weights))
        for schedule, through in itertools.product(schedules, THROUGH):
            some = prompts[: w.candidates_run(schedule, config.few)]
            record = Record(case="forward", name=f"{config.model}/{w.name}/{schedule}/{through}")
            record.configuration = {
                "model": config.model, "checkpoint": config.checkpoint or RANDOM, "workload": w.name,
                "schedule": schedule, "through": through, "candidates": w.candidates, "candidates_run": len(some),
                **{name: getattr(engine.config, name) for name in ("gemm", "graphs", "split", "dtype")},
            }  # fmt: skip
            before = peak_bytes(device, reset=True)
            try:
                run, settle = THROUGH[through](engine, some, schedule, stack)
                run()
                settle()
                hidden, counters = run()
            except Exception as error:
                record.configuration["not_run"] = one_line(error)
                record.failed = "" if isinstance(error, CapacityError) else one_line(error)  # a tree may be too large
                yield record
                continue
            record.configuration |= {"rows": counters.rows, "passes": counters.passes, "unique_rows": w.unique_rows}
            record.configuration["peak_bytes_above_weights"] = peak_bytes(device) - before
            warm[record.name], replays[record.name] = (record, run, hidden), by_the_clock(run)
        times = in_turns(replays, samples=config.samples, seconds=ENOUGH_S)
        for record, run, hidden in warm.values():
            most = max((other for _, _, other in warm.values()), key=len)[: len(hidden)]
            record.configuration["equal"] = min(num_equal(hidden, most), num_equal(run()[0], most))
            yield timed(record, times[record.name], times.get(YARDSTICK), engine, w, config.ceilings)


def peak_bytes(device: str, *, reset: bool = False) -> int:
    """The most that was allocated since the last reset, which is then what is allocated now; 0 on a CPU."""
    if device == "cpu":
        return 0
    if reset:
        torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.max_memory_allocated(device)


def timed(
    record: Record, samples: list[float], yardstick: list[float] | None, engine: Engine, w: Workload, ceilings: Ceilings
) -> Record:
    run, equal = record.configuration["candidates_run"], record.configuration["equal"]
    record.samples_us, whole_us = samples, median(samples) * w.candidates / run
    record.configuration |= {"whole_us": whole_us, "ceilings": vars(ceilings)}
    if yardstick is not None:
        record.configuration["gemm_only_us"] = median(yardstick)
        record.peer, record.ratio = "gemm/default", whole_us / median(yardstick)
        record.floor_us = ceilings.floor_us(gemm_only_cost(engine.dimensions, w.unique_rows))
    if equal < run and engine.config.gemm != "default":
        record.failed = f"{run - equal} of {run} candidates have other bits"
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
