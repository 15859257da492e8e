"""scripts/train_on_hub.py: its header, and the command that it turns into."""

import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT, TINY, default_arguments, load_program, run_script, run_training
from huggingface_hub import __version__ as hub_version
from packaging.requirements import Requirement
from packaging.version import Version

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

SCRIPT = "scripts/train_on_hub.py"


@pytest.fixture(scope="module")
def header() -> dict:
    """The script's metadata, found by the expression that PEP 723 specifies."""
    pattern = r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$"
    (match,) = re.finditer(pattern, (ROOT / SCRIPT).read_text())
    assert match["type"] == "script"
    return tomllib.loads(re.sub(r"(?m)^# ?", "", match["content"]))


def test_the_header_has_the_ranges_of_the_project(header):
    """Python and every package that both name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = {package.name: package.specifier for package in map(Requirement, project["dependencies"])}
    named = [Requirement(text) for text in header["dependencies"]]
    assert {package.name: package.specifier for package in named}.items() <= ranges.items()
    assert "torch" in {package.name for package in named}
    assert header["requires-python"] == project["requires-python"]


@pytest.mark.skipif(Version(hub_version) < Version("2.4"), reason="older clients do not read the header's table")
def test_the_client_accepts_the_command():
    """`hf jobs uv run` reads the token's name and the time limit from the header, and passes our options on."""
    options = ["--config", "gpt2_124m", "--dataset_dir", "/dataset", "--hub_model_id", "user/name", "--seed", "3"]
    command = ["-m", "huggingface_hub.cli.hf", "jobs", "uv", "run", "--dry-run", "--flavor", "h200", SCRIPT, *options]
    environment = {key: value for key, value in os.environ.items() if key != "HF_TOKEN"}
    result = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    shown = re.sub(r" +", " ", result.stdout)
    assert f"args {' '.join(options)}" in shown, result.stderr
    assert "timeout 12h (from script)" in shown and "secrets HF_TOKEN=" in shown


@pytest.fixture
def started(monkeypatch):
    """Run the script with arguments and return the command line that would take its place."""
    commands = []

    def execute(program: str, command: list[str]) -> None:
        assert program == command[0] == sys.executable
        commands.append(command)

    monkeypatch.setattr(os, "execv", execute)

    def run(*arguments: object) -> list[str]:
        assert not run_script(SCRIPT, *arguments)
        return commands.pop()

    return run


def test_one_process_runs_the_program_itself(started, tmp_path, dataset_dir):
    """Signals then reach it without a launcher, and its exit status is the job's. The command trains."""
    arguments = default_arguments(dataset_dir, tmp_path / "run", TINY)
    command = started(*arguments)
    assert command[1:] == [str(ROOT / "recipe/train.py"), "--resume_from_checkpoint", "auto", *arguments]
    run_training(command[2:], tmp_path / "run")
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_several_gpus_use_the_launcher(started, monkeypatch):
    """One process for each GPU; precision and compilation are left to the recipe."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    command = started("--max_steps", 5)
    program = command.index(str(ROOT / "recipe/train.py"))
    assert command[1:4] == ["-m", "accelerate.commands.launch", "--multi_gpu"]
    assert command[command.index("--num_processes") + 1] == "8" and program > command.index("--dynamo_backend")
    assert " ".join(command[program + 1 :]) == "--output_dir runs/demo --resume_from_checkpoint auto --max_steps 5"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", "--output_dir runs/demo --resume_from_checkpoint auto"),
        ("--run_name first", "--output_dir runs/first --resume_from_checkpoint auto"),
        ("--output_dir a --resume_from_checkpoint latest", ""),
        (
            "--hub_model_id user/name",
            "--push_to_hub true --hub_strategy checkpoint --output_dir runs/name --resume_from_checkpoint auto",
        ),
    ],
)
def test_the_options_that_it_adds(arguments, expected):
    """It chooses a fixed folder, resumes, and uploads if there is a repository, unless told otherwise."""
    assert load_program(SCRIPT).build_defaults(arguments.split()) == expected.split()


def test_without_the_package(tmp_path):
    """The message says how to pass it to uv."""
    program = tmp_path / "train_on_hub.py"
    program.write_text("import sys; sys.modules['recipe'] = None\n" + (ROOT / SCRIPT).read_text())
    result = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (1, "") and "gpt2-recipe is not installed" in result.stderr
