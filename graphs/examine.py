"""A small tree of prompts through every Triton operator but the products of weights: what a broken compiler breaks.

An operator must agree with its CPU kernel on the same inputs, in what it returns and in what it writes. A prompt that
is split, with a branch packed beside another, must have the bits it has in one piece and alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isnan, sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ops import tables as t
from ops.add_rms_norm import add_rms_norm
from ops.add_rows import add_rows
from ops.attention import attention
from ops.attention_prepare import attention_prepare
from ops.delta_rule import delta_rule
from ops.gated_rms_norm import gated_rms_norm
from ops.gdn_conv import gdn_conv
from ops.silu_mul import silu_mul
from ops.sizes import CHUNK, CONV_HISTORY
from ops.take_rows import take_rows

Operators = Mapping[str, Callable[..., Any]]

_EPS = 1e-6
_STEP = 2.0**-7
"""From one bfloat16 to the next, relative to the number, at most."""
ALLOWED = {
    "take_rows": 0.0,
    "add_rows": 0.0,  # a float32 sum, rounded once
    "add_rms_norm": _STEP,
    "silu_mul": 2 * _STEP,  # products of noise: a row may have most of its length in one element
    "gated_rms_norm": 2 * _STEP,
    "gdn_conv": _STEP,
    "attention_prepare": _STEP,
    "attention": 2 * _STEP,  # the CPU does not round weights
    "delta_rule": 2 * _STEP,  # nor states, inverses and scores
}
"""Largest error of an operator's worst row. Sums in another order move few elements by a step; rounded operands stay
below one with the delta rule, below half of one with attention."""

# A prefix that ends inside a chunk and is kept; a question across the border at 128 in the pass of its two branches,
# which cross the one at 192. Token ids say where in `_ROWS` rows of input a row has its own.
_PREFIX, _QUESTION = np.arange(70, dtype=np.int32), np.arange(70, 130, dtype=np.int32)
_BRANCHES = np.arange(130, 195, dtype=np.int32), np.arange(195, 258, dtype=np.int32)
_ROWS = 258
_PREFIX_PASS = [t.SegmentEntry(start=0, token_ids=_PREFIX, state_write=1, slot_write=1, kv_write=3)]
_KEPT = t.Source.snapshot(first=0, length=70, slot=1, kv=3)
_KV_ROWS = 75
_ASKED = t.Source.packed(first=70, row=0)
_TREE_PASS = [
    t.SegmentEntry(start=70, token_ids=_QUESTION, request=_KEPT, state_read=1, state_write=2, internal=True),
    *(t.SegmentEntry(start=130, token_ids=b, request=_KEPT, question=_ASKED, state_read=2) for b in _BRANCHES),
]
_READS = [(0, 59), (1, 61), (1, 64), (2, 0), (2, 62)]


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """What the binaries of the kernels are specialised by."""

    hidden_size: int
    intermediate_size: int
    gdn_proj: int
    """Columns of the delta rule's fused input projection."""
    key_heads: int
    value_heads: int
    key_dim: int
    """Columns of a key head of the delta rule."""
    value_dim: int
    heads: int
    """Query heads of attention."""
    kv_heads: int
    head_dim: int
    rotary_dim: int


def _gdn_conv(*args: Any) -> tuple[Tensor, ...]:
    """The gates by kind as well, since kinds differ in size."""
    qkv, gates = gdn_conv(*args)
    value_heads = args[2].shape[0]
    key_heads = gates.shape[1] // 2 - value_heads
    return qkv, gates, *gates.split([value_heads, value_heads, key_heads, key_heads], 1)


def _attention_prepare(*args: Any) -> tuple[Tensor, ...]:
    """Zeros for keys and values that went to the cache, which the operator leaves undefined."""
    q, k, v = attention_prepare(*args)
    tables = args[7]
    segments = tables[t.ROW_SEGMENT : t.ROW_SEGMENT + len(k)]
    kept = tables[t.SEGMENTS + t.SEG_KV_WRITE * t.MAX_SEGMENTS + segments][:, None] >= 0
    return q, k.masked_fill(kept, 0), v.masked_fill(kept, 0)


OPERATORS: Operators = {
    "take_rows": take_rows,
    "add_rows": add_rows,
    "add_rms_norm": add_rms_norm,
    "silu_mul": silu_mul,
    "gated_rms_norm": gated_rms_norm,
    "gdn_conv": _gdn_conv,
    "delta_rule": delta_rule,
    "attention_prepare": _attention_prepare,
    "attention": attention,
}


def examine(n: LayerSizes, device: torch.device, operators: Operators = OPERATORS) -> str | None:
    """What is wrong first with these operators in bfloat16 on `device`, which must be current; None: nothing is."""
    trial = _Trial(n, device, operators)
    prefix, tree = trial.run(_PREFIX_PASS, check=True), trial.run(_TREE_PASS, _READS, check=True)
    if trial.fault is not None:
        return trial.fault
    row = len(_QUESTION)
    for branch in _BRANCHES:
        path = np.concatenate([_PREFIX, _QUESTION, branch])
        own = slice(row, row := row + len(branch))
        for name, alone in trial.run([t.SegmentEntry(start=0, token_ids=path)]).items():
            for first, packed, whole in zip(prefix[name], tree[name], alone, strict=True):
                if not torch.equal(torch.cat([first, packed[: len(_QUESTION)], packed[own]]), whole):
                    return f"{name}: bits of a branch depend on a sibling or on how its prompt is split"
    return None


class _Trial:
    """Inputs of all rows, weights and snapshot buffers on one device, and the first fault found."""

    def __init__(self, n: LayerSizes, device: torch.device, operators: Operators) -> None:
        self.n, self.device, self.operators = n, device, operators
        self.fault: str | None = None
        generator = torch.Generator().manual_seed(0)
        bf16, f32 = torch.bfloat16, torch.float32

        def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = bf16) -> Tensor:
            return (scale * torch.randn(*shape, generator=generator)).to(device, dtype)

        def zeros(*shape: int, dtype: torch.dtype = bf16) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        keys, values, kv = n.key_heads * n.key_dim, n.value_heads * n.value_dim, n.kv_heads * n.head_dim
        self.channels, self.q_columns = 2 * keys + values, 2 * n.heads * n.head_dim
        self.x, self.delta = normal(_ROWS, n.hidden_size), normal(_ROWS, n.hidden_size)
        self.norm, self.gate_up = normal(n.hidden_size, scale=0.3), normal(_ROWS, 2 * n.intermediate_size)
        self.gdn_proj, self.attention_proj = normal(_ROWS, n.gdn_proj), normal(_ROWS, self.q_columns + 2 * kv)
        a_log = normal(n.value_heads, dtype=f32) - 4  # so that states outlive a chunk
        self.conv = normal(self.channels, CONV_HISTORY + 1), a_log, normal(n.value_heads)
        self.history = zeros(2, CONV_HISTORY, self.channels)
        self.tail = zeros(2, CHUNK, keys + values), zeros(2, CHUNK, 2 * n.value_heads + n.key_heads, dtype=f32)
        self.states = zeros(3, n.value_heads, n.key_dim, n.value_dim, dtype=f32)
        self.out_norm = normal(n.value_dim, dtype=f32)
        angles = torch.arange(_ROWS)[:, None] * 1e4 ** (-torch.arange(0, n.rotary_dim, 2) / n.rotary_dim)
        rope = torch.cat([angles.cos(), angles.sin()], 1).to(device, bf16)
        self.head_norms_and_rope = normal(n.head_dim, scale=0.3), normal(n.head_dim, scale=0.3), rope
        self.cache = zeros(_KV_ROWS, kv), zeros(_KV_ROWS, kv)

    def run(
        self, entries: Sequence[t.SegmentEntry], reads: Sequence[tuple[int, int]] = (), check: bool = False
    ) -> dict[str, tuple[Tensor, ...]]:
        """One pass through every operator; what each gives for its rows, by name."""

        def call(name: str, *args: Any) -> tuple[Tensor, ...]:
            return self._call(name, args, check)

        def attend(q_proj: Tensor, kv_proj: Tensor, kv_offset: int, reads: bool) -> tuple[Tensor, ...]:
            prepared = (q_proj, kv_proj, *self.head_norms_and_rope, *self.cache, tables, _EPS, kv_offset, reads)
            q, k, v = call("attention_prepare", *prepared)
            return call("attention", q, q_proj, *self.cache, k, v, tables, self.n.head_dim, reads)

        block = np.zeros(t.TABLE_WORDS, np.int32)
        rows = t.fill(block, entries, reads)
        tables = torch.from_numpy(block).to(self.device)
        inputs = self.delta, self.gate_up, self.gdn_proj, self.attention_proj
        delta, gate_up, proj, fused = (x[tables[t.ROW_TOKEN : t.ROW_TOKEN + rows]] for x in inputs)
        found = {"take_rows": call("take_rows", self.x, tables, t.ROW_TOKEN, rows)}
        (x,) = found["take_rows"]
        found["add_rows"] = call("add_rows", x, delta)
        found["add_rms_norm"] = call("add_rms_norm", x, delta, self.norm, _EPS)
        found["silu_mul"] = call("silu_mul", gate_up)
        found["gdn_conv"] = call("gdn_conv", proj, *self.conv, tables, self.history, *self.tail)
        found["delta_rule"] = call("delta_rule", *found["gdn_conv"][:2], *self.tail, self.states, tables)
        (o,) = found["delta_rule"]
        found["gated_rms_norm"] = call("gated_rms_norm", o, proj, self.out_norm, _EPS, self.channels)
        found["attention"] = attend(fused, fused, self.q_columns, False)
        if reads:  # as in a last layer
            call("take_rows", x, tables, t.READ_ROWS, len(reads))
            read = tables[t.READ_ROWS : t.READ_ROWS + len(reads)]
            q_proj, kv_proj = fused[read, : self.q_columns], fused[:, self.q_columns :].contiguous()
            (o_read,) = attend(q_proj.contiguous(), kv_proj, 0, True)
            if self.fault is None and not torch.equal(o_read, found["attention"][0][read]):
                self.fault = "attention: bits of a row depend on which rows are read"
        return found

    def _call(self, name: str, args: tuple[Any, ...], check: bool) -> tuple[Tensor, ...]:
        """What the operator returns; with `check`, that and what it wrote are held against its CPU kernel."""
        copies = [x.to("cpu", copy=True) if check and isinstance(x, Tensor) else x for x in args]
        found = _tuple(self.operators[name](*args))
        if check and self.fault is None:
            pairs = zip((*found, *args), (*_tuple(OPERATORS[name](*copies)), *copies), strict=True)
            error = max(_error(*pair) for pair in pairs if isinstance(pair[0], Tensor) and pair[0].is_floating_point())
            if error > ALLOWED[name]:
                self.fault = f"{name}: error {error:.2g} against the CPU, allowed {ALLOWED[name]:.2g}"
        return found


def _tuple(found: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def _error(found: Tensor, wanted: Tensor) -> float:
    """L2 of the worst row's difference, relative to the root mean square of rows that are not zero. A head's state
    counts as a row."""
    width = wanted.shape[-2:].numel() if wanted.dim() == 4 else wanted.shape[-1]
    wanted = wanted.double().reshape(-1, width)
    difference = (found.cpu().double().reshape(-1, width) - wanted).norm(dim=1).max().item()
    rows = int(wanted.any(1).sum())
    if difference == 0.0 or not rows:
        return 0.0 if difference == 0.0 else inf
    error = difference * sqrt(rows) / wanted.norm().item()
    return inf if isnan(error) else error
