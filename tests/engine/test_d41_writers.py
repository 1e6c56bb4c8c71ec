"""One run at a time writes a file, and the second says so at once."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from engine.output import claim
from tests.engine.command_support import REQUEST, FakeEngine, Run, rows

ROOT = Path(__file__).parents[2]


class Intruded(FakeEngine):
    """While it loads, another run is started."""

    def __init__(self, other: dict[str, Any]) -> None:
        super().__init__()
        self.other, self.refusals, self.others = other, [], FakeEngine()

    def load(self, config: Any) -> FakeEngine:
        with pytest.raises(ConfigError) as caught:
            Run(self.others, REQUEST, **self.other)
        self.refusals.append(str(caught.value))
        return super().load(config)


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_d41_the_second_run_is_refused_and_the_first_is_whole(tmp_path: Path, suffix: str) -> None:
    requests, out = tmp_path / "r.jsonl", tmp_path / f"o{suffix}"
    requests.write_bytes(b"a\nb\nc\n")
    (tmp_path / "link").symlink_to(out.name)
    request = "-" if suffix == ".json" else str(requests)
    engine = Intruded({"request": request, "out": str(tmp_path / "." / out.name), "overwrite": True})
    assert Run(engine, REQUEST, request=request, out=str(out)).code == 0
    assert engine.refusals == [f"out={out}: another run is writing this file; wait for it or give another out="]
    assert engine.others.configs == []
    if suffix == ".jsonl":
        assert [row["metadata"]["body"] for row in rows(out)] == ["a", "b", "c"]
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []


HOLD = """
import sys, time
from engine.output import claim
with claim(sys.argv[1], inputs={}, overwrite=False):
    print("held", flush=True)
    time.sleep(60)
"""


def test_d41_another_process_counts_and_a_killed_one_holds_nobody_up(tmp_path: Path) -> None:
    out = str(tmp_path / "a.json")
    command = [sys.executable, "-c", HOLD, out]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        start = time.monotonic()
        with pytest.raises(ConfigError, match="another run is writing"), claim(out, inputs={}, overwrite=False):
            pass
        waited = time.monotonic() - start
        holder.kill()
    assert waited < 30  # it does not wait for the other
    assert (tmp_path / ".a.json.lock").exists()
    with claim(out, inputs={}, overwrite=False):
        pass
    assert list(tmp_path.iterdir()) == []
