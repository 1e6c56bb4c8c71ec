"""Requests one after the other, and rows of answers: which request a row answers is told by an id and a hash.

The id is the request's own `id` member, text or a whole number, else the number of its line, from 1. The hash is
SHA-256 over the JSON of the request as Python writes it without spaces, so that spaces and escapes do not count while
the order of keys, which prompts show, does; over the bytes where they are no JSON that a request may be.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, RequestError, shown
from engine.wire.requests import read_body

Id = str | int


@dataclass(frozen=True)
class Line:
    """One request."""

    id: Id
    sha256: str
    body: bytes


Lines = Callable[[], Iterable[Line]]
"""Requests in order, read anew with each call."""


@dataclass(frozen=True)
class Row:
    """What a file holds for an id."""

    sha256: str
    error: str | None
    start: int
    """Of its line, in bytes."""


def told_apart(number: int, body: bytes, id: Any = None) -> Line:
    """Request `number` with its hash, and its id unless one is given. Raises ConfigError for an id of another type."""
    tree, hashed = None, body
    try:
        tree = read_body(body)
        hashed = json.dumps(tree, ensure_ascii=False, separators=(",", ":")).encode()
    except RequestError:
        pass  # it gets its row when it is asked
    if id is None and isinstance(tree, dict):
        id = tree.get("id")
    if id is not None and (isinstance(id, bool) or not isinstance(id, Id)):
        raise ConfigError(f"request {number}: id={shown(id)} is neither text nor a whole number")
    return Line(number if id is None else id, hashlib.sha256(hashed).hexdigest(), body)


def jsonl_lines(path: Path) -> Iterator[Line]:
    """Numbered from 1; blank lines are counted and left out."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line := line.strip():
                yield told_apart(number, line)


def hashes(lines: Iterable[Line]) -> dict[Id, str]:
    """The hash of each id, in order. Raises ConfigError for an id that comes twice."""
    known: dict[Id, str] = {}
    for line in lines:
        if line.id in known:
            raise ConfigError(
                f"two requests have the id {shown(line.id)}; give each its own (one without is called by its number)"
            )
        known[line.id] = line.sha256
    return known


def read_rows(path: Path) -> tuple[dict[Id, Row], int]:
    """The rows of a file by id, of several the last, and where they end: a line that was cut off is none.

    Raises ConfigError for a line that is no row of ours.
    """
    rows: dict[Id, Row] = {}
    end = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                if not line.startswith(b'{"id": '[: len(line)]):
                    raise _foreign(number)
                break
            try:
                row = json.loads(line)
                id, sha256 = row["id"], row["request_sha256"]
                if isinstance(id, bool) or not isinstance(id, Id) or not isinstance(sha256, str):
                    raise _foreign(number)
                rows[id] = Row(sha256, row.get("error"), end)
            except (ValueError, TypeError, KeyError, RecursionError):
                raise _foreign(number) from None
            end += len(line)
    return rows, end


def _foreign(number: int) -> ConfigError:
    return ConfigError(f"line {number} is not a row of this command")
