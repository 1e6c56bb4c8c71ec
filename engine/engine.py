"""The public engine: one set of weights on one device, and requests answered one at a time.

A request is validated whole, prompts and lengths included, in the caller's thread; its forward then waits its turn in
a first-in-first-out queue. Safe to call from many threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from engine.config import RANDOM, SPLITS, EngineConfig, resolve
from engine.errors import CapacityError, ConfigError, ForkgraphError, InferenceError, RequestError
from engine.load.dimensions import ModelDimensions
from engine.load.opening import check_vocabulary, open_model
from engine.load.projections import projection_shapes
from engine.load.weights import Progress, load_weights
from engine.plan.auto import fastest_first, passes_of
from engine.plan.drawing import ExplainReport, explain_report
from engine.plan.layout import Layout, build_layout, independent_layout
from engine.plan.memory import MemoryPlan, plan_memory
from engine.plan.schedule import BufferSizes, Limits, Plan, plan_passes
from engine.prompt import Prompt, checked_prompt
from engine.run.executor import Executor
from engine.run.model import Backbone, Weights
from engine.run.ranges import enable
from engine.statistics import Counters, run_statistics
from engine.wire.answers import Head, Provenance, Response, answer_request, respond, scalar_scores
from engine.wire.letters import LettersHead, letter_answers, letter_prompts, parse_letters
from engine.wire.prompts import build_prompts
from engine.wire.requests import Request, parse_request
from engine.wire.tokens import Tokens
from graphs.rungs import LADDER, rung
from graphs.tuning.tuner import UnknownEnvironmentError, prepare
from ops.linear import linear_default, linear_fixed
from ops.linear_tuned import linear_tuned
from ops.tables import MAX_ROWS

T = TypeVar("T")

_HANDLES = {"default": linear_default, "fixed": linear_fixed, "tuned": linear_tuned}
_ROW_LIMITS = (MAX_ROWS, 8_192, 4_096, 2_048, 1_024, 512)
"""Rows of the largest pass, tried in turn when memory is limited."""
_WARM_UP = {
    "state": "Dialog: Update installed.",
    "questions": {
        "action": {"type": "choice", "instructions": "Close it.", "criteria": {"ok": "OK", "wait": "Wait"}},
    },
}
_CLOSED = "this engine is closed; load another one"
_RUN_OPTIONS = ("split", "gemm", "schedule", "pack", "graphs")
"""What `Engine.like` may change: everything else belongs to the weights."""


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
        tokens: Tokens,
        weights: Weights,
        dimensions: ModelDimensions,
        head: Head | LettersHead,
        provenance: Provenance,
        aliases: Sequence[str] = (),
    ) -> None:
        """`config` must be resolved. Requests may name the model of `provenance` or an alias.

        `Engine.load` is the usual way in.
        """
        self._names = (provenance.model, *aliases)
        self.config, self.dimensions, self.head, self.provenance = config, dimensions, head, provenance
        self._tokens, self._weights = tokens, weights
        if config.nvtx:
            enable()
        if config.gemm == "tuned":
            assert config.cache_dir is not None
            shapes, device = projection_shapes(dimensions), torch.device(config.device)
            try:
                prepare(shapes, device=device, cache_dir=Path(config.cache_dir))
            except UnknownEnvironmentError as error:
                raise ConfigError(f"gemm=tuned: {error}; use gemm=fixed") from None
        backbone = Backbone(weights, dimensions, _HANDLES[config.gemm], compile_layers=config.graphs != "eager")
        graphs_bytes = int(config.memory.graphs_gib * 2**30) if config.graphs == "captured" else 0
        self._executor = Executor(backbone, capture_limit_bytes=graphs_bytes)
        self._queue = ThreadPoolExecutor(max_workers=1, thread_name_prefix="forkgraph")
        self._closed = False

    @classmethod
    def load(cls, config: EngineConfig | None = None, *, progress: Progress | None = None, **options: Any) -> Self:
        """Load weights onto the device: `Engine.load(model="9b", checkpoint=folder)` or with a whole config.

        `progress` is called with (layers done, layers in all). Raises ConfigError for options that cannot work and
        CheckpointError for files that are missing, damaged or of other dimensions.
        """
        config = resolve(_configured(config or EngineConfig(), options))
        device, dtype = torch.device(config.device), getattr(torch, config.dtype)
        model = open_model(config, dtype, device)
        dimensions = model.dimensions
        least = plan_memory(dimensions, rows=LADDER[0], reads=1, buffers=BufferSizes(), **_memory_of(config))
        _check_memory(least, config)
        weights = load_weights(
            model.tensor, dimensions, dtype=dtype, device=device, positions=config.max_length, progress=progress,
            adapter=model.beside,
        )  # fmt: skip
        lora = {} if model.lora is None else {"lora": model.lora}
        engine = cls(
            config,
            tokens=model.tokens,
            weights=weights,
            dimensions=dimensions,
            head=model.head,
            provenance=Provenance(
                model=model.names[0],
                base_revision=model.base_revision,
                max_length=config.max_length,
                backbone_parameter_dtypes=[f"torch.{config.dtype}", "torch.float32"],
                checkpoint_sha256=model.checkpoint_sha256,
                extra=_run_metadata(config) | lora,
            ),
            aliases=model.names[1:],
        )
        if device.type == "cuda":
            engine.warm_up()
        return engine

    def warm_up(self) -> None:
        """Answer a real request in every way that may be chosen, which compiles all there is, and capture the graphs
        that `warmup` names."""
        rows = {rung(rows) for rows in self.config.warmup}
        self.score(_WARM_UP)
        for _, plan in self._options(self._prompts(self._parsed(_WARM_UP)), Limits()):
            self._enqueue(partial(self._executor.run, plan)).result()
        for length in sorted(rows, reverse=True):
            length = min(length, self.config.max_length)
            self.hidden_states([Prompt(np.resize(np.arange(16, dtype=np.int32), length))])
        self.settle()

    def like(self, **options: Any) -> Engine:
        """Another engine over the same weights with other run options (split, gemm, schedule, pack, graphs)."""
        self._check_open()
        for name in options:
            if name not in _RUN_OPTIONS:
                raise ConfigError(f"{name} belongs to the weights; like() changes {', '.join(_RUN_OPTIONS)}")
        config = resolve(_configured(self.config, options))
        return Engine(
            config,
            tokens=self._tokens,
            weights=self._weights,
            dimensions=self.dimensions,
            head=self.head,
            provenance=replace(self.provenance, extra={**self.provenance.extra, **_run_metadata(config)}),
            aliases=self._names[1:],
        )

    def score(self, request: Request | dict[str, Any] | str | bytes) -> Response:
        """Answer one request. Raises RequestError before any forward, InferenceError when the forward fails."""
        return self.submit(request).result()

    def submit(self, request: Request | dict[str, Any] | str | bytes) -> Future[Response]:
        """Queue one request. It is validated before this returns (RequestError).

        The result raises CapacityError, before any forward, when the request fits no pass or not `memory.limit_gib`.
        `cancel()` on the result removes a request that has not started; one that has runs to its end.
        """
        parsed = self._parsed(request)
        questions = self._prompts(parsed)
        return self._enqueue(lambda: self._answer(parsed, questions))

    def hidden_states(self, prompts: Sequence[Prompt | Sequence[int]]) -> list[Tensor]:
        """Final hidden states of each prompt's reads: [reads, h] on the CPU in the model's dtype, in prompt order.

        Token ids are taken as they are. Raises RequestError for no prompt, an empty one, an id outside the vocabulary
        or a prompt above max_length, InferenceError for a read that is not finite.
        """
        if not prompts:
            raise RequestError("there must be at least one prompt", field="prompts")
        states = self._forward([[self._checked(f"prompts[{i}]", prompt) for i, prompt in enumerate(prompts)]]).hidden
        for i, rows in enumerate(states):
            if not torch.isfinite(rows).all():
                raise InferenceError(f"prompts[{i}]: a final hidden state is not finite")
        return states

    def prompts(self, request: Request | dict[str, Any] | str | bytes) -> list[list[Prompt]]:
        """The candidates of each question of `request`, as token ids. Raises RequestError; runs nothing."""
        return self._prompts(self._parsed(request))

    def forward(self, questions: Sequence[Sequence[Prompt]], *, name: str | None = None) -> Forward:
        """Run the candidates of `questions`, as `prompts` gives them: a request without its text and head.

        `name` is what a profiler's ranges call it. Raises RequestError for no candidate or one that the model cannot
        read, else what `submit` raises.
        """
        if not questions or not all(questions):
            raise RequestError("there must be questions, and a candidate in each", field="questions")
        checked = [
            [self._checked(f"questions[{q}][{c}]", prompt) for c, prompt in enumerate(candidates)]
            for q, candidates in enumerate(questions)
        ]
        return self._forward(checked, name)

    def _forward(self, questions: Sequence[Sequence[Prompt]], name: str | None = None) -> Forward:
        def run() -> Forward:
            _, plan = self._plan(questions)
            memory = self._memory(plan)
            hidden, counters = self._executor.run(plan, name=name)
            places = [place for reads in plan.reads_of_prompt for place in reads]
            rows = torch.split_with_sizes(hidden[places], [len(reads) for reads in plan.reads_of_prompt])
            return Forward(hidden=list(rows), counters=counters, memory=memory)

        return self._enqueue(run).result()

    def settle(self) -> None:
        """Wait until the graphs that earlier forwards missed are captured."""
        self._check_open()
        self._enqueue(self._executor.capture_missed).result()

    @property
    def weights(self) -> Weights:
        """The fused weights on the device, for measurements beside this engine; not to be written."""
        self._check_open()
        return self._weights

    @property
    def capture_seconds(self) -> dict[tuple[int, int], float]:
        """What capturing took so far, by (rows, reads) of the graph; empty unless `graphs=captured`."""
        self._check_open()
        captured = self._executor.captured
        return {} if captured is None else dict(captured.capture_seconds)

    def explain(self, request: Request | dict[str, Any] | str | bytes) -> ExplainReport:
        """What `request` would run: its prefix tree, rows with and without reuse, and bytes. Runs nothing."""
        parsed = self._parsed(request)
        prompts = self._prompts(parsed)
        splits = sorted(SPLITS, key=lambda split: split != self.config.split)
        layouts = {split: build_layout(prompts, split) for split in splits}  # type: ignore[arg-type]
        bytes_each = 2 if self.config.dtype == "bfloat16" else 4
        return explain_report(layouts, self.dimensions, bytes_each, question_names=list(parsed.questions))

    def close(self) -> None:
        """Cancel what has not started, wait for what has, and give the memory back."""
        if self._closed:
            return
        self._closed = True
        self._queue.shutdown(wait=True, cancel_futures=True)
        device = torch.device(self.config.device)
        self._executor.release()
        del self._executor, self._weights
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.empty_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ForkgraphError(_CLOSED)

    def _enqueue(self, work: Callable[[], T]) -> Future[T]:
        self._check_open()
        try:
            result = self._queue.submit(work)
        except RuntimeError:  # closed by another thread meanwhile
            raise ForkgraphError(_CLOSED) from None
        # Behind the answer, so that a request never waits for graphs of its own, and only later ones profit.
        result.add_done_callback(self._capture_later)
        return result

    def _capture_later(self, _: Future[Any]) -> None:
        if self._executor.has_missed:
            with suppress(RuntimeError):  # the queue was closed meanwhile
                self._queue.submit(self._executor.capture_missed)

    def _parsed(self, request: Request | dict[str, Any] | str | bytes) -> Request:
        if isinstance(request, Request):
            return request
        parse = parse_letters if isinstance(self.head, LettersHead) else parse_request
        return parse(request, self._names)

    def _prompts(self, request: Request) -> list[list[Prompt]]:
        if isinstance(self.head, LettersHead):
            prompts = letter_prompts(request, self._tokens, self.head.system_message, self.config.max_length)
        else:
            built = build_prompts(request, self._tokens, self.config.max_length)
            prompts = [question.prompts for question in built.questions]
        questions = [[Prompt(ids) for ids in question] for question in prompts]
        largest = max(int(prompt.token_ids.max()) for question in questions for prompt in question)
        check_vocabulary(largest, self.dimensions)
        return questions

    def _checked(self, field: str, prompt: Prompt | Sequence[int]) -> Prompt:
        return checked_prompt(field, prompt, vocab_size=self.dimensions.vocab_size, max_length=self.config.max_length)

    def _plan(self, questions: Sequence[Sequence[Prompt]]) -> tuple[Layout, Plan]:
        """The layout and passes to run: within the memory limit, and for `schedule=auto` the fastest predicted.

        Made when the request's turn has come, since the buffers and times that it goes by are then known.
        """
        for rows in _ROW_LIMITS:
            limits = Limits(rows=rows, question_snapshots=self.config.memory.question_snapshots)
            for layout, plan in self._options(questions, limits):
                if self._fits(plan):
                    return layout, plan
            longest = max(len(prompt) for question in questions for prompt in question)
            if longest > rows // 2:
                break
        _check_memory(self._memory(plan), self.config)
        raise AssertionError("a plan that does not fit is refused above")

    def _options(self, questions: Sequence[Sequence[Prompt]], limits: Limits) -> Iterator[tuple[Layout, Plan]]:
        """What may be run, the fastest predicted first."""
        schedule, pack, split = self.config.schedule, self.config.pack, self.config.split
        whole = schedule in ("independent", "batched")
        layout = independent_layout(questions) if whole else build_layout(questions, split)  # type: ignore[arg-type]
        if schedule != "auto":
            yield layout, plan_passes(layout, schedule=schedule, pack=pack, limits=limits)
            return
        ways = passes_of(layout, limits)
        for way in fastest_first(ways, self._executor.times):
            if way == "tree":
                with suppress(CapacityError):  # it may be too large for one pass
                    yield layout, plan_passes(layout, schedule="tree", pack=pack, limits=limits)
            elif way == "levels":
                yield layout, plan_passes(layout, schedule="levels", pack=pack, limits=limits)
            else:
                flat = build_layout(questions, split, question_prefixes=False)  # type: ignore[arg-type]
                yield flat, plan_passes(flat, schedule="levels", pack=pack, limits=limits)

    def _memory(self, plan: Plan) -> MemoryPlan:
        buffers = self._executor.buffers.sizes_for(plan.buffers)
        rows = rung(max(one.rows for one in plan.passes))
        of_pass = {"rows": rows, "reads": plan.num_reads, "pool_rows": self._executor.pool_rows(rows)}
        return plan_memory(self.dimensions, buffers=buffers, **of_pass, **_memory_of(self.config))

    def _fits(self, plan: Plan) -> bool:
        limit = self.config.memory.limit_gib
        return limit is None or self._memory(plan).total <= limit * 2**30

    def _answer(self, request: Request, questions: Sequence[Sequence[Prompt]]) -> Response:
        start = time.perf_counter()
        layout, plan = self._plan(questions)
        hidden, counters = self._executor.run(plan)
        last = [places[-1] for places in plan.reads_of_prompt]
        states = hidden[last].float().numpy()
        if isinstance(self.head, LettersHead):
            answers = letter_answers(request, states, self.head)
        else:
            answers = answer_request(request, scalar_scores(states, self.head), self.head.temperature)
        shares = self.config.schedule not in ("independent", "batched")
        statistics = run_statistics(layout, counters, shares=shares)
        return respond(answers, self.head, statistics, self.provenance, time.perf_counter() - start)


def _memory_of(config: EngineConfig) -> dict[str, int]:
    graphs = int(config.memory.graphs_gib * 2**30) if config.graphs == "captured" else 0
    return {"dtype_bytes": 2 if config.dtype == "bfloat16" else 4, "graphs_bytes": graphs}


def _check_memory(plan: MemoryPlan, config: EngineConfig) -> None:
    limit = config.memory.limit_gib
    if limit is not None and plan.total > limit * 2**30:
        raise CapacityError(f"this needs {plan}, above memory.limit_gib={limit:g}")


def _configured(config: EngineConfig, options: dict[str, Any]) -> EngineConfig:
    known = {f.name for f in fields(config)}
    for name in options:
        if name not in known:
            raise ConfigError(f"{name} is no option of an engine; known: {', '.join(sorted(known))}")
    return replace(config, **options)


def _run_metadata(config: EngineConfig) -> dict[str, Any]:
    made = config.checkpoint in (None, RANDOM)
    run = {name: getattr(config, name) for name in _RUN_OPTIONS}
    return {"weights": "random" if made else "checkpoint", "device": config.device, **run}
