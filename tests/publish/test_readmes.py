"""The pages: their links, commands, tables, excerpts and changes are those of the program as it is."""

import contextlib
import functools
import io
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest
import torch
from accelerate.commands.launch import launch_command_parser
from helpers import CPU_ONLY, ROOT, TINY, default_arguments, read_weights, run_script

from recipe.command_line import CONFIGS_DIR, load_config
from recipe.hardware.choices import Machine
from recipe.hardware.gpus import load_gpu
from recipe.hardware.memory import MemoryPlan, plan_memory
from recipe.hardware.sharding import Sharding
from recipe.model.build import build_model_config

PLACES = ("*.md", ".github/*.md", "accelerate_configs/*.md", "recipe/**/*.md", "scripts/**/*.md")
PATHS = sorted(path for place in PLACES for path in ROOT.glob(place))
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in PATHS}
EVERYTHING = "\n".join(text for name, text in PAGES.items() if not name.endswith("LOG.md"))  # of its time
TRAIN = "recipe/train.py"
PROGRAM = r"(?:recipe|scripts)/[\w/]+\.py"
TAKES_A_RUN = "sweep|plan_run|run_ladder|peers"  # these programs accept the options of a run, too
LAUNCHER = {name.lstrip("-") for action in launch_command_parser()._actions for name in action.option_strings}
OTHER_PROGRAMS = {"dist", "dry_run", "index_url", "max_iters", "outfile", "outtype", "task"}
# A card that stands for each class of memory. An L4, A10 and A10G have less than other cards of 24 GB.
CARDS = {"8 GB": "rtx3070", "12 GB": "rtx3060", "16 GB": "t4", "24 GB": "rtx4090", "40 GB": "a100-40gb"}
CARDS |= {"80 GB": "a100-80gb", "141 GB": "h200", "10 to 16 GB": "rtx3080", "8 to 12 GB": "rtx3070"}
# Metal recommends that a process use two thirds of 16 GB of unified memory, and three quarters of larger ones.
OTHERS = {"Apple, 16 GB": ("mps", 16 * 2**30 * 2 / 3), "Apple, 64 GB": ("mps", 64 * 2**30 * 3 / 4)}
OTHERS |= {"CPU, 32 GB": ("cpu", 32 * 2**30)}
# Packages that prepare text and evaluate, which many GPU images lack. A packed dataset needs none of them.
LACKING = ("datasets", "evaluate", "orjson", "xxhash", "gigatoken")


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^( *)```(?:{language})\n(.*?)^\1```", EVERYTHING, re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(block) for _, block in found]


def commands() -> Iterator[list[str]]:
    """Yield the commands of the bash blocks, as words."""
    for block in blocks("bash|sh"):
        for line in block.replace("\\\n", " ").splitlines():
            for command in line.split("&&"):
                yield shlex.split(command, comments=True)


@functools.cache
def options_of(program: str) -> set[str]:
    """Return the options of a program, as its --help says."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run_script(program, "--help")
    own = set(re.findall(r"--([a-z_]+)", printed.getvalue()))
    return own | options_of(TRAIN) if re.search(TAKES_A_RUN, program) else own


def anchors_of(page: str) -> set[str]:
    """Return the names that GitHub gives to the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_existing_files_and_headings(name):
    page = ROOT / name
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", PAGES[name]):
        path = page.parent / target if target else page
        assert path.exists(), target
        assert not anchor or anchor in anchors_of(path.read_text()), f"{target}#{anchor}"
    for target in re.findall(r'(?:src|srcset)="([^"]+)"', PAGES[name]):
        assert (page.parent / target).exists(), target


def test_paths_in_the_text_exist():
    text = EVERYTHING.replace("accelerate_configs/FILE", "")
    for path in re.findall(r"(?<![\w/.-])(?:recipe|scripts|tests|accelerate_configs)/[\w./-]*\w", text):
        assert (ROOT / path).exists(), path


def test_commands_use_options_and_recipes_that_exist():
    num_checked = 0
    for words in commands():
        at = next((i for i, word in enumerate(words) if re.fullmatch(PROGRAM, word)), None)
        if at is None:  # a command of another program
            continue
        before, after = (
            {word[2:].split("=")[0] for word in part if word[:2] == "--"} for part in (words[:at], words[at:])
        )
        assert after <= options_of(words[at]), words
        assert words[:2] != ["accelerate", "launch"] or before <= LAUNCHER, words
        if "--config" in words and (name := words[words.index("--config") + 1]).isidentifier():
            assert (CONFIGS_DIR / f"{name}.yaml").is_file(), words
        num_checked += 1
    assert num_checked > 5


def test_commands_in_sources_and_messages_use_options_that_exist():
    paths = [path for folder in ("recipe", "scripts", "accelerate_configs") for path in (ROOT / folder).rglob("*.*")]
    for path in paths:
        lines = path.read_text().replace("\\\n#", "") if path.suffix in (".py", ".yaml", ".sbatch") else ""
        for program, words in re.findall(rf"({PROGRAM})([^\n\"()]*)", lines):
            if (ROOT / program).is_file():
                assert set(re.findall(r" --([a-z_]+)", words)) <= options_of(program), (path, words)


def test_options_in_the_text_exist():
    programs = [str(path.relative_to(ROOT)) for path in (ROOT / "scripts").rglob("*.py") if path.stem != "bare_loop"]
    text = re.sub(r"^```.*?^```|`[^`]*`\s+of\s+commit", "", EVERYTHING, flags=re.DOTALL | re.MULTILINE)
    names = {name.replace("-", "_") for name in re.findall(r"(?<![\w-])--([a-z][a-z_-]+)", text)}
    assert names - LAUNCHER - OTHER_PROGRAMS - set().union(*map(options_of, [TRAIN, *programs])) == set()


def test_what_is_shown_of_a_program_is_the_program():
    """A block of Python that imports nothing is an excerpt of a file, line by line."""
    sources = [path.read_text() for folder in ("recipe", "scripts") for path in (ROOT / folder).rglob("*.py")]
    sources = ["\n".join(line.strip() for line in source.splitlines()) for source in sources]
    for block in blocks("python"):
        shown = "\n".join(line.strip() for line in block.splitlines())
        assert re.search(r"^(import|from) ", block, re.MULTILINE) or any(shown in source for source in sources), block


def read_rows(first_cell: str) -> list[list[str]]:
    """Return the rows of all tables whose first cell matches, as cells."""
    return [row[2:-2].split(" | ") for row in re.findall(rf"^\| {first_cell} \|.*", EVERYTHING, re.MULTILINE)]


def plan(options: str, device: str, memory_bytes: float, num_devices: int = 1) -> MemoryPlan | None:
    """Return the plan of a run with GPT-2's vocabulary, with what `auto` becomes on a device."""
    precision, backend = {"cuda": ("bf16", "inductor"), "cpu": ("bf16", "inductor"), "mps": ("no", "no")}[device]
    options += f" --dataset_dir x --mixed_precision {precision} --dynamo_backend {backend} --attn_implementation sdpa"
    config = load_config(options.split())[0]
    machine = Machine(device, num_devices, Sharding(num_devices) if num_devices > 1 else None)
    return plan_memory(config, build_model_config(config, 50304, 0), machine, memory_bytes)


def test_the_tables_of_memory_are_what_is_planned():
    rows = read_rows(r"(?:\d+ x |Apple, |CPU, )?\d+ GB(?:, FSDP)?")
    sizes = [row for row in rows if len(row) == 5]
    assert len(sizes) == 7 + 5
    for label, *cells in sizes:
        device, memory_bytes = OTHERS.get(label) or (
            "cuda",
            load_gpu(CARDS[re.search(r"\d+ GB", label)[0]]).memory_bytes,
        )
        num_devices = 8 if label.endswith("FSDP") else 1
        for size, cell in zip(("124m", "355m", "774m", "1558m"), cells, strict=True):
            found, shown = plan(f"--config gpt2_{size}", device, memory_bytes, num_devices), "-"
            if found:
                letters = "C" * found.activation_checkpointing + "L" * (found.loss_chunks > 1)
                shown = f"{f'{found.micro_batch_size} {letters}'.strip()}: {found.total_bytes / 1e9:.1f} GB"
            assert cell == shown, (label, size)


def test_the_models_that_fit_smaller_cards_do():
    rows = [row for row in read_rows(r"[^|]*\d GB") if len(row) == 4]
    assert len(rows) == 3
    for label, shape, micro_batch, memory in rows:
        layers, width, length = map(int, re.findall(r"\d+", shape))
        options = f"--config gpt2_124m --config_overrides n_layer={layers},n_head={width // 64},n_embd={width}"
        found = plan(f"{options} --block_size {length}", "cuda", load_gpu(CARDS[label]).memory_bytes)
        assert micro_batch == f"{found.micro_batch_size} x {512 // found.micro_batch_size}"
        assert memory == f"{found.total_bytes / 1e9:.1f} GB"


def test_memory_and_flops_of_attention_are_those_computed_by_hand():
    """In bf16, plain attention keeps 6 bytes per score, next to which flash attention's memory does not grow."""
    rows = [
        [float(cell.rstrip(" GB%").replace(",", "")) for cell in row] for row in read_rows(r"[\d,]+") if len(row) == 6
    ]
    assert [row[0] for row in rows] == [512, 1024, 2048, 4096, 8192]
    for tokens, num_rows, flash, plain, share, flops in rows:
        options = f"--block_size {tokens:.0f} --per_device_train_batch_size {num_rows:.0f}"
        options += " --loss_chunks 1 --activation_checkpointing false"
        found = plan(f"--config gpt2_124m {options}", "cuda", 1e12)
        attention = 12 * 12 * 768 * tokens
        assert flash == pytest.approx(found.total_bytes / 1e9, abs=0.06)
        assert plain - flash == pytest.approx(6 * 12 * 12 * 8192 * tokens / 1e9, abs=0.11)
        assert flops == pytest.approx(100 * attention / (attention + 6 * 123_689_472), abs=1)
        assert share == pytest.approx(100 * (1 - flash / plain), abs=1)


def test_the_examples_of_changes_apply_and_train(tmp_path, tokenizer_dir):
    """All diffs apply in one copy of the package, which trains with the options of the paragraphs before them."""
    shutil.copytree(ROOT / "recipe", tmp_path / "recipe")
    examples = re.findall(r"([^\n]*(?:\n[^\n]+)*)\n\n```diff\n(.*?)^```", EVERYTHING, re.DOTALL | re.MULTILINE)
    assert len(examples) == EVERYTHING.count("```diff") > 0
    options: list[str] = []
    for paragraph, diff in examples:
        options += shlex.split(" ".join(re.findall(r"`(--\w+ [^`]+)`", paragraph)))
        for change in diff.split("--- ")[1:]:
            path, *lines = change.splitlines()
            before = "".join(f"{line[1:]}\n" for line in lines if line[0] in " -")
            after = "".join(f"{line[1:]}\n" for line in lines if line[0] in " +")
            content = (tmp_path / path).read_text()
            assert content.count(before) == 1, f"a page shows a change of {path} that does not apply:\n{before}"
            (tmp_path / path).write_text(content.replace(before, after))
        for name in re.findall(r"^\+import recipe\.(\w+)", diff, re.MULTILINE):  # the block above it
            (module,) = [block for block in blocks("python") if f'"{name}"' in block]
            (tmp_path / "recipe" / f"{name}.py").write_text(module)
        for name in re.findall(r'torch\.load\("(.*?)"', diff):
            torch.save(torch.randint(0, 400, (200, 33)), tmp_path / name)
    options += [*TINY, "--max_steps", "2", "--tokenizer_name", str(tokenizer_dir), "--eval_steps", "0"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path), "HOME": str(tmp_path), **CPU_ONLY}
    command = [sys.executable, TRAIN, *options, "--output_dir", "run"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "run" / "model.safetensors").is_file()
    if "--optim" in options:
        assert options[options.index("--optim") + 1] in result.stdout


def test_the_cell_for_notebooks_trains_and_trains_again(dataset_dir, tmp_path):
    """The cell runs as it stands, twice in one process, without packages that only prepare text."""
    (cell,) = [block for block in blocks("python") if "notebook_launcher" in block]
    options = re.search(r'"(--config .*?)"', cell)[1]
    assert load_config(options.split())
    code = [f"import sys; sys.modules.update(dict.fromkeys({LACKING}))"]
    for name in ("first", "second"):
        arguments = default_arguments(dataset_dir, tmp_path / name, TINY)
        code.append(cell.replace(options, " ".join(map(str, arguments))))
    command = [sys.executable, "-c", "\n".join(code)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    first, second = (read_weights(tmp_path / name) for name in ("first", "second"))
    assert first == second
