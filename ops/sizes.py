"""Constants that operators and their kernels share. Imports nothing of ops, so that either side may import it."""

from __future__ import annotations

LEAST_LOG_DECAY = -128.0
"""The delta rule takes a lower log decay for this one. Either multiplies by exactly zero in float32, where e^-104 is
nothing, but in a prefix sum the decays around -1e6 would vanish; with this one 64 rows sum to -8192 at most."""
