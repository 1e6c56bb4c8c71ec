"""Operators over rows that stand alone: exact against float64, and a row's bits know nothing of its neighbours.

A case names an operator, its kernel's launcher and its float64 reference over the same arguments, the first of which
are per row. Kernels run in the interpreter where there is no GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.add_rms_norm import add_rms_norm, add_rms_norm_reference
from ops.add_rows import add_rows, add_rows_reference
from ops.checks import check_separate, check_tables
from ops.gated_rms_norm import gated_rms_norm, gated_rms_norm_reference
from ops.kernels import rows as kernels
from ops.silu_mul import silu_mul, silu_mul_reference
from ops.tables import READ_ROWS, ROW_TOKEN, TABLE_WORDS
from ops.take_rows import take_rows, take_rows_reference

EPS = 1e-6
TOLERANCE = 4e-6
"""Relative, of float32 arithmetic with a GPU's approximate exp2 and rsqrt."""


@dataclasses.dataclass(frozen=True)
class Case:
    operator: Callable[..., Any]
    launch: Callable[..., Any]
    reference: Callable[..., Any]
    rows: tuple[Tensor, ...]
    rest: tuple[Any, ...]
    roundings: int = 1

    def call(self, fn: Callable[..., Any], rows: tuple[Tensor, ...] | None = None) -> tuple[Tensor, ...]:
        result = fn(*(self.rows if rows is None else rows), *self.rest)
        return result if isinstance(result, tuple) else (result,)


def make(name: str, count: int, dtype: torch.dtype, device: torch.device, sizes: dict[str, int]) -> Case:
    generator = torch.Generator().manual_seed(count)

    def noise(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        scale = torch.exp(torch.randn(shape[0], *[1] * (len(shape) - 1), generator=generator))
        return (torch.randn(*shape, generator=generator) * scale).to(dtype).to(device)

    if name == "add_rms_norm":
        h = sizes["hidden"]
        return Case(
            add_rms_norm, kernels.launch_add_rms_norm, add_rms_norm_reference,
            (noise(count, h), noise(count, h)), (noise(1, h)[0], EPS),
        )  # fmt: skip
    if name == "gated_rms_norm":
        dv, values, offset = sizes["dim"], sizes["dim"] * sizes["value_heads"], sizes["z_offset"]
        return Case(
            gated_rms_norm, kernels.launch_gated_rms_norm, gated_rms_norm_reference,
            (noise(count, values), 4 * noise(count, offset + values + 16)),
            (noise(1, dv, dtype=torch.float32)[0], EPS, offset),
        )  # fmt: skip
    if name == "add_rows":
        n = sizes["z_offset"] + sizes["hidden"]
        return Case(add_rows, kernels.launch_add_rows, add_rows_reference, (noise(count, n), noise(count, n)), ())
    return Case(
        silu_mul, kernels.launch_silu_mul, silu_mul_reference, (4 * noise(count, 2 * sizes["intermediate"]),), (), 2
    )


NAMES = ("add_rms_norm", "add_rows", "gated_rms_norm", "silu_mul")
SMALL = {"hidden": 80, "dim": 16, "value_heads": 3, "z_offset": 80, "intermediate": 96}
NINE = {"hidden": 4096, "dim": 128, "value_heads": 32, "z_offset": 8192, "intermediate": 12288}
TWENTY_SEVEN = {"hidden": 5120, "dim": 128, "value_heads": 48, "z_offset": 10240, "intermediate": 17408}
FOUR = {"hidden": 2560, "dim": 128, "value_heads": 32, "z_offset": 8192, "intermediate": 9216}


def ulps(value: Tensor, exact: Tensor) -> Tensor:
    """Distance in units of the last place of bfloat16 between a result and the rounded float64 value.

    Below 1e-30, where e^-x has overflowed float32, everything counts as zero.
    """

    def ordered(x: Tensor) -> Tensor:
        bits = torch.where(x.abs() < 1e-30, 0.0, x).view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return (ordered(value) - ordered(exact.to(torch.bfloat16))).abs()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kernel", [False, True], ids=["operator", "kernel"])
def test_float32_rows_equal_float64(name: str, kernel: bool, device: torch.device) -> None:
    case = make(name, 5, torch.float32, device, SMALL)
    for got, exact in zip(case.call(case.launch if kernel else case.operator), case.call(case.reference), strict=True):
        torch.testing.assert_close(got.double(), exact.double(), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_operators_are_rounded_float64(name: str, device: torch.device) -> None:
    case = make(name, 67, torch.bfloat16, device, SMALL)
    for got, exact in zip(case.call(case.operator), case.call(case.reference), strict=True):
        distance = ulps(got, exact)
        assert int(distance.max()) <= case.roundings
        assert float((distance > 0).float().mean()) < 1e-2


@pytest.mark.parametrize("name", NAMES)
def test_kernel_rows_stand_alone(name: str, device: torch.device, guards: Any) -> None:
    case = make(name, 6, torch.float32, device, SMALL)
    together = case.call(case.launch)
    order = torch.tensor([4, 0, 5, 2])
    packed = [x[order].clone() for x in case.rows]
    for x in packed:
        x[2] = float("nan")
        x[3] = 1e30
    for whole, part in zip(together, case.call(case.launch, tuple(packed)), strict=True):
        assert torch.equal(whole[order[:2]], part[:2])
        assert not torch.equal(whole[order[2:]].nan_to_num(), part[2:].nan_to_num()), "the poison did not arrive"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_operator_rows_stand_alone(name: str, dtype: torch.dtype, device: torch.device) -> None:
    case = make(name, 130, dtype, device, SMALL)
    together = case.call(case.operator)
    for rows in (torch.arange(1), torch.arange(129), torch.arange(63, 66), torch.randperm(130)[:77]):
        alone = case.call(case.operator, tuple(x[rows] for x in case.rows))
        assert all(torch.equal(whole[rows], part) for whole, part in zip(together, alone, strict=True))


@pytest.mark.parametrize("kernel", [False, True], ids=["operator", "kernel"])
def test_take_rows_copies(kernel: bool, device: torch.device) -> None:
    tables = torch.zeros(TABLE_WORDS, dtype=torch.int32)
    tables[ROW_TOKEN : ROW_TOKEN + 5] = torch.tensor([3, 0, 6, 6, 1])
    tables[READ_ROWS : READ_ROWS + 2] = torch.tensor([5, 2])
    source = torch.randn(7, 40)
    source[4] = float("nan")  # not picked
    fn = kernels.launch_take_rows if kernel else take_rows
    for section, rows in ((ROW_TOKEN, 5), (READ_ROWS, 3), (ROW_TOKEN, 0)):
        picked = fn(source.to(device), tables.to(device), section, rows)
        assert torch.equal(picked.cpu(), take_rows_reference(source, tables, section, rows))


@pytest.mark.parametrize("count", [0, 1, 65])
@pytest.mark.parametrize("name", [*NAMES, "take_rows"])
def test_operator_contract(name: str, count: int, device: torch.device) -> None:
    if name == "take_rows":
        tables = torch.zeros(TABLE_WORDS, dtype=torch.int32, device=device)
        torch.library.opcheck(take_rows, (torch.randn(4, 16, device=device), tables, ROW_TOKEN, count))
    else:
        case = make(name, count, torch.float32, device, SMALL)
        torch.library.opcheck(case.operator, (*case.rows, *case.rest))


def shifted(x: Tensor) -> Tensor:
    """The same values, starting one element past an aligned address."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def test_wrong_arguments_are_refused_by_name(device: torch.device) -> None:
    x, w = torch.randn(4, 64, device=device), torch.randn(64, device=device)
    tables = torch.zeros(TABLE_WORDS, dtype=torch.int32, device=device)
    head = torch.randn(16, device=device)
    wrong: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: add_rms_norm(x.half(), x, w, EPS), TypeError, r"add_rms_norm: x has dtype torch.float16"),
        (lambda: add_rms_norm(x, x.bfloat16(), w, EPS), TypeError, r"delta has dtype torch.bfloat16, wants"),
        (lambda: add_rms_norm(x, x[:3], w, EPS), ValueError, r"delta has shape \[3, 64\], wants \[4, 64\]"),
        (lambda: add_rms_norm(x, x, w[:48], EPS), ValueError, r"weight has shape"),
        (lambda: add_rms_norm(x.t(), x, w, EPS), ValueError, r"x has strides \(1, 64\).*contiguous"),
        (lambda: add_rms_norm(x[:, :32], x, w, EPS), ValueError, r"x has strides \(64, 1\)"),
        (lambda: add_rms_norm(shifted(x), x, w, EPS), ValueError, r"x starts at 4 bytes past a multiple of 16"),
        (lambda: add_rms_norm(x[:, :30].clone(), x, w, EPS), ValueError, r"last dimension of x is 30"),
        (lambda: add_rows(x, x[:3]), ValueError, r"add_rows: delta has shape \[3, 64\], wants \[4, 64\]"),
        (lambda: add_rows(x[:, :30].clone(), x), ValueError, r"last dimension of x is 30"),
        (lambda: check_tables("op", tables, torch.device("meta")), ValueError, r"op: tables is on .* meta"),
        (lambda: check_separate("op", a=x, b=w, c=x[1:]), ValueError, r"op: a and c share memory"),
        (lambda: gated_rms_norm(x, x, head, EPS, 8), ValueError, r"z_offset .* is 72, wants at most 64"),
        (lambda: gated_rms_norm(x, x, head, EPS, -1), ValueError, r"z_offset is -1"),
        (lambda: gated_rms_norm(x[:, :32].clone(), x, head, EPS, 3), ValueError, r"z_offset is 3"),
        (lambda: gated_rms_norm(x[:, :24].clone(), x, head, EPS, 0), ValueError, r"last dimension of o is 24"),
        (lambda: gated_rms_norm(x, x, head.double(), EPS, 0), TypeError, r"weight has dtype"),
        (lambda: silu_mul(x[:, :12].clone()), ValueError, r"last dimension of gate_up is 12"),
        (lambda: silu_mul(x[0]), ValueError, r"gate_up has shape \[64\]"),
        (lambda: take_rows(x, tables.long(), 0, 1), TypeError, r"tables has dtype torch.int64"),
        (lambda: take_rows(x, tables[:-4], 0, 1), ValueError, r"tables has shape"),
        (lambda: take_rows(x, tables, TABLE_WORDS, 1), ValueError, r"end of the section"),
        (lambda: take_rows(x, tables, -1, 1), ValueError, r"section is -1"),
    ]
    for call, error, text in wrong:
        with pytest.raises(error, match=text):
            call()


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [NINE, TWENTY_SEVEN, FOUR], ids=["9b", "27b", "4b"])
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_rows_at_full_size(name: str, sizes: dict[str, int], device: torch.device, guards: Any) -> None:
    case = make(name, 193, torch.bfloat16, device, sizes)
    together = case.call(case.operator)
    for got, exact in zip(together, case.call(case.reference), strict=True):
        distance = ulps(got, exact)
        assert int(distance.max()) <= case.roundings
        assert float((distance > 0).float().mean()) < 1e-2
    for rows in (torch.arange(1), torch.arange(64), torch.arange(100, 165), torch.randperm(193)[:120]):
        part = [x[rows].clone() for x in case.rows]
        for x in part:
            x[1:] = x[1:].roll(1, 0)  # other neighbours for the first row
        alone = case.call(case.operator, tuple(part))
        assert all(torch.equal(whole[rows[:1]], some[:1]) for whole, some in zip(together, alone, strict=True))
        alone = case.call(case.operator, tuple(x[rows].clone() for x in case.rows))
        assert all(torch.equal(whole[rows], some) for whole, some in zip(together, alone, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_one_binary_serves_every_row_count(name: str, device: torch.device) -> None:
    kernel = getattr(kernels, f"{name}_kernel")
    binaries = kernel.device_caches[device.index or 0][0]

    def run(count: int) -> int:
        case = make(name, count, torch.bfloat16, device, NINE)
        case.call(case.operator)
        return len(binaries)

    first = run(64)
    assert [run(count) for count in (1, 15, 16, 17, 130, 1000)] == [first] * 6


@pytest.mark.gpu
def test_one_binary_takes_rows_of_every_section(device: torch.device) -> None:
    source, tables = torch.randn(9, 4096, device=device), torch.zeros(TABLE_WORDS, dtype=torch.int32, device=device)
    binaries = kernels.take_rows_kernel.device_caches[device.index or 0][0]
    take_rows(source, tables, ROW_TOKEN, 64)
    first = len(binaries)
    for section, rows in ((READ_ROWS, 1), (READ_ROWS, 17), (ROW_TOKEN, 1000)):
        take_rows(source, tables, section, rows)
    assert len(binaries) == first


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_captured_equals_eager(name: str, device: torch.device) -> None:
    case = make(name, 65, torch.bfloat16, device, NINE)
    eager = case.call(case.operator)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = case.call(case.operator)
    for x in captured:
        x.fill_(float("nan"))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(eager, captured, strict=True))


@pytest.mark.gpu
def test_offsets_pass_two_to_the_31(device: torch.device) -> None:
    source = torch.empty(2**31 // 4096 + 3, 4096, dtype=torch.bfloat16, device=device)
    source[-1] = torch.arange(4096, device=device)
    tables = torch.zeros(TABLE_WORDS, dtype=torch.int32, device=device)
    tables[ROW_TOKEN] = len(source) - 1
    assert torch.equal(take_rows(source, tables, ROW_TOKEN, 1)[0], source[-1])
