"""A row of attention depends on its own path: not on splits, neighbours, order, padding, or on how it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.attention import attention, attention_reference
from ops.attention_prepare import attention_prepare, attention_prepare_reference
from ops.kernels import attention as attention_kernels
from ops.kernels.attention_prepare import launch_attention_prepare
from ops.tables import Source
from tests.ops.attention_layer import (
    CPU,
    EPS,
    NAN,
    ON_GPU,
    THETA,
    TRITON,
    Heads,
    Kernels,
    Layer,
    child,
    root,
    same,
    snapshot,
)

SMALL = Heads(heads=3, kv_heads=1, d=16)


@pytest.fixture(params=[CPU, TRITON], ids=lambda kernels: kernels.name)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return request.param


@pytest.fixture(autouse=True)
def exact_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies with numpy, whose rows change with their place; here K is walked in order instead."""
    if ON_GPU:
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(_: Any, a: Any, b: Any, d: Any, *__: Any) -> Any:
        acc = d.data.copy()
        for i in range(a.data.shape[1]):
            acc += a.data[:, i : i + 1] * b.data[i : i + 1]
        return TensorHandle(acc, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(
        attention_kernels, "FLOAT32_SHAPE", attention_kernels.ProgramShape(queries=64, keys=32, stages=1, warps=4)
    )


@cache
def small_path(kernels: Kernels) -> tuple[Tensor, Tensor]:
    """(projected rows, attention of them in one segment) of one path of 150 tokens."""
    layer = Layer(SMALL, kernels)
    proj = layer.rows(150)
    return proj, layer.alone(proj)


def test_one_path_equals_the_float64_reference(kernels: Kernels) -> None:
    h, layer = SMALL, Layer(SMALL, kernels)
    proj, out = small_path(kernels)
    heads = proj.cpu()[:, : h.kv_offset].view(-1, h.heads, 2, h.d)
    k, v = proj.cpu()[:, h.kv_offset :].view(-1, 2, h.kv_heads, h.d).unbind(1)
    at = torch.arange(len(proj))
    q = attention_prepare_reference(heads[:, :, 0], layer.q_norm.cpu(), at, THETA, h.d // 4, EPS)
    k = attention_prepare_reference(k, layer.k_norm.cpu(), at, THETA, h.d // 4, EPS)
    wanted = attention_reference(q, heads[:, :, 1], k, v)
    torch.testing.assert_close(out.cpu().double().view_as(wanted), wanted, rtol=0, atol=5e-6)


@pytest.mark.parametrize("at", [1, 2, 31, 63, 64, 65, 127, 128, 149])
def test_a_split_changes_no_bit(kernels: Kernels, at: int) -> None:
    layer = Layer(SMALL, kernels)
    proj, whole = small_path(kernels)
    prefix, source = snapshot(layer, proj[:at])
    (branch,) = layer.run([proj[at:]], [child(at, 150 - at, request=source)])
    assert same(prefix, whole[:at])
    assert same(branch, whole[at:])


@pytest.mark.parametrize(("a", "b"), [(1, 1), (31, 34), (70, 3), (64, 64)])
def test_three_levels_and_a_tree_equal_the_unsplit_path(kernels: Kernels, a: int, b: int) -> None:
    proj, whole = small_path(kernels)
    parts, wanted = proj.split([a, b, 150 - a - b]), whole.split([a, b, 150 - a - b])

    layer = Layer(SMALL, kernels)
    request_out, request = snapshot(layer, parts[0])
    (question_out,) = layer.run([parts[1]], [child(a, b, request=request, kv_write=400 - a)])
    question = Source.snapshot(first=a, length=a + b, slot=1, kv=400 - a)
    (branch_out,) = layer.run([parts[2]], [child(a + b, 150 - a - b, request=request, question=question)])
    assert same(request_out, wanted[0])
    assert same(question_out, wanted[1])
    assert same(branch_out, wanted[2])

    # One pass; another question and branches with fewer rows stand between, and a path of its own at the end.
    layer = Layer(SMALL, kernels)
    other = layer.rows(9, seed=3)
    request, question = Source.packed(first=0, row=0), Source.packed(first=a, row=a)
    entries = [
        root(a, internal=True),
        child(a, b, request=request, internal=True),
        child(a, 9, request=request),
        child(a + b, 2, request=request, question=question),
        child(a + b, 150 - a - b, request=request, question=question),
        root(9),
    ]
    outs = layer.run([parts[0], parts[1], other, parts[2][:2], parts[2], other], entries)
    assert same(outs[0], wanted[0])
    assert same(outs[1], wanted[1])
    assert same(outs[3], wanted[2][:2])
    assert same(outs[4], wanted[2])
    assert same(outs[5], layer.alone(other))


def test_neighbours_and_their_order_change_no_bit(kernels: Kernels) -> None:
    layer = Layer(SMALL, kernels)
    proj, whole = small_path(kernels)
    _, source = snapshot(layer, proj[:70])
    branches = [proj[70:110], *(layer.rows(n, seed=n) for n in (1, 2, 5, 1, 40))]
    entries = [child(70, len(rows), request=source) for rows in branches]
    alone = [layer.run([rows], [entry])[0] for rows, entry in zip(branches, entries, strict=True)]
    assert same(alone[0], whole[70:110])
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 4, 2, 0]):
        outs = layer.run([branches[i] for i in order], [entries[i] for i in order])
        assert all(same(out, alone[i]) for i, out in zip(order, outs, strict=True))


@pytest.mark.parametrize("value", [NAN, float("inf")])
@pytest.mark.parametrize("part", ["query", "gate", "key", "value"])
def test_a_row_that_is_not_finite_reaches_only_those_that_attend_to_it(
    kernels: Kernels, part: str, value: float
) -> None:
    h, layer = SMALL, Layer(SMALL, kernels)
    proj, whole = small_path(kernels)
    _, source = snapshot(layer, proj[:70])
    column = {"query": 0, "gate": h.d, "key": h.kv_offset, "value": h.kv_offset + h.kv_heads * h.d}[part]
    bad = layer.rows(6, seed=4)
    bad[3, column + 1] = value
    entries = [child(70, n, request=source) for n in (4, 6, 4)]
    first, sick, last = layer.run([proj[70:74], bad, proj[70:74]], entries)
    assert same(first, whole[70:74])
    assert same(last, whole[70:74])
    assert sick[:3].isfinite().all()
    if part in ("key", "value"):
        assert sick[3:].isnan().any(-1).all()
    elif part == "query" or value != value:
        assert not sick[3].isfinite().all()


def test_read_rows_equal_the_rows_of_the_whole_pass(kernels: Kernels) -> None:
    h, layer = SMALL, Layer(SMALL, kernels)
    proj, whole = small_path(kernels)
    _, source = snapshot(layer, proj[:70])
    packed = torch.cat([proj[70:110], layer.rows(3, seed=5), proj[70:75]])
    entries = [child(70, n, request=source) for n in (40, 3, 5)]
    reads = [(2, 4), (0, 39), (0, 39), (1, 2), (0, 0)]
    tables = layer.tables(entries, reads)
    q, k, v = layer.prepare(packed, tables)
    every = layer.attend(q, packed, k, v, tables)
    picked = torch.tensor([47, 39, 39, 42, 0, 0, 0])  # two rows of padding
    q_proj = packed[picked, : h.kv_offset].contiguous()
    q_proj[5:] = NAN
    kv_proj = packed[:, h.kv_offset :].contiguous()
    q, k2, v2 = layer.kernels.prepare(
        q_proj, kv_proj, layer.q_norm, layer.k_norm, layer.rope, layer.k_cache, layer.v_cache, tables, EPS, 0, True
    )
    assert torch.equal(k2, k)
    assert torch.equal(v2, v)
    read = layer.attend(q, q_proj, k2, v2, tables, reads=True)
    assert same(read[:5], every[picked[:5]])
    assert same(read[1:2], whole[109:110])


@pytest.mark.parametrize("logit", [-6e4, -1e5])
def test_very_negative_logits_are_logits(kernels: Kernels, logit: float) -> None:
    """Key 0 has twice the logit of the others: the first row sees it alone, later rows see the mean of the others."""
    h, layer, n = SMALL, Layer(SMALL, kernels), 70
    proj = layer.rows(n)
    proj[:, : h.kv_offset].view(n, h.heads, 2, h.d)[:, :, 1] = 60.0  # open gates
    q, k = proj.new_zeros(n, h.heads * h.d), proj.new_zeros(n, h.kv_heads * h.d)
    q[:, :: h.d] = 256.0
    k[:, :: h.d] = logit * h.d**0.5 / 256
    k[0] *= 2
    v = layer.rows(n, seed=6)[:, : h.kv_heads * h.d].contiguous()
    out = layer.attend(q, proj, k, v, layer.tables([root(n)]))
    mean = v[1:].cumsum(0) / torch.arange(1, n, device=v.device)[:, None]
    wanted = torch.cat([v[:1], mean]).repeat_interleave(h.heads, 0).view(n, -1)
    torch.testing.assert_close(out, wanted, rtol=0, atol=2e-6)


def test_tiles_anchored_elsewhere_give_other_bits(kernels: Kernels) -> None:
    """The control: the same rows behind five keys of weight zero, so that each stands in another tile of keys."""
    h, layer, n, shift = SMALL, Layer(SMALL, kernels), 150, 5
    proj, _ = small_path(kernels)
    q, k, v = layer.prepare(proj, layer.tables([root(n)]))
    layer.k_cache[:shift], layer.v_cache[:shift] = 0.0, 0.0
    q[:, h.d - 1 :: h.d] = 1.0
    k[:, h.d - 1 :: h.d] = 0.0
    here = layer.attend(q, proj, k, v, layer.tables([root(n)]))
    layer.k_cache[:shift, h.d - 1 :: h.d] = -1e30
    source = Source.snapshot(first=0, length=shift, slot=0, kv=0)
    shifted = layer.attend(q, proj, k, v, layer.tables([child(shift, n, request=source)]))
    torch.testing.assert_close(shifted, here, rtol=0, atol=1e-5)
    assert not torch.equal(shifted, here)


@pytest.mark.parametrize("reads", [False, True])
def test_the_triton_prepare_kernel_equals_the_cpu_kernel(reads: bool) -> None:
    h = Heads(heads=3, kv_heads=2, d=16)
    layer = Layer(h, CPU)
    packed = layer.rows(12)
    packed[4, h.kv_offset + h.kv_heads * h.d + 3] = float("inf")
    source = Source.snapshot(first=0, length=50, slot=0, kv=20)
    entries = [child(50, 4, request=source, kv_write=20), child(50, 5, request=source), root(1)]
    tables = layer.tables(entries, [(1, 4), (0, 2)])
    picked = torch.tensor([8, 2, 0])
    q_proj = packed[picked, : h.kv_offset].contiguous() if reads else packed
    kv_proj = packed[:, h.kv_offset :].contiguous() if reads else packed
    tail = (EPS, 0 if reads else h.kv_offset, reads)

    wanted = attention_prepare(
        q_proj, kv_proj, layer.q_norm, layer.k_norm, layer.rope, layer.k_cache, layer.v_cache, tables, *tail
    )
    there = Layer(h, TRITON)
    found = launch_attention_prepare(
        *(x.to(there.kernels.device) for x in (q_proj, kv_proj)), there.q_norm, there.k_norm, there.rope,
        there.k_cache, there.v_cache, tables.to(there.kernels.device), *tail,
    )  # fmt: skip
    queries = slice(0, 2 if reads else 10)
    torch.testing.assert_close(found[0][queries].cpu(), wanted[0][queries], rtol=2e-6, atol=2e-6)
    packed_rows = slice(4, 10)
    for mine, theirs in zip(found[1:], wanted[1:], strict=True):
        torch.testing.assert_close(mine[packed_rows].cpu(), theirs[packed_rows], rtol=2e-6, atol=2e-6, equal_nan=True)
    assert wanted[1][4, : h.d].isnan().all()  # a bad value is a NaN key over a zero value
    assert not wanted[2][4, : h.d].any()
    for mine, theirs in ((there.k_cache, layer.k_cache), (there.v_cache, layer.v_cache)):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=2e-6, atol=2e-6, equal_nan=True)
        assert theirs[70:74].isfinite().all()  # positions 50 to 53
        assert theirs[:70].isnan().all()
        assert theirs[74:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_rotary_equal_transformers_after_a_prefix(dtype: torch.dtype) -> None:
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import (
        Qwen3_5RMSNorm,
        Qwen3_5TextRotaryEmbedding,
        apply_rotary_pos_emb,
    )

    h = Heads(heads=4, kv_heads=2, d=64)
    parameters = {
        "rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2], "mrope_interleaved": True,
    }  # fmt: skip
    config = Qwen3_5TextConfig(hidden_size=256, head_dim=h.d, rope_parameters=parameters)
    rotary, rms = Qwen3_5TextRotaryEmbedding(config), Qwen3_5RMSNorm(h.d, eps=EPS)
    layer = Layer(h, CPU, dtype=dtype)
    positions = torch.arange(2048)[None]
    cos, sin = rotary(torch.zeros(1, dtype=dtype), positions)
    half = cos.shape[-1] // 2
    layer.rope = torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1).contiguous()

    start, n = 1203, 40  # a question of 20 tokens, then a branch of 20, behind a prefix
    proj = layer.rows(n)
    request = Source.snapshot(first=0, length=start, slot=0, kv=0)
    question = Source.packed(first=start, row=0)
    entries = [
        child(start, 20, request=request, internal=True),
        child(start + 20, 20, request=request, question=question),
    ]
    q, k, v = layer.prepare(proj, layer.tables(entries))

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        rms.weight.data = weight
        return rms(x.reshape(1, n, -1, h.d)).transpose(1, 2)

    at = slice(start, start + n)
    keys = proj[:, h.kv_offset :].view(n, 2, -1, h.d)
    queries = proj[:, : h.kv_offset].view(n, -1, 2, h.d)[:, :, 0]
    wanted_q, wanted_k = apply_rotary_pos_emb(
        normed(queries, layer.q_norm), normed(keys[:, 0], layer.k_norm), cos[:, at], sin[:, at]
    )
    # One rounding of the last bit apart where the norm's reciprocal root is vectorised otherwise.
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(q, wanted_q[0].transpose(0, 1).reshape(n, -1), **tolerance)
    torch.testing.assert_close(k, wanted_k[0].transpose(0, 1).reshape(n, -1), **tolerance)
    assert torch.equal(v, keys[:, 1].reshape(n, -1))


def small_call(reads: bool) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Arguments of both operators."""
    h, layer = SMALL, Layer(SMALL, CPU, kv_rows=16)
    layer.k_cache.zero_()
    layer.v_cache.zero_()
    packed = layer.rows(70)
    tables = layer.tables([root(66, kv_write=-1), root(3)], [(0, 65)])
    q_proj = packed[:2, : h.kv_offset].contiguous() if reads else packed
    kv_proj = packed[:, h.kv_offset :].contiguous() if reads else packed
    caches = (layer.k_cache, layer.v_cache)
    prepare = (q_proj, kv_proj, layer.q_norm, layer.k_norm, layer.rope, *caches, tables, EPS)
    prepare = (*prepare, 0 if reads else h.kv_offset, reads)
    q, k, v = attention_prepare(*prepare)
    return prepare, (q, q_proj, *caches, k, v, tables, h.d, reads)


@pytest.mark.parametrize("reads", [False, True])
def test_operators_keep_the_custom_operator_contract(reads: bool) -> None:
    prepare, attend = small_call(reads)
    torch.library.opcheck(attention_prepare, prepare)
    torch.library.opcheck(attention, attend)


def misaligned(x: Tensor) -> Tensor:
    memory = x.new_empty(x.numel() + 8).flatten()
    return memory[1 : 1 + x.numel()].view(x.shape)


@pytest.mark.parametrize(
    ("index", "change", "error", "message"),
    [
        (0, lambda q: q.double(), TypeError, "q has dtype"),
        (0, lambda q: q.t().contiguous().t(), ValueError, "q has strides"),
        (0, misaligned, ValueError, "bytes past a multiple of 16"),
        (1, lambda p: p[:, 1:].contiguous(), ValueError, "columns of q_proj"),
        (1, lambda p: p[:-1].clone(), ValueError, "q_proj has shape"),
        (2, lambda k: k.bfloat16(), TypeError, "k_cache has dtype"),
        (4, lambda k: torch.cat([k, k], 1), ValueError, "v has shape"),
        (5, lambda v: v[:-1].clone(), ValueError, "v has shape"),
        (6, lambda t: t[1:].clone(), ValueError, "tables has shape"),
        (7, lambda _: 24, ValueError, "head size"),
    ],
)
def test_attention_refuses_what_its_kernel_would_misread(
    index: int, change: Callable[[Any], Any], error: type[Exception], message: str
) -> None:
    arguments = list(small_call(False)[1])
    arguments[index] = change(arguments[index])
    with pytest.raises(error, match=message):
        attention(*arguments)


@pytest.mark.parametrize(
    ("index", "change", "error", "message"),
    [
        (0, lambda q: q[:, :-1], ValueError, "q_proj"),
        (1, lambda kv: kv[:-1].clone(), ValueError, "kv_proj has shape"),
        (2, lambda w: w.double(), TypeError, "q_norm has dtype"),
        (4, lambda r: r[:, :3].contiguous(), ValueError, "rope has 3 columns"),
        (6, lambda v: v[:-1].clone(), ValueError, "v_cache has shape"),
        (9, lambda _: 40, ValueError, "kv_offset is 40"),
    ],
)
def test_attention_prepare_refuses_what_its_kernel_would_misread(
    index: int, change: Callable[[Any], Any], error: type[Exception], message: str
) -> None:
    arguments = list(small_call(False)[0])
    arguments[index] = change(arguments[index])
    with pytest.raises(error, match=message):
        attention_prepare(*arguments)


def test_one_buffer_for_keys_and_values_is_refused() -> None:
    arguments = list(small_call(False)[0])
    arguments[6] = arguments[5]
    with pytest.raises(ValueError, match="share memory"):
        attention_prepare(*arguments)
