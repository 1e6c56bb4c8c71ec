"""Requests from a Parquet file, and answers as one."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from tests.engine.command_support import REQUEST, FakeEngine, Run, rows

QUESTIONS = {"q": {"type": "noul", "instructions": "é"}}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


def written(path: Path, **columns: Any) -> str:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path)
    return str(path)


def read(path: Path) -> list[dict[str, Any]]:
    from pyarrow import parquet

    return parquet.read_table(path).to_pylist()


def test_d42_a_table_of_requests_becomes_a_table_of_answers(engine: FakeEngine, tmp_path: Path) -> None:
    out = tmp_path / "o.parquet"
    request = written(tmp_path / "r.parquet", id=[7, 5, 6], request=["a", "bad", None], other=[1.0, 2.0, 3.0])
    run = Run(engine, request=request, out=str(out))
    assert (run.code, engine.seen) == (1, [b"a", b""])
    table = read(out)
    assert [row["id"] for row in table] == [7, 5, 6]
    assert json.loads(table[0]["response"])["metadata"]["body"] == "a"
    assert (table[0]["error"], table[1]["response"]) == (None, None)
    assert (table[1]["error"], table[1]["field"]) == ("state must be text", "state")
    assert [row["request_sha256"] for row in table] == [r["request_sha256"] for r in rows(tmp_path / "o.parquet.jsonl")]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "o.parquet", "o.parquet.jsonl", "o.parquet.jsonl.config.yaml", "r.parquet",
    ]  # fmt: skip


def test_d42_a_table_is_made_anew_from_rows_that_went_on(engine: FakeEngine, tmp_path: Path) -> None:
    out = tmp_path / "o.parquet"
    request = written(tmp_path / "r.parquet", id=["a", "b", "c"], request=["1", "stop", "3"])
    with pytest.raises(KeyboardInterrupt):
        Run(engine, request=request, out=str(out))
    assert not out.exists()
    request = written(tmp_path / "r.parquet", id=["c", "b", "a"], request=["3", "2", "1"])
    assert Run(engine, request=request, out=str(out)).code == 0
    assert engine.seen == [b"1", b"3", b"2"]
    assert [(row["id"], json.loads(row["response"])["metadata"]["body"]) for row in read(out)] == [
        ("c", "3"), ("b", "2"), ("a", "1"),
    ]  # fmt: skip
    request = written(tmp_path / "r.parquet", id=["a", "b"], request=["1", "bad"])
    assert Run(engine, request=request, out=str(out)).code == 1
    assert [(row["id"], row["error"]) for row in read(out)] == [("a", None), ("b", "state must be text")]
    out.with_name("o.parquet.jsonl.config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"o\.parquet exists; overwrite=true replaces it"):
        Run(engine, request=request, out=str(out))


@pytest.mark.parametrize("states", [["x", "y"], [{"a": [1, 2.0]}, {"a": []}], [["x"], ["y", "z"]]])
def test_d42_the_same_questions_about_many_states(engine: FakeEngine, tmp_path: Path, states: list[Any]) -> None:
    questions = tmp_path / "q.json"
    questions.write_text(json.dumps(QUESTIONS))
    request = written(tmp_path / "r.parquet", state=states)
    run = Run(engine, request=request, questions=str(questions))
    assert run.code == 0
    assert [json.loads(body) for body in engine.seen] == [{"state": s, "questions": QUESTIONS} for s in states]
    assert [json.loads(line)["id"] for line in run.out.splitlines()] == [1, 2]
    changed = tmp_path / "o.jsonl"
    Run(engine, request=request, questions=str(questions), out=str(changed))
    questions.write_text(json.dumps({"q": {"type": "noul", "instructions": "other"}}))
    Run(engine, request=request, questions=str(questions), out=str(changed))
    assert len(rows(changed)) == 4


def test_d42_ids_of_two_kinds_are_text_in_a_table(engine: FakeEngine, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    requests = tmp_path / "r.jsonl"
    requests.write_text('{"id": "x"}\n{}\n')
    assert Run(engine, request=str(requests), out=str(tmp_path / "o.parquet")).code == 0
    assert [row["id"] for row in read(tmp_path / "o.parquet")] == ["x", "2"]


def test_d42_tables_that_cannot_serve_are_refused_before_anything_runs(engine: FakeEngine, tmp_path: Path) -> None:
    questions, damaged = tmp_path / "q.json", tmp_path / "d.parquet"
    questions.write_text(json.dumps(QUESTIONS))
    damaged.write_bytes(b"PAR1")
    path = tmp_path / "r.parquet"
    for columns, options, match in (
        ({"text": ["a"]}, {}, "has no column request, only text"),
        ({"state": ["a"]}, {}, "has no column request, only state; give questions=FILE for its column state"),
        ({"request": ["a"]}, {"questions": str(questions)}, "has no column state, only request"),
        ({"request": [1]}, {}, "column request is int64, not text"),
        ({"request": [{"a": 1}]}, {}, "column request is struct"),
        ({"state": [1.5]}, {"questions": str(questions)}, "column state is double, not text"),
        ({"state": [{"a": float("nan")}]}, {"questions": str(questions)}, "request 1: column state: Out of range"),
        ({"state": ["a"]}, {"questions": str(path)}, "questions=.*: "),
        ({"request": ["a"], "id": [1.5]}, {}, r"request 1: id=1\.5 is neither text nor a whole number"),
        ({"request": ["a", "b"], "id": [1, 1]}, {}, "two requests have the id 1"),
    ):
        request = written(path, **columns)
        with pytest.raises(ConfigError, match=match):
            Run(engine, request=request, **options)
    with pytest.raises(ConfigError, match=r"request=.*d\.parquet: "):
        Run(engine, request=str(damaged))
    assert engine.configs == []


def test_d42_without_pyarrow_the_extra_is_named(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ModuleNotFoundError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    (tmp_path / "r.parquet").write_bytes(b"PAR1")
    (tmp_path / "r.jsonl").write_bytes(b"a\n")
    for options in (
        {"request": str(tmp_path / "r.parquet")},
        {"request": str(tmp_path / "r.jsonl"), "out": str(tmp_path / "o.parquet")},
    ):
        with pytest.raises(ConfigError, match=r"Parquet needs pyarrow; pip install 'forkgraph\[parquet\]'"):
            Run(engine, **options)
    assert engine.configs == []


def test_d42_options_of_tables_are_refused_elsewhere(engine: FakeEngine, tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_bytes(b"a\n")
    for options, match in (
        ({"request": "-", "questions": "q.json"}, r"questions=q\.json goes with request=FILE\.parquet"),
        ({"request": str(tmp_path / "r.jsonl"), "questions": "q.json"}, r"questions=q\.json goes with"),
        ({"request": "-", "out": "o.parquet"}, r"out=o\.parquet: one request has no table"),
    ):
        with pytest.raises(ConfigError, match=match):
            Run(engine, REQUEST, **options)
