"""What every operator asks of its arguments before it runs, said in words that name the remedy.

A kernel is one binary whose loads assume dense rows and 16-byte alignment, so anything else is an error here rather
than garbage there. Wrong types and dtypes raise TypeError, everything else ValueError.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ops.sizes import COLUMN_UNIT
from ops.tables import TABLE_WORDS

VECTOR_BYTES = 16
"""Bytes: one vector load."""
STORAGE = (torch.bfloat16, torch.float32)
"""Dtypes a model may be stored in."""


def check_tensor(
    op: str,
    name: str,
    x: Tensor,
    shape: tuple[int | None, ...],
    dtype: torch.dtype | tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """`x` has this shape (None: any size), one of these dtypes, dense rows, 16-byte alignment and lives on `device`."""
    allowed = dtype if isinstance(dtype, tuple) else (dtype,)
    if x.dtype not in allowed:
        wanted = " or ".join(str(d) for d in allowed)
        raise TypeError(f"{op}: {name} has dtype {x.dtype}, wants {wanted}; convert it with .to()")
    if x.device != device:
        raise ValueError(f"{op}: {name} is on {x.device}, the other arguments on {device}; move it with .to()")
    if x.dim() != len(shape) or any(want not in (None, have) for want, have in zip(shape, x.shape, strict=True)):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{op}: {name} has shape {list(x.shape)}, wants [{wanted}]; pass a tensor of that shape")
    if not x.is_contiguous():
        raise ValueError(f"{op}: {name} has strides {x.stride()}, wants dense rows; call .contiguous() on it first")
    if x.data_ptr() % VECTOR_BYTES:
        raise ValueError(
            f"{op}: {name} starts at {x.data_ptr() % VECTOR_BYTES} bytes past a multiple of {VECTOR_BYTES}; "
            "pass a tensor of its own (.clone()), not a slice that starts inside a row"
        )


def check_tables(op: str, tables: Tensor, device: torch.device) -> None:
    """`tables` is one block of a pass (ops/tables.py)."""
    check_tensor(op, "tables", tables, (TABLE_WORDS,), torch.int32, device)


def check_multiple(op: str, name: str, value: int, of: int) -> None:
    """`value`, a size that sets the row pitch or a column offset, is a positive multiple of `of`."""
    if value <= 0 or value % of:
        raise ValueError(f"{op}: {name} is {value}, wants a positive multiple of {of}; pad that dimension")


def check_row_pitch(op: str, name: str, x: Tensor) -> None:
    """Every row of `x` starts at a multiple of 16 bytes, so that a kernel may load it in vectors."""
    check_multiple(op, f"the last dimension of {name}", x.shape[-1], VECTOR_BYTES // x.element_size())


def check_head_size(op: str, d: int) -> None:
    """A head fills whole vectors and is at least one step of a matrix product."""
    if d < COLUMN_UNIT or d & (d - 1):
        raise ValueError(f"{op}: the head size is {d}, wants a power of two from {COLUMN_UNIT}; pad the heads")


def check_at_least(op: str, name: str, value: int, least: int) -> None:
    """`value` is not below `least`."""
    if value < least:
        raise ValueError(f"{op}: {name} is {value}, wants at least {least}; pass more")


def check_at_most(op: str, name: str, value: int, most: int) -> None:
    """`value` is not above `most`."""
    if value > most:
        raise ValueError(f"{op}: {name} is {value}, wants at most {most}; pass less")


def check_separate(op: str, **tensors: Tensor) -> None:
    """No two of these share memory: an operator must not write what it also reads through another argument."""
    spans = sorted((x.data_ptr(), x.data_ptr() + x.nbytes, name) for name, x in tensors.items() if x.nbytes)
    for (_, end, first), (start, _, second) in itertools.pairwise(spans):
        if start < end:
            raise ValueError(f"{op}: {first} and {second} share memory; pass separate tensors")
