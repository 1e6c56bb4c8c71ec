"""cuBLAS beside torch: its process-wide switches, its version, and single cuBLASLt algorithms.

A cuBLASLt algorithm is named by its code, the 64 bytes in which the library describes it; a code holds for one version
of the library. The codes offered here sum every output in one pass over K: no split, no workspace.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

# Values of cublasLt.h and library_types.h.
_COMPUTE_32F, _R_32F, _R_16BF = 68, 0, 14
_DESC_TRANSA = 3
_PREF_MAX_WORKSPACE_BYTES, _PREF_REDUCTION_SCHEME_MASK = 1, 3
_NOT_SUPPORTED = 15

_switching = threading.RLock()


class _Algorithm(ctypes.Structure):
    _fields_ = (("data", ctypes.c_uint64 * 8),)


class _Heuristic(ctypes.Structure):
    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@contextmanager
def switches(library: str, *, split_k: bool) -> Iterator[None]:
    """Run a block with torch's products on `library` ("cublas" or "cublaslt"), with or without split K.

    Both switches belong to the process. They are put back when the block ends, also by an error, and one block runs at
    a time.
    """
    with _switching:
        matmul = torch.backends.cuda.matmul
        before = (
            torch.backends.cuda.preferred_blas_library(),
            (matmul.allow_bf16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction_split_k),
        )
        try:
            _switch(library, (split_k, split_k))
            yield
        finally:
            _switch(*before)


def _switch(library: Any, reduction: tuple[bool, bool]) -> None:
    # Split K can be off with cuBLASLt alone, so it is on while the library changes.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (True, True)
    torch.backends.cuda.preferred_blas_library(library)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = reduction


def version() -> int:
    """The version of the cuBLAS that torch runs on, for instance 130100."""
    return int(_lt().cublasLtGetVersion())


def codes(columns: int, inputs: int, rows: int, count: int) -> list[str]:
    """Up to `count` algorithms for [rows, inputs] times the transpose of [columns, inputs], best guess first.

    For buffers aligned to 256 bytes, on the current CUDA device.
    """
    lt, problem = _lt(), _problem(columns, inputs, rows)
    preference = ctypes.c_void_p()
    _check("cublasLtMatmulPreferenceCreate", lt.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
    settings = ((_PREF_MAX_WORKSPACE_BYTES, ctypes.c_uint64(0)), (_PREF_REDUCTION_SCHEME_MASK, ctypes.c_uint32(0)))
    for attribute, value in settings:
        status = lt.cublasLtMatmulPreferenceSetAttribute(
            preference, attribute, ctypes.byref(value), ctypes.sizeof(value)
        )
        _check("cublasLtMatmulPreferenceSetAttribute", status)
    found, returned = (_Heuristic * count)(), ctypes.c_int(0)
    status = lt.cublasLtMatmulAlgoGetHeuristic(
        _handle(torch.cuda.current_device()), problem.product, problem.w, problem.x, problem.out, problem.out,
        preference, count, found, ctypes.byref(returned),
    )  # fmt: skip
    lt.cublasLtMatmulPreferenceDestroy(preference)
    if status == _NOT_SUPPORTED:
        return []
    _check("cublasLtMatmulAlgoGetHeuristic", status)
    return [bytes(h.algorithm).rstrip(b"\0").hex() for h in found[: returned.value] if h.state == 0]


def coded(code: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The algorithm of this code as a product: x [R, K] and w [N, K], both bfloat16 and aligned to 256 bytes.

    The product raises RuntimeError where the library refuses the algorithm for these sizes. Raises ValueError for text
    that is no code.
    """
    data = bytes.fromhex(code)
    if not 0 < len(data) <= ctypes.sizeof(_Algorithm):
        raise ValueError(f"a cuBLASLt code has 1 to {ctypes.sizeof(_Algorithm)} bytes, got {len(data)}: {code!r}")
    algorithm = _Algorithm.from_buffer_copy(data.ljust(ctypes.sizeof(_Algorithm), b"\0"))
    one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)

    def product(x: Tensor, w: Tensor) -> Tensor:
        problem = _problem(w.shape[0], w.shape[1], x.shape[0])
        out = x.new_empty(x.shape[0], w.shape[0])
        status = _lt().cublasLtMatmul(
            _handle(x.device.index), problem.product, ctypes.byref(one), w.data_ptr(), problem.w, x.data_ptr(),
            problem.x, ctypes.byref(zero), out.data_ptr(), problem.out, out.data_ptr(), problem.out,
            ctypes.byref(algorithm), None, 0, torch.cuda.current_stream(x.device).cuda_stream,
        )  # fmt: skip
        _check("cublasLtMatmul", status)
        return out

    return product


class _Problem:
    """Descriptions of one product. Columns first, as the library has it: its matrices are ours transposed."""

    def __init__(self, columns: int, inputs: int, rows: int) -> None:
        lt, transposed = _lt(), ctypes.c_int32(1)
        self.product = ctypes.c_void_p()
        _check(
            "cublasLtMatmulDescCreate", lt.cublasLtMatmulDescCreate(ctypes.byref(self.product), _COMPUTE_32F, _R_32F)
        )
        status = lt.cublasLtMatmulDescSetAttribute(
            self.product, _DESC_TRANSA, ctypes.byref(transposed), ctypes.sizeof(transposed)
        )
        _check("cublasLtMatmulDescSetAttribute", status)
        self.w, self.x, self.out = (
            _layout(height, width) for height, width in ((inputs, columns), (inputs, rows), (columns, rows))
        )


@cache
def _problem(columns: int, inputs: int, rows: int) -> _Problem:
    return _Problem(columns, inputs, rows)


def _layout(height: int, width: int) -> ctypes.c_void_p:
    layout = ctypes.c_void_p()
    status = _lt().cublasLtMatrixLayoutCreate(ctypes.byref(layout), _R_16BF, height, width, height)
    _check("cublasLtMatrixLayoutCreate", status)
    return layout


@cache
def _handle(device: int) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        _check("cublasLtCreate", _lt().cublasLtCreate(ctypes.byref(handle)))
    return handle


@cache
def _lt() -> Any:
    """The library that torch itself has loaded. Raises OSError where there is none."""
    assert torch.version.cuda is not None
    lt = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}")
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    lt.cublasLtGetVersion.restype = size
    lt.cublasLtMatrixLayoutCreate.argtypes = [pointer, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64]
    for name in ("cublasLtMatmulDescSetAttribute", "cublasLtMatmulPreferenceSetAttribute"):
        getattr(lt, name).argtypes = [pointer, ctypes.c_int, pointer, size]
    lt.cublasLtMatmulAlgoGetHeuristic.argtypes = [pointer] * 7 + [ctypes.c_int, pointer, pointer]
    lt.cublasLtMatmul.argtypes = [pointer] * 14 + [size, pointer]
    return lt


def _check(call: str, status: int) -> None:
    if status:
        raise RuntimeError(f"{call} returned status {status}")
