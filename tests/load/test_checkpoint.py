"""A checkpoint folder is checked whole, in both directions, before a value is used."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from engine.errors import CheckpointError
from engine.load.checkpoint import (
    EMBEDDING,
    INDEX,
    RandomWeights,
    TensorSpec,
    expected_tensors,
    open_checkpoint,
    random_tensor,
)
from engine.load.dimensions import DIMENSIONS, ModelDimensions
from engine.load.tiny import tiny_checkpoint, tiny_config

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
Q_PROJ = "layers.3.self_attn.q_proj.weight"  # in the second shard


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "model"))


def edit_json(path: Path, change: Callable[[dict], None]) -> None:
    content = json.loads(path.read_bytes())
    change(content)
    path.write_text(json.dumps(content))


def edit_shard(folder: Path, shard: int, change: Callable[[dict[str, Tensor]], None], *, index: bool = True) -> None:
    """Rewrite one shard; unless told otherwise the index keeps up."""
    file = SHARDS[shard]
    tensors = load_file(folder / file)
    before = set(tensors)
    change(tensors)
    save_file(tensors, folder / file, metadata={"format": "pt"})
    if index:

        def keep_up(content: dict) -> None:
            for name in before - set(tensors):
                del content["weight_map"][name]
            content["weight_map"].update(dict.fromkeys(set(tensors) - before, file))

        edit_json(folder / INDEX, keep_up)


def all_tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / SHARDS[0]) | load_file(folder / SHARDS[1])


def test_every_tensor_is_the_one_in_the_files(pristine: Path) -> None:
    checkpoint = open_checkpoint(pristine)
    files = all_tensors(pristine)
    assert {f"model.{name}" for name in checkpoint.names} == set(files)
    for name in checkpoint.names:
        tensor = checkpoint.tensor(name)
        assert tensor.dtype == files[f"model.{name}"].dtype
        assert torch.equal(tensor, files[f"model.{name}"]), name


def test_names_and_shapes_are_those_of_transformers() -> None:
    config = tiny_config(8) | {
        "hidden_size": 96, "intermediate_size": 208, "vocab_size": 1_331, "num_attention_heads": 6,
        "linear_num_value_heads": 6, "linear_key_head_dim": 16, "linear_value_head_dim": 64, "head_dim": 64,
    }  # fmt: skip
    with torch.device("meta"):
        theirs = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**config)).model.state_dict()
    ours = expected_tensors(ModelDimensions.from_config(config))
    assert {name: spec.shape for name, spec in ours.items()} == {k: tuple(t.shape) for k, t in theirs.items()}


@pytest.mark.parametrize(("model", "tensors"), [("4b", 426), ("9b", 426), ("27b", 850)])
def test_published_models_have_as_many_tensors_as_their_files(model: str, tensors: int) -> None:
    """427 and 851 with the head."""
    assert len(expected_tensors(DIMENSIONS[model])) == tensors


@pytest.mark.parametrize("prefix", ["model.language_model.", "model.", ""])
def test_the_prefix_is_found_and_other_parts_are_skipped(folder: Path, prefix: str) -> None:
    wanted = all_tensors(folder)
    for shard in (0, 1):
        edit_shard(folder, shard, lambda t: [t.update({prefix + n.removeprefix("model."): t.pop(n)}) for n in list(t)])
    extra = ["mtp.norm.weight", "model.visual.blocks.0.norm1.weight", "visual.patch_embed.weight"]
    edit_shard(folder, 1, lambda t: t.update({name: torch.zeros(3) for name in extra}))
    checkpoint = open_checkpoint(folder)
    assert torch.equal(checkpoint.tensor(Q_PROJ), wanted[f"model.{Q_PROJ}"])
    assert len(checkpoint.names) == len(wanted)


def test_one_file_without_an_index_is_a_checkpoint(folder: Path) -> None:
    tensors = all_tensors(folder)
    for name in (*SHARDS, INDEX):
        (folder / name).unlink()
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(open_checkpoint(folder).tensor(Q_PROJ), tensors[f"model.{Q_PROJ}"])


def test_a_nested_config_is_read(folder: Path) -> None:
    text = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": text}))
    assert open_checkpoint(folder).dimensions == ModelDimensions.from_config(text)


def drop(name: str) -> Callable[[Path], None]:
    return lambda folder: edit_shard(folder, 1, lambda t: t.pop(name))


def put(name: str, tensor: Tensor, *, index: bool = True) -> Callable[[Path], None]:
    return lambda folder: edit_shard(folder, 1, lambda t: t.update({name: tensor}), index=index)


def recast(name: str, dtype: torch.dtype) -> Callable[[Path], None]:
    return lambda folder: edit_shard(folder, 1, lambda t: t.update({name: t[name].to(dtype)}))


def place(name: str, file: object) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / INDEX, lambda content: content["weight_map"].update({name: file}))


def cut(file: str, missing: int) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:-missing])


def text(file: str, content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_text(content) and None


def remove(*names: str) -> Callable[[Path], None]:
    return lambda folder: [(folder / name).unlink() for name in names] and None


DAMAGE = {
    "missing tensor": (drop(f"model.{Q_PROJ}"), rf"model\.{Q_PROJ} is missing"),
    "missing embedding": (
        lambda folder: edit_shard(folder, 0, lambda t: t.pop(f"model.{EMBEDDING}")),
        r"no embed_tokens\.weight under any of",
    ),
    "unexpected tensor": (
        put("model.layers.3.self_attn.q_porj.weight", torch.zeros(2)),
        rf"{SHARDS[1]}: model\.layers\.3\.self_attn\.q_porj\.weight is not part .*did you mean 'model\.{Q_PROJ}'",
    ),
    "a layer too many": (put("model.layers.4.mlp.up_proj.weight", torch.zeros(2)), r"layers\.4\.mlp\.up_proj"),
    "unexpected tensor the index does not list": (
        put("model.layers.9.x", torch.zeros(2), index=False),
        rf"{SHARDS[1]}: model\.layers\.9\.x is not part",
    ),
    "duplicate": (
        put(f"model.{EMBEDDING}", torch.zeros(832, 128, dtype=torch.bfloat16), index=False),
        rf"model\.embed_tokens\.weight is in {SHARDS[0]} and in {SHARDS[1]}",
    ),
    "tensor the index does not list": (
        lambda folder: edit_json(folder / INDEX, lambda c: c["weight_map"].pop(f"model.{Q_PROJ}")),
        rf"{SHARDS[1]}: holds model\.{Q_PROJ}, which {INDEX} does not list",
    ),
    "wrong place": (
        place(f"model.{Q_PROJ}", SHARDS[0]),
        rf"{SHARDS[0]}: {INDEX} places model\.{Q_PROJ} there, but the file does not hold it",
    ),
    "wrong shape": (
        put(f"model.{Q_PROJ}", torch.zeros(128, 256, dtype=torch.bfloat16)),
        rf"{SHARDS[1]}: model\.{Q_PROJ} has shape \[128, 256\], config\.json asks for \[256, 128\]",
    ),
    "flattened": (put("model.norm.weight", torch.zeros(128, 1, dtype=torch.bfloat16)), r"norm\.weight has shape"),
    "float16": (recast(f"model.{Q_PROJ}", torch.float16), rf"{SHARDS[1]}: model\.{Q_PROJ} is F16; convert it to BF16"),
    "integers": (recast("model.norm.weight", torch.int8), r"model\.norm\.weight is I8"),
    "missing shard": (remove(SHARDS[1]), rf"{SHARDS[1]}: no such file, but {INDEX} places model\.layers"),
    "cut short": (cut(SHARDS[1], 1), rf"{SHARDS[1]}: damaged or cut short: 663,735 bytes, its header asks for 663,736"),
    "cut in the header": (lambda f: (f / SHARDS[0]).write_bytes(b"\x10\0\0") and None, rf"{SHARDS[0]}: damaged"),
    "empty shard": (text(SHARDS[0], ""), rf"{SHARDS[0]}: damaged or cut short: 0 bytes"),
    "outside the folder": (
        place(f"model.{Q_PROJ}", "../x.safetensors"),
        rf"{INDEX}: model\.{Q_PROJ} is placed outside",
    ),
    "index of numbers": (place(f"model.{Q_PROJ}", 2), "weight_map must give a file name"),
    "index without map": (text(INDEX, "{}"), "weight_map must give a file name"),
    "index that is no JSON": (text(INDEX, "{"), rf"{INDEX}: not readable as JSON"),
    "no weights": (remove(*SHARDS, INDEX), rf"neither {INDEX} nor model\.safetensors"),
    "shards without an index": (remove(INDEX), rf"neither {INDEX} nor model\.safetensors \(found {SHARDS[0]}"),
    "no config": (remove("config.json"), r"config\.json: no such file"),
    "config that is no JSON": (text("config.json", "hidden_size: 128"), r"config\.json: not readable as JSON"),
    "config that is a list": (text("config.json", "[]"), r"config\.json: must hold a JSON object"),
    "config without a size": (
        lambda folder: edit_json(folder / "config.json", lambda c: c.pop("hidden_size")),
        r"config\.json: hidden_size is missing",
    ),
    "config of another size": (
        lambda folder: edit_json(folder / "config.json", lambda c: c.update(intermediate_size=272)),
        r"gate_proj\.weight has shape \[256, 128\], config\.json asks for \[272, 128\]",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_told_by_file_and_tensor(folder: Path, damage: str) -> None:
    inflict, message = DAMAGE[damage]
    open_checkpoint(folder)
    inflict(folder)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: no such folder"):
        open_checkpoint(tmp_path / "nowhere")


def test_a_stray_file_is_left_out_with_a_warning(folder: Path) -> None:
    wanted = all_tensors(folder)[f"model.{EMBEDDING}"]
    save_file({f"model.{EMBEDDING}": wanted + 1}, folder / "model.safetensors")
    with pytest.warns(UserWarning, match=r"not part of the checkpoint, left out: model\.safetensors"):
        checkpoint = open_checkpoint(folder)
    assert torch.equal(checkpoint.tensor(EMBEDDING), wanted)


def test_float32_files_keep_their_dtype(folder: Path) -> None:
    recast(f"model.{Q_PROJ}", torch.float32)(folder)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.tensor(Q_PROJ).dtype == torch.float32
    assert checkpoint.tensor("layers.2.linear_attn.A_log").dtype == torch.float32


def untie(folder: Path) -> None:
    edit_json(folder / "config.json", lambda c: c.update(tie_word_embeddings=False))


def test_a_tied_head_is_the_embedding(folder: Path) -> None:
    embedding = all_tensors(folder)[f"model.{EMBEDDING}"]
    assert torch.equal(open_checkpoint(folder).head_rows([7, 831]), embedding[[7, 831]])
    put("lm_head.weight", embedding.clone())(folder)
    assert torch.equal(open_checkpoint(folder).head_rows([831, 7]), embedding[[831, 7]])


def test_a_tied_head_that_differs_is_refused(folder: Path) -> None:
    put("lm_head.weight", all_tensors(folder)[f"model.{EMBEDDING}"] + 1)(folder)
    with pytest.raises(CheckpointError, match=rf"{SHARDS[1]}: lm_head\.weight differs from the embedding"):
        open_checkpoint(folder).head_rows([7])


def test_an_untied_head_is_read_from_its_own_tensor(folder: Path) -> None:
    untie(folder)
    with pytest.raises(CheckpointError, match=r"no lm_head\.weight, and config\.json does not tie it"):
        open_checkpoint(folder).head_rows([7])
    head = torch.randn(832, 128).bfloat16()
    put("lm_head.weight", head)(folder)
    assert torch.equal(open_checkpoint(folder).head_rows([7, 0]), head[[7, 0]])
    put("lm_head.weight", head[:800].clone())(folder)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight has shape \[800, 128\]"):
        open_checkpoint(folder).head_rows([7])


def random(name: str, spec: TensorSpec, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return random_tensor(name, spec, dtype=dtype, device="cpu", seed=seed)


def test_random_weights_depend_on_seed_and_name_alone() -> None:
    dimensions = ModelDimensions.from_config(tiny_config())
    weights, again, other = (
        RandomWeights(dimensions, seed=seed, dtype=torch.float32, device=torch.device("cpu")) for seed in (3, 3, 4)
    )
    first = {name: weights.tensor(name) for name in weights.names}
    for name in reversed(again.names):
        assert torch.equal(again.tensor(name), first[name]), name
        assert not torch.equal(other.tensor(name), first[name]), name
    assert not torch.equal(first["layers.0.mlp.up_proj.weight"], first["layers.0.mlp.gate_proj.weight"])


def test_random_weights_differ_between_dtypes_by_rounding_alone() -> None:
    spec = TensorSpec((33, 48), "linear")
    assert torch.equal(random("x", spec).bfloat16(), random("x", spec, dtype=torch.bfloat16))


def test_random_heads_are_tied_as_the_config_says() -> None:
    tied = ModelDimensions.from_config(tiny_config())
    untied = ModelDimensions.from_config(tiny_config() | {"tie_word_embeddings": False})
    for dimensions, same in ((tied, True), (untied, False)):
        weights = RandomWeights(dimensions, seed=0, dtype=torch.bfloat16, device=torch.device("cpu"))
        assert torch.equal(weights.head_rows([5, 9]), weights.tensor(EMBEDDING)[[5, 9]]) is same


@pytest.mark.parametrize(
    ("spec", "mean", "deviation"),
    [
        (TensorSpec((300, 400), "linear"), 0.0, 400**-0.5),
        (TensorSpec((700, 64), "embedding"), 0.0, 64**-0.5),
        (TensorSpec((9_000, 1, 4), "conv"), 0.0, 0.5),
        (TensorSpec((20_000,), "norm"), 0.0, 0.1),
        (TensorSpec((20_000,), "gated_norm"), 1.0, 0.1),
    ],
)
def test_normal_weights_have_their_moments(spec: TensorSpec, mean: float, deviation: float) -> None:
    values = random("x", spec).double()
    assert values.mean().item() == pytest.approx(mean, abs=4 * deviation / math.sqrt(values.numel()))
    assert values.std().item() == pytest.approx(deviation, rel=4 / math.sqrt(2 * values.numel()))


def test_decays_cover_their_ranges() -> None:
    rate = random("x", TensorSpec((20_000,), "a_log")).double().exp()
    assert rate.min() == pytest.approx(1, abs=0.01)
    assert rate.max() == pytest.approx(16, abs=0.01)
    step = torch.nn.functional.softplus(random("x", TensorSpec((20_000,), "dt_bias")).double())
    assert step.min() == pytest.approx(1e-3, rel=0.01)
    assert step.max() == pytest.approx(1e-1, rel=0.01)
    assert step.log().mean() == pytest.approx(math.log(1e-2), abs=0.05)
