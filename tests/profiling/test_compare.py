"""The comparison on a tiny model: what is run and kept, what is refused, and gates that can fail."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "profiling"))  # scripts, not a package

import arms
import compare
from compare_options import GatesConfig

from engine import Engine
from engine.errors import CapacityError, ConfigError
from tests.profiling.compare_support import (
    FAST,
    WORKLOADS,
    Run,
    fake,
    run,
)


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A whole run, which several tests look at and none changes."""
    with pytest.MonkeyPatch.context() as patch:
        fake(patch)
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
        found = ("identity", "m1/two", "| 2 of 4 |", "~", "base and plain", "vLLM", "support no claim", "causal-conv1d")
        for text in found:
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
        monkeypatch.setattr(compare, "environment", lambda: {"git": "another", "causal_conv1d": None})
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
