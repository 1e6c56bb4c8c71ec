"""Requests, and a tiny engine on the CPU, for tests of the engine from outside."""

from __future__ import annotations

import tempfile
from functools import cache
from typing import Any

from engine import Engine, Response


def choice(*names: str, ask: str = "Who answers?") -> dict[str, Any]:
    return {"type": "choice", "instructions": ask, "criteria": dict.fromkeys(names)}


TICKET = {
    "state": {"subject": "Two charges for October", "paid": True, "invoices": [2210, 2211]},
    "questions": {
        "team": choice("billing", "engineering", "sales", ask="Which team should answer this ticket, and why?"),
        "refund": {"type": "noul", "instructions": "Is a refund due?"},
        "urgency": {"type": "score", "instructions": "How soon?", "criteria": ["later", {"when": "today"}]},
    },
}
SHORT = {"state": "s", "questions": {"q": choice("a", "b")}}
LONG = {"state": "The second invoice was paid twice. " * 110, "questions": TICKET["questions"]}


@cache
def cache_dir() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="forkgraph-tests-")  # removed when the process ends


def loaded(**options: Any) -> Engine:
    return Engine.load(device="cpu", cache_dir=cache_dir().name, **options)


def answers(response: Response) -> dict[str, Any]:
    found: dict[str, Any] = response.to_dict()["answers"]
    return found
