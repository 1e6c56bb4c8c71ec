"""Tuned products of one model on one GPU: from what is known on disk to what `ops.linear_tuned` runs.

An engine start never searches. What this machine has tested before is taken as it is; else the winners that ship for
this GPU, or else the library's choices, are tested once and kept. `forkgraph tune` searches.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from engine.errors import ConfigError
from engine.load.dimensions import FULL, ModelDimensions
from graphs.rungs import LADDER
from graphs.tuning.search import Findings, Lab, Progress, retest, search
from graphs.tuning.table import Key, Table, read, shipped, write
from graphs.tuning.trials import GpuLab
from ops import blas
from ops.linear_tuned import CUBLAS, CUBLASLT, FIXED, Cell, install, is_one_kernel

UNKNOWN = (CUBLAS, CUBLASLT)
"""What is tested for a weight that nobody has searched."""

_SOURCES = (
    "graphs/tuning/trials.py",
    "ops/blas.py",
    "ops/linear_tuned.py",
    "ops/kernels/linear.py",
    "ops/kernels/linear_variants.py",
)
_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE")
logger = logging.getLogger("forkgraph")


def weight_shapes(dimensions: ModelDimensions) -> tuple[tuple[int, int], ...]:
    """Rows and columns of every weight that a forward multiplies with, each once.

    A last layer of attention multiplies with the two parts of its input projection apart.
    """
    d, h = dimensions, dimensions.hidden_size
    shapes = [(2 * d.intermediate_size, h), (h, d.intermediate_size)]
    if d.num_linear_layers:
        shapes += [(d.gdn_proj, h), (h, d.value_dim)]
    if d.num_full_layers:
        shapes += [(h, d.query_dim)]
    if FULL in d.layer_types[:-1]:
        shapes += [(d.attention_proj, h)]
    if d.layer_types[-1] == FULL:
        shapes += [(2 * d.query_dim, h), (2 * d.kv_dim, h)]
    return tuple(dict.fromkeys(shapes))


def prepare(
    dimensions: ModelDimensions, *, device: torch.device, cache_dir: Path, progress: Progress | None = None
) -> None:
    """Make `linear_tuned` know every weight of this model at every rung, testing what this machine has not tested.

    Raises ConfigError when the driver or cuBLAS cannot be asked for its version.
    """
    key = current_key(device)
    path = table_path(cache_dir, key)
    table = read(path, key)
    cells = [(n, k, rows) for n, k in weight_shapes(dimensions) for rows in LADDER]
    while missing := [cell for cell in cells if cell not in table.names]:
        findings = _tested(missing, table, key, device, progress)
        table = merged(table, findings)
        keep(path, key, table)
        for line in failures(findings):
            logger.info("gemm=tuned: %s", line)
        for line in left_to_fixed(findings):
            logger.warning("gemm=tuned: %s", line)
    install({cell: table.names[cell][0] for cell in cells}, device)


def tune(
    dimensions: ModelDimensions, *, device: torch.device, cache_dir: Path, progress: Progress | None = None
) -> tuple[Findings, Key, Table]:
    """Search anew for every weight of this model and keep what was found; also the whole table of this machine."""
    key = current_key(device)
    path = table_path(cache_dir, key)
    known, shapes = read(path, key), weight_shapes(dimensions)
    findings = in_lab(device, lambda lab: search(shapes, lab, failed=known.failed, progress=progress))
    table = merged(known, findings)
    keep(path, key, table)
    return findings, key, table


def _tested(
    missing: Sequence[Cell], table: Table, key: Key, device: torch.device, progress: Progress | None
) -> Findings:
    known = shipped(key)
    wanted = {cell: known.get(cell, UNKNOWN) for cell in missing}
    return in_lab(device, lambda lab: retest(wanted, lab, failed=table.failed, progress=progress))


def merged(table: Table, findings: Findings) -> Table:
    """What was found replaces what was known. A cell led by a kernel that failed elsewhere since is open again."""
    struck = {name for name in findings.failed if is_one_kernel(name)}
    names = {cell: kept for cell, kept in (table.names | findings.names).items() if kept[0] not in struck}
    return Table(names=names, failed=findings.failed)


def in_lab(device: torch.device, work: Callable[[Lab], Findings]) -> Findings:
    with torch.cuda.device(device):
        lab = GpuLab(device)
        try:
            return work(lab)
        finally:
            lab.close()


def keep(path: Path, key: Key, table: Table) -> None:
    try:
        write(path, key, table)
    except OSError as error:
        logger.warning("gemm=tuned: %s cannot be written, the next start tests again (%s)", path, error.strerror)


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
    faster = {cell[:2] for cell, names in findings.names.items() if names[0] != FIXED}
    left = sorted({cell[:2] for cell in findings.names} - faster)
    return [f"no faster algorithm has the bits of fixed for a {n}x{k} weight; fixed multiplies it" for n, k in left]


def current_key(device: torch.device) -> Key:
    """The GPU and software of this process. Raises ConfigError when one cannot be asked."""
    import triton

    try:
        return Key(
            gpu=torch.cuda.get_device_name(device),
            driver=_driver(),
            torch=torch.__version__,
            triton=triton.__version__,
            cublas=blas.version(),
            workspace=" ".join(os.environ.get(name, "-") for name in _WORKSPACE),
            sources=sources_hash(),
        )
    except OSError as error:
        raise ConfigError(f"gemm=tuned: a version it depends on is not known ({error}); use gemm=fixed") from None


def sources_hash() -> str:
    """Of the code whose change makes earlier tests void."""
    root = Path(__file__).resolve().parents[2]
    return hashlib.sha256(b"\0".join((root / name).read_bytes() for name in _SOURCES)).hexdigest()[:16]


def table_path(cache_dir: Path, key: Key) -> Path:
    return cache_dir / "tuned" / f"{key.digest}.json"


def _driver() -> str:
    """The version of the GPU driver, from the library that nvidia-smi asks too. Raises OSError."""
    nvml, text = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.create_string_buffer(96)
    if nvml.nvmlInit_v2():
        raise OSError("libnvidia-ml.so.1 cannot be initialised")
    try:
        if nvml.nvmlSystemGetDriverVersion(text, len(text)):
            raise OSError("libnvidia-ml.so.1 does not tell the version of the driver")
    finally:
        nvml.nvmlShutdown()
    return text.value.decode()
