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

from engine.cli import config_file, config_text, readable, to_json, write_whole
from engine.config import EngineConfig, ScoreConfig
from engine.engine import Engine
from engine.errors import ConfigError, ForkgraphError, RequestError

Load = Callable[[EngineConfig], Engine]


def score_lines(config: ScoreConfig, *, load: Load, stdout: TextIO, stderr: TextIO) -> int:
    """Answer the lines of `config.request` that `config.out` has no row for yet; 1 if any row is an error, else 0.

    Rows already in `out` count, failed ones too, and are not tried again. Nothing is loaded when no line is left.
    Raises ConfigError when a file cannot be used.
    """
    assert config.request is not None
    requests = readable(config.request)
    done = _resume(Path(config.out).expanduser(), config) if config.out else {}
    todo = [number for number, _ in _lines(requests) if number not in done]
    failed = sum(done.values())
    if todo:
        target = Path(config.out).expanduser().open("a", encoding="utf-8") if config.out else nullcontext(stdout)
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


def _resume(out: Path, config: ScoreConfig) -> dict[int, bool]:
    """Line number -> failed, for the rows `out` holds; a last row that was cut off is removed.

    The first call for `out` writes the options beside it. Later ones raise ConfigError unless their options are the
    same, and for a file that this command did not begin.
    """
    beside = config_file(out)
    if not out.exists():
        write_whole(beside, config_text(config))
        return {}
    if not beside.exists():
        raise ConfigError(f"out={out} exists and {beside.name} does not, so it is not from this command; rename one")
    _require_same_options(out, config_text(config))
    content = out.read_bytes()
    complete = content.rfind(b"\n") + 1
    done = {}
    for position, line in enumerate(content[:complete].splitlines(), 1):
        try:
            row = json.loads(line)
            done[int(row["line"])] = "error" in row
        except (ValueError, TypeError, KeyError):
            raise ConfigError(f"out={out}: line {position} is not a row of this command; give another out=") from None
    os.truncate(out, complete)
    return done


def _require_same_options(out: Path, text: str) -> None:
    before, now = (OmegaConf.to_container(OmegaConf.create(t)) for t in (config_file(out).read_text("utf-8"), text))
    assert isinstance(before, dict)
    assert isinstance(now, dict)
    changed = [f"{key!s}={before.get(key)}" for key in now if key != "progress" and before.get(key) != now[key]]
    if changed:
        raise ConfigError(f"out={out} was begun with {', '.join(changed)}; give the same options or another out=")
