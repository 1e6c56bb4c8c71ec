"""The Markdown page of a comparison. Computes nothing that the cells do not hold."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import fields

from comparison.gates import Verdict, by_request, mean_ms
from comparison.journal import PASSES, RUN, Cell, Difference, Journal, RequestFacts
from comparison.options import BASE, ENGINE_ARMS, PLAIN, REFERENCE, SHOWN_ALONE, CompareConfig, GatesConfig
from engine.config import RANDOM
from engine.load.checkpoint import RANDOM_NOTE

NOT_RUN = (
    "Not run as peers: vLLM, SGLang and open-jev-fast, which were not installed. What is compared is each candidate's "
    "final hidden state, with the candidates of one request forked at any token from one prefix. vLLM keeps the state "
    "of a hybrid at block borders only, 528 to 2,096 tokens apart in reports, and a shared prefix shorter than a block "
    "never hits. SGLang's scoring of many items in one sequence keeps them apart by attention masks, which a recurrent "
    "layer does not have, and its radix cache has no state where an edge is split. What open-jev-fast has published is "
    "of 27B on a B300."
)


def page(journal: Journal, config: CompareConfig, verdicts: Sequence[Verdict], *, minutes: float, conv: bool) -> str:
    """Gates first, then what was measured, then what it cost to get ready. `minutes` were used in all; `conv` says
    whether transformers had the package causal-conv1d."""
    cells, facts = by_request(journal.cells.values()), list(journal.requests.values())
    parts = [f"# Comparison: {config.model}, {config.device}"]
    parts += _gates(verdicts, config.gates)
    parts += _differences(journal.differences.values(), config.gates)
    for one in facts:
        if one.set in SHOWN_ALONE:
            parts += _request(one, cells[one.request], config.arms)
    for name in config.sets:
        members = [one for one in facts if one.set == name]
        if members and name not in SHOWN_ALONE:
            parts += _set(name, members, cells, config.arms)
    parts += _preparations(journal, config.arms)
    parts += ["## Notes", *_notes(config, journal, minutes, conv), NOT_RUN]
    return "\n\n".join(parts) + "\n"


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """One table, the first column to the left and the others to the right; none without rows."""
    lines = [headers, ["---", *["---:"] * (len(headers) - 1)], *rows]
    text = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
    return [text] if rows else []


def _gates(verdicts: Sequence[Verdict], limits: GatesConfig) -> list[str]:
    declared = GatesConfig()
    values = [(f.name, getattr(limits, f.name), getattr(declared, f.name)) for f in fields(limits)]
    shown = [f"{name} {now:g}" + (f" (declared: {was:g})" if now != was else "") for name, now, was in values]
    text = f"Limits: {', '.join(shown)}. Speed: mean of the measured passes, `{BASE}` against `{REFERENCE}`."
    rows = [(v.gate, v.subject, v.outcome, v.detail) for v in verdicts]
    return ["## Gates", text, *table(("gate", "of", "outcome", "found"), rows)]


def _differences(differences: Iterable[Difference], limits: GatesConfig) -> list[str]:
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
    text = (
        f"`{PLAIN}` is today's forward: the library's own products, every candidate alone. Its rounding differs from "
        "the base's by the products, not by sharing. "
        f"Declared beforehand: every decision equal, probabilities within {limits.probability:g}, head within "
        f"{limits.head:g}, hidden states within {limits.hidden:g} relative L2."
    )
    close = f"within {limits.close_probability:g}"
    headers = (
        *("pair", "set", "decisions equal", "max dp", close, "max head"),
        *("hidden median", "hidden max", "same bits"),
    )
    return ["## Distances, reported and not gated", text, *table(headers, rows)]


def _request(facts: RequestFacts, cells: Sequence[Cell], arms: Sequence[str]) -> list[str]:
    text = (
        f"{facts.candidates} candidates of {facts.questions} question{'s' if facts.questions > 1 else ''}, "
        f"{facts.logical_tokens:,} tokens, {facts.unique_rows:,} of them unique, {facts.prefix_tokens:,} shared by "
        f"all; read and tokenised in {facts.tokenise_ms:.1f} ms, which no time below holds."
    )
    if facts.gemm_only_us is not None and facts.roofline_us is not None:
        text += f" GEMM-only {facts.gemm_only_us / 1e3:,.2f} ms, its roofline {facts.roofline_us / 1e3:,.2f} ms."
    alone = mean_ms(cells, REFERENCE)
    rows: list[tuple[str, ...]] = []
    for arm in arms:
        own = [cell for cell in cells if cell.arm == arm]
        measured, mean = [cell for cell in own if cell.measured], mean_ms(own, arm)
        if mean is None:
            why = next((cell.status for cell in own if not cell.ran), "feasibility pass only")
            rows += [(arm, why, *["-"] * 8)] if own else []
            continue
        last = measured[-1]
        about, planned = "" if last.whole else "~", last.planned_bytes
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
                _peak(own),
                f"{_mib(planned['snapshots'])} + {_mib(planned['pass_scratch'])}" if planned else "-",
            )
        )
    headers = (
        *("arm", "run", "mean ms", "median ms", "/GEMM", "faster", "rows/tokens", "passes", "peak MiB"),
        "snap+scratch",
    )
    return [f"## {facts.request}", text, *table(headers, rows)]


def _set(name: str, members: Sequence[RequestFacts], cells: dict[str, list[Cell]], arms: Sequence[str]) -> list[str]:
    """One line for each arm over all requests that it and the reference were measured on."""
    tokens, unique = sum(one.logical_tokens for one in members), sum(one.unique_rows for one in members)
    text = (
        f"{len(members)} requests, {sum(one.candidates for one in members):,} candidates, {tokens:,} tokens, "
        f"{unique:,} of them unique. Means and medians are over requests, each the mean of its passes; faster than "
        f"`{REFERENCE}` on the same requests."
    )
    rows = []
    for arm in arms:
        times = {one.request: mean_ms(cells[one.request], arm) for one in members}
        found = {request: ms for request, ms in times.items() if ms is not None}
        if not found:
            continue
        own = [cell for request in found for cell in cells[request] if cell.arm == arm and cell.ran]
        about = "" if all(cell.whole for cell in own if cell.measured) else "~"
        both = [(ms, alone) for request, ms in found.items() if (alone := mean_ms(cells[request], REFERENCE))]
        faster = f"{about}{sum(alone for _, alone in both) / sum(ms for ms, _ in both):.2f}" if both else "-"
        mean, median = statistics.mean(found.values()), statistics.median(found.values())
        counted = f"{len(found)} of {len(members)}"
        rows.append((arm, counted, f"{about}{mean:,.2f}", f"{about}{median:,.2f}", faster, _peak(own)))
    return [f"## {name}", text, *table(("arm", "requests", "mean ms", "median ms", "faster", "peak MiB"), rows)]


def _preparations(journal: Journal, arms: Sequence[str]) -> list[str]:
    text = (
        "Ready: an arm opened over the weights, compiled and warmed up, in the last start. Captures: CUDA graphs made "
        "after a request that had none yet; forwards that had none are left out and taken again. Not run: cells by "
        "reason."
    )
    rows = []
    for arm in arms:
        prepared, own = journal.preparations.get(arm), [cell for cell in journal.cells.values() if cell.arm == arm]
        options = " ".join(f"{k}={v}" for k, v in ENGINE_ARMS.get(arm, {}).items())
        reasons = [cell.status for cell in own if not cell.ran]
        if prepared is not None and prepared.status != RUN:
            reasons.append(prepared.status)
        rows.append(
            (
                f"{arm} ({options})" if options else arm,
                "-" if prepared is None else f"{prepared.seconds:.1f}",
                f"{sum(cell.capture_seconds for cell in own):.1f}",
                f"{sum(cell.retaken for cell in own)}",
                " / ".join(f"{sum(cell.ran and cell.pass_number == n for cell in own)}" for n in PASSES),
                "; ".join(f"{text} ({reasons.count(text)})" for text in dict.fromkeys(reasons)) or "-",
            )
        )
    headers = ("arm", "ready s", "captures s", "retaken", "cells by pass", "not run")
    return ["## Before and beside the measurements", text, *table(headers, rows)]


def _notes(config: CompareConfig, journal: Journal, minutes: float, conv: bool) -> list[str]:
    base = " ".join(f"{name}={getattr(config, name)}" for name in ("gemm", "schedule", "split", "graphs"))
    notes = [
        f"Base: {base}, {config.dtype} on {config.device}. Pass 0 is excluded; passes 1 and 2 are measured, "
        "requests and arms alternating, the arms in the other order in every second pass. A time is the wall time from "
        f"token ids to hidden states on the host. {minutes:.1f} of {config.budget_minutes:g} minutes were used.",
        "`~`: stated for all candidates from a run of the first few (column run), whose rows, tokens and passes are "
        "shown. /GEMM: mean time over that of the projections alone. Faster: mean time of `independent` over this one. "
        "Peak: the most the allocator held for the arm above the weights in any pass; what a replayed graph uses lies "
        "in its pool and is not in it, so planned snapshots and scratch (MiB) stand beside.",
    ]
    if config.checkpoint in (None, RANDOM):
        notes.append(f"{RANDOM_NOTE} Random weights support no claim about decisions.")
    if not conv and any(arm.startswith("transformers/") for arm in config.arms):
        notes.append("Transformers ran without the package causal-conv1d: its convolution is PyTorch's, on both paths.")
    readings = [cell.clocks for cell in journal.cells.values() if cell.clocks]
    if readings:
        ranges = [(name, sorted({reading[name] for reading in readings})) for name in readings[0]]
        shown = [f"{name} {found[0]}" + (f" to {found[-1]}" if len(found) > 1 else "") for name, found in ranges]
        notes.append(f"Logged and never changed: {'; '.join(shown)}.")
    return notes


def _peak(cells: Iterable[Cell]) -> str:
    return _mib(max((cell.peak_bytes for cell in cells if cell.peak_bytes is not None), default=None))


def _mib(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:,.0f}"
