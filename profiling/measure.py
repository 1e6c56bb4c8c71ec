"""What every measurement here shares: CUDA-graph timing, the environment it ran in, and one JSON-lines record.

A record is one line: `kind`, `name`, `configuration`, `samples_us` (raw, in the order taken), `median_us`, and the
environment (versions, git commit, GPU, driver, clocks). Absolute times hold for one GPU; a record therefore names the
peer it was taken beside in the same run (`peer`, `ratio`).
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

SCHEMA = 1
ROOT = Path(__file__).resolve().parent.parent


def _command(*words: str) -> str:
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=20, cwd=ROOT, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


@cache
def environment() -> dict[str, Any]:
    """Versions, commit and device: what a number needs to be compared with another."""
    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "transformers", "fla", "causal_conv1d"):
        try:
            found[name] = __import__(name).__version__
        except ImportError:
            found[name] = None
    found["git"] = _command("git", "rev-parse", "HEAD") or None
    found["git_dirty"] = bool(_command("git", "status", "--porcelain"))
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["driver"] = _command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]
        found["cuda"] = torch.version.cuda
    return found


def clocks(device: torch.device | str = "cuda:0") -> dict[str, str]:
    """Clocks, power, temperature and throttle reasons of `device` now; logged, never changed."""
    fields = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "clocks_event_reasons.active")
    uuid = torch.cuda.get_device_properties(device).uuid  # its number there need not be the one here
    line = _command("nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
    return dict(zip(fields, (part.strip() for part in line.split(",")), strict=False))


def graph_times(fn: Callable[[], object], *, repeats: int = 20, inner: int = 1, warmup: int = 3) -> list[float]:
    """Microseconds per call of `fn`, replayed from one CUDA graph that holds `inner` calls; raw samples."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            fn()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inner):
            fn()
    for _ in range(warmup):
        graph.replay()
    samples = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        samples.append(start.elapsed_time(stop) * 1e3 / inner)
    del graph
    return samples


@dataclass(kw_only=True)
class Record:
    """One measurement. `floor_us` is the time its bytes or flops need at the ceilings given in `configuration`."""

    kind: str
    name: str
    samples_us: list[float]
    configuration: dict[str, Any] = field(default_factory=dict)
    peer: str | None = None
    ratio: float | None = None
    floor_us: float | None = None

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples_us)


class Results:
    """Appends records to a JSON-lines file, each complete on its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, record: Record) -> None:
        line = {
            "schema": SCHEMA,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            **asdict(record),
            "median_us": record.median_us,
            "clocks": clocks() if torch.cuda.is_available() else {},
            "environment": environment(),
        }
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
