"""The convolution kernel on a GPU: at full size, with one binary for every row count, captured."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ops.gdn_conv import gdn_conv
from ops.kernels.gdn_conv import gdn_conv_kernel
from ops.tables import TABLE_WORDS, Source, fill
from tests.ops.test_ops_conv import assert_same, check_against_float64, cut, make_layer, segment

FULL_SIZES = pytest.mark.parametrize(("key_heads", "value_heads"), [(16, 32), (16, 48)], ids=["9b", "27b"])


@pytest.mark.gpu
@FULL_SIZES
def test_bfloat16_at_full_size(key_heads: int, value_heads: int, device: torch.device, guards: Any) -> None:
    layer = make_layer(gdn_conv, device, dtype=torch.bfloat16, key_heads=key_heads, value_heads=value_heads, dim=128)
    path = layer.path(2101, 1)
    whole_kept, kept = layer.snapshots(), layer.snapshots()
    [whole] = layer([segment(path, slot_write=3)], whole_kept, rung=2112, padding=float("nan"))
    check_against_float64(layer, path, *whole)
    for first, second in ((1, 3), (63, 64), (65, 130), (1027, 1090)):
        [head] = layer([segment(path, end=first, slot_write=1)], kept)
        request = Source.snapshot(first=0, length=first, slot=1, kv=0)
        stranger = segment(layer.path(37, 5), slot_write=0)
        _, middle = layer([stranger, segment(path, first, second, request=request, slot_write=2)], kept)
        question = Source.snapshot(first=first, length=second, slot=2, kv=0)
        tail, short = layer(
            [
                segment(path, second, request=request, question=question, slot_write=3),
                segment(path, second, second + 1, request=request, question=question),
            ],
            kept,
            rung=2304,
            padding=float("nan"),
        )
        assert_same(head, cut(whole, 0, first))
        assert_same(middle, cut(whole, first, second))
        assert_same(tail, cut(whole, second))
        assert_same(short, cut(whole, second, second + 1))
        assert_same(kept.slot(3, second, 2101), whole_kept.slot(3, 0, 2101))


@pytest.mark.gpu
def test_one_binary_serves_every_row_count(device: torch.device) -> None:
    layer = make_layer(gdn_conv, device, dtype=torch.bfloat16, key_heads=16, value_heads=32, dim=128)
    binaries = gdn_conv_kernel.device_caches[device.index or 0][0]

    def run(count: int) -> int:
        layer([segment(layer.path(count, 0), slot_write=1)], layer.snapshots())
        return len(binaries)

    first = run(64)
    assert [run(count) for count in (1, 15, 16, 17, 512, 1024, 4000)] == [first] * 7


@pytest.mark.gpu
def test_captured_equals_eager(device: torch.device) -> None:
    layer = make_layer(gdn_conv, device, dtype=torch.bfloat16, key_heads=16, value_heads=32, dim=128)
    path, kept = layer.path(130, 0), layer.snapshots()
    block = np.zeros(TABLE_WORDS, dtype=np.int32)
    fill(block, [segment(path, slot_write=1)[0]], [])
    tables = torch.from_numpy(block).to(device)
    weights = (layer.conv_weight, layer.a_log, layer.dt_bias)
    eager = gdn_conv(path, *weights, tables, kept.history, kept.tail_kv, kept.gates)
    left = kept.slot(1, 0, 130)
    again = layer.snapshots()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gdn_conv(path, *weights, tables, again.history, again.tail_kv, again.gates)
    graph.replay()
    assert_same(captured, eager)
    assert_same(again.slot(1, 0, 130), left)
