"""LoRA: checked whole, merged once in float32 or multiplied beside the weights; PEFT is the reference."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.engine import Engine
from engine.errors import CheckpointError
from engine.load.checkpoint import open_checkpoint, read_dimensions
from engine.load.dimensions import ModelDimensions
from engine.load.lora import SETTINGS, VALUES, merge, open_adapter
from engine.load.tensors import Weights
from tests.load.package_support import (
    CUA,
    OPEN_JEV,
    distance,
    our_states,
    their_states,
    write_adapter,
    write_base,
    write_package,
)

CPU = torch.device("cpu")
A = "base_model.model.layers.3.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    return write_package(tmp_path_factory.mktemp("package"), base)


@pytest.fixture
def adapter(package: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(package / "adapter", tmp_path / "adapter"))


def loaded(base: Path, package: Path, **options: Any) -> Engine:
    return Engine.load(model="tiny", device="cpu", check_ids=False, checkpoint=str(package), base=str(base), **options)


# The merge itself


def small_change() -> tuple[Tensor, Tensor, Tensor]:
    """Base values near 1e-2, a change near 1e-4."""
    generator = torch.Generator().manual_seed(0)
    weight = (1e-2 * torch.randn(96, 80, generator=generator)).bfloat16()
    a, b = torch.randn(8, 80, generator=generator), torch.randn(96, 8, generator=generator)
    return weight, a, 1e-5 * b


def test_a_merge_is_the_exact_sum_rounded_once() -> None:
    weight, a, b = small_change()
    exact = (weight.double() + 4.0 * (b.double() @ a.double())).bfloat16()
    ours = merge(weight, a, b, 4.0)
    assert ours.dtype == torch.float32
    differ = {
        "ours": ours.bfloat16(),
        "product rounded first": weight + (4.0 * (b @ a)).bfloat16(),
        "scale forgotten": merge(weight, a, b, 1.0).bfloat16(),
        "not merged": weight,
    }
    share = {name: float((value != exact).float().mean()) for name, value in differ.items()}
    assert share.pop("ours") < 1e-3  # a float32 sum that lies on a tie of bfloat16
    assert all(value > 0.02 for value in share.values()), share


def test_merging_again_gives_the_same_and_the_base_stays() -> None:
    weight, a, b = small_change()
    before = weight.clone()
    first = merge(weight, a, b, 4.0)
    merge(weight, a, b, -4.0)
    assert torch.equal(merge(weight, a, b, 4.0), first)
    assert torch.equal(weight, before)
    exact = weight.float()
    merge(exact, a, b, 4.0)
    assert torch.equal(exact, before.float())


# Through the engine


def matrices(weights: Weights) -> list[Tensor]:
    return [w for layer in weights.layers for w in (layer.in_proj, layer.out_proj, layer.mlp.gate_up, layer.mlp.down)]


def test_merged_unmerged_merged_is_repeatable(base: Path, package: Path) -> None:
    files = {path: path.read_bytes() for path in (*base.iterdir(), *package.rglob("*")) if path.is_file()}
    found = []
    for lora in ("merged", "unmerged", "merged"):
        with loaded(base, package, lora=lora) as engine:
            found.append((our_states(engine), [w.clone() for w in matrices(engine.weights)]))
    first, unmerged, again = found
    assert torch.equal(first[0], again[0])
    assert all(torch.equal(one, other) for one, other in zip(first[1], again[1], strict=True))
    assert not torch.equal(first[0], unmerged[0])
    with Engine.load(model="tiny", device="cpu", checkpoint=str(base)) as plain:
        assert all(torch.equal(x, y) for x, y in zip(matrices(plain.weights), unmerged[1], strict=True))
        assert distance(our_states(plain), first[0]) > 0.02, "the adapter changes nothing"
    assert all(path.read_bytes() == content for path, content in files.items())


@pytest.mark.parametrize("lora", ["merged", "unmerged"])
def test_float32_states_are_those_of_peft(base: Path, package: Path, lora: str) -> None:
    theirs = their_states(base, package / "adapter", dtype=torch.float32, merged=lora == "merged")
    with loaded(base, package, lora=lora, dtype="float32") as engine:
        assert distance(our_states(engine), theirs) <= 5e-5


@pytest.mark.parametrize("lora", ["merged", "unmerged"])
def test_bfloat16_states_are_as_near_to_float32_as_those_of_peft(base: Path, package: Path, lora: str) -> None:
    exact = their_states(base, package / "adapter", dtype=torch.float32, merged=False)
    theirs = their_states(base, package / "adapter", dtype=torch.bfloat16, merged=lora == "merged")
    with loaded(base, package, lora=lora, dtype="bfloat16") as engine:
        assert distance(our_states(engine), exact) <= 1.25 * distance(theirs, exact)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_unmerged_adapter_keeps_the_promise(base: Path, package: Path, dtype: str) -> None:
    names = {"a": "first", "b": "second one", "c": None}
    request = {
        "state": "word " * 70,
        "questions": {
            "q": {"type": "choice", "instructions": "Which?", "criteria": names},
            "r": {"type": "noul", "instructions": "Is it?"},
        },
    }
    with loaded(base, package, lora="unmerged", dtype=dtype) as engine:
        expected = engine.like(schedule="independent").score(request).answers
        for schedule in ("batched", "levels", "tree"):
            assert engine.like(schedule=schedule).score(request).answers == expected, schedule
        if dtype == "float32":
            assert engine.like(graphs="compiled").score(request).answers == expected


def test_every_linear_module_can_be_adapted(base: Path, tmp_path: Path) -> None:
    targets = (*OPEN_JEV, "in_proj_z", "in_proj_b", "in_proj_a", "gate_proj", "up_proj", "down_proj")
    for rank, lora in ((5, "unmerged"), (16, "unmerged"), (5, "merged")):
        package = write_package(tmp_path / f"{rank}{lora}", base)
        shutil.rmtree(package / "adapter")
        write_adapter(package / "adapter", base, rank=rank, alpha=3, targets=targets)
        said = json.loads((package / "model.json").read_bytes())
        (package / "model.json").write_text(json.dumps(said | {"lora_rank": rank}))
        theirs = their_states(base, package / "adapter", dtype=torch.float32, merged=False)
        with loaded(base, package, lora=lora, dtype="float32") as engine:
            assert distance(our_states(engine), theirs) <= 5e-5


# Files


def test_modules_are_found_under_both_prefixes(base: Path, tmp_path: Path) -> None:
    dimensions = read_dimensions(base)
    for head in (False, True):
        folder = write_adapter(tmp_path / str(head), base, targets=CUA, head=head)
        found = open_adapter(folder, dimensions)
        assert len(found.modules) == 4 * 3 + 4
        assert all(module.rpartition(".")[2] in CUA for module in found.modules)
    pattern = write_adapter(tmp_path / "pattern", base, targets=r".*\.self_attn\.[qv]_proj")
    assert open_adapter(pattern, dimensions).modules == ("layers.3.self_attn.q_proj", "layers.3.self_attn.v_proj")


def setting(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = json.loads((folder / SETTINGS).read_bytes())
        (folder / SETTINGS).write_text(json.dumps(content | changes))

    return change


def tensors(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        content = load_file(folder / VALUES)
        change(content)
        save_file(content, folder / VALUES)

    return rewrite


def other_parts(content: dict[str, Tensor]) -> None:
    for name in list(content):
        content[name.replace("model.layers", "model.model.language_model.layers")] = content.pop(name)


WRONG = {
    "no settings": (lambda f: (f / SETTINGS).unlink(), rf"{SETTINGS}: no such file"),
    "no values": (lambda f: (f / VALUES).unlink(), rf"{VALUES}: no such file"),
    "cut short": (
        lambda f: (f / VALUES).write_bytes((f / VALUES).read_bytes()[:-1]) and None,
        rf"{VALUES}: damaged or cut short",
    ),
    "another method": (setting(peft_type="IA3"), r"peft_type='IA3' is not supported; it must be 'LORA'"),
    "rank of another adapter": (setting(r=4), rf"has shape \[8, 128\], {SETTINGS} with config.json .* \[4, 128\]"),
    "no rank": (setting(r=None), r"r=None is not supported"),
    "alpha": (setting(lora_alpha=0), r"lora_alpha=0 is not supported"),
    "bias": (setting(bias="all"), r"bias='all' is not supported"),
    "dora": (setting(use_dora=True), r"use_dora=True is not supported"),
    "rslora": (setting(use_rslora=True), r"use_rslora=True"),
    "patterns": (setting(rank_pattern={"q_proj": 4}), r"rank_pattern=.* is not supported"),
    "trained head": (setting(modules_to_save=["lm_head"]), r"modules_to_save="),
    "changed base": (setting(init_lora_weights="pissa"), r"init_lora_weights='pissa' .*leaves the base weights"),
    "something new": (setting(use_something=True), r"use_something=True is not supported"),
    "targets of numbers": (setting(target_modules=[3]), r"target_modules=\[3\] is not supported"),
    "targets nothing": (setting(target_modules=["x_proj"]), r"target_modules=\('x_proj',\) names no linear module"),
    "targets less": (setting(target_modules=["q_proj"]), r"lora_A\.weight is not part of this adapter"),
    "targets more": (
        setting(target_modules=[*OPEN_JEV, "up_proj"]),
        r"mlp\.up_proj\.lora_A\.weight is missing, but adapter_config\.json targets it",
    ),
    "a broken pattern": (setting(target_modules="("), r"target_modules and exclude_modules: no pattern"),
    "missing factor": (tensors(lambda t: t.pop(A)), rf"{A} is missing"),
    "misspelt": (tensors(lambda t: t.update({A + "x": t.pop(A)})), rf"{A}x is not part .*did you mean '{A}'"),
    "transposed": (tensors(lambda t: t.update({A: t[A].t().contiguous()})), rf"{A} has shape \[128, 8\]"),
    "float16": (tensors(lambda t: t.update({A: t[A].half()})), rf"{A} is F16"),
    "another part": (
        tensors(other_parts),
        r"no base_model\.model\.layers\.\* of a text model's adapter, but for instance .*language_model",
    ),
    "empty": (tensors(lambda t: t.clear()), r"no base_model\.model\.layers"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_adapter_is_refused_by_file_and_key(base: Path, adapter: Path, name: str) -> None:
    spoil, message = WRONG[name]
    dimensions = read_dimensions(base)
    open_adapter(adapter, dimensions)
    spoil(adapter)
    with pytest.raises(CheckpointError, match=message):
        open_adapter(adapter, dimensions)


def test_a_value_that_is_not_finite_is_refused_when_it_is_read(base: Path, adapter: Path) -> None:
    tensors(lambda t: t[A].__setitem__((0, 3), torch.nan))(adapter)
    found = open_adapter(adapter, read_dimensions(base))
    with pytest.raises(CheckpointError, match=rf"{VALUES}: {A} holds a value that is not finite"):
        found.merged(open_checkpoint(base).tensor, CPU)("layers.3.self_attn.q_proj.weight")


def test_an_adapter_of_another_size_does_not_fit(base: Path, adapter: Path) -> None:
    config = json.loads((base / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"lora_A\.weight has shape \[8, 128\], .* asks for \[8, 256\]"):
        open_adapter(adapter, ModelDimensions.from_config(config | {"hidden_size": 256}))
