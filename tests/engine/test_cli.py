"""The command lines: clean output, whole files, one line for a mistake, and runs that go on where they stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from engine.errors import ConfigError, RequestError
from tests.engine.command_support import REQUEST, FakeEngine, FakeResponse, Run, row, rows

ROOT = Path(__file__).parents[2]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


def test_the_example_is_scored_and_named_when_no_request_is_given(engine: FakeEngine) -> None:
    run = Run(engine)
    assert run.code == 0
    assert engine.seen == [(ROOT / "configs" / "requests" / "support_ticket.json").read_bytes()]
    assert "request: example:support_ticket (choose with request=FILE)" in run.err
    assert engine.open == 0


def test_json_goes_to_stdout_and_the_table_to_stderr(engine: FakeEngine) -> None:
    run = Run(engine, REQUEST, request="-")
    assert json.loads(run.out) == FakeResponse(REQUEST).to_dict()
    for cells in (["colour", "red", "75 %"], ["blue", "25 %"], ["sure", "no", "88 %"], ["level", "1.50 on a scale"]):
        assert any(all(cell in line for cell in cells) for line in run.err.splitlines()), cells
    assert "1,234 tokens, 1,000 of them reused, 500 ms" in run.err
    assert "The weights are random" in run.err


def test_markup_in_names_is_shown_as_it_is(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    response = FakeResponse(REQUEST).to_dict()
    response["answers"] = {"[red]x[/nope]": {"type": "noul", "noul": 0.5}}
    monkeypatch.setattr(FakeResponse, "to_dict", lambda _: response)
    assert "[red]x[/nope]" in Run(engine, REQUEST, request="-").err


def test_out_takes_the_answers_and_the_options_lie_beside_it(engine: FakeEngine, tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    run = Run(engine, REQUEST, request="-", out=str(out), split="aligned")
    assert run.out == ""
    assert json.loads(out.read_bytes()) == FakeResponse(REQUEST).to_dict()
    saved = OmegaConf.load(tmp_path / "a.json.config.yaml")
    assert (saved.split, saved.gemm, saved.schedule, saved.device) == ("aligned", "fixed", "levels", "cpu")
    assert len(list(tmp_path.iterdir())) == 2


def test_the_engine_gets_the_resolved_options(engine: FakeEngine) -> None:
    Run(engine, schedule="auto", dtype="auto")
    assert (engine.configs[0].schedule, engine.configs[0].dtype) == ("levels", "float32")


def test_one_bad_request_is_raised_and_nothing_is_written(engine: FakeEngine, tmp_path: Path) -> None:
    with pytest.raises(RequestError):
        Run(engine, b"bad", request="-", out=str(tmp_path / "a.json"))
    assert list(tmp_path.iterdir()) == []
    assert engine.open == 0


def test_a_folder_that_cannot_be_written_is_named(engine: FakeEngine, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"out=.*/missing/a\.json: no such folder as .*/missing"):
        Run(engine, REQUEST, request="-", out=str(tmp_path / "missing" / "a.json"))


def test_a_request_file_that_is_not_there_is_told_with_its_neighbour(engine: FakeEngine, tmp_path: Path) -> None:
    (tmp_path / "ticket.json").write_bytes(REQUEST)
    for name in ("tiket.json", "tiket.jsonl"):
        with pytest.raises(ConfigError, match=rf"request=.*{name}: no such file; did you mean 'ticket\.json'\?"):
            Run(engine, request=str(tmp_path / name))
    assert engine.configs == []


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b"one\n\n  \nbad\r\nbroken\nlast")
    return path


def test_lines_are_answered_one_by_one_and_bad_ones_get_an_error_row(engine: FakeEngine, lines: Path) -> None:
    run = Run(engine, request=str(lines))
    assert run.code == 1
    assert [json.loads(line) for line in run.out.splitlines()] == [
        row(1, b"one"),
        row(4, b"bad", error="state must be text", field="state"),
        row(5, b"broken", error="not finite", field=None),
        row(6, b"last"),
    ]
    assert run.err == "4 requests; 2 failed\n  id 4: state must be text\n  id 5: not finite\n"
    assert len(engine.configs) == 1


def test_lines_without_a_failure_give_code_0(engine: FakeEngine, tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_bytes(b"a\nb\n")
    out = tmp_path / "out.jsonl"
    assert Run(engine, request=str(tmp_path / "r.jsonl"), out=str(out)).code == 0
    assert [row["id"] for row in rows(out)] == [1, 2]
    assert (tmp_path / "out.jsonl.config.yaml").exists()


def test_ctrl_c_keeps_what_is_done_and_the_next_run_goes_on(engine: FakeEngine, tmp_path: Path) -> None:
    requests, out = tmp_path / "r.jsonl", tmp_path / "out.jsonl"
    requests.write_bytes(b"a\nb\nstop\nd\n")
    with pytest.raises(KeyboardInterrupt):
        Run(engine, request=str(requests), out=str(out))
    assert [row["id"] for row in rows(out)] == [1, 2]
    assert engine.open == 0

    requests.write_bytes(b"a\nb\nc\nd\n")
    run = Run(engine, request=str(requests), out=str(out))
    assert run.code == 0
    assert engine.seen == [b"a", b"b", b"c", b"d"]
    assert rows(out) == [row(1, b"a"), row(2, b"b"), row(3, b"c"), row(4, b"d")]
    assert run.err == "4 requests, 2 of them from an earlier run; 0 failed\n"


def test_a_row_that_was_cut_off_is_done_again(engine: FakeEngine, tmp_path: Path) -> None:
    requests, out = tmp_path / "r.jsonl", tmp_path / "out.jsonl"
    requests.write_bytes(b"a\nb\n")
    Run(engine, request=str(requests), out=str(out))
    whole = out.read_bytes()
    out.write_bytes(whole[:-10])
    Run(engine, request=str(requests), out=str(out))
    assert out.read_bytes() == whole
    assert engine.seen == [b"a", b"b", b"b"]


def test_nothing_is_loaded_when_every_line_has_its_row_and_failures_still_count(
    engine: FakeEngine, lines: Path, tmp_path: Path
) -> None:
    options = {"request": str(lines), "out": str(tmp_path / "out.jsonl")}
    assert Run(engine, **options).code == 1
    again = Run(engine, **options, progress=False)
    assert again.code == 1
    assert again.err.splitlines() == [
        "4 requests, 4 of them from an earlier run; 2 failed",
        "  id 4: state must be text",
        "  id 5: not finite",
        "retry_failed=true tries those of earlier runs again",
    ]
    assert len(engine.configs) == 1


def test_rows_of_other_options_are_not_mixed(engine: FakeEngine, lines: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    Run(engine, request=str(lines), out=str(out))
    before = out.read_bytes()
    with pytest.raises(ConfigError, match=r"out=.*out\.jsonl was begun with split=exact; give the same options"):
        Run(engine, request=str(lines), out=str(out), split="aligned")
    assert out.read_bytes() == before


@pytest.mark.parametrize("content", ["my notes", "my notes\n", '{"line": 1}\n'])
def test_a_file_of_somebody_else_is_left_alone(engine: FakeEngine, lines: Path, tmp_path: Path, content: str) -> None:
    out = tmp_path / "notes.txt"
    out.write_text(content)
    with pytest.raises(ConfigError, match="is not from this command"):
        Run(engine, request=str(lines), out=str(out))
    assert out.read_text() == content


@pytest.mark.parametrize(
    "damaged", ["[]", "{}", "null", "no", '{"line": 2}', '{"id": 2}', '{"id": 2.5, "request_sha256": ""}']
)
def test_a_row_that_is_none_is_told_by_its_line(engine: FakeEngine, lines: Path, tmp_path: Path, damaged: str) -> None:
    out = tmp_path / "out.jsonl"
    Run(engine, request=str(lines), out=str(out))
    text = out.read_text().replace("\n", f"\n{damaged}\n", 1)
    out.write_text(text)
    with pytest.raises(ConfigError, match=r"line 2 is not a row of this command"):
        Run(engine, request=str(lines), out=str(out))
    assert out.read_text() == text
