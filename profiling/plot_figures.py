"""Draws panels of lines and of bars with matplotlib. Knows neither files of measurements nor arms' options.

Colours are Okabe and Ito's, which colour-blind readers can tell apart. Files are the same bytes for the same data.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from compare_options import BASE, ENGINE_ARMS
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from plot_data import GEMM_ONLY, Bar, Panel, Series

BLACK, ORANGE, SKY, GREEN, BLUE, RED, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
GREY, PEER = "#8C8C8C", "#BBBBBB"
_STYLE: dict[Any, Any] = {
    "font.size": 9, "axes.titlesize": 9, "axes.labelsize": 9, "axes.spines.top": False, "axes.spines.right": False,
    "axes.edgecolor": "#666666", "xtick.color": "#444444", "ytick.color": "#444444", "axes.grid": True,
    "grid.color": "#DDDDDD", "grid.linewidth": 0.6, "axes.axisbelow": True, "svg.hashsalt": "forkgraph",
}  # fmt: skip
_WAYS = {"one": ORANGE, "graph": BLUE, "batched": PURPLE, "forked": RED}
_COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY)
_PANEL_INCHES = (3.1, 2.7)


def _looks(label: str, others: Sequence[str]) -> dict[str, Any]:
    """Colour, dashes and marker of a line; `others` are the labels that take a colour in turn."""
    if label == GEMM_ONLY:
        return {"color": GREY, "linestyle": (0, (1, 1.5)), "marker": "", "linewidth": 1.6}
    if label == BASE:
        return {"color": BLACK, "linestyle": "-", "marker": "o", "linewidth": 3.0, "zorder": 1.9}
    if label in ENGINE_ARMS:
        i = others.index(label)
        return {"color": _COLOURS[i % len(_COLOURS)], "linestyle": "-", "marker": "sD^v<>"[i % 6], "linewidth": 1.3}
    _, path, way = label.split("/")
    dashes = (0, (4, 1.5)) if path == "fla" else (0, (1.5, 1.5))
    return {
        "color": _WAYS[way],
        "linestyle": dashes,
        "marker": "^" if path == "fla" else "v",
        "linewidth": 1.3,
    }


def _plain(value: float, _: object = None) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def lines(panels: Sequence[Panel], stem: Path, subject: str) -> list[Path]:
    """`panels` in rows of three, or of one for each quantity; those of one quantity have one scale. Each line is named
    once, right of the panels."""
    quantities = len({panel.y_label for panel in panels})
    columns = quantities if quantities > 1 else min(3, len(panels))
    rows = -(-len(panels) // columns)
    labels = list(dict.fromkeys(series.label for panel in panels for series in panel.series))
    others = [label for label in labels if label in ENGINE_ARMS and label != BASE]
    with matplotlib.rc_context(_STYLE):
        width, height = _PANEL_INCHES
        figure = Figure(figsize=(width * columns + 1.9, height * rows + 0.5), layout="constrained")
        first: dict[str, Axes] = {}
        for i, panel in enumerate(panels):
            ax = figure.add_subplot(rows, columns, i + 1, sharey=first.get(panel.y_label))
            first.setdefault(panel.y_label, ax)
            for series in panel.series:
                _line(ax, series, _looks(series.label, others))
            _logarithmic(ax, panel)
            if i % columns and panels[i - 1].y_label == panel.y_label:
                ax.set_ylabel("")
                ax.tick_params(labelleft=False)
        handles = [
            Line2D([], [], label=label, markersize=4.5, **_looks(label, others))
            for label in _by_last_value(labels, panels)
        ]
        if any(any(series.scaled) for panel in panels for series in panel.series):
            open_marker: dict[str, Any] = {"marker": "o", "markerfacecolor": "white", "color": GREY, "linestyle": ""}
            handles.append(Line2D([], [], label="stated for all\nfrom a few", **open_marker))
        figure.legend(handles=handles, loc="outside right center", frameon=False, handlelength=3.2)
        figure.suptitle(subject, fontsize=9, color="#444444")
        return _saved(figure, stem)


def _line(ax: Axes, series: Series, looks: dict[str, Any]) -> None:
    ax.plot(series.x, series.y, label=series.label, markersize=4.5, **looks)
    open_x, open_y = (
        [v for v, scaled in zip(values, series.scaled, strict=True) if scaled] for values in (series.x, series.y)
    )
    if open_x:
        ax.plot(
            open_x, open_y, linestyle="", marker=looks["marker"], markersize=4.5, color=looks["color"],
            markerfacecolor="white", zorder=5,
        )  # fmt: skip


def _logarithmic(ax: Axes, panel: Panel) -> None:
    ax.set(xscale="log", yscale="log", title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
    places = sorted({x for series in panel.series for x in series.x})
    ax.set_xticks(places, [_plain(x) for x in places])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(FuncFormatter(_plain))
    ax.yaxis.set_minor_locator(NullLocator())


def _by_last_value(labels: Sequence[str], panels: Sequence[Panel]) -> list[str]:
    """From the top line of the last panel down, so that names stand in the order of the lines beside them."""
    last = {series.label: series.y[-1] for series in panels[-1].series}
    return sorted(labels, key=lambda label: -last.get(label, 0.0))


def bars(measured: Sequence[Bar], stem: Path, subject: str) -> list[Path]:
    """Time of each operator, its peer's below it, and a stroke at its floor; a panel for each group."""
    groups: dict[str, list[Bar]] = {}
    for bar in measured:
        groups.setdefault(bar.group, []).append(bar)
    columns = min(3, len(groups))
    rows = -(-len(groups) // columns)
    most = max(map(len, groups.values()))
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(4.6 * columns, (0.42 * most + 0.9) * rows + 0.7), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False)
        for ax, (group, members) in zip(axes.flat, groups.items(), strict=False):
            _bars_of(ax, group, members)
        for ax in list(axes.flat)[len(groups) :]:
            ax.set_axis_off()
        handles = [
            Patch(color=BLUE, label="this engine's operator"),
            Patch(color=PEER, label="its peer"),
            Line2D([], [], color=RED, linewidth=2, label="floor: least bytes or operations"),
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
        figure.suptitle(subject, fontsize=9, color="#444444")
        return _saved(figure, stem)


def _bars_of(ax: Axes, group: str, members: Sequence[Bar]) -> None:
    peers = sorted({bar.peer for bar in members if bar.peer and bar.peer_us is not None})
    ax.set_title(f"{group} (peer: {', '.join(peers)})" if peers else group)
    longest = max(max(bar.us, bar.peer_us or 0.0) for bar in members)
    for i, bar in enumerate(members):
        shown = [(i - 0.19, bar.us, BLUE)]
        if bar.peer_us is not None:
            shown.append((i + 0.19, bar.peer_us, PEER))
        for y, us, colour in shown:
            ax.barh(y, us, height=0.36, color=colour)
            ax.annotate(_us(us), (us, y), (3, 0), textcoords="offset points", va="center", fontsize=7.5)
        if bar.floor_us is not None:
            ax.plot([bar.floor_us] * 2, [i - 0.4, i + 0.4], color=RED, linewidth=2, solid_capstyle="butt")
    ax.set_yticks(range(len(members)), [bar.label for bar in members])
    ax.set(xlabel="time, µs", xlim=(0, longest * 1.16), ylim=(len(members) - 0.45, -0.55))
    ax.xaxis.set_major_formatter(FuncFormatter(_plain))
    ax.grid(visible=False, axis="y")


def _us(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _saved(figure: Figure, stem: Path) -> list[Path]:
    """STEM.png and STEM.svg, each under another name until it is complete."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # what it found serves both files
    written = []
    for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": None})):
        path = stem.with_name(f"{stem.name}.{kind}")
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        figure.savefig(unfinished, format=kind, dpi=150, metadata=metadata)
        unfinished.replace(path)
        written.append(path)
    return written
