"""Text to token ids. Knows the tokenizer's rules and the template's control tokens; knows nothing of questions.

A prompt is a row of pieces. Where the tokenizer's rules show that no token spans the border between two pieces
(`Tokens.joinable`), each distinct piece is tokenised once and the ids are joined; else prompts are tokenised whole.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from engine.errors import CheckpointError

Ids = NDArray[np.int32]

TOKENIZER = "tokenizer.json"


class Control(Enum):
    """Control tokens of the chat template. Only the template holds them; text that spells one is something else."""

    START = "<|im_start|>"
    END = "<|im_end|>"
    THINK = "<think>"
    END_THINK = "</think>"


Piece = tuple[str | Control, ...]
"""Control tokens, and the text around them."""

# A border between "\n" and an ASCII letter is a token border, whatever stands around it, because
#  - NFC: an ASCII letter has combining class 0 and never composes with what precedes it, so both sides normalise
#    on their own, and a line feed stays one.
#  - The patterns below: no alternative matches a line feed with a letter behind it (letters follow at most one
#    character, which is not a line feed; line feeds end the two alternatives that hold them), and every character is
#    matched by some alternative, so one match ends exactly at the border. The text before it is cut alike with and
#    without a right neighbour: greedy runs stop at the border either way, and the lookahead `\s+(?!\S)` is never asked
#    there, since a run of white space that ends in a line feed is taken whole by `\s*[\r\n]+`, which is tried first.
#    Nothing looks behind, so the text after the border is cut as if it stood alone.
#  - BPE without dropout works within one cut; ByteLevel adds no space.
#  - Added tokens (only `control="special"` looks for them) are found leftmost-longest; one that holds no line feed
#    cannot span the border, and without strip and word flags none looks at its neighbours.
_SPLIT_PATTERNS = {
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen3_5": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
}


class Tokens:
    """A tokenizer with the two readings of user text.

    `control="plain"`: text that spells an added token, special or not, becomes ordinary pieces.
    `control="special"`: it becomes that token, as in the reference implementation.

    `joinable` says that pieces may be tokenised one by one where a piece ends in a line feed and the next begins with
    an ASCII letter.
    """

    def __init__(self, definition: str, control: Literal["plain", "special"] = "plain") -> None:
        """`definition` is the text of a tokenizer.json.

        Raises `CheckpointError` if it cannot be read, is not BPE, or its added tokens cannot serve the template.
        """
        self._plain = control == "plain"
        try:
            rules = _read_rules(definition)
            added = {token["content"]: token for token in rules["added_tokens"]}
            self._control_ids = {token: _control_id(token, added) for token in Control}
            if self._plain:
                # Nothing looks for added tokens then, and no merge ends in one: their ids come from the template alone.
                # (An added token of one letter is a byte of ordinary text as well, and stays.)
                vocabulary = rules["model"]["vocab"].items()
                rules["model"]["vocab"] = {word: id for word, id in vocabulary if word not in added or len(word) == 1}
                rules["added_tokens"] = []
                definition = json.dumps(rules, ensure_ascii=False)
            self.joinable = _joinable(rules)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"tokenizer: not a tokenizer.json: {error!r}") from error
        try:
            self._tokenizer = Tokenizer.from_str(definition)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the library raises no narrower type, and its panics are no Exception
            raise CheckpointError(f"tokenizer: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    @classmethod
    def load(cls, folder: str | Path, control: Literal["plain", "special"] = "plain") -> Tokens:
        """From `tokenizer.json` in `folder`, else from whatever files there `transformers` makes a tokenizer of."""
        file = Path(folder) / TOKENIZER
        if file.exists():
            try:
                return cls(file.read_text(encoding="utf-8"), control)
            except OSError as error:
                raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from None
            except UnicodeDecodeError as error:
                raise CheckpointError(f"{file}: must hold UTF-8: {error}") from None
            except CheckpointError as error:
                raise CheckpointError(f"{file}: {str(error).removeprefix('tokenizer: ')}") from None
        from transformers import AutoTokenizer  # seconds to import, and only needed here

        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"tokenizer: none in {folder}: {error}") from error
        return cls(tokenizer.backend_tokenizer.to_str(), control)

    def encode(self, piece: Piece) -> Ids:
        """Ids of one piece, tokenised whole. No token is added in front or behind."""
        return self.encode_all([piece])[0]

    def encode_all(self, pieces: Sequence[Piece]) -> list[Ids]:
        """Ids of each piece, as `encode` gives them; the library shares the texts among its threads."""
        runs_of = [self._runs(piece) for piece in pieces]
        texts = [run for runs in runs_of for run in runs if isinstance(run, str)]
        encoded = iter(self._tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        return [
            np.array([id for run in runs for id in (next(encoded).ids if isinstance(run, str) else (run,))], np.int32)
            for runs in runs_of
        ]

    def _runs(self, piece: Piece) -> list[str | int]:
        """Texts that are tokenised whole, and ids of the template between them."""
        if not self._plain:
            return ["".join(part.value if isinstance(part, Control) else part for part in piece)]
        runs: list[str | int] = []
        text = ""
        for part in piece:
            if isinstance(part, Control):
                runs += [text, self._control_ids[part]] if text else [self._control_ids[part]]
                text = ""
            else:
                text += part
        return [*runs, text] if text else runs

    def single_id(self, word: str) -> int:
        """The id of a word that must be one token, such as the answers of the untrained head."""
        ids = self.encode((word,))
        if len(ids) != 1:
            raise CheckpointError(f"tokenizer: {word!r} must be a single token, got {len(ids)}: {ids.tolist()}")
        return int(ids[0])


def _read_rules(definition: str) -> dict[str, Any]:
    rules: dict[str, Any] = json.loads(definition)
    kind = rules["model"]["type"]
    if kind != "BPE":
        raise CheckpointError(f"tokenizer: model.type must be BPE, got {kind!r}")
    rules = {"added_tokens": [], "normalizer": None, "pre_tokenizer": None, **rules}
    _check_added_ids(rules)
    return rules


def _check_added_ids(rules: dict[str, Any]) -> None:
    """The library numbers added tokens itself, as below, whatever ids the file gives them."""
    vocabulary, highest = rules["model"]["vocab"], -1
    for token in rules["added_tokens"]:
        id = vocabulary.get(token["content"], max(len(vocabulary), highest + 1))
        if token["id"] != id:
            raise CheckpointError(f"tokenizer: added token {token['content']!r} should be {id}, got {token['id']}")
        highest = max(highest, id)


def _control_id(token: Control, added: dict[str, Any]) -> int:
    entry = added.get(token.value)
    if entry is None:
        raise CheckpointError(f"tokenizer: the chat template needs the added token {token.value}, which is missing")
    if entry["lstrip"] or entry["rstrip"] or entry["single_word"]:
        raise CheckpointError(f"tokenizer: {token.value} must not have lstrip, rstrip or single_word set, got {entry}")
    return int(entry["id"])


def _joinable(rules: dict[str, Any]) -> bool:
    """Whether these are the rules that the argument above is about."""
    model, normalizer = rules["model"], rules["normalizer"]
    cuts = [
        {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }
        for pattern in _SPLIT_PATTERNS.values()
    ]
    return (
        normalizer in (None, {"type": "NFC"})
        and _without_offsets(rules["pre_tokenizer"]) in cuts
        and not any(model.get(name) for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"))
        and not any(
            "\n" in token["content"] or token["lstrip"] or token["rstrip"] or token["single_word"]
            for token in rules["added_tokens"]
        )
    )


def _without_offsets(pre_tokenizer: Any) -> Any:
    """The pre-tokenizer's rules less `trim_offsets`, which concerns offsets alone."""
    if isinstance(pre_tokenizer, dict):
        return {name: _without_offsets(rule) for name, rule in pre_tokenizer.items() if name != "trim_offsets"}
    return [_without_offsets(rule) for rule in pre_tokenizer] if isinstance(pre_tokenizer, list) else pre_tokenizer
