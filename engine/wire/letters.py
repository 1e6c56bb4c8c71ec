"""Cua-S1's way to answer: one prompt per question that lists all options, and the letter that the model would say.

Only `choice` questions exist here. A question is one prompt and one read, at its last token.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from engine.errors import CheckpointError, ConfigError, InferenceError, RequestError
from engine.prompt import Prompt
from engine.wire.answers import Answer, ChoiceAnswer
from engine.wire.processor import to_prompts
from engine.wire.requests import Choice, Request, parse_request, read_body
from engine.wire.tokens import Control, Piece, Tokens

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
LETTER_IDS = tuple(range(32, 58))
"""Of the letters, in the vocabulary of the published models."""
MAX_QUESTIONS = 64
SYSTEM_SHA256 = "7916645b0ea961e496a7feb506714da296c28a665facc888391a1376c3f47137"
"""Of the system message that Cua-S1 was trained with."""


@dataclass(frozen=True, kw_only=True)
class LettersHead:
    """Rows of the language-model head for the letters."""

    rows: NDArray[np.float32]
    """[26, hidden]"""
    dtype: torch.dtype
    """The model's; logits are rounded to it."""


@dataclass(frozen=True, kw_only=True)
class Letters:
    """The processor of Cua-S1 and of a plain model asked for a letter."""

    tokens: Tokens
    names: tuple[str, ...]
    max_length: int
    vocab_size: int
    system_message: str
    """In front of every prompt."""
    head: LettersHead | None = None
    """None where nothing is answered."""
    method: ClassVar[str] = "letter_logits"
    temperature: ClassVar[float] = 1.0

    def parse(self, source: Request | dict[str, Any] | str | bytes) -> Request:
        return parse_letters(source, self.names)

    def prompts(self, request: Request) -> list[list[Prompt]]:
        check_letters(request)
        questions = []
        for id, question in request.questions.items():
            assert isinstance(question, Choice)
            ids = self.tokens.encode(prompt_piece(self.system_message, request.state, question))
            if len(ids) > self.max_length:
                text = f"Input length {len(ids)} exceeds max_length={self.max_length}; no silent truncation"
                raise RequestError(text, field=f"questions.{id}", value=len(ids))
            questions.append([ids])
        return to_prompts(questions, self.vocab_size)

    def answers(self, request: Request, states: Sequence[NDArray[np.float32]]) -> dict[str, Answer]:
        assert self.head is not None, "a processor without a head answers nothing"
        answers: dict[str, Answer] = {}
        for (id, question), [row] in zip(request.questions.items(), states, strict=True):
            names = question.candidates
            logits = letter_logits(row, self.head, len(names))
            for name, logit in zip(names, logits, strict=True):
                if not np.isfinite(logit):
                    raise InferenceError(f"question {id!r}, candidate {name!r}: the logit is {logit}")
            weights = np.exp(logits - logits.max())
            p = weights / weights.sum()
            probabilities = dict(zip(names, map(float, p), strict=True))
            answers[id] = ChoiceAnswer(names[int(p.argmax())], probabilities, _confidence(p.astype(np.float64)))
        return answers


def read_system_message(file: str | None, *, check: bool) -> str:
    """The text of the file named by `letters.system_message`.

    Raises ConfigError when there is none or, with `check`, when it is not the text that Cua-S1 was trained with.
    """
    if file is None:
        raise ConfigError("head=letters needs the system message that the model was trained with; give "
                          "letters.system_message=FILE")  # fmt: skip
    try:
        content = Path(file).expanduser().read_bytes()
        text = content.decode()
    except (OSError, UnicodeDecodeError, RuntimeError) as error:  # the last where `~` is nobody's home
        raise ConfigError(f"letters.system_message={file}: {error}") from None
    found = hashlib.sha256(content).hexdigest()
    if check and found != SYSTEM_SHA256:
        raise ConfigError(
            f"letters.system_message={file}: the SHA-256 is {found}, that of Cua-S1's message is {SYSTEM_SHA256}; "
            "check_ids=false takes a message of your own"
        )
    return text


def letter_ids(tokens: Tokens, *, check: bool) -> list[int]:
    """Ids of the letters. Raises CheckpointError where a letter is no token, or with `check` not the published one."""
    ids = [tokens.single_id(letter) for letter in LETTERS]
    if check and tuple(ids) != LETTER_IDS:
        at = next(i for i, pair in enumerate(zip(ids, LETTER_IDS, strict=True)) if len(set(pair)) == 2)
        raise CheckpointError(f"tokenizer: {LETTERS[at]!r} is id {ids[at]}, Cua-S1 has {LETTER_IDS[at]}")
    return ids


def parse_letters(source: Request | dict[str, Any] | str | bytes, loaded_names: Collection[str]) -> Request:
    """As `parse_request`, but `instructions` may be null, and what this head cannot answer is refused."""
    if isinstance(source, Request):
        check_letters(source)
        return source
    tree = read_body(source)
    if not isinstance(tree, dict):
        return parse_request(source)  # which refuses it
    model = tree.get("model")
    if model is not None and model not in loaded_names:
        raise RequestError("requested model is not loaded; see /v1/models", field="model", value=model)
    questions = tree.get("questions")
    for question in questions.values() if isinstance(questions, dict) else ():
        if isinstance(question, dict) and question.get("instructions", "") is None:
            question["instructions"] = ""
    request = parse_request(tree, loaded_names)
    check_letters(request)
    return request


def check_letters(request: Request) -> None:
    """Raise RequestError for what one letter cannot answer."""
    if len(request.questions) > MAX_QUESTIONS:
        text = f"at most {MAX_QUESTIONS} questions can be answered by letters"
        raise RequestError(text, field="questions", value=len(request.questions))
    for id, question in request.questions.items():
        if not isinstance(question, Choice):
            text = "only choice questions can be answered by letters"
            raise RequestError(text, field=f"questions.{id}.type", value=question.kind)
        if len(question.criteria) > len(LETTERS):
            text = f"Choice by letters requires between 1 and {len(LETTERS)} candidates"
            raise RequestError(text, field=f"questions.{id}.criteria", value=len(question.criteria))


def prompt_piece(system_message: str, state: Any, question: Choice) -> Piece:
    """A whole prompt: system message, user message, and the start of an answer that thinks first."""
    goal = _text(question.instructions)
    options = [
        f'{letter}. Decision "{_label(name if description is None else description)}" -> select'
        for letter, (name, description) in zip(LETTERS, question.criteria.items(), strict=False)
    ]
    lines = [
        *([f"Goal: {goal}", ""] if goal else []),
        *("App: Cua Driver", "Task family: closed-candidate decision", ""),
        *("Accessibility tree:", _text(state), ""),
        *("Options:", *options, ""),
        "Answer with a single letter.",
    ]
    user = "\n".join(lines)
    return (
        *(Control.START, f"system\n{system_message}", Control.END, "\n"),
        *(Control.START, f"user\n{user}", Control.END, "\n"),
        *(Control.START, "assistant\n", Control.THINK, "\n"),
    )


def letter_logits(row: NDArray[np.floating[Any]], head: LettersHead, letters: int) -> NDArray[np.float32]:
    """Logits [letters] of one hidden state: each a float64 product of its own, rounded to the model's dtype."""
    row = row.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        products = [np.dot(row, weight.astype(np.float64)) for weight in head.rows[:letters]]
    rounded: NDArray[np.float32] = torch.tensor(products, dtype=torch.float64).to(head.dtype).float().numpy()
    return rounded


def _confidence(p: NDArray[np.float64]) -> float:
    """1 - entropy / log n; 1 for a single option."""
    if len(p) == 1:
        return 1.0
    positive = p[p > 0]
    return max(0.0, 1.0 + float(positive @ np.log(positive)) / math.log(len(p)))


def _text(value: Any) -> str:
    """A string as is; anything else as JSON in the order of the request."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)


def _label(value: Any) -> str:
    """The text of an option as JSON spells it, without the quotes around it."""
    return json.dumps(_text(value), ensure_ascii=False)[1:-1]
