"""Make many small runs in each of two processes, and write what each process saw to found0.json and found1.json.

    accelerate launch two_processes.py RUNS OPTIONS

RUNS: JSON, {name: options}. The name of a run is that of its folder, and says how it runs:

    fsdp                  with shards
    without resharding    with the gathered blocks kept until backward
    traced                with a record of the gradients that are exchanged
    small stacks          Muon stacks at most three square matrices
    other options         the second process has another learning rate
    other micro-batch     the second process has another micro-batch, which it types
    other launcher        the second process's launcher says another precision
    other machine         the second process finds no compiler, less memory and fewer cores, and compiling would pay
    missing data          the second process does not find the dataset
    bad loss              the second process's loss of step 3 is infinite, but its gradients are not
    signal                the second process gets SIGTERM in step 2, and the main process takes long to end
    slow disk             a process that saves waits one second for the other, and the disk takes three

OPTIONS: of all runs. They share one process group, because a second one in the same store may hang (torch 2.13), and
one start, because importing torch takes longer than a small run.
"""

import contextlib
import hashlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from accelerate.state import PartialState
from torch.profiler import ProfilerActivity, profile

import recipe.run.start
import recipe.train
from recipe.checkpoint import CheckpointSaver
from recipe.errors import UserError
from recipe.hardware.processes import STEP_WAIT, host_group
from recipe.model.loss import LanguageModelingLoss
from recipe.model.weights import full_tensor
from recipe.optim import muon
from recipe.run.log import RunLog

RANK = int(os.environ["RANK"])
seen = {}  # by this process in the current run
added_loss = torch.zeros(())

add, loss_sum, decide_turn = RunLog.add, LanguageModelingLoss._loss_sum, recipe.train.decide_turn
open_datasets = recipe.run.start.open_datasets
save, write, orthogonalize = CheckpointSaver.save, CheckpointSaver._write, muon.orthogonalize


def is_now(words: str) -> bool:
    """Return whether the name of the current run has these words."""
    return words in seen["name"]


def add_and_look(log: RunLog, *numbers: object) -> None:
    """Hash the weights after each update."""
    add(log, *numbers)
    digest = hashlib.sha256()
    for group in log.optimizer.param_groups:
        for parameter in group["params"]:
            digest.update(full_tensor(parameter.detach()).numpy().tobytes())
    seen["weights"].append(digest.hexdigest())
    is_second_step = RANK == 1 and len(seen["weights"]) == 2
    added_loss.fill_(math.inf if is_now("bad loss") and is_second_step else 0.0)
    if is_now("signal") and is_second_step:
        os.kill(os.getpid(), signal.SIGTERM)


def add_to_loss(*args: object) -> torch.Tensor:
    return loss_sum(*args) + added_loss


def open_or_miss(directories: list[Path], *options: object) -> object:
    is_missing = is_now("missing data") and RANK == 1
    return open_datasets([Path("missing")] if is_missing else directories, *options)


def end_slowly(log: RunLog) -> None:
    if is_now("signal"):
        time.sleep(2)


def decide_and_look(run: object, state: object, stop: bool) -> object:
    """At the top of each turn."""
    seen["evaluation seconds"].append(state.initial.get("seconds"))
    return decide_turn(run, state, stop)


def save_in_a_hurry(saver: CheckpointSaver, state: object) -> None:
    limit = timedelta(seconds=1) if is_now("slow disk") else STEP_WAIT
    dist.distributed_c10d._set_pg_timeout(limit, host_group())
    save(saver, state)
    dist.distributed_c10d._set_pg_timeout(STEP_WAIT, host_group())


def write_slowly(saver: CheckpointSaver, final: Path, *args: object) -> object:
    if is_now("slow disk") and final.name == "checkpoint-2":
        time.sleep(3)
    return write(saver, final, *args)


def orthogonalize_and_count(matrices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    seen["matrices"] += len(matrices)
    return orthogonalize(matrices, dtype)


def train_traced() -> int:
    """Train, and note the vectors of gradients that this process sends to the other one."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        status = recipe.train.main()
    trace = Path(f"trace{RANK}.json")
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    sent = [event["args"] for event in events if event.get("name") == "gloo:all_reduce"]
    shapes = [(args["Input type"][0], args["Input Dims"][0]) for args in sent]
    seen["gradients"] = [(kind, shape[0]) for kind, shape in shapes if shape and shape[0] > 100]
    return status


OTHER_OPTIONS = {
    "other options": ["--learning_rate", "1.1"],
    "other micro-batch": ["--per_device_train_batch_size", "2"],
}
OTHER_MACHINE = {
    "recipe.hardware.accelerator.why_no_inductor": "there is no compiler",
    "recipe.hardware.accelerator.list_thread_counts": (1,),
    "recipe.run.start.measure_usable_bytes": 5e9,
}


@contextlib.contextmanager
def differing() -> Iterator[None]:
    """Let the second process differ from the first, as the name of the run says."""
    with contextlib.ExitStack() as stack:
        if is_now("other machine"):
            stack.enter_context(mock.patch("recipe.hardware.choices.COMPILE_PAYS_SECONDS", 0.0))
        for words, options in OTHER_OPTIONS.items() if RANK == 1 else ():
            sys.argv += options if is_now(words) else []
        for name, value in OTHER_MACHINE.items() if RANK == 1 and is_now("other machine") else ():
            stack.enter_context(mock.patch(name, lambda *_, value=value: value))
        if RANK == 1 and is_now("other launcher"):
            stack.enter_context(mock.patch.dict(os.environ, ACCELERATE_MIXED_PRECISION="bf16"))
        yield


def train(name: str) -> dict:
    """Make a run, and return what this process saw of it. The status is that of `main`, or its error."""
    seen.update({"name": name, "weights": [], "evaluation seconds": [], "matrices": 0, "gradients": []})
    muon.STACK_VALUES = 3 * 32 * 32 if is_now("small stacks") else 2**26
    if is_now("fsdp"):
        reshard = str(not is_now("without resharding"))
        os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": reshard}
    try:
        with differing():
            status = train_traced() if is_now("traced") else recipe.train.main()
    except UserError as error:
        status = str(error)
    if is_now("fsdp"):
        assert os.environ.pop("ACCELERATE_USE_FSDP") == "true"  # main() leaves it as it was
    return {**seen, "status": status, "left at": time.time()}


def main() -> None:
    PartialState.destroy_process_group = lambda self, group=None: None
    RunLog.add, RunLog.end, recipe.train.decide_turn = add_and_look, end_slowly, decide_and_look
    recipe.run.start.open_datasets = open_or_miss
    LanguageModelingLoss._loss_sum, muon.orthogonalize = add_to_loss, orthogonalize_and_count
    CheckpointSaver.save, CheckpointSaver._write = save_in_a_hurry, write_slowly
    runs, options, found = json.loads(sys.argv[1]), sys.argv[2:], {}
    for name, more in runs.items():
        sys.argv[1:] = [*options, *more, "--output_dir", name]
        found[name] = train(name)
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    found["minutes"] = backend.options._timeout.total_seconds() / 60
    Path(f"found{RANK}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
