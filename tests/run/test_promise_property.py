"""The promise as one property: in whatever company and order, a candidate's hidden states are those it has alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import engine.plan.layout
from engine.errors import CapacityError
from engine.plan.layout import Layout, build_layout, independent_layout
from engine.plan.schedule import Limits, Plan, _Planner, plan_passes
from engine.run.executor import Executor
from ops.tables import SegmentEntry, Source
from tests.strategies import SPLITS, Questions, limited_requests
from tests.support import random_backbone, small_config

Ways = tuple[tuple[str, str], ...]
"""(schedule, pack) each."""


@dataclass(frozen=True, kw_only=True)
class Work:
    questions: Questions
    ways: Ways
    limits: Limits
    split: str
    question_prefixes: bool
    dtype: torch.dtype


_WHOLE = (("independent", "all"), ("batched", "all"))
_LEVELS = (("levels", "all"), ("levels", "all"), ("levels", "one"))


@st.composite
def works(draw: st.DrawFn) -> Work:
    questions, limits = draw(limited_requests(most_questions=3, most_rows=900))
    return Work(
        questions=questions,
        ways=(draw(st.sampled_from(_WHOLE)), draw(st.sampled_from(_LEVELS)), ("tree", "all")),
        limits=limits,
        split=draw(st.sampled_from(SPLITS)),
        question_prefixes=draw(st.sampled_from([True, True, False])),
        dtype=draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16])),
    )


@cache
def executor(dtype: torch.dtype) -> Executor:
    """One for all examples: what earlier requests left in its buffers must not matter either."""
    return Executor(random_backbone(small_config(), dtype=dtype))


def alone(work: Work) -> list[torch.Tensor]:
    """Hidden states [reads, h] of each candidate as the only one of its request."""
    plans = [
        plan_passes(independent_layout([[prompt]]), schedule="independent", pack="all", limits=Limits())
        for candidates in work.questions
        for prompt in candidates
    ]
    return [executor(work.dtype).run(plan)[0][list(plan.reads_of_prompt[0])] for plan in plans]


def laid_out(work: Work, schedule: str) -> Layout:
    if schedule in ("independent", "batched"):
        return independent_layout(work.questions)
    return build_layout(work.questions, work.split, question_prefixes=work.question_prefixes)  # type: ignore[arg-type]


def planned(work: Work, schedule: str, pack: str) -> Plan:
    """Within the limits; a tree that is too large for them has the largest pass instead."""
    layout = laid_out(work, schedule)
    try:
        return plan_passes(layout, schedule=schedule, pack=pack, limits=work.limits)
    except CapacityError:
        assert schedule == "tree"
        return plan_passes(layout, schedule=schedule, pack=pack, limits=Limits())


def check(work: Work) -> None:
    expected = alone(work)
    for schedule, pack in work.ways:
        plan = planned(work, schedule, pack)
        hidden, _ = executor(work.dtype).run(plan)
        for places, reference in zip(plan.reads_of_prompt, expected, strict=True):
            assert torch.equal(hidden[list(places)], reference), (schedule, pack)
            assert torch.isfinite(reference).all()


@settings(max_examples=100, derandomize=True, deadline=None)
@given(works())
def test_every_candidate_has_the_bits_it_has_alone(work: Work) -> None:
    check(work)


# Controls: each plants one fault, which must break the property.


def _branches(change: Callable[[_Planner, SegmentEntry], SegmentEntry]) -> Callable[[pytest.MonkeyPatch], None]:
    """Branches of `levels` whose entry is not the right one."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        right = _Planner.branch_entry
        monkeypatch.setattr(_Planner, "branch_entry", lambda self, *place: change(self, right(self, *place)))

    return plant


def _moved(space: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Rows of prefixes are looked for one row before their own."""

    def moved(source: Source | None) -> Source | None:
        return source and replace(source, **{space: getattr(source, space) - 1})

    return _branches(lambda _, entry: replace(entry, request=moved(entry.request), question=moved(entry.question)))


def _state_of_another_prefix(planner: _Planner, entry: SegmentEntry) -> SegmentEntry:
    """Only where a question has a state of its own beside the request's, or beside another question's."""
    return replace(entry, state_read=(entry.state_read + 1) % planner.sizes.states if entry.state_read >= 0 else -1)


def _no_tail_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of an open chunk count for nothing in a child's first chunk."""
    forward = Executor._forward

    def forgetting(self: Executor, block: torch.Tensor, one: Any) -> torch.Tensor:
        hidden = forward(self, block, one)
        for layer in self.buffers.layers:
            for name in ("tail_kv", "tail_gates"):
                if hasattr(layer, name):
                    getattr(layer, name).zero_()
        return hidden

    monkeypatch.setattr(Executor, "_forward", forgetting)


def _too_long_a_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates share the token at which they part."""
    right = engine.plan.layout._common_prefix

    def wrong(prompts: Any) -> int:
        return min(right(prompts) + 1, min(map(len, prompts)) - 1)

    monkeypatch.setattr(engine.plan.layout, "_common_prefix", wrong)


def _swapped_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two reads of a pass change places."""
    emit = _Planner.emit

    def wrong(self: _Planner, kind: str, members: Any) -> None:
        emit(self, kind, members)
        last = self.passes[-1]
        first, rest = last.outputs[:2], last.outputs[2:]
        self.passes[-1] = replace(last, outputs=first[::-1] + rest)

    monkeypatch.setattr(_Planner, "emit", wrong)


@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(_moved("kv"), id="keys-of-the-position-before"),
        pytest.param(_moved("chunk"), id="tail-of-the-row-before"),
        pytest.param(_moved("conv"), id="history-of-the-row-before"),
        pytest.param(_no_tail_replay, id="no-tail-replay"),
        pytest.param(_branches(_state_of_another_prefix), id="state-of-another-prefix"),
        pytest.param(_too_long_a_prefix, id="prefix-beyond-the-parting"),
        pytest.param(_swapped_reads, id="reads-out-of-order"),
    ],
)
def test_a_fault_breaks_the_property(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)

    @settings(max_examples=80, derandomize=True, deadline=None, phases=[Phase.generate], report_multiple_bugs=False)
    @given(works())
    def every_candidate_has_its_bits(work: Work) -> None:
        check(work)

    with pytest.raises(AssertionError):
        every_candidate_has_its_bits()
