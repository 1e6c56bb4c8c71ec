"""Transformers over the engine's weights: the bits of `from_pretrained`, no second set, and ways that agree."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import peers
import pytest
import torch
from peers import Peer
from torch import Tensor
from transformers import Qwen3_5ForCausalLM
from transformers.integrations import use_kernel_func_from_hub_with_fallback
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

from engine.errors import ConfigError, InferenceError, RequestError
from engine.load.checkpoint import open_checkpoint
from engine.load.dimensions import ModelDimensions
from engine.load.tensors import LowRank, Weights
from engine.load.tiny import tiny_checkpoint
from engine.load.weights import load_weights
from engine.prompt import Prompt
from tests.support import random_backbone, small_config, tokens

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
COPIED = ("linear_attn.A_log", "linear_attn.norm.weight")

NINE_HEADS = {
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def loaded(folder: Path, dtype: torch.dtype) -> tuple[Weights, ModelDimensions]:
    checkpoint = open_checkpoint(folder)
    weights = load_weights(checkpoint.tensor, checkpoint.dimensions, dtype=dtype, device=CPU, positions=512)
    return weights, checkpoint.dimensions


@cache
def small() -> tuple[Weights, ModelDimensions]:
    backbone = random_backbone(small_config(), dtype=torch.float32)
    return backbone.weights, backbone.dimensions


def small_peer(way: str, batch: int = 32) -> Peer:
    return Peer(*small(), path="torch", way=way, batch=batch)


def questions_of(prefix: int, *suffixes: list[int], seed: int = 0) -> list[list[Prompt]]:
    """Questions whose candidates all begin with one random prefix and go on for so many tokens."""
    rng = np.random.default_rng(seed)
    head = tokens(rng, prefix)
    return [[Prompt(np.concatenate([head, tokens(rng, n)])) for n in lengths] for lengths in suffixes]


def distance(x: Tensor, reference: Tensor) -> float:
    """The worst candidate's."""
    return float(((x - reference).float().norm(dim=1) / reference.float().norm(dim=1)).max())


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the token ids that went through transformers' model."""
    shapes: list[tuple[int, ...]] = []
    plain = Peer._hidden

    def hidden(self: Peer, ids: Tensor, *rest: Any, **named: Any) -> Tensor:
        shapes.append(tuple(ids.shape))
        return plain(self, ids, *rest, **named)

    monkeypatch.setattr(Peer, "_hidden", hidden)
    return shapes


class TestWeights:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_one_has_the_bits_of_from_pretrained(self, folder: Path, dtype: torch.dtype) -> None:
        reference = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").model.eval()
        questions = questions_of(60, [1, 5, 70], [3, 140])
        with torch.no_grad(), peers._delta_rule("torch"):
            rows = [
                reference(torch.tensor(p.token_ids[None]).long(), use_cache=False).last_hidden_state[:, -1]
                for candidates in questions
                for p in candidates
            ]
        hidden = Peer(*loaded(folder, dtype), path="torch", way="one").forward(questions)
        assert hidden.dtype == dtype
        assert not hidden.is_inference()
        assert torch.equal(hidden, torch.cat(rows))

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_parameters_lie_in_the_engines_memory(self, folder: Path, dtype: torch.dtype) -> None:
        weights, dimensions = loaded(folder, dtype)
        ours = {tensor.untyped_storage().data_ptr() for tensor in tensors(weights)}
        peer = Peer(weights, dimensions, path="torch", way="one")
        copied = {name: p for name, p in peer.model.named_parameters() if p.untyped_storage().data_ptr() not in ours}
        if dtype == torch.float32:
            assert not copied
        else:
            assert all(name.endswith(COPIED) for name in copied)
            per_layer = dimensions.linear_num_value_heads + dimensions.linear_value_head_dim
            assert sum(p.nbytes for p in copied.values()) == dimensions.num_linear_layers * per_layer * dtype.itemsize

    @pytest.mark.parametrize(
        "change",
        [
            pytest.param(lambda w: replace(w, mlp=replace(w.mlp, gate_up=w.mlp.gate_up.roll(1, 0))), id="gate-up"),
            pytest.param(lambda w: replace(w, in_proj=w.in_proj.roll(1, 0)), id="in-proj"),
            pytest.param(lambda w: replace(w, out_proj=w.out_proj.roll(1, 1)), id="out-proj"),
        ],
    )
    @pytest.mark.parametrize("layer", [0, 3], ids=["delta-rule", "attention"])
    def test_a_matrix_in_another_order_is_seen(self, change: Any, layer: int) -> None:
        weights, dimensions = small()
        layers = list(weights.layers)
        layers[layer] = change(layers[layer])
        questions = questions_of(20, [3, 9])
        expected = small_peer("one").forward(questions)
        hidden = Peer(replace(weights, layers=tuple(layers)), dimensions, path="torch", way="one").forward(questions)
        assert distance(hidden, expected) > 1e-2


def tensors(weights: Weights) -> Iterator[Tensor]:
    yield from (weights.embedding, weights.norm_h)
    for layer in weights.layers:
        for part in (layer, layer.mlp):
            yield from (value for value in vars(part).values() if isinstance(value, Tensor))


class TestWays:
    """Against `one`, which `TestWeights` holds to transformers; at the distance that float32 leaves."""

    QUESTIONS = (
        pytest.param(questions_of(70, [1, 30, 2], [64, 7], [3]), id="questions"),
        pytest.param(questions_of(1, [5, 5, 5, 5, 5]), id="prefix-of-one-token"),
        pytest.param(questions_of(2, [1, 1, 1]), id="prefix-shorter-than-the-convolution"),
        pytest.param(questions_of(128, [1, 1, 1, 1]), id="suffixes-of-one-token"),
        pytest.param(questions_of(64, [65, 1], [3, 200]), id="chunk-borders"),
    )

    @pytest.mark.parametrize("questions", QUESTIONS)
    @pytest.mark.parametrize("way", ["batched", "forked"])
    @pytest.mark.parametrize("batch", [2, 32])
    def test_every_way_agrees_with_one(self, questions: list[list[Prompt]], way: str, batch: int) -> None:
        expected = small_peer("one").forward(questions)
        assert distance(small_peer(way, batch).forward(questions), expected) <= 1e-4

    def test_bfloat16_ways_are_as_near_to_float32_as_one(self) -> None:
        questions = questions_of(70, [5, 30, 2], [64, 7])
        exact = small_peer("one").forward(questions)
        backbone = random_backbone(small_config(), dtype=torch.bfloat16)
        peer = partial(Peer, backbone.weights, backbone.dimensions, path="torch", batch=2)
        bound = 1.5 * distance(peer(way="one").forward(questions), exact)
        for way in ("batched", "forked"):
            assert distance(peer(way=way).forward(questions), exact) <= bound

    @pytest.mark.parametrize("way", ["batched", "forked"])
    def test_a_single_candidate_is_one(self, way: str) -> None:
        questions = questions_of(70, [30])
        assert torch.equal(small_peer(way).forward(questions), small_peer("one").forward(questions))

    def test_without_a_common_prefix_forked_is_batched(self) -> None:
        ids = [np.full(length, first, dtype=np.int32) for first, length in enumerate((9, 70, 30))]
        questions = [[Prompt(x) for x in ids]]
        assert torch.equal(small_peer("forked").forward(questions), small_peer("batched").forward(questions))

    def test_forked_reads_the_prefix_once_and_batches_are_sorted(self, seen: list[tuple[int, ...]]) -> None:
        questions = questions_of(70, [30, 2], [64, 7, 3])
        small_peer("forked", 2).forward(questions)
        assert seen == [(1, 70), (2, 3), (2, 30), (1, 64)]
        seen.clear()
        small_peer("batched", 2).forward(questions)
        assert seen == [(2, 73), (2, 100), (1, 134)]

    @pytest.mark.parametrize("lost", ["conv_states", "recurrent_states"])
    def test_a_fork_that_loses_a_state_is_seen(self, lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Transformers does go on from both states when several tokens follow."""
        questions = questions_of(70, [30, 2], [64])
        plain = peers._forked_cache

        def without(*args: Any) -> Any:
            fork = plain(*args)
            for layer in fork.layers:
                for state in getattr(layer, lost, {}).values():
                    state.zero_()
            return fork

        expected = small_peer("one").forward(questions)
        monkeypatch.setattr(peers, "_forked_cache", without)
        assert distance(small_peer("forked").forward(questions), expected) > 1e-2


class TestPaths:
    def test_the_torch_path_never_calls_what_transformers_chose(self, monkeypatch: pytest.MonkeyPatch) -> None:
        questions = questions_of(20, [1, 1])
        expected = small_peer("forked").forward(questions)
        chosen = {}
        for name in peers._REPLACEABLE:

            def kernel(*args: Any, **named: Any) -> Any:
                raise AssertionError("a package's kernel ran")

            kernel.__wrapped__ = inspect.unwrap(getattr(modeling, name))  # type: ignore[attr-defined]
            chosen[name] = kernel
            monkeypatch.setattr(modeling, name, kernel)
        assert torch.equal(small_peer("forked").forward(questions), expected)
        assert {name: getattr(modeling, name) for name in chosen} == chosen
        with peers._delta_rule("fla"), pytest.raises(AssertionError, match="a package's kernel ran"):
            small_peer("forked").model(torch.zeros(1, 3, dtype=torch.long), use_cache=False)

    @pytest.mark.parametrize(("package", "found"), [("math", True), ("no_such_package", False)])
    def test_whether_transformers_took_kernels(
        self, package: str, found: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in peers._DELTA_RULE:
            chosen = use_kernel_func_from_hub_with_fallback("sqrt", package)(inspect.unwrap(getattr(modeling, name)))
            monkeypatch.setattr(modeling, name, chosen)
        assert peers.takes_fla() is found


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"path": "triton"}, "path=triton is not one of torch, fla"),
            ({"way": "two"}, "way=two is not one of one, graph, batched, forked"),
            ({"batch": 0}, "batch=0 must be a positive number"),
            ({"way": "graph"}, "way=graph needs weights on a CUDA device, these are on cpu; use way=one"),
            ({"path": "fla"}, "path=fla needs weights on a CUDA device, these are on cpu; use path=torch"),
        ],
    )
    def test_an_option_that_cannot_work_is_named(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            Peer(*small(), **{"path": "torch", "way": "one"} | options)

    def test_a_transformers_that_hides_its_torch_code_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        name = peers._DELTA_RULE[0]
        monkeypatch.setattr(modeling, name, inspect.unwrap(getattr(modeling, name)))
        with pytest.raises(ConfigError, match="path=torch"):
            small_peer("one")

    def test_an_adapter_beside_the_weights_is_refused(self) -> None:
        weights, dimensions = small()
        adapter = LowRank(down=torch.zeros(16, 64), up=torch.zeros(64, 16))
        layers = (replace(weights.layers[0], out_lora=adapter), *weights.layers[1:])
        with pytest.raises(ConfigError, match="lora=unmerged"):
            Peer(replace(weights, layers=layers), dimensions, path="torch", way="one")

    def test_no_candidate_and_a_closed_peer(self) -> None:
        peer = small_peer("one")
        assert peer.name == "transformers/torch/one"
        assert peer.capture_seconds == {}
        with pytest.raises(RequestError, match="at least one candidate"):
            peer.forward([])
        peer.close()
        peer.close()
        with pytest.raises(InferenceError, match="transformers/torch/one is closed"):
            peer.forward(questions_of(2, [1]))


@cache
def nine() -> tuple[Weights, ModelDimensions]:
    """Four layers with the heads of 9B."""
    config = {**small_config(hidden=1_024), **NINE_HEADS}
    backbone = random_backbone(config, dtype=torch.bfloat16, device="cuda")
    return backbone.weights, backbone.dimensions


@pytest.mark.gpu
class TestOnAGpu:
    QUESTIONS = questions_of(278, [34, 1, 40], [7, 64])

    @pytest.mark.parametrize("way", ["one", "batched", "forked"])
    def test_both_paths_live_together_and_agree(self, way: str) -> None:
        pytest.importorskip("fla")
        torch_peer, fla_peer = (Peer(*nine(), path=path, way=way, batch=2) for path in peers.PATHS)
        fla_before = fla_peer.forward(self.QUESTIONS)
        by_torch = torch_peer.forward(self.QUESTIONS)
        assert distance(fla_before, by_torch) <= 3e-2
        assert not torch.equal(fla_before, by_torch)
        assert torch.equal(fla_peer.forward(self.QUESTIONS), fla_before)

    @pytest.mark.parametrize("path", peers.PATHS)
    def test_a_graph_has_the_bits_of_one(self, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Cold, replayed, after other lengths in the same pool, and captured again after it had to go."""
        if path == "fla":
            pytest.importorskip("fla")
        monkeypatch.setattr(peers, "GRAPHS_KEPT", 3)
        expected = Peer(*nine(), path=path, way="one").forward(self.QUESTIONS)
        peer = Peer(*nine(), path=path, way="graph")
        for _ in range(3):
            assert torch.equal(peer.forward(self.QUESTIONS), expected)
        assert set(peer.capture_seconds) == {len(p) for candidates in self.QUESTIONS for p in candidates}
        assert len(peer._captured) == 3
        others = questions_of(278, [34, 40], seed=1)  # of lengths captured with other ids
        assert torch.equal(peer.forward(others), Peer(*nine(), path=path, way="one").forward(others))
        peer.close()
