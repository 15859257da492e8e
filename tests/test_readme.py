"""README.md: its numbers are those of the result files, and its links, paths and options exist."""

import json
import re
import shlex
from collections.abc import Iterator
from statistics import fmean, median, stdev

import pytest
from conftest import ROOT, load_program, run_script

from recipe.command_line import CONFIGS_DIR, load_yaml
from recipe.run.log import describe_evaluation

TEXT = (ROOT / "README.md").read_text()
MAX_LINES = 600
# Programs that other projects provide, and the options of them that the README mentions.
LAUNCHER_OPTIONS = {"config_file", "num_processes", "machine_rank", "main_process_ip"}  # accelerate launch
LAUNCHER_OPTIONS |= {"flavor", "timeout", "secrets", "with", "dry_run"}  # hf jobs uv run
OTHER_OPTIONS = {"nodes", "model_args"}  # of a cluster's scheduler, and of lm_eval
OTHER_OPTIONS |= {"no_deps", "wheel_dir", "outfile", "task"}  # of pip and of converters
OTHER_OPTIONS |= {"repo_type", "include", "local_dir", "retry", "create_dirs", "output_dir"}  # of hf and curl


def measured(name: str) -> dict:
    return json.loads((ROOT / "scripts" / "benchmarks" / f"{name}.json").read_text())


def rows_of(text: str) -> list[list[str]]:
    """The cells of all table rows."""
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines() if line[:1] == "|"]


def is_rounded(shown: str, value: float) -> bool:
    """Return whether a printed number is a value, rounded to the digits that it shows."""
    return f"{float(shown.replace(',', '')):f}" == f"{round(value, len(shown.partition('.')[2])):f}"


def test_the_check_of_numbers_notices_a_wrong_one():
    assert is_rounded("1,234.6", 1234.56) and is_rounded("-0.0005", -0.00049) and is_rounded("12", 11.7)
    assert not is_rounded("1,234.5", 1234.56) and not is_rounded("0.01", 0.0012)


def test_the_ladder_is_what_was_measured():
    """Every rung of the result file is a row of the README, as the program prints it."""
    make_row = load_program("scripts/run_ladder.py").make_row
    entries, shown = measured("ladder_cpu")["entries"], rows_of(TEXT)
    for entry in entries:
        (row,) = rows_of(make_row(entry, entries))
        assert row in shown


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
    ((_, _, adamw, muon, share, n),) = (row for row in rows_of(TEXT) if row[0].startswith(setting))
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


def test_the_length_of_the_readme():
    assert len(TEXT.splitlines()) <= MAX_LINES


def test_links_lead_to_existing_files():
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", TEXT) + re.findall(r'(?:src|srcset)="([^"]+)"', TEXT):
        assert (ROOT / target).exists(), target


def test_paths_exist():
    """A path of recipe/, scripts/, tests/ or accelerate_configs/ anywhere in the text."""
    paths = re.findall(r"(?<![\w/.-])(?:recipe|scripts|tests|accelerate_configs)/[\w./-]*\w", TEXT)
    assert paths
    for path in paths:
        assert (ROOT / path).exists(), path


def test_the_table_of_contents_leads_to_sections():
    """Anchors follow GitHub's rule: lower case, no punctuation, hyphens for spaces."""
    text = re.sub(r"^```.*?^```", "", TEXT, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^##+ (.+)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    links = re.findall(r"\]\(#([^)]+)\)", text)
    assert len(links) >= 5 and set(links) <= anchors, set(links) - anchors


def commands_in(text: str) -> Iterator[list[str]]:
    """Yield the commands of the bash blocks, as words."""
    for block in re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            yield shlex.split(line, comments=True)


@pytest.fixture(scope="module")
def known_options():
    """The options of a program: `known_options("scripts/run_ladder.py")`."""
    known = {}

    def find(program: str, capsys) -> set[str]:
        if program not in known:
            run_script(program, "--help")
            known[program] = set(re.findall(r"--([a-z_]+)", capsys.readouterr().out))
        return known[program]

    return find


def test_options_in_commands_exist(known_options, capsys):
    """Every option after a program's name is one of that program, and every option before it is the launcher's."""
    checked = 0
    for words in commands_in(TEXT):
        program = next((i for i, word in enumerate(words) if re.fullmatch(r"(recipe|scripts)/[\w/]+\.py", word)), None)
        if program is None:
            continue
        options = [word[2:].split("=")[0] for word in words[program:] if word.startswith("--")]
        known = known_options(words[program], capsys)
        if words[program] in ("scripts/benchmarks/sweep.py", "scripts/plan_run.py", "scripts/check_environment.py"):
            known = known | known_options("recipe/train.py", capsys)  # they accept the options of a run
        assert set(options) <= known, words
        launcher = {word[2:].split("=")[0] for word in words[:program] if word.startswith("--")}
        assert launcher <= LAUNCHER_OPTIONS, words
        checked += 1
    assert checked >= 5


def test_options_in_the_text_exist(known_options, capsys):
    """An option that the text mentions belongs to a program of this project or to the launcher."""
    programs = ["recipe/train.py", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "scripts").rglob("*.py"))]
    known = set().union(*(known_options(program, capsys) for program in programs if "bare_loop" not in program))
    names = {name.replace("-", "_") for name in re.findall(r"(?<![\w-])--([a-z][a-z_-]+)", TEXT)}
    assert names - known - LAUNCHER_OPTIONS - OTHER_OPTIONS == set()


def test_recipes_in_commands_exist():
    for words in commands_in(TEXT):
        if "recipe/train.py" in words and "--config" in words:
            assert (CONFIGS_DIR / f"{words[words.index('--config') + 1]}.yaml").is_file(), words


def test_python_blocks_are_lines_of_the_loop():
    """What the README shows of the loop is the loop; tests/test_notebook.py runs the cell for notebooks."""
    lines = [line.strip() for line in (ROOT / "recipe" / "train.py").read_text().splitlines()]
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    blocks = [block for block in blocks if "notebook_launcher" not in block]
    assert blocks
    for block in blocks:
        shown = [line.strip() for line in block.splitlines()]
        start = lines.index(shown[0])
        assert lines[start : start + len(shown)] == shown


def test_the_excerpt_of_the_demo_is_the_recorded_run():
    """The evaluations on the first screen are those of demo_cpu.jsonl."""
    recorded = [json.loads(line) for line in (ROOT / "scripts/benchmarks/demo_cpu.jsonl").read_text().splitlines()]
    expected = [
        describe_evaluation(f"step {event['step']:>6,}", event) for event in recorded if event["event"] == "eval"
    ]
    assert [line for line in TEXT.splitlines() if line.startswith("step ")] == expected


def test_numbers_in_the_text_are_measured():
    """Each number, found by the words next to it, is that of a result file, rounded to the digits shown."""
    data, ablation, peers = measured("data_cpu"), measured("ablation_cpu")["entries"], measured("peers_cpu")["entries"]
    shakespeare, everything = measured("shakespeare_cpu"), ablation[0]["tokens_per_second"]
    ablated = {entry["what"]: entry["tokens_per_second"] / everything for entry in ablation}
    speeds = [entry["tokens_per_second"] for entry in peers]
    fast = load_yaml("gpt2_124m_fast")
    decay_start = fast["max_steps"] * (1 - fast["lr_scheduler_kwargs"]["num_decay_steps"])
    expected = {
        r"runs/fast/checkpoint-(\d+)": decay_start,
        r"from ([\d.]+) to [\d.]+ nats": shakespeare["untrained"]["loss"],
        r"from [\d.]+ to ([\d.]+) nats": shakespeare["eval_loss"],
        r"SIGKILL (\d+) times": measured("soak_cpu")["kills"],
        r"is ([\d.]+) times as fast as nanoGPT": median(a / b for a, b in zip(speeds[::2], speeds[1::2], strict=True)),
        r"at ([\d.]+) of its speed without bf16": ablated["- bf16"],
        r"at ([\d.]+) without the loss in the graph": ablated["- loss in the graph"],
        r"and at ([\d.]+) without torch.compile": ablated["- torch.compile"],
        r"the others are worth at most (\d+)%": 100 * (1 - sorted(ablated.values())[3]),
        r"MB of JSON lines takes ([\d.]+) s": min(data["sizes"]["200"]["seconds"]),
        r"with two threads ([\d.]+) times as long": data["sizes"]["200"]["times_as_fast"],
        r"2 GB run at ([\d.]+) MB/s per core": data["sizes"]["2000"]["megabytes_per_second_per_core"],
        r"packing takes about (\d+) minutes": 46e3 / (2 * data["sizes"]["2000"]["megabytes_per_second_per_core"]) / 60,
        r"32 packed rows takes ([\d.]+) ms": data["batch_of_32_rows_ms"],
    }
    text = " ".join(TEXT.split())
    for pattern, value in expected.items():
        (shown,) = re.findall(pattern, text)
        assert is_rounded(shown, value), (pattern, value)
    largest = max(size["peak_megabytes"] for size in data["sizes"].values())
    assert largest < int(re.search(r"less than (\d+) MB of memory", text)[1])
