"""What `Engine.load` and `Engine.like` take, as a type checker sees it; the words of each are in `engine.words`.

`engine/config.py` owns defaults, meanings and checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any, TypedDict

from engine.words import Capture, Dtype, Gemm, Graphs, HeadName, Lora, Model, Pack, Schedule, Split, WarmUp

if TYPE_CHECKING:
    import torch

    from engine.config import LettersConfig, MemoryConfig, TokensConfig


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
