"""Rows picked by a section of the tables: the embedding, and the rows that are read."""

from __future__ import annotations

import torch
from torch import Tensor

from ops.checks import STORAGE, check_at_least, check_at_most, check_row_pitch, check_tables, check_tensor
from ops.cpu import cpu_kernel
from ops.tables import TABLE_WORDS


@torch.library.custom_op("forkgraph::take_rows", mutates_args=(), device_types="cuda")
def take_rows(source: Tensor, tables: Tensor, section: int, rows: int) -> Tensor:
    """Row i is source[tables[section + i]]: [rows, h] of source [V, h] (bfloat16 or float32).

    `section` is ROW_TOKEN or READ_ROWS of ops/tables.py; unused entries there are 0, so every row is defined. Raises
    TypeError for a dtype, ValueError for a shape, stride, alignment, device or a section outside the tables.
    """
    from ops.kernels.rows import launch_take_rows

    _check(source, tables, section, rows)
    return launch_take_rows(source, tables, section, rows)


@cpu_kernel("take_rows")
def _cpu(source: Tensor, tables: Tensor, section: int, rows: int) -> Tensor:
    _check(source, tables, section, rows)
    return source.index_select(0, tables[section : section + rows])


@take_rows.register_fake
def _fake(source: Tensor, tables: Tensor, section: int, rows: int) -> Tensor:
    return source.new_empty(rows, source.shape[1])


def take_rows_reference(source: Tensor, tables: Tensor, section: int, rows: int) -> Tensor:
    """The same rows, one at a time."""
    picked = source.new_empty(rows, source.shape[1])
    for i in range(rows):
        picked[i] = source[int(tables[section + i])]
    return picked


def _check(source: Tensor, tables: Tensor, section: int, rows: int) -> None:
    op = "take_rows"
    check_tensor(op, "source", source, (None, None), STORAGE, source.device)
    check_row_pitch(op, "source", source)
    check_tables(op, tables, source.device)
    check_at_least(op, "section", section, 0)
    check_at_least(op, "rows", rows, 0)
    check_at_most(op, "the end of the section", section + rows, TABLE_WORDS)
