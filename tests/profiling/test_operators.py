"""Operators at sizes that a CPU runs at once: inputs and snapshots as meant, floors counted right, failures named."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import inputs
import pytest
import torch
from bench_options import OPERATORS, BenchConfig
from cases import gemm, operators
from inputs import Ceilings, PassCase, branches, normal, one_sequence
from record import Record
from timing import Call

from engine.load.dimensions import DIMENSIONS, ModelDimensions
from ops.attention import attention, attention_reference
from ops.delta_rule import delta_rule, delta_rule_reference
from tests.support import random_backbone, small_config

CPU = torch.device("cpu")
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

    @pytest.mark.parametrize("case", [one_sequence(200), one_sequence(64), branches(3, 34, 93), branches(2, 200, 64)])
    def test_pairs_and_chunks_by_counting(self, case: PassCase) -> None:
        positions = [range(case.prefix, case.prefix + n) for n in case.lengths]
        assert case.pairs == sum(p + 1 for own in positions for p in own)
        touched = sum(len({p // 64 for p in own}) for own in positions)
        assert case.chunks == (touched, sum(p % 64 == 63 for own in positions for p in own))

    def test_delta_rule_by_hand(self) -> None:
        """Two key heads and four value heads of 16: C = 128, Vd = 64, 12 gates a row."""
        alone = inputs.delta_rule_cost(SMALL, one_sequence(64))
        assert alone.bytes == 64 * ((128 + 64) * 2 + 12 * 4)
        square, thin = 2 * 64 * 64 * 16, 2 * 64 * 16 * 16
        assert alone.flops == 2 * 2 * square + 4 * 2 * square + 4 * 3 * thin
        behind = inputs.delta_rule_cost(SMALL, branches(2, 5, 66))
        assert behind.bytes == 10 * ((128 + 64) * 2 + 12 * 4) + 2 * (96 * 2 + 10 * 4) + 4 * 16 * 16 * 4
        assert behind.flops == 2 * (2 * 2 * square + 4 * 2 * square + 4 * 2 * thin)

    def test_attention_by_hand(self) -> None:
        """Four heads of 32 on two key/value heads: 128 and 64 columns."""
        cost = inputs.attention_cost(SMALL, branches(2, 3, 10))
        assert cost.flops == 2 * (11 + 12 + 13) * 4 * (2 * 32 + 2 * 32)
        assert cost.bytes == (6 * (3 * 128 + 2 * 64) + 10 * 2 * 64) * 2


class TestInputs:
    def test_delta_rule_reads_inputs_and_snapshot_as_meant(self) -> None:
        case, kept = branches(3, 5, 70), inputs.gdn_snapshot(SMALL, CPU)
        qkv, gates = inputs.gdn_inputs(SMALL, case.rung, CPU)
        o = delta_rule(qkv, gates, kept.tail_kv, kept.tail_gates, kept.states, case.tables(SMALL, CPU))
        for s in range(3):
            own = slice(5 * s, 5 * s + 5)
            path = torch.cat([torch.cat([torch.ones(6, 32), kept.tail_kv[0, :6].float()], dim=1), qkv[own].float()])
            factors = torch.cat([torch.cat([kept.tail_gates[0, :6], torch.ones(6, 2)], dim=1), gates[own]])
            expected, _ = delta_rule_reference(
                path, factors, key_heads=2, value_heads=4, key_dim=16, initial_state=kept.states[0]
            )
            assert (o[own].double() - expected[6:].flatten(1)).norm() / expected[6:].norm() < 6e-3

    def test_attention_reads_inputs_and_snapshot_as_meant(self) -> None:
        case, cache = branches(2, 5, 70), inputs.attention_snapshot(SMALL, 70, CPU)
        proj, q, k, v = (normal(case.rung, n, device=CPU) for n in (SMALL.attention_proj, 128, 64, 64))
        o = attention(q, proj, cache.k_cache, cache.v_cache, k, v, case.tables(SMALL, CPU), 32, False)
        for s in range(2):
            own = slice(5 * s, 5 * s + 5)
            keys = torch.cat([cache.k_cache, k[own]]).view(75, 2, 32)
            values = torch.cat([cache.v_cache, v[own]]).view(75, 2, 32)
            queries = torch.cat([torch.zeros(70, 128), q[own]]).view(75, 4, 32)
            gate = torch.cat([torch.zeros(70, 4, 32), proj[own, :256].view(5, 4, 2, 32)[:, :, 1]])
            expected = attention_reference(queries, gate, keys, values)[70:].flatten(1)
            assert (o[own].double() - expected).norm() / expected.norm() < 6e-3


class TestOperators:
    @pytest.fixture
    def measured(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Record]]:
        monkeypatch.setattr(operators, "captured", once)
        monkeypatch.setitem(operators.DIMENSIONS, "9b", SMALL)
        small = {"SEQUENCES": (64,), "BRANCHES": branches(3, 5, 70), "LONGEST": 72, "ROW_COUNTS": (64,)}
        for name, value in small.items():
            monkeypatch.setattr(operators, name, value)
        config = BenchConfig(model="9b", case="operators", samples=3)
        return lambda fla=None: [
            operators.record_of(one, config, cache_bytes=1 << 10) for one in operators.benches("9b", CPU, fla)
        ]

    def test_every_operator_and_peer_takes_its_inputs(self, measured: Callable[..., list[Record]]) -> None:
        records = measured()
        assert [r.failed or r.configuration["peer_error"] for r in records] == [""] * len(records)
        assert {r.configuration["operator"] for r in records} == set(OPERATORS)
        for r in records:
            assert r.ratio == (None if r.configuration["operator"] == "delta_rule" else 1.0)

    def test_chunk_rule_gets_grouped_heads_and_copied_states(self, measured: Callable[..., list[Record]]) -> None:
        seen = []

        def fla(*given: torch.Tensor, **more: torch.Tensor) -> None:
            seen.append([tuple(x.shape) for x in given])
            assert torch.allclose(given[1].float().norm(dim=-1), torch.ones(1), atol=1e-2)
            if more:
                assert more["cu_seqlens"].tolist() == [0, 5, 10, 15]
                assert more["initial_state"].shape == (3, 4, 16, 16)

        assert not any(r.configuration["peer_error"] for r in measured(fla))
        heads = [(2, 16), (2, 16), (4, 16), (4,), (4,)]
        assert seen == [[(1, n, *h) for h in heads] for n in (64, 64, 15, 15)]

    def test_a_failing_operator_is_named_and_the_rest_go_on(
        self, measured: Callable[..., list[Record]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*_: object) -> None:
            raise ValueError("no such tile\nand more")

        monkeypatch.setattr(operators, "silu_mul", broken)
        failed = [(r.name, r.failed) for r in measured() if r.failed]
        assert failed == [("silu_mul/64", "ValueError: no such tile")]


class TestGemm:
    def test_products_are_those_of_a_backbone(self) -> None:
        weights = random_backbone(small_config(periods=2), dtype=torch.float32).weights
        shapes = [tuple(w.shape) for w in gemm.matrices_of(weights)]
        assert shapes == gemm.products(ModelDimensions.from_config(small_config(periods=2)))

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
