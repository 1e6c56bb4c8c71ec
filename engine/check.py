"""`forkgraph check FOLDER`: everything about a checkpoint that can be told without a GPU.

Standard output has a few facts, then one line for each finding, with file and key. Exit code: 0 nothing found,
1 something found, 2 wrong arguments or nothing to check.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from engine import process
from engine.config import MODELS
from engine.errors import ConfigError
from engine.resources import CONFIGS

PACKAGES = ("engine", "graphs", "ops")
"""Names that a program's own files may have too."""


def main() -> None:
    process.run("check", lambda: run(sys.argv[1:], stdout=process.standard_output(), stderr=sys.stderr))


def run(arguments: Sequence[str], *, stdout: TextIO, stderr: TextIO) -> int:
    parser = argparse.ArgumentParser(prog="forkgraph check", description="Check a checkpoint folder without a GPU.")
    parser.add_argument("folder", help="a Hugging Face folder, an Open-Jev package or export, or a Cua-S1 adapter")
    parser.add_argument("--base", help="folder of the base weights, for a checkpoint that holds none of its own")
    parser.add_argument("--model", choices=[m for m in MODELS if m != "tiny"], help="the size it should have")
    parser.add_argument("--own", action="store_true", help="a checkpoint of your own: published ids are not asked for")
    parser.add_argument("--deep", action="store_true", help="read every base weight too")
    options = parser.parse_args(arguments)
    from engine.load.inspection import check  # torch takes seconds, and wrong words need none

    try:
        facts, findings = check(
            options.folder, base=options.base, model=options.model, own=options.own, deep=options.deep,
            bar=stderr.isatty(),
        )  # fmt: skip
    except ConfigError as error:
        print(f"check: {error}", file=stderr)
        return 2
    if found := shadows(Path.cwd()):
        facts = {"in the way": f"{', '.join(found)} (of python -m and of scripts there, not of this command)"} | facts
    for name, value in facts.items():
        print(f"{name}: {value}", file=stdout)
    for finding in findings:
        print(finding, file=stdout)
    print(f"{len(findings)} finding{'s' * (len(findings) != 1)}" if findings else "nothing found", file=stdout)
    return 1 if findings else 0


def shadows(folder: Path) -> list[str]:
    """Files that Python takes for parts of this project where a program is started in `folder`."""
    if folder.samefile(CONFIGS.parent):
        return []
    files = (folder / file for name in PACKAGES for file in (f"{name}/__init__.py", f"{name}.py"))
    return [str(file) for file in files if file.exists()]


if __name__ == "__main__":
    main()
