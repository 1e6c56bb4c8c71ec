"""A child that was forked from a process with an engine is told so, and does not hang."""

from __future__ import annotations

import multiprocessing
import os
import time
import warnings
from collections.abc import Iterator

import pytest

from engine import Engine, ForkedError
from tests.engine.engine_support import SHORT, answers, loaded

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here"),
    pytest.mark.filterwarnings("ignore:This process"),
]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with loaded() as engine:
        yield engine


def uses(engine: Engine) -> int:
    """How many ways to use an engine end in the typed error."""
    told = 0
    for use in (
        lambda: engine.score(SHORT),
        lambda: engine.submit(SHORT),
        lambda: engine.hidden_states([[1, 2]]),
        lambda: engine.like(split="aligned"),
        loaded,
    ):
        try:
            use()
        except ForkedError as error:
            told += "spawn" in str(error)
    engine.close()
    return told


def test_d34_a_forked_child_is_told_and_ends(engine: Engine) -> None:
    expected = answers(engine.score(SHORT))
    child = os.fork()
    if not child:
        os._exit(uses(engine))
    deadline = time.monotonic() + 60
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ended[0] == child, "the child hangs"
    assert os.waitstatus_to_exitcode(ended[1]) == 5
    assert answers(engine.score(SHORT)) == expected


_engine: Engine | None = None


def _score(_: int) -> str:
    assert _engine is not None
    try:
        _engine.score(SHORT)
    except ForkedError as error:
        return type(error).__name__
    return "answered"


def test_d34_a_pool_of_forked_workers_is_told(engine: Engine) -> None:
    global _engine
    _engine = engine
    engine.score(SHORT)
    with warnings.catch_warnings(), multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map_async(_score, range(3)).get(60) == ["ForkedError"] * 3
