"""The promise: a candidate's final hidden state depends on its own tokens alone. `torch.equal` throughout."""

from __future__ import annotations

import hashlib
from functools import cache

import numpy as np
import pytest
import torch

from engine.plan.layout import build_layout, independent_layout
from engine.plan.schedule import Limits, plan_passes
from engine.prompt import Prompt
from engine.run.executor import Executor
from ops.linear import linear_fixed
from tests.support import prompts_of, random_backbone, run, small_config, tokens

PREFIXES = (1, 2, 3, 31, 62, 63, 64, 65, 127, 128, 129, 130, 300)
BRANCHES = (1, 2, 5, 64, 65, 200)
DTYPES = (torch.float32, torch.bfloat16)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])


@cache
def executor(dtype: torch.dtype, value_heads: int = 4) -> Executor:
    return Executor(random_backbone(small_config(value_heads=value_heads), dtype=dtype))


def one_question(rng: np.random.Generator, prefix: int) -> list[list[Prompt]]:
    """Candidates that part at `prefix`: the first token of each branch is its own."""
    head = tokens(rng, prefix)
    branches = [tokens(rng, n) for n in BRANCHES]
    for i, branch in enumerate(branches):
        branch[0] = i
    return prompts_of([[(head, branch) for branch in branches]])


def nested(rng: np.random.Generator, request: int, question: int) -> list[list[Prompt]]:
    """Two questions with prefixes of their own, and one with a single candidate."""
    head = tokens(rng, request)
    questions = []
    for i, count in enumerate((3, 2, 1)):
        own = tokens(rng, question + i)
        own[0] = i
        candidates = []
        for j in range(count):
            branch = tokens(rng, 3 + 31 * j)
            branch[0] = j
            candidates.append((head, own, branch))
        questions.append(candidates)
    return prompts_of(questions)


@dtypes
@pytest.mark.parametrize("prefix", PREFIXES)
def test_schedules_and_splits_give_the_same_bits(prefix: int, dtype: torch.dtype) -> None:
    questions = one_question(np.random.default_rng(prefix), prefix)
    alone, counters = run(executor(dtype), questions, schedule="independent")
    assert counters.passes == {"branch": len(BRANCHES)}
    assert torch.isfinite(alone).all()
    for schedule, split in (("batched", "exact"), ("levels", "exact"), ("levels", "aligned"), ("tree", "exact")):
        together, _ = run(executor(dtype), questions, schedule=schedule, split=split)
        assert torch.equal(alone, together), (schedule, split)


@dtypes
@pytest.mark.parametrize(
    ("request_length", "question"),
    [
        pytest.param(70, 9, id="same-chunk"),
        pytest.param(50, 140, id="two-borders"),
        pytest.param(0, 70, id="no-request"),
        pytest.param(1, 1, id="history-of-one"),
        pytest.param(128, 64, id="on-the-border"),
    ],
)
def test_three_levels_give_the_same_bits(request_length: int, question: int, dtype: torch.dtype) -> None:
    questions = nested(np.random.default_rng(request_length), request_length, question)
    alone, _ = run(executor(dtype), questions, schedule="independent")
    for schedule in ("batched", "levels", "tree"):
        for split in ("exact", "aligned"):
            together, _ = run(executor(dtype), questions, schedule=schedule, split=split)
            assert torch.equal(alone, together), (schedule, split)
    one_by_one, counters = run(executor(dtype), questions, schedule="levels", pack="one")
    assert torch.equal(alone, one_by_one)
    assert counters.passes["branch"] == 6


@dtypes
def test_two_threads_keep_the_bits(dtype: torch.dtype) -> None:
    threads = torch.get_num_threads()
    questions = one_question(np.random.default_rng(2), 77)
    try:
        torch.set_num_threads(2)
        alone, _ = run(executor(dtype), questions, schedule="independent")
        together, _ = run(executor(dtype), questions, schedule="levels")
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(alone, together)


@dtypes
def test_odd_head_counts_and_two_periods(dtype: torch.dtype) -> None:
    config = small_config(periods=2, key_heads=1, value_heads=3, hidden=96, heads=6, kv_heads=1)
    own = Executor(random_backbone(config, dtype=dtype))
    questions = nested(np.random.default_rng(5), 66, 10)
    alone, _ = run(own, questions, schedule="independent")
    together, _ = run(own, questions, schedule="levels")
    assert torch.equal(alone, together)


@dtypes
def test_small_passes_and_few_snapshots_give_the_same_bits(dtype: torch.dtype) -> None:
    """Waves over questions and branches."""
    questions = nested(np.random.default_rng(3), 70, 60)
    whole, _ = run(executor(dtype), questions, schedule="levels")
    limits = Limits(rows=80, segments=2, question_snapshots=1)
    cut, counters = run(executor(dtype), questions, schedule="levels", limits=limits)
    assert torch.equal(whole, cut)
    assert counters.passes["question"] == 2
    assert counters.passes["branch"] >= 4


@dtypes
def test_order_of_candidates_and_questions_only_permutes(dtype: torch.dtype) -> None:
    questions = nested(np.random.default_rng(7), 65, 5)
    first, _ = run(executor(dtype), questions, schedule="levels")
    turned, _ = run(executor(dtype), [q[::-1] for q in questions[::-1]], schedule="levels")
    assert torch.equal(first, turned.flip(0))


@dtypes
def test_repeats_and_other_requests_in_between_change_nothing(dtype: torch.dtype) -> None:
    own = Executor(random_backbone(small_config(), dtype=dtype))
    a = nested(np.random.default_rng(11), 40, 30)
    b = one_question(np.random.default_rng(12), 1_100)  # larger: the buffers grow
    first, _ = run(own, a, schedule="levels")
    again, _ = run(own, a, schedule="levels")
    run(own, b, schedule="levels")
    after, _ = run(own, a, schedule="levels")
    assert torch.equal(first, again)
    assert torch.equal(first, after)


@dtypes
def test_one_sibling_changed_leaves_the_others(dtype: torch.dtype) -> None:
    questions = one_question(np.random.default_rng(13), 77)
    before, _ = run(executor(dtype), questions, schedule="levels")
    other = questions[0][3].token_ids.copy()
    other[-1] += 1
    changed = [[*questions[0][:3], Prompt(other), *questions[0][4:]]]
    after, _ = run(executor(dtype), changed, schedule="levels")
    same = [i for i in range(len(BRANCHES)) if i != 3]
    assert torch.equal(before[same], after[same])
    assert not torch.equal(before[3], after[3])


def digest(own: Executor) -> str:
    hashed = hashlib.sha256()
    for tensor in own.buffers.tensors():
        hashed.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


@dtypes
def test_branches_leave_the_snapshot_untouched(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Executor(random_backbone(small_config(), dtype=dtype))
    seen: dict[str, list[str]] = {}
    forward = Executor._forward

    def hashing(self: Executor, tables: torch.Tensor, one: object) -> torch.Tensor:
        before = digest(self)
        result = forward(self, tables, one)  # type: ignore[arg-type]
        seen.setdefault(one.kind, []).append("same" if digest(self) == before else "changed")  # type: ignore[attr-defined]
        return result

    monkeypatch.setattr(Executor, "_forward", hashing)
    run(own, nested(np.random.default_rng(17), 130, 70), schedule="levels", pack="one")
    assert set(seen["prefix"]) == {"changed"}
    assert set(seen["question"]) == {"changed"}
    assert set(seen["branch"]) == {"same"}


@dtypes
def test_reads_anywhere_on_a_path(dtype: torch.dtype) -> None:
    """Several reads of one prompt, in the shared prefix and in the branch, equal the reads of that prompt alone."""
    rng = np.random.default_rng(19)
    head = tokens(rng, 70)
    whole = [np.concatenate([head, tokens(rng, 40)]) for _ in range(3)]
    for i, ids in enumerate(whole):
        ids[70] = i
    prompts = [Prompt(ids, reads=(0, 63, 69, 70, 109)) for ids in whole]

    def all_reads(schedule: str) -> torch.Tensor:
        build = independent_layout([prompts]) if schedule == "independent" else build_layout([prompts], "exact")
        plan = plan_passes(build, schedule=schedule, pack="all", limits=Limits())
        hidden, _ = executor(dtype).run(plan)
        return torch.stack([hidden[list(places)] for places in plan.reads_of_prompt])

    alone = all_reads("independent")
    assert torch.equal(alone, all_reads("levels"))
    assert torch.equal(alone, all_reads("tree"))


class TestControls:
    """Breaking the mechanism must break the bits, or the tests above could not fail."""

    @dtypes
    def test_a_zeroed_snapshot_is_seen(self, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        own = Executor(random_backbone(small_config(), dtype=dtype))
        questions = one_question(np.random.default_rng(23), 200)
        alone, _ = run(own, questions, schedule="independent")
        forward = Executor._forward

        def zeroing(self: Executor, tables: torch.Tensor, one: object) -> torch.Tensor:
            result = forward(self, tables, one)  # type: ignore[arg-type]
            for layer in self.buffers.layers:
                if hasattr(layer, "states"):
                    layer.states.zero_()
            return result

        monkeypatch.setattr(Executor, "_forward", zeroing)
        broken, _ = run(own, questions, schedule="levels")
        assert not any(torch.equal(a, b) for a, b in zip(alone, broken, strict=True))

    @dtypes
    def test_a_product_that_knows_the_number_of_rows_is_seen(self, dtype: torch.dtype) -> None:
        """Splitting K for few rows, as a library may: the same sums in another order."""

        def split_k(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            if x.shape[0] > 128:
                return linear_fixed(x, w)
            half = x.shape[1] // 2
            parts = [linear_fixed(x[:, s].contiguous(), w[:, s].contiguous()) for s in (slice(half), slice(half, None))]
            return parts[0] + parts[1]

        own = Executor(random_backbone(small_config(), dtype=dtype, linear=split_k))
        questions = one_question(np.random.default_rng(31), 100)
        alone, _ = run(own, questions, schedule="independent")
        broken, _ = run(own, questions, schedule="levels")
        assert not torch.equal(alone, broken)
