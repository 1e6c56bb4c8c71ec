"""Gates and distances on numbers made by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparison import gates
from comparison.journal import Cell, RequestFacts
from comparison.options import GatesConfig

from engine.wire.answers import Head
from engine.wire.requests import parse_request
from tests.engine.engine_support import choice

REFUND = {"type": "noul", "instructions": "Is a refund due?"}


def cell(arm: str, **changes: Any) -> Cell:
    values: dict[str, Any] = {"pass_number": 0, "request": "r", "sha256": "", "status": "run", "logical_tokens": 1}
    candidates = changes.pop("candidates", len(changes.get("bits", "?")))
    run = changes.pop("candidates_run", candidates)
    return Cell(arm=arm, candidates=candidates, candidates_run=run, **{**values, **changes})


def replace(line: Any, **changes: Any) -> Any:
    return line.model_copy(update=changes)


def facts_of(set_name: str, candidates: int, prefix: int) -> RequestFacts:
    return RequestFacts(
        request="r", set=set_name, sha256="", candidates=candidates, questions=1, logical_tokens=1, unique_rows=1,
        prefix_tokens=prefix, tokenise_ms=1.0,
    )  # fmt: skip


def test_digests_are_equal_where_torch_equal_holds() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        a = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
        a[0, 0] = 0.0
        b = a.clone()
        b[0, 0] = -0.0
        b[1, 3] = torch.nextafter(b[1, 3], torch.tensor(9.0, dtype=dtype))
        same = [x == y for x, y in zip(gates.bits_of(a), gates.bits_of(b), strict=True)]
        assert same == [torch.equal(x, y) for x, y in zip(a, b, strict=True)] == [True, False, True]


def test_identity_compares_with_the_first_run_alone_in_every_pass() -> None:
    alone = cell("independent", bits=["p", "q"], candidates=2)
    later = replace(alone, pass_number=2)
    found = {v.subject: v for v in gates.identity([alone, later, cell("tree", bits=["p", "x"], pass_number=2)])}
    assert (found["independent"].outcome, found["independent"].detail) == ("passed", "4 of 4 candidates equal")
    assert found["tree"].outcome == "failed"
    assert found["tree"].detail == "1 of 2 candidates equal; r in pass 2: 1 of 2 differ"
    changed = replace(later, bits=["p", "y"])
    assert [v.outcome for v in gates.identity([alone, changed])] == ["failed"]
    assert [v.outcome for v in gates.identity([cell("tree", bits=["p"])])] == ["not evaluated"]
    assert gates.identity([cell("plain", bits=["z"]), alone])[0].subject == "independent"
    assert len(gates.identity([cell("plain", bits=["z"]), alone])) == 1


def test_speed_is_the_ratio_of_the_means_of_measured_passes() -> None:
    facts, limits = facts_of("m1", 8, 1_048), GatesConfig()
    cells = [
        cell("base", pass_number=0, samples_ms=[999.0]),
        cell("base", pass_number=1, samples_ms=[1.0, 3.0]),
        cell("base", pass_number=2, samples_ms=[4.0]),
        cell("independent", pass_number=1, samples_ms=[6.0]),
    ]
    verdict = gates.speedup(facts, cells, limits)
    assert verdict == gates.Verdict("speed-up", "r", "passed", "2.00 times (3.00 ms against 6.00 ms)")
    slow = [*cells[:-1], replace(cells[-1], samples_ms=[5.9])]
    assert gates.speedup(facts, slow, limits).outcome == "failed"  # type: ignore[union-attr]
    assert gates.speedup(facts, cells[:-1], limits).outcome == "not evaluated"  # type: ignore[union-attr]
    for other in (facts_of("m2", 8, 1_048), facts_of("m1", 7, 1_048), facts_of("m1", 8, 1_023)):
        assert gates.speedup(other, slow, limits) is None


def test_m4_is_the_mean_over_all_its_requests() -> None:
    cells = [
        cell(arm, request=request, pass_number=1, samples_ms=[ms])
        for request, times in {"a": (10.0, 10.0), "b": (32.0, 30.0)}.items()
        for arm, ms in zip(("base", "independent"), times, strict=True)
    ]
    verdict = gates.m4_slower(["a", "b"], cells, GatesConfig())
    assert verdict is not None
    assert (verdict.outcome, verdict.detail[:5]) == ("failed", "+5.0%")
    passed = gates.m4_slower(["a", "b"], cells, GatesConfig(m4_slower=0.051))
    assert passed is not None
    assert passed.outcome == "passed"
    unknown = gates.m4_slower(["a", "b", "c"], cells, GatesConfig())
    assert unknown is not None
    assert (unknown.outcome, unknown.detail[:6]) == ("not evaluated", "2 of 3")
    assert gates.m4_slower([], cells, GatesConfig()) is None


def test_a_few_candidates_are_scaled_to_all() -> None:
    few = cell("plain", candidates=8, candidates_run=2, pass_number=1, samples_ms=[3.0])
    assert gates.mean_ms([few], "plain") == 12.0
    assert not few.whole


def test_distances_by_hand() -> None:
    request = parse_request({"state": "s", "questions": {"q": choice("a", "b"), "n": REFUND}})
    head = Head(torch.tensor([1.0, 0.0]).numpy(), bias=0.5, temperature=2.0, method="m")
    a = torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.1, 0.0]])
    b = torch.tensor([[3.0, 4.0], [0.0, 0.0], [-0.9, 1.0]])
    b[1, 0] = 5.0
    facts = facts_of("m2", 3, 1)
    apart = gates.difference(facts, request, {"x": a, "y": b}, ("x", "y"), head, 1e-3)
    assert apart.identical == 1
    assert apart.hidden == [0.0, 0.8, pytest.approx((2 / 1.81) ** 0.5, rel=1e-3)]
    assert apart.head == 4.0
    # a: 3 against 1, yes at 0.6; b: 3 against 5, no at -0.4
    assert (apart.decisions, apart.decisions_equal, apart.probabilities) == (2, 0, 3)
    sigmoid = torch.sigmoid(torch.tensor([1.0, -1.0], dtype=torch.float64))
    assert apart.probability == pytest.approx(float(sigmoid[0] - sigmoid[1]), abs=1e-6)
    cut = gates.difference(facts, request, {"x": a, "y": b[:2]}, ("x", "y"), head, 1e-3)
    assert (cut.decisions, len(cut.hidden)) == (1, 2)
