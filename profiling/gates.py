"""What is held against the measurements: equal bits and speed, which are gated, and distances, which are reported.

Knows cells and hidden states, and runs nothing. Bits are held against a whole pass under the same handle, so that
sharing alone can differ. Distances to today's plain forward, whose products round differently, are reported beside
those between transformers' own two paths.
"""

from __future__ import annotations

import hashlib
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from compare_journal import FEASIBILITY, Cell, Difference, RequestFacts
from compare_options import BASE, EXACT_ARMS, PLAIN, REFERENCE, GatesConfig
from torch import Tensor

from engine.wire.answers import Answer, ChoiceAnswer, Head, NoulAnswer, answer_request, scalar_scores
from engine.wire.requests import Request

COMPARED = (
    (BASE, PLAIN),
    ("transformers/torch/one", "transformers/fla/one"),
    (PLAIN, "transformers/torch/one"),
    (PLAIN, "transformers/fla/one"),
)
"""Pairs of arms whose answers are compared: ours with today's forward, and how far two references are apart."""

IDENTITY, SPEEDUP, M4 = "identity", "speed-up", "M4"
Outcome = Literal["passed", "failed", "not evaluated"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    gate: str
    subject: str
    outcome: Outcome
    detail: str


def bits_of(hidden: Tensor) -> list[str]:
    """A digest of each row of `hidden` [n, h]: for finite rows equal where `torch.equal` holds."""
    positive = hidden + 0.0  # which has no negative zero, equal to zero and of other bytes
    return [hashlib.blake2b(row.view(torch.uint8).numpy(), digest_size=8).hexdigest() for row in positive]


def identity(cells: Iterable[Cell]) -> list[Verdict]:
    """For every exact arm: each candidate of each pass has the bits it first had alone, under `independent`."""
    cells = [cell for cell in cells if cell.ran and cell.arm in EXACT_ARMS]
    alone: dict[str, Cell] = {}
    for cell in cells:
        if cell.arm == REFERENCE and cell.whole and cell.finite:
            alone.setdefault(cell.request, cell)
    equal, compared, unsound = defaultdict[str, int](int), defaultdict[str, int](int), defaultdict[str, list[str]](list)
    for cell in cells:
        where = f"{cell.request} in pass {cell.pass_number}"
        if not cell.finite:
            unsound[cell.arm].append(f"{where}: not finite")
        elif reference := alone.get(cell.request):
            same = sum(a == b for a, b in zip(cell.bits, reference.bits, strict=False))
            equal[cell.arm] += same
            compared[cell.arm] += len(cell.bits)
            if same < len(cell.bits):
                unsound[cell.arm].append(f"{where}: {len(cell.bits) - same} of {len(cell.bits)} differ")
    verdicts = []
    for arm in [name for name in EXACT_ARMS if any(cell.arm == name for cell in cells)]:
        outcome: Outcome = "failed" if unsound[arm] else "passed" if compared[arm] else "not evaluated"
        detail = f"{equal[arm]:,} of {compared[arm]:,} candidates equal"
        if unsound[arm]:
            detail += f"; {unsound[arm][0]}" + (f", and {len(unsound[arm]) - 1} more" if len(unsound[arm]) > 1 else "")
        verdicts.append(Verdict(gate=IDENTITY, subject=arm, outcome=outcome, detail=detail))
    return verdicts


def speedup(facts: RequestFacts, cells: Iterable[Cell], limits: GatesConfig) -> Verdict | None:
    """Mean latency of the base against `independent` on one request; None where the gate does not apply to it."""
    many = facts.candidates >= limits.speedup_candidates and facts.prefix_tokens >= limits.speedup_prefix_tokens
    if facts.set != "m1" or not many:
        return None
    cells = [cell for cell in cells if cell.request == facts.request]
    base, alone = mean_ms(cells, BASE), mean_ms(cells, REFERENCE)
    if base is None or alone is None:
        return Verdict(gate=SPEEDUP, subject=facts.request, outcome="not evaluated", detail="no measured pass of both")
    times = alone / base
    return Verdict(
        gate=SPEEDUP,
        subject=facts.request,
        outcome="passed" if times >= limits.speedup else "failed",
        detail=f"{times:.2f} times ({base:,.2f} ms against {alone:,.2f} ms)",
    )


def m4_slower(requests: Sequence[str], cells: Iterable[Cell], limits: GatesConfig) -> Verdict | None:
    """Mean latency of the base over the M4 `requests` against `independent`; None where there are none."""
    if not requests:
        return None
    by_request = defaultdict[str, list[Cell]](list)
    for cell in cells:
        by_request[cell.request].append(cell)
    pairs = [(mean_ms(by_request[name], BASE), mean_ms(by_request[name], REFERENCE)) for name in requests]
    both = [(base, alone) for base, alone in pairs if base is not None and alone is not None]
    if len(both) < len(requests):
        detail = f"{len(both)} of {len(requests)} requests have a measured pass of both"
        return Verdict(gate=M4, subject="m4", outcome="not evaluated", detail=detail)
    base, alone = (statistics.mean(times) for times in zip(*both, strict=True))
    return Verdict(
        gate=M4,
        subject="m4",
        outcome="passed" if base <= alone * (1 + limits.m4_slower) else "failed",
        detail=f"{base / alone - 1:+.1%} ({base:,.2f} ms against {alone:,.2f} ms, {len(both)} requests)",
    )


def pass_means(cells: Iterable[Cell], arm: str) -> list[float]:
    """Mean milliseconds of `arm` for all candidates, one for each measured pass it ran in. Cells of one request."""
    measured = (cell for cell in cells if cell.arm == arm and cell.ran and cell.pass_number != FEASIBILITY)
    return [statistics.mean(cell.whole_ms) for cell in measured]


def mean_ms(cells: Iterable[Cell], arm: str) -> float | None:
    """Mean of the pass means; None without a measured pass."""
    means = pass_means(cells, arm)
    return statistics.mean(means) if means else None


def difference(
    request: Request,
    states: Mapping[str, Tensor],
    pair: tuple[str, str],
    head: Head,
    *,
    facts: RequestFacts,
    close: float,
) -> Difference:
    """How far two arms' answers are apart. `states` are their hidden states [n, h], of the first n candidates each."""
    n = min(len(states[name]) for name in pair)
    a, b = (states[name][:n].float().numpy() for name in pair)
    scores_a, scores_b = scalar_scores(a, head), scalar_scores(b, head)
    whole = _answered_by(request, n)
    m = whole.num_candidates if whole else 0
    answers_a, answers_b = (
        list(answer_request(whole, scores[:m], head.temperature).values()) if whole else []
        for scores in (scores_a, scores_b)
    )
    apart = [
        abs(p - q)
        for x, y in zip(answers_a, answers_b, strict=True)
        for p, q in zip(probabilities(x), probabilities(y), strict=True)
    ]
    distance = np.linalg.norm(a.astype(np.float64) - b, axis=1) / np.linalg.norm(b.astype(np.float64), axis=1)
    equal = sum(decision(x) == decision(y) for x, y in zip(answers_a, answers_b, strict=True))
    return Difference(
        request=facts.request,
        set=facts.set,
        arm=pair[0],
        other=pair[1],
        decisions=len(answers_a),
        decisions_equal=equal,
        probabilities=len(apart),
        probabilities_close=sum(p <= close for p in apart),
        probability=max(apart, default=0.0),
        head=float(np.abs(scores_a.astype(np.float64) - scores_b).max()),
        hidden=[float(f"{d:.3e}") for d in distance],
        identical=sum(torch.equal(x, y) for x, y in zip(states[pair[0]], states[pair[1]], strict=False)),
    )


def _answered_by(request: Request, candidates: int) -> Request | None:
    """The request's leading questions that `candidates` candidates answer wholly."""
    kept, used = {}, 0
    for name, question in request.questions.items():
        used += len(question.candidates)
        if used > candidates:
            break
        kept[name] = question
    return request.model_copy(update={"questions": kept}) if kept else None


def decision(answer: Answer) -> bool | str:
    """Noul's side of 0.5, the choice, or the most likely level."""
    if isinstance(answer, NoulAnswer):
        return answer.noul >= 0.5
    if isinstance(answer, ChoiceAnswer):
        return answer.choice
    return max(answer.probabilities, key=lambda level: answer.probabilities[level])


def probabilities(answer: Answer) -> list[float]:
    return [answer.noul] if isinstance(answer, NoulAnswer) else list(answer.probabilities.values())


def verdicts(requests: Sequence[RequestFacts], cells: Sequence[Cell], limits: GatesConfig) -> list[Verdict]:
    """Every gate on everything measured so far. A gate that nothing was measured for is there too, not evaluated."""
    by_request = defaultdict[str, list[Cell]](list)
    for cell in cells:
        by_request[cell.request].append(cell)
    speedups = [verdict for facts in requests if (verdict := speedup(facts, by_request[facts.request], limits))]
    m4 = m4_slower([facts.request for facts in requests if facts.set == "m4"], cells, limits)
    none = "the run holds no request of this kind"
    return [
        *identity(cells),
        *(speedups or [Verdict(gate=SPEEDUP, subject="m1", outcome="not evaluated", detail=none)]),
        m4 or Verdict(gate=M4, subject="m4", outcome="not evaluated", detail=none),
    ]
