"""Finds for each weight shape and row count the fastest algorithm that has the bits of `fixed`.

Time decides the order, bytes decide what may run: at its own row count every algorithm is compared with `fixed` on
rows made to show a different order of summation, from inside a captured graph, over an output full of NaN. One that is
a single kernel and fails once is used nowhere; the library's own choice is another algorithm at every row count. Only
bytes that differ count against a name: where a test could not be made the cell stays open, to be tested another time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from graphs.rungs import LADDER, rung
from graphs.tuning.candidates import PADDED_BELOW, candidates
from ops.linear_tuned import CUBLASLT, FIXED, Cell, is_one_kernel

# fmt: off
ANCHORS = tuple(map(rung, (
    64, 80, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 448, 512, 576, 640, 768, 896, 1_024, 1_088, 1_280, 1_536,
    2_048, 3_136, 4_096, 6_016, 8_960, 11_776, LADDER[-1],
)))
# fmt: on
"""Rungs at which every candidate is timed. Elsewhere the winners of both neighbours and the library's choice are."""
KEPT = 4
"""Names kept per cell, fastest first, for machines on which the first does not pass."""

Progress = Callable[[int, int], None]
"""Steps done, steps in all."""


class CannotRunError(Exception):
    """An algorithm that does not exist for these sizes here, or that found no memory. Says nothing of its bits."""


class Trials(Protocol):
    """Where algorithms are tried: a GPU, or a test's idea of one."""

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
    failed: dict[str, tuple[Cell, ...]]
    """Where a name's bytes differed from those of `fixed`, with what was known before."""
    open: dict[Cell, tuple[str, ...]] = field(default_factory=dict)
    """Cells of `names` where one ahead of the first could not be tested, with all that is to be tried again."""
    errors: tuple[str, ...] = ()
    """Why not."""
    times: dict[Cell, dict[str, float]] = field(default_factory=dict)
    """Microseconds."""


def search(
    shapes: Sequence[tuple[int, int]],
    trials: Trials,
    *,
    failed: Mapping[str, Sequence[Cell]] | None = None,
    offered: Callable[[Cell], Sequence[str]] = candidates,
    progress: Progress | None = None,
) -> Findings:
    """Time and test anew for weights of these shapes (rows, columns), on every rung. `failed` is known to fail."""
    tests = _ByteTests(trials, failed or {})
    times: dict[Cell, dict[str, float]] = {}
    leaders: dict[Cell, tuple[str, ...]] = {}
    steps, done = 2 * len(shapes) * len(LADDER), 0
    everything = {(n, k, rows): tuple(offered((n, k, rows))) for n, k in shapes for rows in ANCHORS}
    trials.prepare({name for names in everything.values() for name in names})
    for n, k in shapes:
        for rows in (*ANCHORS, *(r for r in LADDER if r not in ANCHORS)):
            cell = n, k, rows
            if rows in ANCHORS:
                times[cell] = trials.times(cell, everything[cell], careful=True)
                passing = (name for name in by_time(times[cell]) if tests.passes(name, cell))
                leaders[cell] = tuple(islice(passing, 2 if rows <= PADDED_BELOW else 1))
            else:
                near = [name for anchor in neighbours(rows) for name in leaders[n, k, anchor] if fits(name, rows)]
                times[cell] = trials.times(cell, list(dict.fromkeys((CUBLASLT, *near))), careful=False)
            done += 1
            if progress is not None:
                progress(done, steps)
    ranked = {cell: kept(by_time(found)) for cell, found in times.items()}
    return first_passing(ranked, tests, times, lambda n: progress(done + n, steps) if progress is not None else None)


def retest(
    wanted: Mapping[Cell, Sequence[str]],
    trials: Trials,
    *,
    failed: Mapping[str, Sequence[Cell]] | None = None,
    progress: Progress | None = None,
) -> Findings:
    """Test known winners without timing anything: in each cell the first name that passes leads."""
    ranked = {cell: tuple(names) for cell, names in wanted.items()}
    trials.prepare({names[0] for names in ranked.values() if names})
    tests = _ByteTests(trials, failed or {})
    return first_passing(ranked, tests, {}, lambda n: progress(n, len(ranked)) if progress is not None else None)


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
    """The fastest few down to `fixed`, with one among them that another version of cuBLAS knows too."""
    faster = list(names[: names.index(FIXED)] if FIXED in names else names)
    best = faster[:KEPT]
    if best and all(name.startswith(f"{CUBLASLT}#") for name in best):
        best[KEPT - 1 :] = [name for name in faster if not name.startswith(f"{CUBLASLT}#")][:1]
    return tuple(best) or (FIXED,)


class _ByteTests:
    """What byte tests have said so far."""

    def __init__(self, trials: Trials, failed: Mapping[str, Sequence[Cell]]) -> None:
        self._trials = trials
        self._failed = {name: list(cells) for name, cells in failed.items()}
        self._known: dict[tuple[Cell, str], bool] = {}
        self._errors: dict[tuple[Cell, str], str] = {}

    @property
    def failed(self) -> dict[str, tuple[Cell, ...]]:
        return {name: tuple(cells) for name, cells in self._failed.items()}

    def rejected(self, name: str, cell: Cell) -> bool:
        """Whether the name failed here, or, as a single kernel, anywhere."""
        return name in self._failed and (is_one_kernel(name) or cell in self._failed[name])

    def error(self, name: str, cell: Cell) -> str | None:
        """Why the name could not be tested here, if so."""
        return None if self.rejected(name, cell) else self._errors.get((cell, name))

    def passes(self, name: str, cell: Cell) -> bool:
        if name == FIXED:
            return True
        if self.rejected(name, cell):
            return False
        if (cell, name) not in self._known:
            try:
                same = self._trials.same_bytes(cell, name)
            except CannotRunError as error:
                self._errors[cell, name] = str(error)
                self._known[cell, name] = False
                return False
            if not same:
                self._failed.setdefault(name, []).append(cell)
            self._known[cell, name] = same
        return self._known[cell, name]


def first_passing(
    ranked: Mapping[Cell, tuple[str, ...]],
    tests: _ByteTests,
    times: dict[Cell, dict[str, float]],
    progress: Callable[[int], None],
) -> Findings:
    """Per cell the first name that passes the byte test, and those after it."""
    names: dict[Cell, tuple[str, ...]] = {}
    ahead: dict[Cell, tuple[str, ...]] = {}
    waiting = list(ranked)
    while waiting:
        for cell in waiting:
            first = next((i for i, name in enumerate(ranked[cell]) if tests.passes(name, cell)), None)
            ahead[cell] = ranked[cell][:first]
            names[cell] = (FIXED,) if first is None else ranked[cell][first:]
            progress(len(names))
        waiting = [cell for cell, kept in names.items() if tests.rejected(kept[0], cell)]  # failed since
    errors = {cell: [e for name in tried if (e := tests.error(name, cell))] for cell, tried in ahead.items()}
    return Findings(
        names={cell: tuple(n for n in kept if not tests.rejected(n, cell)) for cell, kept in names.items()},
        failed=tests.failed,
        open={cell: tuple(n for n in ranked[cell] if not tests.rejected(n, cell)) for cell in errors if errors[cell]},
        errors=tuple(dict.fromkeys(error for found in errors.values() for error in found)),
        times=times,
    )
