"""A run that cannot be lost: what happens, fault by fault."""

import fcntl
import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from conftest import BLOCK_SIZE, PLAIN, ROOT, TINY, launch, read_events

import recipe.checkpoint.save
import recipe.model.loss
import recipe.train
from recipe.checkpoint.load import find_checkpoint, list_checkpoints
from recipe.checkpoint.manifest import seal_checkpoint, why_damaged
from recipe.checkpoint.save import CheckpointSaver
from recipe.command_line import load_config
from recipe.errors import UserError
from recipe.hardware.memory import smaller_micro_batch
from recipe.run.output_dir import choose_output_dir, lock_output_dir, release_output_dir
from recipe.run.stop import EXIT_STOPPED

# Of a log line; the others are the run's.
MACHINE_NUMBERS = ("tokens_per_second", "mfu", "peak_memory_bytes", "share_outside_training", "seconds")
TWO_PROCESSES = ("--multi_gpu", "--num_processes", "2")
CHECKPOINT_FILES = ["config.json", "generation_config.json", "model.safetensors", "optimizer.pt", "rng.pt",
                    "tokenizer.json", "tokenizer_config.json", "training_state.json"]  # fmt: skip


# ------------------------------------------------------------------ checkpoints that are damaged


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory, dataset_dir):
    """The folder of a run with checkpoint-2 and checkpoint-4."""
    output_dir = tmp_path_factory.mktemp("run") / "run"
    result = launch([*options(dataset_dir), "--max_steps", "4", "--save_steps", "2", "--output_dir", output_dir], ROOT)
    assert result.returncode == 0, result.stderr
    return output_dir


def options(dataset_dir, steps=4):
    return ["--dataset_dir", dataset_dir, *TINY, *PLAIN, "--global_batch_size", "4", "--max_steps", steps,
            "--logging_steps", "1", "--warmup_steps", "2", "--learning_rate", "0.003", "--eval_steps", "0",
            "--save_steps", "0"]  # fmt: skip


@pytest.fixture
def run_dir(tmp_path, two_checkpoints):
    return Path(shutil.copytree(two_checkpoints, tmp_path / "run"))


def test_a_checkpoint_is_sealed(run_dir):
    """Every file is in the manifest, with step, versions and what the run was; `latest` names the newest."""
    checkpoint = run_dir / "checkpoint-4"
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    assert sorted([*manifest["files"], "manifest.json"]) == sorted(p.name for p in checkpoint.iterdir())
    assert set(CHECKPOINT_FILES) <= set(manifest["files"]) and manifest["step"] == 4
    assert manifest["environment"]["torch"] == torch.__version__
    assert manifest["identity"]["learning_rate"] == 0.003 and len(manifest["identity"]["dataset"]) == 64
    assert (run_dir / "latest").read_text() == "checkpoint-4\n"
    assert why_damaged(checkpoint) is None and find_checkpoint(run_dir, "auto") == checkpoint
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in checkpoint.iterdir())


@pytest.mark.parametrize("fault", ["truncated", "one byte flipped", "missing", "empty"])
@pytest.mark.parametrize("name", [*CHECKPOINT_FILES, "manifest.json"])
def test_a_damaged_file_is_noticed_and_an_older_checkpoint_taken(run_dir, capsys, name, fault):
    """Whatever file it is, the message names it and the reason."""
    path = run_dir / "checkpoint-4" / name
    content = bytearray(path.read_bytes())
    if fault == "truncated":
        path.write_bytes(content[:-2])
    elif fault == "one byte flipped":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif fault == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
    for wish in ("auto", "latest", str(run_dir)):
        assert find_checkpoint(run_dir, wish) == run_dir / "checkpoint-2"
        assert f"passing over {run_dir}/checkpoint-4: {name} " in capsys.readouterr().out
    with pytest.raises(UserError, match=f"no checkpoint to resume from is whole .*checkpoint-4: {name} "):
        find_checkpoint(run_dir, str(run_dir / "checkpoint-4"))


def test_all_checkpoints_damaged(train, run_dir):
    """The run does not start over; nothing is touched."""
    for checkpoint in list_checkpoints(run_dir):
        (checkpoint / "optimizer.pt").write_bytes(b"junk")
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    for wish in ("auto", "latest"):
        with pytest.raises(UserError, match=r"is whole .*checkpoint-4: optimizer.pt has 4 bytes.*checkpoint-2.*anew"):
            train("--resume_from_checkpoint", wish, output_dir=run_dir)
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["optimizer.pt", "rng.pt", "training_state.json", "model.safetensors"])
def test_a_sealed_checkpoint_with_other_content_is_one_sentence(train, run_dir, name):
    """Bytes that verify, of another version of this program perhaps, are refused without a traceback."""
    (run_dir / "checkpoint-4" / name).write_bytes(b'{"step": 4}')
    (run_dir / "checkpoint-4" / "manifest.json").unlink()
    seal_checkpoint(run_dir / "checkpoint-4", {"step": 4})
    with pytest.raises(UserError, match=r"checkpoint-4 is damaged \(.*resume from another checkpoint"):
        train("--resume_from_checkpoint", "latest", output_dir=run_dir)


def test_going_on_from_the_older_one_gives_the_same_run(train, run_dir, two_checkpoints, capsys):
    """The damaged newer checkpoint is written again, bit for bit."""
    (run_dir / "checkpoint-4" / "model.safetensors").write_bytes(b"")
    (run_dir / "checkpoint-4" / "rng.pt").unlink()
    train("--save_steps", "2", "--resume_from_checkpoint", "auto", output_dir=run_dir)
    for name in ("model.safetensors", "rng.pt"):
        expected = (two_checkpoints / "checkpoint-4" / name).read_bytes()
        assert (run_dir / "checkpoint-4" / name).read_bytes() == expected
    assert (run_dir / "model.safetensors").read_bytes() == (two_checkpoints / "model.safetensors").read_bytes()


def test_auto(train, tmp_path, capsys):
    """Nothing there: begins. Died before the first checkpoint: begins again. Finished without any: refused."""
    run = tmp_path / "run"
    train("--resume_from_checkpoint", "auto", output_dir=run)
    assert "no checkpoint in" in capsys.readouterr().out
    with pytest.raises(UserError, match="holds another run"):
        train("--resume_from_checkpoint", "auto", output_dir=run)
    (run / "summary.json").unlink()
    with pytest.raises(UserError, match="holds another run"):  # a model that may be anyone's
        train("--resume_from_checkpoint", "auto", output_dir=run)
    (run / "model.safetensors").unlink()
    train("--resume_from_checkpoint", "auto", output_dir=run)
    assert [event["step"] for event in read_events(run, "train")] == [1, 2, 3, 4]  # not those of the first try too
    downloaded = tmp_path / "downloaded"
    downloaded.mkdir()
    for name in ("README.md", "config.json"):
        shutil.copy(run / name, downloaded)
    with pytest.raises(UserError, match="holds files that a run would replace"):
        train("--resume_from_checkpoint", "auto", output_dir=downloaded)
    with pytest.raises(UserError, match="auto needs the --output_dir"):
        load_config(["--resume_from_checkpoint", "auto"])


def test_what_a_kill_in_the_middle_of_a_save_leaves(train, run_dir):
    """A half-written checkpoint is neither counted nor found, and removed by the next process."""
    shutil.copytree(run_dir / "checkpoint-4", run_dir / ".checkpoint-4.partial")
    (run_dir / ".checkpoint-4.partial" / "optimizer.pt").write_bytes(b"half")
    shutil.rmtree(run_dir / "checkpoint-4")
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write('{"event": "train", "step": 4, "lo{"event": "train", "step": 9}\n{"event"')
    assert find_checkpoint(run_dir, "auto").name == "checkpoint-2"
    train("--resume_from_checkpoint", "auto", output_dir=run_dir)
    assert not list(run_dir.glob(".checkpoint*"))
    assert [event["step"] for event in read_events(run_dir, "train")] == [1, 2, 3, 4]


# ------------------------------------------------------------------ saving that fails


def fail_when_saving(monkeypatch, step, limit_bytes=None):
    """Let files end at `limit_bytes` while that step is saved: what a full disk does."""
    write = CheckpointSaver._write

    def limited(self, final, content, *args):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if content["step"] == step:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limits[1]))
        try:
            write(self, final, content, *args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    monkeypatch.setattr(CheckpointSaver, "_write", limited)


@pytest.mark.parametrize("limit_bytes", [10, 2_000, 200_000])
def test_disk_full_while_saving(train, monkeypatch, capsys, limit_bytes):
    """The checkpoint before stays, nothing half-written stays, training goes on, and the next one is written."""
    fail_when_saving(monkeypatch, 4, limit_bytes)
    output_dir = train("--max_steps", "6", "--save_steps", "2", "--save_total_limit", "1")
    assert "warning: checkpoint-4 not written: " in capsys.readouterr().out
    assert [p.name for p in list_checkpoints(output_dir)] == ["checkpoint-6"]
    assert not list(output_dir.glob(".checkpoint*")) and why_damaged(output_dir / "checkpoint-6") is None


def test_a_failure_noticed_late_names_the_checkpoint_that_failed(train, monkeypatch, capsys):
    """Steps faster than the disk: that it failed is only noticed when the next one is due."""
    fail_when_saving(monkeypatch, 4, 2_000)
    monkeypatch.setattr(CheckpointSaver, "report", lambda self: None)
    output_dir = train("--max_steps", "6", "--save_steps", "2")
    assert "warning: checkpoint-4 not written: " in capsys.readouterr().out
    assert [p.name for p in list_checkpoints(output_dir)] == ["checkpoint-2", "checkpoint-6"]


def test_disk_full_stops_the_run_if_asked_to(train, monkeypatch, tmp_path):
    fail_when_saving(monkeypatch, 4, 2_000)
    with pytest.raises(UserError, match=r"checkpoint-4 not written.*\(--on_save_failure stop\)"):
        train("--max_steps", "9", "--save_steps", "2", "--save_total_limit", "1", "--on_save_failure", "stop")
    assert find_checkpoint(tmp_path / "run", "auto").name == "checkpoint-2"
    assert len(read_events(tmp_path / "run", "train")) < 9  # not only when the next one is due


def test_disk_full_at_the_end(train, monkeypatch, tmp_path):
    """The model of an earlier sitting stays as it is; the same command writes the new one when there is room."""
    output_dir = train("--max_steps", "4", "--save_steps", "2")
    before = (output_dir / "model.safetensors").read_bytes()
    (output_dir / "summary.json").unlink()
    monkeypatch.setattr(recipe.checkpoint.save, "write_model", lambda *args: Path("/dev/full").write_text("x" * 10**6))
    with pytest.raises(
        UserError, match="the final model could not be written to .*No space left on device; when that"
    ):
        train("--max_steps", "4", "--resume_from_checkpoint", "auto", output_dir=output_dir)
    assert (output_dir / "model.safetensors").read_bytes() == before
    monkeypatch.undo()
    assert not list(output_dir.glob(".checkpoint*"))


def test_killed_while_exporting(train, tmp_path):
    """What the end of a run writes is written by the next sitting: model, summary and card."""
    output_dir = train("--max_steps", "4", "--save_steps", "2")
    for name in ("model.safetensors", "summary.json", "README.md"):
        (output_dir / name).unlink()
    train("--max_steps", "4", "--resume_from_checkpoint", "auto", output_dir=output_dir)
    assert json.loads((output_dir / "summary.json").read_text())["step"] == 4
    assert (output_dir / "README.md").is_file() and (output_dir / "model.safetensors").is_file()


def test_pruning_leaves_alone_what_is_newer(train, run_dir):
    """A damaged checkpoint of a later step is not counted instead of a good one."""
    shutil.copytree(run_dir / "checkpoint-4", run_dir / "checkpoint-9")
    (run_dir / "checkpoint-9" / "rng.pt").write_bytes(b"x")
    shutil.rmtree(run_dir / "checkpoint-4")
    train("--save_steps", "1", "--save_total_limit", "2", "--resume_from_checkpoint", "auto", output_dir=run_dir)
    assert [p.name for p in list_checkpoints(run_dir)] == ["checkpoint-3", "checkpoint-4", "checkpoint-9"]


def test_what_fails_after_a_checkpoint_is_written_does_not_unmake_it(train, monkeypatch, capsys):
    monkeypatch.setattr(
        recipe.checkpoint.save, "_remove", lambda path: path.exists() and os.open(path / "gone", os.O_RDONLY)
    )
    output_dir = train("--max_steps", "4", "--save_steps", "2", "--save_total_limit", "1", "--on_save_failure", "stop")
    assert "warning: checkpoint-4 is written, but what comes after it failed: FileNotFoundE" in capsys.readouterr().out
    assert why_damaged(output_dir / "checkpoint-4") is None


def test_pruning_waits_for_the_new_one(train, monkeypatch):
    """With room for one, the old one goes when the new one is sealed, and not before."""
    seen = []

    def sealed(directory, about):
        seen.append(sorted(p.name for p in directory.parent.glob("*checkpoint-*")))
        seal_checkpoint(directory, about)

    monkeypatch.setattr(recipe.checkpoint.save, "seal_checkpoint", sealed)
    train("--max_steps", "3", "--save_steps", "1", "--save_total_limit", "1")
    assert seen == [[".checkpoint-1.partial"], [".checkpoint-2.partial", "checkpoint-1"],
                    [".checkpoint-3.partial", "checkpoint-2"]]  # fmt: skip


def test_saving_does_not_wait_for_the_disk(train, monkeypatch):
    """Steps go on while a checkpoint is written; what is written is the state at its step."""
    write, log = CheckpointSaver._write, []

    def slow(self, final, content, weights, *args):
        log.append(f"begin {content['step']}")
        time.sleep(1)
        write(self, final, content, weights, *args)
        log.append(f"end {content['step']}")

    train_event = recipe.run.log.RunReport.train

    def event(self, step, **values):
        log.append(f"step {step}")
        train_event(self, step, **values)

    monkeypatch.setattr(CheckpointSaver, "_write", slow)
    monkeypatch.setattr(recipe.run.log.RunReport, "train", event)
    output_dir = train("--max_steps", "5", "--save_steps", "2")
    assert log.index("step 4") < log.index("end 2") < log.index("begin 4")
    reference = train("--max_steps", "5", "--save_steps", "0", output_dir=output_dir.parent / "b")
    weights = (reference / "model.safetensors").read_bytes()
    assert (output_dir / "checkpoint-5" / "model.safetensors").read_bytes() == weights
    assert (output_dir / "checkpoint-4" / "model.safetensors").read_bytes() != weights


def test_trackers_and_logs_that_fail_do_not_end_a_run(train, monkeypatch, capsys):
    """Each is said once; what can still be recorded is."""

    def broken(*args, **kwargs):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(Accelerator, "log", broken)
    monkeypatch.setattr(Accelerator, "init_trackers", broken)
    monkeypatch.setattr(Accelerator, "end_training", broken)
    output_dir = train("--report_to", "tensorboard")
    assert (
        capsys.readouterr().out.count("warning: the tracker fails and the run goes on (ConnectionError: no rou") == 1
    )
    assert len(read_events(output_dir, "train")) == 4


# ------------------------------------------------------------------ bad numbers


def spoil(monkeypatch, steps, value):
    """Make the loss of those steps `value`, with gradients that are finite by themselves, in a compiled graph too."""
    spoiled, forward = torch.zeros(()), recipe.model.loss.LanguageModelingLoss._loss_sum
    update, backward, taken = recipe.optim.guard.GuardedUpdate.step, recipe.train.build_batches, []

    def add(self, hidden, targets):
        return forward(self, hidden, targets) + spoiled

    def count(self, *args):
        update(self, *args)
        taken.append(1)
        spoiled.fill_(value if len(taken) + 1 in steps else 0.0)

    def begin(*args):
        spoiled.fill_(value if 1 in steps else 0.0)
        return backward(*args)

    monkeypatch.setattr(recipe.model.loss.LanguageModelingLoss, "_loss_sum", add)
    monkeypatch.setattr(recipe.optim.guard.GuardedUpdate, "step", count)
    monkeypatch.setattr(recipe.train, "build_batches", begin)


@pytest.mark.parametrize("backend", ["no", "inductor"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_leaves_no_trace_in_the_weights(train, monkeypatch, value, backend):
    """Also where its gradients are finite by themselves, and where the graph is compiled."""
    spoil(monkeypatch, {2, 3, 4}, value)
    before = recipe.optim.guard.GuardedUpdate.step
    weights = []

    def recorded(self, loss, grad_norm):
        before(self, loss, grad_norm)
        weights.append([p.detach().clone() for group in self.optimizer.param_groups for p in group["params"]])

    monkeypatch.setattr(recipe.optim.guard.GuardedUpdate, "step", recorded)
    output_dir = train("--max_steps", "6", "--lr_scheduler_type", "constant", "--dynamo_backend", backend)
    changed = [not all(map(torch.equal, a, b)) for a, b in zip(weights, weights[1:], strict=False)]
    assert changed == [False, False, False, True, True]
    events = read_events(output_dir, "train")
    assert [e["loss"] is None for e in events] == [False, True, True, True, False, False]
    assert [e["steps_left_out"] for e in events] == [0, 1, 2, 3, 3, 3]


def test_a_run_stops_whose_numbers_stay_bad(train, monkeypatch, tmp_path):
    """After max_bad_steps in a row; the message has step, loss, gradient norm and the last good checkpoint."""
    spoil(monkeypatch, range(5, 100), math.nan)
    expected = r"step 7: 3 steps in a row .*\(loss nan, gradient norm nan\).*last good checkpoint: .*checkpoint-6;"
    with pytest.raises(UserError, match=expected):
        train("--max_steps", "50", "--max_bad_steps", "3", "--save_steps", "2")
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


PATCHED = """
import sys
sys.path.insert(0, {tests!r})
import os, signal, time
import torch
import recipe.model.loss, recipe.train
from recipe.config import run_main
{patch}
if __name__ == "__main__":
    run_main(recipe.train.main)
"""


def patched_program(tmp_path, patch):
    path = tmp_path / "program.py"
    path.write_text(PATCHED.format(tests=str(ROOT / "tests"), patch=patch))
    return str(path)


def command(program, arguments, launcher=()):
    return [sys.executable, "-m", "accelerate.commands.launch", *launcher, program, *map(str, arguments)]


def environment(**more):
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "OMP_"))}
    return {**kept, "ACCELERATE_USE_CPU": "true", "OMP_WAIT_POLICY": "passive", **more}


def test_a_nan_on_one_process_of_two(tmp_path, dataset_dir):
    """Neither takes the step; both end with the weights of a run that never met it at that step."""
    patch = """
forward, calls = recipe.model.loss.LanguageModelingLoss._loss_sum, []
def spoiled(self, hidden, targets):
    loss = forward(self, hidden, targets)
    if self.training:
        calls.append(1)
        if len(calls) == 3 and os.environ["RANK"] == "1":
            return loss * float("nan")
    return loss
recipe.model.loss.LanguageModelingLoss._loss_sum = spoiled
"""
    arguments = [*options(dataset_dir, 6), "--output_dir", "run", "--lr_scheduler_type", "constant"]
    result = subprocess.run(
        command(patched_program(tmp_path, patch), arguments, TWO_PROCESSES), cwd=tmp_path, env=environment(),
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    events = read_events(tmp_path / "run", "train")
    assert [e["loss"] is None for e in events] == [False, False, True, False, False, False]
    assert [e["steps_left_out"] for e in events] == [0, 0, 1, 1, 1, 1]
    assert all(math.isfinite(e["grad_norm"]) for e in events if e["step"] != 3)


# ------------------------------------------------------------------ out of memory


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_in_the_middle_of_a_run(train, tmp_path, monkeypatch, capsys, where):
    """The step again in smaller micro-batches, also from the middle of an accumulation; the run is the same."""
    options = ["--max_steps", "5", "--global_batch_size", "8"]
    expected = read_events(train(*options, output_dir=tmp_path / "plain"), "train")
    owner = recipe.model.loss.LanguageModelingLoss if where == "forward" else Accelerator
    original, calls = getattr(owner, where), []

    def patched(self, *args, **kwargs):
        if where == "backward" or self.training:
            calls.append(1)
            if len(calls) in (1, 7):  # at once; then in the second of two micro-batches of step 3
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(owner, where, patched)
    eval_batch_sizes, evaluate = [], recipe.train.evaluate_model
    monkeypatch.setattr(
        recipe.train, "evaluate_model", lambda *args: eval_batch_sizes.append(args[-2]) or evaluate(*args)
    )
    found = train(*options, output_dir=tmp_path / "short")
    assert eval_batch_sizes == [2048 // BLOCK_SIZE, 2]  # before training, and after it
    out = capsys.readouterr().out
    assert "out of memory in step 1: continuing with micro-batches of 4" in out
    assert "out of memory in step 3: continuing with micro-batches of 2" in out
    for before, after in zip(expected, read_events(found, "train"), strict=True):
        assert after["loss"] == pytest.approx(before["loss"], abs=1e-5)
        assert after["grad_norm"] == pytest.approx(before["grad_norm"], abs=1e-5)


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch"])
def test_out_of_memory_in_the_optimizer(train, monkeypatch, tmp_path, optim):
    """A part of the update may be done, so it is not tried again: one sentence, and the last checkpoint is whole."""
    step, calls = torch.optim.AdamW.step, []

    def patched(self, *args):
        calls.append(1)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", patched)
    with pytest.raises(
        UserError, match="out of memory in the optimizer; go on with --resume_from_checkpoint auto and a"
    ):
        train("--max_steps", "6", "--save_steps", "3", "--optim", optim)
    deadline = time.monotonic() + 10  # a process that ends waits for the checkpoint it is writing; a test does not
    while not list_checkpoints(tmp_path / "run") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert find_checkpoint(tmp_path / "run", "auto").name == "checkpoint-3"


def test_out_of_memory_without_auto_gives_the_numbers_to_pass():
    config = load_config(["--dataset_dir", "d", "--global_batch_size", "12", "--per_device_train_batch_size", "6"])[0]
    error = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(UserError, match=r"micro-batches of 6; go on .*--per_device_train_batch_size 4,"):
        smaller_micro_batch(error, config, [6], 6, 1)
    with pytest.raises(UserError, match="micro-batches of 6; go on .*--per_device_train_batch_size 3,"):
        smaller_micro_batch(error, config, [6, 3], 6, 2)  # the other process is in the middle of the step
    with pytest.raises(UserError, match="with one sequence per forward; try --activation_checkpointing"):
        smaller_micro_batch(error, config, [6, 1], 1, 1)
    with pytest.raises(RuntimeError, match="something else"):
        smaller_micro_batch(RuntimeError("something else"), config, [6, 3], 6, 1)
    assert smaller_micro_batch(error, config, [12, 6], 12, 1) == 6


# ------------------------------------------------------------------ signals

STEPS = 300


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, dataset_dir):
    """The final weights of a run that nothing happened to; dropout is on, so random state counts."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    result = launch(slow_options(dataset_dir), folder)
    assert result.returncode == 0, result.stderr
    return (folder / "run" / "model.safetensors").read_bytes()


def slow_options(dataset_dir):
    dropout = ["--config_overrides", "n_layer=2,n_head=2,n_embd=32,resid_pdrop=0.1"]
    return [*options(dataset_dir, STEPS), *dropout, "--output_dir", "run", "--resume_from_checkpoint", "auto"]


def start(arguments, cwd, launcher=(), direct=False):
    train_py = str(ROOT / "recipe" / "train.py")
    to_run = [sys.executable, train_py, *map(str, arguments)] if direct else command(train_py, arguments, launcher)
    # In a session of its own: a signal to the process is not one to the tests.
    return subprocess.Popen(
        to_run, cwd=cwd, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip


def wait_for_step(cwd, step, timeout=120):
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        path = cwd / "run" / "metrics.jsonl"
        if path.is_file() and path.read_text().count('"event": "train"') >= step:
            return
        time.sleep(0.01)
    pytest.fail("the run did not get going")


def workers_of(process):
    """Process ids of the training programs that a launcher started."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            command_line = (status.parent / "cmdline").read_bytes()
            parent = int(status.read_text().split("PPid:")[1].split()[0])
        except OSError:
            continue
        if parent == process.pid and b"recipe/train.py" in command_line:
            found.append(int(status.parent.name))
    return found


def check_stopped(cwd, output):
    """One checkpoint, of the step of the message, which gives the command to go on with."""
    (checkpoint,) = list_checkpoints(cwd / "run")
    step = int(checkpoint.name.partition("-")[2])
    assert 20 <= step < STEPS and why_damaged(checkpoint) is None
    assert f"after step {step}, saved in run/checkpoint-{step}; to continue:" in output
    started = rf"\n(python|accelerate launch) {re.escape(str(ROOT))}/recipe/train.py "
    assert re.search(started + "--resume_from_checkpoint auto --config run/training_config.yaml", output)


def check_going_on(cwd, arguments, weights):
    """Resubmitting the command ends in the uninterrupted run's weights."""
    again = launch(arguments, cwd)
    assert again.returncode == 0, again.stderr
    assert (cwd / "run" / "model.safetensors").read_bytes() == weights
    assert [e["step"] for e in read_events(cwd / "run", "train")] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"])
def test_a_signal_to_the_program(tmp_path, dataset_dir, uninterrupted, name):
    """Finishes the step, saves once, exits with the documented code and one line that gives the command."""
    process = start(slow_options(dataset_dir), tmp_path, direct=True)
    wait_for_step(tmp_path, 20)
    process.send_signal(signal.Signals[name])
    output = process.communicate(timeout=120)[0]
    assert process.returncode == EXIT_STOPPED, output
    assert f"stopped by {name} after step" in output and "Traceback" not in output
    assert (tmp_path / "run" / ".lock").read_text() == ""  # a lock that is left over means that it was killed
    assert f"{name}: stopping after this step; once more exits at once" in output
    check_stopped(tmp_path, output)
    if name == "SIGTERM":
        check_going_on(tmp_path, slow_options(dataset_dir), uninterrupted)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL", "SIGUSR1"])
def test_a_signal_to_the_launcher(tmp_path, dataset_dir, uninterrupted, name):
    """The trainer is no orphan: it saves and ends when its launcher does."""
    process = start(slow_options(dataset_dir), tmp_path)
    wait_for_step(tmp_path, 20)
    (worker,) = workers_of(process)
    process.send_signal(signal.Signals[name])
    output = process.communicate(timeout=120)[0]  # to the end of the trainer's output, not the launcher's alone
    assert not Path(f"/proc/{worker}").exists() or "zombie" in Path(f"/proc/{worker}/status").read_text()
    check_stopped(tmp_path, output)
    if name == "SIGTERM":
        check_going_on(tmp_path, slow_options(dataset_dir), uninterrupted)


@pytest.mark.parametrize("target", ["a worker", "the launcher"])
def test_a_signal_to_one_of_two_processes(tmp_path, dataset_dir, target):
    """Both stop after the same step and save once; one process goes on with it, and two again: the same losses."""
    arguments = slow_options(dataset_dir)
    arguments[arguments.index("n_layer=2,n_head=2,n_embd=32,resid_pdrop=0.1")] = "n_layer=2,n_head=2,n_embd=32"
    process = start(arguments, tmp_path, launcher=TWO_PROCESSES)
    wait_for_step(tmp_path, 20)
    os.kill(max(workers_of(process)) if target == "a worker" else process.pid, signal.SIGTERM)
    output = process.communicate(timeout=120)[0]
    assert output.count("after step") == 1 and "stopped by" in output, output
    assert 'recipe/train.py", line' not in output  # no traceback of ours
    if target == "a worker":
        assert f"exitcode  : {EXIT_STOPPED}" in output and "exitcode  : 1 " not in output
    (checkpoint,) = list_checkpoints(tmp_path / "run")
    assert why_damaged(checkpoint) is None
    if target == "the launcher":
        return
    one = start(arguments, tmp_path, direct=True)  # 2 -> 1
    wait_for_step(tmp_path, int(checkpoint.name.partition("-")[2]) + 20)
    one.send_signal(signal.SIGTERM)
    assert one.wait(120) == EXIT_STOPPED
    two = launch(arguments, tmp_path, TWO_PROCESSES, ACCELERATE_USE_CPU="true")  # 1 -> 2
    assert two.returncode == 0, two.stderr
    (tmp_path / "run" / "summary.json").unlink()  # as if killed before its end; and there is nothing left to train
    again = launch(arguments, tmp_path, TWO_PROCESSES, ACCELERATE_USE_CPU="true")
    assert again.returncode == 0 and (tmp_path / "run" / "summary.json").is_file(), again.stderr
    arguments[arguments.index("run")] = "whole"
    assert launch(arguments, tmp_path).returncode == 0
    found, expected = (read_events(tmp_path / name, "train") for name in ("run", "whole"))
    assert len(found) == len(expected) == STEPS
    for a, b in zip(found, expected, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5), a["step"]


def test_a_second_signal_exits_at_once(tmp_path, dataset_dir):
    """A user who cannot wait is not made to; a signal that comes twice within a second is one."""
    patch = """
from recipe.checkpoint.save import CheckpointSaver
write = CheckpointSaver._write
CheckpointSaver._write = lambda *args: (print("writing", flush=True), time.sleep(60), write(*args))
"""
    arguments = slow_options(dataset_dir)
    process = subprocess.Popen(
        [sys.executable, patched_program(tmp_path, patch), *map(str, arguments)], cwd=tmp_path, env=environment(),
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    wait_for_step(tmp_path, 5)
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
    """In the seconds of importing torch the worker cannot ask for its launcher's death; it looks for it after them."""
    process = start(slow_options(dataset_dir), tmp_path)
    deadline = time.monotonic() + 60
    while not (workers := workers_of(process)) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    output = process.communicate(timeout=60)[0]
    assert workers and "error: the launcher ended before the run began" in output, output
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_stop_leaves_no_trace_in_the_log(tmp_path, dataset_dir):
    """Between two log lines too: means over the same steps, and every evaluation, as in a run that went through."""
    arguments = [*slow_options(dataset_dir), "--logging_steps", "7", "--eval_steps", "10"]
    whole = launch([*arguments[:-4], "--output_dir", "whole", "--logging_steps", "7", "--eval_steps", "10"], tmp_path)
    assert whole.returncode == 0, whole.stderr
    process = start(arguments, tmp_path, direct=True)
    wait_for_step(tmp_path, 9)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == EXIT_STOPPED
    again = launch(arguments, tmp_path)
    assert again.returncode == 0, again.stderr
    for event in ("train", "eval"):
        found, expected = ([{k: v for k, v in e.items() if k not in MACHINE_NUMBERS}
                            for e in read_events(tmp_path / name, event)] for name in ("run", "whole"))  # fmt: skip
        assert found == expected


# ------------------------------------------------------------------ one run in a folder


def test_a_folder_in_use(train, tmp_path):
    """The message names the process; nothing is changed."""
    code = ("from pathlib import Path; from recipe.run.output_dir import lock_output_dir; "
            "lock_output_dir(Path('run')); print('locked', flush=True); input()")  # fmt: skip
    other = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True)  # fmt: skip
    assert other.stdout.readline() == "locked\n"
    with pytest.raises(
        UserError, match=rf"run is in use by process {other.pid} on .*, since 20.*another --output_dir"
    ):
        train()
    other.kill()
    other.wait()
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [".lock"]


def test_a_stale_lock(train, tmp_path, capsys):
    """Of a process that is gone, on this machine or another: recognised, said, taken over."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").write_text('{"host": "node7", "pid": 4321, "started_at": "2026-01-01T00:00:00Z"}')
    train()
    out = capsys.readouterr().out
    assert "taking over the lock of process 4321 on node7, since 2026-01-01T00:00:00Z: that process is gone" in out
    assert (tmp_path / "run" / ".lock").read_text() == ""


def test_a_file_system_without_locks(tmp_path, monkeypatch, capsys):
    def unsupported(*args):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    lock_output_dir(tmp_path / "run")
    release_output_dir(tmp_path / "run")
    assert "cannot be locked (Operation not supported): make sure that no other run uses it" in capsys.readouterr().out


def test_an_output_dir_that_cannot_be_written(tmp_path, monkeypatch):
    """Noticed by writing: neither root nor a read-only file system can be asked."""
    import tempfile

    def read_only(**kwargs):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
    with pytest.raises(UserError, match=r"cannot write to output_dir .* \(Read-only file system\)"):
        choose_output_dir(load_config(["--output_dir", str(tmp_path / "run")])[0], "demo")


# ------------------------------------------------------------------ secrets


def test_no_secret_leaves_the_environment(tmp_path, dataset_dir):
    """Not in a file of the run, not on the screen, not in the traceback of a crash."""
    canary = "hf_CANARY0123456789abcdefghijklmnopqr"
    secrets = {"HF_TOKEN": canary, "HUGGING_FACE_HUB_TOKEN": canary, "WANDB_API_KEY": canary}
    arguments = [*options(dataset_dir), "--save_steps", "2", "--report_to", "tensorboard"]
    good = launch([*arguments, "--output_dir", "run"], tmp_path, **secrets)
    assert good.returncode == 0, good.stderr
    pushed = ["--push_to_hub", "--hub_model_id", "someone/model", "--output_dir", "pushed"]
    pushed = launch([*arguments, *pushed], tmp_path, **secrets)
    patch = "recipe.train.closing_words = None"
    crashed = subprocess.run(
        command(patched_program(tmp_path, patch), [*arguments, "--output_dir", "crashed"]), cwd=tmp_path,
        env=environment(**secrets), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert crashed.returncode != 0 and "Traceback" in crashed.stderr
    for result in (good, pushed, crashed):
        assert canary not in result.stdout + result.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 40 and any("tfevents" in path.name for path in files)
    assert [path for path in files if canary.encode() in path.read_bytes()] == []


def test_the_same_examples_on_another_number_of_processes_or_an_error_that_helps(tmp_path, dataset_dir):
    """What does not divide says which counts would."""
    arguments = [*options(dataset_dir), "--output_dir", "run", "--global_batch_size", "5"]
    result = launch(arguments, tmp_path, TWO_PROCESSES, ACCELERATE_USE_CPU="true")
    assert result.returncode != 0
    assert "global_batch_size 5 does not divide by 2 processes; 4 or 6 would" in result.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
