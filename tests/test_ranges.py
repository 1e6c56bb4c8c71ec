"""NVTX ranges: nothing until they are asked for, then in a domain of their own."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import nvtx
import pytest

from engine import ranges


@pytest.fixture
def annotated(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What is handed to the library; `enable` is undone afterwards."""
    seen: list[dict[str, Any]] = []

    def annotate(**arguments: Any) -> nullcontext[None]:
        seen.append(arguments)
        return nullcontext()

    monkeypatch.setattr(nvtx, "annotate", annotate)
    monkeypatch.setattr(ranges, "_enabled", False)
    return seen


def test_off_by_default(annotated: list[dict[str, Any]]) -> None:
    with ranges.span("branch", rows=3):
        pass
    assert annotated == []


def test_a_range_carries_its_details_in_the_projects_domain(annotated: list[dict[str, Any]]) -> None:
    ranges.enable()
    with ranges.span("branch", rows=3, rung=64):
        pass
    assert annotated == [{"message": "branch rows=3 rung=64", "domain": "forkgraph"}]


def test_the_library_takes_them() -> None:
    with nvtx.annotate(message="branch", domain=ranges.DOMAIN):
        pass
