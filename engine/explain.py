"""`python -m engine.explain`: what a request would run, from a tokenizer and dimensions alone."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import BinaryIO, TextIO

from engine.cli import console, read_request, run_command
from engine.config import RANDOM, SPLITS, ExplainConfig, resolve
from engine.load.checkpoint import read_dimensions
from engine.load.dimensions import DIMENSIONS, ModelDimensions
from engine.load.opening import checkpoint_kind, head_of, model_names
from engine.load.package import weights_folder
from engine.load.tiny import tiny_config, tiny_tokenizer
from engine.plan.drawing import explain_report
from engine.plan.layout import build_layout
from engine.prompt import Prompt
from engine.wire.letters import letter_prompts, parse_letters, read_system_message
from engine.wire.prompts import build_prompts
from engine.wire.requests import parse_request
from engine.wire.tokens import Tokens


def main() -> None:
    sys.exit(run_command("explain", ExplainConfig, lambda c: explain(c, stdin=sys.stdin.buffer, stdout=sys.stdout)))


def explain(config: ExplainConfig, *, stdin: BinaryIO, stdout: TextIO) -> int:
    """Draw the prefix tree of `config.request` and what each split runs and holds; `config.split` comes first.

    Nothing is allocated on a device and no weights are read. Raises RequestError for a request that would be refused.
    """
    config = resolve(replace(config, checkpoint=config.checkpoint or RANDOM))
    body, source = read_request(config.request, stdin)
    kind = checkpoint_kind(config)
    letters = head_of(config, kind) == "letters"
    request = (parse_letters if letters else parse_request)(body, model_names(config, kind))
    tokens, note = _tokenizer(config)
    if letters:
        message = read_system_message(config.letters.system_message, check=config.check_ids)
        ids = letter_prompts(request, tokens, message, config.max_length)
    else:
        ids = [question.prompts for question in build_prompts(request, tokens, config.max_length).questions]
    prompts = [[Prompt(one) for one in question] for question in ids]
    splits = sorted(SPLITS, key=lambda split: split != config.split)
    report = explain_report(
        {split: build_layout(prompts, split) for split in splits},  # type: ignore[arg-type]
        _dimensions(config),
        2 if config.dtype == "bfloat16" else 4,
        question_names=list(request.questions),
    )
    if config.format == "json":
        facts = {"request": source, "model": config.model, "dtype": config.dtype, "tokenizer": note}
        stdout.write(json.dumps(facts | report.to_dict(), ensure_ascii=False, indent=2) + "\n")
        return 0
    console(stdout).print(f"request: {source}\nmodel: {config.model}, {config.dtype}\ntokenizer: {note}\n")
    console(stdout).print(report.renderable())
    return 0


def _dimensions(config: ExplainConfig) -> ModelDimensions:
    if config.checkpoint is not None and config.checkpoint != RANDOM:
        return read_dimensions(weights_folder(config.checkpoint, config.base))
    return DIMENSIONS.get(config.model) or ModelDimensions.from_config(tiny_config())


def _tokenizer(config: ExplainConfig) -> tuple[Tokens, str]:
    folder = config.tokenizer
    if folder is None and config.checkpoint is not None and config.checkpoint != RANDOM:
        folder = weights_folder(config.checkpoint, config.base)
    if folder is not None:
        return Tokens.load(folder, config.tokens.control), folder  # type: ignore[arg-type]
    note = "that of tiny" + (
        "" if config.model == "tiny" else "; the model's own makes fewer tokens, choose it with tokenizer=FOLDER"
    )
    return Tokens(tiny_tokenizer().to_str(), config.tokens.control), note  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
