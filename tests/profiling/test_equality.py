"""The comparison of bits without a GPU: requests it makes, what it counts, and that it finds a planted difference."""

from __future__ import annotations

from typing import Any

import forwards
import numpy as np
import pytest
import torch
from bench_options import BenchConfig
from cases import equality
from cases.equality import Depth

from engine.config import EngineConfig
from engine.errors import ConfigError, InferenceError
from engine.plan.layout import build_layout
from engine.run.executor import Executor
from engine.run.model import Linear
from ops.linear import linear_fixed
from tests.engine.engine_support import cache_dir
from tests.support import random_backbone, small_config

HANDLES = [("fixed", "eager"), ("fixed", "again")]


def depth_of(linear: Linear = linear_fixed) -> Depth:
    backbone = random_backbone(small_config(), dtype=torch.float32, linear=linear)
    executors = {handle: Executor(backbone) for handle in HANDLES}
    return Depth(alone=Executor(backbone), executors=executors, cells=equality.cells_of("matrix", HANDLES))


def depends_on_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return linear_fixed(x, weight) * (1 + x.shape[0] / 2**16)


def compared(requests: list[forwards.Questions], depth: Depth, seconds: float = 600) -> int:
    return equality.compare_all([(depth, questions) for questions in requests], HANDLES, seconds=seconds)


def test_random_layouts_span_sizes_and_levels() -> None:
    requests = list(equality.random_layouts(512, 40))
    layouts = [build_layout(questions, "exact") for questions in requests]
    sizes = [len(layout.segments) for layout in layouts]
    assert min(sizes) == 1
    assert 250 <= max(sizes) <= equality.MOST_SEGMENTS + 32
    assert any(layout.question_prefix_tokens for layout in layouts)
    assert any(layout.request_prefix_tokens and not layout.question_prefix_tokens for layout in layouts)
    assert max(len(p) for questions in requests for q in questions for p in q) <= equality.LONGEST


def test_every_candidate_of_every_way_is_counted() -> None:
    requests, depth = equality.matrix(512, prefixes=(2, 65), lengths=(1, 65)), depth_of()
    assert compared(requests, depth) == 2 * len(requests)
    assert {(c.requests, c.equal, c.differing) for c in depth.cells} == {(6, 2 * (2 + 2 + 4), 0)}


def test_each_request_is_run_once_before_any_is_run_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    requests, depth, clock = equality.matrix(512, prefixes=(2, 3), lengths=(1,)), depth_of(), iter(range(100))
    monkeypatch.setattr(equality.time, "perf_counter", lambda: next(clock))
    assert compared(requests, depth, seconds=len(requests) + 0.5) == len(requests)
    assert {c.requests for c in depth.cells} == {len(requests) // 2}, "handles take turns"


def test_a_tree_too_large_for_a_pass_is_counted_apart() -> None:
    depth, branches = depth_of(), forwards.siblings(np.random.default_rng(0), [], (1_200,) * 14, 512)
    depth.compare(HANDLES[0], [branches], torch.zeros(14, 64))
    too_large = {c.schedule: c.too_large for c in depth.cells if c.graphs == "eager"}
    assert too_large == {"batched": 0, "levels": 0, "tree": 1}


def test_the_case_runs_on_the_tiny_model_and_fails_with_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    config = BenchConfig(device="cpu", cache_dir=cache_dir().name, random=1, layers=3)
    monkeypatch.setattr(equality, "matrix", lambda vocabulary: [equality.tree_of(2, 65, (1, 5), vocabulary)])
    assert [r.failed for r in equality.measure(config)] == [""] * 10
    monkeypatch.setitem(forwards.HANDLES, "fixed", depends_on_rows)
    assert any(r.failed for r in equality.measure(config))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), InferenceError("out of memory")])
def test_what_was_done_before_it_ended_is_counted(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, num_equal = [], forwards.num_equal

    def ended(*arguments: Any) -> int:
        calls.append(arguments)
        if len(calls) == 4:
            raise error
        return num_equal(*arguments)

    monkeypatch.setattr(equality, "num_equal", ended)
    monkeypatch.setattr(equality, "matrix", lambda vocabulary: [equality.tree_of(2, 65, (1, 5), vocabulary)])
    records = iter(equality.measure(BenchConfig(device="cpu", cache_dir=cache_dir().name, random=0)))
    assert [next(records).configuration["equal"] for _ in equality.WAYS] == [2, 2, 2, 0, 0]
    with pytest.raises(type(error)):
        next(records)


def test_options_narrow_what_is_compared() -> None:
    gpu = EngineConfig(device="cuda:0", gemm="tuned")
    pairs = equality.handles_of(BenchConfig(), gpu)
    every = {(g, k) for g in ("fixed", "tuned") for k in ("eager", "compiled", "captured")}
    assert set(pairs) == every - {("fixed", "compiled")}
    assert pairs[-1] == ("tuned", "captured")
    assert equality.handles_of(BenchConfig(gemm="fixed", graphs="compiled"), gpu) == [("fixed", "compiled")]
    assert equality.handles_of(BenchConfig(), EngineConfig(device="cpu", gemm="fixed")) == [("fixed", "eager")]
    assert {c.schedule for c in equality.cells_of("matrix", pairs, "tree")} == {"tree"}
    with pytest.raises(ConfigError, match="promises no equal bits"):
        equality.handles_of(BenchConfig(gemm="default"), gpu)
