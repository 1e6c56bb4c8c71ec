"""From the token ids of all prompts of one request to the tree of segments that is run. No tensors, no device.

Prefixes are found on ids, never on text: where two prompts part is the tokenizer's affair. A prompt always keeps one
token to run as its own branch, so equal prompts and a prompt that is the start of another are laid out like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from engine.errors import ConfigError, RequestError
from engine.prompt import Prompt, TokenIds
from ops.sizes import CHUNK

Split = Literal["exact", "aligned"]
Kind = Literal["request", "question", "branch"]


@dataclass(frozen=True, eq=False)
class Segment:
    """A run of tokens of the tree: `token_ids` [length] int32 at the absolute positions start..end-1.

    `parent` is the index of the segment that ends where this one starts, None at position 0; `question` is -1 for the
    request prefix.
    """

    kind: Kind
    start: int
    token_ids: TokenIds
    parent: int | None
    question: int

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, eq=False)
class Layout:
    """The segments of one request: request prefix, question prefixes in order, branches in prompt order.

    Either kind of prefix may be absent; every prompt has its own branch. Per prompt, in request order: its branch, its
    question, and its reads as (segment, row of that segment); a read may lie in a shared prefix.
    """

    split: Split
    segments: tuple[Segment, ...]
    branch_of: tuple[int, ...]
    question_of: tuple[int, ...]
    reads: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def num_prompts(self) -> int:
        return len(self.branch_of)

    @property
    def unique_rows(self) -> int:
        """Rows of the tree: what runs when every prefix is read once."""
        return sum(segment.length for segment in self.segments)

    @property
    def full_rows(self) -> int:
        """Rows of all prompts whole: what runs when nothing is shared."""
        return sum(self.segments[branch].end for branch in self.branch_of)

    @property
    def request_prefix_tokens(self) -> int:
        return self._tokens("request")

    @property
    def question_prefix_tokens(self) -> int:
        """Over all questions, what their prefixes add to the request prefix."""
        return self._tokens("question")

    def _tokens(self, kind: Kind) -> int:
        return sum(segment.length for segment in self.segments if segment.kind == kind)

    def path(self, prompt: int) -> tuple[int, ...]:
        """The segments a prompt runs through, from position 0 to its own branch: one to three indices."""
        return _path(self.segments, self.branch_of[prompt])


def build_layout(questions: Sequence[Sequence[Prompt]], split: Split, *, question_prefixes: bool = True) -> Layout:
    """Lay out a request so that every prefix common to all prompts, or to those of one question, is run once.

    A question of one prompt gets no prefix of its own, and a request of one prompt none at all. Without
    `question_prefixes` all branches hang under the request prefix: more rows, but one pass less for `levels`. Raises
    `RequestError` when there is no question or a question has no prompt, `ConfigError` for an unknown split.
    """
    if split not in get_args(Split):
        raise ConfigError(f"split must be exact or aligned, got {split!r}")
    _check(questions)
    own = [_common_prefix(prompts) for prompts in questions]
    shared = min(_common_prefix([prompts[0] for prompts in questions]), *own)
    if sum(len(prompts) for prompts in questions) == 1:
        shared = 0
    ends = [
        prefix if question_prefixes and len(prompts) > 1 else shared
        for prompts, prefix in zip(questions, own, strict=True)
    ]
    if split == "aligned":
        shared, ends = _border(shared), [_border(end) for end in ends]
    return _assemble(questions, split, shared, ends)


def independent_layout(questions: Sequence[Sequence[Prompt]]) -> Layout:
    """Every prompt whole, as one branch without a prefix. Raises `RequestError` as `build_layout` does."""
    _check(questions)
    return _assemble(questions, "exact", 0, [0] * len(questions))


def _check(questions: Sequence[Sequence[Prompt]]) -> None:
    if not questions:
        raise RequestError("questions must be a nonempty mapping", field="questions")
    for index, prompts in enumerate(questions):
        if not prompts:
            raise RequestError("a question must have at least one prompt", field=f"questions.{index}")


def _common_prefix(prompts: Sequence[Prompt]) -> int:
    """Length of the longest common prefix, at most one less than the shortest prompt: one token is left to run."""
    length = min(map(len, prompts)) - 1
    first = prompts[0].token_ids
    for prompt in prompts[1:]:
        differs = first[:length] != prompt.token_ids[:length]
        if differs.any():
            length = int(differs.argmax())
    return length


def _border(position: int) -> int:
    """Where the `aligned` split may end a prefix."""
    return position - position % CHUNK


def _assemble(questions: Sequence[Sequence[Prompt]], split: Split, shared: int, ends: Sequence[int]) -> Layout:
    """The tree with a request prefix of `shared` tokens and question prefixes ending at `ends`."""
    segments: list[Segment] = []

    def add(kind: Kind, ids: TokenIds, start: int, end: int | None, parent: int | None, question: int) -> int:
        segments.append(Segment(kind, start, ids[start:end], parent, question))
        return len(segments) - 1

    root = add("request", questions[0][0].token_ids, 0, shared, None, -1) if shared else None
    parents = [
        add("question", prompts[0].token_ids, shared, end, root, q) if end > shared else root
        for q, (prompts, end) in enumerate(zip(questions, ends, strict=True))
    ]
    branch_of, question_of, reads = [], [], []
    for q, (prompts, end) in enumerate(zip(questions, ends, strict=True)):
        for prompt in prompts:
            branch = add("branch", prompt.token_ids, end, None, parents[q], q)
            branch_of.append(branch)
            question_of.append(q)
            reads.append(tuple(_locate(segments, branch, position) for position in prompt.reads))
    return Layout(split, tuple(segments), tuple(branch_of), tuple(question_of), tuple(reads))


def _path(segments: Sequence[Segment], branch: int) -> tuple[int, ...]:
    path = [branch]
    while (parent := segments[path[0]].parent) is not None:
        path.insert(0, parent)
    return tuple(path)


def _locate(segments: Sequence[Segment], branch: int, position: int) -> tuple[int, int]:
    """(segment, row) of one position on the path that ends with `branch`."""
    index: int | None = branch
    while index is not None and position < segments[index].start:
        index = segments[index].parent
    assert index is not None
    return index, position - segments[index].start
