"""Many requests, one per line: the engine is loaded once, each is answered or refused on a row of its own.

A row carries the `id` of its request and `request_sha256`, the hash of what was asked (`engine/rows.py`). Rows are
written as they come and only ever appended, in the order of the requests. A later run keeps the rows whose id and hash
are those of a request, and appends one for each request that is new or was changed (with `retry_failed`, that failed).
So the last row of an id counts; earlier ones, and those of requests that are gone, stay where they are.

With out=NAME.parquet the rows lie in NAME.parquet.jsonl, and the table, one row for each request in their order, is
made of them at the end.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from engine.cli import plain, readable, to_json
from engine.config import EngineConfig, ScoreConfig
from engine.engine import Engine
from engine.errors import ConfigError, ForkgraphError, RequestError
from engine.identity import difference, made_with
from engine.output import Output, claim, named_inputs
from engine.parquet import parquet_lines, parquet_table, pyarrow, read_questions
from engine.rows import Id, Line, Lines, Row, hashes, jsonl_lines, read_rows

Load = Callable[[EngineConfig], Engine]
SUFFIXES = (".jsonl", ".parquet")
"""Of files with many requests."""
_TOLD = 10


def score_lines(config: ScoreConfig, *, load: Load, stdout: TextIO | None, stderr: TextIO) -> int:
    """Answer the requests of `config.request` that `config.out` has no row for; 1 if any of them failed, else 0.

    Nothing is loaded when none is left. Raises ConfigError when a file cannot be used, two requests have one id, or
    rows were made with other options or weights.
    """
    assert config.request is not None
    if config.format in ("table", "both"):
        raise ConfigError(f"format={config.format} shows one request; many have a row of JSON each")
    lines = _lines(config)
    if config.out is None:
        assert stdout is not None
        _refuse_circle(config.request, stdout)
        return _answer(config, lines, None, load=load, stdout=stdout, stderr=stderr)
    with _claimed(config, config.out) as (out, table):
        code = _answer(config, lines, out, load=load, stdout=stdout, stderr=stderr)
        if table is not None:
            rows, _ = read_rows(out.path)
            table.write(parquet_table(out.path, (id for id in hashes(lines()) if id in rows), rows))
        return code


def _lines(config: ScoreConfig) -> Lines:
    name = config.request or ""
    path = readable(name)
    if not stat.S_ISREG(path.stat().st_mode):
        raise ConfigError(f"request={name} is no plain file, and its lines are read twice; save them in one first")
    if name.endswith(".jsonl"):
        if config.questions is not None:
            raise ConfigError(f"questions={config.questions} goes with the column state of a .parquet request")
        return lambda: jsonl_lines(path)
    questions = None
    if config.questions is not None:
        questions = read_questions(config.questions, readable(config.questions, "questions"))
    return lambda: parquet_lines(path, questions)


@contextmanager
def _claimed(config: ScoreConfig, given: str) -> Iterator[tuple[Output, Output | None]]:
    """The file of rows, and that of the table where one is asked for."""
    inputs = named_inputs(config)
    if not given.endswith(".parquet"):
        with claim(given, inputs=inputs, overwrite=config.overwrite, resumes=True) as out:
            yield out, None
        return
    pyarrow(f"out={given}")
    rows = f"{given}.jsonl"
    with claim(rows, inputs=inputs, overwrite=config.overwrite, resumes=True) as out:
        remade = config.overwrite or out.options.exists()  # the table was made of these rows
        with claim(given, inputs=inputs, overwrite=remade) as table:
            yield out, table


def _answer(
    config: ScoreConfig, lines: Lines, out: Output | None, *, load: Load, stdout: TextIO | None, stderr: TextIO
) -> int:
    try:
        wanted = hashes(lines())
    except ConfigError as error:
        raise ConfigError(f"request={config.request}: {error}") from None
    made = "" if out is None else made_with(config)
    rows, end = (dict[Id, Row](), None) if out is None or config.overwrite else _earlier(out, made)
    todo = {id for id, sha256 in wanted.items() if not _settled(rows.get(id), sha256, config.retry_failed)}
    kept = {id: rows[id] for id in wanted if id not in todo}
    failures = {id: row.error for id, row in kept.items() if row.error is not None}
    if todo:
        with load(config) as engine, _opened(out, made, end, stdout) as target, _progress(config, stderr) as progress:
            bar = progress.add_task("requests", total=len(wanted), completed=len(kept))
            for line in lines():
                if line.id in todo:
                    row = score_line(line, engine)
                    target.write(to_json(row) + "\n")
                    target.flush()
                    if "error" in row:
                        failures[line.id] = row["error"]
                    progress.advance(bar)
    else:
        with _opened(out, made, end, stdout):
            pass
    _report(wanted, rows, kept, failures, stderr)
    return 1 if failures else 0


def _settled(row: Row | None, sha256: str, retry_failed: bool) -> bool:
    return row is not None and row.sha256 == sha256 and not (retry_failed and row.error is not None)


def score_line(line: Line, engine: Engine) -> dict[str, Any]:
    """The row of one request: its response, or what was wrong and in which field."""
    named = {"id": line.id, "request_sha256": line.sha256}
    try:
        return {**named, **engine.score(line.body).to_dict()}
    except RequestError as error:
        return {**named, "error": error.text, "field": error.field}
    except ForkgraphError as error:
        return {**named, "error": str(error), "field": None}


def _earlier(out: Output, made: str) -> tuple[dict[Id, Row], int | None]:
    """Rows of earlier runs and where they end, None where there was none. Raises ConfigError for a file that was not
    begun by this command, or with options or weights that may answer otherwise."""
    if not out.options.exists():
        if not out.path.exists() or out.path.stat().st_size == 0:
            return {}, None
        raise ConfigError(
            f"out={out.name} exists and {out.options.name} does not, so it is not from this command; rename one"
        )
    if changed := difference(out.options.read_text("utf-8", errors="replace"), made):
        raise ConfigError(
            f"out={out.name} was begun with {', '.join(changed)}; give the same options and files, or another out="
        )
    if not out.path.exists():
        return {}, 0
    try:
        return read_rows(out.path)
    except ConfigError as error:
        raise ConfigError(f"out={out.name}: {error}; give another out=") from None


@contextmanager
def _opened(out: Output | None, made: str, end: int | None, stdout: TextIO | None) -> Iterator[TextIO]:
    """Where rows are appended: to a new file, or after `end` bytes and without what was cut off there."""
    if out is None:
        assert stdout is not None
        yield stdout
        return
    if end is None:
        out.write("")  # before the options: these never stand beside rows of others
        out.write_options(made)
    with out.path.open("a", encoding="utf-8") as target:
        target.truncate(end or 0)
        yield target


def _report(
    wanted: Mapping[Id, str],
    rows: Mapping[Id, Row],
    kept: Mapping[Id, Row],
    failures: Mapping[Id, str],
    stderr: TextIO,
) -> None:
    earlier = f", {len(kept)} of them from an earlier run" if kept else ""
    said = [f"{_count(len(wanted), 'request')}{earlier}; {len(failures)} failed"]
    said += [f"  id {plain(str(id))}: {plain(' '.join(error.split()))}" for id, error in _first(failures.items())]
    if len(failures) > _TOLD:
        said.append(f"  and {len(failures) - _TOLD} more")
    if failures.keys() & kept.keys():
        said.append("retry_failed=true tries those of earlier runs again")
    gone = [id for id in rows if id not in wanted]
    if gone:
        named = ", ".join(plain(str(id)) for id in _first(gone)) + (", ..." if len(gone) > _TOLD else "")
        said.append(f"kept {_count(len(gone), 'row')} of requests that are not there any more: id {named}")
    changed = sum(id in rows and rows[id].sha256 != sha256 for id, sha256 in wanted.items())
    if changed:
        said.append(f"kept {_count(changed, 'row')} of requests that have changed; the last row of an id counts")
    print("\n".join(said), file=stderr)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _first(items: Iterable[Any]) -> list[Any]:
    return [item for item, _ in zip(items, range(_TOLD), strict=False)]


def _refuse_circle(request: str, stdout: TextIO) -> None:
    """Rows that are appended to the requests would be read as requests."""
    try:
        same = os.path.samestat(os.fstat(stdout.fileno()), os.stat(readable(request)))
    except (OSError, ValueError):  # standard output is no file
        return
    if same:
        raise ConfigError(f"standard output is request={request} itself; give another file")


def _progress(config: ScoreConfig, stderr: TextIO) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(file=stderr),
        disable=not (config.progress and stderr.isatty()),
    )
