"""Complete checkpoints at tiny dimensions, written by transformers and PEFT themselves, and their own answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3_5TextModel

from engine.engine import Engine
from engine.load.checkpoint import TensorSpec, expected_tensors, random_tensor
from engine.load.dimensions import ModelDimensions
from engine.load.package import CHAT_PREFIX, CHAT_SUFFIX
from engine.load.tiny import tiny_config, tiny_tokenizer
from engine.prompt import Prompt

HIDDEN = 128
OPEN_JEV = ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "out_proj")
CUA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TEMPERATURE = 1.75
LENGTHS = (1, 63, 130)


def write_base(folder: Path, *, tied: bool = True, a_log: torch.dtype = torch.float32) -> Path:
    """A sharded Hugging Face folder in bfloat16."""
    config = tiny_config() | {"tie_word_embeddings": tied}
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**config)).to(torch.bfloat16)
    specs = expected_tensors(ModelDimensions.from_config(config))
    parameters = dict(model.model.named_parameters())
    assert parameters.keys() == specs.keys()
    for name, spec in specs.items():
        dtype = a_log if spec.kind == "a_log" else torch.bfloat16
        parameters[name].data = random_tensor(name, spec, dtype=dtype, device="cpu", seed=0)
    if not tied:
        head = TensorSpec((config["vocab_size"], HIDDEN), "embedding")
        model.lm_head.weight.data = random_tensor("head", head, dtype=torch.bfloat16, device="cpu", seed=0)
    model.save_pretrained(folder, max_shard_size="400KB")
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def write_adapter(
    folder: Path, base: Path, *, rank: int = 8, alpha: int = 16, targets: Any = OPEN_JEV, head: bool = False
) -> Path:
    """A PEFT folder over the text model, or over the model with its language-model head."""
    kind = Qwen3_5ForCausalLM if head else Qwen3_5TextModel
    settings = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, bias="none", target_modules=targets)
    model = get_peft_model(kind.from_pretrained(base), settings)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            scale = parameter.shape[1] ** -0.5 * (1.0 if "lora_A" in name else 0.2)
            parameter.data = scale * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    return folder


def write_package(folder: Path, base: Path) -> Path:
    """An Open-Jev package of its own, without published ids."""
    write_adapter(folder / "adapter", base)
    write_json(
        folder / "model.json",
        {
            "model_id": "somebody/base",
            "revision": "0" * 40,
            "max_length": 4096,
            "lora_rank": 8,
            "method": "independent_candidate_lora_nll_brier",
        },
    )
    write_json(
        folder / "temperature.json",
        {"temperature": TEMPERATURE, "split": "calibration", "n": 512, "ids_sha256": "0" * 64},
    )
    head = torch.nn.Linear(HIDDEN, 1)
    weight, bias = head_values()
    head.load_state_dict({"weight": weight[None], "bias": bias})
    torch.save(head.state_dict(), folder / "head.pt")
    return folder


def write_export(folder: Path, base: Path, package: Path) -> Path:
    """The package merged into one folder: the text model alone, names without prefix."""
    model = Qwen3_5TextModel.from_pretrained(base)
    merged = PeftModel.from_pretrained(model, package / "adapter").merge_and_unload(safe_merge=True)
    merged.save_pretrained(folder, max_shard_size="400KB")
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    weight, bias = head_values()
    write_json(
        folder / "open_jev_export.json",
        {
            "format": "open-jev-text-merged/1",
            "model_id": "somebody/base",
            "base_revision": "0" * 40,
            "checkpoint_revision": "1" * 40,
            "temperature": TEMPERATURE,
            "max_length": 4096,
            "chat_prefix": CHAT_PREFIX,
            "chat_suffix": CHAT_SUFFIX,
            "head_weight": weight.tolist(),
            "head_bias": float(bias),
        },
    )
    return folder


def head_values() -> tuple[Tensor, Tensor]:
    """Weight [hidden] and bias [1], float32."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(HIDDEN, generator=generator), torch.tensor([0.25])


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")


def loaded(folder: Path, **options: Any) -> Engine:
    return Engine.load(**{"model": "tiny", "device": "cpu", "check_ids": False, "checkpoint": str(folder)} | options)


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, 763, length, dtype=np.int32) for length in lengths]


def their_states(base: Path, adapter: Path | None, *, dtype: torch.dtype, merged: bool) -> Tensor:
    """Final hidden states of all rows of all prompts [rows, hidden] float32, from transformers and PEFT."""
    model: Any = Qwen3_5TextModel.from_pretrained(base, dtype=dtype)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
        model = model.merge_and_unload(safe_merge=True) if merged else model
    with torch.no_grad():
        return torch.cat(
            [
                model(input_ids=torch.from_numpy(ids).long()[None], use_cache=False).last_hidden_state[0].float()
                for ids in prompts()
            ]
        )


def our_states(engine: Engine) -> Tensor:
    """The same from an engine."""
    whole = [Prompt(ids, reads=tuple(range(len(ids)))) for ids in prompts()]
    return torch.cat([states.float() for states in engine.hidden_states(whole)])


def distance(x: Tensor, reference: Tensor) -> float:
    """Relative L2."""
    return float((x - reference).norm() / reference.norm())
