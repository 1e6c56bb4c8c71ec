"""Plots of a comparison and of operators, as PNG and SVG.

    python profiling/plots.py OUT                                        # the folder of profiling/compare.py
    python profiling/plots.py OUT --operators profiling/results/FILE.jsonl --to FOLDER

The first gives latency against candidates and against the length of the state, a line for each way to answer, and how
tokens, time and memory grow with candidates; the second the time of each operator beside its peer and floor.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plot_data import FAMILIES, by_candidates, by_state, growth, read_operators, read_run

from engine.errors import ConfigError, ForkgraphError


def plot_run(folder: Path, to: Path) -> list[Path]:
    """Every plot of a comparison, into `to`; the files written.

    Raises ConfigError for a folder without one, and without matplotlib.
    """
    figures = _figures()
    run, written = read_run(folder), list[Path]()
    for family, arms in FAMILIES.items():
        if any(arm in {cell.arm for cell in run.cells} for arm in arms[1:]):
            for axis, panels in (("candidates", by_candidates(run, arms)), ("state", by_state(run, arms))):
                written += figures.lines(panels, to / f"latency-{axis}-{family}", run.subject)
    written += figures.lines(growth(run), to / "growth", run.subject)
    return written


def plot_operators(path: Path, to: Path) -> list[Path]:
    """Time per operator, into `to`; the files written. Raises ConfigError for another file, and without matplotlib."""
    bars, subject = read_operators(path)
    written: list[Path] = _figures().bars(bars, to / "operators", subject)
    return written


def _figures() -> Any:
    try:
        import plot_figures
    except ImportError as error:
        if error.name and error.name.partition(".")[0] == "matplotlib":
            raise ConfigError("matplotlib is not installed; run pip install -e '.[plot]'") from None
        raise
    return plot_figures


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", metavar="OUT", help="folder of a comparison")
    parser.add_argument("--operators", type=Path, metavar="FILE", help="records of operators.py")
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="where the plots go (OUT/plots, or plots)")
    arguments = parser.parse_args(argv)
    if arguments.run is None and arguments.operators is None:
        parser.error("give OUT, --operators FILE, or both")
    to = arguments.to or (arguments.run or Path()) / "plots"
    written: list[Path] = []
    try:
        if arguments.run:
            written += plot_run(arguments.run, to)
        if arguments.operators:
            written += plot_operators(arguments.operators, to)
    except ForkgraphError as error:
        print(f"plots: {error}", file=sys.stderr)
        return 2
    print("\n".join(map(str, written)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
