"""Small requests, and what a wrong one is refused with."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import RequestError
from engine.wire.requests import parse_request

NOUL = {"type": "noul", "instructions": "Is it open?"}
TEXT_TYPE = "instructions and descriptions must be text, an object, or an array"


def refused(source: Any, **kwargs: Any) -> tuple[str, str]:
    with pytest.raises(RequestError) as caught:
        parse_request(source, **kwargs)
    return caught.value.text, caught.value.field


def asking(question: Any, **more: Any) -> dict[str, Any]:
    return {"state": "The door is ajar.", "questions": {"q": question}, **more}
