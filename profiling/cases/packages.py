"""Real sizes from files: a base folder and a LoRA adapter with random weights are written, loaded and compared.

Loading is timed with the files in the page cache. Device memory may rise above the weights by one layer; anonymous host
memory, looked at behind each layer, by 2 GiB. What was loaded must give the bits of the same weights made on the
device, merged or not.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from bench_options import BenchConfig
from floors import DTYPE
from forwards import executor_of, last_rows, plan_of, random_ids
from huggingface_hub import save_torch_state_dict
from peers import text_config
from record import Record, number, progress
from safetensors.torch import save_file
from torch import Tensor

from cases import Case, column
from engine.config import RANDOM, resolve
from engine.load.checkpoint import HEAD, RandomWeights, expected_tensors, open_checkpoint
from engine.load.dimensions import DIMENSIONS, ModelDimensions
from engine.load.lora import SETTINGS, VALUES, Adapter, open_adapter
from engine.load.tiny import tiny_config
from engine.load.weights import TensorOf, load_weights
from engine.prompt import Prompt

RANK, ALPHA = 8, 16
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "out_proj")
LENGTHS = (1, 64, 129, 700)
MOST_SECONDS, MOST_HOST_BYTES = 10.0, 2 << 30


def write_base(
    folder: Path, dimensions: ModelDimensions, device: torch.device, *, seed: int = 0, shard_bytes: int = 4 << 30
) -> None:
    """A sharded Hugging Face folder in bfloat16, its language-model head included; no tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(text_config(dimensions).to_dict(), indent=2))
    source = RandomWeights(dimensions, seed=seed, dtype=DTYPE, device=device)
    tensors = {f"model.{name}": source.tensor(name).cpu() for name in source.names}
    if not dimensions.tie_word_embeddings:
        tensors[HEAD] = torch.zeros(dimensions.vocab_size, dimensions.hidden_size, dtype=DTYPE)
    save_torch_state_dict(tensors, folder, max_shard_size=shard_bytes)
    progress(f"wrote {folder}")


def write_adapter(folder: Path, dimensions: ModelDimensions) -> None:
    """Over the modules that Open-Jev's published adapters cover."""
    folder.mkdir(parents=True, exist_ok=True)
    generator, factors = torch.Generator().manual_seed(0), {}
    for name, spec in expected_tensors(dimensions).items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in ADAPTED:
            rows, inputs = spec.shape
            place = f"base_model.model.{module}"
            factors[f"{place}.lora_A.weight"] = inputs**-0.5 * torch.randn(RANK, inputs, generator=generator)
            factors[f"{place}.lora_B.weight"] = 0.02 * RANK**-0.5 * torch.randn(rows, RANK, generator=generator)
    save_file(factors, folder / VALUES)
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(ADAPTED), "bias": "none"}
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2))


def anonymous_bytes() -> int:
    """Host memory of this process that is no mapped file."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon"))
    return int(line.split()[1]) << 10


def loaded(
    source: TensorOf, dimensions: ModelDimensions, device: torch.device, *, beside: Adapter | None = None
) -> tuple[float, dict[str, int], Tensor]:
    """Seconds, bytes above what was there before, and the hidden states [prompts, h] of LENGTHS prompts."""
    cuda, before = device.type == "cuda", 0
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    start, host_before, host = time.perf_counter(), anonymous_bytes(), [0]
    weights = load_weights(
        source, dimensions, dtype=DTYPE, device=device, positions=max(LENGTHS), adapter=beside,
        progress=lambda done, layers: host.append(anonymous_bytes() - host_before),
    )  # fmt: skip
    if cuda:
        torch.cuda.synchronize(device)
    seconds, took = time.perf_counter() - start, {"host_bytes": max(host)}
    took["weight_bytes"] = torch.cuda.memory_allocated(device) - before if cuda else 0
    took["excess_bytes"] = torch.cuda.max_memory_allocated(device) - before - took["weight_bytes"] if cuda else 0
    rng = np.random.default_rng(0)
    prompts = [Prompt(random_ids(rng, length, dimensions.vocab_size)) for length in LENGTHS]
    hidden, _ = last_rows(executor_of(weights, dimensions, "fixed", "eager"), plan_of([prompts], "independent"))
    return seconds, took, hidden


def loads(folder: Path, dimensions: ModelDimensions, device: torch.device) -> Iterator[Record]:
    """A record for each way. What came from files must have the bits of what was made, and keep the bounds."""
    made = RandomWeights(dimensions, seed=0, dtype=DTYPE, device=device)
    files, adapter = open_checkpoint(folder / "base"), open_adapter(folder / "adapter", dimensions)
    ways: dict[str, tuple[TensorOf, Adapter | None, str | None]] = {
        "base made": (made.tensor, None, None),
        "base from files": (files.tensor, None, "base made"),
        "merged, made": (adapter.merged(made.tensor, device), None, "base made"),
        "merged from files": (adapter.merged(files.tensor, device), None, "merged, made"),
        "adapter beside, from files": (files.tensor, adapter, "merged from files"),
    }
    hidden: dict[str, Tensor] = {}
    layer_bytes = dimensions.weight_bytes(DTYPE.itemsize).layers // dimensions.num_hidden_layers
    for name, (source, beside, other) in ways.items():
        seconds, took, hidden[name] = loaded(source, dimensions, device, beside=beside)
        apart = None if other is None else distance(hidden[name], hidden[other])
        same_bits = other is None or beside is not None or torch.equal(hidden[name], hidden[other])
        bounds = {
            f"other bits than {other}": same_bits,
            f"more than {MOST_SECONDS:g} s": name != "base from files" or seconds <= MOST_SECONDS,
            "more than a layer above the weights": took["excess_bytes"] <= layer_bytes,
            "more than 2 GiB of host memory": took["host_bytes"] <= MOST_HOST_BYTES,
        }
        failed = [text for text, kept in bounds.items() if not kept] if name.endswith("files") else []
        yield Record(
            case="packages", name=name, samples_us=[seconds * 1e6], failed=", ".join(failed),
            configuration=took | {"layer_bytes": layer_bytes, "compared": other, "distance": apart},
        )  # fmt: skip


def distance(x: Tensor, reference: Tensor) -> float:
    return float((x.double() - reference.double()).norm() / reference.double().norm())


def measure(config: BenchConfig) -> Iterator[Record]:
    device = torch.device(resolve(replace(config, checkpoint=RANDOM)).device)
    dimensions = DIMENSIONS.get(config.model) or ModelDimensions.from_config(tiny_config())
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(config.folder or scratch)
        write_base(folder / "base", dimensions, device)
        write_adapter(folder / "adapter", dimensions)
        for record in loads(folder, dimensions, device):
            record.configuration["model"] = config.model
            yield record


CASE = Case(
    measure=measure,
    figures={
        "weights": lambda r: r.name,
        "s": lambda r: number(r.us / 1e6, 1),
        "GiB": lambda r: number(r.configuration["weight_bytes"] / 2**30),
        "above, MiB": lambda r: number(r.configuration["excess_bytes"] / 2**20, 0),
        "host, MiB": lambda r: number(r.configuration["host_bytes"] / 2**20, 0),
        "compared with": column("compared"),
        "relative L2": lambda r: number(r.configuration["distance"], 5),
    },
)
