"""The layout: imports between rooms point one way."""

import ast
import graphlib
from pathlib import Path

from conftest import ROOT

MODULES = {
    ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p
    for p in sorted((ROOT / "recipe").rglob("*.py"))
}
# Bottom to top. A module imports from lower floors, and within its own floor from earlier rooms.
FLOORS = [
    ["recipe", "recipe.launcher", "recipe.errors", "recipe.disk"],
    ["recipe.config", "recipe.arguments", "recipe.command_line"],
    ["recipe.environment", "recipe.progress", "recipe.metrics", "recipe.charts"],
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


def test_imports_point_one_way():
    """Rooms import as `FLOORS` states, and modules within a room without a cycle."""
    modules = {name: {i for i in imports_of(path) if i.split(".")[0] == "recipe"} for name, path in MODULES.items()}
    for name, imports in modules.items():
        for imported in imports:
            assert ROOMS.index(room_of(imported)) <= ROOMS.index(room_of(name)), f"{name} imports {imported}"
    graphlib.TopologicalSorter(modules).prepare()  # raises CycleError
