"""The public engine: one set of weights on one device, and requests answered in turn.

A request is validated whole, prompts and lengths included, in the caller's thread; its forward then waits for the owner
of the device (`engine.run.device`). Safe to call from many threads, beside any number of engines.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self, Unpack

import torch
from torch import Tensor

from engine.assembly import RUN_OPTIONS, load_parts, make_executor, ran_with, warm_up
from engine.config import EngineConfig, configured, dtype_bytes, resolve
from engine.errors import ClosedError, ConfigError, DeviceLostError, InferenceError
from engine.load.dimensions import ModelDimensions
from engine.load.environment import check_environment
from engine.load.tensors import Weights
from engine.options import EngineOptions, RunOptions
from engine.plan.drawing import ExplainReport, explain_prompts
from engine.plan.memory import MemoryPlan
from engine.plan.planning import Planned, Planner
from engine.prompt import Prompt, checked_prompts, checked_questions
from engine.run.device import Progress, owner_of
from engine.run.ranges import enable
from engine.statistics import Counters, run_statistics
from engine.wire.answers import Provenance, Response, respond
from engine.wire.processor import Processor
from engine.wire.requests import Request

RequestLike = Request | dict[str, Any] | str | bytes


@dataclass(frozen=True, kw_only=True)
class Forward:
    """What `Engine.forward` ran: `hidden` [reads, h] of each candidate on the CPU, rows and passes, planned bytes."""

    hidden: list[Tensor]
    counters: Counters
    memory: MemoryPlan


class Engine:
    """Loaded weights, a tokenizer and a head, ready to answer. Use as a context manager, or call `close`."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        weights: Weights,
        dimensions: ModelDimensions,
        processor: Processor,
        provenance: Provenance,
        progress: Progress | None = None,
    ) -> None:
        """`config` must be resolved. `Engine.load` is the usual way in."""
        self.config, self.dimensions, self.processor, self.provenance = config, dimensions, processor, provenance
        self._planner = Planner(config, dimensions)
        if config.nvtx:
            enable()
        device = torch.device(config.device)
        self._client = owner_of(device).client()
        self._client.weights[id(weights)] = dimensions.weight_bytes(dtype_bytes(config.dtype)).total
        self._planner.check_least(others=self._client.owner.bytes_beside(self._client))
        made = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        self._executor = self._client.report(partial(make_executor, config, weights, dimensions, made), progress)
        # What nobody closed is given back when it is collected, but on the thread that owns the device.
        self._leave = weakref.finalize(self, self._client.owner.leave, self._client, self._executor.release)
        self._leave.atexit = False
        if device.type == "cuda":
            self._client.report(partial(warm_up, config, self._planner, self._executor), progress)
        if config.capture == "idle":
            self._client.idle = self._executor.capture_next

    @classmethod
    def load(
        cls,
        config: EngineConfig | Mapping[str, Any] | None = None,
        *,
        progress: Progress | None = None,
        **options: Unpack[EngineOptions],
    ) -> Self:
        """Load weights onto the device: `Engine.load(model="9b", checkpoint=folder)` or with a whole config, which may
        be a mapping of options.

        `progress` is called with (steps done, steps in all) of each part of it: layers, products, graphs. Raises
        ConfigError for options that cannot work and CheckpointError for files that are missing, damaged or of other
        dimensions.
        """
        config = resolve(configured(config, options))
        check_environment(config)
        client = owner_of(torch.device(config.device)).client()
        return cls(config, **client.report(partial(load_parts, config, client), progress), progress=progress)

    def like(self, *, progress: Progress | None = None, **options: Unpack[RunOptions]) -> Engine:
        """Another engine over the same weights with other run options: split, gemm, schedule, pack, graphs, capture."""
        self._check_open()
        for name in options:
            if name not in RUN_OPTIONS:
                raise ConfigError(f"{name} belongs to the weights; like() changes {', '.join(RUN_OPTIONS)}")
        config = resolve(configured(self.config, options))
        check_environment(config)
        return Engine(
            config,
            weights=self.weights,
            dimensions=self.dimensions,
            processor=self.processor,
            provenance=ran_with(config, self.provenance),
            progress=progress,
        )

    def score(self, request: RequestLike) -> Response:
        """Answer one request. Raises RequestError before any forward, InferenceError when the forward fails."""
        return self.submit(request).result()

    def submit(self, request: RequestLike) -> Future[Response]:
        """Queue one request. It is validated before this returns (RequestError).

        The result raises CapacityError, before any forward, when the request fits no pass or not `memory.limit_gib`,
        ClosedError when the engine is closed before its turn, and DeviceLostError when the device answers no more.
        `cancel()` on the result removes a request that has not started; one that has runs to its end. Callbacks of the
        result run on a thread of their own.
        """
        self._check_open()
        parsed = self.processor.parse(request)
        questions = self.processor.prompts(parsed)
        return self._client.submit(lambda: self._answer(parsed, questions))

    def hidden_states(self, prompts: Sequence[Prompt | Sequence[int]]) -> list[Tensor]:
        """Final hidden states of each prompt's reads: [reads, h] on the CPU in the model's dtype, in prompt order.

        Token ids are taken as they are. Raises RequestError for no prompt, an empty one, an id outside the vocabulary
        or a prompt above max_length, InferenceError for a read that is not finite.
        """
        checked = checked_prompts("prompts", prompts, **self._readable)
        states = self._client.call(lambda: self._forward([checked])).hidden
        for i, rows in enumerate(states):
            if not torch.isfinite(rows).all():
                raise InferenceError(f"prompts[{i}]: a final hidden state is not finite")
        return states

    def prompts(self, request: RequestLike) -> list[list[Prompt]]:
        """The candidates of each question of `request`, as token ids. Raises RequestError; runs nothing."""
        return self.processor.prompts(self.processor.parse(request))

    def forward(self, questions: Sequence[Sequence[Prompt]], *, name: str | None = None) -> Forward:
        """Run the candidates of `questions`, as `prompts` gives them: a request without its text and head.

        `name` is what a profiler's ranges call it. Raises RequestError for no candidate or one that the model cannot
        read, else what `submit` raises.
        """
        checked = checked_questions(questions, **self._readable)
        return self._client.call(lambda: self._forward(checked, name))

    def settle(self) -> None:
        """Wait until the graphs that earlier forwards missed are captured."""
        self._client.call(self._executor.capture_missed)

    @property
    def weights(self) -> Weights:
        """The fused weights on the device, for measurements beside this engine; not to be written."""
        self._check_open()
        return self._executor.backbone.weights

    @property
    def capture_seconds(self) -> dict[tuple[int, int], float]:
        """What capturing took so far, by (rows, reads) of the graph; empty unless `graphs=captured`."""
        self._check_open()
        captured = self._executor.captured
        return {} if captured is None else dict(captured.capture_seconds)

    def explain(self, request: RequestLike) -> ExplainReport:
        """What `request` would run: its prefix tree, rows with and without reuse, and bytes. Runs nothing."""
        parsed = self.processor.parse(request)
        return explain_prompts(
            self.processor.prompts(parsed), self.config, self.dimensions, names=list(parsed.questions)
        )

    def close(self) -> None:
        """Refuse what has not started (ClosedError), wait for what has, and give the memory back."""
        self._leave()
        if not self._client.owner.forked:
            with suppress(DeviceLostError):  # then there is nothing to give back
                self._client.released.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        self._client.owner.check()
        if self._client.closed:
            raise ClosedError

    @property
    def _readable(self) -> dict[str, int]:
        return {"vocab_size": self.dimensions.vocab_size, "max_length": self.config.max_length}

    # What follows runs on the thread that owns the device.

    def _planned(self, questions: Sequence[Sequence[Prompt]]) -> Planned:
        client = self._client
        planned = self._planner.plan(questions, self._executor, others=client.owner.bytes_beside(client))
        client.held_bytes = max(client.held_bytes, planned.memory.above_weights)
        return planned

    def _forward(self, questions: Sequence[Sequence[Prompt]], name: str | None = None) -> Forward:
        planned = self._planned(questions)
        plan = planned.plan
        hidden, counters = self._executor.run(plan, name=name)
        places = [place for reads in plan.reads_of_prompt for place in reads]
        rows = torch.split_with_sizes(hidden[places], [len(reads) for reads in plan.reads_of_prompt])
        self._capture_before_answer()
        return Forward(hidden=list(rows), counters=counters, memory=planned.memory)

    def _answer(self, request: Request, questions: Sequence[Sequence[Prompt]]) -> Response:
        start = time.perf_counter()
        planned = self._planned(questions)
        hidden, counters = self._executor.run(planned.plan)
        states = hidden.float().numpy()
        answers = self.processor.answers(request, [states[list(places)] for places in planned.plan.reads_of_prompt])
        shares = self.config.schedule not in ("independent", "batched")
        statistics = run_statistics(planned.layout, counters, shares=shares)
        response = respond(answers, self.processor, statistics, self.provenance, time.perf_counter() - start)
        self._capture_before_answer()
        return response

    def _capture_before_answer(self) -> None:
        """While the caller waits, a program of one thread can do nothing that a capture forbids."""
        if self.config.capture == "answer":
            self._executor.capture_missed()
