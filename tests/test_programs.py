"""The programs as users start them: with `accelerate launch`, from another folder, on one and two processes."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
from conftest import (
    CPU_ONLY,
    PLAIN,
    ROOT,
    TINY,
    default_arguments,
    launch,
    make_documents,
    read_events,
    run_script,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe.errors import UserError
from recipe.evaluation.validation import Validation

TRAIN = ROOT / "recipe" / "train.py"
TWO_PROCESSES = (
    "--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--dynamo_backend", "no", "--mixed_precision", "no",
)  # fmt: skip


# ------------------------------------------------------------------ the first commands


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    """The demo, shortened, in an empty folder. Returns the finished process and the folder."""
    folder = tmp_path_factory.mktemp("first")
    return launch(["--max_steps", "20", "--max_eval_samples", "8"], cwd=folder, CUDA_VISIBLE_DEVICES=""), folder


def test_the_first_run_needs_no_arguments(first_run):
    """It prepares a corpus, trains a tokenizer and a model, and prints what to do next."""
    result, folder = first_run
    assert result.returncode == 0, result.stderr
    out, output_dir = result.stdout, folder / "runs" / "demo"
    assert "trained a byte-level BPE" in out and "packed into" in out
    assert "initial_loss" in out and "perplexity" in out
    assert "loss" in result.stderr and "tok/s" in result.stderr and "20/20" in result.stderr  # the progress bar
    closing = out[out.index("\n---\n") :]
    assert [line for line in closing.splitlines() if len(line) > 80] == []
    assert re.search(r"^eval_loss: +\d\.\d{4}$", closing, re.MULTILINE)  # to be grepped
    resume = "--resume_from_checkpoint runs/demo/checkpoint-"  # the last one before the decay
    for part in ("scripts/generate_text.py --model runs/demo", resume, "--train_file TEXT.txt", "GPT-2 124M"):
        assert part in closing
    summary = json.loads((output_dir / "summary.json").read_text())
    assert summary["eval_loss"] < summary["initial"]["loss"] - 1.3
    model = AutoModelForCausalLM.from_pretrained(output_dir)
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(output_dir))


def test_a_second_run_reuses_the_data_in_a_folder_of_its_own(train, first_run, monkeypatch, capsys):
    folder = first_run[1]
    monkeypatch.chdir(folder)
    train("--max_steps", "1", "--max_eval_samples", "8", output_dir=folder / "runs" / "demo-2", alone=True)
    printed = capsys.readouterr().out
    assert "is already prepared" in printed and "trained a byte-level BPE" not in printed
    assert (folder / "runs" / "demo-2" / "summary.json").is_file()


def test_from_own_text_to_a_sample(train, tmp_path, monkeypatch, capsys):
    """The scripts lead from text to a model, and train.py prepares the same rows from the same text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("\n".join(make_documents(400)), encoding="utf-8")
    text = ["--train_file", "a.txt"]
    assert not run_script("scripts/train_tokenizer.py", *text, "--vocab_size", 400, "--output_dir", "tok")
    assert "trained a byte-level BPE of 400 tokens\n" in capsys.readouterr().out
    prepare = [*text, "--tokenizer_name", "tok", "--output_dir", "packed"]
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
    "length",
    [
        ["--max_steps", 4],
        ["--num_train_epochs", 0.03],
        ["--max_minutes", 5],
        ["--num_train_epochs", 0.03, "--max_minutes", 5],
    ],
)
def test_printed_commands_run_as_printed(train, tmp_path, monkeypatch, capsys, dataset_dir, length):
    """Those of a run, in a folder whose name a shell would split, with a prompt that looks like an option."""
    monkeypatch.chdir(tmp_path)
    options = ["--dataset_dir", dataset_dir, "--output_dir", "my [v2] run", "--sample_prompt=-x $HOME", *TINY, *PLAIN]
    options += ["--global_batch_size", 4, "--warmup_steps", 1, "--save_steps", 1, "--max_eval_samples", 4, *length]
    minutes_alone = length[0] == "--max_minutes"  # which end the run after four steps

    def measure_progress(schedule, state):
        return state.step / (4 if minutes_alone else schedule.max_steps)

    with mock.patch("recipe.run.decide.measure_progress", measure_progress):
        train(*options, alone=True)
        printed = capsys.readouterr().out
        (generate,) = re.findall(r"^  generate   python (.*)$", printed, re.MULTILINE)
        assert not run_script(*shlex.split(generate), "--max_new_tokens", 4)
        assert capsys.readouterr().out.startswith("-x $HOME")
        longer = re.search(r"^  longer     repeat your command with\n +(.*) \\\n +(.*)$", printed, re.MULTILINE)
        names = {text for text in shlex.split(longer[2]) if text.startswith("--")}
        assert names - {"--output_dir"} == {text for text in length if str(text).startswith("--")}
        train(*options, *shlex.split(f"{longer[1]} {longer[2]}"), alone=True)
        summaries = sorted(Path().glob("my*/summary.json"), key=os.path.getmtime)
        before, after = (json.loads(path.read_text()) for path in summaries)
        times = 1 if minutes_alone else 2
        assert abs(after["step"] - times * before["step"]) <= 1  # epochs end with a part of a step
        with pytest.raises(UserError, match="contains another run") as refused:
            train(*options, alone=True)
        (resume,) = re.findall(r"resume it \((.*?auto)\)", str(refused.value))
        train(*shlex.split(resume), alone=True)
    assert [e["step"] for e in read_events(Path("my [v2] run"), "end")] == [before["step"]]


def test_the_printed_way_to_resume_resumes(train, tmp_path, monkeypatch, capsys, dataset_dir):
    """The command that a signal stopped, with the options that it printed."""
    monkeypatch.chdir(tmp_path)
    options = ["--dataset_dir", dataset_dir, *TINY, *PLAIN, "--global_batch_size", 4, "--warmup_steps", 1]
    options += ["--run_name", "my run", "--max_eval_samples", 4, "--max_steps", 6, "--logging_steps", 1]

    def stop_after_two(_, state):
        if state.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return state.step / 6

    with mock.patch("recipe.run.decide.measure_progress", stop_after_two), pytest.raises(SystemExit):
        train(*options, alone=True)
    resume = capsys.readouterr().out.partition("repeat your command with\n")[2].splitlines()[0]
    train(*options, *shlex.split(resume), alone=True)
    assert [e["step"] for e in read_events(Path("runs", "my run"), "train")] == [1, 2, 3, 4, 5, 6]


# What Windows lacks, deleted once Python's own modules, which are others there, are imported.
WITHOUT_POSIX = """
import asyncio, multiprocessing.util, os, runpy, signal, subprocess, sys, tempfile
import torch, transformers, accelerate, datasets, evaluate, matplotlib.pyplot, psutil
for name in ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGKILL", "SIGQUIT", "pthread_sigmask", "setitimer"):
    delattr(signal, name)
for name in ("sysconf", "fork", "getuid", "geteuid", "killpg", "getpgid", "sched_getaffinity"):
    delattr(os, name)
sys.modules.update(dict.fromkeys(("resource", "fcntl", "termios", "grp")))
program = sys.argv.pop(1)
runpy.run_path(program, run_name="__main__")
"""


def test_nothing_of_posix_is_used_before_it_is_looked_for(tmp_path, dataset_dir):
    """A stand-in for Windows, on which nothing has been tried: the command line, and three steps on a CPU."""
    (tmp_path / "without_posix.py").write_text(WITHOUT_POSIX)
    arguments = [*default_arguments(dataset_dir, tmp_path / "run", TINY), "--max_steps", "3", "--save_steps", "2"]
    for options in (["--help"], arguments):
        command = [sys.executable, tmp_path / "without_posix.py", TRAIN, *options]
        result = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
    assert [event["step"] for event in read_events(tmp_path / "run", "train")] == [1, 2, 3]


def test_a_missing_file_is_found_before_anything_is_prepared(train, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="^there is no file gone.txt$"):
        train("--train_file", "gone.txt", "--output_dir", "run", alone=True)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [".lock"]


# ------------------------------------------------------------------ ends


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


@pytest.mark.parametrize("at", ["__init__", "run"])  # before the loop, and in its first evaluation
def test_ctrl_c_before_the_first_step_promises_no_checkpoint(train, tmp_path, dataset_dir, monkeypatch, capsys, at):
    """It exits with 130; the same command starts again, and the log holds no first try."""
    with monkeypatch.context() as patch:
        patch.setattr(Validation, at, mock.Mock(side_effect=KeyboardInterrupt))
        assert run_script("recipe/train.py", *default_arguments(dataset_dir, tmp_path / "run", TINY)) == "130"
    printed = capsys.readouterr().err
    assert printed.endswith("interrupted\n") and "Traceback" not in printed
    assert not list(tmp_path.glob("run/checkpoint-*"))
    assert [e["step"] for e in read_events(train(), "eval")] == [0, 4]


# ------------------------------------------------------------------ two processes

# Everything in the same two processes: importing torch takes longer than a tiny run. All runs use one process group,
# because a second one in the same store may hang (torch 2.13). Gradients are reduced in several buckets, as those of a
# large model are: DistributedDataParallel splits compiled graphs between them.
IN_TWO_PROCESSES = """
import runpy, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from accelerate.state import PartialState
from torch.nn.parallel import DistributedDataParallel
import recipe.train
from recipe.hardware.processes import STEP_WAIT, host_group, on_main_process, start_processes

def limit_collectives(wait):
    for group in (dist.group.WORLD, host_group()):
        dist.distributed_c10d._set_pg_timeout(wait, group)

start_processes()
limit_collectives(timedelta(seconds=1))
time.sleep(2 * (dist.get_rank() == 0))  # the other process waits for its begin, and then for its result
print("waited:", on_main_process(lambda: time.sleep(2) or "prepared"))
limit_collectives(STEP_WAIT)

init = DistributedDataParallel.__init__
DistributedDataParallel.__init__ = lambda self, *args, **kwargs: init(self, *args, **kwargs, bucket_cap_mb=0.02)
torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = 4096
PartialState.destroy_process_group = lambda self, group=None: None
runs, evaluation, *arguments = sys.argv[1:]
for name in runs.split(","):
    backend, _, saves_memory = name.partition("+")
    options = ["--activation_checkpointing", "--loss_chunks", "2"] if saves_memory else []
    sys.argv[1:] = [*arguments, "--dynamo_backend", backend, *options, "--output_dir", name]
    recipe.train.main()
program, *sys.argv[1:] = evaluation.split()
runpy.run_path(program, run_name="__main__")
"""
SHORT = ["--max_steps", "6", "--eval_steps", "3", "--global_batch_size", "8", "--per_device_train_batch_size", "2"]


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory, dataset_dir):
    """The command line of an evaluation of which each process gets some windows, rows and examples."""
    folder = tmp_path_factory.mktemp("evaluation")
    (folder / "a.txt").write_text("".join(make_documents(30)), encoding="utf-8")
    lambada = (ROOT / "tests" / "lambada_sample.jsonl").read_text()
    (folder / "lambada.jsonl").write_text(lambada * 4)  # a process gets 32 at a time
    data = f"--text_file {folder}/a.txt --dataset_dir {dataset_dir} --tasks lambada={folder}/lambada.jsonl"
    return f"{ROOT}/scripts/evaluate_model.py {data} --batch_size 1"


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory, dataset_dir, evaluation):
    """Train with the backends that name the runs, and evaluate the first model. Returns the folder and the output."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "train.py").write_text(IN_TWO_PROCESSES)
    command = f"{evaluation} --model aot_eager --output_file two.json"
    arguments = ["aot_eager,aot_eager+", command, *default_arguments(dataset_dir, folder, TINY), *SHORT]
    environment = {**CPU_ONLY, "OMP_NUM_THREADS": "1"}
    result = launch(arguments, cwd=folder, launcher=TWO_PROCESSES, program=folder / "train.py", **environment)
    assert result.returncode == 0, result.stderr
    return folder, result.stdout


def test_two_processes_are_one_run(train, two_processes, tmp_path):
    """Compiled, with recomputation (+) or without, two have the losses and gradient norms of one, but for rounding.

    tests/test_nodes.py has two processes with inductor.
    """
    one = train(*SHORT, output_dir=tmp_path / "one")
    for run in (two_processes[0] / name for name in ("aot_eager", "aot_eager+")):
        summary = json.loads((run / "summary.json").read_text())
        assert (summary["num_processes"], summary["dynamo_backend"]) == (2, "aot_eager")
        for event, key, count in (("train", "loss", 6), ("train", "grad_norm", 6), ("eval", "loss", 3)):
            found, expected = ([e[key] for e in read_events(path, event)] for path in (run, one))
            assert len(found) == count and found == pytest.approx(expected, abs=1e-5), (run.name, key)


def test_two_processes_divide_an_evaluation(two_processes, evaluation, tmp_path):
    """The scores and counts of texts, rows and tasks are those of one process, and the table is printed once."""
    folder, printed = two_processes
    program, *arguments = evaluation.split()
    arguments += ["--model", folder / "aot_eager", "--output_file", tmp_path / "one.json"]
    assert not run_script(program, *arguments)
    expected, found = (json.loads(path.read_text()) for path in (tmp_path / "one.json", folder / "two.json"))
    assert (expected["num_processes"], found["num_processes"]) == (1, 2)
    pairs = [*zip(expected["texts"], found["texts"], strict=True)]
    pairs.append((expected["tasks"]["lambada"], found["tasks"]["lambada"]))
    for left, right in pairs:
        assert left.keys() == right.keys()
        numbers = {key: value for key, value in left.items() if isinstance(value, (int, float)) and key != "seconds"}
        assert {key: right[key] for key in numbers} == pytest.approx(numbers, rel=1e-5)
    tables = [line for line in printed.splitlines() if "bits/byte" in line and not line.startswith("step")]
    assert len(tables) == 1


def test_waiting_for_the_main_process_has_no_time_limit(two_processes):
    """Text preparation and slow saves may take longer than collectives allow, so the others wait on the host."""
    assert two_processes[1].count("waited: prepared") == 2


def test_launched_processes_must_see_each_other(train, monkeypatch):
    """accelerate 1.15 turns two CPU processes into two runs; the error names the command that works."""
    environment = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in {**environment, "ACCELERATE_USE_CPU": "false"}.items():  # as `accelerate launch` does
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.distributed.init_process_group", lambda **_: None)  # it would wait for the other
    with pytest.raises(UserError, match="2 processes but Accelerate sees 1.*accelerate_configs/multi_cpu.yaml"):
        train()


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
