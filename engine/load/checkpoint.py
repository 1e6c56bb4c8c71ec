"""Where weights come from: a Hugging Face folder, checked whole before a value is used, or a seed.

Names are those of the Hugging Face text model without prefix (`layers.3.self_attn.q_proj.weight`).
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import CheckpointError, nearest
from engine.load.dimensions import ModelDimensions
from engine.load.projections import FULL
from ops.sizes import CONV_HISTORY

Kind = Literal["linear", "embedding", "norm", "gated_norm", "conv", "a_log", "dt_bias"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"

RANDOM_NOTE = "The weights are random: answers show the mechanics and judge nothing."

_PREFIXES = ("model.language_model.", "model.", "")
_NOT_TEXT = ("model.visual.", "visual.", "model.mtp.", "mtp.", HEAD)
DTYPES = ("BF16", "F32")  # float16 and quantised files would change values on the way to bfloat16
_LARGEST_HEADER = 100_000_000  # bytes, as safetensors allows
_BLOCK = 1 << 26  # elements of random weights made in float32 at once


class TensorSpec(NamedTuple):
    shape: tuple[int, ...]
    kind: Kind


def expected_tensors(dimensions: ModelDimensions) -> dict[str, TensorSpec]:
    """Every tensor of the text model, in the order of a forward; the language-model head is not among them."""
    d, hidden = dimensions, dimensions.hidden_size
    tensors = {EMBEDDING: TensorSpec((d.vocab_size, hidden), "embedding")}

    def add(name: str, kind: Kind, *shape: int) -> None:
        tensors[name] = TensorSpec(shape, kind)

    for n, layer_type in enumerate(d.layer_types):
        layer = f"layers.{n}."
        add(layer + "input_layernorm.weight", "norm", hidden)
        if layer_type == FULL:
            mixer = layer + "self_attn."
            add(mixer + "q_proj.weight", "linear", 2 * d.query_dim, hidden)  # per head: query, then gate
            add(mixer + "k_proj.weight", "linear", d.kv_dim, hidden)
            add(mixer + "v_proj.weight", "linear", d.kv_dim, hidden)
            add(mixer + "q_norm.weight", "norm", d.head_dim)
            add(mixer + "k_norm.weight", "norm", d.head_dim)
            add(mixer + "o_proj.weight", "linear", hidden, d.query_dim)
        else:
            mixer = layer + "linear_attn."
            add(mixer + "in_proj_qkv.weight", "linear", d.conv_dim, hidden)
            add(mixer + "in_proj_z.weight", "linear", d.value_dim, hidden)
            add(mixer + "in_proj_b.weight", "linear", d.linear_num_value_heads, hidden)
            add(mixer + "in_proj_a.weight", "linear", d.linear_num_value_heads, hidden)
            add(mixer + "conv1d.weight", "conv", d.conv_dim, 1, CONV_HISTORY + 1)
            add(mixer + "A_log", "a_log", d.linear_num_value_heads)
            add(mixer + "dt_bias", "dt_bias", d.linear_num_value_heads)
            add(mixer + "norm.weight", "gated_norm", d.linear_value_head_dim)
            add(mixer + "out_proj.weight", "linear", hidden, d.value_dim)
        add(layer + "post_attention_layernorm.weight", "norm", hidden)
        add(layer + "mlp.gate_proj.weight", "linear", d.intermediate_size, hidden)
        add(layer + "mlp.up_proj.weight", "linear", d.intermediate_size, hidden)
        add(layer + "mlp.down_proj.weight", "linear", hidden, d.intermediate_size)
    add("norm.weight", "norm", hidden)
    return tensors


class Checkpoint:
    """A checked folder. Values are read when asked for; `open_checkpoint` makes one. A context manager, which closes
    the files."""

    def __init__(self, folder: Path, dimensions: ModelDimensions, shards: dict[str, Any], places: dict[str, str]):
        self.folder, self.dimensions = folder, dimensions
        self._shards = shards  # file name -> open safetensors file
        self._files = {name: shard for shard, handle in shards.items() for name in handle.keys()}  # noqa: SIM118
        self._places = places  # text name -> name in its file

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for shard in self._shards.values():
            shard.__exit__(None, None, None)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._places)

    def tensor(self, name: str) -> Tensor:
        """The tensor as the file holds it (bfloat16 or float32), on the CPU, backed by the mapped file.

        Raises CheckpointError for an A_log or dt_bias that makes gates of NaN.
        """
        place = self._places[name]
        tensor: Tensor = self._shards[self._files[place]].get_tensor(place)
        check_gates(self.file_of(name), place, tensor)
        return tensor

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files that hold the tensors, visual and other ones too."""
        return tuple(self._shards)

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self.folder / self._files[self._places[name]]

    def head_rows(self, token_ids: Sequence[int]) -> Tensor:
        """Rows [tokens, hidden] of the language-model head; those of the embedding where the two are tied.

        Raises CheckpointError when an untied checkpoint lacks the head, or a tied one holds a different one.
        """
        file = self._files.get(HEAD)
        shape = [self.dimensions.vocab_size, self.dimensions.hidden_size]
        if file is not None:
            check_tensor(file, HEAD, self._shards[file].get_slice(HEAD), shape)
            rows = self._rows(HEAD, token_ids)
            if self.dimensions.tie_word_embeddings and not torch.equal(rows, self._rows(self._embedding, token_ids)):
                raise CheckpointError(f"{file}: {HEAD} differs from the embedding that config.json ties it to")
            return rows
        if not self.dimensions.tie_word_embeddings:
            raise CheckpointError(f"{self.folder}: no {HEAD}, and config.json does not tie it to the embedding")
        return self._rows(self._embedding, token_ids)

    @property
    def _embedding(self) -> str:
        return self._places[EMBEDDING]

    def _rows(self, place: str, token_ids: Sequence[int]) -> Tensor:
        rows = self._shards[self._files[place]].get_slice(place)
        with torch.device("cpu"):  # a slice comes on the default device
            return torch.cat([rows[i : i + 1] for i in token_ids])


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Map the folder's files and check every tensor's presence, place, shape and dtype; no value is read.

    `config.json` gives the dimensions. The index decides which files belong to the checkpoint: any other safetensors
    file is left out with a warning, because loaders that take whatever lies there would read different weights.
    Tensors are bfloat16 or float32. Visual, `mtp` and head tensors may be there and are not looked at.

    Raises CheckpointError naming file and tensor.
    """
    folder = Path(folder).expanduser()
    dimensions = read_dimensions(folder)
    index = _read_index(folder)
    shards = {file: open_shard(folder / file) for file in sorted(set(index.values()))}
    held = {file: frozenset(shard.keys()) for file, shard in shards.items()}
    for name, file in index.items():
        if name not in held[file]:
            raise CheckpointError(f"{file}: {INDEX} places {name} there, but the file does not hold it")
    expected = expected_tensors(dimensions)
    places = _text_tensors(folder, held, index, expected)
    for name, spec in expected.items():
        file = index[places[name]]
        check_tensor(file, places[name], shards[file].get_slice(places[name]), list(spec.shape))
    return Checkpoint(folder, dimensions, shards, places)


def read_dimensions(folder: str | Path) -> ModelDimensions:
    """Those of the folder's `config.json`. Raises CheckpointError naming file and key."""
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    return ModelDimensions.from_config(read_json(folder / "config.json"), source=str(folder / "config.json"))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError naming the file when there is none."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return content


def _read_index(folder: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    present = {path.name for path in folder.glob("*.safetensors")}
    if (folder / INDEX).exists():
        index = read_json(folder / INDEX).get("weight_map")
        if not isinstance(index, dict) or not index or not all(isinstance(file, str) for file in index.values()):
            raise CheckpointError(f"{folder / INDEX}: weight_map must give a file name for each tensor")
        for name, file in index.items():
            if Path(file).name != file:
                raise CheckpointError(f"{folder / INDEX}: {name} is placed outside the folder, in {file}")
            if file not in present:
                raise CheckpointError(f"{folder / file}: no such file, but {INDEX} places {name} there")
    elif SINGLE in present:
        index = dict.fromkeys(open_shard(folder / SINGLE).keys(), SINGLE)
    else:
        found = f" (found {', '.join(sorted(present))})" if present else ""
        raise CheckpointError(f"{folder}: neither {INDEX} nor {SINGLE}{found}")
    strays = present - set(index.values())
    if strays:
        warnings.warn(f"{folder}: not part of the checkpoint, left out: {', '.join(sorted(strays))}", stacklevel=3)
    return index


def open_shard(path: Path) -> Any:
    """The mapped safetensors file. Raises CheckpointError naming it when it is missing, damaged or cut short."""
    try:
        with path.open("rb") as file:
            size, stated = path.stat().st_size, _stated_bytes(file)
        return safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except SafetensorError as error:
        wanted = "" if stated is None else f", its header asks for {stated:,}"
        raise CheckpointError(f"{path}: damaged or cut short: {size:,} bytes{wanted} ({error})") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None


def _stated_bytes(file: BinaryIO) -> int | None:
    """Bytes that a safetensors file must have by its own header, or to hold it at all; None where it tells nothing."""
    length = int.from_bytes(file.read(8), "little")
    if length > _LARGEST_HEADER:
        return None
    header = file.read(length)
    if len(header) < length:
        return 8 + length
    try:
        ends = [entry["data_offsets"][1] for name, entry in json.loads(header).items() if name != "__metadata__"]
        return 8 + length + int(max(ends, default=0))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return None


def _text_tensors(
    folder: Path, held: dict[str, frozenset[str]], index: dict[str, str], expected: dict[str, TensorSpec]
) -> dict[str, str]:
    """Text name -> name in the files, after checking that exactly the expected tensors exist, once each."""
    files = defaultdict(list)
    for file, names in held.items():
        for name in names:
            files[name].append(file)
    prefix = next((p for p in _PREFIXES if p + EMBEDDING in files), None)
    if prefix is None:
        raise CheckpointError(f"{folder}: no {EMBEDDING} under any of {', '.join(repr(p) for p in _PREFIXES)}")
    places = {name: prefix + name for name in expected}
    for name, place in places.items():
        if place not in files:
            raise CheckpointError(f"{folder}: {place} is missing; {len(files)} tensors are there, {name} is not")
    known = set(places.values())
    for name, where in sorted(files.items()):
        if name in known and len(where) > 1:
            raise CheckpointError(f"{folder}: {name} is in {' and in '.join(where)}")
        if name in known and name not in index:
            raise CheckpointError(f"{where[0]}: holds {name}, which {INDEX} does not list")
        if name not in known and not name.startswith(_NOT_TEXT):
            raise CheckpointError(f"{where[0]}: {name} is not part of this model{nearest(name, known)}")
    return places


def check_tensor(file: str, name: str, found: Any, shape: list[int], *, wanted_by: str = "config.json") -> None:
    """`found`, a slice of a safetensors file, has this shape and one of DTYPES. Raises CheckpointError."""
    if found.get_shape() != shape:
        raise CheckpointError(f"{file}: {name} has shape {found.get_shape()}, {wanted_by} asks for {shape}")
    if found.get_dtype() not in DTYPES:
        raise CheckpointError(f"{file}: {name} is {found.get_dtype()}; convert it to BF16 or F32")


def check_gates(file: Path, name: str, tensor: Tensor) -> None:
    """`exp(A_log)` and `dt_bias` are finite in float32; any other `tensor` passes. Raises CheckpointError."""
    if not name.endswith((".A_log", ".dt_bias")):
        return
    values = tensor.float()
    bad = ~values.isfinite() | (name.endswith(".A_log") & ~values.exp().isfinite())
    if bool(bad.any()):
        raise CheckpointError(
            f"{file}: {name} holds {float(values[bad][0]):g} at {int(bad.nonzero()[0, 0])}; its gates would be NaN: "
            "A_log must be finite and at most 88.7, dt_bias finite; restore the file"
        )


class RandomWeights:
    """Weights of any dimensions from a seed, made on `device`; the same interface as a Checkpoint.

    Each tensor depends on the seed and its own name alone. Values differ between CPU and CUDA, not between dtypes
    beyond rounding.
    """

    def __init__(self, dimensions: ModelDimensions, *, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self.dimensions, self.seed, self.dtype, self.device = dimensions, seed, dtype, device
        self._expected = expected_tensors(dimensions)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._expected)

    def tensor(self, name: str) -> Tensor:
        return random_tensor(name, self._expected[name], dtype=self.dtype, device=self.device, seed=self.seed)

    def head_rows(self, token_ids: Sequence[int]) -> Tensor:
        """Rows [tokens, hidden] of the head."""
        ids = torch.tensor(token_ids, device=self.device)
        if self.dimensions.tie_word_embeddings:
            return self.tensor(EMBEDDING)[ids]
        head = TensorSpec((self.dimensions.vocab_size, self.dimensions.hidden_size), "embedding")
        return random_tensor(HEAD, head, dtype=self.dtype, device=self.device, seed=self.seed)[ids]


def random_tensor(name: str, spec: TensorSpec, *, dtype: torch.dtype, device: torch.device | str, seed: int) -> Tensor:
    """Values of `spec.shape` such that activations keep their size through any number of layers.

    Matrices and the convolution are normal with variance 1 / inputs, embeddings with variance 1 / hidden (a head tied
    to them gives logits near 1), zero-centred norms 0 and the gated norm 1, each with deviation 0.1. A decays 1 to 16
    times per unit of a step size that starts between 0.001 and 0.1, as in the delta rule's usual start.
    """
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
    values = torch.empty(spec.shape, dtype=dtype, device=device)
    for block in torch.split(values.view(-1), _BLOCK):
        block.copy_(_draw(spec, torch.empty(block.shape, dtype=torch.float32, device=device), generator))
    return values


def _draw(spec: TensorSpec, block: Tensor, generator: torch.Generator) -> Tensor:
    if spec.kind == "a_log":
        return block.uniform_(1.0, 16.0, generator=generator).log_()
    if spec.kind == "dt_bias":
        step = block.uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp_()
        return step + torch.log(-torch.expm1(-step))  # softplus of this is `step`
    if spec.kind in ("norm", "gated_norm"):
        return block.normal_(0.0 if spec.kind == "norm" else 1.0, 0.1, generator=generator)
    return block.normal_(0.0, spec.shape[-1] ** -0.5, generator=generator)
