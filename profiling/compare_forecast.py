"""How long cells will take, from those that the feasibility pass ran so far. Knows no clock and no budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from compare_journal import FEASIBILITY, PASSES, Cell

ENOUGH_MS = 300.0
"""No further sample is taken once those of a cell took this long together."""
_SLACK = 2.0
"""A request may take so many times longer than its rows at the arm's best rate: short ones wait for weights."""
_SLOWEST = 20.0
"""Of the rate of the fastest arm. A cell slower than that compiled something, which it does once."""


@dataclass(kw_only=True)
class Forecast:
    """`few` and `samples` are those of the configuration: candidates and forwards of a measured cell."""

    few: Mapping[str, int]
    samples: int
    promised: float = 0.0
    """Seconds that the measured passes will take of what the feasibility pass ran."""
    _cells: list[Cell] = field(default_factory=list)
    _rates: dict[str, float] = field(default_factory=dict)
    """Each arm's best so far, seconds per row."""

    def learn(self, cell: Cell) -> None:
        """Take a cell into account, if it ran and is one of the feasibility pass."""
        if not cell.ran or cell.pass_number != FEASIBILITY:
            return
        self._cells.append(cell)
        rate = (cell.seconds - cell.capture_seconds) / _rows(cell)
        if rate < self._rates.get(cell.arm, float("inf")):  # and with it what is expected of cells before
            self._rates[cell.arm] = rate
            self.promised = (len(PASSES) - 1) * sum(map(self.measured, self._cells))
        else:
            self.promised += (len(PASSES) - 1) * self.measured(cell)

    def feasibility(self, arm: str, rows: int) -> float:
        """Seconds of a first forward of `rows` rows; of an arm that ran none yet, at the slowest rate of the others."""
        return _SLACK * self._rate(arm) * rows

    def measured(self, cell: Cell) -> float:
        """Seconds of a measured cell of the arm and request of `cell`, which is one of the feasibility pass."""
        share = self.share(cell.arm, cell.candidates, cell.candidates_run)
        once = min(cell.seconds - cell.capture_seconds, _SLACK * self._rate(cell.arm) * _rows(cell)) * share
        return once * min(self.samples, 1 + ENOUGH_MS / 1e3 / once) if once > 0 else 0.0

    def share(self, arm: str, candidates: int, run: int) -> float:
        """What a measured pass runs of what the feasibility pass ran."""
        return min(self.few.get(arm, candidates), candidates) / run

    def _rate(self, arm: str) -> float:
        rates = self._rates.values()
        own = self._rates.get(arm, max(rates, default=0.0))
        return min(own, _SLOWEST * min(rates, default=own))


def _rows(cell: Cell) -> int:
    return max(1, sum(cell.rows.values()))
