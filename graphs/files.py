"""Files that are the old one or the whole new one, whenever a process stops."""

from __future__ import annotations

import os
import stat
import uuid
from pathlib import Path


def replace_file(path: Path, content: str | bytes) -> None:
    """Write under another name beside `path`, then rename. A link stays, and what it leads to is replaced; so do the
    permissions of a file that was there. Text is UTF-8. Raises OSError."""
    path = Path(os.path.realpath(path))
    unfinished = path.with_name(f".{path.name[:100]}.{uuid.uuid4().hex}")
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        mode = None
    try:
        # What only its owner may read is never readable by others, not even unfinished.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with open(os.open(unfinished, flags, 0o666 if mode is None else 0o600), "wb") as file:
            if mode is not None:
                unfinished.chmod(mode)
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
