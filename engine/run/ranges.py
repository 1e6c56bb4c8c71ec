"""Named ranges around requests and passes, for a profiler: NVTX in the domain `forkgraph`, or what `enable` was given.

Off unless `enable` was called; then `span` costs one attribute test. Ranges are pushed and popped on one thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

DOMAIN = "forkgraph"

Sink = Callable[[str], AbstractContextManager[Any]]
"""Makes a range with a message, such as `torch.profiler.record_function`."""

_OFF: AbstractContextManager[None] = nullcontext()
_sink: Sink | None = None
_numbers = itertools.count(1)
_request: ContextVar[dict[str, object]] = ContextVar("request")


def nvtx_range(message: str) -> AbstractContextManager[Any]:
    """A range in the domain `forkgraph`, by which a profiler tells it from torch's and the libraries'."""
    import nvtx

    return nvtx.annotate(message=message, domain=DOMAIN)  # type: ignore[no-any-return]


def enable(sink: Sink = nvtx_range) -> None:
    """Emit ranges from now on, into `sink` and no other."""
    global _sink
    _sink = sink


def span(message: str, **details: object) -> AbstractContextManager[Any]:
    """A range around a block; the details of the request around it and `details` are appended as ``key=value``."""
    if _sink is None:
        return _OFF
    return _sink(_text(message, _request.get({}) | details))


def request_span(schedule: str, name: str | None, **details: object) -> AbstractContextManager[None]:
    """A range around one request. Ranges within carry its running number in this process, name and schedule too."""
    return _OFF if _sink is None else _around(_sink, schedule, name, details)


@contextmanager
def _around(sink: Sink, schedule: str, name: str | None, details: dict[str, object]) -> Iterator[None]:
    named = {} if name is None else {"name": name}
    known = {"request": next(_numbers), **named, "schedule": schedule}
    token = _request.set(known)
    try:
        with sink(_text("request", known | details)):
            yield
    finally:
        _request.reset(token)


def _text(message: str, details: dict[str, object]) -> str:
    return " ".join([message, *(f"{key}={value}" for key, value in details.items())])
