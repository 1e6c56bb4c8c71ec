"""Every Triton operator but the products, run once on a GPU and compiler that have no record of it.

A version of the compiler can break a kernel. Each operator runs in bfloat16 or float32 over a small pass of three
segments, one of them the continuation of another: its results are held against its own CPU kernel, within a tolerance,
and the rows of each segment against those of its path alone, bit for bit. What passed is kept on disk. Needs no model.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphs.tuning.table import digest_of, write_whole
from graphs.tuning.tuner import UnknownEnvironmentError, driver_version, sources_hash
from ops.add_rms_norm import add_rms_norm
from ops.add_rows import add_rows
from ops.attention import attention
from ops.attention_prepare import attention_prepare
from ops.delta_rule import delta_rule
from ops.gated_rms_norm import gated_rms_norm
from ops.gdn_conv import gdn_conv
from ops.silu_mul import silu_mul
from ops.tables import CHUNK, CONV_HISTORY, ROW_TOKEN, TABLE_WORDS, Int32Array, SegmentEntry, Source, fill
from ops.take_rows import take_rows

Operator = Callable[..., Any]
Tensors = dict[str, Tensor]

OPERATORS: dict[str, Operator] = {
    "take_rows": take_rows,
    "add_rms_norm": add_rms_norm,
    "gdn_conv": gdn_conv,
    "delta_rule": delta_rule,
    "gated_rms_norm": gated_rms_norm,
    "attention_prepare": attention_prepare,
    "attention": attention,
    "silu_mul": silu_mul,
    "add_rows": add_rows,
}
TOLERANCE = {torch.bfloat16: (0.02, 0.25), torch.float32: (1e-3, 0.01)}
"""What a tensor may be off from the CPU kernel's, by norms; and one value, in root mean squares of its row and, a
sixteenth of that, in its own size."""

_EPS = 1e-6
_VOCABULARY = 512
logger = logging.getLogger("forkgraph")


class SelfTestError(RuntimeError):
    """A kernel computes something else than its operator says. The message names operator, error and versions."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A layer of each kind; the heads' sizes are those of the published models."""

    hidden: int = 256
    key_heads: int = 4
    value_heads: int = 8
    delta_head: int = 128
    heads: int = 4
    kv_heads: int = 1
    attention_head: int = 256
    rotary: int = 64
    lengths: tuple[int, int, int] = (70, 3, 129)
    """Rows of a prefix, of a path of its own, and of the prefix' continuation, which begins the chunk that it ends in:
    of an open chunk a segment keeps its own rows only."""

    @property
    def keys(self) -> int:
        return self.key_heads * self.delta_head

    @property
    def values(self) -> int:
        return self.value_heads * self.delta_head

    @property
    def channels(self) -> int:
        return 2 * self.keys + self.values


def self_test(device: torch.device, cache_dir: Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Run the operators of this CUDA device, unless they passed before on this GPU, with these versions and sources.

    Raises SelfTestError.
    """
    import triton

    try:
        driver = driver_version()
    except UnknownEnvironmentError:
        driver = "unknown"
    versions = {
        "gpu": torch.cuda.get_device_name(device),
        "driver": driver,
        "torch": str(torch.__version__),
        "triton": triton.__version__,
        "sources": sources_hash(_sources()),
        "dtype": str(dtype),
    }
    path = cache_dir / "selftest" / f"{digest_of(versions)}.json"
    if _passed(path, versions):
        return
    try:
        with torch.cuda.device(device):
            worst = check_operators(device, dtype)
    except SelfTestError as error:
        named = ", ".join(f"{name} {versions[name]}" for name in ("driver", "torch", "triton"))
        raise SelfTestError(f"{error} ({versions['gpu']}, {named}); run another version of Triton") from None
    try:
        write_whole(path, json.dumps({"versions": versions, "worst": worst}, indent=1) + "\n")
    except OSError as error:
        logger.warning(
            "%s cannot be written (%s), so the next start tests the kernels again; name another folder with cache_dir",
            path, error.strerror or error,
        )  # fmt: skip


def check_operators(
    device: torch.device,
    dtype: torch.dtype,
    *,
    sizes: Sizes | None = None,
    operators: Mapping[str, Operator] = OPERATORS,
) -> dict[str, float]:
    """Per operator the worst error over what is tolerated. Raises SelfTestError for one above 1 or other bits."""
    n = sizes or Sizes()
    token_ids = np.random.default_rng(0).integers(_VOCABULARY, size=sum(n.lengths), dtype=np.int32)
    packed, alone = _packed(n, token_ids), _alone(n, token_ids)
    here = _tensors(n, dtype, packed)
    there = {name: tensor.to(device) for name, tensor in here.items()}
    worst = {}
    for name, operator in operators.items():
        call = _CALLS[name]
        found, wanted = call(operator, n, there, packed.to(device)), call(OPERATORS[name], n, here, packed)
        worst[name] = max(_error(a, b, dtype) for a, b in zip(found.all, wanted.all, strict=True))
        if not worst[name] <= 1:
            raise SelfTestError(f"{name} is off by {worst[name]:.3g} times what is tolerated")
        for i, (path, own) in enumerate(zip(alone, packed.segments, strict=True)):
            single = call(operator, n, there, path.to(device))
            same = [torch.equal(a[-len(own) :], b[own]) for a, b in zip(single.by_row, found.by_row, strict=True)]
            same += [torch.equal(a[0], b[i]) for a, b in zip(single.by_slot, found.by_slot, strict=True)]
            if not all(same):
                raise SelfTestError(f"{name} gives the rows of a segment other bits when its path runs alone")
    return worst


def _error(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> float:
    """The largest of what is off over what is tolerated; infinite for a value that is not finite."""
    of_all, of_row = TOLERANCE[dtype]
    found, wanted = found.to("cpu", torch.float32).flatten(1), wanted.float().flatten(1)
    off, row = (found - wanted).abs(), wanted.square().mean(1, keepdim=True).sqrt()
    ratio = torch.where(off == 0, 0.0, off / (of_row * (row + wanted.abs() / 16)))
    whole = off.norm() / (of_all * wanted.norm())
    return max(float(torch.where(ratio.isfinite(), ratio, torch.inf).max()), float(whole) if whole > 0 else 0.0)


@dataclass(frozen=True)
class _Pass:
    """Which rows of the data a pass packs, its tables, and the packed rows of each segment; slot i is segment i's."""

    rows: Tensor
    tables: Tensor
    segments: tuple[range, ...]

    @classmethod
    def of(cls, entries: list[SegmentEntry], rows: Tensor) -> _Pass:
        block = np.zeros(TABLE_WORDS, np.int32)
        fill(block, entries, [])
        bounds = list(accumulate((e.length for e in entries), initial=0))
        return cls(rows, torch.from_numpy(block), tuple(range(a, b) for a, b in pairwise(bounds)))

    def to(self, device: torch.device) -> _Pass:
        return _Pass(self.rows.to(device), self.tables.to(device), self.segments)


def _packed(n: Sizes, token_ids: Int32Array) -> _Pass:
    """A prefix, a path of its own, and the prefix' continuation, in one pass."""
    first, second, _ = n.lengths
    prefix, other, rest = np.split(token_ids, [first, first + second])
    entries = [
        SegmentEntry(start=0, token_ids=prefix, state_write=0, slot_write=0, internal=True),
        SegmentEntry(start=0, token_ids=other, state_write=1, slot_write=1),
        SegmentEntry(
            start=first, token_ids=rest, request=Source.packed(first=0, row=0), state_read=0, state_write=2,
            slot_write=2,
        ),
    ]  # fmt: skip
    return _Pass.of(entries, torch.arange(len(token_ids), device="cpu"))


def _alone(n: Sizes, token_ids: Int32Array) -> list[_Pass]:
    """Each segment's whole path as a pass of one segment."""
    first, second, third = n.lengths
    own = [(0, first), (first, first + second), (first + second, first + second + third)]
    paths = [np.arange(*own[0]), np.arange(*own[1]), np.concatenate([np.arange(*own[0]), np.arange(*own[2])])]
    return [
        _Pass.of(
            [SegmentEntry(start=0, token_ids=token_ids[rows], state_write=0, slot_write=0)], torch.from_numpy(rows)
        )
        for rows in paths
    ]


def _tensors(n: Sizes, dtype: torch.dtype, packed: _Pass) -> Tensors:
    """Random rows and weights on the CPU; what one operator hands to another comes from the CPU kernels."""
    generator = torch.Generator("cpu").manual_seed(0)

    def normal(*shape: int, scale: float = 1.0, as_dtype: torch.dtype = dtype) -> Tensor:
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")
        return (scale * drawn).to(as_dtype)

    rows, gates = sum(n.lengths), 2 * n.value_heads
    places = torch.arange(rows, dtype=torch.float32, device="cpu")
    angles = places[:, None] * torch.logspace(0, -4, n.rotary // 2, dtype=torch.float32, device="cpu")
    t = {
        "embedding": normal(_VOCABULARY, n.hidden),
        "x": normal(rows, n.hidden),
        "delta": normal(rows, n.hidden),
        "norm": normal(n.hidden, scale=0.3),
        "gdn_proj": normal(rows, n.channels + n.values + gates + -gates % 16),
        "conv": normal(n.channels, CONV_HISTORY + 1, scale=0.5),
        "a_log": normal(n.value_heads, as_dtype=torch.float32),
        "dt_bias": normal(n.value_heads),
        "gated_norm": 1 + normal(n.delta_head, scale=0.3, as_dtype=torch.float32),
        "attention_proj": normal(rows, 2 * (n.heads + n.kv_heads) * n.attention_head),
        "q_norm": normal(n.attention_head, scale=0.3),
        "k_norm": normal(n.attention_head, scale=0.3),
        "rope": torch.cat([angles.cos(), angles.sin()], 1).to(dtype),
    }
    t["qkv"], t["gates"] = _gdn_conv(gdn_conv, n, t, packed).by_row
    (t["o"],) = _delta_rule(delta_rule, n, t, packed).by_row
    t["q"], t["k"], t["v"] = _attention_prepare(attention_prepare, n, t, packed).by_row
    return t


@dataclass(frozen=True)
class _Results:
    """Tensors with one row per packed row, and with one per slot."""

    by_row: tuple[Tensor, ...]
    by_slot: tuple[Tensor, ...] = ()

    @property
    def all(self) -> tuple[Tensor, ...]:
        return self.by_row + self.by_slot


def _gdn_conv(operator: Operator, n: Sizes, t: Tensors, p: _Pass) -> _Results:
    history = t["x"].new_zeros(len(p.segments), CONV_HISTORY, n.channels)
    tail_kv, tail_gates = _tails(n, t, p)
    weights = t["conv"], t["a_log"], t["dt_bias"]
    rows = operator(t["gdn_proj"][p.rows], *weights, p.tables, history, tail_kv, tail_gates)
    return _Results(tuple(rows), (history, tail_kv, tail_gates))


def _delta_rule(operator: Operator, n: Sizes, t: Tensors, p: _Pass) -> _Results:
    states = t["a_log"].new_zeros(len(p.segments), n.value_heads, n.delta_head, n.delta_head)
    out = operator(t["qkv"][p.rows], t["gates"][p.rows], *_tails(n, t, p), states, p.tables)
    return _Results((out,), (states,))


def _tails(n: Sizes, t: Tensors, p: _Pass) -> tuple[Tensor, Tensor]:
    slots = len(p.segments)
    gates = t["a_log"].new_zeros(slots, CHUNK, 2 * n.value_heads + n.key_heads)
    return t["x"].new_zeros(slots, CHUNK, n.keys + n.values), gates


def _attention_prepare(operator: Operator, n: Sizes, t: Tensors, p: _Pass) -> _Results:
    proj, offset = t["attention_proj"][p.rows], 2 * n.heads * n.attention_head
    weights = t["q_norm"], t["k_norm"], t["rope"]
    return _Results(tuple(operator(proj, proj, *weights, *_caches(n, t), p.tables, _EPS, offset, False)))


def _attention(operator: Operator, n: Sizes, t: Tensors, p: _Pass) -> _Results:
    q, proj, k, v = (t[name][p.rows] for name in ("q", "attention_proj", "k", "v"))
    return _Results((operator(q, proj, *_caches(n, t), k, v, p.tables, n.attention_head, False),))


def _caches(n: Sizes, t: Tensors) -> tuple[Tensor, Tensor]:
    """Of keys and values; all of them are packed here, so that none is read or written."""
    k_cache = t["x"].new_zeros(CHUNK, n.kv_heads * n.attention_head)
    return k_cache, k_cache.clone()


def _gated_rms_norm(operator: Operator, n: Sizes, t: Tensors, p: _Pass) -> _Results:
    return _Results((operator(t["o"][p.rows], t["gdn_proj"][p.rows], t["gated_norm"], _EPS, n.channels),))


_CALLS: dict[str, Callable[[Operator, Sizes, Tensors, _Pass], _Results]] = {
    "take_rows": lambda op, n, t, p: _Results((op(t["embedding"], p.tables, ROW_TOKEN, len(p.rows)),)),
    "add_rms_norm": lambda op, n, t, p: _Results(tuple(op(t["x"][p.rows], t["delta"][p.rows], t["norm"], _EPS))),
    "gdn_conv": _gdn_conv,
    "delta_rule": _delta_rule,
    "gated_rms_norm": _gated_rms_norm,
    "attention_prepare": _attention_prepare,
    "attention": _attention,
    "silu_mul": lambda op, n, t, p: _Results((op(t["x"][p.rows]),)),
    "add_rows": lambda op, n, t, p: _Results((op(t["x"][p.rows], t["delta"][p.rows]),)),
}


def _sources() -> list[str]:
    root = Path(__file__).resolve().parents[1]
    return sorted(str(path.relative_to(root)) for path in (root / "ops").rglob("*.py"))


def _passed(path: Path, versions: Mapping[str, str]) -> bool:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none, or a damaged one, which is written again
        return False
    return isinstance(found, dict) and found.get("versions") == versions
