"""`python -m engine.tune`: search the fastest products with the bits of `fixed`, for one model on this GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from engine.cli import console, run_command, write_whole
from engine.config import RANDOM, EngineConfig, resolve
from engine.errors import ConfigError
from engine.load.checkpoint import read_dimensions
from engine.load.dimensions import DIMENSIONS, ModelDimensions
from engine.load.package import weights_folder
from engine.load.projections import projection_shapes
from engine.load.tiny import tiny_config
from graphs.tuning.report import report
from graphs.tuning.search import Findings
from graphs.tuning.table import Environment, Table, encode
from graphs.tuning.tuner import UnknownEnvironmentError, table_path, tune


@dataclass(kw_only=True)
class TuneConfig(EngineConfig):
    """`python -m engine.tune`. Of the weights' options only their sizes matter."""

    out: str | None = None
    """File for everything known about this GPU, in the format of `configs/tuned/`."""


def main() -> None:
    sys.exit(run_command("tune", TuneConfig, lambda config: search_and_report(config, stderr=sys.stderr)))


def search_and_report(
    config: TuneConfig, *, stderr: TextIO, search: Callable[..., tuple[Findings, Environment, Table]] = tune
) -> int:
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
        try:
            findings, environment, table = search(
                projection_shapes(_dimensions(config)),
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
    if config.out is not None:
        write_whole(Path(config.out).expanduser(), encode(environment, table))
    return 0


def _dimensions(config: TuneConfig) -> ModelDimensions:
    if config.checkpoint is not None and config.checkpoint != RANDOM:
        return read_dimensions(weights_folder(config.checkpoint, config.base))
    return DIMENSIONS.get(config.model) or ModelDimensions.from_config(tiny_config())


if __name__ == "__main__":
    main()
