"""A row of `linear_fixed` has the same bits for every number of rows and wherever it stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ops.kernels.linear import descriptor_kernel, launch_linear_fixed
from ops.linear import linear_default, linear_fixed

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def operands(rows: int, inputs: int, outputs: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """x with rows of very different size and one that cancels, and a fan-in scaled weight."""
    generator = torch.Generator(device).manual_seed(rows + inputs + outputs)
    x = torch.randn(rows, inputs, generator=generator, device=device)
    w = torch.randn(outputs, inputs, generator=generator, device=device) * inputs**-0.5
    x[1::7] *= 1e3
    x[2::7] *= 1e-3
    x[3::7, inputs // 2 :] = -x[3::7, : inputs - inputs // 2]
    w[:, inputs // 2 :] = w[:, : inputs - inputs // 2] + 1e-3 * w[:, inputs // 2 :]
    return x.to(dtype), w.to(dtype)


def moved(x: Tensor, row: int, to: int) -> Tensor:
    """`x` with one row written over another."""
    x = x.clone()
    x[to] = x[row]
    return x


def check_rows(linear: Callable[[Tensor, Tensor], Tensor], x: Tensor, w: Tensor, counts: list[int]) -> None:
    """Every row among the first of `x`, and one row in other places, against the product of all rows."""
    whole = linear(x, w)
    for count in counts:
        assert torch.equal(linear(x[:count].contiguous(), w), whole[:count]), f"{count} rows"
        for to in {0, count // 2, count - 1}:
            out = linear(moved(x[:count], min(3, count - 1), to), w)
            assert torch.equal(out[to], whole[min(3, count - 1)]), f"place {to} of {count}"


@DTYPES
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 48), (256, 192), (200, 16)])
def test_a_row_has_one_set_of_bits_on_the_cpu(dtype: torch.dtype, inputs: int, outputs: int) -> None:
    x, w = operands(130, inputs, outputs, dtype)
    check_rows(linear_fixed, x, w, [1, 2, 3, 15, 16, 17, 33, 63, 64, 65, 127, 128, 129, 130])


@DTYPES
def test_products_equal_the_float64_reference(dtype: torch.dtype) -> None:
    x, w = operands(70, 200, 48, dtype)
    wanted = x.double() @ w.double().T
    scale = (x.double().abs() @ w.double().abs().T).amax(-1, keepdim=True)
    for linear in (linear_fixed, linear_default):
        error = (linear(x, w).double() - wanted).abs()
        rounding = wanted.abs() * torch.finfo(dtype).eps
        assert (error <= rounding + 1e-6 * scale).all()
    assert torch.equal(linear_default(x, w), F.linear(x, w))


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 40, 16), (70, 40, 80), (130, 64, 48)])
def test_the_pointer_kernel_equals_the_cpu_kernel(
    rows: int, inputs: int, outputs: int, device: torch.device, guards: Any
) -> None:
    x, w = operands(rows, inputs, outputs, torch.float32)
    found = launch_linear_fixed(x.to(device), w.to(device)).cpu()
    scale = x.abs() @ w.abs().T
    assert ((found - linear_fixed(x, w)).abs() <= 2e-6 * scale).all()


def test_rows_past_the_end_and_no_rows(device: torch.device) -> None:
    x, w = operands(70, 40, 16, torch.float32)
    memory = torch.cat([x, torch.full_like(x, float("nan"))]).to(device)
    assert torch.equal(launch_linear_fixed(memory[:70], w.to(device)), launch_linear_fixed(x.to(device), w.to(device)))
    assert launch_linear_fixed(memory[:0], w.to(device)).shape == (0, 16)
    assert linear_fixed(x[:0], w).shape == (0, 16)


@DTYPES
def test_operators_keep_the_custom_operator_contract(dtype: torch.dtype) -> None:
    for rows in (1, 63, 65):
        arguments = operands(rows, 64, 48, dtype)
        torch.library.opcheck(linear_fixed, arguments)
        torch.library.opcheck(linear_default, arguments)


@pytest.mark.parametrize(
    ("x", "w", "error", "message"),
    [
        (torch.ones(4, 64).double(), torch.ones(16, 64), TypeError, "x has dtype"),
        (torch.ones(4, 64), torch.ones(16, 64).bfloat16(), TypeError, "w has dtype"),
        (torch.ones(64, 4).t(), torch.ones(16, 64), ValueError, "x has strides"),
        (torch.ones(4, 64), torch.ones(64, 16).t(), ValueError, "w has strides"),
        (torch.ones(4, 64), torch.ones(16, 60), ValueError, "w has shape"),
        (torch.ones(4, 63), torch.ones(16, 63), ValueError, "last dimension of x"),
        (torch.ones(4, 64), torch.ones(15, 64), ValueError, "number of rows of w"),
        (torch.ones(257)[1:].view(4, 64), torch.ones(16, 64), ValueError, "bytes past a multiple of 16"),
    ],
)
def test_what_the_kernel_would_misread_is_refused(x: Tensor, w: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        linear_fixed(x, w)


# Inputs and outputs of every projection: delta-rule in, attention in, both outs, gate/up, down, last layer's q and kv.
PROJECTIONS = {
    "4b": [(2560, 12352), (2560, 10240), (4096, 2560), (2560, 18432), (9216, 2560), (2560, 8192), (2560, 2048)],
    "9b": [(4096, 12352), (4096, 10240), (4096, 4096), (4096, 24576), (12288, 4096), (4096, 8192), (4096, 2048)],
    "27b": [(5120, 16480), (5120, 14336), (6144, 5120), (5120, 34816), (17408, 5120), (5120, 12288), (5120, 2048)],
}


@pytest.mark.gpu
@pytest.mark.parametrize("model", PROJECTIONS)
def test_a_row_has_one_set_of_bits_at_model_sizes(model: str) -> None:
    counts = [*range(1, 131), *range(131, 1101, 97), 1100]
    for inputs, outputs in PROJECTIONS[model]:
        x, w = operands(1100, inputs, outputs, torch.bfloat16, "cuda")
        check_rows(linear_fixed, x, w, counts)


@pytest.mark.gpu
def test_a_row_has_one_set_of_bits_in_float32_on_a_gpu() -> None:
    x, w = operands(300, 500, 80, torch.float32, "cuda")
    check_rows(linear_fixed, x, w, [1, 2, 63, 64, 65, 130])


@pytest.mark.gpu
def test_products_equal_the_float64_reference_on_a_gpu(guards: Any) -> None:
    for inputs, outputs in PROJECTIONS["9b"][:5]:
        x, w = operands(130, inputs, outputs, torch.bfloat16, "cuda")
        wanted = x.double() @ w.double().T
        scale = (x.double().abs() @ w.double().abs().T).amax(-1, keepdim=True)
        error = (linear_fixed(x, w).double() - wanted).abs()
        assert (error <= wanted.abs() * 2**-8 + 1e-5 * scale).all()


@pytest.mark.gpu
def test_captured_equals_eager_with_one_binary_for_all_row_counts() -> None:
    w = operands(1, 4096, 12352, torch.bfloat16, "cuda")[1]
    linear_fixed(operands(1, 4096, 12352, torch.bfloat16, "cuda")[0], w)
    binaries = descriptor_kernel.device_caches[torch.cuda.current_device()][0]
    before = len(binaries)
    for rows in (1, 16, 64, 1000):
        x, _ = operands(rows, 4096, 16, torch.bfloat16, "cuda")
        buffer = torch.zeros_like(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = linear_fixed(buffer, w)
        buffer.copy_(x)
        graph.replay()
        assert torch.equal(captured, linear_fixed(x, w))
    assert len(binaries) == before


@pytest.mark.gpu
def test_the_library_alone_fails_this_check() -> None:
    """The control: left alone the library splits K where rows are few, and a row's bits move with their number."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("seen with compute capability 9.0; what the library picks elsewhere is its own affair")
    x, w = operands(4096, 12288, 4096, torch.bfloat16, "cuda")
    with pytest.raises(AssertionError, match="rows"):
        check_rows(linear_default, x, w, [1, 16, 64, 128])
