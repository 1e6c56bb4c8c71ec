"""Folders that `checkpoint=` may name beside a plain Hugging Face one, and what makes a decision model of weights.

- package: LoRA, head and temperature of a published Open-Jev; its base weights lie elsewhere (`base=`)
- export: an Open-Jev with its LoRA merged, complete in one folder
- adapter: a PEFT LoRA alone, as Cua-S1 is published
"""

from __future__ import annotations

import hashlib
import math
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.config import LARGEST_MAX_LENGTH
from engine.errors import CheckpointError, ConfigError, shown
from engine.load.checkpoint import read_json
from engine.load.lora import SETTINGS, VALUES, Adapter
from engine.wire.answers import Head

Kind = Literal["base", "export", "package", "adapter"]
Value = TypeVar("Value")

EXPORT = "open_jev_export.json"
MODEL, TEMPERATURE, HEAD, ADAPTER = "model.json", "temperature.json", "head.pt", "adapter"
PACKAGE_FILES = (MODEL, TEMPERATURE, HEAD, f"{ADAPTER}/{SETTINGS}", f"{ADAPTER}/{VALUES}")

_OTHER_FAMILIES = (
    "judge_config.json", "decision_config.json", "decision.json", "decision_head.json", "calibration.json",
    "head.safetensors", "readout.safetensors", "adapter_vllm",
)  # fmt: skip
"""Files of decision models that are not among the kinds above."""

CHAT_PREFIX = "<|im_start|>user\n"
CHAT_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
"""Around every prompt, as `engine.wire.prompts` writes it."""

_METHOD = "independent_candidate_lora_nll_brier"
_FORMAT = "open-jev-text-merged/1"
_OWN = "check_ids=false accepts a checkpoint of your own"


@dataclass(frozen=True, kw_only=True)
class Pin:
    """Ids of a published Open-Jev."""

    base: str
    base_revision: str
    checkpoint_revision: str
    temperature: float


PINS = {
    "9b": Pin(
        base="Qwen/Qwen3.5-9B",
        base_revision="c202236235762e1c871ad0ccb60c8ee5ba337b9a",
        checkpoint_revision="47e966881e489511c0c7f5633a9e1960a676a551",
        temperature=1.8969118766347646,
    ),
    "27b": Pin(
        base="Qwen/Qwen3.8-27B",
        base_revision="1d4bf0f2ff6012fd82039f2fa52739d0dd7c60c0",
        checkpoint_revision="28cf73067d5b337860bbef3c85b8b82ba8730956",
        temperature=2.5343690298472983,
    ),
}
"""By `model=`; no other size has been published."""

CUA_NAME = "cua-s1-4b-0.2"
CUA_REVISION = "16818868b0cc7813808aae4e87b417657046ab79"
CUA_BASE_REVISION = "851bf6e806efd8d0a36b00ddf55e13ccb7b8cd0a"
_CUA_RANK, _CUA_ALPHA = 16, 32.0
_CUA_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class DecisionModel:
    """What a package or an export says about itself. `file` says it; an export's revision is None in a package."""

    file: Path
    model_id: str
    base_revision: str
    checkpoint_revision: str | None
    max_length: int
    lora_rank: int | None
    """None for an export, whose LoRA is merged."""
    head: Head


def kind_of(folder: str | Path) -> Kind:
    """By content. Raises CheckpointError for the repository around a package, with the folder that is meant, and for a
    folder that cannot be read."""
    folder = Path(folder).expanduser()
    try:
        return _kind_of(folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error.strerror}") from None


def _kind_of(folder: Path) -> Kind:
    if (folder / EXPORT).exists():
        return "export"
    if (folder / SETTINGS).exists() or (folder / VALUES).exists():
        return "adapter"
    if (folder / "config.json").exists():
        return "base"
    if any((folder / name).exists() for name in (*PACKAGE_FILES, ADAPTER)):
        return "package"
    inner = folder / "package" / "checkpoint"
    if inner.is_dir():
        raise CheckpointError(f"{folder}: the checkpoint is inside; give {inner}")
    return "base"


def check_trained(folder: str | Path, kind: Kind) -> None:
    """Raise CheckpointError for files of a trained head or adapter that a checkpoint of this kind would ignore."""
    names = (*_OTHER_FAMILIES, *((MODEL, TEMPERATURE, HEAD, ADAPTER) if kind == "base" else ()))
    found = [name for name in names if (Path(folder).expanduser() / name).exists()]
    if found:
        remedy = "; head=yes_minus_no asks its base weights without training, for other answers"
        raise CheckpointError(
            f"{folder}: {', '.join(found)} belong to a decision model of a kind that is not supported yet"
            + (remedy if kind == "base" else "; move them away if they are not meant")
        )


def weights_folder(checkpoint: str, kind: Kind, base: str | None) -> str:
    """The folder with config.json, base weights and tokenizer.

    Raises ConfigError when `base` is missing for a folder without weights, or given for one that has them.
    """
    if kind in ("base", "export"):
        if base is not None:
            raise ConfigError(f"base={base}: {checkpoint} holds its own weights; leave base= out")
        return checkpoint
    if base is None:
        raise ConfigError(f"checkpoint={checkpoint} holds no base weights; give their folder with base=FOLDER")
    if (found := kind_of(base)) != "base":
        raise ConfigError(f"base={base} is no plain Hugging Face folder but holds an {found} itself")
    return base


def read_model_id(folder: str | Path, kind: Literal["package", "export"]) -> str:
    """The model that a package or an export was trained as. Raises CheckpointError naming file and key."""
    file = Path(folder).expanduser() / (MODEL if kind == "package" else EXPORT)
    return _get(file, read_json(file), "model_id", str)


def read_package(folder: str | Path, hidden_size: int) -> DecisionModel:
    """model.json, temperature.json and head.pt of a package. Raises CheckpointError naming file and key."""
    folder = Path(folder).expanduser()
    file = folder / MODEL
    said, calibration = read_json(file), read_json(folder / TEMPERATURE)
    if (method := _get(file, said, "method", str)) != _METHOD:
        raise CheckpointError(f"{file}: method={shown(method)} is not supported; it must be {_METHOD!r}")
    temperature = _get(folder / TEMPERATURE, calibration, "temperature", float)
    weight, bias = read_head(folder / HEAD, hidden_size)
    return DecisionModel(
        file=file,
        model_id=_get(file, said, "model_id", str),
        base_revision=_get(file, said, "revision", str),
        checkpoint_revision=None,
        max_length=_max_length(file, said),
        lora_rank=_get(file, said, "lora_rank", int),
        head=_head(folder / TEMPERATURE, weight, bias, temperature, "lora_decision_head"),
    )


def read_export(folder: str | Path, hidden_size: int) -> DecisionModel:
    """open_jev_export.json of an export. Raises CheckpointError naming the key."""
    file = Path(folder).expanduser() / EXPORT
    said = read_json(file)
    for key, wanted in (("format", _FORMAT), ("chat_prefix", CHAT_PREFIX), ("chat_suffix", CHAT_SUFFIX)):
        if (found := _get(file, said, key, str)) != wanted:
            raise CheckpointError(f"{file}: {key}={shown(found)} is not supported; it must be {wanted!r}")
    values = _get(file, said, "head_weight", list)
    if len(values) != hidden_size:
        raise CheckpointError(f"{file}: head_weight has {len(values)} numbers, hidden_size is {hidden_size}")
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        raise CheckpointError(f"{file}: head_weight must be a list of numbers")
    with np.errstate(over="ignore"):  # an infinite weight is refused below
        weight = np.array([_float(value) for value in values], np.float64).astype(np.float32)
    bias, temperature = _get(file, said, "head_bias", float), _get(file, said, "temperature", float)
    return DecisionModel(
        file=file,
        model_id=_get(file, said, "model_id", str),
        base_revision=_get(file, said, "base_revision", str),
        checkpoint_revision=_get(file, said, "checkpoint_revision", str),
        max_length=_max_length(file, said),
        lora_rank=None,
        head=_head(file, weight, bias, temperature, "native_merged_lora_decision_head"),
    )


def read_head(path: Path, hidden_size: int) -> tuple[NDArray[np.float32], float]:
    """Weight [hidden] and bias of a head.pt. Nothing but tensors is unpickled.

    Raises CheckpointError naming the key.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    except pickle.UnpicklingError:
        raise CheckpointError(
            f"{path}: damaged, or holds more than tensors, which could run code and is not read"
        ) from None
    except Exception as error:  # the reader raises whatever its parts raise for a file that is none of its own
        raise CheckpointError(f"{path}: damaged ({type(error).__name__}: {shown(str(error))})") from None
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise CheckpointError(f"{path}: must hold the tensors weight and bias, not {shown(type(state).__name__)}")
    for key, shape in (("weight", [1, hidden_size]), ("bias", [1])):
        if key not in state:
            raise CheckpointError(f"{path}: {key} is missing")
        if list(state[key].shape) != shape:
            raise CheckpointError(f"{path}: {key} has shape {list(state[key].shape)}, hidden_size asks for {shape}")
        if state[key].dtype != torch.float32:
            raise CheckpointError(f"{path}: {key} is {state[key].dtype}, must be torch.float32")
    if extra := state.keys() - {"weight", "bias"}:
        raise CheckpointError(f"{path}: {min(map(str, extra))} is not part of a head")
    for key in ("weight", "bias"):
        if not torch.isfinite(state[key]).all():
            raise CheckpointError(f"{path}: {key} holds a value that is not finite")
    return state["weight"][0].numpy(), float(state["bias"])


def check_open_jev(found: DecisionModel, model: str) -> None:
    """The pinned ids of the published package for `model`. Raises CheckpointError with both values."""
    size = next((name for name, pin in PINS.items() if pin.base == found.model_id), None)
    if size is None:
        raise CheckpointError(f"{found.file}: model_id {found.model_id} is that of no published Open-Jev; {_OWN}")
    if size != model:
        raise CheckpointError(f"{found.file}: model_id {found.model_id} is that of model={size}, not of model={model}")
    pin = PINS[size]
    ids: list[tuple[str, object, object]] = [
        ("base revision", found.base_revision, pin.base_revision),
        ("checkpoint_revision", found.checkpoint_revision, pin.checkpoint_revision),
        ("temperature", found.head.temperature, pin.temperature),
    ]
    for key, value, pinned in ids:
        if value is not None and value != pinned:
            raise CheckpointError(f"{found.file}: {key} is {value}, published is {pinned}; {_OWN}")


def check_rank(found: DecisionModel, adapter: Adapter) -> None:
    """A package states its adapter's rank twice. Raises CheckpointError where the two differ."""
    if found.lora_rank != adapter.settings.rank:
        raise CheckpointError(
            f"{adapter.folder / SETTINGS}: r is {adapter.settings.rank}, {MODEL} says lora_rank {found.lora_rank}"
        )


def check_cua(adapter: Adapter, model: str) -> None:
    """What tells that an adapter is Cua-S1's text adapter. Raises CheckpointError with both values."""
    settings = adapter.settings
    modules = sorted({module.rpartition(".")[2] for module in adapter.modules})
    facts: list[tuple[str, object, object]] = [
        ("model", model, "4b"),
        ("r", settings.rank, _CUA_RANK),
        ("lora_alpha", settings.alpha, _CUA_ALPHA),
        ("target_modules", modules, sorted(_CUA_MODULES)),
    ]
    for key, value, pinned in facts:
        if value != pinned:
            raise CheckpointError(f"{adapter.folder / SETTINGS}: {key} is {value}, {CUA_NAME} has {pinned}; {_OWN}")


def folder_sha256(folder: str | Path) -> str:
    """Over every file in order of its path: the relative path, a zero byte, the content.

    Raises CheckpointError for a file that cannot be read.
    """
    folder = Path(folder).expanduser()
    digest = hashlib.sha256()
    for path in files_of(folder):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
        try:
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    return digest.hexdigest()


def files_of(folder: Path) -> list[Path]:
    """Every file below the folder, in order of its path."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _head(file: Path, weight: NDArray[np.float32], bias: float, temperature: float, method: str) -> Head:
    if not (math.isfinite(temperature) and temperature > 0):
        raise CheckpointError(f"{file}: temperature={temperature} must be finite and positive")
    try:
        return Head(weight, bias, temperature, method)
    except ConfigError as error:
        raise CheckpointError(f"{file}: {error}") from None


def _max_length(file: Path, said: dict[str, Any]) -> int:
    value = _get(file, said, "max_length", int)
    if not 1 <= value <= LARGEST_MAX_LENGTH:
        raise CheckpointError(f"{file}: max_length={value} must be from 1 to {LARGEST_MAX_LENGTH:,}")
    return value


def _get(file: Path, said: dict[str, Any], key: str, kind: type[Value]) -> Value:
    """A required value of that JSON type; an integer also serves as a float."""
    if key not in said:
        raise CheckpointError(f"{file}: {key} is missing")
    value = said[key]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = _float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise CheckpointError(f"{file}: {key}={shown(value)} must be of type {kind.__name__}")
    return value


def _float(value: float) -> float:
    """Infinite where the file spells out an integer that no float holds."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
