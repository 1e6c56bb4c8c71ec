"""A process that is not ours alone: engines and their clients beside a program that does what programs do."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine import Engine, Prompt

Questions = list[list[Prompt]]


def requests(count: int, *, seed: int, longest: int) -> list[Questions]:
    """Requests of 1 to 12 candidates behind 20 to `longest` tokens, as token ids of any model."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        head = rng.integers(0, 300, int(rng.integers(20, longest)), dtype=np.int32)
        made.append(
            [
                [
                    Prompt(np.concatenate([head, rng.integers(0, 300, int(rng.integers(1, 40)), dtype=np.int32)]))
                    for _ in range(int(rng.integers(1, 7)))
                ]
                for _ in range(int(rng.integers(1, 3)))
            ]
        )
    return made


def alone(engine: Engine, works: Sequence[Questions]) -> list[list[Tensor]]:
    """What each candidate gives when it is asked alone and eagerly, request by request."""
    with engine.like(schedule="independent", graphs="eager") as reference:
        return [reference.forward(work).hidden for work in works]


@dataclass
class Crowd:
    """Threads that run until `stop`; what each of them saw."""

    answers: int = 0
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    failed_calls: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._threads: list[threading.Thread] = []

    def ask(self, name: str, engine: Engine, works: Sequence[Questions], expected: Sequence[Sequence[Tensor]]) -> None:
        """A client that asks these over and over, in an order of its own."""

        def client() -> None:
            order = random.Random(len(self._threads))
            while not self._stop.is_set():
                i = order.randrange(len(works))
                try:
                    found = engine.forward(works[i]).hidden
                except Exception as error:
                    with self._lock:
                        self.errors.append(f"{name}: {type(error).__name__}: {error}")
                    continue
                same = all(torch.equal(a, b) for a, b in zip(found, expected[i], strict=True))
                with self._lock:
                    self.answers += 1
                    if not same:
                        self.wrong.append(f"{name}: request {i}")

        self._start(client)

    def do(self, name: str, call: Callable[[int], object], *, pause: float = 0.0) -> None:
        """Part of the program: `call` over and over."""

        def program() -> None:
            for i in itertools.count():
                if self._stop.is_set():
                    return
                failed = None
                try:
                    call(i)
                except Exception as error:
                    failed = f"{name}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
                with self._lock:
                    self.calls[name] += 1
                    if failed is not None:
                        self.failed_calls[failed] += 1
                time.sleep(pause)

        self._start(program)

    def _start(self, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, daemon=True)
        self._threads.append(thread)
        thread.start()

    def run(self, seconds: float) -> None:
        """Let everybody go on for so long, then wait for all of them."""
        time.sleep(seconds)
        self._stop.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive(), "a thread of the program hangs"

    def said(self) -> str:
        """For a report."""
        failed = sum(self.failed_calls.values())
        return (
            f"{self.answers} answers, {len(self.wrong)} wrong, {len(self.errors)} errors; the program made "
            f"{sum(self.calls.values())} calls, {failed} failed {dict(self.failed_calls)}"
        )
