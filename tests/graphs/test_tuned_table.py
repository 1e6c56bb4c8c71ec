"""Tuned products from disk to an engine start, and the command that searches them."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pynvml
import pytest
import torch

import configs
from engine.errors import ConfigError
from engine.load.dimensions import DIMENSIONS, ModelDimensions
from engine.load.projections import projection_shapes
from engine.tune import TuneConfig, search_and_report
from graphs.rungs import LADDER
from graphs.tuning import candidates as offer
from graphs.tuning import table as tuned_table
from graphs.tuning import tuner
from graphs.tuning.search import CannotRunError, search
from graphs.tuning.table import DamagedTableError, Environment, Table, decode, encode, read, shipped, write
from graphs.tuning.tuner import UnknownEnvironmentError
from ops import blas, linear_tuned
from ops.linear_tuned import CUBLASLT, FIXED, Cell, chosen
from tests.graphs.tuned_support import CODE, ENVIRONMENT, SHAPE, TILE_A, TILE_B, FakeTrials, by_order, offered
from tests.support import small_config

NAMES = {(512, 128, 64): (TILE_A, CODE, CUBLASLT), (512, 128, 16_384): (CUBLASLT,), (48, 64, 320): (f"{CUBLASLT}@384",)}
TABLE = Table(
    names=NAMES,
    failed={TILE_B: ((512, 128, 64),), CUBLASLT: ((48, 64, 64), (48, 64, 72))},
    open={(48, 64, 88): (CODE, CUBLASLT)},
)


@pytest.fixture(autouse=True)
def _fresh_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_tuned, "_products", {})
    linear_tuned.missed.clear()


class TestTableOnDisk:
    def test_it_comes_back_as_written(self, tmp_path: Path) -> None:
        write(tmp_path / "deep" / "t.json", ENVIRONMENT, TABLE)
        assert read(tmp_path / "deep" / "t.json", ENVIRONMENT) == TABLE
        assert decode(encode(ENVIRONMENT, TABLE)) == (ENVIRONMENT, TABLE)
        assert [p.name for p in (tmp_path / "deep").iterdir()] == ["t.json"]

    def test_a_missing_file_is_an_empty_table(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        assert read(tmp_path / "t.json", ENVIRONMENT) == Table()
        assert not caplog.messages

    @pytest.mark.parametrize("name", [field.name for field in fields(Environment)])
    def test_another_key_makes_it_stale(self, tmp_path: Path, name: str) -> None:
        other = replace(ENVIRONMENT, **{name: 9 if name == "cublas" else "other"})
        write(tmp_path / "t.json", ENVIRONMENT, TABLE)
        assert read(tmp_path / "t.json", other) == Table()
        assert tuner.table_path(tmp_path, ENVIRONMENT) != tuner.table_path(tmp_path, other)

    @pytest.mark.parametrize(
        "damage",
        [
            lambda text: text[: len(text) // 2],
            lambda text: "[]",
            lambda text: "null",
            lambda text: text.replace('"format": 2', '"format": 1'),
            lambda text: text.replace('"driver"', '"river"'),
            lambda text: text.replace(TILE_A, "tile 64"),
            lambda text: text.replace('"512x128": [[', '"512x128": [[7,'),
            lambda text: text.replace('"512x128": [[', '"512x128": [[-1,'),
            lambda text: text.replace('"512x128": [[', '"512x128": [[],['),
            lambda text: text.replace('"512x128"', '"512"'),
            lambda text: text.replace('"names"', '"nams"'),
            lambda text: text.replace("[48, 64, 72]", "[48, 64]"),
            lambda text: text.replace(f'"{TILE_B}": [', '"tile": ['),
            lambda text: text.replace(f'"{TILE_A}"', '"cublas"'),
            lambda text: text.replace("[48, 64, 88, [", "[48, 64, 88, [7, "),
            lambda text: text.replace('"open"', '"opened"'),
        ],
    )
    def test_a_damaged_file_is_ignored_with_a_warning(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[str], str]
    ) -> None:
        text = encode(ENVIRONMENT, TABLE)
        assert damage(text) != text
        with pytest.raises(DamagedTableError):
            decode(damage(text))
        path = tmp_path / "t.json"
        path.write_text(damage(text))
        with caplog.at_level(logging.WARNING, "forkgraph"):
            assert read(path, ENVIRONMENT) == Table()
        assert [m for m in caplog.messages if f"{path} is damaged and ignored" in m]

    def test_bytes_that_are_no_text_are_damage_too(self, tmp_path: Path) -> None:
        (tmp_path / "t.json").write_bytes(b"\xff\xfe{")
        assert read(tmp_path / "t.json", ENVIRONMENT) == Table()

    def test_an_interrupted_write_leaves_the_old_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "t.json"
        write(path, ENVIRONMENT, TABLE)

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write(path, ENVIRONMENT, Table())
        assert read(path, ENVIRONMENT) == TABLE
        assert [p.name for p in tmp_path.iterdir()] == ["t.json"]

    def test_shipped_winners_are_found_by_gpu_and_codes_by_cublas(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(tuned_table, "SHIPPED", tmp_path / "tuned")
        (tmp_path / "tuned").mkdir()
        assert shipped(ENVIRONMENT) == {}
        file = tmp_path / "tuned" / "gpu-1.json"
        file.write_text(encode(ENVIRONMENT, Table(names=NAMES | {(16, 64, 64): (CODE,)})))
        assert shipped(replace(ENVIRONMENT, driver="9", torch="9")) == NAMES | {(16, 64, 64): (CODE,)}
        assert shipped(replace(ENVIRONMENT, cublas=6)) == NAMES | {(512, 128, 64): (TILE_A, CUBLASLT)}
        assert shipped(replace(ENVIRONMENT, gpu="GPU 2")) == {}
        file.write_text("{")
        assert shipped(ENVIRONMENT) == {}
        assert "damaged and ignored" in caplog.text

    def test_what_ships_is_whole(self) -> None:
        for file in (Path(configs.__path__[0]) / "tuned").glob("*.json"):
            environment, table = decode(file.read_text())
            assert file.name == tuned_table.shipped_name(environment.gpu)
            assert not table.open
            assert encode(environment, table) == file.read_text()
            for model, d in DIMENSIONS.items():
                for n, k in projection_shapes(d):
                    assert all(table.names.get((n, k, rows)) for rows in LADDER), (model, n, k)

    def test_the_environment_knows_its_sources(self) -> None:
        whole, part = tuner.sources_hash(tuner._SOURCES), tuner.sources_hash(tuner._SOURCES[1:])
        assert whole == tuner.sources_hash(tuner._SOURCES)
        assert whole != part


class TestPrepare:
    """An engine start, with trials and an environment of the test's making."""

    @pytest.fixture
    def opened(self, monkeypatch: pytest.MonkeyPatch) -> list[FakeTrials]:
        used: list[FakeTrials] = []

        @contextmanager
        def open_trials(device: torch.device) -> Iterator[FakeTrials]:
            used.append(FakeTrials(same=lambda cell, name: cell[1] != 128))
            yield used[-1]

        monkeypatch.setattr(tuner, "open_trials", open_trials)
        monkeypatch.setattr(tuner, "current_environment", lambda device: ENVIRONMENT)
        monkeypatch.setattr(tuner, "shipped", lambda environment: {})
        return used

    SHAPES = projection_shapes(ModelDimensions.from_config(small_config(hidden=64)))

    @classmethod
    def start(cls, cache_dir: Path) -> None:
        assert {k for _, k in cls.SHAPES} == {64, 128}
        tuner.prepare(cls.SHAPES, device=torch.device("cuda", 0), cache_dir=cache_dir)

    def test_cold_tests_once_and_warm_asks_nobody(
        self, opened: list[FakeTrials], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.INFO, "forkgraph"):
            self.start(tmp_path)
        assert len(opened) == 1
        assert not opened[0].timed
        said = [m for m in caplog.messages if "fixed multiplies it" in m]
        wide = [shape for shape in self.SHAPES if shape[1] == 128]
        assert len(said) == len(wide) == 1
        assert f"{len(LADDER)} rungs from 64 to 16384 rows; not used there" in caplog.text
        first = dict(linear_tuned._products)
        linear_tuned._products.clear()
        caplog.clear()
        self.start(tmp_path)
        assert len(opened) == 1
        assert first.keys() == linear_tuned._products.keys()
        assert not caplog.messages

    def test_every_product_of_the_model_is_known_afterwards(self, opened: list[FakeTrials], tmp_path: Path) -> None:
        self.start(tmp_path)
        for n, k in self.SHAPES:
            for rows in LADDER:
                chosen(0, (n, k, rows))
        assert not linear_tuned.missed

    def test_shipped_winners_are_tested_first(
        self, opened: list[FakeTrials], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cell = (256, 64, 64)
        monkeypatch.setattr(tuner, "shipped", lambda environment: {cell: (TILE_A, CUBLASLT)})
        self.start(tmp_path)
        assert [name for tested, name in opened[0].tested if tested == cell] == [TILE_A]
        assert [name for tested, name in opened[0].tested if tested == (256, 64, 72)] == [CUBLASLT]

    def test_a_kernel_that_fails_for_a_new_weight_leaves_the_old_ones_too(
        self, opened: list[FakeTrials], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The half of the rungs that was known is led by a tile, which fails where it is tested now."""
        cells = [(n, k, rows) for n, k in self.SHAPES for rows in LADDER]
        write(tuner.table_path(tmp_path, ENVIRONMENT), ENVIRONMENT, Table(names=dict.fromkeys(cells[::2], (TILE_A,))))
        monkeypatch.setattr(tuner, "shipped", lambda environment: dict.fromkeys(cells, (TILE_A, CUBLASLT)))
        self.start(tmp_path)
        table = read(tuner.table_path(tmp_path, ENVIRONMENT), ENVIRONMENT)
        assert TILE_A in table.failed
        assert all(TILE_A not in table.names[cell] for cell in cells)
        assert len(opened) == 2

    def test_a_damaged_table_is_made_again(
        self, opened: list[FakeTrials], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        self.start(tmp_path)
        tuner.table_path(tmp_path, ENVIRONMENT).write_text("{")
        self.start(tmp_path)
        assert len(opened) == 2
        assert "damaged and ignored" in caplog.text
        self.start(tmp_path)
        assert len(opened) == 2

    def test_a_table_that_cannot_be_kept_is_used_and_said(
        self, opened: list[FakeTrials], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "tuned").write_text("a file where a folder should be")
        self.start(tmp_path)
        assert linear_tuned._products
        (said,) = [m for m in caplog.messages if "cannot be written" in m]
        assert "the next start tests again; name another folder with cache_dir" in said

    def test_a_search_adds_to_what_is_known(
        self, opened: list[FakeTrials], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(offer.blas, "codes", lambda *_: [])
        other = Table(names={(16, 16, 64): (CODE,)}, failed={TILE_B: ((16, 16, 64),)})
        write(tuner.table_path(tmp_path, ENVIRONMENT), ENVIRONMENT, other)
        findings, environment, table = tuner.tune(self.SHAPES, device=torch.device("cuda", 0), cache_dir=tmp_path)
        assert environment == ENVIRONMENT
        assert table == read(tuner.table_path(tmp_path, ENVIRONMENT), ENVIRONMENT)
        assert table.names == other.names | findings.names
        assert table.failed == findings.failed
        assert table.failed[TILE_B] == ((16, 16, 64),)
        assert all(TILE_B not in names for names in findings.names.values())
        assert opened[0].timed


class TestD39:
    """Only bytes that differ count against an algorithm; a crowded start is forgotten."""

    SHAPES = ((512, 128),)

    @pytest.fixture
    def crowded(self, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[Cell, str], str]:
        """What cannot be tested, and why; all other names have the bits of fixed."""
        errors: dict[tuple[Cell, str], str] = {}

        def same(cell: Cell, name: str) -> bool:
            if (cell, name) in errors:
                raise CannotRunError(errors[cell, name])
            return name != TILE_B

        self.opened: list[FakeTrials] = []

        @contextmanager
        def open_trials(device: torch.device) -> Iterator[FakeTrials]:
            self.opened.append(FakeTrials(same=same))
            yield self.opened[-1]

        monkeypatch.setattr(tuner, "open_trials", open_trials)
        monkeypatch.setattr(tuner, "current_environment", lambda device: ENVIRONMENT)
        winners = {(*SHAPE, rows): (TILE_B, TILE_A, CODE, CUBLASLT) for rows in LADDER}
        monkeypatch.setattr(tuner, "shipped", lambda environment: winners)
        return errors

    def start(self, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> dict[Cell, str]:
        """What each cell runs after an engine start."""
        monkeypatch.setattr(tuner, "install", lambda names, device: running.update(names))
        running: dict[Cell, str] = {}
        tuner.prepare(self.SHAPES, device=torch.device("cuda", 0), cache_dir=cache_dir)
        return running

    def test_d39_a_cell_without_memory_runs_the_next_name_and_is_tested_again(
        self,
        crowded: dict[tuple[Cell, str], str],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        full, crammed = (*SHAPE, 64), (*SHAPE, 72)
        crowded |= {(full, TILE_A): "out of memory\nmore", (crammed, TILE_A): "out of memory\nmore"}
        crowded |= {(crammed, CODE): "out of memory\nmore", (crammed, CUBLASLT): "out of memory\nmore"}
        running = self.start(tmp_path, monkeypatch)
        assert (running.pop(full), running.pop(crammed)) == (CODE, FIXED)
        assert set(running.values()) == {TILE_A}
        said = f"tests could not be made for 2 of {len(LADDER)} products (out of memory); others with the same bits run"
        assert [m for m in caplog.messages if said in m]
        table = read(tuner.table_path(tmp_path, ENVIRONMENT), ENVIRONMENT)
        assert table.open == dict.fromkeys((full, crammed), (TILE_A, CODE, CUBLASLT))
        assert not table.names.keys() & table.open.keys()
        assert set(table.failed) == {TILE_B}

        crowded.clear()
        caplog.clear()
        running = self.start(tmp_path, monkeypatch)
        assert set(running.values()) == {TILE_A}
        assert self.opened[1].tested == [(full, TILE_A), (crammed, TILE_A)]
        assert not caplog.messages
        table = read(tuner.table_path(tmp_path, ENVIRONMENT), ENVIRONMENT)
        assert not table.open
        assert len(table.names) == len(LADDER)
        self.start(tmp_path, monkeypatch)
        assert len(self.opened) == 2

    def test_d39_an_error_behind_the_winner_leaves_nothing_open(
        self, crowded: dict[tuple[Cell, str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        crowded[(*SHAPE, 64), CODE] = "out of memory"
        assert set(self.start(tmp_path, monkeypatch).values()) == {TILE_A}
        assert not read(tuner.table_path(tmp_path, ENVIRONMENT), ENVIRONMENT).open

    def test_d39_what_runs_meanwhile_is_left_when_it_fails_elsewhere(
        self, crowded: dict[tuple[Cell, str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A cell known from before is led by a tile that fails where it is tested now: it goes, and is tested too."""
        known, crammed = (*SHAPE, 64), (*SHAPE, 72)
        other = Table(names={(*SHAPE, rows): (TILE_B,) for rows in LADDER if rows not in (64, 72)} | {known: (TILE_B,)})
        write(tuner.table_path(tmp_path, ENVIRONMENT), ENVIRONMENT, other)
        crowded[crammed, TILE_A] = crowded[known, TILE_A] = "out of memory"
        running = self.start(tmp_path, monkeypatch)
        assert (running[known], running[crammed]) == (CODE, CODE)
        assert TILE_B not in running.values()

    def test_d39_a_search_keeps_what_it_could_not_test_open(
        self, crowded: dict[tuple[Cell, str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(offer.blas, "codes", lambda *_: [])
        cell = (*SHAPE, 64)
        fastest = FakeTrials(by_order(CUBLASLT))
        crowded[cell, CUBLASLT] = "out of memory"
        found = search(
            self.SHAPES, FakeTrials(fastest.time, lambda c, n: self._same(crowded, c, n)), offered=offered
        )  # fmt: skip
        assert found.open.keys() == {cell}
        assert found.open[cell][0] == CUBLASLT
        assert found.names[cell][0] != CUBLASLT
        table = tuner.merged(Table(open={cell: (CODE,), (16, 16, 64): (CODE,)}), found)
        assert cell not in table.names
        assert table.open == {cell: found.open[cell], (16, 16, 64): (CODE,)}

    @staticmethod
    def _same(errors: dict[tuple[Cell, str], str], cell: Cell, name: str) -> bool:
        if (cell, name) in errors:
            raise CannotRunError(errors[cell, name])
        return True


class TestEnvironment:
    def test_a_driver_that_cannot_be_asked_is_a_typed_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing() -> None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

        monkeypatch.setattr(pynvml, "nvmlInit", missing)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
        monkeypatch.setattr(blas, "version", lambda: 130_100)
        with pytest.raises(UnknownEnvironmentError, match=r"version of the driver is not known: NVML Shared Library"):
            tuner.current_environment(torch.device("cuda", 0))

    def test_a_library_loaded_twice_is_a_typed_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def twice() -> int:
            raise OSError("libcublasLt.so.13 is loaded more than once")

        monkeypatch.setattr(blas, "version", twice)
        with pytest.raises(UnknownEnvironmentError, match=r"version of cuBLAS is not known: .* more than once"):
            tuner.current_environment(torch.device("cuda", 0))

    def test_the_command_says_so_in_one_line(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        def unknown(shapes: object, **_: object) -> Any:
            raise UnknownEnvironmentError("the version of the driver is not known: no library")

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        config = TuneConfig(model="9b", cache_dir=str(tmp_path))
        with pytest.raises(ConfigError, match=r"nothing can be tuned: the version of the driver .*gemm=fixed"):
            search_and_report(config, stderr=io.StringIO(), search=unknown)
