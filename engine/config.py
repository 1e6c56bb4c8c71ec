"""Options of an engine and of its command lines.

These classes own every default; the YAML under `configs/` repeats them and a test compares the two. A value is
checked when it is set, with nothing but the value at hand; what depends on the machine is settled by `resolve`.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import torch

from engine.errors import ConfigError, shown

MODELS = ("tiny", "4b", "9b", "27b")
DTYPES = ("auto", "bfloat16", "float32")
SPLITS = ("exact", "aligned")
GEMMS = ("auto", "default", "fixed", "tuned")
SCHEDULES = ("auto", "independent", "batched", "levels", "tree")
PACKS = ("all", "one")
GRAPHS = ("auto", "eager", "compiled", "captured")
CAPTURES = ("answer", "load", "idle")
HEADS = ("auto", "scalar", "yes_minus_no", "letters")
LORAS = ("merged", "unmerged")
CONTROLS = ("plain", "special")
FORMATS = ("text", "json")

RANDOM = "random"
"""Value of `checkpoint` that asks for weights made from the seed."""
LARGEST_MAX_LENGTH = 16_384

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the known word closest to `word`, nothing when none is close."""
    close = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!s} is not one of {', '.join(allowed)}{nearest(str(value), allowed)}")


def _within(name: str, value: int, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        bounds = f"from {low} to {high:,}" if high is not None else f"of at least {low}"
        raise ConfigError(f"{name}={shown(value)} is not a whole number {bounds}")


def _positive(name: str, value: float | None) -> None:
    if value is not None and not (isinstance(value, int | float) and 0 < value < float("inf")):
        raise ConfigError(f"{name}={shown(value)} is not a positive number")


@dataclass(kw_only=True)
class TokensConfig:
    control: str = "plain"
    """What a control token typed inside a state or a question becomes: `plain` text pieces, or the `special` id."""

    def __post_init__(self) -> None:
        _one_of("tokens.control", self.control, CONTROLS)


@dataclass(kw_only=True)
class LettersConfig:
    system_message: str | None = None
    """File with the system message in front of every prompt of `head=letters`; not part of this project."""

    def __post_init__(self) -> None:
        if self.system_message == "":
            raise ConfigError("letters.system_message= is empty; give a file or leave it out")


@dataclass(kw_only=True)
class MemoryConfig:
    question_snapshots: int = 16
    """Question snapshots alive at once; a request with more questions runs in waves."""
    limit_gib: float | None = None
    """Device memory the engine may use, weights included. A request that cannot fit is refused with the figures."""
    graphs_gib: float = 0.25
    """Device memory for captured graphs beside the activations they share; the least recently used ones go first."""

    def __post_init__(self) -> None:
        _within("memory.question_snapshots", self.question_snapshots, 1, 4_096)
        _positive("memory.limit_gib", self.limit_gib)
        _positive("memory.graphs_gib", self.graphs_gib)


@dataclass(kw_only=True)
class EngineConfig:
    """Everything that is fixed for an engine's life. Raises ConfigError on a value that can never work."""

    model: str = "tiny"
    checkpoint: str | None = None
    """Folder of a Hugging Face model, an Open-Jev package, its merged export or a Cua-S1 adapter, told apart by
    content; or `random` for weights made from `seed`. `tiny` makes its own when none is given."""
    base: str | None = None
    """Hugging Face folder with the base weights, for a checkpoint that holds none of its own."""
    check_ids: bool = True
    """Accept published packages only, by their ids and settings. `false` takes a checkpoint of your own."""
    lora: str = "merged"
    """`merged` into the weights in float32, rounded once; `unmerged` multiplies it beside them, to compare."""
    tokenizer: str | None = None
    """Folder with a tokenizer.json. Without one: the checkpoint's, and for `checkpoint=random` that of `tiny`."""
    seed: int = 0
    """Decides random and tiny weights, nothing else."""
    device: str = "auto"
    dtype: str = "auto"
    """Storage of weights and activations. `auto`: bfloat16, but float32 for `tiny` on a CPU."""
    split: str = "exact"
    gemm: str = "auto"
    schedule: str = "auto"
    pack: str = "all"
    """`one` runs branches one by one, to measure reuse alone."""
    graphs: str = "auto"
    """`eager`: operators one by one. `compiled`: torch.compile per layer. `captured`: replayed from CUDA graphs."""
    capture: str = "answer"
    """When a missing graph is captured. `answer`: before the answer is handed over, when a program of one thread can do
    nothing that breaks a capture. `load`: while loading, and never later. `idle`: when no request waits, in a process
    that does nothing else on CUDA."""
    head: str = "auto"
    """`auto`: what the checkpoint was trained with. `scalar` is a trained one, `yes_minus_no` needs no training, and
    `letters` lists all options in one prompt (Cua-S1)."""
    max_length: int = 4_096
    """Tokens of the longest prompt accepted; nothing is ever cut."""
    warmup: list[int] = field(default_factory=list)
    """Row counts to capture graphs for while loading; others are captured after their first use."""
    nvtx: bool = False
    """Emit NVTX ranges in the domain `forkgraph`, for a profiler that watches this process."""
    cache_dir: str | None = None
    """Where tiny checkpoints are kept. Without one: `forkgraph` in the user's cache folder."""
    tokens: TokensConfig = field(default_factory=TokensConfig)
    letters: LettersConfig = field(default_factory=LettersConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)

    def __post_init__(self) -> None:
        _one_of("model", self.model, MODELS)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("split", self.split, SPLITS)
        _one_of("schedule", self.schedule, SCHEDULES)
        _one_of("pack", self.pack, PACKS)
        _one_of("head", self.head, HEADS)
        _one_of("lora", self.lora, LORAS)
        _one_of("gemm", self.gemm, GEMMS)
        _one_of("graphs", self.graphs, GRAPHS)
        _one_of("capture", self.capture, CAPTURES)
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError(
                f"device={self.device} is not one of auto, cpu, cuda, cuda:N{nearest(self.device, ('cpu', 'cuda'))}"
            )
        _within("seed", self.seed, 0, 2**63 - 1)
        _within("max_length", self.max_length, 1, LARGEST_MAX_LENGTH)
        for rows in self.warmup:
            _within("warmup", rows, 1, LARGEST_MAX_LENGTH)
        for name in ("checkpoint", "base", "tokenizer", "cache_dir"):
            if getattr(self, name) == "":
                raise ConfigError(f"{name}= is empty; give a folder or leave it out")
        if self.lora == "unmerged" and self.memory.limit_gib is not None:
            raise ConfigError(
                "memory.limit_gib counts no products beside the weights; leave it out with lora=unmerged, or merge"
            )
        if self.pack == "one" and self.schedule in ("batched", "tree"):
            raise ConfigError(
                f"pack=one runs branches one by one, which contradicts schedule={self.schedule}; use schedule=levels"
            )


@dataclass(kw_only=True)
class ScoreConfig(EngineConfig):
    """`python -m engine.score`."""

    request: str | None = None
    """A .json request, a .jsonl file with one request per line, or `-` for one request on standard input."""
    out: str | None = None
    """File for the answers; without one they go to standard output."""
    progress: bool = True
    """Draw a progress bar for .jsonl on a terminal."""


@dataclass(kw_only=True)
class ExplainConfig(EngineConfig):
    """`python -m engine.explain`."""

    request: str | None = None
    format: str = "text"

    def __post_init__(self) -> None:
        super().__post_init__()
        _one_of("format", self.format, FORMATS)


Config = TypeVar("Config", bound=EngineConfig)


def resolve(config: Config) -> Config:
    """A copy in which device, dtype, gemm, schedule and the folders are concrete for this machine.

    `schedule=auto` stays on CUDA: there it is decided per request. Raises ConfigError when the device or a folder
    does not exist, or when the model has no weights to run with.
    """
    if config.model != "tiny" and config.checkpoint is None:
        raise ConfigError(
            f"model={config.model} has no weights; give checkpoint=FOLDER, or checkpoint=random for weights made "
            "from the seed"
        )
    if config.base is not None and config.checkpoint in (None, RANDOM):
        raise ConfigError(f"base={config.base} belongs to a checkpoint without base weights; give checkpoint=FOLDER")
    device = _resolve_device(config.device)
    small = device == "cpu" and config.model == "tiny"
    dtype = ("float32" if small else "bfloat16") if config.dtype == "auto" else config.dtype
    return replace(
        config,
        checkpoint=RANDOM if config.checkpoint == RANDOM else _resolve_folder("checkpoint", config.checkpoint),
        base=_resolve_folder("base", config.base),
        tokenizer=_resolve_folder("tokenizer", config.tokenizer),
        device=device,
        dtype=dtype,
        gemm=_resolve_gemm(config.gemm, device, dtype),
        schedule=_resolve_schedule(config.schedule, config.pack, device),
        graphs=_resolve_graphs(config.graphs, device),
        cache_dir=str(Path(config.cache_dir).expanduser() if config.cache_dir else default_cache_dir()),
    )


def _resolve_folder(name: str, value: str | None) -> str | None:
    if value is None:
        return None
    folder = Path(value).expanduser()
    if not folder.is_dir():
        beside = [entry.name for entry in folder.parent.iterdir()] if folder.parent.is_dir() else []
        raise ConfigError(f"{name}={value}: no such folder{nearest(folder.name, beside)}")
    return str(folder)


def _resolve_schedule(schedule: str, pack: str, device: str) -> str:
    if schedule == "auto" and (device == "cpu" or pack == "one"):
        return "levels"
    return schedule


def _resolve_gemm(gemm: str, device: str, dtype: str) -> str:
    tunable = device != "cpu" and dtype == "bfloat16"
    if gemm == "auto":
        return "tuned" if tunable else "fixed"
    if gemm == "tuned" and not tunable:
        raise ConfigError(
            "gemm=tuned chooses among bfloat16 products of a CUDA device; use gemm=fixed, which has the same bits"
        )
    return gemm


def _resolve_graphs(graphs: str, device: str) -> str:
    if device == "cpu" and graphs == "captured":
        raise ConfigError("graphs=captured needs a CUDA device; use graphs=eager or graphs=compiled")
    if graphs == "auto":
        return "eager" if device == "cpu" else "captured"
    return graphs


def _resolve_device(device: str) -> str:
    if device == "cpu":
        return device
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        return "cuda:0" if available else "cpu"
    index = int(device.partition(":")[2] or 0)
    if index >= available:
        found = f"{available} CUDA devices are" if available > 1 else f"{'one' if available else 'no'} CUDA device is"
        raise ConfigError(f"device={device}: {found} visible; use device=" + ("cuda:0" if available else "cpu"))
    return f"cuda:{index}"


def dtype_bytes(dtype: str) -> int:
    """Bytes of an element of a resolved `dtype`."""
    return {"bfloat16": 2, "float32": 4}[dtype]


def default_cache_dir() -> Path:
    """`forkgraph` in the cache folder of this platform's user."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA", "~/AppData/Local")
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "forkgraph"
