"""Files that ship beside the code, found by path: the name `configs` may be somebody else's package."""

from __future__ import annotations

from pathlib import Path

from engine.errors import ConfigError, nearest

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
"""Hydra's groups, example requests and tuned winners."""
EXAMPLE = "example:"
"""Prefix of a request that ships, in place of a path."""


def example(name: str) -> Path:
    """The file of `example:NAME`. Raises ConfigError with the nearest name, and all there are."""
    stem = name.removeprefix(EXAMPLE)
    files = {path.stem: path for path in sorted((CONFIGS / "requests").iterdir())}
    if stem not in files:
        raise ConfigError(f"request={name}: no such example{nearest(stem, files)}; there are {', '.join(files)}")
    return files[stem]
