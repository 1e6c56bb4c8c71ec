"""Transformers over the engine's weights: the bits of `from_pretrained`, no second set, and ways that agree."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import peers
import pytest
import torch
from peers import Peer
from torch import Tensor
from transformers import Qwen3_5ForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

from engine.errors import ConfigError, RequestError
from engine.load.checkpoint import open_checkpoint
from engine.load.dimensions import ModelDimensions
from engine.load.tensors import LowRank, Weights
from engine.load.tiny import tiny_checkpoint
from engine.load.weights import load_weights
from engine.prompt import Prompt
from tests.support import random_backbone, small_config, tokens

NINE_HEADS = {
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_has_the_bits_of_from_pretrained_over_the_engines_memory(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = tiny_checkpoint(tmp_path)
    reference = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").model.eval()
    questions = questions_of(60, [1, 5, 70], [3, 140])
    with torch.no_grad(), peers._delta_rule("torch"):
        rows = [
            reference(torch.tensor(p.token_ids[None]).long(), use_cache=False).last_hidden_state[:, -1]
            for candidates in questions
            for p in candidates
        ]
    checkpoint = open_checkpoint(folder)
    weights = load_weights(
        checkpoint.tensor, checkpoint.dimensions, dtype=dtype, device=torch.device("cpu"), positions=512
    )
    peer = Peer(weights, checkpoint.dimensions, path="torch", way="one")
    hidden = peer.forward(questions)
    assert torch.equal(hidden, torch.cat(rows))
    assert not hidden.is_inference()
    parts = [weights, *weights.layers, *(layer.mlp for layer in weights.layers)]
    tensors = [value for part in parts for value in vars(part).values() if isinstance(value, Tensor)]
    ours = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    copied = [n for n, p in peer.model.named_parameters() if p.untyped_storage().data_ptr() not in ours]
    assert all(dtype == torch.bfloat16 and name.endswith(("A_log", "linear_attn.norm.weight")) for name in copied)


@pytest.mark.parametrize(
    "questions",
    [
        pytest.param(questions_of(70, [1, 30, 2], [64, 7], [3]), id="questions"),
        pytest.param(questions_of(1, [5, 5, 5, 5, 5]), id="prefix-of-one-token"),
        pytest.param(questions_of(2, [1, 1, 1]), id="prefix-shorter-than-the-convolution"),
        pytest.param(questions_of(64, [65, 1], [3, 200]), id="chunk-borders"),
        pytest.param([questions_of(20, [5])[0] * 3], id="equal-prompts"),
        pytest.param(questions_of(70, [30]), id="one-candidate"),
    ],
)
@pytest.mark.parametrize("way", ["batched", "forked"])
def test_every_way_agrees_with_one(questions: list[list[Prompt]], way: str) -> None:
    """At the distance that float32 leaves."""
    assert distance(small_peer(way, 2).forward(questions), small_peer("one").forward(questions)) <= 1e-4


def test_forked_reads_the_prefix_once_and_batches_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, plain = list[tuple[int, ...]](), Peer._hidden

    def hidden(self: Peer, ids: Tensor, *rest: Any, **named: Any) -> Tensor:
        seen.append(tuple(ids.shape))
        return plain(self, ids, *rest, **named)

    monkeypatch.setattr(Peer, "_hidden", hidden)
    questions = questions_of(70, [30, 2], [64, 7, 3])
    small_peer("forked", 2).forward(questions)
    small_peer("batched", 2).forward(questions)
    assert seen == [(1, 70), (2, 3), (2, 30), (1, 64), (2, 73), (2, 100), (1, 134)]


@pytest.mark.parametrize("lost", ["conv_states", "recurrent_states"])
def test_a_fork_that_loses_a_state_is_seen(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    questions, plain = questions_of(70, [30, 2], [64]), peers._forked_cache

    def without(*args: Any) -> Any:
        fork = plain(*args)
        for layer in fork.layers:
            for state in getattr(layer, lost, {}).values():
                state.zero_()
        return fork

    monkeypatch.setattr(peers, "_forked_cache", without)
    assert distance(small_peer("forked").forward(questions), small_peer("one").forward(questions)) > 1e-2


def test_the_torch_path_never_calls_what_transformers_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    questions = questions_of(20, [1, 1])
    expected = small_peer("forked").forward(questions)
    for name in peers._REPLACEABLE:

        def kernel(*args: Any, **named: Any) -> Any:
            raise AssertionError("a package's kernel ran")

        kernel.__wrapped__ = inspect.unwrap(getattr(modeling, name))  # type: ignore[attr-defined]
        monkeypatch.setattr(modeling, name, kernel)
    assert torch.equal(small_peer("forked").forward(questions), expected)
    with peers._delta_rule("fla"), pytest.raises(AssertionError, match="a package's kernel ran"):
        small_peer("forked").model(torch.zeros(1, 3, dtype=torch.long), use_cache=False)


def test_what_a_peer_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, dimensions = small()
    for path, way, message in (
        ("triton", "one", "path=triton is not one of torch, fla"),
        ("torch", "graph", "way=graph needs a CUDA device, the weights are on cpu; use one"),
        ("fla", "one", "path=fla needs a CUDA device, the weights are on cpu; use torch"),
    ):
        with pytest.raises(ConfigError, match=message):
            Peer(weights, dimensions, path=path, way=way)
    adapter = LowRank(down=torch.zeros(16, 64), up=torch.zeros(64, 16))
    layers = (replace(weights.layers[0], out_lora=adapter), *weights.layers[1:])
    with pytest.raises(ConfigError, match="lora=unmerged"):
        Peer(replace(weights, layers=layers), dimensions, path="torch", way="one")
    with pytest.raises(RequestError, match="at least one candidate"):
        small_peer("one").forward([])
    name = peers._DELTA_RULE[0]
    monkeypatch.setattr(modeling, name, inspect.unwrap(getattr(modeling, name)))
    with pytest.raises(ConfigError, match="path=torch"):
        small_peer("one")


@pytest.mark.gpu
@pytest.mark.parametrize("path", peers.PATHS)
def test_a_graph_has_the_bits_of_one_and_the_paths_are_close(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cold, replayed, after other lengths in the same pool, and captured again after it had to go."""
    pytest.importorskip("fla")
    monkeypatch.setattr(peers, "GRAPHS_KEPT", 3)
    backbone = random_backbone(small_config(hidden=1_024) | NINE_HEADS, dtype=torch.bfloat16, device="cuda")
    questions, others = questions_of(278, [34, 1, 40], [7, 64]), questions_of(278, [34, 40], seed=1)
    one, graph = (Peer(backbone.weights, backbone.dimensions, path=path, way=way) for way in ("one", "graph"))
    expected = one.forward(questions)
    for _ in range(3):
        assert torch.equal(graph.forward(questions), expected)
    assert torch.equal(graph.forward(others), one.forward(others))
    other = next(name for name in peers.PATHS if name != path)
    for way in ("batched", "forked"):
        for name in (path, other):
            found = Peer(backbone.weights, backbone.dimensions, path=name, way=way, batch=2).forward(questions)
            assert distance(found, expected) <= 3e-2
