"""The comparison itself: pass after pass, request after request, arm after arm, so that drift hits all alike.

A cell (pass, request, arm) is journalled as soon as it ends. Knows no file format and no table.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from cases.gemm import gemm_only_cost, gemm_only_us, matrices_of
from inputs import Ceilings
from record import clocks
from torch import Tensor
from workloads import Workload

from comparison import gates
from comparison.arms import Arm, Outcome, Questions, first_candidates, open_arm
from comparison.journal import FEASIBILITY, OUT_OF_BUDGET, PASSES, RUN, Cell, Journal, Preparation, RequestFacts
from comparison.options import BASE, REFERENCE, SCALABLE_ARMS, SHOWN_ALONE, CompareConfig
from engine.engine import Engine
from engine.errors import CapacityError, ConfigError, ForkgraphError
from engine.plan.layout import build_layout
from engine.wire.answers import Head
from engine.wire.open_jev import OpenJev
from engine.wire.requests import Request, parse_request

ENOUGH_MS = 300.0
"""No further sample is taken once those of a cell took this long together."""
_RETAKES = 2
"""Forwards that ran beside captures are left out of the samples, but not more of them."""
_CLOCKS_S = 5.0
"""Asking for clocks takes longer than many a cell, so a reading serves for this long."""
_SLACK = 2.0
"""What took longer than so many times its rows at the arm's best rate compiled something, which it does once."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One request, read and tokenised."""

    workload: Workload
    request: Request
    questions: Questions
    tokenise_ms: float

    @property
    def name(self) -> str:
        return self.workload.name


@dataclass(kw_only=True)
class Comparison:
    """Runs what the journal does not hold yet. `owner` holds the weights; arms are opened over it and closed."""

    config: CompareConfig
    owner: Engine
    journal: Journal
    began: float
    """`time.perf_counter()` when this start began, loading included."""
    workloads: Sequence[Workload]
    report: Callable[[str], None]
    """Called with one line after each request of each pass."""
    arms: dict[str, Arm] = field(default_factory=dict)
    states: dict[str, Tensor] = field(default_factory=dict)
    """Hidden states of the request at hand, by arm."""
    warm: set[tuple[str, str]] = field(default_factory=set)
    """Requests and arms that this start has run: some arms compile and capture for every request."""
    _clocks: tuple[float, dict[str, str]] = (float("-inf"), {})

    def run(self) -> bool:
        """All passes; False when a gate failed, which ends the run. Raises what base and reference raise at start."""
        tasks = [self._read(workload) for workload in self.workloads]
        m4 = [task.name for task in tasks if task.workload.set == "m4"]
        try:
            self._open(min(tasks, key=lambda task: sum(map(len, first_candidates(task.questions, 1)[0]))))
            for number in PASSES:
                for task in tasks:
                    self._group(number, task)
                    failed = [v for v in self._verdicts(number, task, m4) if v.outcome == "failed"]
                    for verdict in failed:
                        self.report(f"gate failed: {verdict.gate}, {verdict.subject}: {verdict.detail}")
                    if failed:
                        return False
        finally:
            for arm in self.arms.values():
                arm.close()
        return True

    @property
    def left_seconds(self) -> float:
        """Of the budget."""
        used = self.journal.earlier_seconds + time.perf_counter() - self.began
        return self.config.budget_minutes * 60 - used

    def _read(self, workload: Workload) -> Task:
        start = time.perf_counter()
        questions = self.owner.prompts(workload.body)
        ms = (time.perf_counter() - start) * 1e3
        return Task(workload=workload, request=parse_request(workload.body), questions=questions, tokenise_ms=ms)

    def _open(self, smallest: Task) -> None:
        """Every arm with cells left, warmed up. One that cannot run is recorded with the reason; the gates need two."""
        few = first_candidates(smallest.questions, 2)
        for name in unfinished(self.config, self.journal, self.workloads):
            start, before = time.perf_counter(), self._allocated()
            status = RUN
            try:
                arm = open_arm(name, self.owner)
                arm.forward(few)
                arm.settle()
                arm.held_bytes = self._allocated() - before
                self.arms[name] = arm
            except (ForkgraphError, RuntimeError, ImportError) as error:
                if name in (BASE, REFERENCE):
                    raise
                status = f"not run: {_first_line(error)}"
            seconds = time.perf_counter() - start
            self.journal.add(Preparation(arm=name, status=status, seconds=seconds))
            self.report(f"{name}: {f'ready after {seconds:.1f} s' if status == RUN else status}")

    def _group(self, number: int, task: Task) -> None:
        """One request by every arm, in the other order in every second pass."""
        self.states.clear()
        facts = self._facts(task)
        start, done = time.perf_counter(), []
        promised, rates = self._promised()
        for name in list(self.arms)[:: -1 if number % 2 else 1]:
            key = (number, task.name, name)
            if key in self.journal.cells or not self.config.takes(name, task.workload.set):
                continue
            cell = self._cell(number, task, facts, self.arms[name], promised, rates.get(name, 0.0))
            self.journal.add(cell)
            done.append(cell)
        if number == FEASIBILITY:
            self._differences(task, facts)
        if done:
            seconds, ran = time.perf_counter() - start, sum(cell.ran for cell in done)
            left = f"{max(0.0, self.left_seconds) / 60:.1f} of {self.config.budget_minutes:g} minutes left"
            self.report(f"pass {number}, {task.name}: {ran} of {len(done)} arms in {seconds:.1f} s; {left}")

    def _facts(self, task: Task) -> RequestFacts:
        known = self.journal.requests.get(task.name)
        if known is not None:
            return known
        layout = build_layout(task.questions, "exact")
        gemm, roofline = None, None
        if self._on_gpu and self.owner.config.dtype == "bfloat16":
            dimensions, rows = self.owner.dimensions, layout.unique_rows
            roofline = Ceilings().floor_us(gemm_only_cost(dimensions, rows))
            if task.workload.set in SHOWN_ALONE:
                matrices = matrices_of(self.owner.weights)
                with torch.cuda.device(self.owner.config.device):
                    gemm = statistics.median(gemm_only_us(dimensions, rows, matrices=matrices, repeats=5))
        facts = RequestFacts(
            request=task.name, set=task.workload.set, sha256=task.workload.sha256, candidates=layout.num_prompts,
            questions=len(task.questions), logical_tokens=layout.full_rows, unique_rows=layout.unique_rows,
            prefix_tokens=layout.request_prefix_tokens, tokenise_ms=task.tokenise_ms, gemm_only_us=gemm,
            roofline_us=roofline,
        )  # fmt: skip
        self.journal.add(facts)
        return facts

    def _cell(self, number: int, task: Task, facts: RequestFacts, arm: Arm, promised: float, rate: float) -> Cell:
        all_once = number == FEASIBILITY and arm.name in self.config.whole
        questions = first_candidates(task.questions, None if all_once else self.config.few.get(arm.name))
        what: dict[str, Any] = {
            "pass_number": number, "request": task.name, "sha256": facts.sha256, "arm": arm.name,
            "candidates": facts.candidates, "candidates_run": sum(map(len, questions)),
            "logical_tokens": sum(len(prompt) for prompts in questions for prompt in prompts),
        }  # fmt: skip
        first = self.journal.cells.get((FEASIBILITY, task.name, arm.name))
        if first is not None and not first.ran:
            return Cell(status=first.status, **what)
        if first is not None:
            needed = self._again(first, rate)
        else:  # nothing is begun that there is no time to measure
            once = rate * (what["logical_tokens"] if arm.name in SCALABLE_ARMS else facts.unique_rows)
            share = self._share(arm.name, facts.candidates, what["candidates_run"])
            needed = promised + once * (1 + share * (len(PASSES) - 1))
        if needed > self.left_seconds:
            return Cell(status=OUT_OF_BUDGET, **what)
        start, before = time.perf_counter(), self._allocated()
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(self.owner.config.device)
        samples: list[float] = []
        retaken, captured, wanted = 0, 0.0, 1 if number == FEASIBILITY else self.config.samples
        try:
            if number != FEASIBILITY and (task.name, arm.name) not in self.warm:  # that was in an earlier start
                captured += _timed(arm, questions)[2]
            self.warm.add((task.name, arm.name))
            while len(samples) < wanted and sum(samples) < ENOUGH_MS:
                outcome, ms, seconds = _timed(arm, questions)
                captured += seconds
                if seconds and number != FEASIBILITY and retaken < _RETAKES:
                    retaken += 1
                else:
                    samples.append(ms)
        except Exception as error:
            kind = "not run" if isinstance(error, CapacityError) else "failed"  # a tree may be too large for one pass
            status = f"{kind}: {_first_line(error)}"
            gc.collect()
            if self._on_gpu:
                torch.cuda.empty_cache()
            return Cell(status=status, seconds=time.perf_counter() - start, **what)
        peak = None
        if self._on_gpu:
            peak = arm.held_bytes + torch.cuda.max_memory_allocated(self.owner.config.device) - before
            arm.held_bytes += self._allocated() - before
        self.states[arm.name] = outcome.hidden
        return Cell(
            status=RUN, samples_ms=samples, retaken=retaken, capture_seconds=captured, rows=outcome.rows,
            passes=outcome.passes, planned_bytes=outcome.planned, peak_bytes=peak, bits=gates.bits_of(outcome.hidden),
            finite=bool(torch.isfinite(outcome.hidden).all()), clocks=self._clocks_now(),
            seconds=time.perf_counter() - start, **what,
        )  # fmt: skip

    def _promised(self) -> tuple[float, dict[str, float]]:
        """Seconds that the measured passes will take of what the excluded one ran, and each arm's best rate so far in
        seconds per row."""
        cells = [cell for cell in self.journal.cells.values() if cell.ran and cell.pass_number == FEASIBILITY]
        rates: dict[str, float] = {}
        for cell in cells:
            rates[cell.arm] = min(rates.get(cell.arm, float("inf")), _steady(cell) / sum(cell.rows.values()))
        return (len(PASSES) - 1) * sum(self._again(cell, rates[cell.arm]) for cell in cells), rates

    def _again(self, cell: Cell, rate: float) -> float:
        """Seconds of a measured cell of the arm and request of `cell`, which is one of the excluded pass."""
        share = self._share(cell.arm, cell.candidates, cell.candidates_run)
        once = min(_steady(cell), _SLACK * rate * sum(cell.rows.values())) * share
        return once * min(self.config.samples, 1 + ENOUGH_MS / 1e3 / once)

    def _share(self, arm: str, candidates: int, run: int) -> float:
        """What a measured pass runs of what the excluded one ran."""
        return min(self.config.few.get(arm, candidates), candidates) / run

    def _differences(self, task: Task, facts: RequestFacts) -> None:
        head = scalar_head(self.owner)
        for pair in gates.COMPARED:
            cells = [self.journal.cells.get((FEASIBILITY, task.name, name)) for name in pair]
            if (task.name, *pair) in self.journal.differences or not all(c and c.ran and c.finite for c in cells):
                continue
            for cell in cells:
                if cell is not None and cell.arm not in self.states:  # it ran in an earlier start
                    questions = first_candidates(task.questions, cell.candidates_run)
                    self.states[cell.arm] = self.arms[cell.arm].forward(questions).hidden
            close = self.config.gates.close_probability
            self.journal.add(gates.difference(task.request, self.states, pair, head, facts=facts, close=close))

    def _verdicts(self, number: int, task: Task, m4: Sequence[str]) -> list[gates.Verdict]:
        """What the last cells of `task` settle. Speed is judged in the last pass, over `m4` after its last request."""
        limits, cells = self.config.gates, self.journal.cells
        own = [cell for n in PASSES for arm in self.config.arms if (cell := cells.get((n, task.name, arm)))]
        found = gates.identity(own)
        if number == PASSES[-1]:
            speed = [gates.speedup(self._facts(task), own, limits)]
            if m4 and task.name == m4[-1]:
                speed.append(gates.m4_slower(m4, cells.values(), limits))
            found += [verdict for verdict in speed if verdict]
        return found

    @property
    def _on_gpu(self) -> bool:
        return self.owner.config.device != "cpu"

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self.owner.config.device) if self._on_gpu else 0

    def _clocks_now(self) -> dict[str, str]:
        at, found = self._clocks
        if self._on_gpu and time.perf_counter() - at > _CLOCKS_S:
            found = clocks(self.owner.config.device)
            self._clocks = time.perf_counter(), found
        return found


def unfinished(config: CompareConfig, journal: Journal, workloads: Sequence[Workload]) -> list[str]:
    """Arms that have cells left. One that could not be opened has none: what it lacked belongs to the run."""
    done, wanted = journal.cells, [(n, w.name, w.set) for n in PASSES for w in workloads]
    return [
        arm
        for arm in config.arms
        if (arm not in journal.preparations or journal.preparations[arm].status == RUN)
        and any((n, name, arm) not in done and config.takes(arm, of) for n, name, of in wanted)
    ]


def scalar_head(engine: Engine) -> Head:
    """Raises ConfigError for a head whose answers are not one scalar for each candidate."""
    if not isinstance(engine.processor, OpenJev):
        raise ConfigError("head=letters has one prompt for all candidates, so there is nothing to share; use another")
    assert engine.processor.head is not None
    return engine.processor.head


def _steady(cell: Cell) -> float:
    """Seconds without captures."""
    return cell.seconds - cell.capture_seconds


def _timed(arm: Arm, questions: Questions) -> tuple[Outcome, float, float]:
    """One forward, from token ids to hidden states on the host: what it gave, milliseconds, seconds of captures."""
    start = time.perf_counter()
    outcome = arm.forward(questions)
    ms = (time.perf_counter() - start) * 1e3
    return outcome, ms, arm.settle()


def _first_line(error: BaseException) -> str:
    text = str(error) if isinstance(error, ForkgraphError) else f"{type(error).__name__}: {error}"
    return text.split("\n")[0][:200]
