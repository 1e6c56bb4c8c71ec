"""`forkgraph explain`: what a request would run, from a tokenizer and dimensions alone."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import BinaryIO, TextIO

from engine.process import begin, run, standard_input, standard_output

if __name__ == "__main__":
    begin("explain")  # before torch, whose import takes seconds, is interrupted

from engine.cli import console, read_request, run_command
from engine.config import RANDOM, ExplainConfig, resolve
from engine.load.opening import describe
from engine.plan.drawing import explain_prompts


def main() -> None:
    def job(config: ExplainConfig) -> int:
        return explain(config, stdin=standard_input(), stdout=standard_output())

    run("explain", lambda: run_command("explain", ExplainConfig, job))


def explain(config: ExplainConfig, *, stdin: BinaryIO | None, stdout: TextIO) -> int:
    """Draw the prefix tree of `config.request` and what each split runs and holds; `config.split` comes first.

    Nothing is allocated on a device and no weights are read. Raises RequestError for a request that would be refused.
    """
    config = resolve(replace(config, checkpoint=config.checkpoint or RANDOM))
    body, source = read_request(config.request, stdin)
    named = describe(config)
    processor = named.processor()
    request = processor.parse(body)
    prompts = processor.prompts(request)
    note = named.tokenizer or "that of tiny" + (
        "" if config.model == "tiny" else "; the model's own makes fewer tokens, choose it with tokenizer=FOLDER"
    )
    report = explain_prompts(prompts, config, named.dimensions, names=list(request.questions))
    if config.format == "json":
        facts = {"request": source, "model": config.model, "dtype": config.dtype, "tokenizer": note}
        stdout.write(json.dumps(facts | report.to_dict(), ensure_ascii=False, indent=2) + "\n")
        return 0
    console(stdout).print(f"request: {source}\nmodel: {config.model}, {config.dtype}\ntokenizer: {note}\n")
    console(stdout).print(report.renderable())
    return 0


if __name__ == "__main__":
    main()
