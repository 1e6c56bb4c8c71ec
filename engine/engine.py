"""The public engine: one set of weights on one device, and requests answered one at a time.

A request is validated whole, prompts and lengths included, in the caller's thread; its forward then waits its turn in
a first-in-first-out queue. Safe to call from many threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields, replace
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from engine.answers import Head, Provenance, Response, RunStatistics, answer_request, respond, scalar_scores
from engine.checkpoint import Checkpoint, RandomWeights, open_checkpoint
from engine.config import RANDOM, SPLITS, EngineConfig, resolve
from engine.dimensions import DIMENSIONS, ModelDimensions
from engine.drawing import ExplainReport, explain_report
from engine.errors import CapacityError, CheckpointError, ConfigError, ForkgraphError, InferenceError, RequestError
from engine.executor import Counters, Executor
from engine.layout import Layout, Prompt, build_layout, independent_layout
from engine.memory import MemoryPlan, plan_memory
from engine.model import Backbone, Weights
from engine.prompts import build_prompts
from engine.ranges import span
from engine.requests import Request, parse_request
from engine.schedule import BufferSizes, Limits, Plan, plan_passes
from engine.tiny import tiny_checkpoint
from engine.tokens import Tokens
from engine.weights import Progress, load_weights
from graphs.rungs import LADDER, rung
from ops.linear import linear_default, linear_fixed
from ops.tables import MAX_ROWS

T = TypeVar("T")

MODEL_NAMES = {
    "tiny": ("forkgraph/tiny",),
    "4b": ("Qwen/Qwen3.5-4B",),
    "9b": ("Qwen/Qwen3.5-9B", "open-jev-9b"),
    "27b": ("Qwen/Qwen3.8-27B", "open-jev-27b-v1.1"),
}
"""The base id a response carries, then the aliases a request may use."""

_HANDLES = {"default": linear_default, "fixed": linear_fixed}
_ROW_LIMITS = (MAX_ROWS, 8_192, 4_096, 2_048, 1_024, 512)
"""Rows of the largest pass, tried in turn when memory is limited."""
_WARM_UP = {
    "state": "Dialog: Update installed.",
    "questions": {
        "action": {"type": "choice", "instructions": "Close it.", "criteria": {"ok": "OK", "wait": "Wait"}},
    },
}
_RUN_OPTIONS = ("split", "gemm", "schedule", "pack", "graphs")
"""What `Engine.like` may change: everything else belongs to the weights."""


class Engine:
    """Loaded weights, a tokenizer and a head, ready to answer. Use as a context manager, or call `close`."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        tokens: Tokens,
        weights: Weights,
        dimensions: ModelDimensions,
        head: Head,
        provenance: Provenance,
    ) -> None:
        """`config` must be resolved. `Engine.load` is the usual way in."""
        self.config, self.dimensions, self.head, self.provenance = config, dimensions, head, provenance
        self._tokens, self._weights = tokens, weights
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
        source, folder = _open_weights(config, dtype, device)
        tokens = Tokens.load(folder, control=config.tokens.control)  # type: ignore[arg-type]
        dimensions = source.dimensions
        _check_memory(plan_memory(dimensions, rows=LADDER[0], buffers=BufferSizes(), **_memory_of(config)), config)
        weights = load_weights(
            source.tensor, dimensions, dtype=dtype, device=device, positions=config.max_length, progress=progress
        )
        engine = cls(
            config,
            tokens=tokens,
            weights=weights,
            dimensions=dimensions,
            head=_yes_minus_no(source, tokens),
            provenance=Provenance(
                model=MODEL_NAMES[config.model][0],
                base_revision=None,
                max_length=config.max_length,
                backbone_parameter_dtypes=[f"torch.{config.dtype}", "torch.float32"],
                extra=_run_metadata(config),
            ),
        )
        if device.type == "cuda":
            engine.warm_up()
        return engine

    def warm_up(self) -> None:
        """Answer a real request, which compiles what will be needed, and capture the graphs that `warmup` names."""
        rows = {rung(rows) for rows in self.config.warmup}
        self.score(_WARM_UP)
        for length in sorted(rows, reverse=True):
            length = min(length, self.config.max_length)
            self.hidden_states([Prompt(np.resize(np.arange(16, dtype=np.int32), length))])

    def like(self, **options: Any) -> Engine:
        """Another engine over the same weights with other run options (split, gemm, schedule, pack, graphs)."""
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
            provenance=replace(self.provenance, extra=_run_metadata(config)),
        )

    def score(self, request: Request | dict[str, Any] | str | bytes) -> Response:
        """Answer one request. Raises RequestError before any forward, InferenceError when the forward fails."""
        return self.submit(request).result()

    def submit(self, request: Request | dict[str, Any] | str | bytes) -> Future[Response]:
        """Queue one request. It is validated before this returns (RequestError).

        `cancel()` on the result removes a request that has not started; one that has runs to its end.
        """
        parsed = self._parsed(request)
        layout, plan = self._plan(self._prompts(parsed))
        return self._enqueue(lambda: self._answer(parsed, layout, plan))

    def hidden_states(self, prompts: Sequence[Prompt | Sequence[int]]) -> list[Tensor]:
        """Final hidden states of each prompt's reads: [reads, h] on the CPU in the model's dtype, in prompt order.

        Token ids are taken as they are. Raises RequestError for an empty prompt, an id outside the vocabulary or a
        prompt above max_length, InferenceError for a read that is not finite.
        """
        checked = [self._checked(i, p) for i, p in enumerate(prompts)]
        _, plan = self._plan([checked])

        def states() -> list[Tensor]:
            hidden, _ = self._executor.run(plan)
            rows = [hidden[list(places)] for places in plan.reads_of_prompt]
            for i, row in enumerate(rows):
                if not torch.isfinite(row).all():
                    raise InferenceError(f"prompts[{i}]: a final hidden state is not finite")
            return rows

        return self._enqueue(states).result()

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

    def _enqueue(self, work: Callable[[], T]) -> Future[T]:
        if self._closed:
            raise ForkgraphError("this engine is closed; load another one")
        result = self._queue.submit(work)
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
        return parse_request(request, MODEL_NAMES[self.config.model])

    def _prompts(self, request: Request) -> list[list[Prompt]]:
        prompts = build_prompts(request, self._tokens, self.config.max_length)
        return [[Prompt(ids) for ids in question.prompts] for question in prompts.questions]

    def _plan(self, questions: Sequence[Sequence[Prompt]]) -> tuple[Layout, Plan]:
        """The layout and passes to run: within the memory limit, and for `schedule=auto` the fastest predicted."""
        for rows in _ROW_LIMITS:
            limits = Limits(rows=rows, question_snapshots=self.config.memory.question_snapshots)
            options = list(self._options(questions, limits))
            fitting = [option for option in options if self._fits(option[1])]
            if fitting:
                plan = self._executor.times.fastest(plan for _, plan in fitting)
                return next(option for option in fitting if option[1] is plan)
            longest = max(len(prompt) for question in questions for prompt in question)
            if longest > rows // 2:
                break
        _check_memory(self._memory(options[-1][1]), self.config)
        raise AssertionError("a plan that does not fit is refused above")

    def _options(self, questions: Sequence[Sequence[Prompt]], limits: Limits) -> Iterator[tuple[Layout, Plan]]:
        schedule, pack, split = self.config.schedule, self.config.pack, self.config.split
        if schedule in ("independent", "batched"):
            layout = independent_layout(questions)
            yield layout, plan_passes(layout, schedule=schedule, pack=pack, limits=limits)
            return
        layout = build_layout(questions, split)  # type: ignore[arg-type]
        if schedule != "auto":
            yield layout, plan_passes(layout, schedule=schedule, pack=pack, limits=limits)
            return
        with suppress(CapacityError):  # the tree may be too large for one pass
            yield layout, plan_passes(layout, schedule="tree", pack=pack, limits=limits)
        yield layout, plan_passes(layout, schedule="levels", pack=pack, limits=limits)
        if layout.question_prefix_tokens:
            flat = build_layout(questions, split, question_prefixes=False)  # type: ignore[arg-type]
            yield flat, plan_passes(flat, schedule="levels", pack=pack, limits=limits)

    def _memory(self, plan: Plan) -> MemoryPlan:
        buffers = self._executor.buffers.sizes_for(plan.buffers)
        rows = rung(max(one.rows for one in plan.passes))
        return plan_memory(self.dimensions, rows=rows, buffers=buffers, **_memory_of(self.config))

    def _fits(self, plan: Plan) -> bool:
        limit = self.config.memory.limit_gib
        return limit is None or self._memory(plan).total <= limit * 2**30

    def _answer(self, request: Request, layout: Layout, plan: Plan) -> Response:
        start = time.perf_counter()
        with span("request", schedule=self.config.schedule, candidates=layout.num_prompts, rows=plan.rows):
            hidden, counters = self._executor.run(plan)
        last = [places[-1] for places in plan.reads_of_prompt]
        scores = scalar_scores(hidden[last].float().numpy(), self.head)
        answers = answer_request(request, scores, self.head.temperature)
        shares = self.config.schedule not in ("independent", "batched")
        statistics = _statistics(layout, counters, shares=shares)
        return respond(answers, self.head, statistics, self.provenance, time.perf_counter() - start)

    def _checked(self, index: int, prompt: Prompt | Sequence[int]) -> Prompt:
        if not isinstance(prompt, Prompt):
            try:
                prompt = Prompt(np.asarray(prompt, dtype=np.int32))
            except (OverflowError, ValueError, TypeError) as error:
                raise RequestError(f"token ids must be integers: {error}", field=f"prompts[{index}]") from None
        ids = prompt.token_ids
        size = self.dimensions.vocab_size
        if ids.min() < 0 or ids.max() >= size:
            bad = int(ids[(ids < 0) | (ids >= size)][0])
            raise RequestError(f"a token id must be from 0 to {size - 1}", field=f"prompts[{index}]", value=bad)
        if len(prompt) > self.config.max_length:
            text = f"Input length {len(prompt)} exceeds max_length={self.config.max_length}; no silent truncation"
            raise RequestError(text, field=f"prompts[{index}]", value=len(prompt))
        return prompt


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


def _open_weights(
    config: EngineConfig, dtype: torch.dtype, device: torch.device
) -> tuple[Checkpoint | RandomWeights, str]:
    """Where tensors come from, and the folder of the tokenizer."""
    assert config.cache_dir is not None
    if config.checkpoint == RANDOM and config.model != "tiny":
        folder = config.tokenizer or str(tiny_checkpoint(config.cache_dir))
        return RandomWeights(DIMENSIONS[config.model], seed=config.seed, dtype=dtype, device=device), folder
    if config.checkpoint in (None, RANDOM):
        folder = str(tiny_checkpoint(config.cache_dir, seed=config.seed))
    else:
        assert config.checkpoint is not None
        folder = config.checkpoint
    source = open_checkpoint(folder)
    expected = DIMENSIONS.get(config.model)
    if expected is not None and source.dimensions != expected:
        for field in fields(expected):
            ours, theirs = getattr(expected, field.name), getattr(source.dimensions, field.name)
            if ours != theirs:
                raise CheckpointError(
                    f"{folder}/config.json: {field.name} is {theirs}, model={config.model} has {ours}"
                )
    return source, config.tokenizer or folder


def _yes_minus_no(source: Checkpoint | RandomWeights, tokens: Tokens) -> Head:
    """The untrained head: the language-model row of "Yes" minus that of "No", both float32."""
    yes, no = source.head_rows([tokens.single_id("Yes"), tokens.single_id("No")]).to("cpu", torch.float32)
    return Head((yes - no).numpy(), 0.0, 1.0, "pretrained_yes_minus_no_no_training")


def _run_metadata(config: EngineConfig) -> dict[str, Any]:
    made = config.model == "tiny" or config.checkpoint == RANDOM
    run = {name: getattr(config, name) for name in _RUN_OPTIONS}
    return {"weights": "random" if made else "checkpoint", "device": config.device, **run}


def _statistics(layout: Layout, counters: Counters, *, shares: bool) -> RunStatistics:
    rows, passes = counters.rows, counters.passes
    prefix_rows = layout.request_prefix_tokens + layout.question_prefix_tokens
    tree = "tree" in passes
    return RunStatistics(
        shares_prefixes=shares,
        logical_input_tokens=layout.full_rows,
        candidate_sequences=layout.num_prompts,
        processed_input_tokens=counters.total_rows,
        shared_prefix_tokens=layout.request_prefix_tokens,
        question_prefix_tokens=layout.question_prefix_tokens,
        prefill_calls=passes.get("prefix", 0) + passes.get("question", 0),
        suffix_batches=passes.get("branch", 0) + passes.get("tree", 0),
        suffix_tokens=counters.total_rows - prefix_rows if tree else rows.get("branch", 0),
        max_suffix_batch=layout.num_prompts if tree else counters.most_branches,
    )
