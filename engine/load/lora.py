"""A PEFT LoRA folder: checked whole, then merged into the weights or kept beside them.

Module names are those of the text model without prefix (`layers.3.self_attn.q_proj`). A module's weight W [out, in]
becomes W + scale * B A, with A [rank, in] and B [out, rank].
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.errors import CheckpointError, nearest, shown
from engine.load.checkpoint import check_tensor, expected_tensors, open_shard, read_json
from engine.load.dimensions import ModelDimensions
from engine.load.tensors import LowRank
from ops.sizes import COLUMN_UNIT

SETTINGS = "adapter_config.json"
VALUES = "adapter_model.safetensors"

_PREFIXES = ("base_model.model.", "base_model.model.model.")  # of a text model alone, and of one with its head
_WITHOUT_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "inference_mode", "layers_pattern", "lora_dropout", "megatron_core",
    "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type",
}  # fmt: skip
"""Settings that do not change what a trained adapter computes."""


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """What `adapter_config.json` says, as far as it changes the adapter's product."""

    rank: int
    alpha: float
    targets: str | tuple[str, ...]
    """Names of modules, or a pattern over their whole paths."""
    excluded: str | tuple[str, ...]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def covers(self, path: str) -> bool:
        """Whether the module at this path of the trained model is adapted, by PEFT's rules."""
        return _matches(self.targets, path) and not _matches(self.excluded, path)


class Adapter:
    """A checked folder; `open_adapter` makes one. Values are read when asked for."""

    def __init__(
        self, folder: Path, settings: LoraSettings, dimensions: ModelDimensions, file: Any, places: Mapping[str, str]
    ) -> None:
        self.folder, self.settings = folder, settings
        self._rows = {name.removesuffix(".weight"): t.shape[0] for name, t in expected_tensors(dimensions).items()}
        self._file = file
        self._places = places  # module -> its name in the file

    def close(self) -> None:
        """Nothing can be read after."""
        self._file.__exit__(None, None, None)

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(self._places)

    def factors(self, module: str, device: torch.device) -> tuple[Tensor, Tensor]:
        """A [rank, in] and B [out, rank] of an adapted module, float32.

        Raises CheckpointError for a value that is not finite.
        """
        factors = []
        for letter in "AB":
            name = _factor(self._places[module], letter)
            factor = self._file.get_tensor(name)
            if not torch.isfinite(factor).all():
                raise CheckpointError(f"{self.folder / VALUES}: {name} holds a value that is not finite")
            factors.append(factor.to(device, torch.float32))
        return factors[0], factors[1]

    def merged(self, source: Callable[[str], Tensor], device: torch.device) -> Callable[[str], Tensor]:
        """`source` with the adapter in its weights: those are float32 on `device`, to be rounded by their reader."""

        def tensor(name: str) -> Tensor:
            module = name.removesuffix(".weight")
            if module not in self._places:
                return source(name)
            return merge(source(name).to(device), *self.factors(module, device), self.settings.scale)

        return tensor

    def low_rank(self, modules: Sequence[str], weight: Tensor) -> LowRank | None:
        """The adapter of a fused `weight` [out, in] whose rows are these modules' in turn; None where it has none.

        In the weight's dtype, rounded once. The rank is the sum of the modules', padded with zeros.
        """
        adapted = [module for module in modules if module in self._places]
        if not adapted:
            return None
        rank = self.settings.rank
        padded = -(-len(adapted) * rank // COLUMN_UNIT) * COLUMN_UNIT
        down, up = weight.new_zeros(padded, weight.shape[1]), weight.new_zeros(weight.shape[0], padded)
        row = column = 0
        for module in modules:
            rows = self._rows[module]
            if module in self._places:
                a, b = self.factors(module, weight.device)
                down[column : column + rank] = a
                up[row : row + rows, column : column + rank] = self.settings.scale * b
                column += rank
            row += rows
        return LowRank(down=down, up=up)


def merge(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """weight + scale * b a, float32 [out, in]. `weight` is bfloat16 or float32 and stays as it is.

    One rank after the other: true float32 on every device, whatever precision products are allowed there.
    """
    delta = b[:, :1] * a[:1]
    for i in range(1, len(a)):
        delta.addcmul_(b[:, i : i + 1], a[i : i + 1])
    return delta.mul_(scale).add_(weight)


def open_adapter(folder: str | Path, dimensions: ModelDimensions) -> Adapter:
    """Check settings, names, shapes and dtypes; no value is read.

    The file must hold both factors of every linear module that the settings target, and nothing else.
    Raises CheckpointError naming file and key.
    """
    folder = Path(folder).expanduser()
    settings = read_settings(folder)
    file, path = open_shard(folder / VALUES), str(folder / VALUES)
    names = set(file.keys())
    prefix = next((p for p in reversed(_PREFIXES) if any(name.startswith(p + "layers.") for name in names)), None)
    if prefix is None:
        some = f", but for instance {min(names)}" if names else ""
        raise CheckpointError(f"{path}: no {_PREFIXES[0]}layers.* of a text model's adapter{some}")
    tensors = expected_tensors(dimensions)
    linear = {name.removesuffix(".weight"): spec for name, spec in tensors.items() if spec.kind == "linear"}
    inside = prefix.removeprefix(_PREFIXES[0])
    shapes = {module: spec.shape for module, spec in linear.items() if settings.covers(inside + module)}
    if not shapes:
        raise CheckpointError(f"{folder / SETTINGS}: target_modules={shown(settings.targets)} names no linear module")
    wanted = {
        _factor(prefix + module, letter): [settings.rank, inputs] if letter == "A" else [outputs, settings.rank]
        for module, (outputs, inputs) in shapes.items()
        for letter in "AB"
    }
    for name in sorted(names - wanted.keys()):
        raise CheckpointError(f"{path}: {name} is not part of this adapter{nearest(name, wanted.keys() - names)}")
    for name, shape in wanted.items():
        if name not in names:
            raise CheckpointError(f"{path}: {name} is missing, but {SETTINGS} targets it")
        check_tensor(path, name, file.get_slice(name), shape, wanted_by=f"{SETTINGS} with config.json")
    return Adapter(folder, settings, dimensions, file, {module: prefix + module for module in shapes})


def read_settings(folder: Path) -> LoraSettings:
    """Those of the folder. Raises CheckpointError for a setting that would need more than W + scale * B A."""
    path = folder / SETTINGS
    config = read_json(path)

    def refuse(key: str, supported: str) -> CheckpointError:
        return CheckpointError(f"{path}: {key}={shown(config.get(key))} is not supported; it must be {supported}")

    def names(key: str) -> str | tuple[str, ...]:
        value = config.get(key) or ()
        if isinstance(value, str):
            return value
        if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
            raise refuse(key, "a list of module names or a pattern")
        return tuple(value)

    if config.get("peft_type") != "LORA":
        raise refuse("peft_type", "'LORA'")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= 256:
        raise refuse("r", "a whole number from 1 to 256")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha < 1e300:
        raise refuse("lora_alpha", "a positive number")
    if config.get("bias", "none") != "none":
        raise refuse("bias", "'none'")
    if config.get("init_lora_weights", True) not in (True, False, "gaussian", "orthogonal"):
        raise refuse("init_lora_weights", "one that leaves the base weights as they are")
    known = {"peft_type", "r", "lora_alpha", "bias", "init_lora_weights", "target_modules", "exclude_modules"}
    for key, value in config.items():
        if value and key not in known | _WITHOUT_EFFECT:
            raise refuse(key, "absent, null, false or empty")
    settings = LoraSettings(
        rank=rank,
        alpha=float(alpha),
        targets=names("target_modules"),
        excluded=names("exclude_modules"),
    )
    try:
        settings.covers("")
    except (re.error, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{path}: target_modules and exclude_modules: no pattern: {error}") from None
    return settings


def _factor(place: str, letter: str) -> str:
    return f"{place}.lora_{letter}.weight"


def _matches(wanted: str | tuple[str, ...], path: str) -> bool:
    if isinstance(wanted, str):
        return bool(wanted) and re.fullmatch(wanted, path) is not None
    return any(path == name or path.endswith("." + name) for name in wanted)
