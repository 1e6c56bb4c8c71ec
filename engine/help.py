"""What `--help` prints, read from sources: importing a command takes seconds."""

from __future__ import annotations

import ast
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from omegaconf import OmegaConf

from engine.resources import CONFIGS

_ROOT = CONFIGS.parent
_COLUMN = 30
_WIDEST = 100

_NOTES = """
Text is taken as it is typed, `~` included; null leaves an option out. With -m every combination of comma-separated
values is run, one after the other; text that holds a comma is then quoted: "request='a, b.json'". `+experiment=NAME
--config-dir FOLDER` takes options from FOLDER/experiment/NAME.yaml. --hydra-help lists Hydra's own flags.
"""


class Option(NamedTuple):
    name: str
    default: str | None
    """As it is typed; None for an option that has none."""
    words: tuple[str, ...]
    """What it may be, where that is a list."""
    text: str


def command_help(name: str, config_class: str, files: Iterable[Path]) -> str:
    """Usage from `configs/NAME.yaml`, and every option of `config_class`, defined in one of `files` or in
    `engine/config.py`."""
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    usage = OmegaConf.select(OmegaConf.load(CONFIGS / f"{name}.yaml"), "hydra.help.template")
    lines = [usage.rstrip(), "", "Options, with their defaults:", ""]
    for option in options_of(config_class, [*files, source_of("engine.config")]):
        head = f"  {option.name}" + ("" if option.default is None else f"={option.default}")
        words = f"One of {', '.join(option.words)}. " if option.words else ""
        body = textwrap.wrap(words + option.text, width - _COLUMN, break_on_hyphens=False)
        if len(head) > _COLUMN - 2:
            lines.append(head)
            head = ""
        lines += [f"{left:{_COLUMN}}{right}" for left, right in zip([head, *[""] * (len(body) - 1)], body, strict=True)]
    return "\n".join([*lines, "", textwrap.fill(" ".join(_NOTES.split()), width)])


def summary_of(module: str) -> str:
    """What a command's file says it is, after its name."""
    first = (ast.get_docstring(ast.parse(source_of(module).read_text("utf-8"))) or "").partition("\n\n")[0]
    return " ".join(first.partition(": ")[2].split())


def source_of(module: str) -> Path:
    return _ROOT / f"{module.replace('.', '/')}.py"


def options_of(config_class: str, files: Iterable[Path]) -> list[Option]:
    """Options of a dataclass and of its groups, a class's own before those it inherits."""
    statements = [statement for file in files for statement in ast.parse(file.read_text("utf-8")).body]
    classes = {statement.name: statement for statement in statements if isinstance(statement, ast.ClassDef)}
    return list(_options(config_class, "", classes, _words()))


def _words() -> dict[str, tuple[str, ...]]:
    """The types in `engine.words` that are a list of words."""
    return {
        ast.unparse(statement.targets[0]): ast.literal_eval(statement.value.slice)
        for statement in ast.parse(source_of("engine.words").read_text("utf-8")).body
        if isinstance(statement, ast.Assign)
        and isinstance(statement.value, ast.Subscript)
        and ast.unparse(statement.value.value) == "Literal"
    }


def _options(
    name: str, prefix: str, classes: Mapping[str, ast.ClassDef], words: Mapping[str, tuple[str, ...]]
) -> Iterator[Option]:
    body = classes[name].body
    for field, following in zip(body, [*body[1:], None], strict=True):
        if not isinstance(field, ast.AnnAssign):
            continue
        kind, option = ast.unparse(field.annotation), prefix + ast.unparse(field.target)
        if kind in classes:
            yield from _options(kind, f"{option}.", classes, words)
        else:
            yield Option(option, _typed(field.value), words.get(kind, ()), _docstring(following))
    for base in classes[name].bases:
        if (inherited := ast.unparse(base)) in classes:
            yield from _options(inherited, prefix, classes, words)


def _docstring(statement: ast.stmt | None) -> str:
    """The one under a field, on one line."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return " ".join(str(statement.value.value).split())
    return ""


def _typed(value: ast.expr | None) -> str | None:
    """A default as a command line spells it."""
    if isinstance(value, ast.Constant):
        return None if value.value is None else str(value.value).lower()
    return "[]" if value is not None and ast.unparse(value) == "field(default_factory=list)" else None
