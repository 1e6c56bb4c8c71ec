"""Runs the passes of a plan: tables to the device, the backbone over them, hidden states back. Knows no question.

One plan at a time; the caller serialises. Snapshots are slots in this executor's buffers, written by the prefix passes
of a plan and valid until it ends.
"""

from __future__ import annotations

import traceback
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from engine.errors import InferenceError
from engine.plan.auto import PassTimes
from engine.plan.schedule import BufferSizes, Pass, Plan
from engine.run.model import Backbone
from engine.run.ranges import request_span, span
from engine.run.snapshot import SnapshotBuffers
from engine.statistics import Counters
from graphs.capture import CapturedForwards, Forward
from graphs.rungs import rung
from ops.tables import TABLE_WORDS, fill

_BLOCKS = 64
"""Passes whose tables are copied together; bounds the pinned memory of `independent` runs."""


def _forward_over(backbone: Backbone, buffers: SnapshotBuffers) -> Forward:
    """Knows no executor, so that graphs and buffers go with the last reference to theirs, not with a collection."""

    def forward(tables: Tensor, rows: int, reads: int) -> Tensor:
        hidden: Tensor = backbone(tables, rows, reads, buffers.layers)
        return hidden

    return forward


class Executor:
    """Owns the snapshot buffers of one backbone on one device, and the CUDA graphs that hold their addresses."""

    def __init__(self, backbone: Backbone, *, capture_limit_bytes: int = 0) -> None:
        """With `capture_limit_bytes`, forwards are replayed from CUDA graphs up to that much device memory."""
        embedding = backbone.weights.embedding
        self.backbone, self.device = backbone, embedding.device
        self.buffers = SnapshotBuffers(backbone.dimensions, dtype=embedding.dtype, device=self.device)
        self._eager = _forward_over(backbone, self.buffers)
        # Every pass reads its tables here: graphs hold the address, and compiled code tells a view from its base.
        self._tables = torch.zeros(TABLE_WORDS, dtype=torch.int32, device=self.device)
        self.captured = (
            CapturedForwards(self._eager, self._tables, limit_bytes=capture_limit_bytes)
            if capture_limit_bytes
            else None
        )
        self._missed: dict[tuple[int, int], Tensor] = {}
        self.times = PassTimes()

    def run(self, plan: Plan, *, name: str | None = None) -> tuple[Tensor, Counters]:
        """Final hidden states [plan.num_reads, h] on the CPU in the model's dtype, and what was run.

        `name` is what a profiler's ranges call it. Returns only after the device is done, also on error. Raises
        InferenceError when a pass fails.
        """
        counters = Counters()
        try:
            with self._on_device(), request_span(plan.schedule, name, rows=plan.rows, segments=plan.segments):
                self._reserve(plan.buffers)
                hidden = self._hidden_states(plan, counters).cpu()
        except Exception as error:
            self._synchronize()
            traceback.clear_frames(error.__traceback__)  # they hold what the failed pass had allocated
            raise InferenceError(f"model inference failed: {type(error).__name__}: {error}") from error
        order = torch.tensor([place for one in plan.passes for place in one.outputs])
        return torch.empty_like(hidden).index_copy_(0, order, hidden), counters

    def _hidden_states(self, plan: Plan, counters: Counters) -> Tensor:
        """All passes; the hidden states [plan.num_reads, h] on the device, pass by pass."""
        hidden = self.backbone.weights.embedding.new_empty(plan.num_reads, self.backbone.dimensions.hidden_size)
        done = 0
        for first in range(0, len(plan.passes), _BLOCKS):
            group = plan.passes[first : first + _BLOCKS]
            for block, one in zip(self._blocks(group, counters), group, strict=True):
                reads = len(one.reads)
                hidden[done : done + reads] = self._forward(block, one)
                done += reads
        return hidden

    def _blocks(self, passes: tuple[Pass, ...], counters: Counters) -> Tensor:
        """The tables of each pass, filled on the host and copied to the device together."""
        host = torch.empty(len(passes), TABLE_WORDS, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        blocks = host.numpy()
        for block, one in zip(blocks, passes, strict=True):
            rows = fill(block, one.entries, one.reads)
            counters.add(one.kind, rows, len(one.entries))
        return host.to(self.device, non_blocking=True)

    def capture_missed(self) -> None:
        """Capture the forwards that ran uncaptured since the last call, largest first, so that the others fit in."""
        missed, self._missed = self._missed, {}
        if self.captured is not None:
            with self._on_device():
                for rows, reads in sorted(missed, reverse=True):
                    self.captured.capture(rows, reads, missed[rows, reads])
                    seconds = self.captured.replay_seconds.get((rows, reads))
                    if seconds is not None:
                        self.times.record(rows, seconds)

    @property
    def has_missed(self) -> bool:
        """Whether `capture_missed` has something to do."""
        return bool(self._missed)

    def pool_rows(self, rows: int) -> int:
        """Rows of the largest captured forward once one of `rows` is captured too; 0 where none is."""
        return 0 if self.captured is None else max([rows, *(captured for captured, _ in self.captured.keys)])

    def release(self) -> None:
        """Wait for the device and drop graphs, buffers and weights; the executor is not used again."""
        self._synchronize()
        if self.captured is not None:
            self.captured.drop()
        self.captured = None
        self._missed.clear()
        self.buffers.drop()
        del self.backbone, self._eager, self._tables

    def _reserve(self, sizes: BufferSizes) -> None:
        if self.captured is not None and not self.buffers.fits(sizes):
            self.captured.drop()  # its graphs hold the addresses of the buffers that are replaced
            self._missed.clear()
        self.buffers.reserve(sizes)

    def _forward(self, block: Tensor, one: Pass) -> Tensor:
        """Hidden states [reads, h] of one pass with these tables, valid until the next."""
        reads = len(one.reads)
        rows, padded = rung(one.rows), rung(reads) if reads else 0
        with span(one.kind, rows=one.rows, rung=rows, segments=len(one.entries), reads=reads):
            self._tables.copy_(block, non_blocking=True)
            if self.captured is not None:
                hidden = self.captured.replay(rows, padded)
                if hidden is not None:
                    return hidden[:reads]
                if self.captured.wants(rows, padded):
                    self._missed[rows, padded] = block.clone()
            return self._eager(self._tables, rows, padded)[:reads]

    def _on_device(self) -> AbstractContextManager[object]:
        """Triton launches on the current device, which belongs to the thread."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
