"""Files that ship beside the code, found by path: the name `configs` may be somebody else's package."""

from __future__ import annotations

from pathlib import Path

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
"""Hydra's groups, example requests and tuned winners."""
