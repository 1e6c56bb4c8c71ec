"""Token ids and the rows that are read: what the executor is asked for. Knows no question and no tensor."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from engine.errors import RequestError

TokenIds = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Prompt:
    """One candidate as the model sees it: `token_ids` [tokens] int32, and the rows whose hidden states are wanted.

    `reads` are positions in the prompt, ascending; left empty, the last row alone. Raises `RequestError` for ids that
    are not a non-empty int32 vector and for reads that are no whole numbers, out of order or out of range.
    """

    token_ids: TokenIds
    reads: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        ids = self.token_ids
        if not isinstance(ids, np.ndarray) or ids.dtype != np.int32 or ids.ndim != 1:
            found = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, np.ndarray) else type(ids).__name__
            raise RequestError("token ids must be a one-dimensional int32 array", field="token_ids", value=found)
        if len(ids) == 0:
            raise RequestError("a prompt must have at least one token", field="token_ids")
        reads = _whole_numbers(self.reads) or (len(ids) - 1,)
        in_range = reads[0] >= 0 and reads[-1] < len(ids)
        if not in_range or any(a >= b for a, b in pairwise(reads)):
            text = f"reads must be ascending positions below the prompt's {len(ids)} tokens"
            raise RequestError(text, field="reads", value=reads)
        frozen = ids.view()
        frozen.flags.writeable = False
        object.__setattr__(self, "token_ids", frozen)
        object.__setattr__(self, "reads", reads)

    def __len__(self) -> int:
        return len(self.token_ids)


def checked_prompt(field: str, prompt: Prompt | Sequence[int], *, vocab_size: int, max_length: int) -> Prompt:
    """`prompt`, or token ids as one. Raises RequestError naming `field` for anything that the model cannot read."""
    ids = prompt.token_ids if isinstance(prompt, Prompt) else _token_ids(field, prompt)
    if ids.view(f"u{ids.itemsize}").max() >= vocab_size:  # as unsigned numbers, negative ones are the largest
        first = next(int(i) for i in ids if not 0 <= i < vocab_size)
        raise RequestError(f"a token id must be from 0 to {vocab_size - 1}", field=field, value=first)
    if len(ids) > max_length:
        text = f"Input length {len(ids)} exceeds max_length={max_length}; no silent truncation"
        raise RequestError(text, field=field, value=len(ids))
    return prompt if isinstance(prompt, Prompt) else Prompt(ids.astype(np.int32))


def checked_prompts(
    field: str, prompts: Sequence[Prompt | Sequence[int]], *, vocab_size: int, max_length: int
) -> list[Prompt]:
    """`checked_prompt` of each. Raises RequestError for no prompt, and for what is no list of them."""
    checked = [
        checked_prompt(f"{field}[{i}]", prompt, vocab_size=vocab_size, max_length=max_length)
        for i, prompt in enumerate(_listed(field, prompts))
    ]
    if not checked:
        raise RequestError("there must be at least one prompt", field=field)
    return checked


def checked_questions(
    questions: Sequence[Sequence[Prompt | Sequence[int]]], *, vocab_size: int, max_length: int
) -> list[list[Prompt]]:
    """`checked_prompts` of each. Raises RequestError for no question, and for what is no list of them."""
    checked = [
        checked_prompts(f"questions[{i}]", prompts, vocab_size=vocab_size, max_length=max_length)
        for i, prompts in enumerate(_listed("questions", questions))
    ]
    if not checked:
        raise RequestError("there must be at least one question", field="questions")
    return checked


Item = TypeVar("Item")


def _listed(field: str, items: Sequence[Item]) -> list[Item]:
    if isinstance(items, Prompt | str | bytes | Mapping) or not isinstance(items, Iterable):
        raise RequestError(f"must be a list of prompts, not {type(items).__name__}", field=field)
    return list(items)


def _whole_numbers(reads: Iterable[int]) -> tuple[int, ...]:
    try:
        reads = tuple(reads)
        if not any(isinstance(read, bool) for read in reads):
            return tuple(map(operator.index, reads))
    except TypeError:
        pass
    raise RequestError("reads must be whole numbers, the positions of tokens", field="reads", value=reads)


def _token_ids(field: str, prompt: Sequence[int]) -> npt.NDArray[np.integer[Any]]:
    text = "token ids must be a list of integers"
    try:
        if not len(prompt):
            raise RequestError("a prompt must have at least one token", field=field)
        if isinstance(prompt, list | tuple) and isinstance(prompt[0], list | tuple):
            raise TypeError("a list in the list")
        ids = np.asarray(prompt)
    except (TypeError, ValueError, OverflowError) as error:
        raise RequestError(f"{text}: {error}", field=field) from None
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise RequestError(text, field=field, value=f"{ids.dtype} {list(ids.shape)}")
    return ids.astype(ids.dtype.newbyteorder("="), copy=False)
