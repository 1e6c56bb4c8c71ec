"""What the options of an engine name: told once by `describe`, opened and checked whole by `open_model`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from engine.config import RANDOM, EngineConfig, cache_folder
from engine.errors import CheckpointError, ConfigError
from engine.load.checkpoint import Checkpoint, RandomWeights, open_checkpoint, read_dimensions
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
    check_trained,
    folder_sha256,
    kind_of,
    read_export,
    read_model_id,
    read_package,
    weights_folder,
)
from engine.load.tiny import tiny_checkpoint, tiny_config, tiny_tokenizer
from engine.wire.answers import Head, Provenance
from engine.wire.letters import Letters, LettersHead, letter_ids, read_system_message
from engine.wire.open_jev import OpenJev
from engine.wire.processor import Processor, check_vocabulary
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
class Description:
    """What a folder is and how it is asked, from names and JSON alone. `describe` makes one."""

    config: EngineConfig
    kind: Kind
    """Weights made from a seed count as a plain base."""
    weights: str | None
    """Folder with config.json, base weights and tokenizer; None for weights made from the seed."""
    dimensions: ModelDimensions
    head: str
    """Never `auto`."""
    names: tuple[str, ...]
    """The id that a response carries, then aliases that a request may use."""

    @property
    def tokenizer(self) -> str | None:
        """Folder of the tokenizer; None for that of `tiny`."""
        return self.config.tokenizer or self.weights

    def processor(self, opened: Opened | None = None) -> Processor:
        """With the head of what was opened; without one it parses and makes prompts only.

        Raises CheckpointError for a tokenizer or a head that cannot serve, ConfigError for a wrong system message.
        """
        config, vocab_size = self.config, self.dimensions.vocab_size
        control = config.tokens.control
        tokens = (
            Tokens(tiny_tokenizer().to_str(), control)
            if self.tokenizer is None
            else Tokens.load(self.tokenizer, control)
        )
        if self.head == "letters":
            return Letters(
                tokens=tokens,
                names=self.names,
                max_length=config.max_length,
                vocab_size=vocab_size,
                system_message=read_system_message(config.letters.system_message, check=config.check_ids),
                head=None if opened is None else opened.letters_head(tokens, check=self.published_cua),
            )
        return OpenJev(
            tokens=tokens,
            names=self.names,
            max_length=config.max_length,
            vocab_size=vocab_size,
            head=None if opened is None else opened.scalar_head(tokens),
        )

    @property
    def published_cua(self) -> bool:
        return self.kind == "adapter" and self.config.check_ids


@dataclass(frozen=True, kw_only=True)
class Opened:
    """What heads are made of."""

    source: Checkpoint | RandomWeights
    dtype: torch.dtype
    decision: DecisionModel | None
    """Of a package or an export."""

    def scalar_head(self, tokens: Tokens) -> Head:
        """The trained one, else Yes minus No."""
        if self.decision is not None:
            return self.decision.head
        yes, no = self._rows([tokens.single_id("Yes"), tokens.single_id("No")])
        return Head((yes - no).numpy(), 0.0, 1.0, "pretrained_yes_minus_no_no_training")

    def letters_head(self, tokens: Tokens, *, check: bool) -> LettersHead:
        """`check` asks for the published ids of letters."""
        rows = self._rows(letter_ids(tokens, check=check))
        return LettersHead(rows=rows.to(self.dtype).float().numpy(), dtype=self.dtype)

    def _rows(self, ids: Sequence[int]) -> Tensor:
        """Rows [ids, hidden] of the language-model head, float32 on the CPU."""
        check_vocabulary(max(ids), self.source.dimensions.vocab_size)
        return self.source.head_rows(ids).to("cpu", torch.float32)


@dataclass(frozen=True, kw_only=True)
class OpenModel:
    """Everything an engine is made of but the weights on its device. `tensor` and `beside` read open files."""

    tensor: Callable[[str], Tensor]
    """Weights by text-model name, with the adapter where it is merged."""
    beside: Adapter | None
    """The adapter where it is not."""
    dimensions: ModelDimensions
    processor: Processor
    provenance: Provenance


def describe(config: EngineConfig) -> Description:
    """Tell what `config`, which must be resolved, names; neither a weight nor a tokenizer is read.

    Raises ConfigError for options that contradict the folder and CheckpointError for the folder's faults.
    """
    kind: Kind = "base"
    weights: str | None = None
    said: tuple[str, ...] = ()
    dimensions = DIMENSIONS.get(config.model) or ModelDimensions.from_config(tiny_config())
    if config.checkpoint is not None and config.checkpoint != RANDOM:
        kind = kind_of(config.checkpoint)
        if kind != "base" or config.head == "auto":
            check_trained(config.checkpoint, kind)
        weights = weights_folder(config.checkpoint, kind, config.base)
        dimensions = read_dimensions(weights)
        check_dimensions(dimensions, config.model, weights)
        said = (read_model_id(config.checkpoint, kind),) if kind in ("package", "export") else ()
    possible = _HEADS[kind]
    if config.head != "auto" and config.head not in possible:
        raise ConfigError(f"head={config.head}: a checkpoint of kind {kind} serves {' or '.join(possible)}")
    if kind == "adapter":
        revision = CUA_REVISION if config.check_ids else "unchecked"
        names: tuple[str, ...] = (f"cua-ai/{CUA_NAME}@{revision}:text", CUA_NAME)
    else:
        names = tuple(dict.fromkeys((*said, *_NAMES[config.model])))
    return Description(
        config=config,
        kind=kind,
        weights=weights,
        dimensions=dimensions,
        head=possible[0] if config.head == "auto" else config.head,
        names=names,
    )


@contextmanager
def open_model(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> Iterator[OpenModel]:
    """Open what `config`, which must be resolved, names; no base weight is read but the head's rows.

    Files are closed at the end of the block. Raises what `describe` does.
    """
    named = describe(config)
    with ExitStack() as files:
        source = _open_weights(named, dtype, device, files)
        adapter = _open_adapter(named, files)
        decision = _open_decision_model(named, adapter) if named.head == "scalar" else None
        tensor: Callable[[str], Tensor] = source.tensor
        beside, lora = adapter, {} if adapter is None else {"lora": config.lora}
        if adapter is not None and config.lora == "merged":
            tensor, beside = adapter.merged(source.tensor, device), None
        base_revision = CUA_BASE_REVISION if named.published_cua else None
        weights = "random" if named.weights is None else "checkpoint"
        yield OpenModel(
            tensor=tensor,
            beside=beside,
            dimensions=named.dimensions,
            processor=named.processor(Opened(source=source, dtype=dtype, decision=decision)),
            provenance=Provenance(
                model=named.names[0],
                base_revision=base_revision if decision is None else decision.base_revision,
                max_length=config.max_length,
                backbone_parameter_dtypes=[str(dtype), "torch.float32"],
                checkpoint_sha256=None if adapter is None else folder_sha256(config.checkpoint or ""),
                extra={"weights": weights, "device": config.device, **lora},
            ),
        )


def _open_weights(
    named: Description, dtype: torch.dtype, device: torch.device, files: ExitStack
) -> Checkpoint | RandomWeights:
    config, folder = named.config, named.weights
    if folder is None and config.model != "tiny":
        return RandomWeights(named.dimensions, seed=config.seed, dtype=dtype, device=device)
    if folder is None:
        folder = str(tiny_checkpoint(cache_folder(config), seed=config.seed))
    return files.enter_context(open_checkpoint(folder))


def _open_adapter(named: Description, files: ExitStack) -> Adapter | None:
    config, folder = named.config, Path(named.config.checkpoint or "")
    if named.kind in ("base", "export"):
        if config.lora != "merged":
            raise ConfigError(f"lora={config.lora}: no adapter lies beside these weights; leave lora= out")
        return None
    adapter = open_adapter(folder if named.kind == "adapter" else folder / ADAPTER, named.dimensions)
    files.callback(adapter.close)
    if named.published_cua:
        check_cua(adapter, config.model)
    return adapter


def _open_decision_model(named: Description, adapter: Adapter | None) -> DecisionModel:
    """Ids, head and temperature of a package, or without an adapter of an export, checked as the options ask."""
    folder, hidden = named.config.checkpoint or "", named.dimensions.hidden_size
    if adapter is None:
        found = read_export(folder, hidden)
    else:
        found = read_package(folder, hidden)
        check_rank(found, adapter)
    if named.config.check_ids:
        check_open_jev(found, named.config.model)
    return found


def check_dimensions(found: ModelDimensions, model: str, folder: str) -> None:
    """A published size is what its folder says. Raises CheckpointError with the first key that differs."""
    expected = DIMENSIONS.get(model)
    for field in fields(expected) if expected is not None else ():
        ours, theirs = getattr(expected, field.name), getattr(found, field.name)
        if ours != theirs:
            raise CheckpointError(f"{folder}/config.json: {field.name} is {theirs}, model={model} has {ours}")
