"""The process of a command: its standard streams, Ctrl-C, and how it ends. Nothing here is called by a library.

Ctrl-C is one line and code 130 from `begin` on, which comes before imports that take seconds. Work that leaves files in
order is `interruptible`. The process then ends without waiting for what still runs on the device.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, BinaryIO, NoReturn, TextIO

from engine.errors import ConfigError

INTERRUPTED = 130
_TEXT: Any = {"encoding": "utf-8", "errors": "backslashreplace"}
_name = "forkgraph"


class _Messages(io.TextIOWrapper):
    """Standard error, which costs nobody an answer where nobody reads it."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


def begin(name: str) -> None:
    """Text is UTF-8, no file that is opened takes the number of a closed stream, and Ctrl-C ends the process `name`."""
    global _name
    _name = name
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8")  # noqa: SIM115
    if type(sys.stderr) is io.TextIOWrapper:
        sys.stderr = _Messages(sys.stderr.detach(), line_buffering=True, **_TEXT)
    if type(sys.stdout) is io.TextIOWrapper:
        sys.stdout.reconfigure(**_TEXT)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in a background job, or under nohup
        signal.signal(signal.SIGINT, _leave)


def run(name: str, command: Callable[[], int | None]) -> NoReturn:
    """Run `command` and end this process with its code: 2 for a ConfigError, 1 for a stream that cannot be written."""
    begin(name)
    try:
        code = command() or 0
    except ConfigError as error:
        say(f"{name}: {error}")
        code = 2
    except OSError as error:
        say(f"{name}: {told(error)}")
        code = 1
        discard()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is done, and has its code
    if (fault := discard()) is not None:
        say(f"{name}: {told(fault)}")
        code = code or 1
    if code == INTERRUPTED:
        os._exit(code)
    sys.exit(code)


def discard() -> OSError | None:
    """Write out what standard output has buffered; drop it where that fails, and give the error."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error
    return None


@contextmanager
def interruptible() -> Iterator[None]:
    """In a process that `begin` set up the first Ctrl-C raises KeyboardInterrupt here, and a second one waits for
    nothing."""
    if signal.getsignal(signal.SIGINT) is not _leave:
        yield
        return
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _leave)


def interrupted(name: str) -> int:
    """Say so, once; the exit code."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    say(f"{name}: interrupted")
    return INTERRUPTED


def say(line: str) -> None:
    """A line on standard error."""
    print(line, file=sys.stderr, flush=True)


def told(error: OSError) -> str:
    if isinstance(error, BrokenPipeError):
        return "standard output was closed by its reader"
    return str(error)


def standard_input() -> BinaryIO | None:
    """None where it is closed."""
    return None if sys.stdin is None else sys.stdin.buffer


def standard_output() -> TextIO:
    """Raises ConfigError where it is closed."""
    if sys.stdout is None:
        raise ConfigError("standard output is closed; redirect it to a file")
    return sys.stdout


def _leave(signum: int, frame: FrameType | None) -> NoReturn:
    beside_a_bar = "\x1b[?25h\n" if os.isatty(2) else ""  # which hides the cursor
    with suppress(OSError):
        os.write(2, f"{beside_a_bar}{_name}: interrupted\n".encode())
    os._exit(INTERRUPTED)


def _interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGINT, _leave)
    raise KeyboardInterrupt
