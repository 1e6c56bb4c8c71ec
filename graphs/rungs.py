"""The row counts that passes are padded to: one ladder for every schedule, eager or captured.

Few row counts mean few graphs to capture and few products to tune. A step is the largest power of two within the
allowed waste, so rungs are whole 64-row tiles from 1,600 rows on and whole 128-row tiles from 3,200.
"""

from __future__ import annotations

from bisect import bisect_left

from ops.tables import MAX_READS, MAX_ROWS

_LOWEST = 64  # fewer rows cost a product no less time
_FINE = 512  # rows from which padding costs more than another rung
_COVERING_STEP = 1.1  # rows of a graph over those of the next smaller one, where every pass must find one


def _ladder() -> tuple[int, ...]:
    rungs = [_LOWEST]
    while rungs[-1] < MAX_ROWS:
        allowed = rungs[-1] // (8 if rungs[-1] < _FINE else 25)  # 12.5 %, then 4 %
        rungs.append(min(rungs[-1] + (1 << allowed.bit_length() - 1), MAX_ROWS))
    return tuple(rungs)


LADDER = _ladder()
"""Ascending; the top rung is the row limit of a pass."""


def rung(rows: int) -> int:
    """The lowest rung that holds `rows`. Raises ValueError below 1 and above the top."""
    if not 0 < rows <= LADDER[-1]:
        raise ValueError(f"rows must be from 1 to {LADDER[-1]}, the most a pass can hold, got {rows}; run more passes")
    return LADDER[bisect_left(LADDER, rows)]


def _covering() -> tuple[tuple[int, int], ...]:
    rows = [LADDER[0]]
    while rows[-1] < LADDER[-1]:
        above = [r for r in LADDER if r > rows[-1]]
        rows.append(max((r for r in above if r <= rows[-1] * _COVERING_STEP), default=above[0]))
    return tuple((r, reads) for r in rows for reads in map(rung, (1, 256, MAX_READS)) if reads <= r)


COVERING = _covering()
"""(rows, reads) of graphs of which one holds any pass, what `warmup=all` captures. A pass without reads takes a graph
with some, whose rows nobody looks at."""
