"""What an engine is made of: weights, a processor and an executor. Runs on the thread that owns the device."""

from __future__ import annotations

import traceback
from dataclasses import replace
from typing import TypedDict

import numpy as np
import torch

from engine.config import EngineConfig, cache_folder
from engine.errors import ConfigError, InferenceError
from engine.load.dimensions import ModelDimensions
from engine.load.environment import explain_failure
from engine.load.opening import open_model
from engine.load.projections import projection_shapes
from engine.load.tensors import Weights
from engine.load.weights import load_weights
from engine.plan.planning import Planner
from engine.prompt import Prompt
from engine.run.device import Client, Progress
from engine.run.executor import Executor
from engine.run.model import Backbone
from engine.wire.answers import Provenance
from engine.wire.processor import Processor
from graphs.examine import LayerSizes
from graphs.rungs import COVERING, rung
from graphs.selftest import SelfTestError, self_test
from graphs.tuning.tuner import UnknownEnvironmentError, prepare
from ops.linear import linear_default, linear_fixed
from ops.linear_tuned import linear_tuned

_HANDLES = {"default": linear_default, "fixed": linear_fixed, "tuned": linear_tuned}
_WARM_UP = [[Prompt(np.r_[np.zeros(70 + 5 * q, np.int32), np.full(3, c, np.int32)]) for c in (1, 2)] for q in (0, 1)]
"""Two questions with two candidates each: every kind of pass."""
RUN_OPTIONS = ("split", "gemm", "schedule", "pack", "graphs", "capture")
"""What engines over the same weights may differ in."""


class Parts(TypedDict):
    """What `Engine` takes beside its options."""

    weights: Weights
    dimensions: ModelDimensions
    processor: Processor
    provenance: Provenance


def load_parts(config: EngineConfig, client: Client, progress: Progress) -> Parts:
    """Open what `config`, which must be resolved, names, and put its weights on the device.

    Raises ConfigError and CheckpointError as `open_model`, CapacityError where the weights fit no limit.
    """
    device, dtype = torch.device(config.device), getattr(torch, config.dtype)
    with open_model(config, dtype, device) as model:
        Planner(config, model.dimensions).check_least(others=client.owner.bytes_beside(client))
        weights = load_weights(
            model.tensor, model.dimensions, dtype=dtype, device=device, positions=config.max_length, progress=progress,
            adapter=model.beside,
        )  # fmt: skip
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # so that any stream may read them
    return Parts(
        weights=weights,
        dimensions=model.dimensions,
        processor=model.processor,
        provenance=ran_with(config, model.provenance),
    )


def make_executor(
    config: EngineConfig,
    weights: Weights,
    dimensions: ModelDimensions,
    made: torch.cuda.Event | None,
    progress: Progress,
) -> Executor:
    """The executor over weights that are there once the event `made` has happened.

    Raises ConfigError where kernels or products cannot be believed, InferenceError where kernels cannot be run.
    """
    if made is not None:
        torch.cuda.current_stream().wait_event(made)
    if torch.device(config.device).type == "cuda" and config.dtype == "bfloat16":
        check_kernels(config, dimensions)
    if config.gemm == "tuned":
        try:
            prepare(
                projection_shapes(dimensions), device=torch.device(config.device), cache_dir=cache_folder(config),
                progress=progress,
            )  # fmt: skip
        except UnknownEnvironmentError as error:
            raise ConfigError(f"gemm=tuned cannot be believed here: {error}; use gemm=fixed") from None
    backbone = Backbone(weights, dimensions, _HANDLES[config.gemm], compile_layers=config.graphs == "compiled")
    graphs_bytes = int(config.memory.graphs_gib * 2**30) if config.graphs == "captured" else 0
    return Executor(backbone, capture_limit_bytes=graphs_bytes)


def check_kernels(config: EngineConfig, d: ModelDimensions) -> None:
    """Raises ConfigError for a kernel that is wrong here, InferenceError for one that cannot be run."""
    sizes = LayerSizes(
        hidden_size=d.hidden_size,
        intermediate_size=d.intermediate_size,
        gdn_proj=d.gdn_proj,
        key_heads=d.linear_num_key_heads,
        value_heads=d.linear_num_value_heads,
        key_dim=d.linear_key_head_dim,
        value_dim=d.linear_value_head_dim,
        heads=d.num_attention_heads,
        kv_heads=d.num_key_value_heads,
        head_dim=d.head_dim,
        rotary_dim=d.rotary_dim,
    )
    folder = cache_folder(config)
    try:
        self_test(sizes, device=torch.device(config.device), cache_dir=folder)
    except SelfTestError as error:
        raise ConfigError(str(error)) from None
    except Exception as error:
        traceback.clear_frames(error.__traceback__)  # they hold what the test had allocated
        told = explain_failure(error) or f"{type(error).__name__}: {error}"
        raise InferenceError(f"the self-test of the kernels failed: {told}") from error


def warm_up(config: EngineConfig, planner: Planner, executor: Executor, progress: Progress) -> None:
    """Run every kind of pass once, which compiles all there is, and capture the graphs that `warmup` names."""
    for _, plan in planner.options(_WARM_UP):
        executor.run(plan)
    if config.graphs != "captured":
        return
    if config.capture == "load":
        executor.seal(planner.largest_buffers())
    else:
        executor.capture_missed()
    keys = COVERING if config.warmup == "all" else [(rung(rows), rung(1)) for rows in config.warmup]
    executor.capture_keys(keys, longest=config.max_length, progress=progress)


def ran_with(config: EngineConfig, provenance: Provenance) -> Provenance:
    """`provenance` with the run options of this engine."""
    run = {name: getattr(config, name) for name in RUN_OPTIONS}
    return replace(provenance, extra={**provenance.extra, **run})
