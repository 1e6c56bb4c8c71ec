"""A request as sent: strict JSON in, a frozen `Request` out, or a `RequestError` with the wire contract's wording.

Knows nothing of tokens or models. Key order of `questions` and of choice criteria is the sender's, and so is the
spelling class of every number (`1` is not `1.0`), because prompts show both.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Collection
from typing import Annotated, Any, Final, Literal, NoReturn, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from engine.errors import RequestError, nearest, shown

logger = logging.getLogger("forkgraph")

MAX_BODY_BYTES = 4 * 1024 * 1024
MAX_QUESTIONS = 4096
MAX_CANDIDATES = 65_536
MAX_NESTING = 127
MODEL_ALIASES = ("open-jev", "jev-latest")

_MEMBERS = frozenset(("type", "instructions", "criteria"))
_TEXT_TYPE: Final = "instructions and descriptions must be text, an object, or an array"
_SURROGATES: Final = "text must not hold lone surrogates"
_CRITERIA = {
    "choice": "Choice requires between 1 and 255 candidates",
    "score": "Score requires an array of 2 to 10 descriptive levels",
    "noul": "Noul criteria must contain true and false descriptions",
}


def _require_text(value: Any) -> Any:
    if not isinstance(value, str | dict | list):
        raise PydanticCustomError("text", _TEXT_TYPE)
    return value


Text = Annotated[Any, AfterValidator(_require_text)]
"""What a prompt may show: a string, or a JSON object or array that is rendered as JSON."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class YesNo(_Frozen):
    """What the two answers of a `noul` question mean."""

    model_config = ConfigDict(extra="forbid")

    true: Text
    false: Text


class Noul(_Frozen):
    """A yes/no question: one candidate, whose scalar stands against a constant 0."""

    kind: Literal["noul"] = Field(alias="type")
    instructions: Text
    criteria: YesNo | None = None

    @property
    def candidates(self) -> tuple[str, ...]:
        return ("true",)


class Choice(_Frozen):
    """Named candidates, each with a description or null."""

    kind: Literal["choice"] = Field(alias="type")
    instructions: Text
    criteria: Annotated[dict[str, Text | None], Field(min_length=1, max_length=255)]

    @property
    def candidates(self) -> tuple[str, ...]:
        return tuple(self.criteria)


class Score(_Frozen):
    """Ordered levels; the position is the value."""

    kind: Literal["score"] = Field(alias="type")
    instructions: Text
    criteria: Annotated[list[Text], Field(min_length=2, max_length=10)]

    @property
    def candidates(self) -> tuple[str, ...]:
        return tuple(map(str, range(len(self.criteria))))


Question = Noul | Choice | Score


_AS_READ: Final = object()
"""Validation context of values that `read_body` gave, which have been looked through."""


class Request(_Frozen):
    """One observation and the questions about it, in the sender's order.

    Made of Python values it obeys the rules of the body they would be sent as: RequestError, or pydantic's
    ValidationError, for anything that no body can say.
    """

    state: Text
    questions: Annotated[
        dict[str, Annotated[Question, Field(discriminator="kind")]], Field(min_length=1, max_length=MAX_QUESTIONS)
    ]

    @model_validator(mode="before")
    @classmethod
    def _as_sent(cls, values: Any, info: ValidationInfo) -> Any:
        return values if info.context is _AS_READ or isinstance(values, cls) else read_body(values)

    @model_validator(mode="after")
    def _within_limits(self) -> Self:
        if self.num_candidates > MAX_CANDIDATES:
            raise RequestError("request exceeds the candidate limit", field="questions", value=self.num_candidates)
        return self

    @property
    def num_candidates(self) -> int:
        return sum(len(question.candidates) for question in self.questions.values())


def parse_request(source: Request | dict[str, Any] | str | bytes, loaded_names: Collection[str] = ()) -> Request:
    """The request in `source`: a JSON body, or the same as Python values (dict, list, str, int, float, bool, None).
    One that is parsed already stays as it is.

    `loaded_names` are the names of the loaded model; a request may also name no model or one of `MODEL_ALIASES`.
    Raises `RequestError` for the first violated rule of the wire contract. Python values obey the rules of the body
    they would be sent as; tuples and non-string keys, which JSON cannot spell, are refused.
    """
    if isinstance(source, Request):
        return source
    tree = read_body(source)
    if not isinstance(tree, dict) or "state" not in tree or "questions" not in tree:
        raise RequestError("request requires state and questions", value=tree)
    model = tree.get("model")
    if model is not None and model not in (*MODEL_ALIASES, *loaded_names):
        raise RequestError("requested model is not loaded; see /v1/models", field="model", value=model)
    questions = tree["questions"]
    if not isinstance(questions, dict) or len(questions) > MAX_QUESTIONS:
        text = "questions must be an object within the server question limit"
        raise RequestError(text, field="questions", value=questions)
    try:
        request = Request.model_validate(tree, context=_AS_READ)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False)[0]) from None
    _say_misspelt(questions)
    return request


def _say_misspelt(questions: dict[str, Any]) -> None:
    """The contract ignores members that it does not know; the first that looks like one of its own is said."""
    for id, question in questions.items():
        for member in question.keys() - _MEMBERS:
            if close := nearest(member, _MEMBERS):
                logger.warning("questions.%s: the member %s is ignored%s", shown(id), shown(member), close)
                return


def read_body(source: dict[str, Any] | str | bytes) -> Any:
    """What the JSON body says, read strictly; Python values are taken as the body they would be sent as."""
    if isinstance(source, dict):
        return _read_json(_as_body(source))
    if not isinstance(source, str | bytes):
        found = type(source).__name__
        raise RequestError(f"a request must be one dict, or one JSON body as str or bytes, not {found}")
    tree = _read_json(source)
    _check_tree(tree)
    return tree


def _refusal(error: ErrorDetails) -> RequestError:
    """The contract's wording for a structural error. Paths in a question are (questions, id, kind, member, ...)."""
    match error["loc"]:
        case ("state", *_):
            text = "state must be text, a JSON object, or an array"
        case ("questions",):
            text = "questions must be a nonempty mapping"
        case ("questions", _) if error["type"].startswith("union_tag"):
            text = "question type must be choice, score, or noul"
        case ("questions", _):
            text = "question IDs must be strings and definitions must be mappings"
        case ("questions", _, kind, "criteria", *_) if error["type"] != "text":
            text = _CRITERIA[str(kind)]
        case _:
            text = _TEXT_TYPE
    path = [str(part) for position, part in enumerate(error["loc"]) if position != 2]
    return RequestError(text, field=".".join(path), value=error["input"])


def _as_body(source: dict[str, Any]) -> bytes:
    _measure(source, 0, {})
    try:
        return json.dumps(source, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        raise RequestError(_SURROGATES) from None
    except ValueError as error:  # an integer of more digits than Python prints
        raise RequestError(str(error)) from None


def _read_json(source: str | bytes) -> Any:
    try:
        body = source.encode() if isinstance(source, str) else source
        if len(body) > MAX_BODY_BYTES:
            raise _too_large(len(body))
        if not body:
            raise RequestError("empty request body")
        tree = json.loads(
            body.decode(), object_pairs_hook=_unique, parse_constant=_refuse_number, parse_float=_finite_float
        )
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # malformed JSON, text that is not UTF-8, an integer of more digits than Python reads
        raise RequestError(str(error)) from None
    return tree


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise RequestError("duplicate JSON key", value=key)
    return members


def _finite_float(spelling: str) -> float:
    value = float(spelling)
    return value if math.isfinite(value) else _refuse_number(spelling)


def _refuse_number(spelling: str) -> NoReturn:
    raise RequestError("non-finite JSON number", value=spelling)


def _too_deep() -> RequestError:
    return RequestError(f"JSON nesting exceeds {MAX_NESTING} levels")


def _too_large(size: int) -> RequestError:
    return RequestError("request body size is outside server limits", value=size)


def _check_tree(value: Any, depth: int = 0) -> None:
    """What JSON syntax does not rule out: depth, and escapes that spell half a character."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise RequestError(_SURROGATES, value=value) from None
    elif isinstance(value, dict | list):
        if depth == MAX_NESTING:
            raise _too_deep()
        if isinstance(value, dict):
            for key in value:
                _check_tree(key)
        for member in value.values() if isinstance(value, dict) else value:
            _check_tree(member, depth + 1)


def _measure(value: Any, depth: int, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Bytes that a Python value takes in a body at least, and its levels; refuses what no body can spell.

    A list that stands in several places is looked through once (`known`) and counts wherever it is written out.
    """
    if isinstance(value, str):
        return len(value) + 2, 0
    if isinstance(value, int):
        return (value.bit_length() - 1) * 3 // 10 + 1, 0  # log10(2) is a little more
    if value is None or isinstance(value, float):
        return 3, 0
    if not isinstance(value, dict | list):
        raise RequestError("values must be dict, list, str, int, float, bool or None", value=type(value))
    size, levels = known.get(id(value), (0, 1))
    if depth + levels > MAX_NESTING:
        raise _too_deep()
    if size:
        return size, levels
    size = 1  # the brackets, less a comma that the members below do not have
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise RequestError("object keys must be strings", value=type(key))
            size += len(key) + 3
    for member in value.values() if isinstance(value, dict) else value:
        bytes_, below = _measure(member, depth + 1, known)
        size, levels = size + bytes_ + 1, max(levels, below + 1)
        if size > MAX_BODY_BYTES:
            raise _too_large(size)
    known[id(value)] = size, levels
    return size, levels
