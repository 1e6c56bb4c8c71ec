"""One workload in its steady state inside a capture range, for a profiler to watch.

    python profiling/session.py trace=true out=FOLDER
    profiling/nsys.sh model=9b checkpoint=random tokenizer=FOLDER workload=m1/1024x32 out=FOLDER

Loading, compiling, capturing and two warm-up runs come before the range, which cudaProfilerStart and cudaProfilerStop
bound. Requests and passes are named ranges with their numbers (engine/run/ranges.py): NVTX, or with `trace=true` those
of torch.profiler; two profilers cannot watch one process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TextIO

import torch
from record import environment
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function
from workloads import workload_named

from engine.cli import config_text, run_command, write_whole
from engine.config import EngineConfig, resolve
from engine.engine import Engine
from engine.errors import ConfigError
from engine.lines import Load
from engine.process import run
from engine.run import ranges

WARM_UPS = 2
"""The first run misses graphs, which are then captured; the second replays them."""


@dataclass(kw_only=True)
class SessionConfig(EngineConfig):
    """`python profiling/session.py`."""

    workload: str = "m1/1024x32"
    """Name of a frozen request (`python profiling/workloads.py`)."""
    repeats: int = 5
    """Runs inside the capture range; a trace holds one."""
    trace: bool = False
    """Write a trace of torch.profiler, and emit the ranges into it instead of NVTX."""
    out: str | None = None
    """Folder for the report and its configuration; it must hold no other session."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.repeats < 1:
            raise ConfigError(f"repeats={self.repeats} is not a whole number of at least 1")


def main() -> None:
    def job(config: SessionConfig) -> int:
        return session(config, load=Engine.load, stderr=sys.stderr)

    run("session", lambda: run_command("session", SessionConfig, job))


def session(config: SessionConfig, *, load: Load, stderr: TextIO) -> int:
    """Run `config.workload` and write what was run to `config.out`. Raises ConfigError for options that cannot work."""
    config = replace(resolve(config), nvtx=not config.trace)
    if not config.out:
        raise ConfigError("out is missing; name a folder for the report, as in out=/tmp/session")
    workload, folder = workload_named(config.workload), Path(config.out).expanduser()
    if (folder / "config.yaml").exists():  # a profiler may have begun its report there, but no session ended in it
        raise ConfigError(f"out={folder} holds an earlier session; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    with load(EngineConfig(**{f.name: getattr(config, f.name) for f in fields(EngineConfig)})) as engine:
        questions, profiled = engine.prompts(workload.body), list[float]()
        for _ in range(WARM_UPS):
            engine.forward(questions)
            if config.graphs == "captured":
                engine.settle()
        with _traced(folder / "trace.json.gz") if config.trace else _capture_range(config.device):
            for _ in range(1 if config.trace else config.repeats):
                start = time.perf_counter()
                forward = engine.forward(questions, name=workload.name)
                profiled.append((time.perf_counter() - start) * 1e3)
    facts = {
        "workload": workload.name, "sha256": workload.sha256, "candidates": workload.candidates,
        "rows": forward.counters.rows, "passes": forward.counters.passes, "planned_bytes": asdict(forward.memory),
        "profiled_ms": profiled, "environment": environment(),
    }  # fmt: skip
    write_whole(folder / "config.yaml", config_text(config))
    write_whole(folder / "session.json", json.dumps(facts, indent=1) + "\n")
    print(f"session: {workload.name} ran {len(profiled)} times; configuration in {folder}", file=stderr)
    return 0


@contextmanager
def _capture_range(device: str) -> Iterator[None]:
    """What a profiler records that waits for cudaProfilerStart; nothing on a CPU."""
    if device == "cpu":
        yield
        return
    torch.cuda.synchronize(device)
    with torch.cuda.profiler.profile():
        yield
        torch.cuda.synchronize(device)


@contextmanager
def _traced(path: Path) -> Iterator[None]:
    """A compressed Chrome trace of torch.profiler with the project's ranges: no shapes, no stacks, no memory."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    # Requests run on the thread that owns the device, which was there before.
    with profile(activities=activities, experimental_config=_ExperimentalConfig(profile_all_threads=True)) as profiler:
        ranges.enable(record_function)
        yield
    unfinished = path.with_name(f".{os.getpid()}.{path.name}")
    profiler.export_chrome_trace(str(unfinished))
    unfinished.replace(path)


if __name__ == "__main__":
    main()
