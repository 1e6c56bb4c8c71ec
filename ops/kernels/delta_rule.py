"""Triton kernels of the gated delta rule; ops/delta_rule.py has the formulas and the operator.

Everything that does not depend on the state is prepared in parallel over (chunk, key head): the inverse
T = (I + A)^-1, the scores P = (Q K^T) o D and five factors per row. What is left is a walk along the chunks,
independent for every (value head, block of value columns), with the state in float32 registers:

    V' = T (beta V - beta exp(G) K S)        O = exp(G) Q S + P V'        S = exp(G_63) S + K^T (exp(G_63 - G) V')

Products take keys and queries as stored; their norms are float32 factors of the results. Rows that a chunk does not
have are loaded as zeros, T and P are exact zeros above the diagonal, and prefix sums run downwards: no row depends on
a later one.

Sizes: KEY_HEADS of DK columns, VALUE_HEADS of DV columns, GROUP value heads of a key head; _P2 the next power of two.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops import tables as t
from ops.kernels.sources import rows_at, source_at
from ops.kernels.tables import (
    CHUNK_OWN,
    CHUNK_QUESTION,
    CHUNK_REQUEST,
    CHUNKS,
    CHUNKS_OF,
    FIRST_CHUNK,
    LENGTH,
    NUM_CHUNKS,
    NUM_INTERNAL,
    NUM_SEGMENTS,
    PACKED,
    QUESTION_FIRST,
    START,
    STATE_READ,
    STATE_WRITE,
)
from ops.sizes import CHUNK, LEAST_LOG_DECAY, DeltaSizes

PREPARE_PROGRAMS = 396
PREPARE_WARPS = 4
PREPARE_REGISTERS = 168
"""Most registers of a thread, so that three programs fit on a multiprocessor."""
INTERNAL_SCAN = (32, 4, 5)
"""Value columns of a program, warps and depth of the software pipeline, for few long segments: plans are loaded four
chunks ahead, rows two. One program fills the shared memory of a multiprocessor."""
WIDE_INTERNAL_SCAN = (64, 4, 5)
"""The same for so many heads that narrow programs would not run all at once."""
LEAF_SCAN = (64, 4, 5)
"""The same for many short segments. A pipeline of one stage was 9 % faster there, but with 32 columns it read out of
bounds on sm_90 (Triton 3.6), so it is not used."""
SCAN_LANES = 4
"""Scan programs that share the leaves of one (value head, column block)."""
PRECISION = "tf32x3"
"""Of products of float32 tiles; products of bfloat16 tiles are exact and summed in float32."""

_CHUNK = tl.constexpr(CHUNK)
_LEAST_LOG_DECAY = tl.constexpr(LEAST_LOG_DECAY)

# The plan of a chunk, int32: virtual row of each row it has, packed row of each row it owns (-1: none), then words.
_PLAN_OWN = tl.constexpr(CHUNK)
_PLAN_READ = tl.constexpr(2 * CHUNK)  # slot to take the state from; -1 zeros; _KEEP the state of the chunk before
_PLAN_WRITE = tl.constexpr(2 * CHUNK + 1)  # slot to leave the state in; -1 none
_PLAN_FULL = tl.constexpr(2 * CHUNK + 2)  # 1 if the chunk ends at a border, and so moves the state
_PLAN_WIDTH = tl.constexpr(2 * CHUNK + 4)
_KEEP = tl.constexpr(-2)

# Factors of a (chunk, value head), five rows of 64 float32.
_BETA = tl.constexpr(0)  # of V
_KEY = tl.constexpr(CHUNK)  # of K S: beta exp(G) / |k|
_QUERY = tl.constexpr(2 * CHUNK)  # of Q S: exp(G) dk^-0.5 / |q|
_WRITE = tl.constexpr(3 * CHUNK)  # of V' on its way into the state: exp(G_63 - G) / |k|
_CARRY = tl.constexpr(4 * CHUNK)  # of S: exp(G_63), repeated
_FACTORS = tl.constexpr(5 * CHUNK)

_TILE = tl.constexpr(16)


@triton.jit
def plan_chunk(tables, i_chunk, plan, store):
    """Virtual row and owned packed row (-1: none) of the 64 rows of a chunk; with `store` the plan is written too."""
    i_segment = tl.load(tables + CHUNKS + 2 * i_chunk)
    first = tl.load(tables + CHUNKS + 2 * i_chunk + 1) * _CHUNK
    start = tl.load(tables + START + i_segment)
    end = start + tl.load(tables + LENGTH + i_segment)
    own = tl.load(tables + CHUNK_OWN + i_segment)
    question = tl.load(tables + CHUNK_QUESTION + i_segment)
    request = tl.load(tables + CHUNK_REQUEST + i_segment)
    question_first = tl.load(tables + QUESTION_FIRST + i_segment)
    o_row = tl.arange(0, _CHUNK)
    i_position = first + o_row
    source = source_at(i_position, start, question_first, request, question, own)
    i_row = tl.where(i_position < end, i_position + source, -1)
    i_own_row = tl.where((i_position >= start) & (i_position < end), i_position + own - PACKED, -1)
    if store:
        p_plan = plan + i_chunk * _PLAN_WIDTH
        read = tl.where(first <= start, tl.load(tables + STATE_READ + i_segment), _KEEP)
        write = tl.where(first + _CHUNK >= end, tl.load(tables + STATE_WRITE + i_segment), -1)
        tl.store(p_plan + o_row, i_row)
        tl.store(p_plan + _PLAN_OWN + o_row, i_own_row)
        tl.store(p_plan + _PLAN_READ, read)
        tl.store(p_plan + _PLAN_WRITE, write)
        tl.store(p_plan + _PLAN_FULL, (first + _CHUNK <= end).to(tl.int32))
    return i_row, i_own_row


@triton.jit
def invert(p_work, HEADS: tl.constexpr, HEADS_P2: tl.constexpr, PRECISION: tl.constexpr):
    """In place: work [HEADS, 64, 64], strictly lower and zero elsewhere, becomes (I + work)^-1.

    Diagonal tiles by forward substitution, a thread per column; then pairs of blocks are merged, twice.
    """
    i_tile = tl.arange(0, 4 * HEADS_P2)[:, None]
    o_column = tl.arange(0, _TILE)[None, :]
    m_tile = i_tile < 4 * HEADS
    p_tile = p_work + i_tile // 4 * (_CHUNK * _CHUNK) + i_tile % 4 * (_TILE * _CHUNK + _TILE) + o_column * 0
    rows = ()
    for r in tl.static_range(_TILE):
        b_row = tl.where(i_tile * 0 + o_column == r, 1.0, 0.0)
        for c in tl.static_range(r):
            b_row = tl.fma(-tl.load(p_tile + (r * _CHUNK + c), mask=m_tile, other=0.0), rows[c], b_row)
        rows = rows + (b_row,)  # type: ignore[assignment]  # noqa: RUF005 (no starred tuples in kernels)
    tl.debug_barrier()
    for r in tl.static_range(_TILE):
        tl.store(p_tile + (r * _CHUNK + o_column), rows[r], mask=m_tile)
    tl.debug_barrier()
    merge(p_work, _TILE, 2 * HEADS, 2 * HEADS_P2, PRECISION)
    merge(p_work, 2 * _TILE, HEADS, HEADS_P2, PRECISION)


@triton.jit
def merge(p_work, SIZE: tl.constexpr, PAIRS: tl.constexpr, PAIRS_P2: tl.constexpr, PRECISION: tl.constexpr):
    """The inverse of [[X, 0], [A, Y]] from X^-1, A and Y^-1 [SIZE, SIZE]: A becomes -Y^-1 A X^-1, in every pair."""
    PER_HEAD: tl.constexpr = _CHUNK // (2 * SIZE)
    i_pair = tl.arange(0, PAIRS_P2)[:, None, None]
    o_row = tl.arange(0, SIZE)[None, :, None]
    o_column = tl.arange(0, SIZE)[None, None, :]
    m_pair = i_pair < PAIRS
    p_pair = p_work + i_pair // PER_HEAD * (_CHUNK * _CHUNK) + i_pair % PER_HEAD * (2 * SIZE * (_CHUNK + 1))
    p_x = p_pair + o_row * _CHUNK + o_column
    p_a = p_x + SIZE * _CHUNK
    b_x = tl.load(p_x, mask=m_pair, other=0.0)
    b_a = tl.load(p_a, mask=m_pair, other=0.0)
    b_y = tl.load(p_a + SIZE, mask=m_pair, other=0.0)
    b_a = -tl.dot(b_y, tl.dot(b_a, b_x, input_precision=PRECISION), input_precision=PRECISION)
    tl.debug_barrier()
    tl.store(p_a, b_a, mask=m_pair)
    tl.debug_barrier()


@triton.jit
def prepare_kernel(
    qkv, gates, tail_kv, tail_gates, tables, plan, inverse, scores, factors, work,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    GROUP_P2: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Programs share the (chunk, key head) items; each inverts in its own part of work [programs, Hv / Hk, 64, 64]."""
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    KEYS: tl.constexpr = KEY_HEADS * DK
    VALUES: tl.constexpr = VALUE_HEADS * DV
    GATES: tl.constexpr = 2 * VALUE_HEADS + 2 * KEY_HEADS
    SQUARE: tl.constexpr = _CHUNK * _CHUNK
    dtype = qkv.dtype.element_ty
    work += tl.program_id(0).to(tl.int64) * (GROUP * SQUARE)
    o_row = tl.arange(0, _CHUNK)
    o_k = tl.arange(0, DK)[None, :]
    o_square = o_row[:, None] * _CHUNK + o_row[None, :]
    m_earlier = o_row[None, :] < o_row[:, None]

    for i_item in range(tl.program_id(0), tl.load(tables + NUM_CHUNKS) * KEY_HEADS, tl.num_programs(0)):
        i_chunk, i_head = i_item // KEY_HEADS, i_item % KEY_HEADS
        i_row, i_own_row = plan_chunk(tables, i_chunk, plan, i_head == 0)
        m_row, m_own = i_row >= 0, i_own_row >= 0
        p_key = rows_at(i_row, qkv + KEYS, 2 * KEYS + VALUES, tail_kv, KEYS + VALUES) + i_head * DK
        p_query = qkv + i_own_row.to(tl.int64) * (2 * KEYS + VALUES) + i_head * DK
        p_gates = rows_at(i_row, gates, GATES, tail_gates, GATES - KEY_HEADS)
        b_key = tl.load(p_key[:, None] + o_k, mask=m_row[:, None], other=0.0)
        b_query = tl.load(p_query[:, None] + o_k, mask=m_own[:, None], other=0.0)
        b_key_norm = tl.load(p_gates + 2 * VALUE_HEADS + i_head, mask=m_row, other=0.0)
        b_query_norm = tl.load(p_gates + 2 * VALUE_HEADS + KEY_HEADS + i_head, mask=m_own, other=0.0)
        b_keys = tl.dot(b_key, tl.trans(b_key), input_precision=PRECISION)
        b_keys = b_keys * b_key_norm[:, None] * b_key_norm[None, :]
        b_scores = tl.dot(b_query, tl.trans(b_key), input_precision=PRECISION)
        b_scores = b_scores * b_query_norm[:, None] * b_key_norm[None, :]

        for i_member in tl.static_range(GROUP):
            i_value_head = i_head * GROUP + i_member
            i_entry = tl.cast(i_chunk, tl.int64) * VALUE_HEADS + i_value_head
            b_log_decay = tl.load(p_gates + i_value_head, mask=m_row, other=0.0)
            b_log_decay = tl.where(b_log_decay < _LEAST_LOG_DECAY, _LEAST_LOG_DECAY, b_log_decay)  # NaN stays
            b_total = tl.cumsum(b_log_decay, 0)
            b_last = tl.sum(tl.where(o_row == _CHUNK - 1, b_total, 0.0), 0)
            b_beta = tl.load(p_gates + VALUE_HEADS + i_value_head, mask=m_row, other=0.0)
            b_decay = b_total[:, None] - b_total[None, :]
            b_decay = tl.exp(tl.where(o_row[None, :] <= o_row[:, None], b_decay, float("-inf")))
            b_a = tl.where(m_earlier, b_beta[:, None] * b_keys * b_decay, 0.0)
            tl.store(scores + i_entry * SQUARE + o_square, (b_scores * b_decay).to(dtype))
            tl.store(work + i_member * SQUARE + o_square, b_a)
            p_factors = factors + i_entry * _FACTORS + o_row
            b_carried = tl.exp(b_total)
            tl.store(p_factors + _BETA, b_beta)
            tl.store(p_factors + _KEY, b_beta * b_carried * b_key_norm)
            tl.store(p_factors + _QUERY, b_carried * b_query_norm)
            tl.store(p_factors + _WRITE, tl.exp(b_last - b_total) * b_key_norm)
            tl.store(p_factors + _CARRY, tl.exp(b_last + tl.zeros_like(b_total)))

        tl.debug_barrier()
        invert(work, GROUP, GROUP_P2, PRECISION)
        for i_member in tl.static_range(GROUP):
            i_entry = tl.cast(i_chunk, tl.int64) * VALUE_HEADS + i_head * GROUP + i_member
            tl.store(inverse + i_entry * SQUARE + o_square, tl.load(work + i_member * SQUARE + o_square).to(dtype))
        tl.debug_barrier()


@triton.jit
def segment_border(tables, i_chunk, end):
    """The first chunk from `i_chunk` on that begins a segment, or `end`."""
    i_segment = tl.load(tables + CHUNKS + 2 * i_chunk, mask=i_chunk < end, other=0)
    first = tl.load(tables + FIRST_CHUNK + i_segment)
    following = first + tl.load(tables + CHUNKS_OF + i_segment)
    return tl.where(i_chunk < end, tl.where(first == i_chunk, i_chunk, following), end)


@triton.jit
def scan_kernel(
    qkv, tail_kv, states, tables, plan, inverse, scores, factors, out,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    LEAVES: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Programs (lane, value head, column block) walk chunks in order, whatever segments these belong to.

    Without LEAVES there is one lane: it takes one internal segment after another, so that a child finds what the same
    program wrote for its parent. With LEAVES the lanes share the chunks of all leaves, cut at segment borders.
    """
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    KEYS: tl.constexpr = KEY_HEADS * DK
    VALUES: tl.constexpr = VALUE_HEADS * DV
    BLOCKS: tl.constexpr = DV // BLOCK
    SQUARE: tl.constexpr = _CHUNK * _CHUNK
    dtype = qkv.dtype.element_ty
    lanes = tl.num_programs(0) // (VALUE_HEADS * BLOCKS)
    i_lane = tl.program_id(0) // (VALUE_HEADS * BLOCKS)
    i_value_head = tl.program_id(0) // BLOCKS % VALUE_HEADS
    o_block = tl.program_id(0) % BLOCKS * BLOCK
    num_internal = tl.load(tables + NUM_INTERNAL)
    num_chunks = tl.load(tables + NUM_CHUNKS)
    has_leaves = num_internal < tl.load(tables + NUM_SEGMENTS)
    first_leaf = tl.load(tables + FIRST_CHUNK + num_internal, mask=has_leaves, other=0)
    leaf_chunks = tl.where(has_leaves, num_chunks - first_leaf, 0)

    o_row = tl.arange(0, _CHUNK)
    o_square = o_row[:, None] * _CHUNK + o_row[None, :]
    o_k = i_value_head // GROUP * DK + tl.arange(0, DK)[None, :]
    o_v = i_value_head * DV + o_block + tl.arange(0, BLOCK)[None, :]
    p_state = states + (i_value_head * DK + tl.arange(0, DK)[:, None]) * DV + o_block + tl.arange(0, BLOCK)[None, :]
    for i_turn in range(0, 1 if LEAVES else num_internal):
        if LEAVES:
            first = segment_border(tables, first_leaf + leaf_chunks * i_lane // lanes, first_leaf + leaf_chunks)
            end = segment_border(tables, first_leaf + leaf_chunks * (i_lane + 1) // lanes, first_leaf + leaf_chunks)
        else:
            first = tl.load(tables + FIRST_CHUNK + i_turn)
            end = first + tl.load(tables + CHUNKS_OF + i_turn)
        tl.debug_barrier()  # states that this program wrote for earlier segments are there to be read
        b_state = tl.zeros([DK, BLOCK], dtype=tl.float32)
        b_operand = b_state.to(dtype)
        held = _KEEP  # slot whose state is in registers, unchanged
        for i_chunk in tl.range(first, end, num_stages=STAGES):
            p_plan = plan + i_chunk * _PLAN_WIDTH
            i_row = tl.load(p_plan + o_row)
            i_own_row = tl.load(p_plan + _PLAN_OWN + o_row)
            read = tl.load(p_plan + _PLAN_READ)
            write = tl.load(p_plan + _PLAN_WRITE)
            full = tl.load(p_plan + _PLAN_FULL)
            i_entry = tl.cast(i_chunk, tl.int64) * VALUE_HEADS + i_value_head
            p_row = rows_at(i_row, qkv + KEYS, 2 * KEYS + VALUES, tail_kv, KEYS + VALUES)
            p_query = qkv + i_own_row.to(tl.int64) * (2 * KEYS + VALUES)
            p_factors = factors + i_entry * _FACTORS
            b_key = tl.load(p_row[:, None] + o_k, mask=i_row[:, None] >= 0, other=0.0)
            b_query = tl.load(p_query[:, None] + o_k, mask=i_own_row[:, None] >= 0, other=0.0)
            b_value = tl.load(p_row[:, None] + (KEYS + o_v), mask=i_row[:, None] >= 0, other=0.0)
            b_inverse = tl.load(inverse + i_entry * SQUARE + o_square)
            b_scores = tl.load(scores + i_entry * SQUARE + o_square)
            b_value_factor = tl.load(p_factors + _BETA + o_row)
            b_key_factor = tl.load(p_factors + _KEY + o_row)
            b_query_factor = tl.load(p_factors + _QUERY + o_row)
            b_write_factor = tl.load(p_factors + _WRITE + o_row)
            carry = tl.load(p_factors + _CARRY)

            if (read != _KEEP) & (read != held):
                p_read = p_state + read.to(tl.int64) * (VALUE_HEADS * DK * DV)
                b_state = tl.load(p_read, mask=read >= 0, other=0.0)
                b_operand = b_state.to(dtype)
            b_change = b_key_factor[:, None] * tl.dot(b_key, b_operand, input_precision=PRECISION)
            b_change = b_value_factor[:, None] * b_value.to(tl.float32) - b_change
            b_change = tl.dot(b_inverse, b_change.to(dtype), input_precision=PRECISION)
            b_out = b_query_factor[:, None] * tl.dot(b_query, b_operand, input_precision=PRECISION)
            b_out = tl.dot(b_scores, b_change.to(dtype), b_out, input_precision=PRECISION)
            p_out = out + i_own_row.to(tl.int64)[:, None] * VALUES + o_v
            tl.store(p_out, b_out.to(dtype), mask=i_own_row[:, None] >= 0)

            # Without a branch, which would keep the state in several layouts at once.
            b_write = (b_write_factor[:, None] * b_change).to(dtype)
            b_next = tl.dot(tl.trans(b_key), b_write, b_state * carry, input_precision=PRECISION)
            b_state = tl.where(full != 0, b_next, b_state)
            b_operand = b_state.to(dtype)
            held = tl.where(full != 0, _KEEP, tl.where(read != _KEEP, read, held))
            if write >= 0:
                tl.store(p_state + write.to(tl.int64) * (VALUE_HEADS * DK * DV), b_state)


def prepare_options() -> dict[str, Any]:
    return {"num_warps": PREPARE_WARPS, "num_stages": 1, "maxnreg": PREPARE_REGISTERS}


def scan_options(qkv: Tensor, n: DeltaSizes, leaves: bool) -> dict[str, Any]:
    """In bfloat16 all variants give the same bits, which tests hold them to: each sums a column in one order."""
    if qkv.dtype == torch.float32:
        block, warps, stages = 32, 8, 1
    elif (capability := torch.cuda.get_device_capability(qkv.device))[0] not in (9, 10):
        block, warps, stages = 32, 8, 3 if capability == (8, 0) else 2  # 99 KiB of shared memory hold two stages
    elif leaves:
        block, warps, stages = LEAF_SCAN
    else:
        programs = n.value_heads * n.value_dim // INTERNAL_SCAN[0]
        fits = programs <= torch.cuda.get_device_properties(qkv.device).multi_processor_count
        block, warps, stages = INTERNAL_SCAN if fits else WIDE_INTERNAL_SCAN
    return {"BLOCK": min(block, n.value_dim), "STAGES": stages, "num_warps": warps, "num_stages": stages}


def launch_delta_rule(
    qkv: Tensor, gates: Tensor, tail_kv: Tensor, tail_gates: Tensor, states: Tensor, tables: Tensor, n: DeltaSizes
) -> Tensor:
    """Three launches: preparation, internal segments, leaves. Tensors as `ops.delta_rule.delta_rule` takes them."""
    heads = {"KEY_HEADS": n.key_heads, "VALUE_HEADS": n.value_heads, "DK": n.key_dim, "DV": n.value_dim}
    capacity = t.chunk_capacity(qkv.shape[0])
    group = n.value_heads // n.key_heads
    programs = min(capacity * n.key_heads, PREPARE_PROGRAMS)
    plan = tables.new_empty(capacity, _PLAN_WIDTH.value)
    inverse = qkv.new_empty(capacity, n.value_heads, CHUNK, CHUNK)
    scores = torch.empty_like(inverse)
    factors = gates.new_empty(capacity, n.value_heads, _FACTORS.value)
    work = gates.new_empty(programs, group, CHUNK, CHUNK)
    out = qkv.new_empty(qkv.shape[0], n.value_heads * n.value_dim)
    prepare_kernel[(programs,)](
        qkv, gates, tail_kv, tail_gates, tables, plan, inverse, scores, factors, work, **heads,
        GROUP_P2=triton.next_power_of_2(group), PRECISION=PRECISION,
        enable_fp_fusion=False, **prepare_options(),
    )  # fmt: skip
    for leaves in (False, True):
        options = scan_options(qkv, n, leaves)
        columns = n.value_heads * (n.value_dim // options["BLOCK"])
        scan_kernel[(columns * (SCAN_LANES if leaves else 1),)](
            qkv, tail_kv, states, tables, plan, inverse, scores, factors, out, **heads,
            LEAVES=leaves, PRECISION=PRECISION, enable_fp_fusion=False, **options,
        )  # fmt: skip
    return out
