"""Words of the tables (ops/tables.py) as kernels address them: the field of segment s is s words behind that name."""

from __future__ import annotations

import triton.language as tl

from ops import tables as t


def _field(which: int) -> tl.constexpr:
    return tl.constexpr(t.SEGMENTS + which * t.MAX_SEGMENTS)


PACKED = tl.constexpr(t.PACKED)

NUM_ROWS = tl.constexpr(t.NUM_ROWS)
NUM_SEGMENTS = tl.constexpr(t.NUM_SEGMENTS)
NUM_INTERNAL = tl.constexpr(t.NUM_INTERNAL)
NUM_CHUNKS = tl.constexpr(t.NUM_CHUNKS)
NUM_READS = tl.constexpr(t.NUM_READS)

ROW_POSITION = tl.constexpr(t.ROW_POSITION)
ROW_SEGMENT = tl.constexpr(t.ROW_SEGMENT)
CHUNKS = tl.constexpr(t.CHUNKS)
READ_ROWS = tl.constexpr(t.READ_ROWS)

START = _field(t.SEG_START)
LENGTH = _field(t.SEG_LENGTH)
FIRST_CHUNK = _field(t.SEG_CHUNK)
CHUNKS_OF = _field(t.SEG_NUM_CHUNKS)
STATE_READ = _field(t.SEG_STATE_READ)
STATE_WRITE = _field(t.SEG_STATE_WRITE)
SLOT_WRITE = _field(t.SEG_SLOT_WRITE)
KV_WRITE = _field(t.SEG_KV_WRITE)
QUESTION_FIRST = _field(t.SEG_QUESTION_FIRST)
KV_REQUEST = _field(t.SEG_KV_REQUEST)
KV_QUESTION = _field(t.SEG_KV_QUESTION)
KV_OWN = _field(t.SEG_KV_OWN)
CHUNK_REQUEST = _field(t.SEG_CHUNK_REQUEST)
CHUNK_QUESTION = _field(t.SEG_CHUNK_QUESTION)
CHUNK_OWN = _field(t.SEG_CHUNK_OWN)
CONV_REQUEST = _field(t.SEG_CONV_REQUEST)
CONV_QUESTION = _field(t.SEG_CONV_QUESTION)
CONV_OWN = _field(t.SEG_CONV_OWN)
