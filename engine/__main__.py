"""`forkgraph`, also `python -m engine`: one command for all. Help, version and wrong words need no torch."""

from __future__ import annotations

import sys
from importlib import import_module

from engine import __version__
from engine.errors import nearest
from engine.process import run
from engine.resources import CONFIGS

COMMANDS = {"score": "engine.score", "explain": "engine.explain", "check": "engine.check", "tune": "engine.tune"}
"""Sub-command: the module whose `main` it runs."""


def main() -> None:
    """Run the sub-command that `sys.argv` names, with the words behind it. Exit code 2 where there is none."""
    run("forkgraph", lambda: _main(*sys.argv[1:]))


def _main(name: str = "", *words: str) -> None:
    if name == "--version" or (name in COMMANDS and "--version" in words):
        print(f"forkgraph {__version__}")
    elif name in ("", "-h", "--help"):
        print(overview())
        sys.exit(0 if name else 2)
    elif name not in COMMANDS:
        print(
            f"forkgraph: {name} is no command{nearest(name, COMMANDS)}; known: {', '.join(COMMANDS)}", file=sys.stderr
        )
        sys.exit(2)
    elif {"-h", "--help"} & set(words) and (CONFIGS / f"{name}.yaml").exists():  # `check` explains itself
        from engine.help import command_help, source_of

        print(command_help(name, f"{name.capitalize()}Config", [source_of(COMMANDS[name])]))
    else:
        sys.argv = [f"forkgraph {name}", *words]
        import_module(COMMANDS[name]).main()


def overview() -> str:
    from engine.help import summary_of

    lines = [f"  {name:10}{summary_of(module)}" for name, module in COMMANDS.items()]
    usage = "forkgraph COMMAND [option=value ...], or python -m engine COMMAND"
    return "\n".join([usage, "", *lines, "", "forkgraph COMMAND --help explains every option; forkgraph --version."])


if __name__ == "__main__":
    main()
