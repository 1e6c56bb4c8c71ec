"""The folder of one comparison: what it is of (run.json) and what was measured so far (cells.jsonl), one line each.

A line is appended when it is complete and never changed, so that a run that was stopped goes on where it stopped.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from engine.cli import write_whole
from engine.errors import ConfigError, shown

SCHEMA = 1
FEASIBILITY, PASSES = 0, (0, 1, 2)
"""Pass 0 shows that an arm can run, compiles and captures; its times enter no mean. The others are measured."""
RUN = "run"
"""Status of a cell that was measured; any other says why it was not."""
OUT_OF_BUDGET = "not run: budget"

# What may differ between two starts of one run.
_FREE = ("configuration.out", "configuration.progress", "environment.git_dirty")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One arm on one request in one pass. Times in milliseconds, of the candidates run."""

    pass_number: int
    request: str
    sha256: str
    arm: str
    status: str
    candidates: int
    candidates_run: int
    logical_tokens: int
    """Of the candidates run, each prompt whole."""
    samples_ms: list[float] = field(default_factory=list)
    retaken: int = 0
    """Forwards left out of the samples because graphs were captured for them."""
    capture_seconds: float = 0.0
    seconds: float = 0.0
    """What the cell took of the budget."""
    rows: dict[str, int] = field(default_factory=dict)
    passes: dict[str, int] = field(default_factory=dict)
    planned_bytes: dict[str, int] = field(default_factory=dict)
    peak_bytes: int | None = None
    """The most the allocator held for this arm above the weights; None on a CPU."""
    bits: list[str] = field(default_factory=list)
    """A digest of each candidate's hidden state; equal digests are equal bits."""
    finite: bool = True
    clocks: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> tuple[int, str, str]:
        return self.pass_number, self.request, self.arm

    @property
    def whole(self) -> bool:
        return self.candidates_run == self.candidates

    @property
    def ran(self) -> bool:
        return self.status == RUN

    @property
    def whole_ms(self) -> list[float]:
        """Samples for all candidates, from the share of them that was run."""
        return [ms * self.candidates / self.candidates_run for ms in self.samples_ms]


@dataclass(frozen=True, kw_only=True)
class RequestFacts:
    """What holds for a request whatever the arm."""

    request: str
    set: str
    sha256: str
    candidates: int
    questions: int
    logical_tokens: int
    unique_rows: int
    prefix_tokens: int
    tokenise_ms: float
    gemm_only_us: float | None = None
    """All projections at the unique rows by the library's own choice, in one CUDA graph; CUDA only."""
    roofline_us: float | None = None


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What an arm took before its first request, or why it is not run."""

    arm: str
    status: str
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Answers of `arm` beside those of `other`: over the candidates that both ran, probabilities over whole questions.

    `hidden` is the relative L2 distance of each candidate's hidden state, `head` the largest distance of the scalars.
    """

    request: str
    set: str
    arm: str
    other: str
    decisions: int
    decisions_equal: int
    probabilities: int
    probabilities_close: int
    probability: float
    head: float
    hidden: list[float]
    identical: int


Line = Cell | RequestFacts | Preparation | Difference
_KINDS: dict[str, type[Line]] = {
    "cell": Cell, "request": RequestFacts, "preparation": Preparation, "difference": Difference,
}  # fmt: skip


class Journal:
    """Lines of one run, in the order they were written; of preparations the latest one of each arm counts."""

    def __init__(self, folder: Path, description: Mapping[str, Any]) -> None:
        """Begin a run in `folder`, or go on with one of the same `description`; a last line cut off is removed.

        Raises ConfigError for a run of another description, naming what differs, and for a file that is none of ours.
        """
        self.folder, self.cells = folder, dict[tuple[int, str, str], Cell]()
        self.requests: dict[str, RequestFacts] = {}
        self.preparations: dict[str, Preparation] = {}
        self.differences: dict[tuple[str, str, str], Difference] = {}
        self.earlier_seconds = 0.0
        """What cells and preparations of earlier starts took."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"out={folder}: {error.strerror}") from None
        self._path = folder / "cells.jsonl"
        run = folder / "run.json"
        if run.exists():
            _require_same(folder, json.loads(run.read_text("utf-8")), json.loads(json.dumps(description)))
            self._read()
        elif any(folder.iterdir()):
            raise ConfigError(f"out={folder} holds files and no run.json, so it is not from this command; name another")
        else:
            write_whole(run, json.dumps({"schema": SCHEMA, "begun": _now(), **description}, indent=1) + "\n")

    def add(self, line: Line) -> None:
        [kind] = [name for name, one in _KINDS.items() if isinstance(line, one)]
        text = json.dumps({"kind": kind, "time": _now(), **asdict(line)}, ensure_ascii=False)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
        self._keep(line)

    def _keep(self, line: Line) -> None:
        match line:
            case Cell():
                self.cells[line.key] = line
            case RequestFacts():
                self.requests[line.request] = line
            case Preparation():
                self.preparations[line.arm] = line
            case Difference():
                self.differences[line.request, line.arm, line.other] = line

    def _read(self) -> None:
        if not self._path.exists():
            return
        content = self._path.read_bytes()
        complete = content.rfind(b"\n") + 1
        for position, text in enumerate(content[:complete].splitlines(), 1):
            try:
                found = json.loads(text)
                kind = _KINDS[found["kind"]]
                self._keep(kind(**{f.name: found[f.name] for f in fields(kind)}))
                self.earlier_seconds += found.get("seconds", 0.0)
            except (ValueError, TypeError, KeyError):
                raise ConfigError(f"{self._path}: line {position} is not of this command; name another out=") from None
        os.truncate(self._path, complete)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _require_same(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    was, new = _leaves(before), _leaves(now)
    names = sorted(name for name in {*was, *new} - {"schema", "begun"} if not name.startswith(_FREE))
    changed = [f"{name}={shown(was.get(name))}, now {shown(new.get(name))}" for name in names]
    changed = [text for name, text in zip(names, changed, strict=True) if was.get(name) != new.get(name)]
    if changed:
        more = f", and {len(changed) - 5} more" if len(changed) > 5 else ""
        raise ConfigError(
            f"out={folder} was begun with {'; '.join(changed[:5])}{more}; begin the same run again or name another out="
        )


def _leaves(value: Any, name: str = "") -> dict[str, Any]:
    """Dotted names of all values that are no dictionary."""
    if not isinstance(value, Mapping):
        return {name: value}
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found |= _leaves(inner, f"{name}.{key}" if name else str(key))
    return found
