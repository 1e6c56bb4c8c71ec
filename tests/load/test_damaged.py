"""Damaged checkpoints: loading and the offline check name the file and what is wrong, whatever it holds."""

from __future__ import annotations

import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.check import run
from engine.engine import Engine
from engine.errors import CheckpointError, ConfigError
from engine.load.package import CHAT_PREFIX, CHAT_SUFFIX, PACKAGE_FILES, kind_of, read_export, read_package
from engine.load.tiny import write_tiny
from tests.load.package_support import HIDDEN, head_values, write_json

HUGE = 10**400
DEEP = b"[" * 100_000
INDEX = "model.safetensors.index.json"
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    write_tiny(folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def put(name: str, content: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content)


def edit(name: str, change: Callable[[dict[str, Any]], object]) -> Damage:
    def apply(folder: Path) -> None:
        content = json.loads((folder / name).read_bytes())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return apply


def config(**values: Any) -> Damage:
    return edit("config.json", lambda content: content.update(values))


def tokenizer(change: Callable[[dict[str, Any]], object]) -> Damage:
    return edit("tokenizer.json", change)


def folder_in_place_of(name: str) -> Damage:
    def apply(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return apply


def cut(bytes_: int) -> Damage:
    return lambda folder: os.truncate(folder / "model-00002-of-00002.safetensors", bytes_)


NOT_A_TOKENIZER = "model/tokenizer.json: not a tokenizer.json"
SHARD = "model-00002-of-00002.safetensors"
DAMAGES: dict[str, tuple[Damage, str]] = {
    "no utf-8": (put("tokenizer.json", b"\xff"), "model/tokenizer.json: must hold UTF-8: 'utf-8' codec"),
    "no vocabulary": (tokenizer(lambda t: t["model"].pop("vocab")), f"{NOT_A_TOKENIZER}: KeyError('vocab')"),
    "a list for the vocabulary": (tokenizer(lambda t: t["model"].update(vocab=[])), NOT_A_TOKENIZER),
    "null for added tokens": (tokenizer(lambda t: t.update(added_tokens=None)), NOT_A_TOKENIZER),
    "text for added tokens": (tokenizer(lambda t: t.update(added_tokens=["x"])), NOT_A_TOKENIZER),
    "an added token that is a list": (tokenizer(lambda t: t["added_tokens"][0].update(content=[5])), NOT_A_TOKENIZER),
    "an added token without flags": (tokenizer(lambda t: t["added_tokens"][1].pop("lstrip")), NOT_A_TOKENIZER),
    "null for merges": (tokenizer(lambda t: t["model"].update(merges=None)), "model/tokenizer.json: "),
    "a prefix longer than tokens": (tokenizer(lambda t: t["model"].update(continuing_subword_prefix="x" * 20)),
                                    "model/tokenizer.json: "),
    "a deep tokenizer": (put("tokenizer.json", DEEP), f"{NOT_A_TOKENIZER}: RecursionError"),
    "a folder for the tokenizer": (folder_in_place_of("tokenizer.json"),
                                   "tokenizer.json: cannot be read: Is a directory"),
    "a huge head": (config(head_dim=HUGE), "config.json: head_dim=1000"),
    "a huge vocabulary": (config(vocab_size=HUGE), "config.json: vocab_size=1000"),
    "a huge context": (config(max_position_embeddings=2**31), "max_position_embeddings=2147483648 is not supported; it "
                       "must be below 2,147,483,648"),
    "huge layers": (config(layer_types=None, full_attention_interval=4, num_hidden_layers=2**30),
                    "num_hidden_layers=1073741824 is not supported; it must be from 1 to 1,024"),
    "no layers": (config(num_hidden_layers=0, layer_types=[]), "num_hidden_layers=0 is not supported"),
    "a huge epsilon": (config(rms_norm_eps=HUGE), "config.json: rms_norm_eps=1000"),
    "a huge base": (edit("config.json", lambda c: c["rope_parameters"].update(rope_theta=HUGE)),
                    "config.json: rope_parameters.rope_theta=1000"),
    "a deep config": (put("config.json", DEEP), "config.json: not readable as JSON: maximum recursion depth"),
    "more digits than Python reads": (put("config.json", b'{"head_dim": %s}' % (b"1" * 5000)),
                                      "config.json: not readable as JSON: Exceeds the limit"),
    "a folder for the config": (folder_in_place_of("config.json"), "config.json: cannot be read: Is a directory"),
    "a deep index": (put(INDEX, b'{"a":' * 100_000), f"{INDEX}: not readable as JSON: maximum recursion depth"),
    "a folder for a shard": (folder_in_place_of(SHARD), f"{SHARD}: cannot be read: Is a directory"),
    "a shard cut short": (cut(600_000), f"{SHARD}: damaged or cut short: 600,000 bytes, its header asks for 663,736"),
    "a header cut short": (cut(100), f"{SHARD}: damaged or cut short: 100 bytes, its header asks for "),
    "a header that is none": (put(SHARD, b"\xff" * 100), f"{SHARD}: damaged or cut short: 100 bytes (Error"),
    "a header of another kind": (put(SHARD, b"\x02" + bytes(7) + b"[]"), f"{SHARD}: damaged or cut short: 10 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_d45_damage_is_named_by_loading_and_by_the_check(folder: Path, damage: str) -> None:
    inflict, text = DAMAGES[damage]
    inflict(folder)
    with pytest.raises(CheckpointError) as caught:
        Engine.load(device="cpu", checkpoint=folder)
    assert text in str(caught.value)
    out = io.StringIO()
    assert run([str(folder)], stdout=out, stderr=out) == 1
    assert text in out.getvalue()


def test_d45_numbers_of_a_package_and_an_export_that_no_float_holds(tmp_path: Path) -> None:
    write_json(tmp_path / "temperature.json", {"temperature": HUGE})
    said = {"model_id": "m", "revision": "r", "max_length": 1, "lora_rank": 8,
            "method": "independent_candidate_lora_nll_brier"}  # fmt: skip
    write_json(tmp_path / "model.json", said)
    weight, bias = head_values()
    torch.save({"weight": weight[None], "bias": bias}, tmp_path / "head.pt")
    with pytest.raises(CheckpointError, match=r"temperature\.json: temperature=inf must be finite and positive"):
        read_package(tmp_path, HIDDEN)
    export = {"format": "open-jev-text-merged/1", "chat_prefix": CHAT_PREFIX, "chat_suffix": CHAT_SUFFIX,
              "head_weight": [-HUGE, 1.0], "head_bias": 0, "temperature": 1, "model_id": "m", "base_revision": "r",
              "checkpoint_revision": "c", "max_length": 1}  # fmt: skip
    write_json(tmp_path / "open_jev_export.json", export)
    with pytest.raises(CheckpointError, match=r"open_jev_export\.json: head\.weight and head\.bias must be finite"):
        read_export(tmp_path, 2)


# What may not be read


@pytest.fixture
def somebody_else() -> Iterator[Path]:
    """A folder that everybody may enter, while this process is a user who may read what everybody may."""
    if os.name != "posix" or os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        os.seteuid(54_321)
        try:
            yield Path(name)
        finally:
            os.seteuid(0)


def test_d45_what_may_not_be_read_is_not_called_missing(whole: Path, somebody_else: Path) -> None:
    os.seteuid(0)
    folder = Path(shutil.copytree(whole, somebody_else / "model"))
    folder.chmod(0o755)
    for file in folder.iterdir():
        file.chmod(0o644)
    os.seteuid(54_321)
    for name in ("config.json", SHARD, "tokenizer.json"):
        os.seteuid(0)
        (folder / name).chmod(0o600)
        os.seteuid(54_321)
        with pytest.raises(CheckpointError, match=rf"{name}: cannot be read: Permission denied"):
            Engine.load(device="cpu", checkpoint=folder)
        os.seteuid(0)
        (folder / name).chmod(0o644)
    folder.chmod(0o600)
    os.seteuid(54_321)
    with pytest.raises(CheckpointError, match="model: cannot be read: Permission denied"):
        kind_of(folder)
    with pytest.raises(ConfigError, match=r"checkpoint=.*below: cannot be read: Permission denied"):
        Engine.load(device="cpu", checkpoint=folder / "below")


# What is there and would not be used


@pytest.mark.parametrize("name", ["judge_config.json", "calibration.json", "decision_config.json", *PACKAGE_FILES[:3]])
def test_d46_a_trained_head_that_would_be_ignored_is_refused(folder: Path, name: str) -> None:
    (folder / name).write_text("{}")
    (folder / "adapter").mkdir()
    text = (
        f"{folder}: {name}, adapter belong to a decision model of a kind that is not supported yet; head=yes_minus_no"
    )
    with pytest.raises(CheckpointError) as caught:
        Engine.load(device="cpu", checkpoint=folder)
    assert str(caught.value).startswith(text)
    out = io.StringIO()
    assert run([str(folder)], stdout=out, stderr=out) == 1
    assert text in out.getvalue()
    with Engine.load(device="cpu", checkpoint=folder, head="yes_minus_no") as engine:
        assert engine.processor.method == "pretrained_yes_minus_no_no_training"
