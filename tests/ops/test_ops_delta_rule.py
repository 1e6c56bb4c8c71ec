"""The delta rule: equal to its token recurrence, and a row's bits know its path alone, however it was split and packed.

A place is where the operator runs (conftest.py): its CPU kernel, or the Triton kernels in the interpreter or on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

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
    spans,
)

SMALL = DeltaSizes(key_heads=1, value_heads=2, key_dim=16, value_dim=16)
SIZES = (SMALL, DeltaSizes(2, 2, 32, 16), DeltaSizes(1, 3, 16, 64))
CUTS = (1, 2, 31, 63, 64, 65, 127, 128, 129)
TOLERANCE = 1e-5


@pytest.mark.parametrize("n", SIZES, ids=str)
def test_equals_the_recurrence(place: Place, n: DeltaSizes) -> None:
    path = Path.random(place, 150, n)
    out, state = path.whole()
    torch.testing.assert_close(out.double(), path.reference(150)[0], rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(state.double(), path.reference(128)[1], rtol=TOLERANCE, atol=TOLERANCE)


def test_any_split_has_the_bits_of_the_whole(place: Place) -> None:
    path = Path.random(place, 140, SMALL)
    levels = [[Piece(0, cut) for cut in CUTS], [Piece(cut, 140, i) for i, cut in enumerate(CUTS)]]
    check_pieces(path, levels, run_levels(path, levels, padding=3))


def test_a_tree_in_one_pass_has_the_bits_of_the_whole(place: Place) -> None:
    path = Path.random(place, 140, SMALL)
    cuts = (1, 63, 64, 65, 129)
    levels = [[Piece(0, cut) for cut in cuts], [Piece(cut, 140, i) for i, cut in enumerate(cuts)]]
    check_pieces(path, levels, run_tree(path, levels))


@pytest.mark.parametrize("run", [run_levels, run_tree])
def test_three_levels(place: Place, run: Callable[..., Any]) -> None:
    """Question prefixes that end in the parent's chunk, at its border, and two chunks on."""
    path = Path.random(place, 140, SMALL)
    questions = [Piece(50, 51, 0), Piece(50, 64, 0), Piece(50, 130, 0), Piece(70, 100, 1)]
    levels = [[Piece(0, 50), Piece(0, 70)], questions, [Piece(q.last, q.last + 6, i) for i, q in enumerate(questions)]]
    check_pieces(path, levels, run(path, levels))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy remarks on the poison
def test_neighbours_and_order_change_nothing(place: Place) -> None:
    check_neighbours(Path.random(place, 100, SMALL))


def test_extreme_gates(place: Place) -> None:
    """Decay to nothing, no decay, no step and a whole step, in every mixture."""
    generator = torch.Generator().manual_seed(2)
    g = torch.randint(0, 2, (130, 2), generator=generator) * -1e4
    g[::5] = 0.0
    beta = torch.randint(0, 2, (130, 2), generator=generator)
    beta[:20] = 1
    g[:20] = 0
    qkv = torch.randn(130, 2 * SMALL.keys + SMALL.values, generator=generator)
    path = Path.of(place, SMALL, qkv, g, beta)
    out, state = path.whole()
    torch.testing.assert_close(out.double(), path.reference(130)[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state.double(), path.reference(128)[1], rtol=1e-4, atol=1e-5)


def test_states_are_written_where_asked_alone(place: Place) -> None:
    path = Path.random(place, 70, SMALL)
    slots = path.slots(4)
    slots.states[:] = 7.0
    slots.states[2] = torch.randn(slots.states[2].shape, generator=torch.Generator().manual_seed(3)).to(place.device)
    before = slots.states.clone()
    short = [entry(0, 70), entry(64, 3, state_read=2, state_write=1), entry(0, 70, state_write=3)]
    path.run(spans([(0, 70), (64, 67), (0, 70)]), short, slots)
    assert torch.equal(slots.states[[0, 2]], before[[0, 2]])
    assert torch.equal(slots.states[1], before[2]), "no border was crossed"
    assert torch.equal(slots.states[3], path.whole()[1])


@pytest.mark.parametrize("broken", ["no state", "state at the split"])
def test_a_continuation_without_its_past_differs(place: Place, broken: str) -> None:
    """The tests above could fail: neither a forgotten state nor one kept inside a chunk passes them."""
    path = Path.random(place, 100, SMALL)
    slots = path.slots(1)
    slots.states[0] = path.reference(70 if broken == "state at the split" else 64)[1].float()
    path.keep_tail(slots, 0, 0, 70)
    source = Source.snapshot(first=0, length=70, slot=0, kv=0)
    branch = entry(70, 30, state_read=-1, request=source)
    if broken == "state at the split":
        branch = entry(64, 30, state_read=0)
    out, whole = path.run(span(70, 100), [branch], slots), path.whole()[0][70:]
    assert not torch.equal(out, whole)
    close = torch.allclose(out, whole, rtol=1e-4, atol=1e-5)
    assert close == (broken == "state at the split")


def test_operator_is_registered_well() -> None:
    path = Path.random(Place(delta_rule, torch.device("cpu")), 70, SMALL)
    slots = path.slots(2)
    tables = block([entry(0, 70, state_write=1)])
    torch.library.opcheck(delta_rule, (path.qkv, path.gates, slots.kv.nan_to_num(), slots.gates.nan_to_num(),
                                       slots.states.nan_to_num(), tables))  # fmt: skip


def test_wrong_arguments_are_named() -> None:
    path = Path.random(Place(delta_rule, torch.device("cpu")), 70, SMALL)
    slots, tables = path.slots(2), block([entry(0, 70)])
    good = {"qkv": path.qkv, "gates": path.gates, "tail_kv": slots.kv, "tail_gates": slots.gates,
            "states": slots.states, "tables": tables}  # fmt: skip
    for name, bad, error in (
        ("qkv", path.qkv.half(), TypeError),
        ("qkv", path.qkv[:, 1:].contiguous(), ValueError),
        ("gates", path.gates[:60], ValueError),
        ("gates", path.gates.double(), TypeError),
        ("tail_kv", slots.kv[:1], ValueError),
        ("tail_kv", slots.kv.bfloat16(), TypeError),
        ("tail_gates", slots.gates[:, :, :4].contiguous(), ValueError),
        ("states", slots.states.transpose(2, 3), ValueError),
        ("states", slots.states.double(), TypeError),
        ("tables", tables[:100], ValueError),
        ("tables", block([entry(0, 70), entry(0, 1)]), ValueError),
    ):
        with pytest.raises(error, match=f"delta_rule: .*{name}"):
            delta_rule(**good | {name: bad})
