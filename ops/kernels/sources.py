"""Where the rows before a segment live: the look-up of ops/tables.py, once for all kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from ops.kernels.tables import PACKED


@triton.jit
def source_at(i_position, start, question_first, request, question, own):
    """Of a segment's three sources the last that begins at or before each position."""
    inherited = tl.where(i_position >= question_first, question, request)
    return tl.where(i_position >= start, own, inherited)


@triton.jit
def rows_at(i_row, p_packed, PACKED_PITCH: tl.constexpr, p_kept, KEPT_PITCH: tl.constexpr):
    """Pointers to virtual rows: of the pass, or of what a snapshot kept."""
    p_in_pass = p_packed + (i_row - PACKED).to(tl.int64) * PACKED_PITCH
    return tl.where(i_row >= PACKED, p_in_pass, p_kept + i_row.to(tl.int64) * KEPT_PITCH)
