"""A complete Hugging Face folder of about a megabyte, made from a seed without a network.

It has everything a Qwen3.5 text checkpoint has (config, sharded weights with an index, a byte-level BPE tokenizer),
so the whole path runs on any machine. Its weights are random: answers show the mechanics and judge nothing.
"""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from engine.errors import ConfigError
from engine.load.checkpoint import INDEX, RANDOM_NOTE, expected_tensors, random_tensor
from engine.load.dimensions import ModelDimensions
from engine.load.projections import FULL, LINEAR

_FORMAT = 1  # part of the folder's name; raise it whenever the files' content changes
_MANIFEST = "tiny.json"
_PREFIX = "model."
_VOCABULARY = 768
_PADDED_VOCABULARY = 832  # rows of the embedding; published checkpoints have spare rows too
_CONTROL = {"<|endoftext|>": True, "<|im_start|>": True, "<|im_end|>": True, "<think>": False, "</think>": False}

# How Qwen3.5 cuts text before byte pairs are merged.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_CORPUS = """\
user
Context:
A customer writes that the parcel arrived open and that one of the two lamps is broken. The order was placed on
Monday, the payment went through, and the carrier reported a delivery on Thursday. She asks for a new lamp or for her
money back, and she would like an answer before the weekend.

Question: What should the support team do next?
Proposed answer: replace: Send another lamp and collect the broken one.
Is this proposed answer correct? Answer Yes or No.
assistant
Yes

Context:
{"order": {"id": 4711, "items": ["lamp", "cable"], "paid": true, "total": 59.9}, "status": "delivered", "notes": null}

Question: How urgent is this message?
Proposed answer: low: It can wait until the next working day.
Is this proposed answer correct? Answer Yes or No.
assistant
No

Context:
The agent was asked to book a train. It opened the search page, entered both stations and a date, and now sees a list
of connections with a price for each. The cheapest one leaves early and has two changes; the next one is direct and
costs a little more. The user said that time matters more than price.

Question: Is the task done?
Yes means: The booking has been confirmed on the page.
No means: Something is left to do, for instance to choose a connection or to pay.
Is the answer to this question yes? Answer Yes or No.
assistant
No

Context:
An invoice from a supplier lists three positions, a tax number and a bank account. The account differs from the one
that is on file, and the message that came with it asks to pay today. Nobody in the company has approved the change.

Question: Which of these actions is right, and how sure can we be about it?
Proposed answer: review: Hold the payment and ask the supplier on a known telephone number whether the account is new.
Is this proposed answer correct? Answer Yes or No.
assistant
Yes

Context:
A server reports many failed logins from one address within a minute, then a single success, then a download of the
whole user table. The person who owns the account is on holiday. Alerts of this kind were false in most cases before,
but none of them had a download.

Question: How severe is the incident, from none to critical?
Proposed answer: critical: Lock the account, keep the logs and wake the team on duty.
Is this proposed answer correct? Answer Yes or No.
assistant
Yes

Yes No Yes No yes no true false null high medium low accept reject refund escalate close wait ignore review approve
The quick way is not always the right way: read what is there, say what follows from it, and leave the rest out.
"""


def tiny_config(layers: int = 4) -> dict[str, Any]:
    """`config.json` of a model of `layers` layers; every fourth is attention, as in the published models."""
    if layers < 4 or layers % 4:
        raise ConfigError(f"a tiny model has a multiple of 4 layers, not {layers}")
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "eos_token_id": _VOCABULARY - len(_CONTROL),
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": 128,
        "intermediate_size": 256,
        "layer_types": [LINEAR, LINEAR, LINEAR, FULL] * (layers // 4),
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 32,
        "max_position_embeddings": 32_768,
        "model_type": "qwen3_5_text",
        "num_attention_heads": 4,
        "num_hidden_layers": layers,
        "num_key_value_heads": 2,
        "pad_token_id": _VOCABULARY - len(_CONTROL),
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [2, 1, 1],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10_000_000.0,
            "rope_type": "default",
        },
        "tie_word_embeddings": True,
        "vocab_size": _PADDED_VOCABULARY,
    }


def tiny_tokenizer() -> Tokenizer:
    """Qwen3.5's rules over byte pairs learnt from a page of text: 768 ids, the control tokens last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY - len(_CONTROL),
        min_frequency=1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_CORPUS], trainer)
    tokenizer.add_tokens([AddedToken(text, special=special, normalized=False) for text, special in _CONTROL.items()])
    assert tokenizer.get_vocab_size() == _VOCABULARY, "the corpus has too few byte pairs"
    return tokenizer


def tiny_checkpoint(cache_dir: str | Path, *, seed: int = 0, layers: int = 4) -> Path:
    """The folder under `cache_dir` for this seed and number of layers; written if it is missing or incomplete.

    It is written under another name and renamed when done, so a folder that exists is whole. Raises ConfigError when
    `cache_dir` cannot be written.
    """
    folder = Path(cache_dir).expanduser() / f"tiny-v{_FORMAT}-layers{layers}-seed{seed}"
    if _is_complete(folder):
        return folder
    unfinished = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    try:
        unfinished.mkdir(parents=True)
        write_tiny(unfinished, seed=seed, layers=layers)
        _put_in_place(unfinished, folder)
    except OSError as error:
        raise ConfigError(f"cache_dir={cache_dir} cannot be written ({error}); give another cache_dir=") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def write_tiny(folder: Path, *, seed: int = 0, layers: int = 4) -> None:
    """All files of the checkpoint into an existing folder, the manifest last."""
    config = tiny_config(layers)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}, indent=2) + "\n",
        encoding="utf-8",
    )
    _write_weights(folder, ModelDimensions.from_config(config), seed)
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    manifest = {"note": RANDOM_NOTE, "seed": seed, "files": sizes}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _write_weights(folder: Path, dimensions: ModelDimensions, seed: int) -> None:
    """Two shards, cut in the middle of the layers. Decay and gated norm are float32, as in published files."""
    middle = f"layers.{dimensions.num_hidden_layers // 2}."
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, spec in expected_tensors(dimensions).items():
        if len(shards) == 1 and name.startswith(middle):
            shards.append({})
        dtype = torch.float32 if spec.kind in ("a_log", "gated_norm") else torch.bfloat16
        shards[-1][_PREFIX + name] = random_tensor(name, spec, dtype=dtype, device="cpu", seed=seed)
    weight_map = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _is_complete(folder: Path) -> bool:
    try:
        files = json.loads((folder / _MANIFEST).read_bytes())["files"]
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError):
        return False


def _put_in_place(unfinished: Path, folder: Path) -> None:
    """Rename; a complete folder that another process put there meanwhile stays, an incomplete one makes way."""
    if folder.exists() and not _is_complete(folder):
        shutil.rmtree(folder)
    try:
        unfinished.rename(folder)
    except OSError:
        if not _is_complete(folder):
            raise
