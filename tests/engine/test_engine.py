"""The engine from outside: answers, errors and honest counts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from engine import Engine, Prompt, parse_request
from engine.config import EngineConfig, resolve
from engine.errors import CapacityError, ConfigError, RequestError
from engine.load.dimensions import ModelDimensions
from engine.load.tensors import Weights
from engine.run.model import Backbone
from engine.wire.answers import Head, Provenance
from engine.wire.open_jev import OpenJev
from ops.tables import NUM_ROWS, NUM_SEGMENTS
from tests.engine.engine_support import SHORT, TICKET, answers, cache_dir, choice, loaded
from tests.support import random_backbone, small_config, tokens
from tests.wire.qwen_vocabulary import qwen_tokens

EXAMPLES = sorted((Path(__file__).parents[2] / "configs" / "requests").glob("*.json"))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with loaded() as engine:
        yield engine


def engine_of(weights: Weights, dimensions: ModelDimensions) -> Engine:
    """An engine with the Qwen3.5 vocabulary over these weights."""
    return Engine(
        resolve(EngineConfig(device="cpu")),
        processor=OpenJev(
            tokens=qwen_tokens("plain"),
            names=("small",),
            max_length=4_096,
            vocab_size=dimensions.vocab_size,
            head=Head(np.ones(dimensions.hidden_size, np.float32), 0.0, 1.0, "none"),
        ),
        weights=weights,
        dimensions=dimensions,
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
    with pytest.raises(ConfigError, match=r"spilt is no option of an engine; did you mean 'split'\?; known: .*split"):
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
        engine_of(engine.weights, engine.dimensions) as foreign,
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


@pytest.fixture(scope="module")
def wide() -> Iterator[Engine]:
    backbone = random_backbone({**small_config(), "vocab_size": 248_320}, dtype=torch.float32)
    with engine_of(backbone.weights, backbone.dimensions) as engine:
        yield engine


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_explain_tells_the_rows_that_run(path: Path, wide: Engine, ran: list[tuple[int, int]]) -> None:
    body = path.read_bytes()
    report = wide.explain(body)
    assert ran == []
    found = []
    for split in ("exact", "aligned"):
        ran.clear()
        with wide.like(split=split) as engine:
            found.append(answers(engine.score(body)))
        assert sum(rows for rows, _ in ran) == report.layouts[split].rows < report.full_rows
    assert found[0] == found[1]


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
        ([None], r"prompts\[0\]: token ids must be a list of integers: .*NoneType"),
        ([3], r"prompts\[0\]: token ids must be a list of integers: .*int"),
        (["ab"], r"prompts\[0\]: token ids must be a list of integers"),
        ([{1: 2}], r"prompts\[0\]: token ids must be a list of integers"),
        ([[2**70]], r"prompts\[0\]: token ids must be a list of integers"),
        (None, r"prompts: must be a list of prompts, not NoneType"),
        (5, r"prompts: must be a list of prompts, not int"),
        ("text", r"prompts: must be a list of prompts, not str"),
        (Prompt(np.array([1], np.int32)), r"prompts: must be a list of prompts, not Prompt"),
        ([[1] * 4_097], r"prompts\[0\]: Input length 4097 exceeds max_length=4096; no silent truncation"),
    ],
)
def test_d47_wrong_token_ids_are_refused_before_any_forward(
    engine: Engine, ran: list[tuple[int, int]], prompts: Any, text: str
) -> None:
    with pytest.raises(RequestError, match=text):
        engine.hidden_states(prompts)
    assert ran == []


def test_d47_ids_of_any_integer_type_and_byte_order_are_taken(engine: Engine) -> None:
    [expected] = engine.hidden_states([[1, 2, 3]])
    for kind in (">i4", "<i8", ">u2", "u1"):
        assert torch.equal(engine.hidden_states([np.array([1, 2, 3], kind)])[0], expected)  # type: ignore[list-item]
    assert torch.equal(engine.hidden_states([torch.tensor([1, 2, 3])])[0], expected)  # type: ignore[list-item]


@pytest.mark.parametrize("reads", [(0.5,), (1.5, 2), (True,), (np.bool_(True),), ("1",), (None,), 1, None])
def test_d47_reads_are_whole_numbers(reads: Any) -> None:
    with pytest.raises(RequestError, match="reads: reads must be whole numbers, the positions of tokens"):
        Prompt(np.array([1, 2, 3], np.int32), reads=reads)


def test_d47_reads_may_be_integers_of_numpy() -> None:
    ids = np.array([1, 2, 3], np.int32)
    for reads in ((0, 2), [0, 2], np.array([0, 2]), (np.int64(0), np.uint8(2))):
        prompt = Prompt(ids, reads=reads)  # type: ignore[arg-type]
        assert prompt.reads == (0, 2)
        assert {type(read) for read in prompt.reads} == {int}
    for wrong in ((2, 0), (0, 3), (-1,), (1, 1)):
        with pytest.raises(RequestError, match="reads must be ascending positions below the prompt's 3 tokens"):
            Prompt(ids, reads=wrong)


def test_d47_arguments_of_load_and_score_are_refused_by_name(engine: Engine) -> None:
    for load, message in (
        (lambda: Engine.load("tiny"), "config='tiny' is neither an EngineConfig nor a mapping"),  # type: ignore[arg-type]
        (lambda: Engine.load(device=0), "device=0 is not the name of a device"),  # type: ignore[arg-type]
        (lambda: Engine.load(tokens=None), "tokens=None is neither a TokensConfig"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError, match=message):
            load()
    for request in ([SHORT, SHORT], None, Path("request.json")):
        with pytest.raises(RequestError, match="a request must be one dict, or one JSON body as str or bytes"):
            engine.score(request)  # type: ignore[arg-type]


def test_d47_a_device_of_torch_and_mappings_of_options_load(engine: Engine) -> None:
    config = OmegaConf.create({"cache_dir": cache_dir().name, "tokens": {"control": "plain"}})
    with Engine.load(config, device=torch.device("cpu"), memory={"limit_gib": 1}) as other:
        assert (other.config.device, other.config.memory.limit_gib) == ("cpu", 1)
        assert answers(other.score(SHORT)) == answers(engine.score(SHORT))


def test_a_forward_over_the_prompts_of_a_request_runs_what_its_answer_ran(engine: Engine) -> None:
    response = engine.score(TICKET)
    questions = engine.prompts(TICKET)
    names = list(TICKET["questions"])
    assert [len(candidates) for candidates in questions] == [
        len(parse_request(TICKET).questions[name].candidates) for name in names
    ]
    done = engine.forward(questions)
    flat = [prompt for candidates in questions for prompt in candidates]
    assert len(done.hidden) == len(flat) == response.metadata["candidate_sequences"]
    assert done.counters.total_rows == response.metadata["prefix_cache"]["processed_input_tokens"]
    assert done.memory.snapshots > 0
    for prompt, hidden in zip(flat, done.hidden, strict=True):
        assert torch.equal(engine.hidden_states([prompt])[0], hidden)


def test_a_forward_over_nothing_is_refused(engine: Engine) -> None:
    for questions, text in (
        ([], "questions: there must be at least one question"),
        ([[]], r"questions\[0\]: there must be at least one prompt"),
        ([[Prompt(np.array([1], np.int32))], []], r"questions\[1\]: there must be at least one prompt"),
    ):
        with pytest.raises(RequestError, match=text):
            engine.forward(questions)
    with pytest.raises(RequestError, match=r"questions\[1\]\[0\]: a token id must be from 0 to 831 \(got 900\)"):
        engine.forward([[Prompt(np.array([1], np.int32))], [Prompt(np.array([900], np.int32))]])
