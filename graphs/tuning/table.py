"""What is known about tuned products, as a file: which algorithms may run, for what GPU and software that holds.

One format for the cache of this machine and for the winners that ship in `configs/tuned/`.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from graphs.files import replace_file
from graphs.rungs import LADDER
from ops.linear_tuned import CUBLASLT, Cell, product

FORMAT = 2
SHIPPED = Path(__file__).resolve().parents[2] / "configs" / "tuned"
logger = logging.getLogger("forkgraph")


@dataclass(frozen=True, kw_only=True)
class Table:
    names: dict[Cell, tuple[str, ...]] = field(default_factory=dict)
    """Per weight rows, weight columns and rung the names of algorithms, best first."""
    failed: dict[str, tuple[Cell, ...]] = field(default_factory=dict)
    """Where an algorithm did not have the bits of `fixed`."""
    open: dict[Cell, tuple[str, ...]] = field(default_factory=dict)
    """Cells that `names` lacks because a test could not be made, with what is to be tried again, best first."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Everything that decides whether a byte test made once still holds."""

    gpu: str
    driver: str
    torch: str
    triton: str
    cublas: int
    sources: str
    """Hash of the code that multiplies and compares."""

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


class DamagedTableError(Exception):
    """The text is no table; the message says where it went wrong."""


def encode(environment: Environment, table: Table) -> str:
    """JSON with one line per weight: for each rung the places of its names in `names`."""
    weights = sorted({cell[:2] for cell in table.names})
    names = sorted({name for found in (*table.names.values(), *table.open.values()) for name in found})
    place = {name: i for i, name in enumerate(names)}
    places = {
        (n, k): [[place[name] for name in table.names.get((n, k, rung), ())] for rung in LADDER] for n, k in weights
    }
    parts = {
        "format": json.dumps(FORMAT),
        "environment": json.dumps(asdict(environment)),
        "rungs": json.dumps(LADDER, separators=(",", ":")),
        "names": _lines("[]", [json.dumps(name) for name in names]),
        "weights": _lines("{}", [f'"{n}x{k}": {json.dumps(places[n, k], separators=(",", ":"))}' for n, k in weights]),
        "failed": _lines(
            "{}", [f"{json.dumps(name)}: {json.dumps(cells)}" for name, cells in sorted(table.failed.items())]
        ),
        "open": _lines(
            "[]", [json.dumps([*cell, [place[name] for name in found]]) for cell, found in sorted(table.open.items())]
        ),
    }
    return "{\n " + ",\n ".join(f'"{part}": {text}' for part, text in parts.items()) + "\n}\n"


def decode(text: str) -> tuple[Environment, Table]:
    """Raises DamagedTableError for anything that `encode` would not have written."""
    try:
        content = json.loads(text)
        if content["format"] != FORMAT:
            raise DamagedTableError(f"format {content['format']!r}, not {FORMAT}")
        environment = _environment(content["environment"])
        names = [str(name) for name in content["names"]]
        for name in (*names, *content["failed"]):
            product(name)
        table = Table()
        for weight, places in content["weights"].items():
            n, k = map(int, weight.split("x"))
            for rung, chosen in zip(content["rungs"], places, strict=True):
                if chosen:
                    table.names[n, k, int(rung)] = tuple(names[_index(place)] for place in chosen)
        for name, cells in content["failed"].items():
            table.failed[name] = tuple((int(n), int(k), int(rows)) for n, k, rows in cells)
        for n, k, rows, places in content["open"]:
            table.open[int(n), int(k), int(rows)] = tuple(names[_index(place)] for place in places)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise DamagedTableError(f"{type(error).__name__}: {error}") from None
    return environment, table


def read(path: Path, environment: Environment) -> Table:
    """The table in this file if it was made in this environment, else an empty one; a damaged one is warned of."""
    found = _read(path)
    return found[1] if found is not None and found[0] == environment else Table()


def write(path: Path, environment: Environment, table: Table) -> None:
    """The file of a table, whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, encode(environment, table))


def shipped(environment: Environment) -> dict[Cell, tuple[str, ...]]:
    """The winners that ship for this GPU, untested here. Codes of another cuBLAS mean nothing and are left out."""
    found = _read(SHIPPED / shipped_name(environment.gpu))
    if found is None:
        return {}
    names = found[1].names
    if found[0].cublas != environment.cublas:
        names = {cell: tuple(n for n in kept if not n.startswith(f"{CUBLASLT}#")) for cell, kept in names.items()}
    return {cell: kept for cell, kept in names.items() if kept}


def shipped_name(gpu: str) -> str:
    return f"{'-'.join(gpu.lower().split())}.json"


def _read(path: Path) -> tuple[Environment, Table] | None:
    try:
        return decode(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, DamagedTableError) as error:
        logger.warning("gemm=tuned: %s is damaged and ignored (%s)", path, error)
        return None


def _lines(brackets: str, items: Sequence[str]) -> str:
    """A JSON list or object with one item per line."""
    return f"{brackets[0]}\n  " + ",\n  ".join(items) + f"\n {brackets[1]}" if items else brackets


def _environment(content: dict[str, Any]) -> Environment:
    if set(content) != {field.name for field in fields(Environment)}:
        raise DamagedTableError(f"environment has the fields {', '.join(sorted(content))}")
    return Environment(**content)


def _index(place: Any) -> int:
    if isinstance(place, bool) or not isinstance(place, int) or place < 0:
        raise DamagedTableError(f"{place!r} is no place in names")
    return place
