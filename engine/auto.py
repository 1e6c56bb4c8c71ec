"""Which plan to run: every schedule gives the same bits, so predicted time alone decides."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from engine.schedule import Plan
from graphs.rungs import rung

_READ_BOUND_ROWS = 256
"""Below about this many rows a pass takes the time of reading the weights, whatever the number of rows."""


class PassTimes:
    """Seconds of a pass by its rung: measured where it was, between neighbours elsewhere."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def record(self, rows: int, seconds: float) -> None:
        """A measured pass of `rows` padded rows; the latest one counts."""
        self._seconds[rows] = seconds

    def predict(self, rows: int) -> float:
        """Seconds of a pass of `rows` true rows; without any measurement, in units of its rows."""
        padded = rung(rows)
        known = sorted(self._seconds)
        if not known:
            return float(max(padded, _READ_BOUND_ROWS))
        i = bisect_left(known, padded)
        if i == len(known):
            last = known[-1]
            scale = max(padded, _READ_BOUND_ROWS) / max(last, _READ_BOUND_ROWS)
            return self._seconds[last] * scale
        if known[i] == padded or i == 0:
            return self._seconds[known[i]]
        low, high = known[i - 1], known[i]
        share = (padded - low) / (high - low)
        return self._seconds[low] + share * (self._seconds[high] - self._seconds[low])

    def fastest(self, plans: Iterable[Plan]) -> Plan:
        """The plan with the smallest predicted sum of its passes; the first of equals."""
        return min(plans, key=lambda plan: sum(self.predict(one.rows) for one in plan.passes))
