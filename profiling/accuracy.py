"""How far bfloat16 moves hidden states: the engine and transformers with FLA, each against the float32 forward.

The reference is the engine in float32 over the same bfloat16 weights, itself compared with transformers in float32.
Prompts of random tokens, one forward each; the relative L2 distance is taken over up to 256 rows of a prompt, evenly
spaced, its last one among them. What counts is the ratio of the two distances, prompt by prompt.

    python profiling/accuracy.py --model 9b --prompts 64
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from cases import DTYPE, positive, print_table, progress, without_cuda
from forward import plan_of, random_ids, random_weights
from measure import Record, Results
from peers import Peer
from torch import Tensor

from engine.config import default_cache_dir
from engine.load.checkpoint import RandomWeights
from engine.load.dimensions import DIMENSIONS, ModelDimensions
from engine.load.projections import projection_shapes
from engine.load.weights import load_weights
from engine.prompt import Prompt
from engine.run.executor import Executor
from engine.run.model import Backbone, Linear, Weights
from graphs.tuning.tuner import prepare
from ops.linear import linear_fixed
from ops.linear_tuned import linear_tuned

SHORTEST, LONGEST = 16, 2_048
ROWS = 256
CROSS_CHECKED = 8
"""Prompts on which the reference itself is compared with transformers in float32."""
MEDIAN, MOST = 1.05, 1.25
"""Bounds on the engine's distance over transformers'."""


def prompts_of(count: int, vocabulary: int) -> list[Prompt]:
    """Random tokens, lengths evenly over the logarithm, with the rows that are compared."""
    rng = np.random.default_rng(count)
    prompts = []
    for length in np.geomspace(SHORTEST, LONGEST, count).round().astype(int).tolist():
        reads = np.unique(np.linspace(0, length - 1, min(length, ROWS)).round().astype(int))
        prompts.append(Prompt(random_ids(rng, length, vocabulary), reads=tuple(reads.tolist())))
    return prompts


def engine_states(
    weights: Weights, dimensions: ModelDimensions, linear: Linear, prompts: Sequence[Prompt]
) -> list[Tensor]:
    """[reads, h] of each prompt on the CPU, each run alone."""
    executor = Executor(Backbone(weights, dimensions, linear))
    return [executor.run(plan_of([[prompt]], "independent"))[0] for prompt in prompts]


def peer_states(weights: Weights, dimensions: ModelDimensions, path: str, prompts: Sequence[Prompt]) -> list[Tensor]:
    peer = Peer(weights, dimensions, path=path, way="one")
    states = [peer.states(prompt) for prompt in prompts]
    peer.close()
    return states


def distances(states: Sequence[Tensor], reference: Sequence[Tensor]) -> np.ndarray:
    """Relative L2 per prompt, in float64."""
    pairs = [(x.double(), y.double()) for x, y in zip(states, reference, strict=True)]
    return np.array([float((x - y).norm() / y.norm()) for x, y in pairs])


def compared(
    weights: Weights, exact: Weights, dimensions: ModelDimensions, linear: Linear, path: str, prompts: Sequence[Prompt]
) -> dict[str, np.ndarray]:
    """Distances to the float32 forward by who is measured, over all rows and over last rows; one per prompt.

    `exact` holds the same values as `weights` in float32. `path` is transformers' delta rule for bfloat16; in float32
    it is its own torch code.
    """
    progress("float32 reference")
    reference = engine_states(exact, dimensions, linear_fixed, prompts)
    some = range(0, len(prompts), max(1, len(prompts) // CROSS_CHECKED))
    theirs32 = peer_states(exact, dimensions, "torch", [prompts[i] for i in some])
    progress("bfloat16: the engine, then transformers")
    ours = engine_states(weights, dimensions, linear, prompts)
    theirs = peer_states(weights, dimensions, path, prompts)
    last = [states[-1:] for states in reference]
    return {
        "engine": distances(ours, reference),
        "transformers": distances(theirs, reference),
        "engine, last row": distances([s[-1:] for s in ours], last),
        "transformers, last row": distances([s[-1:] for s in theirs], last),
        "transformers float32": distances(theirs32, [reference[i] for i in some]),
    }


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description="Compare what bfloat16 costs the engine and transformers with FLA.")
    p.add_argument("--model", choices=tuple(DIMENSIONS), default="9b", help="whose dimensions (%(default)s)")
    p.add_argument("--prompts", type=positive, default=64, help="how many (%(default)s)")
    p.add_argument("--out", type=Path, metavar="FILE", help="append one JSON line with all distances to FILE")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    if without_cuda("accuracy"):
        return 2
    dimensions, device = DIMENSIONS[arguments.model], torch.device("cuda", 0)
    weights = random_weights(dimensions, positions=LONGEST)
    source = RandomWeights(dimensions, seed=0, dtype=DTYPE, device=device)
    exact = load_weights(source.tensor, dimensions, dtype=torch.float32, device=device, positions=LONGEST)
    prepare(projection_shapes(dimensions), device=device, cache_dir=default_cache_dir())
    prompts = prompts_of(arguments.prompts, dimensions.vocab_size)
    found = compared(weights, exact, dimensions, linear_tuned, "fla", prompts)
    ratios = {
        "all rows": found["engine"] / found["transformers"],
        "last row": found["engine, last row"] / found["transformers, last row"],
    }
    print_table(
        ("distance to float32", "median", "largest"),
        [(who, f"{np.median(d):.2e}", f"{d.max():.2e}") for who, d in found.items()],
    )
    print_table(
        ("engine over transformers", "median", "largest"),
        [(rows, f"{np.median(r):.3f}", f"{r.max():.3f}") for rows, r in ratios.items()],
    )
    whole = ratios["all rows"]
    kept = bool(np.median(whole) <= MEDIAN and whole.max() <= MOST)
    if arguments.out is not None:
        configuration = {"model": arguments.model, "checkpoint": "random", "gemm": "tuned", "peer": "fla"}
        configuration |= {"lengths": [len(p) for p in prompts], "median": MEDIAN, "most": MOST, "kept": kept}
        configuration |= {name: values.tolist() for name, values in (found | ratios).items()}
        record = Record(kind="accuracy", name=arguments.model, samples_us=[0.0], configuration=configuration)
        Results(arguments.out).add(record)
    return int(not kept)


if __name__ == "__main__":
    sys.exit(main())
