"""Prompts of random tokens, an engine to run them, and executors over its weights: what several cases share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from record import progress
from torch import Tensor

from engine.config import RANDOM, EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError
from engine.load.dimensions import ModelDimensions
from engine.load.tensors import Weights
from engine.plan.layout import Split, build_layout, independent_layout
from engine.plan.schedule import Limits, Plan, plan_passes
from engine.prompt import Prompt
from engine.run.executor import Executor
from engine.run.model import Backbone, Linear
from engine.statistics import Counters
from ops.linear import linear_default, linear_fixed
from ops.linear_tuned import linear_tuned
from ops.tables import MAX_ROWS

CAPTURE_LIMIT = 2 << 30
HANDLES: dict[str, Linear] = {"default": linear_default, "fixed": linear_fixed, "tuned": linear_tuned}
Questions = list[list[Prompt]]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One question of `candidates` prompts that share `prefix` tokens and go on for `length` of their own."""

    prefix: int
    candidates: int
    length: int

    @classmethod
    def parse(cls, text: str) -> Workload:
        """`3136`, or `278+8x34`. Raises ConfigError."""
        found = re.fullmatch(r"(?:([1-9]\d*)\+([1-9]\d*)x)?([1-9]\d*)", text)
        if found is None:
            raise ConfigError(f"workloads={text} is neither TOKENS nor PREFIX+CANDIDATESxTOKENS")
        prefix, candidates, length = found.groups()
        return cls(prefix=int(prefix or 0), candidates=int(candidates or 1), length=int(length))

    @property
    def name(self) -> str:
        return f"{self.prefix}+{self.candidates}x{self.length}" if self.prefix else str(self.length)

    @property
    def own_rows(self) -> int:
        """Of all candidates, the prefix not counted."""
        return self.candidates * self.length

    @property
    def unique_rows(self) -> int:
        return self.prefix + self.own_rows

    def prompts(self, vocabulary: int) -> list[Prompt]:
        rng = np.random.default_rng(self.prefix + self.length)
        head = random_ids(rng, self.prefix, vocabulary)
        return siblings(rng, [head], (self.length,) * self.candidates, vocabulary)

    def candidates_run(self, schedule: str, few: int) -> int:
        """Of how many candidates `schedule` is measured."""
        if schedule == "independent":
            return min(self.candidates, few)
        if schedule == "batched":  # about a full pass
            return min(self.candidates, max(few, MAX_ROWS // (self.prefix + self.length)))
        return self.candidates


def random_ids(rng: np.random.Generator, length: int, vocabulary: int) -> np.ndarray:
    return rng.integers(0, vocabulary, length, dtype=np.int32)


def siblings(
    rng: np.random.Generator, heads: Sequence[np.ndarray], lengths: Sequence[int], vocabulary: int
) -> list[Prompt]:
    """Prompts that share `heads` and part right after them: the first token of each branch is its own."""
    prompts = []
    for i, length in enumerate(lengths):
        branch = random_ids(rng, length, vocabulary)
        branch[0] = i
        prompts.append(Prompt(np.concatenate([*heads, branch])))
    return prompts


def loaded(config: EngineConfig, **changes: Any) -> Engine:
    """An engine with the engine's options of `config`; weights are made from the seed unless `checkpoint` names some.

    Loading it prepares the products of `gemm=tuned` for whatever else runs over its weights.
    """
    options = {f.name: getattr(config, f.name) for f in fields(EngineConfig)}
    options |= {"checkpoint": config.checkpoint or RANDOM} | changes

    def report(done: int, steps: int) -> None:
        if done % 8 == 0 or done == steps:
            progress(f"loading {config.model}: {done} of {steps}")

    return Engine.load(EngineConfig(**options), progress=report)


def on_device(engine: Engine) -> AbstractContextManager[object]:
    """What runs beside an engine runs on its device."""
    return nullcontext() if engine.config.device == "cpu" else torch.cuda.device(engine.config.device)


def executor_of(weights: Weights, dimensions: ModelDimensions, gemm: str, graphs: str) -> Executor:
    """An executor beside an engine, whose products must be prepared for `tuned`. Release it in the end."""
    backbone = Backbone(weights, dimensions, HANDLES[gemm], compile_layers=graphs == "compiled")
    return Executor(backbone, capture_limit_bytes=CAPTURE_LIMIT if graphs == "captured" else 0)


def plan_of(questions: Questions, schedule: str, split: Split = "exact") -> Plan:
    """Raises CapacityError for a tree that is larger than a pass."""
    whole = schedule in ("independent", "batched")
    layout = independent_layout(questions) if whole else build_layout(questions, split)
    return plan_passes(layout, schedule=schedule, pack="all", limits=Limits())


def last_rows(executor: Executor, plan: Plan) -> tuple[Tensor, Counters]:
    """Hidden state of every prompt's last row, [prompts, h] in prompt order."""
    hidden, counters = executor.run(plan)
    return hidden[[places[-1] for places in plan.reads_of_prompt]], counters


def num_equal(a: Tensor, b: Tensor) -> int:
    """Rows of `a` [n, h] that are those of `b`, bit for bit; a NaN equals nothing."""
    return sum(torch.equal(x, y) for x, y in zip(a, b, strict=True))
