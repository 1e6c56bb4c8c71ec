"""Plots of a comparison, as SVG: `python profiling/plots.py OUT [FOLDER]` for the folder of profiling/compare.py.

Latency against candidates and against the shared prefix, a line for each way to answer, and how tokens, time and memory
grow with candidates. Only M1 is drawn: its requests differ in the number of candidates and in the length of the state
and in nothing else. Colours are Okabe and Ito's, which colour-blind readers can tell apart. The same data give the same
bytes.
"""

from __future__ import annotations

import io
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from comparison.gates import by_request
from comparison.journal import Cell, Journal, RequestFacts
from comparison.options import BASE, ENGINE_ARMS, PEER_ARMS, PLAIN, REFERENCE

from engine.cli import write_whole
from engine.errors import ConfigError

try:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
except ImportError as missing:
    raise SystemExit(f"plots: {missing}; run pip install -e '.[plot]'") from None

GEMM_ONLY = "GEMM-only"
FAMILIES = {
    "schedules": (BASE, REFERENCE, "batched", "levels_one", "levels", "tree", GEMM_ONLY),
    "options": (BASE, "aligned", "gemm_fixed", "gemm_default", "compiled", "eager", PLAIN, GEMM_ONLY),
    "peers": (BASE, *PEER_ARMS, GEMM_ONLY),
}
"""Arms that are drawn together, so that no panel holds more lines than can be told apart."""
GROWING = (BASE, REFERENCE, "batched", "levels_one", "transformers/fla/forked", "transformers/torch/forked")
# A median of the measured passes for all candidates. Memory of a few says nothing about that of all.
QUANTITIES: dict[str, Callable[[Cell], float | None]] = {
    "tokens processed": lambda cell: sum(cell.rows.values()) * cell.candidates / cell.candidates_run,
    "latency, ms": lambda cell: statistics.median(cell.whole_ms),
    "peak memory above weights, MiB": lambda cell: cell.peak_bytes / 2**20 if cell.peak_bytes and cell.whole else None,
}

BLACK, ORANGE, SKY, GREEN, BLUE, RED, PURPLE, GREY = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7", "#8C8C8C",
)  # fmt: skip
_STYLE: dict[Any, Any] = {
    "font.size": 9, "axes.titlesize": 9, "axes.labelsize": 9, "axes.spines.top": False, "axes.spines.right": False,
    "axes.edgecolor": "#666666", "axes.grid": True, "grid.color": "#DDDDDD", "grid.linewidth": 0.6,
    "axes.axisbelow": True, "svg.hashsalt": "forkgraph", "svg.fonttype": "none",
    "font.sans-serif": ["DejaVu Sans", "Verdana"],
}  # fmt: skip
_WAYS = {"one": ORANGE, "graph": BLUE, "batched": PURPLE, "forked": RED}
_COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY)


@dataclass
class Panel:
    """`series` by label: points (x, y, whether y is stated for all candidates from a run of a few)."""

    title: str
    x_label: str
    y_label: str
    series: dict[str, list[tuple[float, float, bool]]] = field(default_factory=dict)


def panels(journal: Journal, arms: Sequence[str], *, along: str, y_label: str = "latency, ms") -> list[Panel]:
    """A panel for each state length with points along `candidates`, or for each number of candidates along `prefix`."""
    made: dict[int, Panel] = {}
    cells = by_request(cell for cell in journal.cells.values() if cell.measured)
    for facts in sorted(journal.requests.values(), key=lambda facts: (facts.prefix_tokens, facts.candidates)):
        if facts.set != "m1":
            continue
        if along == "candidates":
            state = int(facts.request.removeprefix("m1/").split("x")[0])
            x, panel = facts.candidates, Panel(f"state of about {state:,} tokens", "candidates", y_label)
            panel = made.setdefault(state, panel)
        else:
            x, panel = facts.prefix_tokens, Panel(f"{facts.candidates:,} candidates", "shared prefix, tokens", y_label)
            panel = made.setdefault(facts.candidates, panel)
        for arm in arms:
            if point := _point(arm, facts, cells[facts.request], QUANTITIES[y_label]):
                panel.series.setdefault(arm, []).append((x, *point))
    return [panel for panel in made.values() if panel.series]


def _point(
    arm: str, facts: RequestFacts, cells: Sequence[Cell], quantity: Callable[[Cell], float | None]
) -> tuple[float, bool] | None:
    if arm == GEMM_ONLY:
        return (facts.gemm_only_us / 1e3, False) if facts.gemm_only_us else None
    own = [cell for cell in cells if cell.arm == arm]
    values = [value for value in map(quantity, own) if value is not None]
    return (statistics.median(values), not all(cell.whole for cell in own)) if values else None


def looks(label: str, others: Sequence[str]) -> dict[str, Any]:
    """Colour, dashes and marker of a line; `others` are the labels that take a colour in turn."""
    if label == GEMM_ONLY:
        return {"color": GREY, "linestyle": (0, (1, 1.5)), "marker": "", "linewidth": 1.6}
    if label == BASE:
        return {"color": BLACK, "linestyle": "-", "marker": "o", "linewidth": 3.0, "zorder": 1.9}
    if label in ENGINE_ARMS:
        i = others.index(label)
        return {"color": _COLOURS[i % len(_COLOURS)], "linestyle": "-", "marker": "sD^v<>"[i % 6], "linewidth": 1.3}
    _, path, way = label.split("/")
    dashes, marker = ((0, (4, 1.5)), "^") if path == "fla" else ((0, (1.5, 1.5)), "v")
    return {"color": _WAYS[way], "linestyle": dashes, "marker": marker, "linewidth": 1.3}


def draw(panels: Sequence[Panel], subject: str) -> Figure:
    """`panels` in rows of three; those of one quantity have one scale. Each line is named once, right of the panels, in
    the order of the last panel's ends. An open marker is a point stated for all from a few."""
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    last = {label: points[-1][1] for label, points in panels[-1].series.items()}
    labels = list(dict.fromkeys(label for panel in panels for label in panel.series))
    others = [label for label in labels if label in ENGINE_ARMS and label != BASE]
    figure = Figure(figsize=(3.1 * columns + 1.9, 2.7 * rows + 0.5), layout="constrained")
    first: dict[str, Any] = {}
    for i, panel in enumerate(panels):
        ax: Any = figure.add_subplot(rows, columns, i + 1, sharey=first.get(panel.y_label))
        first.setdefault(panel.y_label, ax)
        for label, points in panel.series.items():
            look = looks(label, others)
            ax.plot([x for x, _, _ in points], [y for _, y, _ in points], markersize=4.5, **look)
            hollow = {**look, "linestyle": "", "markerfacecolor": "white", "zorder": 5}
            few = [(x, y) for x, y, scaled in points if scaled]
            ax.plot([x for x, _ in few], [y for _, y in few], markersize=4.5, **hollow)
        ax.set(xscale="log", yscale="log", title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
        places = sorted({x for points in panel.series.values() for x, _, _ in points})
        ax.set_xticks(places, [f"{x:,.0f}" for x in places])
        ax.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}" if y >= 1 else f"{y:g}"))
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_minor_locator(NullLocator())
    handles = [
        Line2D([], [], label=label, markersize=4.5, **looks(label, others))
        for label in sorted(labels, key=lambda label: -last.get(label, 0.0))
    ]
    figure.legend(handles=handles, loc="outside right center", frameon=False, handlelength=3.2)
    figure.suptitle(subject, fontsize=9, color="#444444")
    return figure


def plot(folder: Path, to: Path) -> list[Path]:
    """Every plot of a comparison, into `to`; the files written. Raises ConfigError for a folder without one of M1."""
    try:
        described = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        options, gpu = described["configuration"], described["environment"].get("gpu", "a CPU")
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{folder / 'run.json'}: not of a comparison: {error!r}") from error
    weights = "random weights" if options["checkpoint"] in (None, "random") else "weights of a checkpoint"
    journal, wanted = Journal(folder), dict[str, list[Panel]]()
    for family, arms in FAMILIES.items():
        for along in ("candidates", "prefix"):
            wanted[f"latency-{along}-{family}"] = panels(journal, arms, along=along)
    growth = [panels(journal, GROWING, along="candidates", y_label=label) for label in QUANTITIES]
    wanted["growth"] = [panel for quantity in growth for panel in quantity]
    if not wanted["growth"]:
        raise ConfigError(f"{folder}: no request of M1 was measured, so there is nothing to plot; run sets=[m1]")
    to.mkdir(parents=True, exist_ok=True)
    written = []
    for name, made in wanted.items():
        text = io.StringIO()
        with matplotlib.rc_context(_STYLE):
            figure = draw(made, f"{options['model']}, {weights}, {options['dtype']} on {gpu}")
            figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
        written.append(to / f"{name}.svg")
        write_whole(written[-1], text.getvalue())
    return written


def main(words: Sequence[str]) -> int:
    if not 1 <= len(words) <= 2:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        print(*plot(Path(words[0]), Path(words[-1])), sep="\n")
    except ConfigError as error:
        print(f"plots: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
