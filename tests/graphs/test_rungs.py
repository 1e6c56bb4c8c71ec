"""The ladder of row counts."""

import ast
from itertools import pairwise
from pathlib import Path

import pytest

import graphs
from graphs.rungs import LADDER, rung
from ops.tables import MAX_ROWS


def test_the_ladder_climbs_in_multiples_of_eight_from_64_to_the_row_limit():
    assert (LADDER[0], LADDER[-1]) == (64, MAX_ROWS)
    assert list(LADDER) == sorted(set(LADDER))
    assert all(r % 8 == 0 for r in LADDER)


def test_every_row_count_gets_the_lowest_rung_that_holds_it():
    for below, top in pairwise((0, *LADDER)):
        assert {rung(rows) for rows in range(below + 1, top + 1)} == {top}


def test_padding_stays_within_the_allowed_waste():
    for rows in range(65, MAX_ROWS + 1):
        assert rung(rows) - rows <= (0.125 if rows < 512 else 0.04) * rows, rows


def test_long_passes_are_whole_tiles():
    assert all(r % 64 == 0 for r in LADDER if r >= 1_600)
    assert all(r % 128 == 0 for r in LADDER if r >= 3_200)


@pytest.mark.parametrize("rows", [0, -1, MAX_ROWS + 1])
def test_rows_outside_the_ladder_are_refused(rows):
    with pytest.raises(ValueError, match=f"from 1 to {MAX_ROWS}, .* got {rows}"):
        rung(rows)


def test_graphs_imports_nothing_of_engine():
    for file in Path(graphs.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] == "engine"], file.name
