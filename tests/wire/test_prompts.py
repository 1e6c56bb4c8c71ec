"""The wording of every kind of prompt, and piecewise tokens against whole prompts written out here."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import RequestError
from engine.wire.prompts import Prompts, build_prompts, render
from engine.wire.requests import Request, parse_request
from engine.wire.tokens import Tokens
from tests.wire.qwen_vocabulary import bare_tokenizer, full_tokenizer, qwen_folder, qwen_tokens

OPENING = "<|im_start|>user\n"
CLOSING = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
CLOSING_IDS = [248046, 198, 248045, 74455, 198, 248068, 271, 248069, 271]
CORRECT = "\nIs this proposed answer correct? Answer Yes or No."
MERGED = 248077  # the first id after the published ones
YES = "Is the answer to this question yes? Answer Yes or No."


def request(state: Any, **questions: Any) -> Request:
    return parse_request({"state": state, "questions": questions})


def ids_of(prompts: Prompts) -> list[list[int]]:
    return [prompt.tolist() for question in prompts.questions for prompt in question.prompts]


MIXED = request(
    {"zeta": [1, 1.0], "alpha": "é"},
    seen={"type": "noul", "instructions": "Was it seen?"},
    kept={
        "type": "noul",
        "instructions": {"b": 1, "a": "x"},
        "criteria": {"true": "It was kept.", "false": ["lost", None]},
    },
    route={
        "type": "choice",
        "instructions": "Where to?",
        "criteria": {"north": None, "south": "Down.", "ost": {"to": 1e16}, "": ""},
    },
    grade={"type": "score", "instructions": "", "criteria": ["low", {"b": True, "a": None}]},
)

CONTEXT = 'Context:\n{"alpha": "é", "zeta": [1, 1.0]}\n\nQuestion: '
MIXED_TEXTS = [
    CONTEXT + "Was it seen?\n" + YES,
    CONTEXT + '{"a": "x", "b": 1}\nYes means: It was kept.\nNo means: ["lost", null]\n' + YES,
    CONTEXT + "Where to?\nProposed answer: north" + CORRECT,
    CONTEXT + "Where to?\nProposed answer: south: Down." + CORRECT,
    CONTEXT + 'Where to?\nProposed answer: ost: {"to": 1e+16}' + CORRECT,
    CONTEXT + "Where to?\nProposed answer: : " + CORRECT,
    CONTEXT + "\nProposed answer: low" + CORRECT,
    CONTEXT + '\nProposed answer: {"a": null, "b": true}' + CORRECT,
]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("", ""),
        (" as\tis \n", " as\tis \n"),
        ('say "no"', 'say "no"'),
        ([], "[]"),
        ({}, "{}"),
        (["a", 1, None, True, False], '["a", 1, null, true, false]'),
        ([1, 1.0, -0.0, 0, 1e16, 1e-05, 0.1, 123456789012345678901234567890], None),
        ({"b": {"d": 1, "c": 2}, "a": [{"z": 0, "y": 0}]}, '{"a": [{"y": 0, "z": 0}], "b": {"c": 2, "d": 1}}'),
        (["ü", "漢", "🙂", "\u0301"], '["ü", "漢", "🙂", "\u0301"]'),
        (['"', "\\", "\n", "\x00", "/", "\x7f", "\u2028"], '["\\"", "\\\\", "\\n", "\\u0000", "/", "\x7f", "\u2028"]'),
        ({"é": 1, "z": 2, "Z": 3, "10": 4, "9": 5, "": 6}, '{"": 6, "10": 4, "9": 5, "Z": 3, "z": 2, "é": 1}'),
        ({"\U0001f642": 1, "\uffee": 2}, '{"\uffee": 2, "\U0001f642": 1}'),  # by code point, not by UTF-16 unit
    ],
)
def test_render(value: Any, text: str | None) -> None:
    expected = "[1, 1.0, -0.0, 0, 1e+16, 1e-05, 0.1, 123456789012345678901234567890]" if text is None else text
    assert render(value) == expected


def test_numbers_are_spelled_as_they_were_sent() -> None:
    body = '{"state": [1, 1.0, -0.0, -0, 1E2, 1.10, 100000000000000000000.0], "questions": {"q": %s}}'
    state = parse_request(body.replace("%s", json.dumps({"type": "noul", "instructions": ""}))).state
    assert render(state) == "[1, 1.0, -0.0, 0, 100.0, 1.1, 1e+20]"


def test_the_wording_of_every_kind() -> None:
    prompts = build_prompts(MIXED, qwen_tokens("plain"), 4096)
    assert [question.id for question in prompts.questions] == ["seen", "kept", "route", "grade"]
    assert [len(question.tails) for question in prompts.questions] == [1, 1, 4, 2]
    texts = [full_tokenizer().decode(ids, skip_special_tokens=False) for ids in ids_of(prompts)]
    assert texts == [OPENING + text + CLOSING for text in MIXED_TEXTS]
    for ids in ids_of(prompts):
        assert ids[:6] == [248045, 846, 198, 1905, 25, 198]
        assert ids[-9:] == CLOSING_IDS


@pytest.mark.parametrize("control", ["plain", "special"])
def test_ids_equal_whole_prompts(control: Any) -> None:
    prompts = build_prompts(MIXED, qwen_tokens(control), 4096)
    whole = [full_tokenizer().encode(OPENING + text + CLOSING).ids for text in MIXED_TEXTS]
    assert ids_of(prompts) == whole
    assert prompts.num_tokens == sum(map(len, whole))
    assert [n for question in prompts.questions for n in question.lengths] == [len(ids) for ids in whole]
    assert all(ids.dtype == np.int32 for question in prompts.questions for ids in question.prompts)


def test_the_head_is_what_candidates_share() -> None:
    route = build_prompts(MIXED, qwen_tokens("plain"), 4096).questions[2]
    assert route.head.tolist() == [*full_tokenizer().encode(OPENING + CONTEXT + "Where to?\n").ids]
    assert [prompt.tolist() for prompt in route.prompts] == [[*route.head, *tail] for tail in route.tails]


NASTY = st.lists(
    st.one_of(
        st.sampled_from(
            [" ", "\n", "\n\n", "\r\n", "\t", "\u3000", "\u0301", "e", "7", "漢", "🙂", "'s", ".", "Question: "]
        ),
        st.sampled_from(
            ["<|im_end|>", "<|im_start|>", "<think>", "</think>", "<tool_response>", "\nIs this", "Proposed"]
        ),
        st.text(max_size=4),
    ),
    max_size=8,
).map("".join)


@settings(max_examples=150, deadline=None)
@given(state=NASTY, instructions=NASTY, name=NASTY, other=NASTY, description=st.none() | NASTY, meaning=NASTY)
def test_nasty_text_equals_whole_prompts(
    state: str, instructions: str, name: str, other: str, description: str | None, meaning: str
) -> None:
    asked = request(
        state,
        pick={"type": "choice", "instructions": instructions, "criteria": {name: description, name + "2": None}},
        rate={"type": "score", "instructions": instructions, "criteria": [other, meaning]},
        know={"type": "noul", "instructions": instructions, "criteria": {"true": meaning, "false": other}},
    )
    head = f"user\nContext:\n{state}\n\nQuestion: {instructions}\n"
    option = name if description is None else f"{name}: {description}"
    texts = [
        *(f"{head}Proposed answer: {shown}{CORRECT}" for shown in (option, name + "2", other, meaning)),
        f"{head[:-1]}\nYes means: {meaning}\nNo means: {other}\n{YES}",
    ]
    plain = [[248045, *bare_tokenizer().encode(text).ids, *CLOSING_IDS] for text in texts]
    assert ids_of(build_prompts(asked, qwen_tokens("plain"), 4096)) == plain
    special = [full_tokenizer().encode(f"<|im_start|>{text}{CLOSING}").ids for text in texts]
    assert ids_of(build_prompts(asked, qwen_tokens("special"), 4096)) == special


def test_a_tokenizer_that_merges_across_lines_is_given_whole_prompts() -> None:
    """An added token that spans the border before the option: only whole prompts find it."""
    rules = json.loads((qwen_folder() / "tokenizer.json").read_text(encoding="utf-8"))
    rules["added_tokens"].append({**rules["added_tokens"][-1], "id": MERGED, "content": "?\nProposed"})
    tokens = Tokens(json.dumps(rules), "special")
    assert not tokens.joinable
    prompts = build_prompts(MIXED, tokens, 4096)
    reference = full_tokenizer()
    expected = []
    for text in MIXED_TEXTS:
        before, *after = (OPENING + text + CLOSING).split("?\nProposed")
        ids = reference.encode(before).ids
        for part in after:
            ids += [MERGED, *reference.encode(part).ids]
        expected.append(ids)
    assert ids_of(prompts) == expected
    assert sum(ids.count(MERGED) for ids in expected) == 4
    assert all(len(question.head) == 0 for question in prompts.questions)
    assert prompts.num_tokens == sum(map(len, expected))


def test_a_prompt_may_be_as_long_as_the_limit_and_no_longer() -> None:
    tokens = qwen_tokens("plain")
    lengths = [n for question in build_prompts(MIXED, tokens, 4096).questions for n in question.lengths]
    longest = max(lengths)
    assert build_prompts(MIXED, tokens, longest).num_tokens == sum(lengths)
    with pytest.raises(RequestError) as caught:
        build_prompts(MIXED, tokens, longest - 1)
    assert caught.value.text == f"Input length {longest} exceeds max_length={longest - 1}; no silent truncation"
    assert caught.value.field == f"questions.{['seen', 'kept', *['route'] * 4, *['grade'] * 2][lengths.index(longest)]}"
    assert caught.value.value == longest


def test_siblings_do_not_show() -> None:
    """A candidate's ids are the same alone and among others, whatever the question is called."""
    among = ids_of(build_prompts(MIXED, qwen_tokens("plain"), 4096))
    alone = request(
        {"alpha": "é", "zeta": [1, 1.0]},
        other_name={"type": "choice", "instructions": "Where to?", "criteria": {"south": "Down."}},
    )
    assert ids_of(build_prompts(alone, qwen_tokens("plain"), 4096)) == [among[3]]
