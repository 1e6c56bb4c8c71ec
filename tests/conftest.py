"""Without a GPU every Triton kernel runs in the interpreter, which must be chosen before triton is first imported.

Tensors here are small: one thread each, or the test processes wait for one another.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported, here and in the processes tests start

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    _splat = InterpreterBuilder.create_splat

    def _splat_of_bool(self: Any, shape: Any, x: Any) -> Any:
        """Spreads a scalar mask as booleans: the interpreter makes integers of it, which that of Triton 3.9 refuses."""
        return _splat(self, shape, TensorHandle(x.data, tl.int1) if x.data.dtype == bool else x)

    InterpreterBuilder.create_splat = _splat_of_bool

_GUARD_BYTES = 256


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where launch functions of kernels run: the GPU, or the interpreter on CPU tensors (float32 only there)."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Guards:
    """Fresh tensors of an operator, filled with NaN, each with a strip behind it that must not change."""

    def __init__(self) -> None:
        self.strips: list[torch.Tensor] = []

    def empty(self, *shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        count = int(torch.Size(shape).numel()) * dtype.itemsize
        memory = torch.full((count + _GUARD_BYTES,), 0xFF, dtype=torch.uint8, device=device)  # 0xFF..: NaN, or -1
        self.strips.append(memory[count:])
        return memory[:count].view(dtype).view(shape)

    def check(self) -> None:
        assert self.strips, "nothing was allocated under guard"
        assert all(bool((strip == 0xFF).all()) for strip in self.strips), "written past the end of an output"


@pytest.fixture
def guards(monkeypatch: pytest.MonkeyPatch) -> Iterator[Guards]:
    """Every `new_empty` and `empty_like` of the test is NaN and guarded; the strips are checked at its end."""
    guards = Guards()
    plain_empty, plain_like = torch.Tensor.new_empty, torch.empty_like

    def new_empty(x: torch.Tensor, *size: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs:  # not an operator: the interpreter's own copies
            return plain_empty(x, *size, **kwargs)
        return guards.empty(*torch.Size(size), dtype=kwargs.get("dtype", x.dtype), device=x.device)

    def empty_like(x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return plain_like(x, **kwargs) if "device" in kwargs else new_empty(x, *x.shape, **kwargs)

    patches: tuple[tuple[object, str, Callable[..., torch.Tensor]], ...] = (
        (torch.Tensor, "new_empty", new_empty),
        (torch, "empty_like", empty_like),
    )
    for owner, name, patch in patches:
        monkeypatch.setattr(owner, name, patch)
    yield guards
    guards.check()
