"""What a pass cannot hold is refused by `fill` with field, value and limit, before the block is touched."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from ops.tables import (
    MAX_CHUNKS,
    MAX_READS,
    MAX_ROWS,
    MAX_SEGMENTS,
    NUM_CHUNKS,
    NUM_INTERNAL,
    NUM_READS,
    NUM_SEGMENTS,
    TABLE_WORDS,
    HostTables,
    SegmentEntry,
    Source,
    fill,
)

FILLER = 7


def entry(length: int, start: int = 0, *, internal: bool = False, state_write: int = -1) -> SegmentEntry:
    ids = np.zeros(length, np.int32)
    return SegmentEntry(start=start, token_ids=ids, internal=internal, state_write=state_write)


def empty_between() -> list[SegmentEntry]:
    """The middle one would write its parent's state."""
    parent = Source.packed(first=0, row=0)
    middle = SegmentEntry(start=192, token_ids=np.zeros(0, np.int32), request=parent, state_read=0, state_write=1)
    return [entry(192, internal=True, state_write=0), middle, entry(64)]


REFUSED: dict[str, tuple[Sequence[SegmentEntry], Sequence[tuple[int, int]], str]] = {
    "nothing": ([], [], "a pass of 0 segments, wants at least 1"),
    "an empty segment": (empty_between(), [], "segment 1 has 0 rows, wants at least 1"),
    "an empty segment alone": ([entry(0)], [], "segment 0 has 0 rows"),
    "an empty segment at a border": ([entry(3), entry(0, 64)], [], "segment 1 has 0 rows"),
    "rows": ([entry(MAX_ROWS), entry(1)], [], "a pass of 16385 rows, wants at most 16384"),
    "segments": ([entry(1)] * (MAX_SEGMENTS + 1), [], "a pass of 513 segments, wants at most 512"),
    "chunks": ([entry(2, 63)] * (MAX_CHUNKS // 2 + 1), [], "a pass of 770 chunks, wants at most 768"),
    "reads": ([entry(1)], [(0, 0)] * (MAX_READS + 1), "a pass of 1025 reads, wants at most 1024"),
    "a read behind its segment": ([entry(3), entry(2)], [(0, 2), (1, 2)], "read 1 is row 2 of segment 1, wants 0 to 1"),
    "a read before its segment": ([entry(3), entry(2)], [(1, -1)], "read 0 is row -1 of segment 1, wants 0 to 1"),
    "a read of no segment": ([entry(3), entry(2)], [(0, 0), (2, 0)], "read 1 is in segment 2, wants 0 to 1"),
    "a read of segment -1": ([entry(3), entry(2)], [(-1, 0)], "read 0 is in segment -1, wants 0 to 1"),
    "a late internal segment": (
        [entry(3, internal=True), entry(3), entry(3), entry(3, internal=True)],
        [],
        "segment 3 is internal behind one that is not; put internal segments first",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_d51_what_does_not_fit_is_refused_by_name(case: str) -> None:
    entries, reads, message = REFUSED[case]
    block = np.full(TABLE_WORDS, FILLER, np.int32)
    with pytest.raises(ValueError, match=f"tables: {message}"):
        fill(block, entries, reads)
    assert (block == FILLER).all()


@pytest.mark.parametrize(
    ("entries", "reads", "counts"),
    [
        ([entry(MAX_ROWS)], [(0, MAX_ROWS - 1)], (1, 0, 256, 1)),
        ([entry(1)] * MAX_SEGMENTS, [(MAX_SEGMENTS - 1, 0)], (MAX_SEGMENTS, 0, 512, 1)),
        ([entry(2, 63)] * (MAX_CHUNKS // 2), [], (384, 0, MAX_CHUNKS, 0)),
        ([entry(1, internal=True), entry(1)], [(1, 0)] * MAX_READS, (2, 1, 2, MAX_READS)),
        ([entry(1, internal=True)] * 3, [], (3, 3, 3, 0)),
    ],
)  # fmt: skip
def test_d51_each_limit_itself_fits(
    entries: Sequence[SegmentEntry], reads: Sequence[tuple[int, int]], counts: tuple[int, ...]
) -> None:
    block = np.full(TABLE_WORDS, FILLER, np.int32)
    assert fill(block, entries, reads) == sum(e.length for e in entries)
    host = HostTables(block)
    assert tuple(host.count(c) for c in (NUM_SEGMENTS, NUM_INTERNAL, NUM_CHUNKS, NUM_READS)) == counts
