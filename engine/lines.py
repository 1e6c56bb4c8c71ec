"""Many requests, one per line: the engine is loaded once, each line is answered or refused on its own row.

Rows carry the number of their line (`{"line": 3, ...}`), are written as they come, and are never written twice: a run
that was stopped goes on where it stopped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TextIO

from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from engine.cli import config_text, readable, to_json
from engine.config import EngineConfig, ScoreConfig
from engine.engine import Engine
from engine.errors import ConfigError, ForkgraphError, RequestError
from engine.output import Output, claimed

Load = Callable[[EngineConfig], Engine]


def score_lines(config: ScoreConfig, *, load: Load, stdout: TextIO, stderr: TextIO) -> int:
    """Answer the lines of `config.request` that `config.out` has no row for yet; 1 if any row is an error, else 0.

    Rows already in `out` count, failed ones too, and are not tried again. Nothing is loaded when no line is left.
    Raises ConfigError when a file cannot be used.
    """
    assert config.request is not None
    requests = readable(config.request)
    with claimed(config, resumes=True) as out:
        return _score_lines(config, requests, out, load=load, stdout=stdout, stderr=stderr)


def _score_lines(
    config: ScoreConfig, requests: Path, out: Output | None, *, load: Load, stdout: TextIO, stderr: TextIO
) -> int:
    done = {} if out is None else _resume(out, config)
    todo = [number for number, _ in _lines(requests) if number not in done]
    failed = sum(done.values())
    if todo:
        target = nullcontext(stdout) if out is None else out.path.open("a", encoding="utf-8")
        with load(config) as engine, target as rows, _progress(config, stderr) as progress:
            bar = progress.add_task("requests", total=len(done) + len(todo), completed=len(done))
            for number, line in _lines(requests):
                if number in done:
                    continue
                row = score_line(number, line, engine)
                rows.write(to_json(row) + "\n")
                rows.flush()
                failed += "error" in row
                progress.advance(bar)
    kept = f", {len(done)} of them from an earlier run" if done else ""
    print(f"{len(done) + len(todo)} requests{kept}; {failed} failed", file=stderr)
    return 1 if failed else 0


def score_line(number: int, line: bytes, engine: Engine) -> dict[str, Any]:
    """The row of one request: its response, or what was wrong and in which field."""
    try:
        return {"line": number, **engine.score(line).to_dict()}
    except RequestError as error:
        return {"line": number, "error": error.text, "field": error.field}
    except ForkgraphError as error:
        return {"line": number, "error": str(error), "field": None}


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered from 1; blank lines are counted and left out."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line := line.strip():
                yield number, line


def _progress(config: ScoreConfig, stderr: TextIO) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(file=stderr),
        disable=not (config.progress and stderr.isatty()),
    )


def _resume(out: Output, config: ScoreConfig) -> dict[int, bool]:
    """Line number -> failed, for the rows `out` holds; a last row that was cut off is removed.

    The first call for `out` writes the options beside it. Later ones raise ConfigError unless their options are the
    same, and for a file that this command did not begin.
    """
    if config.overwrite or not out.path.exists():
        out.write("")
        out.write_options(config_text(config))
        return {}
    if not out.options.exists():
        raise ConfigError(
            f"out={out.name} exists and {out.options.name} does not, so it is not from this command; rename one"
        )
    _require_same_options(out, config_text(config))
    content = out.path.read_bytes()
    complete = content.rfind(b"\n") + 1
    done = {}
    for position, line in enumerate(content[:complete].splitlines(), 1):
        try:
            row = json.loads(line)
            done[int(row["line"])] = "error" in row
        except (ValueError, TypeError, KeyError):
            raise ConfigError(
                f"out={out.name}: line {position} is not a row of this command; give another out="
            ) from None
    os.truncate(out.path, complete)
    return done


def _require_same_options(out: Output, text: str) -> None:
    before, now = (OmegaConf.to_container(OmegaConf.create(t)) for t in (out.options.read_text("utf-8"), text))
    assert isinstance(before, dict)
    assert isinstance(now, dict)
    ours = ("progress", "overwrite")
    changed = [f"{key!s}={before.get(key)}" for key in now if key not in ours and before.get(key) != now[key]]
    if changed:
        raise ConfigError(f"out={out.name} was begun with {', '.join(changed)}; give the same options or another out=")
