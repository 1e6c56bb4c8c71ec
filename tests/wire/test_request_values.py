"""Requests made of Python values: what stands in Python and never in a body is refused, at once and by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from engine.errors import RequestError
from engine.wire.requests import Request, _measure, parse_request
from tests.wire.request_support import NOUL, TEXT_TYPE, asking, refused


def shared(levels: int) -> list[Any]:
    """A list of 2^levels letters once it is written out."""
    value: list[Any] = ["a"]
    for _ in range(levels):
        value = [value, value]
    return value


class Counted(list[Any]):
    """Counts how often it is gone through."""

    passes = 0

    def __iter__(self) -> Any:
        Counted.passes += 1
        return super().__iter__()


def test_d48_shared_structure_is_measured_before_it_is_written_out() -> None:
    counted = Counted(["a"])
    state: list[Any] = counted
    for _ in range(26):
        state = [state, state]
    assert refused(asking(NOUL, state=state)) == ("request body size is outside server limits", "request")
    assert Counted.passes == 1
    assert refused(asking(NOUL, state=[{"k": shared(40)}]))[0] == "request body size is outside server limits"
    wide = ["x" * 1_000_000] * 5
    assert refused(asking(NOUL, state=wide))[0] == "request body size is outside server limits"
    assert refused(asking(NOUL, state=[10**4000] * 2000))[0] == "request body size is outside server limits"
    assert parse_request(asking(NOUL, state=shared(10))).state == json.loads(json.dumps(shared(10)))


def test_d48_what_is_shared_is_as_deep_as_its_deepest_place() -> None:
    deep: Any = "a"
    for _ in range(100):
        deep = [deep]
    below = [deep]
    for _ in range(26):
        below = [below]
    assert refused(asking(NOUL, state=[deep, below])) == ("JSON nesting exceeds 127 levels", "request")
    endless: list[Any] = []
    endless.extend([endless, endless])
    assert refused(asking(NOUL, state=endless)) == ("JSON nesting exceeds 127 levels", "request")
    circle: dict[str, Any] = {}
    circle["a"] = [1, circle]
    assert refused(asking(NOUL, state=circle)) == ("JSON nesting exceeds 127 levels", "request")


def test_the_size_found_beforehand_is_never_more_than_the_body() -> None:
    numbers = (0, -1, 7, 8, 9, 10, 15, 16, 99, 100, 2**63, -(2**63), 10**40 - 1, 10**40, 0.0, -1.5, 1e-300, True, False)
    for value in (*numbers, None, "", "é\n", [], {}, [[]], {"": {}}, [1, 2.0, None], {"a": [True], "bc": "d"}):
        body = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        assert _measure(value, 0, {})[0] <= len(body.encode()), value
    assert _measure(["a", {"k": ["v"]}, "b"], 0, {}) == (len('["a",{"k":["v"]},"b"]'), 3)


@pytest.mark.parametrize("source", [None, 3, [asking(NOUL)], (asking(NOUL),), Path("a.json"), {"a"}, object()])
def test_d47_what_is_no_request_is_refused_by_its_type(source: Any) -> None:
    with pytest.raises(RequestError, match=r"^request: a request must be one dict, or one JSON body as str or bytes, "
                       rf"not {type(source).__name__}$"):  # fmt: skip
        parse_request(source)


WRONG = [
    ({"state": "\ud800"}, "text must not hold lone surrogates"),
    ({"state": {"\udc00": 1}}, "text must not hold lone surrogates"),
    ({"state": [float("nan")]}, "non-finite JSON number"),
    ({"state": [float("inf")]}, "non-finite JSON number"),
    ({"state": [{"a"}]}, "values must be dict, list, str, int, float, bool or None"),
    ({"state": [("a",)]}, "values must be dict, list, str, int, float, bool or None"),
    ({"state": {1: "a"}}, "object keys must be strings"),
    ({"state": shared(26)}, "request body size is outside server limits"),
    ({"state": 3}, "state"),
    ({"questions": {}}, "questions"),
    ({"questions": {str(i): NOUL for i in range(4097)}}, "at most 4096 items"),
    ({"questions": {"q": {"type": "noul", "instructions": 3}}}, TEXT_TYPE),
    (
        {"questions": {str(i): {"type": "choice", "instructions": "", "criteria": dict.fromkeys(map(str, range(255)))}
                       for i in range(258)}},
        "request exceeds the candidate limit",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("change", "text"), WRONG, ids=range(len(WRONG)))
def test_d47_a_request_made_of_values_obeys_the_rules_of_a_body(change: dict[str, Any], text: str) -> None:
    values = asking(NOUL) | change
    for make in (lambda: Request.model_validate(values), lambda: Request(**values)):
        with pytest.raises((RequestError, ValidationError), match=text):
            make()


def test_d47_a_request_made_of_values_is_the_one_that_is_parsed_and_keeps_none_of_them() -> None:
    values = asking(NOUL, state=[{"a": 1.0}])
    for request in (Request.model_validate(values), Request(**values)):
        assert request == parse_request(values)
        assert Request.model_validate(request) is request
        assert parse_request(request) is request
        assert request.state[0] is not values["state"][0]
    with pytest.raises(RequestError, match="a request must be one dict, or one JSON body"):
        Request.model_validate([values])
