"""A self-test of the Triton kernels at the first start on a GPU or with versions that have none on record.

That it passed is kept on disk for as long as GPU, driver, versions, kernels and sizes stay the same. Products of
weights have tests of their own (graphs/tuning).
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from graphs.examine import LayerSizes, examine
from graphs.files import replace_file
from graphs.tuning.tuner import UnknownEnvironmentError, driver_version, sources_hash

_ROOT = Path(__file__).resolve().parents[1]
logger = logging.getLogger("forkgraph")


class SelfTestError(RuntimeError):
    """A kernel is wrong on this GPU with these versions; the message names them, what was found and the remedy."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Everything that decides whether a test that passed once still holds."""

    gpu: str
    driver: str | None
    """None where it cannot be asked: then no record is believed or kept."""
    torch: str
    triton: str
    sources: str
    """Hash of the kernels and of what tests them."""
    sizes: LayerSizes


def self_test(sizes: LayerSizes, *, device: torch.device, cache_dir: Path) -> None:
    """Test the kernels in bfloat16 on `device`, which must be current, unless they passed here before.

    Raises SelfTestError, and what a kernel raises that cannot be compiled or launched.
    """
    environment = current_environment(sizes, device)
    path = record_path(cache_dir, environment)
    if _has_passed(path, environment):
        return
    try:
        fault = examine(sizes, device)
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if fault is not None:
        where = f"on {environment.gpu} with torch {environment.torch} and Triton {environment.triton}"
        raise SelfTestError(
            f"the self-test of the kernels failed {where}: {fault}; install another version of Triton, "
            "and report this message"
        )
    _keep(path, environment)


def current_environment(sizes: LayerSizes, device: torch.device) -> Environment:
    import triton

    driver = None
    try:
        driver = driver_version()
    except UnknownEnvironmentError as error:
        logger.warning("%s, so the kernels are tested at every start; install NVIDIA's NVML", error)
    return Environment(
        gpu=torch.cuda.get_device_name(device),
        driver=driver,
        torch=torch.__version__,
        triton=triton.__version__,
        sources=sources_hash(_tested_sources()),
        sizes=sizes,
    )


def _tested_sources() -> list[str]:
    files = (file for folder in ("ops", "ops/kernels") for file in sorted((_ROOT / folder).glob("*.py")))
    operators = (file.relative_to(_ROOT).as_posix() for file in files if not file.name.startswith("linear"))
    return ["graphs/examine.py", *operators]


def record_path(cache_dir: Path, environment: Environment) -> Path:
    text = json.dumps(asdict(environment), sort_keys=True)
    return cache_dir / "selftest" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def _has_passed(path: Path, environment: Environment) -> bool:
    try:
        return environment.driver is not None and bool(json.loads(path.read_bytes()) == asdict(environment))
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        logger.warning("%s is damaged and ignored (%s)", path, error)
        return False


def _keep(path: Path, environment: Environment) -> None:
    if environment.driver is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(asdict(environment), indent=1))
    except OSError as error:
        logger.warning(
            "%s cannot be written (%s), so the next start tests the kernels again; name another folder with cache_dir",
            path, error.strerror or error,
        )  # fmt: skip
