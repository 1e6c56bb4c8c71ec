"""Which way to run a request: every schedule gives the same bits, so predicted time alone decides."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from engine.plan.layout import Layout
from engine.plan.schedule import Limits
from graphs.rungs import LADDER, rung

_READ_BOUND_ROWS = 256
"""Below about this many rows a pass takes the time of reading the weights, whatever the number of rows."""
_ROWS_OF_A_PASS = 64
"""About as many rows take the time that a pass costs beside its rows; on one H200, 1 to 5 ms at 9B."""
_SURELY_FASTER = 1.1
"""Several passes must be predicted so many times faster than one. They can save padding alone, at most 3 % at 9B and
27B on one H200, while measured replays repeat within 5 % (profiling/results/2026-11-30-h200.md)."""


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
            return float(max(padded, _READ_BOUND_ROWS) + _ROWS_OF_A_PASS)
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

    def seconds(self, passes: Iterable[int]) -> float:
        """Predicted sum of passes of these true rows; what is above the largest pass runs in several."""
        total = 0.0
        for rows in passes:
            whole, rest = divmod(rows, LADDER[-1])
            total += whole * self.predict(LADDER[-1]) if whole else 0.0
            total += self.predict(rest) if rest else 0.0
        return total


def fastest_first(ways: Mapping[str, Sequence[int]], times: PassTimes) -> list[str]:
    """The names of `ways`, each the true rows of its passes, in the order to try them in."""

    def weighed(way: str) -> float:
        several = sum(rows > 0 for rows in ways[way]) > 1
        return times.seconds(ways[way]) * (_SURELY_FASTER if several else 1.0)

    return sorted(ways, key=weighed)


def passes_of(layout: Layout, limits: Limits) -> dict[str, list[int]]:
    """About the rows of the passes that each way to run `layout` takes: as one `tree`, in `levels`, or `flat`, which
    are levels whose question prefixes run with every branch instead of in a pass of their own."""
    prefix, own, rows = layout.request_prefix_tokens, layout.question_prefix_tokens, layout.unique_rows
    branches = rows - prefix - own
    prefixes = sum(segment.kind == "question" for segment in layout.segments)
    waves = max(1, -(-prefixes // limits.question_snapshots))
    packs = -(-layout.num_prompts // limits.segments)
    ways = {
        "tree": [rows],
        "levels": [prefix, *_shared(own, waves), *_shared(branches, max(waves, packs))],
    }
    if own:
        parents = (layout.segments[layout.segments[branch].parent or 0] for branch in layout.branch_of)
        repeated = sum(parent.length for parent in parents if parent.kind == "question")
        ways["flat"] = [prefix, *_shared(branches + repeated, packs)]
    return ways


def _shared(rows: int, passes: int) -> list[int]:
    return [(rows + i) // passes for i in range(passes)]
