"""The command that searches tuned products, and the weights that it searches for."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.load.dimensions import DIMENSIONS
from engine.load.projections import projection_shapes
from engine.run.executor import Executor
from engine.tune import TuneConfig, search_and_report
from graphs.rungs import LADDER
from graphs.tuning import report as tuning_report
from graphs.tuning.search import Findings, search
from graphs.tuning.table import Environment, Table, decode
from ops.linear import linear_fixed
from ops.linear_tuned import CUBLASLT
from tests.graphs.tuned_support import ENVIRONMENT, SHAPE, TILE_A, TILE_B, FakeTrials, by_order, offered
from tests.support import prompts_of, random_backbone, run, small_config, tokens


@pytest.mark.parametrize("types", [None, ["full_attention", "linear_attention"]])
def test_the_weights_tuned_are_those_that_a_forward_multiplies(types: list[str] | None) -> None:
    """Also in a last layer of either kind, with and without rows that are read."""
    seen: set[tuple[int, int]] = set()

    def recording(x: Tensor, w: Tensor) -> Tensor:
        seen.add((w.shape[0], w.shape[1]))
        assert x.shape[0] in LADDER
        return linear_fixed(x, w)

    config = small_config()
    if types is not None:
        config |= {"layer_types": types, "num_hidden_layers": len(types)}
    backbone = random_backbone(config, dtype=torch.float32, linear=recording)
    rng = np.random.default_rng(0)
    head, question = tokens(rng, 40), tokens(rng, 30)
    questions = prompts_of([[[head, question, tokens(rng, 3 + i)] for i in range(3)]])
    run(Executor(backbone), questions, schedule="levels")
    assert seen == set(projection_shapes(backbone.dimensions))


class TestCommand:
    def test_a_cpu_has_nothing_to_tune(self) -> None:
        with pytest.raises(ConfigError, match="device=cpu: only products on a CUDA device are tuned; gemm=fixed"):
            search_and_report(TuneConfig(device="cpu", model="9b"), stderr=io.StringIO())

    @pytest.fixture
    def gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    def test_float32_is_not_tuned(self, gpu: None) -> None:
        with pytest.raises(ConfigError, match="dtype=float32: only bfloat16 products are tuned"):
            search_and_report(TuneConfig(model="9b", dtype="float32"), stderr=io.StringIO())

    def test_the_report_shows_ratios_and_names_what_failed(self, gpu: None, tmp_path: Path) -> None:
        asked: dict[str, Any] = {}

        def fake(shapes: Any, **options: Any) -> tuple[Findings, Environment, Table]:
            asked.update(options, shapes=shapes)
            time = by_order(TILE_A, TILE_B, CUBLASLT)
            trials = FakeTrials(lambda cell, name: 4.0 + time(cell, name), lambda cell, name: name != TILE_A)
            found = search([SHAPE], trials, offered=offered, progress=options["progress"])
            return found, ENVIRONMENT, Table(names=found.names)

        stderr, out = io.StringIO(), tmp_path / "gpu-1.json"
        config = TuneConfig(model="9b", cache_dir=str(tmp_path), out=str(out))
        assert search_and_report(config, stderr=stderr, search=fake) == 0
        assert asked["shapes"] == projection_shapes(DIMENSIONS["9b"])
        assert asked["device"] == torch.device("cuda", 0)
        said = stderr.getvalue()
        assert "9b on GPU 1, driver 1.2, torch 3, cuBLAS 5" in said
        line = next(line for line in said.splitlines() if line.startswith("512x128"))
        assert line.split()[1:] == ["0.83", "t"] * len(tuning_report.SHOWN) + ["0.833"]
        assert f"{TILE_A} does not have the bits of fixed for a 512x128 weight" in said
        assert decode(out.read_text())[0] == ENVIRONMENT
        with pytest.raises(ConfigError, match=r"gpu-1\.json exists; overwrite=true replaces it"):
            search_and_report(config, stderr=stderr, search=fake)
        assert search_and_report(replace(config, overwrite=True), stderr=stderr, search=fake) == 0

    def test_the_yaml_repeats_every_default(self) -> None:
        from hydra import compose, initialize_config_module
        from omegaconf import OmegaConf

        with initialize_config_module("configs", version_base=None):
            composed = compose("tune")
        assert OmegaConf.to_container(composed) == OmegaConf.to_container(OmegaConf.structured(TuneConfig))

    def test_on_the_command_line_a_mistake_is_one_line_and_code_2(self) -> None:
        command = [sys.executable, "-m", "engine.tune", "model=9b", "device=cpu"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("tune: device=cpu: only products")
        assert done.stderr.count("\n") == 1
