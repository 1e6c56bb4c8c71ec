"""What kernels need of the machine beside a device: folders for what is compiled, and a C compiler.

Asked before anything is loaded, and told when a launch or a compilation fails for want of one after all.
"""

from __future__ import annotations

import getpass
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from subprocess import CalledProcessError

from engine.config import EngineConfig, cache_folder
from engine.errors import ConfigError

_INDUCTOR, _TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
_COMPILER = "Triton needs a C compiler for kernels that are not in its cache: install gcc, or name one in CC"


def check_environment(config: EngineConfig) -> None:
    """Raise ConfigError where `config` needs a folder that is unknown or cannot be written, or a missing compiler.

    `config` must be resolved. Triton's compiler is asked for while its cache is empty: a warm cache needs none.
    """
    if config.gemm == "tuned":
        folder = cache_folder(config)
        _check_folder(f"cache_dir={folder}", folder, "give another cache_dir=")
    if config.device != "cpu":
        folder = _triton_folder()
        if folder.parts[:1] == ("~",):  # which stayed
            raise ConfigError(f"this user has no home folder for compiled kernels; set {_TRITON} to a folder of yours")
        _check_folder(f"{_TRITON}={folder}", folder, f"set {_TRITON} to a folder of yours")
        if not any(folder.iterdir()) and (missing := _missing_compiler()):
            raise ConfigError(missing)
        cache_folder(config)  # where the self-test of the kernels is kept; where it cannot be, it runs again
    if config.graphs == "compiled":
        folder = _inductor_folder()
        _check_folder(f"{_INDUCTOR}={folder}", folder, f"set {_INDUCTOR} to a folder of yours")


def explain_failure(error: BaseException) -> str | None:
    """Cause and remedy where an error comes of a compiler or a folder for compiled kernels, else None."""
    folders = {_INDUCTOR: _inductor_folder()}
    if "triton" in sys.modules:
        folders[_TRITON] = _triton_folder()
    for cause in _causes(error):
        text = str(cause)
        if type(cause).__name__ == "InvalidCxxCompiler":
            return "torch.compile found no working C++ compiler: install g++, or name one in CXX"
        if isinstance(cause, RuntimeError) and text.startswith("Failed to find C compiler"):
            return f"no C compiler; {_COMPILER}"
        if isinstance(cause, CalledProcessError) and "-shared" in cause.cmd:
            return (
                f"{cause.cmd[0]} failed with code {cause.returncode}; Triton needs a C compiler that works and "
                "Python's headers: install gcc and python3-dev"
            )
        if isinstance(cause, KeyError) and "getpwuid" in text:
            return f"this user has no name for a folder of compiled kernels; set {_INDUCTOR} to a folder of yours"
        if isinstance(cause, OSError) and cause.filename is not None:
            name = os.fsdecode(cause.filename)
            if name == os.environ.get("CC"):
                return f"CC={name}: {cause.strerror}; {_COMPILER}"
            for variable, folder in folders.items():
                if Path(name).is_relative_to(folder):
                    return f"{variable}: {name}: {cause.strerror}; set {variable} to a folder of yours"
    return None


def _check_folder(name: str, folder: Path, remedy: str) -> None:
    """Writing is tried: what a mode allows does not tell it, as root or on a read-only file system."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{name} cannot be written ({error}); {remedy}") from None


def _triton_folder() -> Path:
    from triton import knobs

    return Path(knobs.cache.dir)


def _inductor_folder() -> Path:
    if folder := os.environ.get(_INDUCTOR):
        return Path(folder)
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid_{os.getuid()}"
    return Path(tempfile.gettempdir()) / f"torchinductor_{user}"


def _missing_compiler() -> str | None:
    from triton import knobs

    if knobs.build.impl is not None:
        return None
    named = os.environ.get("CC")
    if named is not None:
        return None if shutil.which(named) else f"CC={named}: no such program; {_COMPILER}"
    return None if shutil.which("gcc") or shutil.which("clang") else f"no C compiler; {_COMPILER}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it comes of, each once."""
    waiting, seen = [error], set()
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting += [one.__context__, one.__cause__, getattr(one, "inner_exception", None)]
