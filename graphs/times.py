"""Measured milliseconds of a pass, by rows, for model sizes and GPUs: to plan by, since no bit depends on them.

`times.json`: GPU name -> model size -> padded rows -> median of whole forwards that ran as one captured pass, host
included, from the measured passes of the comparison that is kept in `profiling/results/`.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True, kw_only=True)
class PassTimes:
    """Of one model size on one GPU."""

    gpu: str
    ms_by_rows: Mapping[int, float]
    """Ascending rows."""

    def ms(self, rows: int) -> float:
        """Milliseconds of a pass of `rows` rows: measured, or between its measured neighbours."""
        known = list(self.ms_by_rows)
        i = bisect_left(known, rows)
        if i == len(known):
            return self.ms_by_rows[known[-1]] * rows / known[-1]
        if known[i] == rows or i == 0:
            return self.ms_by_rows[known[i]]
        low, high = known[i - 1], known[i]
        share = (rows - low) / (high - low)
        return self.ms_by_rows[low] + share * (self.ms_by_rows[high] - self.ms_by_rows[low])


def measured(size: str) -> tuple[PassTimes, ...]:
    """For each GPU on which this size was measured; none for a size that was not."""
    return tuple(
        PassTimes(gpu=gpu, ms_by_rows={int(rows): float(ms) for rows, ms in sizes[size].items()})
        for gpu, sizes in _file().items()
        if size in sizes
    )


@cache
def _file() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(files("graphs").joinpath("times.json").read_text(encoding="utf-8"))
    return content
