"""Hidden states against transformers' Qwen3.5 with the same random weights."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.load.checkpoint import expected_tensors, random_tensor
from engine.load.dimensions import ModelDimensions
from engine.plan.layout import independent_layout
from engine.plan.schedule import Limits, plan_passes
from engine.prompt import Prompt
from engine.run.executor import Executor
from tests.support import random_backbone, run, small_config, tokens

LENGTHS = (1, 2, 3, 5, 63, 64, 65, 127, 128, 129, 200, 300)

CONFIGS = {
    "2-4-heads": small_config(),
    "equal-heads": small_config(key_heads=2, value_heads=2, heads=2, kv_heads=2),
    "1-3-heads-two-periods": small_config(periods=2, key_heads=1, value_heads=3, heads=6, kv_heads=1, hidden=96),
    "three-periods": small_config(periods=3, key_heads=4, value_heads=8, heads=8, kv_heads=2, hidden=128),
}


@cache
def transformers_model(name: str, dtype: torch.dtype) -> Any:
    """Our tensors in transformers' own module. Rotary frequencies stay float32, as `from_pretrained` keeps them."""
    from transformers import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

    config = CONFIGS[name]
    with torch.device("meta"):
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**config))
    model.to_empty(device="cpu")
    rotary = type(model.model.rotary_emb)(model.config)
    model.model.rotary_emb = rotary
    weights = {
        f"model.{n}": random_tensor(n, spec, dtype=torch.float32, device="cpu", seed=0)
        for n, spec in expected_tensors(ModelDimensions.from_config(config)).items()
    }
    head = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights | {"lm_head.weight": head}, strict=True)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.eval()


def theirs(name: str, dtype: torch.dtype, prompts: list[np.ndarray]) -> list[Tensor]:
    with torch.no_grad():
        model = transformers_model(name, dtype)
        return [
            model.model(input_ids=torch.from_numpy(ids).long()[None], use_cache=False).last_hidden_state[0].float()
            for ids in prompts
        ]


def ours(name: str, dtype: torch.dtype, prompts: list[np.ndarray]) -> list[Tensor]:
    executor = Executor(random_backbone(CONFIGS[name], dtype=dtype))
    result = []
    for ids in prompts:
        layout = independent_layout([[Prompt(ids, reads=tuple(range(len(ids))))]])
        hidden, _ = executor.run(plan_passes(layout, schedule="independent", pack="all", limits=Limits()))
        result.append(hidden.float())
    return result


def distance(x: Tensor, reference: Tensor) -> float:
    return float((x - reference).norm() / reference.norm())


@pytest.mark.parametrize("name", CONFIGS)
def test_float32_hidden_states_agree(name: str) -> None:
    rng = np.random.default_rng(1)
    prompts = [tokens(rng, n) for n in LENGTHS]
    reference = theirs(name, torch.float32, prompts)
    worst = max(distance(a, b) for a, b in zip(ours(name, torch.float32, prompts), reference, strict=True))
    assert worst <= 5e-5


@pytest.mark.parametrize("name", CONFIGS)
def test_bfloat16_is_as_near_to_float32_as_transformers(name: str) -> None:
    """Over all prompts together: our bf16 may be 1.25 times as far from float32 as transformers' own bf16."""
    rng = np.random.default_rng(2)
    prompts = [tokens(rng, n) for n in (63, 129, 300)]
    exact = torch.cat(theirs(name, torch.float32, prompts))
    their_bf16 = torch.cat(theirs(name, torch.bfloat16, prompts))
    our_bf16 = torch.cat(ours(name, torch.bfloat16, prompts))
    assert distance(our_bf16, exact) <= 1.25 * distance(their_bf16, exact)


def test_a_wrong_rotary_base_is_seen() -> None:
    """The bound can fail: the class default base instead of the checkpoint's."""
    config = small_config()
    rope = dict(config["rope_parameters"], rope_theta=10_000.0)  # type: ignore[call-overload]
    prompt = tokens(np.random.default_rng(3), 200)
    reference = theirs("2-4-heads", torch.float32, [prompt])[0]
    executor = Executor(random_backbone(config | {"rope_parameters": rope}, dtype=torch.float32))
    hidden, _ = run(executor, [[Prompt(prompt)]], schedule="independent")
    assert distance(hidden[0], reference[-1]) > 5e-5
