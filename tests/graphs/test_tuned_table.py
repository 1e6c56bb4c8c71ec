"""Tuned products from disk to an engine start, and the command that searches them."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import configs
from engine.errors import ConfigError
from engine.load.dimensions import DIMENSIONS, ModelDimensions
from engine.run.executor import Executor
from engine.tune import TuneConfig, search_and_report
from graphs.rungs import LADDER
from graphs.tuning import candidates as offer
from graphs.tuning import report as tuning_report
from graphs.tuning import table as tuned_table
from graphs.tuning import tuner
from graphs.tuning.search import Findings, search
from graphs.tuning.table import DamagedTableError, Key, Table, decode, encode, read, shipped, write
from ops import linear_tuned
from ops.linear import linear_fixed
from ops.linear_tuned import CUBLAS, CUBLASLT, chosen
from tests.graphs.tuned_support import CODE, KEY, SHAPE, TILE_A, TILE_B, FakeLab, by_order, offered
from tests.support import prompts_of, random_backbone, run, small_config, tokens

NAMES = {(512, 128, 64): (TILE_A, CODE, CUBLAS), (512, 128, 16_384): (CUBLAS,), (48, 64, 320): (f"{CUBLASLT}@384",)}
TABLE = Table(names=NAMES, failed={TILE_B: ((512, 128, 64),), CUBLAS: ((48, 64, 64), (48, 64, 72))})


@pytest.fixture(autouse=True)
def _fresh_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_tuned, "_products", {})
    linear_tuned.missed.clear()


class TestTableOnDisk:
    def test_it_comes_back_as_written(self, tmp_path: Path) -> None:
        write(tmp_path / "deep" / "t.json", KEY, TABLE)
        assert read(tmp_path / "deep" / "t.json", KEY) == TABLE
        assert decode(encode(KEY, TABLE)) == (KEY, TABLE)
        assert [p.name for p in (tmp_path / "deep").iterdir()] == ["t.json"]

    def test_a_missing_file_is_an_empty_table(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        assert read(tmp_path / "t.json", KEY) == Table()
        assert not caplog.messages

    @pytest.mark.parametrize("name", [field.name for field in fields(Key)])
    def test_another_key_makes_it_stale(self, tmp_path: Path, name: str) -> None:
        other = replace(KEY, **{name: 9 if name == "cublas" else "other"})
        write(tmp_path / "t.json", KEY, TABLE)
        assert read(tmp_path / "t.json", other) == Table()
        assert tuner.table_path(tmp_path, KEY) != tuner.table_path(tmp_path, other)

    @pytest.mark.parametrize(
        "damage",
        [
            lambda text: text[: len(text) // 2],
            lambda text: "[]",
            lambda text: "null",
            lambda text: text.replace('"format": 1', '"format": 2'),
            lambda text: text.replace('"driver"', '"river"'),
            lambda text: text.replace(TILE_A, "tile 64"),
            lambda text: text.replace('"512x128": [[', '"512x128": [[7,'),
            lambda text: text.replace('"512x128": [[', '"512x128": [[-1,'),
            lambda text: text.replace('"512x128": [[', '"512x128": [[],['),
            lambda text: text.replace('"512x128"', '"512"'),
            lambda text: text.replace('"names"', '"nams"'),
            lambda text: text.replace("[48, 64, 72]", "[48, 64]"),
            lambda text: text.replace(f'"{TILE_B}": [', '"tile": ['),
        ],
    )
    def test_a_damaged_file_is_ignored_with_a_warning(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[str], str]
    ) -> None:
        text = encode(KEY, TABLE)
        assert damage(text) != text
        with pytest.raises(DamagedTableError):
            decode(damage(text))
        path = tmp_path / "t.json"
        path.write_text(damage(text))
        with caplog.at_level(logging.WARNING, "forkgraph"):
            assert read(path, KEY) == Table()
        assert [m for m in caplog.messages if f"{path} is damaged and ignored" in m]

    def test_bytes_that_are_no_text_are_damage_too(self, tmp_path: Path) -> None:
        (tmp_path / "t.json").write_bytes(b"\xff\xfe{")
        assert read(tmp_path / "t.json", KEY) == Table()

    def test_an_interrupted_write_leaves_the_old_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "t.json"
        write(path, KEY, TABLE)

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write(path, KEY, Table())
        assert read(path, KEY) == TABLE
        assert [p.name for p in tmp_path.iterdir()] == ["t.json"]

    def test_shipped_winners_are_found_by_gpu_and_codes_by_cublas(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(tuned_table, "SHIPPED", tmp_path / "tuned")
        (tmp_path / "tuned").mkdir()
        assert shipped(KEY) == {}
        file = tmp_path / "tuned" / "gpu-1.json"
        file.write_text(encode(KEY, Table(names=NAMES | {(16, 64, 64): (CODE,)})))
        assert shipped(replace(KEY, driver="9", torch="9")) == NAMES | {(16, 64, 64): (CODE,)}
        assert shipped(replace(KEY, cublas=6)) == NAMES | {(512, 128, 64): (TILE_A, CUBLAS)}
        assert shipped(replace(KEY, gpu="GPU 2")) == {}
        file.write_text("{")
        assert shipped(KEY) == {}
        assert "damaged and ignored" in caplog.text

    def test_what_ships_is_whole(self) -> None:
        for file in (Path(configs.__path__[0]) / "tuned").glob("*.json"):
            key, table = decode(file.read_text())
            assert file.name == tuned_table.shipped_name(key.gpu)
            assert encode(key, table) == file.read_text()
            for model, d in DIMENSIONS.items():
                for n, k in tuner.weight_shapes(d):
                    assert all(table.names.get((n, k, rows)) for rows in LADDER), (model, n, k)

    def test_the_key_knows_its_sources(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert tuner.sources_hash() == tuner.sources_hash()
        before = tuner.sources_hash()
        monkeypatch.setattr(tuner, "_SOURCES", tuner._SOURCES[1:])
        assert tuner.sources_hash() != before


class TestPrepare:
    """An engine start, with a laboratory and a key of the test's making."""

    @pytest.fixture
    def labs(self, monkeypatch: pytest.MonkeyPatch) -> list[FakeLab]:
        used: list[FakeLab] = []

        def in_lab(device: torch.device, work: Callable[[FakeLab], Findings]) -> Findings:
            used.append(FakeLab(same=lambda cell, name: cell[1] != 128 and name != CUBLAS))
            return work(used[-1])

        monkeypatch.setattr(tuner, "in_lab", in_lab)
        monkeypatch.setattr(tuner, "current_key", lambda device: KEY)
        monkeypatch.setattr(tuner, "shipped", lambda key: {})
        return used

    @staticmethod
    def start(cache_dir: Path) -> None:
        dimensions = ModelDimensions.from_config(small_config(hidden=64))
        assert {k for _, k in tuner.weight_shapes(dimensions)} == {64, 128}
        tuner.prepare(dimensions, device=torch.device("cuda", 0), cache_dir=cache_dir)

    def test_cold_tests_once_and_warm_asks_nobody(
        self, labs: list[FakeLab], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.INFO, "forkgraph"):
            self.start(tmp_path)
        assert len(labs) == 1
        assert not labs[0].timed
        said = [m for m in caplog.messages if "fixed multiplies it" in m]
        wide = [shape for shape in tuner.weight_shapes(ModelDimensions.from_config(small_config())) if shape[1] == 128]
        assert len(said) == len(wide) == 1
        assert f"{len(LADDER)} rungs from 64 to 16384 rows; not used there" in caplog.text
        first = dict(linear_tuned._products)
        linear_tuned._products.clear()
        caplog.clear()
        self.start(tmp_path)
        assert len(labs) == 1
        assert first.keys() == linear_tuned._products.keys()
        assert not caplog.messages

    def test_every_product_of_the_model_is_known_afterwards(self, labs: list[FakeLab], tmp_path: Path) -> None:
        self.start(tmp_path)
        for n, k in tuner.weight_shapes(ModelDimensions.from_config(small_config())):
            for rows in LADDER:
                chosen(0, (n, k, rows))
        assert not linear_tuned.missed

    def test_shipped_winners_are_tested_first(
        self, labs: list[FakeLab], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cell = (256, 64, 64)
        monkeypatch.setattr(tuner, "shipped", lambda key: {cell: (TILE_A, CUBLAS)})
        self.start(tmp_path)
        assert [name for tested, name in labs[0].tested if tested == cell] == [TILE_A]
        assert [name for tested, name in labs[0].tested if tested == (256, 64, 72)] == [CUBLAS, CUBLASLT]

    def test_a_kernel_that_fails_for_a_new_weight_leaves_the_old_ones_too(
        self, labs: list[FakeLab], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The half of the rungs that was known is led by a tile, which fails where it is tested now."""
        dimensions = ModelDimensions.from_config(small_config())
        cells = [(n, k, rows) for n, k in tuner.weight_shapes(dimensions) for rows in LADDER]
        write(tuner.table_path(tmp_path, KEY), KEY, Table(names=dict.fromkeys(cells[::2], (TILE_A,))))
        monkeypatch.setattr(tuner, "shipped", lambda key: dict.fromkeys(cells, (TILE_A, CUBLASLT)))
        self.start(tmp_path)
        table = read(tuner.table_path(tmp_path, KEY), KEY)
        assert TILE_A in table.failed
        assert all(TILE_A not in table.names[cell] for cell in cells)
        assert len(labs) == 2

    def test_a_damaged_table_is_made_again(
        self, labs: list[FakeLab], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        self.start(tmp_path)
        tuner.table_path(tmp_path, KEY).write_text("{")
        self.start(tmp_path)
        assert len(labs) == 2
        assert "damaged and ignored" in caplog.text
        self.start(tmp_path)
        assert len(labs) == 2

    def test_a_table_that_cannot_be_kept_is_used_and_said(
        self, labs: list[FakeLab], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "tuned").write_text("a file where a folder should be")
        self.start(tmp_path)
        assert linear_tuned._products
        assert "cannot be written, the next start tests again" in caplog.text

    def test_a_search_adds_to_what_is_known(
        self, labs: list[FakeLab], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(offer.blas, "codes", lambda *_: [])
        other = Table(names={(16, 16, 64): (CODE,)}, failed={TILE_B: ((16, 16, 64),)})
        write(tuner.table_path(tmp_path, KEY), KEY, other)
        dimensions = ModelDimensions.from_config(small_config())
        findings, key, table = tuner.tune(dimensions, device=torch.device("cuda", 0), cache_dir=tmp_path)
        assert key == KEY
        assert table == read(tuner.table_path(tmp_path, KEY), KEY)
        assert table.names == other.names | findings.names
        assert table.failed == findings.failed
        assert table.failed[TILE_B] == ((16, 16, 64),)
        assert all(TILE_B not in names for names in findings.names.values())
        assert labs[0].timed


def test_a_driver_that_cannot_be_asked_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: no such library")

    monkeypatch.setattr(tuner.ctypes, "CDLL", missing)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    with pytest.raises(ConfigError, match=r"gemm=tuned: .*libnvidia-ml\.so\.1.* use gemm=fixed"):
        tuner.current_key(torch.device("cuda", 0))


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
    assert seen == set(tuner.weight_shapes(backbone.dimensions))


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

        def fake(dimensions: ModelDimensions, **options: Any) -> tuple[Findings, Key, Table]:
            asked.update(options, dimensions=dimensions)
            time = by_order(TILE_A, TILE_B, CUBLAS)
            lab = FakeLab(lambda cell, name: 4.0 + time(cell, name), lambda cell, name: name != TILE_A)
            found = search([SHAPE], lab, offered=offered, progress=options["progress"])
            return found, KEY, Table(names=found.names)

        stderr, out = io.StringIO(), tmp_path / "gpu-1.json"
        config = TuneConfig(model="9b", cache_dir=str(tmp_path), out=str(out))
        assert search_and_report(config, stderr=stderr, search=fake) == 0
        assert asked["dimensions"] == DIMENSIONS["9b"]
        assert asked["device"] == torch.device("cuda", 0)
        said = stderr.getvalue()
        assert "9b on GPU 1, driver 1.2, torch 3, cuBLAS 5" in said
        line = next(line for line in said.splitlines() if line.startswith("512x128"))
        assert line.split()[1:] == ["0.83", "t"] * len(tuning_report.SHOWN) + ["0.833"]
        assert f"{TILE_A} does not have the bits of fixed for a 512x128 weight" in said
        assert decode(out.read_text())[0] == KEY

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
