"""Plans against a machine that follows their tables row by row and knows what every place holds."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import CapacityError
from engine.plan.layout import Layout, build_layout, independent_layout
from engine.plan.schedule import BufferSizes, Limits, Pass, Plan, plan_passes
from engine.prompt import Prompt
from ops.sizes import CHUNK, CONV_HISTORY
from ops.tables import (
    MAX_SEGMENTS,
    PACKED,
    SEG_CHUNK_OWN,
    SEG_CHUNK_QUESTION,
    SEG_CHUNK_REQUEST,
    SEG_CONV_OWN,
    SEG_CONV_QUESTION,
    SEG_CONV_REQUEST,
    SEG_KV_OWN,
    SEG_KV_QUESTION,
    SEG_KV_REQUEST,
    SEG_KV_WRITE,
    SEG_SLOT_WRITE,
    SEG_STATE_READ,
    SEG_STATE_WRITE,
    TABLE_WORDS,
    HostTables,
    fill,
    virtual_rows,
)
from tests.strategies import SCHEDULES, SPLITS, limited_requests, requests

KV = (SEG_KV_REQUEST, SEG_KV_QUESTION, SEG_KV_OWN)
TAIL = (SEG_CHUNK_REQUEST, SEG_CHUNK_QUESTION, SEG_CHUNK_OWN)
CONV = (SEG_CONV_REQUEST, SEG_CONV_QUESTION, SEG_CONV_OWN)

Held = tuple[int, int]
"""What a place holds: (segment that position p of a path belongs to, p). It fixes all tokens up to p."""

block = np.empty(TABLE_WORDS, np.int32)


@dataclass
class Machine:
    """Runs a plan on names instead of numbers. A place that is read must hold what the reader's path asks for."""

    layout: Layout
    kv: dict[int, Held] = field(default_factory=dict)
    tails: dict[int, Held] = field(default_factory=dict)
    history: dict[int, Held] = field(default_factory=dict)
    states: dict[int, Held] = field(default_factory=dict)
    ran: list[int] = field(default_factory=list)
    read: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.segment_of = {id(s.token_ids): i for i, s in enumerate(self.layout.segments)}

    def at(self, segment: int, position: int) -> Held:
        """The name of a position on the path of `segment`."""
        while position < self.layout.segments[segment].start:
            parent = self.layout.segments[segment].parent
            assert parent is not None
            segment = parent
        return segment, position

    def run(self, one: Pass) -> None:
        rows = fill(block, one.entries, one.reads)
        tables = HostTables(block)
        members = [self.segment_of[id(entry.token_ids)] for entry in one.entries]
        packed = [(s, p) for s in members for p in range(self.layout.segments[s].start, self.layout.segments[s].end)]
        assert rows == len(packed) == one.rows
        fields = [tables.segment(i) for i in range(len(members))]
        for s, of in zip(members, fields, strict=True):
            start = self.layout.segments[s].start
            self.check(s, range(start), of, KV, self.kv, packed)
            self.check(s, range(start - start % CHUNK, start), of, TAIL, self.tails, packed)
            self.check(s, range(max(0, start - CONV_HISTORY), start), of, CONV, self.history, packed)
        internal = [entry.internal for entry in one.entries]
        assert internal == sorted(internal, reverse=True)
        for s, of in zip(members, fields, strict=True):  # in order: an entry may read a state written by one before
            start, end = self.layout.segments[s].start, self.layout.segments[s].end
            border = start - start % CHUNK
            if border:
                assert self.states[of[SEG_STATE_READ]] == self.at(s, border - 1)
            else:
                assert of[SEG_STATE_READ] == -1
            if of[SEG_STATE_WRITE] >= 0:
                border = end - end % CHUNK
                assert border > start - 1
                self.states[of[SEG_STATE_WRITE]] = self.at(s, border - 1)
        for s, of in zip(members, fields, strict=True):
            start, end = self.layout.segments[s].start, self.layout.segments[s].end
            if of[SEG_KV_WRITE] >= 0:
                self.kv |= {p + of[SEG_KV_WRITE]: (s, p) for p in range(start, end)}
            if (slot := of[SEG_SLOT_WRITE]) >= 0:
                own = range(max(start, end - end % CHUNK), end)  # earlier rows of the chunk stay in the parent's slot
                self.tails |= {slot * CHUNK + p % CHUNK: (s, p) for p in own}
                last = range(max(0, end - CONV_HISTORY), end)
                self.history |= {slot * CONV_HISTORY + CONV_HISTORY - (end - p): self.at(s, p) for p in last}
        self.ran += members
        self.read += [(members[i], row) for i, row in one.reads]

    def check(
        self,
        s: int,
        positions: range,
        fields: tuple[int, ...],
        space: tuple[int, int, int],
        snapshot: dict[int, Held],
        packed: list[Held],
    ) -> None:
        rows = virtual_rows(np.array(positions, np.int64), fields, *space)
        for p, row in zip(positions, rows.tolist(), strict=True):
            found = packed[row - PACKED] if row >= PACKED else snapshot[row]
            assert found == self.at(s, p), (s, p)


def followed(layout: Layout, plan: Plan) -> Machine:
    """The machine after the whole plan; every segment ran once, and every prompt finds its reads."""
    machine = Machine(layout)
    for one in plan.passes:
        machine.run(one)
    assert sorted(machine.ran) == list(range(len(layout.segments)))
    outputs = [place for one in plan.passes for place in one.outputs]
    assert sorted(outputs) == list(range(plan.num_reads))
    row_of = dict(zip(outputs, machine.read, strict=True))
    assert [tuple(row_of[place] for place in places) for places in plan.reads_of_prompt] == list(layout.reads)
    return machine


def largest(plan: Plan) -> BufferSizes:
    """Sizes that the entries of a plan address."""
    entries = [entry for one in plan.passes for entry in one.entries]
    return BufferSizes(
        kv_rows=max(e.kv_write + e.end if e.kv_write >= 0 else 0 for e in entries),
        slots=max(e.slot_write + 1 for e in entries),
        states=max(e.state_write + 1 for e in entries),
    )


def laid_out(questions: list[list[Prompt]], schedule: str, split: str = "exact") -> Layout:
    return independent_layout(questions) if schedule in SCHEDULES[:2] else build_layout(questions, split)  # type: ignore[arg-type]


def ids(*parts: list[int]) -> Prompt:
    return Prompt(np.array(list(chain(*parts)), np.int32))


@settings(max_examples=120, deadline=None)
@given(limited_requests(), st.sampled_from(SCHEDULES[:3]), st.sampled_from(SPLITS))
def test_every_segment_runs_once_within_the_limits_and_finds_what_it_reads(limited, schedule, split):
    questions, limits = limited
    layout = laid_out(questions, schedule, split)
    plan = plan_passes(layout, schedule=schedule, pack="all", limits=limits)
    followed(layout, plan)
    assert plan.buffers == largest(plan)
    assert plan.rows == layout.unique_rows
    kinds = [one.kind for one in plan.passes]
    assert kinds.count("prefix") == (layout.request_prefix_tokens > 0)
    assert kinds[0] == "prefix" or "prefix" not in kinds
    alive = 0
    for one in plan.passes:
        assert one.rows <= limits.rows
        assert 1 <= len(one.entries) <= (1 if schedule == "independent" else limits.segments)
        assert sum(e.num_chunks for e in one.entries) <= limits.chunks
        assert len(one.reads) <= limits.reads
        alive = alive + len(one.entries) if one.kind == "question" else 0
        assert alive <= limits.question_snapshots
    assert plan.buffers.slots <= 1 + limits.question_snapshots


@settings(max_examples=60, deadline=None)
@given(requests(), st.sampled_from(SPLITS))
def test_a_tree_is_one_pass_with_parents_before_children(questions, split):
    layout = laid_out(questions, "tree", split)
    plan = plan_passes(layout, schedule="tree", pack="all", limits=Limits())
    machine = followed(layout, plan)
    [one] = plan.passes
    assert one.kind == "tree"
    place = {s: i for i, s in enumerate(machine.ran)}
    internal = {machine.ran[i] for i, e in enumerate(one.entries) if e.internal}
    states = {e.state_write for e in one.entries if e.state_write >= 0}
    assert plan.buffers == BufferSizes(states=len(states)) == largest(plan)
    for s in internal:
        parent = layout.segments[s].parent
        if parent in internal:
            assert place[parent] < place[s]
    if len(one.entries) > 1:
        parents = {s.parent for s in layout.segments}
        crossing = {
            i for i, s in enumerate(layout.segments) if i in parents and s.end // CHUNK > s.start // CHUNK
        }  # fmt: skip
        assert internal == crossing


@settings(max_examples=40, deadline=None)
@given(requests(), st.integers(1, 3))
def test_one_by_one_runs_each_branch_in_a_pass_of_its_own(questions, snapshots):
    layout = laid_out(questions, "levels")
    plan = plan_passes(layout, schedule="levels", pack="one", limits=Limits(question_snapshots=snapshots))
    followed(layout, plan)
    assert [len(one.entries) for one in plan.passes if one.kind == "branch"] == [1] * layout.num_prompts


def test_a_machine_that_misses_a_write_is_caught() -> None:
    """The reference can fail: another slot, another row, another state, a pass too early."""
    questions = [[ids(list(range(1, 101)), [200 + q] * 70, [300 + c, 7]) for c in range(2)] for q in range(2)]
    layout = laid_out(questions, "levels")
    plan = plan_passes(layout, schedule="levels", pack="all", limits=Limits())
    followed(layout, plan)
    prefix, question, branch = plan.passes
    for name in ("slot_write", "kv_write", "state_write"):
        moved = tuple(replace(e, **{name: getattr(e, name) + 1}) for e in question.entries)
        machine = Machine(layout)
        machine.run(prefix)
        machine.run(Pass(kind="question", entries=moved, reads=question.reads, outputs=question.outputs))
        with pytest.raises((AssertionError, KeyError)):
            machine.run(branch)
    machine = Machine(layout)
    machine.run(prefix)
    with pytest.raises((AssertionError, KeyError)):
        machine.run(branch)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_segment_alone_in_its_pass_takes_the_scan_of_internal_ones(schedule: str) -> None:
    layout = laid_out([[ids([1, 2, 3])]], schedule)
    plan = plan_passes(layout, schedule=schedule, pack="all", limits=Limits())
    [one] = plan.passes
    assert [e.internal for e in one.entries] == [True]
    assert one.kind == ("tree" if schedule == "tree" else "branch")
    assert plan.buffers == BufferSizes()
    together = plan_passes(
        laid_out([[ids([1])], [ids([2])]], schedule), schedule="batched", pack="all", limits=Limits()
    )
    assert [e.internal for e in together.passes[0].entries] == [False, False]


def test_many_questions_of_one_candidate_run_in_few_full_passes() -> None:
    state = list(range(1, 41))
    questions = [[ids(state, [1_000 + q, 1, 2])] for q in range(4_096)]
    layout = laid_out(questions, "levels")
    plan = plan_passes(layout, schedule="levels", pack="all", limits=Limits())
    assert [(one.kind, len(one.entries), one.rows) for one in plan.passes] == [
        ("prefix", 1, 40), *[("branch", MAX_SEGMENTS, 3 * MAX_SEGMENTS)] * 8,
    ]  # fmt: skip
    assert plan.buffers == BufferSizes(kv_rows=40, slots=1, states=0)
    followed(layout, plan)


def test_questions_with_prefixes_run_in_waves_over_the_same_places() -> None:
    state = list(range(1, 71))
    questions = [[ids(state, [1_000 + q] * 60, [2_000 + c]) for c in range(2)] for q in range(40)]
    layout = laid_out(questions, "levels")
    plan = plan_passes(layout, schedule="levels", pack="all", limits=Limits(question_snapshots=16))
    assert [(one.kind, len(one.entries)) for one in plan.passes] == [
        ("prefix", 1), ("question", 16), ("branch", 32), ("question", 16), ("branch", 32), ("question", 8),
        ("branch", 16),
    ]  # fmt: skip
    assert plan.buffers == BufferSizes(kv_rows=70 + 16 * 60, slots=17, states=17)
    followed(layout, plan)


def test_prefixes_that_cross_no_border_own_no_state() -> None:
    state = list(range(1, 71))
    questions = [[ids(state, [1_000 + q] * 9, [2_000 + c]) for c in range(2)] for q in range(3)]
    plan = plan_passes(laid_out(questions, "levels"), schedule="levels", pack="all", limits=Limits())
    assert plan.buffers == BufferSizes(kv_rows=70 + 3 * 9, slots=4, states=1)


@pytest.mark.parametrize("schedule", SCHEDULES[:3])
def test_a_segment_larger_than_a_pass_is_refused_with_both_figures(schedule: str) -> None:
    layout = laid_out([[ids(list(range(100)))]], schedule)
    with pytest.raises(CapacityError, match="a segment has 100 rows and 1 reads; a pass holds 99 and 1024"):
        plan_passes(layout, schedule=schedule, pack="all", limits=Limits(rows=99))
    reads = Prompt(np.arange(100, dtype=np.int32), tuple(range(20)))
    with pytest.raises(CapacityError, match="a segment has 100 rows and 20 reads; a pass holds 16384 and 19"):
        plan_passes(laid_out([[reads]], schedule), schedule=schedule, pack="all", limits=Limits(reads=19))


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        (Limits(rows=395), "396 rows where 395 fit"),
        (Limits(segments=7), "8 segments where 7 fit"),
        (Limits(chunks=10), "11 chunks where 10 fit"),
        (Limits(reads=4), "5 reads where 4 fit"),
        (Limits(question_snapshots=1), "3 states where 2 fit"),
        (Limits(rows=1, reads=1), "396 rows where 1 fit, 5 reads where 1 fit"),
    ],
)
def test_a_tree_that_fits_no_pass_is_refused_with_both_figures(limits: Limits, text: str) -> None:
    state = list(range(1, 71))
    questions = [[ids(state, [1_000 + q] * 80, [2_000 + c] * 33) for c in range(2)] for q in range(2)]
    questions.append([ids(state, [3_000] * 34)])
    layout = laid_out(questions, "tree")
    with pytest.raises(CapacityError, match=f"this request has {text}; use schedule=levels"):
        plan_passes(layout, schedule="tree", pack="all", limits=limits)
    plan_passes(layout, schedule="tree", pack="all", limits=Limits(rows=396, segments=8, reads=5, question_snapshots=2))
