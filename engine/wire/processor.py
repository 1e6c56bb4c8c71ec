"""What a family of decision models is to the engine: questions in, prompts out, hidden states to answers.

One object for each family (`open_jev`, `letters`), chosen when a folder is opened. The engine knows nothing else of
questions, and a processor knows nothing of devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigError
from engine.prompt import Prompt
from engine.wire.answers import Answer, Calibration
from engine.wire.requests import Request
from engine.wire.tokens import Ids


class Processor(Calibration, Protocol):
    """Without a head it parses and makes prompts, and nothing more."""

    @property
    def names(self) -> tuple[str, ...]:
        """The model id that a response carries, then aliases that a request may use."""
        ...

    def parse(self, source: Request | dict[str, Any] | str | bytes) -> Request:
        """Raises RequestError for what the family cannot answer."""
        ...

    def prompts(self, request: Request) -> list[list[Prompt]]:
        """The candidates of each question: token ids, and the rows that `answers` will want.

        Raises RequestError for a prompt above the length limit, ConfigError when the tokenizer is another model's.
        """
        ...

    def answers(self, request: Request, states: Sequence[NDArray[np.float32]]) -> dict[str, Answer]:
        """Answers in question order, from `states[i]` [reads, hidden] of prompt i in the order of `prompts`.

        Raises InferenceError naming question and candidate where a state gives no finite number.
        """
        ...


def to_prompts(questions: Iterable[Sequence[Ids]], vocab_size: int) -> list[list[Prompt]]:
    """Ids as prompts that read their last row. Raises ConfigError for an id that the model does not have."""
    prompts = [[Prompt(ids) for ids in candidates] for candidates in questions]
    check_vocabulary(max(int(prompt.token_ids.max()) for candidates in prompts for prompt in candidates), vocab_size)
    return prompts


def check_vocabulary(largest: int, vocab_size: int) -> None:
    """Raise ConfigError when the tokenizer gives ids that the model does not have."""
    if largest >= vocab_size:
        raise ConfigError(
            f"the tokenizer gave id {largest}, the model knows {vocab_size} ids; "
            "give the tokenizer= that belongs to this model"
        )
