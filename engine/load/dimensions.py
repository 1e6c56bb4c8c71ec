"""The sizes of a Qwen3.5 text backbone, from its `config.json`, and the memory they imply before any is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from engine.errors import CheckpointError, shown
from engine.load.projections import FULL, LINEAR, layer_projections
from ops.sizes import CHUNK, COLUMN_UNIT, CONV_HISTORY, MAX_GROUP

_F32 = 4

_LARGEST_SIZE, _LARGEST_LAYERS, _LARGEST_FLOAT = 2**31, 1_024, 10**300

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class WeightBytes:
    """`layers` with the final norm, and the token `embedding`. An output projection is not part of the backbone."""

    layers: int
    embedding: int

    @property
    def total(self) -> int:
        return self.layers + self.embedding


@dataclass(frozen=True, kw_only=True)
class SnapshotBytes:
    """What one prefix leaves behind over all layers: `state` at its last chunk border, `tail` of the open chunk,
    `history` of the convolution, and keys and values for each of its own tokens."""

    state: int
    tail: int
    history: int
    kv_per_token: int

    def buffers(self, *, kv_rows: int, slots: int, states: int) -> int:
        """Buffers of that many K/V rows, tail and history slots, and state slots."""
        return kv_rows * self.kv_per_token + slots * (self.tail + self.history) + states * self.state


@dataclass(frozen=True, kw_only=True)
class ModelDimensions:
    """Field names are those of `config.json`. Raises `CheckpointError` with key, value and what is supported."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int
    """Leading dimensions of a head that are rotated: partial_rotary_factor * head_dim."""
    rope_theta: float
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool

    def __post_init__(self) -> None:
        for name in ("vocab_size", "max_position_embeddings", "num_key_value_heads", "linear_num_key_heads"):
            self._require(name, getattr(self, name) > 0, "a positive number")
        for name in ("rope_theta", "rms_norm_eps"):
            self._require(name, 0 < getattr(self, name) < float("inf"), "a positive, finite number")
        for name in ("hidden_size", "intermediate_size"):
            value = getattr(self, name)
            self._require(name, value > 0 and value % COLUMN_UNIT == 0, f"a positive multiple of {COLUMN_UNIT}")
        for name in ("head_dim", "linear_key_head_dim", "linear_value_head_dim"):
            value = getattr(self, name)
            self._require(name, value >= COLUMN_UNIT and value & (value - 1) == 0, f"a power of two from {COLUMN_UNIT}")
        self._require(
            "layer_types", set(self.layer_types) in ({LINEAR, FULL}, {LINEAR}, {FULL}), f"a list of {LINEAR} and {FULL}"
        )
        group, remainder = divmod(self.num_attention_heads, self.num_key_value_heads)
        self._require(
            "num_attention_heads",
            remainder == 0 and 0 < group <= MAX_GROUP,
            f"1 to {MAX_GROUP} heads for each of the {self.num_key_value_heads} num_key_value_heads",
        )
        self._require(
            "linear_num_value_heads",
            self.linear_num_value_heads > 0 and self.linear_num_value_heads % self.linear_num_key_heads == 0,
            f"a multiple of linear_num_key_heads={self.linear_num_key_heads}",
        )
        self._require(
            "rotary_dim",
            0 < self.rotary_dim <= self.head_dim and self.rotary_dim % 2 == 0,
            f"an even number (partial_rotary_factor * head_dim) up to head_dim={self.head_dim}",
        )

    def _require(self, name: str, holds: bool, supported: str) -> None:
        if not holds:
            raise _unsupported(name, getattr(self, name), supported)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, source: str = "config.json") -> ModelDimensions:
        """Dimensions from a parsed `config.json`: the text model's own, or one that holds it under `text_config`.

        Raises `CheckpointError` that begins with `source` and names the key, its value and what is supported.
        """
        try:
            return _read(config)
        except CheckpointError as error:
            raise CheckpointError(f"{source}: {error}") from None

    # Names in the shape comments of `run.model` and `load.tensors`: H, Hkv, d; Hk, Hv, dk, dv; Kd, Vd, C, P.

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layer_types)

    @property
    def num_linear_layers(self) -> int:
        return self.layer_types.count(LINEAR)

    @property
    def num_full_layers(self) -> int:
        return self.layer_types.count(FULL)

    @property
    def key_dim(self) -> int:
        """Kd, columns of all key heads of the delta rule; as many for its queries."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        """Vd, columns of all value heads of the delta rule."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        """C, channels of the convolution: q, k and v."""
        return 2 * self.key_dim + self.value_dim

    @property
    def gdn_proj(self) -> int:
        """P, rows of the delta rule's fused input projection: q, k, v, z, b, a, zeros up to a multiple of 16."""
        rows = self.conv_dim + self.value_dim + 2 * self.linear_num_value_heads
        return rows + -rows % COLUMN_UNIT

    @property
    def query_dim(self) -> int:
        """Columns of all attention query heads."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Columns of all key (or value) heads of attention."""
        return self.num_key_value_heads * self.head_dim

    @property
    def attention_proj(self) -> int:
        """Rows of the fused attention input projection: query and gate of each head, then keys, then values."""
        return 2 * self.query_dim + 2 * self.kv_dim

    def weight_bytes(self, dtype_bytes: int) -> WeightBytes:
        """Weights on the device, fused and padded; `A_log` and the gated norm's weight are float32 at any dtype."""
        h, value_heads = self.hidden_size, self.linear_num_value_heads
        linear, full = (
            2 * h + sum(p.rows * p.columns for p in layer_projections(self, kind).values()) for kind in (LINEAR, FULL)
        )
        linear += (CONV_HISTORY + 1) * self.conv_dim + value_heads
        full += 2 * self.head_dim
        elements = self.num_linear_layers * linear + self.num_full_layers * full + h
        float32 = self.num_linear_layers * (value_heads + self.linear_value_head_dim)
        return WeightBytes(layers=elements * dtype_bytes + float32 * _F32, embedding=self.vocab_size * h * dtype_bytes)

    def snapshot_bytes(self, dtype_bytes: int) -> SnapshotBytes:
        """A prefix's share of the snapshot buffers; states and gates are float32 at any dtype."""
        gates = 2 * self.linear_num_value_heads + self.linear_num_key_heads
        return SnapshotBytes(
            state=self.num_linear_layers * self.value_dim * self.linear_key_head_dim * _F32,
            tail=self.num_linear_layers * CHUNK * ((self.key_dim + self.value_dim) * dtype_bytes + gates * _F32),
            history=self.num_linear_layers * CONV_HISTORY * self.conv_dim * dtype_bytes,
            kv_per_token=self.num_full_layers * 2 * self.kv_dim * dtype_bytes,
        )

    def pass_bytes(self, rows: int, dtype_bytes: int) -> int:
        """Activations of a pass of `rows` rows (its rung): the largest set alive at once in one layer.

        Every tensor counts from its operator to its last reader, and the layer's two inputs to the layer's end. Room
        that operators and products take for themselves comes on top.
        """
        h = self.hidden_size
        norms = 6 * h  # two inputs, two operands and two results
        mlp = 3 * h + 3 * self.intermediate_size  # the layer's inputs, the residual; gate, up and their product
        moments = [norms, mlp]
        if self.num_linear_layers:
            gates = 2 * (self.linear_num_value_heads + self.linear_num_key_heads) * _F32 // dtype_bytes
            delta_rule = self.conv_dim + gates + self.value_dim  # its inputs and its result
            moments.append(3 * h + self.gdn_proj + max(h, delta_rule))
        if self.num_full_layers:
            attention = 2 * self.query_dim + 2 * self.kv_dim
            moments.append(3 * h + self.attention_proj + max(h, attention))
        return rows * max(moments) * dtype_bytes


def _unsupported(key: str, value: Any, supported: str) -> CheckpointError:
    return CheckpointError(f"{key}={shown(value)} is not supported; it must be {supported}")


def _get(config: Mapping[str, Any], key: str, kind: type[Value], where: str = "") -> Value:
    """A required value of that JSON type; an integer also serves as a float, true and false never as a number."""
    if key not in config:
        raise CheckpointError(f"{where}{key} is missing")
    value = config[key]
    if kind is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGEST_FLOAT:
        value = float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise _unsupported(where + key, value, f"of type {kind.__name__}")
    if isinstance(value, int) and abs(value) >= _LARGEST_SIZE:
        raise _unsupported(where + key, value, f"below {_LARGEST_SIZE:,}")
    return value


def _read(config: Mapping[str, Any]) -> ModelDimensions:
    text: Mapping[str, Any] = _get(config, "text_config", dict) if "text_config" in config else config

    def size(key: str) -> int:
        return _get(text, key, int)

    for key, wanted in (("model_type", "qwen3_5_text"), ("hidden_act", "silu"), ("linear_conv_kernel_dim", 4)):
        if (value := _get(text, key, type(wanted))) != wanted:
            raise _unsupported(key, value, repr(wanted))
    for key, only in (("attention_bias", False), ("attn_output_gate", True)):
        if text.get(key, only) is not only:
            raise _unsupported(key, text[key], repr(only))
    for holder in (config, text):
        if holder.get("quantization_config") is not None:
            raise _unsupported(
                "quantization_config", holder["quantization_config"], "absent: weights are not quantised"
            )

    rope = _get(text, "rope_parameters", dict)
    if rope.get("rope_type", "default") != "default":
        raise _unsupported("rope_parameters.rope_type", rope["rope_type"], "'default'")
    head_dim = size("head_dim")
    factor = _get(rope, "partial_rotary_factor", float, "rope_parameters.")
    rotary = factor * head_dim
    if not rotary.is_integer():
        supported = f"a factor that makes head_dim={head_dim} a whole, even number"
        raise _unsupported("rope_parameters.partial_rotary_factor", factor, supported)

    return ModelDimensions(
        vocab_size=size("vocab_size"),
        hidden_size=size("hidden_size"),
        intermediate_size=size("intermediate_size"),
        layer_types=_layer_types(text, size("num_hidden_layers")),
        num_attention_heads=size("num_attention_heads"),
        num_key_value_heads=size("num_key_value_heads"),
        head_dim=head_dim,
        rotary_dim=int(rotary),
        rope_theta=_get(rope, "rope_theta", float, "rope_parameters."),
        linear_num_key_heads=size("linear_num_key_heads"),
        linear_num_value_heads=size("linear_num_value_heads"),
        linear_key_head_dim=size("linear_key_head_dim"),
        linear_value_head_dim=size("linear_value_head_dim"),
        rms_norm_eps=_get(text, "rms_norm_eps", float),
        max_position_embeddings=size("max_position_embeddings"),
        tie_word_embeddings=_tied(config, text),
    )


def _layer_types(text: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    if not 0 < layers <= _LARGEST_LAYERS:
        raise _unsupported("num_hidden_layers", layers, f"from 1 to {_LARGEST_LAYERS:,}")
    if text.get("layer_types") is None:
        interval = _get(text, "full_attention_interval", int)
        if interval <= 0:
            raise _unsupported("full_attention_interval", interval, "a positive number")
        return tuple(LINEAR if (i + 1) % interval else FULL for i in range(layers))
    types = _get(text, "layer_types", list)
    if len(types) != layers:
        raise _unsupported("layer_types", types, f"of num_hidden_layers={layers} entries, not {len(types)}")
    return tuple(map(str, types))


def _tied(config: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    """The flag may stand in either part, or in both with one value."""
    values = {_get(holder, "tie_word_embeddings", bool) for holder in (config, text) if "tie_word_embeddings" in holder}
    if len(values) != 1:
        found = "missing" if not values else "true in one part and false in the other (outside and in text_config)"
        raise CheckpointError(f"tie_word_embeddings is {found}")
    return values.pop()


def _published(**sizes: Any) -> ModelDimensions:
    """What the published checkpoints have in common; three delta-rule layers, then one of attention."""
    layers = sizes.pop("layers")
    return ModelDimensions(
        vocab_size=248_320,
        layer_types=(LINEAR, LINEAR, LINEAR, FULL) * (layers // 4),
        num_key_value_heads=4,
        head_dim=256,
        rotary_dim=64,
        rope_theta=1e7,
        linear_num_key_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        rms_norm_eps=1e-6,
        max_position_embeddings=262_144,
        **sizes,
    )


DIMENSIONS: dict[str, ModelDimensions] = {
    "4b": _published(
        layers=32,
        hidden_size=2_560,
        intermediate_size=9_216,
        num_attention_heads=16,
        linear_num_value_heads=32,
        tie_word_embeddings=True,
    ),
    "9b": _published(
        layers=32,
        hidden_size=4_096,
        intermediate_size=12_288,
        num_attention_heads=16,
        linear_num_value_heads=32,
        tie_word_embeddings=False,
    ),
    "27b": _published(
        layers=64,
        hidden_size=5_120,
        intermediate_size=17_408,
        num_attention_heads=24,
        linear_num_value_heads=48,
        tie_word_embeddings=False,
    ),
}
"""The published sizes: Qwen3.5-4B, Qwen3.5-9B and Qwen3.8-27B."""
