"""The one block of int32 device data that every operator reads, and how the host fills it.

A *pass* packs the rows of several segments. Nothing an operator does depends on a host value: counts, lengths and
addresses are all in this block, whose size never changes, so that one captured graph serves any tree of segments
within its rung.

Virtual rows. Rows before a segment live either in snapshot buffers or in the same pass's packed rows. Both are
addressed by one integer: below `PACKED` it is a row of the snapshot buffer, from `PACKED` on it is packed row
``index - PACKED``. Position p of a segment's path lives at ``p + offset`` of the last source that begins at or before
p (request prefix, question prefix, own rows); a negative position reads as zeros. Three spaces have such offsets:

    kv     keys and values:            k_cache, v_cache [kv_rows, Hkv * d]     or the packed K/V of this pass
    chunk  rows of an open chunk:      tail_kv [slots * 64, Kd + Vd], gates    or the packed conv output
    conv   inputs of the convolution:  history [slots * 3, C]                  or the packed projection
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ops.sizes import CHUNK, CONV_HISTORY, num_chunks

PACKED = 1 << 30
"""First virtual row that means a packed row of the same pass."""

MAX_ROWS = 16_384
MAX_SEGMENTS = 512
MAX_READS = 1_024
MAX_CHUNKS = 768
"""Chunks of one pass; bounds the delta rule's scratch. Enough for 255 branches that each straddle a border."""

# Counts, at the head of the block.
NUM_ROWS, NUM_SEGMENTS, NUM_INTERNAL, NUM_CHUNKS, NUM_READS = range(5)
_HEADER = 16

# Per-row sections, each MAX_ROWS long.
ROW_TOKEN = _HEADER
ROW_POSITION = ROW_TOKEN + MAX_ROWS
ROW_SEGMENT = ROW_POSITION + MAX_ROWS

# Per-segment sections, each MAX_SEGMENTS long: field f of segment s is at SEGMENTS + f * MAX_SEGMENTS + s.
SEGMENTS = ROW_SEGMENT + MAX_ROWS
(
    SEG_START,  # absolute position of the first row
    SEG_LENGTH,
    SEG_ROW,  # first packed row
    SEG_CHUNK,  # first entry in the chunk list
    SEG_NUM_CHUNKS,
    SEG_STATE_READ,  # state slot at the last chunk border at or before `start`; -1 = zeros
    SEG_STATE_WRITE,  # slot for the state at the last chunk border at or before the end; -1 = none
    SEG_SLOT_WRITE,  # tail and history slot written by this segment; -1 = none
    SEG_KV_WRITE,  # K/V of position p go to snapshot row p + this; -1 = to the packed K/V
    SEG_QUESTION_FIRST,  # first position of the question prefix (== start when there is none)
    SEG_KV_REQUEST,
    SEG_KV_QUESTION,
    SEG_KV_OWN,
    SEG_CHUNK_REQUEST,
    SEG_CHUNK_QUESTION,
    SEG_CHUNK_OWN,
    SEG_CONV_REQUEST,
    SEG_CONV_QUESTION,
    SEG_CONV_OWN,
) = range(19)
_SEGMENT_FIELDS = 19

# The work list of chunks, (segment, absolute chunk index) each, and the packed rows that are read.
CHUNKS = SEGMENTS + _SEGMENT_FIELDS * MAX_SEGMENTS
READ_ROWS = CHUNKS + 2 * MAX_CHUNKS
TABLE_WORDS = READ_ROWS + MAX_READS

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where the rows of one ancestor prefix live: offsets of the three spaces, from its first position on."""

    first: int
    kv: int
    chunk: int
    conv: int

    @classmethod
    def snapshot(cls, *, first: int, length: int, slot: int, kv: int) -> Source:
        """A finished prefix ending at `length`: tail and history in `slot`, K/V of position p at row p + kv."""
        border = length - length % CHUNK
        return cls(first=first, kv=kv, chunk=slot * CHUNK - border, conv=slot * CONV_HISTORY - (length - CONV_HISTORY))

    @classmethod
    def packed(cls, *, first: int, row: int) -> Source:
        """A segment of the same pass whose position `first` is packed row `row`."""
        offset = PACKED + row - first
        return cls(first=first, kv=offset, chunk=offset, conv=offset)


@dataclass(frozen=True, kw_only=True)
class SegmentEntry:
    """One segment of a pass. Internal ones (whose state another segment of the pass reads) come first."""

    start: int
    token_ids: Int32Array
    request: Source | None = None
    question: Source | None = None
    state_read: int = -1
    state_write: int = -1
    slot_write: int = -1
    kv_write: int = -1
    internal: bool = False

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def num_chunks(self) -> int:
        return num_chunks(self.start, self.end)


def chunk_capacity(rows: int) -> int:
    """Most chunks that a pass of `rows` packed rows may touch: each holds at least one row."""
    return min(rows, MAX_CHUNKS)


def fill(block: Int32Array, entries: Sequence[SegmentEntry], reads: Sequence[tuple[int, int]]) -> int:
    """Write one pass into `block` [TABLE_WORDS]; returns the number of packed rows.

    `reads` are (segment, row of that segment) in the order their hidden states are wanted. Raises ValueError, before
    anything is written, for a segment without rows, an internal segment behind another, a read outside its segment, and
    more of anything than the block holds.
    """
    lines, rows, total_chunks = [], 0, 0
    for e in entries:
        length, own = len(e.token_ids), PACKED + rows - e.start
        touched = (e.start + length - 1) // CHUNK - e.start // CHUNK + 1  # `num_chunks`, without a call
        request, question = e.request, e.question
        lines.append(
            (
                e.start, length, rows, total_chunks, touched,
                e.state_read, e.state_write, e.slot_write, e.kv_write, question.first if question else e.start,
                request.kv if request else own, question.kv if question else 0, own if e.kv_write < 0 else e.kv_write,
                request.chunk if request else own, question.chunk if question else 0, own,
                request.conv if request else own, question.conv if question else 0, own,
            )
        )  # fmt: skip
        rows += length
        total_chunks += touched
    count = len(entries)
    if not 0 < count <= MAX_SEGMENTS or rows > MAX_ROWS or total_chunks > MAX_CHUNKS or len(reads) > MAX_READS:
        _refuse_size(segments=count, rows=rows, chunks=total_chunks, reads=len(reads))
    internal = [e.internal for e in entries]
    num_internal = sum(internal)
    if not all(internal[:num_internal]):
        late = internal.index(True, internal.index(False))
        raise ValueError(f"tables: segment {late} is internal behind one that is not; put internal segments first")
    fields = np.array(lines, np.int32).T
    starts, lengths, first_row, first_chunk, chunks_of = fields[: SEG_NUM_CHUNKS + 1]
    if not lengths.all():
        raise ValueError(f"tables: segment {int(lengths.argmin())} has 0 rows, wants at least 1; leave it out")
    segments, read_rows = np.array(reads, np.int32).reshape(-1, 2).T
    if reads:
        _check_reads(segments, read_rows, lengths)

    segment_of_row = np.repeat(np.arange(count, dtype=np.int32), lengths)
    block[:ROW_SEGMENT] = 0
    block[ROW_SEGMENT:SEGMENTS] = -1
    block[ROW_TOKEN : ROW_TOKEN + rows] = np.concatenate([e.token_ids for e in entries])
    block[ROW_POSITION : ROW_POSITION + rows] = np.arange(rows) + (starts - first_row)[segment_of_row]
    block[ROW_SEGMENT : ROW_SEGMENT + rows] = segment_of_row
    block[SEGMENTS:CHUNKS].reshape(_SEGMENT_FIELDS, MAX_SEGMENTS)[:, :count] = fields

    segment_of_chunk = np.repeat(np.arange(count, dtype=np.int32), chunks_of)
    chunks = block[CHUNKS : CHUNKS + 2 * total_chunks].reshape(-1, 2)
    chunks[:, 0] = segment_of_chunk
    chunks[:, 1] = np.arange(total_chunks) + (starts // CHUNK - first_chunk)[segment_of_chunk]

    block[READ_ROWS:TABLE_WORDS] = 0
    block[READ_ROWS : READ_ROWS + len(reads)] = first_row[segments] + read_rows
    block[:5] = (rows, count, num_internal, total_chunks, len(reads))
    return rows


def _refuse_size(*, segments: int, rows: int, chunks: int, reads: int) -> None:
    if not segments:
        raise ValueError("tables: a pass of 0 segments, wants at least 1; leave it out")
    for name, value, limit in (
        ("segments", segments, MAX_SEGMENTS),
        ("rows", rows, MAX_ROWS),
        ("chunks", chunks, MAX_CHUNKS),
        ("reads", reads, MAX_READS),
    ):
        if value > limit:
            raise ValueError(f"tables: a pass of {value} {name}, wants at most {limit}; run it in several passes")


def _check_reads(segments: Int32Array, rows: Int32Array, lengths: Int32Array) -> None:
    """Every read is a row of a segment. Unsigned, a negative number is beyond any limit."""
    known = segments.view(np.uint32) < len(lengths)
    if not known.all():
        i = int(known.argmin())
        raise ValueError(f"tables: read {i} is in segment {segments[i]}, wants 0 to {len(lengths) - 1}")
    inside = rows.view(np.uint32) < lengths[segments].view(np.uint32)
    if not inside.all():
        i = int(inside.argmin())
        last = lengths[segments[i]] - 1
        raise ValueError(f"tables: read {i} is row {rows[i]} of segment {segments[i]}, wants 0 to {last}")


@dataclass(frozen=True)
class HostTables:
    """Named views over a block on the host, for the CPU kernels and for tests."""

    block: Int32Array

    @classmethod
    def of(cls, tables: torch.Tensor) -> HostTables:
        return cls(tables.numpy())

    def count(self, which: int) -> int:
        return int(self.block[which])

    def rows(self, section: int) -> Int32Array:
        """One per-row section, true rows only."""
        return self.block[section : section + self.count(NUM_ROWS)]

    def segment(self, s: int) -> tuple[int, ...]:
        """All fields of one segment, in the order of the SEG_ constants."""
        return tuple(int(v) for v in self.block[SEGMENTS + s : CHUNKS : MAX_SEGMENTS])

    def field(self, which: int) -> Int32Array:
        """One field of all segments."""
        first = SEGMENTS + which * MAX_SEGMENTS
        return self.block[first : first + self.count(NUM_SEGMENTS)]

    def read_rows(self) -> Int32Array:
        return self.block[READ_ROWS : READ_ROWS + self.count(NUM_READS)]


def virtual_rows(
    positions: npt.NDArray[np.int64], fields: tuple[int, ...], request: int, question: int, own: int
) -> npt.NDArray[np.int64]:
    """Virtual row of each position of one segment's path; arguments name the three offset fields of one space."""
    offsets = np.where(
        positions >= fields[SEG_START],
        fields[own],
        np.where(positions >= fields[SEG_QUESTION_FIRST], fields[question], fields[request]),
    )
    return positions + offsets
