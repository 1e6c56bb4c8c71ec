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
from numpy.typing import NDArray
from torch import Tensor

from comparison.journal import Cell, Difference, RequestFacts
from comparison.options import BASE, EXACT_ARMS, PLAIN, REFERENCE, GatesConfig
from engine.wire.answers import Head, NoulAnswer, answer_request, scalar_scores
from engine.wire.requests import Request

COMPARED = (
    (BASE, PLAIN),
    ("transformers/torch/one", "transformers/fla/one"),
    (PLAIN, "transformers/torch/one"),
    (PLAIN, "transformers/fla/one"),
)
"""Pairs of arms whose answers are compared: ours with today's forward, and how far two references are apart."""
_NONE = "the run holds no request of this kind"


@dataclass(frozen=True)
class Verdict:
    gate: str
    subject: str
    outcome: Literal["passed", "failed", "not evaluated"]
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
        detail = f"{equal[arm]:,} of {compared[arm]:,} candidates equal"
        if wrong := unsound[arm]:
            detail += f"; {wrong[0]}" + (f", and {len(wrong) - 1} more" if len(wrong) > 1 else "")
        outcome: Literal["failed", "passed", "not evaluated"]
        outcome = "failed" if wrong else "passed" if compared[arm] else "not evaluated"
        verdicts.append(Verdict("identity", arm, outcome, detail))
    return verdicts


def speedup(facts: RequestFacts, cells: Iterable[Cell], limits: GatesConfig) -> Verdict | None:
    """Mean latency of the base against `independent` on one request; None where the gate does not apply to it."""
    many = facts.candidates >= limits.speedup_candidates and facts.prefix_tokens >= limits.speedup_prefix_tokens
    if facts.set != "m1" or not many:
        return None
    cells = [cell for cell in cells if cell.request == facts.request]
    base, alone = mean_ms(cells, BASE), mean_ms(cells, REFERENCE)
    if base is None or alone is None:
        return Verdict("speed-up", facts.request, "not evaluated", "no measured pass of both")
    detail = f"{alone / base:.2f} times ({base:,.2f} ms against {alone:,.2f} ms)"
    return Verdict("speed-up", facts.request, "passed" if alone / base >= limits.speedup else "failed", detail)


def m4_slower(requests: Sequence[str], cells: Iterable[Cell], limits: GatesConfig) -> Verdict | None:
    """Mean latency of the base over the M4 `requests` against `independent`; None where there are none."""
    if not requests:
        return None
    of = by_request(cells)
    pairs = [(mean_ms(of[name], BASE), mean_ms(of[name], REFERENCE)) for name in requests]
    both = [(base, alone) for base, alone in pairs if base is not None and alone is not None]
    if len(both) < len(requests):
        detail = f"{len(both)} of {len(requests)} requests have a measured pass of both"
        return Verdict("M4", "m4", "not evaluated", detail)
    base, alone = (statistics.mean(times) for times in zip(*both, strict=True))
    detail = f"{base / alone - 1:+.1%} ({base:,.2f} ms against {alone:,.2f} ms, {len(both)} requests)"
    return Verdict("M4", "m4", "passed" if base <= alone * (1 + limits.m4_slower) else "failed", detail)


def verdicts(requests: Iterable[RequestFacts], cells: Iterable[Cell], limits: GatesConfig) -> list[Verdict]:
    """Every gate on everything measured so far. A gate that nothing was measured for is there too, not evaluated."""
    requests, cells = list(requests), list(cells)
    of = by_request(cells)
    speedups = [found for facts in requests if (found := speedup(facts, of[facts.request], limits))]
    m4 = m4_slower([facts.request for facts in requests if facts.set == "m4"], cells, limits)
    return [
        *identity(cells),
        *(speedups or [Verdict("speed-up", "m1", "not evaluated", _NONE)]),
        m4 or Verdict("M4", "m4", "not evaluated", _NONE),
    ]


def by_request(cells: Iterable[Cell]) -> defaultdict[str, list[Cell]]:
    found = defaultdict[str, list[Cell]](list)
    for cell in cells:
        found[cell.request].append(cell)
    return found


def mean_ms(cells: Iterable[Cell], arm: str) -> float | None:
    """Mean of the measured passes' means of `arm` for all candidates; None without one. Cells of one request."""
    means = [statistics.mean(cell.whole_ms) for cell in cells if cell.arm == arm and cell.measured]
    return statistics.mean(means) if means else None


def difference(
    facts: RequestFacts, request: Request, states: Mapping[str, Tensor], pair: tuple[str, str], head: Head, close: float
) -> Difference:
    """How far two arms' answers are apart. `states` are their hidden states [n, h], of the first n candidates each."""
    n = min(len(states[name]) for name in pair)
    a, b = (states[name][:n].float().numpy() for name in pair)
    scores_a, scores_b = scalar_scores(a, head), scalar_scores(b, head)
    answers = list(zip(*(_answers(request, scores, head.temperature) for scores in (scores_a, scores_b)), strict=True))
    apart = [abs(p - q) for (_, x), (_, y) in answers for p, q in zip(x, y, strict=True)]
    distance = np.linalg.norm(a.astype(np.float64) - b, axis=1) / np.linalg.norm(b.astype(np.float64), axis=1)
    return Difference(
        request=facts.request, set=facts.set, arm=pair[0], other=pair[1], decisions=len(answers),
        decisions_equal=sum(x == y for (x, _), (y, _) in answers), probabilities=len(apart),
        probabilities_close=sum(p <= close for p in apart), probability=max(apart, default=0.0),
        head=float(np.abs(scores_a.astype(np.float64) - scores_b).max()),
        hidden=[float(f"{d:.3e}") for d in distance],
        identical=sum(torch.equal(x, y) for x, y in zip(states[pair[0]], states[pair[1]], strict=False)),
    )  # fmt: skip


def _answers(request: Request, scores: NDArray[np.float32], temperature: float) -> list[tuple[bool | int, list[float]]]:
    """Decision and probabilities of the leading questions that `scores` answer wholly: noul's side of 0.5, or the most
    likely of the others."""
    kept, used = {}, 0
    for name, question in request.questions.items():
        if used + len(question.candidates) > len(scores):
            break
        kept[name], used = question, used + len(question.candidates)
    whole = request.model_copy(update={"questions": kept})
    found: list[tuple[bool | int, list[float]]] = []
    for answer in answer_request(whole, scores[:used], temperature).values() if kept else ():
        if isinstance(answer, NoulAnswer):
            found.append((answer.noul >= 0.5, [answer.noul]))
        else:
            likely = list(answer.probabilities.values())
            found.append((int(np.argmax(likely)), likely))
    return found
