"""The house: who may import whom, no circles, short files, and what importing the engine does not need."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("configs", "engine", "graphs", "ops")
LONGEST_FILE = 400

_BASE = ("engine.errors", "engine.prompt", "engine.statistics")
_OPTIONS = ("engine.config", "engine.hub", "engine.options", "engine.words")
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "ops": ("ops",),
    "graphs": ("graphs", "ops"),
    "engine.errors": (),
    "engine.prompt": ("engine.errors",),
    "engine.statistics": ("engine.errors",),
    "engine.words": (),
    "engine.options": ("engine.words",),
    "engine.resources": ("engine.errors",),
    "engine.hub": ("engine.errors",),
    "engine.values": ("engine.errors",),
    "engine.config": ("engine.errors", "engine.hub", "engine.values", "engine.words"),
    "engine.wire": ("engine.wire", *_BASE),
    "engine.load": ("engine.load", "engine.wire", "engine.errors", *_OPTIONS, "ops"),
    "engine.plan": (
        "engine.plan", "engine.load.dimensions", *_BASE, *_OPTIONS, "graphs.rungs", "graphs.times", "ops.sizes",
        "ops.tables",
    ),
    "engine.run": (
        "engine.run", "engine.plan", "engine.load.dimensions", "engine.load.environment", "engine.load.tensors", *_BASE,
        "graphs", "ops",
    ),
    "engine": ("engine", "graphs", "ops", "configs"),
    "configs": (),
}  # fmt: skip
"""What each part may import of this project; the longest name counts. Names for types alone are free."""
NEVER_REACHES = {
    "ops": ("engine", "graphs"),
    "graphs": ("engine",),
    "engine.wire": ("engine.load", "engine.plan", "engine.run", "graphs", "ops"),
    "engine.load": ("engine.plan", "engine.run", "graphs", "ops.kernels"),
    "engine.plan": ("engine.run", "engine.wire", "ops.kernels"),
    "engine.run": ("engine.wire",),
}
"""What each part loads by no detour, imports inside functions included."""


class Import(NamedTuple):
    target: str
    for_types: bool


def module_of(file: Path) -> str:
    """Scripts of `profiling/` import one another by bare names."""
    path = file.relative_to(ROOT / "profiling" if "profiling" in file.relative_to(ROOT).parts else ROOT)
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


@cache
def files() -> dict[str, Path]:
    """All modules of the project, by name."""
    found = [file for folder in (*PACKAGES, "profiling") for file in sorted((ROOT / folder).rglob("*.py"))]
    return {module_of(file): file for file in found}


def is_in(module: str, part: str) -> bool:
    return module == part or module.startswith(part + ".")


def imports_of(source: str, modules: Iterable[str], module: str = "") -> set[Import]:
    """What `source` imports of `modules`, wherever in the file. The package of a module is no import of its own."""
    found: set[Import] = set()
    known = set(modules)

    def visit(node: ast.AST, for_types: bool) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for child in node.body:
                visit(child, True)
            for child in node.orelse:
                visit(child, for_types)
            return
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute"
            whole = str(node.module)
            names = [f"{whole}.{a.name}" if f"{whole}.{a.name}" in known else whole for a in node.names]
        found.update(Import(name, for_types) for name in names if name in known)
        for child in ast.iter_child_nodes(node):
            visit(child, for_types)

    visit(ast.parse(source), False)
    return found


@cache
def graph() -> dict[str, set[str]]:
    """What each module loads when it runs."""
    return {
        module: {found.target for found in imports_of(file.read_text(), files(), module) if not found.for_types}
        for module, file in files().items()
    }


def reached(module: str, graph: Mapping[str, set[str]]) -> set[str]:
    """Every module that `module` loads in the end; itself only in a circle."""
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        for target in graph[waiting.pop()] - seen:
            seen.add(target)
            waiting.append(target)
    return seen


def in_circles(graph: Mapping[str, set[str]]) -> list[str]:
    return [module for module in graph if module in reached(module, graph)]


def part_of(module: str) -> str:
    return max((part for part in MAY_IMPORT if is_in(module, part)), key=len)


def packaged() -> list[str]:
    return [module for module in files() if module.split(".")[0] in PACKAGES]


def test_modules_import_what_their_part_may() -> None:
    beyond = [
        (module, target)
        for module in packaged()
        for target in graph()[module]
        if not any(is_in(target, part) for part in MAY_IMPORT[part_of(module)])
    ]
    assert beyond == []


@pytest.mark.parametrize(("part", "others"), NEVER_REACHES.items())
def test_a_part_never_reaches_another(part: str, others: tuple[str, ...]) -> None:
    members = [module for module in packaged() if is_in(module, part)]
    assert members
    wrong = [(m, t) for m in members for t in reached(m, graph()) if any(is_in(t, other) for other in others)]
    assert wrong == []


def test_no_module_loads_itself_by_a_detour() -> None:
    assert in_circles(graph()) == []


def test_only_letters_of_what_stands_on_the_wire_touches_torch() -> None:
    """To round logits to bfloat16, which numpy does not know."""
    wire = {module: files()[module].read_text() for module in packaged() if is_in(module, "engine.wire")}
    assert {m for m, source in wire.items() if imports_of(source, ["torch"])} <= {"engine.wire.letters"}


def test_imports_are_found_wherever_they_are() -> None:
    source = """
from typing import TYPE_CHECKING
import a.b
from a import c, f
if TYPE_CHECKING:
    from a.d import D
else:
    from a import e
def late():
    import g
"""
    known = ["a", "a.b", "a.c", "a.d", "a.e", "g", "h"]
    found = imports_of(source, known)
    assert {i.target for i in found if not i.for_types} == {"a.b", "a.c", "a", "a.e", "g"}
    assert {i.target for i in found if i.for_types} == {"a.d"}


def test_a_circle_is_found() -> None:
    assert in_circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    assert in_circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def named(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def test_files_are_short() -> None:
    long = {named(file) for file in files().values() if len(file.read_text().splitlines()) > LONGEST_FILE}
    assert long == set()


def test_every_package_says_what_it_is() -> None:
    firsts = {files()[module].parent / "__init__.py" for module in packaged()}
    silent = {named(file) for file in firsts if not ast.get_docstring(ast.parse(file.read_text()))}
    assert silent == set()


_WITHOUT = """
import importlib.abc, sys
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {refused!r}:
            raise ModuleNotFoundError(f"refused: {{name}}", name=name)
sys.meta_path.insert(0, Refuse())
"""


def run_without(refused: set[str], code: str) -> str:
    """Standard output of `code` in a process of its own that finds no GPU and none of these packages."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", _WITHOUT.format(refused=refused) + code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_engine_is_imported_without_hydra_triton_or_a_gpu() -> None:
    code = """
import engine
print("torch" in sys.modules)
for name in engine.__all__:
    getattr(engine, name)
"""
    assert run_without({"hydra", "omegaconf", "triton"}, code).split() == ["False"]


def test_a_refused_package_is_not_found() -> None:
    with pytest.raises(AssertionError, match="refused: hydra"):
        run_without({"hydra"}, "import engine.cli")


def test_a_cpu_answers_without_triton(tmp_path: Path) -> None:
    request = ROOT / "configs" / "requests" / "routing.json"
    code = f"""
import json
from engine import Engine
with Engine.load(model="tiny", device="cpu", cache_dir={str(tmp_path)!r}) as engine:
    print(json.dumps(engine.score(open({str(request)!r}, "rb").read()).to_dict()))
"""
    answers = json.loads(run_without({"hydra", "omegaconf", "triton"}, code))["answers"]
    assert list(answers) == list(json.loads(request.read_text())["questions"])
