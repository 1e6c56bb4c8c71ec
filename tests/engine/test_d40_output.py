"""`out=` replaces nothing that it was not told to, and what it writes keeps its place, links and permissions."""

from __future__ import annotations

import os
import socket
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from engine import cli
from engine.config import ScoreConfig
from engine.errors import ConfigError
from engine.output import claim, refuse_shared
from graphs.files import replace_file
from tests.engine.command_support import REQUEST, FakeEngine, Run


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


def refused(engine: FakeEngine, match: str, **options: Any) -> None:
    """Before anything is loaded, and without a trace."""
    folder = Path(options["out"]).parent
    before = {p: (p.lstat().st_ino, p.lstat().st_mode, p.lstat().st_nlink) for p in folder.iterdir()}
    with pytest.raises(ConfigError, match=match):
        Run(engine, REQUEST, **{"request": "-", **options})
    assert engine.configs == []
    assert {p: (p.lstat().st_ino, p.lstat().st_mode, p.lstat().st_nlink) for p in folder.iterdir()} == before


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_d40_an_input_is_never_replaced(engine: FakeEngine, tmp_path: Path, suffix: str, overwrite: bool) -> None:
    request = tmp_path / f"same{suffix}"
    request.write_bytes(REQUEST)
    (tmp_path / "sub").mkdir()
    (tmp_path / "link").symlink_to(request.name)
    os.link(request, tmp_path / "hard")
    for name in (request.name, "link", "hard", f"sub/../{request.name}"):
        match = f"would replace request={request}"
        refused(engine, match, request=str(request), out=str(tmp_path / name), overwrite=overwrite)
    assert request.read_bytes() == REQUEST


def test_d40_nor_one_that_is_read_from_standard_input_or_as_a_message(engine: FakeEngine, tmp_path: Path) -> None:
    request = tmp_path / "r.json"
    request.write_bytes(REQUEST)
    with request.open("rb") as stdin, pytest.raises(ConfigError, match="would replace request=-"):
        claim(str(request), inputs={"request": stdin}, overwrite=True).__enter__()
    refused(engine, "would replace letters.system_message=", out=str(request), overwrite=True,
            letters={"system_message": str(request)})  # fmt: skip
    beside = tmp_path / "o.json.config.yaml"
    beside.write_bytes(REQUEST)
    refused(engine, "would replace request=", request=str(beside), out=str(tmp_path / "o.json"), overwrite=True)


def test_d40_what_is_no_file_is_refused_by_kind(engine: FakeEngine, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    os.mkfifo("fifo")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("socket")
    Path("folder").mkdir()
    Path("dangling").symlink_to("nowhere")
    Path("circle").symlink_to("circle")
    Path("pipe").symlink_to("fifo")
    for out, match in {
        "fifo": "is a pipe, not a file", "pipe": "is a pipe", "socket": "is a socket", "/dev/null": "is a device",
        "folder": "is a folder", "new/": "is a folder", "dangling": "is a link to nowhere, which does not exist",
        "circle": "Too many levels of symbolic links", "no/a": "no such folder as no", "fifo/a": "Not a directory",
        "a" * 300: "File name too long", "a\0b": "embedded null byte", "-": "leave out= away",
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=f"^out={out[:100]}.*{match}"):
            Run(engine, REQUEST, request="-", out=out, overwrite=True)
    listener.close()
    assert engine.configs == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["circle", "dangling", "fifo", "folder", "pipe", "socket"]


def test_d40_a_file_that_is_there_needs_overwrite_and_keeps_its_permissions(engine: FakeEngine, tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    out.write_text("notes")
    out.chmod(0o600)
    refused(engine, "a.json exists; overwrite=true replaces it", out=str(out))
    assert Run(engine, REQUEST, request="-", out=str(out), overwrite=True).code == 0
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    assert out.read_text().startswith("{")
    engine.configs.clear()
    refused(engine, "a.json exists", out=str(out))
    out.unlink()
    refused(engine, r"a\.json\.config\.yaml exists", out=str(out))


@pytest.mark.parametrize("name", ["a.json", "a.json.config.yaml"])
def test_d40_read_only_files_and_hard_links_stay_with_overwrite_too(
    engine: FakeEngine, tmp_path: Path, name: str
) -> None:
    file = tmp_path / name
    file.write_text("kept")
    file.chmod(0o444)
    refused(engine, f"{name} is read-only", out=str(tmp_path / "a.json"), overwrite=True)
    file.chmod(0o644)
    os.link(file, tmp_path / "other")
    refused(engine, f"{name} has 2 hard links", out=str(tmp_path / "a.json"), overwrite=True)
    assert file.read_text() == "kept"


def test_d40_a_link_is_written_through_and_the_options_lie_beside_the_file(engine: FakeEngine, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "b.json").write_text("old")
    link = tmp_path / "a.json"
    link.symlink_to("real/b.json")
    refused(engine, "exists", out=str(link))
    assert Run(engine, REQUEST, request="-", out=str(link), overwrite=True).code == 0
    assert link.is_symlink()
    assert sorted(p.name for p in (tmp_path / "real").iterdir()) == ["b.json", "b.json.config.yaml"]
    assert (tmp_path / "real" / "b.json").read_text().startswith("{")
    options = tmp_path / "real" / "b.json.config.yaml"
    options.rename(tmp_path / "elsewhere")
    options.symlink_to("../elsewhere")
    with pytest.raises(ConfigError, match=r"b\.json\.config\.yaml is no plain file"):
        Run(engine, REQUEST, request="-", out=str(link), overwrite=True)


def test_d40_lines_go_on_in_a_file_with_hard_links(engine: FakeEngine, tmp_path: Path) -> None:
    requests, out = tmp_path / "r.jsonl", tmp_path / "o.jsonl"
    requests.write_bytes(b"a\n")
    assert Run(engine, request=str(requests), out=str(out)).code == 0
    os.link(out, tmp_path / "other.jsonl")
    requests.write_bytes(b"a\nb\n")
    assert Run(engine, request=str(requests), out=str(out)).code == 0
    assert len((tmp_path / "other.jsonl").read_bytes().splitlines()) == 2
    with pytest.raises(ConfigError, match="2 hard links"):
        Run(engine, request=str(requests), out=str(out), overwrite=True)
    (tmp_path / "other.jsonl").unlink()
    assert Run(engine, request=str(requests), out=str(out), overwrite=True).code == 0
    assert engine.seen == [b"a", b"b", b"a", b"b"]


def test_d40_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a"
    file.write_text("old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        replace_file(file, "new")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def swept(monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, list[str | None]]:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # restored afterwards
    monkeypatch.setattr(sys, "argv", ["score", "-m", *words])
    outs: list[str | None] = []

    def job(config: ScoreConfig) -> int:
        outs.append(config.out)
        return 0

    return cli.run_command("score", ScoreConfig, job, refuse=refuse_shared), outs


def test_d40_two_jobs_of_a_sweep_on_one_file_start_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.json").touch()
    os.link("there.json", "hard.json")
    Path("link.json").symlink_to("new.json")
    for words in (
        ["out=s.json,./s.json"],
        ["out=s.json", "split=exact,aligned"],
        [f"out=s.json,{tmp_path}/s.json"],
        ["out=there.json,hard.json"],
        ["out=new.json,link.json"],
        ["out=${schedule}.json", "split=exact,aligned"],
    ):
        assert swept(monkeypatch, *words) == (2, []), words
        err = capsys.readouterr().err
        assert "two jobs would write one file" in err
        assert err.count("\n") == 1


def test_d40_jobs_that_write_different_files_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert swept(monkeypatch, "out=a-${split}.json", "split=exact,aligned") == (0, ["a-exact.json", "a-aligned.json"])
    words = ("out='a-${hydra:job.num}.json'", "split=exact,aligned")
    assert swept(monkeypatch, *words) == (0, ["a-0.json", "a-1.json"])
    assert swept(monkeypatch, "split=exact,aligned") == (0, [None, None])
    assert list(tmp_path.iterdir()) == []
