"""Every operator beside its peer and its floor, in turns, each in a CUDA graph.

A graph holds one call per input set, and a replay walks all sets, so that a large operator finds neither inputs nor
outputs in cache (`inputs` says cold). Small ones fit there whatever is done (L2), as they do in a forward, where the
operator before has just written them. Peers run over inputs of the same sizes:

    delta_rule        flash-linear-attention's chunk rule, grouped heads; branches start from copies of the state
    attention         torch SDPA; branches have copies of the keys, lower-right causal (no gate, which ours applies)
    row operators     a copy that moves as many bytes

Products are the case `gemm`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from statistics import median
from typing import Any

import inputs
import torch
import torch.nn.functional as F
from bench_options import BenchConfig
from inputs import DTYPE, Cost, PassCase, branches, normal, one_sequence
from record import Record, number, one_line
from timing import Call, Replay, captured, in_turns
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from cases import Case, column
from cases.gemm import require_cuda
from engine.errors import ConfigError
from engine.load.dimensions import DIMENSIONS, ModelDimensions
from ops.add_rms_norm import add_rms_norm
from ops.attention import attention
from ops.attention_prepare import attention_prepare
from ops.delta_rule import delta_rule
from ops.gated_rms_norm import gated_rms_norm
from ops.gdn_conv import gdn_conv
from ops.silu_mul import silu_mul
from ops.tables import ROW_TOKEN
from ops.take_rows import take_rows

Pair = tuple[Call, Call | None]

SEQUENCES = (64, 320, 1_088, 3_136)
LONGEST = 3_136
BRANCHES = branches(255, 34, 3_093)
ROW_COUNTS = (64, 3_136)
MAX_SETS = 16


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One row of the table. `build(sets)` makes that many input sets; of each, the operator's call and its peer's."""

    operator: str
    case: str
    cost: Cost
    peer: str
    build: Callable[[int], list[Pair]]


def chunk_rule() -> Callable[..., Any] | None:
    """flash-linear-attention's chunk rule, when that is installed."""
    try:
        rule: Callable[..., Any] = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    except ImportError:
        return None
    return rule


def delta_rule_bench(d: ModelDimensions, case: PassCase, device: torch.device, fla: Callable[..., Any] | None) -> Bench:
    def build(sets: int) -> list[Pair]:
        tables, kept = case.tables(d, device), inputs.gdn_snapshot(d, device)
        many: dict[str, Tensor] = {}
        if case.prefix:
            many["initial_state"] = kept.states.repeat(len(case.lengths), 1, 1, 1)
            many["cu_seqlens"] = torch.tensor([0, *case.lengths], device=device).cumsum(0).int()
        pairs: list[Pair] = []
        for _ in range(sets):
            qkv, gates = inputs.gdn_inputs(d, case.rung, device)
            ours = partial(delta_rule, qkv, gates, kept.tail_kv, kept.tail_gates, kept.states, tables)
            theirs = None if fla is None else partial(fla, *_chunk_rule_inputs(d, qkv, gates, case.rows), **many)
            pairs.append((ours, theirs))
        return pairs

    peer = "none" if fla is None else "flash-linear-attention"
    return Bench(operator="delta_rule", case=case.name, cost=inputs.delta_rule_cost(d, case), peer=peer, build=build)


def _chunk_rule_inputs(d: ModelDimensions, qkv: Tensor, gates: Tensor, rows: int) -> list[Tensor]:
    """q, k [1, rows, Hk, dk] normalised, v [1, rows, Hv, dv], g [1, rows, Hv] float32, beta [1, rows, Hv]."""
    q, k, v = torch.split_with_sizes(qkv[:rows], [d.key_dim, d.key_dim, d.value_dim], dim=1)
    q, k = (F.normalize(x.float().view(rows, d.linear_num_key_heads, -1), dim=-1).to(DTYPE) for x in (q, k))
    g, beta = gates[:rows, : 2 * d.linear_num_value_heads].chunk(2, dim=1)
    v = v.reshape(rows, d.linear_num_value_heads, -1)
    return [x.contiguous()[None] for x in (q, k, v, g, beta.to(DTYPE))]


def attention_bench(d: ModelDimensions, case: PassCase, device: torch.device) -> Bench:
    count, length = len(case.lengths), case.lengths[0]

    def build(sets: int) -> list[Pair]:
        tables, cache = case.tables(d, device), inputs.attention_snapshot(d, case.prefix, device)
        keys, values = normal(2, count, d.num_key_value_heads, case.prefix + length, d.head_dim, device=device)
        how: dict[str, Any] = {"is_causal": True}
        if case.prefix:
            how = {"attn_mask": causal_lower_right(length, case.prefix + length)}
        pairs: list[Pair] = []
        for _ in range(sets):
            widths = (d.query_dim, d.attention_proj, d.kv_dim, d.kv_dim)
            q, proj, k, v = (normal(case.rung, n, device=device) for n in widths)
            queries = normal(count, d.num_attention_heads, length, d.head_dim, device=device)
            ours = partial(attention, q, proj, cache.k_cache, cache.v_cache, k, v, tables, d.head_dim, False)
            theirs = partial(F.scaled_dot_product_attention, queries, keys, values, enable_gqa=True, **how)
            pairs.append((ours, theirs))
        return pairs

    return Bench(operator="attention", case=case.name, cost=inputs.attention_cost(d, case), peer="SDPA", build=build)


def row_benches(d: ModelDimensions, rows: int, device: torch.device) -> Iterator[Bench]:
    """The operators whose time is that of their bytes. `rows` is a rung, so nothing is padded."""
    case, make = one_sequence(rows), partial(normal, device=device)
    assert case.rung == rows
    h, eps, two = d.hidden_size, d.rms_norm_eps, DTYPE.itemsize
    tables, kv, kept = case.tables(d, device), inputs.attention_snapshot(d, 0, device), inputs.gdn_snapshot(d, device)
    rope, norms = make(rows, d.rotary_dim), (make(d.head_dim), make(d.head_dim))
    conv, gates = make(d.conv_dim, 4), inputs.gate_weights(d, device)
    out_norm = torch.randn(d.linear_value_head_dim, device=device)
    embedding, seeds = make(d.vocab_size, h), iter(range(MAX_SETS))

    def prepare() -> Call:
        proj = make(rows, d.attention_proj)
        rest = (*norms, rope, kv.k_cache, kv.v_cache, tables, eps, 2 * d.query_dim, False)
        return partial(attention_prepare, proj, proj, *rest)

    def convolve() -> Call:
        return partial(
            gdn_conv, make(rows, d.gdn_proj), conv, *gates, tables, kept.history, kept.tail_kv, kept.tail_gates
        )

    heads = d.linear_num_value_heads
    conv_bytes = (rows * (2 * d.conv_dim + 2 * heads) + 4 * d.conv_dim) * two
    operators: dict[str, tuple[int, Callable[[], Call]]] = {
        "attention_prepare": (rows * (2 * (d.query_dim + 2 * d.kv_dim) + d.rotary_dim) * two, prepare),
        "add_rms_norm": (
            (rows * 4 + 1) * h * two, lambda: partial(add_rms_norm, make(rows, h), make(rows, h), make(h), eps),
        ),
        "gdn_conv": (conv_bytes + rows * 2 * (heads + d.linear_num_key_heads) * 4, convolve),
        "gated_rms_norm": (
            rows * 3 * d.value_dim * two,
            lambda: partial(
                gated_rms_norm, make(rows, d.value_dim), make(rows, d.gdn_proj), out_norm, eps, d.conv_dim
            ),
        ),
        "silu_mul": (
            rows * 3 * d.intermediate_size * two, lambda: partial(silu_mul, make(rows, 2 * d.intermediate_size)),
        ),
        "take_rows": (
            rows * 2 * h * two,
            lambda: partial(take_rows, embedding, case.tables(d, device, seed=next(seeds)), ROW_TOKEN, rows),
        ),
    }  # fmt: skip
    for operator, (num_bytes, one) in operators.items():

        def build(sets: int, one: Callable[[], Call] = one, num_bytes: int = num_bytes) -> list[Pair]:
            return [(one(), _copy_of(num_bytes, device)) for _ in range(sets)]

        yield Bench(operator=operator, case=case.name, cost=Cost(bytes=num_bytes), peer="copy", build=build)


def _copy_of(num_bytes: int, device: torch.device) -> Call:
    """A copy that reads half of `num_bytes` and writes as much."""
    source = normal(num_bytes // (2 * DTYPE.itemsize), device=device)
    return partial(torch.empty_like(source).copy_, source)


def benches(model: str, device: torch.device, fla: Callable[..., Any] | None) -> Iterator[Bench]:
    """All rows of the table at the head counts of a published size."""
    d = DIMENSIONS[model]
    for case in (*map(one_sequence, SEQUENCES), BRANCHES):
        yield delta_rule_bench(d, case, device, fla)
    for case in (one_sequence(LONGEST), BRANCHES):
        yield attention_bench(d, case, device)
    for rows in ROW_COUNTS:
        yield from row_benches(d, rows, device)


def sets_for(num_bytes: int, cache_bytes: int) -> tuple[int, bool]:
    """Input sets of a graph, and whether together they are twice the cache or more, so that none is found there."""
    sets = max(2, min(MAX_SETS, -(-2 * cache_bytes // num_bytes)))
    return sets, sets * num_bytes >= 2 * cache_bytes


def record_of(bench: Bench, config: BenchConfig, *, cache_bytes: int) -> Record:
    """Time a bench. An operator or a peer that cannot run is said in the record, and the others still run."""
    sets, cold = sets_for(bench.cost.bytes, cache_bytes)
    configuration: dict[str, Any] = {
        "model": config.model, "operator": bench.operator, "case": bench.case, "sets": sets, "peer_samples_us": [],
        "inputs": "cold" if cold else "L2", "peer_error": "", **vars(bench.cost), "ceilings": vars(config.ceilings),
    }  # fmt: skip
    record = Record(
        case="operators", name=f"{bench.operator}/{bench.case}", configuration=configuration, peer=bench.peer,
        floor_us=config.ceilings.floor_us(bench.cost),
    )  # fmt: skip
    replays: dict[str, Replay] = {}
    try:
        pairs = bench.build(sets)
        replays["ours"] = captured([ours for ours, _ in pairs])
        if peers := [peer for _, peer in pairs if peer is not None]:
            replays["peer"] = captured(peers)
    except Exception as error:
        if "ours" not in replays:
            record.failed = one_line(error)
            return record
        configuration["peer_error"] = one_line(error)
    times = in_turns(replays, samples=config.samples)
    record.samples_us = times["ours"]
    if theirs := times.get("peer"):
        configuration["peer_samples_us"], record.ratio = theirs, record.us / median(theirs)
    return record


def measure(config: BenchConfig) -> Iterator[Record]:
    device = require_cuda(config)
    if config.model not in DIMENSIONS:
        raise ConfigError(f"model={config.model}: operators are timed at published sizes; use {', '.join(DIMENSIONS)}")
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    for bench in benches(config.model, device, chunk_rule() if config.fla else None):
        if not config.only or bench.operator in config.only:
            yield record_of(bench, config, cache_bytes=cache_bytes)
            torch.cuda.empty_cache()


CASE = Case(
    measure=measure,
    figures={
        **{name: column(name) for name in ("operator", "case")},
        "us": lambda r: number(r.median_us, 1),
        "peer us": lambda r: number(r.ratio and r.us / r.ratio, 1),
        "ratio": lambda r: number(r.ratio),
        "floor us": lambda r: number(r.floor_us, 1),
        "inputs": column("inputs"),
        "peer": lambda r: r.configuration["peer_error"] or r.peer,
    },
)
