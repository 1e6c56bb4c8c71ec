"""Tables of a comparison, for a terminal and as Markdown. Computes nothing that the cells do not hold."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields

from compare_journal import FEASIBILITY, PASSES, RUN, Cell, Difference, Journal, RequestFacts
from compare_options import BASE, ENGINE_ARMS, PLAIN, REFERENCE, CompareConfig, GatesConfig
from gates import Verdict, pass_means
from rich.table import Table
from rich.text import Text

_ALONE = ("m1", "m2", "m3")
"""Sets whose requests have a table each; of the others, many and small, only all together are shown."""
_MIB = 2**20

NOT_RUN = (
    "Not run as peers: vLLM, SGLang and open-jev-fast, which were not installed. What is compared is each candidate's "
    "final hidden state, with the candidates of one request forked at any token from one prefix. vLLM keeps the state "
    "of a hybrid at block borders only, 528 to 2,096 tokens apart in reports, and a shared prefix shorter than a block "
    "never hits. SGLang's scoring of many items in one sequence keeps them apart by attention masks, which a recurrent "
    "layer does not have, and its radix cache has no state where an edge is split. What open-jev-fast has published is "
    "of 27B on a B300."
)


class Report:
    """Paragraphs and tables in order. `markdown` and `renderables` show the same."""

    def __init__(self) -> None:
        self._parts: list[str | tuple[Sequence[str], Sequence[Sequence[str]]]] = []

    def heading(self, text: str) -> None:
        self._parts.append(f"## {text}")

    def text(self, text: str) -> None:
        self._parts.append(text)

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """The first column is left-aligned, the others to the right."""
        if rows:
            self._parts.append((headers, rows))

    def markdown(self, title: str) -> str:
        parts = [f"# {title}"]
        for part in self._parts:
            if isinstance(part, str):
                parts.append(part)
                continue
            headers, rows = part
            lines = [headers, ["---", *["---:"] * (len(headers) - 1)], *rows]
            parts.append("\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines))
        return "\n\n".join(parts) + "\n"

    def renderables(self) -> Iterable[Text | Table]:
        for part in self._parts:
            if isinstance(part, str):
                yield Text("\n" + part.removeprefix("## "), style="bold" if part.startswith("## ") else "")
                continue
            headers, rows = part
            table = Table(box=None, pad_edge=False, header_style="bold")
            for i, header in enumerate(headers):
                table.add_column(header, justify="right" if i else "left", no_wrap=not i)
            for row in rows:
                table.add_row(*map(Text, row))
            yield table


def report_of(journal: Journal, config: CompareConfig, verdicts: Sequence[Verdict], notes: Sequence[str]) -> Report:
    """Gates first, then what was measured, then what it cost to get ready."""
    report = Report()
    _gates(report, verdicts, config.gates)
    _differences(report, list(journal.differences.values()), config.gates)
    by_request = defaultdict[str, list[Cell]](list)
    for cell in journal.cells.values():
        by_request[cell.request].append(cell)
    facts = list(journal.requests.values())
    for one in facts:
        if one.set in _ALONE:
            _request(report, one, by_request[one.request], config.arms)
    for name in config.sets:
        members = [one for one in facts if one.set == name]
        if members and name not in _ALONE:
            _set(report, name, members, by_request, config.arms)
    _preparations(report, journal, config.arms)
    report.heading("Notes")
    for note in (*notes, NOT_RUN):
        report.text(note)
    return report


def _gates(report: Report, verdicts: Sequence[Verdict], limits: GatesConfig) -> None:
    report.heading("Gates")
    declared = GatesConfig()
    values = [(f.name, getattr(limits, f.name), getattr(declared, f.name)) for f in fields(limits)]
    shown = [f"{name} {now:g}" + (f" (declared: {was:g})" if now != was else "") for name, now, was in values]
    report.text(f"Limits: {', '.join(shown)}. Speed: mean of the measured passes, `{BASE}` against `{REFERENCE}`.")
    report.table(("gate", "of", "outcome", "found"), [(v.gate, v.subject, v.outcome, v.detail) for v in verdicts])


def _differences(report: Report, differences: Sequence[Difference], limits: GatesConfig) -> None:
    report.heading("Distances, reported and not gated")
    report.text(
        f"`{PLAIN}` is today's forward: the library's own products, every candidate alone. Its rounding differs from "
        "the base's by the products, not by sharing. "
        f"Declared beforehand: every decision equal, probabilities within {limits.probability:g}, head within "
        f"{limits.head:g}, hidden states within {limits.hidden:g} relative L2."
    )
    groups = defaultdict[tuple[str, str, str], list[Difference]](list)
    for one in differences:
        groups[one.arm, one.other, "all"].append(one)
        groups[one.arm, one.other, one.set].append(one)
    rows = []
    for (arm, other, name), members in sorted(groups.items()):
        hidden = [distance for one in members for distance in one.hidden]
        rows.append(
            (
                f"{arm} and {other}",
                name,
                f"{sum(one.decisions_equal for one in members):,} of {sum(one.decisions for one in members):,}",
                f"{max(one.probability for one in members):.4f}",
                f"{sum(one.probabilities_close for one in members):,} of {sum(one.probabilities for one in members):,}",
                f"{max(one.head for one in members):.4f}",
                f"{statistics.median(hidden):.1e}",
                f"{max(hidden):.1e}",
                f"{sum(one.identical for one in members):,} of {len(hidden):,}",
            )
        )
    close = f"within {limits.close_probability:g}"
    report.table(
        (
            "pair", "set", "decisions equal", "max dp", close, "max head", "hidden median", "hidden max",
            "same bits",
        ),
        rows,
    )  # fmt: skip


def _request(report: Report, facts: RequestFacts, cells: Sequence[Cell], arms: Sequence[str]) -> None:
    report.heading(facts.request)
    text = (
        f"{facts.candidates} candidates of {facts.questions} question{'s' if facts.questions > 1 else ''}, "
        f"{facts.logical_tokens:,} tokens, {facts.unique_rows:,} of them unique, {facts.prefix_tokens:,} shared by "
        f"all; read and tokenised in {facts.tokenise_ms:.1f} ms, which no time below holds."
    )
    if facts.gemm_only_us is not None and facts.roofline_us is not None:
        text += f" GEMM-only {facts.gemm_only_us / 1e3:,.2f} ms, its roofline {facts.roofline_us / 1e3:,.2f} ms."
    report.text(text)
    alone = _mean(pass_means(cells, REFERENCE))
    rows = []
    for arm in arms:
        own = [cell for cell in cells if cell.arm == arm]
        if not own:
            continue
        measured = [cell for cell in own if cell.ran and cell.pass_number != FEASIBILITY]
        if not measured:
            why = next((cell.status for cell in own if not cell.ran), "feasibility pass only")
            rows.append((arm, why, *["-"] * 8))
            continue
        last, mean = measured[-1], _mean(pass_means(cells, arm))
        assert mean is not None
        about = "" if last.whole else "~"
        planned = last.planned_bytes
        rows.append(
            (
                arm,
                str(last.candidates) if last.whole else f"{last.candidates_run} of {last.candidates}",
                f"{about}{mean:,.2f}",
                f"{about}{statistics.median([ms for cell in measured for ms in cell.whole_ms]):,.2f}",
                "-" if facts.gemm_only_us is None else f"{about}{mean * 1e3 / facts.gemm_only_us:.2f}",
                "-" if alone is None else f"{about}{alone / mean:.2f}",
                f"{sum(last.rows.values()):,}/{last.logical_tokens:,}",
                f"{sum(last.passes.values())}" if last.passes else "-",
                _mib(max((cell.peak_bytes for cell in own if cell.peak_bytes is not None), default=None)),
                f"{_mib(planned.get('snapshots'))} + {_mib(planned.get('pass_scratch'))}" if planned else "-",
            )
        )
    report.table(
        (
            "arm", "run", "mean ms", "median ms", "/GEMM", "faster", "rows/tokens", "passes", "peak MiB",
            "snap+scratch",
        ),
        rows,
    )  # fmt: skip


def _set(
    report: Report,
    name: str,
    members: Sequence[RequestFacts],
    by_request: dict[str, list[Cell]],
    arms: Sequence[str],
) -> None:
    """One line for each arm over all requests that it and the reference were measured on."""
    report.heading(name)
    tokens, unique = sum(one.logical_tokens for one in members), sum(one.unique_rows for one in members)
    report.text(
        f"{len(members)} requests, {sum(one.candidates for one in members):,} candidates, {tokens:,} tokens, "
        f"{unique:,} of them unique. Means and medians are over requests, each the mean of its passes; faster than "
        f"`{REFERENCE}` on the same requests."
    )
    rows = []
    for arm in arms:
        times = {one.request: _mean(pass_means(by_request[one.request], arm)) for one in members}
        found = {request: ms for request, ms in times.items() if ms is not None}
        if not found:
            continue
        cells = [cell for request in found for cell in by_request[request] if cell.arm == arm and cell.ran]
        about = "" if all(cell.whole for cell in cells if cell.pass_number != FEASIBILITY) else "~"
        pairs = [(ms, _mean(pass_means(by_request[request], REFERENCE))) for request, ms in found.items()]
        both = [(ms, alone) for ms, alone in pairs if alone is not None]
        gemm = {one.request: one.gemm_only_us for one in members}
        over = [ms * 1e3 / us for request, ms in found.items() if (us := gemm[request])]
        faster = sum(alone for _, alone in both) / sum(ms for ms, _ in both) if both else None
        peaks = [cell.peak_bytes for cell in cells if cell.peak_bytes is not None]
        rows.append(
            (
                arm,
                f"{len(found)} of {len(members)}",
                f"{about}{statistics.mean(found.values()):,.2f}",
                f"{about}{statistics.median(found.values()):,.2f}",
                f"{about}{statistics.geometric_mean(over):.2f}" if over else "-",
                f"{about}{faster:.2f}" if faster else "-",
                _mib(max(peaks, default=None)),
            )
        )
    report.table(("arm", "requests", "mean ms", "median ms", "/GEMM", "faster", "peak MiB"), rows)


def _preparations(report: Report, journal: Journal, arms: Sequence[str]) -> None:
    report.heading("Before and beside the measurements")
    report.text(
        "Ready: an arm opened over the weights, compiled and warmed up, in the last start. Captures: CUDA graphs made "
        "after a request that had none yet; forwards that had none are left out and taken again. Not run: cells by "
        "reason."
    )
    cells = defaultdict[str, list[Cell]](list)
    for cell in journal.cells.values():
        cells[cell.arm].append(cell)
    rows = []
    for arm in arms:
        prepared, own = journal.preparations.get(arm), cells[arm]
        options = " ".join(f"{k}={v}" for k, v in ENGINE_ARMS.get(arm, {}).items())
        reasons = [cell.status for cell in own if not cell.ran]
        if prepared is not None and prepared.status != RUN:
            reasons.append(prepared.status)
        counted = [f"{text} ({reasons.count(text)})" for text in dict.fromkeys(reasons)]
        rows.append(
            (
                f"{arm} ({options})" if options else arm,
                "-" if prepared is None else f"{prepared.seconds:.1f}",
                f"{sum(cell.capture_seconds for cell in own):.1f}",
                f"{_count(own, lambda cell: cell.retaken)}",
                " / ".join(f"{_count(own, lambda cell, n=n: cell.ran and cell.pass_number == n)}" for n in PASSES),
                "; ".join(counted) or "-",
            )
        )
    report.table(("arm", "ready s", "captures s", "retaken", "cells by pass", "not run"), rows)


def _count(cells: Iterable[Cell], of: Callable[..., int]) -> int:
    return sum(of(cell) for cell in cells)


def _mean(values: Sequence[float]) -> float | None:
    return statistics.mean(values) if values else None


def _mib(count: int | None) -> str:
    return "-" if count is None else f"{count / _MIB:,.0f}"
