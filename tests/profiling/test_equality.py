"""The comparison of bits without a GPU: the requests it makes, what it counts, and that it can find a difference."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "profiling"))  # scripts, not a package

import equality
import forward

from engine.errors import InferenceError
from engine.plan.layout import build_layout
from engine.run.executor import Executor
from ops.linear import linear_fixed
from tests.support import random_backbone, small_config


def executors(linear: Callable[..., Tensor] = linear_fixed) -> dict[str, Executor]:
    backbone = random_backbone(small_config(), dtype=torch.float32, linear=linear)
    return {"eager": Executor(backbone), "again": Executor(backbone)}


def depends_on_rows(x: Tensor, weight: Tensor) -> Tensor:
    return linear_fixed(x, weight) * (1 + x.shape[0] / 2**16)


def counted(requests: list[forward.Questions], executors: dict[str, Executor]) -> list[equality.Cell]:
    cells = equality.cells_of(executors)
    assert equality.equality(requests, executors, cells) == (len(requests), 0)
    return cells


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_trees_have_the_levels_asked_for(levels: int) -> None:
    plan = forward.plan_of(equality.tree_of(levels, 65, (1, 5), 512), "levels")
    kinds = ["branch", "prefix", "question"]
    assert {one.kind for one in plan.passes} == set(kinds[:levels])
    if levels > 1:
        assert plan.passes[0].rows == 65


def test_random_layouts_span_sizes_and_levels() -> None:
    layouts = [build_layout(questions, "exact") for questions in equality.random_layouts(512, 40)]
    sizes = [len(layout.segments) for layout in layouts]
    assert min(sizes) == 1
    assert 250 <= max(sizes) <= equality.MOST_SEGMENTS + 32
    assert any(layout.question_prefix_tokens for layout in layouts)
    assert any(layout.request_prefix_tokens and not layout.question_prefix_tokens for layout in layouts)
    assert (
        max(len(p) for questions in equality.random_layouts(512, 40) for q in questions for p in q) <= equality.LONGEST
    )


def test_every_candidate_of_every_way_is_counted() -> None:
    requests = list(equality.matrix(512, prefixes=(2, 65), lengths=(1, 65)))
    cells = counted(requests, executors())
    assert [(c.graphs, c.schedule, c.split) for c in cells] == [
        (graphs, *way) for graphs in ("eager", "again") for way in equality.WAYS
    ]
    assert {(c.equal, c.differing) for c in cells} == {(2 * (2 + 2 + 4), 0)}


def test_a_tree_too_large_for_a_pass_is_counted_apart() -> None:
    branches = forward.siblings(np.random.default_rng(0), [], (1_200,) * 14, 512)
    cells = counted([[branches[:1]], [branches]], {"eager": executors()["eager"]})
    assert {c.schedule: (c.equal, c.differing, c.too_large) for c in cells} == {
        "batched": (15, 0, 0), "levels": (15, 0, 0), "tree": (1, 0, 1)
    }  # fmt: skip


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (InferenceError("out of memory"), 1)])
def test_what_was_done_before_it_ended_is_counted(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    requests, done = list(equality.matrix(512, prefixes=(2,), lengths=(1, 65))), []

    def ended(*arguments: Any) -> Any:
        done.append(arguments)
        if len(done) == 9:
            raise error
        return forward.plan_of(*arguments)

    monkeypatch.setattr(equality, "plan_of", ended)
    own = {"eager": executors()["eager"]}
    cells = equality.cells_of(own)
    assert equality.equality(requests, own, cells) == (1, code)
    assert str(error) in capsys.readouterr().err
    record = equality.record_of(cells, "tiny", "fixed", "matrix", 1.0)
    assert (record.configuration["equal"], record.configuration["differing"]) == (2 * 5 + 2, 0), (
        "the second request by one way"
    )


def test_a_product_that_knows_the_number_of_rows_is_seen() -> None:
    requests = list(equality.matrix(512, prefixes=(65,), lengths=(1, 5)))
    cells = counted(requests, executors(depends_on_rows))
    assert sum(cell.differing for cell in cells) > 0
