"""The whole comparison as a user starts it, on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_tiny_comparison_runs_every_arm_and_passes_its_gates(tmp_path: Path) -> None:
    out = tmp_path / "run"
    # The speed of a machine that other tests share is no fact to assert; equal bits are.
    words = ["model=tiny", f"out={out}", "names=[m1/256x2,m1/256x8]", "budget_minutes=10", "gates.speedup=0.01"]
    done = subprocess.run(
        [sys.executable, "profiling/compare.py", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    summary = (out / "summary.md").read_text()
    for arm in ("base", "independent", "batched", "levels_one", "tree", "aligned", "compiled"):
        assert f"| identity | {arm} | passed | 30 of 30 candidates equal |" in summary
    for arm in ("plain", "transformers/torch/one", "transformers/torch/batched", "transformers/torch/forked"):
        assert f"| {arm} |" in summary
    assert "not run" not in (out / "cells.jsonl").read_text()
