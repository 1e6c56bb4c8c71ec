"""From a layout to passes: which segments run together, and where each finds and leaves its state.

Pure host work: slots, K/V rows and passes are numbers here, the buffers behind them are the executor's. Every schedule
gives the same bits; they differ in rows run, passes and memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from engine.errors import CapacityError
from engine.plan.layout import Layout, Segment
from ops.sizes import crosses_border, num_chunks
from ops.tables import MAX_CHUNKS, MAX_READS, MAX_ROWS, MAX_SEGMENTS, SegmentEntry, Source

Read = tuple[int, int]  # (segment of the layout, row of that segment)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one pass may hold, and how many question snapshots may live at a time."""

    rows: int = MAX_ROWS
    segments: int = MAX_SEGMENTS
    chunks: int = MAX_CHUNKS
    reads: int = MAX_READS
    question_snapshots: int = 16


@dataclass(frozen=True, kw_only=True)
class BufferSizes:
    """Sizes of the snapshot buffers that a plan addresses: K/V rows, tail and history slots, state slots."""

    kv_rows: int = 0
    slots: int = 0
    states: int = 0

    def union(self, other: BufferSizes) -> BufferSizes:
        return BufferSizes(
            kv_rows=max(self.kv_rows, other.kv_rows),
            slots=max(self.slots, other.slots),
            states=max(self.states, other.states),
        )


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Segments that run together. `reads` are (entry, row of it); `outputs` their places among the plan's reads."""

    kind: str  # "prefix", "question", "branch", "tree"
    entries: tuple[SegmentEntry, ...]
    reads: tuple[tuple[int, int], ...]
    outputs: tuple[int, ...]

    @cached_property
    def rows(self) -> int:
        return sum(e.length for e in self.entries)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Passes in the order they run, the buffers they need, and for each prompt the places of its reads."""

    schedule: str
    passes: tuple[Pass, ...]
    buffers: BufferSizes
    num_reads: int
    reads_of_prompt: tuple[tuple[int, ...], ...]

    @property
    def rows(self) -> int:
        return sum(p.rows for p in self.passes)

    @property
    def segments(self) -> int:
        return sum(len(p.entries) for p in self.passes)


@dataclass(frozen=True, kw_only=True)
class _Prefix:
    """A finished prefix as its children see it: its source, and the slot of the state at its last chunk border."""

    request: Source | None = None
    question: Source | None = None
    state: int = -1


@dataclass(kw_only=True)
class _Planner:
    layout: Layout
    limits: Limits
    places: dict[Read, int] = field(default_factory=dict)
    reads_of_segment: dict[int, list[int]] = field(default_factory=dict)
    passes: list[Pass] = field(default_factory=list)
    sizes: BufferSizes = field(default_factory=BufferSizes)

    def __post_init__(self) -> None:
        for reads in self.layout.reads:
            for segment, row in reads:
                if (segment, row) not in self.places:
                    self.places[segment, row] = len(self.places)
                    self.reads_of_segment.setdefault(segment, []).append(row)

    def plan(self, schedule: str) -> Plan:
        return Plan(
            schedule=schedule,
            passes=tuple(self.passes),
            buffers=self.sizes,
            num_reads=len(self.places),
            reads_of_prompt=tuple(tuple(self.places[r] for r in reads) for reads in self.layout.reads),
        )

    def emit(self, kind: str, members: Sequence[tuple[int, SegmentEntry]]) -> None:
        if len(members) == 1:  # a segment alone takes the scan that is made for few long ones
            members = [(s, replace(entry, internal=True)) for s, entry in members]
        reads = [(i, row, self.places[s, row]) for i, (s, _) in enumerate(members) for row in self.reads_of(s)]
        self.passes.append(
            Pass(
                kind=kind,
                entries=tuple(e for _, e in members),
                reads=tuple((i, row) for i, row, _ in reads),
                outputs=tuple(place for _, _, place in reads),
            )
        )

    def reads_of(self, segment: int) -> Sequence[int]:
        return self.reads_of_segment.get(segment, ())

    def packed(self, members: Sequence[tuple[int, SegmentEntry]]) -> Iterator[list[tuple[int, SegmentEntry]]]:
        """Cut into runs that keep the pass limits, in order."""
        run: list[tuple[int, SegmentEntry]] = []
        rows = reads = chunks = 0
        limits = self.limits
        for s, entry in members:
            of_rows, of_chunks, of_reads = entry.length, entry.num_chunks, len(self.reads_of(s))
            self.check(of_rows, of_reads)
            full = (
                rows + of_rows > limits.rows
                or len(run) == limits.segments
                or chunks + of_chunks > limits.chunks
                or reads + of_reads > limits.reads
            )
            if run and full:
                yield run
                run, rows, reads, chunks = [], 0, 0, 0
            run.append((s, entry))
            rows += of_rows
            chunks += of_chunks
            reads += of_reads
        if run:
            yield run

    def check(self, rows: int, reads: int) -> None:
        if rows > self.limits.rows or reads > self.limits.reads:
            raise CapacityError(
                f"a segment has {rows} rows and {reads} reads; a pass holds {self.limits.rows} and {self.limits.reads}"
            )

    def prefix_entry(
        self, segment: Segment, parent: _Prefix, *, slot: int, state: int, kv_row: int
    ) -> tuple[SegmentEntry, _Prefix]:
        """The pass entry of a prefix that leaves a snapshot, and what its children see of it.

        A prefix that crosses no chunk border has its parent's state and owns no state slot.
        """
        end = segment.start + len(segment.token_ids)
        crosses = crosses_border(segment.start, end)
        source = Source.snapshot(first=segment.start, length=end, slot=slot, kv=kv_row - segment.start)
        entry = SegmentEntry(
            start=segment.start,
            token_ids=segment.token_ids,
            request=parent.request,
            state_read=parent.state,
            state_write=state if crosses else -1,
            slot_write=slot,
            kv_write=source.kv,
        )
        is_request = segment.kind == "request"
        child = _Prefix(
            request=source if is_request else parent.request,
            question=None if is_request else source,
            state=state if crosses else parent.state,
        )
        self.sizes = self.sizes.union(
            BufferSizes(kv_rows=kv_row + len(segment.token_ids), slots=slot + 1, states=state + 1 if crosses else 0)
        )
        return entry, child

    def branch_entry(self, segment: Segment, parent: _Prefix) -> SegmentEntry:
        return SegmentEntry(
            start=segment.start,
            token_ids=segment.token_ids,
            request=parent.request,
            question=parent.question,
            state_read=parent.state,
        )


def plan_passes(layout: Layout, *, schedule: str, pack: str, limits: Limits) -> Plan:
    """Passes of `layout` under `schedule`: independent, batched, levels or tree.

    For `independent` and `batched` the layout must be the one without prefixes. `pack="one"` runs every branch in a
    pass of its own, to measure reuse without batching. Raises CapacityError when a segment exceeds a pass.
    """
    planner = _Planner(layout=layout, limits=limits)
    if schedule == "independent":
        _plan_levels(planner, one_by_one=True)
    elif schedule in ("batched", "levels"):
        _plan_levels(planner, one_by_one=pack == "one")
    else:
        assert schedule == "tree", schedule
        _plan_tree(planner)
    return planner.plan(schedule)


def _plan_levels(planner: _Planner, *, one_by_one: bool) -> None:
    """Request prefix, then waves of questions: their prefixes in one pass, then all their branches."""
    layout = planner.layout
    seen: dict[int | None, _Prefix] = {None: _Prefix()}
    kv_row = first_slot = first_state = 0
    for s, segment in enumerate(layout.segments):
        if segment.kind == "request":
            planner.check(len(segment.token_ids), len(planner.reads_of(s)))
            entry, seen[s] = planner.prefix_entry(segment, seen[None], slot=0, state=0, kv_row=0)
            planner.emit("prefix", [(s, entry)])
            kv_row, first_slot, first_state = len(segment.token_ids), 1, entry.state_write + 1
    for prefixes, branches in _waves(layout, planner.limits):
        members = []
        row, state = kv_row, first_state
        for i, s in enumerate(prefixes):
            segment = layout.segments[s]
            entry, seen[s] = planner.prefix_entry(
                segment, seen[segment.parent], slot=first_slot + i, state=state, kv_row=row
            )
            members.append((s, entry))
            row += len(segment.token_ids)
            state += entry.state_write >= 0
        for run in planner.packed(members):
            planner.emit("question", run)
        leaves = [(s, planner.branch_entry(layout.segments[s], seen[layout.segments[s].parent])) for s in branches]
        for run in [[leaf] for leaf in leaves] if one_by_one else planner.packed(leaves):
            planner.check(run[0][1].length, len(planner.reads_of(run[0][0])))
            planner.emit("branch", run)


def _waves(layout: Layout, limits: Limits) -> Iterator[tuple[list[int], list[int]]]:
    """Question prefixes and branches of runs of questions whose snapshots may live at the same time."""
    prefix_of: dict[int, int] = {}
    branches_of: dict[int, list[int]] = {}
    for s, segment in enumerate(layout.segments):
        if segment.kind == "question":
            prefix_of[segment.question] = s
        elif segment.kind == "branch":
            branches_of.setdefault(segment.question, []).append(s)
    prefixes: list[int] = []
    branches: list[int] = []
    rows = 0
    for question, own in branches_of.items():
        prefix = prefix_of.get(question)
        length = 0 if prefix is None else len(layout.segments[prefix].token_ids)
        full = len(prefixes) == limits.question_snapshots or rows + length > limits.rows
        if prefix is not None and prefixes and full:
            yield prefixes, branches
            prefixes, branches, rows = [], [], 0
        if prefix is not None:
            prefixes.append(prefix)
            rows += length
        branches.extend(own)
    if branches:
        yield prefixes, branches


def _plan_tree(planner: _Planner) -> None:
    """All unique rows in one pass. Segments whose state another one reads come first, parents before children."""
    segments, limits = planner.layout.segments, planner.limits
    parents = {s.parent for s in segments}
    states: dict[int | None, int] = {None: -1}
    owns: dict[int, int] = {}
    for s, segment in enumerate(segments):
        if s in parents and crosses_border(segment.start, segment.end):
            owns[s] = len(owns)
            states[s] = owns[s]
        else:
            states[s] = states[segment.parent]
    order = sorted(range(len(segments)), key=lambda s: s not in owns)
    needed = {
        "rows": (sum(len(s.token_ids) for s in segments), limits.rows),
        "segments": (len(segments), limits.segments),
        "chunks": (sum(num_chunks(s.start, s.end) for s in segments), limits.chunks),
        "reads": (len(planner.places), limits.reads),
        "states": (len(owns), 1 + limits.question_snapshots),
    }
    beyond = [f"{wanted} {name} where {limit} fit" for name, (wanted, limit) in needed.items() if wanted > limit]
    if beyond:
        raise CapacityError(
            f"schedule=tree runs one pass, and this request has {', '.join(beyond)}; use schedule=levels"
        )
    sources: dict[int | None, Source] = {}
    row = 0
    for s in order:
        if s in parents:
            sources[s] = Source.packed(first=segments[s].start, row=row)
        row += len(segments[s].token_ids)
    members = []
    for s in order:
        segment = segments[s]
        request = question = None
        parent = segment.parent
        if parent is not None and segments[parent].kind == "question":
            question, parent = sources[parent], segments[parent].parent
        if parent is not None:
            request = sources[parent]
        members.append(
            (
                s,
                SegmentEntry(
                    start=segment.start,
                    token_ids=segment.token_ids,
                    request=request,
                    question=question,
                    state_read=states[segment.parent],
                    state_write=owns.get(s, -1),
                    internal=s in owns,
                ),
            )
        )
    planner.emit("tree", members)
    planner.sizes = BufferSizes(states=len(owns))
