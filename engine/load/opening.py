"""What the options of an engine name, opened and checked whole before a weight is on a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from engine.config import RANDOM, EngineConfig
from engine.errors import CheckpointError, ConfigError
from engine.load.checkpoint import Checkpoint, RandomWeights, open_checkpoint
from engine.load.dimensions import DIMENSIONS, ModelDimensions
from engine.load.lora import Adapter, open_adapter
from engine.load.package import (
    ADAPTER,
    CUA_BASE_REVISION,
    CUA_NAME,
    CUA_REVISION,
    DecisionModel,
    Kind,
    check_cua,
    check_open_jev,
    check_rank,
    folder_sha256,
    kind_of,
    read_export,
    read_package,
    weights_folder,
)
from engine.load.tiny import tiny_checkpoint
from engine.wire.answers import Head
from engine.wire.letters import LettersHead, letter_ids, read_system_message
from engine.wire.tokens import Tokens

_NAMES = {
    "tiny": ("forkgraph/tiny",),
    "4b": ("Qwen/Qwen3.5-4B",),
    "9b": ("Qwen/Qwen3.5-9B", "open-jev-9b"),
    "27b": ("Qwen/Qwen3.8-27B", "open-jev-27b-v1.1"),
}
_HEADS: dict[Kind, tuple[str, ...]] = {
    "base": ("yes_minus_no", "letters"),
    "export": ("scalar",),
    "package": ("scalar",),
    "adapter": ("letters",),
}
"""Heads that a folder can serve; `auto` is the first."""


@dataclass(frozen=True, kw_only=True)
class OpenModel:
    """Everything an engine is made of but the weights on its device."""

    tensor: Callable[[str], Tensor]
    """Weights by text-model name, with the adapter where it is merged."""
    beside: Adapter | None
    """The adapter where it is not."""
    dimensions: ModelDimensions
    tokens: Tokens
    head: Head | LettersHead
    names: tuple[str, ...]
    """The id that a response carries, then aliases that a request may use."""
    base_revision: str | None = None
    checkpoint_sha256: str | None = None
    lora: str | None = None
    """How the adapter is applied; None without one."""


def open_model(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> OpenModel:
    """Open what `config`, which must be resolved, names; no base weight is read but the head's rows.

    Raises ConfigError for options that contradict the folder and CheckpointError for the folder's faults.
    """
    source, tokenizer = _open_weights(config, dtype, device)
    dimensions, kind = source.dimensions, checkpoint_kind(config)
    wanted = head_of(config, kind)
    adapter = _open_adapter(config, kind, dimensions)
    tokens = Tokens.load(tokenizer, control=config.tokens.control)  # type: ignore[arg-type]
    names = model_names(config, kind)
    head: Head | LettersHead
    base_revision: str | None
    if wanted == "scalar":
        found = open_decision_model(config, dimensions, adapter)
        head, base_revision = found.head, found.base_revision
        names = tuple(dict.fromkeys((found.model_id, *names)))
    else:
        published = kind == "adapter" and config.check_ids
        head = _untrained_head(wanted, config, source, tokens, dtype, check=published)
        base_revision = CUA_BASE_REVISION if published else None
    tensor: Callable[[str], Tensor] = source.tensor
    beside = adapter
    if adapter is not None and config.lora == "merged":
        tensor, beside = adapter.merged(source.tensor, device), None
    return OpenModel(
        tensor=tensor,
        beside=beside,
        dimensions=dimensions,
        tokens=tokens,
        head=head,
        names=names,
        base_revision=base_revision,
        checkpoint_sha256=None if adapter is None else folder_sha256(config.checkpoint or ""),
        lora=None if adapter is None else config.lora,
    )


def _open_adapter(config: EngineConfig, kind: Kind, dimensions: ModelDimensions) -> Adapter | None:
    if kind in ("base", "export"):
        if config.lora != "merged":
            raise ConfigError(f"lora={config.lora}: no adapter lies beside these weights; leave lora= out")
        return None
    folder = Path(config.checkpoint or "")
    adapter = open_adapter(folder if kind == "adapter" else folder / ADAPTER, dimensions)
    if kind == "adapter" and config.check_ids:
        check_cua(adapter, config.model)
    return adapter


def open_decision_model(config: EngineConfig, dimensions: ModelDimensions, adapter: Adapter | None) -> DecisionModel:
    """Ids, head and temperature of a package, or without an adapter of an export, checked as `config` asks."""
    folder = config.checkpoint or ""
    if adapter is None:
        found = read_export(folder, dimensions.hidden_size)
    else:
        found = read_package(folder, dimensions.hidden_size)
        check_rank(found, adapter)
    if config.check_ids:
        check_open_jev(found, config.model)
    return found


def checkpoint_kind(config: EngineConfig) -> Kind:
    """What `checkpoint` names. Weights made from a seed count as a plain base."""
    return "base" if config.checkpoint in (None, RANDOM) else kind_of(config.checkpoint or "")


def head_of(config: EngineConfig, kind: Kind) -> str:
    """The head that `head` asks for. Raises ConfigError when the checkpoint cannot serve it."""
    possible = _HEADS[kind]
    if config.head != "auto" and config.head not in possible:
        raise ConfigError(f"head={config.head}: a checkpoint of kind {kind} serves {' or '.join(possible)}")
    return possible[0] if config.head == "auto" else config.head


def model_names(config: EngineConfig, kind: Kind) -> tuple[str, ...]:
    """The id that a response carries, then aliases that a request may use."""
    if kind == "adapter":
        revision = CUA_REVISION if config.check_ids else "unchecked"
        return (f"cua-ai/{CUA_NAME}@{revision}:text", CUA_NAME)
    return _NAMES[config.model]


def check_vocabulary(largest: int, dimensions: ModelDimensions) -> None:
    """Raise ConfigError when the tokenizer gives ids that the model does not have."""
    if largest >= dimensions.vocab_size:
        raise ConfigError(
            f"the tokenizer gave id {largest}, the model knows {dimensions.vocab_size} ids; "
            "give the tokenizer= that belongs to this model"
        )


def check_dimensions(found: ModelDimensions, model: str, folder: str) -> None:
    """A published size is what its folder says. Raises CheckpointError with the first key that differs."""
    expected = DIMENSIONS.get(model)
    for field in fields(expected) if expected is not None else ():
        ours, theirs = getattr(expected, field.name), getattr(found, field.name)
        if ours != theirs:
            raise CheckpointError(f"{folder}/config.json: {field.name} is {theirs}, model={model} has {ours}")


def _open_weights(
    config: EngineConfig, dtype: torch.dtype, device: torch.device
) -> tuple[Checkpoint | RandomWeights, str]:
    """Where tensors come from, and the folder of the tokenizer."""
    assert config.cache_dir is not None
    if config.checkpoint == RANDOM and config.model != "tiny":
        folder = config.tokenizer or str(tiny_checkpoint(config.cache_dir))
        return RandomWeights(DIMENSIONS[config.model], seed=config.seed, dtype=dtype, device=device), folder
    if config.checkpoint in (None, RANDOM):
        folder = str(tiny_checkpoint(config.cache_dir, seed=config.seed))
    else:
        assert config.checkpoint is not None
        folder = weights_folder(config.checkpoint, config.base)
    source = open_checkpoint(folder)
    check_dimensions(source.dimensions, config.model, folder)
    return source, config.tokenizer or folder


def _untrained_head(
    wanted: str,
    config: EngineConfig,
    source: Checkpoint | RandomWeights,
    tokens: Tokens,
    dtype: torch.dtype,
    *,
    check: bool,
) -> Head | LettersHead:
    """A head made of rows of the language-model head; `check` asks for the published ids of letters."""
    if wanted == "letters":
        message = read_system_message(config.letters.system_message, check=config.check_ids)
        rows = _rows(source, letter_ids(tokens, check=check))
        return LettersHead(rows=rows.to(dtype).float().numpy(), dtype=dtype, system_message=message)
    yes, no = _rows(source, [tokens.single_id("Yes"), tokens.single_id("No")])
    return Head((yes - no).numpy(), 0.0, 1.0, "pretrained_yes_minus_no_no_training")


def _rows(source: Checkpoint | RandomWeights, ids: Sequence[int]) -> Tensor:
    """Rows [ids, hidden] of the language-model head, float32 on the CPU."""
    check_vocabulary(max(ids), source.dimensions)
    return source.head_rows(ids).to("cpu", torch.float32)
