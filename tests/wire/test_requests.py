"""Every rule of the wire format that a body can break: wording, field, and which rule wins."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.errors import RequestError
from engine.wire.requests import MAX_BODY_BYTES, Choice, Noul, Score, YesNo, parse_request
from tests.wire.request_support import NOUL, TEXT_TYPE, asking, refused

QUESTIONS_SHAPE = "questions must be an object within the server question limit"
CHOICE = "Choice requires between 1 and 255 candidates"
SCORE = "Score requires an array of 2 to 10 descriptive levels"
NOUL_CRITERIA = "Noul criteria must contain true and false descriptions"
MISSING = "request requires state and questions"


def test_a_request_of_every_kind_keeps_order_types_and_names() -> None:
    body = {
        "state": {"b": 1, "a": [1.0, None, True]},
        "questions": {
            "z": {"type": "noul", "instructions": ""},
            "a": {"type": "noul", "instructions": "i", "criteria": {"false": ["no"], "true": {"yes": 1}}},
            "m": {"type": "choice", "instructions": ["i"], "criteria": {"wait": None, "go": "Go on.", "": {}}},
            "k": {"type": "score", "instructions": {}, "criteria": ["low", {"x": 1}, []]},
        },
    }
    request = parse_request(json.dumps(body).encode())
    assert request == parse_request(json.dumps(body)) == parse_request(body)
    assert list(request.questions) == ["z", "a", "m", "k"]
    assert request.state == {"b": 1, "a": [1.0, None, True]}
    assert list(request.state) == ["b", "a"]
    z, a, m, k = request.questions.values()
    assert isinstance(z, Noul)
    assert z.criteria is None
    assert isinstance(a, Noul)
    assert a.criteria == YesNo(true={"yes": 1}, false=["no"])
    assert isinstance(m, Choice)
    assert list(m.criteria.items()) == [("wait", None), ("go", "Go on."), ("", {})]
    assert isinstance(k, Score)
    assert k.criteria == ["low", {"x": 1}, []]
    assert [question.candidates for question in (z, a, m, k)] == [
        ("true",),
        ("true",),
        ("wait", "go", ""),
        ("0", "1", "2"),
    ]
    assert request.num_candidates == 8


def test_unknown_members_are_ignored_but_their_json_is_still_checked() -> None:
    parse_request(asking({**NOUL, "weight": 3, "note": None}, temperature=0.5, trace=[1]))
    assert refused(asking(NOUL, trace=[float("nan")]))[0] == "non-finite JSON number"


def test_number_spellings_keep_their_class() -> None:
    numbers = "[1, 1.0, -0.0, -0, 1e2, 12345678901234567890]"
    state = parse_request(f'{{"state": {numbers}, "questions": {{"q": {json.dumps(NOUL)}}}}}').state
    assert [repr(number) for number in state] == ["1", "1.0", "-0.0", "0", "100.0", "12345678901234567890"]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "empty request body"),
        ("", "empty request body"),
        (b'{"state": "a", "state": "b", "questions": {}}', "duplicate JSON key"),
        (b'{"state": [{"x": 1, "y": 2, "x": 1}], "questions": {}}', "duplicate JSON key"),
        (b'{"state": [NaN], "questions": {}}', "non-finite JSON number"),
        (b'{"state": [Infinity], "questions": {}}', "non-finite JSON number"),
        (b'{"state": [-Infinity], "questions": {}}', "non-finite JSON number"),
        (b'{"state": [1e400], "questions": {}}', "non-finite JSON number"),
        (b'{"state": ["\\ud800"], "questions": {}}', "text must not hold lone surrogates"),
        (b'{"state": {"\\udc00": 1}, "questions": {}}', "text must not hold lone surrogates"),
        (b"[]", MISSING),
        (b"null", MISSING),
        (b'"state questions"', MISSING),
        (b'{"state": "a"}', MISSING),
        (b'{"questions": {}}', MISSING),
    ],
)
def test_bodies_that_are_no_request(body: str | bytes, text: str) -> None:
    assert refused(body) == (text, "request")


@pytest.mark.parametrize(
    "body",
    [
        b" \n ",
        b'{"state": 1,}',
        b"{'state': 1}",
        b'{"state": "a", "questions": {}} x',
        b'{"state": 01, "questions": {}}',
        b'{"state": "a\nb", "questions": {}}',
        b'\xef\xbb\xbf{"state": "a", "questions": {}}',
        b'{"state": "\xff", "questions": {}}',
        b'{"state": "\xed\xa0\x80", "questions": {}}',
        '{"state": "a", "questions": {}}'.encode("utf-16"),
        '{"state": "\ud800", "questions": {}}',
        b'{"state": [' + b"1" * 5000 + b'], "questions": {}}',
    ],
)
def test_malformed_bodies_are_refused_with_the_parsers_own_words(body: str | bytes) -> None:
    text, field = refused(body)
    assert text
    assert field == "request"


def nested(levels: int) -> bytes:
    """A body whose deepest value has `levels` containers around it, the request itself being the first."""
    state = b"[" * (levels - 1) + b"]" * (levels - 1)
    return b'{"state": %s, "questions": {"q": %s}}' % (state, json.dumps(NOUL).encode())


def test_nesting_ends_at_127_levels() -> None:
    too_deep = ("JSON nesting exceeds 127 levels", "request")
    parse_request(nested(127))
    parse_request(json.loads(nested(127)))
    assert refused(nested(128)) == too_deep
    assert refused(json.loads(nested(128))) == too_deep
    assert refused(nested(100_000)) == too_deep
    endless: list[Any] = []
    endless.append(endless)
    assert refused(asking(NOUL, state=endless)) == too_deep


def test_the_body_ends_at_4_mib_of_utf8() -> None:
    frame = len(json.dumps(asking(NOUL, state=""), separators=(",", ":")))
    text = "é" * ((MAX_BODY_BYTES - frame) // 2)
    fitting = asking(NOUL, state=text + "x" * ((MAX_BODY_BYTES - frame) % 2))
    body = json.dumps(fitting, ensure_ascii=False, separators=(",", ":"))
    assert len(body.encode()) == MAX_BODY_BYTES
    for source in (body, body.encode(), fitting):
        parse_request(source)
    too_long = "request body size is outside server limits"
    for source in (body + " ", body.encode() + b" ", asking(NOUL, state=fitting["state"] + "x")):
        assert refused(source) == (too_long, "request")


@pytest.mark.parametrize("value", [("a", "b"), {1}, b"x", object()])
def test_python_values_that_json_cannot_spell(value: Any) -> None:
    text = "values must be dict, list, str, int, float, bool or None"
    assert refused(asking(NOUL, state=[value])) == (text, "request")


@pytest.mark.parametrize("key", [1, None, True, 1.5, ("a",)])
def test_python_keys_that_json_cannot_spell(key: Any) -> None:
    assert refused(asking(NOUL, state={key: "x"})) == ("object keys must be strings", "request")


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_python_numbers_that_json_cannot_spell(number: float) -> None:
    assert refused(asking(NOUL, state=[number])) == ("non-finite JSON number", "request")
    assert "digits" in refused(asking(NOUL, state=[10**5000]))[0]


def test_a_request_does_not_change_with_the_values_it_was_made_from() -> None:
    source = asking(NOUL, state={"list": [1]})
    request = parse_request(source)
    source["state"]["list"].append(2)
    source["questions"].clear()
    assert request.state == {"list": [1]}
    assert list(request.questions) == ["q"]


@pytest.mark.parametrize("name", [None, "open-jev", "jev-latest", "Qwen/Qwen3.5-9B", "open-jev-9b"])
def test_model_names_that_are_served(name: str | None) -> None:
    parse_request(asking(NOUL, model=name), loaded_names={"Qwen/Qwen3.5-9B", "open-jev-9b"})
    parse_request(asking(NOUL), loaded_names=())


@pytest.mark.parametrize("name", ["Qwen/Qwen3.8-27B", "", "OPEN-JEV", 1, ["open-jev"], {}])
def test_model_names_that_are_not(name: Any) -> None:
    text = "requested model is not loaded; see /v1/models"
    assert refused(asking(NOUL, model=name), loaded_names=["Qwen/Qwen3.5-9B"]) == (text, "model")


@pytest.mark.parametrize("questions", [None, [], [NOUL], "q", 1, {str(i): NOUL for i in range(4097)}])
def test_questions_of_a_wrong_shape(questions: Any) -> None:
    assert refused({"state": "s", "questions": questions}) == (QUESTIONS_SHAPE, "questions")


@pytest.mark.parametrize("state", [None, 1, 1.5, True])
def test_states_of_a_wrong_type(state: Any) -> None:
    assert refused(asking(NOUL, state=state)) == ("state must be text, a JSON object, or an array", "state")


@pytest.mark.parametrize("state", ["", {}, []])
def test_empty_states_are_states(state: Any) -> None:
    assert parse_request(asking(NOUL, state=state)).state == state


def test_no_questions() -> None:
    assert refused({"state": "s", "questions": {}}) == ("questions must be a nonempty mapping", "questions")


@pytest.mark.parametrize("definition", [None, [], "noul", 1, True])
def test_definitions_that_are_no_objects(definition: Any) -> None:
    text = "question IDs must be strings and definitions must be mappings"
    assert refused(asking(definition)) == (text, "questions.q")


@pytest.mark.parametrize("kind", [None, "Noul", "", 1, ["noul"], {}])
def test_bad_types(kind: Any) -> None:
    text = "question type must be choice, score, or noul"
    assert refused(asking({**NOUL, "type": kind})) == (text, "questions.q")
    assert refused(asking({"instructions": "i"})) == (text, "questions.q")


@pytest.mark.parametrize("wrong", [None, 1, 1.5, False])
@pytest.mark.parametrize(
    ("kind", "criteria"), [("noul", None), ("choice", {"a": None}), ("score", ["a", "b"])], ids=lambda x: str(x)[:6]
)
def test_instructions_of_a_wrong_type(kind: str, criteria: Any, wrong: Any) -> None:
    field = "questions.q.instructions"
    assert refused(asking({"type": kind, "instructions": wrong, "criteria": criteria})) == (TEXT_TYPE, field)
    assert refused(asking({"type": kind, "criteria": criteria})) == (TEXT_TYPE, field)


@pytest.mark.parametrize(
    ("kind", "criteria", "text", "field"),
    [
        ("choice", {"a": 1}, TEXT_TYPE, "criteria.a"),
        ("choice", {"a": None, "b": True}, TEXT_TYPE, "criteria.b"),
        ("choice", {}, CHOICE, "criteria"),
        ("choice", None, CHOICE, "criteria"),
        ("choice", ["a", "b"], CHOICE, "criteria"),
        ("choice", "a", CHOICE, "criteria"),
        ("choice", {str(i): None for i in range(256)}, CHOICE, "criteria"),
        ("score", ["a", None], TEXT_TYPE, "criteria.1"),
        ("score", [2, "a"], TEXT_TYPE, "criteria.0"),
        ("score", None, SCORE, "criteria"),
        ("score", {"0": "a", "1": "b"}, SCORE, "criteria"),
        ("score", ["a"], SCORE, "criteria"),
        ("score", list("abcdefghijk"), SCORE, "criteria"),
        ("noul", {"true": "a", "false": None}, TEXT_TYPE, "criteria.false"),
        ("noul", {"true": 0, "false": "b"}, TEXT_TYPE, "criteria.true"),
        ("noul", {"true": "a"}, NOUL_CRITERIA, "criteria.false"),
        ("noul", {}, NOUL_CRITERIA, "criteria.true"),
        ("noul", {"true": "a", "false": "b", "maybe": "c"}, NOUL_CRITERIA, "criteria.maybe"),
        ("noul", ["a", "b"], NOUL_CRITERIA, "criteria"),
        ("noul", "yes", NOUL_CRITERIA, "criteria"),
        ("noul", False, NOUL_CRITERIA, "criteria"),
    ],
)
def test_criteria_of_a_wrong_shape(kind: str, criteria: Any, text: str, field: str) -> None:
    assert refused(asking({"type": kind, "instructions": "", "criteria": criteria})) == (text, f"questions.q.{field}")


def test_missing_criteria() -> None:
    assert refused(asking({"type": "choice", "instructions": ""})) == (CHOICE, "questions.q.criteria")
    assert refused(asking({"type": "score", "instructions": ""})) == (SCORE, "questions.q.criteria")


@pytest.mark.parametrize(
    ("kind", "criteria"),
    [
        ("choice", {"only": None}),
        ("choice", {str(i): None for i in range(255)}),
        ("score", ["a", "b"]),
        ("score", list("abcdefghij")),
    ],
)
def test_criteria_at_the_limits(kind: str, criteria: Any) -> None:
    request = parse_request(asking({"type": kind, "instructions": "", "criteria": criteria}))
    assert request.num_candidates == len(criteria)


def test_question_and_candidate_limits() -> None:
    wide = {"type": "choice", "instructions": "", "criteria": {str(i): None for i in range(255)}}
    assert len(parse_request({"state": "", "questions": {str(i): NOUL for i in range(4096)}}).questions) == 4096
    fitting = {str(i): wide for i in range(257)} | {"last": NOUL}
    assert parse_request({"state": "", "questions": fitting}).num_candidates == 65_536
    over = ("request exceeds the candidate limit", "questions")
    assert refused({"state": "", "questions": fitting | {"one more": NOUL}}) == over


def test_the_checking_order() -> None:
    """Each line mends the fault that the line before was refused for; the later faults were there all along."""
    bad = {"type": "choice", "instructions": 5, "criteria": {"a": 5}}
    assert refused('{"model": "x", "questions": [], "state": 5, "state": 6}')[0] == "duplicate JSON key"
    assert refused({"model": "x", "questions": []})[0] == MISSING
    assert refused({"model": "x", "questions": [], "state": 5})[1] == "model"
    assert refused({"questions": [], "state": 5})[0] == QUESTIONS_SHAPE
    assert refused({"questions": {str(i): 7 for i in range(4097)}, "state": 5})[0] == QUESTIONS_SHAPE
    assert refused({"questions": {}, "state": 5})[1] == "state"
    assert refused({"questions": {"a": 7}, "state": 5})[1] == "state"
    assert refused({"questions": {"a": 7, "b": bad}, "state": ""})[1] == "questions.a"
    assert refused({"questions": {"a": {**bad, "type": "x"}, "b": bad}, "state": ""})[1] == "questions.a"
    assert refused({"questions": {"a": bad, "b": 7}, "state": ""})[1] == "questions.a.instructions"
    assert (
        refused({"questions": {"a": {**bad, "instructions": ""}, "b": 7}, "state": ""})[1] == "questions.a.criteria.a"
    )
    assert refused({"questions": {"a": NOUL, "b": 7}, "state": ""})[1] == "questions.b"


def test_a_question_id_may_be_any_string_and_is_found_in_the_field() -> None:
    assert refused({"state": "", "questions": {"": 1}})[1] == "questions."
    assert (
        refused({"state": "", "questions": {"a.b ü": {**NOUL, "instructions": 1}}})[1] == "questions.a.b ü.instructions"
    )


def test_an_error_carries_the_value_and_stays_short() -> None:
    with pytest.raises(RequestError) as caught:
        parse_request(asking({"type": "score", "instructions": "", "criteria": {"a": "x" * 100_000}}))
    assert caught.value.value == {"a": "x" * 100_000}
    assert len(str(caught.value)) < 400
