"""The measuring scripts without a GPU: tables and inputs they build, floors they compute, and their plumbing."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "profiling"))  # scripts, not a package

import cases
import forward
import gemm_only
import measure
import operator_benches
import operators

from engine.load.dimensions import DIMENSIONS, ModelDimensions
from graphs.rungs import LADDER
from ops import tables as t
from ops.attention import attention, attention_reference
from ops.delta_rule import delta_rule, delta_rule_reference
from tests.support import random_backbone, small_config

CPU = torch.device("cpu")
SMALL = ModelDimensions.from_config(small_config())
SCRIPTS = [gemm_only, operators, forward]
scripts = pytest.mark.parametrize("script", SCRIPTS, ids=lambda module: module.__name__)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def once(fn: Callable[[], object], *, repeats: int = 20, **_: object) -> list[float]:
    """In place of a CUDA graph: one call, and samples whose median is 12."""
    fn()
    return [10.0, 12.0, 50.0][:repeats]


class TestCommandLines:
    @scripts
    def test_without_cuda_one_line_and_exit_code_2(
        self, script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert script.main([]) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith(f"{script.__name__}: no CUDA device")
        assert captured.err.count("\n") == 1
        assert captured.out == ""

    @scripts
    def test_every_option_is_explained(self, script: ModuleType) -> None:
        parser = script.parser()
        parser.format_help()
        assert all(action.help for action in parser._actions)

    @pytest.mark.parametrize(
        ("script", "words", "named"),
        [
            (gemm_only, ["--models", "9b,5b"], "5b is not one of 4b, 9b, 27b"),
            (gemm_only, ["--rows", "64,0"], "0 is not a positive number"),
            (operators, ["--only", "softmax"], "softmax is not one of delta_rule"),
            (forward, ["--workloads", "278+8"], "278+8 is neither"),
            (forward, ["--schedules", "levels,trees"], "trees is not one of independent"),
        ],
    )
    def test_a_wrong_value_is_named(
        self, script: ModuleType, words: list[str], named: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as error:
            script.parser().parse_args(words)
        assert error.value.code == 2
        assert named in capsys.readouterr().err

    def test_default_workloads_are_parsed(self) -> None:
        found = forward.parser().parse_args([]).workloads
        assert [w.name for w in found] == forward.WORKLOADS.split(",")
        assert [w.unique_rows for w in found] == [64, 320, 1_088, 3_136, 550, 8_948, 2_104, 11_763]


class TestResults:
    def test_records_come_back_as_written(self, tmp_path: Path) -> None:
        path = tmp_path / "deep" / "results.jsonl"
        samples = [3.25, 1.5, 2.125]
        more = {"peer": "copy", "ratio": 1.5, "floor_us": 0.5}
        for name in ("first", "second"):
            measure.Results(path).add(measure.Record(kind="operator", name=name, samples_us=samples, **more))
        first, second = (json.loads(line) for line in path.read_text().splitlines())
        assert (first["name"], second["name"]) == ("first", "second")
        assert first["samples_us"] == samples
        assert first["median_us"] == 2.125
        assert {key: second[key] for key in more} == more
        assert first["environment"]["torch"] == torch.__version__


class TestFloors:
    def test_the_slower_of_bytes_and_operations(self) -> None:
        ceilings = cases.Ceilings(tbytes=2.0, tflops=100.0)
        assert ceilings.floor_us(cases.Cost(bytes=4_000_000, flops=50_000_000)) == pytest.approx(2.0)
        assert ceilings.floor_us(cases.Cost(bytes=4_000_000, flops=500_000_000)) == pytest.approx(5.0)

    @pytest.mark.parametrize(
        ("model", "weights_ms", "products_ms"), [("4b", 1.66, 28.34), ("9b", 3.22, 54.93), ("27b", 11.33, 193.3)]
    )
    def test_roofline_of_the_published_sizes(self, model: str, weights_ms: float, products_ms: float) -> None:
        """At 64 rows the weights' bytes decide, at 3,136 the operations."""
        few, many = (
            cases.Ceilings().floor_us(gemm_only.gemm_only_cost(DIMENSIONS[model], rows)) / 1e3 for rows in (64, 3_136)
        )
        assert few == pytest.approx(weights_ms, abs=0.01)
        assert many == pytest.approx(products_ms, rel=1e-3)

    @pytest.mark.parametrize(
        "case", [cases.one_sequence(200), cases.one_sequence(64), cases.branches(3, 34, 93), cases.branches(2, 200, 64)]
    )
    def test_pairs_and_chunks_by_counting(self, case: cases.PassCase) -> None:
        positions = [range(case.prefix, case.prefix + n) for n in case.lengths]
        assert case.pairs == sum(p + 1 for own in positions for p in own)
        touched = sum(len({p // 64 for p in own}) for own in positions)
        complete = sum(p % 64 == 63 for own in positions for p in own)
        assert case.chunks == (touched, complete)

    def test_delta_rule_by_hand(self) -> None:
        """Two key heads and four value heads of 16: C = 128, Vd = 64, 12 gates a row."""
        alone = cases.delta_rule_cost(SMALL, cases.one_sequence(64))
        assert alone.bytes == 64 * ((128 + 64) * 2 + 12 * 4)
        square, thin = 2 * 64 * 64 * 16, 2 * 64 * 16 * 16
        assert alone.flops == 2 * 2 * square + 4 * 2 * square + 4 * 3 * thin
        behind = cases.delta_rule_cost(SMALL, cases.branches(2, 5, 66))
        assert behind.bytes == 10 * ((128 + 64) * 2 + 12 * 4) + 2 * (96 * 2 + 10 * 4) + 4 * 16 * 16 * 4
        assert behind.flops == 2 * (2 * 2 * square + 4 * 2 * square + 4 * 2 * thin)

    def test_attention_by_hand(self) -> None:
        """Four heads of 32 on two key/value heads: 128 and 64 columns."""
        cost = cases.attention_cost(SMALL, cases.branches(2, 3, 10))
        assert cost.flops == 2 * (11 + 12 + 13) * 4 * (2 * 32 + 2 * 32)
        assert cost.bytes == (6 * (3 * 128 + 2 * 64) + 10 * 2 * 64) * 2


class TestCases:
    @pytest.mark.parametrize("case", [cases.one_sequence(130), cases.branches(3, 5, 70), cases.branches(2, 9, 40)])
    def test_every_position_before_a_segment_lies_in_slot_0(self, case: cases.PassCase) -> None:
        host = t.HostTables.of(case.tables(SMALL, CPU))
        assert host.count(t.NUM_ROWS) == case.rows
        assert host.count(t.NUM_SEGMENTS) == host.count(t.NUM_READS) == len(case.lengths)
        assert host.rows(t.ROW_TOKEN).max() < SMALL.vocab_size
        prefix, border = case.prefix, case.prefix - case.prefix % 64
        for s in range(len(case.lengths)):
            fields = host.segment(s)
            assert fields[t.SEG_STATE_READ] == (0 if prefix >= 64 else -1)
            assert fields[t.SEG_STATE_WRITE] == fields[t.SEG_SLOT_WRITE] == fields[t.SEG_KV_WRITE] == -1

            def rows(first: int, *space: int, own: tuple[int, ...] = fields) -> list[int]:
                return list(t.virtual_rows(np.arange(first, prefix), own, *space))

            kv = rows(0, t.SEG_KV_REQUEST, t.SEG_KV_QUESTION, t.SEG_KV_OWN)
            chunk = rows(border, t.SEG_CHUNK_REQUEST, t.SEG_CHUNK_QUESTION, t.SEG_CHUNK_OWN)
            conv = rows(max(prefix - 3, 0), t.SEG_CONV_REQUEST, t.SEG_CONV_QUESTION, t.SEG_CONV_OWN)
            assert kv == list(range(prefix))
            assert chunk == list(range(prefix - border))
            assert conv == ([0, 1, 2] if prefix else [])

    def test_sequences_are_rungs(self) -> None:
        """No padding hides in a time that is set beside a peer's."""
        assert set(operator_benches.SEQUENCES) | set(operator_benches.ROW_COUNTS) | set(
            operator_benches.LINEAR_ROWS
        ) <= set(LADDER)
        assert cases.one_sequence(operator_benches.LONGEST).rung == operator_benches.LONGEST

    def test_delta_rule_reads_inputs_and_snapshot_as_meant(self) -> None:
        case = cases.branches(3, 5, 70)
        kept = cases.gdn_snapshot(SMALL, CPU)
        qkv, gates = cases.gdn_inputs(SMALL, case.rung, CPU)
        assert (gates[:, :4] < 0).all()
        assert ((gates[:, 4:8] > 0) & (gates[:, 4:8] < 1)).all()
        o = delta_rule(qkv, gates, kept.tail_kv, kept.tail_gates, kept.states, case.tables(SMALL, CPU))
        for s in range(3):
            own = slice(5 * s, 5 * s + 5)
            path = torch.cat([torch.cat([torch.ones(6, 32), kept.tail_kv[0, :6].float()], dim=1), qkv[own].float()])
            factors = torch.cat([torch.cat([kept.tail_gates[0, :6], torch.ones(6, 2)], dim=1), gates[own]])
            expected, _ = delta_rule_reference(
                path, factors, key_heads=2, value_heads=4, key_dim=16, initial_state=kept.states[0]
            )
            error = (o[own].double() - expected[6:].flatten(1)).norm() / expected[6:].norm()
            assert error < 6e-3

    def test_attention_reads_inputs_and_snapshot_as_meant(self) -> None:
        case = cases.branches(2, 5, 70)
        cache = cases.attention_snapshot(SMALL, 70, CPU)
        proj, q, k, v = (cases.normal(case.rung, n, device=CPU) for n in (SMALL.attention_proj, 128, 64, 64))
        o = attention(q, proj, cache.k_cache, cache.v_cache, k, v, case.tables(SMALL, CPU), 32, False)
        for s in range(2):
            own = slice(5 * s, 5 * s + 5)
            keys = torch.cat([cache.k_cache, k[own]]).view(75, 2, 32)
            values = torch.cat([cache.v_cache, v[own]]).view(75, 2, 32)
            queries = torch.cat([torch.zeros(70, 128), q[own]]).view(75, 4, 32)
            gate = torch.cat([torch.zeros(70, 4, 32), proj[own, :256].view(5, 4, 2, 32)[:, :, 1]])
            expected = attention_reference(queries, gate, keys, values)[70:].flatten(1)
            assert (o[own].double() - expected).norm() / expected.norm() < 6e-3


class TestGemmOnly:
    def test_products_are_those_of_a_backbone(self) -> None:
        weights = random_backbone(small_config(periods=2), dtype=torch.float32).weights
        dimensions = ModelDimensions.from_config(small_config(periods=2))
        matrices = gemm_only.matrices_of(weights)
        assert [tuple(w.shape) for w in matrices] == gemm_only.products(dimensions)
        assert len(matrices) == 4 * 8

    def test_all_products_run_once_at_the_rows_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gemm_only, "graph_times", once)
        seen: list[tuple[int, ...]] = []

        def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            assert x.any(dim=1).all()
            seen.append((x.shape[0], *w.shape))
            return x @ w.t()

        matrices = gemm_only.random_matrices(SMALL, CPU)
        samples = gemm_only.gemm_only_us(SMALL, 70, matrices=matrices, linear=linear)
        assert samples == [10.0, 12.0, 50.0]
        assert seen == [(70, *shape) for shape in gemm_only.products(SMALL)]

    def test_a_line_states_rate_roofline_and_ratio(self) -> None:
        record = gemm_only.record_of("9b", 3_136, "fixed", [80_000.0], 64_000.0, cases.Ceilings())
        assert record.ratio == 1.25
        assert gemm_only.line(record)[:4] == ("9b", "3,136", "fixed", "80.00")
        assert float(gemm_only.line(record)[4]) == pytest.approx(54.93 / 80 * 790, abs=1)


Benches = Callable[..., list[operator_benches.Bench]]


@pytest.fixture
def small_benches(monkeypatch: pytest.MonkeyPatch) -> Benches:
    """Every bench at sizes that a CPU runs at once."""
    monkeypatch.setattr(operators, "graph_times", once)
    monkeypatch.setitem(operator_benches.DIMENSIONS, "9b", SMALL)
    monkeypatch.setattr(operator_benches, "SEQUENCES", (64,))
    monkeypatch.setattr(operator_benches, "BRANCHES", cases.branches(3, 5, 70))
    monkeypatch.setattr(operator_benches, "LONGEST", 72)
    monkeypatch.setattr(operator_benches, "ROW_COUNTS", (64,))
    monkeypatch.setattr(operator_benches, "LINEAR_ROWS", (64,))
    return lambda fla=None: list(operator_benches.benches("9b", CPU, fla))


class TestOperators:
    def test_every_target_belongs_to_a_row(self) -> None:
        made = {(bench.operator, bench.case): bench for bench in operator_benches.benches("9b", CPU, None)}
        assert {key for key, bench in made.items() if bench.mark and not bench.relative} == set(
            operator_benches.TARGETS_9B
        )
        assert {operator for operator, _ in made} == set(operator_benches.NAMES)
        assert made["silu_mul", "3,136"].mark == 1.25
        assert made["silu_mul", "64"].mark is None
        assert made["linear_fixed", "down 1,088"].mark == 1.25
        assert made["linear_fixed", "down 320"].mark is None
        assert all(b.mark is None for b in operator_benches.benches("27b", CPU, None) if not b.relative)

    def test_every_operator_and_peer_takes_its_inputs(self, small_benches: Benches) -> None:
        rows = [operators.measure(bench, 1 << 10, 3) for bench in small_benches()]
        assert [row.error or row.peer_error for row in rows] == [""] * len(rows)
        assert {row.bench.operator for row in rows} == set(operator_benches.NAMES)
        for row in rows:
            assert row.us == 6.0  # two sets share a replay whose median is 12
            assert row.ratio == (None if row.bench.operator == "delta_rule" else 1.0)

    def test_chunk_rule_gets_grouped_heads_and_copied_states(self, small_benches: Benches) -> None:
        seen = []

        def fla(*inputs: torch.Tensor, **more: torch.Tensor) -> None:
            seen.append([tuple(x.shape) for x in inputs])
            assert torch.allclose(inputs[1].float().norm(dim=-1), torch.ones(1), atol=1e-2)
            if more:
                assert more["cu_seqlens"].tolist() == [0, 5, 10, 15]
                assert more["initial_state"].shape == (3, 4, 16, 16)

        rows = [operators.measure(b, 1 << 10, 3) for b in small_benches(fla) if b.operator == "delta_rule"]
        assert [row.peer_error for row in rows] == ["", ""]
        heads = [(2, 16), (2, 16), (4, 16), (4,), (4,)]
        assert seen == [[(1, n, *h) for h in heads] for n in (64, 64, 15, 15)]

    def test_a_failing_operator_is_named_and_the_rest_go_on(
        self,
        small_benches: Benches,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        tmp_path: Path,
    ) -> None:
        def broken(*_: object) -> None:
            raise ValueError("no such tile\nand more")

        def run(path: Path) -> int:
            return operators.run(
                small_benches(), heads="9b", cache_bytes=1 << 10, repeats=3, ceilings=cases.Ceilings(),
                results=measure.Results(path),
            )  # fmt: skip

        whole, rest = tmp_path / "whole.jsonl", tmp_path / "rest.jsonl"
        assert run(whole) == 0
        monkeypatch.setattr(operator_benches, "silu_mul", broken)
        assert run(rest) == 1
        [row] = [text for text in capsys.readouterr().out.splitlines() if "no such tile" in text]
        assert row.startswith("silu_mul")
        assert "and more" not in row
        assert len(rest.read_text().splitlines()) == len(whole.read_text().splitlines()) - 1

    @pytest.mark.parametrize(("us", "met"), [(30.0, "mark"), (18.0, "goal"), (30.1, "neither")])
    def test_marks_are_upper_bounds(self, us: float, met: str) -> None:
        bench = next(operator_benches.benches("9b", CPU, None))
        assert operators.Row(bench=bench, sets=2, cold=True, samples_us=[us], peer_samples_us=[]).met == met

    def test_sets_exceed_the_cache_when_they_can(self) -> None:
        assert operators.sets_for(100, 60) == (2, True)
        assert operators.sets_for(10, 60) == (12, True)
        assert operators.sets_for(1, 60) == (operators.MAX_SETS, False)
