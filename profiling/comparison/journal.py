"""The folder of one comparison: what it is of (run.json) and what was measured so far (cells.jsonl), one line each.

A line is appended when it is complete and never changed, so that a run that was stopped goes on where it stopped.
"""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from engine.cli import write_whole
from engine.errors import ConfigError, shown

FEASIBILITY, PASSES = 0, (0, 1, 2)
"""Pass 0 shows that an arm can run, compiles and captures; its times enter no mean. The others are measured."""
RUN, OUT_OF_BUDGET = "run", "not run: budget"
"""Status of a cell that was measured; any other says why it was not."""

# What may differ between two starts of one run.
_FREE = ("configuration.out", "environment.git_dirty", "begun")


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, ser_json_inf_nan="constants")

    time: str = Field(default_factory=_now)
    seconds: float = 0.0
    """What it took of the budget."""


class Cell(_Line):
    """One arm on one request in one pass. Times in milliseconds, of the candidates run."""

    kind: Literal["cell"] = "cell"
    pass_number: int
    request: str
    sha256: str
    arm: str
    status: str
    candidates: int
    candidates_run: int
    logical_tokens: int
    """Of the candidates run, each prompt whole."""
    samples_ms: list[float] = []
    retaken: int = 0
    """Forwards left out of the samples because graphs were captured for them."""
    capture_seconds: float = 0.0
    rows: dict[str, int] = {}
    passes: dict[str, int] = {}
    planned_bytes: dict[str, int] = {}
    peak_bytes: int | None = None
    """The most the allocator held for this arm above the weights; None on a CPU."""
    bits: list[str] = []
    """A digest of each candidate's hidden state; equal digests are equal bits."""
    finite: bool = True
    clocks: dict[str, str] = {}

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
    def measured(self) -> bool:
        return self.ran and self.pass_number != FEASIBILITY

    @property
    def num_rows(self) -> int:
        return sum(self.rows.values())

    @property
    def whole_ms(self) -> list[float]:
        """Samples for all candidates, from the share of them that was run."""
        return [ms * self.candidates / self.candidates_run for ms in self.samples_ms]


class RequestFacts(_Line):
    """What holds for a request whatever the arm."""

    kind: Literal["request"] = "request"
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


class Preparation(_Line):
    """What an arm took before its first request, or why it is not run."""

    kind: Literal["preparation"] = "preparation"
    arm: str
    status: str


class Difference(_Line):
    """Answers of `arm` beside those of `other`: over the candidates that both ran, probabilities over whole questions.

    `hidden` is the relative L2 distance of each candidate's hidden state, `head` the largest distance of the scalars.
    """

    kind: Literal["difference"] = "difference"
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
_LINE: TypeAdapter[Line] = TypeAdapter(Annotated[Line, Field(discriminator="kind")])


class Journal:
    """Lines of one run, in the order they were written; of preparations the latest one of each arm counts."""

    def __init__(self, folder: Path) -> None:
        """Reads what `folder` holds, compressed or not; a last line that was cut off is passed over.

        Raises ConfigError for lines that are none of ours.
        """
        self.folder, self.path = folder, folder / "cells.jsonl"
        self.cells: dict[tuple[int, str, str], Cell] = {}
        self.requests: dict[str, RequestFacts] = {}
        self.preparations: dict[str, Preparation] = {}
        self.differences: dict[tuple[str, str, str], Difference] = {}
        self.earlier_seconds = 0.0
        """What cells and preparations of earlier starts took."""
        packed = self.path.with_suffix(".jsonl.gz")
        content = gzip.decompress(packed.read_bytes()) if packed.exists() else b""
        content += self.path.read_bytes() if self.path.exists() else b""
        self.torn = len(content) - (content.rfind(b"\n") + 1)
        """Bytes of the last line, where it was cut off."""
        for position, text in enumerate(content[: len(content) - self.torn].splitlines(), 1):
            try:
                line = _LINE.validate_json(text)
            except ValidationError:
                raise ConfigError(f"{self.path}: line {position} is not of this command; name another out=") from None
            self._keep(line)
            self.earlier_seconds += line.seconds

    @classmethod
    def begun(cls, folder: Path, description: Mapping[str, Any]) -> Self:
        """Begin a run in `folder`, or go on with one of the same `description`.

        Raises ConfigError for a run of another description, naming what differs, and for a folder of something else.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"out={folder}: {error.strerror}") from None
        run = folder / "run.json"
        if run.exists():
            _require_same(folder, json.loads(run.read_text("utf-8")), json.loads(json.dumps(description)))
        elif any(folder.iterdir()):
            raise ConfigError(f"out={folder} holds files and no run.json, so it is not from this command; name another")
        else:
            write_whole(run, json.dumps({"begun": _now(), **description}, indent=1) + "\n")
        journal = cls(folder)
        if journal.torn:
            os.truncate(journal.path, journal.path.stat().st_size - journal.torn)
        return journal

    def add(self, line: Line) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line.model_dump_json() + "\n")
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


def _require_same(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    was, new = dict(_leaves(before)), dict(_leaves(now))
    names = sorted(name for name in {*was, *new} if not name.startswith(_FREE) and was.get(name) != new.get(name))
    if names:
        changed = "; ".join(f"{name}={shown(was.get(name))}, now {shown(new.get(name))}" for name in names[:5])
        more = f", and {len(names) - 5} more" if len(names) > 5 else ""
        raise ConfigError(f"out={folder} was begun with {changed}{more}; begin the same run again or name another out=")


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names of all values that are no dictionary."""
    for key, value in tree.items():
        yield from _leaves(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(prefix + key, value)]
