"""The engine from outside: answers, errors, honest counts, many callers, faults and the end of its life."""

from __future__ import annotations

import gc
import json
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine import Engine, Prompt, Response, parse_request
from engine.answers import Head, Provenance
from engine.config import EngineConfig, MemoryConfig, resolve
from engine.dimensions import ModelDimensions
from engine.errors import CapacityError, ConfigError, ForkgraphError, InferenceError, RequestError
from engine.executor import Counters, Executor
from engine.model import Backbone, Weights
from engine.schedule import Pass, Plan
from engine.snapshot import SnapshotBuffers
from ops.tables import NUM_ROWS, NUM_SEGMENTS
from tests.qwen_vocabulary import qwen_tokens
from tests.support import random_backbone, run, small_config, tokens

EXAMPLES = sorted((Path(__file__).parents[1] / "configs" / "requests").glob("*.json"))


def choice(*names: str, ask: str = "Who answers?") -> dict[str, Any]:
    return {"type": "choice", "instructions": ask, "criteria": dict.fromkeys(names)}


TICKET = {
    "state": {"subject": "Two charges for October", "paid": True, "invoices": [2210, 2211]},
    "questions": {
        "team": choice("billing", "engineering", "sales", ask="Which team should answer this ticket, and why?"),
        "refund": {"type": "noul", "instructions": "Is a refund due?"},
        "urgency": {"type": "score", "instructions": "How soon?", "criteria": ["later", {"when": "today"}]},
    },
}
SHORT = {"state": "s", "questions": {"q": choice("a", "b")}}
LONG = {"state": "The second invoice was paid twice. " * 110, "questions": TICKET["questions"]}


@cache
def cache_dir() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="forkgraph-tests-")  # removed when the process ends


def loaded(**options: Any) -> Engine:
    return Engine.load(device="cpu", cache_dir=cache_dir().name, **options)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with loaded() as engine:
        yield engine


def engine_of(weights: Weights, dimensions: ModelDimensions) -> Engine:
    """An engine with the Qwen3.5 vocabulary over these weights."""
    return Engine(
        resolve(EngineConfig(device="cpu")),
        tokens=qwen_tokens("plain"),
        weights=weights,
        dimensions=dimensions,
        head=Head(np.ones(dimensions.hidden_size, np.float32), 0.0, 1.0, "none"),
        provenance=Provenance(
            model="small", base_revision=None, max_length=4_096, backbone_parameter_dtypes=["torch.float32"]
        ),
    )


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(rows, segments) of each forward of a backbone, as its tables have them."""
    seen: list[tuple[int, int]] = []
    forward = Backbone.forward

    def recorded(self: Backbone, tables: Tensor, *rest: Any) -> Tensor:
        seen.append((int(tables[NUM_ROWS]), int(tables[NUM_SEGMENTS])))
        return forward(self, tables, *rest)

    monkeypatch.setattr(Backbone, "forward", recorded)
    return seen


def answers(response: Response) -> dict[str, Any]:
    found: dict[str, Any] = response.to_dict()["answers"]
    return found


# Loading and answering


def test_defaults_on_a_cpu(engine: Engine) -> None:
    c = engine.config
    assert (c.device, c.dtype, c.schedule, c.gemm, c.graphs) == ("cpu", "float32", "levels", "fixed", "eager")
    response = engine.score(SHORT)
    assert response.model == "forkgraph/tiny"
    facts = ("weights", "device", "split", "gemm", "schedule", "graphs", "method", "temperature", "base_revision")
    assert [response.metadata[name] for name in facts] == [
        "random", "cpu", "exact", "fixed", "levels", "eager", "pretrained_yes_minus_no_no_training", 1.0, None,
    ]  # fmt: skip
    assert json.loads(response.to_json()) == response.to_dict()


def test_options_are_those_of_the_config_and_loading_reports_its_progress() -> None:
    steps: list[tuple[int, int]] = []
    with Engine.load(
        EngineConfig(device="cpu", cache_dir=cache_dir().name),
        split="aligned",
        progress=lambda *step: steps.append(step),
    ) as engine:
        assert engine.config.split == "aligned"
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]
    with pytest.raises(ConfigError, match=r"spilt is no option of an engine; known: .*split"):
        loaded(spilt="exact")
    with pytest.raises(ConfigError, match=r"graphs=captured needs a CUDA device"):
        loaded(graphs="captured")


def test_another_seed_gives_other_answers(engine: Engine) -> None:
    with loaded(seed=1) as other:
        assert answers(other.score(SHORT)) != answers(engine.score(SHORT))


def test_a_request_may_be_text_bytes_a_mapping_or_parsed(engine: Engine) -> None:
    text = json.dumps(TICKET)
    expected = answers(engine.score(TICKET))
    for request in (text, text.encode(), parse_request(text, ("forkgraph/tiny",))):
        assert answers(engine.score(request)) == expected


def test_answers_have_the_form_of_their_kind(engine: Engine) -> None:
    found = answers(engine.score(TICKET))
    assert list(found) == ["team", "refund", "urgency"]
    team, refund, urgency = found.values()
    assert set(team) == {"type", "choice", "probabilities", "confidence"}
    assert team["choice"] == max(team["probabilities"], key=team["probabilities"].get)
    assert set(refund) == {"type", "noul"}
    assert urgency["legend"] == {"0": "later", "1": {"when": "today"}}
    assert urgency["score"] == pytest.approx(urgency["probabilities"]["1"])


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (b"{", "JSON|json|EOF|Expecting"),
        ({"state": 3, "questions": {"q": choice("a")}}, "state must be text"),
        ({"state": "s", "questions": {}}, "questions must be a nonempty mapping"),
        ({"state": "s", "questions": {"good": choice("a"), "bad": choice()}}, "Choice requires between 1 and 255"),
        ({"model": "gpt", **SHORT}, "requested model is not loaded"),
        ({"state": "word " * 4_100, "questions": {"q": choice("a")}}, r"questions\.q: Input length \d+ exceeds max"),
    ],
)  # fmt: skip
def test_a_wrong_request_is_refused_before_any_forward(
    engine: Engine, ran: list[tuple[int, int]], request_: Any, text: str
) -> None:
    with pytest.raises(RequestError, match=text):
        engine.submit(request_)
    assert ran == []


def test_what_fits_no_pass_is_refused_before_any_forward(engine: Engine, ran: list[tuple[int, int]]) -> None:
    many = {"state": "s", "questions": {f"q{i}": {"type": "noul", "instructions": "i"} for i in range(600)}}
    with engine.like(schedule="tree") as tree, pytest.raises(CapacityError, match="601 segments where 512 fit"):
        tree.score(many)
    assert ran == []


def test_the_tokenizer_of_another_model_is_refused(engine: Engine, ran: list[tuple[int, int]]) -> None:
    with (
        engine_of(engine._weights, engine.dimensions) as foreign,
        pytest.raises(ConfigError, match="the tokenizer gave id 248069, the model knows 832 ids; give the tokenizer="),
    ):
        foreign.score(SHORT)
    assert ran == []


# Schedules: same answers, honest figures


def test_every_schedule_and_split_gives_the_same_answers_and_counts_what_ran(
    engine: Engine, ran: list[tuple[int, int]]
) -> None:
    expected = answers(engine.score(TICKET))
    full = engine.explain(TICKET)
    for options in (
        {"schedule": "independent"},
        {"schedule": "batched"},
        {"schedule": "levels"},
        {"schedule": "levels", "split": "aligned"},
        {"schedule": "levels", "pack": "one"},
        {"schedule": "tree"},
        {"schedule": "tree", "split": "aligned"},
    ):
        ran.clear()
        with engine.like(**options) as other:
            response = other.score(TICKET)
        assert answers(response) == expected, options
        assert response.usage.input_tokens == full.full_rows
        assert response.usage.output_tokens == 0
        assert response.metadata["candidate_sequences"] == 6
        assert [response.metadata[name] for name in options] == list(options.values())
        found = response.metadata["prefix_cache"]
        rows = sum(rows for rows, _ in ran)
        if options["schedule"] in ("independent", "batched"):
            assert found == {"enabled": False, "mode": "independent_candidates"}
            assert rows == full.full_rows
            assert len(ran) == (6 if options["schedule"] == "independent" else 1)
            continue
        layout = full.layouts[options.get("split", "exact")]
        tree = options["schedule"] == "tree"
        prefixes = layout.request_prefix_tokens + layout.question_prefix_tokens
        branches = ran if tree else [one for one, kind in zip(ran, kinds(ran, layout), strict=True) if kind == "branch"]
        assert found == {
            "enabled": True,
            "mode": "request_local_token_prefix",
            "logical_input_tokens": full.full_rows,
            "processed_input_tokens": rows,
            "reused_input_tokens": full.full_rows - rows,
            "shared_prefix_tokens": layout.request_prefix_tokens,
            "question_prefix_tokens": layout.question_prefix_tokens,
            "prefill_calls": len(ran) - len(branches),
            "suffix_batches": len(branches),
            "suffix_tokens": rows - prefixes,
            "max_suffix_batch": 6 if tree else max(segments for _, segments in branches),
            "candidate_sequences": 6,
            "recurrent_state_dtype": "preserve_kernel_output",
        }
        assert rows == layout.rows


def kinds(ran: list[tuple[int, int]], layout: Any) -> list[str]:
    """What each pass of `levels` must have been: request prefix, question prefixes, branches."""
    prefixes = ["request"] * (layout.request_prefix_tokens > 0) + ["question"] * (layout.question_prefix_tokens > 0)
    return prefixes + ["branch"] * (len(ran) - len(prefixes))


@cache
def wide() -> Engine:
    backbone = random_backbone({**small_config(), "vocab_size": 248_320}, dtype=torch.float32)
    return engine_of(backbone.weights, backbone.dimensions)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_explain_tells_the_rows_that_run(path: Path, ran: list[tuple[int, int]]) -> None:
    body = path.read_bytes()
    report = wide().explain(body)
    assert ran == []
    found = []
    for split in ("exact", "aligned"):
        ran.clear()
        with wide().like(split=split) as engine:
            found.append(answers(engine.score(body)))
        assert sum(rows for rows, _ in ran) == report.layouts[split].rows < report.full_rows
    assert found[0] == found[1]


# Queue


class Gate:
    """Holds every run of an executor until `open`; tells how many candidates each had, in the order they ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.order: list[int] = []
        self.entered, self._open = threading.Event(), threading.Event()
        plain = Executor.run

        def held(executor: Executor, plan: Plan) -> tuple[Tensor, Counters]:
            self.order.append(plan.num_reads)
            self.entered.set()
            assert self._open.wait(60)
            return plain(executor, plan)

        monkeypatch.setattr(Executor, "run", held)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open()


def asks(candidates: int) -> dict[str, Any]:
    return {"state": "s", "questions": {"q": choice(*"abcdefgh"[:candidates])}}


def test_requests_run_in_turn_and_a_cancelled_one_never_does(engine: Engine, gate: Gate) -> None:
    running, *waiting = (engine.submit(asks(n)) for n in (2, 3, 4, 5))
    assert gate.entered.wait(60)
    assert all(isinstance(future, Future) for future in (running, *waiting))
    assert not running.cancel()
    assert waiting[1].cancel()
    gate.open()
    assert len(running.result().answers["q"].probabilities) == 2  # type: ignore[union-attr]
    assert waiting[2].result().metadata["candidate_sequences"] == 5
    assert gate.order == [2, 3, 5]
    with pytest.raises(CancelledError):
        waiting[1].result()


def test_many_threads_get_the_answers_they_would_get_alone(engine: Engine) -> None:
    requests = [TICKET, SHORT, asks(5), {**TICKET, "state": "Nothing happened."}]
    alone = [answers(engine.score(request)) for request in requests]
    start = threading.Barrier(8)

    def all_of_them(first: int) -> list[tuple[int, dict[str, Any]]]:
        start.wait(60)
        order = [(first + i) % len(requests) for i in range(3)]
        return [(i, answers(engine.score(requests[i]))) for i in order]

    with ThreadPoolExecutor(8) as threads:
        for found in threads.map(all_of_them, range(8)):
            assert all(response == alone[i] for i, response in found)


# Token ids in, hidden states out


def test_hidden_states_are_those_of_each_prompt_alone(engine: Engine) -> None:
    rng = np.random.default_rng(0)
    head = tokens(rng, 90).tolist()
    prompts = [[5], [5, 6], [5, 6, 7], [*head, 1], [*head, 2, 3], [5, 6]]
    together = engine.hidden_states(prompts)
    assert [tuple(state.shape) for state in together] == [(1, 128)] * 6
    assert {state.dtype for state in together} == {torch.float32}
    for prompt, state in zip(prompts, together, strict=True):
        assert torch.equal(engine.hidden_states([prompt])[0], state)
    assert torch.equal(together[1], together[5])


def test_hidden_states_of_several_reads(engine: Engine) -> None:
    ids = tokens(np.random.default_rng(1), 70)
    reads = (0, 3, 63, 64, 69)
    [found] = engine.hidden_states([Prompt(ids, reads=reads)])
    shorter = engine.hidden_states([ids[: read + 1] for read in reads])
    assert torch.equal(found, torch.cat(shorter))


@pytest.mark.parametrize(
    ("prompts", "text"),
    [
        ([], "prompts: there must be at least one prompt"),
        ([[1], []], r"prompts\[1\]: a prompt must have at least one token"),
        ([[1], [2, 832]], r"prompts\[1\]: a token id must be from 0 to 831 \(got 832\)"),
        ([[-1]], r"prompts\[0\]: a token id must be from 0 to 831 \(got -1\)"),
        ([[2**40]], r"from 0 to 831 \(got 1099511627776\)"),
        ([[1.5]], r"prompts\[0\]: token ids must be a list of integers"),
        ([["1"]], r"prompts\[0\]: token ids must be a list of integers"),
        ([[True]], r"prompts\[0\]: token ids must be a list of integers"),
        ([[[1, 2], [3, 4]]], r"prompts\[0\]: token ids must be a list of integers"),
        ([[[1], [2, 3]]], r"prompts\[0\]: token ids must be a list of integers"),
        ([Prompt(np.array([900], np.int32))], r"prompts\[0\]: a token id must be from 0 to 831 \(got 900\)"),
        ([[1] * 4_097], r"prompts\[0\]: Input length 4097 exceeds max_length=4096; no silent truncation"),
    ],
)
def test_wrong_token_ids_are_refused_before_any_forward(
    engine: Engine, ran: list[tuple[int, int]], prompts: Any, text: str
) -> None:
    with pytest.raises(RequestError, match=text):
        engine.hidden_states(prompts)
    assert ran == []


# Faults


def test_a_read_that_is_not_finite_is_an_error_and_leaves_its_siblings(engine: Engine) -> None:
    head = tokens(np.random.default_rng(2), 70)
    prompts = [np.concatenate([head, np.array(tail, np.int32)]) for tail in ([600, 1], [601, 1], [602, 1])]
    expected, _ = run(engine._executor, [[Prompt(ids) for ids in prompts]], schedule="levels")
    with loaded() as broken:
        broken._weights.embedding[601] = torch.nan
        with pytest.raises(InferenceError, match=r"prompts\[1\]: a final hidden state is not finite"):
            broken.hidden_states(prompts)  # type: ignore[arg-type]
        for schedule in ("batched", "levels", "tree"):
            found, _ = run(broken._executor, [[Prompt(ids) for ids in prompts]], schedule=schedule)
            assert torch.isnan(found[1]).all()
            assert torch.equal(found[[0, 2]], expected[[0, 2]])


def test_a_score_that_is_not_finite_is_an_error_and_the_next_request_is_fine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(engine.score(TICKET))
    plain = Executor._forward

    def spoiled(self: Executor, tables: Tensor, one: Pass) -> Tensor:
        hidden = plain(self, tables, one).clone()
        hidden[2:3, 7] = torch.inf
        return hidden

    with monkeypatch.context() as patch:
        patch.setattr(Executor, "_forward", spoiled)
        with pytest.raises(InferenceError, match="question 'team', candidate 'sales': the scalar is"):
            engine.score(TICKET)
    assert answers(engine.score(TICKET)) == expected


class Fault:
    """Lets `calls` calls through and fails at the next, holding a tensor as a forward would."""

    def __init__(self, plain: Callable[..., Any], error: Exception, calls: int) -> None:
        self.plain, self.error, self.left = plain, error, calls
        self.held: weakref.ref[Tensor] | None = None

    def method(self) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if self.left == 0:
                scratch = torch.zeros(8)
                self.held = weakref.ref(scratch)
                raise self.error
            self.left -= 1
            return self.plain(*arguments, **options)

        return call


@pytest.fixture(scope="module")
def fresh_answers() -> dict[str, Any]:
    with loaded() as engine:
        return answers(engine.score(TICKET))


@pytest.mark.parametrize("calls", [0, 1, 2])
@pytest.mark.parametrize("error", [RuntimeError("device lost"), torch.OutOfMemoryError("no room"), ValueError("odd")])
def test_a_fault_in_the_middle_is_typed_and_the_next_request_has_the_bits_of_a_fresh_engine(
    engine: Engine, fresh_answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch, error: Exception, calls: int
) -> None:
    fault = Fault(Executor._forward, error, calls)
    with monkeypatch.context() as patch:
        patch.setattr(Executor, "_forward", fault.method())
        with pytest.raises(InferenceError, match=f"model inference failed: {type(error).__name__}: {error}") as caught:
            engine.score(TICKET)
    assert caught.value.__cause__ is error
    assert fault.held is not None
    assert fault.held() is None, "the error keeps the memory of the pass that failed"
    assert answers(engine.score(TICKET)) == fresh_answers


def test_buffers_that_did_not_get_their_memory_are_made_by_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with loaded() as engine:
        expected = answers(engine.score(TICKET))
        with monkeypatch.context() as patch:
            fault = Fault(SnapshotBuffers._allocate, torch.OutOfMemoryError("no room"), 2)
            patch.setattr(SnapshotBuffers, "_allocate", fault.method())
            with pytest.raises(InferenceError, match="OutOfMemoryError: no room"):
                engine.score(LONG)
        assert answers(engine.score(TICKET)) == expected


def test_a_larger_request_in_between_changes_nothing(engine: Engine) -> None:
    with loaded() as own:
        first, rows = answers(own.score(TICKET)), own._executor.buffers.sizes.kv_rows
        own.score(LONG)
        assert own._executor.buffers.sizes.kv_rows > rows
        assert answers(own.score(TICKET)) == first == answers(engine.score(TICKET))


def test_nothing_of_an_earlier_request_is_read() -> None:
    for schedule in ("levels", "tree"):
        with loaded(schedule=schedule) as engine:
            expected = answers(engine.score(TICKET))
            engine.score(LONG)
            for tensor in engine._executor.buffers.tensors():
                tensor.fill_(torch.nan)
            assert answers(engine.score(TICKET)) == expected


# Several engines, and the end


def test_like_shares_the_weights_and_changes_run_options_only(engine: Engine) -> None:
    other = engine.like(split="aligned", schedule="batched")
    assert (other.config.split, other.config.schedule) == ("aligned", "batched")
    assert other._weights.embedding.data_ptr() == engine._weights.embedding.data_ptr()
    assert all(a is b for a, b in zip(other._weights.layers, engine._weights.layers, strict=True))
    assert not {t.data_ptr() for t in other._executor.buffers.tensors()} & {
        t.data_ptr() for t in engine._executor.buffers.tensors()
    }
    other.close()
    engine.score(SHORT)
    for name, value in (("seed", 1), ("dtype", "bfloat16"), ("max_length", 8), ("memory", MemoryConfig()), ("no", 1)):
        with pytest.raises(
            ConfigError, match=f"{name} belongs to the weights; like\\(\\) changes split, gemm, schedule"
        ):
            engine.like(**{name: value})
    with pytest.raises(ConfigError, match="split=odd is not one of"):
        engine.like(split="odd")


def test_a_closed_engine_refuses_and_may_be_closed_again() -> None:
    with loaded() as engine:
        engine.score(SHORT)
    engine.close()
    for use in (
        lambda: engine.score(SHORT),
        lambda: engine.submit(SHORT),
        lambda: engine.hidden_states([[1]]),
        lambda: engine.like(split="exact"),
    ):
        with pytest.raises(ForkgraphError, match="this engine is closed; load another one"):
            use()
    assert engine.explain(SHORT).candidates == 2


def test_closing_waits_for_what_runs_and_cancels_what_waits(gate: Gate) -> None:
    engine = loaded()
    running, waiting = engine.submit(asks(2)), engine.submit(asks(3))
    assert gate.entered.wait(60)
    closing = threading.Thread(target=engine.close)
    closing.start()
    deadline = time.monotonic() + 60
    while not waiting.cancelled() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert waiting.cancelled()
    assert closing.is_alive()
    gate.open()
    closing.join(60)
    assert running.result(0).metadata["candidate_sequences"] == 2
    assert gate.order == [2]


def test_closing_gives_weights_and_buffers_back() -> None:
    engine = loaded()
    engine.score(SHORT)
    tensors = [engine._weights.embedding, engine._weights.rope, *engine._executor.buffers.tensors()]
    held = [weakref.ref(tensor) for tensor in tensors]
    del tensors
    gc.collect()
    gc.disable()
    try:
        engine.close()
        assert [ref() for ref in held] == [None] * len(held)
    finally:
        gc.enable()
