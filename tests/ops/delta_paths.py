"""Paths of the delta rule, and ways to run them in pieces, shared by its tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ops.delta_rule import delta_rule_reference
from ops.sizes import CHUNK, DeltaSizes
from ops.tables import TABLE_WORDS, SegmentEntry, Source, fill


@dataclass(frozen=True)
class Place:
    """Where the operator runs: `run` has its arguments and result."""

    run: Callable[..., Tensor]
    device: torch.device


@dataclass
class Path:
    """Rows of one path as the operator takes them, and a place to run pieces of it."""

    n: DeltaSizes
    qkv: Tensor
    gates: Tensor
    run_at: Callable[..., Tensor]

    @classmethod
    def random(
        cls, place: Place, rows: int, n: DeltaSizes, *, seed: int = 0, dtype: torch.dtype = torch.float32
    ) -> Path:
        generator = torch.Generator().manual_seed(seed)
        qkv = F.silu(2 * torch.randn(rows, 2 * n.keys + n.values, generator=generator))
        g = -0.5 * F.softplus(torch.randn(rows, n.value_heads, generator=generator))
        beta = torch.rand(rows, n.value_heads, generator=generator)
        return cls.of(place, n, qkv.to(dtype), g, beta)

    @classmethod
    def of(cls, place: Place, n: DeltaSizes, qkv: Tensor, g: Tensor, beta: Tensor) -> Path:
        q, k = (x.float().unflatten(1, (n.key_heads, n.key_dim)) for x in qkv[:, : 2 * n.keys].chunk(2, 1))
        k_norm, q_norm = ((x.square().sum(2) + 1e-6).rsqrt() for x in (k, q))
        gates = torch.cat([g.float(), beta.float(), k_norm, q_norm * n.key_dim**-0.5], 1)
        return cls(n, qkv.to(place.device), gates.to(place.device), place.run)

    def slots(self, count: int) -> Slots:
        n = self.n
        kv = self.qkv.new_full((count, CHUNK, n.keys + n.values), float("nan"))
        kv[:, 1::2] = 1e30
        gates = self.gates.new_full((count, CHUNK, n.tail_gates), float("nan"))
        return Slots(kv, gates, self.gates.new_full((count, n.value_heads, n.key_dim, n.value_dim), float("nan")))

    def run(self, rows: Tensor, entries: Sequence[SegmentEntry], slots: Slots, padding: int = 0) -> Tensor:
        """Outputs of `rows` of the path, packed in the order of `entries`, with poison behind them."""
        qkv, gates = (F.pad(x[rows], (0, 0, 0, padding), value=float("nan")) for x in (self.qkv, self.gates))
        out = self.run_at(qkv, gates, slots.kv, slots.gates, slots.states, block(entries).to(qkv.device))
        return out[: len(rows)]

    def up_to(self, rows: int) -> Path:
        return Path(self.n, self.qkv[:rows], self.gates[:rows], self.run_at)

    def whole(self) -> tuple[Tensor, Tensor]:
        """Outputs and last state of the path as one segment."""
        slots = self.slots(1)
        out = self.run(span(0, len(self.qkv)), [entry(0, len(self.qkv), state_write=0)], slots)
        return out, slots.states[0]

    def reference(self, rows: int) -> tuple[Tensor, Tensor]:
        """Float64 outputs [rows, Hv dv] and the state behind them, by the recurrence."""
        n, qkv, gates = self.n, self.qkv[:rows], self.gates[:rows]
        out, state = delta_rule_reference(
            qkv, gates, key_heads=n.key_heads, value_heads=n.value_heads, key_dim=n.key_dim
        )
        return out.flatten(1), state

    def keep_tail(self, slots: Slots, slot: int, start: int, end: int) -> None:
        """What the convolution leaves of a segment's own rows in the chunk that is open at its end."""
        border = max(start, end - end % CHUNK)
        at = slice(border % CHUNK, border % CHUNK + end - border)
        slots.kv[slot, at] = self.qkv[border:end, self.n.keys :]
        slots.gates[slot, at] = self.gates[border:end, : self.n.tail_gates]


@dataclass
class Slots:
    kv: Tensor
    gates: Tensor
    states: Tensor


def block(entries: Sequence[SegmentEntry]) -> Tensor:
    table = np.zeros(TABLE_WORDS, np.int32)
    fill(table, entries, [])
    return torch.from_numpy(table)


def entry(start: int, length: int, **kwargs: Any) -> SegmentEntry:
    return SegmentEntry(start=start, token_ids=np.zeros(length, np.int32), **kwargs)


def span(first: int, last: int) -> Tensor:
    return torch.arange(first, last)


def spans(pieces: Sequence[tuple[int, int]]) -> Tensor:
    return torch.cat([span(*piece) for piece in pieces])


@dataclass
class Piece:
    """Rows first..last of the path behind the piece `parent` of the level above (-1: none)."""

    first: int
    last: int
    parent: int = -1


def run_levels(path: Path, levels: Sequence[Sequence[Piece]], padding: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """A pass per level, each behind the snapshots of the one before: outputs and states of every piece."""
    slots = path.slots(sum(len(level) for level in levels))
    outputs, states, base = [], [], 0
    sources: list[tuple[Source, ...]] = []
    for level in levels:
        entries = []
        for i, piece in enumerate(level):
            above = sources[piece.parent] if piece.parent >= 0 else ()
            read = base - len(sources) + piece.parent if above else -1
            named = dict(zip(("request", "question"), above, strict=False))
            entries.append(entry(piece.first, piece.last - piece.first, state_read=read, state_write=base + i, **named))
        out = path.run(spans([(p.first, p.last) for p in level]), entries, slots, padding)
        outputs += out.split([p.last - p.first for p in level])
        states += [slots.states[base + i] for i in range(len(level))]
        for i, piece in enumerate(level):
            path.keep_tail(slots, base + i, piece.first, piece.last)
        own = [Source.snapshot(first=p.first, length=p.last, slot=base + i, kv=0) for i, p in enumerate(level)]
        sources = [(*(sources[p.parent] if p.parent >= 0 else ()), s) for p, s in zip(level, own, strict=True)]
        base += len(level)
    return outputs, states


def run_tree(path: Path, levels: Sequence[Sequence[Piece]]) -> tuple[list[Tensor], list[Tensor]]:
    """The same in one pass: internal pieces first, parents before children."""
    entries: list[SegmentEntry] = []
    above: list[tuple[Source, ...]] = []
    row = 0
    for depth, level in enumerate(levels):
        base = len(entries)
        own = []
        for i, piece in enumerate(level):
            sources = above[piece.parent] if piece.parent >= 0 else ()
            named = dict(zip(("request", "question"), sources, strict=False))
            read = base - len(above) + piece.parent if sources else -1
            internal = depth < len(levels) - 1
            length = piece.last - piece.first
            entries.append(
                entry(piece.first, length, state_read=read, state_write=base + i, internal=internal, **named)
            )
            own.append((*sources, Source.packed(first=piece.first, row=row)))
            row += length
        above = own
    pieces = [piece for level in levels for piece in level]
    slots = path.slots(len(pieces))
    out = path.run(spans([(p.first, p.last) for p in pieces]), entries, slots)
    return list(out.split([p.last - p.first for p in pieces])), list(slots.states)


def check_pieces(path: Path, levels: Sequence[Sequence[Piece]], result: tuple[list[Tensor], list[Tensor]]) -> None:
    """Every output has the bits of the whole path, every state those of the prefix that ends at its border."""
    whole, _ = path.whole()
    borders: dict[int, Tensor] = {}
    for piece, out, state in zip((p for level in levels for p in level), *result, strict=True):
        assert torch.equal(out, whole[piece.first : piece.last]), piece
        border = piece.last - piece.last % CHUNK
        assert torch.equal(state, borders.setdefault(border, state)), piece
    longest = max(borders)
    assert torch.equal(borders[longest], path.up_to(longest).whole()[1] if longest else torch.zeros_like(borders[0]))


def check_neighbours(path: Path) -> None:
    """Branches behind one prefix of 40 rows keep their bits in any order and between neighbours of NaN and 1e30."""
    path = path.up_to(100)
    poison = Path(path.n, path.qkv.clone(), path.gates.clone(), path.run_at)
    poison.qkv[::2], poison.qkv[1::2], poison.gates[::3] = float("nan"), 1e30, float("nan")
    both = Path(path.n, torch.cat([path.qkv, poison.qkv]), torch.cat([path.gates, poison.gates]), path.run_at)
    slots = path.slots(2)
    path.run(span(0, 40), [entry(0, 40, state_write=1)], slots)
    path.keep_tail(slots, 1, 0, 40)
    source = Source.snapshot(first=0, length=40, slot=1, kv=0)
    whole, _ = path.whole()
    pieces = [(40, 47), (100, 133), (40, 100), (190, 200), (40, 41), (140, 200)]  # from 100 on it is poison
    for order in ([0, 1, 2, 3, 4, 5], [5, 2, 1, 4, 0]):
        mine = [pieces[i] for i in order]
        entries = [entry(40, last - first, state_read=1, request=source) for first, last in mine]
        outputs = both.run(spans(mine), entries, slots).split([last - first for first, last in mine])
        for (first, last), out in zip(mine, outputs, strict=True):
            if first < 100:
                assert torch.equal(out, whole[first:last])
            else:
                assert not out.isfinite().all(), "the poison did not arrive"
