"""`forkgraph tune`: search the fastest products with the bits of `fixed`, for one model on this GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from engine.process import begin, run

if __name__ == "__main__":
    begin("tune")  # before torch, whose import takes seconds, is interrupted

import torch
from rich import progress as bars_of
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from engine.cli import console, run_command
from engine.config import RANDOM, EngineConfig, cache_folder, resolve
from engine.errors import ConfigError
from engine.load.opening import describe
from engine.load.projections import projection_shapes
from engine.output import claim, refuse_shared
from engine.run.device import Progress, owner_of
from graphs.tuning.report import report
from graphs.tuning.search import Findings
from graphs.tuning.table import Environment, Table, encode
from graphs.tuning.tuner import UnknownEnvironmentError, table_path, tune


@dataclass(kw_only=True)
class TuneConfig(EngineConfig):
    """`forkgraph tune`. Of the weights' options only their sizes matter."""

    out: str | None = None
    """File for everything known about this GPU, in the format of `configs/tuned/`."""
    overwrite: bool = False
    """Replace a file that `out` names; without it, one that is there is refused."""


def main() -> None:
    def job(config: TuneConfig) -> int:
        return search_and_report(config, stderr=sys.stderr)

    run("tune", lambda: run_command("tune", TuneConfig, job, refuse=refuse_shared))


def tune_in_turn(
    shapes: Sequence[tuple[int, int]], *, device: torch.device, cache_dir: Path, progress: Progress
) -> tuple[Findings, Environment, Table]:
    """`tune` on the thread that owns the device."""
    return (
        owner_of(device)
        .client()
        .report(lambda step: tune(shapes, device=device, cache_dir=cache_dir, progress=step), progress)
    )


def search_and_report(
    config: TuneConfig, *, stderr: TextIO, search: Callable[..., tuple[Findings, Environment, Table]] = tune_in_turn
) -> int:
    """Search, keep what was found, and report. Raises ConfigError where there is nothing to tune."""
    config = resolve(replace(config, checkpoint=config.checkpoint or RANDOM))
    device = torch.device(config.device)
    if device.type != "cuda":
        raise ConfigError(f"device={config.device}: only products on a CUDA device are tuned; gemm=fixed serves a CPU")
    if config.dtype != "bfloat16":
        raise ConfigError(f"dtype={config.dtype}: only bfloat16 products are tuned; gemm=fixed serves float32")
    cache_dir = cache_folder(config)
    with nullcontext() if config.out is None else claim(config.out, inputs={}, overwrite=config.overwrite) as out:
        with bars_of.Progress(
            TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
            console=Console(stderr=True), transient=True, disable=not stderr.isatty(),
        ) as bars:  # fmt: skip
            bar = bars.add_task(f"tuning {config.model}", total=None)
            try:
                findings, environment, table = search(
                    projection_shapes(describe(config).dimensions),
                    device=device,
                    cache_dir=cache_dir,
                    progress=lambda done, total: bars.update(bar, completed=done, total=total),
                )
            except UnknownEnvironmentError as error:
                raise ConfigError(f"nothing can be tuned: {error}; gemm=fixed needs no tuning") from None
        e = environment
        console(stderr).print(f"{config.model} on {e.gpu}, driver {e.driver}, torch {e.torch}, cuBLAS {e.cublas}\n")
        console(stderr).print(report(findings))
        console(stderr).print(f"\nkept in {table_path(cache_dir, environment)}")
        if out is not None:
            out.write(encode(environment, table))
    return 0


if __name__ == "__main__":
    main()
