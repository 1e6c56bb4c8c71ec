"""The comparison on a tiny model: what is run and kept, what is refused, and gates that can fail."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "profiling"))  # scripts, not a package

import arms
import compare
import compare_loop
from compare_forecast import Forecast
from compare_journal import Cell, Journal, Preparation
from compare_options import CompareConfig, GatesConfig

from engine import Engine
from engine.config import EngineConfig
from engine.dimensions import ModelDimensions
from engine.errors import CapacityError, ConfigError
from engine.model import Weights
from tests.engine_support import cache_dir, choice, loaded

FAST = ["base", "independent", "tree", "aligned", "plain", "transformers/torch/one"]


@dataclass(frozen=True, kw_only=True)
class FakeWorkload:
    name: str
    set: str
    body: dict[str, Any]
    sha256: str
    candidates: int = 0


SHARED = {
    "state": "The second invoice was paid twice.",
    "questions": {"team": choice("billing", "sales", "legal"), "sure": {"type": "noul", "instructions": "Is it?"}},
}
SINGLE = {"state": "Paid.", "questions": {"refund": {"type": "noul", "instructions": "Is a refund due?"}}}
WORKLOADS = [
    FakeWorkload(name="m1/two", set="m1", body=SHARED, sha256="a1"),
    FakeWorkload(name="m4/one", set="m4", body=SINGLE, sha256="b2"),
]
CELL = Cell(
    pass_number=0, request="r", sha256="", arm="base", status="run", candidates=1, candidates_run=1, logical_tokens=1,
    seconds=3.0,
)  # fmt: skip
LENIENT = {"gates": GatesConfig(speedup=0.001, speedup_candidates=4, speedup_prefix_tokens=1, m4_slower=1e6)}
"""Limits that the times of a busy machine cannot fail."""


@pytest.fixture(autouse=True)
def _manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "workloads", lambda sets, *, jevbench: [w for w in WORKLOADS if w.set in sets])
    monkeypatch.setattr(compare, "environment", lambda: {"git": "one"})
    monkeypatch.setitem(sys.modules, "peers", PEERS)


@dataclass
class Run:
    code: int
    out: str
    err: str
    folder: Path

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "cells.jsonl").read_text().splitlines()]

    @property
    def cells(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["kind"] == "cell"]

    @property
    def summary(self) -> str:
        return (self.folder / "summary.md").read_text()


@cache
def owner() -> Engine:
    return loaded()


def load(config: EngineConfig) -> AbstractContextManager[Engine]:
    """The same engine for every run that does not ask for another."""
    return nullcontext(owner())


class FakePeer:
    """In place of transformers, which takes seconds to import: the first engine that runs, a little off."""

    def __init__(self, weights: Weights, dimensions: ModelDimensions, *, path: str, way: str) -> None:
        if path == "fla":
            raise ConfigError("path=fla needs a CUDA device")
        self.capture_seconds: dict[int, float] = {}

    def forward(self, questions: arms.Questions) -> torch.Tensor:
        return torch.cat(owner().forward(questions).hidden) + 1e-5

    def close(self) -> None: ...


PEERS = SimpleNamespace(Peer=FakePeer)


def run(folder: Path, load: Any = load, **options: Any) -> Run:
    defaults = {"device": "cpu", "cache_dir": cache_dir().name, "out": str(folder), "sets": ["m1", "m4"], "arms": FAST}
    config = CompareConfig(**{**defaults, "names": [], "few": {}, **LENIENT, **options})
    out, err = io.StringIO(), io.StringIO()
    code = compare.compare(config, load=load, stdout=out, stderr=err)
    return Run(code, out.getvalue(), err.getvalue(), folder)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A whole run, which several tests look at and none changes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "workloads", lambda sets, *, jevbench: WORKLOADS)
        patch.setattr(compare, "environment", lambda: {"git": "one"})
        patch.setitem(sys.modules, "peers", PEERS)
        yield run(tmp_path_factory.mktemp("run") / "out", Engine.load, few={"transformers/torch/one": 2})


class TestRun:
    def test_a_request_that_no_set_holds_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"names=m1/tow is in none of sets=m1,m4; did you mean 'm1/two'"):
            run(tmp_path / "out", names=["m1/tow"])

    def test_every_arm_runs_every_request_in_three_passes(self, done: Run) -> None:
        assert done.code == 0, done.err
        assert [(c["pass_number"], c["request"]) for c in done.cells[:: len(FAST)]] == [
            (number, workload.name) for number in range(3) for workload in WORKLOADS
        ]
        assert {(c["pass_number"], c["request"], c["arm"]) for c in done.cells} == {
            (number, workload.name, arm) for number in range(3) for workload in WORKLOADS for arm in FAST
        }
        assert [c["arm"] for c in done.cells if c["request"] == "m1/two" and c["pass_number"] == 1] == FAST[::-1]
        assert [c["arm"] for c in done.cells if c["request"] == "m1/two" and c["pass_number"] == 2] == FAST

    def test_cells_say_what_was_run(self, done: Run) -> None:
        first = {c["arm"]: c for c in done.cells if c["request"] == "m1/two" and c["pass_number"] == 0}
        facts = next(line for line in done.lines if line["kind"] == "request")
        assert facts["candidates"] == 4
        assert facts["unique_rows"] < facts["logical_tokens"]
        assert sum(first["independent"]["rows"].values()) == facts["logical_tokens"]
        assert first["independent"]["passes"] == {"branch": 4}
        assert first["tree"]["rows"] == {"tree": facts["unique_rows"]}
        assert sum(first["base"]["rows"].values()) == facts["unique_rows"]
        assert first["base"]["sha256"] == "a1"
        assert first["base"]["planned_bytes"]["snapshots"] > 0
        few = first["transformers/torch/one"]
        assert (few["candidates_run"], few["candidates"], len(few["bits"])) == (2, 4, 2)

    def test_the_reports_hold_gates_distances_and_what_was_left_out(self, done: Run) -> None:
        for text in ("identity", "m1/two", "| 2 of 4 |", "~", "base and plain", "vLLM", "support no claim"):
            assert text in done.summary, text
        for arm in ("base", "independent", "tree", "aligned"):
            assert f"| identity | {arm} | passed | 15 of 15 candidates equal |" in done.summary
        assert "declared: 2" in done.summary  # the limits of this test are not the declared ones
        assert "m1/two" in done.out

    def test_distances_are_over_what_both_arms_ran(self, done: Run) -> None:
        [close] = [
            d for d in done.lines
            if d["kind"] == "difference" and d["request"] == "m1/two" and d["other"] == "transformers/torch/one"
        ]  # fmt: skip
        assert len(close["hidden"]) == 2
        assert 0 < max(close["hidden"]) < 1e-4
        assert close["decisions"] == 0  # two of three candidates answer no question

    def test_the_reference_runs_all_candidates_once_and_then_a_few(self, tmp_path: Path) -> None:
        found = run(tmp_path / "out", arms=["base", "independent"], names=["m1/t*"], few={"independent": 1})
        alone = [c for c in found.cells if c["arm"] == "independent"]
        assert [(c["pass_number"], c["candidates_run"]) for c in alone] == [(0, 4), (1, 1), (2, 1)]
        assert "| identity | base | passed | 12 of 12 candidates equal |" in found.summary
        assert "| identity | independent | passed | 6 of 6 candidates equal |" in found.summary


class TestResume:
    def test_a_second_start_runs_nothing_again(self, tmp_path: Path) -> None:
        first = run(tmp_path / "out", arms=["base", "independent"])
        second = run(tmp_path / "out", arms=["base", "independent"], progress=False)
        assert second.code == 0
        assert second.cells == first.cells
        assert len(first.cells) == 12
        assert "ready" not in second.err  # nothing was even loaded

    def test_what_is_missing_is_run_and_a_torn_line_is_not_kept(self, done: Run, tmp_path: Path) -> None:
        folder = tmp_path / "out"
        folder.mkdir()
        lines = (done.folder / "cells.jsonl").read_text().splitlines(keepends=True)
        cut = next(i for i, line in enumerate(lines) if json.loads(line)["kind"] == "cell") + 2
        (folder / "cells.jsonl").write_text("".join(lines[:cut]) + lines[cut][:40])
        described = json.loads((done.folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps(described))
        again = run(folder, few={"transformers/torch/one": 2})
        assert again.code == 0
        assert len(again.cells) == len(done.cells)
        assert again.cells[:2] == done.cells[:2]
        # The distances of the first request need states that only the earlier start had.
        assert {d["arm"] for d in again.lines if d["kind"] == "difference"} == {"base", "plain"}

    def test_another_run_in_the_same_folder_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder, two = tmp_path / "out", ["base", "independent"]
        run(folder, arms=two, sets=["m4"])
        with pytest.raises(ConfigError, match=r"begun with configuration\.budget_minutes=2\.0, now 3"):
            run(folder, arms=two, sets=["m4"], budget_minutes=3)
        monkeypatch.setattr(compare, "environment", lambda: {"git": "another"})
        with pytest.raises(ConfigError, match=r"begun with environment\.git='one', now 'another'"):
            run(folder, arms=two, sets=["m4"])

    def test_a_request_that_changed_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder, two = tmp_path / "out", ["base", "independent"]
        run(folder, arms=two, sets=["m4"])
        changed = replace(WORKLOADS[1], sha256="c3")
        monkeypatch.setattr(compare, "workloads", lambda sets, *, jevbench: [changed])
        with pytest.raises(ConfigError, match=r"requests\.m4/one='b2', now 'c3'"):
            run(folder, arms=two, sets=["m4"])

    def test_a_folder_of_something_else_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").write_text("...")
        with pytest.raises(ConfigError, match=r"holds files and no run\.json"):
            run(tmp_path)

    def test_an_interrupted_run_keeps_its_cells_and_is_summed_up(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(self: arms.EngineArm, questions: arms.Questions) -> arms.Outcome:
            raise KeyboardInterrupt

        monkeypatch.setattr(arms.EngineArm, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "out", arms=["transformers/torch/one", "base", "independent"], sets=["m4"])
        assert "not evaluated" in (tmp_path / "out" / "summary.md").read_text()


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


class Planted:
    """Adds to one hidden state of an arm, as a fault in a kernel would."""

    def __init__(self, arm: str, value: float) -> None:
        self.arm, self.value = arm, value
        self.forward = arms.EngineArm.forward

    def __call__(self, one: arms.EngineArm, questions: arms.Questions) -> arms.Outcome:
        outcome = self.forward(one, questions)
        if one.name == self.arm:
            outcome.hidden[-1, 7] += self.value
        return outcome


class TestGates:
    @pytest.mark.parametrize("value", [1e-3, float("nan")])
    def test_a_wrong_bit_ends_the_run_with_code_1(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
    ) -> None:
        planted = Planted("tree", value)
        monkeypatch.setattr(arms.EngineArm, "forward", lambda one, questions: planted(one, questions))
        stopped = run(tmp_path / "out", arms=["base", "independent", "tree"])
        assert stopped.code == 1
        assert {c["request"] for c in stopped.cells} == {"m1/two"}
        assert {c["pass_number"] for c in stopped.cells} == {0}
        assert "gate failed: identity, tree" in stopped.err
        assert "| identity | tree | failed |" in stopped.summary
        assert "| identity | base | passed |" in stopped.summary

    def test_a_speed_gate_that_fails_ends_the_run_with_code_1(self, tmp_path: Path) -> None:
        limits = GatesConfig(speedup=1e9, speedup_candidates=4, speedup_prefix_tokens=1)
        stopped = run(tmp_path / "out", arms=["base", "independent"], gates=limits)
        assert stopped.code == 1
        assert "gate failed: speed-up, m1/two" in stopped.err
        assert [c["request"] for c in stopped.cells if c["pass_number"] == 2] == ["m1/two"] * 2

    @pytest.mark.parametrize(("error", "code"), [(CapacityError("too large for one pass"), 0), (ValueError("odd"), 1)])
    def test_an_arm_that_fails_leaves_the_others(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
    ) -> None:
        forward = arms.EngineArm.forward

        def failing(one: arms.EngineArm, questions: arms.Questions) -> arms.Outcome:
            if one.name == "tree":
                raise error
            return forward(one, questions)

        monkeypatch.setattr(arms.EngineArm, "forward", failing)
        left = run(tmp_path / "out", arms=["base", "independent", "tree"], sets=["m4"])
        assert left.code == code
        assert str(error) in left.summary
        assert len([c for c in left.cells if c["status"] == "run"]) == 6

    def test_an_arm_that_cannot_run_here_is_stated(self, tmp_path: Path) -> None:
        left = run(tmp_path / "out", arms=["base", "independent", "transformers/fla/one"], sets=["m4"])
        assert left.code == 0
        assert "transformers/fla/one: not run: path=fla needs a CUDA device" in left.err
        assert "not run: path=fla needs" in left.summary
