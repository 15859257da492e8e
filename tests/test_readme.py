"""README.md and those of the folders: links, commands and examples work, and tables show what was measured."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from statistics import fmean, stdev

import pytest
import torch
from conftest import CPU_ONLY, ROOT, TINY, load_program, run_script

from recipe.command_line import CONFIGS_DIR, load_yaml
from recipe.run.log import describe_evaluation

FOLDERS = (".", "recipe/data", "recipe/publish", "accelerate_configs", "scripts/benchmarks")
PAGES = {folder: (ROOT / folder / "README.md").read_text() for folder in FOLDERS}
TEXT, EVERYTHING = PAGES["."], "\n".join(PAGES.values())
# Options of programs that other projects provide: the launcher, pip, hf, git, uv, lm_eval, sbatch, optimum-cli.
OTHER_OPTIONS = {"config_file", "num_processes", "machine_rank", "num_machines", "main_process_ip", "dynamo_mode"}
OTHER_OPTIONS |= {"flavor", "timeout", "secrets", "with", "dry_run", "detach", "no_deps", "wheel_dir", "index_url"}
OTHER_OPTIONS |= {"repo_type", "include", "local_dir", "nodes", "array", "cpus_per_task", "wrap", "model_args"}
OTHER_OPTIONS |= {"outfile", "task", "dist", "multi_gpu"}


def measured(name: str) -> dict:
    return json.loads((ROOT / "scripts" / "benchmarks" / f"{name}.json").read_text())


def rows_of(text: str) -> list[list[str]]:
    """The cells of all table rows."""
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines() if line[:1] == "|"]


def is_rounded(shown: str, value: float) -> bool:
    """Return whether a printed number is a value, rounded to the digits that it shows."""
    return f"{float(shown.replace(',', '')):f}" == f"{round(value, len(shown.partition('.')[2])):f}"


def commands_in(text: str) -> Iterator[list[str]]:
    """Yield the commands of the bash blocks, as words."""
    for block in re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            for command in line.split("&&"):
                yield shlex.split(command, comments=True)


# ---------------------------------------------------------------- what exists


@pytest.mark.parametrize("folder", FOLDERS)
def test_links_and_paths_lead_to_existing_files(folder):
    page = PAGES[folder].replace("accelerate_configs/FILE", "")
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page) + re.findall(r'(?:src|srcset)="([^"]+)"', page):
        assert (ROOT / folder / target).exists(), target
    for path in re.findall(r"(?<![\w/.-])(?:recipe|scripts|tests|accelerate_configs)/[\w./-]*\w", page):
        assert (ROOT / path).exists(), path


def test_programs_options_and_recipes_exist(capsys):
    """Every option after a program's name in a command is one of that program, and others belong to some program."""
    known: dict[str, set[str]] = {}

    def options_of(program: str) -> set[str]:
        if program not in known:
            run_script(program, "--help")
            known[program] = set(re.findall(r"--([a-z_]+)", capsys.readouterr().out))
        return known[program]

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
    assert "nadam" in result.stdout and "SimpleNamespace: 100 training rows" in result.stdout
    assert (tmp_path / "run" / "model.safetensors").is_file()


# ---------------------------------------------------------------- what was measured


def test_the_check_of_numbers_notices_a_wrong_one():
    assert is_rounded("1,234.6", 1234.56) and is_rounded("-0.0005", -0.00049) and is_rounded("12", 11.7)
    assert not is_rounded("1,234.5", 1234.56) and not is_rounded("0.01", 0.0012)


def test_the_ladder_is_what_was_measured():
    """Every rung of the result file is a row, the first and the last in README.md too; peers' rates are means."""
    make_row = load_program("scripts/run_ladder.py").make_row
    entries, ladder, shown = measured("ladder_cpu")["entries"], rows_of(PAGES["scripts/benchmarks"]), rows_of(TEXT)
    for entry in entries:
        (row,) = rows_of(make_row(entry, entries))
        assert row[:4] in ladder or "not_run" in entry, row
        assert row[:3] in [cells[:3] for cells in shown] or entry not in (entries[0], entries[-1]), row
    for file in ("peers_cpu", "peers_bf16_cpu"):
        speeds = {"nanoGPT": [], "recipe/train.py": []}
        for entry in measured(file)["entries"]:
            speeds[entry["what"]].append(entry["tokens_per_second"])
        at = next(i for i, row in enumerate(shown) if f"{file}.json" in row[-1])
        for row, rates in zip(shown[at : at + 2], speeds.values(), strict=True):
            assert is_rounded(row[1], fmean(rates)), row
            assert is_rounded(row[2], fmean(rates) / fmean(speeds["nanoGPT"])), row


SWEEPS = {"demo": "sweep_demo_cpu", "nanoGPT's Shakespeare": "sweep_shakespeare_cpu", "English": "sweep_english_cpu"}


def losses_of(name: str, optimizer: str) -> dict[tuple[int, float], list[float]]:
    """The final losses of a sweep, by number of steps and learning rate."""
    losses: dict[tuple[int, float], list[float]] = {}
    for run in measured(name)["runs"]:
        optim, learning_rate, max_steps = run["value"].split(",")
        if optim == optimizer:
            losses.setdefault((int(max_steps), float(learning_rate)), []).append(run["eval_loss"])
    return losses


@pytest.mark.parametrize("setting", SWEEPS)
def test_the_table_of_optimizers_is_what_was_measured(setting):
    """The best learning rate of each side lies inside its grid, and the shorter runs reach AdamW's loss."""
    ((_, _, adamw, muon, share, n, _),) = (row for row in rows_of(TEXT) if row[0].startswith(setting))
    best = {}
    for optimizer, shown in (("adamw_torch_fused", adamw), ("muon", muon)):
        losses = losses_of(SWEEPS[setting], optimizer)
        steps = max(steps for steps, _ in losses)
        grid = [(rate, fmean(found)) for (length, rate), found in sorted(losses.items()) if length == steps]
        best[optimizer] = rate = min(grid, key=lambda point: point[1])[0]
        assert grid[0][0] < rate < grid[-1][0]
        found = losses[steps, rate]
        mean, sd = shown.split(" ± ")
        assert len(found) == int(n) and is_rounded(mean, fmean(found)) and is_rounded(sd, stdev(found))
    losses = losses_of(SWEEPS[setting], "muon")
    shorter = min(length for (length, _), found in losses.items() if len(found) == int(n))
    found = losses[shorter, best["muon"]]
    assert len(found) == int(n) and fmean(found) <= float(adamw.split()[0])
    assert is_rounded(share, shorter / steps)


def test_the_table_of_data_preparation_is_what_was_measured():
    shown = rows_of(PAGES["recipe/data"])
    for megabytes, size in measured("data_cpu")["sizes"].items():
        ((_, seconds, tiktoken, rate, peak),) = (row for row in shown if row[0] == f"{int(megabytes):,} MB")
        assert is_rounded(seconds, min(size["seconds"])) and is_rounded(rate, size["megabytes_per_second_per_core"])
        assert is_rounded(peak, size["peak_megabytes"])
        assert not tiktoken or is_rounded(tiktoken, min(size["tiktoken_seconds"]))


def test_the_excerpt_of_the_demo_is_the_recorded_run():
    recorded = [json.loads(line) for line in (ROOT / "scripts/benchmarks/demo_cpu.jsonl").read_text().splitlines()]
    lines = [describe_evaluation(f"step {event['step']:>6,}", event) for event in recorded]
    shown = [line for line in TEXT.splitlines() if line.startswith("step ")]
    assert set(shown) <= set(lines) and shown[-1] == lines[-1]


def test_the_number_of_kills_and_the_checkpoint_before_the_decay():
    soak, fast = measured("soak_cpu"), load_yaml("gpt2_124m_fast")
    assert f"after {soak['kills']} SIGKILLs" in " ".join(TEXT.split()) and soak["differences"] == []
    decay_start = fast["max_steps"] * (1 - fast["lr_scheduler_kwargs"]["num_decay_steps"])
    assert f"runs/gpt2_124m_fast/checkpoint-{decay_start:.0f}" in TEXT
