"""Plots of a comparison and of operators, as SVG.

    python profiling/plots.py OUT                                        # the folder of profiling/compare.py
    python profiling/plots.py OUT --operators profiling/results/FILE.jsonl --to FOLDER

The first gives latency against candidates and against the shared prefix, a line for each way to answer, and how tokens,
time and memory grow with candidates; the second the time of each operator beside its peer and floor. Of a comparison
only M1 is drawn: its requests differ in the number of candidates and in the length of the state and in nothing else.
Colours are Okabe and Ito's, which colour-blind readers can tell apart. The same data give the same bytes.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comparison.gates import by_request
from comparison.journal import Cell, Journal, RequestFacts
from comparison.options import BASE, ENGINE_ARMS, PEER_ARMS, PLAIN, REFERENCE

from engine.cli import write_whole
from engine.errors import ConfigError, ForkgraphError

try:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
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

BLACK, ORANGE, SKY, GREEN, BLUE, RED, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
GREY, PEER = "#8C8C8C", "#BBBBBB"
_STYLE: dict[Any, Any] = {
    "font.size": 9, "axes.titlesize": 9, "axes.labelsize": 9, "axes.spines.top": False, "axes.spines.right": False,
    "axes.edgecolor": "#666666", "axes.grid": True, "grid.color": "#DDDDDD", "grid.linewidth": 0.6,
    "axes.axisbelow": True, "svg.hashsalt": "forkgraph", "svg.fonttype": "none",
    "font.sans-serif": ["DejaVu Sans", "Verdana"],
}  # fmt: skip
_WAYS = {"one": ORANGE, "graph": BLUE, "batched": PURPLE, "forked": RED}
_COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY)


@dataclass(frozen=True)
class Panel:
    """`series` by label: points (x, y, whether y is stated for all candidates from a run of a few)."""

    title: str
    x_label: str
    y_label: str
    series: dict[str, list[tuple[float, float, bool]]]


class Run:
    """The requests of M1 in one comparison. `subject` says of what and where."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError for a folder that holds no comparison, or one without measured requests of M1."""
        try:
            described = json.loads((folder / "run.json").read_text(encoding="utf-8"))
            options, gpu = described["configuration"], described["environment"].get("gpu", "a CPU")
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{folder / 'run.json'}: not of a comparison: {error!r}") from error
        weights = "random weights" if options["checkpoint"] in (None, "random") else "weights of a checkpoint"
        self.subject = f"{options['model']}, {weights}, {options['dtype']} on {gpu}"
        journal = Journal(folder)
        self.facts = [facts for facts in journal.requests.values() if facts.set == "m1"]
        self.cells = by_request(cell for cell in journal.cells.values() if cell.measured)
        if not any(self.cells[facts.request] for facts in self.facts):
            raise ConfigError(f"{folder}: no request of M1 was measured, so there is nothing to plot; run sets=[m1]")

    @property
    def arms(self) -> set[str]:
        return {cell.arm for facts in self.facts for cell in self.cells[facts.request]}

    def series(
        self,
        arms: Sequence[str],
        requests: Iterable[RequestFacts],
        x: Callable[[RequestFacts], float],
        value: Callable[[Cell], float | None],
    ) -> dict[str, list[tuple[float, float, bool]]]:
        """Medians of `value` over the measured passes, for the arms that have any."""
        found: dict[str, list[tuple[float, float, bool]]] = {arm: [] for arm in arms}
        for facts in sorted(requests, key=x):
            for arm in arms:
                own = [cell for cell in self.cells[facts.request] if cell.arm == arm]
                values = [v for v in map(value, own) if v is not None]
                if values:
                    found[arm].append((x(facts), statistics.median(values), not all(cell.whole for cell in own)))
            if GEMM_ONLY in arms and facts.gemm_only_us:
                found[GEMM_ONLY].append((x(facts), facts.gemm_only_us / 1e3, False))
        return {arm: points for arm, points in found.items() if points}

    def by_candidates(self, arms: Sequence[str], y_label: str = "latency, ms") -> list[Panel]:
        """Latency, or another of `QUANTITIES`, against candidates: a panel for each state length."""
        return [
            Panel(
                f"state of about {state:,} tokens", "candidates", y_label,
                self.series(arms, [f for f in self.facts if _state(f) == state], _candidates, QUANTITIES[y_label]),
            )
            for state in sorted({_state(facts) for facts in self.facts})
        ]  # fmt: skip

    def by_state(self, arms: Sequence[str]) -> list[Panel]:
        """Latency against the tokens that all candidates share, a panel for each number of candidates."""
        return [
            Panel(
                f"{n:,} candidates", "shared prefix, tokens", "latency, ms",
                self.series(arms, [f for f in self.facts if f.candidates == n], lambda f: f.prefix_tokens, _ms),
            )
            for n in sorted({facts.candidates for facts in self.facts})
        ]  # fmt: skip

    def growth(self) -> list[Panel]:
        """Tokens processed, time, and where it was measured memory, against candidates; a row for each state."""
        columns = [self.by_candidates(GROWING, label) for label in QUANTITIES]
        return [panel for row in zip(*columns, strict=True) for panel in row if panel.series]


def _state(facts: RequestFacts) -> int:
    """Nominal tokens of the state of `m1/1024x32`."""
    return int(facts.request.removeprefix("m1/").split("x")[0])


def _candidates(facts: RequestFacts) -> float:
    return facts.candidates


def _ms(cell: Cell) -> float:
    return statistics.median(cell.whole_ms)


def _rows(cell: Cell) -> float:
    return sum(cell.rows.values()) * cell.candidates / cell.candidates_run


def _mib(cell: Cell) -> float | None:
    """None also for a run of a few candidates, which says nothing about all of them."""
    return None if cell.peak_bytes is None or not cell.whole else cell.peak_bytes / 2**20


QUANTITIES: dict[str, Callable[[Cell], float | None]] = {
    "tokens processed": _rows, "latency, ms": _ms, "peak memory above weights, MiB": _mib,
}  # fmt: skip


@dataclass(frozen=True)
class Bar:
    """One operator in one case, microseconds."""

    group: str
    label: str
    us: float
    peer: str | None
    peer_us: float | None
    floor_us: float | None


def read_operators(path: Path) -> tuple[list[Bar], str]:
    """The operators of a file of records, and what they were measured for and on; of several runs in one file the last
    counts. Raises ConfigError for a file without any."""
    subject, bars = "", dict[str, Bar]()
    try:
        for text in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(text)
            if record["kind"] == "operator" and record["samples_us"]:
                bars[record["name"]] = _bar(record)
                subject = f"{record['configuration']['heads']} head counts on {record['environment']['gpu']}"
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path}: holds no records of operators: {error!r}") from error
    if not bars:
        raise ConfigError(f"{path}: no operator was measured in it")
    return list(bars.values()), subject


def _bar(record: dict[str, Any]) -> Bar:
    operator, _, case = record["name"].partition("/")
    peer = record["configuration"]["peer_samples_us"]
    if operator.startswith("linear"):  # one panel for each number of rows, since times differ by so much
        matrix, _, rows = case.rpartition(" ")
        group, label = f"{operator}, {rows} rows", matrix
    elif record["peer"] == "copy":
        group, label = f"row operators, {case} rows", operator
    else:
        group, label = operator, case if " " in case else f"{case} rows"
    us, peer_us = statistics.median(record["samples_us"]), statistics.median(peer) if peer else None
    return Bar(group, label, us, record["peer"], peer_us, record["floor_us"])


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


def lines(panels: Sequence[Panel], subject: str) -> Figure:
    """`panels` in rows of three, or of one for each quantity; those of one quantity have one scale. Each line is named
    once, right of the panels, in the order of the last panel's ends."""
    quantities = len({panel.y_label for panel in panels})
    columns = quantities if quantities > 1 else min(3, len(panels))
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
            ax.plot(*zip(*[(x, y) for x, y, _ in points], strict=True), markersize=4.5, **look)
            hollow = [(x, y) for x, y, scaled in points if scaled]
            if hollow:
                ax.plot(
                    *zip(*hollow, strict=True), linestyle="", marker=look["marker"], markersize=4.5, zorder=5,
                    color=look["color"], markerfacecolor="white",
                )  # fmt: skip
        y_label = "" if i % columns and panels[i - 1].y_label == panel.y_label else panel.y_label
        ax.set(xscale="log", yscale="log", title=panel.title, xlabel=panel.x_label, ylabel=y_label)
        ax.tick_params(labelleft=bool(y_label))
        places = sorted({x for points in panel.series.values() for x, _, _ in points})
        ax.set_xticks(places, [number(x) for x in places])
        ax.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter(FuncFormatter(number))
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_minor_locator(NullLocator())
    handles = [
        Line2D([], [], label=label, markersize=4.5, **looks(label, others))
        for label in sorted(labels, key=lambda label: -last.get(label, 0.0))
    ]
    if any(scaled for panel in panels for points in panel.series.values() for _, _, scaled in points):
        hollow_marker: dict[str, Any] = {"marker": "o", "markerfacecolor": "white", "color": GREY, "linestyle": ""}
        handles.append(Line2D([], [], label="stated for all\nfrom a few", **hollow_marker))
    figure.legend(handles=handles, loc="outside right center", frameon=False, handlelength=3.2)
    figure.suptitle(subject, fontsize=9, color="#444444")
    return figure


def bars(measured: Sequence[Bar], subject: str) -> Figure:
    """Time of each operator, its peer's below it, and a stroke at its floor; a panel for each group."""
    groups: dict[str, list[Bar]] = {}
    for bar in measured:
        groups.setdefault(bar.group, []).append(bar)
    columns, most = min(3, len(groups)), max(map(len, groups.values()))
    rows = -(-len(groups) // columns)
    figure = Figure(figsize=(4.6 * columns, (0.42 * most + 0.9) * rows + 0.7), layout="constrained")
    for n, (group, members) in enumerate(groups.items()):
        ax: Any = figure.add_subplot(rows, columns, n + 1)
        peers = sorted({bar.peer for bar in members if bar.peer and bar.peer_us is not None})
        ax.set_title(f"{group} (peer: {', '.join(peers)})" if peers else group)
        for i, bar in enumerate(members):
            for y, us, colour in ((i - 0.19, bar.us, BLUE), (i + 0.19, bar.peer_us, PEER)):
                if us is not None:
                    ax.barh(y, us, height=0.36, color=colour)
                    text = f"{us:,.0f}" if us >= 100 else f"{us:.1f}"
                    ax.annotate(text, (us, y), (3, 0), textcoords="offset points", va="center", fontsize=7.5)
            if bar.floor_us is not None:
                ax.plot([bar.floor_us] * 2, [i - 0.4, i + 0.4], color=RED, linewidth=2, solid_capstyle="butt")
        longest = max(max(bar.us, bar.peer_us or 0.0) for bar in members)
        ax.set_yticks(range(len(members)), [bar.label for bar in members])
        ax.set(xlabel="time, µs", xlim=(0, longest * 1.16), ylim=(len(members) - 0.45, -0.55))
        ax.xaxis.set_major_formatter(FuncFormatter(number))
        ax.grid(visible=False, axis="y")
    handles = [
        Patch(color=BLUE, label="this engine's operator"),
        Patch(color=PEER, label="its peer"),
        Line2D([], [], color=RED, linewidth=2, label="floor: least bytes or operations"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(subject, fontsize=9, color="#444444")
    return figure


def number(value: float, _: object = None) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def plot(run: Path | None, operators: Path | None, to: Path) -> list[Path]:
    """Every plot of a comparison and of operators, into `to`; the files written. Raises ConfigError for others."""
    written = []

    def save(name: str, draw: Callable[..., Figure], *what: Any) -> None:
        with matplotlib.rc_context(_STYLE):
            figure, text = draw(*what), io.StringIO()
            figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
        to.mkdir(parents=True, exist_ok=True)
        write_whole(to / f"{name}.svg", text.getvalue())
        written.append(to / f"{name}.svg")

    if run:
        read = Run(run)
        for family, arms in FAMILIES.items():
            if read.arms & set(arms[1:]):
                save(f"latency-candidates-{family}", lines, read.by_candidates(arms), read.subject)
                save(f"latency-state-{family}", lines, read.by_state(arms), read.subject)
        save("growth", lines, read.growth(), read.subject)
    if operators:
        save("operators", bars, *read_operators(operators))
    return written


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", metavar="OUT", help="folder of a comparison")
    parser.add_argument("--operators", type=Path, metavar="FILE", help="records of operators")
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="where the plots go (OUT/plots, or plots)")
    arguments = parser.parse_args(argv)
    if arguments.run is None and arguments.operators is None:
        parser.error("give OUT, --operators FILE, or both")
    try:
        to = arguments.to or (arguments.run or Path()) / "plots"
        print(*plot(arguments.run, arguments.operators, to), sep="\n")
    except ForkgraphError as error:
        print(f"plots: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
