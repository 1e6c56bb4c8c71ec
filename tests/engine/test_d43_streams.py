"""A command's standard streams: UTF-8 always, and one line with the right code where one is closed, full or left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def shell(line: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """A line of bash in which `python` is ours; its code is that of the first part of a pipeline."""
    python = f'python() {{ "{sys.executable}" "$@"; }}; '
    names = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "", **environment}
    line = f"{python}{line}; exit ${{PIPESTATUS[0]}}"
    return subprocess.run(["bash", "-c", line, "bash", *arguments], env=names, capture_output=True, check=False)


COMMAND = r"""
import sys
from engine.process import run, say, standard_output, standard_input
def command():
    say("said \u00e9")
    print("\u00e9" * int(sys.argv[1]), file=standard_output())
    return int(sys.argv[2])
run("it", command)
"""


def command(redirected: str, *, size: int = 1, code: int = 0, **environment: str) -> tuple[int, str, str]:
    """A command that says a line on standard error, then writes to standard output."""
    done = shell(f'python -c "$1" {size} {code} {redirected}', COMMAND, **environment)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-16", "utf-8:strict"])
def test_d43_text_is_utf8_whatever_the_environment_says(encoding: str) -> None:
    got = command("", PYTHONIOENCODING=encoding, LC_ALL="C", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0")
    assert got == (0, "é\n", "said é\n")


@pytest.mark.parametrize("size", [1, 100_000])
@pytest.mark.parametrize(
    ("redirected", "line"),
    [
        ("> /dev/full", "it: [Errno 28] No space left on device"),
        ("| true", "it: standard output was closed by its reader"),
        (">&-", "it: standard output is closed; redirect it to a file"),
    ],
)
def test_d43_answers_that_go_nowhere_are_one_line(redirected: str, line: str, size: int) -> None:
    if redirected == "| true":
        redirected = "| (exec <&-; sleep 0.2)"  # the reader has left when it is written to
        size = max(size, 100_000)  # more than a pipe holds
    code, out, err = command(redirected, size=size)
    assert (code, out, err.splitlines()) == (2 if ">&-" in redirected else 1, "", ["said é", line])


def test_d43_messages_that_go_nowhere_cost_no_answer() -> None:
    for redirected in ("2>&-", "2> /dev/full", "<&- 2>&-"):
        assert command(redirected, size=3) == (0, "ééé\n", ""), redirected
    assert command("2>&- >&-")[0] == 2
    assert command("> /dev/full", code=7)[0] == 7


def test_d43_a_file_that_is_opened_never_takes_the_number_of_a_closed_stream() -> None:
    code = """
import os
from engine.process import begin
begin("it")
file = open(os.devnull)
os.write(3, f"{file.fileno() > 3}".encode())
"""
    assert shell('python -c "$1" 3>&1 >&- <&- 2>&-', code).stdout == b"True"


REQUEST = '{"state": "s", "questions": {"équipe": {"type": "noul", "instructions": "i"}}}'


def test_d43_a_full_disk_for_messages_leaves_the_code(tmp_path: Path) -> None:
    code = """
from engine.process import run, say
from rich.console import Console
import sys
def command():
    Console(stderr=True).print("a table" * 10_000)
    print("answer")
run("it", command)
"""
    assert shell('python -c "$1" 2> /dev/full', code).stdout == b"answer\n"
    assert shell('python -c "$1" 2> /dev/full', code).returncode == 0


def test_d43_a_whole_command_in_a_hostile_environment(tmp_path: Path) -> None:
    """Latin-1, no standard error, and a name that neither knows."""
    request = tmp_path / "équipe.json"
    request.write_text(REQUEST, encoding="utf-8")
    words = f"device=cpu cache_dir={tmp_path}/cache"
    done = shell(
        f'python -m engine.score "request=$1" {words} format=both 2>&-', str(request), PYTHONIOENCODING="latin-1"
    )
    assert done.returncode == 0
    assert '"équipe": {' in done.stdout.decode()
    done = shell(f"python -m engine.score request=- {words} <&-")
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr == b"score: request=-: standard input is closed\n"


def test_d43_a_drawing_with_nobody_to_read_it() -> None:
    done = shell("python -m engine.explain | (exec <&-; sleep 4)")
    assert (done.returncode, done.stderr) == (1, b"explain: standard output was closed by its reader\n")


def test_d43_check_with_nobody_to_read_it(tmp_path: Path) -> None:
    done = shell('python -m engine.check "$1" | (exec <&-; sleep 3)', str(tmp_path))
    assert done.returncode in (1, 2)
    assert done.stderr.count(b"\n") == 1
    assert b"Traceback" not in done.stderr


INTERRUPTED = """
import os, runpy, signal, sys, threading, time

def interrupt(times):
    def send():
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
    threading.Thread(target=send).start()

class At:
    def __init__(self, module, times):
        self.module, self.times = module, times
    def find_spec(self, name, path=None, target=None):
        if name == self.module:
            interrupt(self.times)
            time.sleep(0.2)

moment, times = sys.argv[1], int(sys.argv[2])
if moment == "forward":
    from engine.engine import Engine
    submit = Engine.submit
    def interrupted(self, request):
        result = submit(self, request)
        interrupt(times)
        return result
    Engine.submit = interrupted
else:
    sys.meta_path.insert(0, At(moment, times))
sys.argv[1:] = sys.argv[3:]
runpy.run_module("engine.score", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("moment", "times"), [("hydra", 1), ("torch", 1), ("numpy", 2), ("safetensors", 1), ("forward", 1), ("forward", 2)]
)
def test_d43_ctrl_c_is_one_line_and_code_130_at_any_moment(tmp_path: Path, moment: str, times: int) -> None:
    out = tmp_path / "o.json"
    words = ["device=cpu", f"cache_dir={tmp_path}/cache", f"out={out}"]
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, moment, str(times), *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "score: interrupted\n")
    assert not out.exists()


def test_d43_a_job_that_ignores_ctrl_c_goes_on_ignoring_it() -> None:
    """As started in the background by a script, or under nohup."""
    code = 'import os, signal; from engine.process import run; run("it", lambda: os.kill(os.getpid(), signal.SIGINT))'
    assert shell("(trap '' INT; python -c \"$1\")", code).returncode == 0
    assert shell('python -c "$1"', code).returncode == 130
