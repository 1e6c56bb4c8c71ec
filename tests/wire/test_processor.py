"""Families of decision models behind one interface: parse, prompts, answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.errors import ConfigError, InferenceError
from engine.wire.answers import Head, NoulAnswer
from engine.wire.letters import Letters, LettersHead
from engine.wire.open_jev import OpenJev
from engine.wire.processor import Processor
from engine.wire.prompts import build_prompts
from tests.wire.qwen_vocabulary import qwen_tokens

ASKED = {
    "state": "The door is ajar.",
    "questions": {
        "next": {"type": "choice", "instructions": "What now?", "criteria": {"shut": None, "wait": "Do nothing."}},
        "then": {"type": "choice", "instructions": "And then?", "criteria": {"go": None}},
    },
}
COMMON: dict[str, Any] = {
    "tokens": qwen_tokens("plain"), "names": ("m", "alias"), "max_length": 4096, "vocab_size": 248_320,
}  # fmt: skip
SIZE = 3


def open_jev(**changes: Any) -> OpenJev:
    return OpenJev(**COMMON | changes)


def letters(**changes: Any) -> Letters:
    return Letters(**COMMON | {"system_message": "One letter."} | changes)


def scalar_head() -> Head:
    return Head(np.array([1.0, 2.0, 3.0], np.float32), 0.5, 2.0, "trained")


def letters_head() -> LettersHead:
    return LettersHead(rows=np.arange(26 * SIZE, dtype=np.float32).reshape(26, SIZE), dtype=torch.float32)


@pytest.mark.parametrize("bare", [open_jev(), letters()], ids=["open_jev", "letters"])
def test_without_a_head_a_processor_still_parses_and_makes_prompts(bare: Processor) -> None:
    request = bare.parse({"model": "alias", **ASKED})
    assert bare.parse(request) is request
    questions = bare.prompts(request)
    assert [len(candidates) for candidates in questions] == [2, 1] if isinstance(bare, OpenJev) else [1, 1]
    assert all(prompt.reads == (len(prompt) - 1,) for candidates in questions for prompt in candidates)
    with pytest.raises(AssertionError, match="a processor without a head answers nothing"):
        bare.answers(request, [np.zeros((1, SIZE), np.float32)] * 3)


@pytest.mark.parametrize("make", [open_jev, letters])
def test_ids_that_the_model_does_not_have_are_refused(make: Any) -> None:
    request = make().parse(ASKED)
    largest = max(int(prompt.token_ids.max()) for candidates in make().prompts(request) for prompt in candidates)
    make(vocab_size=largest + 1).prompts(request)
    with pytest.raises(ConfigError, match=rf"gave id {largest}, the model knows {largest} ids; give the tokenizer="):
        make(vocab_size=largest).prompts(request)


def test_open_jev_answers_from_a_state_for_each_candidate() -> None:
    processor = open_jev(head=scalar_head())
    request = processor.parse(ASKED)
    assert (processor.method, processor.temperature) == ("trained", 2.0)
    states = [np.full((1, SIZE), value, np.float32) for value in (1.0, 2.0, 3.0)]
    answers = processor.answers(request, states)
    logits = np.array([6.5, 12.5]) / 2.0
    expected = np.exp(logits - logits.max())
    assert list(answers["next"].probabilities.values()) == pytest.approx(list(expected / expected.sum()))
    built = build_prompts(request, COMMON["tokens"], 4096)
    for candidates, question in zip(processor.prompts(request), built.questions, strict=True):
        assert [prompt.token_ids.tolist() for prompt in candidates] == [ids.tolist() for ids in question.prompts]
    noul = processor.parse({"state": "s", "questions": {"q": {"type": "noul", "instructions": "i"}}})
    found = processor.answers(noul, [np.zeros((1, SIZE), np.float32)])["q"]
    assert found == NoulAnswer(pytest.approx(1 / (1 + np.exp(-0.25))))
    with pytest.raises(InferenceError, match="question 'next', candidate 'wait': the scalar is nan"):
        processor.answers(request, [states[0], np.full((1, SIZE), np.nan, np.float32), states[2]])


def test_letters_answer_from_a_state_for_each_question() -> None:
    processor = letters(head=letters_head())
    request = processor.parse(ASKED)
    assert (processor.method, processor.temperature) == ("letter_logits", 1.0)
    answers = processor.answers(request, [np.full((1, SIZE), 0.1, np.float32)] * 2)
    assert list(answers["next"].probabilities) == ["shut", "wait"]
    assert answers["next"].choice == "wait"
    assert answers["then"].probabilities == {"go": 1.0}
