"""The one record: a measurement as a line of JSON and as a row of a table, and the environment it was taken in.

Absolute times hold for one GPU; a record therefore names the peer it was taken beside in the same run.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

SCHEMA = 2
ROOT = Path(__file__).resolve().parent.parent


def _command(*words: str) -> str:
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=20, cwd=ROOT, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


@cache
def environment() -> dict[str, Any]:
    """Versions, commit and device: what a number needs to be compared with another."""
    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "transformers", "fla", "causal_conv1d"):
        try:
            found[name] = __import__(name).__version__
        except ImportError:
            found[name] = None
    found["git"] = _command("git", "rev-parse", "HEAD") or None
    found["git_dirty"] = bool(_command("git", "status", "--porcelain"))
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["driver"] = _command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]
        found["cuda"] = torch.version.cuda
    return found


def clocks(device: torch.device | str = "cuda:0") -> dict[str, str]:
    """Clocks, power, temperature and throttle reasons of `device` now; logged, never changed."""
    fields = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "clocks_event_reasons.active")
    uuid = torch.cuda.get_device_properties(device).uuid  # its number there need not be the one here
    line = _command("nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
    return dict(zip(fields, (part.strip() for part in line.split(",")), strict=False))


@dataclass(kw_only=True)
class Record:
    """One measurement. `samples_us` are raw and in order; `floor_us` is what its bytes or operations need at least."""

    case: str
    name: str
    samples_us: list[float] = field(default_factory=list)
    configuration: dict[str, Any] = field(default_factory=dict)
    peer: str | None = None
    ratio: float | None = None
    """To the peer."""
    floor_us: float | None = None
    failed: str = ""
    """What was found wrong; one such record fails the run."""

    @property
    def us(self) -> float:
        """The median. Raises StatisticsError where nothing was timed."""
        return statistics.median(self.samples_us)

    @property
    def median_us(self) -> float | None:
        return self.us if self.samples_us else None


def append(path: Path, record: Record) -> None:
    """Add one line, complete on its own, to a file whose folder is made if need be."""
    line = {
        "schema": SCHEMA,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **asdict(record),
        "median_us": record.median_us,
        "clocks": clocks() if torch.cuda.is_available() else {},
        "environment": environment(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def ms(us: float | None) -> str | None:
    return None if us is None else f"{us / 1e3:,.2f}"


def number(value: float | None, places: int = 2) -> str | None:
    return None if value is None else f"{value:,.{places}f}"


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().split("\n")[0][:160]


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def print_table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """On standard output: the first column to the left, the others to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, header in enumerate(headers):
        table.add_column(header, justify="right" if i else "left", overflow="fold")
    for row in rows:
        table.add_row(*("-" if cell is None else str(cell) for cell in row))
    width = None if sys.stdout.isatty() else 200
    Console(file=sys.stdout, width=width, markup=False, highlight=False).print(table)
