"""NVTX ranges in the domain `forkgraph`, so that a profiler can tell them from torch's and the libraries'.

Off unless `enable` was called; then `span` costs one attribute test. Ranges are pushed and popped on one thread.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

DOMAIN = "forkgraph"

_OFF: AbstractContextManager[None] = nullcontext()
_enabled = False


def enable() -> None:
    """Emit ranges from now on."""
    global _enabled
    _enabled = True


def span(message: str, **details: object) -> AbstractContextManager[object]:
    """A range around a block; `details` are appended as ``key=value``."""
    if not _enabled:
        return _OFF
    import nvtx

    text = " ".join([message, *(f"{key}={value}" for key, value in details.items())])
    return nvtx.annotate(message=text, domain=DOMAIN)  # type: ignore[no-any-return]
