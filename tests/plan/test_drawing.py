"""The explain report: figures worked out by hand, and what a reader sees."""

import io
import json

import numpy as np
import pytest
from rich.console import Console

from engine.load.dimensions import DIMENSIONS
from engine.plan.drawing import ExplainReport, explain_report, readable
from engine.plan.layout import build_layout, independent_layout
from engine.plan.memory import scratch_bytes
from engine.prompt import Prompt
from graphs.rungs import rung
from ops.tables import MAX_ROWS, chunk_capacity

NINE = DIMENSIONS["9b"]
KIB, MIB = 2**10, 2**20


def request(*questions: tuple[int, list[int]], state: int) -> list[list[Prompt]]:
    """A state of `state` tokens, then per question a head of its own and candidates of the given lengths."""
    fresh = iter(range(1_000, 10_000_000))

    def run(length: int) -> list[int]:
        return [next(fresh) for _ in range(length)]

    built = []
    shared = run(state)
    for head, tails in questions:
        ids = shared + run(head)
        built.append([Prompt(np.array(ids + run(tail), dtype=np.int32)) for tail in tails])
    return built


def report(questions: list[list[Prompt]], *, splits: tuple[str, ...] = ("exact", "aligned"), names=None):
    layouts = {split: build_layout(questions, split) for split in splits}
    return explain_report(layouts, NINE, 2, question_names=names)


def drawn(found: ExplainReport, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(found.renderable())
    return console.file.getvalue()


THREE = request((20, [30, 31, 32]), (5, [40]), (70, [10, 200]), state=100)


def test_figures_of_a_small_request():
    found = report(THREE)
    full = 3 * 120 + 93 + 145 + 2 * 170 + 210
    assert (found.candidates, found.full_rows) == (6, full)
    exact, aligned = found.layouts["exact"], found.layouts["aligned"]
    assert (exact.rows, exact.request_prefix_tokens, exact.question_prefix_tokens) == (
        100 + 20 + 93 + 45 + 70 + 210,
        100,
        90,
    )
    assert [(q.prefix_tokens, q.branch_tokens) for q in exact.questions] == [
        (20, (30, 31, 32)),
        (0, (45,)),
        (70, (10, 200)),
    ]
    # Borders at 64 and 128: the state, then nothing for the first question (120) and 64 more for the third (170).
    assert (aligned.request_prefix_tokens, aligned.question_prefix_tokens) == (64, 64)
    assert [q.branch_tokens for q in aligned.questions] == [(86, 87, 88), (81,), (52, 242)]
    assert aligned.rows == 64 + 64 + 261 + 81 + 294


def test_bytes_of_a_small_request():
    found = report(THREE)
    exact, aligned = found.layouts["exact"], found.layouts["aligned"]
    slot = 24 * (64 * (6_144 * 2 + 80 * 4) + 3 * 8_192 * 2)  # 24 layers: tail rows and gates, history
    state = 48 * MIB
    token = 32 * KIB
    assert exact.request_snapshot_bytes == state + slot + 100 * token
    # The first question ends at 120, in its parent's chunk, and goes on with its state; the third ends at 170.
    assert exact.question_snapshot_bytes == state + 2 * slot + 90 * token
    assert aligned.question_snapshot_bytes == state + slot + 64 * token
    assert exact.tree_state_bytes == 2 * state
    row = (3 * 4_096 + 3 * 12_288) * 2
    chunk = 32 * 2 * 64 * 64 * 2  # the inverse and the scores of every value head
    assert exact.levels_scratch_bytes == rung(348) * row + chunk_capacity(rung(348)) * chunk
    assert exact.tree_scratch_bytes == rung(538) * row + chunk_capacity(rung(538)) * chunk
    assert found.weight_bytes == NINE.weight_bytes(2).total


def test_a_tree_above_the_row_limit_is_told_apart_from_levels_that_run_in_several_passes():
    found = report(request((0, [9_000, 9_000]), state=10), splits=("exact",))
    exact = found.layouts["exact"]
    assert exact.tree_scratch_bytes is None
    assert exact.levels_scratch_bytes == scratch_bytes(NINE, MAX_ROWS, 2)
    assert "too large" in drawn(found)


def test_without_prefixes_there_is_no_snapshot():
    layouts = {"independent": independent_layout(THREE)}
    figures = explain_report(layouts, NINE, 2).layouts["independent"]
    assert (figures.request_snapshot_bytes, figures.question_snapshot_bytes, figures.tree_state_bytes) == (0, 0, 0)
    assert figures.rows == sum(len(p) for prompts in THREE for p in prompts)


def test_the_dictionary_is_plain_json():
    found = report(THREE, names=["route", "late", "mood"])
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["full_rows"] == found.full_rows
    assert plain["layouts"]["aligned"]["rows"] == found.layouts["aligned"].rows
    assert plain["layouts"]["exact"]["questions"][0] == {
        "name": "route",
        "prefix_tokens": 20,
        "branch_tokens": [30, 31, 32],
    }


def test_the_drawing_shows_the_tree_and_both_layouts():
    found = report(THREE, names=["route", "late", "mood"])
    lines = [line.strip() for line in drawn(found).splitlines()]
    assert lines[0] == "6 candidates, 1,148 tokens in all; exact prefixes"
    assert lines[1:5] == [
        "└── request prefix  100 tokens",
        "├── question 'route'  20 tokens",
        "│   ├── candidate 1  30 tokens",
        "│   ├── candidate 2  31 tokens",
    ]
    assert "├── question 'late'  45 tokens" in lines
    rows = {line[:17].strip(): line[17:].split() for line in lines}
    assert any(line.split() == ["full", "exact", "aligned"] for line in lines)
    assert rows["tokens run"] == ["1,148", "538", "764"]
    assert rows["of full"] == ["100.0", "%", "46.9", "%", "66.6", "%"]
    assert max(map(len, lines)) <= 80


def test_long_lists_are_folded_in_the_drawing_and_whole_in_the_dictionary():
    questions = request(*[(3, [7] * 7)] * 6, (3, [7, 9, 8, 30, 11, 12, 7, 5]), state=20)
    found = report(questions)
    text = drawn(found)
    assert "... 3 more questions, 156 tokens" in text  # three times a head of 3 and seven branches of 7
    assert "question '7'" in text
    assert "question '5'" not in text
    assert "... 4 more, 7 to 30 tokens each" in text
    assert "candidate 8  5 tokens" in text
    assert len(found.layouts["exact"].questions) == 7
    assert found.layouts["exact"].questions[6].branch_tokens == (7, 9, 8, 30, 11, 12, 7, 5)


def test_nothing_in_common_is_drawn_without_a_request_prefix():
    apart = [[Prompt(np.array([1, 2], dtype=np.int32))], [Prompt(np.array([3], dtype=np.int32))]]
    lines = [line.rstrip() for line in drawn(report(apart)).splitlines()]
    assert lines[1:3] == ["├── question '1'  2 tokens", "└── question '2'  1 token"]


def test_names_are_shown_as_data_never_as_markup_or_control_codes():
    text = drawn(report(THREE, names=["[bold]x[/bold]", "\x1b[2J", "y" * 500]))
    assert "question '[bold]x[/bold]'" in text
    assert "\x1b" not in text
    assert "y" * 121 not in text


def test_layouts_of_different_requests_are_not_compared():
    layouts = {"exact": build_layout(THREE, "exact"), "aligned": build_layout(THREE[:1], "aligned")}
    with pytest.raises(AssertionError, match="different requests"):
        explain_report(layouts, NINE, 2)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1_023, "1023 B"), (1_024, "1.0 KiB"), (1_536 * KIB, "1.5 MiB"), (3_000 * MIB, "2.93 GiB")],
)
def test_readable_bytes(size, text):
    assert readable(size) == text
