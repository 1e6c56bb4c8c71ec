"""Compare ways to answer the same requests over one set of weights: bits, time, rows and memory, with gates.

    python profiling/compare.py model=tiny
    python profiling/compare.py model=9b checkpoint=random tokenizer=FOLDER out=FOLDER

The excluded pass 0 shows what can run, compiles and captures; two passes are measured. A run that was stopped goes on
when it is started again. A failed gate ends it; what was measured stays.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TextIO

from compare_journal import PASSES, Journal
from compare_loop import Comparison, Workload, check_head, unfinished
from compare_options import CompareConfig
from compare_report import report_of
from gates import verdicts
from manifest import workloads
from record import ROOT, environment
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from engine.cli import console, run_command, write_whole
from engine.config import RANDOM, EngineConfig, nearest, resolve
from engine.engine import Engine
from engine.errors import ConfigError
from engine.lines import Load
from engine.load.checkpoint import RANDOM_NOTE


def main() -> None:
    def job(config: CompareConfig) -> int:
        return compare(config, load=Engine.load, stdout=sys.stdout, stderr=sys.stderr)

    sys.exit(run_command("compare", CompareConfig, job))


def compare(config: CompareConfig, *, load: Load, stdout: TextIO, stderr: TextIO) -> int:
    """Run or go on with the comparison in `config.out`; 1 when a gate or a cell failed, else 0.

    Raises ConfigError for options that cannot work and for a folder with another run.
    """
    began = time.perf_counter()
    config = resolve(config)
    chosen = _chosen(config)
    folder = Path(config.out).expanduser() if config.out else Path(tempfile.mkdtemp(prefix="forkgraph-compare-"))
    described = {
        "configuration": asdict(config),
        "requests": {workload.name: workload.sha256 for workload in chosen},
        "environment": environment(),
        "sources": _sources(),
    }
    journal = Journal(folder, described)
    print(f"compare: {len(chosen)} requests, {len(config.arms)} arms, results in {folder}", file=stderr, flush=True)
    engine_config = EngineConfig(**{f.name: getattr(config, f.name) for f in fields(EngineConfig)})
    try:
        if unfinished(config, journal, chosen):
            with load(engine_config) as owner, _lines(config, len(chosen) * len(PASSES), stderr) as report:
                check_head(owner)
                Comparison(
                    config=config, owner=owner, journal=journal, began=began, workloads=chosen, report=report
                ).run()
    finally:  # whatever ended the run, what was measured is there to be read
        found = verdicts(list(journal.requests.values()), list(journal.cells.values()), config.gates)
        summary = report_of(journal, config, found, _notes(config, journal, time.perf_counter() - began))
        write_whole(folder / "summary.md", summary.markdown(f"Comparison: {config.model}, {config.device}"))
    console(stdout).print(*summary.renderables(), sep="\n")
    failed = any(verdict.outcome == "failed" for verdict in found)
    return int(failed or any(cell.status.startswith("failed") for cell in journal.cells.values()))


def _sources() -> str:
    """SHA-256 of what is measured, which may be ahead of the commit."""
    digest = hashlib.sha256()
    for folder in ("engine", "ops", "graphs"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _chosen(config: CompareConfig) -> list[Workload]:
    """The requests to run. Raises ConfigError for a pattern that names none in the sets."""
    found: list[Workload] = list(workloads(config.sets, jevbench=Path(config.jevbench) if config.jevbench else None))
    known = [workload.name for workload in found]
    for pattern in config.names:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise ConfigError(f"names={pattern} is in none of sets={','.join(config.sets)}{nearest(pattern, known)}")
    patterns = config.names or ["*"]
    return [workload for workload in found if any(fnmatchcase(workload.name, pattern) for pattern in patterns)]


@contextmanager
def _lines(config: CompareConfig, total: int, stderr: TextIO) -> Iterator[Callable[[str], None]]:
    """A bar over all requests and passes with the last line beside it on a terminal, plain lines otherwise."""
    if not (config.progress and stderr.isatty()):
        yield lambda text: print(text, file=stderr, flush=True)
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=stderr)) as progress:
        bar = progress.add_task("arms", total=total)

        def report(text: str) -> None:
            progress.update(bar, description=text, advance=text.startswith("pass "))

        yield report


def _notes(config: CompareConfig, journal: Journal, seconds: float) -> list[str]:
    used = (journal.earlier_seconds + seconds) / 60
    base = " ".join(f"{name}={getattr(config, name)}" for name in ("gemm", "schedule", "split", "graphs"))
    notes = [
        f"Base: {base}, {config.dtype} on {config.device}. Pass 0 is excluded; passes 1 and 2 are measured, requests "
        "and arms alternating, the arms in the other order in every second pass. A time is the wall time from token "
        f"ids to hidden states on the host. {used:.1f} of {config.budget_minutes:g} minutes were used.",
        "`~`: stated for all candidates from a run of the first few (column run), whose rows, tokens and passes are "
        "shown. /GEMM: mean time over that of the projections alone; of a set, the geometric mean. Faster: mean "
        "time of `independent` over this one. Peak: the most the allocator held for the arm above the weights in any "
        "pass; what a replayed graph uses lies in its pool and is not in it, so planned snapshots and scratch (MiB) "
        "stand beside.",
    ]
    if config.checkpoint in (None, RANDOM):
        notes.append(f"{RANDOM_NOTE} Random weights support no claim about decisions.")
    if environment()["causal_conv1d"] is None and any(arm.startswith("transformers/") for arm in config.arms):
        notes.append("Transformers ran without the package causal-conv1d: its convolution is PyTorch's, on both paths.")
    readings = [cell.clocks for cell in journal.cells.values() if cell.clocks]
    if readings:
        ranges = [(name, sorted({reading[name] for reading in readings})) for name in readings[0]]
        shown = [f"{name} {found[0]}" + (f" to {found[-1]}" if len(found) > 1 else "") for name, found in ranges]
        notes.append(f"Logged and never changed: {'; '.join(shown)}.")
    return notes


if __name__ == "__main__":
    main()
