"""A folder that cannot be written, a compiler or a home that is not there: one line with cause and remedy."""

from __future__ import annotations

import io
import json
import os
import pwd
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from triton import knobs
from triton.runtime import build
from triton.runtime.cache import FileCacheManager

from engine.config import EngineConfig, ExplainConfig, cache_folder, default_cache_dir, resolve
from engine.engine import Engine
from engine.errors import ConfigError
from engine.explain import explain
from engine.load.environment import check_environment, explain_failure
from engine.wire.letters import read_system_message

ROOT = Path(__file__).parents[2]
ON_GPU = {"device": "cuda:0", "dtype": "bfloat16", "schedule": "auto", "graphs": "captured"}
NOUL = {"state": "s", "questions": {"q": {"type": "noul", "instructions": "i"}}}


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Folders of ours that are empty, below the one returned, and the machine's compilers."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path


def engine_config(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(**ON_GPU | {"cache_dir": str(folder / "cache"), "gemm": "tuned"} | options)


def unwritable(folder: Path) -> list[str]:
    """A file in the folder's place, one on the way to it, and a file system that takes no files."""
    file = folder / "file"
    file.touch()
    return [str(file), str(file / "below"), "/proc/forkgraph"]


def test_what_is_there_is_enough(folders: Path) -> None:
    check_environment(engine_config(folders))
    check_environment(engine_config(folders, graphs="compiled"))
    check_environment(resolve(EngineConfig(device="cpu")))
    assert sorted(path.name for path in folders.iterdir()) == ["cache", "inductor", "triton"]
    assert not any(any(path.iterdir()) for path in folders.iterdir())


@pytest.mark.parametrize(
    ("variable", "options"),
    [
        ("TRITON_CACHE_DIR", {"gemm": "fixed", "graphs": "eager"}),
        ("TORCHINDUCTOR_CACHE_DIR", {"device": "cpu", "gemm": "fixed", "graphs": "compiled"}),
    ],
)
def test_d37_a_folder_for_kernels_that_cannot_be_written(
    folders: Path, monkeypatch: pytest.MonkeyPatch, variable: str, options: dict[str, str]
) -> None:
    config = engine_config(folders, **options)
    for place in unwritable(folders):
        monkeypatch.setenv(variable, place)
        with pytest.raises(ConfigError, match=rf"^{variable}={place} cannot be written \(.*\); set {variable} to a"):
            check_environment(config)


def test_d37_a_folder_for_tuned_products_that_cannot_be_written(folders: Path) -> None:
    for place in unwritable(folders):
        config = engine_config(folders, cache_dir=place)
        with pytest.raises(ConfigError, match=rf"^cache_dir={place} cannot be written \(.*\); give another cache_dir="):
            check_environment(config)
        check_environment(engine_config(folders, cache_dir=place, gemm="fixed"))


def test_d37_triton_needs_a_compiler_while_its_cache_is_empty(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = engine_config(folders)
    monkeypatch.setenv("CC", "/nowhere/gcc")
    with pytest.raises(ConfigError, match=r"^CC=/nowhere/gcc: no such program; Triton needs a C compiler .*gcc"):
        check_environment(config)
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(folders))
    with pytest.raises(ConfigError, match=r"^no C compiler; Triton needs .* install gcc, or name one in CC$"):
        check_environment(config)
    (folders / "gcc").write_text("#!/bin/sh\n")
    (folders / "gcc").chmod(0o755)
    check_environment(config)
    (folders / "gcc").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(knobs.build, "impl", lambda *_: "")
        check_environment(config)
    (folders / "triton" / "key").mkdir()
    check_environment(config)


def failed(work: Any) -> BaseException:
    """The error of `work` as torch and the engine pass it on: the cause of one, the context of another."""
    try:
        try:
            try:
                work()
            except Exception as error:
                raise ValueError("while compiling") from error
        except ValueError:
            raise RuntimeError("backend failed")  # noqa: B904
    except RuntimeError as error:
        return error


def test_d37_a_failure_of_a_compiler_is_told(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile() -> None:
        for kept in vars(build).values():  # a later Triton looks for a compiler once
            if hasattr(kept, "cache_clear"):
                kept.cache_clear()
        build._build("name", "", str(folders), [], [], [], [])

    monkeypatch.setenv("CC", "/nowhere/gcc")
    told = explain_failure(failed(compile))
    assert told is not None
    assert told.startswith("CC=/nowhere/gcc: No such file or directory; Triton needs a C compiler")
    monkeypatch.setenv("CC", "/bin/false")
    told = explain_failure(failed(compile))
    assert told is not None
    assert told.startswith("/bin/false failed with code 1; Triton needs a C compiler that works and Python's headers")
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(folders))
    told = explain_failure(failed(compile))
    assert told is not None
    assert told.startswith("no C compiler; Triton needs a C compiler for kernels that are not in its cache")

    class InvalidCxxCompiler(RuntimeError):  # noqa: N818, as torch calls it
        pass

    def refuse() -> None:
        raise InvalidCxxCompiler

    told = explain_failure(failed(refuse))
    assert told == "torch.compile found no working C++ compiler: install g++, or name one in CXX"


def test_d37_a_failure_of_a_folder_is_told(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in unwritable(folders):
        monkeypatch.setenv("TRITON_CACHE_DIR", place)
        told = explain_failure(failed(lambda: FileCacheManager("key")))
        assert told is not None
        assert told.startswith(f"TRITON_CACHE_DIR: {place}")
        assert told.endswith("; set TRITON_CACHE_DIR to a folder of yours")
    (folders / "inductor").touch()
    told = explain_failure(failed(lambda: (folders / "inductor" / "x").mkdir()))
    assert told is not None
    assert told.endswith(": Not a directory; set TORCHINDUCTOR_CACHE_DIR to a folder of yours")


def test_other_failures_are_not_explained(folders: Path) -> None:
    assert explain_failure(failed(lambda: (folders / "mine").read_text())) is None
    assert explain_failure(failed(lambda: 1 / 0)) is None
    circle = ValueError("a")
    circle.__cause__ = circle
    assert explain_failure(circle) is None


def run_command(*words: str, code: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    start = f"import sys; sys.argv[0] = 'score'\n{code}\nfrom engine.score import main\nmain()"
    return subprocess.run(
        [sys.executable, "-c", start, *words],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_d37_the_command_says_so_in_one_line(folders: Path) -> None:
    (folders / "inductor").touch()
    done = run_command("device=cpu", "graphs=compiled", f"cache_dir={folders / 'cache'}")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert f"score: TORCHINDUCTOR_CACHE_DIR={folders / 'inductor'} cannot be written" in done.stderr


# A user without a home: no HOME, and no entry that could tell one


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unknown(uid: int) -> Any:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("HOME", "XDG_CACHE_HOME", "LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("homeless")
def test_d38_without_a_home_a_cache_is_asked_for_by_name(tmp_path: Path) -> None:
    config = resolve(EngineConfig(device="cpu"))
    for ask in (default_cache_dir, lambda: cache_folder(config), lambda: Engine.load(config)):
        with pytest.raises(ConfigError, match=r"^this user has no home folder .*; give cache_dir=FOLDER$"):
            ask()
    for name in ("cache_dir", "checkpoint", "tokenizer"):
        with pytest.raises(ConfigError, match=rf"^{name}=~/x: this user has no home folder; give the whole path$"):
            resolve(EngineConfig(device="cpu", **{name: "~/x"}))
    with pytest.raises(ConfigError, match=r"^letters\.system_message=~/x: .*home"):
        read_system_message("~/x", check=False)
    with Engine.load(device="cpu", cache_dir=tmp_path / "cache") as engine:
        assert engine.score(NOUL).model == "forkgraph/tiny"
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


@pytest.mark.usefixtures("homeless")
def test_d38_explain_needs_no_home(tmp_path: Path) -> None:
    out = io.StringIO()
    assert explain(ExplainConfig(device="cpu", format="json"), stdin=io.BytesIO(), stdout=out) == 0
    assert json.loads(out.getvalue())["candidates"] == 7
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("homeless")
def test_d38_without_a_home_kernels_need_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_HOME", os.path.expanduser("~/"))  # as triton reads it when imported
    with pytest.raises(ConfigError, match=r"no home folder for compiled kernels; set TRITON_CACHE_DIR to a folder"):
        check_environment(engine_config(tmp_path, gemm="fixed"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    (tmp_path / "a kernel").touch()  # then no compiler is asked for
    with pytest.raises(ConfigError, match=r"^this user has no home folder to keep files in; give cache_dir=FOLDER$"):
        check_environment(engine_config(tmp_path, gemm="fixed", cache_dir=None))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    told = explain_failure(failed(lambda: pwd.getpwuid(54321)))
    assert told is not None
    assert told.endswith("set TORCHINDUCTOR_CACHE_DIR to a folder of yours")


def test_d38_the_command_says_so_in_one_line() -> None:
    code = (
        "import os, pwd\n"
        "def unknown(uid): raise KeyError(uid)\n"
        "pwd.getpwuid = unknown\n"
        "for name in ('HOME', 'XDG_CACHE_HOME'): os.environ.pop(name, None)\n"
    )
    done = run_command("device=cpu", code=code)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr == "score: this user has no home folder to keep files in; give cache_dir=FOLDER\n"
