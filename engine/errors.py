"""Typed errors. Everything a caller can act on derives from `ForkgraphError`; our own bugs are assertions."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

_SHOWN_CHARACTERS = 120


def shown(value: Any) -> str:
    """`repr` of a value, shortened so that a 4 MiB state never fills a log line."""
    try:
        text = repr(value)
    except Exception:  # a value of the caller's own kind, or an integer of more digits than Python prints
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}... ({len(text)} characters)"


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the known word closest to `word`, nothing when none is close."""
    close = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


class ForkgraphError(Exception):
    """Base of every error raised on purpose."""


class RequestError(ForkgraphError):
    """The request is wrong. Raised before any forward.

    `text` is the wire contract's wording, `field` the path of the offending part (``questions.route.criteria``),
    `value` what was found there.
    """

    def __init__(self, text: str, *, field: str = "request", value: Any = None) -> None:
        self.text, self.field, self.value = text, field, value
        super().__init__(f"{field}: {text}" + ("" if value is None else f" (got {shown(value)})"))


class ConfigError(ForkgraphError, ValueError):
    """An option is unknown, out of range, or contradicts another; the message names it, its value and the remedy."""


class CheckpointError(ForkgraphError):
    """A checkpoint file is missing, damaged, or disagrees with the model; the message names file and key."""


class CapacityError(ForkgraphError):
    """The work does not fit a stated limit (rows, segments, memory); the message gives both figures."""


class InferenceError(ForkgraphError):
    """The forward itself failed. No answer is made up in its place; the engine stays usable."""


class ClosedError(ForkgraphError):
    """The engine was closed, before the request or while it waited."""

    def __init__(self) -> None:
        super().__init__("this engine is closed; load another one")


class DeviceLostError(ForkgraphError):
    """An error of the device that leaves this process no use of it; the message names the error. Start another one."""


class ForkedError(ForkgraphError):
    """The engine was made in another process, and this one is its fork; load one here, or start by spawning."""


class SettingsError(ForkgraphError):
    """A setting of the process that decides bits is not what it was at load; the message names it and both values."""
