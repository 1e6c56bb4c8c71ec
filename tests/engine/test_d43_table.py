"""What `score` shows: on a terminal a table that says what its numbers mean, elsewhere JSON."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from engine.config import ScoreConfig
from engine.errors import ConfigError
from engine.score import score
from engine.table import percent, print_table
from tests.engine.command_support import REQUEST, FakeEngine, FakeResponse, Run


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("terminal", "options", "on_stdout", "on_stderr"),
    [
        (True, {}, "table", ""),
        (True, {"format": "json"}, "json", ""),
        (True, {"format": "both"}, "json", "table"),
        (False, {}, "json", "table"),
        (False, {"format": "table"}, "table", ""),
        (False, {"format": "json"}, "json", ""),
        (True, {"out": "o.json"}, "", "table"),
        (True, {"out": "o.json", "format": "json"}, "", ""),
    ],
)
def test_d43_format_says_what_goes_where(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, terminal: bool, options: Any, on_stdout: str, on_stderr: str
) -> None:
    monkeypatch.chdir(tmp_path)
    stdout, stderr = Terminal() if terminal else io.StringIO(), io.StringIO()
    config = ScoreConfig(device="cpu", request="-", **options)
    assert score(config, load=FakeEngine().load, stdin=io.BytesIO(REQUEST), stdout=stdout, stderr=stderr) == 0  # type: ignore[arg-type]
    for text, expected in ((stdout.getvalue(), on_stdout), (stderr.getvalue(), on_stderr)):
        if expected == "json":
            assert json.loads(text) == FakeResponse(REQUEST).to_dict()
        else:
            assert ("probability" in text) == (expected == "table")
    if "out" in options:
        assert json.loads((tmp_path / "o.json").read_text()) == FakeResponse(REQUEST).to_dict()


def test_d43_a_closed_stream_is_told_before_anything_is_loaded(tmp_path: Any) -> None:
    engine = FakeEngine()
    requests = tmp_path / "r.jsonl"
    requests.write_bytes(b"a\n")
    for request in ("-", str(requests)):
        config = ScoreConfig(device="cpu", request=request)
        with pytest.raises(ConfigError, match="standard output is closed; give out=FILE"):
            score(config, load=engine.load, stdin=io.BytesIO(REQUEST), stdout=None, stderr=io.StringIO())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="request=-: standard input is closed"):
        score(
            ScoreConfig(device="cpu", request="-"),
            load=engine.load, stdin=None, stdout=io.StringIO(), stderr=io.StringIO(),  # type: ignore[arg-type]
        )  # fmt: skip
    assert engine.configs == []
    config = ScoreConfig(device="cpu", request="-", out=str(tmp_path / "o.json"))
    assert score(config, load=engine.load, stdin=io.BytesIO(REQUEST), stdout=None, stderr=io.StringIO()) == 0  # type: ignore[arg-type]


def test_d43_many_requests_have_no_table_and_empty_names_are_none(tmp_path: Any) -> None:
    (tmp_path / "r.jsonl").write_bytes(b"a\n")
    for shown in ("table", "both"):
        with pytest.raises(ConfigError, match=f"format={shown} shows one request"):
            Run(FakeEngine(), request=str(tmp_path / "r.jsonl"), format=shown)
    for name in ("out", "request", "questions"):
        with pytest.raises(ConfigError, match=f"{name}= is empty; give a file or leave it out"):
            ScoreConfig(**{name: ""})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="format=text is not one of auto, json, table, both"):
        ScoreConfig(format="text")  # type: ignore[arg-type]


def choice(*p: float, name: str = "option") -> dict[str, Any]:
    return {"type": "choice", "choice": f"{name}0", "confidence": 0.5,
            "probabilities": {f"{name}{i}": value for i, value in enumerate(p)}}  # fmt: skip


def shown(answers: dict[str, Any], *, width: int = 80, colour: bool = False) -> list[str]:
    response = {"model": "m", "answers": answers, "usage": {"input_tokens": 1},
                "metadata": {"inference_seconds": 0.0, "prefix_cache": {}}}  # fmt: skip
    file = io.StringIO()
    console = Console(
        file=file, width=width, markup=False, highlight=False, force_terminal=colour,
        color_system="standard" if colour else None,
    )  # fmt: skip
    print_table(console, "r.json", response)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def row(lines: list[str], start: str) -> str:
    [line] = [line for line in lines if line.strip().startswith(start)]
    return " ".join(line.strip("█▉▊▋▌▍▎▏ ").split())


def test_d43_yes_or_no_is_the_likelier_one_with_its_probability() -> None:
    lines = shown({"a": {"type": "noul", "noul": 0.27}, "b": {"type": "noul", "noul": 0.5}})
    assert row(lines, "a ") == "a no 73 %"
    assert row(lines, "b ") == "b yes 50 %"


def test_d43_options_are_named_the_likeliest_first() -> None:
    lines = shown({"q": choice(0.2, 0.7, 0.1)})
    options = [line for line in lines if "option" in line]
    assert ["option1" in options[0], "option0" in options[1], "option2" in options[2]] == [True] * 3
    assert row(lines, "q ") == "q option1 70 %"
    assert row(lines, "confidence") == "confidence 0.50 option0 20 %"
    many = shown({"q": choice(*[1 / 255] * 255)})
    assert row(many, "250 others") == "250 others 98 %"


def test_d43_levels_come_in_order_with_what_they_mean() -> None:
    legend = {"0": "Far from here.", "1": {"text": "é"}, "2": "z" * 70}
    answer = {"type": "score", "score": 1.25, "confidence": 0.5, "legend": legend,
              "probabilities": {"0": 0.25, "1": 0.25, "2": 0.5}}  # fmt: skip
    lines = shown({"level": answer})
    assert row(lines, "level") == "level 1.25 on a scale of 0 to 2"
    assert row(lines, "confidence") == "confidence 0.50 0 Far from here. 25 %"
    assert row(lines, "1 ") == '1 {"text": "é"} 25 %'
    folded = [line for line in lines if "z" in line]
    assert row(folded, "2 ").endswith("50 %")
    assert sum(line.count("z") for line in folded) == 70
    assert folded[1].index("z") == folded[0].index("z"), "the meaning hangs beside its level"


def test_d43_nothing_is_wider_than_80_columns_and_colour_is_for_terminals() -> None:
    answers = {"q" * 60: choice(0.5, 0.5, name="日本" * 40), "n": {"type": "noul", "noul": 0.1}}
    for width in (80, 200):
        lines = shown(answers, width=width)
        assert max(map(cell_len, lines)) <= 80
        assert "\x1b" not in "".join(lines)
    assert "\x1b[1;32mno" in "".join(shown(answers, colour=True))


def test_d43_percents_are_whole_and_never_certain() -> None:
    assert [percent(p) for p in (0.0, 0.004, 0.006, 0.5, 0.994, 0.996, 1.0)] == [
        "0 %", "< 1 %", "1 %", "50 %", "99 %", "> 99 %", "100 %",
    ]  # fmt: skip
