"""Operators at sizes that a CPU runs at once: arguments as meant, floors counted right, failures named."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import floors
import pytest
import torch
from bench_options import BenchConfig
from cases import gemm, operators
from floors import Ceilings
from forwards import Workload
from record import Record
from timing import Call

from engine.load.dimensions import DIMENSIONS, ModelDimensions
from graphs.rungs import LADDER
from tests.support import small_config

SMALL = ModelDimensions.from_config(small_config())


def once(calls: Sequence[Call]) -> Callable[[], float]:
    """In place of a CUDA graph: one call of each."""
    for call in calls:
        call()
    return lambda: 12.0


class TestFloors:
    @pytest.mark.parametrize(
        ("model", "weights_ms", "products_ms"), [("4b", 1.66, 28.34), ("9b", 3.22, 54.93), ("27b", 11.33, 193.3)]
    )
    def test_roofline_of_the_published_sizes(self, model: str, weights_ms: float, products_ms: float) -> None:
        """At 64 rows the weights' bytes decide, at 3,136 the operations."""
        few, many = (Ceilings().floor_us(gemm.gemm_only_cost(DIMENSIONS[model], rows)) / 1e3 for rows in (64, 3_136))
        assert few == pytest.approx(weights_ms, abs=0.01)
        assert many == pytest.approx(products_ms, rel=1e-3)

    @pytest.mark.parametrize("text", ["200", "64", "93+3x34", "64+2x200"])
    def test_pairs_and_chunks_by_counting(self, text: str) -> None:
        w = Workload.parse(text)
        own = range(w.prefix, w.prefix + w.length)
        assert floors.pairs(w) == w.candidates * sum(p + 1 for p in own)
        touched = len({p // 64 for p in own})
        assert floors.chunks(w) == (w.candidates * touched, w.candidates * sum(p % 64 == 63 for p in own))

    def test_delta_rule_by_hand(self) -> None:
        """Two key heads and four value heads of 16: C = 128, Vd = 64, 12 gates a row."""
        alone = floors.delta_rule(SMALL, Workload.parse("64"))
        assert alone.bytes == 64 * ((128 + 64) * 2 + 12 * 4)
        square, thin = 2 * 64 * 64 * 16, 2 * 64 * 16 * 16
        assert alone.flops == 2 * 2 * square + 4 * 2 * square + 4 * 3 * thin
        behind = floors.delta_rule(SMALL, Workload.parse("66+2x5"))
        assert behind.bytes == 10 * ((128 + 64) * 2 + 12 * 4) + 2 * (96 * 2 + 10 * 4) + 4 * 16 * 16 * 4
        assert behind.flops == 2 * (2 * 2 * square + 4 * 2 * square + 4 * 2 * thin)

    def test_attention_by_hand(self) -> None:
        """Four heads of 32 on two key/value heads: 128 and 64 columns."""
        cost = floors.attention(SMALL, Workload.parse("10+2x3"))
        assert cost.flops == 2 * (11 + 12 + 13) * 4 * (2 * 32 + 2 * 32)
        assert cost.bytes == (6 * (3 * 128 + 2 * 64) + 10 * 2 * 64) * 2


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Record]]:
    monkeypatch.setattr(operators, "captured", once)
    config = BenchConfig(model="9b", case="operators", samples=3)

    def measure(text: str) -> dict[str, Record]:
        w = Workload.parse(text)
        calls = operators.calls_of(SMALL, w, torch.device("cpu"))
        how = {"config": config, "cache_bytes": 1 << 10}
        return {name: operators.record_of(name, calls[name], SMALL, w, **how) for name in floors.OPERATORS}

    return measure


class TestOperators:
    @pytest.mark.parametrize("text", ["64", "130", "70+3x5"])
    def test_every_operator_and_peer_takes_its_arguments(
        self, text: str, measured: Callable[[str], dict[str, Record]]
    ) -> None:
        records = measured(text)
        for name, r in records.items():
            assert not r.failed
            assert r.ratio == (None if name == "delta_rule" else 1.0), "the chunk rule is not installed here"
        assert records["delta_rule"].configuration["peer_error"].startswith("ModuleNotFoundError")

    def test_arguments_are_those_of_the_candidates_behind_their_prefix(self) -> None:
        w = Workload.parse("70+3x5")
        func, args = operators.calls_of(SMALL, w, torch.device("cpu"))["delta_rule"]
        o = func(*args)
        qkv, gates, tail_kv, tail_gates, states, tables = args
        assert len(qkv) == len(o) == 64, "a rung"
        for other in (torch.zeros_like(states), states):  # what the prefix left counts, in the state and in the tail
            assert torch.equal(func(qkv, gates, tail_kv, tail_gates, other, tables), o) == (other is states)
        assert not torch.equal(func(qkv, gates, torch.zeros_like(tail_kv), tail_gates, states, tables), o)

    def test_chunk_rule_gets_grouped_heads_and_copied_states(
        self, measured: Callable[[str], dict[str, Record]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen = []

        class Fla:
            @staticmethod
            def chunk_gated_delta_rule(*given: torch.Tensor, **more: torch.Tensor) -> None:
                seen.append([tuple(x.shape) for x in given])
                assert torch.allclose(given[1].float().norm(dim=-1), torch.ones(1), atol=1e-2)
                if more:
                    assert more["cu_seqlens"].tolist() == [0, 5, 10, 15]
                    assert more["initial_state"].shape == (3, 4, 16, 16)

        monkeypatch.setattr(operators, "import_module", lambda name: Fla)
        for text in ("64", "70+3x5"):
            assert measured(text)["delta_rule"].configuration["peer_error"] == ""
        heads = [(2, 16), (2, 16), (4, 16), (4,), (4,)]
        assert seen == [[(1, n, *h) for h in heads] for n in (64, 64, 15, 15)]

    def test_an_operator_that_cannot_run_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(calls: Sequence[Call]) -> Callable[[], float]:
            raise ValueError("no such tile\nand more")

        monkeypatch.setattr(operators, "captured", broken)
        w, config = Workload.parse("64"), BenchConfig(model="9b", case="operators")
        record = operators.record_of("silu_mul", (torch.sin, (torch.ones(64, 8),)), SMALL, w, config, cache_bytes=1)
        assert record.failed == "ValueError: no such tile"

    def test_sets_exceed_the_cache_when_they_can_and_no_padding_is_timed(self) -> None:
        assert [operators.sets_for(size, 60) for size in (100, 10, 1)] == [(2, True), (12, True), (16, False)]
        assert {int(text) for text in operators.ROWS} <= set(LADDER)


class TestGemm:
    def test_default_multiplies_the_rows_themselves_and_the_others_their_rung(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[tuple[int, ...]] = []
        monkeypatch.setattr(gemm, "captured", once)
        monkeypatch.setattr(gemm, "LINEARS", dict.fromkeys(gemm.LINEARS, lambda x, w: seen.append((len(x), *w.shape))))
        matrices = [torch.ones(n, k) for n, k in gemm.products(SMALL)]
        for handle in ("default", "fixed"):
            gemm.gemm_only(70, matrices, handle)
        assert seen == [(rows, *shape) for rows in (70, 72) for shape in gemm.products(SMALL)]

    def test_a_handle_is_held_against_the_library(self) -> None:
        times = {"default": [4.0, 2.0, 3.0], "fixed": [6.0], "tuned": [1.5, 1.5]}
        config = BenchConfig(model="9b", case="gemm")
        default, fixed, tuned = gemm.records_of(config, DIMENSIONS["9b"], 1, times, 2)
        assert (default.ratio, fixed.ratio, tuned.ratio) == (None, 2.0, 0.5)
        assert (fixed.failed, tuned.failed) == ("", "2 calls ran fixed in its place")
        assert gemm.summary([default, fixed, tuned])[0].startswith("tuned over default: geometric mean 0.500")
