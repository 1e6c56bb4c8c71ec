"""`forkgraph score`: answers to one request, or to a file with many."""

from __future__ import annotations

import gc
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import BinaryIO, TextIO

from engine.process import begin, run, standard_input

if __name__ == "__main__":
    begin("score")  # before torch, whose import takes seconds, is interrupted

from rich.console import Console
from rich.progress import Progress

from engine.cli import console, read_request, run_command, to_json
from engine.config import EngineConfig, ScoreConfig, resolve
from engine.engine import Engine
from engine.errors import ConfigError
from engine.identity import made_with
from engine.lines import SUFFIXES, Load, score_lines
from engine.output import Output, claim, named_inputs, refuse_shared
from engine.table import print_table


def main() -> None:
    def job(config: ScoreConfig) -> int:
        try:
            return score(config, load=_load, stdin=standard_input(), stdout=sys.stdout, stderr=sys.stderr)
        finally:
            gc.collect()  # the next job of a sweep finds this one's memory free

    run("score", lambda: run_command("score", ScoreConfig, job, refuse=refuse_shared))


def _load(config: EngineConfig) -> Engine:
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("weights", total=None)
        return Engine.load(config, progress=lambda done, total: progress.update(bar, completed=done, total=total))


def score(config: ScoreConfig, *, load: Load, stdin: BinaryIO | None, stdout: TextIO | None, stderr: TextIO) -> int:
    """Answer `config.request` and return the exit code. Raises what the engine raises for a single request.

    `stdin` and `stdout` are None where they are closed.
    """
    config = resolve(config)
    if config.out is None and stdout is None:
        raise ConfigError("standard output is closed; give out=FILE")
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
        text = to_json(response, indent=2) + "\n"
        if out is not None:
            out.write(text)
            out.write_options(made_with(config))
            stdout = None
        alone = config.format == "table" or (config.format == "auto" and stdout is not None and stdout.isatty())
        if stdout is not None and not alone:
            stdout.write(text)
            stdout.flush()
        if config.format != "json":
            print_table(console(stdout if stdout is not None and alone else stderr), source, response)
    return 0


def _claimed(config: ScoreConfig, stdin: BinaryIO | None) -> AbstractContextManager[Output | None]:
    if config.out is None:
        return nullcontext()
    return claim(config.out, inputs=named_inputs(config, stdin), overwrite=config.overwrite)


if __name__ == "__main__":
    main()
