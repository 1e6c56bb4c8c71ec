"""What the command lines share: options from Hydra, errors as one line, exit codes, requests and whole files.

Knows nothing of what a command does.
"""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, BinaryIO, TextIO, TypeVar, cast

import hydra
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from engine.config import EngineConfig, expanded, nearest
from engine.errors import CheckpointError, ConfigError, ForkgraphError, RequestError, shown
from engine.output import refuse_shared
from engine.wire.requests import MAX_BODY_BYTES
from graphs.files import replace_file

EXAMPLE = "configs/requests/support_ticket.json"
"""The request that commands take when none is given."""

Config = TypeVar("Config", bound=EngineConfig)

# Settings of Hydra whose members are anybody's.
_FREE_FORM = tuple(f"hydra.{name}." for name in ("hydra_logging", "job_logging", "callbacks", "launcher", "sweeper"))


def run_command(name: str, config_class: type[Config], job: Callable[[Config], int]) -> int:
    """Run `job` with the options in `sys.argv`, several times with `-m` once all of them are known to be right and to
    write different files; the exit code of the process.

    `configs/NAME.yaml` is the root. What a user can mend is one line on standard error and code 2; a job's own code
    is passed on, the highest of them with `-m`; Ctrl-C gives 130. Anything else is a bug and keeps its traceback.
    """
    jobs: list[tuple[str, Config]] = []
    wrong: list[ConfigError] = []

    @hydra.main(version_base=None, config_path="../configs", config_name=name)
    def compose(options: DictConfig) -> None:
        swept = HydraConfig.get().mode is RunMode.MULTIRUN
        title = f"--- {' '.join(HydraConfig.get().overrides.task)}" if swept else ""
        try:
            jobs.append((title, to_config(options, config_class)))
        except ConfigError as error:  # raised later: Hydra would put a line of its own before it
            wrong.append(error)

    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises, instead of printing and leaving with code 1
    try:
        try:
            with tempfile.TemporaryDirectory(prefix="forkgraph-") as scratch:
                OmegaConf.register_new_resolver("forkgraph.scratch", lambda: scratch, replace=True)
                check_overrides(_overrides(sys.argv[1:]), config_class)
                compose()
            for error in wrong:
                raise error
            refuse_shared([getattr(config, "out", None) for _, config in jobs])
        except (ConfigError, HydraException, OmegaConfBaseException) as fault:
            return _report(name, as_config_error(fault, config_class))
        return max((_run(name, title, partial(job, config)) for title, config in jobs), default=0)
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130


def _run(name: str, title: str, job: Callable[[], int]) -> int:
    """The code of one job; what fails is reported here, so that a sweep goes on with its next."""
    if title:
        print(title, file=sys.stderr)
    try:
        return job()
    except (ForkgraphError, OSError) as error:
        return _report(name, error)


def _report(name: str, error: ForkgraphError | OSError) -> int:
    if isinstance(error, BrokenPipeError):  # whoever read standard output has left; what is buffered goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    print(f"{name}: {plain(' '.join(str(error).split()))}", file=sys.stderr)
    return 2 if isinstance(error, ConfigError | CheckpointError | RequestError) else 1


def _overrides(arguments: Sequence[str]) -> list[str]:
    return [word for word in arguments if not word.startswith("-") and ("=" in word or word.startswith("~"))]


def check_overrides(overrides: Sequence[str], config_class: type[EngineConfig]) -> None:
    """Raise ConfigError for a key that is neither an option nor a setting of Hydra; Hydra lets some of both pass."""
    options = list(_keys(config_class()))
    settings = [f"hydra.{key}" for key in _keys(HydraConf())]
    groups = [f"hydra/{group}" for default in HydraConf().defaults for group in cast(dict[str, Any], default)]
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key = override.key_or_group
        known = options if not key.startswith("hydra") else groups if "/" in key else settings
        if key not in known and not key.startswith(_FREE_FORM):
            raise ConfigError(f"{key} is not an option{nearest(key, known)}")


def _keys(config: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names of all fields of a dataclass."""
    for field in dataclasses.fields(config):
        yield prefix + field.name
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _keys(value, f"{prefix}{field.name}.")


def to_config(options: DictConfig, config_class: type[Config]) -> Config:
    """The typed form of what Hydra composed. Raises ConfigError for a key or value that does not fit."""
    try:
        merged = OmegaConf.merge(OmegaConf.structured(config_class), options)
        return cast(Config, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        raise as_config_error(error, config_class) from None


def as_config_error(error: Exception, config_class: type[EngineConfig]) -> ConfigError:
    """Hydra's and OmegaConf's errors, in this project's words where the user's mistake can be told."""
    if isinstance(error, ConfigError):
        return error
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options is not None:
        name, _, value = error.missing_cfg_file.rpartition("/")
        if name in _keys(config_class()):
            try:
                config_class(**cast(dict[str, Any], {name: value}))
            except ConfigError as reason:
                return reason
        return ConfigError(f"{name}={value} is not one of {', '.join(error.options)}{nearest(value, error.options)}")
    lines = [line.strip() for line in str(error).splitlines()]
    if key := getattr(error, "full_key", None):
        found = getattr(error, "value", None)
        return ConfigError(f"{key}={found if isinstance(found, str) else shown(found)}: {lines[0]}")
    return ConfigError(" ".join(line for line in lines if not line.startswith(("See https:", "full_key:"))))


def read_request(request: str | None, stdin: BinaryIO) -> tuple[bytes, str]:
    """The body of one request and where it is from. Raises ConfigError when it cannot be read, or holds several."""
    if request is None:
        folder, _, path = EXAMPLE.partition("/")
        return files(folder).joinpath(path).read_bytes(), f"{EXAMPLE} (the example; choose with request=FILE)"
    if request == "-":
        body, source = stdin.read(MAX_BODY_BYTES + 1), "standard input"
    else:
        with readable(request).open("rb") as file:
            body, source = file.read(MAX_BODY_BYTES + 1), request
    first, _, rest = body.strip().partition(b"\n")
    if rest and first.startswith(b"{") and first.rstrip().endswith(b"}") and rest.lstrip().startswith(b"{"):
        raise ConfigError(f"request={request} holds a request on each line; save them in a file named .jsonl")
    return body, source


def readable(name: str, option: str = "request") -> Path:
    """The path of a file that can be opened. Raises ConfigError naming it, and a file with nearly that name."""
    path = expanded(option, name)
    try:
        if not stat.S_ISFIFO(path.stat().st_mode):  # whose writer would see that it was closed
            path.open("rb").close()
    except FileNotFoundError:
        beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ConfigError(f"{option}={name}: no such file{nearest(path.name, beside)}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option}={name}: {getattr(error, 'strerror', error)}") from None
    return path


def write_whole(path: Path, text: str) -> None:
    """`replace_file`, with ConfigError when the file cannot be written."""
    try:
        replace_file(path, text)
    except OSError as error:
        raise ConfigError(f"out={path}: {error.strerror}") from None


_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}
_JSON_CONTROLS = {code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)}  # those below 0x20 JSON escapes itself


def plain(text: str) -> str:
    """Text of somebody's with its control characters spelled out, so that a terminal shows them and obeys none."""
    return text.translate(_CONTROLS)


def to_json(value: Any, *, indent: int | None = None) -> str:
    """JSON in which every control character is escaped."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent).translate(_JSON_CONTROLS)


def console(stream: TextIO) -> Console:
    """For text that is not ours to interpret, wide enough for the tables when it goes to a file."""
    return Console(file=stream, width=None if stream.isatty() else 120, markup=False, highlight=False)


def config_text(config: EngineConfig) -> str:
    return OmegaConf.to_yaml(OmegaConf.structured(config))
