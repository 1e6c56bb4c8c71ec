"""Options of the comparison: one owner of defaults, settings for every size, and nonsense refused by name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "profiling"))  # scripts, not a package

from compare_options import ARMS, CompareConfig, GatesConfig

from engine.cli import check_overrides, to_config
from engine.config import MODELS
from engine.errors import ConfigError


def test_the_yaml_repeats_every_default() -> None:
    with initialize_config_module("configs", version_base=None):
        composed = compose("compare")
    assert OmegaConf.to_container(composed) == OmegaConf.to_container(OmegaConf.structured(CompareConfig))
    assert to_config(composed, CompareConfig) == CompareConfig()


@pytest.mark.parametrize("model", MODELS)
def test_every_size_has_its_settings(model: str) -> None:
    with initialize_config_module("configs", version_base=None):
        config = to_config(compose("compare", [f"model={model}"]), CompareConfig)
    assert config.model == model
    assert set(config.few) <= set(config.arms)
    assert set(config.only) <= set(config.arms)
    if model != "tiny":
        assert set(config.arms) == set(ARMS)
        assert {"m1", "m2", "m3", "m4"} <= set(config.sets), "every gate has its requests"
    assert config.gates == GatesConfig()


def test_gates_are_options_of_the_command_line() -> None:
    check_overrides(["gates.speedup=3", "arms=[base,independent]", "names=[]", "budget_minutes=1"], CompareConfig)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sets": ["m6"]}, r"sets=m6 is not one of m1, m2, m3, m4, m5"),
        ({"arms": ["base", "independant"]}, r"arms=independant is not one of .*did you mean 'independent'"),
        ({"arms": ["base", "tree"]}, r"arms=base,tree: the gates need independent"),
        ({"only": {"base": ["m1"]}}, r"the gates need base, on every set"),
        ({"few": {"tree": 4}}, r"few=tree is not one of independent, plain, batched"),
        ({"whole": ["levels"]}, r"whole=levels is not one of independent, plain, batched"),
        ({"few": {"independent": 4}, "whole": []}, r"few\.independent: bits are compared with those of all"),
        ({"few": {"plain": 0}}, r"few\.plain=0 is not a whole number"),
        ({"only": {"tree": ["m7"]}}, r"only\.tree=m7 is not one of"),
        ({"gemm": "default"}, r"gemm=default promises no equal bits"),
        ({"budget_minutes": 0}, r"budget_minutes=0 is not a positive number"),
        ({"samples": 0}, r"samples=0 is not a whole number"),
    ],
)
def test_what_cannot_work_is_refused_by_name(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CompareConfig(**wrong)
    with pytest.raises(ConfigError, match=r"gates\.head=-1"):
        GatesConfig(head=-1)


def test_no_option_that_is_a_list_is_taken_for_a_folder_of_choices() -> None:
    words = ["names=[m1/256x2]", "sets=[m1]", "arms=[base,independent]"]
    with initialize_config_module("configs", version_base=None):
        config = to_config(compose("compare", words), CompareConfig)
    assert (config.names, config.sets, config.arms) == (["m1/256x2"], ["m1"], ["base", "independent"])
