"""Chunks that a run of positions touches and completes, against counting them."""

from __future__ import annotations

import pytest

from ops.sizes import CHUNK, crosses_border, num_chunks


@pytest.mark.parametrize("start", [0, 1, 63, 64, 65, 127, 128])
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 128, 129])
def test_chunks_touched_and_completed(start: int, length: int) -> None:
    positions = range(start, start + length)
    assert num_chunks(start, start + length) == len({p // CHUNK for p in positions})
    assert crosses_border(start, start + length) == any(p % CHUNK == CHUNK - 1 for p in positions)
