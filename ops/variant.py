"""One Triton tile for a product, and its name."""

from __future__ import annotations

import re
from dataclasses import dataclass

_FLAGS = ("swapped", "halves", "persistent", "early")
_VARIANT = re.compile(r"tile (\d+)x(\d+)x(\d+) w(\d+) s(\d+)" + "".join(f"( {flag})?" for flag in _FLAGS))


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One Triton tile: rows of x, rows of w, depth of a step, warps and stages."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    swapped: bool = False
    """w is the left operand of the tensor cores."""
    halves: bool = False
    """Stored in two parts."""
    persistent: bool = False
    """One program per multiprocessor walks many tiles."""
    early: bool = False
    """Launched before the kernel ahead has ended (programmatic dependent launch)."""

    @property
    def name(self) -> str:
        flags = [f" {flag}" for flag in _FLAGS if getattr(self, flag)]
        return f"tile {self.rows}x{self.columns}x{self.depth} w{self.warps} s{self.stages}{''.join(flags)}"

    @classmethod
    def named(cls, name: str) -> Variant:
        """Raises ValueError for a name that is none."""
        match = _VARIANT.fullmatch(name)
        if match is None:
            raise ValueError(f"{name!r} names no tile; one looks like 'tile 64x128x64 w4 s4 swapped'")
        rows, columns, depth, warps, stages = map(int, match.groups()[:5])
        flags = dict(zip(_FLAGS, map(bool, match.groups()[5:]), strict=True))
        return cls(rows=rows, columns=columns, depth=depth, warps=warps, stages=stages, **flags)
