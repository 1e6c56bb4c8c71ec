"""Plots: which points are drawn, from hand-made cells and records, and the files they become."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "profiling"))  # scripts, not a package

import plot_data
import plots
from compare_journal import Cell, RequestFacts
from compare_options import ARMS
from plot_data import FAMILIES, GEMM_ONLY, GROWING, Panel

from engine.errors import ConfigError

DESCRIBED = {
    "configuration": {"model": "9b", "checkpoint": "random", "dtype": "bfloat16"},
    "environment": {"gpu": "NVIDIA H200"},
}
SHAPES = [(256, 278, 2), (256, 278, 8), (1024, 1048, 8)]


def facts(state: int, prefix: int, candidates: int) -> RequestFacts:
    rows = prefix + 34 * candidates
    return RequestFacts(
        request=f"m1/{state}x{candidates}", set="m1", sha256="", candidates=candidates, questions=1,
        logical_tokens=candidates * (prefix + 34), unique_rows=rows, prefix_tokens=prefix, tokenise_ms=1.0,
        gemm_only_us=20.0 * rows,
    )  # fmt: skip


def cell(of: RequestFacts, arm: str, samples: list[float], *, number: int = 1, **options: Any) -> Cell:
    made = {
        "pass_number": number, "request": of.request, "sha256": "", "arm": arm, "status": "run",
        "candidates": of.candidates, "candidates_run": of.candidates, "logical_tokens": 1, "samples_ms": samples,
        "rows": {"tree": of.unique_rows}, "peak_bytes": 300 << 20,
    }  # fmt: skip
    return Cell(**(made | options))


def write(folder: Path, lines: list[RequestFacts | Cell], described: Any = DESCRIBED) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps(described))
    kinds = [("request" if isinstance(line, RequestFacts) else "cell", line) for line in lines]
    text = "".join(json.dumps({"kind": kind, "time": "", **asdict(line)}) + "\n" for kind, line in kinds)
    (folder / "cells.jsonl").write_text(text)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Base and independent on three requests, in the excluded pass and two others."""
    lines: list[RequestFacts | Cell] = []
    for shape in SHAPES:
        of = facts(*shape)
        lines.append(of)
        for number, factor in ((0, 50.0), (1, 1.0), (2, 1.1)):
            ms = of.candidates * 10.0 * factor
            lines.append(cell(of, "base", [ms / 5] * 3, number=number))
            few = {"candidates_run": 2, "rows": {"branch": 600}}
            lines.append(cell(of, "batched", [ms * 2 / of.candidates], number=number, **few))
    return write(tmp_path / "run", lines)


def points(panel: Panel, label: str) -> list[tuple[float, float, bool]]:
    [series] = [series for series in panel.series if series.label == label]
    return list(zip(series.x, series.y, series.scaled, strict=True))


class TestData:
    def test_a_panel_for_each_state_and_a_point_for_each_number_of_candidates(self, folder: Path) -> None:
        short, long = plot_data.by_candidates(plot_data.read_run(folder), FAMILIES["schedules"])
        assert (short.title, long.title) == ("state of about 256 tokens", "state of about 1,024 tokens")
        assert points(short, "base") == [(2, pytest.approx(4.2), False), (8, pytest.approx(16.8), False)]
        assert points(long, "base") == [(8, pytest.approx(16.8), False)]
        assert [series.label for series in short.series] == ["base", "batched", GEMM_ONLY]

    def test_a_run_of_a_few_is_stated_for_all_and_marked(self, folder: Path) -> None:
        short, _ = plot_data.by_candidates(plot_data.read_run(folder), FAMILIES["schedules"])
        assert points(short, "batched") == [(2, pytest.approx(21), False), (8, pytest.approx(84), True)]

    def test_a_panel_for_each_number_of_candidates_over_the_shared_prefix(self, folder: Path) -> None:
        two, eight = plot_data.by_state(plot_data.read_run(folder), FAMILIES["schedules"])
        assert (two.title, eight.title) == ("2 candidates", "8 candidates")
        assert [x for x, *_ in points(eight, "base")] == [278, 1048]
        assert points(two, GEMM_ONLY) == [(278, pytest.approx(20 * (278 + 68) / 1e3), False)]

    def test_growth_of_tokens_time_and_memory(self, folder: Path) -> None:
        panels = plot_data.growth(plot_data.read_run(folder))
        assert [panel.y_label for panel in panels[:3]] == [
            "tokens processed", "latency, ms", "peak memory above weights, MiB",
        ]  # fmt: skip
        tokens, _, memory = panels[:3]
        assert points(tokens, "base") == [(2, 278 + 68, False), (8, 278 + 272, False)]
        assert points(tokens, "batched") == [(2, 600, False), (8, 2400, True)]
        assert points(memory, "batched") == [(2, 300, False)], "a run of a few says nothing about the memory of all"

    def test_without_a_gpu_there_is_no_memory_and_no_yardstick(self, tmp_path: Path) -> None:
        of = RequestFacts(**{**asdict(facts(*SHAPES[0])), "gemm_only_us": None})
        described = {
            "configuration": {"model": "tiny", "checkpoint": "/x", "dtype": "float32"},
            "environment": {},
        }
        run = plot_data.read_run(write(tmp_path / "run", [of, cell(of, "base", [1.0], peak_bytes=None)], described))
        assert run.subject == "tiny, weights of a checkpoint, float32 on a CPU"
        assert {panel.y_label for panel in plot_data.growth(run)} == {"tokens processed", "latency, ms"}
        [panel] = plot_data.by_candidates(run, FAMILIES["schedules"])
        assert [series.label for series in panel.series] == ["base"]

    def test_what_was_not_run_and_other_sets_are_left_out(self, tmp_path: Path) -> None:
        of, other = facts(*SHAPES[0]), RequestFacts(**{**asdict(facts(*SHAPES[1])), "request": "m4/001", "set": "m4"})
        missed = cell(of, "tree", [], status="not run: budget", candidates_run=0)
        folder = write(tmp_path / "run", [of, other, missed, cell(other, "base", [9.0]), cell(of, "base", [1.0])])
        assert [c.arm for c in plot_data.read_run(folder).cells] == ["base"]

    def test_a_line_that_is_being_written_waits(self, folder: Path) -> None:
        before = plot_data.read_run(folder)
        with (folder / "cells.jsonl").open("a") as file:
            file.write('{"kind": "ce')
        assert plot_data.read_run(folder) == before

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                lambda folder: (folder / "run.json").unlink(),
                "run.json: No such file .* give the folder of a comparison",
            ),
            (lambda folder: (folder / "run.json").write_text("{}"), "run.json: not of a comparison"),
            (lambda folder: (folder / "cells.jsonl").write_text("{}\n"), "line 1 cannot be read"),
            (lambda folder: (folder / "cells.jsonl").write_text(""), "no request of M1 was measured"),
        ],
        ids=["no run", "other run", "other lines", "empty"],
    )
    def test_other_folders_are_refused(self, folder: Path, change: Any, message: str) -> None:
        change(folder)
        with pytest.raises(ConfigError, match=message):
            plot_data.read_run(folder)

    def test_every_arm_of_the_comparison_has_a_plot(self) -> None:
        drawn = {arm for arms in FAMILIES.values() for arm in arms}
        assert drawn == {*ARMS, GEMM_ONLY}
        assert set(GROWING) <= set(ARMS)


def record(name: str, us: float, peer: str | None = "copy", peer_us: tuple[float, ...] = (5.0,), **more: Any) -> str:
    configuration = {"heads": "9b", "peer_samples_us": list(peer_us)}
    made = {"kind": "operator", "name": name, "samples_us": [us, us, 99.0], "peer": peer, "floor_us": 1.0}
    return json.dumps({**made, "configuration": configuration, "environment": {"gpu": "NVIDIA H200"}, **more}) + "\n"


@pytest.fixture
def operators(tmp_path: Path) -> Path:
    path = tmp_path / "operators.jsonl"
    path.write_text(
        record("delta_rule/320", 30, "flash-linear-attention")
        + record("silu_mul/3,136", 57)
        + record("linear_fixed/gate, up 64", 60, "F.linear")
        + record("delta_rule/255 x 34 behind 3,093", 700, "flash-linear-attention", ())
        + record("silu_mul/3,136", 56)
        + record("failed/64", 1, samples_us=[])
    )
    return path


class TestOperators:
    def test_bars_are_grouped_and_the_last_run_counts(self, operators: Path) -> None:
        bars, subject = plot_data.read_operators(operators)
        assert subject == "9b head counts on NVIDIA H200"
        assert [(bar.group, bar.label, bar.us, bar.peer_us) for bar in bars] == [
            ("delta_rule", "320 rows", 30, 5.0),
            ("row operators, 3,136 rows", "silu_mul", 56, 5.0),
            ("linear_fixed, 64 rows", "gate, up", 60, 5.0),
            ("delta_rule", "255 x 34 behind 3,093", 700, None),
        ]

    def test_the_kept_results_can_be_read(self) -> None:
        kept = sorted(Path(plots.__file__).parent.glob("results/*-operators.jsonl"))
        assert kept
        for path in kept:
            bars, _ = plot_data.read_operators(path)
            assert len({(bar.group, bar.label) for bar in bars}) == len(bars) > 10

    @pytest.mark.parametrize("text", ["{}\n", "no\n", '{"kind": "forward"}\n', ""])
    def test_other_files_are_refused(self, operators: Path, text: str) -> None:
        operators.write_text(text)
        with pytest.raises(ConfigError, match=r"is no record|no operator was measured"):
            plot_data.read_operators(operators)


class TestFiles:
    def test_png_and_svg_of_each_and_no_other_file(
        self, folder: Path, operators: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert plots.main([str(folder), "--operators", str(operators)]) == 0
        stems = ["growth", "latency-candidates-schedules", "latency-state-schedules", "operators"]
        expected = [folder / "plots" / f"{stem}.{kind}" for stem in stems for kind in ("png", "svg")]
        assert sorted((folder / "plots").iterdir()) == expected
        assert sorted(capsys.readouterr().out.split()) == sorted(map(str, expected))
        for path in expected:
            if path.suffix == ".png":
                assert path.read_bytes().startswith(b"\x89PNG")
            else:
                assert ElementTree.parse(path).getroot().tag.endswith("svg")

    def test_the_same_data_give_the_same_bytes(self, operators: Path, tmp_path: Path) -> None:
        first, second = (plots.plot_operators(operators, tmp_path / name) for name in ("a", "b"))
        assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
        operators.write_text(operators.read_text().replace("30", "31"))
        other = plots.plot_operators(operators, tmp_path / "c")
        assert all(path.read_bytes() != before.read_bytes() for path, before in zip(other, first, strict=True))

    def test_every_arm_can_be_told_apart(self) -> None:
        import plot_figures

        for arms in (*FAMILIES.values(), GROWING):
            others = [arm for arm in arms if arm in plot_figures.ENGINE_ARMS and arm != "base"]
            looks = [plot_figures._looks(arm, others) for arm in arms]
            assert len({(look["color"], str(look["linestyle"])) for look in looks}) == len(arms)

    def test_numbers_are_plain(self) -> None:
        import plot_figures

        assert [plot_figures._plain(v) for v in (0.5, 2, 20_000)] == ["0.5", "2", "20,000"]

    def test_without_matplotlib_one_line_and_code_2(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.delitem(sys.modules, "plot_figures", raising=False)
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        assert plots.main([str(folder)]) == 2
        assert capsys.readouterr().err == "plots: matplotlib is not installed; run pip install -e '.[plot]'\n"

    def test_nothing_to_plot_is_a_usage_error(self) -> None:
        with pytest.raises(SystemExit) as ended:
            plots.main([])
        assert ended.value.code == 2
