"""Attention on a GPU, in bfloat16, at the sizes of the models: bits of every split, accuracy, capture, binaries."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from ops.attention import attention, attention_reference
from ops.attention_prepare import attention_prepare
from ops.kernels.attention import attention_kernel
from ops.kernels.attention_prepare import attention_prepare_kernel
from ops.tables import Source
from tests.ops.attention_layer import CPU, EPS, NAN, Heads, Kernels, Layer, child, root, same, snapshot

pytestmark = pytest.mark.gpu

GPU = Kernels("gpu", attention_prepare, attention, "cuda")
MODEL_HEADS = [Heads(heads=16, kv_heads=4, d=256), Heads(heads=24, kv_heads=4, d=256)]
model_heads = pytest.mark.parametrize("h", MODEL_HEADS, ids=["16-4", "24-4"])
PREFIXES = (1, 2, 3, 31, 62, 63, 64, 65, 127, 128, 129, 130, 1000)
BRANCHES = (1, 2, 3, 64, 65, 200)


def gpu_layer(h: Heads, *, kv_rows: int = 4096) -> Layer:
    return Layer(h, GPU, kv_rows=kv_rows, dtype=torch.bfloat16)


@cache
def model_path(h: Heads) -> tuple[Tensor, Tensor]:
    layer = gpu_layer(h)
    proj = layer.rows(max(PREFIXES) + max(BRANCHES))
    return proj, layer.alone(proj)


@model_heads
@pytest.mark.parametrize("prefix", PREFIXES)
def test_levels_and_trees_equal_the_unsplit_path_on_a_gpu(h: Heads, prefix: int) -> None:
    proj, whole = model_path(h)
    layer = gpu_layer(h)
    out, request = snapshot(layer, proj[:prefix])
    assert same(out, whole[:prefix])

    # All branch lengths side by side, ragged, in tiles that mix them.
    parts = [proj[prefix : prefix + n] for n in BRANCHES]
    outs = layer.run(parts, [child(prefix, n, request=request) for n in BRANCHES])
    assert all(same(out, whole[prefix : prefix + n]) for out, n in zip(outs, BRANCHES, strict=True))

    # A question of 40 rows, in a pass of its own, and then everything in one pass.
    start = prefix + 40
    rows = (*(n for n in BRANCHES if n < 160), 160)
    wanted = [whole[start : start + n] for n in rows]
    branches = [proj[start : start + n] for n in rows]
    (out,) = layer.run([proj[prefix:start]], [child(prefix, 40, request=request, kv_write=3000 - prefix)])
    assert same(out, whole[prefix:start])
    question = Source.snapshot(first=prefix, length=start, slot=1, kv=3000 - prefix)
    entries = [child(start, n, request=request, question=question) for n in rows]
    assert all(map(same, layer.run(branches, entries), wanted))

    request, question = Source.packed(first=0, row=0), Source.packed(first=prefix, row=prefix)
    entries = [
        root(prefix, internal=True),
        child(prefix, 40, request=request, internal=True),
        *(child(start, n, request=request, question=question) for n in rows),
        child(prefix, 40, request=request),
        root(77),
    ]
    parts = [proj[:prefix], proj[prefix:start], *branches, proj[prefix:start], proj[:77]]
    outs = layer.run(parts, entries)
    wanted = [whole[:prefix], whole[prefix:start], *wanted, whole[prefix:start], whole[:77]]
    assert all(map(same, outs, wanted))


@model_heads
def test_accuracy_on_a_gpu(h: Heads) -> None:
    proj, out = model_path(h)
    layer = gpu_layer(h)
    q, k, v = layer.prepare(proj, layer.tables([root(len(proj))]))
    gate = proj[:, : h.kv_offset].view(-1, h.heads, 2, h.d)[:, :, 1]
    wanted = attention_reference(
        q.view(-1, h.heads, h.d), gate, k.view(-1, h.kv_heads, h.d), v.view(-1, h.kv_heads, h.d)
    ).flatten(1)
    error = out.double() - wanted
    assert (error.abs().amax(-1) <= 6e-3 * wanted.abs().amax(-1)).all()
    assert error.norm() <= 2.3e-3 * wanted.norm()

    cpu = Layer(h, CPU, dtype=torch.bfloat16)
    n = 200
    mine = layer.prepare(proj[:n], layer.tables([root(n)]))
    theirs = cpu.prepare(proj[:n].cpu(), cpu.tables([root(n)]))
    for found, expected in zip(mine, theirs, strict=True):
        error = (found.cpu().double() - expected.double()).norm()
        assert error <= 3e-4 * expected.double().norm()  # a rare last bit, where reciprocal roots differ


@model_heads
def test_reads_padding_and_guards_on_a_gpu(h: Heads, guards: Any) -> None:
    proj, whole = model_path(h)
    layer = gpu_layer(h)
    _, request = snapshot(layer, proj[:130])
    lengths = [1, 34, 64, 3] * 20
    entries = [child(130, n, request=request) for n in lengths]
    tables = layer.tables(entries, [(s, n - 1) for s, n in enumerate(lengths)])
    packed = torch.cat([*(proj[130 : 130 + n] for n in lengths), proj[:11] * NAN])
    q, k, v = layer.prepare(packed, tables)
    every = layer.attend(q, packed, k, v, tables)
    ends = torch.tensor(lengths).cumsum(0) - 1
    q_proj = torch.cat([packed[ends.cuda(), : h.kv_offset], packed[-16:, : h.kv_offset] * NAN])
    kv_proj = packed[:, h.kv_offset :].contiguous()
    q, k, v = layer.kernels.prepare(
        q_proj, kv_proj, layer.q_norm, layer.k_norm, layer.rope, layer.k_cache, layer.v_cache, tables, EPS, 0, True
    )
    reads = layer.attend(q, q_proj, k, v, tables, reads=True)
    assert same(reads[: len(lengths)], every[ends.cuda()])
    assert same(reads[: len(lengths)], whole[torch.tensor(lengths).cuda() + 129])


@model_heads
def test_a_captured_pass_serves_other_trees_with_the_same_bits_and_binary(h: Heads) -> None:
    proj, _ = model_path(h)
    layer = gpu_layer(h)
    _, request = snapshot(layer, proj[:130])
    trees = [[child(130, n, request=request) for n in lengths] for lengths in ([100], [1] * 100, [34, 3, 60], [2, 64])]
    packed = proj[130:258].clone()
    tables = layer.tables(trees[0])
    binaries = [compiled(kernel) for kernel in (attention_kernel, attention_prepare_kernel)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q, k, v = layer.prepare(packed, tables)
        captured = layer.attend(q, packed, k, v, tables)
    for tree in trees:
        tables.copy_(layer.tables(tree))
        graph.replay()
        rows = sum(entry.length for entry in tree)
        found = captured[:rows].clone()
        q, k, v = layer.prepare(packed, tables)
        assert same(found, layer.attend(q, packed, k, v, tables)[:rows])
    assert binaries == [compiled(kernel) for kernel in (attention_kernel, attention_prepare_kernel)]


def compiled(kernel: triton.JITFunction) -> int:
    """Binaries of a kernel on this device so far."""
    return len(kernel.device_caches[torch.cuda.current_device()][0])


def test_cache_rows_beyond_32_bit_offsets() -> None:
    h = MODEL_HEADS[0]
    proj, whole = model_path(h)
    rows = 2**31 // (h.kv_heads * h.d) + 500
    layer = gpu_layer(h, kv_rows=rows)
    out, request = snapshot(layer, proj[:200], kv=rows - 200)
    (branch,) = layer.run([proj[200:300]], [child(200, 100, request=request)])
    assert same(out, whole[:200])
    assert same(branch, whole[200:300])
