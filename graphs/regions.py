"""Regional torch.compile: the one place where a layer's forward is compiled, once per kind of layer.

Regions hold views, allocations and operator calls only, so compiling moves work off the host and changes no bit, and no
switch of the process matters to them: guards on such switches are left out. Row counts and buffer sizes are dynamic,
everything else is fixed. Knows callables and tensors, nothing of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from itertools import count
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

Region = Callable[..., Any]

_numbers = count()

_OF_THE_PROCESS = frozenset(
    ("GLOBAL_STATE", "GRAD_MODE", "DEFAULT_DEVICE", "DETERMINISTIC_ALGORITHMS", "TORCH_FUNCTION_STATE",
     "AUTOGRAD_SAVED_TENSORS_HOOKS")
)  # fmt: skip
"""Kinds of guards whose change compiles a region again, though none reaches an operator."""


@cache
def compiled(forward: FunctionType, key: Hashable) -> Region:
    """`forward` as one full graph, shared by every module of the process that has this forward and this `key`.

    The key names what differs between models but not between the layers of one (dimensions, dtype, GEMM handle).
    Each key gets a code object of its own, since that is what the compiler counts recompilations by, under a name of
    its own, since by name and line it remembers sizes: one that differs between two regions would be made dynamic.
    """
    code = forward.__code__.replace(co_name=f"{forward.__name__}_{next(_numbers)}")
    own = FunctionType(code, forward.__globals__, forward.__name__, forward.__defaults__)
    return torch.compile(own, fullgraph=True, options={"guard_filter_fn": _kept})


def _kept(guards: Sequence[Any]) -> list[bool]:
    return [guard.guard_type not in _OF_THE_PROCESS for guard in guards]


def dynamic_rows(*tensors: Tensor | None) -> None:
    """Declare the first dimension of these region inputs dynamic, from the first call on.

    The compiler fixes sizes 0 and 1 all the same, so callers keep them at 2 or more.
    """
    for tensor in tensors:
        if tensor is not None:
            torch._dynamo.mark_dynamic(tensor, 0)
