"""One attention layer whose passes can be split in every way, shared by its tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ops.attention import attention
from ops.attention_prepare import attention_prepare
from ops.kernels.attention import launch_attention
from ops.tables import TABLE_WORDS, SegmentEntry, Source, fill

NAN = float("nan")
EPS = 1e-6
THETA = 1e7
ON_GPU = torch.cuda.is_available()


@dataclass(frozen=True)
class Heads:
    heads: int
    kv_heads: int
    d: int

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def kv_offset(self) -> int:
        return 2 * self.heads * self.d

    @property
    def columns(self) -> int:
        return self.kv_offset + 2 * self.kv_heads * self.d


@dataclass(frozen=True)
class Kernels:
    name: str
    prepare: Callable[..., tuple[Tensor, Tensor, Tensor]]
    attention: Callable[..., Tensor]
    device: str


CPU = Kernels("cpu", attention_prepare, attention, "cpu")
# Without a GPU the Triton kernel runs in the interpreter, behind the CPU kernel of what comes before it.
TRITON = Kernels("triton", attention_prepare, launch_attention, "cuda" if ON_GPU else "cpu")


class Layer:
    """One attention layer's constants, and buffers whose unused rows are NaN."""

    def __init__(self, h: Heads, kernels: Kernels, *, kv_rows: int = 640, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(1)
        self.h, self.kernels, self.dtype = h, kernels, dtype
        self.q_norm, self.k_norm = (self._to(0.3 * torch.randn(h.d, generator=generator)) for _ in range(2))
        rot = h.d // 4
        angles = torch.arange(2048)[:, None] * THETA ** (-torch.arange(0, rot, 2) / rot)
        self.rope = self._to(torch.cat([angles.cos(), angles.sin()], dim=-1))
        self.k_cache = torch.full((kv_rows, h.kv_heads * h.d), NAN, dtype=dtype, device=kernels.device)
        self.v_cache = self.k_cache.clone()

    def _to(self, x: Tensor) -> Tensor:
        return x.to(self.kernels.device, self.dtype)

    def rows(self, count: int, *, seed: int = 2) -> Tensor:
        """Projected rows [count, columns]."""
        return self._to(torch.randn(count, self.h.columns, generator=torch.Generator().manual_seed(seed)))

    def prepare(self, proj: Tensor, tables: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.kernels.prepare(
            proj, proj, self.q_norm, self.k_norm, self.rope, self.k_cache, self.v_cache, tables, EPS,
            self.h.kv_offset, False,
        )  # fmt: skip

    def attend(self, q: Tensor, q_proj: Tensor, k: Tensor, v: Tensor, tables: Tensor, *, reads: bool = False) -> Tensor:
        return self.kernels.attention(q, q_proj, self.k_cache, self.v_cache, k, v, tables, self.h.d, reads)

    def tables(self, entries: Sequence[SegmentEntry], reads: Sequence[tuple[int, int]] = ()) -> Tensor:
        block = np.zeros(TABLE_WORDS, np.int32)
        fill(block, entries, reads)
        return torch.from_numpy(block).to(self.kernels.device)

    def run(self, proj: Sequence[Tensor], entries: Sequence[SegmentEntry]) -> list[Tensor]:
        """One pass over segments with these projected rows, and a few rows of padding; outputs by segment."""
        padding = self._to(torch.full((5, self.h.columns), NAN))
        packed = torch.cat([*proj, padding])
        tables = self.tables(entries)
        out = self.attend(*self._split(packed, tables), tables)
        return list(out[: -len(padding)].split([len(rows) for rows in proj]))

    def _split(self, packed: Tensor, tables: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v = self.prepare(packed, tables)
        return q, packed, k, v

    def alone(self, proj: Tensor) -> Tensor:
        return self.run([proj], [root(len(proj))])[0]


def root(length: int, **options: Any) -> SegmentEntry:
    return SegmentEntry(start=0, token_ids=np.zeros(length, np.int32), **options)


def child(start: int, length: int, **options: Any) -> SegmentEntry:
    return SegmentEntry(start=start, token_ids=np.zeros(length, np.int32), **options)


def snapshot(layer: Layer, proj: Tensor, *, kv: int = 7) -> tuple[Tensor, Source]:
    """Run `proj` as a prefix that leaves its keys and values at row position + kv."""
    out = layer.run([proj], [root(len(proj), kv_write=kv)])[0]
    return out, Source.snapshot(first=0, length=len(proj), slot=0, kv=kv)


def same(found: Tensor, wanted: Tensor) -> bool:
    return bool(wanted.isfinite().all()) and torch.equal(found, wanted)
