"""The command around every case: options, records, the timer's turns, exit codes, and what ends early."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import bench
import pytest
import record
import timing
import torch
from bench_options import BenchConfig
from cases import Case
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from record import Record

from engine.cli import to_config
from engine.errors import ConfigError

ROOT = Path(record.__file__).parents[1]


def test_the_yaml_repeats_every_default() -> None:
    with initialize_config_module("configs", version_base=None):
        composed = compose("bench")
        own = to_config(compose("bench", ["case=forward", "workloads=[3136,3093+255x34]"]), BenchConfig)
    assert OmegaConf.to_container(composed) == OmegaConf.to_container(OmegaConf.structured(BenchConfig))
    assert own.workloads == ["3136", "3093+255x34"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"case": "equalty"}, "case=equalty is not one of .*did you mean 'equality'"),
        ({"only": ["softmax"]}, "only=softmax is not one of delta_rule"),
        ({"workloads": ["278+8"]}, r"workloads=278\+8 is neither"),
        ({"samples": 0}, "samples=0 is not a whole number"),
        ({"seconds": 0}, "seconds=0 is not a positive number"),
        ({"rows": [64, 0]}, "nor rows 0"),
    ],
)
def test_nonsense_is_refused_by_name(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BenchConfig(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", ["gemm", "operators"])
def test_kernels_are_not_timed_without_cuda(case: str) -> None:
    command = [sys.executable, "profiling/bench.py", f"case={case}", "device=cpu"]
    done = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": "."}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith(f"bench: case={case} times kernels in CUDA graphs, and no CUDA device is visible")


def case_of(*records: Record, error: BaseException | None = None) -> Case:
    def measure(config: BenchConfig) -> Iterator[Record]:
        yield from records
        if error is not None:
            raise error

    return Case(measure=measure, figures={"name": lambda r: r.name, "us": lambda r: r.median_us})


def test_records_come_back_as_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "results.jsonl"
    first = Record(case="x", name="first", samples_us=[3.25, 1.5, 2.125], peer="copy", ratio=1.5, floor_us=0.5)
    assert bench.bench(BenchConfig(out=str(out)), case_of(first, Record(case="x", name="second"))) == 0
    read, second = (json.loads(line) for line in out.read_text().splitlines())
    assert {key: read[key] for key in vars(first)} == vars(first)
    assert (read["median_us"], second["median_us"]) == (2.125, None)
    assert read["environment"]["torch"] == torch.__version__
    assert [line.split() for line in capsys.readouterr().out.splitlines()[1:3]] == [["first", "2.125"], ["second", "-"]]


def test_a_record_that_failed_fails_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.bench(BenchConfig(), case_of(Record(case="x", name="bad", failed="other bits"))) == 1
    assert "FAILED bad: other bits" in capsys.readouterr().out


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("lost")])
def test_what_was_measured_before_it_ended_is_kept(
    error: BaseException, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results.jsonl"
    with pytest.raises(type(error)):
        bench.bench(BenchConfig(out=str(out)), case_of(Record(case="x", name="kept"), error=error))
    assert json.loads(out.read_text())["name"] == "kept"
    assert "kept" in capsys.readouterr().out


class TestTimer:
    def replays(self, calls: list[str], clock: list[float], took: float) -> dict[str, Callable[[], float]]:
        def replay(name: str) -> float:
            calls.append(name)
            clock[0] += took
            return float(len(calls))

        return {name: lambda name=name: replay(name) for name in "ab"}  # type: ignore[misc]

    @pytest.mark.parametrize(("took", "samples"), [(0.01, 5), (0.5, timing.LEAST), (0.125, 4)])
    def test_variants_take_turns_behind_a_round_that_does_not_count(
        self, took: float, samples: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock, calls = [0.0], list[str]()
        monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
        taken = timing.in_turns(self.replays(calls, clock, took), samples=5, seconds=0.9)
        assert calls == ["a", "b"] * (samples + 1)
        assert taken["b"] == [4.0 + 2 * i for i in range(samples)]

    @pytest.mark.gpu
    def test_a_graph_replays_every_call(self) -> None:
        sums = [torch.zeros(1, device="cuda") for _ in range(2)]
        replay = timing.captured([lambda x=x: x.add_(1) for x in sums])  # type: ignore[misc]
        assert replay() > 0
        replay()
        assert [x.item() for x in sums] == [3.0, 3.0], "once before the capture, which runs nothing, and twice replayed"
