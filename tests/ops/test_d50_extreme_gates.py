"""Log decays from -128 to -inf among small ones: right against the token recurrence in float64, and split like any.

The small ones are what is hard: a prefix sum that holds -1e6 has no digits left for -0.02.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ops import delta_rule as operator
from ops.delta_rule import delta_rule
from ops.sizes import LEAST_LOG_DECAY, DeltaSizes
from tests.ops.delta_paths import Path, Piece, Place, check_pieces, entry, run_levels, run_tree, span

SMALL = DeltaSizes(key_heads=1, value_heads=2, key_dim=16, value_dim=16)
NINE = DeltaSizes(key_heads=16, value_heads=32, key_dim=128, value_dim=128)
EXTREMES = (-104.0, -128.0, -1e6, -3.4e38, -torch.inf)
SEVERAL = (0, 3, 17, 18, 40, 63, 64, 90)
ROWS = 150


def path_with(
    place: Place,
    n: DeltaSizes,
    extremes: dict[int, float],
    *,
    small: float = -0.02,
    dtype: torch.dtype = torch.float32,
    rows: int = ROWS,
) -> Path:
    """Every log decay is `small` but those of head 0 in the given rows."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(rows, 2 * n.keys + n.values, generator=generator)
    g = torch.full((rows, n.value_heads), small)
    for row, value in extremes.items():
        g[row, 0] = value
    return Path.of(place, n, qkv.to(dtype), g, torch.rand(rows, n.value_heads, generator=generator))


def relative_error(path: Path, rows: int = ROWS) -> float:
    """Of the worst row of a value head, or of the state behind the last complete chunk."""
    out, state = path.whole()
    exact, _ = path.reference(rows)
    _, exact_state = path.reference(rows - rows % 64)
    assert bool(out.isfinite().all() & state.isfinite().all())

    def worst(found: Tensor, wanted: Tensor) -> float:
        by_head = (-1, path.n.value_heads, path.n.value_dim)
        found, wanted = found.double().reshape(by_head), wanted.reshape(by_head)
        return float(((found - wanted).norm(dim=2) / wanted.norm(dim=2).mean()).max())

    return max(worst(out, exact), worst(state.transpose(0, 1), exact_state.transpose(0, 1)))


@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("row", [0, 20, 63, 64, 149])
def test_d50_one_extreme_among_small_log_decays(place: Place, extreme: float, row: int) -> None:
    assert relative_error(path_with(place, SMALL, {row: extreme})) < 2e-4


@pytest.mark.parametrize("extreme", EXTREMES)
def test_d50_several_extremes_in_a_chunk(place: Place, extreme: float) -> None:
    assert relative_error(path_with(place, SMALL, dict.fromkeys(SEVERAL, extreme))) < 1e-3


def test_d50_every_row_extreme_but_the_last(place: Place) -> None:
    assert relative_error(path_with(place, SMALL, dict.fromkeys(range(63), -1e6))) < 5e-3


def test_d50_all_below_the_limit_are_the_limit(place: Place) -> None:
    at_limit, beyond = (
        path_with(place, SMALL, dict.fromkeys(SEVERAL, extreme)).whole() for extreme in (LEAST_LOG_DECAY, -torch.inf)
    )
    assert torch.equal(at_limit[0], beyond[0])
    assert torch.equal(at_limit[1], beyond[1])


@pytest.mark.parametrize("extremes", [(), (-127.99, -104.0, -90.0)])
def test_d50_the_limit_changes_no_bit_above_it(extremes: Sequence[float], monkeypatch: pytest.MonkeyPatch) -> None:
    path = path_with(Place(delta_rule, torch.device("cpu")), SMALL, dict(zip(SEVERAL, extremes, strict=False)))
    with_limit = path.whole()
    monkeypatch.setattr(operator, "LEAST_LOG_DECAY", -torch.inf)
    without = path.whole()
    assert torch.equal(with_limit[0], without[0])
    assert torch.equal(with_limit[1], without[1])


def test_d50_without_the_limit_small_log_decays_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first test could fail."""
    monkeypatch.setattr(operator, "LEAST_LOG_DECAY", -torch.inf)
    assert relative_error(path_with(Place(delta_rule, torch.device("cpu")), SMALL, {20: -1e6})) > 1e-2


@pytest.mark.parametrize("run", [run_levels, run_tree])
def test_d50_extremes_in_tail_and_packed_rows_of_the_parent(place: Place, run: Callable[..., Any]) -> None:
    """Whoever goes on from an open chunk reads its gates again, from a slot or from the pass."""
    path = path_with(place, SMALL, {3: -torch.inf, 65: -1e6, 69: -torch.inf, 75: -3e38})
    levels = [[Piece(0, 5), Piece(0, 70)], [Piece(5, 80, 0), Piece(70, 130, 1)]]
    check_pieces(path, levels, run(path, levels))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy remarks on the NaN
def test_d50_nan_stays_and_reaches_its_own_rows_alone(place: Place) -> None:
    path, plain = path_with(place, SMALL, {70: torch.nan, 75: -torch.inf}), path_with(place, SMALL, {75: -torch.inf})
    whole, slots = plain.whole()[0], path.slots(1)
    rows = torch.cat([span(0, ROWS), span(0, 70)])  # behind it a segment without the row
    out = path.run(rows, [entry(0, ROWS, state_write=0), entry(0, 70)], slots)
    poisoned, healthy = out.split([ROWS, 70])
    head = slice(SMALL.value_dim)
    assert poisoned[70:, head].isnan().all()
    assert slots.states[0, 0].isnan().all()
    assert torch.equal(poisoned[:64], whole[:64]), "an earlier chunk"
    assert torch.equal(poisoned[:, SMALL.value_dim :], whole[:, SMALL.value_dim :]), "another head"
    assert torch.equal(healthy, whole[:70]), "another segment"


@pytest.mark.gpu
@pytest.mark.parametrize("extreme", EXTREMES)
def test_d50_extremes_in_bfloat16_at_full_size(extreme: float) -> None:
    place = Place(delta_rule, torch.device("cuda"))
    for rows in ((20,), SEVERAL):
        path = path_with(place, NINE, dict.fromkeys(rows, extreme), dtype=torch.bfloat16)
        assert relative_error(path) < 5e-2


@pytest.mark.gpu
@pytest.mark.parametrize("run", [run_levels, run_tree])
def test_d50_extremes_of_the_parent_at_full_size(run: Callable[..., Any]) -> None:
    extremes = {3: -torch.inf, 65: -1e6, 69: -torch.inf, 75: -3e38}
    path = path_with(Place(delta_rule, torch.device("cuda")), NINE, extremes, dtype=torch.bfloat16)
    levels = [[Piece(0, 5), Piece(0, 70)], [Piece(5, 80, 0), Piece(70, 130, 1)]]
    check_pieces(path, levels, run(path, levels))
