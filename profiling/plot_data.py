"""What the plots show: panels of lines out of a comparison's cells, and bars out of operators' records.

Only requests of M1 have places on the axes: they differ in the number of candidates and in the length of the state and
in nothing else. Knows nothing of drawing.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from compare_journal import FEASIBILITY, Cell, RequestFacts
from compare_options import BASE, PEER_ARMS, PLAIN, REFERENCE

from engine.errors import ConfigError

GEMM_ONLY = "GEMM-only"
FAMILIES = {
    "schedules": (BASE, REFERENCE, "batched", "levels_one", "levels", "tree", GEMM_ONLY),
    "options": (BASE, "aligned", "gemm_fixed", "gemm_default", "compiled", "eager", PLAIN, GEMM_ONLY),
    "peers": (BASE, *PEER_ARMS, GEMM_ONLY),
}
"""Arms that are drawn together, so that no panel holds more lines than can be told apart."""
GROWING = (BASE, REFERENCE, "batched", "levels_one", "transformers/fla/forked", "transformers/torch/forked")
_MIB = 2**20

Line = TypeVar("Line", Cell, RequestFacts)


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line: `scaled` points are stated for all candidates from a run of a few."""

    label: str
    x: list[float]
    y: list[float]
    scaled: list[bool]


@dataclass(frozen=True, kw_only=True)
class Panel:
    title: str
    x_label: str
    y_label: str
    series: list[Series]


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One operator in one case, microseconds."""

    group: str
    label: str
    us: float
    peer: str | None
    peer_us: float | None
    floor_us: float | None


@dataclass(frozen=True, kw_only=True)
class Run:
    """The requests of M1 in one comparison, measured cells alone. `subject` says of what and where."""

    subject: str
    facts: list[RequestFacts]
    cells: list[Cell]

    @property
    def states(self) -> list[int]:
        """Nominal lengths of states, ascending."""
        return sorted({_shape(facts.request)[0] for facts in self.facts})

    @property
    def candidates(self) -> list[int]:
        return sorted({facts.candidates for facts in self.facts})


def _shape(request: str) -> tuple[int, int]:
    """State length and candidates of `m1/1024x32`."""
    state, candidates = request.removeprefix("m1/").split("x")
    return int(state), int(candidates)


def read_run(folder: Path) -> Run:
    """Raises ConfigError for a folder that holds no comparison, or one without measured requests of M1."""
    try:
        subject = _subject(json.loads(_text(folder / "run.json")))
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{folder / 'run.json'}: not of a comparison: {error!r}") from error
    facts: dict[str, RequestFacts] = {}
    cells: dict[tuple[int, str, str], Cell] = {}
    journal = _text(folder / "cells.jsonl")
    complete = journal[: journal.rfind("\n") + 1]  # a run that goes on may be in the middle of a line
    for position, text in enumerate(complete.splitlines(), 1):
        try:
            line = json.loads(text)
            if line["kind"] == "request" and line["request"].startswith("m1/"):
                facts[line["request"]] = _line(RequestFacts, line)
            elif line["kind"] == "cell" and line["request"].startswith("m1/"):
                cell = _line(Cell, line)
                if cell.ran and cell.pass_number != FEASIBILITY:
                    cells[cell.key] = cell
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{folder / 'cells.jsonl'}: line {position} cannot be read: {error!r}") from error
    if not cells:
        raise ConfigError(f"{folder}: no request of M1 was measured, so there is nothing to plot; run sets=[m1]")
    return Run(subject=subject, facts=list(facts.values()), cells=list(cells.values()))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give the folder of a comparison") from error


def _line(kind: type[Line], line: dict[str, Any]) -> Line:
    return kind(**{f.name: line[f.name] for f in fields(kind)})


def _subject(described: dict[str, Any]) -> str:
    options, environment = described["configuration"], described["environment"]
    made = options["checkpoint"] in (None, "random")
    weights = "random weights" if made else "weights of a checkpoint"
    return f"{options['model']}, {weights}, {options['dtype']} on {environment.get('gpu', 'a CPU')}"


def _gathered(run: Run, value: Callable[[Cell], float | None]) -> dict[tuple[str, str], tuple[float, bool]]:
    """Median of `value` over the cells of each (request, arm), and whether it is scaled up from a few candidates."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in run.cells:
        groups.setdefault((cell.request, cell.arm), []).append(cell)
    found = {}
    for key, members in groups.items():
        values = [v for v in map(value, members) if v is not None]
        if values:
            found[key] = statistics.median(values), not all(cell.whole for cell in members)
    return found


def _ms(cell: Cell) -> float:
    return statistics.median(cell.whole_ms)


def _rows(cell: Cell) -> float:
    return sum(cell.rows.values()) * cell.candidates / cell.candidates_run


def _mib(cell: Cell) -> float | None:
    """None also for a run of a few candidates, which says nothing about all of them."""
    return None if cell.peak_bytes is None or not cell.whole else cell.peak_bytes / _MIB


def _series(
    run: Run,
    arms: Sequence[str],
    requests: Sequence[RequestFacts],
    x: Callable[[RequestFacts], float],
    value: Callable[[Cell], float | None] = _ms,
) -> list[Series]:
    values = _gathered(run, value)
    if GEMM_ONLY in arms:
        values |= {(f.request, GEMM_ONLY): (f.gemm_only_us / 1e3, False) for f in run.facts if f.gemm_only_us}
    made = []
    for arm in arms:
        points = sorted((x(f), *values[f.request, arm]) for f in requests if (f.request, arm) in values)
        if points:
            xs, ys, scaled = zip(*points, strict=True)
            made.append(Series(label=arm, x=list(xs), y=list(ys), scaled=list(scaled)))
    return made


def _of_state(run: Run, state: int) -> list[RequestFacts]:
    return [facts for facts in run.facts if _shape(facts.request)[0] == state]


def by_candidates(run: Run, arms: Sequence[str]) -> list[Panel]:
    """Latency against candidates, a panel for each state length."""
    return [
        Panel(
            title=f"state of about {state:,} tokens",
            x_label="candidates",
            y_label="latency, ms",
            series=_series(run, arms, _of_state(run, state), lambda f: f.candidates),
        )
        for state in run.states
    ]


def by_state(run: Run, arms: Sequence[str]) -> list[Panel]:
    """Latency against the tokens that all candidates share, a panel for each number of candidates."""
    return [
        Panel(
            title=f"{candidates:,} candidates",
            x_label="shared prefix, tokens",
            y_label="latency, ms",
            series=_series(run, arms, [f for f in run.facts if f.candidates == candidates], lambda f: f.prefix_tokens),
        )
        for candidates in run.candidates
    ]


def growth(run: Run) -> list[Panel]:
    """Tokens processed, time, and where it was measured memory, against candidates; a row of panels for each state."""
    quantities: list[tuple[str, Callable[[Cell], float | None]]] = [("tokens processed", _rows), ("latency, ms", _ms)]
    if any(_mib(cell) for cell in run.cells):
        quantities.append(("peak memory above weights, MiB", _mib))
    return [
        Panel(
            title=f"state of about {state:,} tokens",
            x_label="candidates",
            y_label=label,
            series=_series(run, GROWING, _of_state(run, state), lambda f: f.candidates, value),
        )
        for state in run.states
        for label, value in quantities
    ]


def read_operators(path: Path) -> tuple[list[Bar], str]:
    """The records of `bench.py case=operators`, and what they were measured for and on; of several runs in one file
    the last counts. Raises ConfigError for a file without any."""
    subject = ""
    bars: dict[str, Bar] = {}
    for position, text in enumerate(_text(path).splitlines(), 1):
        try:
            record = json.loads(text)
            if record.get("case", record.get("kind")) in ("operators", "operator") and record["samples_us"]:
                bars[record["name"]] = _bar(record)
                how = record["configuration"]
                subject = f"{how.get('model') or how['heads']} head counts on {record['environment']['gpu']}"
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{path}: line {position} is no record: {error!r}") from error
    if not bars:
        raise ConfigError(f"{path}: no operator was measured in it; write it with bench.py case=operators out=FILE")
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
    return Bar(
        group=group,
        label=label,
        us=statistics.median(record["samples_us"]),
        peer=record["peer"],
        peer_us=statistics.median(peer) if peer else None,
        floor_us=record["floor_us"],
    )
