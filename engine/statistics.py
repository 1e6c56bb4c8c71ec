"""What a response says of its run, from the layout and from what the executor counted."""

from __future__ import annotations

from engine.answers import RunStatistics
from engine.executor import Counters
from engine.layout import Layout


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
