"""The programs as users start them: with `accelerate launch`, from another folder, on one and two processes."""

import json
import os
import re
import subprocess
import sys
import time

import pytest
from conftest import PLAIN, ROOT, TINY, default_arguments, launch, make_documents, read_events, run_script
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe.errors import UserError

TRAIN = ROOT / "recipe" / "train.py"
TWO_PROCESSES = (
    "--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--dynamo_backend", "no", "--mixed_precision", "no",
)  # fmt: skip


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    """The demo, shortened, in an empty folder. Returns the finished process and the folder."""
    folder = tmp_path_factory.mktemp("first")
    return launch(["--max_steps", "60", "--max_eval_samples", "8"], cwd=folder, CUDA_VISIBLE_DEVICES=""), folder


def test_the_first_run_needs_no_arguments(first_run):
    """It prepares a corpus, trains a tokenizer and a model, and prints what to do next."""
    result, folder = first_run
    assert result.returncode == 0, result.stderr
    out, output_dir = result.stdout, folder / "runs" / "demo"
    assert "trained a byte-level BPE" in out and "packed into" in out
    assert "untrained" in out and "perplexity" in out
    assert "loss" in result.stderr and "tok/s" in result.stderr and "100%" in result.stderr  # the progress bar
    closing = out[out.index("\n---\n") :]
    assert [line for line in closing.splitlines() if len(line) > 80] == []
    assert re.search(r"^eval_loss: +\d\.\d{4}$", closing, re.MULTILINE)  # to be grepped
    resume = "--resume_from_checkpoint runs/demo/checkpoint-"  # the last one before the decay
    for part in ("scripts/generate_text.py --model runs/demo", resume, "--train_file TEXT.txt", "GPT-2 124M"):
        assert part in closing
    summary = json.loads((output_dir / "summary.json").read_text())
    assert summary["eval_loss"] < summary["untrained"]["loss"] - 1.3
    model = AutoModelForCausalLM.from_pretrained(output_dir)
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(output_dir))


def test_a_second_run_reuses_the_data_and_repeats_the_launchers_options(first_run):
    """It has its own output folder, and its resume command is the launcher's command line."""
    folder, config_file = first_run[1], str(ROOT / "accelerate_configs" / "cpu.yaml")
    result = launch(
        ["--max_steps", "1", "--max_eval_samples", "8"],
        cwd=folder,
        launcher=("--config_file", config_file, "--num_processes", "1"),
    )
    assert result.returncode == 0, result.stderr
    assert "is already prepared" in result.stdout and "trained a byte-level BPE" not in result.stdout
    assert (folder / "runs" / "demo-2" / "summary.json").is_file()
    printed = " ".join(result.stdout.replace("\\\n", " ").split())
    assert (
        f"accelerate launch --config_file {config_file} --num_processes 1 {TRAIN} "
        "--resume_from_checkpoint runs/demo-2/checkpoint-1 --config runs/demo-2/training_config.yaml" in printed
    )


# Trains several times in the same two processes: importing torch takes longer than a tiny run. All runs use one
# process group, because a second one in the same store may hang (torch 2.13). Gradients are reduced in several
# buckets, as those of a large model are: DistributedDataParallel splits compiled graphs between them.
RUNS_IN_TWO_PROCESSES = """
import sys
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.nn.parallel import DistributedDataParallel
import recipe.train

init = DistributedDataParallel.__init__
DistributedDataParallel.__init__ = lambda self, *args, **kwargs: init(self, *args, **kwargs, bucket_cap_mb=0.02)
torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = 4096
PartialState.destroy_process_group = lambda self, group=None: None
runs, *arguments = sys.argv[1:]
for name in runs.split(","):
    backend, _, saves_memory = name.partition("+")
    options = ["--activation_checkpointing", "--loss_chunks", "2"] if saves_memory else []
    sys.argv[1:] = [*arguments, "--dynamo_backend", backend, *options, "--output_dir", name]
    recipe.train.main()
    AcceleratorState._reset_state()
    GradientState._reset_state()
    torch.compiler.reset()
"""


@pytest.mark.parametrize(
    "runs", ["no,aot_eager,aot_eager+", pytest.param("inductor,inductor+", marks=pytest.mark.slow)]
)
def test_two_processes_are_one_run(train, tmp_path, dataset_dir, runs):
    """Compiled or not, with recomputation (+) or without, two have the losses and gradient norms of one, but for
    rounding."""
    options = ["--max_steps", "6", "--eval_steps", "3", "--global_batch_size", "8"]
    options += ["--per_device_train_batch_size", "2"]
    one = train(*options, output_dir=tmp_path / "one")
    (tmp_path / "program.py").write_text(RUNS_IN_TWO_PROCESSES)
    arguments = [runs, *default_arguments(dataset_dir, tmp_path, TINY), *options]
    result = launch(
        arguments,
        cwd=tmp_path,
        launcher=TWO_PROCESSES,
        program=tmp_path / "program.py",
        ACCELERATE_USE_CPU="true",
        OMP_NUM_THREADS="1",
    )
    assert result.returncode == 0, result.stderr
    for name in runs.split(","):
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert (summary["num_processes"], summary["dynamo_backend"]) == (2, name.removesuffix("+"))
        for event, key, count in (("train", "loss", 6), ("train", "grad_norm", 6), ("eval", "loss", 3)):
            found, expected = ([e[key] for e in read_events(run, event)] for run in (tmp_path / name, one))
            assert len(found) == count and found == pytest.approx(expected, abs=1e-5), (name, key)


def test_launched_processes_must_see_each_other(train, monkeypatch):
    """accelerate 1.15 turns two CPU processes into two runs; the error names the command that works."""
    for name, value in {"WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "false"}.items():  # as `accelerate launch` does
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="2 processes but Accelerate sees 1.*accelerate_configs/multi_cpu.yaml"):
        train()


def test_from_own_text_to_a_sample(train, tmp_path, monkeypatch, capsys):
    """The scripts lead from text to a model, and train.py prepares the same rows from the same text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("\n".join(make_documents(400)), encoding="utf-8")
    text = ["--train_file", "a.txt"]
    assert not run_script("scripts/train_tokenizer.py", *text, "--vocab_size", 400, "--output_dir", "tok")
    assert "trained a byte-level BPE of 400 tokens\n" in capsys.readouterr().out
    prepare = [*text, "--tokenizer_name", "tok", "--block_size", 32, "--output_dir", "packed"]
    assert not run_script("scripts/prepare_data.py", *prepare)
    command = capsys.readouterr().out.splitlines()[-1].partition("recipe/train.py ")[2].split()
    small = [*TINY, *PLAIN, "--max_steps", "1", "--global_batch_size", "4"]
    runs = {"run": command, "direct": [*text, "--tokenizer_name", "tok"]}
    for name, arguments in runs.items():
        train(*arguments, *small, "--output_dir", name, output_dir=tmp_path / name, alone=True)
    run, direct = (json.loads((tmp_path / name / "summary.json").read_text()) for name in runs)
    assert run["dataset_content_sha256"] == direct["dataset_content_sha256"]
    capsys.readouterr()
    sample = ["--model", "run", "--prompt", "the cat", "--num_samples", 2, "--max_new_tokens", 9]
    assert not run_script("scripts/generate_text.py", *sample)
    assert capsys.readouterr().out.count("the cat") >= 2


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
def test_scripts_report_mistakes_in_one_line(tmp_path, monkeypatch, arguments, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    name, *options = arguments.split()
    error = run_script(f"scripts/{name}.py", *options)
    assert error.startswith("error: ") and expected in error and "\n" not in error


@pytest.mark.parametrize("program", ["recipe/train.py", "scripts/prepare_data.py --tokenizer_name t --output_dir d"])
def test_a_mistake_is_found_before_anything_is_prepared(tmp_path, program):
    """One line without a traceback, and exit status 1 (the launcher adds its own traceback)."""
    path, *options = program.split()
    command = [sys.executable, str(ROOT / path), *options, "--train_file", "gone.txt"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 1 and result.stderr.strip() == "error: there is no file gone.txt"
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] in ([], [".lock"])


def test_a_killed_run_resumes_to_the_same_model(train, tmp_path, dataset_dir):
    """After a SIGKILL, the same command ends with the weights and losses of an uninterrupted run, bit for bit."""
    options = ["--config_overrides", "n_layer=2,n_head=2,n_embd=32,resid_pdrop=0.1", "--max_steps", "150",
               "--save_steps", "25", "--save_total_limit", "2", "--resume_from_checkpoint", "auto"]  # fmt: skip
    through, killed = (tmp_path / name for name in ("through", "killed"))
    train(*options, output_dir=through)
    command = [sys.executable, TRAIN, *default_arguments(dataset_dir, killed, TINY), *options]
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (killed / "checkpoint-25").is_dir():
        assert process.poll() is None, "the run ended before it was killed"
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert not (killed / "summary.json").exists()
    train(*options, output_dir=killed)
    assert (killed / "model.safetensors").read_bytes() == (through / "model.safetensors").read_bytes()
    logs = [[(e["step"], e["loss"], e["grad_norm"]) for e in read_events(run, "train")] for run in (through, killed)]
    assert logs[0] == logs[1] and len(logs[0]) == 150


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_with_the_same_model(tmp_path):
    """The soak program kills a run at random moments and compares its end with that of an uninterrupted run."""
    (program,) = (ROOT / "scripts").rglob("soak.py")
    command = [sys.executable, str(program), "--kills", "2", "--seed", "1", "--output_file", "soak.json"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False)
    assert result.returncode == 0, result.stderr
    results = json.loads((tmp_path / "soak.json").read_text())
    assert results["kills"] == 2 and not results["differences"]


# The process group gives up after 3 s, as NCCL's watchdog does after 600; the main process is busy for 5.
SLOW_MAIN_PROCESS = """
import datetime, time
import torch.distributed as dist
real = dist.init_process_group
dist.init_process_group = lambda *args, **kwargs: real(*args, **{**kwargs, "timeout": datetime.timedelta(seconds=3)})
from recipe.hardware.processes import on_main_process, start_processes
start_processes()
assert on_main_process(lambda: time.sleep(5) or "prepared") == "prepared"
dist.destroy_process_group()
"""


def test_waiting_for_the_main_process_has_no_time_limit(tmp_path):
    """Text preparation and slow saves may take longer than a collective allows, so the others wait on the host."""
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


# Every process meets the same mistake, but process {late} meets it two seconds after the other.
MISTAKEN = """
import os, time
from recipe.errors import UserError, run_main
def main():
    time.sleep(2 * (os.environ["RANK"] == "{late}"))
    raise UserError("the mistake")
run_main(main)
"""


@pytest.mark.parametrize("late", [0, 1])
def test_the_launchers_report_ends_with_our_error(tmp_path, late):
    """torchrun prints 40 lines and ends with our sentence, whichever process failed first: it kills the other."""
    program = tmp_path / "mistaken.py"
    program.write_text(MISTAKEN.format(late=late))
    result = launch([], cwd=tmp_path, launcher=TWO_PROCESSES, program=program, ACCELERATE_USE_CPU="true")
    assert result.returncode != 0
    last = [line for line in result.stderr.splitlines() if line.strip("=- ")][-1]
    assert "error: the mistake" in last


# A Ctrl-C before the loop.
INTERRUPTED = """
import os, runpy, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits that it is ignored
from recipe.evaluation.validation import Validation
Validation.__init__ = lambda *args: os.kill(os.getpid(), signal.SIGINT) or time.sleep(60)
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def test_an_interrupted_start_does_not_promise_a_checkpoint(tmp_path, dataset_dir):
    """Ctrl-C before the first step prints how to start again, and exits with 130."""
    arguments = [TRAIN, *default_arguments(dataset_dir, tmp_path / "run", TINY)]
    command = [sys.executable, "-c", INTERRUPTED, *map(str, arguments)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 130, result.stderr
    assert "--resume_from_checkpoint auto" in result.stderr and "starts fresh" in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.glob("run/checkpoint-*"))
