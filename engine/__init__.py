"""Forkgraph: read an observation once, answer every question about it, with the bits of asking each alone."""

from engine.answers import Response
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import CapacityError, CheckpointError, ConfigError, ForkgraphError, InferenceError, RequestError
from engine.layout import Prompt
from engine.requests import Request, parse_request

__all__ = [
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "ForkgraphError",
    "InferenceError",
    "Prompt",
    "Request",
    "RequestError",
    "Response",
    "parse_request",
]
