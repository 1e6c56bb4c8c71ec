"""What the command lines share: options from Hydra, errors as one line, exit codes, requests and whole files.

Knows nothing of what a command does.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TextIO, TypeVar, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from engine.config import EngineConfig
from engine.errors import CheckpointError, ConfigError, ForkgraphError, RequestError, nearest, shown
from engine.help import command_help
from engine.overrides import keys, prepared, text_options
from engine.process import discard, interrupted, interruptible, say
from engine.resources import CONFIGS, EXAMPLE, example
from engine.values import expanded
from engine.wire.requests import MAX_BODY_BYTES
from graphs.files import replace_file

DEFAULT = f"{EXAMPLE}support_ticket"
"""The request that commands take when none is given."""

Config = TypeVar("Config", bound=EngineConfig)


def run_command(
    name: str,
    config_class: type[Config],
    job: Callable[[Config], int],
    *,
    refuse: Callable[[Sequence[Config]], None] = lambda _: None,
) -> int:
    """Run `job` with the options in `sys.argv`, several times with `-m`; the exit code of the process.

    Options are checked before the first job starts; `refuse` sees those of all jobs and may raise ConfigError.

    `configs/NAME.yaml` is the root. What a user can mend is one line on standard error and code 2; a job's own code
    is passed on, the highest of them with `-m`; Ctrl-C gives 130. Raises BrokenPipeError where nobody reads on.
    Anything else is a bug and keeps its traceback.
    """
    if {"-h", "--help"} & set(sys.argv[1:]):
        defined_in = [Path(inspect.getfile(c)) for c in config_class.__mro__ if dataclasses.is_dataclass(c)]
        print(command_help(name, config_class.__name__, defined_in))
        return 0
    jobs: list[tuple[str, Config]] = []
    wrong: list[ConfigError] = []

    @hydra.main(version_base=None, config_path=str(CONFIGS), config_name=name)
    def compose(options: DictConfig) -> None:
        swept = HydraConfig.get().mode is RunMode.MULTIRUN
        title = f"--- {' '.join(HydraConfig.get().overrides.task)}" if swept else ""
        try:
            jobs.append((title, to_config(options, config_class)))
        except ConfigError as error:  # raised later: Hydra would put a line of its own before it
            wrong.append(error)

    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises, instead of printing and leaving with code 1
    try:
        with interruptible():
            try:
                with tempfile.TemporaryDirectory(prefix="forkgraph-") as scratch:
                    OmegaConf.register_new_resolver("forkgraph.scratch", lambda: scratch, replace=True)
                    sys.argv[1:] = prepared(sys.argv[1:], config_class)
                    compose()
                for error in wrong:
                    raise error
                refuse([config for _, config in jobs])
            except (ConfigError, HydraException, OmegaConfBaseException) as fault:
                return _report(name, as_config_error(fault, config_class))
            return max((_run(name, title, partial(job, config)) for title, config in jobs), default=0)
    except KeyboardInterrupt:
        return interrupted(name)


def _run(name: str, title: str, job: Callable[[], int]) -> int:
    """The code of one job; what fails is reported here, so that a sweep goes on with its next."""
    if title:
        say(title)
    try:
        return job()
    except BrokenPipeError:  # nobody reads what the next job would write
        raise
    except (ForkgraphError, OSError) as error:
        return _report(name, error)


def _report(name: str, error: ForkgraphError | OSError) -> int:
    say(f"{name}: {plain(' '.join(str(error).split()))}")
    if isinstance(error, OSError):
        discard()  # or it is told again at the end
    return 2 if isinstance(error, ConfigError | CheckpointError | RequestError) else 1


def to_config(options: DictConfig, config_class: type[Config]) -> Config:
    """The typed form of what Hydra composed. Raises ConfigError for a key or value that does not fit."""
    if missing := sorted(OmegaConf.missing_keys(options)):
        raise ConfigError(f"{missing[0]}=??? stands for a value that is still to be given; give one, or leave it out")
    known = [field.name for field in dataclasses.fields(config_class)]
    if extra := sorted(str(name) for name in options if name not in known):
        remedy = "; a file of options begins with the line `# @package _global_`"
        raise ConfigError(f"{extra[0]} is not an option{nearest(extra[0], known)}{remedy}")
    try:
        for name in text_options(config_class):
            if not isinstance(value := OmegaConf.select(options, name), str | None):
                raise ConfigError(f"{name}={value} is of type {type(value).__name__}, not text; put it in quotes")
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
        group, _, word = error.missing_cfg_file.partition("/")
        if group in keys(config_class()):
            name, value = group, word
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


def read_request(request: str | None, stdin: BinaryIO | None) -> tuple[bytes, str]:
    """The body of one request and where it is from. Raises ConfigError when it cannot be read, or holds several."""
    if request is None:
        return readable(DEFAULT).read_bytes(), f"{DEFAULT} (choose with request=FILE)"
    if request == "-":
        if stdin is None:
            raise ConfigError("request=-: standard input is closed")
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
    path = example(name) if name.startswith(EXAMPLE) else expanded(f"{option}={name}", name)
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


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise  # rich would end the process without a word


def console(stream: TextIO) -> Console:
    """For text that is not ours to interpret, wide enough for the tables when it goes to a file."""
    return _Console(file=stream, width=None if stream.isatty() else 120, markup=False, highlight=False)


def config_text(config: EngineConfig) -> str:
    return OmegaConf.to_yaml(OmegaConf.structured(config))
