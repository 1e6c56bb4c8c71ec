"""Plots: which points are drawn, from hand-made cells and records, and the files they become."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import plots
import pytest
from comparison.journal import Cell, Journal, RequestFacts
from comparison.options import ARMS
from plots import FAMILIES, GEMM_ONLY, GROWING

from engine.errors import ConfigError

DESCRIBED = {
    "configuration": {"model": "9b", "checkpoint": "random", "dtype": "bfloat16"},
    "environment": {"gpu": "NVIDIA H200"},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Base and batched on three requests, in the excluded pass and two others; of M4 and of the tree nothing counts."""
    out = tmp_path / "run"
    journal = Journal.begun(out, DESCRIBED)
    for state, prefix, candidates in [(256, 278, 2), (256, 278, 8), (1024, 1048, 8)]:
        rows, name = prefix + 34 * candidates, f"m1/{state}x{candidates}"
        facts = RequestFacts(
            request=name, set="m1", sha256="", candidates=candidates, questions=1, logical_tokens=1, unique_rows=rows,
            prefix_tokens=prefix, tokenise_ms=1.0, gemm_only_us=20.0 * rows,
        )  # fmt: skip
        journal.add(facts)
        for number, ms in ((0, 500.0), (1, 10.0), (2, 11.0)):
            what: dict[str, Any] = {
                "pass_number": number, "request": name, "sha256": "", "candidates": candidates, "logical_tokens": 1,
                "peak_bytes": 300 << 20,
            }  # fmt: skip
            base = {"arm": "base", "candidates_run": candidates, "samples_ms": [ms] * 3, "rows": {"tree": rows}}
            few = {"arm": "batched", "candidates_run": 2, "samples_ms": [ms * 2], "rows": {"branch": 600}}
            journal.add(Cell(status="run", **what, **base))
            journal.add(Cell(status="run", **what, **few))
            journal.add(Cell(status="not run: budget", arm="tree", candidates_run=0, **what))
    journal.add(facts.model_copy(update={"request": "m4/001", "set": "m4"}))
    return out


def test_a_panel_for_each_state_and_a_run_of_a_few_is_marked(folder: Path) -> None:
    short, long = plots.Run(folder).by_candidates(FAMILIES["schedules"])
    assert (short.title, long.title) == ("state of about 256 tokens", "state of about 1,024 tokens")
    assert short.series == {
        "base": [(2, 10.5, False), (8, 10.5, False)],
        "batched": [(2, 21.0, False), (8, 84.0, True)],
        GEMM_ONLY: [(2, pytest.approx(6.92), False), (8, pytest.approx(11.0), False)],
    }


def test_a_panel_for_each_number_of_candidates_over_the_shared_prefix(folder: Path) -> None:
    two, eight = plots.Run(folder).by_state(FAMILIES["schedules"])
    assert (two.title, eight.title) == ("2 candidates", "8 candidates")
    assert [x for x, *_ in eight.series["base"]] == [278, 1048]


def test_growth_of_tokens_time_and_memory(folder: Path) -> None:
    tokens, _, memory, *_ = plots.Run(folder).growth()
    assert tokens.series["batched"] == [(2, 600, False), (8, 2400, True)]
    assert memory.series["batched"] == [(2, 300, False)], "a run of a few says nothing about the memory of all"


def test_every_arm_has_a_plot_and_can_be_told_apart() -> None:
    assert {arm for arms in FAMILIES.values() for arm in arms} == {*ARMS, GEMM_ONLY}
    for arms in (*FAMILIES.values(), GROWING):
        others = [arm for arm in arms if arm in plots.ENGINE_ARMS and arm != "base"]
        looks = [plots.looks(arm, others) for arm in arms]
        assert len({(look["color"], str(look["linestyle"])) for look in looks}) == len(arms)


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


def test_bars_are_grouped_and_the_last_run_counts(operators: Path) -> None:
    bars, subject = plots.read_operators(operators)
    assert subject == "9b head counts on NVIDIA H200"
    assert [(bar.group, bar.label, bar.us, bar.peer_us) for bar in bars] == [
        ("delta_rule", "320 rows", 30, 5.0),
        ("row operators, 3,136 rows", "silu_mul", 56, 5.0),
        ("linear_fixed, 64 rows", "gate, up", 60, 5.0),
        ("delta_rule", "255 x 34 behind 3,093", 700, None),
    ]


def test_svg_of_each_and_the_same_data_give_the_same_bytes(folder: Path, operators: Path, tmp_path: Path) -> None:
    assert plots.main([str(folder), "--operators", str(operators)]) == 0
    stems = ["growth", "latency-candidates-schedules", "latency-state-schedules", "operators"]
    assert sorted((folder / "plots").iterdir()) == [folder / "plots" / f"{stem}.svg" for stem in stems]
    for path in plots.plot(folder, operators, tmp_path / "again"):
        assert ElementTree.parse(path).getroot().tag.endswith("svg")
        assert path.read_bytes() == (folder / "plots" / path.name).read_bytes()


def test_other_folders_and_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plots.main([str(tmp_path)]) == 2
    assert "run.json: not of a comparison" in capsys.readouterr().err
    Journal.begun(tmp_path / "out", DESCRIBED)
    with pytest.raises(ConfigError, match="no request of M1 was measured"):
        plots.Run(tmp_path / "out")
    for text in ("{}\n", "no\n", '{"kind": "forward"}\n', ""):
        (tmp_path / "records.jsonl").write_text(text)
        with pytest.raises(ConfigError, match=r"holds no records|no operator was measured"):
            plots.read_operators(tmp_path / "records.jsonl")
