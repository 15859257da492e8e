"""Several processes and several machines: one run, whatever its split, and what happens when a machine is gone.

The machines are launchers on loopback, and Slurm is a stand-in for its two commands.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from conftest import ROOT, TINY, default_arguments, launch, read_events
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from recipe.checkpoint import OPTIMIZER_NAME, list_checkpoints, why_damaged
from recipe.hardware.processes import STEP_WAIT

GLOBAL_BATCH = 8
SPLITS = {"2x1x4": ("--per_device_train_batch_size", "4"), "2x2x2": ("--per_device_train_batch_size", "2"),
          "2x4x1": ("--per_device_train_batch_size", "1")}  # fmt: skip
INDUCTOR = ("--per_device_train_batch_size", "2", "--dynamo_backend", "inductor")
LESS_MEMORY = ("--activation_checkpointing", "--loss_chunks", "3")
COMPILED = {"inductor": INDUCTOR, "inductor, less memory": (*INDUCTOR, *LESS_MEMORY)}
BAD = {"bad": (*INDUCTOR, "--lr_scheduler_type", "constant")}
# The first is stopped by a signal to the second process, the second continues a run of one process.
STOPPED = {"signaled": (), "continued": ("--resume_from_checkpoint", "auto")}
# With shards: of a width that two processes cut unevenly, with an odd number of examples to score.
ODD = (
    "--config_overrides",
    "n_layer=1,n_head=3,n_embd=33",
    "--save_steps",
    "2",
    "--eval_tasks",
    "hellaswag=task.jsonl",
)
FROM_FSDP = ("--resume_from_checkpoint", "fsdp muon/checkpoint-2")
SHARDED = {
    "fsdp muon": (*ODD, "--optim", "muon"),
    "fsdp adamw": (*ODD, "--optim", "adamw_torch"),  # not fused
    "fsdp continued": (*ODD, "--optim", "muon", "--resume_from_checkpoint", "auto"),  # one process began
    "ddp continued": (*ODD, "--optim", "muon", *FROM_FSDP),
    "fsdp compiled": (*INDUCTOR, *LESS_MEMORY),
    "fsdp kept": (*INDUCTOR, "--label_smoothing_factor", "0.1"),  # the gathered blocks, until backward
}
SLOW = {"slow disk": ("--save_steps", "2")}  # the second checkpoint is due while the first is being written
STEPS = 5
SHORT = ["--max_steps", STEPS, "--eval_steps", "3", "--global_batch_size", GLOBAL_BATCH]
SHORT += ["--config_overrides", "n_layer=1,n_head=2,n_embd=32"]

# Runs in both processes, all in one process group, because a second one in the same store may hang (torch 2.13):
# importing torch takes longer than a tiny run.
PROBE = """
import json, math, os, signal, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from datetime import timedelta
from accelerate.state import PartialState
from torch.profiler import ProfilerActivity, profile
import recipe.train
from recipe.checkpoint import CheckpointSaver
from recipe.errors import UserError
from recipe.hardware.processes import STEP_WAIT, check_same_run, host_group, on_all_processes, start_processes
from recipe.model.loss import LanguageModelingLoss
from recipe.model.weights import whole
from recipe.run.log import RunLog

PartialState.destroy_process_group = lambda self, group=None: None
splits, arguments = json.loads(sys.argv[1]), sys.argv[2:]
SPLITS = ("2x1x4", "2x2x2", "2x4x1")  # the others would fill the trace
found, rank = {}, int(os.environ["RANK"])

# In the run "bad", the second process's loss of step 3 is infinite, but its gradients are not.
added, loss_sum, add = torch.zeros(()), LanguageModelingLoss._loss_sum, RunLog.add
LanguageModelingLoss._loss_sum = lambda *args: loss_sum(*args) + added

def count(self, *args):  # after each update
    add(self, *args)
    parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
    weights.append(sum(whole(p).double().sum().item() for p in parameters))
    added.fill_(math.inf if name == "bad" and rank == 1 and len(weights) == 2 else 0.0)
    if name == "signaled" and rank == 1 and len(weights) == 2:
        os.kill(os.getpid(), signal.SIGTERM)

def end(self):  # on the main process: its tracker takes long
    time.sleep(2 * (name == "signaled"))

def decide(run, state, stop):  # at the top of each turn
    found["evaluation seconds"] = found.get("evaluation seconds", []) + [state.initial.get("seconds")]
    return decide_turn(run, state, stop)

# In the run "slow disk", a step's collectives wait for one second while a process saves, and the disk takes longer.
save, write = CheckpointSaver.save, CheckpointSaver._write

def save_in_a_hurry(self, state):
    limit = timedelta(seconds=1) if name == "slow disk" else STEP_WAIT
    dist.distributed_c10d._set_pg_timeout(limit, host_group())
    save(self, state)
    dist.distributed_c10d._set_pg_timeout(STEP_WAIT, host_group())

def write_slowly(self, final, *args):
    time.sleep(3 * (name == "slow disk" and final.name == "checkpoint-2"))
    return write(self, final, *args)

CheckpointSaver.save, CheckpointSaver._write = save_in_a_hurry, write_slowly
RunLog.add, RunLog.end = count, end
decide_turn, recipe.train.decide_turn = recipe.train.decide_turn, decide
for name, options in splits.items():
    sys.argv[1:] = [*arguments, *options, "--output_dir", name]
    weights = []
    if "fsdp" in name:
        reshard = str("kept" not in name)
        os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": reshard}
        found[name + " exit"] = recipe.train.main()
        assert os.environ.pop("ACCELERATE_USE_FSDP") == "true"  # main() leaves it as it was
        continue
    if name not in SPLITS:
        try:
            found[name + " exit"] = recipe.train.main()
        except Exception as error:
            found[name + " exit"] = repr(error)
        found[name + " left at"], found[name] = time.time(), weights
        continue
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        recipe.train.main()
    profiler.export_chrome_trace(f"trace{rank}.json")
    events = json.loads(Path(f"trace{rank}.json").read_text())["traceEvents"]
    reduced = [event["args"] for event in events if event.get("name") == "gloo:all_reduce"]
    shapes = [(args["Input type"][0], args["Input Dims"][0]) for args in reduced]
    found[name] = [(kind, shape[0]) for kind, shape in shapes if shape and shape[0] > 100]  # vectors of gradients

def error_of(function):
    try:
        function()
    except UserError as error:
        return str(error)

start_processes()
timeout = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).options._timeout
found["minutes"] = timeout.total_seconds() / 60
found["options"] = error_of(lambda: check_same_run({"seed": 1, "learning_rate": 0.1 + rank}))
found["same"] = error_of(lambda: check_same_run({"seed": 1}))

def missing_on_one():
    if rank == 1:
        raise UserError("there is no dataset")

found["one"] = error_of(lambda: on_all_processes(missing_on_one))
Path(f"found{rank}.json").write_text(json.dumps(found))
dist.destroy_process_group()
"""


def mixed(*folders: Path) -> list[str]:
    return ["--dataset_dir", *map(str, folders), "--dataset_weights", "0.3", "0.7"]


def stage(*folders: Path, checkpoint: object = FROM_FSDP[1]) -> list[str]:
    """Go on with other data, best and last model kept. A list may be typed twice, so these join those before."""
    keeps = ["--load_best_model_at_end", "true", "--eval_steps", "1"]
    return [*ODD[:-2], "--optim", "muon", "--resume_from_checkpoint", str(checkpoint), *mixed(*folders), *keeps]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """Three examples for two processes."""
    path = tmp_path_factory.mktemp("task") / "task.jsonl"
    lines = (ROOT / "tests" / "hellaswag_sample.jsonl").read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3]))
    return path


@pytest.fixture(scope="module")
def odd(train_shared, task):
    """Runs of one process with the options of `ODD`, by their optimizer."""
    options = [*SHORT, *ODD[:-1], f"hellaswag={task}", "--optim"]
    return {optim: train_shared(*options, optim, real=True) for optim in ("muon", "adamw_torch")}


@pytest.fixture(scope="module")
def probe(tmp_path_factory, dataset_dir, other, train_shared, task, odd):
    """Two processes, started by accelerate_configs/multi_cpu.yaml and nothing else. Returns the folder."""
    folder = tmp_path_factory.mktemp("probe")
    shutil.copy(task, folder)
    shutil.copytree(odd["muon"] / "checkpoint-2", folder / "fsdp continued" / "checkpoint-2")
    before = train_shared(*SHORT, "--save_steps", "2")
    shutil.copytree(before / "checkpoint-2", folder / "continued" / "checkpoint-2")
    shutil.copy(before / "metrics.jsonl", folder / "continued")
    (folder / "probe.py").write_text(PROBE)
    options = [*default_arguments(dataset_dir, folder / "unused", TINY), *SHORT]
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    runs = SPLITS | COMPILED | BAD | STOPPED | SHARDED | {"mixture": mixed(other)}
    runs |= {name: stage(other) for name in ("ddp stage", "fsdp stage")} | SLOW
    result = launch(
        [json.dumps(runs), *options],
        cwd=folder,
        launcher=("--config_file", str(ROOT / "accelerate_configs" / "multi_cpu.yaml")),
        program=folder / "probe.py",
        **environment,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return folder


@pytest.fixture
def found(probe):
    """What each of the two processes found."""
    return [json.loads((probe / f"found{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def one_process(train_shared):
    """The same run by one process: all of a global batch in one forward pass, and in eight."""
    return [train_shared(*SHORT, "--per_device_train_batch_size", size) for size in (8, 1)]


@pytest.mark.parametrize("split", [*SPLITS, *COMPILED])
def test_every_split_of_a_global_batch_is_one_run(probe, one_process, split):
    """Training and validation losses agree in fp32 to 1e-5, also compiled and with options that save memory."""
    summary = json.loads((probe / split / "summary.json").read_text())
    size = int((SPLITS | COMPILED)[split][1])
    assert summary["num_processes"] == 2 and summary["per_device_train_batch_size"] == size
    for event, count in (("train", STEPS), ("eval", 3)):
        curve, *expected = ([e["loss"] for e in read_events(run, event)] for run in (probe / split, *one_process))
        assert len(curve) == count
        for other in expected:
            assert curve == pytest.approx(other, abs=1e-5)


def test_a_mixture_is_one_run(probe, train, dataset_dir, other):
    """Its order and its validation losses do not depend on the number of processes."""
    expected = train(*SHORT, *mixed(dataset_dir, other))
    for event in ("train", "eval"):
        losses, others = ([e["loss"] for e in read_events(run, event)] for run in (probe / "mixture", expected))
        assert losses == pytest.approx(others, abs=1e-5)
    found, others = (read_events(run, "eval")[-1]["mixture"] for run in (probe / "mixture", expected))
    assert [of["loss"] for of in found.values()] == pytest.approx([of["loss"] for of in others.values()], abs=1e-5)


@pytest.mark.parametrize("split", SPLITS)
def test_gradients_are_synchronized_once_per_step(probe, found, split):
    """However many micro-batches a step has, each process sends every gradient once, in fp32."""
    shape = json.loads((probe / split / "config.json").read_text())
    embeddings = (512 + shape["n_positions"]) * shape["n_embd"]  # the vocabulary of 500 is padded
    blocks = shape["n_layer"] * (12 * shape["n_embd"] ** 2 + 13 * shape["n_embd"])
    num_parameters = embeddings + blocks + 2 * shape["n_embd"]
    for process in found:
        assert process[split] == [["float", num_parameters]] * STEPS


def test_a_bad_loss_on_one_process_of_two(probe, found):
    """Neither process makes the update, though the graph is compiled and no gradient is bad. The others go on."""
    weights, others = (process["bad"] for process in found)
    same = [before == after for before, after in zip(weights, weights[1:], strict=False)]
    assert weights == others and same == [False, True, False, False]
    events = read_events(probe / "bad", "train")
    assert [e["loss"] is None for e in events] == [False, False, True, False, False]
    assert [e["skipped_steps"] for e in events] == [0, 0, 1, 1, 1]


def test_a_signal_to_one_of_two_processes_stops_both(probe, found, train, one_process, tmp_path):
    """After the same step, with a checkpoint. One process continues with it, and two continue a run of one.

    All leave together: if one left earlier, the launcher would end the others.
    """
    assert [process["signaled exit"] for process in found] == [75, 75]
    assert abs(found[0]["signaled left at"] - found[1]["signaled left at"]) < 1
    shutil.copytree(probe / "signaled", tmp_path / "run")
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["checkpoint-2"]
    resumed = train(*SHORT, "--resume_from_checkpoint", "auto")
    expected = [event["loss"] for event in read_events(one_process[0], "train")]
    for run in (resumed, probe / "continued"):
        assert [event["loss"] for event in read_events(run, "train")] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", ["fsdp muon", "fsdp adamw", "fsdp continued", "ddp continued"])
def test_shards_are_one_run(probe, odd, name):
    """Losses, scores and the sample match one process, also when a run resumes in another layout."""
    expected, resumed_at = odd["adamw_torch" if "adamw" in name else "muon"], 2 * ("continued" in name)
    for event in ("train", "eval"):
        found, events = (
            [e for e in read_events(run, event) if e["step"] > resumed_at] for run in (probe / name, expected)
        )
        assert [e["loss"] for e in found] == pytest.approx([e["loss"] for e in events], abs=1e-5)
        assert [e["step"] for e in found] == [e["step"] for e in events]
    scores = [{key: value for key, value in e.items() if "hellaswag_acc" in key} for e in (found[-1], events[-1])]
    assert len(scores[0]) == 4 and scores[0] == scores[1]
    assert read_events(probe / name, "sample")[-1] == read_events(expected, "sample")[-1]


def test_a_stage_is_one_run(probe, train, dataset_dir, other):
    """Other data after a checkpoint: the same examples, the same best model, with two processes, with shards."""
    expected = train(*SHORT, *stage(dataset_dir, other, checkpoint=probe / "fsdp muon" / "checkpoint-2"))
    best = json.loads((expected / "best" / "best.json").read_text())
    assert [e["step"] for e in read_events(expected, "eval")] == [2, 3, 4, 5]
    for name in ("ddp stage", "fsdp stage"):
        for event in ("train", "eval"):
            losses, others = ([e["loss"] for e in read_events(run, event)] for run in (probe / name, expected))
            assert losses == pytest.approx(others, abs=1e-6)
        assert json.loads((probe / name / "best" / "best.json").read_text())["step"] == best["step"]
        weights, others = (load_file(run / "best" / "model.safetensors") for run in (probe / name, expected))
        torch.testing.assert_close(weights, others, rtol=0, atol=1e-5)


def test_compiled_shards_are_one_run(probe, one_process, train_shared):
    """Each block is a graph, and so is the loss; whether blocks are gathered again for backward or kept."""
    smoothed = train_shared(*SHORT, "--label_smoothing_factor", "0.1")
    for name, expected in (("fsdp compiled", one_process[0]), ("fsdp kept", smoothed)):
        for event in ("train", "eval"):
            losses, others = ([e["loss"] for e in read_events(run, event)] for run in (probe / name, expected))
            assert losses == pytest.approx(others, abs=1e-5)


def test_a_checkpoint_does_not_tell_who_wrote_it(probe, odd, train, tmp_path):
    """Shards are saved as whole tensors, which one process continues."""
    checkpoints = [run / "checkpoint-2" for run in (probe / "fsdp muon", odd["muon"])]
    for name, load in (("model.safetensors", load_file), (OPTIMIZER_NAME, torch.load)):
        found, expected = (load(checkpoint / name) for checkpoint in checkpoints)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert AutoModelForCausalLM.from_pretrained(checkpoints[0]).config.vocab_size == 500
    resumed = train(*SHORT, *ODD[:4], "--optim", "muon", "--resume_from_checkpoint", checkpoints[0])
    losses, expected = ([e["loss"] for e in read_events(run, "train")] for run in (resumed, odd["muon"]))
    assert losses == pytest.approx(expected[2:], abs=1e-5)


def test_time_passes_alike_on_all_processes(found):
    """Progress follows from it, and from progress the learning rate and when to save; one process makes the sample."""
    seconds, others = (process["evaluation seconds"] for process in found)
    assert seconds == others and any(seconds)


def test_a_process_that_hangs_ends_the_others_after_ten_minutes(found):
    """As accelerate_configs/README.md says, on CPUs and GPUs: the group of the devices and that of the hosts."""
    assert [process["minutes"] for process in found] == [STEP_WAIT.total_seconds() / 60] * 2 == [10, 10]


def test_a_slow_disk_does_not_end_a_run(probe, found):
    """If a checkpoint is due before the previous one is on disk, all processes wait, longer than for a step."""
    assert [process["slow disk exit"] for process in found] == [0, 0]
    assert [path.name for path in list_checkpoints(probe / "slow disk")] == [f"checkpoint-{n}" for n in (2, 4, 5)]


def test_a_mistake_on_one_process_ends_all(found):
    """Different options, and data that one machine lacks, are reported by every process alike."""
    for process in found:
        assert process["options"].startswith(
            "process 0 and process 1 differ in learning_rate 0.1 and 1.1; run the same"
        )
        assert process["same"] is None
        assert process["one"].startswith("there is no dataset (on process 1 on ")


# ------------------------------------------------------------------ two machines under Slurm

NODE_STEPS = 400
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >> "$SLURM_STAND_IN/requeued"; fi
"""
# Runs a command on two "machines" and passes USR1 on to them. Unlike Slurm's, it does not end a machine when another
# one fails, so that the processes must notice by themselves.
SRUN = """#!/bin/bash
while [[ "$1" = --* ]]; do echo "srun $1"; shift; done
for node in 0 1; do SLURM_NODEID=$node "$@" & tasks+=($!); done
trap 'kill -USR1 "${tasks[@]}"' USR1
for task in "${tasks[@]}"; do
    while kill -0 "$task" 2> /dev/null; do wait "$task"; status=$?; done
    [ "$status" = 0 ] || result=$status
done
exit "${result:-0}"
"""


class Cluster:
    """Runs a batch file as Slurm would run it, on one or two machines."""

    def __init__(self, folder, dataset_dir):
        self.folder, self.run = folder, folder / "run"
        accelerate = '#!/bin/bash\necho "the launcher gives ${TORCH_ELASTIC_SHUTDOWN_TIMEOUT-30} seconds"\n'
        accelerate += f'exec {sys.executable} -m accelerate.commands.accelerate_cli "$@"\n'
        for name, text in (("scontrol", SCONTROL), ("srun", SRUN), ("accelerate", accelerate)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        self.options = [*default_arguments(dataset_dir, self.run, TINY), "--max_steps", NODE_STEPS]
        self.options += ["--save_steps", "40", "--eval_steps", "100", "--global_batch_size", GLOBAL_BATCH]

    def submit(self, file):
        kept = {
            key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "OMP_", "SLURM"))
        }
        path = f"{self.folder}{os.pathsep}{kept['PATH']}"
        slurm = {
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_NNODES": "2",
            "SLURM_GPUS_ON_NODE": "1",
            "SLURM_CPUS_PER_TASK": "16",
            "SLURM_JOB_NODELIST": "node[0-1]",
            "SLURM_STAND_IN": str(self.folder),
        }
        cpu = {"ACCELERATE_USE_CPU": "true", "OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            ["bash", str(ROOT / "scripts" / "slurm" / file), *map(str, self.options)],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env={**kept, **slurm, **cpu, "PATH": path, "CUDA_VISIBLE_DEVICES": ""},
        )  # fmt: skip

    def wait_for_step(self, job, step):
        path, given_up_at = self.run / "metrics.jsonl", time.monotonic() + 120
        while not (path.is_file() and [e for e in read_complete(path) if e["step"] >= step]):
            assert job.poll() is None, job.communicate()[0]
            assert time.monotonic() < given_up_at
            time.sleep(0.02)


def read_complete(path):
    """Return the training events of a log that is being written."""
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n") and '"train"' in line]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory, dataset_dir):
    """A job on two machines that loses one, and the same job again, pre-empted. Returns the cluster and both ends."""
    if not shutil.which("pkill"):
        pytest.skip("the batch files need pkill")
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), dataset_dir)
    job = cluster.submit("multi_node.sbatch")
    cluster.wait_for_step(job, 50)
    below = psutil.Process(job.pid).children(recursive=True)
    (launcher,) = (process for process in below if "--machine_rank 1" in " ".join(process.cmdline()))
    for process in (*launcher.children(recursive=True), launcher):
        process.kill()
    killed_at = time.monotonic()
    lost = job.communicate(timeout=120)[0], job.returncode, time.monotonic() - killed_at
    assert (cluster.folder / "requeued").read_text() == f"requeue {os.getpid()}\n"

    job = cluster.submit("multi_node.sbatch")
    cluster.wait_for_step(job, 120)
    os.kill(job.pid, signal.SIGUSR1)  # as --signal=B:USR1@120
    return cluster, lost, (job.communicate(timeout=120)[0], job.returncode)


def test_the_other_machines_end_when_one_is_gone(jobs):
    """At once, and with one sentence instead of a traceback. The job is queued again: it had saved."""
    output, status, seconds = jobs[1]
    assert status == 75 and seconds < 60
    assert output.count("error: the connection to another process of this run is lost") >= 1, output
    assert 'recipe/train.py", line' not in output


def test_a_preempted_job_saves_and_is_queued_again(jobs):
    cluster, _, (output, status) = jobs
    step = read_events(cluster.run, "train")[-1]["step"]
    assert status == 75 and f"stopped by SIGUSR1 after step {step}, saved" in output, output
    assert (cluster.folder / "requeued").read_text() == 2 * f"requeue {os.getpid()}\n"
    assert output.count("the launcher gives 600 seconds") == 2
    assert why_damaged(cluster.run / f"checkpoint-{step}") is None


def test_two_machines_are_one_run(jobs, train_shared):
    """From step 0 over the kill to the pre-emption, they train and evaluate as one process does."""
    cluster, _, (output, _) = jobs
    assert "checkpoint-40" in output  # the newest before the kill
    whole = train_shared("--max_steps", NODE_STEPS, "--eval_steps", "100", "--global_batch_size", GLOBAL_BATCH)
    for event, at_least in (("train", 120), ("eval", 2)):
        losses, expected = ([e["loss"] for e in read_events(run, event)] for run in (cluster.run, whole))
        assert len(losses) >= at_least and losses == pytest.approx(expected[: len(losses)], abs=1e-5)


def test_a_job_that_branches_saves_and_continues_when_it_is_queued_again(tmp_path, dataset_dir, train_shared):
    """On one GPU, where `accelerate launch` is no torchrun. The option of the folder may be spelled in any way."""
    if not shutil.which("pkill"):
        pytest.skip("the batch files need pkill")
    options = ["--max_steps", NODE_STEPS, "--global_batch_size", GLOBAL_BATCH]
    start = train_shared(*options, "--max_steps", 5, "--save_steps", 3) / "checkpoint-3"
    cluster = Cluster(tmp_path, dataset_dir)
    where = cluster.options.index("--output_dir")
    cluster.options[where : where + 2] = [f"--output-dir={cluster.run}"]
    cluster.options += [*options, "--resume_from_checkpoint", str(start)]
    for number, least in enumerate((10, 50)):
        job = cluster.submit("single_node.sbatch")
        cluster.wait_for_step(job, least)
        os.kill(job.pid, signal.SIGUSR1)
        output = job.communicate(timeout=120)[0]
        assert job.returncode == 75 and "stopped by SIGUSR1" in output, output
        assert (tmp_path / "requeued").read_text().count("requeue") == number + 1
    assert f"{cluster.run} continues {start} already" in " ".join(output.split())
    steps = [event["step"] for event in read_events(cluster.run, "train")]
    assert steps == list(range(4, steps[-1] + 1))
    assert not list(ROOT.glob(".resumable*"))
