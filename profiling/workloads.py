"""The workloads M1 to M5: 253 frozen requests, a line each in workloads/SET.jsonl, with hashes and token counts.

    python profiling/workloads.py                          # what the sets hold
    python profiling/workloads.py m1/1024x32 > FILE        # one body, as request=FILE takes it

Token counts are those of the Qwen3.5 tokenizer, chat template included, split `exact`. Needs no model and no GPU.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from engine.errors import ConfigError, nearest

SETS = ("m1", "m2", "m3", "m4", "m5")
FOLDER = Path(__file__).with_name("workloads")
COUNTS = ("questions", "candidates", "logical_tokens", "unique_tokens")


class Workload(BaseModel):
    """One request: `body` as `Engine.score` takes it, `sha256` of its canonical JSON, and its tokens.

    `logical_tokens` is the sum of all prompts, `unique_tokens` what is left when every common prefix counts once,
    `shared_prefix` what all prompts begin with; 0 for a request of one prompt.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    sha256: str
    questions: int
    candidates: int
    logical_tokens: int
    unique_tokens: int
    shared_prefix: int
    longest_prompt: int
    body: dict[str, Any]

    @property
    def set(self) -> str:
        return self.name.partition("/")[0]


def digest(body: dict[str, Any]) -> str:
    """SHA-256 of the body in canonical JSON. Members keep their order: that of candidates is part of the request."""
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def workloads(sets: Sequence[str] = SETS, folder: Path = FOLDER) -> list[Workload]:
    """The requests of `sets`, in that order. Raises ConfigError for a file that is damaged or was changed."""
    found = []
    for path in (folder / f"{name}.jsonl" for name in sets):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
            found += [Workload.model_validate_json(line) for line in lines]
        except (OSError, ValidationError) as error:
            reason = error.strerror if isinstance(error, OSError) else error.errors()[0]["msg"]
            raise ConfigError(f"{path}: {reason}; restore the file from the repository") from None
    for workload in found:
        if (made := digest(workload.body)) != workload.sha256:
            raise ConfigError(
                f"{workload.name}: the body has sha256 {made}, its line says {workload.sha256}: the file is damaged or "
                "was changed; restore it from the repository"
            )
    return found


def workload_named(name: str) -> Workload:
    """Raises ConfigError for a name that no set holds."""
    found = {one.name: one for one in workloads([s for s in SETS if s == name.partition("/")[0]])}
    if name not in found:
        raise ConfigError(f"workload={name} is in no set{nearest(name, found or SETS)}; names look like m1/1024x32")
    return found[name]


def main(words: Sequence[str]) -> int:
    try:
        if words:
            print(json.dumps(workload_named(words[0]).body, ensure_ascii=False, indent=2))
            return 0
        every = workloads()
    except ConfigError as error:
        print(f"workloads: {error}", file=sys.stderr)
        return 2
    print("set", "requests", *COUNTS, sep="\t")
    for name, members in [*((s, [one for one in every if one.set == s]) for s in SETS), ("all", every)]:
        sums = (sum(getattr(one, count) for one in members) for count in COUNTS)
        print(name, len(members), *(f"{number:,}" for number in sums), sep="\t")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
