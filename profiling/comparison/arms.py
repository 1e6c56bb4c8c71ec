"""The arms of the comparison: each answers the same questions over one set of weights, in its own way.

Knows neither files nor gates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from comparison.options import ENGINE_ARMS
from engine.engine import Engine
from engine.plan.layout import build_layout
from engine.prompt import Prompt

Questions = Sequence[Sequence[Prompt]]


@dataclass(frozen=True)
class Outcome:
    """One forward: `hidden` [candidates, h] of each candidate's last row on the CPU, and what was run for it.

    `rows` are true rows, padding not counted, and `passes` calls, by kind. `planned` are bytes by purpose, for arms
    that plan them.
    """

    hidden: Tensor
    rows: dict[str, int]
    passes: dict[str, int] = field(default_factory=dict)
    planned: dict[str, int] = field(default_factory=dict)


class EngineArm:
    """An engine over the weights of another, with some run options changed."""

    def __init__(self, name: str, engine: Engine) -> None:
        """Raises ConfigError for options that cannot run here."""
        self.name, self.held_bytes = name, 0  # on the device between forwards, as measured so far; weights left out
        self.engine = engine.like(**ENGINE_ARMS[name])
        self._captures: dict[tuple[int, int], float] = {}

    def forward(self, questions: Questions) -> Outcome:
        done = self.engine.forward(questions)
        hidden = torch.stack([rows[-1] for rows in done.hidden])
        return Outcome(hidden, done.counters.rows, done.counters.passes, asdict(done.memory))

    def settle(self) -> float:
        """Wait for captures behind the last forward; the seconds of all captures since the last call."""
        if self.engine.config.graphs != "captured":
            return 0.0
        self.engine.settle()
        before, self._captures = self._captures, self.engine.capture_seconds
        # A graph that was captured again took another time.
        return sum(seconds for key, seconds in self._captures.items() if before.get(key) != seconds)

    def close(self) -> None:
        self.engine.close()


class PeerArm:
    """Transformers over the engine's weights, with an `EngineArm`'s methods."""

    def __init__(self, name: str, engine: Engine) -> None:
        """Raises ConfigError for a path or way that cannot run here."""
        from peers import Peer  # transformers takes seconds to import

        _, path, self._way = name.split("/")
        self.name, self.held_bytes = name, 0
        self.peer = Peer(engine.weights, engine.dimensions, path=path, way=self._way)
        self._captured = 0.0

    def forward(self, questions: Questions) -> Outcome:
        together = [prompt for prompts in questions for prompt in prompts]
        rows = build_layout([together], "exact").unique_rows if self._way == "forked" else sum(map(len, together))
        return Outcome(self.peer.forward(questions), {"peer": rows})

    def settle(self) -> float:
        """A peer captures in `forward`, and adds up what each length took."""
        before, self._captured = self._captured, sum(self.peer.capture_seconds.values())
        return self._captured - before

    def close(self) -> None:
        self.peer.close()


Arm = EngineArm | PeerArm


def open_arm(name: str, engine: Engine) -> Arm:
    return EngineArm(name, engine) if name in ENGINE_ARMS else PeerArm(name, engine)


def first_candidates(questions: Questions, most: int | None) -> list[list[Prompt]]:
    """The questions cut after `most` candidates in all; those that are left without any are dropped."""
    kept: list[list[Prompt]] = []
    for prompts in questions:
        kept.append(list(prompts[: None if most is None else most - sum(map(len, kept))]))
    return [prompts for prompts in kept if prompts]
