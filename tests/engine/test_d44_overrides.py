"""Words for Hydra: whatever text is typed, its grammar reads that text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from engine.config import ScoreConfig, resolve
from engine.overrides import prepared, text_options

PIECES = st.sampled_from([*"'\"\\,=()[]{}:~ $#\n-+.", "a", "é", "1e3", "null", "true", "glob(*)", "\t"])
TEXT = st.lists(PIECES, max_size=8).map("".join)


def is_quoted(text: str) -> bool:
    return len(text) > 1 and text[0] == text[-1] and text[0] in "'\""


def read(word: str) -> list[object]:
    override = OverridesParser.create().parse_override(word)
    return list(override.sweep_iterator()) if override.is_sweep_override() else [override.value()]


@given(TEXT.filter(lambda text: text != "null" and not is_quoted(text)))
def test_d44_hydra_reads_the_text_that_was_typed(text: str) -> None:
    [word] = prepared([f"request={text}"], ScoreConfig)
    assert read(word) == [text]


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="'\",()[]{}\\"), min_size=1), min_size=2))
def test_d44_each_part_of_a_sweep_is_text(texts: list[str]) -> None:
    texts = [text for text in texts if text != "null"] + ["a", "b"]
    word, flag = prepared(["-m", f"request={','.join(texts)}"], ScoreConfig)
    assert flag == "-m"
    assert [getattr(value, "text", value) for value in read(word)] == texts


def test_d44_what_needs_no_quotes_gets_none() -> None:
    words = ["split=exact", "request=r.json", "seed=1", "warmup=[64]", "out=a-${split}", "hydra.run.dir=x", "~request"]
    assert prepared(words, ScoreConfig) == words
    quoted = ["request='a b'", 'request="a b"', "split=exact,aligned", "-m"]
    assert prepared(quoted, ScoreConfig) == quoted


def test_d44_flags_may_stand_anywhere(tmp_path: Path) -> None:
    words = ["seed=1", "--config-dir", str(tmp_path), "request=1_0"]
    assert prepared(words, ScoreConfig) == ["seed=1", "request='1_0'", "--config-dir", str(tmp_path)]


def test_d44_text_options_are_those_of_type_str() -> None:
    found = text_options(ScoreConfig)
    assert found["request"] is True
    assert found["split"] is False
    assert found["letters.system_message"] is True
    assert not {"seed", "warmup", "nvtx", "memory.limit_gib", "memory", "letters"} & set(found)


@pytest.mark.parametrize("name", ["checkpoint", "base", "tokenizer", "cache_dir"])
def test_d44_a_tilde_is_the_users_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x").mkdir()
    given = {"checkpoint": "~/x"} | {name: "~/x"}
    assert getattr(resolve(ScoreConfig(device="cpu", **given)), name) == str(tmp_path / "x")
