"""Every kernel compiles for every GPU generation that is promised and fits it; row kernels spill nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.ops.offline_compile import LAUNCHES, SHARED_LIMIT, SIZE_OF

SPILL_NOTHING = ("rows", "gdn_conv")
"""Launches bound by memory alone; the others may trade a few registers for a larger tile."""


def test_every_kernel_compiles_for_every_architecture() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.offline_compile"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(c["launch"], c["arch"]) for c in compiled} == {(name, arch) for name in LAUNCHES for arch in SIZE_OF}
    over = [c for c in compiled if c["shared"] > SHARED_LIMIT[c["arch"]]]
    assert not over, f"more shared memory than there is: {over}"
    spilled = [c for c in compiled if c["launch"] in SPILL_NOTHING and c["stack"]]
    assert not spilled, f"registers spilled: {spilled}"
