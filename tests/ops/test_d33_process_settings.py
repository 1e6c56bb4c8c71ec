"""Whatever the process sets for itself, operators, references, weights and a forward give the bits they always give.

Not among them, because a kernel cannot keep them on a CPU: the precision of float32 products and the threads. Modes of
a thread are the affair of `computing` for weights and forwards, as in an engine, and of the kernels for operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.load.dimensions import ModelDimensions
from engine.load.tensors import rope_table
from engine.plan.schedule import BufferSizes
from engine.run.device import computing
from engine.run.model import Backbone
from engine.run.snapshot import SnapshotBuffers
from ops.add_rms_norm import add_rms_norm, add_rms_norm_reference
from ops.add_rows import add_rows, add_rows_reference
from ops.attention import attention, attention_reference
from ops.attention_prepare import attention_prepare, attention_prepare_reference
from ops.delta_rule import delta_rule, delta_rule_reference
from ops.gated_rms_norm import gated_rms_norm, gated_rms_norm_reference
from ops.gdn_conv import gdn_conv, gdn_conv_reference, rnorm_reference
from ops.linear import linear_default, linear_fixed
from ops.silu_mul import silu_mul, silu_mul_reference
from ops.tables import ROW_TOKEN, TABLE_WORDS, SegmentEntry, Source, fill
from ops.take_rows import take_rows, take_rows_reference
from tests.support import random_backbone, small_config

CPU = torch.device("cpu")
Tensors = tuple[Tensor, ...]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    """Every fresh tensor is NaN, too."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SETTINGS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "default dtype float16": lambda: default_dtype(torch.float16),
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default device": lambda: torch.device("meta"),
    "gradients": torch.enable_grad,
    "no gradients": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast bfloat16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast float16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "deterministic algorithms": deterministic,
}
EVERY_SETTING = pytest.mark.parametrize("setting", SETTINGS)


def tables(entries: list[SegmentEntry], reads: list[tuple[int, int]]) -> Tensor:
    block = np.zeros(TABLE_WORDS, np.int32)
    fill(block, entries, reads)
    return torch.from_numpy(block)


def prefix(rows: int) -> list[SegmentEntry]:
    """A prefix that leaves a snapshot in slot 1."""
    ids = np.arange(rows, dtype=np.int32)
    return [SegmentEntry(start=0, token_ids=ids, state_write=1, slot_write=1, kv_write=3, internal=True)]


def branches(rows: int) -> list[SegmentEntry]:
    """A branch behind that snapshot, and a packed prefix with a branch."""
    kept = Source.snapshot(first=0, length=rows, slot=1, kv=3)
    ids = np.arange(30, dtype=np.int32)
    return [
        SegmentEntry(start=0, token_ids=ids, internal=True),
        SegmentEntry(start=30, token_ids=ids, request=Source.packed(first=0, row=0)),
        SegmentEntry(start=rows, token_ids=ids[:7], request=kept, state_read=1),
    ]


def noise(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operators(dtype: torch.dtype) -> dict[str, Callable[[], Tensors]]:
    """Each operator and its reference on fixed inputs of 70 rows; results include what an operator writes."""
    rows, entries = 70, prefix(70)
    block = tables(entries, [(0, 69), (0, 3)])
    x, delta, w = (
        noise(rows, 64, seed=1, dtype=dtype),
        noise(rows, 64, seed=2, dtype=dtype),
        noise(64, seed=3, dtype=dtype),
    )
    matrix = noise(32, 64, seed=4, dtype=dtype)
    head = noise(16, seed=5, dtype=torch.float32)

    # Gated DeltaNet: 2 key heads, 4 value heads of 16 columns.
    proj = noise(rows, 128 + 64 + 16, seed=6, dtype=dtype)
    conv, a_log = noise(128, 4, seed=7, dtype=dtype), noise(4, seed=8, dtype=torch.float32)
    bias = noise(4, seed=9, dtype=dtype)
    qkv, gates = noise(rows, 128, seed=10, dtype=dtype), noise(rows, 12, seed=11, dtype=torch.float32).sigmoid() - 1.0
    history, tail_kv = torch.zeros(2, 3, 128, dtype=dtype), torch.zeros(2, 64, 96, dtype=dtype)
    tail_gates, states = torch.zeros(2, 64, 10), torch.zeros(2, 4, 16, 16)

    # Attention: 4 query heads and 2 key/value heads of 32 columns.
    qkv_proj = noise(rows, 256 + 128, seed=12, dtype=dtype)
    norm, rope = noise(32, seed=13, dtype=dtype), noise(128, 8, seed=14, dtype=dtype)
    cache = torch.zeros(80, 64, dtype=dtype)
    q, k, v = (noise(rows, n, seed=15, dtype=dtype) for n in (128, 64, 64))
    positions = torch.arange(5)
    q4, k2 = (noise(9, n, 32, seed=16, dtype=dtype) for n in (4, 2))

    def run_conv() -> Tensors:
        kept = history.clone(), tail_kv.clone(), tail_gates.clone()
        return (*gdn_conv(proj, conv, a_log, bias, block, *kept), *kept)

    def run_delta_rule() -> Tensors:
        kept = states.clone()
        return delta_rule(qkv, gates, tail_kv, tail_gates, kept, block), kept

    def run_prepare() -> Tensors:
        kept = cache.clone(), cache.clone()
        return (*attention_prepare(qkv_proj, qkv_proj, norm, norm, rope, *kept, block, 1e-6, 256, False), *kept)

    def run_attention() -> Tensors:
        found = [attention(q, qkv_proj, cache, cache, k, v, block, 32, False)]
        return (*found, attention(q[:2], qkv_proj[:2], cache, cache, k, v, block, 32, True))

    return {
        "add_rms_norm": lambda: add_rms_norm(x, delta, w, 1e-6),
        "add_rms_norm_reference": lambda: add_rms_norm_reference(x, delta, w, 1e-6),
        "add_rows": lambda: (add_rows(x, delta), add_rows_reference(x, delta)),
        "attention": run_attention,
        "attention_reference": lambda: (attention_reference(q4, q4, k2, k2),),
        "attention_prepare": run_prepare,
        "attention_prepare_reference": lambda: (attention_prepare_reference(q4[:5], norm, positions, 1e7, 8, 1e-6),),
        "delta_rule": run_delta_rule,
        "delta_rule_reference": lambda: delta_rule_reference(qkv, gates, key_heads=2, value_heads=4, key_dim=16),
        "gated_rms_norm": lambda: (gated_rms_norm(x, proj, head, 1e-6, 128),),
        "gated_rms_norm_reference": lambda: (gated_rms_norm_reference(x, proj, head, 1e-6, 128),),
        "gdn_conv": run_conv,
        "gdn_conv_reference": lambda: gdn_conv_reference(proj, conv, a_log, bias, 64),
        "rnorm_reference": lambda: (rnorm_reference(q4),),
        "linear": lambda: (linear_fixed(x, matrix), linear_default(x, matrix)),
        "silu_mul": lambda: (silu_mul(x), silu_mul_reference(x)),
        "take_rows": lambda: (take_rows(x, block, ROW_TOKEN, 70), take_rows_reference(x, block, ROW_TOKEN, 70)),
    }


def same(found: Tensors, wanted: Tensors) -> bool:
    return all(
        a.dtype == b.dtype and a.device == b.device and torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(found, wanted, strict=True)
    )


@EVERY_SETTING
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_d33_operators_keep_their_bits(setting: str, dtype: torch.dtype) -> None:
    cases = operators(dtype)
    plain = {name: case() for name, case in cases.items()}
    found, failed = {}, {}
    with SETTINGS[setting]():
        for name, case in cases.items():
            try:
                found[name] = case()
            except Exception as error:
                failed[name] = error
    assert not failed
    assert [name for name in cases if not same(found[name], plain[name])] == []


def forwards(backbone: Backbone, buffers: SnapshotBuffers) -> Tensors:
    """A prefix and branches behind it: hidden states of both passes, and what the prefix left."""
    with computing(CPU):
        return _forwards(backbone, buffers)


def _forwards(backbone: Backbone, buffers: SnapshotBuffers) -> Tensors:
    buffers.reserve(BufferSizes(kv_rows=80, slots=2, states=2))
    first = backbone.forward(tables(prefix(70), [(0, 69)]), 80, 2, buffers.layers)
    second = backbone.forward(tables(branches(70), [(1, 29), (2, 6)]), 80, 2, buffers.layers)
    return (first, second, *(t.clone() for t in buffers.tensors()))


def new_buffers(backbone: Backbone, dtype: torch.dtype) -> SnapshotBuffers:
    return SnapshotBuffers(backbone.dimensions, dtype=dtype, device=CPU)


@EVERY_SETTING
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_d33_a_forward_keeps_its_bits(setting: str, dtype: torch.dtype) -> None:
    backbone = random_backbone(small_config(), dtype=dtype)
    plain = forwards(backbone, new_buffers(backbone, dtype))
    buffers = new_buffers(backbone, dtype)
    with SETTINGS[setting]():
        found = forwards(backbone, buffers)
    assert same(found, plain)
    assert same(forwards(backbone, buffers), plain), "a later request, without the setting"


@EVERY_SETTING
def test_d33_weights_loaded_under_a_setting_are_the_same(setting: str) -> None:
    dtype = torch.float32
    plain = random_backbone(small_config(), dtype=dtype)
    with SETTINGS[setting](), computing(CPU):
        loaded = random_backbone(small_config(), dtype=dtype)
        buffers = new_buffers(loaded, dtype)
    assert torch.equal(loaded.weights.rope, plain.weights.rope)
    assert same(forwards(loaded, buffers), forwards(plain, new_buffers(plain, dtype)))


@EVERY_SETTING
def test_d33_the_rotary_table_is_that_of_float64_angles(setting: str) -> None:
    dimensions = ModelDimensions.from_config(small_config())
    with SETTINGS[setting]():
        rope = rope_table(dimensions, 300, dtype=torch.float32, device=CPU)
    half = dimensions.rotary_dim // 2
    angles = np.arange(300)[:, None] * dimensions.rope_theta ** (-np.arange(half) / half)
    assert rope.dtype == torch.float32
    np.testing.assert_allclose(rope.numpy(), np.concatenate([np.cos(angles), np.sin(angles)], 1), atol=5e-5)


def test_d33_the_settings_do_change_plain_code() -> None:
    """The tests above could fail: the same product outside the operators moves under autocast."""
    x = noise(8, 64, seed=1, dtype=torch.float32)
    plain = x @ x.T
    with SETTINGS["autocast bfloat16"]():
        assert (x @ x.T).dtype == torch.bfloat16 != plain.dtype
    with SETTINGS["default dtype bfloat16"]():
        assert torch.zeros(1).dtype == torch.bfloat16
    with SETTINGS["default device"]():
        assert torch.zeros(1).device.type == "meta"
