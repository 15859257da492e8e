"""Imports between the rooms of recipe/ point one way."""

import graphlib
import re

from helpers import ROOT

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


def room_number(module: str) -> int:
    """`recipe.data.files` -> the number of `recipe.data`."""
    return ROOMS.index(".".join(module.split(".")[:2]))


def test_modules_import_from_lower_floors_by_absolute_names_and_without_a_cycle():
    modules = {}
    for path in sorted((ROOT / "recipe").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        modules[name] = re.findall(r"^ *(?:from|import) (recipe[\w.]*|\..*)", path.read_text(), re.MULTILINE)
        for imported in modules[name]:
            assert room_number(imported) <= room_number(name), f"{name} imports {imported}"
    graphlib.TopologicalSorter(modules).prepare()  # raises CycleError
