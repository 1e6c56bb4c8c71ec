"""What a layout will run and hold, as figures and as a drawing. Knows no tensor: everything follows from dimensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from engine.config import SPLITS, EngineConfig, dtype_bytes
from engine.errors import CapacityError, shown
from engine.load.dimensions import ModelDimensions
from engine.plan.layout import Layout, Segment, build_layout
from engine.plan.memory import scratch_bytes
from engine.plan.schedule import Limits, plan_passes
from engine.prompt import Prompt
from graphs.rungs import rung
from graphs.times import PassTimes, measured
from ops.sizes import crosses_border
from ops.tables import MAX_ROWS

_UNFOLDED = 6  # a longer list shows its first entries, how many are left out, and its last
_HEAD = 3

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class QuestionFigures:
    """Tokens of one question: of its own prefix (0 for none) and of each candidate's branch."""

    name: str
    prefix_tokens: int
    branch_tokens: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LayoutFigures:
    """What one layout runs, and what the schedules `levels` and `tree` hold for it.

    Question snapshots are counted as if all were alive at once. Scratch is that of the largest pass at its rung; None
    where the tree exceeds the rows of one pass. `milliseconds` are those of its passes on the GPUs that were measured.
    """

    rows: int
    request_prefix_tokens: int
    question_prefix_tokens: int
    request_snapshot_bytes: int
    question_snapshot_bytes: int
    levels_scratch_bytes: int
    tree_state_bytes: int
    tree_scratch_bytes: int | None
    milliseconds: Mapping[str, float]
    questions: tuple[QuestionFigures, ...]


@dataclass(frozen=True, kw_only=True)
class ExplainReport:
    """`full_rows` is what runs when every candidate is read whole; `layouts` are the ways to run fewer, by name."""

    candidates: int
    full_rows: int
    weight_bytes: int
    layouts: Mapping[str, LayoutFigures]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values that JSON can hold."""
        return asdict(self)

    def renderable(self) -> RenderableType:
        """The tree of the first layout, above a table that compares all of them."""
        name, figures = next(iter(self.layouts.items()))
        times = [f"about {ms:,.0f} ms on one {gpu}" for gpu, ms in figures.milliseconds.items()]
        facts = "; ".join([f"weights {readable(self.weight_bytes)}", *times])
        return Group(self._tree(name, figures), Text(), self._table(), Text(facts, style="dim"))

    def _tree(self, name: str, figures: LayoutFigures) -> Tree:
        title = f"{_count(self.candidates, 'candidate')}, {_count(self.full_rows, 'token')} in all; {name} prefixes"
        root = Tree(Text(title, style="bold"), guide_style="dim")
        below = root
        if figures.request_prefix_tokens:
            below = root.add(_line("request prefix", figures.request_prefix_tokens))
        shown_first, folded, shown_last = _fold(figures.questions)
        for question in shown_first:
            _add_question(below, question)
        if folded:
            tokens = sum(question.prefix_tokens + sum(question.branch_tokens) for question in folded)
            below.add(Text(f"... {_count(len(folded), 'more question')}, {_count(tokens, 'token')}", style="dim"))
        for question in shown_last:
            _add_question(below, question)
        return root

    def _table(self) -> Table:
        """A line for each figure and a column for each layout, so that it fits a terminal of 80 columns."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("")
        for name in ("full", *self.layouts):
            table.add_column(Text(name), justify="right")
        layouts = self.layouts.values()
        table.add_row("tokens run", f"{self.full_rows:,}", *(f"{f.rows:,}" for f in layouts))
        table.add_row("of full", "100.0 %", *(f"{100 * f.rows / self.full_rows:.1f} %" for f in layouts))
        table.add_row("request prefix", "", *(f"{f.request_prefix_tokens:,}" for f in layouts))
        table.add_row("question prefixes", "", *(f"{f.question_prefix_tokens:,}" for f in layouts))
        snapshots = (f.request_snapshot_bytes + f.question_snapshot_bytes for f in layouts)
        table.add_row("levels: snapshots", "", *map(readable, snapshots))
        table.add_row("levels: scratch", "", *(readable(f.levels_scratch_bytes) for f in layouts))
        table.add_row("tree: states", "", *(readable(f.tree_state_bytes) for f in layouts))
        scratch = (f.tree_scratch_bytes for f in layouts)
        table.add_row("tree: scratch", "", *("too large" if s is None else readable(s) for s in scratch))
        return table


def explain_prompts(
    questions: Sequence[Sequence[Prompt]],
    config: EngineConfig,
    dimensions: ModelDimensions,
    names: Sequence[str],
) -> ExplainReport:
    """What a request of these candidates would run under each split, that of `config`, which is resolved, first."""
    splits = sorted(SPLITS, key=lambda split: split != config.split)
    return explain_report(
        {split: build_layout(questions, split) for split in splits},
        dimensions,
        dtype_bytes(config.dtype),
        question_names=names,
        times=measured(config.model) if config.dtype == "bfloat16" else (),
    )


def explain_report(
    layouts: Mapping[str, Layout],
    dimensions: ModelDimensions,
    dtype_bytes: int,
    *,
    question_names: Sequence[str] | None = None,
    times: Sequence[PassTimes] = (),
) -> ExplainReport:
    """Figures of one request under the layouts given by name, at least one; the first is the one that is drawn.

    Questions are numbered from 1 unless named, in request order.
    """
    first = next(iter(layouts.values()))
    assert all(layout.full_rows == first.full_rows for layout in layouts.values()), "layouts of different requests"
    names = question_names or [str(q + 1) for q in range(first.question_of[-1] + 1)]
    return ExplainReport(
        candidates=first.num_prompts,
        full_rows=first.full_rows,
        weight_bytes=dimensions.weight_bytes(dtype_bytes).total,
        layouts={name: _figures(layout, dimensions, dtype_bytes, names, times) for name, layout in layouts.items()},
    )


def readable(size: int) -> str:
    """Bytes in the largest binary unit that leaves at least 1."""
    if size < 1024:
        return f"{size} B"
    value = float(size)
    for unit in ("KiB", "MiB"):
        value /= 1024
        if value < 1024:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:,.2f} GiB"


def _figures(
    layout: Layout,
    dimensions: ModelDimensions,
    dtype_bytes: int,
    names: Sequence[str],
    times: Sequence[PassTimes],
) -> LayoutFigures:
    sizes = dimensions.snapshot_bytes(dtype_bytes)
    levels = {kind: [s for s in layout.segments if s.kind == kind] for kind in ("request", "question", "branch")}
    rows_of_level = {kind: sum(s.length for s in segments) for kind, segments in levels.items()}
    prefix_tokens = {s.question: s.length for s in levels["question"]}
    branch_tokens: dict[int, list[int]] = {}
    for segment in levels["branch"]:
        branch_tokens.setdefault(segment.question, []).append(segment.length)

    def states(prefixes: Sequence[Segment]) -> int:
        """A prefix that crosses no chunk border goes on with its parent's state."""
        return sum(crosses_border(s.start, s.end) for s in prefixes)

    def snapshots(prefixes: Sequence[Segment]) -> int:
        return sizes.buffers(kv_rows=sum(s.length for s in prefixes), slots=len(prefixes), states=states(prefixes))

    def scratch(rows: int) -> int:
        return scratch_bytes(dimensions, rung(rows), dtype_bytes)

    return LayoutFigures(
        rows=layout.unique_rows,
        request_prefix_tokens=layout.request_prefix_tokens,
        question_prefix_tokens=layout.question_prefix_tokens,
        request_snapshot_bytes=snapshots(levels["request"]),
        question_snapshot_bytes=snapshots(levels["question"]),
        levels_scratch_bytes=scratch(min(max(rows_of_level.values()), MAX_ROWS)),  # a larger level runs in several
        tree_state_bytes=states([*levels["request"], *levels["question"]]) * sizes.state,
        tree_scratch_bytes=scratch(layout.unique_rows) if layout.unique_rows <= MAX_ROWS else None,
        milliseconds={one.gpu: sum(map(one.ms, _pass_rows(layout))) for one in times},
        questions=tuple(
            QuestionFigures(
                name=names[question],
                prefix_tokens=prefix_tokens.get(question, 0),
                branch_tokens=tuple(tokens),
            )
            for question, tokens in branch_tokens.items()
        ),
    )


def _pass_rows(layout: Layout) -> list[int]:
    """Rows of the passes that run: the tree where it fits, else levels."""
    try:
        plan = plan_passes(layout, schedule="tree", pack="all", limits=Limits())
    except CapacityError:
        plan = plan_passes(layout, schedule="levels", pack="all", limits=Limits())
    return [rung(one.rows) for one in plan.passes]


def _add_question(tree: Tree, question: QuestionFigures) -> None:
    branches = question.branch_tokens
    name = f"question {shown(question.name)}"
    if len(branches) == 1:
        tree.add(_line(name, branches[0]))
        return
    node = tree.add(_line(name, question.prefix_tokens) if question.prefix_tokens else Text(name))
    shown_first, folded, shown_last = _fold(list(enumerate(branches, 1)))
    for number, tokens in shown_first:
        node.add(_line(f"candidate {number}", tokens))
    if folded:
        lengths = [tokens for _, tokens in folded]
        node.add(Text(f"... {len(folded)} more, {min(lengths):,} to {max(lengths):,} tokens each", style="dim"))
    for number, tokens in shown_last:
        node.add(_line(f"candidate {number}", tokens))


def _fold(items: Sequence[Item]) -> tuple[Sequence[Item], Sequence[Item], Sequence[Item]]:
    """The entries to show, those to leave out, and the last one if any are left out."""
    if len(items) <= _UNFOLDED:
        return items, (), ()
    return items[:_HEAD], items[_HEAD:-1], items[-1:]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _line(label: str, tokens: int) -> Text:
    return Text.assemble(label, "  ", (_count(tokens, "token"), "cyan"))
