"""One line per kernel name out of Nsight Compute's details page in CSV.

    ncu --import report.ncu-rep --page details --csv --print-units base --print-kernel-base function > metrics.csv
    python profiling/ncu_summary.py metrics.csv

Shares, occupancy and registers are means over the launches of a name, shares and occupancy weighted by time.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from pathlib import Path

from engine.errors import ConfigError

# Section and metric of the details page, both as it names them, and what is made of them.
_FIELDS = {
    ("GPU Speed Of Light Throughput", "Duration"): "us",
    ("GPU Speed Of Light Throughput", "Compute (SM) Throughput"): "sm",
    ("GPU Speed Of Light Throughput", "DRAM Throughput"): "dram",
    ("Occupancy", "Achieved Occupancy"): "occupancy",
    ("Launch Statistics", "Registers Per Thread"): "registers",
    ("Launch Statistics", "Static Shared Memory Per Block"): "static",
    ("Launch Statistics", "Dynamic Shared Memory Per Block"): "dynamic",
}
# What one of a unit is in microseconds, per cent or bytes. Versions of the tool name seconds differently.
_UNITS = {
    "ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3, "s": 1e6, "second": 1e6,
    "%": 1.0, "register/thread": 1.0, "byte/block": 1.0, "Kbyte/block": 1e3, "byte": 1.0, "Kbyte": 1e3,
}  # fmt: skip
HEADERS = ("kernel", "launches", "us", "us each", "share %", "SM %", "DRAM %", "occupancy %", "registers", "shared KiB")


def lines_of(path: Path) -> list[tuple[str, ...]]:
    """A line for each kernel name under HEADERS, the one that took most time first. Shared memory, static and dynamic,
    is that of the launch with most. Raises ConfigError for a file that is no details page with all of these metrics."""
    launches, names = defaultdict[str, dict[str, float]](dict), dict[str, str]()
    try:
        text = path.read_text(encoding="utf-8").splitlines()
        first = next(i for i, line in enumerate(text) if line.startswith('"ID",'))  # what the tool said goes before
        for line in csv.DictReader(text[first:]):
            names[line["ID"]] = line["Kernel Name"]
            if field := _FIELDS.get((line["Section Name"], line["Metric Name"])):
                value, unit = float(line["Metric Value"].replace(",", "")), _UNITS[line["Metric Unit"]]
                launches[line["ID"]][field] = value * unit
        groups = {name: [launches[id] for id in names if names[id] == name] for name in names.values()}
        total = sum(launch["us"] for launch in launches.values())
        rows = []
        for name, members in groups.items():
            us = sum(v["us"] for v in members)
            by_time = [sum(v[field] * v["us"] for v in members) / us for field in ("sm", "dram", "occupancy")]
            registers = sum(v["registers"] for v in members) / len(members)
            shared = max(v["static"] + v["dynamic"] for v in members) / 1024
            numbers = [f"{n:,.1f}" for n in (us, us / len(members), 100 * us / total, *by_time)]
            rows.append((us, (name, f"{len(members):,}", *numbers, f"{registers:.0f}", f"{shared:.1f}")))
    except (OSError, ValueError, KeyError, StopIteration) as error:
        raise ConfigError(f"{path}: not a details page: {error!r}; write it with profiling/ncu.sh") from error
    return [row for _, row in sorted(rows, reverse=True)]


def main(path: str) -> int:
    try:
        table = [HEADERS, *lines_of(Path(path))]
    except ConfigError as error:
        print(f"ncu_summary: {error}", file=sys.stderr)
        return 2
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for name, *rest in table:
        print(name.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(rest, widths[1:], strict=True)), sep="  ")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
