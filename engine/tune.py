"""`python -m engine.tune`: search the fastest products with the bits of `fixed`, for one model on this GPU."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

import torch
from rich.console import Console, Group
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table as Grid
from rich.text import Text

from engine.checkpoint import read_dimensions
from engine.cli import console, run_command, write_whole
from engine.config import RANDOM, EngineConfig, resolve
from engine.dimensions import DIMENSIONS, ModelDimensions
from engine.errors import ConfigError
from engine.tiny import tiny_config
from engine.tuned_table import Key, Table, encode
from engine.tuning import failures, left_to_fixed, table_path, tune
from graphs.tuning import ANCHORS, Findings
from ops.linear_tuned import CUBLAS, Cell

SHOWN = (64, 128, 256, 320, 512, 1_088, 3_136, 8_960)
"""Rungs of the report."""


@dataclass(kw_only=True)
class TuneConfig(EngineConfig):
    """`python -m engine.tune`. Of the weights' options only their sizes matter."""

    out: str | None = None
    """File for everything known about this GPU, in the format of `configs/tuned/`."""


def main() -> None:
    sys.exit(run_command("tune", TuneConfig, lambda config: search_and_report(config, stderr=sys.stderr)))


def search_and_report(config: TuneConfig, *, stderr: TextIO, search: Callable[..., tuple[Findings, Key, Table]] = tune) -> int:
    """Search, keep what was found, and report. Raises ConfigError where there is nothing to tune."""
    config = resolve(replace(config, checkpoint=config.checkpoint or RANDOM))
    device = torch.device(config.device)
    if device.type != "cuda":
        raise ConfigError(f"device={config.device}: only products on a CUDA device are tuned; gemm=fixed serves a CPU")
    if config.dtype != "bfloat16":
        raise ConfigError(f"dtype={config.dtype}: only bfloat16 products are tuned; gemm=fixed serves float32")
    assert config.cache_dir is not None
    cache_dir = Path(config.cache_dir)
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        console=Console(stderr=True), transient=True, disable=not stderr.isatty(),
    ) as bars:  # fmt: skip
        bar = bars.add_task(f"tuning {config.model}", total=None)
        findings, key, table = search(
            _dimensions(config),
            device=device,
            cache_dir=cache_dir,
            progress=lambda done, total: bars.update(bar, completed=done, total=total),
        )
    console(stderr).print(f"{config.model} on {key.gpu}, driver {key.driver}, torch {key.torch}, cuBLAS {key.cublas}\n")
    console(stderr).print(report(findings))
    console(stderr).print(f"\nkept in {table_path(cache_dir, key)}")
    if config.out is not None:
        write_whole(Path(config.out).expanduser(), encode(key, table))
    return 0


def report(findings: Findings) -> Group:
    """Time of the winner over that of the library's own choice, per weight; then what failed the byte test."""
    grid = Grid(box=None, pad_edge=False, header_style="bold")
    grid.add_column("weight")
    for rows in SHOWN:
        grid.add_column(f"{rows:,}", justify="right")
    grid.add_column("all", justify="right")
    for n, k in dict.fromkeys(cell[:2] for cell in findings.names):
        cells = [_shown(findings, (n, k, rows)) for rows in SHOWN]
        ratios = [ratio for rows in ANCHORS if (ratio := time_ratio(findings, (n, k, rows))) is not None]
        grid.add_row(f"{n}x{k}", *cells, f"{math.exp(sum(map(math.log, ratios)) / len(ratios)):.3f}")
    return Group(
        Text("Time over that of the library's own choice: t a tile, l cuBLAS or cuBLASLt, f fixed, p padded rows."),
        grid,
        Text("\n".join(["", *failures(findings), *left_to_fixed(findings)])),
    )


def time_ratio(findings: Findings, cell: Cell) -> float | None:
    """The winner's time over the library's own choice; None where the winner was not timed."""
    times = findings.times[cell]
    winner = times.get(findings.names[cell][0])
    return None if winner is None else winner / times[CUBLAS]


def _shown(findings: Findings, cell: Cell) -> str:
    ratio = time_ratio(findings, cell)
    name, _, padded = findings.names[cell][0].partition("@")
    kind = "p" if padded else "l" if name.startswith(CUBLAS) else name[0]
    return "-" if ratio is None else f"{ratio:.2f} {kind}"


def _dimensions(config: TuneConfig) -> ModelDimensions:
    if config.checkpoint is not None and config.checkpoint != RANDOM:
        return read_dimensions(config.checkpoint)
    return DIMENSIONS.get(config.model) or ModelDimensions.from_config(tiny_config())


if __name__ == "__main__":
    main()
