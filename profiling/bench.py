"""Measure one case: `python profiling/bench.py case=NAME`. Writes records as they are taken, then prints their table.

Knows nothing of what a case measures.
"""

from __future__ import annotations

from pathlib import Path

from bench_options import BenchConfig
from cases import Case, case_named
from record import Record, append, print_table, progress

from engine.cli import run_command
from engine.process import run


def main() -> None:
    run("bench", lambda: run_command("bench", BenchConfig, lambda config: bench(config, case_named(config.case))))


def bench(config: BenchConfig, case: Case) -> int:
    """1 when a record failed, else 0. Whatever ends the case, what was measured is written and printed."""
    records: list[Record] = []
    out = None if config.out is None else Path(config.out).expanduser()
    try:
        for record in case.measure(config):
            records.append(record)
            if out is not None:
                append(out, record)
            took = "" if record.median_us is None else f": {record.median_us:,.1f} us"
            progress(f"{record.name}{took}")
    finally:
        if records:
            rows = ([figure(record) for figure in case.figures.values()] for record in records)
            print_table(list(case.figures), rows)
            print("\n".join(case.summary(records)), flush=True)
        failed = [record for record in records if record.failed]
        for record in failed:
            print(f"FAILED {record.name}: {record.failed}", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    main()
