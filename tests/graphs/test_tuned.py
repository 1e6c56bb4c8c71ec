"""The tuned product: names of algorithms, the operator, and the choice by time and bytes."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from engine.load.dimensions import DIMENSIONS
from engine.load.projections import projection_shapes
from graphs.rungs import LADDER
from graphs.tuning import candidates as offer
from graphs.tuning import tuner
from graphs.tuning.candidates import padded_rows, variants
from graphs.tuning.search import ANCHORS, KEPT, CannotRunError, neighbours, retest, search
from ops import blas, linear_tuned
from ops.linear_tuned import CUBLASLT, FIXED, Cell, chosen, install, is_one_kernel, product
from ops.variant import Variant
from tests.graphs.tuned_support import CODE, SHAPE, TILE_A, TILE_B, FakeTrials, by_order, offered


@pytest.fixture(autouse=True)
def _fresh_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_tuned, "_products", {})
    linear_tuned.missed.clear()


class TestNames:
    def test_a_tile_is_found_again_by_its_name(self) -> None:
        for variant in {*offer.FEW_ROWS, *offer.SEVERAL_ROWS, *offer.MANY_ROWS}:
            assert Variant.named(variant.name) == variant

    def test_every_kind_of_name_makes_a_product(self) -> None:
        for name in offered((512, 128, 64)):
            assert callable(product(name))

    @pytest.mark.parametrize(
        "name",
        [
            "",
            "cublas",
            "cublas2",
            "tile 64x64 w4 s4",
            "tile 64x64x64 w4 s4 ",
            f"{CUBLASLT}#",
            f"{CUBLASLT}#xy",
            "fixed@x",
        ],
    )
    def test_an_unknown_name_is_refused(self, name: str) -> None:
        with pytest.raises(ValueError):  # noqa: PT011
            product(name)

    def test_only_the_librarys_own_choice_is_another_kernel_at_every_row_count(self) -> None:
        assert [is_one_kernel(n) for n in (CUBLASLT, f"{CUBLASLT}@128", CODE, TILE_A, f"{TILE_A}@128", FIXED)] == [
            False, False, True, True, True, True,
        ]  # fmt: skip

    def test_padding_changes_no_row_and_leaves_no_more_rows(self) -> None:
        seen = []

        def inner(x: Tensor, w: Tensor) -> Tensor:
            seen.append(tuple(x.shape))
            return F.linear(x, w)

        x, w = torch.randn(5, 8), torch.randn(3, 8)
        assert torch.allclose(linear_tuned._padded(inner, 7)(x, w), F.linear(x, w), atol=1e-6)
        assert seen == [(7, 8)]


class TestOperator:
    def test_it_refuses_a_cpu_with_the_remedy(self) -> None:
        x = torch.zeros(64, 64, dtype=torch.bfloat16)
        with pytest.raises(ValueError, match=r"linear_tuned: x is on the CPU.* use linear_fixed"):
            linear_tuned.linear_tuned(x, x)

    def test_its_shape_is_known_without_running(self) -> None:
        with FakeTensorMode():
            x, w = (torch.empty(n, 32, dtype=torch.bfloat16, device="cuda") for n in (64, 48))
            out = linear_tuned.linear_tuned(x, w)
        assert (out.shape, out.dtype, out.device.type) == ((64, 48), torch.bfloat16, "cuda")

    def test_what_was_installed_is_chosen_by_device_weight_and_rows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(linear_tuned, "product", lambda name: name)
        install({(512, 128, 64): TILE_A, (512, 128, 72): CODE}, torch.device("cuda", 0))
        install({(512, 128, 64): CUBLASLT}, torch.device("cuda", 1))
        assert [chosen(d, (512, 128, rows)) for d, rows in ((0, 64), (0, 72), (1, 64))] == [TILE_A, CODE, CUBLASLT]
        assert not linear_tuned.missed

    def test_a_cell_never_tuned_runs_fixed_is_counted_and_said_once(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING, "forkgraph"):
            assert [chosen(0, (512, 128, rows)) for rows in (64, 64, 72)] == [product(FIXED)] * 3
        assert linear_tuned.missed == {(0, (512, 128, 64)): 2, (0, (512, 128, 72)): 1}
        assert len(caplog.messages) == 1
        assert "64 rows of a 512x128 weight" in caplog.text


class TestCandidates:
    def test_anchors_are_rungs_and_reach_both_ends(self) -> None:
        assert list(ANCHORS) == sorted(set(ANCHORS))
        assert set(ANCHORS) <= set(LADDER)
        assert (ANCHORS[0], ANCHORS[-1]) == (LADDER[0], LADDER[-1])
        for rows in set(LADDER) - set(ANCHORS):
            below, above = neighbours(rows)
            assert below < rows < above
            assert not [a for a in ANCHORS if below < a < above]

    @pytest.mark.parametrize(("rows", "padded"), [(64, ()), (72, ()), (112, (128,)), (320, (384,)), (288, (320,)),
                                                  (576, (640,)), (1_088, (1_152, 1_280)), (1_120, ())])  # fmt: skip
    def test_rows_are_padded_to_fuller_counts_within_a_quarter(self, rows: int, padded: tuple[int, ...]) -> None:
        assert padded_rows(rows) == padded

    def test_tiles_fit_the_shared_memory_of_a_hopper_gpu_and_divide_the_inputs(self) -> None:
        for d in DIMENSIONS.values():
            for n, k in projection_shapes(d):
                for rows in ANCHORS:
                    found = variants((n, k, rows))
                    assert found
                    for v in found:
                        stored = v.rows * v.columns * 2 // (2 if v.halves else 1)
                        assert v.stages * (v.rows + v.columns) * v.depth * 2 + stored <= 226 * 1024, v.name
                        assert k % v.depth == 0
        assert variants((512, 64, 64))
        assert all(v.depth == 64 for v in variants((512, 64, 64)))
        assert not variants((512, 48, 64))

    def test_what_is_offered_starts_with_what_always_exists(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(blas, "codes", lambda n, k, rows, count: ["01", "02"][:count])
        names = offer.candidates((4096, 4096, 320))
        assert names[:2] == (FIXED, CUBLASLT)
        assert {"cublaslt@384", "cublaslt#01", "cublaslt#02"} < set(names)
        assert len(names) == len(set(names))


class TestSearch:
    def test_the_fastest_that_passes_is_chosen_at_every_rung(self) -> None:
        trials = FakeTrials(by_order(TILE_A, CODE, CUBLASLT, FIXED), lambda cell, name: name != TILE_A)
        found = search([SHAPE], trials, offered=offered)
        assert set(found.names) == {(*SHAPE, rows) for rows in LADDER}
        assert {names[0] for names in found.names.values()} == {CODE}
        assert all(TILE_A not in names for names in found.names.values())
        assert trials.prepared >= {TILE_A, TILE_B}
        assert all((cell, names[0]) in trials.tested for cell, names in found.names.items())

    def test_a_kernel_that_fails_once_is_used_nowhere(self) -> None:
        """Also where it was chosen before it failed."""
        bad = (*SHAPE, LADDER[-1])
        trials = FakeTrials(by_order(TILE_A, CUBLASLT), lambda cell, name: (cell, name) != (bad, TILE_A))
        found = search([(256, 128), SHAPE], trials, offered=offered)
        assert found.failed == {TILE_A: (bad,)}
        assert {names[0] for names in found.names.values()} == {CUBLASLT}
        assert all(TILE_A not in names for names in found.names.values())

    def test_the_librarys_choice_is_left_out_only_where_it_fails(self) -> None:
        few = [(*SHAPE, rows) for rows in LADDER if rows <= 128]
        trials = FakeTrials(by_order(CUBLASLT, TILE_A), lambda cell, name: name != CUBLASLT or cell not in few)
        found = search([SHAPE], trials, offered=offered)
        assert {cell for cell, names in found.names.items() if names[0] == TILE_A} == set(few)
        assert {cell for cell, names in found.names.items() if names[0] == CUBLASLT} == set(found.names) - set(few)
        assert sorted(found.failed[CUBLASLT]) == few

    def test_what_cannot_run_is_passed_over_and_not_held_against_it(self) -> None:
        def same(cell: Cell, name: str) -> bool:
            if name == TILE_A and cell[2] > 1_000:
                raise CannotRunError
            return True

        found = search([SHAPE], FakeTrials(by_order(TILE_A, CUBLASLT), same), offered=offered)
        assert found.failed == {}
        assert {names[0] for cell, names in found.names.items() if cell[2] <= 1_000} == {TILE_A}
        assert {names[0] for cell, names in found.names.items() if cell[2] > 1_000} == {CUBLASLT}

    def test_without_any_that_passes_fixed_is_left(self) -> None:
        trials = FakeTrials(by_order(*offered((*SHAPE, 64))[1:]), lambda cell, name: False)
        found = search([SHAPE], trials, offered=offered)
        assert set(found.names.values()) == {(FIXED,)}
        assert tuner.left_to_fixed(found) == [
            "no faster algorithm has the bits of fixed for a 512x128 weight; fixed multiplies it"
        ]
        assert len(tuner.failures(found)) == len(found.failed) >= 5

    def test_between_anchors_only_the_neighbours_winners_and_the_library_are_timed(self) -> None:
        trials = FakeTrials(lambda cell, name: float(name != (TILE_A if cell[2] <= 320 else TILE_B)))
        found = search([SHAPE], trials, offered=offered)
        timed = dict(trials.timed)
        assert set(timed[*SHAPE, 320]) == set(offered((*SHAPE, 320)))
        assert {TILE_A, TILE_B, CUBLASLT} >= set(timed[*SHAPE, 72]) - {FIXED}
        assert TILE_B in timed[*SHAPE, 2_112]
        assert len(timed[*SHAPE, 2_112]) <= 4
        assert found.names[*SHAPE, 72][0] == TILE_A
        assert found.names[*SHAPE, 2_112][0] == TILE_B

    def test_a_neighbours_padding_is_taken_only_where_it_still_pads(self) -> None:
        padded = f"{CUBLASLT}@480"
        trials = FakeTrials(by_order(padded, CUBLASLT))
        search([SHAPE], trials, offered=lambda cell: (FIXED, CUBLASLT, *([padded] if cell[2] == 448 else [])))
        timed = dict(trials.timed)
        assert padded in timed[*SHAPE, 416]
        assert padded not in timed[*SHAPE, 480]

    def test_progress_counts_up_to_its_total(self) -> None:
        steps: list[tuple[int, int]] = []
        search([SHAPE, (256, 128)], FakeTrials(), offered=offered, progress=lambda *step: steps.append(step))
        assert [done for done, _ in steps] == sorted(done for done, _ in steps)
        assert {total for _, total in steps} == {4 * len(LADDER)}
        assert steps[-1][0] == steps[-1][1]

    def test_few_names_are_kept_and_one_holds_for_any_cublas(self) -> None:
        codes = [f"{CUBLASLT}#{i:02x}" for i in range(1, 7)]
        trials = FakeTrials(by_order(*codes, TILE_B))
        found = search([SHAPE], trials, offered=lambda cell: (FIXED, CUBLASLT, *codes, TILE_B))
        assert found.names[*SHAPE, 64] == (*codes[: KEPT - 1], TILE_B)

    def test_what_failed_before_is_not_tried_again(self) -> None:
        trials = FakeTrials(by_order(TILE_A, CUBLASLT, TILE_B))
        known = {TILE_A: [(16, 16, 64)], CUBLASLT: [(*SHAPE, 64), (16, 16, 64)]}
        found = search([SHAPE], trials, failed=known, offered=offered)
        assert found.names[*SHAPE, 64][0] == TILE_B
        assert found.names[*SHAPE, 72][0] == CUBLASLT
        assert not [cell for cell, name in trials.tested if name == TILE_A]
        assert found.failed == {name: tuple(cells) for name, cells in known.items()}

    def test_a_retest_times_nothing_and_takes_the_first_that_passes(self) -> None:
        trials = FakeTrials(same=lambda cell, name: name != TILE_A)
        wanted = {(*SHAPE, 64): (TILE_A, CODE, CUBLASLT), (*SHAPE, 72): (CUBLASLT, TILE_A), (*SHAPE, 80): (TILE_A,)}
        found = retest(wanted, trials)
        assert found.names == {(*SHAPE, 64): (CODE, CUBLASLT), (*SHAPE, 72): (CUBLASLT,), (*SHAPE, 80): (FIXED,)}
        assert not trials.timed
