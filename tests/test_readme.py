"""README.md and those of the folders: links, commands and examples work."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from conftest import CPU_ONLY, ROOT, TINY, run_script

from recipe.command_line import CONFIGS_DIR

FOLDERS = (".", "recipe/data", "recipe/publish", "accelerate_configs", "scripts/benchmarks")
PAGES = {folder: (ROOT / folder / "README.md").read_text() for folder in FOLDERS}
TEXT, EVERYTHING = PAGES["."], "\n".join(PAGES.values())
# Options of programs that other projects provide: the launcher, pip, hf, git, uv, lm_eval, sbatch, optimum-cli.
OTHER_OPTIONS = {"config_file", "num_processes", "machine_rank", "num_machines", "main_process_ip", "dynamo_mode"}
OTHER_OPTIONS |= {"flavor", "timeout", "secrets", "with", "dry_run", "detach", "no_deps", "wheel_dir", "index_url"}
OTHER_OPTIONS |= {"repo_type", "include", "local_dir", "nodes", "array", "cpus_per_task", "wrap", "model_args"}
OTHER_OPTIONS |= {"outfile", "outtype", "task", "dist", "multi_gpu"}


def commands_in(text: str) -> Iterator[list[str]]:
    """Yield the commands of the bash blocks, as words."""
    for block in re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            for command in line.split("&&"):
                yield shlex.split(command, comments=True)


@pytest.mark.parametrize("folder", FOLDERS)
def test_links_and_paths_lead_to_existing_files(folder):
    page = PAGES[folder].replace("accelerate_configs/FILE", "")
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page) + re.findall(r'(?:src|srcset)="([^"]+)"', page):
        assert (ROOT / folder / target).exists(), target
    for path in re.findall(r"(?<![\w/.-])(?:recipe|scripts|tests|accelerate_configs)/[\w./-]*\w", page):
        assert (ROOT / path).exists(), path


def test_programs_options_and_recipes_exist(capsys):
    """Every option after a program's name, in a command, a recipe or a message, is one of that program.

    Others belong to some program.
    """
    known: dict[str, set[str]] = {}

    def options_of(program: str) -> set[str]:
        if program not in known:
            run_script(program, "--help")
            known[program] = set(re.findall(r"--([a-z_]+)", capsys.readouterr().out))
        return known[program]

    for path in [
        *(ROOT / "recipe").rglob("*.*"),
        *(ROOT / "scripts").rglob("*.*"),
        *ROOT.glob("accelerate_configs/*.yaml"),
    ]:
        lines = path.read_text().replace("\\\n#", "") if path.suffix in (".py", ".yaml", ".sbatch") else ""
        for program, words in re.findall(r"((?:recipe|scripts)/[\w/]+\.py)([^\n\"()]*)", lines):  # recipes, messages
            if (ROOT / program).is_file():
                allowed = options_of(program) | (
                    options_of("recipe/train.py") if re.search("plan_run|sweep", program) else set()
                )
                assert set(re.findall(r" --([a-z_]+)", words)) <= allowed, (path, words)
    for words in commands_in(EVERYTHING):
        program = next((i for i, word in enumerate(words) if re.fullmatch(r"(recipe|scripts)/[\w/]+\.py", word)), None)
        if program is None:
            continue
        options, allowed = words[program:], options_of(words[program])
        if words[program].startswith(("scripts/benchmarks/sweep", "scripts/plan")):
            allowed = allowed | options_of("recipe/train.py")  # they accept the options of a run
        assert {word[2:].split("=")[0] for word in options if word.startswith("--")} <= allowed, words
        if "--config" in options:
            assert (CONFIGS_DIR / f"{options[options.index('--config') + 1]}.yaml").is_file(), words
    programs = ["recipe/train.py", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "scripts").rglob("*.py"))]
    existing = set().union(*(options_of(program) for program in programs if "bare_loop" not in program))
    names = {name.replace("-", "_") for name in re.findall(r"(?<![\w-])--([a-z][a-z_-]+)", EVERYTHING)}
    assert names - existing - OTHER_OPTIONS == set()


def test_what_is_shown_of_the_loop_is_the_loop():
    lines = [line.strip() for line in (ROOT / "recipe" / "train.py").read_text().splitlines()]
    (block,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    shown = [line.strip() for line in block.splitlines()]
    start = lines.index(shown[0])
    assert lines[start : start + len(shown)] == shown


def test_the_examples_of_changes_apply_and_train(tmp_path, tokenizer_dir):
    """All diffs of the README, in a copy of the package: a loss term, an optimizer by its name, a dataset."""
    copy = tmp_path / "recipe"
    subprocess.run(["cp", "-r", ROOT / "recipe", copy], check=True)
    for block in re.findall(r"^```diff\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE):
        for change in block.split("--- ")[1:]:
            path, *lines = change.splitlines()
            before = "".join(f"{line[1:]}\n" for line in lines if line[0] in " -")
            after = "".join(f"{line[1:]}\n" for line in lines if line[0] in " +")
            content = (tmp_path / path).read_text()
            assert content.count(before) == 1, path
            (tmp_path / path).write_text(content.replace(before, after))
    torch.save(torch.randint(0, 400, (200, 33)), tmp_path / "rows.pt")
    options = [*TINY, "--max_steps", "2", "--optim", "nadam", "--tokenizer_name", str(tokenizer_dir)]
    command = [sys.executable, "recipe/train.py", *options, "--output_dir", "run", "--eval_steps", "0"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path), "HOME": str(tmp_path), **CPU_ONLY}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "nadam" in result.stdout and "a dataset of your own: 100 training rows" in result.stdout
    assert (tmp_path / "run" / "model.safetensors").is_file()
