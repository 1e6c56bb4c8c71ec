"""Switches of the process that a computation on a CPU cannot be shielded from: they are read, never set.

CUDA work has none: its products are ours. Threads and modes that belong to a thread do not reach the owner's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from engine.errors import SettingsError

Settings = Mapping[str, object]
"""Values by the name they are set by."""

_CPU: dict[str, Callable[[], object]] = {
    "torch.set_num_threads": torch.get_num_threads,
    "torch.set_float32_matmul_precision": lambda: _spelled(torch.get_float32_matmul_precision),
    "torch.backends.mkldnn.matmul.fp32_precision": lambda: _plain(torch.backends.mkldnn.matmul.fp32_precision),  # type: ignore[attr-defined]
    "torch.backends.mkldnn.enabled": lambda: torch.backends.mkldnn.enabled,
}


def read_settings(device: torch.device) -> Settings:
    """What they are now, on the thread that asks."""
    return {name: read() for name, read in _CPU.items()} if device.type == "cpu" else {}


def check_settings(expected: Settings) -> None:
    """Raise SettingsError naming the first switch that is not as it was."""
    for name, before in expected.items():
        if (now := _CPU[name]()) != before:
            raise SettingsError(
                f"{name} was {before!r} when this engine was loaded and is {now!r}, which changes bits on a CPU; "
                "set it back, or load another engine"
            )


def _spelled(read: Callable[[], str]) -> str:
    try:
        return read()
    except RuntimeError:  # set through both of torch's interfaces, to different values
        return "mixed"


def _plain(precision: str) -> str:
    return "ieee" if precision == "none" else precision  # two words for products in float32 itself
