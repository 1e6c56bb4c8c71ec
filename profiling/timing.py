"""The one timer. Variants take turns, so that all share the clocks of the moment; what comes out are raw samples.

On the GPU nothing else measures time: calls are captured in a CUDA graph, so that neither the host nor a launch counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from engine.run.device import stream_of

Call = Callable[[], object]
Replay = Callable[[], float]
"""Runs once and says how many microseconds one call took."""

LEAST = 3
"""Samples taken however long they are."""


def captured(calls: Sequence[Call]) -> Replay:
    """A CUDA graph of `calls`, one for each input set. Their results lie apart, so that none is written over.

    It is captured on the engines' stream, since the BLAS library keeps a workspace for each stream it has seen.
    """
    stream = stream_of(torch.device("cuda", torch.cuda.current_device()))
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:  # compiles, chooses and allocates what cannot be captured
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        results = [call() for call in calls]
    del results
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def replay() -> float:
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / len(calls)

    return replay


def by_the_clock(call: Call) -> Replay:
    """For whole requests: the host's time of a call that returns when everything is done."""

    def run() -> float:
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6

    return run


def in_turns(replays: Mapping[str, Replay], *, samples: int, seconds: float = 1.0) -> dict[str, list[float]]:
    """Microseconds by name, in the order taken, behind a round that does not count.

    Rounds end early, but not before LEAST of them, once they took `seconds` together.
    """
    for replay in replays.values():
        replay()
    taken: dict[str, list[float]] = {name: [] for name in replays}
    begin = time.perf_counter()
    for done in range(samples):
        if done >= LEAST and time.perf_counter() - begin > seconds:
            break
        for name, replay in replays.items():
            taken[name].append(replay())
    return taken
