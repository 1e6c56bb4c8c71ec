"""The one command: sub-commands, version, and help that says something of every option and imports no torch."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import engine
from engine import __main__ as command
from engine.config import EngineConfig, ExplainConfig, ScoreConfig
from engine.help import Option, options_of, source_of, summary_of
from engine.tune import TuneConfig

ROOT = Path(__file__).parents[2]
CONFIGS = [
    (ScoreConfig, "engine.config"),
    (ExplainConfig, "engine.config"),
    (TuneConfig, "engine.tune"),
]


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["forkgraph", *words])
    handler = signal.getsignal(signal.SIGINT)
    try:
        command.main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    finally:
        signal.signal(signal.SIGINT, handler)
    return 0


def options(config_class: type, module: str) -> list[Option]:
    return options_of(config_class.__name__, [source_of(module), source_of("engine.config")])


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found = {}
    for name, value in values.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


@pytest.mark.parametrize(("config_class", "module"), CONFIGS)
def test_d44_every_option_is_explained_with_its_default(config_class: type[EngineConfig], module: str) -> None:
    found = options(config_class, module)
    assert [option.name for option in found if not option.text.endswith(".")] == []
    defaults = flat(dataclasses.asdict(config_class()))
    assert {option.name for option in found} == set(defaults)
    assert len(found) == len(defaults)
    for option in found:
        typed = None if option.default is None else OmegaConf.create(f"x: {option.default}").x
        assert typed == defaults[option.name], option


def test_d44_words_of_an_option_are_those_that_it_takes() -> None:
    words = {option.name: option.words for option in options(ScoreConfig, "engine.config")}
    assert words["split"] == ("exact", "aligned")
    assert words["tokens.control"] == ("plain", "special")
    assert words["request"] == ()


@pytest.mark.parametrize(
    ("config_class", "file"),
    [("CompareConfig", "comparison/options"), ("SessionConfig", "session"), ("BenchConfig", "bench_options")],
)
def test_d44_the_scripts_options_are_explained_too(config_class: str, file: str) -> None:
    found = options_of(config_class, [ROOT / "profiling" / f"{file}.py", source_of("engine.config")])
    assert {"seed", "out"} < {option.name for option in found}
    assert [option.name for option in found if not option.text] == []


def test_d44_an_option_without_a_docstring_is_found(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text('class C(EngineConfig):\n    a: int = 1\n    b: str = "x"\n    """Text\n    of b."""\n')
    own = options_of("C", [file])
    assert own == [Option("a", "1", (), ""), Option("b", "x", (), "Text of b.")]


def test_d44_help_lists_the_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--help") == 0
    text = capsys.readouterr().out
    for name, module in command.COMMANDS.items():
        assert f"  {name} " in text
        assert summary_of(module) in text
        assert summary_of(module).endswith(".")
    assert run(monkeypatch) == 2


def test_d44_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("--version",), ("score", "--version")):
        assert run(monkeypatch, *words) == 0
        assert capsys.readouterr().out == f"forkgraph {engine.__version__}\n"


def test_d44_another_word_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "scroe", "model=9b") == 2
    out, err = capsys.readouterr()
    assert (out, err) == (
        "",
        "forkgraph: scroe is no command; did you mean 'score'?; known: score, explain, check, tune\n",
    )


def test_d44_help_and_version_import_no_torch() -> None:
    code = """
import io, sys
from contextlib import redirect_stdout
from engine.__main__ import main
for words in (["--help"], ["--version"], ["score", "--help"], ["tune", "-h"], ["check", "--help"], ["chekc"]):
    sys.argv = ["forkgraph", *words]
    with redirect_stdout(io.StringIO()) as out:
        try:
            main()
        except SystemExit:
            pass
    assert out.getvalue() or words == ["chekc"]
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
