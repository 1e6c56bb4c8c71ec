"""Profiling sessions on a CPU: the trace and what is kept beside it, and the scripts around the profilers."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import ncu_summary
import pytest
import session
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from session import SessionConfig
from workloads import Workload

from engine import Engine
from engine.cli import to_config
from engine.errors import ConfigError
from engine.run import ranges
from tests.engine.engine_support import TICKET, cache_dir

PROFILING = Path(session.__file__).parent
TOOLS = {"nsys.sh": "nsys", "ncu.sh": "ncu"}
NAMED = Workload(
    name="m1/ticket", body=TICKET, sha256="ab12", questions=3, candidates=6, logical_tokens=1, unique_tokens=1,
    shared_prefix=1, longest_prompt=1,
)  # fmt: skip
HEADER = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device",'
    '"CC","Section Name","Metric Name","Metric Unit","Metric Value"\n'
)


@pytest.fixture
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """One known workload, and no ranges afterwards."""
    monkeypatch.setattr(ranges, "_sink", None)
    monkeypatch.setattr(session, "workload_named", lambda name: NAMED)


def config(folder: Path, **options: Any) -> SessionConfig:
    made = {"device": "cpu", "cache_dir": cache_dir().name, "workload": "m1/ticket", "out": str(folder)}
    return SessionConfig(**(made | options))


@pytest.mark.usefixtures("_restored")
class TestSession:
    def test_the_trace_has_one_run_with_its_ranges_and_no_shapes(self, tmp_path: Path) -> None:
        out = tmp_path / "new" / "out"
        assert session.session(config(out, trace=True, schedule="tree"), load=Engine.load, stderr=io.StringIO()) == 0
        assert sorted(path.name for path in out.iterdir()) == ["config.yaml", "session.json", "trace.json.gz"]
        facts = json.loads((out / "session.json").read_text())
        assert (facts["workload"], facts["sha256"], facts["candidates"]) == ("m1/ticket", "ab12", 6)
        assert len(facts["profiled_ms"]) == 1
        assert facts["environment"]["torch"] == torch.__version__
        events = json.loads(gzip.decompress((out / "trace.json.gz").read_bytes()))["traceEvents"]
        [outer], [inner] = (
            [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith(kind)]
            for kind in ("request ", "tree ")
        )
        assert "name=m1/ticket schedule=tree" in outer["name"]
        [rows] = re.findall(r" rows=(\d+) ", inner["name"])
        assert int(rows) == facts["rows"]["tree"]
        assert outer["ts"] <= inner["ts"]
        assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 1
        kept = to_config(OmegaConf.load(out / "config.yaml"), SessionConfig)  # type: ignore[arg-type]
        assert (kept.gemm, kept.schedule, kept.nvtx) == ("fixed", "tree", False), "what ran, not what was asked for"
        assert not any({"Input Dims", "Call stack", "Bytes"} & set(event.get("args", {})) for event in events)

    def test_only_the_steady_runs_are_in_the_capture_range(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        order: list[str] = []
        forward = Engine.forward

        def counted(engine: Engine, questions: Any, *, name: str | None = None) -> Any:
            order.append(name or "warm-up")
            return forward(engine, questions, name=name)

        monkeypatch.setattr(Engine, "forward", counted)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append("wait"))
        monkeypatch.setattr(torch.cuda.profiler, "start", partial(order.append, "start"))
        monkeypatch.setattr(torch.cuda.profiler, "stop", partial(order.append, "stop"))
        on_gpu = session._capture_range
        monkeypatch.setattr(session, "_capture_range", lambda device: on_gpu("cuda:0"))
        session.session(config(tmp_path, repeats=2), load=Engine.load, stderr=io.StringIO())
        assert order == [*["warm-up"] * 2, "wait", "start", *["m1/ticket"] * 2, "wait", "stop"]

    @pytest.mark.parametrize(
        ("out", "message"),
        [
            (None, "out is missing; name a folder"),
            ("/dev/null/x", "out=/dev/null/x: Not a directory"),
            ("used", "holds an earlier session; name another folder"),
        ],
    )
    def test_a_folder_that_cannot_be_used_is_refused_before_loading(
        self, tmp_path: Path, out: str | None, message: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "used").mkdir()
        (tmp_path / "used" / "config.yaml").touch()
        with pytest.raises(ConfigError, match=message):
            session.session(config(tmp_path, out=out), load=pytest.fail, stderr=io.StringIO())  # type: ignore[arg-type]


def test_options(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="repeats=0 is not a whole number of at least 1"):
        SessionConfig(repeats=0)
    with initialize_config_module("configs", version_base=None):
        composed = compose("session")
    assert OmegaConf.to_container(composed) == OmegaConf.to_container(OmegaConf.structured(SessionConfig))
    assert session.workload_named(SessionConfig().workload).candidates == 32


def launch(id: int, kernel: str, us: float, *, sm: float = 50, static: int = 0, omit: str = "") -> str:
    """The lines of one launch, as the tool writes them; every second metric is one that the summary passes over."""
    speed, occupancy, statistics = "GPU Speed Of Light Throughput", "Occupancy", "Launch Statistics"
    metrics = [
        (speed, "DRAM Frequency", "hz", "3,200,000,000"), (speed, "Duration", "ns", f"{us * 1000:,.0f}"),
        (speed, "Compute (SM) Throughput", "%", f"{sm:.2f}"), (speed, "Memory Throughput", "%", "71.00"),
        (speed, "DRAM Throughput", "%", "40.00"), ("Memory Workload Analysis", "Memory Throughput", "byte/s", "9,999"),
        (occupancy, "Achieved Occupancy", "%", "24.50"), (occupancy, "Theoretical Occupancy", "%", "25.00"),
        (statistics, "Registers Per Thread", "register/thread", "128"),
        (statistics, "Static Shared Memory Per Block", "byte/block", f"{static:,}"),
        (statistics, "Dynamic Shared Memory Per Block", "byte/block", "65,536"),
    ]  # fmt: skip
    place = f'"77","python3","127.0.0.1","{kernel}","1","7","(128, 1, 1)","(264, 1, 1)","0","9.0"'
    lines = [f'"{id}",{place},"{s}","{m}","{u}","{v}"\n' for s, m, u, v in metrics if m != omit]
    return "".join(lines)


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.csv"
    launches = [launch(0, "scan, leaves", 1, sm=20), launch(1, "gemm", 300), launch(2, "scan, leaves", 3, sm=60)]
    path.write_text("==WARNING== a word first\n" + HEADER + "".join(launches) + launch(3, "gemm", 100, static=1024))
    return path


class TestNcuSummary:
    def test_launches_of_a_name_are_one_line_weighted_by_time(
        self, metrics: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert ncu_summary.main([str(metrics)]) == 0
        head, *lines = (re.split(r"  +", line) for line in capsys.readouterr().out.splitlines())
        assert head == list(ncu_summary.HEADERS)
        assert lines == [
            ["gemm", "2", "400.0", "200.0", "99.0", "50.0", "40.0", "24.5", "128", "65.0"],
            ["scan, leaves", "2", "4.0", "2.0", "1.0", "50.0", "40.0", "24.5", "128", "64.0"],
        ]

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda text: "", "not a details page"),
            (lambda text: text.replace("Section Name", "Rule"), "KeyError('Section Name')"),
            (lambda text: text.replace('"ns"', '"cycle"'), "KeyError('cycle'); write it with ncu --page details"),
            (lambda text: text.replace('"24.50"', '"n/a"'), "not a details page"),
            (lambda text: text + launch(4, "odd", 1, omit="Duration"), "launch 4 has no 'Duration'"),
        ],
        ids=["empty", "columns", "units", "values", "missing"],
    )
    def test_other_files_are_refused_in_one_line(
        self, metrics: Path, capsys: pytest.CaptureFixture[str], change: Any, message: str
    ) -> None:
        metrics.write_text(change(metrics.read_text()))
        assert ncu_summary.main([str(metrics)]) == 2
        captured = capsys.readouterr()
        assert message in captured.err
        assert (captured.err.count("\n"), captured.out) == (1, "")


# A stand-in for both tools. Profiling writes the report named in its options; reading one prints the file in $TABLE.
TOOL = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >>"$CALLS"
[ "$1" != stats ] && [ "$1" != --import ] || { cat "$TABLE"; exit; }
[ -z "${FAIL:-}" ] || exit "$FAIL"
for word in "$@"; do
    case $word in --output=*) echo bits >"${word#*=}" ;; *.ncu-rep) echo bits >"$word" ;; esac
done
"""


class TestScripts:
    @pytest.fixture
    def shell(self, tmp_path: Path, metrics: Path) -> dict[str, str]:
        """An environment with stand-ins for the tools; what they are called with is in $CALLS."""
        tools = tmp_path / "bin"
        tools.mkdir()
        for name in TOOLS.values():
            (tools / name).write_text(TOOL)
            (tools / name).chmod(0o755)
        path, calls = f"{tools}{os.pathsep}{os.environ['PATH']}", str(tmp_path / "calls")
        return {**os.environ, "PATH": path, "PYTHON": sys.executable, "CALLS": calls, "TABLE": str(metrics)}

    @staticmethod
    def call(script: str, *words: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run([PROFILING / script, *words], env=env, capture_output=True, text=True, check=False)

    @pytest.mark.parametrize(
        ("script", "words", "wanted"),
        [
            ("nsys.sh", [], ["--cuda-graph-trace=node", "--capture-range=cudaProfilerApi"]),
            ("ncu.sh", [], ["--profile-from-start off", "--launch-skip 0 --launch-count 100 --force"]),
            ("ncu.sh", ["--kernels", "a|b", "--skip", "5"], ["--launch-skip 5", "--kernel-name regex:a|b"]),
        ],
    )
    def test_a_report_its_summary_and_nothing_else(
        self, script: str, words: list[str], wanted: list[str], shell: dict[str, str], tmp_path: Path
    ) -> None:
        out = tmp_path / "a folder"
        done = self.call(script, *words, "model=tiny", f"out={out}", env=shell)
        assert done.returncode == 0, done.stderr
        extra = ["metrics.csv"] if script == "ncu.sh" else []
        assert sorted(path.name for path in out.iterdir()) == [*extra, f"report.{TOOLS[script]}-rep", "summary.txt"]
        assert "scan, leaves" in (out / "summary.txt").read_text()
        first, *_ = Path(shell["CALLS"]).read_text().splitlines()
        fixed = " graphs=compiled repeats=1" if script == "ncu.sh" else ""
        for text in [*wanted, f"{PROFILING / 'session.py'} model=tiny out={out}{fixed}"]:
            assert text in first

    @pytest.mark.parametrize("script", TOOLS)
    def test_a_session_that_fails_gives_its_code_and_leaves_no_report(
        self, script: str, shell: dict[str, str], tmp_path: Path
    ) -> None:
        done = self.call(script, f"out={tmp_path / 'out'}", env={**shell, "FAIL": "7"})
        assert done.returncode == 7
        assert list((tmp_path / "out").iterdir()) == []
        bare = {**shell, "PATH": "/usr/bin:/bin"}
        done = self.call(script, f"out={tmp_path / 'new'}", env=bare)
        assert (done.returncode, (tmp_path / "new").exists()) == (2, False)
        assert f"{TOOLS[script]} is not on the PATH" in done.stderr

    @pytest.mark.parametrize(
        ("script", "words", "message"),
        [
            ("nsys.sh", ["model=tiny"], "out is missing"),
            ("nsys.sh", ["out=/nowhere/x", "trace=true"], "two profilers cannot watch one process"),
            ("ncu.sh", ["out=/nowhere/x", "graphs=captured"], "graphs= is fixed here"),
            ("ncu.sh", ["--count", "0", "out=/nowhere/x"], "--count 0: not numbers of launches"),
            ("ncu.sh", ["--kernels"], "--kernels needs a value"),
            ("ncu.sh", ["--kernel", "x"], "--kernel is not an option"),
        ],
    )
    def test_wrong_options(self, script: str, words: list[str], message: str, shell: dict[str, str]) -> None:
        done = self.call(script, *words, env=shell)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert message in done.stderr
