"""What a program may set beside an engine on a CPU: before loading, between requests, in another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

from engine import Engine, SettingsError
from tests.engine.engine_support import SHORT, TICKET, answers, loaded


@contextmanager
def switched(on: Callable[[], object], off: Callable[[], object]) -> Iterator[None]:
    on()
    try:
        yield
    finally:
        off()


def default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    return switched(lambda: torch.set_default_dtype(dtype), lambda: torch.set_default_dtype(torch.float32))


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float16": lambda: default_dtype(torch.float16),
    "float64": lambda: default_dtype(torch.float64),
    "meta": lambda: switched(lambda: torch.set_default_device("meta"), lambda: torch.set_default_device(None)),
    "deterministic": lambda: switched(
        lambda: torch.use_deterministic_algorithms(True), lambda: torch.use_deterministic_algorithms(False)
    ),
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "anomaly": torch.autograd.detect_anomaly,
    "threads": lambda: switched(lambda: torch.set_num_threads(3), lambda: torch.set_num_threads(1)),
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with loaded() as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(engine: Engine) -> Any:
    return answers(engine.score(TICKET))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_d33_a_setting_between_requests_changes_nothing(engine: Engine, expected: Any, setting: str) -> None:
    with SETTINGS[setting]():
        assert answers(engine.score(TICKET)) == expected
        states = engine.hidden_states([[1, 2, 3]])
    assert answers(engine.score(TICKET)) == expected
    assert not states[0].is_inference()
    states[0] += 1  # the caller's own


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_d33_a_setting_before_loading_changes_nothing(expected: Any, setting: str) -> None:
    with SETTINGS[setting](), loaded() as engine:
        inside = answers(engine.score(TICKET))
        assert inside == expected
    with SETTINGS[setting]():
        engine = loaded()
    with engine:
        assert answers(engine.score(TICKET)) == expected
        assert engine.weights.rope.dtype == torch.float32
        assert engine.weights.rope.device.type == "cpu"


def test_d33_a_setting_in_another_thread_changes_nothing(engine: Engine, expected: Any) -> None:
    stop = threading.Event()

    def toggle() -> None:
        while not stop.is_set():
            torch.set_default_dtype(torch.bfloat16)
            torch.use_deterministic_algorithms(True)
            torch.set_default_dtype(torch.float32)
            torch.use_deterministic_algorithms(False)

    thread = threading.Thread(target=toggle)
    thread.start()
    try:
        for _ in range(10):
            assert answers(engine.score(TICKET)) == expected
    finally:
        stop.set()
        thread.join()
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)


def test_d33_float32_precision_on_a_cpu_is_refused_by_name(engine: Engine, expected: Any) -> None:
    with (
        switched(
            lambda: torch.set_float32_matmul_precision("medium"), lambda: torch.set_float32_matmul_precision("highest")
        ),
        pytest.raises(SettingsError, match=r"torch\.set_float32_matmul_precision was 'highest' .* is 'medium'"),
    ):
        engine.score(SHORT)
    assert answers(engine.score(TICKET)) == expected


def test_d33_compiled_regions_are_compiled_once_whatever_is_switched() -> None:
    from torch._dynamo.utils import counters

    with loaded(graphs="compiled") as engine:
        expected = [answers(engine.score(request)) for request in (TICKET, SHORT)]
        before = counters["stats"]["unique_graphs"]
        assert before
        for turn in range(50):
            setting = list(SETTINGS)[turn % 7]
            with SETTINGS[setting]():
                assert answers(engine.score(SHORT)) == expected[1], setting
        assert answers(engine.score(TICKET)) == expected[0]
        assert counters["stats"]["unique_graphs"] == before
