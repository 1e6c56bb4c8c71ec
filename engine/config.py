"""Options of an engine and of its command lines.

These classes own every default; the YAML under `configs/` repeats them and a test compares the two. A value is
checked when it is set, with nothing but the value at hand; what depends on the machine is settled by `resolve`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import platformdirs

from engine import words
from engine.errors import ConfigError, nearest, shown
from engine.hub import SIZES, existing_folder
from engine.values import expanded, flag, group_of, members_of, one_of, path_of, positive, refuse_unknown, within

if TYPE_CHECKING:
    import torch

    from engine.words import (
        Capture,
        Dtype,
        Format,
        Gemm,
        Graphs,
        HeadName,
        Lora,
        Model,
        Pack,
        Reading,
        Schedule,
        Shown,
        Split,
        WarmUp,
    )  # fmt: skip
else:  # OmegaConf, which builds these classes from a command line, knows no Literal
    Capture = Dtype = Format = Gemm = Graphs = HeadName = Lora = Model = Pack = Reading = Schedule = Shown = Split = str
    WarmUp = Any

MODELS: tuple[Model, ...] = get_args(words.Model)
DTYPES: tuple[Dtype, ...] = get_args(words.Dtype)
SPLITS: tuple[Split, ...] = get_args(words.Split)
GEMMS: tuple[Gemm, ...] = get_args(words.Gemm)
SCHEDULES: tuple[Schedule, ...] = get_args(words.Schedule)
PACKS: tuple[Pack, ...] = get_args(words.Pack)
GRAPHS: tuple[Graphs, ...] = get_args(words.Graphs)
CAPTURES: tuple[Capture, ...] = get_args(words.Capture)
HEADS: tuple[HeadName, ...] = get_args(words.HeadName)
LORAS: tuple[Lora, ...] = get_args(words.Lora)
READINGS: tuple[Reading, ...] = get_args(words.Reading)
FORMATS: tuple[Format, ...] = get_args(words.Format)
SHOWN: tuple[Shown, ...] = get_args(words.Shown)

RANDOM = "random"
"""Value of `checkpoint` that asks for weights made from the seed."""
LARGEST_MAX_LENGTH = 16_384

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


@dataclass(kw_only=True)
class TokensConfig:
    control: Reading = "plain"
    """What a control token typed inside a state or a question becomes: `plain` text pieces, or the `special` id."""

    def __post_init__(self) -> None:
        one_of("tokens.control", self.control, READINGS)


@dataclass(kw_only=True)
class LettersConfig:
    system_message: str | None = None
    """File with the system message in front of every prompt of `head=letters`; not part of this project."""

    def __post_init__(self) -> None:
        self.system_message = path_of("letters.system_message", self.system_message, "file")


@dataclass(kw_only=True)
class MemoryConfig:
    question_snapshots: int = 16
    """Question snapshots alive at once; a request with more questions runs in waves."""
    limit_gib: float | None = None
    """Device memory the engine may use, weights included. A request that cannot fit is refused with the figures."""
    graphs_gib: float = 0.25
    """Device memory for captured graphs beside the activations they share; the least recently used ones go first."""

    def __post_init__(self) -> None:
        within("memory.question_snapshots", self.question_snapshots, 1, 4_096)
        if self.limit_gib is not None:
            positive("memory.limit_gib", self.limit_gib)
        positive("memory.graphs_gib", self.graphs_gib)


@dataclass(kw_only=True)
class EngineConfig:
    """Everything that is fixed for an engine's life. Raises ConfigError on a value that can never work.

    A group may be a mapping of its options, a folder a path, and `device` a `torch.device`.
    """

    model: Model = "tiny"
    """Size of the backbone. `tiny` needs no weights; the others are Qwen3.5-4B, Qwen3.5-9B and Qwen3.8-27B,
    whose names on Hugging Face (`Qwen/Qwen3.5-9B`) stand for the size and its weights."""
    checkpoint: str | None = None
    """Folder of a Hugging Face model, an Open-Jev package, its merged export or a Cua-S1 adapter, told apart by
    content; a name on Hugging Face (ORG/NAME) that is in its cache; or `random` for weights made from `seed`. `tiny`
    makes its own when none is given."""
    base: str | None = None
    """Hugging Face folder with the base weights, for a checkpoint that holds none of its own."""
    check_ids: bool = True
    """Accept published packages only, by their ids and settings. `false` takes a checkpoint of your own."""
    lora: Lora = "merged"
    """`merged` into the weights in float32, rounded once; `unmerged` multiplies it beside them, to compare."""
    tokenizer: str | None = None
    """Folder with a tokenizer.json. Without one: the checkpoint's, and for `checkpoint=random` that of `tiny`."""
    seed: int = 0
    """Decides random and tiny weights, nothing else."""
    device: str = "auto"
    """`cpu`, `cuda` or `cuda:N`. `auto`: the first GPU where there is one."""
    dtype: Dtype = "auto"
    """Storage of weights and activations. `auto`: bfloat16, but float32 for `tiny` on a CPU."""
    split: Split = "exact"
    """Where a shared prefix may end: at any token, or at multiples of 64. The bits are the same."""
    gemm: Gemm = "auto"
    """How a projection is multiplied. `fixed`: one tile for any number of rows. `tuned`: the fastest with its bits on
    this GPU. `default`: what the library picks, without the promise. `auto`: `tuned` on a GPU, else `fixed`."""
    schedule: Schedule = "auto"
    """How a request becomes passes. `independent`: each candidate whole and alone. `batched`: whole, packed. `levels`:
    prefix, questions, branches. `tree`: all unique rows at once. `auto`: the fastest, by rows. The bits are
    the same."""
    pack: Pack = "all"
    """`one` runs branches one by one, to measure reuse alone."""
    graphs: Graphs = "auto"
    """`eager`: operators one by one. `compiled`: torch.compile per layer. `captured`: replayed from CUDA graphs.
    `auto`: `captured` on a GPU, else `eager`."""
    capture: Capture = "answer"
    """When a CUDA graph that was missing is captured. A device-wide synchronise anywhere in the process breaks a
    capture, and is broken by it. `answer`: before the answer is handed over. `load`: while loading alone. `idle`: when
    nothing waits, in a process that is ours alone."""
    head: HeadName = "auto"
    """`auto`: what the checkpoint was trained with. `scalar` is a trained one, `yes_minus_no` needs no training, and
    `letters` lists all options in one prompt (Cua-S1)."""
    max_length: int = 4_096
    """Tokens of the longest prompt accepted; nothing is ever cut."""
    warmup: WarmUp = field(default_factory=list)
    """Row counts to capture graphs for while loading, or `all` there are; others are captured as `capture` says."""
    nvtx: bool = False
    """Emit NVTX ranges in the domain `forkgraph`, for a profiler that watches this process."""
    cache_dir: str | None = None
    """Where tiny checkpoints, tuned products and passed self-tests are kept. Without one: `forkgraph` in the user's
    cache folder."""
    tokens: TokensConfig = field(default_factory=TokensConfig)
    letters: LettersConfig = field(default_factory=LettersConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)

    def __post_init__(self) -> None:
        self._take_names()
        one_of("model", self.model, MODELS)
        one_of("dtype", self.dtype, DTYPES)
        one_of("split", self.split, SPLITS)
        one_of("schedule", self.schedule, SCHEDULES)
        one_of("pack", self.pack, PACKS)
        one_of("head", self.head, HEADS)
        one_of("lora", self.lora, LORAS)
        one_of("gemm", self.gemm, GEMMS)
        one_of("graphs", self.graphs, GRAPHS)
        one_of("capture", self.capture, CAPTURES)
        self.device = _device(self.device)
        for name in ("check_ids", "nvtx"):
            flag(name, getattr(self, name))
        within("seed", self.seed, 0, 2**63 - 1)
        within("max_length", self.max_length, 1, LARGEST_MAX_LENGTH)
        self.warmup = _warmup(self.warmup)
        for name in ("checkpoint", "base", "tokenizer", "cache_dir"):
            setattr(self, name, path_of(name, getattr(self, name)))
        self.tokens = group_of("tokens", self.tokens, TokensConfig)
        self.letters = group_of("letters", self.letters, LettersConfig)
        self.memory = group_of("memory", self.memory, MemoryConfig)
        if self.lora == "unmerged" and self.memory.limit_gib is not None:
            raise ConfigError(
                "memory.limit_gib counts no products beside the weights; leave it out with lora=unmerged, or merge"
            )
        if self.pack == "one" and self.schedule in ("batched", "tree"):
            raise ConfigError(
                f"pack=one runs branches one by one, which contradicts schedule={self.schedule}; use schedule=levels"
            )

    def _take_names(self) -> None:
        """A published name as `model` stands for its size and, without another checkpoint, for its weights."""
        if isinstance(self.model, str) and "/" in self.model:
            if self.model not in SIZES:
                names = f"{', '.join(SIZES)}{nearest(self.model, SIZES)}; other weights are named by checkpoint="
                raise ConfigError(f"model={self.model} is not one of {', '.join(MODELS)}, {names}")
            if self.checkpoint is None:
                self.checkpoint = self.model
            self.model = SIZES[self.model]
        elif self.model == "tiny" and isinstance(self.checkpoint, str):
            self.model = SIZES.get(self.checkpoint, self.model)


def _device(device: str | torch.device) -> str:
    if not isinstance(device, str):
        import torch  # seconds, and a command line has none of its devices

        device = str(device) if isinstance(device, torch.device) else device
    if not isinstance(device, str):
        remedy = f"; use device='cuda:{device}'" if isinstance(device, int) and not isinstance(device, bool) else ""
        raise ConfigError(f"device={shown(device)} is not the name of a device{remedy}")
    if not _DEVICE.fullmatch(device):
        raise ConfigError(f"device={device} is not one of auto, cpu, cuda, cuda:N{nearest(device, ('cpu', 'cuda'))}")
    return device


def _warmup(warmup: WarmUp) -> WarmUp:
    if isinstance(warmup, Sequence):
        if warmup == "all":
            return warmup
        if not isinstance(warmup, str):
            for rows in warmup:
                within("warmup", rows, 1, LARGEST_MAX_LENGTH)
            return list(warmup)
    raise ConfigError(f"warmup={shown(warmup)} is neither a list of row counts nor the word all")


@dataclass(kw_only=True)
class ScoreConfig(EngineConfig):
    """`forkgraph score`."""

    request: str | None = None
    """A .json request, a .jsonl or .parquet file with many, `-` for one request on standard input, or `example:NAME`.
    Without one: `example:support_ticket`."""
    questions: str | None = None
    """JSON file with the questions that are asked of each `state` in a .parquet request."""
    out: str | None = None
    """File for the answers; without one they go to standard output."""
    overwrite: bool = False
    """Replace a file that `out` names. Without it many requests go on where they stopped, and others are refused."""
    retry_failed: bool = False
    """Try again what an earlier run has an error row for."""
    format: Shown = "auto"
    """What one request shows. `both`: the table goes to standard error. `auto`: on a terminal the table alone, else
    both."""
    progress: bool = True
    """Draw a progress bar for many requests on a terminal."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("request", "questions", "out"):
            setattr(self, name, path_of(name, getattr(self, name), "file"))
        one_of("format", self.format, SHOWN)


@dataclass(kw_only=True)
class ExplainConfig(EngineConfig):
    """`forkgraph explain`."""

    request: str | None = None
    """A .json request, `-` for one on standard input, or `example:NAME`."""
    format: Format = "text"
    """A drawing for reading, or all figures."""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("format", self.format, FORMATS)


Config = TypeVar("Config", bound=EngineConfig)


def configured(config: EngineConfig | Mapping[str, Any] | None, given: Mapping[str, Any]) -> EngineConfig:
    """`config`, or its mapping (OmegaConf's too), or the defaults, with `given` in place of what it says.

    Raises ConfigError for anything else, and for an option that is none.
    """
    names = [f.name for f in fields(EngineConfig)]
    if config is None:
        config = {}
    if isinstance(config, Mapping):
        members = members_of("config", config)
        refuse_unknown(members, names)
        refuse_unknown(given, names)
        return EngineConfig(**(members | dict(given)))
    if not isinstance(config, EngineConfig):
        remedy = "options go by name, as in Engine.load(model='tiny')"
        raise ConfigError(f"config={shown(config)} is neither an EngineConfig nor a mapping of options; {remedy}")
    refuse_unknown(given, [f.name for f in fields(config)])
    return replace(config, **given)


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
    dtype: Dtype = ("float32" if small else "bfloat16") if config.dtype == "auto" else config.dtype
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
        cache_dir=None if config.cache_dir is None else str(expanded("cache_dir", config.cache_dir)),
    )


def cache_folder(config: EngineConfig) -> Path:
    """`cache_dir`, or the user's own. Raises ConfigError where neither is given."""
    return default_cache_dir() if config.cache_dir is None else expanded("cache_dir", config.cache_dir)


def dtype_bytes(dtype: str) -> int:
    """Bytes of an element of a resolved `dtype`."""
    return {"bfloat16": 2, "float32": 4}[dtype]


def default_cache_dir() -> Path:
    """`forkgraph` in the cache folder of this platform's user. Raises ConfigError for a user without a home."""
    with suppress(RuntimeError):  # of a newer platformdirs; an older one leaves the `~`
        folder = platformdirs.user_cache_path("forkgraph", appauthor=False)
        if folder.is_absolute():
            return folder
    raise ConfigError("this user has no home folder to keep files in; give cache_dir=FOLDER")


def _resolve_folder(name: str, value: str | None) -> str | None:
    return None if value is None else str(existing_folder(f"{name}={value}", value))


def _resolve_schedule(schedule: Schedule, pack: Pack, device: str) -> Schedule:
    if schedule == "auto" and (device == "cpu" or pack == "one"):
        return "levels"
    return schedule


def _resolve_gemm(gemm: Gemm, device: str, dtype: Dtype) -> Gemm:
    tunable = device != "cpu" and dtype == "bfloat16"
    if gemm == "auto":
        return "tuned" if tunable else "fixed"
    if gemm == "tuned" and not tunable:
        raise ConfigError(
            "gemm=tuned chooses among bfloat16 products of a CUDA device; use gemm=fixed, which has the same bits"
        )
    return gemm


def _resolve_graphs(graphs: Graphs, device: str) -> Graphs:
    if device == "cpu" and graphs == "captured":
        raise ConfigError("graphs=captured needs a CUDA device; use graphs=eager or graphs=compiled")
    if graphs == "auto":
        return "eager" if device == "cpu" else "captured"
    return graphs


def _resolve_device(device: str) -> str:
    if device == "cpu":
        return device
    import torch

    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        return "cuda:0" if available else "cpu"
    index = int(device.partition(":")[2] or 0)
    if index >= available:
        found = f"{available} CUDA devices are" if available > 1 else f"{'one' if available else 'no'} CUDA device is"
        raise ConfigError(f"device={device}: {found} visible; use device=" + ("cuda:0" if available else "cpu"))
    return f"cuda:{index}"
