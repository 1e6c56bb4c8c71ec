"""What is known about tuned products, as a file: which algorithms may run, for what GPU and software that holds.

One format for the cache of this machine and for the winners that ship in `configs/tuned/`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from graphs.rungs import LADDER
from ops.linear_tuned import CUBLASLT, Cell, product

Table = dict[Cell, tuple[str, ...]]
"""Per weight rows, weight columns and rung the names of algorithms, best first."""

FORMAT = 1
logger = logging.getLogger("forkgraph")


@dataclass(frozen=True, kw_only=True)
class Key:
    """Everything that decides whether a byte test made once still holds."""

    gpu: str
    driver: str
    torch: str
    triton: str
    cublas: int
    workspace: str
    """The library's workspace settings of the environment."""
    sources: str
    """Hash of the code that multiplies and compares."""

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


class DamagedTableError(Exception):
    """The text is no table; the message says where it went wrong."""


def encode(key: Key, table: Mapping[Cell, tuple[str, ...]]) -> str:
    """JSON with one line per weight: for each rung the places of its names in `names`."""
    shapes = sorted({(n, k) for n, k, _ in table})
    names = sorted({name for found in table.values() for name in found})
    place = {name: i for i, name in enumerate(names)}
    rows = {f"{n}x{k}": [[place[name] for name in table.get((n, k, rung), ())] for rung in LADDER] for n, k in shapes}
    parts = {
        "format": json.dumps(FORMAT),
        "key": json.dumps(asdict(key)),
        "rungs": json.dumps(LADDER, separators=(",", ":")),
        "names": "[\n  " + ",\n  ".join(json.dumps(name) for name in names) + "\n ]",
        "weights": "{\n  "
        + ",\n  ".join(f'"{weight}": {json.dumps(places, separators=(",", ":"))}' for weight, places in rows.items())
        + "\n }",
    }
    return "{\n " + ",\n ".join(f'"{part}": {text}' for part, text in parts.items()) + "\n}\n"


def decode(text: str) -> tuple[Key, Table]:
    """Raises DamagedTableError for anything that `encode` would not have written."""
    try:
        content = json.loads(text)
        if content["format"] != FORMAT:
            raise DamagedTableError(f"format {content['format']!r}, not {FORMAT}")
        key = _key(content["key"])
        names = [str(name) for name in content["names"]]
        for name in names:
            product(name)
        table: Table = {}
        for weight, places in content["weights"].items():
            n, k = map(int, weight.split("x"))
            for rung, chosen in zip(content["rungs"], places, strict=True):
                if chosen:
                    table[n, k, int(rung)] = tuple(names[_index(place)] for place in chosen)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise DamagedTableError(f"{type(error).__name__}: {error}") from None
    return key, table


def read(path: Path, key: Key) -> Table:
    """The table in this file if it was made under `key`, else an empty one; a damaged file is left with a warning."""
    found = _read(path)
    return found[1] if found is not None and found[0] == key else {}


def write(path: Path, key: Key, table: Mapping[Cell, tuple[str, ...]]) -> None:
    """Write under another name, then rename: a reader sees the old file or the whole new one. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        unfinished.write_text(encode(key, table), encoding="utf-8")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def shipped(key: Key) -> Table:
    """The winners that ship for this GPU, untested here. Codes of another cuBLAS mean nothing and are left out."""
    found = _read(files("configs").joinpath("tuned", shipped_name(key.gpu)))
    if found is None:
        return {}
    other, table = found
    if other.cublas != key.cublas:
        table = {cell: tuple(n for n in names if not n.startswith(f"{CUBLASLT}#")) for cell, names in table.items()}
    return {cell: names for cell, names in table.items() if names}


def shipped_name(gpu: str) -> str:
    return f"{'-'.join(gpu.lower().split())}.json"


def _read(path: Path | Traversable) -> tuple[Key, Table] | None:
    try:
        return decode(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, DamagedTableError) as error:
        logger.warning("gemm=tuned: %s is damaged and ignored (%s)", path, error)
        return None


def _key(content: dict[str, Any]) -> Key:
    if set(content) != {field.name for field in fields(Key)}:
        raise DamagedTableError(f"key has the fields {', '.join(sorted(content))}")
    return Key(**content)


def _index(place: Any) -> int:
    if isinstance(place, bool) or not isinstance(place, int) or place < 0:
        raise DamagedTableError(f"{place!r} is no place in names")
    return place
