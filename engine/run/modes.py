"""The modes of the calling thread that would change tensors, switched off for the length of a call or block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def own_modes() -> Iterator[None]:
    """No inference mode, whose tensors nobody may write later, no gradients, no autocast."""
    with torch.inference_mode(False), torch.no_grad(), ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
