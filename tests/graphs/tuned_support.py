"""Trials of products that run nothing, and what their tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from graphs.tuning.table import Environment
from ops.linear_tuned import CUBLASLT, FIXED, Cell

SHAPE = (512, 128)
TILE_A, TILE_B = "tile 64x64x64 w4 s4 early", "tile 128x128x64 w8 s5 persistent"
CODE = f"{CUBLASLT}#0102ff"
ENVIRONMENT = Environment(gpu="GPU 1", driver="1.2", torch="3", triton="4", cublas=5, sources="6")


class FakeTrials:
    """Times by formula, bytes by decree; remembers what it was asked."""

    def __init__(
        self,
        time: Callable[[Cell, str], float | None] = lambda cell, name: 1.0,
        same: Callable[[Cell, str], bool] = lambda cell, name: True,
    ) -> None:
        self.time, self.same = time, same
        self.timed: list[tuple[Cell, tuple[str, ...]]] = []
        self.tested: list[tuple[Cell, str]] = []
        self.prepared: set[str] = set()

    def prepare(self, names: Iterable[str]) -> None:
        self.prepared |= set(names)

    def times(self, cell: Cell, names: Sequence[str], *, careful: bool) -> dict[str, float]:
        self.timed.append((cell, tuple(names)))
        return {name: us for name in names if (us := self.time(cell, name)) is not None}

    def same_bytes(self, cell: Cell, name: str) -> bool:
        self.tested.append((cell, name))
        return self.same(cell, name)


def offered(cell: Cell) -> tuple[str, ...]:
    return (FIXED, CUBLASLT, f"{CUBLASLT}@{cell[2] + 64}", CODE, TILE_A, TILE_B)


def by_order(*names: str) -> Callable[[Cell, str], float]:
    """Names take longer the later they stand here; those that do not are slowest."""
    return lambda cell, name: float(names.index(name) if name in names else len(names))
