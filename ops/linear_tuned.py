"""The `tuned` product: for each weight shape and row count, the fastest algorithm that has the canonical bits.

Which one that is stands in a table that `install` fills before the first call. An algorithm is known by its name:

    fixed             the tile that defines the bits (ops/linear.py)
    cublaslt          cuBLASLt's own choice for the row count among the algorithms that do not split K (ops/blas.py)
    cublaslt#CODE     one cuBLASLt algorithm
    tile ...          one Triton tile, for instance `tile 64x128x64 w4 s4 swapped`
    NAME@ROWS         any of these over that many rows, the ones past the end left undefined
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ops import blas
from ops.checks import check_multiple, check_row_pitch, check_tensor
from ops.cpu import cpu_kernel
from ops.sizes import COLUMN_UNIT
from ops.variant import Variant

Product = Callable[[Tensor, Tensor], Tensor]
"""x [R, K] and w [N, K] to [R, N]."""
Cell = tuple[int, int, int]
"""N, K and R: rows of w, columns of both, rows of x."""

FIXED, CUBLASLT = "fixed", "cublaslt"
ALIGNMENT = 256
"""Bytes that x and w are aligned to. The library may choose by alignment, so there is one only."""

logger = logging.getLogger("forkgraph")

missed: Counter[tuple[int, Cell]] = Counter()
"""Calls per device index and cell that the table did not know. They ran `fixed`, which has the same bits."""

_products: dict[tuple[int, Cell], Product] = {}
"""Of every engine of the process. Cells are added and replaced, by products with the same bits, and never removed."""
_missing = threading.Lock()


def product(name: str) -> Product:
    """The algorithm of this name. Raises ValueError for a name that is none."""
    inner, _, rows = name.partition("@")
    if rows:
        return _padded(product(inner), int(rows))
    if inner == FIXED:
        return _fixed
    if inner == CUBLASLT:
        return blas.library_choice
    if inner.startswith(f"{CUBLASLT}#"):
        return blas.coded(inner.partition("#")[2])
    return _variant(Variant.named(inner))


def is_one_kernel(name: str) -> bool:
    """Whether the name stands for the same kernel at every row count; the library's own choice does not."""
    return name.partition("@")[0] != CUBLASLT


def install(names: Mapping[Cell, str], device: torch.device) -> None:
    """Make `linear_tuned` on this CUDA device use these algorithms, beside those installed before."""
    index = torch.cuda.current_device() if device.index is None else device.index
    products = {name: product(name) for name in set(names.values())}
    _products.update({(index, cell): products[name] for cell, name in names.items()})


def chosen(device: int, cell: Cell) -> Product:
    """What runs there. For a cell that was never installed `fixed`, which is counted in `missed` and said once."""
    found = _products.get((device, cell))
    if found is not None:
        return found
    with _missing:
        first = not missed
        missed[device, cell] += 1
    if first:
        columns, inputs, rows = cell
        logger.warning(
            "gemm=tuned: %d rows of a %dx%d weight were never tuned; fixed multiplies them and any others like them, "
            "with the same bits", rows, columns, inputs,
        )  # fmt: skip
    return _fixed


@torch.library.custom_op("forkgraph::linear_tuned", mutates_args=(), device_types="cuda")
def linear_tuned(x: Tensor, w: Tensor) -> Tensor:
    """x [R, K] times the transpose of w [N, K], both bfloat16 -> [R, N] with the bits of `linear_fixed`.

    For CUDA only. Raises TypeError for a dtype, ValueError for a shape, stride, alignment or device.
    """
    check_tensor("linear_tuned", "x", x, (None, None), torch.bfloat16, x.device)
    check_row_pitch("linear_tuned", "x", x)
    check_tensor("linear_tuned", "w", w, (None, x.shape[1]), torch.bfloat16, x.device)
    check_multiple("linear_tuned", "the number of rows of w", w.shape[0], COLUMN_UNIT)
    if (x.data_ptr() | w.data_ptr()) % ALIGNMENT:
        raise ValueError(
            f"linear_tuned: x and w must start at multiples of {ALIGNMENT} bytes; pass tensors of their own (.clone())"
        )
    return chosen(x.device.index, (w.shape[0], w.shape[1], x.shape[0]))(x, w)


@cpu_kernel("linear_tuned")
def _(x: Tensor, w: Tensor) -> Tensor:
    raise ValueError("linear_tuned: x is on the CPU, where nothing is tuned; use linear_fixed, which has the same bits")


@linear_tuned.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[0])


def _fixed(x: Tensor, w: Tensor) -> Tensor:
    from ops.kernels.linear import launch_linear_fixed

    return launch_linear_fixed(x, w)


def _variant(variant: Variant) -> Product:
    def tile(x: Tensor, w: Tensor) -> Tensor:
        from ops.kernels.linear_variants import launch_variant

        return launch_variant(variant, x, w)

    return tile


def _padded(inner: Product, rows: int) -> Product:
    def padded(x: Tensor, w: Tensor) -> Tensor:
        more = x.new_empty(rows, x.shape[1])
        more[: x.shape[0]] = x
        return inner(more, w)[: x.shape[0]]

    return padded
