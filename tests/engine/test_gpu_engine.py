"""A whole engine on a GPU: ready after loading, bits of eager runs, memory given back, faults, a second device."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from engine import Engine, InferenceError
from engine.run.executor import Executor
from graphs.rungs import COVERING, rung

pytestmark = pytest.mark.gpu


def keys(engine: Engine) -> tuple[tuple[int, int], ...]:
    captured = engine._executor.captured
    assert captured is not None
    return captured.keys


def choice(*names: str) -> dict[str, Any]:
    return {"type": "choice", "instructions": "Which team?", "criteria": dict.fromkeys(names)}


TICKET = {
    "state": "My bank shows the monthly fee twice, on the 3rd and again on the 4th.",
    "questions": {"team": choice("billing", "sales"), "other": choice("a", "b", "c"), "due": {
        "type": "noul", "instructions": "Is a refund due?"}},
}  # fmt: skip
LONG = {**TICKET, "state": "The second invoice was paid twice. " * 60}


@pytest.fixture(scope="module")
def cache_dir() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield folder


def loaded(cache_dir: str, *, device: str = "cuda", gemm: str = "fixed", **options: Any) -> Engine:
    """With `fixed`, which needs no search for the fastest products of this small model."""
    return Engine.load(device=device, cache_dir=cache_dir, gemm=gemm, **options)


def answers(engine: Engine, request: dict[str, Any]) -> Any:
    return engine.score(request).to_dict()["answers"]


def test_a_loaded_engine_compiles_nothing_more_and_answers_as_eager_does(cache_dir: str) -> None:
    with loaded(cache_dir) as engine:
        c = engine.config
        assert (c.device, c.dtype, c.schedule, c.graphs) == ("cuda:0", "bfloat16", "auto", "captured")
        ready = counters["stats"]["unique_graphs"]  # those of tests before
        found = [answers(engine, request) for request in (TICKET, LONG, TICKET)]
        with engine.like(schedule="levels") as levels:
            assert answers(levels, TICKET) == found[0]
        assert counters["stats"]["unique_graphs"] == ready
        assert keys(engine)
        assert [answers(engine, request) for request in (TICKET, LONG, TICKET)] == found
        with engine.like(schedule="independent", graphs="eager") as alone:
            assert [answers(alone, request) for request in (TICKET, LONG)] == found[:2]


@pytest.mark.parametrize(
    ("schedule", "gemm"), [("independent", "default"), ("independent", "fixed"), ("tree", "fixed")]
)
def test_an_engine_is_captured_before_it_hands_its_answers_over(
    cache_dir: str, schedule: str, gemm: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "forkgraph"), loaded(cache_dir, schedule=schedule, gemm=gemm) as engine:
        found = [answers(engine, request) for request in (TICKET, LONG)]
        assert not engine._executor.has_missed
        again = [answers(engine, request) for request in (TICKET, LONG)]
        assert again == found or gemm == "default", "a replay has other bits"
        assert len(keys(engine)) > 1
    assert [record.getMessage() for record in caplog.records if record.name == "forkgraph"] == []


def test_warmup_captures_the_rows_it_names(cache_dir: str) -> None:
    with loaded(cache_dir, warmup=[100, 700]) as engine:
        assert {rung(100), rung(700)} <= {rows for rows, _ in keys(engine)}


def test_warmup_of_all_holds_every_pass_and_nothing_is_captured_later(
    cache_dir: str, capsys: pytest.CaptureFixture[str]
) -> None:
    free, start = torch.cuda.mem_get_info()[0], time.perf_counter()
    with (
        loaded(cache_dir, warmup="all", capture="load", memory={"graphs_gib": 4}) as engine,
        engine.like(schedule="independent", graphs="eager") as alone,
    ):
        took, taken = time.perf_counter() - start, free - torch.cuda.mem_get_info()[0]
        captured = engine._executor.captured
        assert captured is not None
        with capsys.disabled():
            print(f"\nwarmup=all: {len(captured.keys)} graphs in {took:.1f} s, {captured.bytes / 2**20:.0f} MiB of "
                  f"graphs, {taken / 2**20:.0f} MiB in all")  # fmt: skip
        before = keys(engine)
        assert set(before) == set(COVERING)
        assert len(before) <= 200
        for request in (TICKET, LONG, {**TICKET, "state": "A longer page. " * 300}):
            assert answers(engine, request) == answers(alone, request)
        assert not engine._executor.has_missed
        assert set(keys(engine)) == set(before)


def test_closing_gives_the_memory_back(cache_dir: str) -> None:
    with loaded(cache_dir) as first:  # what the process keeps: kernels, compiled code
        first.score(TICKET)
    gc.collect()
    start = torch.cuda.memory_allocated()
    engine = loaded(cache_dir)
    engine.score(LONG)
    engine.score(LONG)
    assert torch.cuda.memory_allocated() > start
    engine.close()
    gc.collect()
    assert torch.cuda.memory_allocated() == start


def test_a_fault_on_the_device_side_leaves_the_bits_of_a_fresh_engine(
    cache_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory for real, in the middle of a request."""
    with loaded(cache_dir) as engine:
        expected = answers(engine, TICKET)
        plain = Executor._forward

        def greedy(self: Executor, *arguments: Any) -> Tensor:
            plain(self, *arguments)
            return torch.empty(2**46, dtype=torch.uint8, device="cuda")

        with monkeypatch.context() as patch:
            patch.setattr(Executor, "_forward", greedy)
            with pytest.raises(InferenceError, match="OutOfMemoryError"):
                engine.score(LONG)
        assert answers(engine, TICKET) == expected


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_second_device_is_used_alone(cache_dir: str) -> None:
    with loaded(cache_dir, device="cuda:0") as engine:
        expected = [answers(engine, request) for request in (TICKET, LONG)]
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(0), torch.cuda.memory_reserved(0)
    torch.cuda.reset_peak_memory_stats(0)
    with loaded(cache_dir, device="cuda:1") as engine:
        for _ in range(2):
            assert [answers(engine, request) for request in (TICKET, LONG)] == expected
            assert keys(engine)
        assert torch.cuda.memory_allocated(1) > 0
        assert (torch.cuda.memory_allocated(0), torch.cuda.memory_reserved(0)) == before
        assert torch.cuda.max_memory_allocated(0) == before[0]
    assert torch.cuda.current_device() == 0


_LOST = """
import sys, time
import torch
from engine import DeviceLostError, Engine
options = dict(model="tiny", gemm="fixed", cache_dir=sys.argv[1])
with Engine.load(**options) as engine, engine.like(schedule="levels") as beside:
    engine.hidden_states([[1, 2, 3]])
    fault = engine._client.submit(lambda: torch.zeros(4, device="cuda")[torch.tensor([10**6], device="cuda")].cpu())
    waiting = beside._client.submit(lambda: 1)
    told, start = 0, time.perf_counter()
    for use in (fault.result, waiting.result, lambda: engine.hidden_states([[1]]), lambda: beside.settle(),
                lambda: engine.like(split="aligned"), lambda: Engine.load(**options)):
        try:
            use()
        except DeviceLostError as error:
            told += "cuda:0 is lost to this process" in str(error)
    print("told", told, "in time" if time.perf_counter() - start < 20 else "late")
print("closed")
"""


def test_a_device_that_is_lost_is_said_at_once_and_for_ever(cache_dir: str) -> None:
    """After an access outside memory no call of the process on that device succeeds; nobody waits for one either."""
    done = subprocess.run(
        [sys.executable, "-c", _LOST, cache_dir], capture_output=True, text=True, check=False, timeout=240,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.stdout.splitlines() == ["told 6 in time", "closed"], done.stderr[-2_000:]
