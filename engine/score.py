"""`forkgraph score`: answers to one request, or to a file with one request per line."""

from __future__ import annotations

import gc
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any, BinaryIO, TextIO

from rich.console import Console, Group
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from engine.cli import console, plain, read_request, run_command, to_json
from engine.config import EngineConfig, ScoreConfig, resolve
from engine.engine import Engine
from engine.errors import ConfigError
from engine.identity import made_with
from engine.lines import SUFFIXES, Load, score_lines
from engine.load.checkpoint import RANDOM_NOTE
from engine.output import Output, claim, named_inputs


def main() -> None:
    def job(config: ScoreConfig) -> int:
        try:
            return score(config, load=_load, stdin=sys.stdin.buffer, stdout=sys.stdout, stderr=sys.stderr)
        finally:
            gc.collect()  # the next job of a sweep finds this one's memory free

    sys.exit(run_command("score", ScoreConfig, job))


def _load(config: EngineConfig) -> Engine:
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("weights", total=None)
        return Engine.load(config, progress=lambda done, total: progress.update(bar, completed=done, total=total))


def score(config: ScoreConfig, *, load: Load, stdin: BinaryIO, stdout: TextIO, stderr: TextIO) -> int:
    """Answer `config.request` and return the exit code. Raises what the engine raises for a single request."""
    config = resolve(config)
    if config.request is not None and config.request.endswith(SUFFIXES):
        return score_lines(config, load=load, stdout=stdout, stderr=stderr)
    if config.questions is not None:
        raise ConfigError(f"questions={config.questions} goes with request=FILE.parquet, whose rows are states")
    if config.out is not None and config.out.endswith(".parquet"):
        raise ConfigError(f"out={config.out}: one request has no table; name it .json")
    body, source = read_request(config.request, stdin)
    with _claimed(config, stdin) as out:
        with load(config) as engine:
            response = engine.score(body).to_dict()
        console(stderr).print(f"request: {source}\n")
        console(stderr).print(summary(response))
        text = to_json(response, indent=2) + "\n"
        if out is None:
            stdout.write(text)
            stdout.flush()
        else:
            out.write(text)
            out.write_options(made_with(config))
    return 0


def _claimed(config: ScoreConfig, stdin: BinaryIO) -> AbstractContextManager[Output | None]:
    if config.out is None:
        return nullcontext()
    return claim(config.out, inputs=named_inputs(config, stdin), overwrite=config.overwrite)


def summary(response: dict[str, Any]) -> Group:
    """The wire response as a table for reading."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("question", "type", "answer", "confidence", "probabilities"):
        table.add_column(column)
    for id, answer in response["answers"].items():
        table.add_row(Text(plain(id)), answer["type"], *_cells(answer))
    metadata = response["metadata"]
    tokens, seconds = response["usage"]["input_tokens"], metadata["inference_seconds"]
    reused = metadata["prefix_cache"].get("reused_input_tokens", 0)
    lines = ["", f"{response['model']}: {tokens:,} tokens, {reused:,} of them reused, {seconds * 1e3:,.0f} ms"]
    if metadata.get("weights") == "random":
        lines.append(RANDOM_NOTE)
    return Group(table, Text("\n".join(lines)))


def _cells(answer: dict[str, Any]) -> tuple[Text, str, Text]:
    """Answer, confidence and the three largest probabilities."""
    if answer["type"] == "noul":
        return Text(f"yes with {answer['noul']:.3f}"), "", Text("")
    ranked = sorted(answer["probabilities"].items(), key=lambda entry: -entry[1])
    shown = "  ".join(f"{name} {p:.3f}" for name, p in ranked[:3]) + ("  ..." if len(ranked) > 3 else "")
    value = answer["choice"] if answer["type"] == "choice" else f"{answer['score']:.2f} of {len(ranked) - 1}"
    return Text(plain(value)), f"{answer['confidence']:.3f}", Text(plain(shown))


if __name__ == "__main__":
    main()
