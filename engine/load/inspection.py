"""Everything about a checkpoint that can be told without a GPU: facts, and findings that name file and key."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import track

from engine.errors import CheckpointError, ConfigError
from engine.hub import existing_folder
from engine.load.checkpoint import INDEX, Checkpoint, open_checkpoint, read_dimensions, read_json
from engine.load.dimensions import DIMENSIONS, ModelDimensions
from engine.load.lora import SETTINGS, VALUES, Adapter, open_adapter, read_settings
from engine.load.opening import check_dimensions
from engine.load.package import (
    ADAPTER,
    EXPORT,
    HEAD,
    PACKAGE_FILES,
    PINS,
    TEMPERATURE,
    DecisionModel,
    Kind,
    check_cua,
    check_open_jev,
    check_rank,
    check_trained,
    files_of,
    folder_sha256,
    kind_of,
    read_export,
    read_head,
    read_package,
    weights_folder,
)
from engine.wire.letters import letter_ids
from engine.wire.processor import check_vocabulary
from engine.wire.tokens import TOKENIZER, Tokens

T = TypeVar("T")

_IGNORED = ("README.md", f"{ADAPTER}/README.md")
_OTHER_TOKENIZERS = (
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
)
"""What transformers makes a tokenizer of where there is no tokenizer.json."""


class _Findings:
    """What was found, each once, in order."""

    def __init__(self) -> None:
        self.lines: dict[str, None] = {}

    def add(self, text: str) -> None:
        self.lines[" ".join(text.split())] = None

    def of(self, step: Callable[..., T], *arguments: Any) -> T | None:
        """The step's result; None where it found something."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            try:
                return step(*arguments)
            except (CheckpointError, ConfigError) as error:
                self.add(str(error))
                return None
            finally:
                for warning in caught:
                    self.add(str(warning.message))


def check(
    folder: str, *, base: str | None = None, model: str | None = None, own: bool = False, deep: bool = False,
    bar: bool = False,
) -> tuple[dict[str, str], list[str]]:  # fmt: skip
    """Facts and findings. Raises ConfigError when there is nothing to check, or nothing to check it against."""
    folder = str(existing_folder(f"FOLDER {folder}", folder))
    base = None if base is None else str(existing_folder(f"--base {base}", base))
    findings = _Findings()
    kind = findings.of(kind_of, folder)
    if kind is None:
        return {}, list(findings.lines)
    facts: dict[str, str] = {"kind": kind}
    findings.of(check_trained, folder, kind)
    if kind in ("package", "adapter"):
        if (sha256 := findings.of(folder_sha256, folder)) is not None:
            facts["checkpoint_sha256"] = sha256
        _files(folder, kind, findings)
    if model is None:
        model = _size(folder, kind)
    dimensions = DIMENSIONS.get(model or "")
    if kind in ("base", "export") or base is not None:
        weights = weights_folder(folder, kind, base)
        dimensions = _weights(weights, model, findings, facts, deep=deep, bar=bar) or dimensions
        _tokenizer(weights, dimensions, letters=kind == "adapter" and not own, findings=findings)
    if dimensions is None:
        if findings.lines:
            return facts, list(findings.lines)
        raise ConfigError(f"{folder} does not tell its size; give --base FOLDER or --model SIZE")
    _decision(folder, kind, dimensions, model, own, findings, facts)
    return facts, list(findings.lines)


def _size(folder: str, kind: Kind) -> str | None:
    """The published size that the folder claims to be, if any."""
    if kind == "adapter":
        return "4b"
    if kind == "base":
        return None
    try:
        claimed = read_json(Path(folder) / ("model.json" if kind == "package" else "open_jev_export.json"))
    except CheckpointError:
        return None
    return next((size for size, pin in PINS.items() if pin.base == claimed.get("model_id")), None)


def _files(folder: str, kind: Kind, findings: _Findings) -> None:
    needed = PACKAGE_FILES if kind == "package" else (SETTINGS, VALUES)
    for name in needed:
        if not (Path(folder) / name).exists():
            findings.add(f"{Path(folder) / name}: no such file")
    for path in files_of(Path(folder)):
        name = path.relative_to(folder).as_posix()
        if name not in (*needed, *_IGNORED):
            findings.add(
                f"{path}: {name} is not part of a checkpoint of kind {kind}, but changes its checkpoint_sha256"
            )


def _weights(
    folder: str, model: str | None, findings: _Findings, facts: dict[str, str], *, deep: bool, bar: bool
) -> ModelDimensions | None:
    dimensions = findings.of(read_dimensions, folder)
    if dimensions is None:
        return None
    if model is not None:
        findings.of(check_dimensions, dimensions, model, folder)
    source = findings.of(open_checkpoint, folder)
    if source is not None:
        facts["weights"] = f"{len(source.names)} tensors in {folder}"
        if unused := _unused(Path(folder), source):
            facts["not used"] = ", ".join(unused)
        if deep:
            for name in track(source.names, "reading", console=Console(stderr=True), transient=True, disable=not bar):
                findings.of(_finite, source, name)
    return dimensions


def _unused(folder: Path, source: Checkpoint) -> list[str]:
    """What lies in the folder and changes no answer: other files of known kinds are findings."""
    used = {"config.json", INDEX, EXPORT, TOKENIZER, *source.files}
    if not (folder / TOKENIZER).exists():
        used |= {name for name in _OTHER_TOKENIZERS if (folder / name).exists()}
    return sorted(path.name + "/" * path.is_dir() for path in folder.iterdir() if path.name not in used)


def _finite(source: Checkpoint, name: str) -> None:
    bad = int((~torch.isfinite(source.tensor(name))).sum())
    if bad:
        raise CheckpointError(f"{source.file_of(name)}: {name} holds {bad:,} values that are not finite")


def _tokenizer(folder: str, dimensions: ModelDimensions | None, *, letters: bool, findings: _Findings) -> None:
    tokens = findings.of(Tokens.load, folder)
    if tokens is None:
        return
    for word in ("Yes", "No"):
        id = findings.of(tokens.single_id, word)
        if id is not None and dimensions is not None:
            findings.of(check_vocabulary, id, dimensions.vocab_size)
    if letters:
        findings.of(lambda: letter_ids(tokens, check=True))


def _decision(
    folder: str,
    kind: Kind,
    dimensions: ModelDimensions,
    model: str | None,
    own: bool,
    findings: _Findings,
    facts: dict[str, str],
) -> None:
    """Adapter, head, temperature and published ids."""
    found: DecisionModel | None = None
    adapter: Adapter | None = None
    if kind in ("package", "adapter"):
        place = Path(folder) if kind == "adapter" else Path(folder) / ADAPTER
        findings.of(read_settings, place)
        adapter = findings.of(open_adapter, place, dimensions)
        for module in adapter.modules if adapter is not None else ():
            assert adapter is not None
            findings.of(adapter.factors, module, torch.device("cpu"))
    if kind == "package":
        findings.of(read_json, Path(folder) / TEMPERATURE)
        findings.of(read_head, Path(folder) / HEAD, dimensions.hidden_size)
        found = findings.of(read_package, folder, dimensions.hidden_size)
    elif kind == "export":
        found = findings.of(read_export, folder, dimensions.hidden_size)
    if found is not None:
        facts["model"] = f"{found.model_id} at {found.base_revision}, temperature {found.head.temperature}"
        if adapter is not None:
            findings.of(check_rank, found, adapter)
        if not own:
            findings.of(check_open_jev, found, model or "")
    if kind == "adapter" and adapter is not None and not own:
        findings.of(check_cua, adapter, model or "4b")
