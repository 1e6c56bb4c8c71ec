"""How the CPU kernels keep a row's bits independent of its neighbours: fixed row tiles, padded with zeros.

ATen rounds the vector body and the scalar tail of an elementwise loop differently, and splits large loops between
threads at any element. Tiles whose element count is a multiple of the vector width and below the threading
threshold have neither a tail nor a split, so a row gives the same bits wherever it stands.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

_library = torch.library.Library("forkgraph", "FRAGMENT")  # type: ignore[no-untyped-call]

_SERIAL_ELEMENTS = 32_768  # at::internal::GRAIN_SIZE: loops below this run on one thread
_VECTOR = 64  # elements; covers two unrolled AVX-512 registers of bf16


def cpu_kernel(name: str) -> Callable[[Kernel], Kernel]:
    """Register the CPU kernel of the operator `name`.

    What `CustomOpDef.register_kernel` does, but without the wrapper that imports the compiler at the first call: a
    first answer on a CPU would wait seconds for it.
    """

    def register(kernel: Kernel) -> Kernel:
        @wraps(kernel)
        def as_given(*arguments: Any) -> Any:
            if not torch.is_autocast_enabled("cpu"):
                return kernel(*arguments)
            with torch.autocast("cpu", enabled=False):  # else it would recast what the kernel multiplies
                return kernel(*arguments)

        _library.impl(name, as_given, "CPU")  # type: ignore[no-untyped-call]
        return kernel

    return register


def tile_rows(width: int) -> int:
    """Rows of one elementwise tile over rows of `width` elements."""
    rows = 64
    while rows > 1 and (rows * width >= _SERIAL_ELEMENTS or rows * width % _VECTOR):
        rows //= 2
    return rows


def pad_rows(x: Tensor, multiple: int) -> Tensor:
    """Rows up to the next multiple, zeros below; the tensor itself when it already fits."""
    missing = -x.shape[0] % multiple
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x


def by_row_tiles(fn: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
    """`fn` over fixed tiles of rows of every input [R, ...]; the results are joined and cut back to R rows."""
    rows = inputs[0].shape[0]
    tile = min(tile_rows(max(x[0].numel() for x in inputs)), 64) if rows else 64
    tiles = [torch.split(pad_rows(x.contiguous(), tile), tile) for x in inputs]
    parts = [fn(*pieces) for pieces in zip(*tiles, strict=True)]
    parts[-1] = tuple(x[: rows - (len(parts) - 1) * tile] for x in parts[-1])
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))
