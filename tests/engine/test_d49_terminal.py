"""Text of somebody's never reaches a terminal as control characters, and a misspelt member is said."""

from __future__ import annotations

import io
import json

import pytest

from engine import cli
from engine.config import ScoreConfig
from engine.errors import RequestError
from engine.score import score
from engine.table import summary
from engine.wire.requests import parse_request
from tests.engine.engine_support import cache_dir, choice, loaded

ESCAPES = "\x1b[2Jq\x9b31m\x07"


def controls(text: str) -> list[str]:
    return [c for c in text if c != "\n" and (ord(c) < 32 or 127 <= ord(c) < 160)]


def test_d49_names_in_the_table_and_the_answers_show_their_control_characters(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = {"state": "s", "questions": {ESCAPES: choice(f"a{ESCAPES}", "b"), "n": choice("c")}}
    stdout, stderr = io.StringIO(), io.StringIO()
    config = ScoreConfig(device="cpu", cache_dir=cache_dir().name, request="-")
    stdin = io.BytesIO(json.dumps(request).encode())
    assert score(config, load=lambda _: loaded(), stdin=stdin, stdout=stdout, stderr=stderr) == 0
    assert controls(stdout.getvalue()) == controls(stderr.getvalue()) == []
    assert list(json.loads(stdout.getvalue())["answers"]) == [ESCAPES, "n"]
    assert r"\x1b[2Jq\x9b31m\x07" in stderr.getvalue()


def test_d49_an_error_shows_them_too(capsys: pytest.CaptureFixture[str]) -> None:
    error = RequestError("Choice requires between 1 and 255 candidates", field=f"questions.{ESCAPES}", value=ESCAPES)
    assert cli._report("score", error) == 2
    assert controls(capsys.readouterr().err) == []


def test_d49_plain_text_stays_as_it_is() -> None:
    assert cli.plain("équipe – 日本 \u200d😀") == "équipe – 日本 \u200d😀"
    answer = {"type": "noul", "noul": 0.5}
    assert summary({"answers": {"é": answer}, "usage": {"input_tokens": 1}, "model": "m",
                    "metadata": {"inference_seconds": 0.0, "prefix_cache": {}}}) is not None  # fmt: skip


def test_d49_a_misspelt_member_is_said_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    plain = {"state": "s", "questions": {"q": {"type": "noul", "instructions": "i"}}}
    spelt = {"state": "s", "questions": {"q": {"type": "noul", "instructions": "i", "critera": "x", "note": 1}}}
    expected = parse_request(plain)
    assert caplog.messages == []
    assert parse_request(spelt) == expected
    assert caplog.messages == ["questions.'q': the member 'critera' is ignored; did you mean 'criteria'?"]
    caplog.clear()
    parse_request({"state": "s", "questions": {"q": {"type": "noul", "instructions": "i", "note": 1}}})
    assert caplog.messages == []
