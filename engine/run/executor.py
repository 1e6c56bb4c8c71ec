"""Runs the passes of a plan: tables to the device, the backbone over them, hidden states back. Knows no question.

One plan at a time; the caller serialises. Snapshots are slots in this executor's buffers, written by the prefix passes
of a plan and valid until it ends.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from engine.errors import InferenceError
from engine.load.environment import explain_failure
from engine.plan.schedule import BufferSizes, Pass, Plan
from engine.run.device import computing
from engine.run.model import Backbone
from engine.run.ranges import request_span, span
from engine.run.snapshot import SnapshotBuffers
from engine.statistics import Counters
from graphs.capture import CapturedForwards, Forward, GraphKey
from graphs.rungs import rung
from ops.tables import MAX_SEGMENTS, TABLE_WORDS, SegmentEntry, fill

logger = logging.getLogger("forkgraph")

_BLOCKS = 64
"""Passes whose tables are copied together; bounds the pinned memory of `independent` runs."""


def _forward_over(backbone: Backbone, buffers: SnapshotBuffers) -> Forward:
    """Knows no executor, so that graphs and buffers go with the last reference to theirs, not with a collection."""

    def forward(tables: Tensor, rows: int, reads: int) -> Tensor:
        hidden: Tensor = backbone.forward(tables, rows, reads, buffers.layers)
        return hidden

    return forward


class Executor:
    """Owns the snapshot buffers of one backbone on one device, and the CUDA graphs that hold their addresses."""

    def __init__(self, backbone: Backbone, *, capture_limit_bytes: int = 0) -> None:
        """With `capture_limit_bytes`, forwards are replayed from CUDA graphs up to that much device memory."""
        embedding = backbone.weights.embedding
        self.backbone, self.device = backbone, embedding.device
        with computing(self.device):
            self.buffers = SnapshotBuffers(backbone.dimensions, dtype=embedding.dtype, device=self.device)
            # Every pass reads its tables here: graphs hold the address, and compiled code tells a view from its base.
            self._tables = torch.zeros(TABLE_WORDS, dtype=torch.int32, device=self.device)
        self._eager = _forward_over(backbone, self.buffers)
        self.captured = (
            CapturedForwards(self._eager, self._tables, limit_bytes=capture_limit_bytes)
            if capture_limit_bytes
            else None
        )
        self._missed: dict[GraphKey, Tensor] = {}
        self._sealed = False

    def run(self, plan: Plan, *, name: str | None = None) -> tuple[Tensor, Counters]:
        """Final hidden states [plan.num_reads, h] on the CPU in the model's dtype, and what was run.

        `name` is what a profiler's ranges call it. Returns only after the device is done, also on error. Raises
        InferenceError when a pass fails; an AssertionError is a fault of this project and stays one.
        """
        counters = Counters()
        with computing(self.device):
            try:
                with request_span(plan.schedule, name, rows=plan.rows, segments=plan.segments):
                    self._reserve(plan.buffers)
                    hidden = self._hidden_states(plan, counters).cpu()
            except Exception as error:
                self._drain()
                traceback.clear_frames(error.__traceback__)  # they hold what the failed pass had allocated
                if isinstance(error, AssertionError):
                    raise
                told = explain_failure(error) or f"{type(error).__name__}: {error}"
                raise InferenceError(f"model inference failed: {told}") from error
            order = torch.tensor([place for one in plan.passes for place in one.outputs], device="cpu")
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
        pinned = self.device.type == "cuda"
        host = torch.empty(len(passes), TABLE_WORDS, dtype=torch.int32, device="cpu", pin_memory=pinned)
        blocks = host.numpy()
        for block, one in zip(blocks, passes, strict=True):
            rows = fill(block, one.entries, one.reads)
            counters.add(one.kind, rows, len(one.entries))
        return host.to(self.device, non_blocking=True)

    def _forward(self, block: Tensor, one: Pass) -> Tensor:
        """Hidden states [reads, h] of one pass with these tables, valid until the next."""
        reads = len(one.reads)
        rows, padded = rung(one.rows), rung(reads) if reads else 0
        with span(one.kind, rows=one.rows, rung=rows, segments=len(one.entries), reads=reads):
            self._tables.copy_(block, non_blocking=True)
            if self.captured is not None:
                key = self.captured.holding(rows, padded) if self._sealed else (rows, padded)
                hidden = None if key is None else self.captured.replay(*key)
                if hidden is not None:
                    return hidden[:reads]
                if not self._sealed and self.captured.wants(rows, padded):
                    self._missed[rows, padded] = block.clone()
            return self._eager(self._tables, rows, padded)[:reads]

    def capture_missed(self) -> None:
        """Capture the forwards that ran uncaptured since the last call, largest first, so that the others fit in."""
        while self.capture_next():
            pass

    def capture_next(self) -> bool:
        """Capture the largest forward that ran uncaptured; whether there was one."""
        if self.captured is None or not self._missed:
            return False
        key = max(self._missed)
        with computing(self.device):
            self.captured.capture(*key, self._missed.pop(key))
        return True

    def seal(self, sizes: BufferSizes) -> None:
        """From now on capture nothing but `capture_keys`: a pass replays the smallest graph that holds it, else runs
        uncaptured. `sizes` are buffers that no later plan outgrows, since growing them drops the graphs."""
        self._sealed = True
        with computing(self.device):
            self._reserve(sizes)

    def capture_keys(
        self, keys: Sequence[GraphKey], *, longest: int, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Run and capture these keys, largest first, over prompts of at most `longest` tokens, which the model has
        positions for."""
        if self.captured is None or not keys:
            return
        start = time.perf_counter()
        for done, (rows, reads) in enumerate(sorted(keys, reverse=True), 1):
            with computing(self.device):
                block = self._any_pass(rows, longest)
                self._tables.copy_(block)
                self._eager(self._tables, rows, reads)
                self.captured.capture(rows, reads, block)
            if progress is not None:
                progress(done, len(keys))
        mib, seconds = self.captured.bytes / 2**20, time.perf_counter() - start
        logger.info("captured %d graphs in %.1f s; they take %.0f MiB beside their pool", len(keys), seconds, mib)

    def _any_pass(self, rows: int, longest: int) -> Tensor:
        """Tables of a pass of so many rows, as few segments as prompts of `longest` tokens allow, with one read."""
        longest = max(longest, -(-rows // MAX_SEGMENTS))
        lengths = [min(longest, rows - first) for first in range(0, rows, longest)]
        entries = [SegmentEntry(start=0, token_ids=np.zeros(length, np.int32)) for length in lengths]
        block = np.empty(TABLE_WORDS, np.int32)
        fill(block, entries, [(0, 0)])
        return torch.from_numpy(block).to(self.device)

    @property
    def has_missed(self) -> bool:
        """Whether `capture_next` has something to do."""
        return bool(self._missed)

    def sizes_for(self, sizes: BufferSizes) -> BufferSizes:
        """The buffers there are once a plan that needs `sizes` has run."""
        return self.buffers.sizes_for(sizes)

    def pool_rows(self, rows: int) -> int:
        """Rows of the largest captured forward once one of `rows` is captured too; 0 where none is."""
        return 0 if self.captured is None else max([rows, *(captured for captured, _ in self.captured.keys)])

    def release(self) -> None:
        """Wait for the device and drop graphs, buffers and weights; the executor is not used again."""
        with computing(self.device):
            self._drain()
            if self.captured is not None:
                self.captured.drop()
            self.captured = None
            self._missed.clear()
            self.buffers.drop()
            del self.backbone, self._eager, self._tables
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _reserve(self, sizes: BufferSizes) -> None:
        if self.captured is not None and not self.buffers.fits(sizes):
            self.captured.drop()  # its graphs hold the addresses of the buffers that are replaced
            self._missed.clear()
        self.buffers.reserve(sizes)

    def _drain(self) -> None:
        """Wait until the device is done with what was launched, as far as it still answers."""
        if self.device.type == "cuda":
            with suppress(RuntimeError):
                torch.cuda.current_stream().synchronize()
