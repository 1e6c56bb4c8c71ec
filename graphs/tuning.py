"""Finds for each weight shape and row count the fastest algorithm that has the bits of `fixed`.

Time decides the order, bytes decide what may run: at its own row count every algorithm is compared with `fixed` on
rows made to show a different order of summation, from inside a captured graph, over an output full of NaN. One that is
a single kernel and fails once is used nowhere; the library's own choice is another algorithm at every row count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from graphs.candidates import PADDED_BELOW, candidates
from graphs.rungs import LADDER, rung
from ops.linear_tuned import CUBLAS, CUBLASLT, FIXED, Cell, is_one_kernel

# fmt: off
ANCHORS = tuple(map(rung, (
    64, 80, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 448, 512, 576, 640, 768, 896, 1_024, 1_088, 1_280, 1_536,
    2_048, 3_136, 4_096, 6_016, 8_960, 11_776, LADDER[-1],
)))
# fmt: on
"""Rungs at which every candidate is timed. Elsewhere the winners of both neighbours and the library's choices are."""
KEPT = 4
"""Names kept per cell, fastest first, for machines on which the first does not pass."""

Progress = Callable[[int, int], None]
"""Steps done, steps in all."""


class CannotRunError(Exception):
    """An algorithm that does not exist for these sizes here, or that found no memory. Says nothing of its bits."""


class Lab(Protocol):
    """Where algorithms are run: a GPU, or a test's idea of one."""

    def times(self, cell: Cell, names: Sequence[str], *, careful: bool) -> dict[str, float]:
        """Microseconds of those that can run."""

    def same_bytes(self, cell: Cell, name: str) -> bool:
        """Whether every row equals that of `fixed`. Raises CannotRunError."""

    def prepare(self, names: Iterable[str]) -> None:
        """Compile ahead of the first use."""


@dataclass(kw_only=True)
class Findings:
    """Per cell the names that may run, best first, and what was learnt on the way."""

    names: dict[Cell, tuple[str, ...]]
    failed: dict[str, list[Cell]]
    """Where a name's bytes differed from those of `fixed`."""
    times: dict[Cell, dict[str, float]] = field(default_factory=dict)
    """Microseconds."""


def search(
    shapes: Sequence[tuple[int, int]],
    lab: Lab,
    *,
    offered: Callable[[Cell], Sequence[str]] = candidates,
    progress: Progress | None = None,
) -> Findings:
    """Time and test anew for weights of these shapes (rows, columns), on every rung."""
    times: dict[Cell, dict[str, float]] = {}
    steps, done = 2 * len(shapes) * len(LADDER), 0
    everything = {(n, k, rows): tuple(offered((n, k, rows))) for n, k in shapes for rows in ANCHORS}
    lab.prepare({name for names in everything.values() for name in names})
    for n, k in shapes:
        for rows in (*ANCHORS, *(r for r in LADDER if r not in ANCHORS)):
            cell = n, k, rows
            if rows in ANCHORS:
                times[cell] = lab.times(cell, everything[cell], careful=True)
            else:
                best = 2 if rows <= PADDED_BELOW else 1
                near = [by_time(times[n, k, anchor])[:best] for anchor in neighbours(rows)]
                few = dict.fromkeys((CUBLAS, CUBLASLT, *(name for pair in near for name in pair)))
                times[cell] = lab.times(cell, [name for name in few if fits(name, rows)], careful=False)
            done += 1
            if progress is not None:
                progress(done, steps)
    ranked = {cell: kept(by_time(found)) for cell, found in times.items()}
    names, failed = settle(ranked, lab, lambda n: progress(done + n, steps) if progress is not None else None)
    return Findings(names=names, failed=failed, times=times)


def retest(wanted: Mapping[Cell, Sequence[str]], lab: Lab, *, progress: Progress | None = None) -> Findings:
    """Test known winners without timing anything: in each cell the first name that passes leads."""
    ranked = {cell: tuple(names) for cell, names in wanted.items()}
    lab.prepare({names[0] for names in ranked.values() if names})
    names, failed = settle(ranked, lab, lambda n: progress(n, len(ranked)) if progress is not None else None)
    return Findings(names=names, failed=failed)


def neighbours(rows: int) -> tuple[int, int]:
    """The anchors just below and just above a rung that is none."""
    return max(a for a in ANCHORS if a < rows), min(a for a in ANCHORS if a > rows)


def fits(name: str, rows: int) -> bool:
    """Whether a name, if it pads, pads to more than `rows`."""
    padded = name.partition("@")[2]
    return not padded or int(padded) > rows


def by_time(times: Mapping[str, float]) -> list[str]:
    return sorted(times, key=lambda name: times[name])


def kept(names: Sequence[str]) -> tuple[str, ...]:
    """The fastest few, with one among them that another version of cuBLAS knows too."""
    best = list(names[:KEPT])
    if all(name.startswith(f"{CUBLASLT}#") for name in best):
        best[-1:] = [next((name for name in names if not name.startswith(f"{CUBLASLT}#")), FIXED)]
    return tuple(best)


def settle(
    ranked: Mapping[Cell, tuple[str, ...]], lab: Lab, progress: Callable[[int], None]
) -> tuple[dict[Cell, tuple[str, ...]], dict[str, list[Cell]]]:
    """Per cell the first name that passes the byte test and those after it; and where names failed."""
    failed: dict[str, list[Cell]] = {}
    settled: dict[Cell, tuple[str, ...]] = {}

    def struck(name: str, cell: Cell) -> bool:
        return name in failed and (is_one_kernel(name) or cell in failed[name])

    def passes(name: str, cell: Cell) -> bool:
        try:
            same = name == FIXED or lab.same_bytes(cell, name)
        except CannotRunError:
            return False
        if not same:
            failed.setdefault(name, []).append(cell)
        return same

    waiting = list(ranked)
    while waiting:
        for cell in waiting:
            names = ranked[cell]
            first = next((i for i, name in enumerate(names) if not struck(name, cell) and passes(name, cell)), None)
            settled[cell] = (FIXED,) if first is None else names[first:]
            progress(len(settled))
        waiting = [cell for cell, names in settled.items() if struck(names[0], cell)]  # failed after it was settled
    return {cell: tuple(n for n in names if not struck(n, cell)) for cell, names in settled.items()}, failed
