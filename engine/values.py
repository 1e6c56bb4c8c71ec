"""Checks of single options. Each raises ConfigError naming the option, what it was given and what it takes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from engine.errors import ConfigError, nearest, shown


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        given = value if isinstance(value, str) else shown(value)
        raise ConfigError(f"{name}={given} is not one of {', '.join(allowed)}{nearest(str(value), allowed)}")


def within(name: str, value: int, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        bounds = f"from {low} to {high:,}" if high is not None else f"of at least {low}"
        raise ConfigError(f"{name}={shown(value)} is not a whole number {bounds}")


def positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not (isinstance(value, int | float) and 0 < value < float("inf")):
        raise ConfigError(f"{name}={shown(value)} is not a positive number")


def flag(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={shown(value)} is neither true nor false")


def path_of(name: str, value: str | os.PathLike[str] | None, kind: str = "folder") -> str | None:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{name}={shown(value)} is not the name of a {kind}")
    if value == "":
        raise ConfigError(f"{name}= is empty; give a {kind} or leave it out")
    return value


def expanded(option: str, path: str) -> Path:
    """`path` with `~` spelled out. Raises ConfigError where the user has no home."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"{option}: this user has no home folder; give the whole path") from None


Group = TypeVar("Group")


def group_of(name: str, value: Group | Mapping[str, Any], group: type[Group]) -> Group:
    """A group of options, which a mapping may spell."""
    if isinstance(value, Mapping):
        given = members_of(name, value)
        refuse_unknown(given, [f.name for f in fields(group)], f"{name}.")  # type: ignore[arg-type]
        return group(**given)
    if not isinstance(value, group):
        raise ConfigError(f"{name}={shown(value)} is neither a {group.__name__} nor a mapping of its options")
    return value


def members_of(name: str, mapping: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping as a plain one; of OmegaConf's it looks up what is interpolated."""
    try:
        return {str(key): mapping[key] for key in mapping}
    except Exception as error:  # whatever the mapping's own kind raises
        raise ConfigError(f"{name}: {error}") from None


def refuse_unknown(given: Iterable[str], known: Sequence[str], prefix: str = "") -> None:
    for key in given:
        if key not in known:
            names = ", ".join(sorted(known))
            raise ConfigError(f"{prefix}{key} is no option of an engine{nearest(key, known)}; known: {names}")
