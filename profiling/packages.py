"""Real sizes from files: a base folder and an Open-Jev package with random weights are written, loaded and compared.

Loading is timed with the files in the page cache. Device memory may rise above the weights by one layer, anonymous host
memory by 2 GiB. What was loaded must give the bits of the same weights made on the device, merged or not.

    python profiling/packages.py --model 9b --folder /tmp/package
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from cases import DTYPE, print_table, progress, without_cuda
from forward import last_rows, plan_of, random_ids
from measure import Record, Results
from peers import text_config
from safetensors.torch import save_file
from torch import Tensor

from engine.load.checkpoint import HEAD, INDEX, RandomWeights, expected_tensors, open_checkpoint
from engine.load.dimensions import DIMENSIONS, ModelDimensions
from engine.load.lora import SETTINGS, VALUES, Adapter, open_adapter
from engine.load.package import ADAPTER, MODEL, TEMPERATURE, folder_sha256, read_package
from engine.load.package import HEAD as HEAD_FILE
from engine.load.tensors import Weights
from engine.load.weights import TensorOf, load_weights
from engine.prompt import Prompt
from engine.run.executor import Executor
from engine.run.model import Backbone
from ops.linear import linear_fixed

SHARD_BYTES = 4 << 30
RANK, ALPHA = 8, 16
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "out_proj")
"""Modules that Open-Jev's published adapters cover."""
LENGTHS = (1, 64, 129, 700)
POSITIONS = max(LENGTHS)
MOST_SECONDS, MOST_HOST_BYTES = 10.0, 2 << 30


def write_base(folder: Path, dimensions: ModelDimensions, device: torch.device) -> None:
    """A sharded Hugging Face folder in bfloat16, its language-model head included; no tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(text_config(dimensions).to_dict(), indent=2))
    source = RandomWeights(dimensions, seed=0, dtype=DTYPE, device=device)
    shards: list[dict[str, Tensor]] = [{}]
    index, total = {}, 0

    def flush() -> None:
        file = f"model-{len(index):05d}.safetensors"
        save_file(shards[-1], folder / file, metadata={"format": "pt"})
        index[file] = list(shards[-1])
        progress(f"wrote {file}")

    size = 0
    for name in source.names:
        tensor = source.tensor(name).cpu()
        bytes_of = tensor.numel() * tensor.element_size()
        if size and size + bytes_of > SHARD_BYTES:
            flush()
            shards[-1], size = {}, 0
        shards[-1][f"model.{name}"] = tensor
        size, total = size + bytes_of, total + bytes_of
    if not dimensions.tie_word_embeddings:
        shards[-1][HEAD] = torch.zeros(dimensions.vocab_size, dimensions.hidden_size, dtype=DTYPE)
    flush()
    places = {name: file for file, names in index.items() for name in names}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2))


def write_package(folder: Path, dimensions: ModelDimensions) -> None:
    """An Open-Jev package of no published ids: adapter, head and temperature."""
    adapter = folder / ADAPTER
    adapter.mkdir(parents=True, exist_ok=True)
    generator, factors = torch.Generator().manual_seed(0), {}
    for name, spec in expected_tensors(dimensions).items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in ADAPTED:
            rows, inputs = spec.shape
            place = f"base_model.model.{module}"
            factors[f"{place}.lora_A.weight"] = inputs**-0.5 * torch.randn(RANK, inputs, generator=generator)
            factors[f"{place}.lora_B.weight"] = 0.02 * RANK**-0.5 * torch.randn(rows, RANK, generator=generator)
    save_file(factors, adapter / VALUES)
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(ADAPTED), "bias": "none"}
    (adapter / SETTINGS).write_text(json.dumps(settings, indent=2))
    said = {
        "model_id": "somebody/base",
        "revision": "0" * 40,
        "max_length": 4_096,
        "lora_rank": RANK,
        "method": "independent_candidate_lora_nll_brier",
    }
    (folder / MODEL).write_text(json.dumps(said, indent=2))
    (folder / TEMPERATURE).write_text(json.dumps({"temperature": 1.75, "n": 512}))
    weight = torch.randn(1, dimensions.hidden_size, generator=generator)
    torch.save({"weight": weight, "bias": torch.tensor([0.25])}, folder / HEAD_FILE)


@dataclass(frozen=True, kw_only=True)
class Load:
    """One way to get the weights: seconds, bytes above what was there before, and what they answer."""

    name: str
    seconds: float
    weight_bytes: int
    device_peak_bytes: int
    host_peak_bytes: int
    hidden: Tensor  # [prompts, h]

    @property
    def device_excess(self) -> int:
        return self.device_peak_bytes - self.weight_bytes


@contextmanager
def anonymous_memory() -> Iterator[Callable[[], int]]:
    """Watches this process's anonymous memory (no mapped files); gives the most it rose by, in bytes."""

    def now() -> int:
        line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon"))
        return int(line.split()[1]) << 10

    start, most, done = now(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            most[0] = max(most[0], now() - start)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield lambda: most[0]
    finally:
        done.set()
        watcher.join()


def load(
    name: str, source: TensorOf, dimensions: ModelDimensions, device: torch.device, *, beside: Adapter | None = None
) -> Load:
    """Load, answer LENGTHS prompts one by one, and give the memory back."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    with anonymous_memory() as most:
        weights = load_weights(source, dimensions, dtype=DTYPE, device=device, positions=POSITIONS, adapter=beside)
        torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
        host = most()
    peak = torch.cuda.max_memory_allocated(device) - before
    held = torch.cuda.memory_allocated(device) - before
    hidden = answers(weights, dimensions)
    progress(f"{name}: {seconds:.1f} s")
    return Load(
        name=name, seconds=seconds, weight_bytes=held, device_peak_bytes=peak, host_peak_bytes=host, hidden=hidden
    )


def answers(weights: Weights, dimensions: ModelDimensions) -> Tensor:
    rng = np.random.default_rng(0)
    prompts = [Prompt(random_ids(rng, length, dimensions.vocab_size)) for length in LENGTHS]
    hidden, _ = last_rows(Executor(Backbone(weights, dimensions, linear_fixed)), plan_of([prompts], "independent"))
    return hidden


def loads(base: Path, package: Path, dimensions: ModelDimensions, device: torch.device) -> dict[str, Load]:
    made = RandomWeights(dimensions, seed=0, dtype=DTYPE, device=device)
    files = open_checkpoint(base)
    adapter = open_adapter(package / ADAPTER, dimensions)
    read_package(package, dimensions.hidden_size)
    progress(f"package {folder_sha256(package)[:12]}")
    ways: list[tuple[str, TensorOf, Adapter | None]] = [
        ("base from files", files.tensor, None),
        ("base made on the device", made.tensor, None),
        ("merged from files", adapter.merged(files.tensor, device), None),
        ("merged, made on the device", adapter.merged(made.tensor, device), None),
        ("adapter beside, from files", files.tensor, adapter),
    ]
    return {name: load(name, source, dimensions, device, beside=beside) for name, source, beside in ways}


def layer_bytes(dimensions: ModelDimensions) -> int:
    """Of the larger kind of layer, in the loaded dtype: what loading may take above the weights."""
    per_layer: dict[str, int] = {}
    for name, spec in expected_tensors(dimensions).items():
        if name.startswith("layers."):
            layer = name.split(".")[1]
            per_layer[layer] = per_layer.get(layer, 0) + 2 * int(np.prod(spec.shape))
    return max(per_layer.values())


def distance(x: Tensor, reference: Tensor) -> float:
    return float((x.double() - reference.double()).norm() / reference.double().norm())


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description="Write a package of real size with random weights, load and compare it.")
    p.add_argument("--model", choices=tuple(DIMENSIONS), default="9b", help="whose dimensions (%(default)s)")
    p.add_argument("--folder", type=Path, metavar="DIR", help="where the files go; without one they are removed again")
    p.add_argument("--device", default="cuda:0", help="a CUDA device (%(default)s)")
    p.add_argument("--out", type=Path, metavar="FILE", help="append one JSON line to FILE")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    if without_cuda("packages"):
        return 2
    dimensions, device = DIMENSIONS[arguments.model], torch.device(arguments.device)
    torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch)
        base, package = folder / "base", folder / "package"
        write_base(base, dimensions, device)
        write_package(package, dimensions)
        found = loads(base, package, dimensions, device)
    files, made, merged, merged_made, beside = found.values()
    facts = {
        "files equal made on the device": torch.equal(files.hidden, made.hidden),
        "merged files equal merged on the device": torch.equal(merged.hidden, merged_made.hidden),
        f"files load in {MOST_SECONDS:g} s": files.seconds <= MOST_SECONDS,
        "device memory stays below weights and one layer": all(
            one.device_excess <= layer_bytes(dimensions) for one in (files, merged, beside)
        ),
        "host memory stays below 2 GiB": all(one.host_peak_bytes <= MOST_HOST_BYTES for one in (files, merged, beside)),
    }
    print_table(
        ("weights", "s", "GiB", "above, MiB", "host, MiB"),
        [
            (one.name, f"{one.seconds:.1f}", f"{one.weight_bytes / 2**30:.2f}", f"{one.device_excess / 2**20:.0f}",
             f"{one.host_peak_bytes / 2**20:.0f}")
            for one in found.values()
        ],
    )  # fmt: skip
    apart = {
        "merged from base": distance(merged.hidden, files.hidden),
        "beside from merged": distance(beside.hidden, merged.hidden),
    }
    for what, value in apart.items():
        print(f"{what}: relative L2 of hidden states {value:.2e}", flush=True)
    for fact, holds in facts.items():
        print(f"{'yes' if holds else 'NO '}  {fact}", flush=True)
    if arguments.out is not None:
        configuration = {"model": arguments.model, "facts": facts, "distances": apart, "layer": layer_bytes(dimensions)}
        for one in found.values():
            configuration[one.name] = {k: v for k, v in vars(one).items() if k not in ("hidden", "name")}
        record = Record(
            kind="package", name=arguments.model, samples_us=[files.seconds * 1e6], configuration=configuration
        )
        Results(arguments.out).add(record)
    return int(not all(facts.values()))


if __name__ == "__main__":
    sys.exit(main())
