"""Requests from the rows of a Parquet file, and rows of answers as one. Needs pyarrow, the extra `[parquet]`."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, RequestError
from engine.rows import Id, Line, Row, told_apart
from engine.wire.requests import read_body

_BATCH = 1024


def pyarrow(option: str) -> Any:
    """The package, with its Parquet part. Raises ConfigError that names the extra."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(f"{option}: Parquet needs pyarrow; pip install 'forkgraph[parquet]'") from None
    return pyarrow


def parquet_lines(path: Path, questions: bytes | None) -> Iterator[Line]:
    """A request for each row, numbered from 1: its column `request` (JSON text), or its column `state` (text, a
    struct or a list) with the JSON object `questions`; `id` where there is such a column.

    Raises ConfigError for a file that is damaged or has other columns.
    """
    arrow = pyarrow(f"request={path}")
    try:
        with arrow.parquet.ParquetFile(path) as file:
            column = _column(path, file.schema_arrow, questions, arrow)
            columns = [name for name in ("id", column) if name in file.schema_arrow.names]
            number = 0
            for batch in file.iter_batches(batch_size=_BATCH, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield told_apart(number, _body(number, row[column], questions), row.get("id"))
    except arrow.ArrowException as error:
        raise ConfigError(f"request={path}: {error}") from None


def parquet_table(journal: Path, ids: Iterable[Id], rows: dict[Id, Row]) -> bytes:
    """A Parquet file with the rows of `ids`, in order, that stand in `journal`: `id` (text unless all are numbers),
    `request_sha256`, `response` (JSON text), `error` and `field`."""
    arrow = pyarrow("out")
    ids = list(ids)
    numbers = all(isinstance(id, int) and abs(id) < 2**63 for id in ids)
    texts = ("request_sha256", "response", "error", "field")
    schema = arrow.schema(
        [("id", arrow.int64() if numbers else arrow.string()), *((name, arrow.string()) for name in texts)]
    )
    buffer = io.BytesIO()
    with journal.open("rb") as file, arrow.parquet.ParquetWriter(buffer, schema) as writer:
        for first in range(0, len(ids), _BATCH):
            batch = []
            for id in ids[first : first + _BATCH]:
                file.seek(rows[id].start)
                batch.append(_table_row(json.loads(file.readline()), numbers=numbers))
            writer.write_table(arrow.Table.from_pylist(batch, schema=schema))
    return buffer.getvalue()


def read_questions(name: str, path: Path) -> bytes:
    """The JSON object in the file `questions=name`. Raises ConfigError."""
    try:
        tree = read_body(path.read_bytes())
    except RequestError as error:
        raise ConfigError(f"questions={name}: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"questions={name} must hold a JSON object, a question for each id")
    return json.dumps(tree, ensure_ascii=False).encode()


def _column(path: Path, schema: Any, questions: bytes | None, arrow: Any) -> str:
    """`request` or `state`, whichever the file has and the options ask for."""
    column = "request" if questions is None else "state"
    if column not in schema.names:
        remedy = "; give questions=FILE for its column state" if questions is None and "state" in schema.names else ""
        found = ", ".join(schema.names)
        raise ConfigError(f"request={path} has no column {column}, only {found}{remedy}")
    kind, types = schema.field(column).type, arrow.types
    text = types.is_string(kind) or types.is_large_string(kind)
    if not (text or (column == "state" and (types.is_struct(kind) or types.is_list(kind)))):
        raise ConfigError(f"request={path}: column {column} is {kind}, not text")
    return column


def _body(number: int, value: Any, questions: bytes | None) -> bytes:
    if questions is None:
        return (value or "").encode()
    try:
        state = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:  # a struct may hold what JSON cannot say
        raise ConfigError(f"request {number}: column state: {error}") from None
    return b'{"state": %b, "questions": %b}' % (state.encode(), questions)


def _table_row(row: dict[str, Any], *, numbers: bool) -> dict[str, Any]:
    id, sha256 = row.pop("id"), row.pop("request_sha256")
    failed = "error" in row
    return {
        "id": id if numbers else str(id),
        "request_sha256": sha256,
        "response": None if failed else json.dumps(row, ensure_ascii=False, allow_nan=False),
        "error": row["error"] if failed else None,
        "field": row["field"] if failed else None,
    }
