"""The comparison of `auto` with single schedules without a GPU: its statistics, and rounds of a tiny engine."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "profiling"))  # scripts, not a package

import forward
import measure
import schedules

from engine import Engine
from engine.engine import Forward
from engine.errors import CapacityError, InferenceError
from engine.prompt import Prompt
from engine.statistics import Counters
from graphs.rungs import LADDER
from tests.engine.engine_support import SHORT, TICKET, loaded

OPTIONS = ["--workloads", "40,30+6x10", "--samples", "3"]


class Clock:
    """Every look at it takes a millisecond; nothing else takes any time."""

    now = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-3
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(schedules, "time", clock)
    return clock


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, Engine]]:
    with ExitStack() as stack:
        auto = stack.enter_context(loaded())
        yield {"auto": auto} | {name: stack.enter_context(auto.like(schedule=name)) for name in schedules.SINGLE}


def work(text: str) -> schedules.Work:
    return schedules.Work(name=text, questions=forward.Workload.parse(text).questions(512), gemm_only_us=500.0)


def slowed(engine: Engine, clock: Clock, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = engine.forward

    def slow(questions: list[list[Prompt]]) -> Forward:
        clock.now += share * 1e-3
        return plain(questions)

    monkeypatch.setattr(engine, "forward", slow)


class TestStatistics:
    def test_the_ratio_is_that_of_each_round(self) -> None:
        """Clocks that fall to a third between rounds change both times, and no ratio."""
        best = [100.0, 200.0, 300.0, 100.0]
        assert schedules.ratio_of([1.5 * us for us in best], best) == pytest.approx((1.5, 1.5, 1.5))
        assert schedules.ratio_of([3.0, 1.0, 8.0], [1.0, 1.0, 4.0]).median == 2.0

    def test_of_three_rounds_the_interval_is_all_of_them(self) -> None:
        """Each resampled median is the least of three with a chance of 7 in 27."""
        assert schedules.ratio_of([1.2, 0.9, 1.0], [1.0, 1.0, 1.0]) == (1.0, 0.9, 1.2)

    def test_the_interval_is_that_of_all_resamples(self) -> None:
        """At most the k-th of 31 is a resampled median when 16 of 31 draws are, which the binomial tells."""
        n = 31

        def chance(k: int) -> float:
            return sum(math.comb(n, i) * (k / n) ** i * (1 - k / n) ** (n - i) for i in range(16, n + 1))

        low = next(k for k in range(1, n + 1) if chance(k) >= 0.025)
        high = next(k for k in range(1, n + 1) if chance(k) >= 0.975)
        ranks = np.random.default_rng(5).permutation(n) + 1.0
        found = schedules.ratio_of(ranks.tolist(), [1.0] * n)
        assert found.median == 16
        assert abs(found.low - low) <= 1
        assert abs(found.high - high) <= 1

    @pytest.mark.parametrize(
        ("low", "high", "verdict"),
        [
            (0.98, 1.01, "within 3 %"),
            (1.02, 1.03, "within 3 %"),
            (1.02, 1.031, "unclear"),
            (1.03, 1.04, "unclear"),
            (1.031, 1.04, "slower"),
        ],
    )
    def test_verdicts(self, low: float, high: float, verdict: str) -> None:
        assert schedules.Ratio((low + high) / 2, low, high).verdict == verdict


class TestWork:
    def test_what_shares_nothing_is_tried_where_little_is_shared(self) -> None:
        assert work("40").schedules == ["levels", "tree", "batched", "independent"]
        assert work("60+4x30").schedules == ["levels", "tree", "batched", "independent"], "360 of 180 rows"
        assert work("61+4x30").schedules == ["levels", "tree", "batched"]
        assert work("300+10x30").schedules == ["levels", "tree"]

    @pytest.mark.parametrize(
        ("passes", "chosen"),
        [
            ({"tree": 1}, "tree"),
            ({"prefix": 1, "question": 1, "branch": 1}, "levels"),
            ({"prefix": 1, "branch": 1}, "flat"),
        ],
    )
    def test_passes_tell_what_auto_chose(self, engines: dict[str, Engine], passes: dict[str, int], chosen: str) -> None:
        questions = engines["auto"].prompts(TICKET)
        one = schedules.Work(name="ticket", questions=questions, counters={"auto": Counters(passes=passes)})
        assert one.layout.question_prefix_tokens > 0
        assert one.chosen == chosen

    def test_without_question_prefixes_a_branch_pass_is_of_levels(self) -> None:
        one = work("30+3x10")
        one.counters["auto"] = Counters(passes={"prefix": 1, "branch": 1})
        assert one.chosen == "levels"

    def test_the_workloads_beside_those_of_forward_are_on_no_rung(self) -> None:
        found = schedules.parser().parse_args([]).workloads
        assert [w.name for w in found] == f"{forward.WORKLOADS},{schedules.OFF_RUNGS}".split(",")
        assert not {w.unique_rows for w in found[len(forward.WORKLOADS.split(",")) :]} & set(LADDER)


class TestMeasure:
    def test_every_schedule_runs_once_a_round_with_the_same_bits(self, engines: dict[str, Engine]) -> None:
        one = work("30+3x10")
        schedules.measure(engines, one, samples=3)
        assert {name: len(samples) for name, samples in one.samples_us.items()} == dict.fromkeys(engines, 3)
        assert min(us for samples in one.samples_us.values() for us in samples) > 0
        assert one.differing == set()
        assert one.counters["tree"].passes == {"tree": 1}
        assert one.counters["independent"].passes == {"branch": 3}

    def test_the_order_is_drawn_anew_in_every_round(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[str] = []

        def timed(name: str, _: object) -> tuple[SimpleNamespace, float]:
            asked.append(name)
            return SimpleNamespace(hidden=[], counters=Counters()), 1.0

        monkeypatch.setattr(schedules, "warmed", lambda name, _: SimpleNamespace(hidden=[]))
        monkeypatch.setattr(schedules, "timed", timed)
        names = ["auto", *schedules.SINGLE]
        schedules.measure({name: name for name in names}, work("40"), samples=30)  # type: ignore[misc]
        rounds = [tuple(asked[i : i + 5]) for i in range(0, len(asked), 5)]
        assert all(sorted(one) == sorted(names) for one in rounds)
        assert len(set(rounds)) > 20
        assert len({one[0] for one in rounds}) == 5

    def test_a_flipped_bit_is_reported(self, engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch) -> None:
        plain = engines["tree"].forward

        def flipped(questions: list[list[Prompt]]) -> Forward:
            done = plain(questions)
            hidden = [rows.clone() for rows in done.hidden]
            hidden[-1].view(torch.int32)[-1, -1] ^= 1
            return replace(done, hidden=hidden)

        monkeypatch.setattr(engines["tree"], "forward", flipped)
        one = work("30+3x10")
        schedules.measure(engines, one, samples=1)
        assert one.differing == {"tree"}
        assert schedules.cells(one)["verdict"] == "other bits: tree"

    @pytest.mark.parametrize(("share", "verdict"), [(0.0, "within 3 %"), (0.02, "within 3 %"), (0.05, "slower")])
    def test_a_slow_auto_is_seen(
        self,
        engines: dict[str, Engine],
        clock: Clock,
        monkeypatch: pytest.MonkeyPatch,
        share: float,
        verdict: str,
    ) -> None:
        slowed(engines["auto"], clock, share, monkeypatch)
        one = work("30+3x10")
        schedules.measure(engines, one, samples=1)
        assert one.ratio == pytest.approx((1 + share,) * 3)
        assert one.ratio.verdict == verdict

    def test_the_best_is_the_fastest_single_one(
        self, engines: dict[str, Engine], clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("levels", "batched", "independent"):
            slowed(engines[name], clock, 1.0, monkeypatch)
        one = work("30+3x10")
        schedules.measure(engines, one, samples=1)
        assert one.best == "tree"
        found = schedules.cells(one)
        assert [found[f"{name} ms"] for name in schedules.SINGLE] == ["2.00", "1.00", "2.00", "2.00"]
        assert (found["auto ms"], found["auto / best"], found["auto / GEMM-only"]) == ("1.00", "1.000", "2.00")

    def test_a_tree_too_large_for_a_pass_is_left_out(
        self, engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def too_large(_: object) -> Forward:
            raise CapacityError("schedule=tree runs one pass")

        monkeypatch.setattr(engines["tree"], "forward", too_large)
        one = work("30+3x10")
        schedules.measure(engines, one, samples=1)
        assert list(one.samples_us) == ["auto", "levels", "batched", "independent"]
        assert schedules.cells(one)["tree ms"] == "-"

    def test_warming_up_ends_behind_a_forward_that_missed_no_graph(self) -> None:
        class Capturing:
            """Misses a graph in each of the first two forwards."""

            forwards = 0

            @property
            def capture_seconds(self) -> dict[tuple[int, int], float]:
                return {(64, i): 0.1 for i in range(min(2, self.forwards))}

            def forward(self, _: object) -> int:
                self.forwards += 1
                return self.forwards

            def settle(self) -> None: ...

        assert schedules.warmed(Capturing(), []) == 3  # type: ignore[arg-type, comparison-overlap]


class TestCommandLine:
    @pytest.fixture(autouse=True)
    def _on_a_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(schedules, "without_cuda", lambda _: False)
        monkeypatch.setattr(schedules, "gemm_only_us", lambda *_, **__: [400.0, 500.0, 900.0])
        monkeypatch.setattr(schedules, "Engine", SimpleNamespace(load=lambda **_: loaded()))
        monkeypatch.setattr(measure, "environment", dict)  # which imports transformers

    def test_without_cuda_one_line_and_exit_code_2(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.undo()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert schedules.main([]) == 2
        assert capsys.readouterr().err == "schedules: no CUDA device is visible; these measurements need one\n"

    def test_every_option_is_explained_and_wrong_values_are_named(self, capsys: pytest.CaptureFixture[str]) -> None:
        parser = schedules.parser()
        parser.format_help()
        assert all(action.help for action in parser._actions)
        for words, named in (
            (["--workloads", "278+8"], "278+8 is neither"),
            (["--requests", "nowhere"], "nowhere is neither a file nor a folder with .json files"),
            (["--requests", "configs/requests"], "--requests needs --tokenizer"),
        ):
            with pytest.raises(SystemExit) as error:
                schedules.main(words)
            assert error.value.code == 2
            assert named in capsys.readouterr().err

    def test_requests_are_named_by_their_place_below_the_folder(self, tmp_path: Path) -> None:
        for name in ("m2/b.json", "m1/a.json", "m1/notes.txt"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()
        assert [name for name, _ in schedules.request_files(str(tmp_path))] == ["m1/a", "m2/b"]
        assert schedules.request_files(str(tmp_path / "m1/a.json")) == [("a", tmp_path / "m1/a.json")]
        with pytest.raises(argparse.ArgumentTypeError):
            schedules.request_files(str(tmp_path / "m3"))

    def test_a_run_prints_a_table_and_writes_every_sample(
        self, clock: Clock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        request, out = tmp_path / "short.json", tmp_path / "deep" / "out.jsonl"
        request.write_text(json.dumps(SHORT))
        words = ["--tokenizer", str(tmp_path), "--requests", str(request), "--out", str(out)]
        assert schedules.main([*OPTIONS, *words]) == 0
        captured = capsys.readouterr()
        header, *lines, summary = captured.out.splitlines()
        assert header.startswith("work")
        assert [line.split()[0] for line in lines] == ["40", "30+6x10", "short"]
        assert all("within 3 %" in line for line in lines)
        assert [line.count(" - ") for line in lines] == [0, 1, 0], "240 rows of candidates apart, of 90"
        assert summary == "auto over the best: worst 1.000 (40), geometric mean 1.000"
        assert "short: levels, 1.000 of levels, within 3 %" in captured.err
        records = [json.loads(line) for line in out.read_text().splitlines()]
        assert [r["name"] for r in records[:5]] == [f"9b/40/{name}" for name in ("auto", *schedules.SINGLE)]
        assert len(records) == 5 + 4 + 5
        assert all(r["samples_us"] == pytest.approx([1_000.0] * 3) and r["ratio"] == pytest.approx(2) for r in records)
        assert all(r["configuration"]["equal"] for r in records)

    def test_an_interrupted_run_shows_and_keeps_what_is_done(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        yardsticks = iter([[500.0]])

        def interrupted(*_: object, **__: object) -> list[float]:
            for samples in yardsticks:
                return samples
            raise KeyboardInterrupt

        monkeypatch.setattr(schedules, "gemm_only_us", interrupted)
        out = tmp_path / "out.jsonl"
        assert schedules.main([*OPTIONS, "--out", str(out)]) == 130
        captured = capsys.readouterr()
        assert captured.err.endswith("schedules: interrupted\n")
        assert len(captured.out.splitlines()) == 3
        assert len(out.read_text().splitlines()) == 5

    def test_a_slow_auto_and_a_failed_forward_are_exit_code_1_and_a_bad_request_2(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def slow(_: object, work: schedules.Work, **__: object) -> None:
            work.samples_us = {"auto": [1.1, 1.1], "levels": [1.0, 1.0]}
            work.counters = {name: Counters(passes={"branch": 1}) for name in work.samples_us}

        monkeypatch.setattr(schedules, "measure", slow)
        assert schedules.main(OPTIONS) == 1
        assert capsys.readouterr().out.count("slower") == 2

        def failing(*_: object, **__: object) -> None:
            raise InferenceError("model inference failed")

        monkeypatch.setattr(schedules, "measure", failing)
        assert schedules.main(OPTIONS) == 1
        assert capsys.readouterr().out == ""
        (tmp_path / "empty.json").write_text("{}")
        assert schedules.main(["--tokenizer", str(tmp_path), "--requests", str(tmp_path)]) == 2
        assert "empty.json: " in capsys.readouterr().err
