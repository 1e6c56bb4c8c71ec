"""Whole requests on the tiny model: what is run, compared and recorded, and what fails."""

from __future__ import annotations

from typing import Any

import forwards
import pytest
import torch
from bench_options import BenchConfig
from cases import forward
from forwards import Workload
from record import Record

from ops.linear import linear_fixed
from tests.engine.engine_support import cache_dir


def measured(**options: Any) -> dict[str, Record]:
    options = {"workloads": ["70+5x3"], "samples": 1, "few": 2, "device": "cpu"} | options
    options["cache_dir"] = cache_dir().name
    return {record.name: record for record in forward.measure(BenchConfig(case="forward", **options))}


def test_candidates_part_right_behind_the_prefix() -> None:
    prompts = Workload.parse("70+5x3").prompts(512)
    assert [len(p) for p in prompts] == [73] * 5
    assert len({tuple(p.token_ids[:70]) for p in prompts}) == 1
    assert len({p.token_ids[70] for p in prompts}) == 5


def test_few_candidates_stand_for_all() -> None:
    w = Workload.parse("3093+255x34")
    assert [w.candidates_run(s, 4) for s in ("independent", "batched", "tree")] == [4, 16_384 // 3_127, 255]
    assert w.unique_rows == 11_763


def test_every_schedule_is_run_through_the_executor_and_the_engine() -> None:
    records = measured(workloads=["40", "70+5x3"])
    assert not any(r.failed for r in records.values())
    for through in forward.THROUGH:
        assert {n: r.configuration["candidates_run"] for n, r in records.items() if n.endswith(through)} == {
            f"tiny/40/independent/{through}": 1,
            f"tiny/70+5x3/independent/{through}": 2,
            f"tiny/70+5x3/batched/{through}": 5,
            f"tiny/70+5x3/levels/{through}": 5,
            f"tiny/70+5x3/tree/{through}": 5,
        }
        levels = records[f"tiny/70+5x3/levels/{through}"]
        assert levels.configuration["rows"] == {"prefix": 70, "branch": 15}
        assert (levels.configuration["equal"], len(levels.samples_us)) == (5, 1)
    few = records["tiny/70+5x3/independent/engine"]
    assert few.configuration["whole_us"] == few.us * 5 / 2


def test_a_difference_is_found_and_a_tree_that_is_too_large_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def knows_rows(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return linear_fixed(x, w) * (1 + x.shape[0] / 2**16)

    monkeypatch.setitem(forwards.HANDLES, "fixed", knows_rows)
    records = measured(workloads=["70+5x40"], schedule="levels")
    assert "5 of 5 candidates have other bits" in {r.failed for r in records.values()}


def test_a_schedule_that_cannot_run_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_of = forward.plan_of

    def failing(questions: forwards.Questions, schedule: str, split: Any) -> object:
        if schedule == "tree":
            raise ValueError("no tree today")
        return plan_of(questions, schedule, split)

    monkeypatch.setattr(forward, "plan_of", failing)
    failed = {name: r.failed for name, r in measured().items() if r.failed}
    assert failed == {"tiny/70+5x3/tree/executor": "ValueError: no tree today"}
