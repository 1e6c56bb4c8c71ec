"""What a family of decision models makes of requests: parse -> prompts -> answers. Knows no device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.prompt import Prompt
from engine.wire.answers import Answer, Calibration
from engine.wire.requests import Request


class Processor(Calibration, Protocol):
    """One family over one tokenizer and head."""

    def parse(self, source: Mapping[str, Any] | str | bytes) -> Request: ...

    def prompts(self, request: Request) -> list[list[Prompt]]: ...

    def answers(self, request: Request, states: Sequence[NDArray[np.float32]]) -> dict[str, Answer]: ...
