"""The convolution of Gated DeltaNet: exact against float64, and the same bits for a row wherever its path is cut.

A path is projected rows from position 0. It runs whole, in one segment; then cut at some positions, through snapshot
slots or packed as a tree, among neighbours and poisoned padding. Every cut must give the rows and the snapshot of the
whole. The operator's CPU kernel and the Triton kernel (interpreted where there is no GPU) pass the same tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ops.gdn_conv import gdn_conv, gdn_conv_reference, rnorm_reference
from ops.kernels import gdn_conv as kernels
from ops.kernels.gdn_conv import launch_gdn_conv
from ops.sizes import CHUNK, ConvSizes
from ops.tables import TABLE_WORDS, SegmentEntry, Source, fill
from tests.ops.test_ops_rows import ulps

UNTOUCHED = 7.0
SLOTS = 4


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Weights of one layer and the function that runs it."""

    run: Callable[..., tuple[Tensor, Tensor]]
    key_heads: int
    value_heads: int
    dim: int
    conv_weight: Tensor
    a_log: Tensor
    dt_bias: Tensor

    @property
    def keys(self) -> int:
        return self.key_heads * self.dim

    @property
    def values(self) -> int:
        return self.value_heads * self.dim

    @property
    def channels(self) -> int:
        return 2 * self.keys + self.values

    @property
    def proj(self) -> int:
        columns = self.channels + self.values + 2 * self.value_heads
        return columns + -columns % 16

    def path(self, length: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(length, self.proj, generator=generator).to(self.conv_weight)

    def snapshots(self) -> Snapshots:
        device, gates = self.conv_weight.device, 2 * self.value_heads + self.key_heads
        return Snapshots(
            torch.full((SLOTS, 3, self.channels), UNTOUCHED, dtype=self.conv_weight.dtype, device=device),
            torch.full((SLOTS, CHUNK, self.keys + self.values), UNTOUCHED, dtype=self.conv_weight.dtype, device=device),
            torch.full((SLOTS, CHUNK, gates), UNTOUCHED, device=device),
        )

    def __call__(
        self, segments: Sequence[tuple[SegmentEntry, Tensor]], kept: Snapshots, rung: int = 0, padding: float = 0.0
    ) -> list[tuple[Tensor, Tensor]]:
        """One pass: (qkv, gates) of each segment's rows. Rows up to `rung` are filled with `padding`."""
        block = np.zeros(TABLE_WORDS, dtype=np.int32)
        count = fill(block, [entry for entry, _ in segments], [])
        proj = torch.cat([rows for _, rows in segments])
        proj = torch.cat([proj, torch.full_like(proj[:1], padding).expand(max(rung - count, 0), -1)])
        tables = torch.from_numpy(block).to(proj.device)
        arguments = (proj, self.conv_weight, self.a_log, self.dt_bias, tables, kept.history, kept.tail_kv, kept.gates)
        qkv, gates = self.run(*arguments)
        lengths = [entry.length for entry, _ in segments]
        return list(zip(qkv[:count].split(lengths), gates[:count].split(lengths), strict=True))


@dataclass(frozen=True)
class Snapshots:
    history: Tensor
    tail_kv: Tensor
    gates: Tensor

    def slot(self, slot: int, start: int, end: int) -> tuple[Tensor, ...]:
        """What a segment from `start` to `end` must have left in a slot."""
        own = slice(max(start, end - end % CHUNK) % CHUNK if end % CHUNK else 0, end % CHUNK)
        return self.history[slot], self.tail_kv[slot, own], self.gates[slot, own]

    def touched(self) -> int:
        """Elements that are not the filler, over all slots."""
        return sum(int((x != UNTOUCHED).sum()) for x in (self.history, self.tail_kv, self.gates))


def launch(*arguments: Tensor) -> tuple[Tensor, Tensor]:
    proj, conv_weight, a_log, _, _, _, tail_kv, tail_gates = arguments
    return launch_gdn_conv(*arguments, ConvSizes.of(proj, conv_weight, a_log, tail_kv, tail_gates))


def make_layer(
    run: Callable[..., tuple[Tensor, Tensor]],
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    key_heads: int = 2,
    value_heads: int = 4,
    dim: int = 16,
) -> Layer:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((2 * key_heads + value_heads) * dim, 4, generator=generator)
    return Layer(
        run=run, key_heads=key_heads, value_heads=value_heads, dim=dim, conv_weight=weight.to(dtype).to(device),
        a_log=torch.randn(value_heads, generator=generator).to(device),
        dt_bias=torch.randn(value_heads, generator=generator).to(dtype).to(device),
    )  # fmt: skip


def segment(rows: Tensor, start: int = 0, end: int | None = None, **fields: Any) -> tuple[SegmentEntry, Tensor]:
    """Positions [start, end) of a path."""
    own = rows[start:end]
    return SegmentEntry(start=start, token_ids=np.zeros(len(own), dtype=np.int32), **fields), own


@pytest.fixture(params=["operator", "kernel"])
def layer(request: pytest.FixtureRequest, device: torch.device) -> Layer:
    return make_layer(launch if request.param == "kernel" else gdn_conv, device)


def assert_same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def cut(whole: tuple[Tensor, ...], start: int, end: int | None = None) -> tuple[Tensor, ...]:
    return tuple(x[start:end] for x in whole)


def within_one_ulp(qkv: Tensor, exact: Tensor) -> Tensor:
    """Four products that cancel keep the absolute error of float32, however small their sum."""
    return (ulps(qkv, exact) <= 1) | ((qkv.double() - exact).abs() < 1e-6)


def check_against_float64(layer: Layer, path: Tensor, qkv: Tensor, gates: Tensor) -> None:
    exact, g, beta = gdn_conv_reference(path, layer.conv_weight, layer.a_log, layer.dt_bias, layer.values)
    hv, hk = layer.value_heads, layer.key_heads
    if path.dtype == torch.bfloat16:
        assert bool(within_one_ulp(qkv, exact).all())
        assert int(ulps(gates[:, hv : 2 * hv].bfloat16(), beta).max()) <= 1
        assert torch.equal(gates[:, hv : 2 * hv], gates[:, hv : 2 * hv].bfloat16().float())
    else:
        torch.testing.assert_close(qkv.double(), exact, rtol=4e-6, atol=4e-6)
        torch.testing.assert_close(gates[:, hv : 2 * hv].double(), beta, rtol=4e-6, atol=0.0)
    torch.testing.assert_close(gates[:, :hv].double(), g, rtol=4e-6, atol=0.0)
    queries, keys = qkv[:, : layer.keys], qkv[:, layer.keys : 2 * layer.keys]
    for rows, column, scale in ((keys, 2 * hv, 1.0), (queries, 2 * hv + hk, layer.dim**-0.5)):
        exact_norm = rnorm_reference(rows.reshape(len(rows), hk, layer.dim)) * scale
        torch.testing.assert_close(gates[:, column : column + hk].double(), exact_norm, rtol=4e-6, atol=0.0)


@pytest.mark.parametrize("run", [gdn_conv, launch], ids=["operator", "kernel"])
@pytest.mark.parametrize(("key_heads", "value_heads"), [(1, 3), (2, 4)])
def test_rows_equal_float64(
    run: Callable[..., tuple[Tensor, Tensor]], key_heads: int, value_heads: int, device: torch.device, guards: Any
) -> None:
    layer = make_layer(run, device, key_heads=key_heads, value_heads=value_heads)
    path = layer.path(7, 1)
    [(qkv, gates)] = layer([segment(path)], layer.snapshots(), rung=9, padding=float("nan"))
    check_against_float64(layer, path, qkv, gates)


@pytest.mark.parametrize("run", [gdn_conv, launch], ids=["operator", "kernel"])
def test_bfloat16_rows_are_one_rounding_from_float64(
    run: Callable[..., tuple[Tensor, Tensor]], device: torch.device
) -> None:
    """The interpreter truncates where a GPU rounds, so only the convolution is held to an ulp there."""
    layer = make_layer(run, device, dtype=torch.bfloat16)
    path = layer.path(7, 1)
    [(qkv, gates)] = layer([segment(path)], layer.snapshots())
    if run is launch and device.type == "cpu":
        exact, _, _ = gdn_conv_reference(path, layer.conv_weight, layer.a_log, layer.dt_bias, layer.values)
        assert bool(within_one_ulp(qkv, exact).all())
    else:
        check_against_float64(layer, path, qkv, gates)


def test_the_snapshot_holds_the_open_chunk_and_three_inputs(layer: Layer) -> None:
    for length in (1, 2, 3, 6, 64, 66) if layer.run is gdn_conv else (2, 6, 66):
        path, kept = layer.path(length, 2), layer.snapshots()
        [(qkv, gates)] = layer([segment(path, slot_write=2)], kept)
        inputs = torch.cat([path.new_zeros(3, layer.proj), path])[-3:, : layer.channels]
        history, tail_kv, tail_gates = kept.slot(2, 0, length)
        border = length - length % CHUNK
        assert_same((history, tail_kv), (inputs, qkv[border:, layer.keys :]))
        assert torch.equal(tail_gates, gates[border:, : 2 * layer.value_heads + layer.key_heads])
        written = inputs.numel() + tail_kv.numel() + tail_gates.numel()
        assert kept.touched() == written, "something else was written"


@pytest.mark.parametrize("ends", [(1, 2), (2, 3), (3, 6), (5, 6), (2, 7)])
def test_a_path_cut_through_snapshots_gives_the_same_bits(layer: Layer, ends: tuple[int, int]) -> None:
    first, second = ends
    path, kept, whole_kept = layer.path(9, 3), layer.snapshots(), layer.snapshots()
    [whole] = layer([segment(path, slot_write=3)], whole_kept)
    [head] = layer([segment(path, end=first, slot_write=1)], kept)
    request = Source.snapshot(first=0, length=first, slot=1, kv=0)
    [middle] = layer([segment(path, first, second, request=request, slot_write=2)], kept)
    question = Source.snapshot(first=first, length=second, slot=2, kv=0)
    before = [x[1:3].clone() for x in (kept.history, kept.tail_kv, kept.gates)]
    [tail] = layer([segment(path, second, request=request, question=question, slot_write=3)], kept)
    assert_same(head, cut(whole, 0, first))
    assert_same(middle, cut(whole, first, second))
    assert_same(tail, cut(whole, second))
    assert_same(kept.slot(3, second, 9), (whole_kept.history[3], *cut(whole_kept.slot(3, 0, 9)[1:], second)))
    assert_same((kept.history[1:3], kept.tail_kv[1:3], kept.gates[1:3]), tuple(before))


def test_without_its_history_a_row_differs(layer: Layer) -> None:
    path, kept = layer.path(6, 3), layer.snapshots()
    [whole] = layer([segment(path)], kept)
    kept.history.zero_()
    [tail] = layer([segment(path, 3, request=Source.snapshot(first=0, length=3, slot=1, kv=0))], kept)
    assert [torch.equal(a, b) for a, b in zip(whole[0][3:], tail[0], strict=True)] == [False] * 3


def test_a_packed_tree_gives_the_bits_of_each_path(layer: Layer) -> None:
    """Prefix, question and branches in one pass, among a stranger's rows and padding that must not be read."""
    prefix, question, stranger = 2, 1, layer.path(5, 9)
    paths = [torch.cat([layer.path(prefix, 4), rest]) for rest in (layer.path(4, 5), layer.path(3, 6))]
    paths[1][prefix : prefix + question] = paths[0][prefix : prefix + question]
    border = prefix + question
    wholes = [layer([segment(path, slot_write=1)], kept := layer.snapshots())[0] + (kept,) for path in paths]
    [alone] = layer([segment(stranger)], layer.snapshots())

    kept = layer.snapshots()
    request, middle = Source.packed(first=0, row=0), Source.packed(first=prefix, row=prefix)
    stranger[3] = 1e30
    got = layer(
        [
            segment(paths[0], end=prefix, internal=True),
            segment(paths[0], prefix, border, request=request, internal=True),
            segment(paths[1], border, request=request, question=middle, slot_write=2),
            segment(stranger),
            segment(paths[0], border, request=request, question=middle, slot_write=1),
        ],
        kept,
        rung=20,
        padding=float("nan"),
    )
    for whole, branch, slot in ((wholes[1], got[2], 2), (wholes[0], got[4], 1)):
        assert_same(branch, cut(whole[:2], border))
        assert torch.equal(kept.history[slot], whole[2].history[1])
        assert torch.equal(kept.tail_kv[slot, border : len(branch[0]) + border], branch[0][:, layer.keys :])
    assert_same(got[0], cut(wholes[0][:2], 0, prefix))
    assert_same(got[1], cut(wholes[0][:2], prefix, border))
    assert_same(cut(got[3], 0, 3), cut(alone, 0, 3))


def test_long_and_short_walks_give_the_same_bits(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program takes one block of rows or several; a border, a next segment and the end fall inside blocks."""
    layer = make_layer(launch, device)
    request = Source.snapshot(first=0, length=50, slot=0, kv=0)
    segments = []
    for slot, (start, length) in enumerate(((0, 11), (50, 24), (50, 10)), 1):
        entry, _ = segment(layer.path(start + length, 1), start, request=request if start else None, slot_write=slot)
        segments.append((entry, layer.path(length, slot)))

    def walks(steps: int) -> tuple[list[tuple[Tensor, Tensor]], Snapshots]:
        monkeypatch.setattr(kernels, "ROWS_PER_STEP", 1)
        monkeypatch.setattr(kernels, "MAX_STEPS", steps)
        kept = layer.snapshots()
        return layer(segments, kept, rung=48, padding=float("nan")), kept

    (short, short_kept), (long, long_kept) = walks(1), walks(4)
    for a, b in zip(short, long, strict=True):
        assert_same(a, b)
    assert_same(*((x.history, x.tail_kv, x.gates) for x in (short_kept, long_kept)))
    assert short_kept.touched() > 3 * 3 * layer.channels, "nothing was kept"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operator_bits_do_not_depend_on_packing(dtype: torch.dtype, device: torch.device) -> None:
    layer = make_layer(gdn_conv, device, dtype=dtype, key_heads=1, value_heads=3)
    paths = [layer.path(length, seed) for seed, length in enumerate((1, 67, 2, 5, 64))]
    alone = [layer([segment(path)], layer.snapshots())[0] for path in paths]
    for order in ((4, 0, 2, 1, 3), (2, 3, 4, 1, 0)):
        together = layer([segment(paths[i]) for i in order], layer.snapshots(), rung=192, padding=float("nan"))
        for i, got in zip(order, together, strict=True):
            assert_same(got, alone[i])


@pytest.mark.parametrize("run", [gdn_conv, launch], ids=["operator", "kernel"])
def test_extreme_gates_stay_finite_and_exact(run: Callable[..., tuple[Tensor, Tensor]], device: torch.device) -> None:
    layer = make_layer(run, device)
    path = layer.path(4, 7)
    gates = path[:, layer.channels + layer.values :]
    gates[:, 4:8] = torch.tensor(
        [[-1e4, -80.0, -30.0, -12.0], [-1e-6, 1e-6, 0.0, 19.99], [20.01, 88.0, 1e4, 3e4], [-3.0, -1.0, 1.0, 3.0]]
    )
    gates[:, :4] = torch.tensor([[-1e4, -88.0, -30.0, 1e4], [0.0, -1.0, 30.0, 88.0], [1.0] * 4, [2.0] * 4])
    layer = replace(layer, a_log=torch.tensor([-20.0, -3.0, 0.0, 10.0], device=device), dt_bias=layer.dt_bias * 0)
    [(_, got)] = layer([segment(path)], layer.snapshots())
    _, g, beta = gdn_conv_reference(path, layer.conv_weight, layer.a_log, layer.dt_bias, layer.values)
    assert bool(got.isfinite().all())
    torch.testing.assert_close(got[:, :4].double(), g, rtol=1e-5, atol=1e-37)
    torch.testing.assert_close(got[:, 4:8].double(), beta, rtol=1e-5, atol=1e-37)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy remarks on the overflow
@pytest.mark.parametrize("run", [gdn_conv, launch], ids=["operator", "kernel"])
def test_d50_the_largest_a_log_makes_no_nan(run: Callable[..., tuple[Tensor, Tensor]], device: torch.device) -> None:
    """Log decays from none to -inf, which the delta rule takes for its least one."""
    layer = make_layer(run, device)
    path = layer.path(4, 7)
    path[:, layer.channels + layer.values + 4 :][:, :4] = torch.tensor([-150.0, -30.0, 0.0, 1e4])
    layer = replace(layer, a_log=torch.full_like(layer.a_log, 88.7), dt_bias=layer.dt_bias * 0)
    [(_, got)] = layer([segment(path)], layer.snapshots())
    assert not bool(got.isnan().any())
    assert bool((got[:, :3].isfinite() & (got[:, :3] <= 0)).all())
    assert bool((got[:, 3] == -torch.inf).all())


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65])
def test_operator_contract(count: int, device: torch.device) -> None:
    layer = make_layer(gdn_conv, device)
    kept = layer.snapshots()
    block = np.zeros(TABLE_WORDS, dtype=np.int32)
    if count:
        fill(block, [segment(layer.path(count, 0), slot_write=1)[0]], [])
    tables = torch.from_numpy(block).to(device)
    proj = layer.path(count, 0)
    weights = (layer.conv_weight, layer.a_log, layer.dt_bias)
    torch.library.opcheck(gdn_conv, (proj, *weights, tables, kept.history, kept.tail_kv, kept.gates))


def test_wrong_arguments_are_refused_by_name(device: torch.device) -> None:
    layer = make_layer(gdn_conv, device)
    kept = layer.snapshots()
    right = {
        "proj": layer.path(4, 0),
        "conv_weight": layer.conv_weight,
        "a_log": layer.a_log,
        "dt_bias": layer.dt_bias,
        "tables": torch.zeros(TABLE_WORDS, dtype=torch.int32, device=device),
        "history": kept.history,
        "tail_kv": kept.tail_kv,
        "tail_gates": kept.gates,
    }
    arena = torch.zeros(kept.tail_kv.numel() + 1, device=device)
    wrong: list[tuple[str, Tensor, type[Exception], str]] = [
        ("proj", right["proj"].double(), TypeError, "proj has dtype torch.float64"),
        ("proj", right["proj"].t(), ValueError, "proj has strides"),
        ("proj", right["proj"][:, :-16].clone(), ValueError, "number of columns of proj is"),
        ("proj", right["proj"].new_empty(0).expand(20_000, 0), ValueError, "last dimension of proj is 0"),
        ("proj", right["proj"][:1].repeat(16_385, 1), ValueError, "number of rows of proj is 16385, wants at most"),
        ("conv_weight", layer.conv_weight.t().clone(), ValueError, "conv_weight has shape"),
        ("conv_weight", layer.conv_weight.bfloat16(), TypeError, "conv_weight has dtype torch.bfloat16"),
        ("conv_weight", layer.conv_weight[:-16].clone(), ValueError, "history has shape"),
        ("dt_bias", layer.dt_bias[:3].clone(), ValueError, r"dt_bias has shape \[3\], wants \[4\]"),
        ("a_log", layer.a_log.double(), TypeError, "a_log has dtype"),
        ("tables", right["tables"].long(), TypeError, "tables has dtype"),
        ("history", kept.history[:, :2], ValueError, "history has shape"),
        ("tail_kv", kept.tail_kv[:2].clone(), ValueError, "tail_kv has shape"),
        ("tail_kv", arena[1:].view(kept.tail_kv.shape), ValueError, "tail_kv starts at 4 bytes past"),
        ("tail_kv", kept.tail_kv[..., :-8].clone(), ValueError, "key head has 20 columns, wants a power of two"),
        ("tail_gates", kept.gates[..., :8].clone(), ValueError, "number of key heads .* is 0"),
        ("tail_gates", kept.gates.bfloat16(), TypeError, "tail_gates has dtype"),
        ("tail_gates", kept.gates.new_zeros(SLOTS, CHUNK, 11), ValueError, "32 channels|number of|a key head"),
    ]
    for name, value, error, text in wrong:
        with pytest.raises(error, match=f"gdn_conv: .*{text}"):
            gdn_conv(**(right | {name: value}))
    shared = {
        "history": arena[: kept.history.numel()].view_as(kept.history),
        "tail_kv": arena[:-1].view_as(kept.tail_kv),
    }
    with pytest.raises(ValueError, match="history and tail_kv share memory"):
        gdn_conv(**(right | shared))
