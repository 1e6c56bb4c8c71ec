"""The delta rule's kernels in bfloat16 at the heads of 9B and 27B: bits of every split, one binary, accuracy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ops.delta_rule import delta_rule
from ops.sizes import DeltaSizes
from ops.tables import Source
from tests.ops.delta_paths import (
    Path,
    Piece,
    Place,
    block,
    check_neighbours,
    check_pieces,
    entry,
    run_levels,
    run_tree,
    span,
)

pytestmark = pytest.mark.gpu

NINE = DeltaSizes(key_heads=16, value_heads=32, key_dim=128, value_dim=128)
TWENTY_SEVEN = DeltaSizes(key_heads=16, value_heads=48, key_dim=128, value_dim=128)
PREFIXES = (1, 2, 3, 31, 62, 63, 64, 65, 127, 128, 129, 130, 1000)
BRANCHES = (1, 2, 3, 64, 65, 200)
QUESTIONS = ((62, 63), (62, 64), (62, 127), (1000, 1001), (1000, 1024), (1000, 1100))


def random_path(n: DeltaSizes, rows: int, seed: int = 0) -> Path:
    return Path.random(Place(delta_rule, torch.device("cuda")), rows, n, seed=seed, dtype=torch.bfloat16)


@pytest.mark.parametrize("run", [run_levels, run_tree])
@pytest.mark.parametrize("n", [NINE, TWENTY_SEVEN], ids=["9b", "27b"])
def test_any_split_has_the_bits_of_the_whole(n: DeltaSizes, run: Callable[..., Any], guards: Any) -> None:
    path = random_path(n, 1_200)
    branches = [Piece(cut, cut + length, i) for i, cut in enumerate(PREFIXES) for length in BRANCHES]
    levels = [[Piece(0, cut) for cut in PREFIXES], branches]
    check_pieces(path, levels, run(path, levels))


@pytest.mark.parametrize("run", [run_levels, run_tree])
@pytest.mark.parametrize("n", [NINE, TWENTY_SEVEN], ids=["9b", "27b"])
def test_three_levels(n: DeltaSizes, run: Callable[..., Any]) -> None:
    path = random_path(n, 1_300)
    prefixes = sorted({first for first, _ in QUESTIONS})
    questions = [Piece(first, last, prefixes.index(first)) for first, last in QUESTIONS]
    branches = [Piece(q.last, q.last + length, i) for i, q in enumerate(questions) for length in (1, 65, 200)]
    levels = [[Piece(0, last) for last in prefixes], questions, branches]
    check_pieces(path, levels, run(path, levels))


def test_neighbours_and_order_change_nothing() -> None:
    check_neighbours(random_path(NINE, 100))


def test_one_graph_serves_any_tree() -> None:
    """Captured with one tree, replayed with another of as many rows: the bits of the eager call."""
    path = random_path(NINE, 640)
    slots = path.slots(2)
    path.keep_tail(slots, 1, 0, 70)
    slots.states[1] = path.up_to(64).whole()[1]
    source = Source.snapshot(first=0, length=70, slot=1, kv=0)
    long, short = [entry(0, 640)], [entry(70, 32, state_read=1, request=source) for _ in range(20)]
    tables = block(long).cuda()
    args = (path.qkv, path.gates, slots.kv, slots.gates, slots.states, tables)
    delta_rule(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = delta_rule(*args)
    for entries in (short, long):
        tables.copy_(block(entries))
        graph.replay()
        replayed = captured.clone()
        assert replayed.isfinite().all()
        assert torch.equal(replayed, delta_rule(*args))
        assert torch.equal(replayed, path.run(span(0, 640), entries, slots))


@pytest.mark.parametrize("n", [NINE, TWENTY_SEVEN], ids=["9b", "27b"])
def test_internal_segments_and_leaves_have_the_same_bits(n: DeltaSizes) -> None:
    """The two variants of the scan on the same tensors: whole paths, and continuations of a state."""
    path = random_path(n, 1_100)
    for first, last in ((0, 1), (0, 63), (0, 64), (0, 65), (0, 1_100), (64, 65), (64, 128), (64, 1_100)):
        results = []
        for internal in (True, False):
            slots = path.slots(2)
            slots.states[0] = path.up_to(64).whole()[1]
            one = entry(first, last - first, state_read=0 if first else -1, state_write=1, internal=internal)
            results.append((path.run(span(first, last), [one], slots), slots.states[1]))
        (out, state), (leaf_out, leaf_state) = results
        assert out.isfinite().all()
        assert torch.equal(out, leaf_out)
        assert torch.equal(state, leaf_state)


def test_one_binary() -> None:
    """Neither rows nor the shape of the tree choose another variant of a kernel: the scan has one for internal segments
    and one for leaves."""
    from ops.kernels.delta_rule import prepare_kernel, scan_kernel

    def variants() -> list[int]:
        return [len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in (prepare_kernel, scan_kernel)]

    for kernel in (prepare_kernel, scan_kernel):
        kernel.device_caches.clear()
    path = random_path(NINE, 1_000)
    path.up_to(64).whole()
    known = variants()
    assert known == [1, 2]
    for rows in (1, 63, 65, 130, 1_000):
        path.up_to(rows).whole()
    tree = [[Piece(0, 40), Piece(0, 64)], [Piece(64, 80, 1), Piece(40, 70, 0)]]
    run_tree(path, tree)
    run_levels(path, tree)
    assert variants() == known


def noise(rows: int, n: DeltaSizes) -> tuple[Tensor, Tensor, Tensor]:
    g = -0.3 * F.softplus(torch.randn(rows, n.value_heads))
    return torch.randn(rows, 2 * n.keys + n.values), g, torch.rand(rows, n.value_heads)


def realistic(rows: int, n: DeltaSizes) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs behind SiLU, gates as a fresh layer has them."""
    decay = torch.empty(n.value_heads).uniform_(1, 16)
    bias = torch.empty(n.value_heads).uniform_(-6.9, -2.3)
    g = -decay * F.softplus(torch.randn(rows, n.value_heads) + bias)
    return F.silu(torch.randn(rows, 2 * n.keys + n.values)), g, torch.randn(rows, n.value_heads).sigmoid()


def correlated(rows: int, n: DeltaSizes) -> tuple[Tensor, Tensor, Tensor]:
    """Keys that share a direction, and a memory of hundreds of rows."""
    qkv = torch.randn(rows, 2 * n.keys + n.values)
    qkv[:, : 2 * n.keys] = 0.5 * qkv[:, : 2 * n.keys] + torch.randn(2 * n.keys)
    return qkv, -0.005 * torch.rand(rows, n.value_heads), 0.5 + 0.5 * torch.rand(rows, n.value_heads)


def errors(out: Tensor, state: Tensor, exact: Tensor, exact_state: Tensor) -> dict[str, float]:
    """Relative L2 of outputs [T, Hv, dv]: worst head, worst row; of the state [Hv, dk, dv]."""
    difference = out.double() - exact
    return {
        "worst head": (difference.norm(dim=(0, 2)) / exact.norm(dim=(0, 2))).max().item(),
        "worst row": (difference.norm(dim=(1, 2)) / exact.norm(dim=(1, 2))).max().item(),
        "state": ((state.double() - exact_state).norm() / exact_state.norm()).item(),
    }


@pytest.mark.parametrize("regime", [noise, realistic, correlated])
def test_no_less_accurate_than_flash_linear_attention(regime: Callable[..., Any]) -> None:
    rule = pytest.importorskip("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    n, rows = NINE, 1_088
    torch.manual_seed(0)
    qkv, g, beta = regime(rows, n)
    path = Path.of(Place(delta_rule, torch.device("cuda")), n, qkv.bfloat16(), g, beta.bfloat16())
    exact, exact_state = path.reference(rows)
    exact = exact.unflatten(1, (n.value_heads, n.value_dim))
    out, state = path.whole()
    ours = errors(out.view_as(exact), state, exact, exact_state)

    q, k = (
        x.unflatten(1, (n.key_heads, n.key_dim)).repeat_interleave(n.value_heads // n.key_heads, 1)[None]
        for x in path.qkv[:, : 2 * n.keys].chunk(2, 1)
    )
    v = path.qkv[:, 2 * n.keys :].reshape(1, rows, n.value_heads, n.value_dim)
    their_out, their_state = rule(
        q, k, v, g[None].cuda(), beta[None].bfloat16().cuda(), output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    theirs = errors(their_out[0], their_state[0], exact, exact_state)
    print(regime.__name__, "ours", ours, "theirs", theirs)
    for name, error in ours.items():
        assert error <= theirs[name], f"{name}: {ours} against {theirs}"
