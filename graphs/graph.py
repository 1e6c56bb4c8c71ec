"""One CUDA graph: how work is captured in a process that is not ours.

Another thread may at any time do what breaks a capture (a device-wide synchronise is enough), and garbage collected on
this one may hold somebody's graph, so a capture that fails is tried again. Knows callables and streams, nothing of what
they run.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch

T = TypeVar("T")

logger = logging.getLogger("forkgraph")

_lock = threading.Lock()
_said: set[str] = set()


class CaptureError(RuntimeError):
    """Work could not be captured, however often it was tried. The cause is the first failure."""


def capture_graph(run: Callable[[], T], *, pool: Any | None, attempts: int = 3) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of `run` on the current stream, and what `run` returned: its new tensors are what replays write.

    What is compiled or set up at a first run cannot be captured, so `run` has run before. Memory comes from `pool`, or
    from a new one where that is None or an attempt failed: `graph.pool()` tells which. Waits for the current stream at
    most, where `torch.cuda.graph` synchronises the device and empties the allocator's cache. Raises CaptureError when
    all attempts fail and ValueError on the default stream, which cannot be captured.
    """
    stream = torch.cuda.current_stream()
    if stream == torch.cuda.default_stream():
        raise ValueError("the default stream cannot be captured; make another one current with torch.cuda.stream")
    first: Exception | None = None
    for _ in range(attempts):
        graph = torch.cuda.CUDAGraph()
        try:
            return graph, _captured(graph, run, torch.cuda.graph_pool_handle() if pool is None else pool)
        except Exception as error:
            first = first or error
            _say_once(error)
            pool = None
            with suppress(RuntimeError):
                stream.synchronize()
    # Torch's default generator takes itself to be captured until a capture ends well.
    with suppress(Exception):
        _captured(torch.cuda.CUDAGraph(), lambda: torch.zeros(1, device=stream.device), torch.cuda.graph_pool_handle())
    raise CaptureError(f"captured in none of {attempts} attempts: {_line(first)}") from first


def _captured(graph: torch.cuda.CUDAGraph, run: Callable[[], T], pool: Any) -> T:
    try:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        result = run()
        graph.capture_end()
    except BaseException as error:
        _abandon(graph, pool, error)
        raise
    return result


def _abandon(graph: torch.cuda.CUDAGraph, pool: Any, error: BaseException) -> None:
    """End a failed capture, on the stream and in the allocator, which takes it to be under way otherwise."""
    try:
        if torch.cuda.is_current_stream_capturing():
            graph.capture_end()
    except RuntimeError as ending:
        error.add_note(f"and then, at the end of the capture: {_line(ending)}")
    device = torch.cuda.current_device()
    with suppress(RuntimeError):  # the allocator knows of the end already
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)


def _say_once(error: Exception) -> None:
    line = _line(error)
    with _lock:
        new = line not in _said
        _said.add(line)
    if new:
        logger.warning("the capture of a CUDA graph failed and is tried again (%s)", line)


def _line(error: Exception | None) -> str:
    return str(error).partition("\n")[0]
