"""profiling/forward.py without a GPU: the workloads it makes, what it compares and records, and what fails."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "profiling"))  # scripts, not a package

import forward
import measure

from engine.load.dimensions import ModelDimensions
from engine.run.model import Backbone
from ops.linear import linear_fixed
from tests.support import random_backbone, small_config

SMALL = ModelDimensions.from_config(small_config())


def depends_on_rows(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Splits K for few rows, as a library may."""
    if x.shape[0] > 64:
        return linear_fixed(x, w)
    half = x.shape[1] // 2
    return linear_fixed(x[:, :half].contiguous(), w[:, :half].contiguous()) + linear_fixed(
        x[:, half:].contiguous(), w[:, half:].contiguous()
    )


def small_backbone(linear: Callable[..., torch.Tensor] = linear_fixed) -> Backbone:
    return random_backbone(small_config(), dtype=torch.float32, linear=linear)


class TestForward:
    def test_candidates_part_right_behind_the_prefix(self) -> None:
        [prompts] = forward.Workload.parse("70+5x3").questions(512)
        assert [len(p) for p in prompts] == [73] * 5
        assert len({tuple(p.token_ids[:70]) for p in prompts}) == 1
        assert len({p.token_ids[70] for p in prompts}) == 5

    def test_few_candidates_stand_for_all(self) -> None:
        w = forward.Workload.parse("3093+255x34")
        assert w.candidates_run("independent", 4) == 4
        assert w.candidates_run("batched", 4) == 4 * 16_384 // 3_127
        assert w.candidates_run("tree", 4) == 255
        assert forward.Workload.parse("278+8x34").candidates_run("batched", 4) == 8

    @pytest.fixture
    def arguments(self, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
        for name in ("reset_peak_memory_stats", "memory_allocated", "max_memory_allocated"):
            monkeypatch.setattr(torch.cuda, name, lambda: 0)
        monkeypatch.setattr(forward, "gemm_only_us", lambda *_, **__: [100.0])
        words = "--workloads 40,70+5x3 --few 2 --gemm fixed --repeats 1"
        return forward.parser().parse_args([*words.split(), "--graphs", "eager"])

    def test_workloads_are_run_compared_and_recorded(
        self, arguments: argparse.Namespace, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        weights, path = small_backbone().weights, tmp_path / "forward.jsonl"
        assert forward.run_workloads(weights, SMALL, arguments, measure.Results(path)) == 0
        records = [json.loads(line) for line in path.read_text().splitlines()]
        rows = {record["name"]: record["configuration"] for record in records}
        assert {name: c["candidates_run"] for name, c in rows.items()} == {
            "9b/40/fixed/independent/eager": 1,
            "9b/70+5x3/fixed/independent/eager": 2,
            "9b/70+5x3/fixed/batched/eager": 5,
            "9b/70+5x3/fixed/levels/eager": 5,
            "9b/70+5x3/fixed/tree/eager": 5,
        }
        assert all(c["equal"] == c["candidates_run"] for c in rows.values())
        assert rows["9b/70+5x3/fixed/tree/eager"]["rows"] == {"tree": 85}
        assert rows["9b/70+5x3/fixed/levels/eager"]["rows"] == {"prefix": 70, "branch": 15}
        assert all(len(record["samples_us"]) == 1 for record in records)
        assert "2 of 5" in capsys.readouterr().out

    def test_a_difference_under_fixed_is_an_error(
        self, arguments: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(forward.HANDLES, "fixed", depends_on_rows)
        arguments.schedules = ["independent", "levels"]
        assert forward.run_workloads(small_backbone().weights, SMALL, arguments, None) == 1

    def test_a_schedule_that_fails_leaves_the_others(
        self, arguments: argparse.Namespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        plan_of = forward.plan_of

        def failing(questions: forward.Questions, schedule: str, split: str = "exact") -> object:
            if schedule == "tree":
                raise ValueError("no tree today")
            return plan_of(questions, schedule, split)

        monkeypatch.setattr(forward, "plan_of", failing)
        arguments.schedules = ["levels", "tree"]
        assert forward.run_workloads(small_backbone().weights, SMALL, arguments, None) == 1
        out = capsys.readouterr().out
        assert "no tree today" in out
        assert "5/5" in out
