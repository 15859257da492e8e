"""The ladder: every rung trains the same model on the same rows, and the last one is recipe/train.py itself."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest
from helpers import BLOCK_SIZE, PLAIN, ROOT, load_program, run_training
from transformers import AutoConfig, AutoModelForCausalLM

SCRIPT = "scripts/run_ladder.py"
NOT_COMPARED = ("architectures", "dtype", "transformers_version", "_name_or_path", "n_ctx", "summary_first_dropout")
PROGRAMS = ROOT / "tests" / "programs"
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.fixture(scope="module")
def program():
    return load_program(SCRIPT)


@pytest.fixture(scope="module")
def options(program, dataset_dir):
    """Twelve steps of two micro-batches of four rows, without compilation and in fp32."""
    options = f"--config gpt2_124m --dataset_dir {dataset_dir} --block_size {BLOCK_SIZE}"
    options += " --config_overrides n_layer=2,n_head=2,n_embd=32"
    options += " --per_device_train_batch_size 4 --global_batch_size 8 --max_steps 12 --max_eval_samples 8"
    return [*program.OPTIONS.split(), *options.split(), *PLAIN]


@pytest.fixture(scope="module")
def config(program, options):
    return program.resolve(options)


@pytest.fixture
def in_process(program, monkeypatch):
    """Run rungs and recipe/train.py in this process. Returns the trained configs."""
    configs = []

    def run_program(command: list[str]) -> None:
        run_training(command[1:])
        configs.append(AutoConfig.from_pretrained(command[command.index("--output_dir") + 1]))

    monkeypatch.setattr(program, "measure_rung", lambda job: {"not_run": job} if isinstance(job, str) else job())
    monkeypatch.setattr(program, "why_no_inductor", lambda device: "not tried")
    monkeypatch.setattr(program, "run_program", run_program)
    return configs


@pytest.fixture(scope="module")
def fp32(program, config):
    return program.train({"fp32"}, config)


@pytest.mark.parametrize(
    ("rung", "tolerance"),
    [("half", 5e-3), ("padding", 0.03)]
    + [(name, 1e-5) for name in ("flash", "fused", "packed", "no_sync", "loss_in_graph")],
)
def test_an_optimization_does_not_change_the_loss(rung, tolerance, program, config, fp32):
    """Padding adds random logits that count: log(512 / 500) here, log(50304 / 50257) with GPT-2's vocabulary."""
    loss = program.train({"fp32", rung}, dataclasses.replace(config, mixed_precision="bf16"))["loss"]
    assert abs(loss - fp32["loss"]) < tolerance
    assert loss != fp32["loss"] or tolerance == 1e-5  # the others compute something else


def test_the_top_of_the_ladder_is_the_recipe(program, config, options, in_process):
    """The plain loop without padding and recipe/train.py, whose loss ignores the padding, train the same model."""
    with mock.patch.object(AutoModelForCausalLM, "from_config", wraps=AutoModelForCausalLM.from_config) as build:
        plain = program.train({"fp32", "tied", "fused", "packed"}, config)
    recipe = program.train_recipe(options)
    assert plain["loss"] == pytest.approx(recipe["loss"], abs=1e-5) and plain["steps"] == recipe["steps"] == 12
    assert plain["num_parameters"] == recipe["num_parameters"]
    ours, theirs = (config.to_dict() for config in (build.call_args.args[0], *in_process))
    for key in NOT_COMPARED:
        ours.pop(key, None)
        theirs.pop(key, None)
    assert ours == theirs


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages of Linux")
def test_rungs_start_without_what_the_recipe_sets(options):
    """A rung then switches huge pages on."""
    environment = {key: value for key, value in os.environ.items() if key != "THP_MEM_ALLOC_ENABLE"}
    command = [sys.executable, PROGRAMS / "start_rung.py", SCRIPT, *options]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment)
    of_rung, huge_kb = run.stdout.splitlines()[-2:]
    assert of_rung == "None"
    if HUGE_PAGES.is_file() and "[madvise]" in HUGE_PAGES.read_text():
        assert int(huge_kb) > 60_000


def test_each_rung_adds_one_optimization_and_the_recipe_is_the_last(program, config, options):
    """What a CPU cannot show is skipped with a reason."""
    plan = program.plan_ladder(config, options, list(program.RUNGS))
    assert [what for what, _ in plan] == [*program.RUNGS.values(), "recipe/train.py"]
    skipped = {what for what, job in plan if isinstance(job, str)}
    assert {program.RUNGS["tf32"], program.RUNGS["half"]} <= skipped
    switches = [job.args[0] for what, job in plan[:-1] if what not in skipped]
    assert all(len(more - fewer) == 1 and fewer < more for fewer, more in pairwise(switches))


def test_each_rung_fills_the_memory_that_it_frees(program, config, monkeypatch):
    """The micro-batch of 124M on 40 GB, by the estimate of recipe/hardware/memory.py, grows from rung to rung."""
    dataset = SimpleNamespace(vocab_size=50257, metadata={"eos_token_id": 50256})
    monkeypatch.setattr(program, "open_dataset_for", lambda _: dataset)
    shape = {"n_layer": 12, "n_head": 12, "n_embd": 768}
    large = dataclasses.replace(config, mixed_precision="bf16", config_overrides=shape, block_size=1024)
    on, sizes = set(), {}
    for rung in program.RUNGS:
        on = on | {rung}
        sizes[rung] = program.fill_memory(on, large, 42.3e9).per_device_train_batch_size
    assert sizes["fp32"] < sizes["flash"] < sizes["loss_in_graph"]
    assert list(sizes.values()) == sorted(sizes.values()) and all(size % 4 == 0 for size in sizes.values())


def test_the_ladder_leaves_a_table_a_file_and_a_chart(program, in_process, options, tmp_path, monkeypatch, capsys):
    """The table fits a terminal."""
    monkeypatch.setattr("sys.argv", [SCRIPT, *options, "--rungs", "flash", "--output_file", f"{tmp_path}/ladder.json"])
    program.main()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ") and "not run" not in line]
    labels = [row.split(" | ")[0].strip("| ") for row in rows[1:]]
    assert max(map(len, rows)) <= 80
    assert labels == [program.RUNGS["fp32"], program.RUNGS["flash"], "recipe/train.py"]
    content = json.loads((tmp_path / "ladder.json").read_text())
    assert content["command"].startswith("python ") and content["environment"]["device"] and content["finished_at"]
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")


def test_a_time_limit_replaces_the_steps(program, config):
    """A rung trains until its seconds, counted from the start of its process, are over."""
    alive = time.time() - psutil.Process().create_time()
    found = program.train({"fp32", "packed"}, dataclasses.replace(config, max_minutes=(alive + 1) / 60))
    assert found["steps"] > 12
