"""The programs as a user starts them: through `accelerate launch`, from another folder, on one and two processes."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, TINY, launch, make_documents, read_events
from transformers import AutoModelForCausalLM, AutoTokenizer

TWO_PROCESSES = (
    "--multi_gpu",
    "--num_processes",
    "2",
    "--num_machines",
    "1",
    "--dynamo_backend",
    "no",
    "--mixed_precision",
    "no",
)


def test_first_run_needs_nothing(tmp_path):
    """No argument but a shorter run: corpus, tokenizer, packing, training, closing words; a second run reuses them."""
    result = launch(["--max_steps", "60"], cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    out = result.stdout
    assert "trained a byte-level BPE" in out and "packed into" in out
    assert "perplexity" in out and "A sample, from the prompt" in out and "untrained" in out
    assert "loss" in result.stderr and "tokens/s" in result.stderr and "100%" in result.stderr  # the progress bar
    closing = out[out.index("Next:") :].splitlines()
    assert [line for line in closing if len(line) > 80] == []
    summary = json.loads((tmp_path / "runs" / "demo" / "summary.json").read_text())
    assert summary["eval_loss"] < summary["untrained"]["loss"] - 1.3
    for part in ("scripts/generate_text.py --model runs/demo", "--resume_from_checkpoint auto", "gpt2_124m"):
        assert part in out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "runs" / "demo")
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(tmp_path / "runs" / "demo"))

    config_file = ROOT / "accelerate_configs" / "cpu.yaml"
    result = launch(["--max_steps", "1"], cwd=tmp_path, launcher=("--config_file", str(config_file)))
    assert result.returncode == 0, result.stderr
    assert "is already prepared" in result.stdout and "trained a byte-level BPE" not in result.stdout
    assert (tmp_path / "runs" / "demo-2" / "summary.json").is_file()


def test_two_processes_are_one_run(tmp_path, dataset_dir):
    """Two processes, compiled or not, give the losses and the validation loss of one, to fp32 rounding."""
    options = [
        "--dataset_dir",
        dataset_dir,
        *TINY,
        "--max_steps",
        "8",
        "--logging_steps",
        "1",
        "--eval_steps",
        "4",
        "--global_batch_size",
        "8",
        "--per_device_train_batch_size",
        "2",
        "--mixed_precision",
        "no",
    ]
    launches = {"one": ((), "no"), "two": (TWO_PROCESSES, "no"), "compiled": (TWO_PROCESSES, "aot_eager")}
    for name, (launcher, backend) in launches.items():
        arguments = [*options, "--output_dir", tmp_path / name, "--dynamo_backend", backend]
        result = launch(arguments, cwd=tmp_path, launcher=launcher, ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1")
        assert result.returncode == 0, result.stderr
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert summary["num_processes"] == (1 if name == "one" else 2)
        assert len(read_events(tmp_path / name, "eval")) == 3
        for event, key in (("train", "loss"), ("train", "grad_norm"), ("eval", "loss")):
            found, expected = ([e[key] for e in read_events(tmp_path / n, event)] for n in (name, "one"))
            assert found == pytest.approx(expected, abs=1e-5), (name, key)


def test_processes_that_do_not_find_each_other(tmp_path, dataset_dir):
    """accelerate 1.15 makes one process of two for a CPU config; that is an error with the command that works."""
    result = launch(["--dataset_dir", dataset_dir, *TINY], cwd=tmp_path, WORLD_SIZE="2", ACCELERATE_USE_CPU="true")
    assert result.returncode != 0
    assert "error: the launcher started 2 processes but Accelerate sees 1" in result.stderr


def script(name, *arguments, cwd):
    command = [sys.executable, str(ROOT / "scripts" / f"{name}.py"), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)


def test_own_text_from_the_scripts_and_from_the_run(tmp_path):
    """train_tokenizer -> prepare_data -> train -> generate; and train.py given the text prepares the same rows."""
    (tmp_path / "a.txt").write_text("\n".join(make_documents(400)), encoding="utf-8")
    result = script(
        "train_tokenizer", "--train_file", "a.txt", "--vocab_size", "400", "--output_dir", "tok", cwd=tmp_path
    )
    assert result.returncode == 0 and "trained a byte-level BPE of 400 tokens\n" in result.stdout, result.stderr
    result = script(
        "prepare_data",
        "--train_file",
        "a.txt",
        "--tokenizer_name",
        "tok",
        "--block_size",
        "32",
        "--output_dir",
        "packed",
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    command = result.stdout.splitlines()[-1].partition("recipe/train.py ")[2].split()
    small = [*TINY, "--max_steps", "3", "--global_batch_size", "4"]
    result = launch([*command, *small, "--output_dir", "run"], cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    result = launch(
        ["--train_file", "a.txt", "--tokenizer_name", "tok", *small, "--output_dir", "direct"], cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    run, direct = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("run", "direct"))
    assert run["dataset_content_sha256"] == direct["dataset_content_sha256"]
    result = script(
        "generate_text",
        "--model",
        "run",
        "--prompt",
        "the cat",
        "--num_samples",
        "2",
        "--max_new_tokens",
        "9",
        cwd=tmp_path,
    )
    assert result.returncode == 0 and result.stdout.count("the cat") >= 2, result.stderr


def test_a_tokenizer_smaller_than_asked_for(tmp_path):
    """A small text gives fewer tokens than --vocab_size; the script says how many and saves them."""
    (tmp_path / "a.txt").write_text("".join(make_documents(20)), encoding="utf-8")
    result = script("train_tokenizer", "--train_file", "a.txt", "--output_dir", "tok", cwd=tmp_path)
    vocab_size = len(AutoTokenizer.from_pretrained(tmp_path / "tok"))
    assert result.returncode == 0 and 257 < vocab_size < 1000, result.stderr
    assert f"BPE of {vocab_size:,} tokens (the text is too small for the requested 50,257)" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("prepare_data --train_file gone.txt --tokenizer_name t --output_dir d", "there is no file gone.txt"),
        ("prepare_data --tokenizer_name t --output_dir d", "pass exactly one of --train_file and --dataset_name"),
        ("train_tokenizer --train_file gone.txt --output_dir d", "there is no file gone.txt"),
        ("train_tokenizer --train_file empty.txt --output_dir d", "there is no text in empty.txt"),
        ("generate_text --model gone", "cannot load a model"),
    ],
)
def test_a_mistake_is_one_line_and_a_non_zero_exit(tmp_path, arguments, expected):
    """No traceback for a user's mistake."""
    (tmp_path / "empty.txt").touch()
    result = script(*arguments.split(), cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1].startswith("error: ") and expected in result.stderr
    assert "Traceback" not in result.stderr


def test_a_mistake_in_the_run_is_found_before_anything_is_written(tmp_path):
    """One line from the program and a non-zero exit (the launcher adds a traceback of its own)."""
    command = [sys.executable, str(ROOT / "recipe" / "train.py"), "--train_file", "gone.txt"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 1 and result.stderr.strip() == "error: there is no file gone.txt"
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_killed_again_and_again(tmp_path):
    """A short soak: the weights and losses of a run killed with SIGKILL are those of one that went through."""
    result = script("benchmarks/soak", "--kills", "2", "--seed", "1", "--output_file", "soak.json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    results = json.loads((tmp_path / "soak.json").read_text())
    assert results["identical"] and results["kills"] == 2 and not results["differences"]


# The process group gives up after 3 s, as NCCL's watchdog does after 600; the main process is busy for 8.
SLOW_MAIN_PROCESS = """
import datetime, sys, time
import torch.distributed as dist
real = dist.init_process_group
dist.init_process_group = lambda *args, **kwargs: real(*args, **{**kwargs, "timeout": datetime.timedelta(seconds=3)})
from recipe.hardware.accelerator import on_main_process, start_processes
start_processes()
assert on_main_process(lambda: time.sleep(8) or "prepared") == "prepared"
dist.destroy_process_group()
"""


def test_waiting_for_the_main_process_has_no_time_limit(tmp_path):
    """Preparing text and slow saves may take longer than a collective may: the others wait on the hosts."""
    (tmp_path / "slow.py").write_text(SLOW_MAIN_PROCESS)
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "slow.py"],
        cwd=tmp_path,
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]


def test_two_processes_repeat_the_error_at_the_end(tmp_path):
    """torchrun's report of 40 lines ends with our sentence."""
    result = launch(["--max_step", "3"], cwd=tmp_path, launcher=TWO_PROCESSES, ACCELERATE_USE_CPU="true")
    assert result.returncode != 0
    last = [line for line in result.stderr.splitlines() if line.strip("=- ")][-1]
    assert "error: unknown option --max_step; did you mean --max_steps?" in last


def test_the_resume_command_keeps_the_launchers_options(tmp_path):
    """The closing words of a run name the launcher as it was called."""
    config_file = str(ROOT / "accelerate_configs" / "cpu.yaml")
    result = launch(
        ["--max_steps", "2", "--config_overrides", "n_layer=1,n_head=1,n_embd=16", "--save_steps", "2"],
        cwd=tmp_path,
        launcher=("--config_file", config_file, "--num_processes", "1"),
    )
    assert result.returncode == 0, result.stderr
    printed = " ".join(result.stdout.replace("\\\n", " ").split())
    assert (
        f"accelerate launch --config_file {config_file} --num_processes 1 {ROOT / 'recipe' / 'train.py'} "
        "--resume_from_checkpoint auto --config runs/demo/training_config.yaml" in printed
    )


def test_an_interrupted_start_does_not_promise_a_checkpoint(tmp_path):
    """Ctrl-C before the first checkpoint: what the message advises starts the run again."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "recipe" / "train.py"), "--output_dir", "run", "--max_eval_samples", "all"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (tmp_path / "run" / "training_config.yaml").is_file():  # the first evaluation comes next
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "continues from its last checkpoint, if it has saved one, and starts again otherwise" in err
    assert not list((tmp_path / "run").glob("checkpoint-*"))
