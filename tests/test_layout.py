"""The layout: top-level files, imports between rooms, and names that shadow nothing."""

import ast
import graphlib
import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from conftest import ROOT

MODULES = {
    ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p
    for p in sorted((ROOT / "recipe").rglob("*.py"))
}
# Bottom to top. A module imports from lower floors, and within its own floor from earlier rooms.
FLOORS = [
    ["recipe", "recipe.errors", "recipe.config", "recipe.arguments", "recipe.command_line"],
    ["recipe.environment", "recipe.progress"],
    ["recipe.data", "recipe.model", "recipe.optim"],
    ["recipe.hardware"],
    ["recipe.checkpoint"],
    ["recipe.publish", "recipe.evaluation", "recipe.run"],
    ["recipe.train"],
]
ROOMS = [room for floor in FLOORS for room in floor]


def room_of(module: str) -> str:
    """`recipe.data.files` -> `recipe.data`."""
    return ".".join(module.split(".")[:2])


def imports_of(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names.add(node.module)
    return names


def test_top_level():
    """It holds exactly the folders and files of the design, and dotfiles."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    found = {line.split("/")[0] for line in listed.stdout.splitlines()}
    expected = "pyproject.toml README.md LICENSE recipe accelerate_configs scripts tests"
    assert {name for name in found if not name.startswith(".")} == set(expected.split())


def test_imports_point_one_way():
    """Rooms import as `FLOORS` states, and modules within a room without a cycle."""
    modules = {name: {i for i in imports_of(path) if i.split(".")[0] == "recipe"} for name, path in MODULES.items()}
    for name, imports in modules.items():
        for imported in imports:
            assert ROOMS.index(room_of(imported)) <= ROOMS.index(room_of(name)), f"{name} imports {imported}"
    graphlib.TopologicalSorter(modules).prepare()  # raises CycleError


def test_nothing_importable_is_defined_in_train():
    """train.py is the run in order, so it defines main() and nothing else."""
    tree = ast.parse(MODULES["recipe.train"].read_text())
    assert [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))] == ["main"]


@pytest.mark.parametrize("folder", ["recipe", "scripts", "scripts/benchmarks"])
def test_no_file_shadows_a_module(folder):
    """Running FOLDER/x.py puts FOLDER first on sys.path, where its names would hide modules of the same name."""
    taken = set(sys.stdlib_module_names) | {name for name in packages_distributions() if name != "recipe"}
    for path in (ROOT / folder).iterdir():
        name = path.stem if path.suffix == ".py" else path.name
        if name != "__init__" and (path.suffix == ".py" or path.is_dir()):
            assert name not in taken, f"{path} shadows {name}"


def test_no_code_edits_the_path_or_trusts_remote_code():
    for path in [*MODULES.values(), *(ROOT / "scripts").rglob("*.py")]:
        assert not re.search(r"sys\.path|from \.|trust_remote_code", path.read_text()), path
