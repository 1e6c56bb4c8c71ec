"""The tiny checkpoint: complete, the same every time, and what transformers reads."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, Qwen3_5ForCausalLM

from engine.errors import ConfigError
from engine.load import tiny
from engine.load.checkpoint import expected_tensors, open_checkpoint
from engine.load.dimensions import ModelDimensions
from engine.load.tiny import tiny_checkpoint, tiny_config, tiny_tokenizer
from engine.wire.tokens import Tokens

TEXT = "<|im_start|>user\nContext:\nCafe\u0301 isn't 12 <think>\n\n  Yes</think>, No! \U0001f980\r\n<|im_end|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("cache"))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_weights(folder: Path, tmp_path: Path) -> None:
    here = contents(folder)
    assert contents(tiny_checkpoint(tmp_path)) == here
    other = contents(tiny_checkpoint(tmp_path, seed=1))
    assert other.keys() == here.keys()
    changed = {name for name in here if here[name] != other[name]}
    assert changed == {"tiny.json", *(name for name in here if name.endswith(".safetensors"))}


def test_it_is_small_and_sharded_and_nothing_else_is_left_in_the_cache(folder: Path) -> None:
    assert sum(len(content) for content in contents(folder).values()) < 2_000_000
    assert sum(name.endswith(".safetensors") for name in contents(folder)) == 2
    assert list(folder.parent.iterdir()) == [folder]


def test_a_complete_folder_is_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tiny_checkpoint(tmp_path)
    monkeypatch.setattr(tiny, "write_tiny", lambda *_, **__: pytest.fail("written again"))
    assert tiny_checkpoint(tmp_path) == first


@pytest.mark.parametrize("damage", ["config.json", "model-00002-of-00002.safetensors", "tiny.json"])
def test_an_incomplete_folder_is_made_again(tmp_path: Path, damage: str) -> None:
    folder = tiny_checkpoint(tmp_path)
    whole = contents(folder)
    (folder / damage).unlink()
    assert contents(tiny_checkpoint(tmp_path)) == whole
    os.truncate(folder / damage, 7)
    assert contents(tiny_checkpoint(tmp_path)) == whole
    assert list(tmp_path.iterdir()) == [folder]


def test_a_failure_in_the_middle_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(tiny, "_write_weights", no_space)
    with pytest.raises(ConfigError, match=r"cache_dir=.*no space left.*give another cache_dir"):
        tiny_checkpoint(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_cache_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="give another cache_dir="):
        tiny_checkpoint(tmp_path / "file")


def test_another_process_may_finish_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = tiny.write_tiny

    def overtaken(folder: Path, *, seed: int, layers: int) -> None:
        write(folder, seed=seed, layers=layers)
        final = tmp_path / "tiny-v1-layers4-seed0"
        final.mkdir()
        write(final, seed=seed, layers=layers)

    monkeypatch.setattr(tiny, "write_tiny", overtaken)
    folder = tiny_checkpoint(tmp_path)
    assert list(tmp_path.iterdir()) == [folder]
    assert open_checkpoint(folder).names


def test_eight_layers_are_two_periods_and_six_are_refused(tmp_path: Path) -> None:
    assert open_checkpoint(tiny_checkpoint(tmp_path, layers=8)).dimensions.num_full_layers == 2
    with pytest.raises(ConfigError, match="multiple of 4 layers, not 6"):
        tiny_config(6)


@pytest.mark.parametrize("layers", [4, 8])
def test_transformers_loads_every_tensor_and_no_other(tmp_path: Path, layers: int) -> None:
    folder = tiny_checkpoint(tmp_path, layers=layers)
    model, report = Qwen3_5ForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    assert model.dtype == torch.bfloat16
    ours = open_checkpoint(folder)
    theirs = model.model.state_dict()
    assert set(ours.names) == set(theirs)
    for name in ours.names:
        assert torch.equal(ours.tensor(name).to(torch.bfloat16), theirs[name]), name


def test_transformers_reads_the_same_config(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    assert config.model_type == "qwen3_5_text"
    written = json.loads((folder / "config.json").read_bytes())
    assert config.rope_parameters == written["rope_parameters"]
    assert ModelDimensions.from_config(config.to_dict()) == ModelDimensions.from_config(written)


def test_transformers_makes_the_same_tokens(folder: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(folder)
    assert theirs.encode(TEXT) == tiny_tokenizer().encode(TEXT).ids
    assert max(theirs.get_vocab().values()) < open_checkpoint(folder).dimensions.vocab_size


def test_the_tokenizer_is_the_same_every_time() -> None:
    assert tiny_tokenizer().to_str() == tiny_tokenizer().to_str()


def test_any_text_comes_back() -> None:
    tokenizer = tiny_tokenizer()
    text = "\x00\t naïve 你好 \U0001f980\r\n\n  end <|im_start|>"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_control_tokens_and_answers_are_single_tokens() -> None:
    tokenizer = tiny_tokenizer()
    for word in ("Yes", "No", *tiny._CONTROL):
        assert len(tokenizer.encode(word).ids) == 1, word
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    assert special == {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}


def test_the_engine_may_join_its_pieces() -> None:
    tokens = Tokens(tiny_tokenizer().to_str())
    assert tokens.joinable
    assert tokens.single_id("Yes") != tokens.single_id("No")


def test_decay_and_gated_norm_are_float32_and_the_rest_bfloat16(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    for name, spec in expected_tensors(checkpoint.dimensions).items():
        float32 = spec.kind in ("a_log", "gated_norm")
        assert checkpoint.tensor(name).dtype == (torch.float32 if float32 else torch.bfloat16), name
