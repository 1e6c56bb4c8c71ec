"""Options of `bench`, one dataclass for all cases; `configs/bench.yaml` repeats the defaults.

An engine's options narrow a case: `auto` stands for everything this device runs, `gemm=fixed` or `graphs=eager` for
that alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from floors import OPERATORS, Ceilings
from forwards import Workload

from engine.config import EngineConfig
from engine.errors import ConfigError, nearest

CASES = ("gemm", "operators", "forward", "equality", "accuracy", "packages")
"""Modules of `cases`."""


@dataclass(kw_only=True)
class BenchConfig(EngineConfig):
    """`python profiling/bench.py`. Without a checkpoint, weights are made from the seed."""

    case: str = "equality"
    """What is measured: a file of `profiling/cases/`."""
    out: str | None = None
    """File that gets a JSON line for each record, as it is taken."""
    samples: int = 10
    """Of each time; at least three, and no more once they take long."""
    tbytes: float = Ceilings.tbytes
    """Memory traffic per second; with the next, the ceilings that floors are made of."""
    tflops: float = Ceilings.tflops
    """Multiplications and additions per second."""
    rows: list[int] = field(default_factory=lambda: [1, 64, 128, 256, 320, 512, 1088, 3136, 8960, 11776])
    """case=gemm: row counts."""
    only: list[str] = field(default_factory=list)
    """case=operators: these alone; none for all."""
    fla: bool = True
    """case=operators: beside flash-linear-attention too, which tunes itself at first."""
    workloads: list[str] = field(
        default_factory=lambda: [
            "64", "320", "1088", "3136", "278+8x34", "278+255x34", "1048+32x33", "3093+255x34",
        ]
    )  # fmt: skip
    """case=forward: TOKENS of one prompt, or PREFIX+CANDIDATESxTOKENS."""
    few: int = 4
    """case=forward: candidates that `independent` and `batched` run at least; their time is stated for all."""
    seconds: float = 60.0
    """case=equality: no further request is begun after so long."""
    random: int = 60
    """case=equality: random layouts beside those around the borders of chunks."""
    layers: int = 4
    """case=equality: layers that random layouts run through; the others run through all."""
    prompts: int = 64
    """case=accuracy: how many."""
    folder: str | None = None
    """case=packages: where the files are written; without one they are removed again."""

    @property
    def ceilings(self) -> Ceilings:
        return Ceilings(tbytes=self.tbytes, tflops=self.tflops)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, values, known in (("case", [self.case], CASES), ("only", self.only, OPERATORS)):
            for value in values:
                if value not in known:
                    raise ConfigError(f"{name}={value} is not one of {', '.join(known)}{nearest(value, known)}")
        for name in ("samples", "few", "layers", "prompts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is not a whole number of at least 1")
        if self.random < 0 or min(self.rows, default=1) < 1:
            raise ConfigError(f"random={self.random} and rows={self.rows} must not be negative, nor rows 0")
        for name in ("seconds", "tbytes", "tflops"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}={getattr(self, name)} is not a positive number")
        for text in self.workloads:
            Workload.parse(text)
