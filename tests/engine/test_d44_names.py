"""What a name stands for: examples that ship, and models in Hugging Face's cache, found without a network."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from engine.check import run
from engine.cli import read_request
from engine.config import EngineConfig, ScoreConfig, resolve
from engine.errors import ConfigError
from engine.hub import SIZES
from engine.load.opening import _NAMES
from engine.overrides import prepared
from engine.resources import CONFIGS

NAME = "Qwen/Qwen3.5-9B"
FOLDER = "models--Qwen--Qwen3.5-9B"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with two snapshots of one model, the second of them `main`."""
    cache = tmp_path / "hub"
    for revision in ("a" * 40, "b" * 40):
        (cache / FOLDER / "snapshots" / revision).mkdir(parents=True)
    (cache / FOLDER / "refs").mkdir()
    (cache / FOLDER / "refs" / "main").write_text("b" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.chdir(tmp_path)
    return cache


def checkpoint(**options: str) -> str | None:
    return resolve(EngineConfig(device="cpu", **options)).checkpoint  # type: ignore[arg-type]


def test_d44_examples_are_read_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for file in (CONFIGS / "requests").iterdir():
        body, source = read_request(f"example:{file.stem}", io.BytesIO())
        assert (body, source) == (file.read_bytes(), f"example:{file.stem}")
    with pytest.raises(
        ConfigError, match=r"request=example:reveiw: no such example; did you mean 'review'\?; there are"
    ):
        read_request("example:reveiw", io.BytesIO())


def test_d44_a_published_name_is_a_size_and_its_weights() -> None:
    assert (EngineConfig(model=NAME).model, EngineConfig(model=NAME).checkpoint) == ("9b", NAME)  # type: ignore[arg-type]
    assert (EngineConfig(checkpoint=NAME).model, EngineConfig(checkpoint=NAME).checkpoint) == ("9b", NAME)
    own = EngineConfig(model=NAME, checkpoint="random")  # type: ignore[arg-type]
    assert (own.model, own.checkpoint) == ("9b", "random")
    assert EngineConfig(checkpoint="somebody/else").model == "tiny"
    with pytest.raises(ConfigError, match=r"model=Qwen/Qwen3.5-9b .*did you mean 'Qwen/Qwen3.5-9B'\?; other weights"):
        EngineConfig(model="Qwen/Qwen3.5-9b")  # type: ignore[arg-type]
    assert {_NAMES[size][0]: size for size in SIZES.values()} == SIZES


def test_d44_a_published_name_on_a_command_line() -> None:
    assert prepared([f"model={NAME}"], ScoreConfig) == ["model=9b", f"checkpoint={NAME}"]
    assert prepared([f"model={NAME}", "checkpoint=random"], ScoreConfig) == ["model=9b", "checkpoint=random"]


def test_d44_a_snapshot_is_found_in_the_cache(cache: Path) -> None:
    main = str(cache / FOLDER / "snapshots" / ("b" * 40))
    assert checkpoint(model=NAME) == checkpoint(checkpoint=NAME) == main
    assert checkpoint(checkpoint=str(cache / FOLDER)) == main
    assert resolve(EngineConfig(device="cpu", tokenizer=NAME)).tokenizer == main
    assert checkpoint(checkpoint=main) == main


def test_d44_a_folder_comes_before_the_cache(cache: Path, tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir(parents=True)
    assert checkpoint(checkpoint=NAME) == NAME


def test_d44_without_main_the_only_snapshot_serves(cache: Path) -> None:
    (cache / FOLDER / "refs" / "main").unlink()
    with pytest.raises(ConfigError, match=r"checkpoint=.*: no refs/main in .*has a{40}, b{40}; give the path of one"):
        checkpoint(model=NAME)
    (cache / FOLDER / "snapshots" / ("a" * 40)).rmdir()
    assert checkpoint(model=NAME) == str(cache / FOLDER / "snapshots" / ("b" * 40))
    (cache / FOLDER / "snapshots" / ("b" * 40)).rmdir()
    with pytest.raises(ConfigError, match="its snapshots/ is empty"):
        checkpoint(model=NAME)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("Qwen/Qwen3.5-9b", r"no such folder, and none of that name in .*/hub; did you mean 'Qwen/Qwen3.5-9B'\?"),
        ("some/model", r"fetch it with `hf download some/model`, or set HF_HOME or HF_HUB_CACHE to where it is"),
        ("nowhere", r"checkpoint=nowhere: no such folder$"),
        ("a/b/c", r"checkpoint=a/b/c: no such folder$"),
        ("file", r"checkpoint=file is a file; give the folder that holds it"),
    ],
)
def test_d44_where_it_was_looked_for_is_said(cache: Path, tmp_path: Path, value: str, message: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=message):
        checkpoint(checkpoint=value)


def test_d44_a_cut_short_download_is_said(cache: Path) -> None:
    (cache / FOLDER / "refs" / "main").write_text("c" * 40)
    with pytest.raises(ConfigError, match=r"refs/main names the snapshot c{40}, which is not in "):
        checkpoint(model=NAME)


def test_d44_check_takes_names_and_a_tilde(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(cache))
    for place in (NAME, f"~/{FOLDER}"):
        out, err = io.StringIO(), io.StringIO()
        assert run([place], stdout=out, stderr=err) == 2 or "config.json: no such file" in out.getvalue()
        assert "b" * 40 in out.getvalue() + err.getvalue()
