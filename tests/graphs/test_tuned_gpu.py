"""The tiles of tuned products: in the interpreter, compiled for a GPU that is not here, and on one that is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.load.dimensions import DIMENSIONS
from engine.load.projections import projection_shapes
from graphs.graph import capture_graph
from graphs.tuning import candidates as offer
from graphs.tuning import trials as trials_module
from graphs.tuning import tuner
from graphs.tuning.trials import GpuTrials
from ops import blas, linear_tuned
from ops.linear import linear_fixed
from ops.linear_tuned import CUBLASLT, FIXED, product
from ops.variant import Variant

SMALL = [
    Variant(rows=16, columns=32, depth=32, warps=4, stages=2),
    Variant(rows=32, columns=16, depth=16, warps=4, stages=2, swapped=True),
    Variant(rows=16, columns=64, depth=32, warps=4, stages=2, halves=True),
    Variant(rows=16, columns=16, depth=32, warps=4, stages=2, persistent=True),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter stands in where there is no GPU")
@pytest.mark.parametrize("variant", SMALL, ids=lambda v: v.name)
@pytest.mark.parametrize(("rows", "columns", "inputs"), [(40, 80, 96), (1, 16, 32), (150, 32, 64)])
def test_a_tile_multiplies_as_fixed_does(
    variant: Variant, rows: int, columns: int, inputs: int, guards: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ops.kernels.linear import launch_linear_fixed
    from ops.kernels.linear_variants import launch_variant

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: mock.Mock(multi_processor_count=3))
    generator = torch.Generator().manual_seed(rows)
    x, w = (torch.randn(n, inputs, generator=generator) for n in (rows, columns))
    out, fixed = launch_variant(variant, x, w), launch_linear_fixed(x, w)
    exact = x.double() @ w.double().T
    assert out.shape == fixed.shape
    assert (out - exact).norm() <= 1e-6 * exact.norm()
    assert (out - fixed).norm() <= 1e-6 * exact.norm()


COMPILE = """
import json, torch
from tests.ops.offline_compile import caught_launches, compile_one, empty
from graphs.tuning.candidates import FEW_ROWS, MANY_ROWS, SEVERAL_ROWS
from ops.kernels.linear_variants import launch_variant
kinds = {}
for v in (*FEW_ROWS, *SEVERAL_ROWS, *MANY_ROWS):
    kinds.setdefault((v.swapped, v.halves, v.persistent, v.early), v)
for v in kinds.values():
    ((source, options),) = caught_launches(lambda: launch_variant(v, empty(100, 4096), empty(12352, 4096)), 90)
    found = compile_one("variant", "9b", 90, source, options)
    print(json.dumps([v.name, found.shared, found.stack]))
"""


def test_one_tile_of_each_kind_compiles_for_hopper_without_spilling() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=600, check=False,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) >= 6
    for name, shared, stack in found:
        assert shared <= 227 * 1024, name
        assert stack == 0, name


# On a GPU.

CUDA = torch.device("cuda", 0)
SHAPES_9B = ((24_576, 4_096), (4_096, 12_288), (12_352, 4_096), (4_096, 4_096))


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def bfloat16(*shape: int) -> Tensor:
    return torch.randn(*shape, device=CUDA).bfloat16()


def switches_now() -> tuple[object, ...]:
    matmul = torch.backends.cuda.matmul
    return (
        torch.backends.cuda.preferred_blas_library(),
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction_split_k,
    )


@pytest.fixture(scope="module")
def trials() -> Iterator[GpuTrials]:
    with torch.cuda.device(CUDA):
        trials = GpuTrials(CUDA)
        yield trials
        trials.close()


@pytest.fixture(scope="module")
def tuned_9b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder in which 9B has been prepared."""
    folder = tmp_path_factory.mktemp("cache")
    tuner.prepare(projection_shapes(DIMENSIONS["9b"]), device=CUDA, cache_dir=folder)
    return folder


@pytest.mark.gpu
def test_the_librarys_own_choice_breaks_equality() -> None:
    """At 12,288 inputs it splits K for few rows: the comparison must see that, or it could not fail at all."""
    w = bfloat16(4_096, 12_288) * 12_288**-0.5
    x = bfloat16(4_096, 12_288)
    fixed = linear_fixed(x, w)
    broken = [rows for rows in (64, 96, 128) if not same(F.linear(x[:rows], w), fixed[:rows])]
    assert broken


@pytest.mark.gpu
def test_the_byte_test_sees_it_too(trials: GpuTrials, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = trials_module.product
    monkeypatch.setattr(trials_module, "product", lambda name: F.linear if name == "torch" else plain(name))
    assert not all(trials.same_bytes((4_096, 12_288, rows), "torch") for rows in (64, 96, 128))


@pytest.mark.gpu
def test_the_librarys_choice_through_our_handle_has_the_bits_of_fixed(trials: GpuTrials) -> None:
    """Without split K it sums as `fixed` does, at rows where torch's own choice does not."""
    for n, k in SHAPES_9B:
        for rows in (64, 72, 96, 128, 320, 1_088, 3_136):
            assert trials.same_bytes((n, k, rows), CUBLASLT), (n, k, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [64, 72, 128, 320, 512, 1_088, 3_136])
def test_every_algorithm_chosen_has_the_bits_of_fixed_at_its_rung(tuned_9b: Path, rows: int) -> None:
    """Through the operator, in eager and from a graph, with data of its own."""
    linear_tuned.missed.clear()
    tuner.prepare(projection_shapes(DIMENSIONS["9b"]), device=CUDA, cache_dir=tuned_9b)
    for n, k in projection_shapes(DIMENSIONS["9b"]):
        w, x = bfloat16(n, k) * k**-0.5, bfloat16(rows, k)
        expected = linear_fixed(x, w)
        assert same(linear_tuned.linear_tuned(x, w), expected), (n, k)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = linear_tuned.linear_tuned(x, w)
        for scale in (1.0, 1e3):
            x.copy_(bfloat16(rows, k) * scale)
            out.fill_(float("nan"))
            graph.replay()
            assert same(out, linear_fixed(x, w)), (n, k, scale)
    assert not linear_tuned.missed


@pytest.mark.gpu
def test_a_row_that_is_not_finite_spoils_no_other(tuned_9b: Path) -> None:
    tuner.prepare(projection_shapes(DIMENSIONS["9b"]), device=CUDA, cache_dir=tuned_9b)
    for n, k in SHAPES_9B:
        w, x = bfloat16(n, k) * k**-0.5, bfloat16(320, k)
        clean = linear_tuned.linear_tuned(x, w)
        x[7], x[100] = float("nan"), float("inf")
        spoilt = linear_tuned.linear_tuned(x, w)
        others = [i for i in range(320) if i not in (7, 100)]
        assert same(spoilt[others], clean[others])


@pytest.mark.gpu
def test_a_warm_start_runs_no_product(tuned_9b: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(*_: object) -> None:
        raise AssertionError("trials were opened")

    monkeypatch.setattr(tuner, "open_trials", nobody)
    tuner.prepare(projection_shapes(DIMENSIONS["9b"]), device=CUDA, cache_dir=tuned_9b)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", list(dict.fromkeys((*offer.FEW_ROWS, *offer.SEVERAL_ROWS, *offer.MANY_ROWS))),
                         ids=lambda v: v.name)  # fmt: skip
def test_every_tile_has_the_bits_of_fixed(trials: GpuTrials, variant: Variant) -> None:
    """At whole and partial tiles of rows and columns."""
    for cell in ((12_352, 4_096, 72), (16_480, 5_120, 320), (4_096, 12_288, 64), (4_096, 4_096, 1_120)):
        assert trials.same_bytes(cell, variant.name), cell


@pytest.mark.gpu
def test_codes_are_products_and_mostly_have_the_bits_of_fixed(trials: GpuTrials) -> None:
    for n, k in SHAPES_9B:
        for rows in (64, 320, 3_136):
            codes = blas.codes(n, k, rows, 8)
            assert codes
            w, x = bfloat16(n, k) * k**-0.5, bfloat16(rows, k)
            out = blas.coded(codes[0])(x, w)
            exact = x[:5].double() @ w.double().T
            assert (out[:5] - exact).norm() <= 5e-3 * exact.norm()
            assert any(trials.same_bytes((n, k, rows), f"{CUBLASLT}#{code}") for code in codes)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [64, 320, 1_088])
def test_whatever_is_offered_can_be_timed(trials: GpuTrials, rows: int) -> None:
    cell = (4_096, 4_096, rows)
    names = offer.candidates(cell)
    times = trials.times(cell, names, careful=True)
    assert {FIXED, CUBLASLT, *(v.name for v in offer.variants(cell))} <= set(times)
    floor = 1e6 * max(2 * 4_096 * 4_096 / 5e12, 2 * rows * 4_096 * 4_096 / 1e15)
    assert all(us > 0.8 * floor for us in times.values()), "faster than the memory or the tensor cores"


@pytest.mark.gpu
def test_d33_products_neither_set_nor_obey_a_switch_of_the_process() -> None:
    x, w = bfloat16(64, 12_288), bfloat16(4_096, 12_288)
    code = blas.codes(4_096, 12_288, 64, 1)[0]
    names = (FIXED, CUBLASLT, f"{CUBLASLT}@128", f"{CUBLASLT}#{code}")
    expected = {name: product(name)(x, w) for name in names}
    matmul = torch.backends.cuda.matmul
    library = torch.backends.cuda.preferred_blas_library()
    try:
        for reduced in (False, True):
            for preferred in ("cublas", "cublaslt"):
                torch.backends.cuda.preferred_blas_library(preferred)
                matmul.allow_bf16_reduced_precision_reduction = reduced
                torch.set_float32_matmul_precision("medium" if reduced else "highest")
                before = switches_now()
                for name in names:
                    assert same(product(name)(x, w), expected[name]), (name, reduced, preferred)
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        out = product(name)(x, w)
                    graph.replay()
                    assert same(out, expected[name])
                assert switches_now() == before
    finally:
        torch.backends.cuda.preferred_blas_library(library)
        matmul.allow_bf16_reduced_precision_reduction = True
        torch.set_float32_matmul_precision("highest")


@pytest.mark.gpu
def test_the_library_is_the_one_that_torch_has_loaded() -> None:
    assert torch.version.cuda is not None
    major = torch.version.cuda.partition(".")[0]
    (path,) = blas._loaded(f"libcublasLt.so.{major}")
    assert Path(path).exists()
    assert str(blas.version()).startswith(major)


@pytest.mark.gpu
def test_what_the_library_chose_is_captured_without_asking_again(monkeypatch: pytest.MonkeyPatch) -> None:
    w, x = bfloat16(4_096, 4_096) * 4_096**-0.5, bfloat16(96, 4_096)
    expected = linear_fixed(x, w)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        blas.library_choice(x, w)

        def asked(*_: object) -> None:
            raise AssertionError("the library was asked during a capture")

        monkeypatch.setattr(blas, "_heuristics", asked)
        graph, out = capture_graph(lambda: blas.library_choice(x, w), pool=None, attempts=1)
        out.fill_(float("nan"))
        graph.replay()
        assert same(out, expected)
    stream.synchronize()


@pytest.mark.gpu
def test_the_library_may_be_asked_inside_a_capture_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """After its kernel has run once: what is captured then is the same product."""
    w, x = bfloat16(4_096, 4_096) * 4_096**-0.5, bfloat16(2_048, 4_096)
    expected = linear_fixed(x, w)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        blas.library_choice(x, w)
        stream.synchronize()
        monkeypatch.setattr(blas, "_choice", blas._once(blas._choice.__wrapped__))
        graph, out = capture_graph(lambda: blas.library_choice(x, w), pool=None, attempts=1)
        out.fill_(float("nan"))
        graph.replay()
        assert same(out, expected)
    stream.synchronize()


@pytest.mark.gpu
def test_many_threads_get_the_same_bits() -> None:
    """Each on a stream of its own, at sizes that all of them ask for first."""
    w = bfloat16(2_048, 4_096) * 4_096**-0.5
    xs = {rows: bfloat16(rows, 4_096) for rows in (72, 104, 328, 712)}
    expected = {rows: linear_fixed(x, w) for rows, x in xs.items()}
    torch.cuda.synchronize()

    def work(_: int) -> bool:
        with torch.cuda.stream(torch.cuda.Stream()):
            found = [same(blas.library_choice(x, w), expected[rows]) for rows, x in xs.items() for _ in range(20)]
        return all(found)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


@pytest.mark.gpu
def test_the_operator_checks_what_it_is_given() -> None:
    x, w = bfloat16(64, 128), bfloat16(64, 128)
    with pytest.raises(TypeError, match=r"linear_tuned: x has dtype torch\.float32"):
        linear_tuned.linear_tuned(x.float(), w.float())
    shifted = bfloat16(65 * 128)[16 : 16 + 64 * 128].view(64, 128)
    with pytest.raises(ValueError, match="must start at multiples of 256 bytes"):
        linear_tuned.linear_tuned(shifted, w)
