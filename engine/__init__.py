"""Forkgraph: read an observation once, answer every question about it, with the bits of asking each alone.

Names are imported when first used: torch takes seconds, and a wrong option should be reported at once.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.engine import Engine
    from engine.errors import (
        CapacityError,
        CheckpointError,
        ClosedError,
        ConfigError,
        DeviceLostError,
        ForkedError,
        ForkgraphError,
        InferenceError,
        RequestError,
        SettingsError,
    )
    from engine.prompt import Prompt
    from engine.wire.answers import Response
    from engine.wire.requests import Request, parse_request

__version__ = "0.1.0"

__all__ = [
    "CapacityError",
    "CheckpointError",
    "ClosedError",
    "ConfigError",
    "DeviceLostError",
    "Engine",
    "EngineConfig",
    "ForkedError",
    "ForkgraphError",
    "InferenceError",
    "Prompt",
    "Request",
    "RequestError",
    "Response",
    "SettingsError",
    "parse_request",
]

_MODULES = {
    "Engine": "engine.engine",
    "EngineConfig": "engine.config",
    "Prompt": "engine.prompt",
    "Request": "engine.wire.requests",
    "Response": "engine.wire.answers",
    "parse_request": "engine.wire.requests",
}


def _check_neighbours() -> None:
    """Raise ImportError where `graphs` or `ops` is somebody else's, which would fail later and less clearly."""
    beside = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    for name in ("graphs", "ops"):
        spec = None if name in sys.modules else find_spec(name)
        found = getattr(sys.modules.get(name, spec), "__file__" if spec is None else "origin", None)
        if found is None or os.path.realpath(found) != os.path.join(beside, name, "__init__.py"):
            raise ImportError(
                f"{found} is not Forkgraph's own {name}, which lies in {beside}: rename it, or start the command "
                "`forkgraph`, which looks for nothing in the folder it is started from",
                name=name,
                path=found,
            )


_check_neighbours()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    return getattr(import_module(_MODULES.get(name, "engine.errors")), name)
