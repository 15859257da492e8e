"""The bare loop, which is the recipe's loop with nothing around it, and the programs that make the benchmarks."""

import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from helpers import BLOCK_SIZE, ONE_STEP, ROOT, load_program, values_of
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from recipe.data.batches import example_rows
from recipe.errors import UserError

PROGRAMS = ROOT / "tests" / "programs"

# ---------------------------------------------------------------- the bare loop


def test_the_bare_loop_and_the_recipe_are_the_same_loop(train, dataset_dir, tmp_path, monkeypatch, capsys):
    """From the same weights, on the same rows, the losses of ten steps in fp32 agree within 1e-5."""
    start = train(*ONE_STEP, output_dir=tmp_path / "start")
    options = {"max_steps": 10, "logging_steps": 1, "learning_rate": 1e-2, "warmup_steps": 3, "global_batch_size": 8}
    options |= {"lr_scheduler_type": "cosine_with_min_lr", "seed": 5}
    options["config_overrides"] = "attn_pdrop=0,resid_pdrop=0,embd_pdrop=0"
    typed = [text for key, value in options.items() for text in (f"--{key}", value)]
    run = train(*typed, shape=["--model_name_or_path", start, "--block_size", BLOCK_SIZE], output_dir=tmp_path / "run")
    expected = values_of(run, "loss")
    losses = []

    def build_started_model(config, **attention):
        model = AutoModelForCausalLM.from_config(config, **attention)
        weights = load_file(start / "model.safetensors")
        for name, parameter in model.named_parameters():
            parameter.data[: len(weights[name])] = weights[name]
        return model

    def record_loss(*arguments):
        losses.append(F.cross_entropy(*arguments))
        return losses[-1]

    program = load_program("scripts/bare_loop.py")
    constants = {
        "MAX_STEPS": 10,
        "LOG_STEPS": 1,
        "WARMUP_STEPS": 3,
        "PEAK_LR": 1e-2,
        "MICRO_BATCH": 4,
        "GRAD_ACCUM": 2,
    }
    constants |= {"BLOCK_SIZE": BLOCK_SIZE, "N_LAYER": 2, "N_HEAD": 2, "N_EMBD": 32}
    constants["time_product"] = lambda *_: 1.0  # fp32
    constants["AutoModelForCausalLM"] = SimpleNamespace(from_config=build_started_model)
    constants["F"] = SimpleNamespace(cross_entropy=record_loss)
    for name, value in constants.items():
        monkeypatch.setattr(program, name, value)
    monkeypatch.setattr(torch, "randperm", lambda n: torch.from_numpy(example_rows(np.arange(n), n, 5)))
    monkeypatch.setattr(sys, "argv", ["bare_loop.py", str(dataset_dir)])
    capsys.readouterr()
    program.main()
    found = torch.stack(losses).detach().view(10, 2).mean(dim=1).tolist()
    assert found == pytest.approx(expected, abs=1e-5) and expected[-1] < expected[0] - 0.5
    printed = [float(loss) for loss in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    assert printed == pytest.approx(expected, abs=1e-4)


# ---------------------------------------------------------------- sweeps


@pytest.fixture
def sweep(tmp_path, monkeypatch, capsys):
    """Run the sweep program with a stand-in for training, which reports the square of the value plus the seed.

    A value above 100 fails. Returns the function, the options of all trainings, and the output file.
    """
    program = load_program("scripts/benchmarks/sweep.py")
    path = tmp_path / "sweep.json"
    trained = []
    environment = {"device": "CPU", "num_cpus": 1}
    measured = {"tokens_seen": 1000, "tokens_per_second": 10.0, "train_seconds": 1.0, "bits_per_byte": 2.0}
    measured |= {"finished_at": "", "environment": environment}

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess:
        options = dict(zip(command[2::2], command[3::2], strict=True))
        trained.append(options)
        value, seed, folder = float(options["--learning_rate"]), int(options["--seed"]), Path(options["--output_dir"])
        if value > 100:
            return subprocess.CompletedProcess(command, 1, "", "Traceback\nerror: stopped at step 5: not finite\n")
        folder.mkdir()
        summary = {"eval_loss": value**2 + seed, **measured}
        (folder / "summary.json").write_text(json.dumps(summary))
        events = [{"event": "eval", "step": 0, "loss": 9.0}]
        for step in (5, 10):
            events.append({"event": "train", "step": step, "tokens_seen": 100 * step, "train_seconds": 0.1 * step})
            events.append({"event": "eval", "step": step, "loss": value + 1 / step})
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, events)))
        return subprocess.CompletedProcess(command, 0, "", "")

    def start(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["sweep.py", *map(str, arguments), "--output_file", str(path)])
        program.main()
        return capsys.readouterr().out

    monkeypatch.setattr(program.subprocess, "run", run)
    return start, trained, path


def test_a_sweep_gives_mean_and_standard_deviation_and_goes_on_where_its_file_ends(sweep):
    start, trained, path = sweep
    start("learning_rate", 1, "--seeds", 0, "--max_steps", 5)
    text = start("learning_rate", 1, 2, "--seeds", 0, 1, 3, "--max_steps", 5)
    found = [(options["--learning_rate"], options["--seed"]) for options in trained]
    assert sorted(found) == [(value, seed) for value in "12" for seed in "013"]
    mean, sd = statistics.fmean([4, 5, 7]), statistics.stdev([4, 5, 7])
    sigmas = (1 - 4) * math.sqrt(3) / math.sqrt(2 * sd**2)  # of a difference between two means of three
    assert f"| 2 | 0.00 M | 3 | {mean:.4f} | {sd:.4f} | {sigmas:.1f} | 10 |" in text
    assert all({"environment", "finished_at"} <= run.keys() for run in json.loads(path.read_text())["runs"])


def test_a_sweep_of_two_options_sets_both_and_draws_their_curves(sweep, tmp_path):
    """The file holds each evaluation after a log line."""
    start, trained, path = sweep
    chart = ["--eval_steps", 5, "--chart_file", tmp_path / "chart.png"]
    start("learning_rate,optim", "1,muon", "2,adamw_torch", "--seeds", 0, 1, *chart)
    assert {(of["--learning_rate"], of["--optim"]) for of in trained} == {("1", "muon"), ("2", "adamw_torch")}
    assert json.loads(path.read_text())["runs"][1]["curve"] == [[500, 0.5, 2.2], [1000, 1.0, 2.1]]
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_fails_is_a_row_of_the_sweep_with_its_reason(sweep, tmp_path):
    """A learning rate that is too high is a result, too; it has no line in the chart."""
    start, _, path = sweep
    chart = ["--eval_steps", 5, "--chart_file", tmp_path / "chart.png"]
    text = start("learning_rate", 1000, 1, "--seeds", 0, *chart)
    assert "| 1000 | | 0 | failed | | | |" in text and "stopped at step 5" in text
    assert "stopped at step 5" in json.loads(path.read_text())["runs"][0]["failed"]
    assert (tmp_path / "chart.png").exists()
    with pytest.raises(UserError):  # if every run fails, so does the sweep
        start("learning_rate", 1000, "--seeds", 0)


# ---------------------------------------------------------------- other programs


def compare(dataset_dir, monkeypatch, *programs: Path, output_file: Path) -> None:
    program = load_program("scripts/benchmarks/peers.py")
    options = f"--config gpt2_124m --dataset_dir {dataset_dir} --block_size {BLOCK_SIZE} --mixed_precision bf16"
    options += " --config_overrides n_layer=2,n_head=2,n_embd=32 --dynamo_backend no"
    options += f" --per_device_train_batch_size 4 --global_batch_size 8 --rounds 5 --output_file {output_file}"
    monkeypatch.setattr(sys, "argv", ["peers.py", *map(str, programs), *options.split()])
    program.main()


def test_programs_take_turns_of_four_steps_and_are_stopped_in_between(dataset_dir, tmp_path, monkeypatch, capsys):
    """nanoGPT gets our tokens and the precision of recipe/train.py, and every turn is timed."""
    laps = tmp_path / "laps.txt"
    nanogpt = tmp_path / "nanoGPT"
    nanogpt.mkdir()
    (nanogpt / "laps.txt").write_text(str(laps))
    shutil.copy(PROGRAMS / "nanogpt_train.py", nanogpt / "train.py")
    compare(dataset_dir, monkeypatch, nanogpt, output_file=tmp_path / "peers.json")
    found = json.loads((tmp_path / "peers.json").read_text())
    assert list(found["turn_seconds"]) == ["recipe/train.py", "nanoGPT"]
    assert all(len(seconds) == 5 for seconds in found["turn_seconds"].values())
    assert len(found["product_flops_per_second"]) == 5 and found["turn_tokens"] == 4 * 8 * BLOCK_SIZE
    assert min(found["turn_seconds"]["nanoGPT"]) > 0.02
    assert len(laps.read_text().splitlines()) <= 3 + 5 + 1  # it did not train while others did
    ours, peer = (found["turn_seconds"][name] for name in ("recipe/train.py", "nanoGPT"))
    ratios = [theirs / mine for theirs, mine in zip(peer, ours, strict=True)]
    assert f"| {statistics.median(ratios):.2f} | {min(ratios):.2f} to {max(ratios):.2f} |" in capsys.readouterr().out


def test_programs_start_without_what_the_recipe_sets(tmp_path):
    """Such as huge pages, which recipe/__init__.py switches on for itself."""
    show = "import os; print(os.environ.get('THP_MEM_ALLOC_ENABLE'))"
    code = f"""import pathlib, runpy
program = runpy.run_path({str(ROOT / "scripts/benchmarks/peers.py")!r})["Program"]
program("any", ["-c", {show!r}], pathlib.Path({str(tmp_path / "output.txt")!r}), "").process.wait()"""
    environment = {key: value for key, value in os.environ.items() if key != "THP_MEM_ALLOC_ENABLE"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert (tmp_path / "output.txt").read_text() == "None\n"


def test_a_program_that_fails_is_named_with_its_last_line_and_nothing_goes_on(dataset_dir, tmp_path, monkeypatch):
    program = tmp_path / "checkout" / "recipe" / "train.py"
    program.parent.mkdir(parents=True)
    program.write_text("import nothing_of_this_name")
    with pytest.raises(UserError, match=r"checkout ended: .*nothing_of_this_name"):
        compare(dataset_dir, monkeypatch, tmp_path / "checkout", output_file=tmp_path / "peers.json")
    running = [process for process in psutil.Process().children() if process.status() != psutil.STATUS_ZOMBIE]
    assert not [process for process in running if "train.py" in " ".join(process.cmdline())]


# ---------------------------------------------------------------- the first hour on a GPU


def test_a_stage_that_fails_or_hangs_does_not_stop_the_next(tmp_path, monkeypatch):
    """What does not fit into the time any more is recorded as not run."""
    program = load_program("scripts/benchmarks/first_gpu.py")
    stages = [  # with the seconds that they should take
        ("bad", 9, [sys.executable, "-c", "raise SystemExit('no kernel')"]),
        ("slow", 1, [sys.executable, "-c", "import time; time.sleep(60)"]),
        ("good", 9, [sys.executable, "-c", "print('b')"]),
        ("late", 900, [sys.executable, "-c", "print(3)"]),
    ]
    monkeypatch.setattr(program, "list_parts", lambda args: stages)
    options = "--dataset_dir data --nanogpt nanoGPT --heads heads --before before --minutes 0.4 --output_dir"
    monkeypatch.setattr(sys, "argv", ["first_gpu.py", *options.split(), str(tmp_path)])
    program.main()
    found = {path.stem[3:]: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert "failed with 1: no kernel" in found["bad"]["status"] and found["slow"]["status"] == "not finished in time"
    assert found["good"]["status"] == "done" and found["good"]["output"] == ["b"]
    assert found["late"]["status"].startswith("not run")
    assert all(entry["environment"]["torch"] and entry["command"].startswith("python") for entry in found.values())
