"""Whole forwards as CUDA graphs, one per (rows, reads), replayed over static tables.

All graphs share one memory pool and one stream, so a graph's activations lie where another's did; what a replay
returns lives until the next one. Graphs hold the addresses of snapshot buffers and weights: whoever replaces those
calls `drop` first.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

Forward = Callable[[Tensor, int, int], Tensor]
"""Tables [words] on the device, padded rows, padded reads -> hidden states [reads, h]."""
Key = tuple[int, int]

MOST_GRAPH_BYTES = 16 * 2**20
"""No graph is charged with more: what other processes allocate meanwhile looks like a graph's own memory."""

_CAPTURING = threading.Lock()
"""One capture at a time in a process: all use one stream of their device."""

logger = logging.getLogger("forkgraph")


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """For the captures of every engine on a device: the BLAS library keeps a workspace for each stream it has seen."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    hidden: Tensor
    bytes: int


@contextmanager
def _no_collection() -> Iterator[None]:
    """Garbage of others is not collected meanwhile: destroying a graph among it would make the capture invalid."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class CapturedForwards:
    """Graphs up to `limit_bytes` of device memory of their own; beyond that the least recently used ones go.

    The pool that they share is not part of it: it holds the activations of the largest forward, whichever graphs stay.
    """

    def __init__(self, forward: Forward, tables: Tensor, *, limit_bytes: int) -> None:
        """Every replay of `forward` reads `tables` [words], which the caller has filled."""
        self._forward, self._tables, self._device, self._limit = forward, tables, tables.device, limit_bytes
        self._stream = _stream_of(self._device)
        self._captured: OrderedDict[Key, _Captured] = OrderedDict()
        self._failed: set[Key] = set()
        self._pool: Any = None
        self.capture_seconds: dict[Key, float] = {}
        self.replay_seconds: dict[Key, float] = {}

    def replay(self, rows: int, reads: int) -> Tensor | None:
        """Hidden states for the tables of now, valid until the next replay; None when this key has no graph yet."""
        captured = self._captured.get((rows, reads))
        if captured is None:
            return None
        self._captured.move_to_end((rows, reads))
        captured.graph.replay()
        return captured.hidden

    def wants(self, rows: int, reads: int) -> bool:
        """Whether this key is neither captured nor known to fail."""
        return (rows, reads) not in self._captured and (rows, reads) not in self._failed

    def capture(self, rows: int, reads: int, contents: Tensor) -> None:
        """Capture one key over these `contents` of the tables [words]; those of any pass of this key will do.

        The forward must have run with this key before: what is compiled or set up at a first run cannot be captured.
        A capture that fails is reported once and leaves the eager forward in charge of that key.
        """
        with _CAPTURING:
            self._capture(rows, reads, contents)

    def _capture(self, rows: int, reads: int, contents: Tensor) -> None:
        start = time.perf_counter()
        before = self._own_bytes()
        self._tables.copy_(contents)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            graph, hidden = self._graph_of(rows, reads)
        except Exception as error:
            torch.cuda.synchronize(self._device)
            self._pool = None  # a capture that fails leaves the pool open, and no other one can begin in it
            self._failed.add((rows, reads))
            logger.warning("no CUDA graph for %d rows, %d reads (%s); it runs uncaptured", rows, reads, error)
            return
        self._pool = graph.pool()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        used = min(max(0, self._own_bytes() - before), MOST_GRAPH_BYTES)
        self._captured[rows, reads] = _Captured(graph, hidden, used)
        self.capture_seconds[rows, reads] = time.perf_counter() - start
        self.replay_seconds[rows, reads] = self._timed(graph)
        while len(self._captured) > 1 and sum(c.bytes for c in self._captured.values()) > self._limit:
            self._captured.popitem(last=False)

    def _graph_of(self, rows: int, reads: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """The graph of a forward over the static tables, and where its replays leave their result."""
        graph = torch.cuda.CUDAGraph()
        with (
            _no_collection(),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            hidden = self._forward(self._tables, rows, reads)
        return graph, hidden

    def _own_bytes(self) -> int:
        """Device memory in use that is not the allocator's."""
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free - torch.cuda.memory_reserved(self._device)

    def _timed(self, graph: torch.cuda.CUDAGraph) -> float:
        """Seconds of one replay, the second of two, over the tables it was captured with."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        graph.replay()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    @property
    def keys(self) -> tuple[Key, ...]:
        return tuple(self._captured)

    def drop(self) -> None:
        """Forget every graph; their memory returns to the pool they shared."""
        if self._captured:
            torch.cuda.synchronize(self._device)
        self._captured.clear()
        self._failed.clear()
        self._pool = None
