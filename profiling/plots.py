"""Plots of a comparison, as SVG: `python profiling/plots.py OUT [FOLDER]` for the folder of profiling/compare.py.

Latency, tokens and memory against candidates, a panel for each length of the state. Only M1 is drawn: its requests
differ in those two and in nothing else. Colours are Okabe and Ito's, which colour-blind readers can tell apart. The
same data give the same bytes.
"""

from __future__ import annotations

import io
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from comparison.gates import by_request
from comparison.journal import Cell, Journal
from comparison.options import BASE, ENGINE_ARMS, PEER_ARMS, PLAIN, REFERENCE
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from engine.cli import write_whole
from engine.errors import ConfigError

GEMM_ONLY = "GEMM-only"
FAMILIES = {
    "schedules": (BASE, REFERENCE, "batched", "levels_one", "levels", "tree", GEMM_ONLY),
    "options": (BASE, "aligned", "gemm_fixed", "gemm_default", "compiled", "eager", PLAIN, GEMM_ONLY),
    "peers": (BASE, *PEER_ARMS, GEMM_ONLY),
}
"""Arms that are drawn together, so that no panel holds more lines than can be told apart."""
GROWING = (BASE, REFERENCE, "batched", "levels_one", "transformers/fla/forked", "transformers/torch/forked")
# Of each cell, for all candidates; memory of a few says nothing about that of all.
QUANTITIES: dict[str, Callable[[Cell], float | None]] = {
    "latency, ms": lambda cell: statistics.median(cell.whole_ms),
    "tokens processed": lambda cell: cell.num_rows * cell.candidates / cell.candidates_run,
    "peak memory above weights, MiB": lambda cell: cell.peak_bytes / 2**20 if cell.peak_bytes and cell.whole else None,
}
Panels = dict[tuple[int, str], dict[str, list[tuple[float, float, bool]]]]
"""By state length and quantity, lines by arm: points (candidates, y, whether y is stated for all from a few)."""

ORANGE, SKY, GREEN, BLUE, RED, PURPLE = "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7"
_COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY)
_WAYS = {"one": ORANGE, "graph": BLUE, "batched": PURPLE, "forked": RED}
_STYLE: dict[Any, Any] = {
    "font.size": 9, "axes.titlesize": 9, "axes.labelsize": 9, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.color": "#DDDDDD", "grid.linewidth": 0.6, "axes.axisbelow": True,
    "lines.markersize": 4.5, "svg.hashsalt": "forkgraph", "svg.fonttype": "none",
    "font.sans-serif": ["DejaVu Sans", "Verdana"],
}  # fmt: skip


def panels(journal: Journal, arms: Sequence[str], quantities: Sequence[str]) -> Panels:
    """Medians over the measured passes, a panel for each quantity and length of the state."""
    cells = by_request(cell for cell in journal.cells.values() if cell.measured)
    requests = sorted((one for one in journal.requests.values() if one.set == "m1"), key=lambda one: one.candidates)
    made: Panels = {}
    for label in quantities:
        for one in sorted(requests, key=lambda one: one.prefix_tokens):
            panel = made.setdefault((int(one.request[3:].split("x")[0]), label), {})
            for arm in arms:
                own = [cell for cell in cells[one.request] if cell.arm == arm]
                values = [value for value in map(QUANTITIES[label], own) if value is not None]
                if arm == GEMM_ONLY and one.gemm_only_us:
                    values = [one.gemm_only_us / 1e3]
                if values:
                    scaled = not all(cell.whole for cell in own)
                    panel.setdefault(arm, []).append((one.candidates, statistics.median(values), scaled))
    return {key: panel for key, panel in made.items() if panel}


def looks(label: str, others: Sequence[str]) -> dict[str, Any]:
    """Colour, dashes and marker of a line; `others` are the labels that take a colour in turn."""
    if label == GEMM_ONLY:
        return {"color": "#8C8C8C", "linestyle": (0, (1, 1.5)), "marker": "", "linewidth": 1.6}
    if label == BASE:
        return {"color": "#000000", "linestyle": "-", "marker": "o", "linewidth": 3.0, "zorder": 1.9}
    if label in ENGINE_ARMS:
        i = others.index(label) % len(_COLOURS)
        return {"color": _COLOURS[i], "linestyle": "-", "marker": "sD^v<>"[i], "linewidth": 1.3}
    _, path, way = label.split("/")
    dashes, marker = ((0, (4, 1.5)), "^") if path == "fla" else ((0, (1.5, 1.5)), "v")
    return {"color": _WAYS[way], "linestyle": dashes, "marker": marker, "linewidth": 1.3}


def draw(panels: Panels, subject: str) -> Figure:
    """A row of panels for each quantity, on one scale. An open marker is a point stated for all from a few."""
    rows = list(dict.fromkeys(label for _, label in panels))
    columns = max(sum(label == row for _, label in panels) for row in rows)
    others = [arm for arm in dict.fromkeys(a for p in panels.values() for a in p) if arm in ENGINE_ARMS and arm != BASE]
    figure = Figure(figsize=(3.1 * columns + 1.9, 2.7 * len(rows) + 0.5), layout="constrained")
    first, lines = dict[str, Any](), dict[str, Any]()
    for i, ((state, label), panel) in enumerate(panels.items()):
        ax: Any = figure.add_subplot(len(rows), columns, i + 1, sharey=first.get(label))
        first.setdefault(label, ax)
        for arm, points in panel.items():
            look = looks(arm, others)
            [lines[arm]] = ax.plot([x for x, _, _ in points], [y for _, y, _ in points], **look)
            few = [(x, y) for x, y, scaled in points if scaled]
            ax.plot(*zip(*few, strict=True), **{**look, "linestyle": ""}, markerfacecolor="white") if few else None
        places = sorted({x for points in panel.values() for x, _, _ in points})
        ax.set(xscale="log", yscale="log", xlabel="candidates", ylabel=label, title=f"state of about {state:,} tokens")
        ax.set_xticks(places, [f"{x:,.0f}" for x in places])
        ax.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}" if y >= 1 else f"{y:g}"))
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_minor_locator(NullLocator())
    figure.legend(lines.values(), lines, loc="outside right center", frameon=False, handlelength=3.2)
    figure.suptitle(subject, fontsize=9)
    return figure


def plot(folder: Path, to: Path) -> list[Path]:
    """Every plot of a comparison, into `to`; the files written. Raises ConfigError for a folder without one of M1."""
    try:
        described = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        options, gpu = described["configuration"], described["environment"].get("gpu", "a CPU")
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{folder / 'run.json'}: not of a comparison: {error!r}") from error
    journal, written = Journal(folder), []
    wanted = {f"latency-{family}": panels(journal, arms, ["latency, ms"]) for family, arms in FAMILIES.items()}
    wanted["growth"] = panels(journal, GROWING, list(QUANTITIES))
    to.mkdir(parents=True, exist_ok=True)
    for name, made in wanted.items():
        if not made:
            raise ConfigError(f"{folder}: no request of M1 was measured, so there is nothing to plot; run sets=[m1]")
        text = io.StringIO()
        with matplotlib.rc_context(_STYLE):
            subject = f"{options['model']}, checkpoint={options['checkpoint']}, {options['dtype']} on {gpu}"
            draw(made, subject).savefig(text, format="svg", metadata={"Date": None, "Creator": None})
        written.append(to / f"{name}.svg")
        write_whole(written[-1], text.getvalue())
    return written


def main(words: Sequence[str]) -> int:
    try:
        print(*plot(Path(words[0]), Path(words[-1])), sep="\n")
    except (ConfigError, IndexError) as error:
        print(f"plots: {error if words else 'give the folder of a comparison'}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
