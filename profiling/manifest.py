"""The workloads M1 to M5: requests made from a seed, held to the hashes and token counts of `manifest.json`.

    python profiling/manifest.py                                    # what the sets hold; reads manifest.json alone
    python profiling/manifest.py --write FOLDER                     # every body as FOLDER/m1/256x2.json, ...
    python profiling/manifest.py --freeze --tokenizer FOLDER        # choose seeds and lengths anew, for maintainers

Token counts are those of the Qwen3.5 tokenizer, chat template included. No model and no GPU is needed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import manifest_requests
import manifest_workflows
from manifest_requests import Body, Recipe
from manifest_text import Draw
from rich.console import Console
from rich.table import Table

from engine.errors import ConfigError, ForkgraphError, RequestError
from engine.plan.layout import build_layout
from engine.prompt import Prompt
from engine.wire.prompts import build_prompts
from engine.wire.requests import parse_request
from engine.wire.tokens import Tokens

SETS = ("m1", "m2", "m3", "m4", "m5")
MANIFEST = Path(__file__).with_name("manifest.json")
JEVBENCH_SHA256 = "2e20ff5f94dd04d015b3a7b9abd955757b6c5be25b55b97fcd141cb52f88b4aa"
"""Of the 231 public JevBench tasks, one JSON object a line."""

_RECIPES = {
    "m1": manifest_requests.m1,
    "m2": manifest_workflows.m2,
    "m3": manifest_requests.m3,
    "m4": manifest_requests.m4,
    "m5": manifest_requests.m5,
}
_MAX_TOKENS = 16_384
_SEEDS = 400


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One request: `body` as `Engine.score` takes it, `sha256` of its canonical JSON."""

    name: str
    set: str
    body: Body
    sha256: str
    candidates: int


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A line of the manifest. `seed` and `words` make the body; the rest is what came of it, in tokens.

    `logical_tokens` is the sum of all prompts, `unique_tokens` what is left when every common prefix counts once (split
    `exact`), `shared_prefix` what all prompts begin with; 0 for a request of one prompt.
    """

    name: str
    seed: int
    words: int
    sha256: str
    questions: int
    candidates: int
    logical_tokens: int
    unique_tokens: int
    shared_prefix: int
    longest_prompt: int

    @property
    def set(self) -> str:
        return self.name.partition("/")[0]


def workloads(sets: Sequence[str] = SETS, *, jevbench: Path | None = None) -> list[Workload]:
    """The requests of `sets`, in that order, made anew and compared with the manifest.

    With `jevbench`, a file of JevBench's public tasks, its yes/no tasks are M4 and all others M5. Raises ConfigError
    for an unknown set, for a body that is not the frozen one, and for a file that is not the known one.
    """
    for name in sets:
        if name not in SETS:
            raise ConfigError(f"sets must be among {', '.join(SETS)}, got {name!r}")
    entries = {entry.name: entry for entry in frozen()}
    tasks = None if jevbench is None else jevbench_workloads(jevbench)
    made: list[Workload] = []
    for name in sets:
        if tasks is not None and name in ("m4", "m5"):
            made += [task for task in tasks if task.set == name]
        else:
            made += [_checked(recipe, entries) for recipe in _RECIPES[name]()]
    return made


def frozen(path: Path | None = None) -> list[Entry]:
    """The lines of the manifest. Raises ConfigError for a file that cannot be read as one."""
    path = path or MANIFEST
    try:
        return [Entry(**line) for line in json.loads(path.read_text(encoding="utf-8"))["workloads"]]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path}: not a manifest: {error!r}; restore it from the repository") from error


def digest(body: Body) -> str:
    """SHA-256 of the body in canonical JSON. Members keep their order: that of candidates is part of the request."""
    text = json.dumps(body, ensure_ascii=False, sort_keys=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _workload(name: str, body: Body, sha256: str) -> Workload:
    set, candidates = name.partition("/")[0], parse_request(body).num_candidates
    return Workload(name=name, set=set, body=body, sha256=sha256, candidates=candidates)


def _made(recipe: Recipe, seed: int, words: int) -> Body:
    return recipe.build(Draw(recipe.stream, seed), words)


def _checked(recipe: Recipe, entries: dict[str, Entry]) -> Workload:
    entry = entries.get(recipe.name)
    if entry is None:
        raise ConfigError(f"{recipe.name}: not in {MANIFEST.name}; restore the file, or freeze it anew after a change")
    body = _made(recipe, entry.seed, entry.words)
    if (found := digest(body)) != entry.sha256:
        raise ConfigError(
            f"{recipe.name}: the body made here has sha256 {found}, {MANIFEST.name} says {entry.sha256}: a file of "
            "profiling/manifest* is damaged or was changed, or Python's random gives other numbers; restore the files"
        )
    return _workload(recipe.name, body, entry.sha256)


def jevbench_workloads(path: Path) -> list[Workload]:
    """JevBench's tasks as requests, named after their ids. Raises ConfigError unless it is the known file."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"jevbench={path}: {error.strerror}; give the JSONL file of the public tasks") from error
    found = hashlib.sha256(content).hexdigest()
    if found != JEVBENCH_SHA256:
        raise ConfigError(
            f"jevbench={path}: sha256 is {found}, expected {JEVBENCH_SHA256}; give the 231 public tasks, or leave it "
            "out for the generated requests"
        )
    made = []
    for number, line in enumerate(content.decode().splitlines(), start=1):
        try:
            task = json.loads(line)
            body = {"model": "open-jev", "state": task["state"], "questions": {"decision": task["question"]}}
            set = "m4" if task["question"]["type"] == "noul" else "m5"
            made.append(_workload(f"{set}/{task['id']}", body, digest(body)))
        except (ValueError, TypeError, KeyError, RequestError) as error:
            raise ConfigError(f"jevbench={path}: line {number} is not a task: {error!r}") from error
    return made


def count(body: Body, tokens: Tokens) -> dict[str, int]:
    """The counts of a manifest line for `body`, as the engine builds its prompts and finds their prefixes."""
    prompts = build_prompts(parse_request(body), tokens, _MAX_TOKENS)
    layout = build_layout([[Prompt(ids) for ids in question.prompts] for question in prompts.questions], "exact")
    return {
        "questions": len(prompts.questions),
        "candidates": layout.num_prompts,
        "logical_tokens": layout.full_rows,
        "unique_tokens": layout.unique_rows,
        "shared_prefix": layout.request_prefix_tokens,
        "longest_prompt": max(max(question.lengths) for question in prompts.questions),
    }


def freeze(recipe: Recipe, tokens: Tokens) -> Entry:
    """The first seed, and its number of words, with which the request has exactly the recipe's length."""
    for seed in range(_SEEDS):
        low, high = 1, recipe.tokens  # a word or mark has at least one token, so `recipe.tokens` words are long enough
        while low <= high:
            words = (low + high) // 2
            body = _made(recipe, seed, words)
            counts = count(body, tokens)
            length = counts["shared_prefix"] or counts["longest_prompt"]
            if length == recipe.tokens:
                return Entry(name=recipe.name, seed=seed, words=words, sha256=digest(body), **counts)
            low, high = (words + 1, high) if length < recipe.tokens else (low, words - 1)
    raise ConfigError(f"{recipe.name}: none of {_SEEDS} seeds gives {recipe.tokens} tokens; ask for another length")


def write_manifest(path: Path, entries: Sequence[Entry]) -> None:
    lines = ",\n".join("  " + json.dumps(asdict(entry)) for entry in entries)
    _replace(path, f'{{"tokenizer": "Qwen3.5", "split": "exact", "workloads": [\n{lines}\n]}}\n')


def write_bodies(folder: Path) -> int:
    """Every request as `folder/SET/NAME.json`; how many there were."""
    made = workloads()
    for workload in made:
        path = folder / f"{workload.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, json.dumps(workload.body, ensure_ascii=False, indent=2) + "\n")
    return len(made)


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def table(entries: Sequence[Entry]) -> Table:
    result = Table("set", "requests", "questions", "candidates", "tokens now", "with reuse", "longest prompt")
    for column in result.columns[1:]:
        column.justify = "right"
    for name, members in _groups(entries):
        result.add_row(
            name,
            f"{len(members)}",
            *(_sum(members, field) for field in ("questions", "candidates", "logical_tokens", "unique_tokens")),
            f"{max((entry.longest_prompt for entry in members), default=0):,}",
            end_section=name == SETS[-1],
        )
    return result


def _groups(entries: Sequence[Entry]) -> Iterator[tuple[str, Sequence[Entry]]]:
    for name in SETS:
        yield name, [entry for entry in entries if entry.set == name]
    yield "all", entries


def _sum(entries: Sequence[Entry], field: str) -> str:
    return f"{sum(getattr(entry, field) for entry in entries):,}"


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    how = result.add_mutually_exclusive_group()
    how.add_argument("--write", type=Path, metavar="FOLDER", help="write every body below this folder")
    how.add_argument("--freeze", action="store_true", help="make manifest.json anew; takes a minute")
    result.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="with --freeze: a folder with tokenizer.json")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        if arguments.freeze != (arguments.tokenizer is not None):
            raise ConfigError("--freeze and --tokenizer FOLDER go together; give both or neither")
        if arguments.write:
            print(f"manifest: {write_bodies(arguments.write)} requests below {arguments.write}", file=sys.stderr)
            return 0
        if arguments.freeze:
            _freeze_all(Tokens.load(arguments.tokenizer))
        Console().print(table(frozen()))
    except ForkgraphError as error:
        print(f"manifest: {error}", file=sys.stderr)
        return 2
    return 0


def _freeze_all(tokens: Tokens) -> None:
    entries: list[Entry] = []
    for name in SETS:
        for recipe in _RECIPES[name]():
            entries.append(freeze(recipe, tokens))
            print(f"manifest: {recipe.name} {entries[-1].longest_prompt:,} tokens", file=sys.stderr)
    write_manifest(MANIFEST, entries)


if __name__ == "__main__":
    sys.exit(main())
