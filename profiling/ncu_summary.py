"""One line per kernel name out of Nsight Compute's details page in CSV.

    ncu --import report.ncu-rep --page details --csv --print-units base --print-kernel-base function > metrics.csv
    python profiling/ncu_summary.py metrics.csv

Shares, occupancy and registers are means over the launches of a name, shares and occupancy weighted by time.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.errors import ConfigError

# Field: section and metric of the details page, both as it names them.
METRICS = {
    "us": ("GPU Speed Of Light Throughput", "Duration"),
    "sm": ("GPU Speed Of Light Throughput", "Compute (SM) Throughput"),
    "dram": ("GPU Speed Of Light Throughput", "DRAM Throughput"),
    "occupancy": ("Occupancy", "Achieved Occupancy"),
    "registers": ("Launch Statistics", "Registers Per Thread"),
    "static": ("Launch Statistics", "Static Shared Memory Per Block"),
    "dynamic": ("Launch Statistics", "Dynamic Shared Memory Per Block"),
}
_FIELDS = {metric: name for name, metric in METRICS.items()}
# What one of a unit is in microseconds, per cent or bytes. Versions of the tool name seconds differently.
_UNITS = {
    "ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3, "s": 1e6, "second": 1e6,
    "%": 1.0, "register/thread": 1.0, "byte/block": 1.0, "Kbyte/block": 1e3, "byte": 1.0, "Kbyte": 1e3,
}  # fmt: skip
HEADERS = ("kernel", "launches", "us", "us each", "share %", "SM %", "DRAM %", "occupancy %", "registers", "shared KiB")


@dataclass
class Launch:
    """One kernel launch; `values` by the names of METRICS, in microseconds, per cent, registers or bytes."""

    kernel: str
    values: dict[str, float] = field(default_factory=dict)


def launches_of(path: Path) -> list[Launch]:
    """The launches in the order they ran.

    Raises ConfigError for a file that is no details page, and for a launch that lacks a metric of METRICS.
    """
    found: dict[str, Launch] = {}
    try:
        text = path.read_text(encoding="utf-8").splitlines()
        first = next(i for i, line in enumerate(text) if line.startswith('"ID",'))  # what the tool said goes before
        for line in csv.DictReader(text[first:]):
            launch = found.setdefault(line["ID"], Launch(line["Kernel Name"]))
            name = _FIELDS.get((line["Section Name"], line["Metric Name"]))
            if name is not None:
                launch.values[name] = float(line["Metric Value"].replace(",", "")) * _UNITS[line["Metric Unit"]]
    except (OSError, ValueError, KeyError, StopIteration) as error:
        how = "write it with ncu --page details --csv --print-units base"
        raise ConfigError(f"{path}: not a details page: {error!r}; {how}") from error
    for id, launch in found.items():
        if lacking := [metric for name, metric in METRICS.items() if name not in launch.values]:
            section, metric = lacking[0]
            raise ConfigError(f"{path}: launch {id} has no {metric!r} ({section}); measure with profiling/ncu.sh")
    return list(found.values())


def lines_of(launches: Sequence[Launch]) -> list[tuple[str, ...]]:
    """A line for each kernel name under HEADERS, the one that took most time first. Shared memory, static and dynamic,
    is that of the launch with most."""
    groups: dict[str, list[dict[str, float]]] = {}
    for launch in launches:
        groups.setdefault(launch.kernel, []).append(launch.values)
    times = {name: sum(v["us"] for v in members) for name, members in groups.items()}
    lines = []
    for name, us in sorted(times.items(), key=lambda item: -item[1]):
        members = groups[name]
        by_time = [sum(v[field] * v["us"] for v in members) / us for field in ("sm", "dram", "occupancy")]
        registers = sum(v["registers"] for v in members) / len(members)
        shared = max(v["static"] + v["dynamic"] for v in members) / 1024
        numbers = [us, us / len(members), 100 * us / sum(times.values()), *by_time]
        lines.append((name, f"{len(members):,}", *(f"{n:,.1f}" for n in numbers), f"{registers:.0f}", f"{shared:.1f}"))
    return lines


def main(words: Sequence[str]) -> int:
    try:
        table = [HEADERS, *lines_of(launches_of(Path(words[0])))]
    except ConfigError as error:
        print(f"ncu_summary: {error}", file=sys.stderr)
        return 2
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for name, *rest in table:
        print(name.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(rest, widths[1:], strict=True)), sep="  ")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
