"""What `bench` measures: one module for each case, of the name that chooses it, with its `CASE`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from record import Record

if TYPE_CHECKING:
    from bench_options import BenchConfig

Figure = Callable[[Record], object]
"""A column: what it shows of a record. None is a dash."""


def column(key: str) -> Figure:
    """What stands in the configuration, if anything."""
    return lambda record: record.configuration.get(key)


@dataclass(frozen=True, kw_only=True)
class Case:
    """`measure` gives records as they are taken, `figures` are the columns of their table."""

    measure: Callable[[BenchConfig], Iterable[Record]]
    figures: Mapping[str, Figure]
    summary: Callable[[Sequence[Record]], Sequence[str]] = lambda records: ()
    """Lines below the table."""


def case_named(name: str) -> Case:
    """Imports no other case: transformers alone takes seconds."""
    found: Case = import_module(f"cases.{name}").CASE
    return found
