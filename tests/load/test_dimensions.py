"""Sizes and memory against transformers, published figures and the buffers themselves."""

import copy
from dataclasses import replace

import pytest
import torch
from transformers import Qwen3_5TextConfig, Qwen3_5TextModel

from engine.errors import CheckpointError
from engine.load.dimensions import DIMENSIONS, ModelDimensions
from engine.load.projections import FULL, LINEAR
from engine.plan.schedule import BufferSizes
from engine.run.snapshot import SnapshotBuffers
from ops.sizes import CHUNK, CONV_HISTORY

KIB, MIB, GIB = 2**10, 2**20, 2**30

TEXT_CONFIG = {
    "model_type": "qwen3_5_text",
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "layer_types": [LINEAR, LINEAR, LINEAR, FULL],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "attention_bias": False,
    "attn_output_gate": True,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 9,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25},
}
SMALL = ModelDimensions.from_config(TEXT_CONFIG)


def hf_config(d: ModelDimensions) -> Qwen3_5TextConfig:
    same = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
        "linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim rms_norm_eps "
        "max_position_embeddings tie_word_embeddings"
    )
    rope = {"rope_type": "default", "rope_theta": d.rope_theta, "partial_rotary_factor": d.rotary_dim / d.head_dim}
    return Qwen3_5TextConfig(
        **{name: getattr(d, name) for name in same.split()}, layer_types=list(d.layer_types), rope_parameters=rope
    )


def test_small_dimensions():
    assert SMALL.layer_types == (LINEAR, LINEAR, LINEAR, FULL)
    assert (SMALL.num_hidden_layers, SMALL.num_linear_layers, SMALL.num_full_layers) == (4, 3, 1)
    assert (SMALL.rotary_dim, SMALL.rope_theta, SMALL.tie_word_embeddings) == (8, 1e7, True)
    assert (SMALL.key_dim, SMALL.value_dim, SMALL.conv_dim) == (48, 288, 384)
    assert SMALL.gdn_proj == 384 + 288 + 18 + 14  # the last 14 are zero rows
    assert (SMALL.query_dim, SMALL.kv_dim, SMALL.attention_proj) == (192, 64, 512)


@pytest.mark.parametrize("name", DIMENSIONS)
def test_dimensions_survive_the_config_transformers_writes(name):
    config = hf_config(DIMENSIONS[name]).to_dict()
    assert ModelDimensions.from_config(config) == DIMENSIONS[name]
    assert ModelDimensions.from_config({"model_type": "qwen3_5", "text_config": config}) == DIMENSIONS[name]


def test_layer_types_follow_from_the_interval_when_they_are_not_listed():
    config = {k: v for k, v in TEXT_CONFIG.items() if k != "layer_types"} | {"num_hidden_layers": 6}
    assert ModelDimensions.from_config(config).layer_types == (LINEAR, LINEAR, LINEAR, FULL, LINEAR, LINEAR)


@pytest.mark.parametrize(("outside", "inside", "tied"), [(True, None, True), (None, True, True), (False, False, False)])
def test_the_tie_flag_may_stand_in_either_part(outside, inside, tied):
    text = {k: v for k, v in TEXT_CONFIG.items() if k != "tie_word_embeddings"}
    text |= {} if inside is None else {"tie_word_embeddings": inside}
    config = {"text_config": text} | ({} if outside is None else {"tie_word_embeddings": outside})
    assert ModelDimensions.from_config(config).tie_word_embeddings is tied


@pytest.mark.parametrize(
    ("name", "gdn_proj", "attention_proj", "layers_gib", "total_gib"),
    [("4b", 12_352, 10_240, 6.65, 7.83), ("9b", 12_352, 10_240, 12.89, 14.78), ("27b", 16_480, 14_336, 45.36, 47.73)],
)
def test_published_sizes(name, gdn_proj, attention_proj, layers_gib, total_gib):
    d = DIMENSIONS[name]
    assert (d.gdn_proj, d.attention_proj, d.rotary_dim) == (gdn_proj, attention_proj, 64)
    weights = d.weight_bytes(2)
    assert weights.layers / GIB == pytest.approx(layers_gib, abs=0.005)
    assert weights.total / GIB == pytest.approx(total_gib, abs=0.005)


@pytest.mark.parametrize("d", [*DIMENSIONS.values(), SMALL], ids=[*DIMENSIONS, "small"])
@pytest.mark.parametrize("dtype_bytes", [2, 4])
def test_weight_bytes_are_the_parameters_of_transformers(d, dtype_bytes):
    with torch.device("meta"):
        parameters = dict(Qwen3_5TextModel(hf_config(d)).named_parameters())
    float32 = ("A_log", "linear_attn.norm.weight")
    expected = sum(p.numel() * (4 if n.endswith(float32) else dtype_bytes) for n, p in parameters.items())
    unpadded = d.conv_dim + d.value_dim + 2 * d.linear_num_value_heads
    expected += d.num_linear_layers * (d.gdn_proj - unpadded) * d.hidden_size * dtype_bytes
    weights = d.weight_bytes(dtype_bytes)
    assert weights.total == expected
    assert weights.embedding == parameters["embed_tokens.weight"].numel() * dtype_bytes


@pytest.mark.parametrize(
    ("name", "state_mib", "history_mib", "kv_kib", "prefix_mib"),
    [("4b", 48, 1.125, 32, 146), ("9b", 48, 1.125, 32, 146), ("27b", 144, 2.8125, 64, 340)],
)
def test_published_snapshot_sizes(name, state_mib, history_mib, kv_kib, prefix_mib):
    s = DIMENSIONS[name].snapshot_bytes(2)
    assert (s.state, s.history, s.kv_per_token) == (state_mib * MIB, history_mib * MIB, kv_kib * KIB)
    without_tail = s.buffers(kv_rows=3_093, slots=1, states=1) - s.tail
    assert without_tail / MIB == pytest.approx(prefix_mib, abs=0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_snapshot_bytes_are_those_of_the_buffers(dtype):
    buffers = SnapshotBuffers(SMALL, dtype=dtype, device=torch.device("cpu"))
    buffers.reserve(BufferSizes(kv_rows=77, slots=3, states=2))
    sizes = buffers.sizes
    expected = SMALL.snapshot_bytes(dtype.itemsize).buffers(
        kv_rows=sizes.kv_rows, slots=sizes.slots, states=sizes.states
    )
    assert buffers.bytes == expected


def largest_live_set(d: ModelDimensions, kind: str, dtype_bytes: int) -> int:
    """Bytes per row, by walking a layer's operators: (results, tensors read), freed after their last reader."""
    h, i, kd, vd = d.hidden_size, d.intermediate_size, d.key_dim, d.value_dim
    q, kv = d.num_attention_heads * d.head_dim, d.num_key_value_heads * d.head_dim
    gates = 2 * (d.linear_num_value_heads + d.linear_num_key_heads) * 4 // dtype_bytes
    if kind == LINEAR:
        mixer = [
            ({"proj": d.gdn_proj}, ["normed"]),
            ({"qkv": 2 * kd + vd, "gates": gates}, ["proj"]),
            ({"o": vd}, ["qkv", "gates"]),
            ({"gated": vd}, ["o", "proj"]),
            ({"mixed": h}, ["gated"]),
        ]
    else:
        mixer = [
            ({"proj": d.attention_proj}, ["normed"]),
            ({"q": q, "k": kv, "v": kv}, ["proj"]),
            ({"o": q}, ["q", "k", "v", "proj"]),
            ({"mixed": h}, ["o"]),
        ]
    steps = [
        ({"x": h, "delta": h}, []),
        ({"residual": h, "normed": h}, ["x", "delta"]),
        *mixer,
        ({"residual2": h, "normed2": h}, ["residual", "mixed"]),
        ({"gate_up": 2 * i}, ["normed2"]),
        ({"product": i}, ["gate_up"]),
        ({"down": h}, ["product"]),
        ({}, ["residual2", "down", "x", "delta"]),
    ]
    last = {name: n for n, (_, read) in enumerate(steps) for name in read}
    live: dict[str, int] = {}
    most = 0
    for n, (results, _) in enumerate(steps):
        live |= results
        most = max(most, sum(live.values()))
        live = {name: size for name, size in live.items() if last[name] > n}
    assert not live
    return most * dtype_bytes


NARROW = replace(SMALL, intermediate_size=16)
WIDE = replace(SMALL, hidden_size=1_024, intermediate_size=16)


@pytest.mark.parametrize(
    "d", [*DIMENSIONS.values(), SMALL, NARROW, WIDE], ids=[*DIMENSIONS, "small", "narrow-mlp", "wide-stream"]
)
@pytest.mark.parametrize("dtype_bytes", [2, 4])
def test_pass_bytes_are_the_largest_live_set_of_a_layer(d, dtype_bytes):
    for kinds in ([LINEAR, FULL], [LINEAR], [FULL]):
        expected = max(largest_live_set(d, kind, dtype_bytes) for kind in kinds)
        assert replace(d, layer_types=tuple(kinds)).pass_bytes(1, dtype_bytes) == expected
    assert d.pass_bytes(1_088, dtype_bytes) == 1_088 * d.pass_bytes(1, dtype_bytes)


def test_snapshot_constants_are_those_of_the_tables():
    s = SMALL.snapshot_bytes(2)
    assert s.history == 3 * CONV_HISTORY * SMALL.conv_dim * 2
    assert s.tail == 3 * CHUNK * ((48 + 288) * 2 + (2 * 9 + 3) * 4)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model_type", "qwen3_next", "model_type='qwen3_next' is not supported; it must be 'qwen3_5_text'"),
        ("hidden_act", "gelu", "hidden_act='gelu' .* 'silu'"),
        ("linear_conv_kernel_dim", 3, "linear_conv_kernel_dim=3 .* must be 4"),
        ("attention_bias", True, "attention_bias=True .* must be False"),
        ("attn_output_gate", False, "attn_output_gate=False .* must be True"),
        ("quantization_config", {"bits": 4}, "quantization_config={'bits': 4} .* not quantised"),
        ("vocab_size", 0, "vocab_size=0 .* positive"),
        ("vocab_size", None, "vocab_size=None .* type int"),
        ("hidden_size", 40, "hidden_size=40 .* multiple of 16"),
        ("hidden_size", 48.0, r"hidden_size=48\.0 .* type int"),
        ("intermediate_size", -16, "intermediate_size=-16 .* multiple of 16"),
        ("num_hidden_layers", True, "num_hidden_layers=True .* type int"),
        ("num_hidden_layers", 5, "layer_types=.* num_hidden_layers=5 entries, not 4"),
        ("num_attention_heads", 5, "num_attention_heads=5 .* 1 to 8 heads for each of the 2"),
        ("num_attention_heads", 18, "num_attention_heads=18 .* 1 to 8 heads for each of the 2"),
        ("num_key_value_heads", 0, "num_key_value_heads=0 .* positive"),
        ("head_dim", 48, "head_dim=48 .* power of two from 16"),
        ("head_dim", 8, "head_dim=8 .* power of two from 16"),
        ("linear_key_head_dim", 24, "linear_key_head_dim=24 .* power of two"),
        ("linear_value_head_dim", 0, "linear_value_head_dim=0 .* power of two"),
        ("linear_num_key_heads", 2, "linear_num_value_heads=9 .* multiple of linear_num_key_heads=2"),
        ("linear_num_value_heads", 0, "linear_num_value_heads=0 .* multiple of"),
        ("rms_norm_eps", 0, r"rms_norm_eps=0\.0 .* positive"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps=nan .* finite"),
        ("rms_norm_eps", "1e-6", "rms_norm_eps='1e-6' .* type float"),
        ("max_position_embeddings", 0, "max_position_embeddings=0 .* positive"),
        ("tie_word_embeddings", 1, "tie_word_embeddings=1 .* type bool"),
        ("layer_types", ["sliding_attention"] * 4, "layer_types=.* a list of linear_attention and full_attention"),
        ("layer_types", LINEAR, "layer_types='linear_attention' .* type list"),
        ("rope_parameters", None, "rope_parameters=None .* type dict"),
        ("rope_parameters.rope_type", "yarn", r"rope_parameters\.rope_type='yarn' .* 'default'"),
        ("rope_parameters.rope_theta", -1, r"rope_theta=-1\.0 .* positive"),
        ("rope_parameters.partial_rotary_factor", 0.3, r"partial_rotary_factor=0\.3 .* head_dim=32"),
        ("rope_parameters.partial_rotary_factor", 0.03125, r"rotary_dim=1 .* an even number .* up to head_dim=32"),
        ("rope_parameters.partial_rotary_factor", 2, r"rotary_dim=64 .* up to head_dim=32"),
    ],
)
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
def test_what_is_not_supported_is_refused_by_name(key, value, message, nested):
    config = copy.deepcopy(TEXT_CONFIG)
    outer, _, inner = key.partition(".")
    if inner:
        config[outer][inner] = value
    else:
        config[outer] = value
    with pytest.raises(CheckpointError, match=f"^folder/config.json: .*{message}"):
        ModelDimensions.from_config({"text_config": config} if nested else config, source="folder/config.json")


OPTIONAL = {"layer_types", "full_attention_interval", "attention_bias", "attn_output_gate"}


@pytest.mark.parametrize("key", sorted(set(TEXT_CONFIG) - OPTIONAL))
def test_a_missing_key_is_refused_by_name(key):
    config = {k: v for k, v in TEXT_CONFIG.items() if k != key}
    with pytest.raises(CheckpointError, match=f"config.json: {key} is missing"):
        ModelDimensions.from_config(config)


@pytest.mark.parametrize("key", ["rope_theta", "partial_rotary_factor"])
def test_rotary_parameters_have_no_default(key):
    config = copy.deepcopy(TEXT_CONFIG)
    del config["rope_parameters"][key]
    with pytest.raises(CheckpointError, match=rf"rope_parameters\.{key} is missing"):
        ModelDimensions.from_config(config)


def test_neither_layer_types_nor_an_interval_is_refused():
    config = {k: v for k, v in TEXT_CONFIG.items() if k not in ("layer_types", "full_attention_interval")}
    with pytest.raises(CheckpointError, match="full_attention_interval is missing"):
        ModelDimensions.from_config(config)
    with pytest.raises(CheckpointError, match=r"full_attention_interval=0 .* positive"):
        ModelDimensions.from_config(config | {"full_attention_interval": 0})


def test_two_tie_flags_must_agree():
    with pytest.raises(CheckpointError, match="true in one part and false in the other"):
        ModelDimensions.from_config({"tie_word_embeddings": False, "text_config": TEXT_CONFIG})
