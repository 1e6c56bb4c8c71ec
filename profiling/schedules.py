"""Is `schedule=auto` more than 3 % slower than the best single schedule? Whole forwards with random weights, in turns.

Each schedule is an engine over the same weights. In a round each answers once, in an order drawn anew, so that drift of
clocks hits all alike. Stated is the median over rounds of the ratio of two times, with the 95 % bootstrap interval of
that median. Every timed forward must have the bits of `auto`'s.

Where `auto` chose the best schedule, both ran the same plan, and the ratio shows noise and the time of choosing. With
one candidate all schedules run the same pass, and the ratio shows how far the best of equals lies below one of them.
`flat` is `auto`'s alone: levels without passes for question prefixes. What it knows of times is from its own graphs.

    python profiling/schedules.py --model 9b --tokenizer FOLDER --requests configs/requests --out FILE
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import geometric_mean, median
from typing import NamedTuple

import numpy as np
import torch
from cases import positive, print_table, progress, several, without_cuda
from forward import WORKLOADS, Questions, Workload
from gemm_only import gemm_only_us, matrices_of
from measure import Record, Results

from engine.config import LARGEST_MAX_LENGTH, RANDOM
from engine.engine import Engine, Forward
from engine.errors import CapacityError, ConfigError, ForkgraphError, InferenceError, RequestError
from engine.load.dimensions import DIMENSIONS
from engine.plan.layout import Layout, build_layout
from engine.statistics import Counters

AUTO = "auto"
SINGLE = ("levels", "tree", "batched", "independent")
MOST_FULL = {"batched": 4, "independent": 2}
"""Most full rows over unique rows to be tried at. `independent` may win over `batched`, where it is padded less."""
OFF_RUNGS = "65,331,1101,150+5x211,285+7x31,1100+40x29,3001+100x37"
"""Beside those of forward.py: row counts that are padded."""
LIMIT = 1.03
MOST_WARM_UPS = 6


class Ratio(NamedTuple):
    """A median over rounds, and the 95 % interval of it."""

    median: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        if self.high <= LIMIT:
            return "within 3 %"
        return "slower" if self.low > LIMIT else "unclear"


@dataclass(kw_only=True)
class Work:
    """A workload or a request, and what the schedules did with it: those not tried, or too large, are absent."""

    name: str
    questions: Questions
    gemm_only_us: float = 0.0
    samples_us: dict[str, list[float]] = field(default_factory=dict)
    """By schedule, in the order of rounds."""
    counters: dict[str, Counters] = field(default_factory=dict)
    """Of the last forward."""
    differing: set[str] = field(default_factory=set)
    """Schedules with a timed forward whose bits are not those of `auto`'s warm-up."""

    @cached_property
    def layout(self) -> Layout:
        return build_layout(self.questions, "exact")

    @property
    def schedules(self) -> list[str]:
        """Those worth a try beside `auto`."""
        share = self.layout.full_rows / self.layout.unique_rows
        return [name for name in SINGLE if share <= MOST_FULL.get(name, share)]

    def us(self, name: str) -> float:
        return median(self.samples_us[name])

    @property
    def best(self) -> str:
        return min((name for name in self.samples_us if name != AUTO), key=self.us)

    @cached_property
    def ratio(self) -> Ratio:
        """`auto` over the best."""
        return ratio_of(self.samples_us[AUTO], self.samples_us[self.best])

    @property
    def chosen(self) -> str:
        """The way that `auto` took, which its passes tell."""
        passes = self.counters[AUTO].passes
        flat = self.layout.question_prefix_tokens > 0 and "question" not in passes
        return "tree" if "tree" in passes else "flat" if flat else "levels"


def ratio_of(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """`a` over `b`, round by round."""
    ratios = np.divide(a, b)
    picks = np.random.default_rng(0).integers(len(ratios), size=(1_000, len(ratios)))
    low, high = np.quantile(np.median(ratios[picks], axis=1), (0.025, 0.975))
    return Ratio(float(np.median(ratios)), float(low), float(high))


def timed(engine: Engine, questions: Questions) -> tuple[Forward, float]:
    """One forward, and microseconds from token ids to hidden states on the host; no capture runs beside the next."""
    start = time.perf_counter()
    forward = engine.forward(questions)
    us = (time.perf_counter() - start) * 1e6
    engine.settle()
    return forward, us


def warmed(engine: Engine, questions: Questions) -> Forward:
    """The first forward behind which nothing was captured: new times may make `auto` choose another way once more."""
    for _ in range(MOST_WARM_UPS):
        before = engine.capture_seconds
        forward, _ = timed(engine, questions)
        if engine.capture_seconds == before:
            break
    return forward


def measure(engines: Mapping[str, Engine], work: Work, *, samples: int) -> None:
    """`samples` rounds of `work` over `engines`, by schedule; `auto` among them."""
    warm = {AUTO: warmed(engines[AUTO], work.questions)}
    for name in work.schedules:
        with suppress(CapacityError):  # a tree may be too large for one pass
            warm[name] = warmed(engines[name], work.questions)
    rng = np.random.default_rng(0)
    work.samples_us = {name: [] for name in warm}
    for _ in range(samples):
        for name in rng.permutation(list(warm)).tolist():
            forward, us = timed(engines[name], work.questions)
            work.samples_us[name].append(us)
            work.counters[name] = forward.counters
            if not all(torch.equal(a, b) for a, b in zip(forward.hidden, warm[AUTO].hidden, strict=True)):
                work.differing.add(name)


def works_of(engine: Engine, workloads: Sequence[Workload], requests: Sequence[tuple[str, Path]]) -> list[Work]:
    """Raises ConfigError for a request that `engine` does not take."""
    works = [Work(name=w.name, questions=w.questions(engine.dimensions.vocab_size)) for w in workloads]
    for name, path in requests:
        try:
            works.append(Work(name=name, questions=engine.prompts(path.read_bytes())))
        except RequestError as error:
            raise ConfigError(f"{path}: {error}") from None
    return works


def run(arguments: argparse.Namespace, done: list[Work]) -> None:
    """Adds each piece of work to `done` and to the file as it ends. Raises what loading an engine raises."""
    with ExitStack() as stack:
        progress(f"loading {arguments.model}")
        load = {"model": arguments.model, "checkpoint": RANDOM, "tokenizer": arguments.tokenizer}
        auto = stack.enter_context(Engine.load(schedule=AUTO, max_length=LARGEST_MAX_LENGTH, **load))
        works = works_of(auto, arguments.workloads, [named for below in arguments.requests for named in below])
        engines = {AUTO: auto} | {name: stack.enter_context(auto.like(schedule=name)) for name in SINGLE}
        for name in SINGLE:  # loading has warmed up the first
            engines[name].warm_up()
        matrices = matrices_of(auto.weights)
        for work in works:
            work.gemm_only_us = median(gemm_only_us(auto.dimensions, work.layout.unique_rows, matrices=matrices))
            measure(engines, work, samples=arguments.samples)
            done.append(work)
            for name in work.samples_us if arguments.out is not None else ():
                Results(arguments.out).add(record_of(work, name, arguments.model))
            progress(f"{work.name}: {work.chosen}, {work.ratio.median:.3f} of {work.best}, {work.ratio.verdict}")


def cells(work: Work) -> dict[str, str]:
    """A line of the table, by its headers."""
    us, ratio = work.us(AUTO), work.ratio
    singles = {f"{name} ms": f"{work.us(name) / 1e3:,.2f}" if name in work.samples_us else "-" for name in SINGLE}
    verdict = f"other bits: {', '.join(sorted(work.differing))}" if work.differing else ratio.verdict
    return {
        "work": work.name, "unique rows": f"{work.layout.unique_rows:,}", "auto ms": f"{us / 1e3:,.2f}",
        "chosen": work.chosen, **singles, "best": work.best, "auto / best": f"{ratio.median:.3f}",
        "95 %": f"{ratio.low:.3f} to {ratio.high:.3f}", "verdict": verdict,
        "GEMM-only ms": f"{work.gemm_only_us / 1e3:,.2f}", "auto / GEMM-only": f"{us / work.gemm_only_us:.2f}",
    }  # fmt: skip


def record_of(work: Work, name: str, model: str) -> Record:
    layout, counters, samples = work.layout, work.counters[name], work.samples_us
    configuration = {
        "model": model, "checkpoint": RANDOM, "schedule": name, "candidates": layout.num_prompts,
        "unique_rows": layout.unique_rows, "full_rows": layout.full_rows, "rows": counters.rows,
        "passes": counters.passes, "gemm_only_us": work.gemm_only_us, "equal": name not in work.differing,
        "auto_over_this": ratio_of(samples[AUTO], samples[name])._asdict(), "chosen": work.chosen, "best": work.best,
    }  # fmt: skip
    return Record(
        kind="schedules", name=f"{model}/{work.name}/{name}", samples_us=samples[name], configuration=configuration,
        peer="gemm_only/default", ratio=work.us(name) / work.gemm_only_us,
    )  # fmt: skip


def request_files(text: str) -> list[tuple[str, Path]]:
    """An argparse type: one file, or all .json files below a folder, each with the name it has there."""
    path = Path(text)
    folder, files = (path, sorted(path.rglob("*.json"))) if path.is_dir() else (path.parent, [path] * path.is_file())
    if not files:
        raise argparse.ArgumentTypeError(f"{text} is neither a file nor a folder with .json files")
    return [(file.relative_to(folder).with_suffix("").as_posix(), file) for file in files]


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description="Compare schedule=auto with the best single schedule.")
    p.add_argument("--model", choices=tuple(DIMENSIONS), default="9b", help="whose dimensions (%(default)s)")
    p.add_argument("--tokenizer", metavar="FOLDER", help="with the tokenizer.json that requests are read with")
    p.add_argument(
        "--workloads", type=several(Workload.parse), default=f"{WORKLOADS},{OFF_RUNGS}", metavar="A,B",
        help="TOKENS or PREFIX+CANDIDATESxTOKENS (%(default)s)",
    )  # fmt: skip
    p.add_argument("--requests", type=request_files, nargs="+", default=[], metavar="PATH", help="files or folders")
    p.add_argument("--samples", type=positive, default=30, help="rounds of each piece of work (%(default)s)")
    p.add_argument("--out", type=Path, metavar="FILE", help="append one JSON line per piece of work and arm to FILE")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    options = parser()
    arguments = options.parse_args(argv)
    if arguments.requests and arguments.tokenizer is None:
        options.error("--requests needs --tokenizer: that of the tiny model gives other numbers of tokens")
    if without_cuda("schedules"):
        return 2
    done: list[Work] = []
    code = 0
    try:
        run(arguments, done)
    except ForkgraphError as error:
        progress(f"schedules: {error}")
        code = 1 if isinstance(error, InferenceError) else 2
    except KeyboardInterrupt:
        progress("schedules: interrupted")
        code = 130
    if done:
        print_table(list(cells(done[0])), [list(cells(work).values()) for work in done])
        worst = max(done, key=lambda work: work.ratio.median)
        mean = geometric_mean(work.ratio.median for work in done)
        print(f"auto over the best: worst {worst.ratio.median:.3f} ({worst.name}), geometric mean {mean:.3f}")
    return code or int(any(work.differing or work.ratio.verdict == "slower" for work in done))


if __name__ == "__main__":
    sys.exit(main())
