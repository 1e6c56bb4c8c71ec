"""Options as a type checker sees them: the words that each may be, and what `Engine.load` and `Engine.like` take.

`engine/config.py` owns defaults, meanings and checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    import torch

    from engine.config import LettersConfig, MemoryConfig, TokensConfig

Model = Literal["tiny", "4b", "9b", "27b"]
Dtype = Literal["auto", "bfloat16", "float32"]
Split = Literal["exact", "aligned"]
Gemm = Literal["auto", "default", "fixed", "tuned"]
Schedule = Literal["auto", "independent", "batched", "levels", "tree"]
Pack = Literal["all", "one"]
Graphs = Literal["auto", "eager", "compiled", "captured"]
Capture = Literal["answer", "load", "idle"]
HeadName = Literal["auto", "scalar", "yes_minus_no", "letters"]
Lora = Literal["merged", "unmerged"]
Reading = Literal["plain", "special"]
Format = Literal["text", "json"]
Shown = Literal["auto", "json", "table", "both"]
WarmUp = list[int] | Literal["all"]


class RunOptions(TypedDict, total=False):
    """What `Engine.like` may change: everything else belongs to the weights."""

    split: Split
    gemm: Gemm
    schedule: Schedule
    pack: Pack
    graphs: Graphs
    capture: Capture


class EngineOptions(RunOptions, total=False):
    """The fields of `EngineConfig`. Groups may be mappings, folders paths, and the device one of torch's."""

    model: Model
    checkpoint: str | PathLike[str] | None
    base: str | PathLike[str] | None
    check_ids: bool
    lora: Lora
    tokenizer: str | PathLike[str] | None
    seed: int
    device: str | torch.device
    dtype: Dtype
    head: HeadName
    max_length: int
    warmup: WarmUp
    nvtx: bool
    cache_dir: str | PathLike[str] | None
    tokens: TokensConfig | Mapping[str, Any]
    letters: LettersConfig | Mapping[str, Any]
    memory: MemoryConfig | Mapping[str, Any]
