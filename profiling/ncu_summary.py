"""One line per kernel name out of Nsight Compute's details page in CSV.

    ncu --import report.ncu-rep --page details --csv --print-units base --print-kernel-base function > metrics.csv
    python profiling/ncu_summary.py metrics.csv

Shares, occupancy and registers are means over the launches of a name, shares and occupancy weighted by time.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from record import print_table

from engine.errors import ConfigError, ForkgraphError

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
_COLUMNS = ("ID", "Kernel Name", "Section Name", "Metric Name", "Metric Unit", "Metric Value")
# What one of a unit is in microseconds, per cent or bytes. Versions of the tool name seconds differently.
_UNITS = {
    "ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3, "s": 1e6, "second": 1e6,
    "%": 1.0, "register/thread": 1.0,
    "byte/block": 1.0, "Kbyte/block": 1e3, "byte": 1.0, "Kbyte": 1e3,
}  # fmt: skip

HEADERS = ("kernel", "launches", "us", "us each", "share %", "SM %", "DRAM %", "occupancy %", "registers", "shared KiB")


@dataclass(kw_only=True)
class Launch:
    """One kernel launch; `values` by the names of METRICS, in microseconds, per cent, registers or bytes."""

    kernel: str
    values: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """All launches of one kernel name. Times in microseconds, shares in per cent, shared memory in bytes a block."""

    name: str
    launches: int
    us: float
    sm: float
    dram: float
    occupancy: float
    registers: float
    shared_bytes: float
    """Static and dynamic, of the launch with most."""


def launches_of(path: Path) -> list[Launch]:
    """The launches in the order they ran.

    Raises ConfigError for a file that is no details page, and for a launch that lacks a metric of METRICS.
    """
    found: dict[str, Launch] = {}
    for line in _lines(path):
        launch = found.setdefault(line["ID"], Launch(kernel=line["Kernel Name"]))
        name = _FIELDS.get((line["Section Name"], line["Metric Name"]))
        if name is not None:
            launch.values[name] = _number(path, line)
    for id, launch in found.items():
        for name in METRICS:
            if name not in launch.values:
                section, metric = METRICS[name]
                raise ConfigError(f"{path}: launch {id} has no {metric!r} ({section}); measure with profiling/ncu.sh")
    return list(found.values())


def _lines(path: Path) -> Iterator[dict[str, str]]:
    """Rows of the table by column; what the tool prints before the table is skipped."""
    try:
        text = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    first = next((i for i, line in enumerate(text) if line.startswith('"ID",')), len(text))
    table = csv.DictReader(text[first:])
    missing = [name for name in _COLUMNS if name not in (table.fieldnames or ())]
    if missing:
        raise ConfigError(f"{path}: no column {missing[0]!r}; write it with ncu --page details --csv")
    yield from table


def _number(path: Path, line: dict[str, str]) -> float:
    unit, value = line["Metric Unit"], line["Metric Value"]
    if unit not in _UNITS:
        raise ConfigError(f"{path}: {line['Metric Name']} in {unit!r}; write it with ncu --print-units base")
    try:
        return float(value.replace(",", "")) * _UNITS[unit]
    except ValueError:
        raise ConfigError(f"{path}: launch {line['ID']}, {line['Metric Name']} is {value!r}, not a number") from None


def kernels_of(launches: Sequence[Launch]) -> list[Kernel]:
    """By kernel name, the one that took most time first."""
    groups: dict[str, list[Launch]] = {}
    for launch in launches:
        groups.setdefault(launch.kernel, []).append(launch)
    return sorted((_kernel(name, members) for name, members in groups.items()), key=lambda kernel: -kernel.us)


def _kernel(name: str, members: Sequence[Launch]) -> Kernel:
    values = [launch.values for launch in members]
    us = sum(v["us"] for v in values)

    def by_time(field: str) -> float:
        return sum(v[field] * v["us"] for v in values) / us

    return Kernel(
        name=name, launches=len(members), us=us, sm=by_time("sm"), dram=by_time("dram"),
        occupancy=by_time("occupancy"), registers=sum(v["registers"] for v in values) / len(values),
        shared_bytes=max(v["static"] + v["dynamic"] for v in values),
    )  # fmt: skip


def lines_of(kernels: Sequence[Kernel]) -> list[tuple[str, ...]]:
    total = sum(kernel.us for kernel in kernels)
    return [
        (
            k.name, f"{k.launches:,}", f"{k.us:,.1f}", f"{k.us / k.launches:,.1f}", f"{100 * k.us / total:.1f}",
            f"{k.sm:.1f}", f"{k.dram:.1f}", f"{k.occupancy:.1f}", f"{k.registers:.0f}", f"{k.shared_bytes / 1024:.1f}",
        )
        for k in kernels
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metrics", type=Path, help="details page in CSV")
    path = parser.parse_args(argv).metrics
    try:
        launches = launches_of(path)
    except ForkgraphError as error:
        print(f"ncu_summary: {error}", file=sys.stderr)
        return 2
    print_table(HEADERS, lines_of(kernels_of(launches)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
