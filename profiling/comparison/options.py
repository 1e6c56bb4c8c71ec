"""Options of the comparison, and the arms by name. Knows neither torch nor Hydra.

An arm is the base (`gemm=tuned schedule=auto split=exact graphs=captured` on a GPU) with one factor changed, or a peer
over the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from workloads import SETS

from engine.config import EngineConfig
from engine.errors import ConfigError, nearest
from engine.options import RunOptions

BASE, REFERENCE, PLAIN = "base", "independent", "plain"
"""What is measured; what its bits and speed are held against; today's forward, by the library's own products."""
ENGINE_ARMS: dict[str, RunOptions] = {
    BASE: {},
    REFERENCE: {"schedule": "independent", "pack": "all"},
    "batched": {"schedule": "batched", "pack": "all"},
    "levels_one": {"schedule": "levels", "pack": "one"},
    "levels": {"schedule": "levels", "pack": "all"},
    "tree": {"schedule": "tree", "pack": "all"},
    "aligned": {"split": "aligned"},
    "gemm_fixed": {"gemm": "fixed"},
    "gemm_default": {"gemm": "default"},
    "compiled": {"graphs": "compiled"},
    "eager": {"graphs": "eager"},
    PLAIN: {"gemm": "default", "schedule": "independent", "pack": "all"},
}
"""Options that differ from the base. `batched` is batching alone, `levels_one` reuse alone."""
PEER_ARMS = tuple(
    f"transformers/{path}/{way}" for path in ("torch", "fla") for way in ("one", "graph", "batched", "forked")
)
ARMS = (*ENGINE_ARMS, *PEER_ARMS)
EXACT_ARMS = tuple(name for name, options in ENGINE_ARMS.items() if options.get("gemm") != "default")
"""Arms that must have the bits of `independent`: all of the engine's but those with the library's own products."""
SCALABLE_ARMS = (REFERENCE, PLAIN, "batched", *(name for name in PEER_ARMS if not name.endswith("/forked")))
"""Arms that read every candidate whole, so that the time of a few can be stated for all."""
SHOWN_ALONE = ("m1", "m2", "m3")
"""Sets whose requests have a table and a GEMM-only time each; the others are many and small."""


@dataclass(kw_only=True)
class GatesConfig:
    """Limits declared before the run; the report prints them, and says so when one differs from these defaults."""

    speedup: float = 2.0
    """At least so many times lower mean latency than `independent`, for every M1 request of the next two lines."""
    speedup_candidates: int = 8
    """At least so many candidates."""
    speedup_prefix_tokens: int = 1_024
    """Behind a prefix of at least so many tokens."""
    m4_slower: float = 0.03
    """At most this share slower than `independent` over M4, where nothing can be shared."""
    probability: float = 0.01
    """This and the next three are reported, not gated: base against plain forward."""
    head: float = 0.035
    """As `probability`, for what the head gives."""
    hidden: float = 0.01
    """As `probability`, for hidden states."""
    close_probability: float = 0.001
    """As `probability`: how near two answers are that may change places."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value < float("inf"):
                raise ConfigError(f"gates.{name}={value} is not a positive number")


@dataclass(kw_only=True)
class CompareConfig(EngineConfig):
    """`python profiling/compare.py`. What is run, on what and for how long is in `configs/comparison/` by size."""

    out: str | None = None
    """Folder of the run; one that was stopped goes on. Without one a new temporary folder is made and named."""
    sets: list[str] = field(default_factory=lambda: ["m1"])
    """Sets of requests, m1 to m5."""
    names: list[str] = field(default_factory=list)
    """Patterns of the requests that are run, such as m1/*x32; none for all of the sets."""
    arms: list[str] = field(default_factory=lambda: [BASE, REFERENCE])
    """What is compared: ways of this engine, and peers over the same weights."""
    few: dict[str, int] = field(default_factory=dict)
    """Arm: candidates it is measured on at most, its time then stated for all; only arms that share nothing."""
    whole: list[str] = field(default_factory=lambda: [REFERENCE])
    """Arms that run all candidates in the excluded pass whatever `few` says: bits and distances are those of all."""
    only: dict[str, list[str]] = field(default_factory=dict)
    """Arm: the sets it is run on, when not on all."""
    samples: int = 1
    """Forwards of each measured pass, fewer when they take long."""
    budget_minutes: float = 2.0
    """Time of the whole run, all its starts together; what does not fit is recorded as not run."""
    gates: GatesConfig = field(default_factory=GatesConfig)

    def takes(self, arm: str, of_set: str) -> bool:
        """Whether `arm` is run on the requests of this set."""
        return of_set in self.only.get(arm, SETS)

    def __post_init__(self) -> None:
        super().__post_init__()
        only = {f"only.{arm}": (sets, SETS) for arm, sets in self.only.items()}
        known = {"sets": (self.sets, SETS), "arms": (self.arms, ARMS), "only": (self.only, ARMS), **only}
        known |= {"few": (self.few, SCALABLE_ARMS), "whole": (self.whole, SCALABLE_ARMS)}
        for option, (names, allowed) in known.items():
            for name in names:
                if name not in allowed:
                    raise ConfigError(f"{option}={name} is not one of {', '.join(allowed)}{nearest(name, allowed)}")
        if self.gemm == "default":
            raise ConfigError("gemm=default promises no equal bits, which the comparison checks; use fixed or tuned")
        for needed in (BASE, REFERENCE):
            if needed not in self.arms or needed in self.only:
                raise ConfigError(f"arms={','.join(self.arms)}: the gates need {needed}, on every set")
        if REFERENCE in self.few and REFERENCE not in self.whole:
            raise ConfigError(f"few.{REFERENCE}: bits are compared with those of all candidates; name it in whole too")
        numbers = {"samples": self.samples, **{f"few.{arm}": n for arm, n in self.few.items()}}
        for option, number in {**numbers, "budget_minutes": self.budget_minutes}.items():
            if not (number >= 1 if option in numbers else number > 0):
                raise ConfigError(f"{option}={number} is not a positive number")
