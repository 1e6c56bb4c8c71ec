"""Tuned products of weights on one GPU: from what is known on disk to what `ops.linear_tuned` runs.

`prepare` never searches. What this machine has tested before is taken as it is; else the winners that ship for this
GPU, or else the library's choice, are tested once and kept. `tune` searches. Weights are given as their shapes (rows N,
columns K).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pynvml
import torch

from graphs.rungs import LADDER
from graphs.tuning.search import Findings, Progress, Trials, retest, search
from graphs.tuning.table import Environment, Table, read, shipped, write
from graphs.tuning.trials import GpuTrials
from ops import blas
from ops.linear_tuned import CUBLASLT, FIXED, Cell, install, is_one_kernel

Shape = tuple[int, int]
"""Rows N and columns K of a weight."""

UNKNOWN = (CUBLASLT,)
"""What is tested for a weight that nobody has searched."""

_SOURCES = (
    "graphs/tuning/trials.py",
    "ops/blas.py",
    "ops/linear_tuned.py",
    "ops/variant.py",
    "ops/kernels/linear.py",
    "ops/kernels/linear_variants.py",
)
logger = logging.getLogger("forkgraph")


class UnknownEnvironmentError(OSError):
    """A version that byte tests depend on cannot be asked, so none of them could be kept or believed."""


def prepare(
    shapes: Sequence[Shape], *, device: torch.device, cache_dir: Path, progress: Progress | None = None
) -> None:
    """Make `linear_tuned` know these weights at every rung, testing what this machine has not tested.

    Raises UnknownEnvironmentError when the driver or cuBLAS cannot be asked for its version.
    """
    environment = current_environment(device)
    path = table_path(cache_dir, environment)
    table = read(path, environment)
    cells = [(n, k, rows) for n, k in shapes for rows in LADDER]
    meanwhile: dict[Cell, tuple[str, ...]] = {}
    while missing := [cell for cell in cells if cell not in table.names and cell not in meanwhile]:
        known = shipped(environment)
        wanted = {cell: table.open.get(cell) or known.get(cell, UNKNOWN) for cell in missing}
        with open_trials(device) as trials:
            findings = retest(wanted, trials, failed=table.failed, progress=progress)
        table = merged(table, findings)
        meanwhile |= {cell: findings.names[cell] for cell in findings.open}
        meanwhile = still_passing(meanwhile, table.failed)
        keep(path, environment, table)
        for line in failures(findings):
            logger.info("gemm=tuned: %s", line)
        for line in (*left_to_fixed(findings), *untested(findings)):
            logger.warning("gemm=tuned: %s", line)
    names = meanwhile | table.names
    install({cell: names[cell][0] for cell in cells}, device)


def tune(
    shapes: Sequence[Shape], *, device: torch.device, cache_dir: Path, progress: Progress | None = None
) -> tuple[Findings, Environment, Table]:
    """Search anew for these weights and keep what was found; also the whole table of this machine.

    Raises UnknownEnvironmentError like `prepare`.
    """
    environment = current_environment(device)
    path = table_path(cache_dir, environment)
    known = read(path, environment)
    with open_trials(device) as trials:
        findings = search(shapes, trials, failed=known.failed, progress=progress)
    table = merged(known, findings)
    keep(path, environment, table)
    return findings, environment, table


def merged(table: Table, findings: Findings) -> Table:
    """What was found replaces what was known. A cell led by a kernel that failed elsewhere since is missing again."""
    names = {cell: kept for cell, kept in (table.names | findings.names).items() if cell not in findings.open}
    waiting = {cell: kept for cell, kept in table.open.items() if cell not in findings.names}
    return Table(names=still_passing(names, findings.failed), failed=findings.failed, open=waiting | findings.open)


def still_passing(
    names: Mapping[Cell, tuple[str, ...]], failed: Mapping[str, Sequence[Cell]]
) -> dict[Cell, tuple[str, ...]]:
    """Without the cells led by a kernel that failed somewhere."""
    rejected = {name for name in failed if is_one_kernel(name)}
    return {cell: kept for cell, kept in names.items() if kept[0] not in rejected}


@contextmanager
def open_trials(device: torch.device) -> Iterator[Trials]:
    with torch.cuda.device(device):
        trials = GpuTrials(device)
        try:
            yield trials
        finally:
            trials.close()


def keep(path: Path, environment: Environment, table: Table) -> None:
    try:
        write(path, environment, table)
    except OSError as error:
        logger.warning(
            "gemm=tuned: %s cannot be written (%s), so the next start tests again; name another folder with cache_dir",
            path, error.strerror or error,
        )  # fmt: skip


def failures(findings: Findings) -> list[str]:
    """A line for each algorithm and weight that failed the byte test."""
    lines = []
    for name, cells in sorted(findings.failed.items()):
        for n, k in sorted({cell[:2] for cell in cells}):
            rows = sorted(cell[2] for cell in cells if cell[:2] == (n, k))
            at = f"{rows[0]} rows" if len(rows) == 1 else f"{len(rows)} rungs from {rows[0]} to {rows[-1]} rows"
            lines.append(f"{name} does not have the bits of fixed for a {n}x{k} weight at {at}; not used there")
    return lines


def left_to_fixed(findings: Findings) -> list[str]:
    """A line for each weight for which no faster algorithm passes."""
    faster = {cell[:2] for cell, names in findings.names.items() if names[0] != FIXED or cell in findings.open}
    left = sorted({cell[:2] for cell in findings.names} - faster)
    return [f"no faster algorithm has the bits of fixed for a {n}x{k} weight; fixed multiplies it" for n, k in left]


def untested(findings: Findings) -> list[str]:
    """A line when tests could not be made."""
    if not findings.open:
        return []
    count, reason = len(findings.open), findings.errors[0].partition("\n")[0]
    return [f"tests could not be made for {count} of {len(findings.names)} products ({reason}); others with the same "
            "bits run now, and the next start tests again"]  # fmt: skip


def current_environment(device: torch.device) -> Environment:
    """The GPU and software of this process. Raises UnknownEnvironmentError when one cannot be asked."""
    import triton

    try:
        cublas = blas.version()
    except OSError as error:
        raise UnknownEnvironmentError(f"the version of cuBLAS is not known: {error}") from None
    return Environment(
        gpu=torch.cuda.get_device_name(device),
        driver=driver_version(),
        torch=torch.__version__,
        triton=triton.__version__,
        cublas=cublas,
        sources=sources_hash(_SOURCES),
    )


def driver_version() -> str:
    """The version of the GPU driver. Raises UnknownEnvironmentError."""
    try:
        pynvml.nvmlInit()
        try:
            return str(pynvml.nvmlSystemGetDriverVersion())
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise UnknownEnvironmentError(f"the version of the driver is not known: {error}") from None


def sources_hash(names: Sequence[str]) -> str:
    """Of the code whose change makes earlier tests void, by paths from the root."""
    root = Path(__file__).resolve().parents[2]
    return hashlib.sha256(b"\0".join((root / name).read_bytes() for name in names)).hexdigest()[:16]


def table_path(cache_dir: Path, environment: Environment) -> Path:
    return cache_dir / "tuned" / f"{environment.digest}.json"
