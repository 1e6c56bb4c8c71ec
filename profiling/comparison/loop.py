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
from floors import Ceilings
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
from engine.wire.requests import parse_request

ENOUGH_MS = 300.0
"""No further sample is taken once those of a cell took this long together."""
_RETAKES = 2
"""Forwards that ran beside captures are left out of the samples, but not more of them."""
_CLOCKS_S = 5.0
"""Asking for clocks takes longer than many a cell, so a reading serves for this long."""
_SLACK = 2.0
"""What took longer than so many times its rows at the arm's best rate compiled something, which it does once."""


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
    promised: float = 0.0
    """Seconds that the measured passes will take of what the excluded one ran."""
    rates: dict[str, float] = field(default_factory=dict)
    """Each arm's best so far, seconds per row."""
    clocks: tuple[float, dict[str, str]] = (float("-inf"), {})

    def run(self) -> None:
        """All passes; a gate that fails ends them. Raises what base and reference raise at start."""
        tasks = [(workload, self.owner.prompts(workload.body)) for workload in self.workloads]
        m4 = [workload.name for workload in self.workloads if workload.set == "m4"]
        try:
            self._open(min((questions for _, questions in tasks), key=lambda questions: len(questions[0][0])))
            for number in PASSES:
                for workload, questions in tasks:
                    self._group(number, workload, questions)
                    failed = [v for v in self._verdicts(number, workload, m4) if v.outcome == "failed"]
                    for verdict in failed:
                        self.report(f"gate failed: {verdict.gate}, {verdict.subject}: {verdict.detail}")
                    if failed:
                        return
        finally:
            for arm in self.arms.values():
                arm.close()

    @property
    def left_seconds(self) -> float:
        """Of the budget."""
        used = self.journal.earlier_seconds + time.perf_counter() - self.began
        return self.config.budget_minutes * 60 - used

    def _open(self, smallest: Questions) -> None:
        """Every arm with cells left, warmed up. One that cannot run is recorded with the reason; the gates need two."""
        for name in unfinished(self.config, self.journal, self.workloads):
            start, before, status = time.perf_counter(), self._allocated(), RUN
            try:
                arm = open_arm(name, self.owner)
                _timed(arm, first_candidates(smallest, 2))
                arm.held_bytes = self._allocated() - before
                self.arms[name] = arm
            except (ForkgraphError, RuntimeError, ImportError) as error:
                if name in (BASE, REFERENCE):
                    raise
                status = f"not run: {_first_line(error)}"
            seconds = time.perf_counter() - start
            self.journal.add(Preparation(arm=name, status=status, seconds=seconds))
            self.report(f"{name}: {f'ready after {seconds:.1f} s' if status == RUN else status}")

    def _group(self, number: int, workload: Workload, questions: Questions) -> None:
        """One request by every arm, in the other order in every second pass."""
        self.states.clear()
        self._forecast()
        facts = self._facts(workload, questions)
        start, done = time.perf_counter(), []
        for name in list(self.arms)[:: -1 if number % 2 else 1]:
            if (number, workload.name, name) in self.journal.cells or not self.config.takes(name, workload.set):
                continue
            done.append(self._cell(number, facts, questions, self.arms[name]))
            self.journal.add(done[-1])
        if number == FEASIBILITY:
            self._differences(workload, questions, facts)
        if done:
            seconds, ran = time.perf_counter() - start, sum(cell.ran for cell in done)
            left = f"{max(0.0, self.left_seconds) / 60:.1f} of {self.config.budget_minutes:g} minutes left"
            self.report(f"pass {number}, {workload.name}: {ran} of {len(done)} arms in {seconds:.1f} s; {left}")

    def _facts(self, workload: Workload, questions: Questions) -> RequestFacts:
        if known := self.journal.requests.get(workload.name):
            return known
        start = time.perf_counter()
        self.owner.prompts(workload.body)
        tokenise_ms = (time.perf_counter() - start) * 1e3
        layout, dimensions = build_layout(questions, "exact"), self.owner.dimensions
        gemm, roofline = None, None
        if self._on_gpu and self.owner.config.dtype == "bfloat16":
            roofline = Ceilings().floor_us(gemm_only_cost(dimensions, layout.unique_rows))
            if workload.set in SHOWN_ALONE:
                matrices = matrices_of(self.owner.weights)
                with torch.cuda.device(self.owner.config.device):
                    gemm = statistics.median(gemm_only_us(dimensions, layout.unique_rows, matrices=matrices, repeats=5))
        facts = RequestFacts(
            request=workload.name, set=workload.set, sha256=workload.sha256, candidates=layout.num_prompts,
            questions=len(questions), logical_tokens=layout.full_rows, unique_rows=layout.unique_rows,
            prefix_tokens=layout.request_prefix_tokens, tokenise_ms=tokenise_ms, gemm_only_us=gemm,
            roofline_us=roofline,
        )  # fmt: skip
        self.journal.add(facts)
        return facts

    def _cell(self, number: int, facts: RequestFacts, questions: Questions, arm: Arm) -> Cell:
        excluded = number == FEASIBILITY
        all_once = excluded and arm.name in self.config.whole
        questions = first_candidates(questions, None if all_once else self.config.few.get(arm.name))
        cell = Cell(
            pass_number=number, request=facts.request, sha256=facts.sha256, arm=arm.name, status=RUN,
            candidates=facts.candidates, candidates_run=sum(map(len, questions)),
            logical_tokens=sum(len(prompt) for prompts in questions for prompt in prompts),
        )  # fmt: skip
        first = self.journal.cells.get((FEASIBILITY, facts.request, arm.name))
        if first is not None and not first.ran:
            return cell.model_copy(update={"status": first.status})
        if self._needed(first, facts, cell) > self.left_seconds:
            return cell.model_copy(update={"status": OUT_OF_BUDGET})
        start, before, device = time.perf_counter(), self._allocated(), self.owner.config.device
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        samples, retaken, captured = list[float](), 0, 0.0
        try:
            if not excluded and (facts.request, arm.name) not in self.warm:  # that was in an earlier start
                captured += _timed(arm, questions)[2]
            self.warm.add((facts.request, arm.name))
            while len(samples) < (1 if excluded else self.config.samples) and sum(samples) < ENOUGH_MS:
                outcome, ms, seconds = _timed(arm, questions)
                captured += seconds
                if seconds and not excluded and retaken < _RETAKES:
                    retaken += 1
                else:
                    samples.append(ms)
        except Exception as error:
            kind = "not run" if isinstance(error, CapacityError) else "failed"  # a tree may be too large for one pass
            status = f"{kind}: {_first_line(error)}"
            gc.collect()
            if self._on_gpu:
                torch.cuda.empty_cache()
            return cell.model_copy(update={"status": status, "seconds": time.perf_counter() - start})
        found: dict[str, Any] = {}
        if self._on_gpu:
            found["peak_bytes"] = arm.held_bytes + torch.cuda.max_memory_allocated(device) - before
            arm.held_bytes += self._allocated() - before
            if time.perf_counter() - self.clocks[0] > _CLOCKS_S:
                self.clocks = time.perf_counter(), clocks(device)
            found["clocks"] = self.clocks[1]
        self.states[arm.name] = outcome.hidden
        found |= {"samples_ms": samples, "retaken": retaken, "capture_seconds": captured}
        found |= {"rows": outcome.rows, "passes": outcome.passes, "planned_bytes": outcome.planned}
        found |= {"bits": gates.bits_of(outcome.hidden), "finite": bool(torch.isfinite(outcome.hidden).all())}
        return cell.model_copy(update={**found, "seconds": time.perf_counter() - start})

    def _forecast(self) -> None:
        """Learn from what the excluded pass ran so far."""
        cells = [cell for cell in self.journal.cells.values() if cell.ran and cell.pass_number == FEASIBILITY]
        self.rates.clear()
        for cell in cells:
            rate = (cell.seconds - cell.capture_seconds) / cell.num_rows
            self.rates[cell.arm] = min(self.rates.get(cell.arm, float("inf")), rate)
        self.promised = (len(PASSES) - 1) * sum(map(self._again, cells))

    def _again(self, cell: Cell) -> float:
        """Seconds of a measured cell of the arm and request of `cell`, which is one of the excluded pass."""
        once = min(cell.seconds - cell.capture_seconds, _SLACK * self.rates[cell.arm] * cell.num_rows)
        once *= self._share(cell)
        return once * min(self.config.samples, 1 + ENOUGH_MS / 1e3 / once)

    def _share(self, cell: Cell) -> float:
        """What a measured pass runs of what `cell` runs in the excluded one."""
        return min(self.config.few.get(cell.arm, cell.candidates), cell.candidates) / cell.candidates_run

    def _needed(self, first: Cell | None, facts: RequestFacts, cell: Cell) -> float:
        """Seconds of a cell. Of the excluded pass also those of all that is to be measured: nothing is begun that there
        is no time to measure."""
        if first is not None:
            return self._again(first)
        rows = cell.logical_tokens if cell.arm in SCALABLE_ARMS else facts.unique_rows
        return self.promised + self.rates.get(cell.arm, 0.0) * rows * (1 + self._share(cell) * (len(PASSES) - 1))

    def _differences(self, workload: Workload, questions: Questions, facts: RequestFacts) -> None:
        head, request = scalar_head(self.owner), parse_request(workload.body)
        for pair in gates.COMPARED:
            cells = [self.journal.cells.get((FEASIBILITY, workload.name, name)) for name in pair]
            if (workload.name, *pair) in self.journal.differences or not all(c and c.ran and c.finite for c in cells):
                continue
            for cell in cells:
                if cell is not None and cell.arm not in self.states:  # it ran in an earlier start
                    few = first_candidates(questions, cell.candidates_run)
                    self.states[cell.arm] = _timed(self.arms[cell.arm], few)[0].hidden
            close = self.config.gates.close_probability
            self.journal.add(gates.difference(facts, request, self.states, pair, head, close))

    def _verdicts(self, number: int, workload: Workload, m4: Sequence[str]) -> list[gates.Verdict]:
        """What the last cells settle. Speed is judged in the last pass, over `m4` after its last request."""
        limits, cells = self.config.gates, self.journal.cells
        own = [cell for n in PASSES for arm in self.config.arms if (cell := cells.get((n, workload.name, arm)))]
        speed = []
        if number == PASSES[-1]:
            speed.append(gates.speedup(self.journal.requests[workload.name], own, limits))
            if m4 and workload.name == m4[-1]:
                speed.append(gates.m4_slower(m4, cells.values(), limits))
        return gates.identity(own) + [verdict for verdict in speed if verdict]

    @property
    def _on_gpu(self) -> bool:
        return self.owner.config.device != "cpu"

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self.owner.config.device) if self._on_gpu else 0


def unfinished(config: CompareConfig, journal: Journal, workloads: Sequence[Workload]) -> list[str]:
    """Arms that have cells left. One that could not be opened has none: what it lacked belongs to the run."""
    wanted = [(n, w.name, w.set) for n in PASSES for w in workloads]
    return [
        arm
        for arm in config.arms
        if (arm not in journal.preparations or journal.preparations[arm].status == RUN)
        and any((n, name, arm) not in journal.cells and config.takes(arm, of) for n, name, of in wanted)
    ]


def scalar_head(engine: Engine) -> Head:
    """Raises ConfigError for a head whose answers are not one scalar for each candidate."""
    if not isinstance(engine.processor, OpenJev):
        raise ConfigError("head=letters has one prompt for all candidates, so there is nothing to share; use another")
    assert engine.processor.head is not None
    return engine.processor.head


def _timed(arm: Arm, questions: Questions) -> tuple[Outcome, float, float]:
    """One forward, from token ids to hidden states on the host: what it gave, milliseconds, seconds of captures."""
    start = time.perf_counter()
    outcome = arm.forward(questions)
    ms = (time.perf_counter() - start) * 1e3
    return outcome, ms, arm.settle()


def _first_line(error: BaseException) -> str:
    text = str(error) if isinstance(error, ForkgraphError) else f"{type(error).__name__}: {error}"
    return text.split("\n")[0][:200]
