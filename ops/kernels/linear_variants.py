"""Other tiles for the product of ops/kernels/linear.py, with its bits: the sum is the same, only the layout differs.

Not the definition of anything: a variant runs for a row count only after its bytes were compared there.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from ops.kernels.linear import tile_place
from ops.variant import Variant


@triton.jit(do_not_specialize=["rows", "columns", "inputs"])
def variant_kernel(
    x,
    w,
    out,
    rows,
    columns,
    inputs,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SWAPPED: tl.constexpr,  # w is the left operand: few rows then fill the narrow side of a tensor-core tile
    HALVES: tl.constexpr,  # stored in two parts, which frees shared memory for one more stage
    PERSISTENT: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        gdc_wait()  # launched before the kernel ahead has ended: nothing is read or written until it has
    tiles = tl.cdiv(rows, ROWS) * tl.cdiv(columns, COLUMNS)
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=PERSISTENT):
        row, column = tile_place(index, rows, columns, ROWS, COLUMNS)
        if SWAPPED:
            acc = tl.zeros((COLUMNS, ROWS), tl.float32)
        else:
            acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in range(0, inputs, DEPTH):
            b_x = x.load([row, k])
            b_w = w.load([column, k])
            if SWAPPED:
                acc = tl.dot(b_w, b_x.T, acc)
            else:
                acc = tl.dot(b_x, b_w.T, acc)
        if SWAPPED:
            acc = acc.T
        if HALVES:
            left, right = tl.split(tl.permute(tl.reshape(acc, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))
            out.store([row, column], left.to(out.dtype))
            out.store([row, column + COLUMNS // 2], right.to(out.dtype))
        else:
            out.store([row, column], acc.to(out.dtype))


def launch_variant(variant: Variant, x: Tensor, w: Tensor) -> Tensor:
    """x [R, K] times the transpose of w [N, K] -> [R, N]; K is a multiple of the variant's depth."""
    out = x.new_empty(x.shape[0], w.shape[0])
    tiles = triton.cdiv(x.shape[0], variant.rows) * triton.cdiv(w.shape[0], variant.columns)
    if variant.persistent:
        tiles = min(tiles, torch.cuda.get_device_properties(x.device).multi_processor_count)
    arguments, options = _arguments(variant, x, w, out)
    variant_kernel[(tiles,)](*arguments, **options)
    return out


def compile_variants(variants: Sequence[Variant], device: torch.device) -> None:
    """Fill Triton's cache on disk, many variants at a time. What does not compile is left to its launch to report."""
    with ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        for variant in variants:
            x = torch.empty(variant.rows, variant.depth, dtype=torch.bfloat16, device=device)
            w = torch.empty(variant.columns, variant.depth, dtype=torch.bfloat16, device=device)
            out = torch.empty(variant.rows, variant.columns, dtype=torch.bfloat16, device=device)
            arguments, options = _arguments(variant, x, w, out)
            variant_kernel.warmup(*arguments, grid=(1,), **options)


def _arguments(variant: Variant, x: Tensor, w: Tensor, out: Tensor) -> tuple[tuple[object, ...], dict[str, object]]:
    stored = variant.columns // 2 if variant.halves else variant.columns
    arguments = (
        TensorDescriptor.from_tensor(x, [variant.rows, variant.depth]),
        TensorDescriptor.from_tensor(w, [variant.columns, variant.depth]),
        TensorDescriptor.from_tensor(out, [variant.rows, stored]),
        x.shape[0],
        w.shape[0],
        x.shape[1],
    )
    options: dict[str, object] = {
        "ROWS": variant.rows,
        "COLUMNS": variant.columns,
        "DEPTH": variant.depth,
        "SWAPPED": variant.swapped,
        "HALVES": variant.halves,
        "PERSISTENT": variant.persistent,
        "EARLY": variant.early,
        "num_warps": variant.warps,
        "num_stages": variant.stages,
        "enable_fp_fusion": False,
    }
    if variant.early:
        options["launch_pdl"] = True
    return arguments, options
