"""Options: one owner of defaults, nonsense refused by name, and `auto` settled from the machine alone."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

import configs
from engine import config as options
from engine.cli import to_config
from engine.config import (
    EngineConfig,
    ExplainConfig,
    MemoryConfig,
    ScoreConfig,
    TokensConfig,
    cache_folder,
    configured,
    resolve,
)
from engine.errors import ConfigError, ForkgraphError

GROUPS = {
    "model": options.MODELS,
    "split": options.SPLITS,
    "gemm": options.GEMMS,
    "schedule": options.SCHEDULES,
    "graphs": options.GRAPHS,
    "head": options.HEADS,
}


@pytest.mark.parametrize(("root", "config_class"), [("score", ScoreConfig), ("explain", ExplainConfig)])
def test_the_yaml_repeats_every_default(root: str, config_class: type[EngineConfig]) -> None:
    with initialize_config_module("configs", version_base=None):
        composed = compose(root)
    assert OmegaConf.to_container(composed) == OmegaConf.to_container(OmegaConf.structured(config_class))
    assert to_config(composed, config_class) == config_class()


def test_groups_offer_the_allowed_values_and_set_them() -> None:
    for group, values in GROUPS.items():
        assert {path.stem for path in (Path(configs.__path__[0]) / group).iterdir()} == set(values)
    with initialize_config_module("configs", version_base=None):
        for i in range(max(map(len, GROUPS.values()))):
            chosen = {group: values[i % len(values)] for group, values in GROUPS.items()}
            composed = to_config(compose("score", [f"{group}={value}" for group, value in chosen.items()]), ScoreConfig)
            assert composed == ScoreConfig(**chosen)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": "9B"}, r"model=9B is not one of tiny, 4b, 9b, 27b; did you mean '9b'\?"),
        ({"dtype": "bf17"}, r"dtype=bf17 is not one of auto, bfloat16, float32"),
        ({"split": "aligne"}, r"split=aligne .*did you mean 'aligned'\?"),
        ({"gemm": "fxed"}, r"gemm=fxed .*auto, default, fixed, tuned; did you mean 'fixed'\?"),
        ({"graphs": "eagre"}, r"graphs=eagre is not one of auto, eager, compiled, captured; did you mean 'eager'\?"),
        ({"schedule": "level"}, r"schedule=level .*did you mean 'levels'\?"),
        ({"head": "lora"}, r"head=lora is not one of auto, scalar, yes_minus_no, letters"),
        ({"pack": "two"}, r"pack=two is not one of all, one"),
        ({"pack": "one", "schedule": "tree"}, r"pack=one .* contradicts schedule=tree; use schedule=levels"),
        ({"device": "gpu"}, r"device=gpu is not one of auto, cpu, cuda, cuda:N"),
        ({"device": "cuda:x"}, r"device=cuda:x is not one of"),
        ({"max_length": 0}, r"max_length=0 is not a whole number from 1 to 16,384"),
        ({"max_length": 16_385}, r"max_length=16385 is not a whole number from 1 to 16,384"),
        ({"max_length": 1.5}, r"max_length=1\.5 is not a whole number"),
        ({"seed": -1}, r"seed=-1 is not a whole number"),
        ({"seed": True}, r"seed=True is not a whole number"),
        ({"warmup": [64, 0]}, r"warmup=0 is not a whole number from 1 to 16,384"),
        ({"warmup": [16_385]}, r"warmup=16385 is not a whole number from 1 to 16,384"),
        ({"checkpoint": ""}, r"checkpoint= is empty"),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_name(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"device": 0}, r"device=0 is not the name of a device; use device='cuda:0'"),
        ({"device": None}, r"device=None is not the name of a device$"),
        ({"device": torch.device("meta")}, r"device=meta is not one of auto, cpu, cuda, cuda:N"),
        ({"dtype": torch.bfloat16}, r"dtype=torch\.bfloat16 is not one of .*did you mean 'bfloat16'\?"),
        ({"split": None}, r"split=None is not one of exact, aligned"),
        ({"model": 9}, r"model=9 is not one of tiny, 4b, 9b, 27b"),
        ({"check_ids": "false"}, r"check_ids='false' is neither true nor false"),
        ({"nvtx": 1}, r"nvtx=1 is neither true nor false"),
        ({"checkpoint": 5}, r"checkpoint=5 is not the name of a folder"),
        ({"cache_dir": b"/tmp"}, r"cache_dir=b'/tmp' is not the name of a folder"),
        ({"capture": "later"}, r"capture=later is not one of answer, load, idle"),
        ({"warmup": "al"}, r"warmup='al' is neither a list of row counts nor the word all"),
        ({"warmup": 64}, r"warmup=64 is neither a list of row counts nor the word all"),
        ({"warmup": [True]}, r"warmup=True is not a whole number"),
        ({"tokens": None}, r"tokens=None is neither a TokensConfig nor a mapping of its options"),
        ({"letters": "file"}, r"letters='file' is neither a LettersConfig nor a mapping of its options"),
        ({"memory": {"limt_gib": 1}}, r"memory\.limt_gib is no option .*did you mean 'limit_gib'\?"),
        ({"memory": {"limit_gib": True}}, r"memory\.limit_gib=True is not a positive number"),
        ({"memory": {"limit_gib": "1"}}, r"memory\.limit_gib='1' is not a positive number"),
        ({"memory": {"graphs_gib": None}}, r"memory\.graphs_gib=None is not a positive number"),
        ({"tokens": {"control": "x"}}, r"tokens\.control=x is not one of plain, special"),
        ({"letters": {"system_message": 1}}, r"letters\.system_message=1 is not the name of a file"),
    ],
)
def test_d47_a_value_of_another_type_is_refused_by_name(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        configured(None, wrong)


def test_d47_mappings_paths_and_devices_of_torch_are_taken(tmp_path: Path) -> None:
    expected = EngineConfig(
        model="9b", device="cuda:1", checkpoint=str(tmp_path), warmup=[64], memory=MemoryConfig(limit_gib=1)
    )
    given = {"model": "9b", "checkpoint": tmp_path, "warmup": [64], "memory": {"limit_gib": 1}}
    on_device = {"device": torch.device("cuda:1")}
    assert configured(None, given | on_device) == expected
    assert configured(given, on_device) == expected
    assert configured(OmegaConf.create(given | {"checkpoint": str(tmp_path)}), on_device) == expected
    interpolated = OmegaConf.create({"model": "9b", "checkpoint": str(tmp_path), "base": "${checkpoint}"})
    assert configured(interpolated, {}).base == str(tmp_path)
    whole = OmegaConf.structured(EngineConfig(warmup="all"))
    assert configured(whole, {"seed": 3}) == EngineConfig(warmup="all", seed=3)
    assert configured(EngineConfig(seed=1, split="aligned"), {"seed": 2}) == EngineConfig(seed=2, split="aligned")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("tiny", r"config='tiny' is neither an EngineConfig nor a mapping .*Engine\.load\(model='tiny'\)"),
        (EngineConfig, r"config=<class .*> is neither an EngineConfig nor a mapping"),
        ({"modle": "tiny"}, r"modle is no option of an engine; did you mean 'model'\?; known: "),
        ({1: 2}, r"1 is no option of an engine"),
        (OmegaConf.create({"model": "???"}), r"config: .*model"),
        (OmegaConf.create({"model": "${nothing}"}), r"config: .*nothing"),
    ],
)
def test_d47_what_is_no_config_is_refused(config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configured(config, {})


def test_nested_options_are_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"tokens\.control=plane .*did you mean 'plain'"):
        TokensConfig(control="plane")
    with pytest.raises(ConfigError, match=r"memory\.question_snapshots=0"):
        MemoryConfig(question_snapshots=0)
    for name in ("limit_gib", "graphs_gib"):
        for value in (0, -1.5, float("inf"), float("nan")):
            with pytest.raises(ConfigError, match=rf"memory\.{name}={value} is not a positive number"):
                MemoryConfig(**{name: value})
    with pytest.raises(ConfigError, match="format=yaml"):
        ExplainConfig(format="yaml")


def test_a_config_error_is_both_ours_and_a_value_error() -> None:
    assert issubclass(ConfigError, ForkgraphError)
    assert issubclass(ConfigError, ValueError)


def test_limits_are_accepted() -> None:
    assert EngineConfig(max_length=1).max_length == 1
    assert EngineConfig(max_length=16_384, pack="one", schedule="levels").max_length == 16_384


def visible_devices(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_defaults_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    visible_devices(monkeypatch, 0)
    c = resolve(EngineConfig())
    assert (c.device, c.dtype, c.split, c.schedule, c.gemm, c.graphs) == (
        "cpu", "float32", "exact", "levels", "fixed", "eager",
    )  # fmt: skip
    assert resolve(EngineConfig(model="9b", checkpoint="random")).dtype == "bfloat16"


def test_defaults_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    visible_devices(monkeypatch, 2)
    c = resolve(EngineConfig())
    assert (c.device, c.dtype, c.split, c.schedule, c.gemm, c.graphs) == (
        "cuda:0", "bfloat16", "exact", "auto", "tuned", "captured",
    )  # fmt: skip
    assert resolve(EngineConfig(device="cuda:1")).device == "cuda:1"
    assert resolve(EngineConfig(device="cpu")).dtype == "float32"
    with pytest.raises(ConfigError, match="device=cuda:2: 2 CUDA devices are visible"):
        resolve(EngineConfig(device="cuda:2"))


def test_a_gpu_that_is_not_there_is_an_error_not_a_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    visible_devices(monkeypatch, 0)
    with pytest.raises(ConfigError, match="device=cuda: no CUDA device is visible; use device=cpu"):
        resolve(EngineConfig(device="cuda"))


def test_tuned_products_need_bfloat16_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    visible_devices(monkeypatch, 1)
    assert resolve(EngineConfig(dtype="float32")).gemm == "fixed"
    for wrong in ({"device": "cpu"}, {"dtype": "float32"}):
        with pytest.raises(ConfigError, match=r"gemm=tuned .*; use gemm=fixed, which has the same bits"):
            resolve(EngineConfig(gemm="tuned", **wrong))


def test_captured_graphs_need_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    visible_devices(monkeypatch, 0)
    with pytest.raises(ConfigError, match="graphs=captured needs a CUDA device; use graphs=eager or graphs=compiled"):
        resolve(EngineConfig(graphs="captured"))


def test_branches_one_by_one_are_never_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    visible_devices(monkeypatch, 1)
    assert resolve(EngineConfig(pack="one")).schedule == "levels"


def test_what_is_set_stays_and_resolving_again_changes_nothing() -> None:
    chosen = ScoreConfig(
        device="cpu", dtype="bfloat16", gemm="default", schedule="tree", graphs="compiled", cache_dir="/x", out="a.json"
    )
    assert resolve(chosen) == chosen
    once = resolve(EngineConfig(device="cpu"))
    assert resolve(once) == once


def test_a_published_model_needs_weights() -> None:
    with pytest.raises(ConfigError, match="model=9b has no weights; give checkpoint=FOLDER, or checkpoint=random"):
        resolve(EngineConfig(model="9b", device="cpu"))


def test_folders_must_exist_and_a_near_name_is_told(tmp_path: Path) -> None:
    (tmp_path / "Qwen3.5-9B").mkdir()
    with pytest.raises(ConfigError, match=r"checkpoint=.*Qwen3.5-9b: no such folder; did you mean 'Qwen3.5-9B'\?"):
        resolve(EngineConfig(model="9b", device="cpu", checkpoint=str(tmp_path / "Qwen3.5-9b")))
    with pytest.raises(ConfigError, match="tokenizer=/nowhere: no such folder"):
        resolve(EngineConfig(device="cpu", tokenizer="/nowhere"))


def test_folders_are_made_concrete(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    c = EngineConfig(device="cpu", cache_dir="~/cache", checkpoint="~/model")
    assert resolve(c) == replace(resolve(c), cache_dir=str(tmp_path / "cache"), checkpoint=str(tmp_path / "model"))


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="other platforms keep caches elsewhere")
def test_the_default_cache_folder_follows_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder(resolve(EngineConfig(device="cpu"))) == tmp_path / "forkgraph"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_folder(resolve(EngineConfig(device="cpu"))) == Path("/home/somebody/.cache/forkgraph")


def test_importing_the_engine_needs_no_hydra() -> None:
    check = "import sys, engine; sys.exit(', '.join({'hydra', 'omegaconf', 'antlr4'} & set(sys.modules)) or None)"
    root = Path(__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", check], cwd=root, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_d47_a_value_that_cannot_be_shown_is_told_by_its_type() -> None:
    with pytest.raises(ConfigError, match=r"seed=a value of type int is not a whole number"):
        EngineConfig(seed=10**5_000)
