"""Cua-S1's letters: the prompt to the character, what is refused, and a readout equal to transformers'."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import Qwen3_5ForCausalLM

from engine.config import EngineConfig, ExplainConfig, LettersConfig
from engine.engine import Engine
from engine.errors import CheckpointError, ConfigError, InferenceError, RequestError
from engine.explain import explain
from engine.load.checkpoint import read_dimensions
from engine.load.lora import open_adapter
from engine.load.package import CUA_NAME, CUA_REVISION, check_cua
from engine.wire import letters
from engine.wire.answers import ChoiceAnswer
from engine.wire.letters import (
    LETTER_IDS,
    LETTERS,
    Letters,
    LettersHead,
    letter_ids,
    read_system_message,
)
from engine.wire.requests import Choice, Request
from engine.wire.tokens import Tokens
from tests.load.package_support import CUA, write_adapter, write_base
from tests.wire.qwen_vocabulary import qwen_tokens

NAMES = (f"cua-ai/{CUA_NAME}@{CUA_REVISION}:text", CUA_NAME)
SYSTEM = "You choose.\nOne letter."
EXAMPLE = {
    "state": "Dialog: Delete 3 files permanently? Buttons: Delete, Cancel",
    "questions": {
        "next": {
            "type": "choice",
            "instructions": "Keep the files.",
            "criteria": {"delete": "Click Delete", "cancel": "Click Cancel"},
        }
    },
}


def choice(count: int, instructions: Any = "Go.") -> dict[str, Any]:
    return {"type": "choice", "instructions": instructions, "criteria": {f"o{i}": None for i in range(count)}}


def request(**questions: Any) -> dict[str, Any]:
    return {"state": "s", "questions": questions}


def processor(tokens: Tokens | None = None, *, max_length: int = 4096, head: LettersHead | None = None) -> Letters:
    return Letters(
        tokens=tokens or qwen_tokens("plain"), names=NAMES, max_length=max_length, vocab_size=248_320,
        system_message=SYSTEM, head=head,
    )  # fmt: skip


def parse(source: Any) -> Request:
    return processor().parse(source)


def ids_of(request: Request, tokens: Tokens | None = None) -> list[list[int]]:
    """Token ids of each question's prompt."""
    return [prompt.token_ids.tolist() for [prompt] in processor(tokens).prompts(request)]


def text(question: dict[str, Any], state: Any = "s") -> str:
    """The prompt as text, control tokens spelt out."""
    parsed = parse({"state": state, "questions": {"q": question}})
    found = parsed.questions["q"]
    assert isinstance(found, Choice)
    piece = letters.prompt_piece(SYSTEM, parsed.state, found)
    return "".join(part if isinstance(part, str) else part.value for part in piece)


# The prompt


def test_the_prompt_is_this_text() -> None:
    assert text(EXAMPLE["questions"]["next"], EXAMPLE["state"]) == (
        "<|im_start|>system\nYou choose.\nOne letter.<|im_end|>\n"
        "<|im_start|>user\n"
        "Goal: Keep the files.\n"
        "\n"
        "App: Cua Driver\n"
        "Task family: closed-candidate decision\n"
        "\n"
        "Accessibility tree:\n"
        "Dialog: Delete 3 files permanently? Buttons: Delete, Cancel\n"
        "\n"
        "Options:\n"
        'A. Decision "Click Delete" -> select\n'
        'B. Decision "Click Cancel" -> select\n'
        "\n"
        "Answer with a single letter.<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n"
    )


@pytest.mark.parametrize("instructions", [None, ""])
def test_without_instructions_there_is_no_goal(instructions: str | None) -> None:
    assert "<|im_start|>user\nApp: Cua Driver\n" in text(choice(1, instructions))


def test_values_are_shown_in_the_order_and_spelling_of_the_request() -> None:
    found = text(
        {
            "type": "choice",
            "instructions": {"z": 1.0, "a": ["é", None]},
            "criteria": {'say "hi"\n': None, "b": {"k": 'x"y'}, "c": ["ü", 1], "d": ""},
        },
        {"b": 1, "a": "ß"},
    )
    assert 'Goal: {"z": 1.0, "a": ["é", null]}\n\nApp' in found
    assert 'Accessibility tree:\n{"b": 1, "a": "ß"}\n\nOptions' in found
    assert 'A. Decision "say \\"hi\\"\\n" -> select\n' in found
    assert 'B. Decision "{\\"k\\": \\"x\\\\\\"y\\"}" -> select\n' in found
    assert 'C. Decision "[\\"ü\\", 1]" -> select\n' in found
    assert 'D. Decision "" -> select\n' in found


def test_no_space_of_the_user_is_trimmed() -> None:
    found = text(choice(1, "  go \n"), "\n tree \n\n")
    assert "Goal:   go \n\n\nApp: Cua Driver" in found
    assert "Accessibility tree:\n\n tree \n\n\n\nOptions:" in found


def test_the_prompt_is_one_text_to_the_tokenizer_and_a_control_token_in_it_is_none() -> None:
    plain, special = qwen_tokens("plain"), qwen_tokens("special")
    [ids] = ids_of(parse(EXAMPLE), plain)
    assert ids == special.encode((text(EXAMPLE["questions"]["next"], EXAMPLE["state"]),)).tolist()
    assert ids[-5:] == [248045, 74455, 198, 248068, 198]
    [injected] = ids_of(parse({**EXAMPLE, "state": "<|im_end|>"}), plain)
    assert injected.count(248046) == 2


# Refusals


def test_letters_of_the_published_vocabulary() -> None:
    assert tuple(letter_ids(qwen_tokens("plain"), check=True)) == LETTER_IDS


def test_letters_of_another_vocabulary_are_refused() -> None:
    class Other:
        def single_id(self, word: str) -> int:
            return LETTER_IDS[LETTERS.index(word)] + (word == "C")

    assert letter_ids(Other(), check=False)[2] == 35  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="tokenizer: 'C' is id 35, Cua-S1 has 34"):
        letter_ids(Other(), check=True)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (request(q={"type": "noul", "instructions": "i"}), r"questions\.q\.type: only choice questions"),
        (
            request(q={"type": "score", "instructions": "i", "criteria": ["a", "b"]}),
            r"questions\.q\.type: only choice questions can be answered by letters \(got 'score'\)",
        ),
        (request(a=choice(26), q=choice(27)), r"questions\.q\.criteria: Choice by letters .* 1 and 26 .*\(got 27\)"),
        (request(q=choice(0)), r"Choice requires between 1 and 255 candidates"),
        (request(**{f"q{i}": choice(1) for i in range(65)}), r"questions: at most 64 questions .*\(got 65\)"),
        (request(q={"type": "choice", "criteria": {"a": None}}), r"questions\.q"),
        (request(q=choice(1, 3)), r"instructions and descriptions must be text"),
        ({**EXAMPLE, "model": "open-jev"}, r"model: requested model is not loaded"),
        ({"questions": {}}, r"request requires state and questions"),
        (b"[]", r"request requires state and questions"),
        (b'{"state": 1, "state": 2}', r"duplicate JSON key"),
    ],
)
def test_what_letters_cannot_answer_is_refused(wrong: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        parse(wrong)


def test_what_letters_can_answer_is_taken() -> None:
    for model in (None, *NAMES):
        parse({**EXAMPLE, "model": model})
    parsed = parse(json.dumps(request(**{f"q{i}": choice(26, None) for i in range(64)})))
    assert parsed.num_candidates == 64 * 26


def test_a_long_prompt_is_refused_by_its_question() -> None:
    parsed = parse(request(a=choice(1), q=choice(1, "word " * 900)))
    with pytest.raises(RequestError, match=r"questions\.q: Input length 9\d\d exceeds max_length=900; no silent"):
        processor(max_length=900).prompts(parsed)


def test_the_system_message_is_the_one_of_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "system.txt"
    file.write_bytes(SYSTEM.encode())
    with pytest.raises(ConfigError, match=r"system\.txt: the SHA-256 is .* that of Cua-S1's message is 7916645b"):
        read_system_message(str(file), check=True)
    assert read_system_message(str(file), check=False) == SYSTEM
    monkeypatch.setattr(letters, "SYSTEM_SHA256", hashlib.sha256(SYSTEM.encode()).hexdigest())
    assert read_system_message(str(file), check=True) == SYSTEM
    with pytest.raises(ConfigError, match=r"letters\.system_message=.*nothing\.txt: .*No such file"):
        read_system_message(str(tmp_path / "nothing.txt"), check=True)
    with pytest.raises(ConfigError, match=r"head=letters needs the system message .*letters\.system_message=FILE"):
        read_system_message(None, check=True)


# The readout


def head(rows: np.ndarray, dtype: torch.dtype = torch.float32) -> LettersHead:
    return LettersHead(rows=rows.astype(np.float32), dtype=dtype)


def answer(logits: list[float]) -> ChoiceAnswer:
    rows = np.zeros((26, 2))
    rows[: len(logits), 0] = logits
    parsed = parse(request(q=choice(len(logits))))
    found = processor(head=head(rows)).answers(parsed, [np.array([[1.0, 0.0]], np.float32)])["q"]
    assert isinstance(found, ChoiceAnswer)
    return found


def test_probabilities_and_confidence() -> None:
    found = answer([0.0, math.log(3.0), 0.0])
    assert list(found.probabilities.values()) == pytest.approx([0.2, 0.6, 0.2])
    assert found.choice == "o1"
    entropy = -(0.6 * math.log(0.6) + 0.4 * math.log(0.2))
    assert found.confidence == pytest.approx(1 - entropy / math.log(3))
    assert answer([2.0]).confidence == 1.0
    assert answer([1.0, 1.0]).choice == "o0"
    assert answer([1.0, 1.0]).confidence == pytest.approx(0.0, abs=1e-7)
    assert answer([500.0, 0.0]).confidence == 1.0


def test_logits_are_rounded_to_the_model_before_the_softmax() -> None:
    rows = np.zeros((26, 2))
    rows[0, 0], rows[1, 0] = 16.0, 16.03  # both 16 in bfloat16
    parsed = parse(request(q=choice(2)))
    states = [np.array([[1.0, 0.0]], np.float32)]
    rounded, exact = (
        processor(head=head(rows, dtype)).answers(parsed, states)["q"] for dtype in (torch.bfloat16, torch.float32)
    )
    assert isinstance(rounded, ChoiceAnswer)
    assert isinstance(exact, ChoiceAnswer)
    assert list(rounded.probabilities.values()) == [0.5, 0.5]
    assert exact.choice == "o1"


def test_a_logit_that_is_not_finite_is_an_error() -> None:
    with pytest.raises(InferenceError, match="question 'q', candidate 'o1': the logit is nan"):
        answer([0.0, math.nan])


# Through the engine


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    folder = tmp_path_factory.mktemp("text")
    return write_adapter(folder, base, rank=16, alpha=32, targets=CUA, head=True)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("system") / "system.txt"
    file.write_text(SYSTEM)
    return file


SEVERAL = request(a=choice(2), b=choice(26, None), c=choice(1, {"k": 1}))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", ["merged", "unmerged"])
def test_answers_are_those_of_the_reference(base: Path, adapter: Path, system: Path, lora: str, dtype: str) -> None:
    """At most twice the reference's own bfloat16 error plus 0.01; far less in float32."""
    with Engine.load(
        model="tiny", device="cpu", checkpoint=str(adapter), base=str(base), check_ids=False, lora=lora, dtype=dtype,
        letters=LettersConfig(system_message=str(system)),
    ) as engine:  # fmt: skip
        response = engine.score(SEVERAL)
        shared = engine.like(schedule="tree").score(SEVERAL)
    assert response.answers == shared.answers
    assert response.model == f"cua-ai/{CUA_NAME}@unchecked:text"
    assert response.metadata["method"] == "letter_logits"
    assert response.metadata["candidate_sequences"] == 3
    exact, rounded = (reference(base, adapter, kind) for kind in (torch.float32, torch.bfloat16))
    own = max(abs(a - b) for one, other in zip(exact, rounded, strict=True) for a, b in zip(one, other, strict=True))
    bound = 1e-4 if dtype == "float32" else 2 * own + 0.01
    for found, wanted in zip(response.answers.values(), exact, strict=True):
        assert isinstance(found, ChoiceAnswer)
        assert list(found.probabilities.values()) == pytest.approx(wanted, abs=bound)
    tokens = Tokens.load(base)
    total = sum(len(ids) for ids in ids_of(parse(SEVERAL), tokens))
    assert response.usage.input_tokens == total


def reference(base: Path, adapter: Path, dtype: torch.dtype) -> list[list[float]]:
    """Probabilities of each question from transformers' own logits."""
    model: Any = PeftModel.from_pretrained(Qwen3_5ForCausalLM.from_pretrained(base, dtype=dtype), adapter)
    tokens = Tokens.load(base)
    parsed = parse(SEVERAL)
    found = []
    for ids, question in zip(ids_of(parsed, tokens), parsed.questions.values(), strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].float()
        rows = [tokens.single_id(letter) for letter in LETTERS[: len(question.candidates)]]
        found.append(torch.softmax(logits[rows], 0).tolist())
    return found


def test_a_plain_model_answers_by_letters_when_asked(base: Path, system: Path) -> None:
    with Engine.load(
        device="cpu", checkpoint=str(base), head="letters", check_ids=False,
        letters=LettersConfig(system_message=str(system)),
    ) as engine:  # fmt: skip
        assert engine.score(EXAMPLE).model == "forkgraph/tiny"
        with pytest.raises(RequestError, match="only choice questions"):
            engine.submit(request(q={"type": "noul", "instructions": "i"}))
    with pytest.raises(ConfigError, match="head=letters needs the system message"):
        Engine.load(device="cpu", head="letters")
    with pytest.raises(ConfigError, match=r"letters\.system_message= is empty"):
        LettersConfig(system_message="")
    assert EngineConfig().letters.system_message is None


def test_explain_shows_the_prompts_of_letters(base: Path, system: Path, tmp_path: Path) -> None:
    body = tmp_path / "request.json"
    body.write_text(json.dumps(SEVERAL))
    config = ExplainConfig(
        device="cpu", checkpoint=str(base), head="letters", check_ids=False, format="json", request=str(body),
        letters=LettersConfig(system_message=str(system)),
    )  # fmt: skip
    out = (tmp_path / "out").open("w+")
    assert explain(config, stdin=(tmp_path / "request.json").open("rb"), stdout=out) == 0
    out.seek(0)
    assert json.load(out)["candidates"] == 3


def test_the_published_adapter_is_known_by_its_settings(base: Path, adapter: Path, tmp_path: Path) -> None:
    dimensions = read_dimensions(base)
    check_cua(open_adapter(adapter, dimensions), "4b")
    for i, (options, message) in enumerate((
        ({"rank": 8, "alpha": 32, "targets": CUA}, r"r is 8, cua-s1-4b-0\.2 has 16"),
        ({"rank": 16, "alpha": 16, "targets": CUA}, r"lora_alpha is 16\.0, .* has 32\.0"),
        ({"rank": 16, "alpha": 32, "targets": ("q_proj",)}, r"target_modules is \['q_proj'\], .* has"),
    )):  # fmt: skip
        other = write_adapter(tmp_path / str(i), base, **options)
        with pytest.raises(CheckpointError, match=message):
            check_cua(open_adapter(other, dimensions), "4b")
    with pytest.raises(CheckpointError, match=r"model is 9b, .* has 4b"):
        check_cua(open_adapter(adapter, dimensions), "9b")
