"""GEMM-only: all projections of a whole forward in one CUDA graph, by each handle. The yardstick of every other time.

Four fused products a layer (mixer input, mixer output, gate and up, down) at the same number of rows. The yardstick is
the library's own choice at exactly the rows named; `fixed` and `tuned` multiply the rung that holds them, as a forward
does. Weights and activations are random, never zeros, on which a product runs faster. Every weight is read once per
replay, so none waits in cache; activations are read where the last product left them, as in a forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from statistics import geometric_mean, median

import torch
import torch.nn.functional as F
from bench_options import BenchConfig
from floors import DTYPE, Cost
from forwards import HANDLES, loaded, on_device
from record import Record, ms, number
from timing import Replay, captured, in_turns
from torch import Tensor

from cases import Case, column
from engine.config import RANDOM
from engine.errors import ConfigError
from engine.load.dimensions import ModelDimensions
from engine.load.projections import layer_projections
from engine.load.tensors import Weights
from engine.run.model import Linear
from graphs.rungs import rung
from ops.linear_tuned import missed

LINEARS: dict[str, Linear] = HANDLES | {"default": F.linear}


def products(dimensions: ModelDimensions) -> list[tuple[int, int]]:
    """(outputs N, inputs K) of every projection, in the order of a forward, four a layer."""
    layers = (layer_projections(dimensions, kind).values() for kind in dimensions.layer_types)
    return [(product.rows, product.columns) for layer in layers for product in layer]


def gemm_only_cost(dimensions: ModelDimensions, rows: int) -> Cost:
    """The weights once, and the operations. Activations stay in cache from one product to the next."""
    elements = sum(n * k for n, k in products(dimensions))
    return Cost(bytes=elements * DTYPE.itemsize, flops=2 * rows * elements)


def matrices_of(weights: Weights) -> list[Tensor]:
    """The weight [N, K] of every product; nothing is copied."""
    return [w for layer in weights.layers for w in (layer.in_proj, layer.out_proj, layer.mlp.gate_up, layer.mlp.down)]


def multiplied(handle: str, rows: int) -> int:
    """The row count that a handle really multiplies."""
    return rows if handle == "default" else rung(rows)


def gemm_only(rows: int, matrices: Sequence[Tensor], handle: str = "default") -> Replay:
    """All products at `rows` rows by one handle."""
    make = partial(torch.randn, multiplied(handle, rows), dtype=DTYPE, device=matrices[0].device)
    inputs = {k: make(k) for k in {w.shape[1] for w in matrices}}

    def forward() -> None:
        for w in matrices:
            LINEARS[handle](inputs[w.shape[1]], w)

    return captured([forward])


def gemm_only_us(
    dimensions: ModelDimensions, rows: int, *, matrices: Sequence[Tensor], repeats: int = 10
) -> list[float]:
    """The yardstick over weights that are there: microseconds, raw samples."""
    assert [tuple(w.shape) for w in matrices] == products(dimensions)
    return in_turns({"default": gemm_only(rows, matrices)}, samples=repeats)["default"]


def require_cuda(config: BenchConfig) -> torch.device:
    """Raises ConfigError; the exit code is then 2."""
    if config.device == "cpu" or not torch.cuda.is_available():
        raise ConfigError(f"case={config.case} times kernels in CUDA graphs, and no CUDA device is visible")
    return torch.device("cuda", torch.cuda.current_device())


def measure(config: BenchConfig) -> Iterator[Record]:
    require_cuda(config)
    handles = tuple(LINEARS) if config.gemm == "auto" else tuple(dict.fromkeys(("default", config.gemm)))
    prepared = "tuned" if "tuned" in handles else "fixed"
    with loaded(config, gemm=prepared, graphs="eager", dtype="bfloat16") as engine, on_device(engine):
        matrices = matrices_of(engine.weights)
        for rows in config.rows:
            unknown = missed.total()
            replays = {handle: gemm_only(rows, matrices, handle) for handle in handles}
            times = in_turns(replays, samples=config.samples)
            del replays
            yield from records_of(config, engine.dimensions, rows, times, missed.total() - unknown)


def records_of(
    config: BenchConfig, dimensions: ModelDimensions, rows: int, times: dict[str, list[float]], unknown: int
) -> Iterator[Record]:
    """A record for each handle; `unknown` products were called that `tuned` had no algorithm for."""
    cost, yardstick = gemm_only_cost(dimensions, rows), median(times["default"])
    for handle, samples in times.items():
        compared = handle != "default"
        configuration = {
            "model": config.model, "checkpoint": config.checkpoint or RANDOM, "rows": rows, "gemm": handle,
            "multiplied_rows": multiplied(handle, rows), **vars(cost), "ceilings": vars(config.ceilings),
        }  # fmt: skip
        yield Record(
            case="gemm", name=f"{config.model}/{rows}/{handle}", samples_us=samples, configuration=configuration,
            peer="default" if compared else None, ratio=median(samples) / yardstick if compared else None,
            floor_us=config.ceilings.floor_us(cost),
            failed=f"{unknown} calls ran fixed in its place" if handle == "tuned" and unknown else "",
        )  # fmt: skip


def summary(records: Sequence[Record]) -> list[str]:
    tuned = {r.name: r.ratio for r in records if r.configuration["gemm"] == "tuned" and r.ratio}
    if not tuned:
        return []
    mean, worst = geometric_mean(tuned.values()), max(tuned, key=lambda name: tuned[name])
    return [f"tuned over default: geometric mean {mean:.3f}, largest {tuned[worst]:.3f} ({worst})"]


CASE = Case(
    measure=measure,
    figures={
        "rows": lambda r: f"{r.configuration['rows']:,}",
        "gemm": column("gemm"),
        "ms": lambda r: ms(r.median_us),
        "TFLOP/s": lambda r: f"{r.configuration['flops'] / r.us / 1e6:.0f}",
        "roofline ms": lambda r: ms(r.floor_us),
        "x roofline": lambda r: number(r.floor_us and r.us / r.floor_us),
        "x default": lambda r: number(r.ratio, 3),
    },
    summary=summary,
)
