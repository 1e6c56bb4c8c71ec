"""The layout against brute force over raw token ids."""

from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ConfigError, RequestError
from engine.plan.layout import Layout, build_layout, independent_layout
from engine.prompt import Prompt
from ops.sizes import CHUNK
from tests.strategies import SPLITS, requests


def prompt(*ids: int, reads: tuple[int, ...] = ()) -> Prompt:
    return Prompt(np.array(ids, dtype=np.int32), reads)


def common_prefix(prompts: list[Prompt]) -> int:
    """By definition, on Python lists; one token is left to the shortest."""
    columns = zip(*(p.token_ids.tolist() for p in prompts), strict=False)
    return min(len(list(takewhile(lambda column: len(set(column)) == 1, columns))), min(map(len, prompts)) - 1)


def laid_out(layout: Layout, index: int) -> list[int]:
    return [token for s in layout.path(index) for token in layout.segments[s].token_ids.tolist()]


@given(requests(), st.sampled_from([*SPLITS, "independent"]))
def test_segments_of_a_path_join_to_the_prompt(questions, how):
    layout = independent_layout(questions) if how == "independent" else build_layout(questions, how)
    flat = [(q, p) for q, prompts in enumerate(questions) for p in prompts]
    assert layout.num_prompts == len(flat)
    assert layout.question_of == tuple(q for q, _ in flat)
    assert layout.full_rows == sum(len(p) for _, p in flat)
    for index, (question, whole) in enumerate(flat):
        assert laid_out(layout, index) == whole.token_ids.tolist()
        *prefixes, branch = (layout.segments[s] for s in layout.path(index))
        assert (branch.kind, branch.question) == ("branch", question)
        assert branch.length >= 1
        assert branch.end == len(whole)
        assert [s.kind for s in prefixes] in ([], ["request"], ["question"], ["request", "question"])
        assert all(s.question == (-1 if s.kind == "request" else question) for s in prefixes)


@given(requests(), st.sampled_from(SPLITS))
def test_segments_are_ordered_and_continue_their_parent(questions, split):
    layout = build_layout(questions, split)
    kinds = [s.kind for s in layout.segments]
    assert kinds == sorted(kinds, key=["request", "question", "branch"].index)
    assert kinds.count("request") <= 1
    prefixes = [s.question for s in layout.segments if s.kind == "question"]
    assert prefixes == sorted(set(prefixes))
    assert list(layout.branch_of) == [i for i, kind in enumerate(kinds) if kind == "branch"]
    for index, segment in enumerate(layout.segments):
        assert segment.length > 0
        if segment.parent is None:
            assert segment.start == 0
        else:
            assert segment.parent < index
            assert layout.segments[segment.parent].end == segment.start
    assert layout.unique_rows == sum(s.length for s in layout.segments)


@given(requests())
def test_exact_prefixes_are_the_longest_common_ones(questions):
    layout = build_layout(questions, "exact")
    everyone = [p for prompts in questions for p in prompts]
    request = common_prefix(everyone) if len(everyone) > 1 else 0
    assert layout.request_prefix_tokens == request
    beyond = {q: common_prefix(p) - request for q, p in enumerate(questions) if len(p) > 1}
    found = {s.question: s.length for s in layout.segments if s.kind == "question"}
    assert found == {q: length for q, length in beyond.items() if length}
    assert layout.question_prefix_tokens == sum(found.values())


@given(requests(), st.sampled_from(SPLITS))
def test_without_question_prefixes_all_branches_hang_under_the_request_prefix(questions, split):
    layout, usual = build_layout(questions, split, question_prefixes=False), build_layout(questions, split)
    assert layout.request_prefix_tokens == usual.request_prefix_tokens
    assert layout.question_prefix_tokens == 0
    assert {s.kind for s in layout.segments} <= {"request", "branch"}
    assert all(layout.segments[b].start == layout.request_prefix_tokens for b in layout.branch_of)
    flat = [p for prompts in questions for p in prompts]
    assert all(laid_out(layout, i) == p.token_ids.tolist() for i, p in enumerate(flat))
    assert layout.full_rows == usual.full_rows
    assert usual.unique_rows <= layout.unique_rows


@given(requests())
def test_aligned_prefixes_are_the_exact_ones_cut_at_the_last_border(questions):
    exact, aligned = build_layout(questions, "exact"), build_layout(questions, "aligned")
    assert all(s.start % CHUNK == 0 for s in aligned.segments)
    for index in range(exact.num_prompts):
        start = exact.segments[exact.branch_of[index]].start
        assert aligned.segments[aligned.branch_of[index]].start == start // CHUNK * CHUNK
    assert exact.unique_rows <= aligned.unique_rows <= exact.full_rows == aligned.full_rows


@given(requests(), st.randoms(use_true_random=False))
def test_order_of_questions_and_prompts_moves_nothing_but_the_order(questions, shuffle):
    """What a prompt shares does not depend on where it stands in the request."""
    order = list(range(len(questions)))
    shuffle.shuffle(order)
    orders = [shuffle.sample(range(len(questions[q])), len(questions[q])) for q in order]
    moved = [[questions[q][i] for i in inner] for q, inner in zip(order, orders, strict=True)]
    before, after = build_layout(questions, "exact"), build_layout(moved, "exact")
    place = {id(p): i for i, p in enumerate(p for prompts in questions for p in prompts)}
    for new, p in enumerate(p for prompts in moved for p in prompts):
        old = [before.segments[s].start for s in before.path(place[id(p)])]
        assert [after.segments[s].start for s in after.path(new)] == old


@given(requests(), st.sampled_from(SPLITS))
def test_reads_name_the_row_of_their_position(questions, split):
    layout = build_layout(questions, split)
    for index, p in enumerate(p for prompts in questions for p in prompts):
        assert all(s in layout.path(index) for s, _ in layout.reads[index])
        assert all(0 <= row < layout.segments[s].length for s, row in layout.reads[index])
        assert tuple(layout.segments[s].start + row for s, row in layout.reads[index]) == p.reads


def test_a_read_in_a_shared_prefix_is_one_row_for_all():
    questions = [[prompt(1, 2, 3, 4, reads=(0, 2, 3)), prompt(1, 2, 3, 5, 6)]]
    layout = build_layout(questions, "exact")
    assert layout.reads == (((0, 0), (0, 2), (1, 0)), ((2, 1),))


def shape(layout: Layout) -> list[tuple[str, int, int]]:
    return [(s.kind, s.start, s.length) for s in layout.segments]


@pytest.mark.parametrize(
    ("questions", "expected"),
    [
        pytest.param([[prompt(1, 2, 3)]], [("branch", 0, 3)], id="one-prompt-stays-whole"),
        pytest.param([[prompt(1, 2)], [prompt(3, 4)]], [("branch", 0, 2)] * 2, id="nothing-in-common"),
        pytest.param(
            [[prompt(1, 2, 3), prompt(1, 2, 4)]],
            [("request", 0, 2), ("branch", 2, 1), ("branch", 2, 1)],
            id="all-but-one-token-in-common",
        ),
        pytest.param(
            [[prompt(1, 2, 3), prompt(1, 2, 3)]],
            [("request", 0, 2), ("branch", 2, 1), ("branch", 2, 1)],
            id="equal-prompts-run-their-last-token-each",
        ),
        pytest.param(
            [[prompt(5), prompt(5, 6), prompt(5, 6, 7)]],
            [("branch", 0, 1), ("branch", 0, 2), ("branch", 0, 3)],
            id="a-one-token-prompt-that-starts-the-others",
        ),
        pytest.param(
            [[prompt(5, 6), prompt(5, 6, 7, 8)]],
            [("request", 0, 1), ("branch", 1, 1), ("branch", 1, 3)],
            id="one-prompt-the-start-of-another",
        ),
        pytest.param(
            [[prompt(1, 2, 3, 4)], [prompt(1, 2, 5, 6)]],
            [("request", 0, 2), ("branch", 2, 2), ("branch", 2, 2)],
            id="single-prompt-questions-get-no-prefix-of-their-own",
        ),
        pytest.param(
            [[prompt(9, 8)], [prompt(1, 2, 3, 4), prompt(1, 2, 3, 5)]],
            [("question", 0, 3), ("branch", 0, 2), ("branch", 3, 1), ("branch", 3, 1)],
            id="a-question-prefix-without-a-request-prefix",
        ),
        pytest.param(
            [[prompt(1, 2, 3, 4), prompt(1, 2, 3, 5)], [prompt(1, 7, 7, 8), prompt(1, 7, 7, 9)]],
            [("request", 0, 1), ("question", 1, 2), ("question", 1, 2)] + [("branch", 3, 1)] * 4,
            id="two-questions",
        ),
        pytest.param(
            [[prompt(1, 2), prompt(1, 2, 9)], [prompt(1, 2, 3, 4), prompt(1, 2, 3, 5)]],
            [("request", 0, 1), ("question", 1, 2), ("branch", 1, 1), ("branch", 1, 2)] + [("branch", 3, 1)] * 2,
            id="the-shortest-prompt-caps-the-request-prefix-only",
        ),
    ],
)
def test_small_trees(questions, expected):
    assert shape(build_layout(questions, "exact")) == expected


@pytest.mark.parametrize(("common", "prefix"), [(63, 0), (64, 64), (65, 64), (127, 64), (128, 128)])
def test_aligned_shares_whole_chunks_only(common, prefix):
    head = list(range(common))
    layout = build_layout([[prompt(*head, 1000), prompt(*head, 1001)]], "aligned")
    assert layout.request_prefix_tokens == prefix
    assert [s.length for s in layout.segments if s.kind == "branch"] == [common + 1 - prefix] * 2


def test_aligned_question_prefix_begins_where_the_request_prefix_was_cut():
    state, head = list(range(100)), [500] * 30
    questions = [[prompt(*state, *head, 1), prompt(*state, *head, 2)], [prompt(*state, 7)]]
    expected = [("request", 0, 64), ("question", 64, 64), ("branch", 128, 3), ("branch", 128, 3), ("branch", 64, 37)]
    assert shape(build_layout(questions, "aligned")) == expected


def test_independent_shares_nothing():
    questions = [[prompt(1, 2, 3), prompt(1, 2, 4)], [prompt(1, 2, 3)]]
    layout = independent_layout(questions)
    assert shape(layout) == [("branch", 0, 3)] * 3
    assert layout.unique_rows == layout.full_rows == 9


@pytest.mark.parametrize("lay_out", [independent_layout, lambda questions: build_layout(questions, "exact")])
def test_a_request_without_prompts_is_refused(lay_out):
    with pytest.raises(RequestError, match="nonempty"):
        lay_out([])
    with pytest.raises(RequestError, match=r"questions\.1: .* at least one prompt"):
        lay_out([[prompt(1)], []])


def test_an_unknown_split_is_refused():
    with pytest.raises(ConfigError, match="exact or aligned, got 'padded'"):
        build_layout([[prompt(1)]], "padded")


@pytest.mark.parametrize(
    ("ids", "reads", "message"),
    [
        (np.array([], dtype=np.int32), (), "at least one token"),
        (np.array([1, 2], dtype=np.int64), (), "int32"),
        (np.array([[1, 2]], dtype=np.int32), (), "one-dimensional"),
        ([1, 2], (), "got 'list'"),
        (np.array([1, 2], dtype=np.int32), (2,), "below the prompt's 2 tokens"),
        (np.array([1, 2], dtype=np.int32), (-1,), "ascending"),
        (np.array([1, 2], dtype=np.int32), (1, 0), "ascending"),
        (np.array([1, 2], dtype=np.int32), (1, 1), "ascending"),
    ],
)
def test_a_bad_prompt_is_refused(ids, reads, message):
    with pytest.raises(RequestError, match=message):
        Prompt(ids, reads)


def test_token_ids_cannot_be_written():
    ids = np.array([1, 2, 3], dtype=np.int32)
    layout = build_layout([[Prompt(ids), prompt(1, 9)]], "exact")
    with pytest.raises(ValueError, match="read-only"):
        layout.segments[0].token_ids[0] = 7
    ids[0] = 1  # the caller's own array stays writable
