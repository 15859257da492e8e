"""The house: what lies where, who imports whom, and names that shadow nothing."""

import ast
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
# Bottom to top. A module imports from floors below its own; builders do not import each other.
FLOORS = [
    [
        "recipe",
        "recipe.config",
        "recipe.environment",
        "recipe.run.meter",
        "recipe.hardware.host_memory",
        "recipe.evaluation.perplexity",
        "recipe.progress",
    ],
    ["recipe.benchmark.machine", "recipe.run.profile"],
    ["recipe.run.stop", "recipe.data", "recipe.data.files", "recipe.data.standard_library", "recipe.data.tokenizer"],
    ["recipe.data.documents"],
    ["recipe.data.text"],
    ["recipe.data.encoder", "recipe.data.packed"],
    ["recipe.data.packing", "recipe.data.batches"],
    ["recipe.data.prepare", "recipe.data.shards"],
    ["recipe.data.streaming"],
    [
        "recipe.model.build",
        "recipe.model.loss",
        "recipe.optim.guard",
        "recipe.hardware.accelerator",
        "recipe.evaluation.generation",
        "recipe.publish.hub",
    ],
    ["recipe.hardware.memory", "recipe.run.plan"],
    ["recipe.checkpoint.manifest"],
    ["recipe.checkpoint.load", "recipe.evaluation.validation"],
    ["recipe.checkpoint.save"],
    ["recipe.run.output_dir"],
    ["recipe.run.log"],
    ["recipe.train"],
    ["recipe.benchmark.measure", "recipe.benchmark.tables"],
    ["recipe.benchmark.ladder"],
    ["recipe.benchmark.peers"],
    ["recipe.benchmark.runner"],
]


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
    """Exactly the folders and files of the design, beside dotfiles."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    found = {line.split("/")[0] for line in listed.stdout.splitlines()}
    assert {name for name in found if not name.startswith(".")} == {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "recipe",
        "accelerate_configs",
        "scripts",
        "tests",
    }


def test_imports_go_one_way():
    floor_of = {name: level for level, names in enumerate(FLOORS) for name in names}
    assert set(floor_of) == set(MODULES), "every module has its floor"
    for name, path in MODULES.items():
        for imported in imports_of(path):
            if imported.split(".")[0] == "recipe":
                below = floor_of[imported] < floor_of[name]
                assert below or (name, imported) in ALLOWED_ON_ONE_FLOOR, f"{name} imports {imported}"


ALLOWED_ON_ONE_FLOOR = {("recipe.environment", "recipe")}


def test_nothing_importable_is_defined_in_train():
    """train.py is the run in order: it defines main() and nothing else."""
    tree = ast.parse(MODULES["recipe.train"].read_text())
    assert [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))] == ["main"]


@pytest.mark.parametrize("folder", ["recipe", "scripts", "scripts/benchmarks"])
def test_no_file_shadows_a_module(folder):
    """Running FOLDER/x.py puts FOLDER first on sys.path: its names must not be those of any other module."""
    taken = set(sys.stdlib_module_names) | {name for name in packages_distributions() if name != "recipe"}
    for path in (ROOT / folder).iterdir():
        name = path.stem if path.suffix == ".py" else path.name
        if name != "__init__" and (path.suffix == ".py" or path.is_dir()):
            assert name not in taken, f"{path} shadows {name}"


def test_the_path_is_not_edited():
    for path in [*MODULES.values(), *(ROOT / "scripts").rglob("*.py")]:
        assert not re.search(r"sys\.path|from \.|trust_remote_code", path.read_text()), path


def test_readme_is_short_and_its_links_lead_somewhere():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 230
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (ROOT / target).exists(), target


def test_training_on_a_packed_dataset_imports_neither_datasets_nor_evaluate():
    """A machine without them (many GPU images) trains on a packed dataset: they prepare text and evaluate."""
    code = (
        "import sys; sys.modules.update(datasets=None, evaluate=None); import recipe.train; "
        "print(sorted({'datasets', 'evaluate'} & {name for name, module in sys.modules.items() if module}))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (result.returncode, result.stdout) == (0, "[]\n"), result.stderr
