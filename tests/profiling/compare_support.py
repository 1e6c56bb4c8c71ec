"""A comparison on a tiny model: two small requests, a peer that is not transformers, and what a run left."""

from __future__ import annotations

import io
import json
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "profiling"))  # scripts, not a package

import arms
import compare
from compare_journal import Cell
from compare_options import CompareConfig, GatesConfig

from engine import Engine
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.load.dimensions import ModelDimensions
from engine.load.tensors import Weights
from tests.engine.engine_support import cache_dir, choice, loaded

FAST = ["base", "independent", "tree", "aligned", "plain", "transformers/torch/one"]


@dataclass(frozen=True, kw_only=True)
class FakeWorkload:
    name: str
    set: str
    body: dict[str, Any]
    sha256: str
    candidates: int = 0


SHARED = {
    "state": "The second invoice was paid twice.",
    "questions": {"team": choice("billing", "sales", "legal"), "sure": {"type": "noul", "instructions": "Is it?"}},
}
SINGLE = {"state": "Paid.", "questions": {"refund": {"type": "noul", "instructions": "Is a refund due?"}}}
WORKLOADS = [
    FakeWorkload(name="m1/two", set="m1", body=SHARED, sha256="a1"),
    FakeWorkload(name="m4/one", set="m4", body=SINGLE, sha256="b2"),
]
CELL = Cell(
    pass_number=0, request="r", sha256="", arm="base", status="run", candidates=1, candidates_run=1, logical_tokens=1,
    seconds=3.0,
)  # fmt: skip
LENIENT = {"gates": GatesConfig(speedup=0.001, speedup_candidates=4, speedup_prefix_tokens=1, m4_slower=1e6)}
"""Limits that the times of a busy machine cannot fail."""


@dataclass
class Run:
    code: int
    out: str
    err: str
    folder: Path

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "cells.jsonl").read_text().splitlines()]

    @property
    def cells(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["kind"] == "cell"]

    @property
    def summary(self) -> str:
        return (self.folder / "summary.md").read_text()


@cache
def owner() -> Engine:
    return loaded()


def load(config: EngineConfig) -> AbstractContextManager[Engine]:
    """The same engine for every run that does not ask for another."""
    return nullcontext(owner())


class FakePeer:
    """In place of transformers, which takes seconds to import: the first engine that runs, a little off."""

    def __init__(self, weights: Weights, dimensions: ModelDimensions, *, path: str, way: str) -> None:
        if path == "fla":
            raise ConfigError("path=fla needs a CUDA device")
        self.capture_seconds: dict[int, float] = {}

    def forward(self, questions: arms.Questions) -> torch.Tensor:
        return torch.cat(owner().forward(questions).hidden) + 1e-5

    def close(self) -> None: ...


PEERS = SimpleNamespace(Peer=FakePeer)


def run(folder: Path, load: Any = load, **options: Any) -> Run:
    defaults = {"device": "cpu", "cache_dir": cache_dir().name, "out": str(folder), "sets": ["m1", "m4"], "arms": FAST}
    config = CompareConfig(**{**defaults, "names": [], "few": {}, **LENIENT, **options})
    out, err = io.StringIO(), io.StringIO()
    code = compare.compare(config, load=load, stdout=out, stderr=err)
    return Run(code, out.getvalue(), err.getvalue(), folder)


def fake(patch: pytest.MonkeyPatch) -> None:
    """The requests, the environment and the peers of a run."""
    patch.setattr(compare, "workloads", lambda sets, *, jevbench: [w for w in WORKLOADS if w.set in sets])
    patch.setattr(compare, "environment", lambda: {"git": "one", "causal_conv1d": None})
    patch.setitem(sys.modules, "peers", PEERS)
