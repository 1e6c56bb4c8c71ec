"""Compiled and captured forwards on a GPU: the bits of eager ones, few compiles and graphs, steady memory."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from engine.plan.layout import build_layout
from engine.plan.schedule import BufferSizes, Limits, plan_passes
from engine.prompt import Prompt
from engine.run.executor import Executor
from engine.run.model import Backbone
from graphs.rungs import rung
from ops.linear import linear_fixed
from tests.support import prompts_of, random_backbone, run, small_config, tokens

pytestmark = pytest.mark.gpu

NINE_HEADS = {
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip
GRAPHS_BYTES = 2**30
"""Room for all graphs below, also while other processes allocate on the device."""
ROOM = BufferSizes(kv_rows=4_096, slots=17, states=17)
"""Larger than any request below, where buffers should stay where they are."""


@cache
def eager_backbone() -> Backbone:
    """Four layers with the heads of 9B."""
    return random_backbone({**small_config(hidden=1_024), **NINE_HEADS}, dtype=torch.bfloat16, device="cuda")


@cache
def eager() -> Executor:
    return Executor(eager_backbone())


@cache
def compiled_backbone() -> Backbone:
    plain = eager_backbone()
    return Backbone(plain.weights, plain.dimensions, linear_fixed, compile_layers=True)


@cache
def compiled() -> Executor:
    """Every compiled region has run once: prefixes without reads, and reads, of equal and different row counts."""
    executor = Executor(compiled_backbone())
    for prefix, count in ((70, 3), (200, 70)):
        run(executor, candidates(np.random.default_rng(prefix), prefix, [2] * count), schedule="levels")
    return executor


def captured() -> Executor:
    return Executor(eager_backbone(), capture_limit_bytes=GRAPHS_BYTES)


def keys(executor: Executor) -> tuple[tuple[int, int], ...]:
    assert executor.captured is not None
    return executor.captured.keys


def candidates(rng: np.random.Generator, prefix: int, lengths: list[int]) -> list[list[Prompt]]:
    """One question; its candidates part after `prefix` tokens."""
    head = tokens(rng, prefix)
    branches = [tokens(rng, length) for length in lengths]
    for i, branch in enumerate(branches):
        branch[0] = i
    return prompts_of([[(head, branch) for branch in branches]])


def random_request(rng: np.random.Generator, segments: int, *, three_levels: bool) -> list[list[Prompt]]:
    """About that many segments: a prefix, questions with prefixes of their own or not, and branches."""
    prefix = int(rng.integers(0, 700))
    if segments < 8 or not three_levels:
        return candidates(rng, prefix, rng.integers(1, 41, max(1, segments - 1)).tolist())
    head = tokens(rng, prefix)
    count = int(rng.integers(2, min(16, segments // 3) + 1))
    questions = []
    for q in range(count):
        own = tokens(rng, int(rng.integers(1, 150)))
        own[0] = q
        branches = [tokens(rng, int(rng.integers(1, 41))) for _ in range(max(2, segments // count - 1))]
        for i, branch in enumerate(branches):
            branch[0] = i
        questions.append([(head, own, branch) for branch in branches])
    return prompts_of(questions)


def test_eager_compiled_and_captured_forwards_have_the_bits_of_each_candidate_alone() -> None:
    rng = np.random.default_rng(0)
    replayed = captured()
    replayed.buffers.reserve(ROOM)
    sizes = np.geomspace(1, 300, 30).round().astype(int)
    for i, segments in enumerate(sizes.tolist()):
        questions = random_request(rng, segments, three_levels=i % 2 == 1)
        alone, _ = run(eager(), questions, schedule="independent")
        assert torch.isfinite(alone).all()
        for schedule, split in (("batched", "exact"), ("levels", "exact"), ("levels", "aligned"), ("tree", "exact")):
            for executor in (eager(), compiled()):
                found, _ = run(executor, questions, schedule=schedule, split=split)
                assert torch.equal(found, alone), (segments, schedule, split)
            if schedule == "batched":  # its passes are those of `levels` without snapshots
                continue
            missed, _ = run(replayed, questions, schedule=schedule, split=split)
            replayed.capture_missed()
            again, _ = run(replayed, questions, schedule=schedule, split=split)
            assert not replayed.has_missed
            assert torch.equal(missed, alone), (segments, schedule, split)
            assert torch.equal(again, alone), (segments, schedule, split)
    assert len(keys(replayed)) > 10


def test_many_lengths_need_no_recompile_and_one_graph_per_rung() -> None:
    executor, rng = captured(), np.random.default_rng(1)
    lengths = list(range(3, 3 + 64 * 9, 9))
    graphs_before = counters["stats"]["unique_graphs"]
    for length in lengths:
        prompt = [[Prompt(tokens(rng, length))]]
        first, _ = run(executor, prompt, schedule="levels")
        executor.capture_missed()
        assert torch.equal(first, run(executor, prompt, schedule="levels")[0])
    assert counters["stats"]["unique_graphs"] == graphs_before
    assert set(keys(executor)) == {(rung(length), rung(1)) for length in lengths}
    assert executor.captured is not None
    assert set(executor.captured.capture_seconds) == set(keys(executor)), "captured once each"


def test_a_pass_replays_a_larger_graph_where_its_own_is_missing() -> None:
    """Nothing is captured once the executor is sealed, and bits do not know which graph a pass went through."""
    executor, rng = captured(), np.random.default_rng(8)
    executor.seal(ROOM)
    executor.capture_keys([(128, 64), (512, 64), (1_024, 256)], longest=300)
    before = keys(executor)
    for prefix, lengths in ((40, [3]), (100, [64, 64]), (90, [2] * 70), (300, [20] * 10), (700, [60, 60])):
        questions = candidates(rng, prefix, lengths)
        expected, _ = run(eager(), questions, schedule="independent")
        for schedule in ("levels", "tree"):
            assert torch.equal(run(executor, questions, schedule=schedule)[0], expected), (prefix, schedule)
    large = candidates(rng, 1_200, [20, 20])
    expected, _ = run(eager(), large, schedule="independent")
    assert torch.equal(run(executor, large, schedule="tree")[0], expected), "a pass that no graph holds"
    assert not executor.has_missed
    assert keys(executor) != ()
    assert set(keys(executor)) == set(before)


@pytest.mark.parametrize("rows", [64, 1_000])
def test_no_graph_needs_the_compiler(rows: int) -> None:
    executor, before = captured(), counters["stats"]["unique_graphs"]
    run(executor, candidates(np.random.default_rng(8), rows, [20, 20]), schedule="levels")
    executor.capture_missed()
    assert keys(executor)
    assert counters["stats"]["unique_graphs"] == before


def test_one_graph_serves_every_tree_of_its_rung() -> None:
    executor, rng = captured(), np.random.default_rng(2)
    executor.buffers.reserve(ROOM)
    for prefix in (100, 97):  # rungs of 104 rows both
        for lengths in ([64, 64], [1, 127], [100, 28], [125, 3], [32] * 4, [1] * 60 + [68]):
            questions = candidates(rng, prefix, lengths)
            expected, _ = run(eager(), questions, schedule="levels")
            found, _ = run(executor, questions, schedule="levels")
            executor.capture_missed()
            assert torch.equal(found, expected), lengths
    assert set(keys(executor)) == {(rung(100), 0), (128, 64)}


def test_graphs_are_dropped_when_the_buffers_they_hold_grow() -> None:
    executor, rng = captured(), np.random.default_rng(3)
    requests = [candidates(rng, prefix, [20, 30]) for prefix in (100, 3_000, 100)]
    places = []
    for _ in range(2):
        for questions in requests:
            expected, _ = run(eager(), questions, schedule="levels")
            for _ in range(3):
                found, _ = run(executor, questions, schedule="levels")
                assert torch.equal(found, expected)
                executor.capture_missed()
                torch.cuda.empty_cache()
            places.append([t.data_ptr() for t in executor.buffers.tensors()])
    assert places[0] != places[1], "the buffers did not grow"
    assert places[1:] == [places[1]] * 5
    assert set(keys(executor)) == {(rung(100), 0), (rung(3_000), 0), (64, 64)}


def test_a_second_visit_of_all_rungs_takes_no_memory() -> None:
    executor, rng = captured(), np.random.default_rng(4)
    executor.buffers.reserve(ROOM)
    requests = [candidates(rng, prefix, [9, prefix]) for prefix in range(1_500, 30, -150)]
    expected = []
    for questions in requests:
        expected.append(run(executor, questions, schedule="levels")[0])
        executor.capture_missed()
    run(executor, requests[0], schedule="levels")  # tables and results find their place in the allocator's cache
    graphs, reserved = keys(executor), torch.cuda.memory_reserved()
    for questions, first in zip(requests, expected, strict=True):
        found, _ = run(executor, questions, schedule="levels")
        assert torch.equal(found, first)
        executor.capture_missed()
    assert torch.cuda.memory_reserved() <= reserved
    assert set(keys(executor)) == set(graphs)


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("no room for a graph")


@pytest.mark.parametrize("fault", [out_of_memory, torch.cuda.synchronize], ids=["raised", "invalid capture"])
def test_a_failed_capture_leaves_the_eager_forward_in_charge(
    fault: Callable[[], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    executor, rng = captured(), np.random.default_rng(5)
    questions = candidates(rng, 100, [20, 30])
    expected, _ = run(executor, questions, schedule="levels")
    assert executor.captured is not None
    forward = executor.captured._forward

    def fails(tables: Tensor, rows: int, reads: int) -> Tensor:
        hidden = forward(tables, rows, reads)
        fault()
        return hidden

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "forkgraph"):
        patch.setattr(executor.captured, "_forward", fails)
        for attempt in range(3):
            assert executor.has_missed, "a capture that failed is tried again behind the next pass"
            executor.capture_missed()
            found, _ = run(executor, questions, schedule="levels")
            assert torch.equal(found, expected), attempt
    assert keys(executor) == ()
    assert caplog.text.count("the next such pass tries again") == 4
    assert caplog.text.count("it runs uncaptured") == 2
    assert not executor.has_missed, "a capture that always fails is given up"
    torch.cuda.empty_cache()  # which a capture that is left open would forbid
    other = candidates(rng, 300, [200, 100])
    before, _ = run(executor, other, schedule="levels")
    executor.capture_missed()
    assert set(keys(executor)) == {(rung(300), 0), (rung(300), 64)}
    assert torch.equal(run(executor, other, schedule="levels")[0], before)
    assert torch.equal(run(executor, questions, schedule="levels")[0], expected)


def test_graphs_among_the_garbage_of_others_do_not_break_a_capture() -> None:
    rng = np.random.default_rng(7)
    questions = candidates(rng, 100, [20, 30])
    expected, _ = run(eager(), questions, schedule="levels")
    garbage: list[Any] = [captured()]
    run(garbage[0], questions, schedule="levels")
    garbage[0].capture_missed()
    assert keys(garbage[0])
    executor = captured()
    run(executor, questions, schedule="levels")
    garbage.append(garbage)
    thresholds = gc.get_threshold()
    del garbage
    gc.set_threshold(1)
    try:
        executor.capture_missed()
    finally:
        gc.set_threshold(*thresholds)
    assert len(keys(executor)) == 2
    assert torch.equal(run(executor, questions, schedule="levels")[0], expected)


def test_one_copy_of_tables_and_one_synchronisation_per_request(monkeypatch: pytest.MonkeyPatch) -> None:
    executor, rng = captured(), np.random.default_rng(6)
    questions = random_request(rng, 30, three_levels=True)
    plan = plan_passes(build_layout(questions, "exact"), schedule="levels", pack="all", limits=Limits())
    assert len(plan.passes) == 3
    for _ in range(2):
        expected, _ = executor.run(plan)
        executor.capture_missed()
    uploads = []
    plain = Tensor.to

    def counted(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
        moved = plain(tensor, *arguments, **options)
        if moved.is_cuda and not tensor.is_cuda:
            uploads.append(tuple(tensor.shape))
        return moved

    for one in (executor, compiled()):  # replayed, and launched one by one
        one.run(plan)
        torch.cuda.synchronize()
        uploads.clear()
        with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            patch.setattr(Tensor, "to", counted)
            torch.cuda.set_sync_debug_mode("warn")
            try:
                found, _ = one.run(plan)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert len(uploads) == 1
        assert sum("called a synchronizing CUDA operation" in str(w.message) for w in seen) == 1, [
            str(w.message) for w in seen
        ]
        assert torch.equal(found, expected)
