"""Whole forwards as CUDA graphs, one per (rows, reads), replayed over static tables.

All graphs share one memory pool and one stream, so a graph's activations lie where another's did; what a replay
returns lives until the next one. Graphs hold the addresses of snapshot buffers and weights: whoever replaces those
calls `drop` first.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphs.graph import CaptureError, capture_graph

Forward = Callable[[Tensor, int, int], Tensor]
"""Tables [words] on the device, padded rows, padded reads -> hidden states [reads, h]."""
GraphKey = tuple[int, int]
"""Padded rows and padded reads."""

MOST_GRAPH_BYTES = 16 * 2**20
"""No graph is charged with more: what other processes allocate meanwhile looks like a graph's own memory."""
_MOST_FAILURES = 3
"""Passes after which a graph is given up that could not be captured behind any of them."""

logger = logging.getLogger("forkgraph")


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    hidden: Tensor
    bytes: int


class CapturedForwards:
    """Graphs up to `limit_bytes` of device memory of their own; beyond that the least recently used ones go.

    The pool that they share is not part of it: it holds the activations of the largest forward, whichever graphs stay.
    Everything happens on the current stream, which must not be the default one, and on one thread at a time.
    """

    def __init__(self, forward: Forward, tables: Tensor, *, limit_bytes: int) -> None:
        """Every replay of `forward` reads `tables` [words], which the caller has filled."""
        self._forward, self._tables, self._device, self._limit = forward, tables, tables.device, limit_bytes
        self._captured: OrderedDict[GraphKey, _Captured] = OrderedDict()
        self._failures: Counter[GraphKey] = Counter()
        self._pool: Any = None
        self._evicted = False
        self.capture_seconds: dict[GraphKey, float] = {}

    def replay(self, rows: int, reads: int) -> Tensor | None:
        """Hidden states for the tables of now, valid until the next replay; None when this key has no graph yet."""
        captured = self._captured.get((rows, reads))
        if captured is None:
            return None
        self._captured.move_to_end((rows, reads))
        captured.graph.replay()
        return captured.hidden

    def holding(self, rows: int, reads: int) -> GraphKey | None:
        """The smallest captured key with room for these; bits do not know the difference."""
        return min((key for key in self._captured if key[0] >= rows and key[1] >= reads), default=None)

    def wants(self, rows: int, reads: int) -> bool:
        """Whether this key is neither captured nor given up."""
        return (rows, reads) not in self._captured and self._failures[rows, reads] < _MOST_FAILURES

    def capture(self, rows: int, reads: int, contents: Tensor) -> None:
        """Capture one key over these `contents` of the tables [words]; those of any pass of this key will do.

        The forward must have run with this key before: what is set up at a first run cannot be captured. A capture
        that fails leaves the eager forward in charge, and is tried again behind a few more passes of its key.
        """
        start, before = time.perf_counter(), self._own_bytes()
        self._tables.copy_(contents)
        try:
            graph, hidden = capture_graph(lambda: self._forward(self._tables, rows, reads), pool=self._pool)
        except CaptureError as error:
            self._pool = None  # a pool in which a capture failed takes no other
            self._failures[rows, reads] += 1
            next_time = (
                "the next such pass tries again" if self.wants(rows, reads) else "it runs uncaptured from now on"
            )
            logger.warning("no CUDA graph for %d rows, %d reads: %s; %s", rows, reads, error, next_time)
            return
        self._pool = graph.pool()
        used = min(max(0, self._own_bytes() - before), MOST_GRAPH_BYTES)
        self._captured[rows, reads] = _Captured(graph, hidden, used)
        self.capture_seconds[rows, reads] = time.perf_counter() - start
        self._evict()

    def _evict(self) -> None:
        while len(self._captured) > 1 and self.bytes > self._limit:
            self._captured.popitem(last=False)
            if not self._evicted:
                self._evicted = True
                logger.info(
                    "captured graphs take more than %.2f GiB, so the least recently used ones go; "
                    "a larger memory.graphs_gib keeps them", self._limit / 2**30,
                )  # fmt: skip

    def _own_bytes(self) -> int:
        """Device memory in use that is not the allocator's."""
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free - torch.cuda.memory_reserved(self._device)

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        return tuple(self._captured)

    @property
    def bytes(self) -> int:
        """Device memory of the graphs, beside the pool that they share."""
        return sum(captured.bytes for captured in self._captured.values())

    def drop(self) -> None:
        """Forget every graph; their memory returns to the pool they shared."""
        if self._captured:
            torch.cuda.current_stream(self._device).synchronize()
        self._captured.clear()
        self._failures.clear()
        self._pool = None
