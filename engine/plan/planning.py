"""Which passes a request runs: the tree where it fits, else levels, within the memory that it may take.

Every schedule gives the same bits, and the tree was the fastest wherever it fits. Host numbers only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from engine.config import EngineConfig, dtype_bytes
from engine.errors import CapacityError
from engine.load.dimensions import ModelDimensions
from engine.plan.layout import Layout, build_layout, independent_layout
from engine.plan.memory import MemoryPlan, plan_memory
from engine.plan.schedule import BufferSizes, Limits, Plan, plan_passes
from engine.prompt import Prompt
from graphs.rungs import LADDER, rung
from ops.tables import MAX_ROWS

_ROW_LIMITS = (MAX_ROWS, 8_192, 4_096, 2_048, 1_024, 512)
"""Rows of the largest pass, tried in turn when memory is limited."""


class Room(Protocol):
    """What an executor holds already, which a plan may use."""

    def sizes_for(self, sizes: BufferSizes) -> BufferSizes:
        """The buffers it has once there is room for `sizes`."""

    def pool_rows(self, rows: int) -> int:
        """Rows of its largest captured forward once one of `rows` is captured; 0 where none ever is."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What is run, and the bytes that the engine holds for it."""

    layout: Layout
    plan: Plan
    memory: MemoryPlan


class Planner:
    """The options that decide how requests are run, over one model."""

    def __init__(self, config: EngineConfig, dimensions: ModelDimensions) -> None:
        """`config` must be resolved."""
        self._config, self._dimensions = config, dimensions
        self._limits = Limits(question_snapshots=config.memory.question_snapshots)

    def plan(self, questions: Sequence[Sequence[Prompt]], room: Room, *, others: int = 0) -> Planned:
        """Made when the request's turn has come, since what the executor and the others hold is then known.

        Raises CapacityError for a request that fits no pass, or not `memory.limit_gib` beside the `others` bytes that
        other engines hold on the device.
        """
        for rows in _ROW_LIMITS:
            for layout, plan in self.options(questions, rows=rows):
                planned = Planned(layout=layout, plan=plan, memory=self._memory(plan, room, others))
                if self._fits(planned.memory):
                    return planned
            longest = max(len(prompt) for question in questions for prompt in question)
            if longest > rows // 2:
                break
        self.check(planned.memory)
        raise AssertionError("a plan that does not fit is refused above")

    def options(self, questions: Sequence[Sequence[Prompt]], *, rows: int = MAX_ROWS) -> Iterator[tuple[Layout, Plan]]:
        """The ways to run a request in passes of up to `rows` rows, best first."""
        schedule, pack, split = self._config.schedule, self._config.pack, self._config.split
        limits = Limits(rows=rows, question_snapshots=self._limits.question_snapshots)
        whole = schedule in ("independent", "batched")
        layout = independent_layout(questions) if whole else build_layout(questions, split)
        if schedule == "auto":
            with suppress(CapacityError):
                yield layout, plan_passes(layout, schedule="tree", pack=pack, limits=limits)
            schedule = "levels"
        yield layout, plan_passes(layout, schedule=schedule, pack=pack, limits=limits)

    def largest_buffers(self) -> BufferSizes:
        """Buffers that no request of this engine outgrows."""
        slots = 1 + self._limits.question_snapshots
        return BufferSizes(kv_rows=self._config.max_length + self._limits.rows, slots=slots, states=slots)

    def check_least(self, *, others: int) -> None:
        """Raise CapacityError when not even the smallest request would fit, beside what is there from the start."""
        sealed = self._config.graphs == "captured" and self._config.capture == "load"
        buffers = self.largest_buffers() if sealed else BufferSizes()
        self.check(self._bytes(rows=LADDER[0], reads=1, buffers=buffers, pool_rows=0, others=others))

    def check(self, memory: MemoryPlan) -> None:
        """Raise CapacityError with both figures when `memory` is above the limit."""
        if not self._fits(memory):
            raise CapacityError(f"this needs {memory}, above memory.limit_gib={self._config.memory.limit_gib:g}")

    def _fits(self, memory: MemoryPlan) -> bool:
        limit = self._config.memory.limit_gib
        return limit is None or memory.total <= limit * 2**30

    def _memory(self, plan: Plan, room: Room, others: int) -> MemoryPlan:
        rows = rung(max(one.rows for one in plan.passes))
        buffers, pool_rows = room.sizes_for(plan.buffers), room.pool_rows(rows)
        return self._bytes(rows=rows, reads=plan.num_reads, buffers=buffers, pool_rows=pool_rows, others=others)

    def _bytes(self, *, rows: int, reads: int, buffers: BufferSizes, pool_rows: int, others: int) -> MemoryPlan:
        captured = self._config.graphs == "captured"
        return plan_memory(
            self._dimensions,
            dtype_bytes=dtype_bytes(self._config.dtype),
            rows=rows,
            reads=reads,
            buffers=buffers,
            graphs_bytes=int(self._config.memory.graphs_gib * 2**30) if captured else 0,
            pool_rows=pool_rows,
            others=others,
        )
