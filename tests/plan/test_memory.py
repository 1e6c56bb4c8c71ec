"""The memory plan worked out by hand, kept by the engine, and refused with its figures."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pytest
import torch

from engine import Engine
from engine.config import EngineConfig, MemoryConfig
from engine.errors import CapacityError
from engine.load.dimensions import DIMENSIONS, ModelDimensions
from engine.load.tiny import tiny_config
from engine.plan.layout import build_layout
from engine.plan.memory import WORKSPACE_BYTES, MemoryPlan, delta_rule_scratch, plan_memory
from engine.plan.planning import Planner
from engine.plan.schedule import BufferSizes, Limits, Plan, plan_passes
from engine.prompt import Prompt
from engine.run.executor import Executor
from engine.run.snapshot import SnapshotBuffers
from graphs.rungs import rung
from ops.tables import MAX_CHUNKS, MAX_ROWS
from tests.support import small_config, tokens

NINE, LARGE = DIMENSIONS["9b"], DIMENSIONS["27b"]
MIB, GIB = 2**20, 2**30


def candidates(prefix: int, count: int, length: int) -> list[list[Prompt]]:
    """One question, as a layout sees it: candidates part after `prefix` tokens."""
    head = np.zeros(prefix, np.int32)
    return [[Prompt(np.concatenate([head, np.full(length, i + 1, np.int32)])) for i in range(count)]]


def planned(dimensions: ModelDimensions, plan: Plan, *, graphs: int = 0) -> MemoryPlan:
    sizes = SnapshotBuffers(dimensions, dtype=torch.bfloat16, device=torch.device("meta")).sizes_for(plan.buffers)
    rows = rung(max(one.rows for one in plan.passes))
    return plan_memory(
        dimensions, dtype_bytes=2, rows=rows, reads=plan.num_reads, buffers=sizes, graphs_bytes=graphs
    )  # fmt: skip


def test_the_long_tree_on_9b() -> None:
    """3,093 tokens and 255 candidates of 34: 11,763 rows in one pass."""
    layout = build_layout(candidates(3_093, 255, 34), "exact")
    tree = plan_passes(layout, schedule="tree", pack="all", limits=Limits())
    assert [one.rows for one in tree.passes] == [11_763]
    found = planned(NINE, tree, graphs=256 * MIB)
    # The MLP: its input, the residual and the other input of 4,096, gate, up and their product of 12,288 columns.
    activations = rung(11_763) * (3 * 4_096 + 3 * 12_288) * 2
    chunks = MAX_CHUNKS * 32 * 2 * 64 * 64 * 2
    assert found.pass_scratch == activations + chunks
    assert found.results == 255 * 4_096 * 2
    assert found.graphs == 256 * MIB
    assert found.workspace == WORKSPACE_BYTES == 96 * MIB
    state = 24 * 32 * 128 * 128 * 4
    tail = 24 * 64 * ((2_048 + 4_096) * 2 + (2 * 32 + 16) * 4)
    history = 24 * 3 * 8_192 * 2
    kv = 8 * 2 * 4 * 256 * 2
    assert state == 48 * MIB
    assert found.snapshots == 2 * (state + tail + history + kv)  # the least an engine has; a tree keeps one state
    parts = (found.snapshots, found.pass_scratch, found.results, found.graphs, found.workspace)
    assert found.above_weights == sum(parts) < 2 * GIB
    assert found.total == found.weights + found.above_weights
    assert 14.5 * GIB < found.weights < 15 * GIB

    levels = planned(NINE, plan_passes(layout, schedule="levels", pack="all", limits=Limits()), graphs=256 * MIB)
    assert levels.snapshots == 2 * (state + tail + history) + 4_096 * kv
    assert levels.above_weights < found.above_weights


def test_many_questions_on_27b_stay_within_a_pass_and_16_snapshots() -> None:
    """4,096 questions over one state: without prefixes of their own, and with ones that cross a border."""
    state = np.arange(1_000, dtype=np.int32)
    own = [[Prompt(np.concatenate([state, np.full(40, 2_000 + q, np.int32)]))] for q in range(4_096)]
    layout = build_layout(own, "exact")
    single = planned(LARGE, plan_passes(layout, schedule="levels", pack="all", limits=Limits()))
    assert single.results == 4_096 * 5_120 * 2
    assert single.above_weights < 4 * GIB
    paired = [[Prompt(np.append(p.token_ids, np.int32(c))) for c in range(2)] for [p] in own]
    layout = build_layout(paired, "exact")
    waves = planned(LARGE, plan_passes(layout, schedule="levels", pack="all", limits=Limits(question_snapshots=16)))
    slot = 144 * MIB + 48 * (64 * ((2_048 + 6_144) * 2 + (2 * 48 + 16) * 4) + 3 * 10_240 * 2)  # state, tail, history
    assert waves.snapshots == 17 * slot + 2_048 * 16 * 2 * 1_024 * 2
    assert waves.above_weights < 5 * GIB


def test_scratch_of_the_delta_rule_stops_growing_at_the_most_chunks() -> None:
    per_chunk = 32 * 2 * 64 * 64 * 2
    assert delta_rule_scratch(NINE, 64, 2) == 64 * per_chunk
    assert delta_rule_scratch(NINE, MAX_ROWS, 2) == MAX_CHUNKS * per_chunk
    attention_only = {**small_config(), "layer_types": ["full_attention"] * 4}
    assert delta_rule_scratch(ModelDimensions.from_config(attention_only), 64, 2) == 0


def test_the_pool_of_graphs_holds_the_activations_of_the_largest() -> None:
    sizes = {"dtype_bytes": 2, "rows": 64, "reads": 1, "buffers": BufferSizes()}
    without, pooled = plan_memory(NINE, **sizes), plan_memory(NINE, **sizes, graphs_bytes=MIB, pool_rows=1_088)
    assert pooled.pass_scratch == without.pass_scratch
    assert pooled.graphs == MIB + NINE.pass_bytes(1_088, 2) + delta_rule_scratch(NINE, 1_088, 2)


def test_a_plan_reads_as_its_figures() -> None:
    plan = MemoryPlan(weights=3 * GIB, snapshots=GIB // 2, pass_scratch=GIB, results=0, graphs=0, workspace=GIB // 4)
    assert str(plan) == (
        "4.75 GiB (weights 3.00, snapshots 0.50, pass scratch 1.00, results 0.00, graphs 0.00, workspace 0.25, "
        "others 0.00)"
    )


@pytest.mark.parametrize("sizes", [BufferSizes(), BufferSizes(kv_rows=1_500, slots=5, states=3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_planned_snapshots_are_what_the_buffers_take(sizes: BufferSizes, dtype: torch.dtype) -> None:
    dimensions = ModelDimensions.from_config(small_config(periods=2))
    buffers = SnapshotBuffers(dimensions, dtype=dtype, device=torch.device("cpu"))
    wanted = buffers.sizes_for(sizes)
    buffers.reserve(sizes)
    assert buffers.sizes == wanted
    plan = plan_memory(
        dimensions, dtype_bytes=dtype.itemsize, rows=64, reads=1, buffers=wanted, graphs_bytes=0
    )  # fmt: skip
    assert plan.snapshots == buffers.bytes == sum(t.untyped_storage().nbytes() for t in buffers.tensors())
    kept = [t.data_ptr() for t in buffers.tensors()]
    buffers.reserve(BufferSizes(kv_rows=1, slots=1, states=1))
    assert [t.data_ptr() for t in buffers.tensors()] == kept
    buffers.drop()
    assert buffers.tensors() == []
    assert not buffers.fits(BufferSizes())


# The engine within a limit

QUESTION = {"type": "choice", "instructions": "Which one?", "criteria": {f"option {i}": None for i in range(60)}}
REQUEST = {"state": "A short state.", "questions": {"q": QUESTION}}


@pytest.fixture(scope="module")
def cache_dir() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield folder


def loaded(cache_dir: str, limit_gib: float | None, **options: Any) -> Engine:
    return Engine.load(device="cpu", cache_dir=cache_dir, memory=MemoryConfig(limit_gib=limit_gib), **options)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each pass that an executor is given."""
    seen: list[int] = []
    plain = Executor.run

    def recorded(self: Executor, plan: Plan, **options: Any) -> Any:
        seen.extend(one.rows for one in plan.passes)
        return plain(self, plan, **options)

    monkeypatch.setattr(Executor, "run", recorded)
    return seen


def test_a_limit_leads_to_smaller_passes_with_equal_bits(cache_dir: str, passes: list[int]) -> None:
    with loaded(cache_dir, None) as engine:
        expected = engine.score(REQUEST).to_dict()["answers"]
        whole, dimensions, buffers = max(passes), engine.dimensions, engine._executor.buffers.sizes
    assert whole > 1_024

    def total(rows: int) -> int:
        plan = plan_memory(dimensions, dtype_bytes=4, rows=rows, reads=60, buffers=buffers, graphs_bytes=0)
        return plan.total

    limit = (total(rung(512)) + total(rung(1_024))) / 2 / GIB
    passes.clear()
    with loaded(cache_dir, limit) as engine:
        assert engine.score(REQUEST).to_dict()["answers"] == expected
    assert 256 < max(passes) <= 512
    passes.clear()
    with loaded(cache_dir, total(rung(whole)) / GIB) as engine:
        engine.score(REQUEST)
    assert max(passes) == whole


def test_a_request_that_cannot_fit_is_refused_with_the_figures_and_the_next_is_answered(
    cache_dir: str, passes: list[int]
) -> None:
    dimensions = ModelDimensions.from_config(tiny_config())
    least = plan_memory(dimensions, dtype_bytes=4, rows=64, reads=1, buffers=BufferSizes(), graphs_bytes=0)
    limit = (least.total + 3 * MIB) / GIB
    with loaded(cache_dir, limit) as engine:
        long = tokens(np.random.default_rng(0), 2_000)
        with pytest.raises(
            CapacityError, match=rf"this needs 0\.\d+ GiB \(weights .*\), above memory\.limit_gib={limit:g}"
        ):
            engine.hidden_states([long])  # type: ignore[list-item]
        assert passes == []
        engine.hidden_states([long[:60]])  # type: ignore[list-item]
        assert passes == [60]


def test_weights_above_the_limit_are_refused_before_they_are_loaded(
    cache_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("engine.assembly.load_weights", never)
    with pytest.raises(CapacityError, match=r"this needs 0\.\d+ GiB .* above memory\.limit_gib=0\.01"):
        loaded(cache_dir, 0.01)
    with pytest.raises(CapacityError, match=r"this needs 14\.\d+ GiB .* above memory\.limit_gib=8"):
        loaded(cache_dir, 8, model="9b", checkpoint="random")


def test_other_engines_on_the_device_count_with_their_weights_once(cache_dir: str) -> None:
    with loaded(cache_dir, None) as one:
        weights = one.dimensions.weight_bytes(4).total
        first = one.forward(one.prompts(REQUEST)).memory
        assert first.others == 0
        with one.like(schedule="tree") as two:
            beside = two.forward(two.prompts(REQUEST)).memory
            assert beside.others == first.above_weights
            assert one.forward(one.prompts(REQUEST)).memory.others == beside.above_weights
            with loaded(cache_dir, None, seed=1) as three:
                found = three.forward(three.prompts(REQUEST)).memory
                assert found.others == weights + first.above_weights + beside.above_weights
        assert one.forward(one.prompts(REQUEST)).memory.others == 0
        with pytest.raises(CapacityError, match=r"others 0\.\d+\), above memory\.limit_gib"):
            loaded(cache_dir, (first.total * 1.5) / GIB, seed=1)


def test_an_engine_that_captures_while_loading_is_refused_where_its_buffers_do_not_fit() -> None:
    def planner(capture: Literal["answer", "load"]) -> Planner:
        config = EngineConfig(
            model="9b", device="cuda:0", dtype="bfloat16", graphs="captured", capture=capture,
            memory=MemoryConfig(limit_gib=16.0),
        )  # fmt: skip
        return Planner(config, NINE)

    planner("answer").check_least(others=0)
    with pytest.raises(CapacityError, match=r"snapshots [1-9]\.\d+.*above memory\.limit_gib=16"):
        planner("load").check_least(others=0)
