"""Measured times: what was measured, and between it."""

from __future__ import annotations

import pytest

from graphs.rungs import LADDER
from graphs.times import PassTimes, measured

TIMES = PassTimes(gpu="GPU", ms_by_rows={64: 5.0, 320: 9.0, 1_000: 26.0})


@pytest.mark.parametrize(
    ("rows", "ms"), [(1, 5.0), (64, 5.0), (192, 7.0), (320, 9.0), (660, 17.5), (1_000, 26.0), (2_000, 52.0)]
)
def test_a_time_is_measured_or_lies_between_its_neighbours(rows: int, ms: float) -> None:
    assert TIMES.ms(rows) == pytest.approx(ms)


@pytest.mark.parametrize("size", ["4b", "9b", "27b"])
def test_the_times_that_ship_are_of_rungs_and_grow_with_them(size: str) -> None:
    found = measured(size)
    assert {times.gpu for times in found} >= {"NVIDIA H200"}
    for times in found:
        rows = list(times.ms_by_rows)
        assert rows == sorted(rows)
        assert set(rows) <= set(LADDER)
        assert times.ms(LADDER[-1]) > 10 * times.ms(LADDER[0])
    assert measured("tiny") == ()
