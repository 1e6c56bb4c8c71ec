"""Ranges for profilers: nothing until they are asked for, then with the numbers of their request."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import nvtx
import pytest

from engine.run import ranges
from tests.engine.engine_support import SHORT, TICKET, loaded


class Log:
    """A sink that notes when ranges begin and end."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.open: list[str] = []

    def __call__(self, message: str) -> AbstractContextManager[None]:
        return self._range(message)

    @contextmanager
    def _range(self, message: str) -> Iterator[None]:
        self.begun.append(message)
        self.open.append(message)
        yield
        assert self.open.pop() == message

    def fields(self, kind: str) -> list[dict[str, str]]:
        lines = [message.split() for message in self.begun]
        return [dict(word.split("=") for word in words) for first, *words in lines if first == kind]


@pytest.fixture(autouse=True)
def _off(monkeypatch: pytest.MonkeyPatch) -> None:
    """`enable` is undone afterwards, and numbers start at 1."""
    monkeypatch.setattr(ranges, "_sink", None)
    monkeypatch.setattr(ranges, "_numbers", itertools.count(1))


@pytest.fixture
def annotated(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What is handed to the library."""
    seen: list[dict[str, Any]] = []

    def annotate(**arguments: Any) -> nullcontext[None]:
        seen.append(arguments)
        return nullcontext()

    monkeypatch.setattr(nvtx, "annotate", annotate)
    return seen


def test_off_by_default(annotated: list[dict[str, Any]]) -> None:
    with ranges.request_span("levels", None, rows=3), ranges.span("branch", rows=3):
        pass
    assert annotated == []


def test_a_range_carries_its_details_in_the_projects_domain(annotated: list[dict[str, Any]]) -> None:
    ranges.enable()
    with ranges.span("branch", rows=3, rung=64):
        pass
    assert annotated == [{"message": "branch rows=3 rung=64", "domain": "forkgraph"}]


def test_the_library_takes_them() -> None:
    with ranges.nvtx_range("branch"):
        pass


def test_ranges_within_a_request_carry_its_number_name_and_schedule() -> None:
    ranges.enable(log := Log())
    for name in ("first", None):
        with ranges.request_span("tree", name, rows=70), ranges.span("tree", rung=96):
            assert len(log.open) == 2
    with ranges.span("apart"):
        pass
    assert log.begun == [
        "request request=1 name=first schedule=tree rows=70",
        "tree request=1 name=first schedule=tree rung=96",
        "request request=2 schedule=tree rows=70",
        "tree request=2 schedule=tree rung=96",
        "apart",
    ]
    assert log.open == []


def test_a_request_that_fails_leaves_no_number_behind() -> None:
    ranges.enable(log := Log())
    with pytest.raises(RuntimeError), ranges.request_span("tree", None):
        raise RuntimeError
    with ranges.span("apart"):
        pass
    assert log.begun[-1] == "apart"


@pytest.mark.parametrize("schedule", ["independent", "batched", "levels", "tree"])
def test_the_engine_names_every_request_and_pass_with_its_true_numbers(schedule: str) -> None:
    with loaded(schedule=schedule) as engine:
        ranges.enable(log := Log())
        counters = engine.forward(engine.prompts(TICKET), name="ticket").counters
        engine.score(SHORT)
    first, second = log.fields("request")
    assert (first["request"], first["name"], first["schedule"]) == ("1", "ticket", schedule)
    assert (second["request"], second.get("name"), second["schedule"]) == ("2", None, schedule)
    passes = {kind: [f for f in log.fields(kind) if f["request"] == "1"] for kind in counters.passes}
    assert {kind: len(members) for kind, members in passes.items()} == counters.passes
    assert {kind: sum(int(f["rows"]) for f in members) for kind, members in passes.items()} == counters.rows
    every = [f for members in passes.values() for f in members]
    assert all(f["schedule"] == schedule and int(f["rung"]) >= int(f["rows"]) for f in every)
    for total in ("rows", "segments"):
        assert sum(int(f[total]) for f in every) == int(first[total])
