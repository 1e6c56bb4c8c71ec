"""Where the rows before a segment live: the look-up of ops/tables.py, once for all kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from ops.kernels.tables import PACKED


@triton.jit
def source_at(position, start, question_first, request, question, own):
    """Of a segment's three sources the last that begins at or before each position."""
    inherited = tl.where(position >= question_first, question, request)
    return tl.where(position >= start, own, inherited)


@triton.jit
def rows_at(row, packed, PACKED_PITCH: tl.constexpr, kept, KEPT_PITCH: tl.constexpr):
    """Pointers to virtual rows: of the pass, or of what a snapshot kept."""
    in_pass = packed + (row - PACKED).to(tl.int64) * PACKED_PITCH
    return tl.where(row >= PACKED, in_pass, kept + row.to(tl.int64) * KEPT_PITCH)
