"""The offline check: facts, one line for each finding with file and key, and exit codes."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.check import run
from engine.config import EngineConfig
from engine.errors import CheckpointError
from engine.load.opening import describe
from engine.load.package import folder_sha256
from tests.load.package_support import CUA, write_adapter, write_base, write_export, write_package

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder with `base`, `package`, `export` and `text`."""
    folder = tmp_path_factory.mktemp("whole")
    base = write_base(folder / "base")
    package = write_package(folder / "package", base)
    write_export(folder / "export", base, package)
    write_adapter(folder / "text", base, rank=16, alpha=32, targets=CUA, head=True)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "all"))


def checked(*arguments: object) -> tuple[int, list[str]]:
    """Exit code and lines."""
    out, err = io.StringIO(), io.StringIO()
    code = run([str(a) for a in arguments], stdout=out, stderr=err)
    return code, [*out.getvalue().splitlines(), *err.getvalue().splitlines()]


def test_a_whole_checkpoint_has_no_finding(whole: Path) -> None:
    base = whole / "base"
    for arguments, kind in (
        ((base,), "base"),
        ((base, "--deep"), "base"),
        ((whole / "package", "--base", base, "--own"), "package"),
        ((whole / "package", "--base", base, "--own", "--deep"), "package"),
        ((whole / "export", "--own"), "export"),
    ):
        code, lines = checked(*arguments)
        assert (code, lines[0], lines[-1]) == (0, f"kind: {kind}", "nothing found"), lines
    assert f"checkpoint_sha256: {folder_sha256(whole / 'package')}" in checked(
        whole / "package", "--base", base, "--own"
    )[1]  # fmt: skip


def test_published_ids_are_asked_for_unless_it_is_ones_own(whole: Path) -> None:
    for name, arguments in (("package", ("--base", whole / "base")), ("export", ())):
        code, lines = checked(whole / name, *arguments)
        assert code == 1
        assert lines[-1] == "1 finding"
        assert "model_id somebody/base is that of no published Open-Jev" in lines[-2]
    code, lines = checked(whole / "text", "--base", whole / "base")
    assert code == 1
    assert any("config.json: vocab_size is 832, model=4b has 248320" in line for line in lines)
    assert checked(whole / "base", "--model", "9b")[0] == 1


def shard(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        file = sorted((folder / "base").glob("*.safetensors"))[1]
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})

    return rewrite


def put(file: str, content: str | None) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        if content is None:
            (folder / file).unlink()
        else:
            (folder / file).write_text(content)

    return change


FAULTS = {
    "stray file": (put("package/notes.txt", ""), [r"notes.txt: notes.txt is not part of a checkpoint of kind package"]),
    "stray weights": (
        lambda f: save_file({"x": torch.zeros(1)}, f / "base" / "x.safetensors"),
        ["not part of the checkpoint, left out: x.safetensors"],
    ),
    "no temperature": (put("package/temperature.json", None), ["temperature.json: no such file"]),
    "no tokenizer": (put("base/tokenizer.json", None), ["tokenizer: "]),
    "config": (put("base/config.json", "{"), ["config.json: not readable as JSON"]),
    "missing tensor": (shard(lambda t: t.pop(min(t))), ["places", "but the file does not hold it"]),
    "dtype": (shard(lambda t: t.update({min(t): t[min(t)].half()})), ["is F16; convert it to BF16 or F32"]),
    "missing shard": (lambda f: min((f / "base").glob("*-00002-*")).unlink(), ["no such file, but"]),
    "several at once": (
        lambda f: [
            put("package/model.json", "{}")(f), put("package/head.pt", "x")(f), shutil.rmtree(f / "package/adapter"),
        ],
        ["adapter_config.json: no such file", "adapter_model.safetensors: no such file", "head.pt: damaged",
         "model.json: method is missing"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_one_line_with_its_place(folder: Path, fault: str) -> None:
    inflict, expected = FAULTS[fault]
    inflict(folder)
    code, lines = checked(folder / "package", "--base", folder / "base", "--own")
    assert code == 1
    for text in expected:
        assert any(text in line for line in lines), lines
    assert int(lines[-1].split()[0]) == len(lines) - 1 - sum(
        line.startswith(("kind: ", "checkpoint_sha256: ", "weights: ", "not used: ", "model: ")) for line in lines
    )


def test_d46_what_is_not_used_is_listed(folder: Path) -> None:
    (folder / "base" / "notes.txt").touch()
    (folder / "base" / "images").mkdir()
    code, lines = checked(folder / "base")
    assert (code, lines[2]) == (0, "not used: generation_config.json, images/, notes.txt"), lines
    (folder / "base" / "vocab.json").touch()
    assert "vocab.json" in checked(folder / "base")[1][2]


@pytest.mark.parametrize("kind", ["base", "export", "package"])
@pytest.mark.parametrize("name", ["adapter_vllm", "calibration.json", "decision_head.json", "head.safetensors"])
def test_d46_files_of_another_kind_of_head_are_refused(folder: Path, kind: str, name: str) -> None:
    (folder / kind / name).mkdir() if "." not in name else (folder / kind / name).touch()
    base = {"base": folder / "base"} if kind == "package" else {}
    line = f"{folder / kind}: {name} belong to a decision model of a kind that is not supported yet"
    code, lines = checked(folder / kind, "--own", *(["--base", folder / "base"] if base else []))
    assert code == 1
    assert any(found.startswith(line) for found in lines), lines
    with pytest.raises(CheckpointError, match=re.escape(line)):
        describe(EngineConfig(checkpoint=str(folder / kind), check_ids=False, **{n: str(p) for n, p in base.items()}))


def test_only_a_deep_check_reads_base_weights(folder: Path) -> None:
    shard(lambda t: t[min(t)].view(-1)[:3].fill_(torch.nan))(folder)
    assert checked(folder / "base")[0] == 0
    code, lines = checked(folder / "base", "--deep")
    assert code == 1
    assert lines[-1] == "1 finding"
    assert "holds 3 values that are not finite" in lines[-2]
    assert "model-00002-of-" in lines[-2]


def test_what_cannot_be_checked_is_code_2(whole: Path, tmp_path: Path) -> None:
    for arguments, message in (
        ((tmp_path / "nowhere",), "check: FOLDER .*nowhere: no such folder"),
        ((whole / "package", "--base", tmp_path / "nowhere"), "check: --base .*nowhere: no such folder"),
        ((whole / "package", "--own"), "does not tell its size; give --base FOLDER or --model SIZE"),
        ((whole / "base", "--base", whole / "base"), "holds its own weights; leave base= out"),
    ):
        code, lines = checked(*arguments)
        assert code == 2, lines
        assert len(lines) == 1
        assert any(part in lines[0] for part in message.split(".*"))
    with pytest.raises(SystemExit) as caught:
        checked("--model", "3b", whole / "base")
    assert caught.value.code == 2


def test_a_package_alone_is_checked_against_its_published_size(folder: Path) -> None:
    said = json.loads((folder / "package" / "model.json").read_bytes())
    (folder / "package" / "model.json").write_text(json.dumps(said | {"model_id": "Qwen/Qwen3.5-9B"}))
    code, lines = checked(folder / "package")
    assert code == 1
    assert any("weight has shape [1, 128], hidden_size asks for [1, 4096]" in line for line in lines)


def test_it_is_a_command_without_hydra(whole: Path) -> None:
    code = (
        "import sys; from engine.check import main; sys.argv[1:] = [sys.argv[1]]\n"
        "try: main()\nexcept SystemExit as end: sys.exit(end.code or 'hydra' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(whole / "base")], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("kind: base\nweights: 55 tensors in ")
