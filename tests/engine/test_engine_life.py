"""The life of an engine: many callers, faults in the middle, several engines over one set of weights, and the end."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine import Engine, Prompt
from engine.config import MemoryConfig
from engine.errors import ClosedError, ConfigError, ForkgraphError, InferenceError
from engine.plan.schedule import Pass, Plan
from engine.run.executor import Executor
from engine.run.snapshot import SnapshotBuffers
from engine.statistics import Counters
from tests.engine.engine_support import LONG, SHORT, TICKET, answers, choice, loaded
from tests.support import run, tokens


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with loaded() as engine:
        yield engine


# Queue


class Gate:
    """Holds every run of an executor until `open`; tells how many candidates each had, in the order they ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.order: list[int] = []
        self.entered, self._open = threading.Event(), threading.Event()
        plain = Executor.run

        def held(executor: Executor, plan: Plan) -> tuple[Tensor, Counters]:
            self.order.append(plan.num_reads)
            self.entered.set()
            assert self._open.wait(60)
            return plain(executor, plan)

        monkeypatch.setattr(Executor, "run", held)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open()


def asks(candidates: int) -> dict[str, Any]:
    return {"state": "s", "questions": {"q": choice(*"abcdefgh"[:candidates])}}


def test_requests_run_in_turn_and_a_cancelled_one_never_does(engine: Engine, gate: Gate) -> None:
    running, *waiting = (engine.submit(asks(n)) for n in (2, 3, 4, 5))
    assert gate.entered.wait(60)
    assert all(isinstance(future, Future) for future in (running, *waiting))
    assert not running.cancel()
    assert waiting[1].cancel()
    gate.open()
    assert len(running.result().answers["q"].probabilities) == 2  # type: ignore[union-attr]
    assert waiting[2].result().metadata["candidate_sequences"] == 5
    assert gate.order == [2, 3, 5]
    with pytest.raises(CancelledError):
        waiting[1].result()


def test_many_threads_get_the_answers_they_would_get_alone(engine: Engine) -> None:
    requests = [TICKET, SHORT, asks(5), {**TICKET, "state": "Nothing happened."}]
    alone = [answers(engine.score(request)) for request in requests]
    start = threading.Barrier(8)

    def all_of_them(first: int) -> list[tuple[int, dict[str, Any]]]:
        start.wait(60)
        order = [(first + i) % len(requests) for i in range(3)]
        return [(i, answers(engine.score(requests[i]))) for i in order]

    with ThreadPoolExecutor(8) as threads:
        for found in threads.map(all_of_them, range(8)):
            assert all(response == alone[i] for i, response in found)


# Faults


def test_a_read_that_is_not_finite_is_an_error_and_leaves_its_siblings(engine: Engine) -> None:
    head = tokens(np.random.default_rng(2), 70)
    prompts = [np.concatenate([head, np.array(tail, np.int32)]) for tail in ([600, 1], [601, 1], [602, 1])]
    expected, _ = run(engine._executor, [[Prompt(ids) for ids in prompts]], schedule="levels")
    with loaded() as broken:
        broken.weights.embedding[601] = torch.nan
        with pytest.raises(InferenceError, match=r"prompts\[1\]: a final hidden state is not finite"):
            broken.hidden_states(prompts)  # type: ignore[arg-type]
        for schedule in ("batched", "levels", "tree"):
            found, _ = run(broken._executor, [[Prompt(ids) for ids in prompts]], schedule=schedule)
            assert torch.isnan(found[1]).all()
            assert torch.equal(found[[0, 2]], expected[[0, 2]])


def test_a_score_that_is_not_finite_is_an_error_and_the_next_request_is_fine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(engine.score(TICKET))
    plain = Executor._forward

    def spoiled(self: Executor, tables: Tensor, one: Pass) -> Tensor:
        hidden = plain(self, tables, one).clone()
        hidden[2:3, 7] = torch.inf
        return hidden

    with monkeypatch.context() as patch:
        patch.setattr(Executor, "_forward", spoiled)
        with pytest.raises(InferenceError, match="question 'team', candidate 'sales': the scalar is"):
            engine.score(TICKET)
    assert answers(engine.score(TICKET)) == expected


class Fault:
    """Lets `calls` calls through and fails at the next, holding a tensor as a forward would."""

    def __init__(self, plain: Callable[..., Any], error: Exception, calls: int) -> None:
        self.plain, self.error, self.left = plain, error, calls
        self.held: weakref.ref[Tensor] | None = None

    def method(self) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if self.left == 0:
                scratch = torch.zeros(8)
                self.held = weakref.ref(scratch)
                raise self.error
            self.left -= 1
            return self.plain(*arguments, **options)

        return call


@pytest.fixture(scope="module")
def fresh_answers() -> dict[str, Any]:
    with loaded() as engine:
        return answers(engine.score(TICKET))


@pytest.mark.parametrize("calls", [0, 1, 2])
@pytest.mark.parametrize("error", [RuntimeError("device lost"), torch.OutOfMemoryError("no room"), ValueError("odd")])
def test_a_fault_in_the_middle_is_typed_and_the_next_request_has_the_bits_of_a_fresh_engine(
    engine: Engine, fresh_answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch, error: Exception, calls: int
) -> None:
    fault = Fault(Executor._forward, error, calls)
    with monkeypatch.context() as patch:
        patch.setattr(Executor, "_forward", fault.method())
        with pytest.raises(InferenceError, match=f"model inference failed: {type(error).__name__}: {error}") as caught:
            engine.score(TICKET)
    assert caught.value.__cause__ is error
    assert fault.held is not None
    assert fault.held() is None, "the error keeps the memory of the pass that failed"
    assert answers(engine.score(TICKET)) == fresh_answers


def test_an_assertion_of_ours_is_not_dressed_up(
    engine: Engine, fresh_answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault(Executor._forward, AssertionError("a slot was given out twice"), 1)
    with monkeypatch.context() as patch:
        patch.setattr(Executor, "_forward", fault.method())
        with pytest.raises(AssertionError, match="a slot was given out twice"):
            engine.score(TICKET)
    assert answers(engine.score(TICKET)) == fresh_answers


def test_buffers_that_did_not_get_their_memory_are_made_by_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with loaded() as engine:
        expected = answers(engine.score(TICKET))
        with monkeypatch.context() as patch:
            fault = Fault(SnapshotBuffers._allocate, torch.OutOfMemoryError("no room"), 2)
            patch.setattr(SnapshotBuffers, "_allocate", fault.method())
            with pytest.raises(InferenceError, match="OutOfMemoryError: no room"):
                engine.score(LONG)
        assert answers(engine.score(TICKET)) == expected


def test_a_larger_request_in_between_changes_nothing(engine: Engine) -> None:
    with loaded() as own:
        first, rows = answers(own.score(TICKET)), own._executor.buffers.sizes.kv_rows
        own.score(LONG)
        assert own._executor.buffers.sizes.kv_rows > rows
        assert answers(own.score(TICKET)) == first == answers(engine.score(TICKET))


def test_nothing_of_an_earlier_request_is_read() -> None:
    for schedule in ("levels", "tree"):
        with loaded(schedule=schedule) as engine:
            expected = answers(engine.score(TICKET))
            engine.score(LONG)
            for tensor in engine._executor.buffers.tensors():
                tensor.fill_(torch.nan)
            assert answers(engine.score(TICKET)) == expected


# Several engines, and the end


def test_like_shares_the_weights_and_changes_run_options_only(engine: Engine) -> None:
    other = engine.like(split="aligned", schedule="batched")
    assert (other.config.split, other.config.schedule) == ("aligned", "batched")
    assert other.weights.embedding.data_ptr() == engine.weights.embedding.data_ptr()
    assert all(a is b for a, b in zip(other.weights.layers, engine.weights.layers, strict=True))
    assert not {t.data_ptr() for t in other._executor.buffers.tensors()} & {
        t.data_ptr() for t in engine._executor.buffers.tensors()
    }
    other.close()
    engine.score(SHORT)
    for name, value in (("seed", 1), ("dtype", "bfloat16"), ("max_length", 8), ("memory", MemoryConfig()), ("no", 1)):
        with pytest.raises(
            ConfigError, match=f"{name} belongs to the weights; like\\(\\) changes split, gemm, schedule"
        ):
            engine.like(**{name: value})
    with pytest.raises(ConfigError, match="split=odd is not one of"):
        engine.like(split="odd")


def test_a_closed_engine_refuses_and_may_be_closed_again() -> None:
    with loaded() as engine:
        engine.score(SHORT)
    engine.close()
    for use in (
        lambda: engine.score(SHORT),
        lambda: engine.submit(SHORT),
        lambda: engine.hidden_states([[1]]),
        lambda: engine.like(split="exact"),
        lambda: engine.settle(),
        lambda: engine.weights,
        lambda: engine.capture_seconds,
    ):
        with pytest.raises(ForkgraphError, match="this engine is closed; load another one"):
            use()
    assert engine.explain(SHORT).candidates == 2


def test_d35_closing_waits_for_what_runs_and_refuses_what_waits(gate: Gate) -> None:
    engine = loaded()
    running = engine.submit(asks(2))
    assert gate.entered.wait(60)
    ended: list[Exception] = []

    def wait() -> None:
        try:
            engine.score(asks(3))
        except Exception as error:
            ended.append(error)

    waiters = [threading.Thread(target=wait) for _ in range(6)]
    for waiter in waiters:
        waiter.start()
    while len(engine._client.owner._waiting) < 6:
        time.sleep(0.001)
    closing = threading.Thread(target=engine.close)
    closing.start()
    for waiter in waiters:
        waiter.join(60)
    assert [type(error) for error in ended] == [ClosedError] * 6
    assert closing.is_alive()
    gate.open()
    closing.join(60)
    assert running.result(0).metadata["candidate_sequences"] == 2
    assert gate.order == [2]


def test_an_engine_that_nobody_closed_gives_back_what_it_held() -> None:
    engine = loaded()
    engine.score(SHORT)
    held, client = weakref.ref(engine.weights.embedding), engine._client
    del engine
    gc.collect()
    client.released.result(60)
    assert held() is None


def test_closing_gives_weights_and_buffers_back() -> None:
    engine = loaded()
    engine.score(SHORT)
    tensors = [engine.weights.embedding, engine.weights.rope, *engine._executor.buffers.tensors()]
    held = [weakref.ref(tensor) for tensor in tensors]
    del tensors
    gc.collect()
    gc.disable()
    try:
        engine.close()
        assert [ref() for ref in held] == [None] * len(held)
    finally:
        gc.enable()
