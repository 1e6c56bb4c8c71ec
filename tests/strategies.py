"""Hypothesis strategies: requests as trees of prompts, limits of a pass, ways to run one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st

from engine.plan.schedule import Limits
from engine.prompt import Prompt, TokenIds
from ops.sizes import CHUNK
from tests.support import VOCABULARY

SPLITS = ("exact", "aligned")
SCHEDULES = ("independent", "batched", "levels", "tree")

Questions = list[list[Prompt]]

_PREFIXES = (0, 1, 2, 3, 30, 31, 63, 64, 65, 127, 128, 129, 130)
_BRANCHES = (1, 2, 3, 31, 60, 63, 64, 65, 127)


@st.composite
def requests(draw: st.DrawFn, *, most_questions: int = 6, most_rows: int = 4_000) -> Questions:
    """A state, questions with heads of their own or none, candidates; lengths around the borders of chunks.

    Trees of one to three levels, in any order. A candidate may equal another one, be its start or go on from it. With
    an alphabet of two, prompts also agree by accident. All prompts together have about `most_rows` tokens.
    """
    letters = np.random.default_rng(draw(st.integers(0, 2**16)))
    alphabet = draw(st.sampled_from([2, VOCABULARY]))

    def run(length: int) -> TokenIds:
        return letters.integers(0, alphabet, length, dtype=np.int32)

    state = run(draw(st.sampled_from(_PREFIXES)))
    questions: Questions = []
    rows = 0
    for _ in range(draw(_number(most_questions))):
        head = np.concatenate([state, run(draw(st.sampled_from(_PREFIXES)))])
        candidates: list[TokenIds] = []
        for _ in range(draw(_number(4))):
            if rows < most_rows or not candidates:
                candidates.append(_candidate(draw, run, head, candidates))
                rows += len(candidates[-1])
        questions.append([Prompt(ids, draw(_reads(len(ids)))) for ids in draw(st.permutations(candidates))])
    return draw(st.permutations(questions))


def _number(most: int) -> st.SearchStrategy[int]:
    """From one; one alone is rare, since it shares nothing."""
    return st.integers(1, most) | st.integers(2, most)


def _candidate(draw: st.DrawFn, run: Callable[[int], TokenIds], head: TokenIds, others: list[TokenIds]) -> TokenIds:
    kind = draw(st.sampled_from(["own", "own", "own", "equal", "start", "longer"])) if others else "own"
    other = head if kind == "own" else draw(st.sampled_from(others))
    if kind == "equal":
        return other
    if kind == "start":
        shortest = draw(st.sampled_from([1, min(len(head) + 1, len(other))]))
        return other[: draw(st.integers(shortest, len(other)))]
    return np.concatenate([other, run(draw(st.sampled_from(_BRANCHES)))])


def _reads(length: int) -> st.SearchStrategy[tuple[int, ...]]:
    """The last row alone, or rows anywhere."""
    some = st.sets(st.integers(0, length - 1), min_size=1, max_size=4).map(lambda rows: tuple(sorted(rows)))
    return st.just(()) | some


@st.composite
def limited_requests(draw: st.DrawFn, *, most_questions: int = 6, most_rows: int = 4_000) -> tuple[Questions, Limits]:
    """A request, and limits from the tightest that hold each of its segments in a pass to loose ones."""
    questions = draw(requests(most_questions=most_questions, most_rows=most_rows))
    prompts = [prompt for candidates in questions for prompt in candidates]
    longest = max(map(len, prompts))
    positions = {position for prompt in prompts for position in prompt.reads}  # no segment has more reads

    def least(value: int) -> int:
        return draw(st.sampled_from([value, value + 1, 2 * value, 8 * value]))

    limits = Limits(
        rows=least(longest),
        segments=draw(st.integers(1, 8)),
        chunks=least(-(-longest // CHUNK)),
        reads=least(len(positions)),
        question_snapshots=draw(st.integers(1, 3)),
    )
    return questions, limits
