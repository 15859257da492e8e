"""The ladder: every rung trains the same model on the same rows, and the last one is recipe/train.py itself."""

import dataclasses
import json
import time
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
from conftest import BLOCK_SIZE, PLAIN, load_program, run_training

from recipe.hardware.devices import native_bf16

SCRIPT = "scripts/run_ladder.py"
SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 32}
NANOGPT = """
import pickle, sys
import numpy as np
options = dict(argument[2:].split("=") for argument in sys.argv[1:])
assert pickle.load(open("data/ladder/meta.pkl", "rb")) == {"vocab_size": 512}
assert len(np.fromfile("data/ladder/train.bin", np.uint16)) > 1000 and options["n_layer"] == "2"
for step in range(int(options["max_iters"]) + 1):
    print(f"iter {step}: loss 6.0, time {1000 if step < 4 else 64:.2f}ms, mfu -100.00%")
"""


@pytest.fixture(scope="module")
def program():
    return load_program(SCRIPT)


@pytest.fixture(scope="module")
def setting(program, dataset_dir):
    return program.Setting("cpu", dataset_dir, SHAPE, BLOCK_SIZE, 4, 2, num_steps=12, seconds=None, eval_rows=8)


@pytest.fixture
def in_process(program, monkeypatch):
    """Run rungs and recipe/train.py in this process, without compilation and in fp32."""
    monkeypatch.setattr(program, "measure", lambda job: {"not_run": job} if isinstance(job, str) else job())
    monkeypatch.setattr(program, "native_bf16", lambda device: None)
    monkeypatch.setattr(program, "why_no_inductor", lambda device: "not tried")

    def run_program(command: list[str], cwd: Path | None = None) -> str:
        run_training([*command[1:], *PLAIN], Path(command[command.index("--output_dir") + 1]))
        return ""

    monkeypatch.setattr(program, "run_program", run_program)


@pytest.fixture(scope="module")
def fp32(program, setting):
    return program.train({"fp32"}, setting)


@pytest.mark.parametrize("rung", ["half", "flash", "fused", "packed", "no_sync", "loss_in_graph", "padding"])
def test_an_optimization_does_not_change_the_loss(rung, program, setting, fp32):
    """Padding adds random logits that count: log(512 / 500) here, log(50304 / 50257) with GPT-2's vocabulary."""
    if rung == "half" and not native_bf16(torch.device("cpu")):
        pytest.skip("this device has no bf16 units")
    loss = program.train({"fp32", rung}, setting)["loss"]
    tolerances = {"half": 5e-3, "padding": 0.03}
    tolerance = tolerances.get(rung, 1e-5)
    assert abs(loss - fp32["loss"]) < tolerance
    assert loss != fp32["loss"] or rung not in tolerances  # these two compute something else


def test_the_top_of_the_ladder_is_the_recipe(program, setting, in_process):
    """The plain loop without padding and recipe/train.py, whose loss ignores the padding, end at the same loss."""
    plain = program.train({"fp32", "tied", "fused", "packed"}, setting)
    recipe = program.train_recipe(setting)
    assert plain["loss"] == pytest.approx(recipe["loss"], abs=1e-5) and plain["steps"] == recipe["steps"] == 12


def test_rungs_add_up_and_what_a_cpu_cannot_show_is_skipped_with_a_word(program, setting, monkeypatch):
    monkeypatch.setattr(program, "native_bf16", lambda device: None)
    plan = program.plan_ladder(setting, None)
    reasons = {what: job for what, job in plan if isinstance(job, str)}
    assert reasons["TF32"] == "this device has no TF32"
    assert reasons[program.RUNGS["half"]] == "this device has no bf16 units"
    switches = [job.args[0] for what, job in plan[:-1] if not isinstance(job, str)]
    assert all(len(more - fewer) == 1 and fewer < more for fewer, more in zip(switches, switches[1:], strict=False))
    assert plan[-1][0] == "recipe/train.py" and [what for what, _ in plan[:-1]] == list(program.RUNGS.values())


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


def test_nanogpt_gets_our_tokens_and_takes_turns(program, setting, tmp_path):
    """The median step counts; the first ones compile."""
    (tmp_path / "data").mkdir()
    (tmp_path / "train.py").write_text(NANOGPT)
    assert program.train_nanogpt(tmp_path, setting)["tokens_per_second"] == pytest.approx(4 * 2 * BLOCK_SIZE / 0.064)
    assert [what for what, _ in program.plan_comparison(setting, tmp_path, 2)] == ["recipe/train.py", "nanoGPT"] * 2


def test_a_rung_that_fails_has_a_row_and_the_next_one_is_compared_with(program, setting):
    with mock.patch.object(program, "train", side_effect=RuntimeError("no kernel")) as train:
        failed = {"what": "fp32", **program.attempt(train)}
    timed = {"what": "bf16", "tokens_per_second": 10.0}
    assert "not run: RuntimeError: no kernel" in program.make_row(failed, [failed, timed])
    assert " 1.00 |" in program.make_row(timed, [failed, timed])
