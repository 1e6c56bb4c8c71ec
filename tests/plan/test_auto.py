"""Which plan is run: predicted time alone decides, since all give the same bits."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from engine import Engine
from engine.plan.auto import PassTimes, fastest_first, passes_of
from engine.plan.layout import build_layout
from engine.plan.schedule import Limits, Plan, plan_passes
from engine.prompt import Prompt
from graphs.rungs import LADDER, rung


def measured(**seconds: float) -> PassTimes:
    times = PassTimes()
    for rows, value in seconds.items():
        times.record(int(rows.removeprefix("r")), value)
    return times


def test_a_measured_rung_is_its_own_prediction_for_every_row_count_it_holds() -> None:
    times = measured(r64=0.004, r1024=0.02)
    assert [times.predict(rows) for rows in (1, 63, 64)] == [0.004] * 3
    below = LADDER[LADDER.index(1_024) - 1]
    assert [times.predict(rows) for rows in (below + 1, 1_024)] == [0.02] * 2
    times.record(1_024, 0.03)
    assert times.predict(1_024) == 0.03


def test_between_two_measured_rungs_time_goes_with_rows() -> None:
    times = measured(r64=1.0, r512=15.0)
    middle = rung(288)
    assert times.predict(288) == pytest.approx(1 + 14 * (middle - 64) / (512 - 64))
    predictions = [times.predict(rows) for rows in LADDER if rows <= 512]
    assert predictions == sorted(predictions)


def test_below_what_is_measured_a_pass_takes_as_long_as_the_smallest_measured_one() -> None:
    assert measured(r512=2.0, r1024=3.0).predict(100) == 2.0


def test_above_what_is_measured_time_grows_with_rows_once_weights_are_read_anyway() -> None:
    assert measured(r1024=2.0).predict(4_096) == pytest.approx(2.0 * rung(4_096) / 1_024)
    few = measured(r64=2.0)
    assert few.predict(128) == 2.0
    assert few.predict(1_024) == pytest.approx(2.0 * 1_024 / 256)


def test_without_a_measurement_rows_decide_and_every_pass_costs_something() -> None:
    times = PassTimes()
    assert times.predict(1) == times.predict(256) == 256 + 64
    assert times.predict(1_000) == rung(1_000) + 64
    assert times.predict(300) > times.predict(256)
    assert rung(2_123) > rung(1_048) + rung(1_075), "padding alone would have it in two"
    assert times.seconds([2_123]) < times.seconds([1_048, 1_075])


def test_passes_add_up_and_one_above_the_largest_rung_runs_in_several() -> None:
    assert PassTimes().seconds([300, 0, 10]) == rung(300) + 256 + 2 * 64
    assert measured(r64=9.0, r704=10.0).seconds([700]) < measured(r64=9.0, r704=10.0).seconds([300, 300])
    assert PassTimes().seconds([2 * LADDER[-1] + 1]) == 2 * LADDER[-1] + 256 + 3 * 64


@pytest.mark.parametrize(("tree", "first"), [(20.0, "tree"), (21.9, "tree"), (22.1, "levels")])
def test_several_passes_must_be_surely_faster_than_one(tree: float, first: str) -> None:
    times = measured(r512=10.0, r1024=tree)
    assert fastest_first({"levels": [512, 512], "tree": [1_024]}, times)[0] == first


def test_among_several_passes_time_alone_decides() -> None:
    times = measured(r512=10.0, r544=10.1, r1024=20.0)
    ways = {"flat": [512, 544], "levels": [512, 0, 512], "tree": [1_024]}
    assert fastest_first(ways, times) == ["tree", "levels", "flat"]
    assert fastest_first({"flat": [0, 512], "levels": [512, 512]}, times) == ["flat", "levels"]


@pytest.mark.parametrize(("prefix", "own"), [(300, 20), (0, 70), (300, 0)])
def test_the_rows_of_each_way_are_those_of_its_plan(prefix: int, own: int) -> None:
    prompts = questions(prefix, own, 10)
    layout = build_layout(prompts, "exact")
    flat = build_layout(prompts, "exact", question_prefixes=False)
    for way, rows in passes_of(layout, Limits()).items():
        schedule, of = ("levels", flat) if way == "flat" else (way, layout)
        plan = plan_passes(of, schedule=schedule, pack="all", limits=Limits())
        assert [n for n in rows if n] == [one.rows for one in plan.passes], way


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with tempfile.TemporaryDirectory() as folder, Engine.load(device="cpu", cache_dir=folder) as engine:
        yield engine


def test_on_a_cpu_auto_is_levels(engine: Engine) -> None:
    assert engine.config.schedule == "levels"
    with engine.like(schedule="auto") as other:
        assert other.config.schedule == "levels"


def questions(prefix: int, own: int, branch: int, count: int = 3) -> list[list[Prompt]]:
    """`count` questions of two candidates under a state of `prefix` tokens, each with `own` tokens of its own."""
    ids = iter(range(1, 10_000_000))
    state = [next(ids) for _ in range(prefix)]
    found = []
    for _ in range(count):
        head = state + [next(ids) for _ in range(own)]
        found.append([Prompt(np.array(head + [next(ids) for _ in range(branch)], np.int32)) for _ in range(2)])
    return found


@pytest.fixture
def auto(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """The engine with `schedule=auto` left for each request, as on a GPU; plans are made, not run."""
    monkeypatch.setattr(engine, "config", replace(engine.config, schedule="auto"))
    monkeypatch.setattr(engine._executor, "times", PassTimes())
    return engine


def kinds(plan: Plan) -> list[tuple[str, int]]:
    return [(one.kind, one.rows) for one in plan.passes]


def test_one_pass_over_all_rows_is_chosen_where_it_fits(auto: Engine) -> None:
    layout, plan = auto._plan(questions(300, 20, 10))
    assert kinds(plan) == [("tree", 420)]
    assert layout.question_prefix_tokens == 60


def test_question_prefixes_are_run_where_they_pay(auto: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the tree out of the way: a pass more against rows more."""
    plain = auto._options

    def without_tree(*arguments: object):
        return (option for option in plain(*arguments) if option[1].passes[0].kind != "tree")  # type: ignore[arg-type]

    monkeypatch.setattr(auto, "_options", without_tree)
    layout, plan = auto._plan(questions(300, 20, 10))
    assert kinds(plan) == [("prefix", 300), ("branch", 180)]
    assert layout.question_prefix_tokens == 0
    layout, plan = auto._plan(questions(300, 600, 10))
    assert kinds(plan) == [("prefix", 300), ("question", 1_800), ("branch", 60)]
    assert layout.question_prefix_tokens == 1_800
    for rows in LADDER:  # a machine on which each pass costs the same
        auto._executor.times.record(rows, 1.0)
    assert kinds(auto._plan(questions(300, 600, 10))[1]) == [("prefix", 300), ("branch", 3_660)]


def test_a_tree_too_large_for_a_pass_leaves_levels(auto: Engine) -> None:
    many = questions(100, 2, 2, count=300)
    layout, plan = auto._plan(many)
    assert {one.kind for one in plan.passes} == {"prefix", "branch"}
    assert layout.question_prefix_tokens == 0
    assert max(len(one.entries) for one in plan.passes) == Limits().segments


def test_without_question_prefixes_there_is_nothing_to_choose(auto: Engine) -> None:
    options = list(auto._options(questions(300, 0, 10, count=1), Limits()))
    assert [kinds(plan) for _, plan in options] == [[("tree", 320)], [("prefix", 300), ("branch", 20)]]
