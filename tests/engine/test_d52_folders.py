"""Among files of a program that have our packages' names: the command works, imports say what is in the way."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.check import run as check
from engine.load.tiny import write_tiny

ROOT = Path(__file__).parents[2]
DECOYS = ("configs/__init__.py", "engine.py", "graphs.py", "ops/__init__.py")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel installed in it."""
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name in ("engine", "ops", "graphs", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    for words in (
        ["wheel", "--no-deps", "--no-build-isolation", "-w", str(source / "dist"), str(source)],
        [
            "install",
            "--no-deps",
            "--no-index",
            "--find-links",
            str(source / "dist"),
            "--target",
            str(site),
            "forkgraph",
        ],
    ):
        done = subprocess.run([*pip, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    return site


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A folder whose files end whoever imports them."""
    for name in DECOYS:
        (tmp_path / "program" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "program" / name).write_text(f"raise SystemExit('imported {name}')\n")
    return tmp_path / "program"


def started(site: Path, program: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(site), "HOME": str(program.parent)}
    return subprocess.run(words, cwd=program, env=environment, capture_output=True, text=True, check=False)


def test_d52_the_wheel_holds_configs_and_no_tests(site: Path) -> None:
    assert {path.name for path in site.iterdir()} >= {"configs", "engine", "graphs", "ops"}
    assert not {"tests", "profiling"} & {path.name for path in site.iterdir()}
    for folder in ("configs/requests", "configs/split", "configs/tuned"):
        assert {p.name for p in (site / folder).iterdir()} == {p.name for p in (ROOT / folder).iterdir()}


def test_d52_the_command_and_what_it_spawns_meet_no_decoy(site: Path, program: Path) -> None:
    """`graphs=compiled` starts workers of torch's compiler."""
    words = ("score", "device=cpu", "graphs=compiled", "request=example:routing")
    done = started(site, program, str(site / "bin" / "forkgraph"), *words)
    assert done.returncode == 0, done.stderr
    assert "imported" not in done.stdout + done.stderr
    assert json.loads(done.stdout)["metadata"]["weights"] == "random"


@pytest.mark.parametrize("name", ["graphs.py", "ops/__init__.py"])
def test_d52_an_import_names_what_is_in_the_way(site: Path, program: Path, name: str) -> None:
    for decoy in DECOYS:
        if decoy not in (name, "configs/__init__.py"):
            (program / decoy).unlink()
    message = f"ImportError: {program / name} is not Forkgraph's own {Path(name).parts[0].removesuffix('.py')}"
    for words in (("-m", "engine.score"), ("-c", "import engine"), ("-c", "from engine.config import EngineConfig")):
        done = started(site, program, sys.executable, *words)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1].startswith(message), done.stderr


def test_d52_a_folder_without_init_or_configs_is_not_in_the_way(site: Path, program: Path) -> None:
    for decoy in DECOYS[1:]:
        (program / decoy).unlink()
    (program / "graphs").mkdir()
    done = started(site, program, sys.executable, "-m", "engine", "--version")
    assert (done.returncode, done.stderr) == (0, "")


def test_d52_what_was_imported_before_is_named() -> None:
    code = "import sys, types; sys.modules['ops'] = types.ModuleType('ops'); import engine"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith("ImportError: None is not Forkgraph's own ops, which lies in ")


def test_d52_check_names_what_is_in_the_way(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    write_tiny(tmp_path / "model")
    monkeypatch.chdir(program)
    out = io.StringIO()
    assert check([str(tmp_path / "model")], stdout=out, stderr=out) == 0
    names = ", ".join(str(program / name) for name in ("engine.py", "graphs.py", "ops/__init__.py"))
    assert out.getvalue().splitlines()[0].startswith(f"in the way: {names} (")
    monkeypatch.chdir(ROOT)
    out = io.StringIO()
    assert check([str(tmp_path / "model")], stdout=out, stderr=out) == 0
    assert "in the way" not in out.getvalue()
