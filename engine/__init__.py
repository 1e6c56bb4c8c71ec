"""Forkgraph: read an observation once, answer every question about it, with the bits of asking each alone.

Names are imported when first used: torch takes seconds, and a wrong option should be reported at once.
"""

from __future__ import annotations

from importlib import import_module
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


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    return getattr(import_module(_MODULES.get(name, "engine.errors")), name)
