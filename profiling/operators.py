"""Every operator beside its peer and its floor, in the same run, each in a CUDA graph.

A graph holds one call per input set, and a replay walks all sets, so that a large operator finds neither inputs nor
outputs in cache (`inputs` says cold). Small ones fit there whatever is done (L2), as they do in a forward, where the
operator before has just written them. Peers run over inputs of the same sizes:

    delta_rule        flash-linear-attention's chunk rule, grouped heads; branches start from copies of the state
    attention         torch SDPA; branches have copies of the keys, lower-right causal (no gate, which ours applies)
    row operators     a copy that moves as many bytes
    linear_fixed      F.linear, the library's own choice

    python profiling/operators.py --heads 9b --out profiling/results/operators.jsonl
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import cases
import torch
from measure import Record, Results, graph_times
from operator_benches import MAX_SETS, NAMES, Bench, Call, benches, chunk_rule


@dataclass(kw_only=True)
class Row:
    bench: Bench
    sets: int
    cold: bool
    samples_us: list[float]
    peer_samples_us: list[float]
    error: str = ""
    peer_error: str = ""

    @property
    def us(self) -> float | None:
        return statistics.median(self.samples_us) if self.samples_us else None

    @property
    def peer_us(self) -> float | None:
        return statistics.median(self.peer_samples_us) if self.peer_samples_us else None

    @property
    def ratio(self) -> float | None:
        return self.us / self.peer_us if self.us is not None and self.peer_us is not None else None

    @property
    def met(self) -> str:
        """The better of mark and goal that this row keeps, `neither`, or `-` when there is nothing to compare."""
        value = self.ratio if self.bench.relative else self.us
        if value is None or self.bench.mark is None:
            return "-"
        if self.bench.goal is not None and value <= self.bench.goal:
            return "goal"
        return "mark" if value <= self.bench.mark else "neither"


def sets_for(num_bytes: int, cache_bytes: int) -> tuple[int, bool]:
    """Input sets of a graph, and whether together they are twice the cache or more, so that none is found there."""
    sets = max(2, min(MAX_SETS, -(-2 * cache_bytes // num_bytes)))
    return sets, sets * num_bytes >= 2 * cache_bytes


def timed(calls: Sequence[Call], repeats: int) -> list[float]:
    """Microseconds of one call, raw samples. The results of a replay are kept until its end, so none shares memory."""
    return [us / len(calls) for us in graph_times(lambda: [call() for call in calls], repeats=repeats)]


def measure(bench: Bench, cache_bytes: int, repeats: int) -> Row:
    """Time a bench. An error of the operator or of its peer is kept in the row, so that the others still run."""
    sets, cold = sets_for(bench.cost.bytes, cache_bytes)
    row = Row(bench=bench, sets=sets, cold=cold, samples_us=[], peer_samples_us=[])
    try:
        pairs = bench.build(sets)
        row.samples_us = timed([ours for ours, _ in pairs], repeats)
    except Exception as error:
        row.error = _one_line(error)
        return row
    peers = [peer for _, peer in pairs if peer is not None]
    try:
        row.peer_samples_us = timed(peers, repeats) if peers else []
    except Exception as error:
        row.peer_error = _one_line(error)
    return row


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().split("\n")[0][:160]


def record_of(row: Row, heads: str, ceilings: cases.Ceilings) -> Record:
    bench = row.bench
    return Record(
        kind="operator",
        name=f"{bench.operator}/{bench.case}",
        samples_us=row.samples_us,
        configuration={
            "heads": heads,
            "sets": row.sets,
            "inputs": "cold" if row.cold else "L2",
            "bytes": bench.cost.bytes,
            "flops": bench.cost.flops,
            "ceilings": vars(ceilings),
            "peer_samples_us": row.peer_samples_us,
            "peer_error": row.peer_error,
            "mark": bench.mark,
            "goal": bench.goal,
            "relative": bench.relative,
        },
        peer=bench.peer,
        ratio=row.ratio,
        floor_us=ceilings.floor_us(bench.cost),
    )


HEADERS = ("operator", "case", "us", "peer us", "ratio", "floor us", "mark", "goal", "met", "inputs", "peer or error")


def line(row: Row, ceilings: cases.Ceilings) -> tuple[str, ...]:
    bench = row.bench

    def number(value: float | None, text: str = "{:,.1f}") -> str:
        return "-" if value is None else text.format(value)

    target = "{:.2f} x" if bench.relative else "{:,.0f}"
    return (
        bench.operator,
        bench.case,
        "error" if row.error else number(row.us),
        "error" if row.peer_error else number(row.peer_us),
        number(row.ratio, "{:.2f}"),
        number(ceilings.floor_us(bench.cost)),
        number(bench.mark, target),
        number(bench.goal, target),
        row.met,
        "cold" if row.cold else "L2",
        row.error or row.peer_error or bench.peer,
    )


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description="Time every operator beside its peer and its floor.")
    p.add_argument("--heads", choices=("4b", "9b", "27b"), default="9b", help="whose sizes (%(default)s)")
    p.add_argument("--only", type=cases.several(str, NAMES), default=list(NAMES), metavar="A,B", help=", ".join(NAMES))
    p.add_argument("--no-fla", action="store_true", help="without flash-linear-attention, which tunes itself at first")
    cases.add_arguments(p, repeats=20)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    if cases.without_cuda("operators"):
        return 2
    device = torch.device("cuda")
    chosen = benches(arguments.heads, device, None if arguments.no_fla else chunk_rule())
    return run(
        (bench for bench in chosen if bench.operator in arguments.only),
        heads=arguments.heads,
        cache_bytes=torch.cuda.get_device_properties(device).L2_cache_size,
        repeats=arguments.repeats,
        ceilings=cases.ceilings_of(arguments),
        results=Results(arguments.out) if arguments.out else None,
    )


def run(
    chosen: Iterable[Bench],
    *,
    heads: str,
    cache_bytes: int,
    repeats: int,
    ceilings: cases.Ceilings,
    results: Results | None,
) -> int:
    """Measure, record and print; 1 when an operator failed, else 0."""
    rows = []
    for bench in chosen:
        row = measure(bench, cache_bytes, repeats)
        torch.cuda.empty_cache()
        rows.append(row)
        cases.progress(f"{bench.operator} {bench.case}: {row.error or f'{row.us:,.1f} us'}")
        if results is not None and not row.error:
            results.add(record_of(row, heads, ceilings))
    cases.print_table(HEADERS, [line(row, ceilings) for row in rows])
    return int(any(row.error for row in rows))


if __name__ == "__main__":
    sys.exit(main())
