"""A request to token ids: one prompt per candidate, in request order.

The wording below is what decision models were trained on: every character counts. Question ids, other candidates,
level numbers and candidate counts are never shown.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.errors import RequestError
from engine.wire.requests import Choice, Noul, Question, Request
from engine.wire.tokens import Control, Ids, Piece, Tokens


@dataclass(frozen=True)
class QuestionPrompts:
    """The prompts of one question: `head` followed by each of `tails`, int32 ids.

    The head is what tokenisation showed to be shared, which may be less than the prompts have in common, or nothing.
    """

    id: str
    head: Ids
    tails: tuple[Ids, ...]

    @property
    def prompts(self) -> list[Ids]:
        return [np.concatenate([self.head, tail]) for tail in self.tails]

    @property
    def lengths(self) -> list[int]:
        return [len(self.head) + len(tail) for tail in self.tails]


@dataclass(frozen=True)
class Prompts:
    """All prompts of a request; candidates are numbered through the questions in order."""

    questions: tuple[QuestionPrompts, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all full prompts, as a request is billed."""
        return sum(sum(question.lengths) for question in self.questions)


def build_prompts(request: Request, tokens: Tokens, max_length: int) -> Prompts:
    """Tokenise every candidate of `request`.

    Raises `RequestError` naming the question if a prompt is longer than `max_length` tokens; nothing is cut.
    """
    context = context_piece(request.state)
    parts = {
        id: (question_piece(question), option_pieces(question), closing_piece(question))
        for id, question in request.questions.items()
    }
    pieces = dict.fromkeys(
        [context, *(p for ask, options, closing in parts.values() for p in (ask, *options, closing))]
    )
    known = dict(zip(pieces, tokens.encode_all(list(pieces)), strict=True)) if tokens.joinable else {}
    questions = []
    for id, (ask, options, closing) in parts.items():
        if tokens.joinable:
            head = np.concatenate([known[context], known[ask]])
            tails = tuple(np.concatenate([known[option], known[closing]]) for option in options)
        else:
            head = np.empty(0, np.int32)
            tails = tuple(tokens.encode_all([context + ask + option + closing for option in options]))
        prompts = QuestionPrompts(id, head, tails)
        for length in prompts.lengths:
            if length > max_length:
                text = f"Input length {length} exceeds max_length={max_length}; no silent truncation"
                raise RequestError(text, field=f"questions.{id}", value=length)
        questions.append(prompts)
    return Prompts(tuple(questions))


def render(value: Any) -> str:
    """A string as is; anything else as JSON with sorted keys, numbers spelled as Python's `repr`."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True, allow_nan=False)


# A prompt is context | question | option | closing. Every piece but the last ends in a line feed and every piece but
# the first begins with a letter: the borders at which `Tokens.joinable` holds.


def context_piece(state: Any) -> Piece:
    return (Control.START, f"user\nContext:\n{render(state)}\n\n")


def question_piece(question: Question) -> Piece:
    text = render(question.instructions)
    if isinstance(question, Noul) and question.criteria is not None:
        text += f"\nYes means: {render(question.criteria.true)}\nNo means: {render(question.criteria.false)}"
    return (f"Question: {text}\n",)


def option_pieces(question: Question) -> list[Piece]:
    """One piece per candidate, empty for `noul`."""
    match question:
        case Noul():
            return [()]
        case Choice():
            options = [
                name if description is None else f"{name}: {render(description)}"
                for name, description in question.criteria.items()
            ]
        case _:
            options = [render(level) for level in question.criteria]
    return [(f"Proposed answer: {option}\n",) for option in options]


def closing_piece(question: Question) -> Piece:
    asked = "Is the answer to this question yes?" if isinstance(question, Noul) else "Is this proposed answer correct?"
    return (
        f"{asked} Answer Yes or No.",
        *(Control.END, "\n", Control.START, "assistant\n"),
        *(Control.THINK, "\n\n", Control.END_THINK, "\n\n"),
    )
