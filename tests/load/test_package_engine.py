"""An engine over decision models: answers and states equal to plain references, names in responses, explain, memory."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5TextModel

from engine.config import ExplainConfig
from engine.engine import Engine
from engine.errors import ConfigError
from engine.explain import explain
from engine.load.checkpoint import open_checkpoint
from engine.load.lora import open_adapter
from engine.load.package import folder_sha256
from engine.load.tensors import Weights
from engine.load.weights import load_weights
from engine.wire.open_jev import OpenJev
from engine.wire.prompts import build_prompts
from engine.wire.requests import parse_request
from engine.wire.tokens import Tokens
from tests.load.package_support import (
    TEMPERATURE,
    distance,
    head_values,
    loaded,
    our_states,
    their_states,
    write_base,
    write_export,
    write_package,
)

REQUEST = {
    "state": "The parcel arrived open.",
    "questions": {
        "action": {"type": "choice", "instructions": "What next?", "criteria": {"replace": "Send it", "wait": None}},
        "sure": {"type": "noul", "instructions": "Is it broken?"},
        "level": {"type": "score", "instructions": "How bad?", "criteria": ["fine", "bad", "worse"]},
    },
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"), tied=False)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    return write_package(tmp_path_factory.mktemp("package"), base)


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory, base: Path, package: Path) -> Path:
    return write_export(tmp_path_factory.mktemp("export"), base, package)


# Answers


def reference_answers(base: Path, package: Path) -> dict[str, Any]:
    """transformers and PEFT on each whole prompt, the head in float64: (probabilities) per question."""
    model = PeftModel.from_pretrained(Qwen3_5TextModel.from_pretrained(base, dtype=torch.float32), package / "adapter")
    weight, bias = head_values()
    request = parse_request(REQUEST)
    found = {}
    for question in build_prompts(request, Tokens.load(base), 4096).questions:
        scores = []
        for ids in question.prompts:
            with torch.no_grad():
                hidden = model(input_ids=torch.from_numpy(ids).long()[None], use_cache=False).last_hidden_state[0, -1]
            scores.append(float(hidden.double() @ weight.double() + bias.double()))
        logits = torch.tensor(scores if len(scores) > 1 else [0.0, *scores], dtype=torch.float64)
        found[question.id] = torch.softmax(logits / TEMPERATURE, 0).tolist()
    return found


def probabilities(engine: Engine) -> dict[str, list[float]]:
    answers = engine.score(REQUEST).to_dict()["answers"]
    return {
        id: list(a["probabilities"].values()) if "probabilities" in a else [1 - a["noul"], a["noul"]]
        for id, a in answers.items()
    }


def test_answers_are_those_of_the_reference(base: Path, package: Path, export: Path) -> None:
    expected = reference_answers(base, package)
    for options in ({"base": str(base)}, {"base": str(base), "lora": "unmerged"}):
        with loaded(package, dtype="float32", **options) as engine:
            found = probabilities(engine)
        assert {id: pytest.approx(p, abs=1e-4) for id, p in found.items()} == expected
    with loaded(export, dtype="float32") as engine:  # its weights were rounded by PEFT
        assert {id: pytest.approx(p, abs=0.05) for id, p in probabilities(engine).items()} == expected


def test_responses_name_the_package(base: Path, package: Path) -> None:
    with loaded(package, base=str(base), lora="unmerged") as engine:
        response = engine.score({**REQUEST, "model": "somebody/base"})
        metadata = response.metadata
        again = engine.like(schedule="tree").score(REQUEST).metadata
    assert response.model == "somebody/base"
    digest = hashlib.sha256()
    for name in (
        "adapter/README.md", "adapter/adapter_config.json", "adapter/adapter_model.safetensors",
        "head.pt", "model.json", "temperature.json",
    ):  # fmt: skip
        digest.update(name.encode() + b"\0" + (package / name).read_bytes())
    for found in (metadata, again):
        assert found["method"] == "lora_decision_head"
        assert found["temperature"] == TEMPERATURE
        assert found["base_revision"] == "0" * 40
        assert found["checkpoint_sha256"] == digest.hexdigest() == folder_sha256(package)
        assert (found["weights"], found["lora"]) == ("checkpoint", "unmerged")


def test_responses_name_the_export(export: Path) -> None:
    with loaded(export) as engine:
        response = engine.score(REQUEST)
    assert response.metadata["method"] == "native_merged_lora_decision_head"
    assert response.metadata["base_revision"] == "0" * 40
    assert not {"checkpoint_sha256", "lora"} & response.metadata.keys()


def test_an_export_has_the_states_of_its_package(base: Path, package: Path, export: Path) -> None:
    theirs = their_states(export, None, dtype=torch.float32, merged=True)
    with loaded(export, dtype="float32") as engine:
        assert distance(our_states(engine), theirs) <= 5e-5


@pytest.mark.parametrize("a_log", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_base_folders_of_every_form_have_their_states(tmp_path: Path, tied: bool, a_log: torch.dtype) -> None:
    base = write_base(tmp_path, tied=tied, a_log=a_log)
    assert len(list(base.glob("*.safetensors"))) > 2
    theirs = their_states(base, None, dtype=torch.float32, merged=False)
    with loaded(base, dtype="float32") as engine:
        assert distance(our_states(engine), theirs) <= 5e-5
        embedding = load_all(base)["model.embed_tokens.weight" if tied else "lm_head.weight"].float()
        yes, no = (Tokens.load(base).single_id(word) for word in ("Yes", "No"))
        assert isinstance(engine.processor, OpenJev)
        assert engine.processor.head is not None
        assert np.array_equal(engine.processor.head.weight, (embedding[yes] - embedding[no]).numpy())


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


@pytest.mark.parametrize("padding", [0, 8])
def test_tensors_may_lie_at_any_multiple_of_eight_bytes(tmp_path: Path, base: Path, padding: int) -> None:
    tensors = load_all(base)
    shutil.copy(base / "config.json", tmp_path)
    shutil.copy(base / "tokenizer.json", tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt", "padding": "x" * padding})
    with loaded(base, dtype="bfloat16") as one, loaded(tmp_path, dtype="bfloat16") as other:
        assert torch.equal(our_states(one), our_states(other))


@pytest.mark.parametrize("lora", ["merged", "unmerged"])
def test_d36_weights_are_the_engines_own_and_no_file_stays_open(
    tmp_path: Path, base: Path, package: Path, lora: str
) -> None:
    own_base, own_package = shutil.copytree(base, tmp_path / "base"), shutil.copytree(package, tmp_path / "package")
    with loaded(own_package, base=str(own_base), dtype="bfloat16", lora=lora) as engine:
        states, answers = our_states(engine), engine.score(REQUEST).answers
        files = [*own_base.glob("*.safetensors"), *(own_package / "adapter").glob("*.safetensors")]
        assert len(files) > 2
        maps = Path("/proc/self/maps").read_text() if sys.platform == "linux" else ""
        for file in files:
            assert str(file) not in maps
            start = 8 + int.from_bytes(file.read_bytes()[:8], "little")
            with file.open("r+b") as values:
                values.seek(start)
                values.write(bytes(file.stat().st_size - start))
        assert torch.equal(our_states(engine), states)
        assert engine.score(REQUEST).answers == answers
        for file in files:
            os.truncate(file, 0)  # a page of a mapped file that is no longer there is SIGBUS
        assert torch.equal(our_states(engine), states)
        assert engine.score(REQUEST).answers == answers


# Explain and memory


def test_explain_takes_tokenizer_and_sizes_from_the_base(base: Path, package: Path) -> None:
    config = {"device": "cpu", "checkpoint": str(package), "check_ids": False, "format": "json"}
    body = io.BytesIO(json.dumps(REQUEST).encode())
    out = io.StringIO()
    assert explain(ExplainConfig(**config, base=str(base), request="-"), stdin=body, stdout=out) == 0
    assert json.loads(out.getvalue())["tokenizer"] == str(base)
    with pytest.raises(ConfigError, match="give their folder with base=FOLDER"):
        explain(ExplainConfig(**config), stdin=body, stdout=out)


def layer_bytes(weights: Weights) -> int:
    """Of the largest layer."""
    found = []
    for layer in weights.layers:
        parts = [*vars(layer).values(), *vars(layer.mlp).values()]
        found.append(sum(part.nbytes for part in parts if isinstance(part, torch.Tensor)))
    return max(found)


@pytest.mark.gpu
@pytest.mark.parametrize("lora", [None, "merged", "unmerged"])
def test_loading_never_takes_more_than_the_weights_and_one_layer(
    base: Path, package: Path, lora: str | None, device: torch.device
) -> None:
    source = open_checkpoint(base)
    adapter = open_adapter(package / "adapter", source.dimensions)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    weights = load_weights(
        adapter.merged(source.tensor, device) if lora == "merged" else source.tensor,
        source.dimensions,
        dtype=torch.bfloat16,
        device=device,
        positions=128,
        adapter=adapter if lora == "unmerged" else None,
    )
    peak = torch.cuda.max_memory_allocated(device) - before
    assert peak <= torch.cuda.memory_allocated(device) - before + layer_bytes(weights)
