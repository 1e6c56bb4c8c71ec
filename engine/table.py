"""Answers for reading: every question with what it may be, how likely each is, and what the levels mean."""

from __future__ import annotations

from typing import Any

from rich.bar import Bar
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from engine.cli import plain, to_json
from engine.load.checkpoint import RANDOM_NOTE

WIDTH = 80
_MOST_OPTIONS = 6
_BAR_WIDTH = 11


def print_table(console: Console, source: str, response: dict[str, Any]) -> None:
    """The wire `response` to the request from `source`."""
    console.print(Group(f"request: {plain(source)}\n", summary(response)), width=min(WIDTH, console.width))


def summary(response: dict[str, Any]) -> Group:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("question", max_width=22, overflow="fold")
    table.add_column("answer", ratio=1, overflow="fold")
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("probability", width=_BAR_WIDTH)
    apart = False
    for id, answer in response["answers"].items():
        rows = _rows(answer)
        if table.row_count and (apart or len(rows) > 1):
            table.add_row()
        apart = len(rows) > 1
        names = [Text(plain(id), style="bold")]
        if "confidence" in answer:
            names.append(Text(f"confidence {answer['confidence']:.2f}", style="dim"))
        for i, (text, p, style) in enumerate(rows):
            name = names[i] if i < len(names) else ""
            if p is None:
                table.add_row(name, Text(text, style=style))
                continue
            bar = Bar(1, 0, p, width=_BAR_WIDTH, color="cyan")
            table.add_row(name, _hanging(text, style), Text(percent(p), style=style), bar)
    metadata = response["metadata"]
    tokens, seconds = response["usage"]["input_tokens"], metadata["inference_seconds"]
    reused = metadata["prefix_cache"].get("reused_input_tokens", 0)
    lines = ["", f"{response['model']}: {tokens:,} tokens, {reused:,} of them reused, {seconds * 1e3:,.0f} ms"]
    if metadata.get("weights") == "random":
        lines.append(RANDOM_NOTE)
    return Group(table, Text("\n".join(lines)))


def _hanging(text: str, style: str) -> Text | Table:
    """A level and, beside it, the lines of what it means."""
    level, tab, legend = text.partition("\t")
    if not tab:
        return Text(text, style=style)
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_row(Text(level, style=style), Text(legend, style=style, overflow="fold"))
    return grid


def percent(p: float) -> str:
    """Whole, but never 0 or 100 for what is not."""
    whole = round(100 * p)
    if whole == 0 and p > 0:
        return "< 1 %"
    return "> 99 %" if whole == 100 and p < 1 else f"{whole} %"


def _rows(answer: dict[str, Any]) -> list[tuple[str, float | None, str]]:
    """Text, probability and style: the likelier answer to yes or no; options, the likeliest first; or the mean and
    all levels in their order."""
    if answer["type"] == "noul":
        yes: float = answer["noul"]
        return [("yes", yes, "bold green") if yes >= 0.5 else ("no", 1 - yes, "bold green")]
    ranked = sorted(answer["probabilities"].items(), key=lambda entry: -entry[1])
    if answer["type"] == "choice":
        shown = ranked if len(ranked) <= _MOST_OPTIONS else ranked[: _MOST_OPTIONS - 1]
        rows = [(plain(name), p, "" if i else "bold green") for i, (name, p) in enumerate(shown)]
        if rest := ranked[len(shown) :]:
            rows.append((f"{len(rest)} others", sum(p for _, p in rest), "dim"))
        return rows
    mean = f"{answer['score']:.2f} on a scale of 0 to {len(ranked) - 1}"
    levels = [
        (f"{level}\t{_legend(answer['legend'], level)}", p, "bold" if level == ranked[0][0] else "")
        for level, p in answer["probabilities"].items()
    ]
    return [(mean, None, "bold green"), *levels]


def _legend(legend: dict[str, Any], level: str) -> str:
    text = legend.get(level, "")
    return plain(text) if isinstance(text, str) else to_json(text)
