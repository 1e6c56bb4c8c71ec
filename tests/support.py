"""Small models with random weights, and prompts, for tests that run the executor directly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.load.checkpoint import expected_tensors, random_tensor
from engine.load.dimensions import ModelDimensions
from engine.load.weights import load_weights
from engine.plan.layout import Layout, build_layout, independent_layout
from engine.plan.schedule import Limits, plan_passes
from engine.prompt import Prompt
from engine.run.executor import Executor
from engine.run.model import Backbone, Linear
from engine.statistics import Counters
from ops.linear import linear_fixed

VOCABULARY = 512


def small_config(
    *, periods: int = 1, key_heads: int = 2, value_heads: int = 4, hidden: int = 64, heads: int = 4, kv_heads: int = 2
) -> dict[str, object]:
    """A Qwen3.5 text config of `periods` times three delta-rule layers and one attention layer."""
    return {
        "model_type": "qwen3_5_text",
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 4 * periods,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * periods,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 32,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25},
    }


def random_backbone(
    config: dict[str, object],
    *,
    dtype: torch.dtype,
    device: str = "cpu",
    seed: int = 0,
    linear: Linear = linear_fixed,
    positions: int = 4_096,
) -> Backbone:
    """Fan-in scaled random weights, which show a rounding difference that the usual 0.02 would hide."""
    dimensions = ModelDimensions.from_config(config)
    expected = expected_tensors(dimensions)
    place = torch.device(device)

    def source(name: str) -> Tensor:
        return random_tensor(name, expected[name], dtype=dtype, device=place, seed=seed)

    weights = load_weights(source, dimensions, dtype=dtype, device=place, positions=positions)
    return Backbone(weights, dimensions, linear)


def tokens(rng: np.random.Generator, length: int) -> np.ndarray:
    return rng.integers(0, VOCABULARY, length, dtype=np.int32)


def prompts_of(questions: Sequence[Sequence[Sequence[np.ndarray]]]) -> list[list[Prompt]]:
    """Prompts from the pieces of each candidate."""
    return [[Prompt(np.concatenate(pieces)) for pieces in question] for question in questions]


def run(
    executor: Executor,
    questions: Sequence[Sequence[Prompt]],
    *,
    schedule: str,
    split: str = "exact",
    pack: str = "all",
    limits: Limits | None = None,
) -> tuple[Tensor, Counters]:
    """Hidden states [prompts, h] in prompt order (last row of each prompt) and what was run."""
    layout = layout_for(questions, schedule, split)
    plan = plan_passes(layout, schedule=schedule, pack=pack, limits=limits or Limits())
    hidden, counters = executor.run(plan)
    return hidden[[places[-1] for places in plan.reads_of_prompt]], counters


def layout_for(questions: Sequence[Sequence[Prompt]], schedule: str, split: str) -> Layout:
    if schedule in ("independent", "batched"):
        return independent_layout(questions)
    return build_layout(questions, split)
