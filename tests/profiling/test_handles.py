"""The comparison of GEMM handles without a GPU: its tables, records and options."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "profiling"))  # scripts, not a package

import cases
import handles

from graphs.rungs import LADDER

MEDIANS = {
    ("4b", 1): {"default": 2_000.0, "fixed": 3_000.0, "tuned": 1_600.0},
    ("4b", 3_136): {"default": 34_000.0, "fixed": 40_000.0, "tuned": 34_000.0},
    ("9b", 1): {"default": 4_000.0, "fixed": 5_000.0, "tuned": 4_100.0},
    ("9b", 3_136): {"default": 64_000.0, "fixed": 72_000.0, "tuned": 63_000.0},
}


def test_without_cuda_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert handles.main([]) == 2
    assert capsys.readouterr().err == "handles: no CUDA device is visible; these measurements need one\n"


def test_every_option_is_explained_and_wrong_values_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    parser = handles.parser()
    parser.format_help()
    assert all(action.help for action in parser._actions)
    with pytest.raises(SystemExit):
        parser.parse_args(["--models", "9b,5b"])
    assert "5b is not one of 4b, 9b, 27b" in capsys.readouterr().err


def test_default_multiplies_the_rows_themselves_and_the_others_their_rung() -> None:
    assert [handles.multiplied(handle, 1) for handle in handles.HANDLES] == [1, 64, 64]
    assert all(handles.multiplied("tuned", rows) == rows for rows in handles.ROWS[1:])
    assert set(handles.ROWS[1:]) <= set(LADDER)


def test_the_table_holds_times_of_default_and_ratios_of_the_others() -> None:
    headers, lines = handles.table(MEDIANS)
    assert headers == ["rows", "4b ms", "fixed", "tuned", "9b ms", "fixed", "tuned"]
    assert lines == [
        ["1", "2.00", "1.500", "0.800", "4.00", "1.250", "1.025"],
        ["3,136", "34.00", "1.176", "1.000", "64.00", "1.125", "0.984"],
    ]


def test_the_verdict_names_the_mean_and_the_worst_cells() -> None:
    mean = (0.8 * 1.0 * 1.025 * 63 / 64) ** 0.25
    assert handles.verdicts(MEDIANS) == [
        f"tuned over default: geometric mean {mean:.3f}, worst 1.025 (9b, 1 rows)",
        "fixed from 1,024 rows: at least 85% of default (4b, 3,136 rows)",
    ]


def test_a_record_names_its_peer_and_what_was_multiplied() -> None:
    samples = {"default": [4.0, 2.0, 3.0], "fixed": [6.0], "tuned": [1.5, 1.5]}
    default, fixed, tuned = handles.records_of("9b", 1, samples, cases.Ceilings())
    assert (default.peer, default.ratio, default.configuration["multiplied_rows"]) == (None, None, 1)
    assert (fixed.peer, fixed.ratio) == ("default", 2.0)
    assert (tuned.name, tuned.ratio, tuned.configuration["multiplied_rows"]) == ("9b/1/tuned", 0.5, 64)
    assert tuned.floor_us == pytest.approx(3_220, rel=0.01)
