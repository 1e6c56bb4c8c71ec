"""Decision models from disk: what a folder is, its head, its published ids, and faults by file and key."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig, MemoryConfig
from engine.engine import Engine
from engine.errors import CheckpointError, ConfigError
from engine.load.dimensions import DIMENSIONS
from engine.load.package import (
    CHAT_PREFIX,
    CHAT_SUFFIX,
    PINS,
    DecisionModel,
    check_open_jev,
    kind_of,
    read_export,
    read_head,
    read_package,
    weights_folder,
)
from engine.wire.prompts import build_prompts
from engine.wire.requests import parse_request
from engine.wire.tokens import Tokens
from tests.load.package_support import HIDDEN, loaded, write_base, write_export, write_package


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"), tied=False)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    return write_package(tmp_path_factory.mktemp("package"), base)


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory, base: Path, package: Path) -> Path:
    return write_export(tmp_path_factory.mktemp("export"), base, package)


@pytest.fixture
def copy(package: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(package, tmp_path / "package"))


# What a folder is


def test_a_folder_is_known_by_its_content(base: Path, package: Path, export: Path, copy: Path) -> None:
    assert [kind_of(folder) for folder in (base, package, export, package / "adapter")] == [
        "base", "package", "export", "adapter",
    ]  # fmt: skip
    (copy / "model.json").unlink()
    assert kind_of(copy) == "package"
    with pytest.raises(CheckpointError, match=r"model\.json: no such file"):
        read_package(copy, HIDDEN)


def test_the_repository_around_a_package_tells_where_it_is(tmp_path: Path, package: Path) -> None:
    shutil.copytree(package, tmp_path / "package" / "checkpoint")
    with pytest.raises(CheckpointError, match=r"the checkpoint is inside; give .*package/checkpoint"):
        kind_of(tmp_path)


def test_base_weights_are_asked_for_where_they_are_missing_and_only_there(base: Path, package: Path) -> None:
    assert weights_folder(str(package), "package", str(base)) == str(base)
    with pytest.raises(ConfigError, match=r"holds no base weights; give their folder with base=FOLDER"):
        loaded(package)
    with pytest.raises(ConfigError, match=r"holds its own weights; leave base= out"):
        loaded(base, base=str(base))
    with pytest.raises(ConfigError, match=r"base=.* is no plain Hugging Face folder"):
        loaded(package, base=str(package))
    with pytest.raises(ConfigError, match=r"base=.* belongs to a checkpoint without base weights"):
        Engine.load(device="cpu", base=str(base))


def test_heads_and_lora_must_fit_the_folder(base: Path, package: Path) -> None:
    with pytest.raises(ConfigError, match="head=scalar: a checkpoint of kind base serves yes_minus_no or letters"):
        loaded(base, head="scalar")
    with pytest.raises(ConfigError, match="head=yes_minus_no: a checkpoint of kind package serves scalar"):
        loaded(package, base=str(base), head="yes_minus_no")
    with pytest.raises(ConfigError, match="lora=unmerged: no adapter lies beside these weights"):
        loaded(base, lora="unmerged")
    with pytest.raises(ConfigError, match="leave it out with lora=unmerged, or merge"):
        EngineConfig(lora="unmerged", memory=MemoryConfig(limit_gib=1.0))
    with pytest.raises(ConfigError, match="lora=mergd is not one of merged, unmerged; did you mean 'merged'"):
        EngineConfig(lora="mergd")


# Faults


def edit(file: str, **changes: Any) -> Callable[[Path], None]:
    """Change keys of a JSON file; None removes one."""

    def change(folder: Path) -> None:
        content = json.loads((folder / file).read_bytes()) | changes
        (folder / file).write_text(json.dumps({k: v for k, v in content.items() if v is not None}))

    return change


def head(state: Any) -> Callable[[Path], None]:
    return lambda folder: torch.save(state, folder / "head.pt")


def write(file: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_bytes(content) and None


class Code:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("code of a stranger ran",))


W, B = torch.zeros(1, HIDDEN), torch.zeros(1)
WRONG = {
    "no model_id": (edit("model.json", model_id=None), r"model\.json: model_id is missing"),
    "no revision": (edit("model.json", revision=None), r"model\.json: revision is missing"),
    "method": (edit("model.json", method="listwise"), r"model\.json: method='listwise' is not supported"),
    "max_length": (edit("model.json", max_length=0), r"model\.json: max_length=0 must be from 1 to 16,384"),
    "rank as text": (edit("model.json", lora_rank="8"), r"model\.json: lora_rank='8' must be of type int"),
    "rank": (edit("model.json", lora_rank=16), r"adapter_config\.json: r is 8, model\.json says lora_rank 16"),
    "no temperature file": (lambda f: (f / "temperature.json").unlink(), r"temperature\.json: no such file"),
    "no temperature": (edit("temperature.json", temperature=None), r"temperature\.json: temperature is missing"),
    "temperature zero": (edit("temperature.json", temperature=0), r"temperature=0\.0 must be finite and positive"),
    "temperature nan": (write("temperature.json", b'{"temperature": NaN}'), r"temperature=nan must be finite"),
    "temperature true": (edit("temperature.json", temperature=True), r"temperature=True must be of type float"),
    "not JSON": (write("model.json", b"{"), r"model\.json: not readable as JSON"),
    "no head": (lambda f: (f / "head.pt").unlink(), r"head\.pt: no such file"),
    "head of code": (head({"weight": W, "bias": B, "x": Code()}), r"head\.pt: .*could run code and is not read"),
    "head that is a pickle": (write("head.pt", pickle.dumps(Code())), r"head\.pt: damaged"),
    "head of noise": (write("head.pt", b"\x00" * 100), r"head\.pt: damaged"),
    "head of nothing": (write("head.pt", b""), r"head\.pt"),
    "head of a list": (head([W, B]), r"head\.pt: must hold the tensors weight and bias, not 'list'"),
    "head too wide": (
        head({"weight": torch.zeros(1, 256), "bias": B}),
        r"head\.pt: weight has shape \[1, 256\], hidden_size asks for \[1, 128\]",
    ),
    "head without bias": (head({"weight": W}), r"head\.pt: bias is missing"),
    "head of bfloat16": (head({"weight": W.bfloat16(), "bias": B}), r"head\.pt: weight is torch\.bfloat16"),
    "head with more": (head({"weight": W, "bias": B, "x": B}), r"head\.pt: x is not part of a head"),
    "head of nan": (head({"weight": W + torch.nan, "bias": B}), r"head\.pt: weight holds a value that is not finite"),
    "no adapter": (lambda f: shutil.rmtree(f / "adapter"), r"adapter_config\.json: no such file"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_package_is_refused_by_file_and_key(
    base: Path, copy: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.assembly.load_weights", lambda *_, **__: pytest.fail("weights were read"))
    spoil, message = WRONG[name]
    spoil(copy)
    with pytest.raises(CheckpointError, match=message):
        loaded(copy, base=str(base))
    assert "stranger" not in capsys.readouterr().out


EXPORT = "open_jev_export.json"
WRONG_EXPORT = {
    "format": (edit(EXPORT, format="open-jev-text-merged/2"), r"format='open-jev-text-merged/2' is not supported"),
    "prefix": (edit(EXPORT, chat_prefix="<|im_start|>system\n"), r"chat_prefix=.* is not supported"),
    "suffix": (edit(EXPORT, chat_suffix="<|im_end|>\n"), r"chat_suffix=.* is not supported"),
    "width": (edit(EXPORT, head_weight=[0.0] * 64), r"head_weight has 64 numbers, hidden_size is 128"),
    "text in the head": (edit(EXPORT, head_weight=["0"] * HIDDEN), r"head_weight must be a list of numbers"),
    "overflow in the head": (edit(EXPORT, head_weight=[1e300] * HIDDEN), r".*must be finite"),
    "no bias": (edit(EXPORT, head_bias=None), r"head_bias is missing"),
    "temperature": (edit(EXPORT, temperature=-1), r"temperature=-1\.0 must be finite and positive"),
    "revision": (edit(EXPORT, checkpoint_revision=None), r"checkpoint_revision is missing"),
}


@pytest.mark.parametrize("name", WRONG_EXPORT)
def test_a_wrong_export_is_refused_by_key(export: Path, tmp_path: Path, name: str) -> None:
    spoil, message = WRONG_EXPORT[name]
    shutil.copy(export / EXPORT, tmp_path)
    read_export(tmp_path, HIDDEN)
    spoil(tmp_path)
    with pytest.raises(CheckpointError, match=rf"{EXPORT}: {message}"):
        read_export(tmp_path, HIDDEN)


@pytest.mark.parametrize("size", DIMENSIONS)
def test_a_head_is_as_wide_as_every_model(tmp_path: Path, size: str) -> None:
    width = DIMENSIONS[size].hidden_size
    torch.save({"weight": torch.ones(1, width), "bias": torch.ones(1)}, tmp_path / "head.pt")
    assert read_head(tmp_path / "head.pt", width)[0].shape == (width,)
    with pytest.raises(CheckpointError, match=rf"weight has shape \[1, {width}\], hidden_size asks for"):
        read_head(tmp_path / "head.pt", width + 16)


def test_a_published_size_is_refused_with_both_values(base: Path, package: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: .* is 832, model=9b has 248320"):
        loaded(package, base=str(base), model="9b")


# Published ids


def published(package: Path, **changes: Any) -> DecisionModel:
    pin = PINS["9b"]
    found = read_package(package, HIDDEN)
    head = replace(found.head, temperature=changes.pop("temperature", pin.temperature))
    return replace(found, **{"model_id": pin.base, "base_revision": pin.base_revision, "head": head} | changes)


def test_published_ids_are_accepted_and_others_refused(package: Path) -> None:
    check_open_jev(published(package), "9b")
    check_open_jev(published(package, checkpoint_revision=PINS["9b"].checkpoint_revision), "9b")
    for changes, message in (
        ({"model_id": "somebody/base"}, r"model_id somebody/base is that of no published Open-Jev; check_ids=false"),
        ({"model_id": PINS["27b"].base}, r"model_id Qwen/Qwen3\.8-27B is that of model=27b, not of model=9b"),
        ({"base_revision": "x"}, r"base revision is x, published is c202236.*; check_ids=false"),
        ({"checkpoint_revision": "x"}, r"checkpoint_revision is x, published is 47e9668"),
        ({"temperature": 1.8969}, r"temperature is 1\.8969, published is 1\.8969118766347646"),
    ):
        with pytest.raises(CheckpointError, match=rf"model\.json: {message}"):
            check_open_jev(published(package, **changes), "9b")


def test_ids_are_checked_unless_told_otherwise(base: Path, package: Path) -> None:
    with pytest.raises(CheckpointError, match="no published Open-Jev; check_ids=false"):
        loaded(package, base=str(base), check_ids=True)


def test_the_published_files_have_the_published_bytes() -> None:
    """The files' layout, rebuilt from ids alone, has their published SHA-256: the ids are spelt right."""
    pin = PINS["27b"]
    said = {
        "model_id": pin.base,
        "revision": pin.base_revision,
        "max_length": 4096,
        "lora_rank": 8,
        "method": "independent_candidate_lora_nll_brier",
    }
    digest = hashlib.sha256((json.dumps(said, indent=2) + "\n").encode()).hexdigest()
    assert digest.startswith("394c4ccc")
    assert digest.endswith("c508")


def test_the_chat_template_is_that_of_the_prompts(base: Path) -> None:
    tokens = Tokens.load(base)
    request = parse_request({"state": "s", "questions": {"q": {"type": "noul", "instructions": "i"}}})
    [question] = build_prompts(request, tokens, 4096).questions
    text = "Context:\ns\n\nQuestion: i\nIs the answer to this question yes? Answer Yes or No."
    special = Tokens.load(base, "special")
    assert question.prompts[0].tolist() == special.encode((CHAT_PREFIX + text + CHAT_SUFFIX,)).tolist()
