"""A later run keeps the rows whose request is the same, and answers what is new, changed, or failed and asked again."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig, ScoreConfig
from engine.errors import CheckpointError, ConfigError
from engine.identity import difference, made_with
from engine.load.tiny import tiny_checkpoint
from tests.engine.command_support import REQUEST, FakeEngine, FakeResponse, Run, row, rows

ROOT = Path(__file__).parents[2]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


def request(state: str, **members: Any) -> dict[str, Any]:
    return {**members, "state": state, "questions": {"q": {"type": "noul", "instructions": "i"}}}


class Files:
    """A file of requests and a file of rows."""

    def __init__(self, folder: Path, engine: FakeEngine) -> None:
        self.requests, self.out, self.engine = folder / "r.jsonl", folder / "o.jsonl", engine

    def run(self, *requests: Any, **options: Any) -> Run:
        """With these requests, as bytes or as JSON; `self.asked` are those that the engine saw."""
        lines = [r if isinstance(r, bytes) else json.dumps(r).encode() for r in requests]
        self.requests.write_bytes(b"".join(line + b"\n" for line in lines))
        before = len(self.engine.seen)
        run = Run(self.engine, **{"request": str(self.requests), "out": str(self.out), **options})
        self.asked = self.engine.seen[before:]
        return run

    @property
    def latest(self) -> dict[Any, str]:
        """By id, of several rows the last: what was answered."""
        return {r["id"]: r.get("error") or r["metadata"]["body"] for r in rows(self.out)}


@pytest.fixture
def files(tmp_path: Path, engine: FakeEngine) -> Files:
    return Files(tmp_path, engine)


def test_d42_a_line_at_the_top_is_seen(files: Files) -> None:
    files.run(b"a", b"b")
    before = files.out.read_bytes()
    run = files.run(b"new", b"a", b"b")
    assert files.asked == [b"new", b"a", b"b"]
    assert files.latest == {1: "new", 2: "a", 3: "b"}
    assert files.out.read_bytes().startswith(before)
    assert run.err.splitlines() == [
        "3 requests; 0 failed",
        "kept 2 rows of requests that have changed; the last row of an id counts",
    ]
    assert files.run(b"new", b"a", b"b").code == 0
    assert files.asked == []


def test_d42_with_ids_only_what_is_new_or_changed_is_asked(files: Files) -> None:
    a, b, c = request("a", id="a"), request("b", id="b"), request("c", id=7)
    files.run(a, b)
    first = rows(files.out)
    run = files.run(c, request("B", id="b"), a)
    assert [json.loads(body)["state"] for body in files.asked] == ["c", "B"]
    assert rows(files.out)[:2] == first
    assert [r["id"] for r in rows(files.out)] == ["a", "b", 7, "b"]
    assert "3 requests, 1 of them from an earlier run; 0 failed\nkept 1 row of requests that have changed" in run.err
    assert files.run(a, b, c).code == 0
    assert [json.loads(body)["state"] for body in files.asked] == ["b"], "the last row of `b` answers another request"


def test_d42_rows_of_requests_that_are_gone_stay_and_are_named(files: Files) -> None:
    files.run(request("a", id="a"), request("b", id="b\x1b"), request("c"))
    before = files.out.read_bytes()
    run = files.run(request("a", id="a"))
    assert files.out.read_bytes() == before
    assert files.asked == []
    assert run.err.splitlines()[1:] == [r"kept 2 rows of requests that are not there any more: id b\x1b, 3"]


def test_d42_the_hash_is_of_what_is_asked(files: Files) -> None:
    asked = request("é 1")
    canonical = json.dumps(asked, ensure_ascii=False, separators=(",", ":")).encode()
    files.run(asked)
    assert rows(files.out)[0]["request_sha256"] == hashlib.sha256(canonical).hexdigest()
    spaced = json.dumps(asked, ensure_ascii=False, separators=(" , ", " : ")).encode()
    files.run(b"  " + spaced + b"\r")
    assert files.asked == []
    turned = {key: asked[key] for key in reversed(asked)}
    for number, other in enumerate((turned, {**asked, "state": [1]}, {**asked, "state": [1.0]}), 1):
        files.run(other)
        assert len(files.asked) == 1, number


def test_d42_failed_rows_are_named_and_tried_again_when_asked(files: Files) -> None:
    first = files.run(b"bad", b"a", b"broken")
    assert first.code == 1
    assert first.err.splitlines() == ["3 requests; 2 failed", "  id 1: state must be text", "  id 3: not finite"]
    again = files.run(b"bad", b"a", b"broken")
    assert (again.code, again.err.splitlines()[-1]) == (1, "retry_failed=true tries those of earlier runs again")
    retried = files.run(b"bad", b"a", b"broken", retry_failed=True)
    assert retried.err.splitlines()[0] == "3 requests, 1 of them from an earlier run; 2 failed"
    assert [r["id"] for r in rows(files.out)] == [1, 2, 3, 1, 3]
    files.engine.score = lambda body: FakeResponse(b"now " + body[:1])  # type: ignore[method-assign]
    fixed = files.run(b"bad", b"a", b"broken", retry_failed=True)
    assert (fixed.code, fixed.err) == (0, "3 requests, 1 of them from an earlier run; 0 failed\n")
    assert files.latest == {1: "now b", 2: "a", 3: "now b"}


def test_d42_many_failures_are_named_in_part(files: Files) -> None:
    said = files.run(*[b"bad"] * 13).err.splitlines()
    assert said[0] == "13 requests; 13 failed"
    assert said[10:] == ["  id 10: state must be text", "  and 3 more"]


@pytest.mark.parametrize(
    ("second", "match"),
    [
        (request("b", id="a"), "two requests have the id 'a'"),
        (request("b", id=1), "two requests have the id 1; give each its own"),
        (request("b", id=[1]), r"request 2: id=\[1\] is neither text nor a whole number"),
        (request("b", id=True), "request 2: id=True is neither"),
        (request("b", id=2.0), r"request 2: id=2\.0 is neither"),
    ],
)
def test_d42_ids_that_cannot_tell_requests_apart_are_refused_first(files: Files, second: Any, match: str) -> None:
    first = request("a", id="a") if "'a'" in match else request("a")
    with pytest.raises(ConfigError, match=rf"request=.*r\.jsonl: {match}"):
        files.run(first, second)
    assert files.engine.configs == []
    assert not files.out.exists()


def test_d42_text_and_number_are_two_ids(files: Files) -> None:
    files.run(request("a", id="2"), request("b"), request("c", id=None))
    assert list(files.latest) == ["2", 2, 3]


def test_d42_files_of_others_are_never_appended_to(files: Files) -> None:
    files.out.write_text('{"line": 1, "answers": {}}\n')
    with pytest.raises(ConfigError, match="is not from this command"):
        files.run(b"a")
    Path(f"{files.out}.config.yaml").write_text(made_with(ScoreConfig(device="cpu", gemm="fixed")))
    with pytest.raises(ConfigError, match="was begun with"):
        files.run(b"a")
    files.run(b"a", overwrite=True)
    for text, match in {'{"line": 1}\n': "line 1 is not a row", "my notes": "line 1 is not a row"}.items():
        files.out.write_text(text)
        with pytest.raises(ConfigError, match=match):
            files.run(b"a")
        assert files.out.read_text() == text


def test_d42_overwrite_begins_anew_and_not_before_the_engine_is_there(files: Files) -> None:
    files.run(b"a", b"b")
    before = files.out.read_bytes()
    failing = FakeEngine()

    def fail(_: EngineConfig) -> FakeEngine:
        raise CheckpointError("damaged")

    failing.load = fail  # type: ignore[method-assign]
    files.engine = failing
    with pytest.raises(CheckpointError):
        files.run(b"b", overwrite=True, split="aligned")
    assert files.out.read_bytes() == before
    files.engine = FakeEngine()
    assert files.run(b"b", overwrite=True, split="aligned").code == 0
    assert rows(files.out) == [row(1, b"b")]


def test_d42_a_run_stopped_before_its_first_row_goes_on(files: Files) -> None:
    with pytest.raises(KeyboardInterrupt):
        files.run(b"stop")
    assert files.out.read_bytes() == b""
    assert files.run(b"a").code == 0
    Path(f"{files.out}.config.yaml").unlink()
    files.out.write_bytes(b"")
    assert files.run(b"a").code == 0
    assert rows(files.out) == [row(1, b"a")]


def test_d42_rows_of_other_weights_are_refused_with_the_file(files: Files, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "cache")
    options = {"checkpoint": str(folder)}
    files.run(b"a", **options)
    (folder / "README.md").write_text("no part of the answers")
    moved = folder.rename(tmp_path / "moved")
    assert files.run(b"a", checkpoint=str(moved)).code == 0
    weights = sorted(moved.glob("*.safetensors"))[1]
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"was begun with another checkpoint/{weights.name}; give the same options"):
        files.run(b"a", b"b", checkpoint=str(moved))
    content[-1] ^= 1
    weights.write_bytes(content)
    assert files.run(b"a", b"b", checkpoint=str(moved)).code == 0
    for other, match in (
        ({"seed": 1}, "seed=0"),
        ({"dtype": "bfloat16", "max_length": 64}, "dtype=float32, max_length=4096"),
        ({"checkpoint": None}, "another checkpoint/config.json"),
        ({"tokenizer": str(moved)}, "another tokenizer/config.json"),
    ):
        with pytest.raises(ConfigError, match=f"was begun with {match}"):
            files.run(b"a", b"b", **{"checkpoint": str(moved), **other})
    run = files.run(b"a", b"b", checkpoint=str(moved), progress=False, cache_dir=str(tmp_path), warmup=[64])
    assert (run.code, files.asked) == (0, [])


def test_d42_large_files_are_told_by_date_and_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.identity._WHOLE_BYTES", 1000)
    monkeypatch.setattr("engine.identity._SAMPLE_BYTES", 100)
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(7000))
    os.utime(file, ns=(0, 10**18))
    config = EngineConfig(checkpoint=str(tmp_path))
    before = made_with(config)
    assert difference(before, made_with(config)) == []
    os.utime(file, ns=(0, 2 * 10**18))
    assert difference(before, made_with(config)) == ["another checkpoint/model.safetensors"]
    file.write_bytes(bytes(6999) + b"x")
    os.utime(file, ns=(0, 10**18))
    assert difference(before, made_with(config)) == ["another checkpoint/model.safetensors"]
    for text in ("", "[]", "a: [", "\x00", "files: 3\n" + before):
        assert difference(text, before) == ["options that cannot be read"], text


def test_d42_lines_from_a_pipe_are_refused_with_the_remedy(engine: FakeEngine, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p.jsonl")
    with pytest.raises(ConfigError, match=r"request=.*p\.jsonl is no plain file.*save them in one first"):
        Run(engine, request=str(tmp_path / "p.jsonl"))
    with pytest.raises(ConfigError, match=r"request=- holds a request on each line; save them in a file named \.jsonl"):
        Run(engine, REQUEST + b"\n" + REQUEST + b"\n", request="-")
    assert engine.configs == []


def test_d42_one_request_may_come_from_a_pipe(engine: FakeEngine, tmp_path: Path) -> None:
    pipe = tmp_path / "p.json"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(REQUEST + b"\n"))
    writer.start()
    assert Run(engine, request=str(pipe)).code == 0
    writer.join()
    assert engine.seen == [REQUEST + b"\n"]


def test_d42_rows_are_not_appended_to_their_own_requests(engine: FakeEngine, tmp_path: Path) -> None:
    requests = tmp_path / "r.jsonl"
    requests.write_bytes(b"a\n")
    code = (
        "import sys; from tests.engine.command_support import FakeEngine; from engine.config import ScoreConfig\n"
        "from engine.score import score\n"
        "score(ScoreConfig(device='cpu', request=sys.argv[1]), load=FakeEngine().load, stdin=sys.stdin.buffer, "
        "stdout=sys.stdout, stderr=sys.stderr)"
    )
    with requests.open("a") as stdout:
        done = subprocess.run(
            [sys.executable, "-c", code, str(requests)], cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True,
            check=False,
        )  # fmt: skip
    assert "standard output is request=" in done.stderr
    assert requests.read_bytes() == b"a\n"
