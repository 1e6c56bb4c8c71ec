"""What the executor counted, and what a response says of it. Knows no tensor and no question."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.plan.layout import Layout


@dataclass(kw_only=True)
class Counters:
    """What the executor ran, counted from the tables it filled: true rows (no padding) and passes, by kind of pass."""

    rows: dict[str, int] = field(default_factory=dict)
    passes: dict[str, int] = field(default_factory=dict)
    most_branches: int = 0
    """Segments of the largest branch pass."""

    def add(self, kind: str, rows: int, segments: int) -> None:
        self.rows[kind] = self.rows.get(kind, 0) + rows
        self.passes[kind] = self.passes.get(kind, 0) + 1
        if kind == "branch":
            self.most_branches = max(self.most_branches, segments)

    @property
    def total_rows(self) -> int:
        return sum(self.rows.values())


@dataclass(frozen=True, kw_only=True)
class RunStatistics:
    """What one request cost, in token positions unless a field says otherwise."""

    shares_prefixes: bool
    """False for one whole prompt per candidate; of what follows only tokens and candidates are then reported."""
    logical_input_tokens: int
    """Sum of all full prompt lengths."""
    candidate_sequences: int
    """Number of candidates."""
    processed_input_tokens: int
    """Positions the backbone really ran, prefixes included, padding not."""
    shared_prefix_tokens: int
    question_prefix_tokens: int
    """Sum over questions of what their prefix adds to the request's."""
    prefill_calls: int
    """Backbone calls for prefixes."""
    suffix_batches: int
    """Backbone calls for candidate suffixes."""
    suffix_tokens: int
    max_suffix_batch: int
    """The most candidates in one call."""


def run_statistics(layout: Layout, counters: Counters, *, shares: bool) -> RunStatistics:
    """`shares`: whether the schedule reads prefixes once."""
    rows, passes = counters.rows, counters.passes
    prefix_rows = layout.request_prefix_tokens + layout.question_prefix_tokens
    tree = "tree" in passes
    return RunStatistics(
        shares_prefixes=shares,
        logical_input_tokens=layout.full_rows,
        candidate_sequences=layout.num_prompts,
        processed_input_tokens=counters.total_rows,
        shared_prefix_tokens=layout.request_prefix_tokens,
        question_prefix_tokens=layout.question_prefix_tokens,
        prefill_calls=passes.get("prefix", 0) + passes.get("question", 0),
        suffix_batches=passes.get("branch", 0) + passes.get("tree", 0),
        suffix_tokens=counters.total_rows - prefix_rows if tree else rows.get("branch", 0),
        max_suffix_batch=layout.num_prompts if tree else counters.most_branches,
    )
