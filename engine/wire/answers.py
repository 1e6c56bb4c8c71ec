"""Hidden states to answers: the scalar head, calibration per question, and the response on the wire.

Python and NumPy only. A candidate's scalar depends on its own hidden state alone; calibration is float64 over one
complete question.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigError, InferenceError
from engine.statistics import RunStatistics
from engine.wire.requests import Choice, Noul, Question, Request

_SUM_TOLERANCE = 1e-6


class Calibration(Protocol):
    """What a response says of the head that gave its answers."""

    @property
    def method(self) -> str: ...

    @property
    def temperature(self) -> float: ...


@dataclass(frozen=True)
class Head:
    """A linear head over the final hidden state, with its calibration."""

    weight: NDArray[np.float32]
    """[hidden]"""
    bias: float
    temperature: float
    """Divides every scalar before the softmax; positive."""
    method: str
    """As reported: `lora_decision_head`, `native_merged_lora_decision_head`, `pretrained_yes_minus_no_no_training`."""

    def __post_init__(self) -> None:
        if self.weight.ndim != 1 or self.weight.dtype != np.float32:
            raise ConfigError(f"head.weight must be float32 [hidden], got {self.weight.dtype} {self.weight.shape}")
        if not (np.isfinite(self.weight).all() and np.isfinite(self.bias)):
            raise ConfigError("head.weight and head.bias must be finite")
        if not (np.isfinite(self.temperature) and self.temperature > 0):
            raise ConfigError(f"head.temperature must be finite and positive, got {self.temperature}")


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Which weights answered; fixed for an engine's life."""

    model: str
    """The loaded base id, never an alias."""
    base_revision: str | None
    max_length: int
    backbone_parameter_dtypes: Sequence[str]
    code_commit: str | None = None
    checkpoint_sha256: str | None = None
    """Of the decision checkpoint; absent for a head without training."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further metadata, such as `weights: random`."""


@dataclass(frozen=True)
class NoulAnswer:
    noul: float
    """Probability of true."""
    type: Literal["noul"] = "noul"


@dataclass(frozen=True)
class ChoiceAnswer:
    choice: str
    probabilities: dict[str, float]
    confidence: float
    type: Literal["choice"] = "choice"


@dataclass(frozen=True)
class ScoreAnswer:
    score: float
    """The expected level."""
    probabilities: dict[str, float]
    confidence: float
    legend: dict[str, Any]
    type: Literal["score"] = "score"


Answer = NoulAnswer | ChoiceAnswer | ScoreAnswer


@dataclass(frozen=True)
class Usage:
    input_tokens: int
    """Sum of all full prompt lengths, the same with and without sharing."""
    output_tokens: int = 0


@dataclass(frozen=True)
class Response:
    """The answer to one request. `to_dict` and `to_json` give the wire form."""

    model: str
    answers: dict[str, Answer]
    usage: Usage
    metadata: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "answers": {id: _wire_answer(answer) for id, answer in self.answers.items()},
            "usage": asdict(self.usage),
            "metadata": dict(self.metadata),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False)


def scalar_scores(hidden: NDArray[np.floating[Any]], head: Head) -> NDArray[np.float32]:
    """One scalar per row of `hidden` [N, h], float32 [N].

    Each row is one float64 dot product of its own: a batched product changes with the number of rows. The product is
    rounded to float32 before the bias is added in float32. Overflow gives a non-finite scalar, which `answer_request`
    refuses.
    """
    if hidden.ndim != 2 or hidden.shape[1:] != head.weight.shape:
        raise ValueError(f"hidden must be [rows, {len(head.weight)}] to fit the head, got {list(hidden.shape)}")
    weight = head.weight.astype(np.float64)
    row = np.empty_like(weight)
    scores = np.empty(len(hidden), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for i, values in enumerate(hidden):
            row[:] = values
            scores[i] = np.float32(np.dot(row, weight)) + np.float32(head.bias)
    return scores


def answer_request(request: Request, scores: NDArray[np.float32], temperature: float) -> dict[str, Answer]:
    """Calibrated answers in question order. `scores` [N] holds one scalar per candidate of all questions, in order.

    Raises `InferenceError` naming question and candidate for a non-finite scalar; no answer is made up.
    """
    if scores.shape != (request.num_candidates,):
        raise ValueError(f"scores must be [{request.num_candidates}], one per candidate, got {list(scores.shape)}")
    answers: dict[str, Answer] = {}
    first = 0
    for id, question in request.questions.items():
        names = question.candidates
        row = scores[first : first + len(names)]
        first += len(names)
        for name, score in zip(names, row, strict=True):
            if not np.isfinite(score):
                raise InferenceError(f"question {id!r}, candidate {name!r}: the scalar is {score}")
        answers[id] = _answer(id, question, row, temperature)
    return answers


def respond(
    answers: dict[str, Answer],
    head: Calibration,
    statistics: RunStatistics,
    provenance: Provenance,
    inference_seconds: float,
) -> Response:
    """Answers with the usage and metadata that clients bind runs to."""
    metadata: dict[str, Any] = {
        "method": head.method,
        "temperature": head.temperature,
        "candidate_sequences": statistics.candidate_sequences,
        "inference_seconds": inference_seconds,
        "prefix_cache": prefix_cache(statistics),
        "base_revision": provenance.base_revision,
        "max_length": provenance.max_length,
        "backbone_parameter_dtypes": sorted(set(provenance.backbone_parameter_dtypes)),
        "code_commit": provenance.code_commit,
    }
    if provenance.checkpoint_sha256 is not None:
        metadata["checkpoint_sha256"] = provenance.checkpoint_sha256
    usage = Usage(statistics.logical_input_tokens)
    return Response(provenance.model, answers, usage, {**provenance.extra, **metadata})


def prefix_cache(statistics: RunStatistics) -> dict[str, Any]:
    """`metadata.prefix_cache`: what sharing saved, or the two fixed fields of a run that shares nothing."""
    if not statistics.shares_prefixes:
        return {"enabled": False, "mode": "independent_candidates"}
    return {
        "enabled": True,
        "mode": "request_local_token_prefix",
        "logical_input_tokens": statistics.logical_input_tokens,
        "processed_input_tokens": statistics.processed_input_tokens,
        "reused_input_tokens": statistics.logical_input_tokens - statistics.processed_input_tokens,
        "shared_prefix_tokens": statistics.shared_prefix_tokens,
        "question_prefix_tokens": statistics.question_prefix_tokens,
        "prefill_calls": statistics.prefill_calls,
        "suffix_batches": statistics.suffix_batches,
        "suffix_tokens": statistics.suffix_tokens,
        "max_suffix_batch": statistics.max_suffix_batch,
        "candidate_sequences": statistics.candidate_sequences,
        "recurrent_state_dtype": "preserve_kernel_output",
    }


def _answer(id: str, question: Question, scores: NDArray[np.float32], temperature: float) -> Answer:
    logits = [0.0, *scores.tolist()] if isinstance(question, Noul) else scores.tolist()
    p = calibrate(id, np.array(logits, np.float64), temperature)
    if isinstance(question, Noul):
        return NoulAnswer(float(p[1]))
    probabilities = dict(zip(question.candidates, p.tolist(), strict=True))
    if isinstance(question, Choice):
        uniform = 1 / len(p)
        confidence = 1.0 if len(p) == 1 else (float(p.max()) - uniform) / (1 - uniform)
        return ChoiceAnswer(question.candidates[int(p.argmax())], probabilities, confidence)
    level = np.arange(len(p), dtype=np.float64)
    spread = float(p @ np.abs(level - p.argmax()))
    uniform_spread = float(np.abs(level - (len(p) - 1) / 2).mean())
    legend = dict(zip(question.candidates, question.criteria, strict=True))
    return ScoreAnswer(float(p @ level), probabilities, max(0.0, 1 - spread / uniform_spread), legend)


def calibrate(id: str, logits: NDArray[np.float64], temperature: float) -> NDArray[np.float64]:
    """Softmax of one complete question's `logits` [n] over `temperature`; [n], sums to 1."""
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = logits / temperature
        weights = np.exp(scaled - scaled.max())
    p: NDArray[np.float64] = weights / weights.sum()
    if not (np.isfinite(p).all() and (p >= 0).all() and (p <= 1).all() and abs(p.sum() - 1) <= _SUM_TOLERANCE):
        raise InferenceError(f"question {id!r}: no distribution from {logits.tolist()} at temperature {temperature}")
    p /= p.sum()
    return p


def _wire_answer(answer: Answer) -> dict[str, Any]:
    fields = asdict(answer)
    return {"type": fields.pop("type"), **fields}
