"""What stands on a command line before Hydra reads it: text stays as typed, and an unknown key is refused by name."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, cast, get_args, get_type_hints

from hydra._internal.utils import get_args_parser
from hydra.conf import HydraConf
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, Quote, QuotedString
from hydra.errors import HydraException

from engine.config import EngineConfig
from engine.errors import ConfigError, nearest
from engine.hub import SIZES
from engine.resources import CONFIGS

_FREE_FORM = tuple(f"hydra.{name}." for name in ("hydra_logging", "job_logging", "callbacks", "launcher", "sweeper"))
"""Settings of Hydra whose members are anybody's."""
_OVERRIDE = re.compile(r"(?P<key>\+{0,2}(?P<name>[\w./]+))=(?P<value>.*)", re.DOTALL)
_SWEEP = re.compile(r"(choice|range|interval|glob|sort|shuffle|tag)\(.*\)", re.DOTALL)


def prepared(words: Sequence[str], config_class: type[EngineConfig]) -> list[str]:
    """The words for Hydra, overrides first.

    Values of text options are quoted where its grammar would make something else of them. With -m, commas and Hydra's
    functions for sweeps keep their meaning. Raises ConfigError for a word that is no override, and for a key that is
    neither an option nor a setting of Hydra; Hydra lets some of both pass.
    """
    arguments = get_args_parser().parse_intermixed_args(words)
    texts = text_options(config_class)
    given = _named_models(arguments.overrides)
    typed = [_typed(word, texts, arguments.multirun) for word in given]
    folders = [CONFIGS]
    if arguments.config_dir is not None:
        folders.append(Path(arguments.config_dir))
        if not folders[-1].is_dir():
            raise ConfigError(f"--config-dir {arguments.config_dir}: no such folder")
    for word, original in zip(typed, given, strict=True):
        _check(_parsed(word, original), config_class, folders)
    return [*typed, *(word for word in words if word not in arguments.overrides)]  # Hydra wants them side by side


def _named_models(overrides: Sequence[str]) -> list[str]:
    """`model=` is a group of Hydra, so a published name there is spelled out as `EngineConfig` takes it."""
    words = []
    for word in overrides:
        size = SIZES.get(word.removeprefix("model="))
        words.append(f"model={size}" if size and word.startswith("model=") else word)
        if words[-1] != word and not any(other.startswith("checkpoint=") for other in overrides):
            words.append(word.replace("model", "checkpoint", 1))
    return words


def text_options(config_class: type[EngineConfig], prefix: str = "") -> dict[str, bool]:
    """Dotted names of the options that hold text, and whether each may be null."""
    found: dict[str, bool] = {}
    for name, kind in get_type_hints(config_class).items():
        if dataclasses.is_dataclass(kind):
            found |= text_options(cast(Any, kind), f"{prefix}{name}.")
        elif kind is str or (isinstance(kind, UnionType) and str in get_args(kind)):
            found[prefix + name] = type(None) in get_args(kind)
    return found


def _typed(word: str, texts: dict[str, bool], sweep: bool) -> str:
    found = _OVERRIDE.fullmatch(word)
    if found is None or found["name"] not in texts:
        return word
    value, optional = found["value"], texts[found["name"]]
    if not sweep:
        if "," in value and (CONFIGS / found["name"]).is_dir():
            raise ConfigError(f"{word} names several; -m runs one after the other")
        return f"{found['key']}={_text(value, optional)}"
    if _SWEEP.fullmatch(value):
        return word
    return f"{found['key']}={','.join(_text(part, optional) for part in _parts(value))}"


def _text(value: str, optional: bool) -> str:
    """`value` as Hydra reads that very text; what the user quoted is left alone."""
    if optional and value == "null":
        return value
    try:
        read = OverridesParser.create().parse_override(f"x={value}").value()
    except HydraException:
        read = None
    quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    if isinstance(read, str) and (read == value or quoted):
        return value
    return QuotedString(text=value, quote=Quote.single).with_quotes()


def _parts(value: str) -> list[str]:
    """Between the commas outside quotes and brackets."""
    parts, depth, quote, escaped = [""], 0, "", False
    for letter in value:
        if letter == "," and not depth and not quote:
            parts.append("")
            continue
        if quote:
            quote = "" if letter == quote and not escaped else quote
        elif letter in "'\"" and not escaped:
            quote = letter
        depth += 0 if quote else (letter in "([{") - (letter in ")]}")
        escaped = letter == "\\" and not escaped
        parts[-1] += letter
    return parts


def _parsed(word: str, given: str) -> Override:
    try:
        return OverridesParser.create().parse_override(word)
    except HydraException:
        found = _OVERRIDE.fullmatch(given)
        if found is None:
            remedy = f"; did you mean request={given}?" if re.search(r"[./]", given) else ""
            raise ConfigError(f"{given} is not of the form option=value{remedy}") from None
        example = f"\"{found['name']}='...'\""
        raise ConfigError(f"{given} is not a value that Hydra reads; text is quoted for it, as in {example}") from None


def _check(override: Override, config_class: type[EngineConfig], folders: Sequence[Path]) -> None:
    key, value = override.key_or_group, override.value()
    if key.startswith("hydra/"):
        known = [f"hydra/{group}" for default in HydraConf().defaults for group in cast(dict[str, Any], default)]
    elif key.startswith("hydra"):
        known = [f"hydra.{name}" for name in keys(HydraConf())]
    else:
        known = list(keys(config_class()))
    if key not in known and not key.startswith(_FREE_FORM) and not any((folder / key).is_dir() for folder in folders):
        raise ConfigError(f"{key} is not an option{nearest(key, known)}")
    if isinstance(value, Glob) and not key.startswith("hydra"):
        words = sorted(path.stem for folder in folders for path in (folder / key).glob("*.yaml"))
        if not value.filter(words):
            among = f"none of {', '.join(words)}" if words else "the words of an option only, never files"
            raise ConfigError(f"{override.input_line}: glob() matches {among}; name them, as in {key}=A,B")


def keys(config: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names of all fields of a dataclass."""
    for field in dataclasses.fields(config):
        yield prefix + field.name
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from keys(value, f"{prefix}{field.name}.")
