"""Where answers go: a file that is looked at before anything runs, held by one writer at a time, and replaced whole.

Knows nothing of answers.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from filelock import FileLock, Timeout

from engine.config import ScoreConfig
from engine.errors import ConfigError
from engine.values import expanded
from graphs.files import replace_file

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class Writes(Protocol):
    """Options of a command that writes a file."""

    out: str | None


@dataclass(frozen=True)
class Output:
    """A file that this run alone writes; `claim` makes one."""

    name: str
    """As it was given, for messages."""
    path: Path
    """The file itself, behind all links."""

    @property
    def options(self) -> Path:
        """Where the options that made the answers are kept."""
        return self.path.with_name(f"{self.path.name}.config.yaml")

    def write(self, content: str | bytes) -> None:
        """The file whole. Raises ConfigError."""
        self._replace(self.path, content)

    def write_options(self, text: str) -> None:
        self._replace(self.options, text)

    def _replace(self, path: Path, content: str | bytes) -> None:
        try:
            replace_file(path, content)
        except OSError as error:
            raise ConfigError(f"out={self.name}: {path.name}: {error.strerror}") from None


@contextmanager
def claim(
    given: str, *, inputs: Mapping[str, str | BinaryIO], overwrite: bool, resumes: bool = False
) -> Iterator[Output]:
    """`out=given`, ours until the block ends. A link is written through; its options lie beside what it leads to.

    `inputs` are what this run reads, by option: names of files, or a stream. With `resumes` the caller goes on with a
    file that is there. Raises ConfigError for what is no plain file that may be written, for an input, for a file that
    is there unless `overwrite`, for one of several hard links, which replacing would part from the others, and while
    another run holds it.
    """
    out = Output(given, _target(given))
    _refuse_input(out, inputs)
    with _locked(out):
        found = [path for path in (out.path, out.options) if os.path.lexists(path)]
        for path in found:
            _refuse_unwritable(path, alone=not resumes or overwrite)
        if found and not (overwrite or resumes):
            raise ConfigError(f"out: {found[0]} exists; overwrite=true replaces it, or give another out=")
        yield out


def _target(given: str) -> Path:
    """The file behind `given`, which need not exist."""
    path = expanded(f"out={given}", given)
    if given == "-":
        raise ConfigError("out=- is no file; leave out= away for standard output")
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
    except FileNotFoundError:
        if path.is_symlink():
            raise ConfigError(f"out={given} is a link to {path.readlink()}, which does not exist") from None
        if not path.parent.is_dir():
            raise ConfigError(f"out={given}: no such folder as {path.parent}") from None
        kind = stat.S_IFDIR if given.endswith(os.sep) else stat.S_IFREG
    except (OSError, ValueError) as error:  # a circle of links, a name too long, a zero byte
        raise ConfigError(f"out={given}: {getattr(error, 'strerror', error)}") from None
    if kind == stat.S_IFDIR:
        raise ConfigError(f"out={given} is a folder; give the name of a file in it")
    if kind in _KINDS:
        kept = "leave out= away and redirect standard output"
        raise ConfigError(f"out={given} is {_KINDS[kind]}, not a file; {kept}")
    return Path(os.path.realpath(path))


def _refuse_input(out: Output, inputs: Mapping[str, str | BinaryIO]) -> None:
    for name, given in inputs.items():
        try:
            source = os.stat(expanded(f"{name}={given}", given)) if isinstance(given, str) else os.fstat(given.fileno())
        except (OSError, ValueError):  # it cannot be read either
            continue
        for path in (out.path, out.options):
            if path.exists() and os.path.samestat(path.stat(), source):
                shown = given if isinstance(given, str) else "-"
                raise ConfigError(f"out={out.name} would replace {name}={shown}; give another out=")


def _refuse_unwritable(path: Path, *, alone: bool) -> None:
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"out: {path} is no plain file; remove it or give another out=")
    if not found.st_mode & 0o222 or not os.access(path, os.W_OK):  # root may write what is read-only
        raise ConfigError(f"out: {path} is read-only; make it writable or give another out=")
    if alone and found.st_nlink > 1:
        raise ConfigError(
            f"out: {path} has {found.st_nlink} hard links, and replacing it would part it from the others; remove "
            "it or give another out="
        )


def named_inputs(config: ScoreConfig, stdin: BinaryIO | None = None) -> dict[str, str | BinaryIO]:
    """What a run with these options reads, for `claim`."""
    named = {
        "request": stdin if config.request == "-" else config.request,
        "questions": config.questions,
        "letters.system_message": config.letters.system_message,
    }
    return {name: given for name, given in named.items() if given is not None}


def refuse_shared(configs: Sequence[Writes]) -> None:
    """Raise ConfigError where two of these jobs write one file, whatever they call it."""
    seen: dict[str | tuple[int, int], str] = {}
    for config in configs:
        if (given := config.out) is None:
            continue
        path = os.path.realpath(expanded(f"out={given}", given))
        identities: list[str | tuple[int, int]] = [path]
        with suppress(OSError, ValueError):  # a file that is there may have other names
            identities.append((os.stat(path).st_dev, os.stat(path).st_ino))
        for first in {seen[identity] for identity in identities if identity in seen}:
            both = f"out={given}" if first == given else f"out={first} and out={given}"
            raise ConfigError(f"{both}: two jobs would write one file; name each, as in 'out=a-${{split}}.json'")
        seen.update(dict.fromkeys(identities, given))


@contextmanager
def _locked(out: Output) -> Iterator[None]:
    """Hold the file beside `out` that says so; one that a killed run left behind holds nobody up."""
    beside = out.path.with_name(f".{out.path.name}.lock")
    lock = FileLock(beside, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ConfigError(
            f"out={out.name}: another run is writing this file; wait for it or give another out="
        ) from None
    except (OSError, NotImplementedError) as error:
        raise ConfigError(f"out={out.name} cannot be locked: {error}") from None
    try:
        yield
    finally:
        with suppress(OSError):
            beside.unlink()
        lock.release()
