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
from dataclasses import asdict, fields
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TextIO

from comparison.gates import verdicts
from comparison.journal import Journal
from comparison.loop import Comparison, scalar_head, unfinished
from comparison.options import CompareConfig
from comparison.report import page
from record import ROOT, environment
from workloads import Workload, workloads

from engine.cli import run_command, write_whole
from engine.config import EngineConfig, resolve
from engine.engine import Engine
from engine.errors import ConfigError, nearest
from engine.lines import Load
from engine.process import run


def main() -> None:
    def job(config: CompareConfig) -> int:
        return compare(config, load=Engine.load, stdout=sys.stdout, stderr=sys.stderr)

    run("compare", lambda: run_command("compare", CompareConfig, job))


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
    journal = Journal.begun(folder, described)
    print(f"compare: {len(chosen)} requests, {len(config.arms)} arms, results in {folder}", file=stderr, flush=True)
    engine_config = EngineConfig(**{f.name: getattr(config, f.name) for f in fields(EngineConfig)})
    try:
        if unfinished(config, journal, chosen):
            with load(engine_config) as owner:
                scalar_head(owner)
                report = partial(print, file=stderr, flush=True)
                Comparison(
                    config=config, owner=owner, journal=journal, began=began, workloads=chosen, report=report
                ).run()
    finally:  # whatever ended the run, what was measured is there to be read
        found = verdicts(journal.requests.values(), journal.cells.values(), config.gates)
        minutes = (journal.earlier_seconds + time.perf_counter() - began) / 60
        summary = page(journal, config, found, minutes=minutes, conv=environment()["causal_conv1d"] is not None)
        write_whole(folder / "summary.md", summary)
    print(summary, file=stdout)
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
    found, patterns = workloads(config.sets), config.names or ["*"]
    for pattern in patterns:
        if not any(fnmatchcase(workload.name, pattern) for workload in found):
            close = nearest(pattern, [workload.name for workload in found])
            raise ConfigError(f"names={pattern} is in none of sets={','.join(config.sets)}{close}")
    return [workload for workload in found if any(fnmatchcase(workload.name, pattern) for pattern in patterns)]


if __name__ == "__main__":
    main()
