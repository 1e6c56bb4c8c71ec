"""What a run of the comparison will take, worked out by hand."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "profiling"))  # scripts, not a package

from compare_forecast import Forecast
from compare_journal import Cell

CELL = Cell(
    pass_number=0, request="r", sha256="", arm="base", status="run", candidates=8, candidates_run=8, logical_tokens=800,
    rows={"tree": 100}, seconds=2.0,
)  # fmt: skip


def test_two_passes_are_promised_without_captures() -> None:
    forecast = Forecast(few={}, samples=1)
    forecast.learn(replace(CELL, seconds=3.0, capture_seconds=1.0))
    assert forecast.promised == 2 * 2.0
    forecast.learn(replace(CELL, pass_number=1))
    forecast.learn(replace(CELL, status="not run: budget"))
    assert forecast.promised == 4.0


def test_a_few_candidates_take_their_share_and_short_cells_several_samples() -> None:
    forecast = Forecast(few={"base": 2}, samples=3)
    assert forecast.measured(CELL) == 0.0, "nothing is known yet"
    forecast.learn(CELL)
    assert forecast.measured(CELL) == pytest.approx(0.5 * (1 + 0.3 / 0.5))
    short = replace(CELL, seconds=0.04)
    forecast.learn(short)
    assert forecast.measured(short) == pytest.approx(3 * 0.01)


def test_what_was_compiled_once_is_not_expected_again() -> None:
    forecast = Forecast(few={}, samples=1)
    forecast.learn(replace(CELL, arm="cold", seconds=40.0))
    assert forecast.promised == 80.0
    forecast.learn(replace(CELL, arm="cold", rows={"tree": 1_000}, seconds=1.0))
    assert forecast.promised == pytest.approx(2 * (0.2 + 1.0))
    assert forecast.feasibility("cold", 5_000) == pytest.approx(10.0)


def test_an_arm_without_cells_is_as_slow_as_the_slowest_but_not_as_a_cold_one() -> None:
    forecast = Forecast(few={}, samples=1)
    assert forecast.feasibility("new", 100) == 0.0
    forecast.learn(replace(CELL, seconds=1.0))
    forecast.learn(replace(CELL, arm="slow", seconds=10.0))
    assert forecast.feasibility("new", 100) == pytest.approx(20.0)
    forecast.learn(replace(CELL, arm="cold", seconds=500.0))
    assert forecast.feasibility("new", 100) == pytest.approx(2 * 20.0)


def test_what_a_peer_compiles_after_the_base_leaves_room_for_the_others() -> None:
    """As it was on a GPU: the base's first cell, then one of a peer that compiled for half a minute."""
    forecast = Forecast(few={}, samples=2)
    forecast.learn(replace(CELL, rows={"tree": 345}, seconds=0.02))
    forecast.learn(replace(CELL, arm="cold", rows={"peer": 345}, seconds=36.6))
    assert forecast.promised < 3.5
    assert forecast.feasibility("new", 623) < 1.5
