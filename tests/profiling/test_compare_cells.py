"""One cell of the comparison: what is measured on a GPU, and what a budget leaves out."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "profiling"))  # scripts, not a package

import arms
import compare_loop
from compare_forecast import Forecast
from compare_journal import Cell, Journal, Preparation
from compare_options import CompareConfig

from engine import Engine
from tests.profiling.compare_support import CELL, WORKLOADS, fake, owner, run


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch)


class Capturing:
    """An arm that captures behind its first forwards, as engines and peers do on a GPU."""

    name = "base"
    held_bytes = 0

    def __init__(self, captures: int) -> None:
        self.captures, self.forwards = captures, 0

    def forward(self, questions: arms.Questions) -> arms.Outcome:
        self.forwards += 1
        return arms.Outcome(hidden=torch.ones(sum(map(len, questions)), 4), rows={"branch": 1})

    def settle(self) -> float:
        return self.forwards / 2 if self.forwards <= self.captures else 0.0


def comparison_in(folder: Path, budget_minutes: float) -> compare_loop.Comparison:
    config = CompareConfig(device="cpu", budget_minutes=budget_minutes)
    return compare_loop.Comparison(
        config=config, owner=owner(), journal=Journal(folder, {}), began=time.perf_counter(), workloads=WORKLOADS,
        report=print,
    )  # fmt: skip


class TestOnAGpu:
    """What is only done there, with torch.cuda played."""

    @pytest.fixture(autouse=True)
    def _cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compare_loop.Comparison, "_on_gpu", True)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5 << 20)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 12 << 20)
        monkeypatch.setattr(compare_loop, "clocks", lambda device: {"clocks.sm": "1980 MHz"})
        monkeypatch.setattr(compare_loop, "gemm_only_us", lambda *_, **__: [7.0, 8.0, 9.0])

    def test_memory_clocks_and_the_yardstick_are_recorded(self, tmp_path: Path) -> None:
        arms_run = ["base", "independent"]
        wanted = {"names": ["m1/two", "m4/*"], "dtype": "bfloat16", "samples": 2}
        found = run(tmp_path / "out", Engine.load, arms=arms_run, **wanted)
        assert {c["peak_bytes"] for c in found.cells} == {7 << 20}
        assert {c["clocks"]["clocks.sm"] for c in found.cells} == {"1980 MHz"}
        facts = {line["request"]: line for line in found.lines if line["kind"] == "request"}
        assert {name: f["gemm_only_us"] for name, f in facts.items() if f["set"] == "m1"} == {"m1/two": 8.0}
        assert all(f["roofline_us"] > 0 and (f["set"] == "m1" or f["gemm_only_us"] is None) for f in facts.values())
        assert "clocks.sm 1980 MHz" in found.summary

    @pytest.mark.parametrize(("captures", "retaken", "forwards"), [(0, 0, 1), (1, 1, 2), (9, 2, 3)])
    def test_a_forward_beside_a_capture_is_taken_again_but_not_for_ever(
        self, tmp_path: Path, captures: int, retaken: int, forwards: int
    ) -> None:
        measured = self.cell(tmp_path, Capturing(captures), number=1)
        assert (measured.retaken, len(measured.samples_ms)) == (retaken, 1)
        assert measured.capture_seconds == sum(n / 2 for n in range(1, forwards + 1) if n <= captures)

    def test_the_feasibility_pass_takes_one_forward_with_its_captures(self, tmp_path: Path) -> None:
        arm = Capturing(9)
        first = self.cell(tmp_path, arm, number=0)
        assert (first.retaken, len(first.samples_ms), arm.forwards) == (0, 1, 1)

    @pytest.mark.parametrize("warm", [True, False])
    def test_a_measured_cell_that_is_the_first_of_its_start_is_not_measured_cold(
        self, tmp_path: Path, warm: bool
    ) -> None:
        arm = Capturing(0)
        measured = self.cell(tmp_path, arm, number=2, warm=warm)
        assert (arm.forwards, len(measured.samples_ms)) == (1 if warm else 2, 1)

    def cell(self, folder: Path, arm: Any, number: int, warm: bool = True) -> Cell:
        comparison = comparison_in(folder, budget_minutes=60)
        task = comparison._read(WORKLOADS[0])
        if warm:  # as a cell of an earlier pass leaves it
            comparison.warm.add((task.name, arm.name))
        return comparison._cell(number, task, comparison._facts(task), arm)

    def test_captures_are_counted_once_and_again_where_they_are_made_again(self) -> None:
        engine = SimpleNamespace(capture_seconds={(64, 1): 1.0}, config=SimpleNamespace(graphs="captured"))
        engine.settle = lambda: None
        arm = arms.EngineArm("base", SimpleNamespace(like=lambda: engine))  # type: ignore[arg-type]
        found = [arm.settle(), arm.settle()]
        engine.capture_seconds = {(64, 1): 1.25, (72, 1): 2.0}
        assert [*found, arm.settle(), arm.settle()] == [1.0, 0.0, 3.25, 0.0]
        peer = arms.PeerArm("transformers/torch/graph", owner())
        peer.peer.capture_seconds = {100: 1.0}
        found = [peer.settle()]
        peer.peer.capture_seconds = {100: 1.5, 101: 2.0}  # a peer adds up what a length took
        assert [*found, peer.settle(), peer.settle()] == [1.0, 2.5, 0.0]


class TestBudget:
    def test_what_does_not_fit_is_recorded_as_not_run(self, tmp_path: Path) -> None:
        spent = run(tmp_path / "out", arms=["base", "independent"], budget_minutes=1e-6)
        assert spent.code == 0
        assert {c["status"] for c in spent.cells} == {"not run: budget"}
        assert len(spent.cells) == 12
        assert "not run: budget (6)" in spent.summary
        assert "passed" not in spent.summary

    def test_nothing_is_begun_that_there_is_no_time_to_measure(self, tmp_path: Path) -> None:
        """The second request would fit once, not three times, beside what the first still takes."""
        comparison = comparison_in(tmp_path, budget_minutes=1.0)
        task = comparison._read(WORKLOADS[0])
        facts = replace(comparison._facts(task), unique_rows=100)
        arm: Any = Capturing(0)
        for seconds, status in ((3.5, "run"), (4.5, "not run: budget")):  # for 100 rows, with as much slack
            comparison.forecast = Forecast(few={}, samples=1)
            comparison.forecast.learn(replace(CELL, rows={"tree": 100}, seconds=seconds))
            comparison.forecast.promised = 35.0
            assert comparison._cell(0, task, facts, arm).status == status
        slow = replace(CELL, request=task.name, rows={"tree": 100}, seconds=70.0)
        comparison.journal.add(slow)
        comparison.forecast = Forecast(few={}, samples=1)
        comparison.forecast.learn(slow)
        assert comparison._cell(1, task, facts, arm).status == "not run: budget"

    def test_earlier_starts_count(self, tmp_path: Path) -> None:
        description = {"configuration": {}}
        journal = Journal(tmp_path / "out", description)
        journal.add(CELL)
        journal.add(Preparation(arm="base", status="run", seconds=1.5))
        journal.add(Preparation(arm="base", status="run", seconds=1.5))
        assert Journal(tmp_path / "out", description).earlier_seconds == 6.0
