"""Four engines of two models, their clients and a program that uses CUDA, for a minute."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from engine import Engine
from tests.engine.crowd import Crowd, Questions, alone, requests

pytestmark = pytest.mark.gpu

SECONDS = 20.0
WARMUP = [64, 128, 256, 512, 1_024, 2_048]
Models = tuple[Engine, Engine]
States = list[list[list[Tensor]]]
"""Of each model, request and candidate."""


@pytest.fixture(scope="module")
def cache_dir() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield folder


@pytest.fixture(scope="module")
def models(cache_dir: str) -> Iterator[Models]:
    with (
        Engine.load(model="4b", checkpoint="random", gemm="fixed", warmup=WARMUP, cache_dir=cache_dir) as large,
        Engine.load(model="tiny", gemm="fixed", warmup=WARMUP, cache_dir=cache_dir) as small,
    ):
        yield large, small


@pytest.fixture(scope="module")
def works() -> list[Questions]:
    return requests(24, seed=0, longest=900)


@pytest.fixture(scope="module")
def expected(models: Models, works: list[Questions]) -> States:
    return [alone(model, works) for model in models]


def beside(crowd: Crowd) -> None:
    """A program that multiplies, waits for the whole device, allocates and empties the cache."""
    x = torch.randn(1_024, 1_024, device="cuda")

    def everything(i: int) -> None:
        (x @ x).sum()
        torch.empty(1 << 20, device="cuda")
        torch.cuda.synchronize()
        if i % 20 == 0:
            torch.cuda.empty_cache()

    crowd.do("synchronise", everything)


def asked(crowd: Crowd, engines: list[Engine], works: list[Questions], expected: States) -> None:
    for i, engine in enumerate(engines):
        for _ in range(3):
            crowd.ask(f"engine {i}", engine, works, expected[i % 2])


@pytest.mark.parametrize("capture", ["load", "answer"])
def test_d31_engines_share_a_device_with_a_program(
    models: Models,
    works: list[Questions],
    expected: States,
    capture: str,
    record_property: pytest.RecordProperty,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Never a wrong bit and never an error of ours; none of the program's either once nothing is captured any more."""
    crowd = Crowd()
    with ExitStack() as engines:
        opened = [
            engines.enter_context(model.like(schedule=schedule, capture=capture))  # type: ignore[arg-type]
            for schedule in ("tree", "levels")
            for model in models
        ]
        asked(crowd, opened, works, expected)
        beside(crowd)
        if capture == "answer":
            y = torch.randn(64, device="cuda")
            crowd.do("compile", lambda i: torch.compile(lambda z: z * i + 1)(y), pause=0.2)
        crowd.run(SECONDS)
    with capsys.disabled():
        print(f"\ncapture={capture}: {crowd.said()}")
    assert crowd.wrong == []
    assert crowd.errors == []
    assert crowd.answers > 100
    if capture == "load":
        assert not crowd.failed_calls


def test_d31_engines_open_and_close_under_load(
    models: Models,
    works: list[Questions],
    expected: States,
    capsys: pytest.CaptureFixture[str],
) -> None:
    crowd = Crowd()
    asked(crowd, list(models), works, expected)
    beside(crowd)

    def reopen(i: int) -> None:
        with models[i % 2].like(schedule=("tree", "levels", "batched")[i % 3]) as engine:  # type: ignore[arg-type]
            found = engine.forward(works[i % len(works)]).hidden
            assert all(torch.equal(a, b) for a, b in zip(found, expected[i % 2][i % len(works)], strict=True))

    crowd.do("reopen", reopen)
    crowd.run(SECONDS)
    with capsys.disabled():
        print(f"\nopening and closing: {crowd.said()}")
    assert crowd.wrong == []
    assert crowd.errors == []
    assert not [failed for failed in crowd.failed_calls if failed.startswith("reopen")]


def test_d32_a_program_of_one_thread_never_meets_a_capture(models: Models, works: list[Questions]) -> None:
    for model in models:
        with model.like(schedule="tree") as engine:
            for work in works[:8]:
                engine.forward(work)
                torch.cuda.synchronize()
                torch.empty(1 << 22, device="cuda")
                torch.cuda.empty_cache()
            assert engine.capture_seconds, "nothing was captured"


def test_d32_idle_captures_behind_the_answer(models: Models, works: list[Questions]) -> None:
    with models[1].like(schedule="tree", capture="idle") as engine:
        first = engine.forward(works[0]).hidden
        deadline = time.monotonic() + 60
        while not engine.capture_seconds and time.monotonic() < deadline:
            time.sleep(0.01)
        assert engine.capture_seconds
        assert all(torch.equal(a, b) for a, b in zip(engine.forward(works[0]).hidden, first, strict=True))


def test_d33_a_request_compiles_nothing_whatever_is_switched(models: Models, works: list[Questions]) -> None:
    """Fifty turns of every switch, for captured and for compiled forwards."""
    with models[1].like(graphs="compiled") as compiled:
        for engine in (models[1], compiled):
            expected = engine.forward(works[0]).hidden
            before = counters["stats"]["unique_graphs"]
            for turn in range(50):
                on = turn % 2 == 0
                torch.set_default_dtype(torch.bfloat16 if on else torch.float32)
                torch.set_default_device("cuda" if on else None)
                torch.use_deterministic_algorithms(on)
                torch.set_float32_matmul_precision("medium" if on else "highest")
                torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = not on
                torch.backends.cuda.preferred_blas_library("cublaslt" if on else "cublas")
                with torch.inference_mode(on), torch.autocast("cuda", enabled=on):
                    found = engine.forward(works[0]).hidden
                assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), turn
            assert counters["stats"]["unique_graphs"] == before


def test_d33_weights_loaded_under_anybodys_switches_have_the_same_bits(
    cache_dir: str, models: Models, works: list[Questions]
) -> None:
    expected = models[1].forward(works[0]).hidden
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("cuda")
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.inference_mode(), Engine.load(model="tiny", gemm="fixed", cache_dir=cache_dir) as engine:
            found = engine.forward(works[0]).hidden
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.set_float32_matmul_precision("highest")
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not found[0].is_inference()
