"""Folders of weights by their path or by their name on Hugging Face, from its cache on this machine. No network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import ConfigError, nearest

if TYPE_CHECKING:
    from engine.words import Model

SIZES: dict[str, Model] = {"Qwen/Qwen3.5-4B": "4b", "Qwen/Qwen3.5-9B": "9b", "Qwen/Qwen3.8-27B": "27b"}
"""Published backbones: the size that each is."""

_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_REPOSITORY = "models--"


def existing_folder(option: str, value: str) -> Path:
    """The folder that `value` names: a path, or ORG/NAME in the cache; `models--ORG--NAME` stands for its snapshot.

    `option` is how the user gave it. Raises ConfigError that says where it was looked for.
    """
    try:
        return _existing(option, value, Path(value).expanduser())
    except RuntimeError:
        raise ConfigError(f"{option}: this user has no home folder; give the whole path") from None
    except OSError as error:
        raise ConfigError(f"{option}: cannot be read: {error.strerror}") from None


def _existing(option: str, value: str, folder: Path) -> Path:
    if folder.is_dir():
        return _snapshot(option, folder) if folder.name.startswith(_REPOSITORY) else folder
    if folder.exists():
        raise ConfigError(f"{option} is a file; give the folder that holds it")
    beside = [entry.name for entry in folder.parent.iterdir()] if folder.parent.is_dir() else []
    missing = f"{option}: no such folder{nearest(folder.name, beside)}"
    if not _ID.fullmatch(value):
        raise ConfigError(missing)
    cache = cache_folder()
    cached = cache / f"{_REPOSITORY}{value.replace('/', '--')}"
    if cached.is_dir():
        return _snapshot(option, cached)
    others = [path.name.removeprefix(_REPOSITORY).replace("--", "/") for path in cache.glob(f"{_REPOSITORY}*--*")]
    raise ConfigError(
        f"{missing}, and none of that name in {cache}{nearest(value, others)}; fetch it with `hf download {value}`, or "
        "set HF_HOME or HF_HUB_CACHE to where it is"
    )


def cache_folder() -> Path:
    """Hugging Face's own, as HF_HUB_CACHE, HF_HOME and XDG_CACHE_HOME say."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _snapshot(option: str, repository: Path) -> Path:
    """Of `main`, else the only one there is."""
    snapshots = sorted(path for path in (repository / "snapshots").glob("*") if path.is_dir())
    main = repository / "refs" / "main"
    if main.is_file():
        name = main.read_text("utf-8").strip()
        found = [path for path in snapshots if path.name == name]
        if not found:
            raise ConfigError(f"{option}: {main} names the snapshot {name}, which is not in {repository / 'snapshots'}")
        return found[0]
    if len(snapshots) != 1:
        names = f"has {', '.join(path.name for path in snapshots)}; give the path of one" if snapshots else "is empty"
        raise ConfigError(f"{option}: no refs/main in {repository}, and its snapshots/ {names}")
    return snapshots[0]
