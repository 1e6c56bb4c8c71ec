"""Trials on a GPU: how long an algorithm takes at a row count, and whether it has the bits of `fixed`.

Both are asked of captured graphs, with tensors as a forward has them: dense rows of their own, weights that no cache
holds, the workspace of their stream.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from graphs.graph import capture_graph
from graphs.tuning.search import CannotRunError
from ops.linear_tuned import FIXED, Cell, Product, product
from ops.variant import Variant

ROUNDS = 2
"""Sets of rows in a byte test."""

_WEIGHTS_BYTES = 256 << 20  # several times the L2 cache: a weight is never warm, as in a model
_GRAPH_US = 300.0  # work in one timed graph, many times the resolution of events
_CLOSE = 1.08  # candidates this near the best are timed again, more carefully


def byte_test_weight(columns: int, inputs: int, generator: torch.Generator) -> Tensor:
    """[columns, inputs] bfloat16: of four rows one repeats its first half in its second, and one nearly."""
    noise = torch.randn(columns, inputs, device=generator.device, generator=generator)
    w, half = noise / math.sqrt(inputs), inputs // 2
    w[1::4, half : 2 * half] = w[1::4, :half]
    w[3::4, half : 2 * half] = w[3::4, :half] * (1.0 + 0.01 * noise[3::4, half : 2 * half])
    return w.bfloat16()


def byte_test_rows(rows: int, inputs: int, generator: torch.Generator, *, shift: int = 0) -> Tensor:
    """[rows, inputs] bfloat16 of five kinds in turn: random, a thousand times that, a thousandth, cancelling, sparse.

    In a cancelling row the second half undoes the first: over a weight that repeats itself nothing is left but what the
    sum lost in rounding, which any other order of summation changes. The first sparse row is all zero.
    """
    place = generator.device
    x = torch.randn(rows, inputs, device=place, generator=generator)
    kind = (torch.arange(rows, device=place) + shift) % 5
    x *= torch.tensor([1.0, 1e3, 1e-3, 1.0, 1.0], device=place)[kind, None]
    half = inputs // 2
    x[:, half : 2 * half] = torch.where((kind == 3)[:, None], -x[:, :half], x[:, half : 2 * half])
    dropped = torch.rand(rows, inputs, device=place, generator=generator) > 1 / 64
    x.masked_fill_((kind == 4)[:, None] & dropped, 0.0)
    x[(kind == 4).nonzero()[:1, 0]] = 0.0
    return x.bfloat16()


class GpuTrials:
    """One GPU, one stream. Holds weights of one shape and rows of one cell at a time; `close` gives them back."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._generator = torch.Generator(device).manual_seed(0)
        current = torch.cuda.current_stream(device)
        # The library keeps a workspace for each stream, and the default one cannot be captured.
        self._stream = current if current != torch.cuda.default_stream(device) else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None
        self._shape: tuple[int, int] | None = None
        self._cell: Cell | None = None
        self._weights: list[Tensor] = []
        self._rows: list[Tensor] = []
        self._expected: list[Tensor] = []
        self._first: object = None

    def prepare(self, names: Iterable[str]) -> None:
        from ops.kernels.linear_variants import compile_variants

        inner = {name.partition("@")[0] for name in names}
        compile_variants([Variant.named(name) for name in sorted(inner) if name.startswith("tile ")], self.device)

    def times(self, cell: Cell, names: Sequence[str], *, careful: bool) -> dict[str, float]:
        columns, inputs, rows = cell
        estimate = 1e6 * max(2 * rows * columns * inputs / 6e14, 2 * columns * inputs / 4e12)
        with torch.cuda.stream(self._stream):
            self._hold_shape(columns, inputs)
            calls = min(len(self._weights), math.ceil(_GRAPH_US / estimate))
            x = torch.randn(rows, inputs, device=self.device, dtype=torch.bfloat16, generator=self._generator)
            graphs = {}
            for name in names:
                try:
                    graphs[name] = self._captured(_each(product(name), x, self._weights[:calls]))[0]
                except Exception:  # each library has its own way to say that it has no such algorithm
                    if name == FIXED:
                        raise
            found = _replay_times(graphs, 3)
            if careful:
                limit = _CLOSE * min(found.values())
                found |= _replay_times({name: graphs[name] for name in graphs if found[name] <= limit}, 9)
        return {name: us / calls for name, us in found.items()}

    def same_bytes(self, cell: Cell, name: str) -> bool:
        run = product(name)
        with torch.cuda.stream(self._stream):
            try:
                self._hold_cell(cell)
                w, x = self._weights[0], torch.empty_like(self._rows[0])
                x.copy_(self._rows[0])
                graph, out = self._captured(lambda: run(x, w))
                for rows, expected in zip(self._rows, self._expected, strict=True):
                    x.copy_(rows)
                    out.fill_(math.nan)
                    graph.replay()
                    if not torch.equal(out.view(torch.int16), expected.view(torch.int16)):
                        return False
            except Exception as error:
                raise CannotRunError(f"{name} at {cell}: {error}") from error
        return True

    def close(self) -> None:
        self._stream.synchronize()
        self._weights, self._rows, self._expected, self._first = [], [], [], None
        self._shape = self._cell = None
        torch.cuda.empty_cache()

    def _hold_shape(self, columns: int, inputs: int) -> None:
        if self._shape == (columns, inputs):
            return
        self._shape = self._cell = None
        self._weights, self._rows, self._expected = [], [], []
        copies = min(max(3, math.ceil(_WEIGHTS_BYTES / (2 * columns * inputs))), 12)
        w = byte_test_weight(columns, inputs, self._generator)
        self._weights = [w, *(w.clone() for _ in range(copies - 1))]
        self._shape = columns, inputs

    def _hold_cell(self, cell: Cell) -> None:
        columns, inputs, rows = cell
        self._hold_shape(columns, inputs)
        if self._cell == cell:
            return
        self._cell, self._rows, self._expected = None, [], []
        self._rows = [byte_test_rows(rows, inputs, self._generator, shift=2 * i) for i in range(ROUNDS)]
        self._expected = [product(FIXED)(x, self._weights[0]) for x in self._rows]
        self._cell = cell

    def _captured(self, run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """A graph of `run`, on the current stream, and the tensor that a replay writes."""
        run()  # compiles, loads, and makes a workspace
        self._stream.synchronize()
        graph, out = capture_graph(run, pool=self._pool)
        if graph.pool() != self._pool:
            # Graphs come and go; the pool that they share lives as long as one of them.
            self._pool, self._first = graph.pool(), graph
        return graph, out


def _each(run: Product, x: Tensor, weights: Sequence[Tensor]) -> Callable[[], Tensor]:
    def all_of_them() -> Tensor:
        for w in weights:
            out = run(x, w)
        return out

    return all_of_them


def _replay_times(graphs: Mapping[str, torch.cuda.CUDAGraph], rounds: int) -> dict[str, float]:
    """Median microseconds of a replay; the graphs take turns, so that they share the clocks of the moment."""
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in graphs}
    next(iter(graphs.values())).replay()  # wakes the clocks
    for _ in range(rounds):
        for name, graph in graphs.items():
            pair = _event(), _event()
            pair[0].record()
            graph.replay()
            pair[1].record()
            events[name].append(pair)
    torch.cuda.current_stream().synchronize()
    return {
        name: statistics.median(1e3 * start.elapsed_time(stop) for start, stop in pairs)
        for name, pairs in events.items()
    }


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
