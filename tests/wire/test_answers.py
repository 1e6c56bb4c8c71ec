"""Scalars, calibration and the response against values worked out by hand."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from engine.errors import ConfigError, InferenceError
from engine.wire.answers import (
    ChoiceAnswer,
    Head,
    NoulAnswer,
    Provenance,
    RunStatistics,
    ScoreAnswer,
    answer_request,
    calibrate,
    prefix_cache,
    respond,
    scalar_scores,
)
from engine.wire.requests import parse_request

METHOD = "lora_decision_head"


def head(weight: Any, bias: float = 0.0, temperature: float = 1.0) -> Head:
    return Head(np.array(weight, np.float32), bias, temperature, METHOD)


def logs(*values: float, temperature: float = 1.0) -> np.ndarray[Any, Any]:
    """Scalars whose softmax over `temperature` is proportional to `values`."""
    return (np.log(np.array(values)) * temperature).astype(np.float32)


def choice(*names: str) -> dict[str, Any]:
    return {"type": "choice", "instructions": "", "criteria": dict.fromkeys(names)}


def score(*levels: Any) -> dict[str, Any]:
    return {"type": "score", "instructions": "", "criteria": list(levels)}


NOUL = {"type": "noul", "instructions": ""}


def answer_one(question: dict[str, Any], scores: np.ndarray[Any, Any], temperature: float = 1.0) -> Any:
    request = parse_request({"state": "", "questions": {"q": question}})
    return answer_request(request, scores, temperature)["q"]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_scalars_are_exact_sums_in_float64(dtype: type) -> None:
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((7, 321)).astype(np.float32)
    weight = rng.standard_normal(321).astype(np.float32)
    scores = scalar_scores(hidden.astype(dtype), head(weight, 0.25))
    exact = [math.fsum(float(h) * float(w) for h, w in zip(row, weight, strict=True)) for row in hidden]
    assert scores.dtype == np.float32
    np.testing.assert_array_equal(scores, np.array(exact).astype(np.float32) + np.float32(0.25))


def test_a_scalar_does_not_know_the_other_rows() -> None:
    rng = np.random.default_rng(1)
    hidden = rng.standard_normal((33, 4097)).astype(np.float32)
    scalar = head(rng.standard_normal(4097))
    together = scalar_scores(hidden, scalar)
    alone = np.concatenate([scalar_scores(hidden[i : i + 1], scalar) for i in range(33)])
    assert together.tobytes() == alone.tobytes()
    assert scalar_scores(hidden[::-1], scalar).tobytes() == together[::-1].tobytes()
    assert scalar_scores(np.asfortranarray(hidden), scalar).tobytes() == together.tobytes()
    assert scalar_scores(hidden[:0], scalar).shape == (0,)


def test_the_product_is_rounded_before_the_bias_is_added() -> None:
    """2^24 + 0.75 rounds to 2^24, and so does that plus 0.5; the unrounded sum is nearer to 2^24 + 2."""
    hidden = np.array([[2.0**24, 0.75]])
    assert scalar_scores(hidden, head([1, 1], 0.5)).tolist() == [2.0**24]
    assert float(np.float32(2.0**24 + 0.75 + 0.5)) == 2.0**24 + 2


def test_hidden_states_that_do_not_fit_the_head() -> None:
    for hidden in (np.zeros((2, 3)), np.zeros(2)):
        with pytest.raises(ValueError, match=r"hidden must be \[rows, 2\]"):
            scalar_scores(hidden, head([1, 1]))


@pytest.mark.parametrize(
    "change",
    [
        {"weight": np.zeros(2)},
        {"weight": np.zeros((1, 2), np.float32)},
        {"weight": np.array([1, np.nan], np.float32)},
        {"bias": math.inf},
        {"temperature": 0.0},
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": math.inf},
    ],
)
def test_heads_that_are_refused(change: dict[str, Any]) -> None:
    fields = {"weight": np.zeros(2, np.float32), "bias": 0.0, "temperature": 1.0, "method": METHOD}
    with pytest.raises(ConfigError, match=f"head.{next(iter(change))}"):
        Head(**{**fields, **change})


@pytest.mark.parametrize("temperature", [1.0, 1.8969118766347646, 0.1])
def test_noul(temperature: float) -> None:
    answer = answer_one(NOUL, logs(3, temperature=temperature), temperature)
    assert answer == NoulAnswer(pytest.approx(0.75, abs=1e-7))
    assert answer_one(NOUL, np.zeros(1, np.float32), temperature) == NoulAnswer(0.5)
    assert answer_one(NOUL, logs(1 / 9, temperature=temperature), temperature).noul == pytest.approx(0.1, abs=1e-7)


@pytest.mark.parametrize("temperature", [1.0, 2.5343690298472983])
def test_choice(temperature: float) -> None:
    """p = 1/6, 3/6, 2/6: confidence (1/2 - 1/3) / (2/3)."""
    answer = answer_one(choice("b", "a", "c"), logs(1, 3, 2, temperature=temperature), temperature)
    assert isinstance(answer, ChoiceAnswer)
    assert answer.choice == "a"
    assert list(answer.probabilities) == ["b", "a", "c"]
    assert list(answer.probabilities.values()) == pytest.approx([1 / 6, 3 / 6, 2 / 6], abs=1e-7)
    assert answer.confidence == pytest.approx(0.25, abs=1e-7)


def test_choice_among_equals_takes_the_first() -> None:
    answer = answer_one(choice("x", "b", "a"), np.array([1, 2, 2], np.float32))
    assert answer.choice == "b"
    even = answer_one(choice("x", "b", "a", "y"), np.full(4, 7, np.float32))
    assert even == ChoiceAnswer("x", dict.fromkeys("xbay", 0.25), 0.0)


def test_choice_of_one_is_certain() -> None:
    assert answer_one(choice("only"), np.array([-50], np.float32)) == ChoiceAnswer("only", {"only": 1.0}, 1.0)


def test_score() -> None:
    """p = .1, .7, .2: expected 1.1; D = .3 about level 1; U = 2/3."""
    levels = ("low", {"b": 1, "a": [None]}, ["high"])
    answer = answer_one(score(*levels), logs(0.1, 0.7, 0.2))
    assert isinstance(answer, ScoreAnswer)
    assert answer.score == pytest.approx(1.1, abs=1e-6)
    assert list(answer.probabilities) == ["0", "1", "2"]
    assert answer.confidence == pytest.approx(1 - 0.3 / (2 / 3), abs=1e-6)
    assert answer.legend == {"0": "low", "1": {"b": 1, "a": [None]}, "2": ["high"]}


def test_score_of_four_levels() -> None:
    """p = .5, .1, .1, .3: m = 0, D = .1 + .2 + .9, U = (1.5 + .5 + .5 + 1.5) / 4 = 1: no confidence below 0."""
    answer = answer_one(score(*"abcd"), logs(0.5, 0.1, 0.1, 0.3))
    assert answer.score == pytest.approx(1.2, abs=1e-6)
    assert answer.confidence == 0.0


def test_probabilities_sum_to_one_at_the_widest_question() -> None:
    rng = np.random.default_rng(2)
    names = [str(i) for i in range(255)]
    answer = answer_one(choice(*names), rng.normal(0, 30, 255).astype(np.float32), 0.7)
    assert math.fsum(answer.probabilities.values()) == pytest.approx(1, abs=1e-12)


def test_large_scalars_do_not_overflow() -> None:
    assert answer_one(NOUL, np.array([3e38], np.float32)) == NoulAnswer(1.0)
    assert answer_one(NOUL, np.array([-3e38], np.float32)) == NoulAnswer(0.0)
    with pytest.raises(InferenceError, match="question 'q': no distribution"):
        answer_one(NOUL, np.array([3e38], np.float32), 1e-300)
    with pytest.raises(InferenceError, match="no distribution"):
        calibrate("q", np.array([0.0, math.nan]), 1.0)


def test_questions_take_their_own_scalars_in_order() -> None:
    questions = {"z": NOUL, "a": choice("n", "m"), "k": score("u", "v", "w"), "b": NOUL}
    request = parse_request({"state": "", "questions": questions})
    answers = answer_request(request, np.concatenate([logs(3), logs(1, 4), logs(2, 1, 1), logs(1 / 4)]), 1.0)
    assert list(answers) == ["z", "a", "k", "b"]
    z, a, k, b = answers.values()
    assert isinstance(z, NoulAnswer)
    assert z.noul == pytest.approx(0.75)
    assert isinstance(a, ChoiceAnswer)
    assert a.probabilities == pytest.approx({"n": 0.2, "m": 0.8})
    assert isinstance(k, ScoreAnswer)
    assert k.probabilities == pytest.approx({"0": 0.5, "1": 0.25, "2": 0.25})
    assert isinstance(b, NoulAnswer)
    assert b.noul == pytest.approx(0.2)
    for count in (6, 8):
        with pytest.raises(ValueError, match=r"scores must be \[7\]"):
            answer_request(request, np.zeros(count, np.float32), 1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_scalar_that_is_not_finite_names_its_candidate(value: float) -> None:
    request = parse_request({"state": "", "questions": {"ok": NOUL, "route": choice("north", "south")}})
    hidden = np.ones((3, 4), np.float32)
    hidden[2, 1] = value
    scores = scalar_scores(hidden, head([1, 2, 3, 4]))
    assert scores[:2].tolist() == [10, 10]
    with pytest.raises(InferenceError, match=r"question 'route', candidate 'south': the scalar is -?(nan|inf)"):
        answer_request(request, scores, 1.0)


def test_a_scalar_too_large_for_float32_is_refused() -> None:
    scores = scalar_scores(np.array([[1e38, 1e38]]), head([2, 2]))
    with pytest.raises(InferenceError, match="candidate 'true': the scalar is inf"):
        answer_one(NOUL, scores)


def statistics(*, shares: bool) -> RunStatistics:
    return RunStatistics(
        shares_prefixes=shares,
        logical_input_tokens=1000,
        candidate_sequences=5,
        processed_input_tokens=300,
        shared_prefix_tokens=180,
        question_prefix_tokens=20,
        prefill_calls=3,
        suffix_batches=2,
        suffix_tokens=100,
        max_suffix_batch=4,
    )


def test_prefix_cache_metadata() -> None:
    assert prefix_cache(statistics(shares=False)) == {"enabled": False, "mode": "independent_candidates"}
    assert prefix_cache(statistics(shares=True)) == {
        "enabled": True,
        "mode": "request_local_token_prefix",
        "logical_input_tokens": 1000,
        "processed_input_tokens": 300,
        "reused_input_tokens": 700,
        "shared_prefix_tokens": 180,
        "question_prefix_tokens": 20,
        "prefill_calls": 3,
        "suffix_batches": 2,
        "suffix_tokens": 100,
        "max_suffix_batch": 4,
        "candidate_sequences": 5,
        "recurrent_state_dtype": "preserve_kernel_output",
    }


def test_the_response_on_the_wire() -> None:
    request = parse_request({"state": "", "questions": {"é": NOUL, "c": choice("o"), "s": score("u", ["v"])}})
    answers = answer_request(request, np.array([0, 5, 1, 1], np.float32), 2.0)
    provenance = Provenance(
        model="Qwen/Qwen3.5-9B",
        base_revision="c202236",
        max_length=4096,
        backbone_parameter_dtypes=["torch.float32", "torch.bfloat16", "torch.bfloat16"],
        checkpoint_sha256="ab" * 32,
        extra={"weights": "random"},
    )
    response = respond(answers, head([1], temperature=2.0), statistics(shares=False), provenance, 0.5)
    expected = {
        "model": "Qwen/Qwen3.5-9B",
        "answers": {
            "é": {"type": "noul", "noul": 0.5},
            "c": {"type": "choice", "choice": "o", "probabilities": {"o": 1.0}, "confidence": 1.0},
            "s": {
                "type": "score",
                "score": 0.5,
                "probabilities": {"0": 0.5, "1": 0.5},
                "confidence": 0.0,
                "legend": {"0": "u", "1": ["v"]},
            },
        },
        "usage": {"input_tokens": 1000, "output_tokens": 0},
        "metadata": {
            "method": METHOD,
            "temperature": 2.0,
            "candidate_sequences": 5,
            "inference_seconds": 0.5,
            "prefix_cache": {"enabled": False, "mode": "independent_candidates"},
            "checkpoint_sha256": "ab" * 32,
            "base_revision": "c202236",
            "max_length": 4096,
            "backbone_parameter_dtypes": ["torch.bfloat16", "torch.float32"],
            "code_commit": None,
            "weights": "random",
        },
    }
    assert response.to_dict() == expected
    assert json.loads(response.to_json()) == expected
    assert list(response.to_dict()["answers"]) == ["é", "c", "s"]
    assert [next(iter(answer)) for answer in response.to_dict()["answers"].values()] == ["type"] * 3
    assert "é" in response.to_json()


def test_an_untrained_head_has_no_checkpoint() -> None:
    provenance = Provenance(model="m", base_revision=None, max_length=64, backbone_parameter_dtypes=["torch.float32"])
    untrained = Head(np.ones(1, np.float32), 0.0, 1.0, "pretrained_yes_minus_no_no_training")
    metadata = respond({}, untrained, statistics(shares=True), provenance, 0.1).metadata
    assert "checkpoint_sha256" not in metadata
    assert metadata["method"] == "pretrained_yes_minus_no_no_training"
    assert metadata["prefix_cache"]["enabled"] is True
    assert metadata["base_revision"] is None
