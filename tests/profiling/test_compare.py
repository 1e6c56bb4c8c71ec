"""The comparison on a tiny model: what is run and kept, what is refused, and gates that can fail."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import compare
import pytest
import torch
from comparison import arms, loop
from comparison.gates import verdicts
from comparison.journal import Cell, Journal, Preparation
from comparison.options import ARMS, CompareConfig, GatesConfig
from hydra import compose, initialize_config_module
from workloads import Workload

from engine import Engine
from engine.cli import to_config
from engine.config import MODELS, EngineConfig
from engine.errors import CapacityError, ConfigError
from engine.load.dimensions import ModelDimensions
from engine.load.tensors import Weights
from tests.engine.engine_support import cache_dir, choice, loaded

ROOT = Path(compare.__file__).parents[1]
FAST = ["base", "independent", "tree", "aligned", "plain", "transformers/torch/one"]
TWO = ["base", "independent"]
NOUL = {"type": "noul", "instructions": "Is it?"}
COUNTS = dict.fromkeys(
    ["questions", "candidates", "logical_tokens", "unique_tokens", "shared_prefix", "longest_prompt"], 1
)
SHARED = {
    "state": "The second invoice was paid twice.",
    "questions": {"team": choice("billing", "sales", "legal"), "sure": NOUL},
}
WORKLOADS = [
    Workload(name="m1/two", sha256="a1", body=SHARED, **COUNTS),
    Workload(name="m4/one", sha256="b2", body={"state": "Paid.", "questions": {"refund": NOUL}}, **COUNTS),
]
CELL = Cell(
    pass_number=0, request="m1/two", sha256="", arm="base", status="run", candidates=1, candidates_run=1,
    logical_tokens=1, seconds=3.0, rows={"tree": 100},
)  # fmt: skip
LENIENT = {"gates": GatesConfig(speedup=0.001, speedup_candidates=4, speedup_prefix_tokens=1, m4_slower=1e6)}
"""Limits that the times of a busy machine cannot fail."""


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


class Run:
    def __init__(self, folder: Path, load: Any = load, **options: Any) -> None:
        defaults = {"device": "cpu", "cache_dir": cache_dir().name, "out": str(folder), "sets": ["m1", "m4"]}
        config = CompareConfig(**{**defaults, "arms": FAST, "names": [], "few": {}, **LENIENT, **options})
        out, err = io.StringIO(), io.StringIO()
        self.code = compare.compare(config, load=load, stdout=out, stderr=err)
        self.out, self.err, self.summary = out.getvalue(), err.getvalue(), (folder / "summary.md").read_text()
        self.journal, self.folder = Journal(folder), folder
        self.cells = list(self.journal.cells.values())


def fake(patch: pytest.MonkeyPatch) -> None:
    """The requests, the environment and the peers of a run."""
    patch.setattr(compare, "workloads", lambda sets: [w for w in WORKLOADS if w.set in sets])
    patch.setattr(compare, "environment", lambda: {"git": "one", "causal_conv1d": None})
    patch.setitem(sys.modules, "peers", SimpleNamespace(Peer=FakePeer))


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A whole run, which several tests look at and none changes."""
    with pytest.MonkeyPatch.context() as patch:
        fake(patch)
        yield Run(tmp_path_factory.mktemp("run") / "out", few={"transformers/torch/one": 2})


class TestRun:
    def test_every_arm_runs_every_request_in_three_passes_alternating(self, done: Run) -> None:
        assert done.code == 0, done.err
        assert [cell.key for cell in done.cells] == [
            (number, workload.name, arm)
            for number in range(3)
            for workload in WORKLOADS
            for arm in FAST[:: -1 if number == 1 else 1]
        ]

    def test_cells_say_what_was_run(self, done: Run) -> None:
        first = {cell.arm: cell for cell in done.cells if cell.request == "m1/two" and cell.pass_number == 0}
        facts = done.journal.requests["m1/two"]
        assert facts.candidates == 4
        assert facts.unique_rows < facts.logical_tokens == sum(first["independent"].rows.values())
        assert first["independent"].passes == {"branch": 4}
        assert first["tree"].rows == {"tree": facts.unique_rows}
        assert first["base"].planned_bytes["snapshots"] > 0
        few = first["transformers/torch/one"]
        assert (few.candidates_run, few.candidates, len(few.bits), few.sha256) == (2, 4, 2, "a1")
        close = done.journal.differences["m1/two", "plain", "transformers/torch/one"]
        assert (len(close.hidden), 0 < max(close.hidden) < 1e-4) == (2, True), "over what both arms ran"
        assert close.decisions == 0, "two of three candidates answer no question"

    def test_the_page_holds_gates_distances_and_what_was_left_out(self, done: Run) -> None:
        for text in ("m1/two", "| 2 of 4 |", "~", "base and plain", "vLLM", "support no claim", "causal-conv1d"):
            assert text in done.summary, text
        for arm in ("base", "independent", "tree", "aligned"):
            assert f"| identity | {arm} | passed | 15 of 15 candidates equal |" in done.summary
        assert "declared: 2" in done.summary  # the limits of this test are not the declared ones
        assert done.summary in done.out

    def test_the_reference_runs_all_candidates_once_and_then_a_few(self, tmp_path: Path) -> None:
        found = Run(tmp_path / "out", arms=TWO, names=["m1/t*"], few={"independent": 1})
        alone = [cell for cell in found.cells if cell.arm == "independent"]
        assert [(cell.pass_number, cell.candidates_run) for cell in alone] == [(0, 4), (1, 1), (2, 1)]
        assert "| identity | base | passed | 12 of 12 candidates equal |" in found.summary

    def test_the_whole_command_on_a_cpu(self, tmp_path: Path) -> None:
        """As a user starts it, transformers included. The speed of a busy machine is no fact to assert."""
        words = [f"out={tmp_path}/run", "names=[m1/256x2,m1/256x8]", "budget_minutes=10", "gates.speedup=0.01"]
        done = subprocess.run(
            [sys.executable, "profiling/compare.py", *words],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        for arm in ("base", "independent", "batched", "levels_one", "tree", "aligned", "compiled"):
            assert f"| identity | {arm} | passed | 30 of 30 candidates equal |" in done.stdout
        for arm in ("plain", "transformers/torch/one", "transformers/torch/batched", "transformers/torch/forked"):
            assert f"| {arm} |" in done.stdout
        assert all(cell.ran for cell in Journal(tmp_path / "run").cells.values())


class TestResume:
    def test_what_is_missing_is_run_and_a_torn_line_is_not_kept(self, done: Run, tmp_path: Path) -> None:
        lines = (done.folder / "cells.jsonl").read_text().splitlines(keepends=True)
        cut = next(i for i, line in enumerate(lines) if json.loads(line)["kind"] == "cell") + 2
        (tmp_path / "cells.jsonl").write_text("".join(lines[:cut]) + lines[cut][:40])
        (tmp_path / "run.json").write_text((done.folder / "run.json").read_text())
        again = Run(tmp_path, few={"transformers/torch/one": 2})
        assert again.code == 0
        assert [cell.key for cell in again.cells] == [cell.key for cell in done.cells]
        assert again.cells[:2] == done.cells[:2]
        # The distances of the first request need states that only the earlier start had.
        assert set(again.journal.differences) == set(done.journal.differences)
        assert Run(tmp_path, pytest.fail, few={"transformers/torch/one": 2}).cells == again.cells, "nothing is loaded"

    def test_another_run_in_the_same_folder_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = tmp_path / "out"
        (tmp_path / "cells.jsonl").write_text("{}\n")
        with pytest.raises(ConfigError, match="line 1 is not of this command"):
            Journal(tmp_path)
        with pytest.raises(ConfigError, match=r"holds files and no run\.json"):
            Run(tmp_path)
        Run(folder, arms=TWO, sets=["m4"])
        with pytest.raises(ConfigError, match=r"begun with configuration\.budget_minutes=2\.0, now 3"):
            Run(folder, arms=TWO, sets=["m4"], budget_minutes=3)
        changed = WORKLOADS[1].model_copy(update={"sha256": "c3"})
        monkeypatch.setattr(compare, "workloads", lambda sets: [changed])
        with pytest.raises(ConfigError, match=r"requests\.m4/one='b2', now 'c3'"):
            Run(folder, arms=TWO, sets=["m4"])
        monkeypatch.setattr(compare, "environment", lambda: {"git": "another", "causal_conv1d": None})
        with pytest.raises(ConfigError, match=r"begun with environment\.git='one', now 'another'"):
            Run(folder, arms=TWO, sets=["m4"])

    def test_the_kept_results_can_be_read_and_judged_again(self) -> None:
        for folder in sorted((ROOT / "profiling" / "results").glob("*-compare-*")):
            journal, page = Journal(folder), (folder / "summary.md").read_text()
            found = verdicts(journal.requests.values(), journal.cells.values(), GatesConfig())
            assert {verdict.outcome for verdict in found} == {"passed"}
            for one in found:
                assert f"| {one.gate} | {one.subject} | {one.outcome} | {one.detail} |" in page


class TestGates:
    @pytest.mark.parametrize("value", [1e-3, float("nan")])
    def test_a_wrong_bit_ends_the_run_with_code_1(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
    ) -> None:
        forward = arms.EngineArm.forward

        def planted(one: arms.EngineArm, questions: arms.Questions) -> arms.Outcome:
            outcome = forward(one, questions)
            outcome.hidden[-1, 7] += value if one.name == "tree" else 0.0
            return outcome

        monkeypatch.setattr(arms.EngineArm, "forward", planted)
        stopped = Run(tmp_path / "out", arms=["base", "independent", "tree"])
        assert stopped.code == 1
        assert {cell.key[:2] for cell in stopped.cells} == {(0, "m1/two")}
        assert "gate failed: identity, tree" in stopped.err
        assert "| identity | tree | failed |" in stopped.summary
        assert "| identity | base | passed |" in stopped.summary

    def test_a_speed_gate_that_fails_ends_the_run_with_code_1(self, tmp_path: Path) -> None:
        limits = GatesConfig(speedup=1e9, speedup_candidates=4, speedup_prefix_tokens=1)
        stopped = Run(tmp_path / "out", arms=TWO, gates=limits)
        assert stopped.code == 1
        assert "gate failed: speed-up, m1/two" in stopped.err
        assert [cell.request for cell in stopped.cells if cell.pass_number == 2] == ["m1/two"] * 2

    @pytest.mark.parametrize(("error", "code"), [(CapacityError("too large for one pass"), 0), (ValueError("odd"), 1)])
    def test_an_arm_that_fails_leaves_the_others(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
    ) -> None:
        forward, calls = arms.EngineArm.forward, list[str]()

        def failing(one: arms.EngineArm, questions: arms.Questions) -> arms.Outcome:
            calls.append(one.name)
            if one.name == "tree" and calls.count("tree") > 1:  # the first is its warm-up
                raise error
            return forward(one, questions)

        monkeypatch.setattr(arms.EngineArm, "forward", failing)
        left = Run(tmp_path / "out", arms=[*TWO, "tree", "transformers/fla/one"], sets=["m4"])
        assert left.code == code
        assert str(error) in left.summary
        assert "not run: path=fla needs a CUDA device" in left.summary
        assert len([cell for cell in left.cells if cell.ran]) == 6


class Capturing:
    """An arm that captures behind its first forward, as engines and peers do on a GPU."""

    name, held_bytes, forwards = "base", 0, 0

    def forward(self, questions: arms.Questions) -> arms.Outcome:
        self.forwards += 1
        return arms.Outcome(hidden=torch.ones(sum(map(len, questions)), 4), rows={"branch": 1})

    def settle(self) -> float:
        return 0.5 if self.forwards == 1 else 0.0


class TestBudget:
    @pytest.fixture
    def comparison(self, tmp_path: Path) -> loop.Comparison:
        """With a minute of budget, and an excluded pass so far in which the first cell compiled."""
        journal = Journal.begun(tmp_path / "out", {})
        for request, seconds in (("a", 40.0), ("b", 2.0)):
            journal.add(CELL.model_copy(update={"request": request, "capture_seconds": 1.0, "seconds": seconds}))
        journal.add(Preparation(arm="base", status="run", seconds=1.5))
        return loop.Comparison(
            config=CompareConfig(device="cpu", budget_minutes=1), owner=owner(), journal=Journal(journal.folder),
            began=time.perf_counter(), workloads=WORKLOADS, report=print,
        )  # fmt: skip

    def test_what_compiled_once_is_not_expected_again_and_earlier_starts_count(
        self, comparison: loop.Comparison
    ) -> None:
        comparison._forecast()
        assert comparison.rates == {"base": 0.01}
        assert comparison.promised == pytest.approx(2 * (2 * 1.0 + 1.0))
        assert comparison.left_seconds == pytest.approx(60 - 43.5, abs=1)

    @pytest.mark.parametrize(("rate", "status"), [(0.02, "run"), (0.05, "not run: budget")])
    def test_nothing_is_begun_that_there_is_no_time_to_measure(
        self, comparison: loop.Comparison, rate: float, status: str
    ) -> None:
        """100 rows would fit once, not three times, beside the six seconds that were promised."""
        comparison.promised, comparison.rates, questions = 6.0, {"base": rate}, owner().prompts(SHARED)
        facts = comparison._facts(WORKLOADS[0], questions).model_copy(update={"unique_rows": 100})
        arm: Any = Capturing()
        assert comparison._cell(0, facts, questions, arm).status == status

    def test_a_sample_beside_a_capture_is_taken_again(self, comparison: loop.Comparison) -> None:
        questions = owner().prompts(SHARED)
        facts = comparison._facts(WORKLOADS[0], questions)
        comparison.warm.add(("m1/two", "base"))
        for number, found in ((0, (0, 1, 1)), (1, (1, 1, 2))):
            arm: Any = Capturing()
            cell = comparison._cell(number, facts, questions, arm)
            assert (cell.retaken, len(cell.samples_ms), arm.forwards, cell.capture_seconds) == (*found, 0.5)

    def test_a_spent_budget_leaves_everything_out_and_says_so(self, tmp_path: Path) -> None:
        spent = Run(tmp_path / "out", arms=TWO, budget_minutes=1e-6)
        assert (spent.code, {cell.status for cell in spent.cells}) == (0, {"not run: budget"})
        assert ("not run: budget (6)" in spent.summary, "passed" in spent.summary) == (True, False)


@pytest.mark.parametrize("model", MODELS)
def test_every_size_has_its_settings(model: str) -> None:
    words = [f"model={model}", "names=[m1/256x2]"]
    with initialize_config_module("configs", version_base=None):
        config = to_config(compose("compare", [*words, "gates.speedup=3", "budget_minutes=1"]), CompareConfig)
    assert (config.model, config.names, config.gates) == (model, ["m1/256x2"], GatesConfig(speedup=3))
    assert {*config.few, *config.only} <= set(config.arms)
    if model != "tiny":
        assert set(config.arms) == set(ARMS)
        assert {"m1", "m2", "m3", "m4"} <= set(config.sets), "every gate has its requests"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"arms": ["base", "independant"]}, r"arms=independant is not one of .*did you mean 'independent'"),
        ({"arms": ["base", "tree"]}, r"arms=base,tree: the gates need independent"),
        ({"few": {"independent": 4}, "whole": []}, r"few\.independent: bits are compared with those of all"),
        ({"gemm": "default"}, r"gemm=default promises no equal bits"),
        ({"gates": {"head": -1}}, r"gates\.head=-1 is not a positive number"),
        ({"names": ["m1/tow"]}, r"names=m1/tow is in none of sets=m1,m4; did you mean 'm1/two'"),
    ],
)
def test_what_cannot_work_is_refused_by_name(wrong: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        Run(tmp_path / "out", **({"gates": GatesConfig(**wrong["gates"])} if "gates" in wrong else wrong))
