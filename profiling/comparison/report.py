"""The Markdown page of a comparison. Computes nothing that the cells do not hold."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import fields

from comparison.gates import Verdict, by_request, mean_ms
from comparison.journal import PASSES, RUN, Cell, Difference, Journal, Preparation, RequestFacts
from comparison.options import BASE, ENGINE_ARMS, PLAIN, REFERENCE, SHOWN_ALONE, CompareConfig, GatesConfig
from engine.config import RANDOM
from engine.load.checkpoint import RANDOM_NOTE

NOTES = (
    "Pass 0 is excluded; passes 1 and 2 are measured, requests and arms alternating, the arms in the other order in "
    "every second pass. A time is the wall time from token ids to hidden states on the host.",
    "`~`: stated for all candidates from a run of the first few (column run), whose rows and tokens are shown. /GEMM: "
    "time over that of the projections alone, the geometric mean over requests. Faster: time of `independent` over "
    "this one, on the same requests. Peak: the most the allocator held for the arm above the weights in any pass; what "
    "a replayed graph uses lies in its pool and is not in it, so planned snapshots and scratch (MiB) stand beside. "
    "Ready: an arm opened, compiled and warmed up, in the last start. Captures: CUDA graphs made for requests that had "
    "none yet; samples that waited for one are taken again.",
    "Not run as peers: vLLM, SGLang and open-jev-fast, which were not installed. What is compared is each candidate's "
    "final hidden state, with the candidates of one request forked at any token from one prefix. vLLM keeps the state "
    "of a hybrid at block borders only, 528 to 2,096 tokens apart in reports, and a shared prefix shorter than a block "
    "never hits. SGLang's scoring of many items in one sequence keeps them apart by attention masks, which a recurrent "
    "layer does not have, and its radix cache has no state where an edge is split. What open-jev-fast has published is "
    "of 27B on a B300.",
)


def page(journal: Journal, config: CompareConfig, verdicts: Sequence[Verdict], *, minutes: float, conv: bool) -> str:
    """Gates first, then what was measured, then what it cost to get ready. `minutes` were used in all; `conv` says
    whether transformers had the package causal-conv1d."""
    cells, facts = by_request(journal.cells.values()), list(journal.requests.values())
    groups = {one.request: [one] for one in facts if one.set in SHOWN_ALONE}
    groups |= {name: [one for one in facts if one.set == name] for name in config.sets if name not in SHOWN_ALONE}
    parts = [f"# Comparison: {config.model}, {config.device}", *_gates(verdicts, config.gates)]
    parts += _differences(journal.differences.values(), config.gates)
    for title, members in groups.items():
        parts += _times(title, members, cells, config.arms) if members else []
    parts += [*_preparations(journal, config.arms), "## Notes"]
    base = " ".join(f"{name}={getattr(config, name)}" for name in ("gemm", "schedule", "split", "graphs"))
    used = f"{minutes:.1f} of {config.budget_minutes:g} minutes were used."
    parts += [f"Base: {base}, {config.dtype} on {config.device}. {used}", *NOTES]
    if config.checkpoint in (None, RANDOM):
        parts.append(f"{RANDOM_NOTE} Random weights support no claim about decisions.")
    if not conv and any(arm.startswith("transformers/") for arm in config.arms):
        parts.append("Transformers ran without the package causal-conv1d: its convolution is PyTorch's, on both paths.")
    readings = [cell.clocks for cell in journal.cells.values() if cell.clocks]
    for name in readings[0] if readings else ():
        found = sorted({reading[name] for reading in readings})
        parts.append(f"Logged and never changed: {name} {found[0]}" + (f" to {found[-1]}." if len(found) > 1 else "."))
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
    groups = defaultdict[tuple[str, str], list[Difference]](list)
    for one in differences:
        for name in ("all", one.set):
            groups[f"{one.arm} and {one.other}", name].append(one)
    rows = []
    for (pair, name), members in sorted(groups.items()):
        hidden = [distance for one in members for distance in one.hidden]
        equal = f"{sum(one.decisions_equal for one in members):,} of {sum(one.decisions for one in members):,}"
        close = f"{sum(one.probabilities_close for one in members):,} of {sum(one.probabilities for one in members):,}"
        apart, head = (max(getattr(one, field) for one in members) for field in ("probability", "head"))
        same = f"{sum(one.identical for one in members):,} of {len(hidden):,}"
        spread = (f"{statistics.median(hidden):.1e}", f"{max(hidden):.1e}")
        rows.append((pair, name, equal, f"{apart:.4f}", close, f"{head:.4f}", *spread, same))
    text = (
        f"`{PLAIN}` is today's forward: the library's own products, every candidate alone. Its rounding differs from "
        "the base's by the products, not by sharing. "
        f"Declared beforehand: every decision equal, probabilities within {limits.probability:g}, head within "
        f"{limits.head:g}, hidden states within {limits.hidden:g} relative L2."
    )
    headers = ("pair", "set", "decisions equal", "max dp", f"within {limits.close_probability:g}", "max head")
    more = ("hidden median", "hidden max", "same bits")
    return ["## Distances, reported and not gated", text, *table((*headers, *more), rows)]


def _times(title: str, members: Sequence[RequestFacts], cells: dict[str, list[Cell]], arms: Sequence[str]) -> list[str]:
    """A line for each arm over the requests it was measured on."""
    gemm = {one.request: one.gemm_only_us for one in members}
    counts = ("candidates", "questions", "logical_tokens", "unique_rows", "prefix_tokens")
    candidates, questions, tokens, unique, shared = (sum(getattr(one, name) for one in members) for name in counts)
    tokenise_ms = sum(one.tokenise_ms for one in members)
    text = (
        f"{len(members)} requests, {candidates:,} candidates of {questions} questions, {tokens:,} tokens, {unique:,} "
        f"of them unique, {shared:,} shared by all; read and tokenised in {tokenise_ms:.1f} ms, which no time holds."
    )
    if len(members) == 1 and members[0].gemm_only_us and members[0].roofline_us:
        text += f" GEMM-only {members[0].gemm_only_us / 1e3:,.2f} ms, its roofline {members[0].roofline_us / 1e3:,.2f}."
    rows: list[tuple[str, ...]] = []
    for arm in arms:
        own = [cell for one in members for cell in cells[one.request] if cell.arm == arm]
        last = {cell.request: cell for cell in own if cell.measured}
        if not last:
            why = next((cell.status for cell in own if not cell.ran), "excluded pass only")
            rows += [(arm, why, *["-"] * 8)] if own else []
            continue
        means = {request: mean_ms(cells[request], arm) or 0.0 for request in last}
        alone = {request: ms for request in last if (ms := mean_ms(cells[request], REFERENCE))}
        over = [means[request] * 1e3 / us for request in last if (us := gemm[request])]
        about = "" if all(cell.whole for cell in last.values()) else "~"
        peaks = [cell.peak_bytes for cell in own if cell.peak_bytes is not None]
        planned = [cell.planned_bytes for cell in last.values() if cell.planned_bytes]
        sizes = [max(bytes[kind] for bytes in planned) for kind in ("snapshots", "pass_scratch")] if planned else []
        rows.append(
            (
                arm,
                f"{sum(c.candidates_run for c in last.values()):,} of {sum(c.candidates for c in last.values()):,}",
                f"{about}{statistics.mean(means.values()):,.2f}",
                f"{about}{statistics.median([ms for cell in own if cell.measured for ms in cell.whole_ms]):,.2f}",
                f"{about}{statistics.geometric_mean(over):.2f}" if over else "-",
                f"{about}{sum(alone.values()) / sum(means[r] for r in alone):.2f}" if alone else "-",
                f"{sum(cell.num_rows for cell in last.values()):,}/{sum(c.logical_tokens for c in last.values()):,}",
                f"{sum(sum(cell.passes.values()) for cell in last.values())}",
                f"{max(peaks) / 2**20:,.0f}" if peaks else "-",
                " + ".join(f"{size / 2**20:,.0f}" for size in sizes) or "-",
            )
        )
    headers = ("arm", "run", "mean ms", "median ms", "/GEMM", "faster", "rows/tokens", "passes", "peak MiB")
    return [f"## {title}", text, *table((*headers, "snap+scratch"), rows)]


def _preparations(journal: Journal, arms: Sequence[str]) -> list[str]:
    rows = []
    for arm in arms:
        prepared = journal.preparations.get(arm, Preparation(arm=arm, status=RUN))
        own = [cell for cell in journal.cells.values() if cell.arm == arm]
        reasons = [status for status in (*(cell.status for cell in own), prepared.status) if status != RUN]
        name = " ".join([arm, *(f"{k}={v}" for k, v in ENGINE_ARMS.get(arm, {}).items())])
        captures, retaken = sum(cell.capture_seconds for cell in own), sum(cell.retaken for cell in own)
        ran = " / ".join(f"{sum(cell.ran and cell.pass_number == n for cell in own)}" for n in PASSES)
        why = "; ".join(f"{text} ({reasons.count(text)})" for text in dict.fromkeys(reasons)) or "-"
        rows.append((name, f"{prepared.seconds:.1f}", f"{captures:.1f}", f"{retaken}", ran, why))
    headers = ("arm", "ready s", "captures s", "retaken", "cells by pass", "cells not run")
    return ["## Before and beside the measurements", *table(headers, rows)]
