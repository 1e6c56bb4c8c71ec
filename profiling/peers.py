"""Transformers' Qwen3.5 over an engine's own weights: the peers that the comparison runs beside the engine.

A peer answers the same prompts through transformers' modeling code as it stands. Its parameters are views of the
engine's fused matrices, so that no second set lies on the device. Two of them are copied because `from_pretrained`
rounds them to the model's dtype while the engine keeps float32: `A_log` and the gated norm's weight, 7.5 KiB at 9B in
bfloat16. Transformers' zero-centred norms and the engine's are the same, and so are the orders of rows in `in_proj`.
"""

from __future__ import annotations

import copy
import inspect
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from engine.errors import ConfigError, RequestError
from engine.load.dimensions import ModelDimensions
from engine.load.tensors import AttentionWeights, Weights
from engine.plan.layout import build_layout
from engine.prompt import Prompt
from ops.sizes import CONV_HISTORY

PATHS = ("torch", "fla")
"""The delta rule of transformers: its own torch code, or flash-linear-attention's kernels."""
WAYS = ("one", "graph", "batched", "forked")

GRAPHS_KEPT = 64
"""Prompt lengths whose graphs are kept; the least recently used goes first."""

_DELTA_RULE = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
_REPLACEABLE = (*_DELTA_RULE, "causal_conv1d_fn", "causal_conv1d_update")
"""Functions that transformers replaces at import by those of packages it finds; the layers look them up per call."""

# Members of a text configuration that have one name here and there.
_SAME = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
    "linear_value_head_dim", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings",
)  # fmt: skip

_CACHE = "cache" if "cache" in inspect.signature(modeling.Qwen3_5TextModel.forward).parameters else "past_key_values"


class Peer:
    """One way of running transformers over `weights`. Peers of both paths may live together, one running at a time.

    Ways: `one`, a candidate per eager forward; `graph`, a candidate per replay of a CUDA graph of exactly its length;
    `batched`, up to `batch` candidates per forward; `forked`, the longest common prefix of all candidates once (one
    token at least is left of each), then batches of what follows, each over a fork of the prefix's cache. With one
    candidate `forked` is `one`, without a common prefix it is `batched`.

    Batches are sorted by length and padded on the right, with no attention mask: nothing in the model lets a row see a
    later one, so what stands behind a candidate's last row changes none of its rows except by rounding. A mask would
    cost the fast attention kernels and change nothing.
    """

    def __init__(self, weights: Weights, dimensions: ModelDimensions, *, path: str, way: str, batch: int = 32) -> None:
        """Raises ConfigError for an unknown path or way, and for one that this device or installation cannot run."""
        self.device = weights.embedding.device
        _check(weights, path=path, way=way, device=self.device)
        self.capture_seconds: dict[int, float] = {}
        """Seconds by prompt length, one warm-up forward included; summed where a length had to be captured again."""
        self.model: Any = _text_model(weights, dimensions)
        self._path, self._way, self._batch = path, way, batch
        self._captured: OrderedDict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = OrderedDict()
        """By prompt length: the graph, ids [1, tokens] that a replay reads, the row [1, h] that it writes."""
        self._pool: Any = None
        self._stream: Any = None
        if way == "graph":
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def forward(self, questions: Sequence[Sequence[Prompt]]) -> Tensor:
        """The last row's hidden state of each candidate, in order, after the final norm: [candidates, h] on the CPU.

        Raises RequestError when there is no candidate; torch's own errors pass through.
        """
        prompts = [prompt for candidates in questions for prompt in candidates]
        if not prompts:
            raise RequestError("there must be at least one candidate", field="questions")
        with torch.inference_mode(), _delta_rule(self._path):
            done = list(self._run(prompts))
        hidden_Nh = torch.cat([rows for _, rows in done]).cpu()  # which waits for the device
        in_order = torch.empty_like(hidden_Nh)
        in_order[[i for indices, _ in done for i in indices]] = hidden_Nh
        return in_order

    def states(self, prompt: Prompt) -> Tensor:
        """Hidden states [reads, h] of one prompt on the CPU, from an eager forward whatever the way."""
        with torch.inference_mode(), _delta_rule(self._path):
            return self._hidden(self._ids([prompt]))[0, list(prompt.reads)].cpu()

    def close(self) -> None:
        """Give back graphs and module. The weights are the engine's and stay."""
        if self._captured:
            torch.cuda.synchronize(self.device)
        self._captured.clear()
        self._pool = self.model = None

    def _run(self, prompts: list[Prompt]) -> Iterator[tuple[list[int], Tensor]]:
        """Which candidates, and their hidden states [candidates, h] on the device."""
        if self._way in ("one", "graph"):
            row = self._last_rows if self._way == "one" else self._replayed
            yield from (([i], row([prompt])) for i, prompt in enumerate(prompts))
            return
        prefix, cache = 0, None
        if self._way == "forked":
            prefix = build_layout([prompts], "exact").request_prefix_tokens
        if prefix:
            cache = DynamicCache(config=self.model.config)
            self._hidden(self._ids([Prompt(prompts[0].token_ids[:prefix])]), cache=cache)
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        for first in range(0, len(order), self._batch):
            indices = order[first : first + self._batch]
            fork = None if cache is None else _forked_cache(cache, len(indices), self.device)
            yield indices, self._last_rows([prompts[i] for i in indices], prefix, fork)

    def _replayed(self, prompts: list[Prompt]) -> Tensor:
        [prompt] = prompts
        if len(prompt) not in self._captured:
            self._capture(prompt)
        self._captured.move_to_end(len(prompt))
        graph, ids, row = self._captured[len(prompt)]
        ids.copy_(self._ids([prompt]), non_blocking=True)
        graph.replay()
        return row.clone()

    def _capture(self, prompt: Prompt) -> None:
        """Graphs share a pool: they run one after another, and a kept row is no other graph's to write."""
        start = time.perf_counter()
        if len(self._captured) >= GRAPHS_KEPT:
            torch.cuda.synchronize(self.device)
            self._captured.popitem(last=False)
        ids, graph, stream = self._ids([prompt]), torch.cuda.CUDAGraph(), self._stream
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):  # kernels are compiled and chosen, workspaces allocated
            self._hidden(ids)
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            row = self._hidden(ids)[:, -1].clone()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        self._captured[len(prompt)] = graph, ids, row
        seconds = time.perf_counter() - start
        self.capture_seconds[len(prompt)] = self.capture_seconds.get(len(prompt), 0.0) + seconds

    def _last_rows(self, prompts: list[Prompt], start: int = 0, cache: Cache | None = None) -> Tensor:
        """[prompts, h] from one forward over the tokens from position `start` on."""
        hidden = self._hidden(self._ids(prompts, start), start, cache)
        ends = torch.tensor([len(prompt) - start - 1 for prompt in prompts]).to(self.device, non_blocking=True)
        return hidden[torch.arange(len(prompts), device=self.device), ends]

    def _ids(self, prompts: list[Prompt], start: int = 0) -> Tensor:
        """[prompts, tokens] from position `start` on, zeros behind the shorter ones."""
        ids = np.zeros((len(prompts), max(map(len, prompts)) - start), dtype=np.int64)
        for row, prompt in zip(ids, prompts, strict=True):
            row[: len(prompt) - start] = prompt.token_ids[start:]
        return torch.from_numpy(ids).to(self.device, non_blocking=True)

    def _hidden(self, ids: Tensor, start: int = 0, cache: Cache | None = None) -> Tensor:
        """[prompts, tokens, h] after the final norm; `cache`, if given, holds `start` tokens and takes up `ids`."""
        count, length = ids.shape
        # Rotary positions alone, without transformers' fourth row for the text: with it, each forward looks for packed
        # sequences, which makes the host wait, or under capture replaces the causal kernels by an explicit mask.
        positions = torch.arange(start, start + length, device=self.device).expand(3, count, length)
        kept = {} if cache is None else {_CACHE: cache}
        hidden: Tensor = self.model(
            input_ids=ids, position_ids=positions, use_cache=cache is not None, **kept
        ).last_hidden_state
        return hidden


def takes_fla() -> bool:
    """Whether transformers took flash-linear-attention's kernels; where their import fails it silently does not."""
    functions = (getattr(modeling, name) for name in _DELTA_RULE)
    return all(inspect.getclosurevars(f).nonlocals.get("is_new_implementation", False) for f in functions)


def _check(weights: Weights, *, path: str, way: str, device: torch.device) -> None:
    for option, value, known in (("path", path, PATHS), ("way", way, WAYS)):
        if value not in known:
            raise ConfigError(f"{option}={value} is not one of {', '.join(known)}")
        if value in ("graph", "fla") and device.type != "cuda":
            raise ConfigError(f"{option}={value} needs a CUDA device, the weights are on {device}; use {known[0]}")
    if path == "fla" and not takes_fla():
        raise ConfigError("path=fla: transformers found no flash-linear-attention; install it or use path=torch")
    if path == "torch" and any(_plain(name) is getattr(modeling, name) for name in _REPLACEABLE):
        raise ConfigError("path=torch: this transformers does not show its own torch code; use 5.17 to 5.24")
    if any(w.in_lora or w.out_lora or w.mlp.gate_up_lora or w.mlp.down_lora for w in weights.layers):
        raise ConfigError("lora=unmerged: a peer has no place for an adapter beside the weights; use lora=merged")


def _plain(name: str) -> Any:
    """The function as transformers wrote it, beneath the wrapper that calls a package's instead."""
    return inspect.unwrap(getattr(modeling, name))


@contextmanager
def _delta_rule(path: str) -> Iterator[None]:
    """For `torch`, transformers' own functions stand in its module meanwhile; for `fla`, what it chose itself."""
    chosen = {name: getattr(modeling, name) for name in _REPLACEABLE}
    if path == "torch":
        vars(modeling).update({name: _plain(name) for name in _REPLACEABLE})
    try:
        yield
    finally:
        vars(modeling).update(chosen)


def text_config(d: ModelDimensions) -> Qwen3_5TextConfig:
    """Transformers' configuration of a text model with these dimensions."""
    return Qwen3_5TextConfig(
        **{name: getattr(d, name) for name in _SAME},
        layer_types=list(d.layer_types),
        linear_conv_kernel_dim=CONV_HISTORY + 1,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": d.rope_theta,
            "partial_rotary_factor": d.rotary_dim / d.head_dim,
        },
        attn_implementation="sdpa",  # type: ignore[call-arg]
    )


def _text_model(weights: Weights, d: ModelDimensions) -> Any:
    """Transformers' module, made without memory of its own and then given the parameters."""
    config = text_config(d)
    with torch.device("meta"):
        model: Any = modeling.Qwen3_5TextModel(config)
    model.requires_grad_(False)
    model.load_state_dict(_parameters(weights, d), strict=True, assign=True)
    # Frequencies are no part of a state dict; they stay float32 at any dtype, as `from_pretrained` keeps them.
    model.rotary_emb = type(model.rotary_emb)(config).to(weights.embedding.device)
    return model.eval()


def _parameters(weights: Weights, d: ModelDimensions) -> dict[str, Tensor]:
    """Transformers' parameters by name: views, but for what the module's docstring names."""
    dtype = weights.embedding.dtype
    named = {"embed_tokens.weight": weights.embedding, "norm.weight": weights.norm_h}
    for n, w in enumerate(weights.layers):
        parts = {"input_layernorm.weight": w.norm_h, "post_attention_layernorm.weight": w.mlp.norm_h}
        gate, up = torch.split(w.mlp.gate_up, d.intermediate_size)
        parts |= _prefixed("mlp", gate_proj=gate, up_proj=up, down_proj=w.mlp.down)
        if isinstance(w, AttentionWeights):
            q, k, v = torch.split(w.in_proj, [2 * d.query_dim, d.kv_dim, d.kv_dim])
            parts |= _prefixed(
                "self_attn", q_proj=q, k_proj=k, v_proj=v, q_norm=w.q_norm, k_norm=w.k_norm, o_proj=w.out_proj
            )
        else:
            heads = d.linear_num_value_heads
            rows = [d.conv_dim, d.value_dim, heads, heads]
            qkv, z, b, a, _ = torch.split(w.in_proj, [*rows, len(w.in_proj) - sum(rows)])
            parts |= {"linear_attn.A_log": w.a_log.to(dtype), "linear_attn.dt_bias": w.dt_bias}
            parts |= _prefixed("linear_attn", in_proj_qkv=qkv, in_proj_z=z, in_proj_b=b, in_proj_a=a)
            parts |= _prefixed("linear_attn", conv1d=w.conv[:, None], norm=w.out_norm.to(dtype), out_proj=w.out_proj)
        named |= {f"layers.{n}.{name}": tensor for name, tensor in parts.items()}
    return named


def _prefixed(prefix: str, **weights: Tensor) -> dict[str, Tensor]:
    return {f"{prefix}.{name}.weight": tensor for name, tensor in weights.items()}


def _forked_cache(cache: Cache, count: int, device: torch.device) -> Cache:
    """A cache of `count` rows, each a copy of the only one of `cache`, which keeps its tensors.

    A forward writes convolution and delta-rule states in place, so a fork of one row is a copy too.
    """
    fork = copy.copy(cache)
    fork.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in fork.layers:
        tables = {name: dict(value) for name, value in vars(layer).items() if isinstance(value, dict)}
        vars(layer).update(tables)  # a delta-rule layer's tensors, by the number of the state
    fork.reorder_cache(torch.zeros(count, dtype=torch.int64, device=device))  # type: ignore[arg-type]
    return fork
