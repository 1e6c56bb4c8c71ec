"""What answers were made with: the options, and which files the weights, the tokenizer and the message were."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from engine.config import EngineConfig
from engine.load.package import files_of

_WHOLE_BYTES = 64 << 20
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16
_SUFFIXES = (".json", ".safetensors", ".txt")
_PLACES = ("checkpoint", "base", "tokenizer")
"""Options whose files count and whose names do not."""
_WITHOUT_EFFECT = ("cache_dir", "nvtx", "warmup", *_PLACES, "letters")
"""What may differ: `letters` names a file, which counts as one."""


def made_with(config: EngineConfig) -> str:
    """YAML: all options, and under `files` a line for each file behind them."""
    options = OmegaConf.to_container(OmegaConf.structured(config))
    assert isinstance(options, dict)
    return OmegaConf.to_yaml(OmegaConf.create({**options, "files": dict(_identities(config))}))


def difference(before: str, now: str) -> list[str]:
    """How what was there `before` could change answers, as in `split=exact`; both as `made_with` writes them."""
    try:
        then = OmegaConf.to_container(OmegaConf.create(before))
    except (OmegaConfBaseException, YAMLError, ValueError):
        then = None
    if not isinstance(then, dict) or not isinstance(then.get("files"), dict):
        return ["options that cannot be read"]
    current: Any = OmegaConf.to_container(OmegaConf.create(now))
    names = [field.name for field in dataclasses.fields(EngineConfig) if field.name not in _WITHOUT_EFFECT]
    changed = [f"{name}={then.get(name)}" for name in names if then.get(name) != current[name]]
    files, ours = then["files"], current["files"]
    return changed + [f"another {name}" for name in sorted(files | ours) if files.get(name) != ours.get(name)]


def _identities(config: EngineConfig) -> Iterator[tuple[str, str]]:
    for place in _PLACES:
        folder = Path(getattr(config, place) or "")
        if getattr(config, place) is None or not folder.is_dir():  # `random` is no folder
            continue
        for path in files_of(folder):
            name = path.relative_to(folder)
            if path.suffix in _SUFFIXES and not any(part.startswith(".") for part in name.parts):
                yield f"{place}/{name.as_posix()}", _identity(path)
    if config.letters.system_message is not None:
        yield "letters.system_message", _identity(Path(config.letters.system_message).expanduser())


def _identity(path: Path) -> str:
    """Size and hash of a file; of a large one, which takes long to read, the date and the hash of samples."""
    found = path.stat()
    with path.open("rb") as file:
        if found.st_size <= _WHOLE_BYTES:
            return f"{found.st_size} bytes, sha256 {hashlib.file_digest(file, 'sha256').hexdigest()}"
        digest = hashlib.sha256()
        for i in range(_SAMPLES):
            file.seek((found.st_size - _SAMPLE_BYTES) * i // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    date = datetime.fromtimestamp(found.st_mtime_ns / 1e9, UTC).isoformat()
    return f"{found.st_size} bytes of {date}, sha256 of {_SAMPLES} samples {digest.hexdigest()}"
