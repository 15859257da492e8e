"""The ladder: every rung trains the same model on the same rows, and the last one is recipe/train.py itself."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import psutil
import pytest
from conftest import BLOCK_SIZE, PLAIN, ROOT, load_program, run_training
from transformers import AutoConfig, AutoModelForCausalLM

SCRIPT = "scripts/run_ladder.py"
NOT_OF_THE_MODEL = {
    "architectures",
    "dtype",
    "transformers_version",
    "_name_or_path",
    "n_ctx",
    "summary_first_dropout",
}
SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 32}
NANOGPT = """
import pickle, sys
from contextlib import nullcontext
import torch
import numpy as np
options = dict(argument[2:].split("=") for argument in sys.argv[1:])
assert pickle.load(open("data/ladder/meta.pkl", "rb")) == {"vocab_size": 512}
device, dtype = options["device"], options["dtype"]
device_type, ptdtype = device, getattr(torch, dtype)
ctx = nullcontext() if device_type == 'cpu' else torch.amp.autocast(device_type=device_type, dtype=ptdtype)
with ctx:
    assert (torch.ones(1, 1) @ torch.ones(1, 1)).dtype == ptdtype
print("num decayed parameter tensors: 2, with 1,200 parameters")
print("num non-decayed parameter tensors: 1, with 34 parameters")
assert len(np.fromfile("data/ladder/train.bin", np.uint16)) > 1000 and options["n_layer"] == "2"
for step in range(int(options["max_iters"]) + 1):
    print(f"iter {step}: loss 6.0, time {1000 if step < 4 else 64:.2f}ms, mfu -100.00%")
"""
RUN_CLM = """
import json, sys, time
from tokenizers import Tokenizer
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
tokenizer = Tokenizer.from_file(options["--tokenizer_name"] + "/tokenizer.json")
lengths = [len(tokenizer.encode(json.loads(line)["text"]).ids) for line in open(options["--train_file"])]
steps, block_size = int(options["--max_steps"]), int(options["--block_size"])
assert min(lengths) >= block_size and sum(lengths) >= steps * 4 * 2 * block_size
assert "n_layer=2" in options["--config_overrides"] and options["--gradient_accumulation_steps"] == "2"
print("[INFO] Number of trainable parameters = 1,234", file=sys.stderr)
time.sleep(1)
for step in range(0, steps, int(options["--logging_steps"])):
    time.sleep(0.2)
    print({"loss": "6.0", "epoch": "0"})
"""
# Prints the variables of recipe/__init__.py that a peer gets, and how much of a tensor of 64 MB is on huge pages.
FRESH = """
import re, runpy, sys
from pathlib import Path
program = runpy.run_path("scripts/run_ladder.py", run_name="__mp_main__")  # as the process of a rung does
import torch
print(program["run_program"](["-c", "import os; print(os.environ.get('THP_MEM_ALLOC_ENABLE'))"])[0][1])
shape = {"n_layer": 1, "n_head": 1, "n_embd": 8}
setting = program["Setting"]("cpu", "fp32", Path(sys.argv[1]), 500, shape, 32, 1, 1, 8, None, 1)
program["train"]({"fp32", "huge_pages"}, setting)
tensor = torch.ones(2**24)
print(re.search(r"AnonHugePages: *(\\d+)", Path("/proc/self/smaps_rollup").read_text())[1])
"""
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.fixture(scope="module")
def program():
    return load_program(SCRIPT)


@pytest.fixture(scope="module")
def setting(program, dataset_dir):
    return program.Setting(
        "cpu", "fp32", dataset_dir, 500, SHAPE, BLOCK_SIZE, 4, 2, num_steps=12, seconds=None, eval_rows=8
    )


@pytest.fixture
def in_process(program, monkeypatch):
    """Run rungs and recipe/train.py in this process, without compilation and in fp32."""
    monkeypatch.setattr(program, "measure_rung", lambda job: {"not_run": job} if isinstance(job, str) else job())
    monkeypatch.setattr(program, "why_no_inductor", lambda device: "not tried")

    def run_program(command: list[str], cwd: Path | None = None) -> list[tuple[float, str]]:
        run_training([*command[1:], *PLAIN])
        return []

    monkeypatch.setattr(program, "run_program", run_program)


@pytest.fixture(scope="module")
def fp32(program, setting):
    return program.train({"fp32"}, setting)


@pytest.mark.parametrize("rung", ["half", "flash", "fused", "packed", "no_sync", "loss_in_graph", "padding"])
def test_an_optimization_does_not_change_the_loss(rung, program, setting, fp32):
    """Padding adds random logits that count: log(512 / 500) here, log(50304 / 50257) with GPT-2's vocabulary."""
    loss = program.train({"fp32", rung}, dataclasses.replace(setting, precision="bf16"))["loss"]
    tolerances = {"half": 5e-3, "padding": 0.03}
    tolerance = tolerances.get(rung, 1e-5)
    assert abs(loss - fp32["loss"]) < tolerance
    assert loss != fp32["loss"] or rung not in tolerances  # these two compute something else


def test_the_top_of_the_ladder_is_the_recipe(program, setting, in_process, monkeypatch):
    """The plain loop without padding and recipe/train.py, whose loss ignores the padding, train the same model."""
    configs, run = [], program.run_program

    def run_program(command: list[str]) -> None:
        run(command)
        configs.append(AutoConfig.from_pretrained(command[command.index("--output_dir") + 1]).to_dict())

    monkeypatch.setattr(program, "run_program", run_program)
    with mock.patch.object(AutoModelForCausalLM, "from_config", wraps=AutoModelForCausalLM.from_config) as build:
        plain = program.train({"fp32", "tied", "fused", "packed"}, setting)
        configs.append(build.call_args.args[0].to_dict())
    recipe = program.train_recipe(setting)
    assert plain["loss"] == pytest.approx(recipe["loss"], abs=1e-5) and plain["steps"] == recipe["steps"] == 12
    assert plain["num_parameters"] == recipe["num_parameters"]
    ours, theirs = ({key: value for key, value in config.items() if key not in NOT_OF_THE_MODEL} for config in configs)
    assert ours == theirs


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages of Linux")
def test_rungs_and_peers_start_without_what_the_recipe_sets(dataset_dir):
    """A rung then switches huge pages on."""
    environment = {key: value for key, value in os.environ.items() if key != "THP_MEM_ALLOC_ENABLE"}
    command = [sys.executable, "-c", FRESH, dataset_dir]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment)
    of_peer, huge_kb = run.stdout.splitlines()[-2:]
    assert of_peer == "None"
    if HUGE_PAGES.is_file() and "[madvise]" in HUGE_PAGES.read_text():
        assert int(huge_kb) > 60_000


def test_rungs_add_up_and_what_a_cpu_cannot_show_is_skipped_with_a_word(program, setting, monkeypatch):
    plan = program.plan_ladder(setting, None)
    reasons = {what: job for what, job in plan if isinstance(job, str)}
    assert reasons["TF32"] == "this device has no TF32"
    assert reasons[program.RUNGS["half"]] == "fp32 is faster than bf16 here"
    switches = [job.args[0] for what, job in plan[:-1] if not isinstance(job, str)]
    assert all(len(more - fewer) == 1 and fewer < more for fewer, more in zip(switches, switches[1:], strict=False))
    assert plan[-1][0] == "recipe/train.py" and [what for what, _ in plan[:-1]] == list(program.RUNGS.values())


def test_each_rung_fills_the_memory_that_it_frees(program, setting):
    """By the estimate of recipe/hardware/memory.py: 124M on 40 GB, where one of the notes has 28 to 64 rows."""
    shape = {"n_layer": 12, "n_head": 12, "n_embd": 768}
    large = dataclasses.replace(setting, device="cuda", precision="bf16", shape=shape, vocab_size=50257)
    large = dataclasses.replace(large, block_size=1024, micro_batch=16)
    on, sizes = set(), {}
    for rung in program.RUNGS:
        on = on | {rung}
        sizes[rung] = program.fill_memory(on, large, 42.3e9).micro_batch
    assert sizes["fp32"] < sizes["flash"] < sizes["loss_in_graph"]
    assert list(sizes.values()) == sorted(sizes.values()) and all(size % 4 == 0 for size in sizes.values())


def test_where_batches_come_from_does_not_change_the_loss(program, setting, in_process):
    """The loop with packed ids, and the recipe with ids mapped, in RAM and on the device."""
    plan = dict(program.plan_input(setting))
    found = {what: plan[what]() for what in [*plan][:5]}
    tokenized, packed, *placed = (of["loss"] for of in found.values())
    assert len(placed) == 3 and len(set(placed)) == 1 and abs(packed - placed[0]) < 0.03  # a padded vocabulary
    assert abs(tokenized - packed) < 0.02  # text does not come back as the same ids
    assert all(of["steps"] == setting.num_steps and of["step_ms"] > 0 for of in found.values())


def test_the_whole_program(program, in_process, dataset_dir, tmp_path, monkeypatch, capsys):
    """Its table fits a terminal; the JSON and both charts exist."""
    path = tmp_path / "ladder.json"
    options = "--config demo --steps 4 --micro_batch 2 --grad_accum 1 --rungs flash"
    arguments = [*options.split(), "--dataset_dir", dataset_dir, "--output_file", path]
    monkeypatch.setattr("sys.argv", [SCRIPT, *map(str, arguments)])
    monkeypatch.setattr(program, "GPT2_SHAPE", SHAPE)
    program.main()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ") and "not run" not in line]
    assert max(map(len, rows)) <= 80 and [row.split(" | ")[0].strip("| ") for row in rows[1:]] == [
        program.RUNGS["fp32"], program.RUNGS["flash"], "recipe/train.py"]  # fmt: skip
    content = json.loads(path.read_text())
    assert content["command"].startswith("python ") and content["environment"]["device"] and content["finished_at"]
    for name in ("ladder.png", "ladder_dark.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_a_time_limit_replaces_the_steps(program, setting):
    """A rung trains until its seconds, counted from the start of its process, are over."""
    alive = time.time() - psutil.Process().create_time()
    found = program.train({"fp32", "packed"}, dataclasses.replace(setting, seconds=alive + 1))
    assert found["steps"] > setting.num_steps


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_nanogpt_gets_our_tokens_and_the_best_precision(program, setting, tmp_path, precision):
    """The median step counts; the first ones compile. On a CPU, nanoGPT has no autocast of its own."""
    (tmp_path / "data").mkdir()
    (tmp_path / "train.py").write_text(NANOGPT)
    found = program.train_nanogpt(tmp_path, dataclasses.replace(setting, precision=precision))
    assert found["tokens_per_second"] == pytest.approx(4 * 2 * BLOCK_SIZE / 0.064)
    assert found["precision"] == precision and ("change" in found) == (precision == "bf16")
    assert found["num_parameters"] == 1234


def test_run_clm_gets_our_text_and_its_speed_is_that_of_its_log(program, setting, tmp_path, monkeypatch):
    """The time before its first line does not count: it compiles."""
    (tmp_path / "run_clm.py").write_text(RUN_CLM)
    found = program.train_run_clm(tmp_path / "run_clm.py", setting)
    assert 0.3 < found["tokens_per_second"] / (4 * 4 * 2 * BLOCK_SIZE / 0.2) < 1.05
    assert found["precision"] == "fp32" and found["num_parameters"] == 1234


def test_programs_take_turns_and_one_that_fails_ends_nothing(program, setting, tmp_path):
    (tmp_path / "train.py").write_text("import nothing_of_this_name")
    (tmp_path / "run_clm.py").write_text("")
    plan = program.plan_comparison(setting, [tmp_path, tmp_path / "run_clm.py"], 2)
    assert [what for what, _ in plan] == ["recipe/train.py", "nanoGPT", "run_clm.py"] * 2
    failed = [{"what": what, **program.attempt(job)} for what, job in plan[1:3]]
    assert "nothing_of_this_name" in failed[0]["not_run"] and "no line per step" in failed[1]["not_run"]
    timed = [{"what": f"{name}.py (fp32)", "tokens_per_second": speed} for name, speed in
             [("ours", 30.0), ("peer", 10.0), ("ours", 22.0), ("peer", 20.0)]]  # fmt: skip
    lines = program.compare([*timed[:2], failed[0], *timed[2:], failed[0]], 2)
    assert lines == ["ours.py (fp32) is 2.05 times as fast as peer.py (fp32): 1.10 to 3.00"]


def test_a_rung_that_fails_has_a_row_and_the_next_one_is_compared_with(program, setting):
    with mock.patch.object(program, "train", side_effect=RuntimeError("no kernel")) as train:
        failed = {"what": "fp32", **program.attempt(train)}
    timed = {"what": "bf16", "tokens_per_second": 10.0, "step_ms": 3.0}
    assert "not run: RuntimeError: no kernel" in program.make_row(failed, [failed, timed])
    assert " 1.00 |" in program.make_row(timed, [failed, timed])
