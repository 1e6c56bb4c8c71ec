"""What `operators.py` measures: each operator over inputs of real sizes, the peer beside it, and the marks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import cases
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from engine.load.dimensions import DIMENSIONS, ModelDimensions
from engine.load.tensors import rope_table
from ops.add_rms_norm import add_rms_norm
from ops.attention import attention
from ops.attention_prepare import attention_prepare
from ops.delta_rule import delta_rule
from ops.gated_rms_norm import gated_rms_norm
from ops.gdn_conv import gdn_conv
from ops.linear import linear_fixed
from ops.silu_mul import silu_mul
from ops.tables import ROW_TOKEN
from ops.take_rows import take_rows

Call = Callable[[], object]
Pair = tuple[Call, Call | None]

SEQUENCES = (64, 320, 1_088, 3_136)
LONGEST = 3_136
BRANCHES = cases.branches(255, 34, 3_093)
ROW_COUNTS = (64, 3_136)
MAX_SETS = 16
LINEAR_ROWS = (64, 320, 1_088, 3_136, 8_960)
NAMES = (
    "delta_rule", "attention", "attention_prepare", "add_rms_norm", "gdn_conv", "gated_rms_norm", "silu_mul",
    "take_rows", "linear_fixed",
)  # fmt: skip

TARGETS_9B = {
    ("delta_rule", "64"): (30.0, 18.0),
    ("delta_rule", "320"): (39.0, 24.0),
    ("delta_rule", "1,088"): (92.0, 52.0),
    ("delta_rule", "3,136"): (210.0, 130.0),
    ("delta_rule", "255 x 34 behind 3,093"): (425.0, 300.0),
    ("attention", "3,136"): (250.0, 183.0),
    ("attention", "255 x 34 behind 3,093"): (1_300.0, 900.0),
}
"""Mark and goal in microseconds on one H200 at 9B heads."""
ROW_TARGETS = (1.25, 1.1)
"""Mark and goal of a row operator at 3,136 rows, times its peer."""
LINEAR_MARK = 1.25
"""80 % of the library's rate, from 1,024 rows on."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One row of the table. `build(sets)` makes that many input sets; of each, the operator's call and its peer's."""

    operator: str
    case: str
    cost: cases.Cost
    peer: str
    build: Callable[[int], list[Pair]]
    mark: float | None = None
    goal: float | None = None
    relative: bool = False
    """Mark and goal are multiples of the peer's time, not microseconds."""


def chunk_rule() -> Callable[..., Any] | None:
    """flash-linear-attention's chunk rule, when that is installed."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError:
        return None
    return chunk_gated_delta_rule


def delta_rule_bench(
    d: ModelDimensions, case: cases.PassCase, device: torch.device, fla: Callable[..., Any] | None
) -> Bench:
    def build(sets: int) -> list[Pair]:
        tables, kept = case.tables(d, device), cases.gdn_snapshot(d, device)
        many: dict[str, Tensor] = {}
        if case.prefix:
            many["initial_state"] = kept.states.repeat(len(case.lengths), 1, 1, 1)
            many["cu_seqlens"] = torch.tensor([0, *case.lengths], device=device).cumsum(0).int()
        pairs: list[Pair] = []
        for _ in range(sets):
            qkv, gates = cases.gdn_inputs(d, case.rung, device)
            ours = partial(delta_rule, qkv, gates, kept.tail_kv, kept.tail_gates, kept.states, tables)
            theirs = None if fla is None else partial(fla, *_chunk_rule_inputs(d, qkv, gates, case.rows), **many)
            pairs.append((ours, theirs))
        return pairs

    peer = "not installed" if fla is None else "flash-linear-attention"
    return Bench(operator="delta_rule", case=case.name, cost=cases.delta_rule_cost(d, case), peer=peer, build=build)


def _chunk_rule_inputs(d: ModelDimensions, qkv: Tensor, gates: Tensor, rows: int) -> list[Tensor]:
    """q, k [1, rows, Hk, dk] normalised, v [1, rows, Hv, dv], g [1, rows, Hv] float32, beta [1, rows, Hv]."""
    q, k, v = qkv[:rows].split((d.key_dim, d.key_dim, d.value_dim), dim=1)
    q, k = (F.normalize(x.float().view(rows, d.linear_num_key_heads, -1), dim=-1).to(cases.DTYPE) for x in (q, k))
    g, beta = gates[:rows, : 2 * d.linear_num_value_heads].chunk(2, dim=1)
    v = v.reshape(rows, d.linear_num_value_heads, -1)
    return [x.contiguous()[None] for x in (q, k, v, g, beta.to(cases.DTYPE))]


def attention_bench(d: ModelDimensions, case: cases.PassCase, device: torch.device) -> Bench:
    count, length = len(case.lengths), case.lengths[0]

    def build(sets: int) -> list[Pair]:
        tables, cache = case.tables(d, device), cases.attention_snapshot(d, case.prefix, device)
        keys, values = cases.normal(2, count, d.num_key_value_heads, case.prefix + length, d.head_dim, device=device)
        how: dict[str, Any] = {"is_causal": True}
        if case.prefix:
            how = {"attn_mask": causal_lower_right(length, case.prefix + length)}
        pairs: list[Pair] = []
        for _ in range(sets):
            proj, q = (cases.normal(case.rung, n, device=device) for n in (d.attention_proj, d.query_dim))
            k, v = (cases.normal(case.rung, d.kv_dim, device=device) for _ in range(2))
            queries = cases.normal(count, d.num_attention_heads, length, d.head_dim, device=device)
            ours = partial(attention, q, proj, cache.k_cache, cache.v_cache, k, v, tables, d.head_dim, False)
            theirs = partial(F.scaled_dot_product_attention, queries, keys, values, enable_gqa=True, **how)
            pairs.append((ours, theirs))
        return pairs

    return Bench(operator="attention", case=case.name, cost=cases.attention_cost(d, case), peer="SDPA", build=build)


def row_benches(d: ModelDimensions, rows: int, device: torch.device) -> Iterator[Bench]:
    """The operators whose time is that of their bytes. `rows` is a rung, so nothing is padded."""
    case = cases.one_sequence(rows)
    assert case.rung == rows
    h, i, hv, two = d.hidden_size, d.intermediate_size, d.linear_num_value_heads, cases.DTYPE.itemsize

    def bench(operator: str, num_bytes: int, inputs: Callable[[], Callable[[], Call]]) -> Bench:
        """`inputs()` makes what all sets share and returns the maker of one set's call."""

        def build(sets: int) -> list[Pair]:
            one = inputs()
            return [(one(), _copy_of(num_bytes, device)) for _ in range(sets)]

        mark, goal = ROW_TARGETS if rows >= 3_136 else (None, None)
        return Bench(
            operator=operator, case=f"{rows:,}", cost=cases.Cost(bytes=num_bytes), peer="copy", build=build,
            mark=mark, goal=goal, relative=True,
        )  # fmt: skip

    def prepare() -> Callable[[], Call]:
        tables, cache = case.tables(d, device), cases.attention_snapshot(d, 0, device)
        norms = [cases.normal(d.head_dim, device=device) for _ in range(2)]
        rope = rope_table(d, rows, dtype=cases.DTYPE, device=device)

        def one() -> Call:
            proj = cases.normal(rows, d.attention_proj, device=device)
            return partial(
                attention_prepare, proj, proj, *norms, rope, cache.k_cache, cache.v_cache, tables, d.rms_norm_eps,
                2 * d.query_dim, False,
            )  # fmt: skip

        return one

    def norm() -> Callable[[], Call]:
        weight = cases.normal(h, device=device)
        x = partial(cases.normal, rows, h, device=device)
        return lambda: partial(add_rms_norm, x(), x(), weight, d.rms_norm_eps)

    def conv() -> Callable[[], Call]:
        weight, (a_log, dt_bias) = cases.normal(d.conv_dim, 4, device=device), cases.gate_weights(d, device)
        tables, kept = case.tables(d, device), cases.gdn_snapshot(d, device)
        rest = (weight, a_log, dt_bias, tables, kept.history, kept.tail_kv, kept.tail_gates)
        return lambda: partial(gdn_conv, cases.normal(rows, d.gdn_proj, device=device), *rest)

    def gated() -> Callable[[], Call]:
        weight = torch.randn(d.linear_value_head_dim, device=device)
        o = partial(cases.normal, rows, d.value_dim, device=device)
        proj = partial(cases.normal, rows, d.gdn_proj, device=device)
        return lambda: partial(gated_rms_norm, o(), proj(), weight, d.rms_norm_eps, d.conv_dim)

    def gate() -> Callable[[], Call]:
        return lambda: partial(silu_mul, cases.normal(rows, 2 * i, device=device))

    def take() -> Callable[[], Call]:
        embedding = cases.normal(d.vocab_size, h, device=device)
        seeds = iter(range(MAX_SETS))
        return lambda: partial(take_rows, embedding, case.tables(d, device, seed=next(seeds)), ROW_TOKEN, rows)

    gates = 2 * hv + 2 * d.linear_num_key_heads
    moved = d.query_dim + 2 * d.kv_dim
    yield bench("attention_prepare", rows * (2 * moved + d.rotary_dim) * two, prepare)
    yield bench("add_rms_norm", (rows * 4 + 1) * h * two, norm)
    yield bench("gdn_conv", (rows * (2 * d.conv_dim + 2 * hv) + 4 * d.conv_dim) * two + rows * gates * 4, conv)
    yield bench("gated_rms_norm", rows * 3 * d.value_dim * two, gated)
    yield bench("silu_mul", rows * 3 * i * two, gate)
    yield bench("take_rows", rows * 2 * h * two, take)


def _copy_of(num_bytes: int, device: torch.device) -> Call:
    """A copy that reads half of `num_bytes` and writes as much."""
    source = cases.normal(num_bytes // (2 * cases.DTYPE.itemsize), device=device)
    return partial(torch.empty_like(source).copy_, source)


def linear_benches(d: ModelDimensions, rows: int, device: torch.device) -> Iterator[Bench]:
    for name, (n, k) in cases.projections(d).items():

        def build(sets: int, n: int = n, k: int = k) -> list[Pair]:
            pairs: list[Pair] = []
            for _ in range(sets):
                x, w = cases.normal(rows, k, device=device), cases.normal(n, k, device=device).mul_(k**-0.5)
                pairs.append((partial(linear_fixed, x, w), partial(F.linear, x, w)))
            return pairs

        yield Bench(
            operator="linear_fixed", case=f"{name} {rows:,}", cost=cases.linear_cost(rows, n, k), peer="F.linear",
            build=build, mark=LINEAR_MARK if rows >= 1_024 else None, relative=True,
        )  # fmt: skip


def benches(heads: str, device: torch.device, fla: Callable[..., Any] | None) -> Iterator[Bench]:
    """All rows of the table at the head counts of a published size."""
    d = DIMENSIONS[heads]
    targets = TARGETS_9B if heads == "9b" else {}
    mixers = [delta_rule_bench(d, case, device, fla) for case in (*map(cases.one_sequence, SEQUENCES), BRANCHES)]
    mixers += [attention_bench(d, case, device) for case in (cases.one_sequence(LONGEST), BRANCHES)]
    for bench in mixers:
        mark, goal = targets.get((bench.operator, bench.case), (None, None))
        yield replace(bench, mark=mark, goal=goal)
    for rows in ROW_COUNTS:
        yield from row_benches(d, rows, device)
    for rows in LINEAR_ROWS:
        yield from linear_benches(d, rows, device)
