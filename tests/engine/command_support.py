"""`score` with streams of its own and an engine that knows nothing."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

from engine.config import EngineConfig, ScoreConfig
from engine.errors import InferenceError, RequestError
from engine.score import score

REQUEST = b'{"state": "s", "questions": {"q": {"type": "noul", "instructions": "i"}}}'


class FakeResponse:
    def __init__(self, body: bytes) -> None:
        self.body = body

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": "fake",
            "answers": {
                "colour": {"type": "choice", "choice": "red", "probabilities": {"red": 0.75, "blue": 0.25},
                           "confidence": 0.5},
                "sure": {"type": "noul", "noul": 0.125},
                "level": {"type": "score", "score": 1.5, "probabilities": {"0": 0.0, "1": 0.5, "2": 0.5},
                          "confidence": 0.25, "legend": {"0": "low", "1": "middle", "2": "high"}},
            },
            "usage": {"input_tokens": 1234, "output_tokens": 0},
            "metadata": {"inference_seconds": 0.5, "prefix_cache": {"reused_input_tokens": 1000}, "weights": "random",
                         "body": self.body.decode()},
        }  # fmt: skip


class FakeEngine:
    """Answers any line; `bad`, `broken` and `stop` do what they say. Knows whether it was closed."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []
        self.configs: list[EngineConfig] = []
        self.open = 0

    def load(self, config: EngineConfig) -> FakeEngine:
        self.configs.append(config)
        return self

    def __enter__(self) -> FakeEngine:
        self.open += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.open -= 1

    def score(self, body: bytes) -> FakeResponse:
        if body == b"stop":
            raise KeyboardInterrupt
        if body == b"bad":
            raise RequestError("state must be text", field="state", value=3)
        if body == b"broken":
            raise InferenceError("not finite")
        self.seen.append(body)
        return FakeResponse(body)


class Run:
    """One call of `score` with streams of its own."""

    def __init__(self, engine: FakeEngine, stdin: bytes = b"", **options: Any) -> None:
        out, err = io.StringIO(), io.StringIO()
        try:
            config = ScoreConfig(device="cpu", **options)
            self.code = score(config, load=engine.load, stdin=io.BytesIO(stdin), stdout=out, stderr=err)  # type: ignore
        finally:
            self.out, self.err = out.getvalue(), err.getvalue()


def row(id: str | int, body: bytes, **rest: Any) -> dict[str, Any]:
    """What stands in a file of rows for `body`, which is no JSON."""
    answer = rest or FakeResponse(body).to_dict()
    return {"id": id, "request_sha256": hashlib.sha256(body).hexdigest(), **answer}


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]
