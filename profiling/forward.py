"""Whole forwards at real dimensions with random weights: wall time beside GEMM-only, rows run, memory, and equal bits.

Token ids go straight to the planner and the executor, so no tokenizer is needed. `independent` and `batched` read every
candidate whole; they run on the first few of many, and their time is stated for all of them (marked ~). Under `fixed`
every candidate that a schedule ran must equal that of the other schedules, bit for bit.

    python profiling/forward.py --model 9b --out profiling/results/forward.jsonl
"""

from __future__ import annotations

import argparse
import gc
import itertools
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from cases import DTYPE, add_arguments, ceilings_of, positive, print_table, progress, several, without_cuda
from gemm_only import gemm_only_cost, gemm_only_us, matrices_of
from measure import Record, Results
from torch import Tensor

from engine.config import default_cache_dir
from engine.errors import CapacityError
from engine.load.checkpoint import RandomWeights
from engine.load.dimensions import DIMENSIONS, ModelDimensions
from engine.load.projections import projection_shapes
from engine.load.weights import load_weights
from engine.plan.layout import Split, build_layout, independent_layout
from engine.plan.schedule import Limits, Plan, plan_passes
from engine.prompt import Prompt
from engine.run.executor import Executor
from engine.run.model import Backbone, Linear, Weights
from engine.statistics import Counters
from graphs.tuning.tuner import prepare
from ops.linear import linear_default, linear_fixed
from ops.linear_tuned import linear_tuned
from ops.tables import MAX_ROWS

GRAPHS = ("eager", "compiled", "captured")
CAPTURE_LIMIT = 2 << 30
HANDLES: dict[str, Linear] = {"fixed": linear_fixed, "default": linear_default, "tuned": linear_tuned}
SCHEDULES = ("independent", "batched", "levels", "tree")
SPLITS: tuple[Split, ...] = ("exact", "aligned")
WORKLOADS = "64,320,1088,3136,278+8x34,278+255x34,1048+32x33,3093+255x34"
BATCHED_PASSES = 4
"""About as many full passes as `batched` runs of a large workload."""
ENOUGH_S = 10.0
"""Samples stop once they took this long together."""

Questions = list[list[Prompt]]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One question of `candidates` prompts that share `prefix` tokens and go on for `length` of their own."""

    prefix: int
    candidates: int
    length: int

    @classmethod
    def parse(cls, text: str) -> Workload:
        """`3136`, or `278+8x34`."""
        found = re.fullmatch(r"(?:([1-9]\d*)\+([1-9]\d*)x)?([1-9]\d*)", text)
        if found is None:
            raise argparse.ArgumentTypeError(f"{text} is neither TOKENS nor PREFIX+CANDIDATESxTOKENS")
        prefix, candidates, length = found.groups()
        return cls(prefix=int(prefix or 0), candidates=int(candidates or 1), length=int(length))

    @property
    def name(self) -> str:
        return f"{self.prefix}+{self.candidates}x{self.length}" if self.prefix else str(self.length)

    @property
    def unique_rows(self) -> int:
        return self.prefix + self.candidates * self.length

    def questions(self, vocabulary: int) -> Questions:
        rng = np.random.default_rng(self.prefix + self.length)
        head = random_ids(rng, self.prefix, vocabulary)
        return [siblings(rng, [head], (self.length,) * self.candidates, vocabulary)]

    def candidates_run(self, schedule: str, few: int) -> int:
        """Of how many candidates `schedule` is measured."""
        if schedule == "independent":
            return min(self.candidates, few)
        if schedule == "batched":
            return min(self.candidates, max(few, BATCHED_PASSES * MAX_ROWS // (self.prefix + self.length)))
        return self.candidates


@dataclass(kw_only=True)
class Run:
    """What one schedule did with one workload: `hidden` [candidates run, h], of which `equal` have the right bits."""

    workload: Workload
    gemm: str
    schedule: str
    graphs: str
    samples_us: list[float]
    hidden: Tensor
    counters: Counters
    stable: bool
    """A run after the timed ones gave the bits of the first."""
    peak_bytes: int
    """Above what was there before: the weights, and the library's workspace."""
    equal: int = 0

    @property
    def candidates(self) -> int:
        return len(self.hidden)

    @property
    def us(self) -> float:
        """Median for the whole workload, from the share of it that was run."""
        return statistics.median(self.samples_us) * self.workload.candidates / self.candidates


def random_ids(rng: np.random.Generator, length: int, vocabulary: int) -> np.ndarray:
    return rng.integers(0, vocabulary, length, dtype=np.int32)


def siblings(
    rng: np.random.Generator, heads: Sequence[np.ndarray], lengths: Sequence[int], vocabulary: int
) -> list[Prompt]:
    """Prompts that share `heads` and part right after them: the first token of each branch is its own."""
    prompts = []
    for i, length in enumerate(lengths):
        branch = random_ids(rng, length, vocabulary)
        branch[0] = i
        prompts.append(Prompt(np.concatenate([*heads, branch])))
    return prompts


def plan_of(questions: Questions, schedule: str, split: Split = "exact") -> Plan:
    whole = schedule in ("independent", "batched")
    layout = independent_layout(questions) if whole else build_layout(questions, split)
    return plan_passes(layout, schedule=schedule, pack="all", limits=Limits())


def last_rows(executor: Executor, plan: Plan) -> tuple[Tensor, Counters]:
    """Hidden state of every prompt's last row, [prompts, h] in prompt order."""
    hidden, counters = executor.run(plan)
    return hidden[[places[-1] for places in plan.reads_of_prompt]], counters


def num_equal(a: Tensor, b: Tensor) -> int:
    """Rows of `a` [n, h] that are those of `b`, bit for bit; a NaN equals nothing."""
    return sum(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def executor_of(weights: Weights, dimensions: ModelDimensions, gemm: str, graphs: str) -> Executor:
    backbone = Backbone(weights, dimensions, HANDLES[gemm], compile_layers=graphs != "eager")
    return Executor(backbone, capture_limit_bytes=CAPTURE_LIMIT if graphs == "captured" else 0)


def measure(
    weights: Weights,
    dimensions: ModelDimensions,
    w: Workload,
    *,
    gemm: str,
    schedule: str,
    graphs: str,
    few: int,
    repeats: int,
) -> Run:
    """One warm-up, then wall times of `Executor.run`: tables filled, passes run, hidden states back on the host."""
    gc.collect()  # an executor that failed before may hang in a traceback
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    executor = executor_of(weights, dimensions, gemm, graphs)
    [prompts] = w.questions(dimensions.vocab_size)
    plan = plan_of([prompts[: w.candidates_run(schedule, few)]], schedule)
    hidden, counters = last_rows(executor, plan)
    executor.capture_missed()
    samples: list[float] = []
    while len(samples) < repeats and sum(samples) < ENOUGH_S * 1e6:
        start = time.perf_counter()
        executor.run(plan)
        samples.append((time.perf_counter() - start) * 1e6)
    again, _ = last_rows(executor, plan)
    return Run(
        workload=w, gemm=gemm, schedule=schedule, graphs=graphs, samples_us=samples, hidden=hidden, counters=counters,
        stable=num_equal(again, hidden) == len(hidden), peak_bytes=torch.cuda.max_memory_allocated() - before,
    )  # fmt: skip


def compare(runs: Sequence[Run]) -> None:
    """Count equal candidates within one workload and handle, against the run that has most of them."""
    if runs:
        reference = max(runs, key=lambda run: run.candidates)
        for run in runs:
            run.equal = num_equal(run.hidden, reference.hidden[: run.candidates]) if run.stable else 0


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description="Time whole forwards with random weights.")
    p.add_argument("--model", choices=tuple(DIMENSIONS), default="9b", help="whose dimensions (%(default)s)")
    p.add_argument(
        "--gemm",
        type=several(str, tuple(HANDLES)),
        default=["tuned", "default"],
        metavar="A,B",
        help=f"handles, in this order, of {', '.join(HANDLES)} (tuned,default)",
    )
    p.add_argument(
        "--schedules", type=several(str, SCHEDULES), default=list(SCHEDULES), metavar="A,B", help=", ".join(SCHEDULES)
    )
    p.add_argument(
        "--graphs",
        type=several(str, GRAPHS),
        default=["captured"],
        metavar="A,B",
        help=f"{', '.join(GRAPHS)} (captured)",
    )
    p.add_argument(
        "--workloads",
        type=several(Workload.parse),
        default=WORKLOADS,
        metavar="A,B",
        help=f"TOKENS or PREFIX+CANDIDATESxTOKENS ({WORKLOADS})",
    )
    p.add_argument(
        "--few", type=positive, default=4, help="candidates that independent and batched run at least (%(default)s)"
    )
    add_arguments(p, repeats=5)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    if without_cuda("forward"):
        return 2
    dimensions = DIMENSIONS[arguments.model]
    longest = max(w.prefix + w.length for w in arguments.workloads)
    weights = random_weights(dimensions, positions=longest)
    results = Results(arguments.out) if arguments.out else None
    if "tuned" in arguments.gemm:
        prepare(projection_shapes(dimensions), device=torch.device("cuda", 0), cache_dir=default_cache_dir())
    return run_workloads(weights, dimensions, arguments, results)


def random_weights(dimensions: ModelDimensions, *, positions: int) -> Weights:
    device = torch.device("cuda")
    source = RandomWeights(dimensions, seed=0, dtype=DTYPE, device=device)

    def report(done: int, layers: int) -> None:
        if done % 8 == 0 or done == layers:
            progress(f"weights: layer {done} of {layers}")

    return load_weights(source.tensor, dimensions, dtype=DTYPE, device=device, positions=positions, progress=report)


def run_workloads(
    weights: Weights, dimensions: ModelDimensions, arguments: argparse.Namespace, results: Results | None
) -> int:
    matrices, table, failed = matrices_of(weights), [], False
    for w in arguments.workloads:
        yardstick = statistics.median(gemm_only_us(dimensions, w.unique_rows, matrices=matrices, repeats=10))
        progress(f"{w.name}: {w.unique_rows:,} unique rows, GEMM-only {yardstick / 1e3:.2f} ms")
        # One candidate is one pass whatever the schedule.
        schedules = arguments.schedules if w.candidates > 1 else arguments.schedules[:1]
        for gemm in arguments.gemm:
            runs = []
            for graphs, schedule in itertools.product(arguments.graphs, schedules):
                how = {"gemm": gemm, "schedule": schedule, "graphs": graphs}
                try:
                    runs.append(measure(weights, dimensions, w, **how, few=arguments.few, repeats=arguments.repeats))
                    progress(f"{w.name} {gemm} {schedule} {graphs}: {runs[-1].us / 1e3:,.1f} ms")
                except Exception as error:
                    text = f"{type(error).__name__}: {error}".split("\n")[0][:100]
                    failed |= not isinstance(error, CapacityError)  # a tree may be too large for one pass
                    table.append((w.name, gemm, schedule, graphs, *["-"] * 7, text))
                    progress(f"{w.name} {gemm} {schedule} {graphs}: {text}")
            compare(runs)
            for run in runs:
                failed |= gemm != "default" and run.equal < run.candidates
                table.append(line(run, yardstick))
                if results is not None:
                    results.add(record_of(run, yardstick, dimensions, arguments))
    print_table(
        (
            "workload",
            "gemm",
            "schedule",
            "graphs",
            "run",
            "rows",
            "passes",
            "ms",
            "GEMM-only ms",
            "ratio",
            "peak MiB",
            "equal",
        ),
        table,
    )
    return int(failed)


def line(run: Run, yardstick: float) -> tuple[str, ...]:
    all_of_them = run.candidates == run.workload.candidates
    return (
        run.workload.name,
        run.gemm,
        run.schedule,
        run.graphs,
        str(run.candidates) if all_of_them else f"{run.candidates} of {run.workload.candidates}",
        f"{run.counters.total_rows:,}",
        str(sum(run.counters.passes.values())),
        f"{'' if all_of_them else '~'}{run.us / 1e3:,.2f}",
        f"{yardstick / 1e3:,.2f}",
        f"{run.us / yardstick:.2f}",
        f"{run.peak_bytes / 2**20:,.0f}",
        f"{run.equal}/{run.candidates}" if run.stable else "unstable",
    )


def record_of(run: Run, yardstick: float, dimensions: ModelDimensions, arguments: argparse.Namespace) -> Record:
    w, ceilings = run.workload, ceilings_of(arguments)
    return Record(
        kind="forward",
        name=f"{arguments.model}/{w.name}/{run.gemm}/{run.schedule}/{run.graphs}",
        samples_us=run.samples_us,
        configuration={
            "model": arguments.model,
            "checkpoint": "random",
            "workload": vars(w),
            "gemm": run.gemm,
            "schedule": run.schedule,
            "graphs": run.graphs,
            "split": "exact",
            "candidates_run": run.candidates,
            "whole_us": run.us,
            "rows": run.counters.rows,
            "passes": run.counters.passes,
            "unique_rows": w.unique_rows,
            "gemm_only_us": yardstick,
            "peak_bytes_above_weights": run.peak_bytes,
            "equal": run.equal,
            "stable": run.stable,
            "ceilings": vars(ceilings),
        },
        peer="gemm_only/default",
        ratio=run.us / yardstick,
        floor_us=ceilings.floor_us(gemm_only_cost(dimensions, w.unique_rows)),
    )


if __name__ == "__main__":
    sys.exit(main())
