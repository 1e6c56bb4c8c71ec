"""The products of a forward: which modules of a checkpoint are fused into which weight, and the weights' sizes.

Names of modules are those within a layer (`self_attn.q_proj`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

LINEAR, FULL = "linear_attention", "full_attention"
"""Kinds of layers."""


class Sizes(Protocol):
    """What the products of a forward need of `ModelDimensions`."""

    @property
    def layer_types(self) -> Sequence[str]: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def gdn_proj(self) -> int: ...
    @property
    def value_dim(self) -> int: ...
    @property
    def attention_proj(self) -> int: ...
    @property
    def query_dim(self) -> int: ...
    @property
    def kv_dim(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Projection:
    """A fused weight [rows, columns]: the rows of its modules one below the other, then rows of zeros."""

    name: str
    rows: int
    """N, outputs."""
    columns: int
    """K, inputs."""
    modules: tuple[str, ...]


def layer_projections(dimensions: Sizes, kind: str) -> dict[str, Projection]:
    """Those of a layer of this kind by name, in the order of a forward: in_proj, out_proj, gate_up, down."""
    d, hidden = dimensions, dimensions.hidden_size
    if kind == FULL:
        mixer = {
            "in_proj": (d.attention_proj, hidden, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            "out_proj": (hidden, d.query_dim, ("self_attn.o_proj",)),
        }
    else:
        parts = tuple(f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a"))
        mixer = {
            "in_proj": (d.gdn_proj, hidden, parts),
            "out_proj": (hidden, d.value_dim, ("linear_attn.out_proj",)),
        }
    fused = mixer | {
        "gate_up": (2 * d.intermediate_size, hidden, ("mlp.gate_proj", "mlp.up_proj")),
        "down": (hidden, d.intermediate_size, ("mlp.down_proj",)),
    }
    return {
        name: Projection(name=name, rows=rows, columns=columns, modules=modules)
        for name, (rows, columns, modules) in fused.items()
    }


def projection_shapes(dimensions: Sizes) -> tuple[tuple[int, int], ...]:
    """Rows and columns of every weight that a forward multiplies with, each once.

    A last layer of attention multiplies with the two parts of its input projection apart: all rows give keys and
    values, those that are read give queries.
    """
    d = dimensions
    *layers, last = (layer_projections(d, kind) for kind in d.layer_types)
    products = [(p.rows, p.columns) for layer in layers for p in layer.values()]
    if d.layer_types[-1] == FULL:
        del last["in_proj"]
        products += [(2 * d.query_dim, d.hidden_size), (2 * d.kv_dim, d.hidden_size)]
    products += [(p.rows, p.columns) for p in last.values()]
    return tuple(dict.fromkeys(products))
