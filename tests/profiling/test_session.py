"""Profiling sessions on a CPU: the trace and what is kept beside it; and the summary of Nsight Compute's page."""

from __future__ import annotations

import gzip
import io
import json
import re
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

NAMED = Workload(
    name="m1/ticket", body=TICKET, sha256="ab12", questions=3, candidates=6, logical_tokens=1, unique_tokens=1,
    shared_prefix=1, longest_prompt=1,
)  # fmt: skip


class TestSession:
    @pytest.fixture(autouse=True)
    def _restored(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One known workload, and no ranges afterwards."""
        monkeypatch.setattr(ranges, "_sink", None)
        monkeypatch.setattr(session, "workload_named", lambda name: NAMED)

    @staticmethod
    def run(folder: Path, **options: Any) -> int:
        made = {"device": "cpu", "cache_dir": cache_dir().name, "out": str(folder), **options}
        return session.session(SessionConfig(**made), load=Engine.load, stderr=io.StringIO())

    def test_the_trace_has_one_run_with_its_ranges_and_no_shapes(self, tmp_path: Path) -> None:
        out = tmp_path / "new" / "out"
        assert self.run(out, trace=True, schedule="tree") == 0
        assert sorted(path.name for path in out.iterdir()) == ["config.yaml", "session.json", "trace.json.gz"]
        facts = json.loads((out / "session.json").read_text())
        assert (facts["workload"], facts["sha256"], facts["candidates"]) == ("m1/ticket", "ab12", 6)
        assert len(facts["profiled_ms"]) == 1
        kept = to_config(OmegaConf.load(out / "config.yaml"), SessionConfig)  # type: ignore[arg-type]
        assert (kept.gemm, kept.schedule, kept.nvtx) == ("fixed", "tree", False), "what ran, not what was asked for"
        events = json.loads(gzip.decompress((out / "trace.json.gz").read_bytes()))["traceEvents"]
        [outer], [inner] = (
            [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith(kind)]
            for kind in ("request ", "tree ")
        )
        assert "name=m1/ticket schedule=tree" in outer["name"]
        assert f" rows={facts['rows']['tree']} " in inner["name"]
        assert outer["ts"] <= inner["ts"]
        assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 1
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
        self.run(tmp_path, repeats=2)
        assert order == [*["warm-up"] * 2, "wait", "start", *["m1/ticket"] * 2, "wait", "stop"]


def test_options(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    for out, message in ((None, "out is missing"), (str(tmp_path), "holds an earlier session; name another folder")):
        with pytest.raises(ConfigError, match=message):
            session.session(SessionConfig(device="cpu", out=out), load=pytest.fail, stderr=io.StringIO())  # type: ignore[arg-type]
    with initialize_config_module("configs", version_base=None):
        composed = compose("session")
    assert OmegaConf.to_container(composed) == OmegaConf.to_container(OmegaConf.structured(SessionConfig))
    assert session.workload_named(SessionConfig().workload).candidates == 32


SPEED, LAUNCH = "GPU Speed Of Light Throughput", "Launch Statistics"


def launch(id: int, kernel: str, us: float, *, sm: float = 50, static: int = 0) -> str:
    """The lines of one launch, as the tool writes them, with some that the summary passes over."""
    metrics = [
        (SPEED, "DRAM Frequency", "hz", "3,200,000,000"), (SPEED, "Duration", "ns", f"{us * 1000:,.0f}"),
        (SPEED, "Compute (SM) Throughput", "%", f"{sm:.2f}"), (SPEED, "Memory Throughput", "%", "71.00"),
        (SPEED, "DRAM Throughput", "%", "40.00"), ("Memory Workload Analysis", "Memory Throughput", "byte/s", "9,999"),
        ("Occupancy", "Achieved Occupancy", "%", "24.50"), (LAUNCH, "Registers Per Thread", "register/thread", "128"),
        (LAUNCH, "Static Shared Memory Per Block", "byte/block", f"{static:,}"),
        (LAUNCH, "Dynamic Shared Memory Per Block", "byte/block", "65,536"),
    ]  # fmt: skip
    return "".join(f'"{id}","77","{kernel}","{s}","{m}","{u}","{v}"\n' for s, m, u, v in metrics)


def test_launches_of_a_name_are_one_line_weighted_by_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.csv"
    header = '"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"\n'
    launches = [launch(0, "scan, leaves", 1, sm=20), launch(1, "gemm", 300), launch(2, "scan, leaves", 3, sm=60)]
    path.write_text("==WARNING== a word first\n" + header + "".join(launches) + launch(3, "gemm", 100, static=1024))
    assert ncu_summary.main(str(path)) == 0
    head, *lines = (re.split(r"  +", line) for line in capsys.readouterr().out.splitlines())
    assert head == list(ncu_summary.HEADERS)
    assert lines == [
        ["gemm", "2", "400.0", "200.0", "99.0", "50.0", "40.0", "24.5", "128", "65.0"],
        ["scan, leaves", "2", "4.0", "2.0", "1.0", "50.0", "40.0", "24.5", "128", "64.0"],
    ]
    for change in (("Section Name", "Rule"), ('"ns"', '"cycle"'), ('"24.50"', '"n/a"'), ('"ID"', "")):
        other = tmp_path / "other.csv"
        other.write_text(path.read_text().replace(*change))
        assert ncu_summary.main(str(other)) == 2
        assert "not a details page" in capsys.readouterr().err
