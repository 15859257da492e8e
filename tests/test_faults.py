"""Faults do not lose a run: damaged checkpoints, full disks, bad numbers, no memory, signals, locks, secrets."""

import contextlib
import fcntl
import json
import math
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from conftest import BLOCK_SIZE, PLAIN, ROOT, TINY, launch, read_events

import recipe.checkpoint.save
import recipe.publish.export
import recipe.train
from recipe.checkpoint.load import find_checkpoint, list_checkpoints
from recipe.checkpoint.manifest import seal_checkpoint, why_damaged
from recipe.checkpoint.save import CheckpointSaver
from recipe.command_line import load_config
from recipe.errors import UserError, run_main
from recipe.evaluation.validation import Validation
from recipe.hardware import processes
from recipe.hardware.micro_batch import smaller_micro_batch
from recipe.model.loss import LanguageModelingLoss
from recipe.optim.guard import MOST_BAD_STEPS, GuardedUpdate
from recipe.run.log import RunReport
from recipe.run.output_dir import choose_output_dir, lock_output_dir, release_output_dir
from recipe.run.stop import EXIT_STOPPED, SIGNALS

TRAIN = str(ROOT / "recipe" / "train.py")
TWO_PROCESSES = ("--multi_gpu", "--num_processes", "2", "--main_process_port", "0")  # any free port
CHECKPOINT_FILES = ["config.json", "generation_config.json", "model.safetensors", "optimizer.pt", "rng.pt",
                    "tokenizer.json", "tokenizer_config.json", "training_state.json"]  # fmt: skip
MACHINE_NUMBERS = ("tokens_per_second", "mfu", "peak_memory_bytes", "share_outside_training", "seconds")
MACHINE_NUMBERS += ("train_seconds", "share_waiting_for_data")
AUTO = ["--resume_from_checkpoint", "auto"]


@pytest.fixture(autouse=True)
def no_ignored_signals():
    """In the background or under nohup, pytest inherits ignored signals; the runs must not."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    for number in [number for number, handler in handlers.items() if handler == signal.SIG_IGN]:
        signal.signal(number, signal.default_int_handler)
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def two_checkpoints(train_shared):
    """The folder of a run of four steps, with checkpoint-2 and checkpoint-4."""
    return train_shared("--save_steps", 2)


@pytest.fixture
def run_dir(tmp_path, two_checkpoints):
    return Path(shutil.copytree(two_checkpoints, tmp_path / "run"))


# ------------------------------------------------------------------ damaged checkpoints


def test_a_manifest_covers_the_whole_checkpoint(run_dir):
    """The manifest lists every file, and holds step, versions and the run's identity. Others may read the files."""
    checkpoint = run_dir / "checkpoint-4"
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    assert sorted([*manifest["files"], "manifest.json"]) == sorted(p.name for p in checkpoint.iterdir())
    assert set(CHECKPOINT_FILES) <= set(manifest["files"]) and manifest["step"] == 4
    assert manifest["environment"]["torch"] == torch.__version__
    assert manifest["identity"]["learning_rate"] == 0.003 and len(manifest["identity"]["dataset"]) == 64
    assert why_damaged(checkpoint) is None and find_checkpoint(run_dir, "auto") == checkpoint
    readable = [path for folder in (checkpoint, run_dir) for path in folder.iterdir() if path.is_file()]
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in readable)


@pytest.mark.parametrize("name", [*CHECKPOINT_FILES, "manifest.json"])
def test_an_older_checkpoint_replaces_a_damaged_one(run_dir, capsys, name):
    """A truncated, changed, empty or missing file is found; the message names the file."""
    path = run_dir / "checkpoint-4" / name
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    for damaged in (content[:-2], bytes(flipped), b"", None):
        path.unlink() if damaged is None else path.write_bytes(damaged)
        for requested in ("auto", "latest", str(run_dir)):
            assert find_checkpoint(run_dir, requested) == run_dir / "checkpoint-2"
            assert f"skipping {run_dir}/checkpoint-4: {name} " in capsys.readouterr().out
        with pytest.raises(UserError, match=f"no valid checkpoint .*checkpoint-4: {name} "):
            find_checkpoint(run_dir, str(run_dir / "checkpoint-4"))


def test_a_run_without_valid_checkpoints_does_not_start_over(train, run_dir):
    """It fails with the reason for each checkpoint and changes no file."""
    for checkpoint in list_checkpoints(run_dir):
        (checkpoint / "optimizer.pt").write_bytes(b"junk")
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    for requested in ("auto", "latest"):
        with pytest.raises(UserError, match=r"checkpoint-4: optimizer.pt has 4 bytes.*checkpoint-2.*--overwrite"):
            train("--resume_from_checkpoint", requested)
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["optimizer.pt", "rng.pt", "training_state.json", "model.safetensors"])
def test_a_valid_manifest_with_unknown_content_is_refused(train, run_dir, name):
    """A checkpoint of another version, say, is refused in one sentence."""
    (run_dir / "checkpoint-4" / name).write_bytes(b'{"step": 4}')
    (run_dir / "checkpoint-4" / "manifest.json").unlink()
    seal_checkpoint(run_dir / "checkpoint-4", {"step": 4})
    with pytest.raises(UserError, match=r"checkpoint-4 is damaged \(.*resume from another checkpoint"):
        train("--resume_from_checkpoint", "latest")


def test_resuming_from_the_older_checkpoint_repeats_the_run(train, run_dir, two_checkpoints):
    """The run writes the damaged newer checkpoint and the final model again, bit for bit."""
    (run_dir / "checkpoint-4" / "model.safetensors").write_bytes(b"")
    (run_dir / "checkpoint-4" / "rng.pt").unlink()
    train("--save_steps", 2, *AUTO)
    for name in ("checkpoint-4/model.safetensors", "checkpoint-4/rng.pt", "model.safetensors"):
        assert (run_dir / name).read_bytes() == (two_checkpoints / name).read_bytes(), name


def test_auto_never_replaces_a_finished_run(train, tmp_path, capsys):
    """`auto` starts a run in a new folder and after a death before the first checkpoint; otherwise it refuses."""
    run = train("--max_steps", 1, *AUTO)
    assert "no checkpoint in" in capsys.readouterr().out
    with pytest.raises(UserError, match="contains another run"):
        train(*AUTO)
    (run / "summary.json").unlink()
    with pytest.raises(UserError, match="contains another run"):  # the model could be anyone's
        train(*AUTO)
    (run / "model.safetensors").unlink()
    train("--max_steps", 1, *AUTO)
    assert [event["step"] for event in read_events(run, "train")] == [1]  # the log of the first try is gone
    downloaded = tmp_path / "downloaded"
    downloaded.mkdir()
    for name in ("README.md", "config.json"):
        shutil.copy(run / name, downloaded)
    with pytest.raises(UserError, match="contains files that a run would replace"):
        train(*AUTO, output_dir=downloaded)
    with pytest.raises(UserError, match="auto (needs|requires) .*--output_dir"):
        load_config(AUTO)


def test_a_kill_during_a_save_leaves_nothing_that_counts(train, run_dir):
    """A partial checkpoint and a torn log line are ignored, and the next process removes them."""
    shutil.copytree(run_dir / "checkpoint-4", run_dir / ".checkpoint-4.partial")
    (run_dir / ".checkpoint-4.partial" / "optimizer.pt").write_bytes(b"half")
    shutil.rmtree(run_dir / "checkpoint-4")
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write('{"event": "train", "step": 4, "lo{"event": "train", "step": 9}\n{"event"')
    assert find_checkpoint(run_dir, "auto").name == "checkpoint-2"
    train(*AUTO)
    assert not list(run_dir.glob(".checkpoint*"))
    assert [event["step"] for event in read_events(run_dir, "train")] == [1, 2, 3, 4]


# ------------------------------------------------------------------ failing to save


def fill_the_disk(monkeypatch, limits: dict[int, int], after_failure=lambda: None):
    """Let no file exceed a number of bytes while a checkpoint is written. limits: {step: bytes}."""
    write = CheckpointSaver._write

    def limited(self, final, config, content, *args):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if content["step"] in limits:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limits[content["step"]], before[1]))
        try:
            return write(self, final, config, content, *args)
        except BaseException:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            after_failure()
            raise
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    monkeypatch.setattr(CheckpointSaver, "_write", limited)


def test_training_continues_after_a_full_disk(train, monkeypatch, tmp_path, capsys):
    """Whichever file does not fit, the previous checkpoint stays, nothing partial stays, and the next one is saved."""
    run, kept = tmp_path / "run", []
    fill_the_disk(monkeypatch, {4: 10, 6: 2_000, 8: 200_000}, lambda: kept.append([p.name for p in run.glob("*-*")]))
    train("--max_steps", 10, "--save_steps", 2, "--save_total_limit", 1)
    assert kept == [["checkpoint-2"]] * 3
    out = capsys.readouterr().out
    assert all(f"warning: checkpoint-{step} could not be written: " in out for step in (4, 6, 8))
    assert [p.name for p in list_checkpoints(run)] == ["checkpoint-10"]
    assert not list(run.glob(".checkpoint*")) and why_damaged(run / "checkpoint-10") is None


def test_a_late_warning_names_the_failed_checkpoint(train, monkeypatch, capsys):
    """If steps are faster than the disk, the run notices the failure when the next checkpoint is due."""
    fill_the_disk(monkeypatch, {4: 2_000})
    monkeypatch.setattr(CheckpointSaver, "report", lambda self: None)
    output_dir = train("--max_steps", 6, "--save_steps", 2)
    assert "warning: checkpoint-4 could not be written: " in capsys.readouterr().out
    assert [p.name for p in list_checkpoints(output_dir)] == ["checkpoint-2", "checkpoint-6"]


def test_a_full_disk_anywhere_is_one_sentence():
    """Other errors of the system are bugs, so they keep their traceback."""
    with pytest.raises(SystemExit, match="^error: No space left on device$"):
        run_main(lambda: Path("/dev/full").write_text("x"))
    with pytest.raises(FileNotFoundError):
        run_main(lambda: Path("/nowhere").read_text())


def test_a_full_disk_leaves_no_empty_summary(tmp_path):
    """A run that resumes at its end writes the summary only if there is none."""
    (tmp_path / ".summary.json.new").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        report = types.SimpleNamespace(output_dir=tmp_path, has_trained=True)
        RunReport.summary(report, {"step": 1, "eval_loss": 5.0})
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.parametrize(
    ("word", "is_launcher"),
    [("/bin/accelerate", True), ("torch.distributed.run", True), ("/home/me/accelerate_runs/go.sh", False)],
)
def test_who_is_a_launcher(monkeypatch, word, is_launcher):
    """A run dies with its launcher, but not with a shell script whose path only looks like one."""
    library = mock.Mock()
    monkeypatch.setattr(processes.ctypes, "CDLL", lambda name: library)
    command = [sys.executable, "-c", "print(flush=True); input()", word]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        parent.stdout.readline()  # it runs
        monkeypatch.setattr(processes.os, "getppid", lambda: parent.pid)
        processes.die_with_the_launcher()
        parent.kill()
    assert library.prctl.called is is_launcher


def test_a_run_that_could_not_export_does_so_later(train, run_dir, monkeypatch):
    """A full disk leaves the earlier model unchanged; the next run writes whatever the end of a run lacks."""
    before = (run_dir / "model.safetensors").read_bytes()
    (run_dir / "summary.json").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(recipe.publish.export, "write_model", lambda *_: Path("/dev/full").write_text("x" * 10**6))
        with pytest.raises(UserError, match="final model could not be written to .*No space left .*_checkpoint auto"):
            train(*AUTO)
    assert (run_dir / "model.safetensors").read_bytes() == before and not list(run_dir.glob(".checkpoint*"))
    for name in ("model.safetensors", "README.md"):
        (run_dir / name).unlink()
    train(*AUTO)
    assert json.loads((run_dir / "summary.json").read_text())["step"] == 4 and (run_dir / "README.md").is_file()
    assert (run_dir / "model.safetensors").read_bytes() == before


def test_pruning_ignores_newer_checkpoints(train, run_dir):
    """A damaged checkpoint of a later step does not push out a valid one."""
    shutil.copytree(run_dir / "checkpoint-4", run_dir / "checkpoint-9")
    (run_dir / "checkpoint-9" / "rng.pt").write_bytes(b"x")
    shutil.rmtree(run_dir / "checkpoint-4")
    train("--save_steps", 1, "--save_total_limit", 2, *AUTO)
    assert [p.name for p in list_checkpoints(run_dir)] == ["checkpoint-3", "checkpoint-4", "checkpoint-9"]


def test_a_failed_cleanup_is_only_a_warning(train, monkeypatch, capsys):
    """The checkpoint counts as written even if older ones cannot be removed."""
    monkeypatch.setattr(
        recipe.checkpoint.save, "_remove", lambda path: path.exists() and os.open(path / "gone", os.O_RDONLY)
    )
    output_dir = train("--save_steps", 2, "--save_total_limit", 1)
    assert "warning: checkpoint-4 is complete, but what follows a save failed: FileNotF" in capsys.readouterr().out
    assert why_damaged(output_dir / "checkpoint-4") is None


def test_pruning_waits_for_the_new_checkpoint(train, monkeypatch):
    """With a limit of one, the old checkpoint goes when the new one is sealed, and not before."""
    seen = []

    def sealed(directory, about):
        seen.append(sorted(p.name for p in directory.parent.glob("*checkpoint-*")))
        seal_checkpoint(directory, about)

    monkeypatch.setattr(recipe.checkpoint.save, "seal_checkpoint", sealed)
    train("--max_steps", 3, "--save_steps", 1, "--save_total_limit", 1)
    assert seen == [[".checkpoint-1.partial"], [".checkpoint-2.partial", "checkpoint-1"],
                    [".checkpoint-3.partial", "checkpoint-2"]]  # fmt: skip


def test_training_does_not_wait_for_the_disk(train, monkeypatch, tmp_path):
    """Steps continue while a checkpoint is written, and the checkpoint holds the state of its own step."""
    reference = train("--max_steps", 5, output_dir=tmp_path / "reference")
    write, log, log_step, step_4 = CheckpointSaver._write, [], RunReport.train, threading.Event()

    def slow(self, final, config, content, *args):
        log.append(f"begin {content['step']}")
        assert step_4.wait(60)
        write(self, final, config, content, *args)
        log.append(f"end {content['step']}")

    def train_event(self, step, *args, **values):
        log.append(f"step {step}")
        if step == 4:
            step_4.set()
        log_step(self, step, *args, **values)

    monkeypatch.setattr(CheckpointSaver, "_write", slow)
    monkeypatch.setattr(RunReport, "train", train_event)
    output_dir = train("--max_steps", 5, "--save_steps", 2)
    assert log.index("step 4") < log.index("end 2") < log.index("begin 4")
    weights = (reference / "model.safetensors").read_bytes()
    assert (output_dir / "checkpoint-5" / "model.safetensors").read_bytes() == weights
    assert (output_dir / "checkpoint-4" / "model.safetensors").read_bytes() != weights


def test_a_failing_tracker_does_not_end_a_run(train, monkeypatch, capsys):
    """One warning says so, and metrics.jsonl is complete."""

    def broken(*args, **kwargs):
        raise ConnectionError("no route to host")

    for name in ("log", "init_trackers", "end_training"):
        monkeypatch.setattr(Accelerator, name, broken)
    output_dir = train("--report_to", "tensorboard")
    assert capsys.readouterr().out.count("ConnectionError: no route to host") == 1
    assert len(read_events(output_dir, "train")) == 4


# ------------------------------------------------------------------ bad numbers


def spoil(monkeypatch, values: dict[int, float]):
    """Add a number to the loss of some steps, without changing its gradients. values: {step: NaN or Inf}."""
    spoiled, forward, update, steps = torch.zeros(()), LanguageModelingLoss._loss_sum, GuardedUpdate.step, []

    def count(self, *args):
        update(self, *args)
        steps.append(1)
        spoiled.fill_(values.get(len(steps) + 1, 0.0))

    monkeypatch.setattr(LanguageModelingLoss, "_loss_sum", lambda *args: forward(*args) + spoiled)
    monkeypatch.setattr(GuardedUpdate, "step", count)


@pytest.mark.parametrize("backend", ["no", "inductor"])
def test_a_bad_loss_does_not_change_the_weights(train, monkeypatch, backend):
    """NaN and Inf skip the update, even if the gradients themselves are finite and the graph is compiled."""
    spoil(monkeypatch, {2: math.nan, 3: math.inf, 4: math.nan})
    step, weights = GuardedUpdate.step, []

    def recorded(self, loss, grad_norm):
        step(self, loss, grad_norm)
        weights.append([p.detach().clone() for group in self.optimizer.param_groups for p in group["params"]])

    monkeypatch.setattr(GuardedUpdate, "step", recorded)
    output_dir = train("--max_steps", 6, "--lr_scheduler_type", "constant", "--dynamo_backend", backend)
    changed = [not all(map(torch.equal, a, b)) for a, b in zip(weights, weights[1:], strict=False)]
    assert changed == [False, False, False, True, True]
    events = read_events(output_dir, "train")
    assert [e["loss"] is None for e in events] == [False, True, True, True, False, False]
    assert [e["steps_left_out"] for e in events] == [0, 1, 2, 3, 3, 3]


def test_a_run_stops_if_its_numbers_stay_bad(train, monkeypatch, tmp_path):
    """The message has step, loss, gradient norm and the newest valid checkpoint."""
    spoil(monkeypatch, dict.fromkeys(range(5, 100), math.nan))
    last = 4 + MOST_BAD_STEPS
    bad = rf"step {last}: {MOST_BAD_STEPS} .*\(loss nan, gradient norm nan\)"
    with pytest.raises(UserError, match=rf"{bad}.*checkpoint: .*checkpoint-{(last - 1) // 2 * 2};"):
        train("--max_steps", 50, "--save_steps", 2)
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


# ------------------------------------------------------------------ out of memory


def test_out_of_memory_repeats_the_step_in_smaller_pieces(train, tmp_path, monkeypatch, capsys):
    """Also in the middle of an accumulation, in forward or backward; the losses stay the same."""
    options = ["--max_steps", 5, "--global_batch_size", 8]
    expected = read_events(train(*options, output_dir=tmp_path / "plain"), "train")
    for owner, name in ((LanguageModelingLoss, "forward"), (Accelerator, "backward")):
        original, evaluate, calls, eval_batch_sizes = getattr(owner, name), Validation.run, [], []

        def patched(self, *args, original=original, calls=calls, name=name, **kwargs):
            if name == "backward" or self.training:
                calls.append(1)
                if len(calls) in (1, 7):  # at once; then in the second of two micro-batches of step 3
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
            return original(self, *args, **kwargs)

        def recorded(self, *args, sizes=eval_batch_sizes, evaluate=evaluate, **kwargs):
            sizes.append(self.batch_size)
            return evaluate(self, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, patched)
            patch.setattr(Validation, "run", recorded)
            found = read_events(train(*options, output_dir=tmp_path / name), "train")
        assert eval_batch_sizes == [2048 // BLOCK_SIZE, 2]  # before training and after it
        out, err = capsys.readouterr()
        assert re.findall(r"100%.*\| (\d+/\d+) ", err)[-1] == "5/5"  # repeated steps count once
        assert "out of memory in step 1: continuing with micro-batches of 4" in out
        assert "out of memory in step 3: continuing with micro-batches of 2" in out
        for key in ("loss", "grad_norm"):
            assert [event[key] for event in found] == pytest.approx([event[key] for event in expected], abs=1e-5)


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch"])
def test_out_of_memory_in_the_optimizer_ends_the_run(train, monkeypatch, tmp_path, optim):
    """Part of the update may be done, so the step cannot be repeated; the last checkpoint is valid."""
    step, calls = torch.optim.AdamW.step, []

    def patched(self, *args):
        calls.append(1)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", patched)
    with pytest.raises(UserError, match="out of memory in the optimizer; resume .*auto and a smaller --per_device"):
        train("--max_steps", 6, "--save_steps", 3, "--optim", optim)
    deadline = time.monotonic() + 10  # a process waits for its checkpoint before it ends; this test must do so itself
    while not list_checkpoints(tmp_path / "run") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert find_checkpoint(tmp_path / "run", "auto").name == "checkpoint-3"


def test_out_of_memory_without_auto_names_the_options_to_pass():
    """A fixed micro-batch rules out smaller pieces."""
    config = load_config(["--dataset_dir", "d", "--global_batch_size", "12", "--per_device_train_batch_size", "6"])[0]
    with pytest.raises(UserError, match=r"micro-batches of 6; resume .*--per_device_train_batch_size 4,"):
        smaller_micro_batch(config, [6], 6, 1)
    with pytest.raises(UserError, match="one sequence per forward pass; try --activation_checkpointing"):
        smaller_micro_batch(config, [6, 1], 1, 1)
    assert smaller_micro_batch(config, [12, 6], 12, 1) == 6
    assert smaller_micro_batch(config, [6, 3], 6, 2) == 3


def test_other_errors_in_a_step_end_the_run(train, monkeypatch):
    """Only a lack of memory is a reason to repeat a step."""
    monkeypatch.setattr(Accelerator, "backward", mock.Mock(side_effect=RuntimeError("something else")))
    with pytest.raises(RuntimeError, match="something else"):
        train()


def test_out_of_memory_on_one_process_of_two(train, tmp_path, dataset_dir):
    """Both repeat the step with smaller micro-batches: the losses are those of one process, and no example is lost.

    It happens before, during and after the reduction of gradients is prepared, and when the buckets are rebuilt.
    """
    patch = """
import torch
from recipe.data.batches import TrainBatches
from recipe.model.loss import LanguageModelingLoss
forward, fetch, steps, fetches = LanguageModelingLoss.forward, TrainBatches.__next__, [], []
class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden):
        return hidden.clone()
    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError("CUDA out of memory")
def fails_in_fetch(self):
    fetches.append(1)
    if os.environ["RANK"] == "1" and len(fetches) == 4:  # before the first forward pass of step 2
        raise torch.OutOfMemoryError("CUDA out of memory")
    return fetch(self)
def fails(self, input_ids, targets):
    if not self.training or os.environ["RANK"] == "0":
        return forward(self, input_ids, targets)
    steps.append(len(input_ids))
    if len(steps) == 5:  # 4 rows, the second of four micro-batches of step 2
        raise torch.OutOfMemoryError("CUDA out of memory")
    hook = None
    if len(steps) in (1, 13):  # 16 rows in step 1; 2 rows, the last of eight micro-batches of step 2
        fail = lambda module, inputs: (FailsInBackward.apply(inputs[0]), *inputs[1:])
        hook = self.model.transformer.h[1].register_forward_pre_hook(fail)
    loss = forward(self, input_ids, targets)
    if hook is not None:
        hook.remove()
    return loss
TrainBatches.__next__ = fails_in_fetch
LanguageModelingLoss.forward = fails
"""
    arguments = [*options(dataset_dir, 5), "--global_batch_size", 32]
    process = start(arguments, tmp_path, TWO_PROCESSES, program=patched_program(tmp_path, patch))
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    found = re.findall(r"out of memory in step (\d): continuing with micro-batches of (\d)", output)
    assert found == [("1", "8"), ("2", "4"), ("2", "2"), ("2", "1")], output
    whole = train("--max_steps", 5, "--global_batch_size", 32, output_dir=tmp_path / "whole")
    for key in ("loss", "grad_norm"):
        losses = [[event[key] for event in read_events(path, "train")] for path in (tmp_path / "run", whole)]
        assert losses[0] == pytest.approx(losses[1], abs=1e-5)


# ------------------------------------------------------------------ signals

STEPS = 300  # enough to be signaled in time
DROPOUT = ["--config_overrides", "n_layer=2,n_head=2,n_embd=32,resid_pdrop=0.1"]  # so that random state counts


@pytest.fixture(scope="module")
def uninterrupted(train_shared):
    """The final weights of a run of STEPS steps with dropout."""
    return (train_shared("--max_steps", STEPS, *DROPOUT) / "model.safetensors").read_bytes()


def options(dataset_dir, steps=STEPS):
    return ["--dataset_dir", dataset_dir, *TINY, *PLAIN, "--global_batch_size", "4", "--max_steps", steps,
            "--logging_steps", "1", "--warmup_steps", "2", "--learning_rate", "0.003", "--eval_steps", "0",
            "--save_steps", "0", "--output_dir", "run", "--optim", "auto",
            "--lr_scheduler_type", "linear"]  # fmt: skip


def start(arguments, cwd, launcher=None, program=TRAIN, **environment):
    """Start a training program. launcher: options of `accelerate launch`, or None to start without it."""
    cwd.mkdir(exist_ok=True)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "OMP_"))}
    prefix = [] if launcher is None else ["-m", "accelerate.commands.launch", *launcher]
    return subprocess.Popen(
        [sys.executable, *prefix, str(program), *map(str, arguments)], cwd=cwd, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,  # signals must not reach the tests
        env={**kept, "ACCELERATE_USE_CPU": "true", "OMP_WAIT_POLICY": "passive", **environment},
    )  # fmt: skip


def patched_program(tmp_path, patch):
    """Write a program that changes the recipe and trains."""
    path = tmp_path / "program.py"
    imports = "import os, time\nimport recipe.train\nfrom recipe.errors import run_main"
    path.write_text(f'{imports}\n{patch}\nif __name__ == "__main__":\n    run_main(recipe.train.main)\n')
    return path


def has_reached(cwd, step):
    path = cwd / "run" / "metrics.jsonl"
    return path.is_file() and path.read_text().count('"event": "train"') >= step


def wait_until(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "the run did not start in time"
        time.sleep(0.01)
    return value


def in_order_of_reaching(step, started, folder):
    """Yield the (name, process) pairs whose run in folder/name reaches a step, the fastest first."""
    waiting = dict(started)
    while waiting:
        name = wait_until(lambda: next((name for name in waiting if has_reached(folder / name, step)), None))
        yield name, waiting.pop(name)


def workers_of(process):
    """Return the ids of the training processes that a launcher started."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):  # the process ended
            parent = int(status.read_text().split("PPid:")[1].split()[0])
            if parent == process.pid and b"train.py" in (status.parent / "cmdline").read_bytes():
                found.append(int(status.parent.name))
    return found


def check_stopped(run, output):
    """Assert that the run saved one checkpoint and printed its step and the command that resumes it."""
    (checkpoint,) = list_checkpoints(run)
    step = int(checkpoint.name.partition("-")[2])
    assert 20 <= step < STEPS and why_damaged(checkpoint) is None
    assert f"after step {step}, saved in " in output and f"/checkpoint-{step}; to resume:\n" in output
    command = r"\n(python|accelerate launch) \S*recipe/train.py --resume_from_checkpoint auto --config \S*run/training"
    assert re.search(command, output)
    return step


def signal_this_process_after(last_step, name, monkeypatch):
    """Send a signal to this process after a number of training steps."""
    step, steps = GuardedUpdate.step, []

    def signaled(self, *args):
        step(self, *args)
        steps.append(1)
        if len(steps) == last_step:
            os.kill(os.getpid(), signal.Signals[name])

    monkeypatch.setattr(GuardedUpdate, "step", signaled)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"])
def test_a_signal_saves_the_run_and_ends_it(train, uninterrupted, monkeypatch, capfd, name):
    """The exit code is the documented one, and the same command resumes the run exactly."""
    signal_this_process_after(20, name, monkeypatch)
    with pytest.raises(SystemExit) as stopped:
        train("--max_steps", STEPS, *DROPOUT, *AUTO)
    assert stopped.value.code == EXIT_STOPPED
    printed = capfd.readouterr()
    run = Path(re.search(r"saved in (.*)/checkpoint-20;", printed.out)[1])
    assert check_stopped(run, printed.out) == 20 and f"stopped by {name} after step" in printed.out
    assert "finishing this step" in printed.err and "again to quit" in printed.err
    if name == "SIGTERM":
        train("--max_steps", STEPS, *DROPOUT, *AUTO)
        assert (run / "model.safetensors").read_bytes() == uninterrupted
        assert [event["step"] for event in read_events(run, "train")] == list(range(1, STEPS + 1))


def test_a_stop_leaves_no_trace_in_the_log(train, tmp_path, dataset_dir):
    """A process that is stopped between log lines, and resumed, logs the same means and the same evaluations."""
    periods = [*DROPOUT, "--logging_steps", "7", "--eval_steps", "10"]
    process = start([*options(dataset_dir), *periods], tmp_path)
    wait_until(lambda: has_reached(tmp_path, 9))
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == EXIT_STOPPED, output
    check_stopped(tmp_path / "run", output)
    assert "Traceback" not in output and "stopped by SIGTERM" in output
    assert (tmp_path / "run" / ".lock").read_text() == ""  # a lock that is left over means a kill
    run = train("--max_steps", STEPS, *periods, *AUTO)
    whole = train("--max_steps", STEPS, *periods, output_dir=tmp_path / "whole")
    assert (run / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    for event in ("train", "eval"):
        found, expected = ([{key: value for key, value in line.items() if key not in MACHINE_NUMBERS}
                            for line in read_events(path, event)] for path in (run, whole))  # fmt: skip
        assert found == expected


def test_a_signal_to_the_launcher_saves_the_run(train, tmp_path, dataset_dir, uninterrupted):
    """The trainer is no orphan: whatever ends its launcher, it saves and ends too."""
    names = ["SIGTERM", "SIGKILL", "SIGUSR1"]
    started = {name: start([*options(dataset_dir), *DROPOUT], tmp_path / name, launcher=()) for name in names}
    workers = {}
    for name, process in in_order_of_reaching(20, started, tmp_path):
        (workers[name],) = workers_of(process)
        process.send_signal(signal.Signals[name])
    for name, process in started.items():
        output = process.communicate(timeout=120)[0]  # ends with the trainer's output, not just the launcher's
        status = Path(f"/proc/{workers[name]}/status")
        assert not status.exists() or "zombie" in status.read_text(), name
        check_stopped(tmp_path / name / "run", output)
    run = train("--max_steps", STEPS, *DROPOUT, *AUTO, output_dir=tmp_path / "SIGTERM" / "run")
    assert (run / "model.safetensors").read_bytes() == uninterrupted


def test_a_signal_to_one_of_two_processes_stops_both(train, monkeypatch, tmp_path, dataset_dir):
    """Both stop after the same step. One process resumes the run, then two again, with the same losses."""
    num_steps = 150
    arguments = [*options(dataset_dir, num_steps), *AUTO]
    started = {name: start(arguments, tmp_path / name, TWO_PROCESSES) for name in ("worker", "launcher")}
    for name, process in in_order_of_reaching(20, started, tmp_path):
        os.kill(max(workers_of(process)) if name == "worker" else process.pid, signal.SIGTERM)
    for name, process in started.items():
        output = process.communicate(timeout=120)[0]
        assert output.count("after step") == 1 and "stopped by" in output, output
        assert 'recipe/train.py", line' not in output  # no traceback of ours
        (checkpoint,) = list_checkpoints(tmp_path / name / "run")
        assert why_damaged(checkpoint) is None
        if name == "worker":
            assert f"exitcode  : {EXIT_STOPPED}" in output and "exitcode  : 1 " not in output
    run, first = tmp_path / "worker" / "run", int(list_checkpoints(tmp_path / "worker" / "run")[0].name[11:])
    signal_this_process_after(20, "SIGTERM", monkeypatch)
    with pytest.raises(SystemExit):
        train("--max_steps", num_steps, *AUTO, output_dir=run)  # two processes -> one
    assert (run / f"checkpoint-{first + 20}").is_dir()
    for _ in range(2):  # one -> two; then two with nothing left to train, as after a kill at the very end
        (run / "summary.json").unlink(missing_ok=True)
        two = launch(arguments, tmp_path / "worker", TWO_PROCESSES, ACCELERATE_USE_CPU="true")
        assert two.returncode == 0 and (run / "summary.json").is_file(), two.stderr
    whole = train("--max_steps", num_steps, output_dir=tmp_path / "whole")
    losses = [[event["loss"] for event in read_events(path, "train")] for path in (run, whole)]
    assert len(losses[0]) == num_steps and losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_a_second_signal_exits_at_once(tmp_path, dataset_dir):
    """A second Ctrl-C quits while the checkpoint is written; two within a second count as one."""
    patch = """
from recipe.checkpoint.save import CheckpointSaver
write = CheckpointSaver._write
CheckpointSaver._write = lambda *args: (print("writing", flush=True), time.sleep(60), write(*args))
"""
    process = start(options(dataset_dir), tmp_path, program=patched_program(tmp_path, patch))
    wait_until(lambda: has_reached(tmp_path, 5))
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    while "writing" not in process.stdout.readline():
        assert process.poll() is None
    time.sleep(1.2)
    assert process.poll() is None
    sent_at = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 128 + signal.SIGINT and time.monotonic() - sent_at < 5
    assert find_checkpoint(tmp_path / "run", "auto") is None


def test_a_launcher_that_dies_before_its_worker_is_up(tmp_path, dataset_dir):
    """A worker that is still importing torch when its launcher dies notices it afterwards."""
    process = start(options(dataset_dir), tmp_path, launcher=())
    wait_until(lambda: workers_of(process), 60)
    process.kill()
    output = process.communicate(timeout=60)[0]
    assert "error: the launcher ended before the run began" in output, output
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_nan_on_one_process_of_two(tmp_path, dataset_dir):
    """Neither process takes the step, and later steps are unaffected."""
    patch = """
from recipe.model.loss import LanguageModelingLoss
forward, calls = LanguageModelingLoss._loss_sum, []
def spoiled(self, hidden, targets):
    calls.extend([1] if self.training else [])
    is_bad = self.training and len(calls) == 3 and os.environ["RANK"] == "1"
    return forward(self, hidden, targets) * (float("nan") if is_bad else 1.0)
LanguageModelingLoss._loss_sum = spoiled
"""
    arguments = [*options(dataset_dir, 6), "--lr_scheduler_type", "constant"]
    process = start(arguments, tmp_path, TWO_PROCESSES, program=patched_program(tmp_path, patch))
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    events = read_events(tmp_path / "run", "train")
    assert [e["loss"] is None for e in events] == [False, False, True, False, False, False]
    assert [e["steps_left_out"] for e in events] == [0, 0, 1, 1, 1, 1]
    assert all(math.isfinite(e["grad_norm"]) for e in events if e["step"] != 3)


# ------------------------------------------------------------------ one run per folder


def test_a_folder_in_use(train, tmp_path):
    """The message names the process that uses the folder; nothing in it changes."""
    fork = multiprocessing.get_context("fork")
    locked = fork.Event()

    def hold_the_lock():
        lock_output_dir(tmp_path / "run")
        locked.set()
        time.sleep(60)

    other = fork.Process(target=hold_the_lock, daemon=True)
    other.start()
    assert locked.wait(30)
    (tmp_path / "run" / "checkpoint-4").mkdir()  # that run comes first in the message, not what it has left so far
    with pytest.raises(UserError, match=rf"in use by process {other.pid} on .* \(since 20.*another --output_dir"):
        train()
    other.kill()
    other.join()
    assert {p.name for p in (tmp_path / "run").iterdir()} == {".lock", "checkpoint-4"}


def test_a_stale_lock(tmp_path, capsys):
    """A lock of a process that is gone, on any machine, is reported and taken over."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").write_text('{"host": "node7", "pid": 4321, "started_at": "2026-01-01T00:00:00Z"}')
    lock_output_dir(tmp_path / "run")
    assert "the lock of process 4321 on node7 (since 2026-01-01T00:00:00Z)" in capsys.readouterr().out
    release_output_dir(tmp_path / "run")
    assert (tmp_path / "run" / ".lock").read_text() == ""


def test_a_file_system_without_locks(tmp_path, monkeypatch, capsys):
    """The run only prints a warning."""

    def unsupported(*args):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    lock_output_dir(tmp_path / "run")
    release_output_dir(tmp_path / "run")
    assert "warning: " in (out := capsys.readouterr().out) and "cannot be locked (Operation not supported)" in out


def test_an_output_dir_that_cannot_be_written(tmp_path, monkeypatch):
    """A trial write finds a read-only file system, which file permissions do not show."""

    def read_only(**kwargs):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", read_only)
    with pytest.raises(UserError, match=r"cannot write to output_dir .* \(Read-only file system\)"):
        choose_output_dir(load_config(["--output_dir", str(tmp_path / "run")])[0], "demo")


# ------------------------------------------------------------------ secrets


def test_no_secret_leaves_the_environment(tmp_path, dataset_dir):
    """Tokens appear neither in the files of a run, nor on the screen, nor in the traceback of a crash."""
    canary = "hf_CANARY0123456789abcdefghijklmnopqr"
    secrets = {"HF_TOKEN": canary, "HUGGING_FACE_HUB_TOKEN": canary, "WANDB_API_KEY": canary}
    arguments = [*options(dataset_dir, 4), "--save_steps", "2", "--report_to", "tensorboard"]
    crash = patched_program(tmp_path, "recipe.train.closing_words = None")
    processes = [start(arguments, tmp_path / "good", (), **secrets),
                 start(arguments, tmp_path / "crashed", (), crash, **secrets)]  # fmt: skip
    good, crashed = (process.communicate(timeout=300)[0] for process in processes)
    assert processes[0].returncode == 0, good
    assert "Traceback" in crashed and processes[1].returncode != 0
    assert canary not in good + crashed
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 40 and any("tfevents" in path.name for path in files)
    assert [path for path in files if canary.encode() in path.read_bytes()] == []
