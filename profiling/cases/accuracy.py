"""How far bfloat16 moves hidden states: the engine and transformers, each against the float32 forward.

The reference is the engine in float32 over the same bfloat16 weights, itself compared with transformers in float32.
Prompts of random tokens, one forward each; the relative L2 distance is taken over up to 256 rows of a prompt, evenly
spaced, its last one among them. What counts is the ratio of the two distances, prompt by prompt. On a GPU transformers
runs flash-linear-attention in bfloat16; in float32, and on a CPU, its own torch code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from bench_options import BenchConfig
from forwards import executor_of, loaded, plan_of, random_ids
from peers import Peer
from record import Record, progress
from torch import Tensor

from cases import Case
from engine.config import RANDOM
from engine.load.dimensions import ModelDimensions
from engine.load.tensors import Weights, rope_table
from engine.prompt import Prompt

SHORTEST, LONGEST = 16, 2_048
ROWS = 256
CROSS_CHECKED = 8
"""Prompts on which the reference itself is compared with transformers in float32."""
BOUNDS = {"median": 1.05, "largest": 1.25}
"""Of the engine's distance over transformers'."""


def prompts_of(count: int, vocabulary: int) -> list[Prompt]:
    """Random tokens, lengths evenly over the logarithm, with the rows that are compared."""
    rng = np.random.default_rng(count)
    prompts = []
    for length in np.geomspace(SHORTEST, LONGEST, count).round().astype(int).tolist():
        reads = np.unique(np.linspace(0, length - 1, min(length, ROWS)).round().astype(int))
        prompts.append(Prompt(random_ids(rng, length, vocabulary), reads=tuple(reads.tolist())))
    return prompts


def states_of(
    weights: Weights, dimensions: ModelDimensions, prompts: Sequence[Prompt], *, gemm: str = "", path: str = ""
) -> list[Tensor]:
    """[reads, h] of each prompt on the CPU, each run alone: by the engine with `gemm`, or transformers on `path`."""
    if gemm:
        executor = executor_of(weights, dimensions, gemm, "eager")
        return [executor.run(plan_of([[prompt]], "independent"))[0] for prompt in prompts]
    peer = Peer(weights, dimensions, path=path, way="one")
    return [peer.states(prompt) for prompt in prompts]


def distances(states: Sequence[Tensor], reference: Sequence[Tensor]) -> np.ndarray:
    """Relative L2 per prompt, in float64."""
    pairs = [(x.double(), y.double()) for x, y in zip(states, reference, strict=True)]
    return np.array([float((x - y).norm() / y.norm()) for x, y in pairs])


def compared(
    weights: Weights, exact: Weights, dimensions: ModelDimensions, gemm: str, path: str, prompts: Sequence[Prompt]
) -> dict[str, np.ndarray]:
    """Distances to the float32 reference, per prompt, by who was measured.

    `exact` holds the same values as `weights` in float32. `path` is transformers' delta rule for bfloat16.
    """
    progress("float32 reference")
    reference = states_of(exact, dimensions, prompts, gemm="fixed")
    some = range(0, len(prompts), max(1, len(prompts) // CROSS_CHECKED))
    theirs32 = states_of(exact, dimensions, [prompts[i] for i in some], path="torch")
    progress("bfloat16: the engine, then transformers")
    ours = states_of(weights, dimensions, prompts, gemm=gemm)
    theirs = states_of(weights, dimensions, prompts, path=path)
    last = [states[-1:] for states in reference]
    return {
        "engine": distances(ours, reference),
        "transformers": distances(theirs, reference),
        "engine, last row": distances([s[-1:] for s in ours], last),
        "transformers, last row": distances([s[-1:] for s in theirs], last),
        "transformers float32": distances(theirs32, [reference[i] for i in some]),
    }


def in_float32(weights: Weights, dimensions: ModelDimensions) -> Weights:
    """The same values, and the rotary table that has not been rounded."""

    def cast(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.float()
        if isinstance(value, tuple):
            return tuple(map(cast, value))
        return replace(value, **{f.name: cast(getattr(value, f.name)) for f in fields(value)}) if value else value

    rope = rope_table(dimensions, len(weights.rope), dtype=torch.float32, device=weights.rope.device)
    exact: Weights = replace(cast(weights), rope=rope)
    return exact


def measure(config: BenchConfig) -> Iterator[Record]:
    with loaded(config, dtype="bfloat16", graphs="eager", max_length=LONGEST) as engine:
        weights, dimensions, gemm = engine.weights, engine.dimensions, engine.config.gemm
        prompts, path = prompts_of(config.prompts, dimensions.vocab_size), "fla" if weights.rope.is_cuda else "torch"
        found = compared(weights, in_float32(weights, dimensions), dimensions, gemm, path, prompts)
    how: dict[str, Any] = {
        "model": config.model, "checkpoint": config.checkpoint or RANDOM, "gemm": gemm, "peer": path,
        "lengths": [len(p) for p in prompts], "rows": ROWS,
    }  # fmt: skip
    for rows in ("", ", last row"):
        found[f"ratio{rows}"] = found[f"engine{rows}"] / found[f"transformers{rows}"]
    for who, values in found.items():
        figures = {"median": float(np.median(values)), "largest": float(values.max())}
        above = [f"{name} {figures[name]:.3f} above {most}" for name, most in BOUNDS.items() if figures[name] > most]
        yield Record(
            case="accuracy", name=f"{config.model}/{who}",
            configuration=how | {"who": who, **figures, "values": values.tolist(), "bounds": BOUNDS},
            failed=", ".join(above) if who == "ratio" else "",
        )  # fmt: skip


CASE = Case(
    measure=measure,
    figures={
        "distance to float32": lambda r: r.configuration["who"],
        "median": lambda r: f"{r.configuration['median']:.3g}",
        "largest": lambda r: f"{r.configuration['largest']:.3g}",
    },
)
