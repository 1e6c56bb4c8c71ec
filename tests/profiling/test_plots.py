"""Plots: which points are drawn, from hand-made cells and records, and the files they become."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import plots
import pytest
from comparison.journal import Cell, Journal, RequestFacts
from plots import GEMM_ONLY

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


def test_a_panel_for_each_quantity_and_state_and_a_run_of_a_few_is_marked(folder: Path) -> None:
    found = plots.panels(Journal(folder), ("base", "batched", "tree", GEMM_ONLY), list(plots.QUANTITIES))
    latency, tokens, memory = (found[256, label] for label in plots.QUANTITIES)
    assert latency == {
        "base": [(2, 10.5, False), (8, 10.5, False)],
        "batched": [(2, 21.0, False), (8, 84.0, True)],
        GEMM_ONLY: [(2, pytest.approx(6.92), False), (8, pytest.approx(11.0), False)],
    }
    assert tokens["batched"] == [(2, 600, False), (8, 2400, True)]
    assert [y for _, y, _ in memory["batched"]] == [300], "a run of a few says nothing about the memory of all"
    assert list(found[1024, "latency, ms"]["base"]) == [(8, 10.5, False)]


def test_the_same_data_give_the_same_svg_and_other_folders_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plots.main([str(folder), str(tmp_path / "a")]) == 0
    for path in plots.plot(folder, tmp_path / "b"):
        assert ElementTree.parse(path).getroot().tag.endswith("svg")
        assert path.read_bytes() == (tmp_path / "a" / path.name).read_bytes()
    assert plots.main([str(tmp_path)]) == 2
    assert "run.json: not of a comparison" in capsys.readouterr().err
