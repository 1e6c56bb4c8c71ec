"""Open-Jev's way to answer: a prompt for each candidate, and a scalar from its last token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.prompt import Prompt
from engine.wire.answers import Answer, Head, answer_request, scalar_scores
from engine.wire.processor import to_prompts
from engine.wire.prompts import build_prompts
from engine.wire.requests import Request, parse_request
from engine.wire.tokens import Tokens


@dataclass(frozen=True, kw_only=True)
class OpenJev:
    """The processor of Open-Jev and of a plain model asked for Yes or No."""

    tokens: Tokens
    names: tuple[str, ...]
    max_length: int
    vocab_size: int
    head: Head | None = None
    """None where nothing is answered."""

    @property
    def method(self) -> str:
        return self._head.method

    @property
    def temperature(self) -> float:
        return self._head.temperature

    def parse(self, source: Request | dict[str, Any] | str | bytes) -> Request:
        return parse_request(source, self.names)

    def prompts(self, request: Request) -> list[list[Prompt]]:
        built = build_prompts(request, self.tokens, self.max_length)
        return to_prompts([question.prompts for question in built.questions], self.vocab_size)

    def answers(self, request: Request, states: Sequence[NDArray[np.float32]]) -> dict[str, Answer]:
        return answer_request(request, scalar_scores(np.concatenate(states), self._head), self.temperature)

    @property
    def _head(self) -> Head:
        assert self.head is not None, "a processor without a head answers nothing"
        return self.head
