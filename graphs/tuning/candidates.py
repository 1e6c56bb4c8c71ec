"""What is worth trying for a weight shape at a row count. Knows names of algorithms, runs none.

Few rows are bound by reading the weights: small tiles, so that every multiprocessor reads, and deep pipelines. Many
rows are bound by arithmetic: large tiles, one program per multiprocessor. In between the number of tiles decides, so
the choice is wide.
"""

from __future__ import annotations

from ops import blas
from ops.linear_tuned import CUBLASLT, FIXED, Cell
from ops.variant import Variant

FEW, SEVERAL = 128, 768
"""Row counts up to which small tiles, and tiles of 64 rows, are tried."""
PADDED_BELOW = 1_100
_CODES = 8


def _variants(*sizes: tuple[int, int, int, int, int], **flags: bool) -> tuple[Variant, ...]:
    return tuple(
        Variant(rows=rows, columns=columns, depth=depth, warps=warps, stages=stages, **flags)
        for rows, columns, depth, warps, stages in sizes
    )


# rows, columns, depth, warps, stages
FEW_ROWS = (
    *_variants(
        (16, 64, 128, 4, 4), (16, 64, 128, 4, 8), (16, 128, 128, 4, 5), (32, 64, 128, 4, 4), (32, 64, 128, 4, 7),
        (32, 128, 64, 4, 8), (64, 64, 128, 4, 6), (64, 128, 64, 4, 4), (64, 128, 128, 4, 4),
        swapped=True, early=True,
    ),
    *_variants(
        (16, 32, 128, 4, 6), (64, 32, 128, 4, 4), (64, 32, 128, 4, 8), (64, 64, 64, 4, 4), (64, 64, 128, 4, 3),
        (64, 64, 128, 4, 6), (64, 128, 64, 4, 4), (64, 128, 128, 4, 4), (64, 256, 64, 4, 4), (128, 32, 128, 4, 5),
        early=True,
    ),
    *_variants((64, 64, 128, 4, 6), (64, 128, 64, 4, 4)),
)  # fmt: skip
SEVERAL_ROWS = (
    *_variants(
        (64, 64, 128, 4, 6), (64, 128, 128, 4, 4), (64, 256, 64, 4, 4), (64, 256, 64, 8, 4), (128, 64, 64, 4, 5),
        (128, 64, 128, 4, 4), (128, 128, 64, 4, 3), (128, 128, 64, 8, 5), (128, 128, 128, 8, 3), (128, 256, 64, 8, 3),
        (256, 64, 64, 8, 4), (256, 128, 64, 8, 3),
        early=True,
    ),
    *_variants((128, 256, 64, 8, 4), (256, 128, 64, 8, 4), halves=True, early=True),
    *_variants((64, 128, 128, 4, 4), (128, 128, 64, 8, 5), (128, 256, 64, 8, 3)),
)  # fmt: skip
MANY_ROWS = (
    *_variants((128, 128, 64, 8, 5), (128, 256, 64, 8, 3), (256, 128, 64, 8, 3), persistent=True),
    *_variants((128, 256, 64, 8, 4), (256, 128, 64, 8, 4), persistent=True, halves=True),
)


def variants(cell: Cell) -> tuple[Variant, ...]:
    """Tiles for these sizes. A tile's depth divides the inputs: the last step is never a partial one."""
    _, inputs, rows = cell
    chosen = (FEW_ROWS if rows <= FEW else SEVERAL_ROWS if rows <= SEVERAL else ()) + (MANY_ROWS if rows > FEW else ())
    return tuple(v for v in chosen if inputs % v.depth == 0)


def padded_rows(rows: int) -> tuple[int, ...]:
    """Fuller row counts within a quarter more; the library takes longer at 320 rows than at 384 for some shapes."""
    if rows > PADDED_BELOW:
        return ()
    fuller = {-(-rows // step) * step for step in (64, 128, 256)}
    return tuple(sorted(r for r in fuller if rows < r <= rows * 5 // 4))


def candidates(cell: Cell) -> tuple[str, ...]:
    """Names to try at this cell on the current CUDA device."""
    columns, inputs, rows = cell
    codes = blas.codes(columns, inputs, rows, _CODES)
    return (
        FIXED,
        CUBLASLT,
        *(f"{CUBLASLT}@{r}" for r in padded_rows(rows)),
        *(f"{CUBLASLT}#{code}" for code in codes),
        *(v.name for v in variants(cell)),
    )
