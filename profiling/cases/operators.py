"""Every operator beside its peer and its floor, in turns, each in a CUDA graph.

Arguments are those of a forward of three layers at real sizes, taken as the operator was called. A graph holds one call
per input set, and a replay walks all sets, so that a large operator finds neither inputs nor outputs in cache (`inputs`
says cold). Small ones fit there whatever is done (L2), as they do in a forward, where the operator before has just
written them. Peers run over inputs of the same sizes:

    delta_rule        flash-linear-attention's chunk rule, grouped heads; branches start from copies of the state
    attention         torch SDPA; branches have copies of the keys, lower-right causal (no gate, which ours applies)
    row operators     a copy that moves as many bytes

Products are the case `gemm`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from bench_options import BenchConfig
from floors import DTYPE, OPERATORS
from forwards import Workload, executor_of, plan_of
from record import Record, number, one_line
from timing import Call, Replay, captured, in_turns
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import TorchDispatchMode

from cases import Case, column
from cases.gemm import require_cuda
from engine.errors import ConfigError
from engine.load.checkpoint import RandomWeights
from engine.load.dimensions import DIMENSIONS, ModelDimensions
from engine.load.projections import FULL, LINEAR
from engine.load.weights import load_weights
from graphs.rungs import rung
from ops.tables import ROW_TOKEN

ROWS = ("64", "3136")
"""Workloads that all operators are timed on; the two mixers also on those below."""
MIXERS = {"delta_rule": ("320", "1088", "3093+255x34"), "attention": ("3093+255x34",)}
PEERS = {"delta_rule": "flash-linear-attention", "attention": "SDPA"}
MAX_SETS = 16

Operator = tuple[Callable[..., object], tuple[Any, ...]]
"""What was called, and with what."""


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the first call of each operator with so many rows of results. Tables are copied: every pass writes them."""

    def __init__(self, rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows = rows
        self.found: dict[str, Operator] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func._schema.name.partition("::")
        if space == "forkgraph":
            before = [a.clone() if isinstance(a, Tensor) and a.dtype == torch.int32 else a for a in args]
        result = func(*args, **(kwargs or {}))
        if space == "forkgraph" and len(result[0] if isinstance(result, tuple) else result) == self.rows:
            self.found.setdefault(name, (func, tuple(before)))
        return result


def calls_of(d: ModelDimensions, w: Workload, device: torch.device) -> dict[str, Operator]:
    """Each operator as it is called in the pass that runs the candidates of `w`, in none but the last layer."""
    d = replace(d, layer_types=(LINEAR, FULL, LINEAR))
    source = RandomWeights(d, seed=0, dtype=DTYPE, device=device)
    weights = load_weights(source.tensor, d, dtype=DTYPE, device=device, positions=w.prefix + w.length)
    calls = _Calls(rung(w.own_rows))
    with calls:
        executor_of(weights, d, "default", "eager").run(plan_of([w.prompts(d.vocab_size)], "levels"))
    return calls.found


def set_of(name: str, operator: Operator, d: ModelDimensions, rows: int) -> Operator:
    """The same call over activations of its own; weights, tables and what a prefix left are shared."""
    func, args = operator
    own = [a.clone() if isinstance(a, Tensor) and a.dim() > 1 and len(a) == rows else a for a in args]
    if name == "take_rows":  # other tokens, so that their rows are not in cache
        own[1] = own[1].clone()
        own[1][ROW_TOKEN : ROW_TOKEN + rows].random_(0, d.vocab_size)
    return func, tuple(own)


def peer_of(name: str, args: Sequence[Any], d: ModelDimensions, w: Workload) -> Call:
    """Raises ImportError without flash-linear-attention."""
    make = partial(torch.randn, dtype=DTYPE, device=args[0].device)
    if name == "delta_rule":
        rule = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        return partial(rule, *_grouped_heads(d, args[0], args[1], w.own_rows), **_copied_states(w, args[4]))
    if name == "attention":
        queries = make(w.candidates, d.num_attention_heads, w.length, d.head_dim)
        keys, values = make(2, w.candidates, d.num_key_value_heads, w.prefix + w.length, d.head_dim)
        mask = {"attn_mask": causal_lower_right(w.length, w.prefix + w.length)} if w.prefix else {"is_causal": True}
        return partial(F.scaled_dot_product_attention, queries, keys, values, enable_gqa=True, **mask)
    source = make(OPERATORS[name](d, w).bytes // (2 * DTYPE.itemsize))
    return partial(torch.empty_like(source).copy_, source)


def _grouped_heads(d: ModelDimensions, qkv: Tensor, gates: Tensor, rows: int) -> list[Tensor]:
    """q, k [1, rows, Hk, dk] normalised, v [1, rows, Hv, dv], g [1, rows, Hv] float32, beta [1, rows, Hv]."""
    q, k, v = torch.split_with_sizes(qkv[:rows], [d.key_dim, d.key_dim, d.value_dim], dim=1)
    q, k = (F.normalize(x.float().view(rows, d.linear_num_key_heads, -1), dim=-1).to(DTYPE) for x in (q, k))
    g, beta = gates[:rows, : 2 * d.linear_num_value_heads].chunk(2, dim=1)
    v = v.reshape(rows, d.linear_num_value_heads, -1)
    return [x.contiguous()[None] for x in (q, k, v, g, beta.to(DTYPE))]


def _copied_states(w: Workload, states: Tensor) -> dict[str, Tensor]:
    if not w.prefix:
        return {}
    ends = torch.arange(w.candidates + 1, dtype=torch.int32, device=states.device) * w.length
    return {"initial_state": states[:1].repeat(w.candidates, 1, 1, 1), "cu_seqlens": ends}


def sets_for(num_bytes: int, cache_bytes: int) -> tuple[int, bool]:
    """Input sets of a graph, and whether together they are twice the cache or more, so that none is found there."""
    sets = max(2, min(MAX_SETS, -(-2 * cache_bytes // num_bytes)))
    return sets, sets * num_bytes >= 2 * cache_bytes


def record_of(
    name: str, operator: Operator, d: ModelDimensions, w: Workload, config: BenchConfig, *, cache_bytes: int
) -> Record:
    """Time an operator. One that cannot run, or a peer, is said in the record, and the others still run."""
    cost = OPERATORS[name](d, w)
    sets, cold = sets_for(cost.bytes, cache_bytes)
    configuration: dict[str, Any] = {
        "model": config.model, "operator": name, "workload": w.name, "sets": sets, "peer_samples_us": [],
        "inputs": "cold" if cold else "L2", "peer_error": "", **vars(cost), "ceilings": vars(config.ceilings),
    }  # fmt: skip
    record = Record(
        case="operators", name=f"{name}/{w.name}", configuration=configuration, peer=PEERS.get(name, "copy"),
        floor_us=config.ceilings.floor_us(cost),
    )  # fmt: skip
    replays: dict[str, Replay] = {}
    try:
        made = [set_of(name, operator, d, rung(w.own_rows)) for _ in range(sets)]
        replays["ours"] = captured([partial(func, *args) for func, args in made])
        if config.fla or name != "delta_rule":
            replays["peer"] = captured([peer_of(name, args, d, w) for _, args in made])
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
    d, cache_bytes = DIMENSIONS[config.model], torch.cuda.get_device_properties(device).L2_cache_size
    for w in map(Workload.parse, dict.fromkeys((*ROWS, *MIXERS["delta_rule"]))):
        calls = calls_of(d, w, device)
        for name in config.only or OPERATORS:
            if w.name in ROWS or w.name in MIXERS.get(name, ()):
                yield record_of(name, calls[name], d, w, config, cache_bytes=cache_bytes)
                torch.cuda.empty_cache()


CASE = Case(
    measure=measure,
    figures={
        **{name: column(name) for name in ("operator", "workload")},
        "us": lambda r: number(r.median_us, 1),
        "peer us": lambda r: number(r.ratio and r.us / r.ratio, 1),
        "ratio": lambda r: number(r.ratio),
        "floor us": lambda r: number(r.floor_us, 1),
        "inputs": column("inputs"),
        "peer": lambda r: r.configuration["peer_error"] or r.peer,
    },
)
