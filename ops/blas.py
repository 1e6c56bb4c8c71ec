"""cuBLASLt through a handle of our own: no switch of torch or of the process reaches a product, and none is set.

The library is the one that torch has loaded. An algorithm sums every output in one pass over K: no split, no reduction.
It is named by its code, the 64 bytes in which the library describes it; a code holds for one version of the library.
What is asked of the library is asked once and kept, so that a captured product asks nothing. Safe to call from many
threads.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")

WORKSPACE_BYTES = 32 * 2**20
"""Room that an algorithm may ask for, one buffer per stream; as much as torch gives the library on Hopper."""

# Values of cublasLt.h and library_types.h.
_COMPUTE_32F, _R_32F, _R_16BF = 68, 0, 14
_DESC_TRANSA = 3
_PREF_MAX_WORKSPACE_BYTES, _PREF_REDUCTION_SCHEME_MASK = 1, 3
_CONFIG_SPLITK_NUM, _CONFIG_REDUCTION_SCHEME = 2, 3
_NOT_SUPPORTED = 15

_ONE, _ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)
_ASKED = 8  # algorithms among which the first that does not split is taken


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


def _once(make: Callable[P, T]) -> Callable[P, T]:
    """`functools.cache` that makes a value once, also when several threads ask for it at the same time."""
    made: dict[Any, T] = {}
    lock = threading.RLock()

    @wraps(make)
    def kept(*key: P.args, **none: P.kwargs) -> T:
        if key not in made:
            with lock:
                if key not in made:
                    made[key] = make(*key, **none)
        return made[key]

    return kept


def version() -> int:
    """The version of the cuBLAS that torch runs on, for instance 130100. Raises OSError where that is not known."""
    return int(_lt().cublasLtGetVersion())


def codes(columns: int, inputs: int, rows: int, count: int) -> list[str]:
    """Up to `count` algorithms without a workspace for [rows, inputs] times the transpose of [columns, inputs].

    Best guess first; for buffers aligned to 256 bytes, on the current CUDA device.
    """
    found = _heuristics(torch.cuda.current_device(), columns, inputs, rows, count, 0)
    return [bytes(h.algorithm).rstrip(b"\0").hex() for h in found]


def coded(code: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The algorithm of this code as a product: x [R, K] and w [N, K], both bfloat16 and aligned to 256 bytes.

    The product raises RuntimeError where the library refuses the algorithm for these sizes. Raises ValueError for text
    that is no code.
    """
    data = bytes.fromhex(code)
    if not 0 < len(data) <= ctypes.sizeof(_Algorithm):
        raise ValueError(f"a cuBLASLt code has 1 to {ctypes.sizeof(_Algorithm)} bytes, got {len(data)}: {code!r}")
    algorithm = _Algorithm.from_buffer_copy(data.ljust(ctypes.sizeof(_Algorithm), b"\0"))
    return lambda x, w: _multiply(algorithm, 0, x, w)


def library_choice(x: Tensor, w: Tensor) -> Tensor:
    """x [R, K] times w [N, K] by the library's own choice for these sizes among the algorithms that do not split K.

    Both are bfloat16 and aligned to 256 bytes. Raises RuntimeError where there is no such algorithm.
    """
    choice = _choice(x.device.index, w.shape[0], w.shape[1], x.shape[0])
    return _multiply(choice.algorithm, choice.workspace, x, w)


def _multiply(algorithm: _Algorithm, workspace_bytes: int, x: Tensor, w: Tensor) -> Tensor:
    device, stream = x.device.index, torch.cuda.current_stream(x.device).cuda_stream
    problem = _problem(w.shape[0], w.shape[1], x.shape[0])
    workspace = _workspace(device, stream).data_ptr() if workspace_bytes else None
    out = x.new_empty(x.shape[0], w.shape[0])
    status = _lt().cublasLtMatmul(
        _handle(device), problem.product, ctypes.byref(_ONE), w.data_ptr(), problem.w, x.data_ptr(), problem.x,
        ctypes.byref(_ZERO), out.data_ptr(), problem.out, out.data_ptr(), problem.out, ctypes.byref(algorithm),
        workspace, workspace_bytes, stream,
    )  # fmt: skip
    _check("cublasLtMatmul", status)
    return out


@_once
def _choice(device: int, columns: int, inputs: int, rows: int) -> _Heuristic:
    found = _heuristics(device, columns, inputs, rows, _ASKED, WORKSPACE_BYTES)
    if not found:
        raise RuntimeError(f"cuBLASLt has no algorithm without split K for {rows} rows of a {columns}x{inputs} weight")
    return found[0]


def _heuristics(
    device: int, columns: int, inputs: int, rows: int, count: int, workspace_bytes: int
) -> list[_Heuristic]:
    """Those of the library's first `count` answers that sum K in one pass, in its order."""
    lt, problem, handle = _lt(), _problem(columns, inputs, rows), _handle(device)
    preference = ctypes.c_void_p()
    _check("cublasLtMatmulPreferenceCreate", lt.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
    try:
        for attribute, value in (
            (_PREF_MAX_WORKSPACE_BYTES, ctypes.c_uint64(workspace_bytes)),
            (_PREF_REDUCTION_SCHEME_MASK, ctypes.c_uint32(0)),
        ):
            status = lt.cublasLtMatmulPreferenceSetAttribute(
                preference, attribute, ctypes.byref(value), ctypes.sizeof(value)
            )
            _check("cublasLtMatmulPreferenceSetAttribute", status)
        found, returned = (_Heuristic * count)(), ctypes.c_int(0)
        with torch.cuda.device(device):
            status = lt.cublasLtMatmulAlgoGetHeuristic(
                handle, problem.product, problem.w, problem.x, problem.out, problem.out,
                preference, count, found, ctypes.byref(returned),
            )  # fmt: skip
    finally:
        lt.cublasLtMatmulPreferenceDestroy(preference)
    if status == _NOT_SUPPORTED:
        return []
    _check("cublasLtMatmulAlgoGetHeuristic", status)
    return [h for h in found[: returned.value] if h.state == 0 and _sums_in_one_pass(h.algorithm)]


def _sums_in_one_pass(algorithm: _Algorithm) -> bool:
    """Whether it neither splits K nor adds up parts. One without these settings cannot."""
    for attribute, most in ((_CONFIG_SPLITK_NUM, 1), (_CONFIG_REDUCTION_SCHEME, 0)):
        value = ctypes.c_uint32(0)
        status = _lt().cublasLtMatmulAlgoConfigGetAttribute(
            ctypes.byref(algorithm), attribute, ctypes.byref(value), ctypes.sizeof(value), None
        )
        if status == 0 and value.value > most:
            return False
    return True


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


@_once
def _problem(columns: int, inputs: int, rows: int) -> _Problem:
    return _Problem(columns, inputs, rows)


def _layout(height: int, width: int) -> ctypes.c_void_p:
    layout = ctypes.c_void_p()
    status = _lt().cublasLtMatrixLayoutCreate(ctypes.byref(layout), _R_16BF, height, width, height)
    _check("cublasLtMatrixLayoutCreate", status)
    return layout


@_once
def _workspace(device: int, stream: int) -> Tensor:
    """The buffer of one stream, whose launches use it in turn. A graph holds its address, so it is never freed."""
    if torch.cuda.is_current_stream_capturing():  # it would come from the graph's own memory
        raise RuntimeError("a product's workspace cannot be made while capturing; run it once on this stream before")
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=torch.device("cuda", device))


@_once
def _handle(device: int) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        _check("cublasLtCreate", _lt().cublasLtCreate(ctypes.byref(handle)))
    return handle


@_once
def _lt() -> Any:
    """The library that torch itself has loaded. Raises OSError where there is none, or more than one."""
    assert torch.version.cuda is not None
    name = f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}"
    loaded = _loaded(name)
    if len(loaded) > 1:
        raise OSError(
            f"{name} is loaded more than once, from {' and '.join(loaded)}, and torch could run on either; leave one"
            " of them on LD_LIBRARY_PATH and among the installed packages"
        )
    try:
        lt = ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
    except OSError:
        raise OSError(f"torch has not loaded {name}") from None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    lt.cublasLtGetVersion.restype = size
    lt.cublasLtMatrixLayoutCreate.argtypes = [pointer, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64]
    for function in ("cublasLtMatmulDescSetAttribute", "cublasLtMatmulPreferenceSetAttribute"):
        getattr(lt, function).argtypes = [pointer, ctypes.c_int, pointer, size]
    lt.cublasLtMatmulAlgoConfigGetAttribute.argtypes = [pointer, ctypes.c_int, pointer, size, pointer]
    lt.cublasLtMatmulAlgoGetHeuristic.argtypes = [pointer] * 7 + [ctypes.c_int, pointer, pointer]
    lt.cublasLtMatmul.argtypes = [pointer] * 14 + [size, pointer]
    return lt


def _loaded(name: str, maps: Path = Path("/proc/self/maps")) -> list[str]:
    """Files of this process that go by the name of a library, minor versions included."""
    paths = {fields[5] for line in maps.read_text().splitlines() if len(fields := line.split(maxsplit=5)) == 6}
    return sorted(path for path in paths if f"{path.rpartition('/')[2]}.".startswith(f"{name}."))


def _check(call: str, status: int) -> None:
    if status:
        raise RuntimeError(f"{call} returned status {status}")
