"""What a type checker knows of options: the words themselves, so that a typo is found before anything runs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Unpack, get_args, get_type_hints

import pytest

from engine.assembly import RUN_OPTIONS
from engine.config import EngineConfig
from engine.engine import Engine
from engine.options import EngineOptions, RunOptions

ROOT = Path(__file__).parents[2]
FOLDER = "str | PathLike[str] | None"
WIDER = {
    "checkpoint": FOLDER,
    "base": FOLDER,
    "tokenizer": FOLDER,
    "cache_dir": FOLDER,
    "device": "str | torch.device",
    "tokens": "TokensConfig | Mapping[str, Any]",
    "letters": "LettersConfig | Mapping[str, Any]",
    "memory": "MemoryConfig | Mapping[str, Any]",
}
"""Where a call may give more than the field keeps."""


def test_the_options_of_a_call_are_the_fields_of_the_config() -> None:
    options = {name: hint.__forward_arg__ for name, hint in EngineOptions.__annotations__.items()}
    assert options == {f.name: WIDER.get(f.name, f.type) for f in fields(EngineConfig)}
    assert set(RUN_OPTIONS) == set(RunOptions.__annotations__) < set(options)
    for method, kind in ((Engine.load, EngineOptions), (Engine.like, RunOptions)):
        assert get_type_hints(method)["options"] == Unpack[kind]
    assert get_args(get_type_hints(Engine.load)["options"]) == (EngineOptions,)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('options: RunOptions = {"split": "aligned", "graphs": "eager"}', None),
        ('options: RunOptions = {"split": "aligne"}', "Literal['exact', 'aligned']"),
        ('options: RunOptions = {"spilt": "aligned"}', 'Extra key "spilt"'),
        ('options: EngineOptions = {"warmup": "al"}', "Literal['all']"),
    ],
)
def test_a_typo_does_not_pass_a_type_checker(tmp_path: Path, line: str, found: str | None) -> None:
    snippet = tmp_path / "snippet.py"
    snippet.write_text(f"from engine.options import EngineOptions, RunOptions\n{line}\n")
    words = [
        "--strict",
        "--follow-imports=skip",
        "--cache-dir",
        str(tmp_path),
        "engine/words.py",
        "engine/options.py",
        str(snippet),
    ]
    done = subprocess.run([sys.executable, "-m", "mypy", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    errors = [text for text in done.stdout.splitlines() if text.startswith(str(snippet))]
    assert (len(errors), done.returncode) == ((0, 0) if found is None else (1, 1)), done.stdout + done.stderr
    assert found is None or found in errors[0]
