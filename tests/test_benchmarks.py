"""The bare loop and the benchmark programs."""

import json
import math
import re
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import BLOCK_SIZE, load_program, read_events
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from recipe.data.batches import example_rows
from recipe.errors import UserError

SUMMARY = {"tokens_seen": 1000, "tokens_per_second": 10.0, "train_seconds": 1.0, "finished_at": ""}
SUMMARY["environment"] = {"device": "CPU", "num_cpus": 1}


def test_the_bare_loop_learns(dataset_dir, monkeypatch, capsys):
    """Thirty steps bring the loss far below that of a uniform guess, log(512)."""
    program = load_program("scripts/bare_loop.py")
    for name, value in {"MAX_STEPS": 30, "LOG_STEPS": 10, "WARMUP_STEPS": 5, "N_EMBD": 32, "GRAD_ACCUM": 2}.items():
        monkeypatch.setattr(program, name, value)
    monkeypatch.setattr(program, "PEAK_LR", 1e-2)
    monkeypatch.setattr(sys, "argv", ["bare_loop.py", str(dataset_dir)])
    program.main()
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    assert len(losses) == 3 and losses == sorted(losses, reverse=True) and losses[-1] < math.log(512) - 1.5


def test_the_bare_loop_and_the_recipe_are_the_same_loop(train, dataset, tmp_path, monkeypatch):
    """From the same weights, on the same rows, the losses of ten steps in fp32 agree within 1e-5."""
    start = train("--max_steps", "1", output_dir=tmp_path / "start")
    no_dropout = "attn_pdrop=0,resid_pdrop=0,embd_pdrop=0"
    options = {"max_steps": 10, "logging_steps": 1, "learning_rate": 1e-2, "warmup_steps": 3, "global_batch_size": 8}
    options |= {"lr_scheduler_type": "cosine_with_min_lr", "seed": 5, "config_overrides": no_dropout}
    typed = [text for key, value in options.items() for text in (f"--{key}", value)]
    shape = ["--model_name_or_path", start, "--block_size", BLOCK_SIZE]
    run = train(*typed, "--optim", "adamw_torch_fused", shape=shape, output_dir=tmp_path / "run")
    expected = [event["loss"] for event in read_events(run, "train")]

    program, losses = load_program("scripts/bare_loop.py"), []

    class StartingModel:
        @staticmethod
        def from_config(config, **attention):
            model = AutoModelForCausalLM.from_config(config, **attention)
            weights = load_file(start / "model.safetensors")
            for name, parameter in model.named_parameters():
                parameter.data[: len(weights[name])] = weights[name]
            return model

    class Recorded:
        @staticmethod
        def cross_entropy(*arguments):
            losses.append(F.cross_entropy(*arguments))
            return losses[-1]

    for name, value in {
        "MAX_STEPS": 10,
        "WARMUP_STEPS": 3,
        "PEAK_LR": 1e-2,
        "MICRO_BATCH": 4,
        "GRAD_ACCUM": 2,
    }.items():
        monkeypatch.setattr(program, name, value)
    for name, value in {"BLOCK_SIZE": BLOCK_SIZE, "N_LAYER": 2, "N_HEAD": 2, "N_EMBD": 32, "F": Recorded}.items():
        monkeypatch.setattr(program, name, value)
    monkeypatch.setattr(program, "AutoModelForCausalLM", StartingModel)
    monkeypatch.setattr(program, "time_product", lambda *_: 1.0)  # fp32
    monkeypatch.setattr(torch, "randperm", lambda n: torch.from_numpy(example_rows(np.arange(n), n, 5)))
    monkeypatch.setattr(sys, "argv", ["bare_loop.py", str(dataset.directory)])
    program.main()
    found = torch.stack(losses).detach().view(10, 2).mean(dim=1).tolist()
    assert found == pytest.approx(expected, abs=1e-5) and expected[-1] < expected[0] - 0.5


def test_the_bare_loop_needs_a_batch(dataset_dir, monkeypatch):
    program = load_program("scripts/bare_loop.py")
    monkeypatch.setattr(program, "MICRO_BATCH", 10**6)
    monkeypatch.setattr(sys, "argv", ["bare_loop.py", str(dataset_dir)])
    with pytest.raises(SystemExit, match="rows, but one step takes 1000000; prepare more text"):
        program.main()


def test_the_bare_loops_schedule():
    """Linear to the peak, then a cosine to a tenth of it."""
    program = load_program("scripts/bare_loop.py")
    rates = [program.learning_rate(step) for step in range(program.MAX_STEPS)]
    assert max(rates) == pytest.approx(program.PEAK_LR) == pytest.approx(rates[program.WARMUP_STEPS])
    assert rates[0] == 0 and rates[1] == pytest.approx(program.PEAK_LR / program.WARMUP_STEPS)
    assert rates[-1] == pytest.approx(program.PEAK_LR / 10, rel=1e-3)


@pytest.fixture
def sweep(tmp_path, monkeypatch, capsys):
    """Run the sweep program with a stand-in for training, which reports the square of the value plus the seed."""
    program, trained, used = load_program("scripts/benchmarks/sweep.py"), [], []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess:
        options = dict(zip(command[2::2], command[3::2], strict=True))
        value = float(options["--learning_rate"])
        trained.append((value, int(options["--seed"])))
        used.append(options)
        if value > 100:
            return subprocess.CompletedProcess(command, 1, "", "Traceback\nerror: stopped at step 5: not finite\n")
        folder = Path(options["--output_dir"])
        folder.mkdir()
        summary = {"eval_loss": value**2 + int(options["--seed"]), **SUMMARY}
        (folder / "summary.json").write_text(json.dumps(summary))
        events = [{"event": "eval", "step": 0, "loss": 9.0}]
        for step in (5, 10):
            events += [{"event": "train", "step": step, "tokens_seen": 100 * step, "train_seconds": 0.1 * step}]
            events += [{"event": "eval", "step": step, "loss": value + 1 / step}]
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, events)))
        return subprocess.CompletedProcess(command, 0, "", "")

    def start(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["sweep.py", *map(str, arguments)])
        program.main()
        return capsys.readouterr().out

    monkeypatch.setattr(program.subprocess, "run", run)
    start.used = used
    return start, trained, tmp_path / "sweep.json"


def test_a_sweep_gives_mean_and_standard_deviation(sweep):
    start, trained, path = sweep
    text = start("learning_rate", 1, 2, "--seeds", 0, 1, 3, "--max_steps", 5, "--output_file", path)
    assert sorted(trained) == [(1, 0), (1, 1), (1, 3), (2, 0), (2, 1), (2, 3)]
    mean, sd = statistics.fmean([4, 5, 7]), statistics.stdev([4, 5, 7])
    assert f"| 2 | 0.00 M | 3 | {mean:.4f} | {sd:.4f} | {math.exp(mean):.2f} | 10 |" in text
    assert all({"environment", "finished_at"} <= run.keys() for run in json.loads(path.read_text())["runs"])


def test_a_sweep_of_two_options_with_its_chart(sweep, tmp_path):
    """Each value sets both options; the file holds each evaluation after a log line, and the charts are drawn."""
    start, _, path = sweep
    options = ["--seeds", 0, 1, "--eval_steps", 5, "--output_file", path, "--chart_file", tmp_path / "chart.png"]
    start("learning_rate,optim", "1,muon", "2,adamw_torch", *options)
    assert {(o["--learning_rate"], o["--optim"]) for o in start.used} == {("1", "muon"), ("2", "adamw_torch")}
    assert json.loads(path.read_text())["runs"][1]["curve"] == [[500, 0.5, 2.2], [1000, 1.0, 2.1]]
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("chart.png", "chart_dark.png"))


def test_a_sweep_continues_and_refuses_another_one(sweep):
    """What is in the file is not trained again; a file with other options is left alone."""
    start, trained, path = sweep
    start("learning_rate", 1, "--seeds", 0, "--output_file", path)
    start("learning_rate", 1, 2, "--seeds", 0, "--output_file", path)
    assert trained == [(1, 0), (2, 0)]
    with pytest.raises(UserError, match="holds another sweep"):
        start("learning_rate", 3, "--seeds", 0, "--max_steps", 5, "--output_file", path)


def test_a_run_that_fails_is_a_row(sweep):
    """A learning rate that is too high is a result, too: with its reason, and without a line in the chart."""
    start, _, path = sweep
    chart = ["--eval_steps", 5, "--chart_file", path.with_suffix(".png")]
    text = start("learning_rate", 1000, 1, "--seeds", 0, "--output_file", path, *chart)
    assert "| 1000 | | 0 | failed | | | |" in text and "seed 0: failed: error: stopped at step 5" in text
    assert json.loads(path.read_text())["runs"][0]["failed"].startswith("error: stopped at step 5")
    assert path.with_suffix(".png").exists()
    with pytest.raises(UserError, match="every run failed"):
        start("learning_rate", 1000, "--seeds", 0)


def test_a_stage_that_fails_or_hangs_does_not_stop_the_next(tmp_path, monkeypatch):
    """Two programs may run side by side. What does not fit into the time any more is recorded as not run."""
    program = load_program("scripts/benchmarks/first_gpu.py")
    codes = {"bad": (9, "raise SystemExit('no kernel')"), "slow": (1, "import time; time.sleep(60)"),
             "good": (9, "print('b')"), "both": (9, "print(1)", "print(2)"), "late": (900, "print(3)")}  # fmt: skip
    stages = []
    for name, (seconds, *parts) in codes.items():
        commands = [[sys.executable, "-c", code] for code in parts]
        stages.append((name, seconds, commands if len(commands) > 1 else commands[0]))
    monkeypatch.setattr(program, "list_parts", lambda args: stages)
    options = "--dataset_dir data --nanogpt nanoGPT --minutes 0.4 --output_dir"
    monkeypatch.setattr(sys, "argv", ["first_gpu.py", *options.split(), str(tmp_path)])
    program.main()
    found = {path.stem[3:]: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert "failed with 1: no kernel" in found["bad"]["status"] and found["slow"]["status"] == "not finished in time"
    assert found["good"]["status"] == "done" and found["good"]["output"] == ["b"]
    assert found["both"]["status"] == "done; done" and found["late"]["status"].startswith("not run")
    assert all(entry["environment"]["torch"] and entry["command"].startswith("python") for entry in found.values())
