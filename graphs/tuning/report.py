"""What a search for tuned products found, for reading."""

from __future__ import annotations

import math

from rich.console import Group
from rich.table import Table as Grid
from rich.text import Text

from graphs.tuning.search import ANCHORS, Findings
from graphs.tuning.tuner import failures, left_to_fixed, untested
from ops.linear_tuned import CUBLASLT, Cell

SHOWN = (64, 128, 256, 320, 512, 1_088, 3_136, 8_960)
"""Rungs of the report."""


def report(findings: Findings) -> Group:
    """Time of the winner over that of cuBLASLt's own choice, per weight; then what failed the byte test."""
    grid = Grid(box=None, pad_edge=False, header_style="bold")
    grid.add_column("weight")
    for rows in SHOWN:
        grid.add_column(f"{rows:,}", justify="right")
    grid.add_column("all", justify="right")
    for n, k in dict.fromkeys(cell[:2] for cell in findings.names):
        cells = [_shown(findings, (n, k, rows)) for rows in SHOWN]
        ratios = [ratio for rows in ANCHORS if (ratio := time_ratio(findings, (n, k, rows))) is not None]
        mean = f"{math.exp(sum(map(math.log, ratios)) / len(ratios)):.3f}" if ratios else "-"
        grid.add_row(f"{n}x{k}", *cells, mean)
    return Group(
        Text("Time over that of cuBLASLt's own choice without split K: t a tile, l cuBLASLt, f fixed, p padded rows."),
        grid,
        Text("\n".join(["", *failures(findings), *left_to_fixed(findings), *untested(findings)])),
    )


def time_ratio(findings: Findings, cell: Cell) -> float | None:
    """The winner's time over cuBLASLt's own choice; None where one of them was not timed."""
    winner, choice = (findings.times[cell].get(name) for name in (findings.names[cell][0], CUBLASLT))
    return None if winner is None or choice is None else winner / choice


def _shown(findings: Findings, cell: Cell) -> str:
    ratio = time_ratio(findings, cell)
    name, _, padded = findings.names[cell][0].partition("@")
    kind = "p" if padded else "l" if name.startswith(CUBLASLT) else name[0]
    return "-" if ratio is None else f"{ratio:.2f} {kind}"
