"""Whole runs on a GPU that is not there: devices match, the host does not wait for it, and what should fit fits."""

import json
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from helpers import TWO_STEPS, default_arguments, read_events

from recipe.command_line import load_config
from recipe.hardware.choices import Machine
from recipe.hardware.memory import PROCESS_BYTES, MemoryPlan, estimate_bytes
from recipe.hardware.sharding import Sharding
from recipe.model.build import build_model_config
from recipe.model.size import count_parameters

SHAPE = ["--config_overrides", "n_layer=1,n_head=2,n_embd=32", "--block_size", "32"]
# Logs after the first and the last step, and evaluates before and after them.
RUN = ["--mixed_precision", "auto", "--max_steps", "4", "--logging_steps", "4", "--eval_steps", "4"]
RUN += ["--max_eval_samples", "16", "--per_device_train_batch_size", "2"]
LOG_LINES = EVALUATIONS = 2
QUIET = {1, 2}  # steps, counted at the top of the turns
LOUD = {"run/log.py record_steps", "run/log.py paused", "run/log.py _stop_clock"}
LOUD |= {"evaluation/scoring.py sum_losses", "evaluation/generation.py generate_texts"}
LOUD |= {"checkpoint.py save", "checkpoint.py _copy", "model/weights.py copy_weights"}
PADDED = 8192
# Of this model, weights and optimizer, activations, and logits each take a good part of the memory.
WIDE = ["--config_overrides", "n_layer=4,n_head=4,n_embd=256", "--block_size", "32"]
LARGE = ["--mixed_precision", "bf16", "--pad_vocab_to_multiple_of", str(PADDED), "--global_batch_size", "32"]
LARGE += ["--per_device_train_batch_size", "16", *TWO_STEPS]


@pytest.fixture(scope="module")
def gpu(absent_gpu, tmp_path_factory, dataset_dir) -> Iterator[Callable[..., SimpleNamespace]]:
    """Run recipe/train.py's main() in another interpreter on the absent GPU: `gpu(argv)`. Returns `rehearse`'s result.

    two_machines: the results of the first run, which is on two.
    """
    with absent_gpu() as process:

        def run(argv: list[object], **options: float) -> SimpleNamespace:
            print(json.dumps({**options, "argv": list(map(str, argv))}), file=process.stdin, flush=True)
            return json.loads(process.stdout.readline(), object_hook=lambda found: SimpleNamespace(**found))

        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        argv = default_arguments(dataset_dir, tmp_path_factory.mktemp("two") / "run", SHAPE)
        argv += [*RUN, "--optim", "muon", "--per_device_train_batch_size", "1"]
        run.two_machines = run(argv, port=port)
        yield run
        process.kill()


@pytest.fixture
def rehearse(gpu, tmp_path, dataset_dir) -> Callable[..., SimpleNamespace]:
    """`gpu`, on the packed dataset, with more options, and the micro-batch that the run has chosen."""

    def run(*options: object, shape: list[str] = SHAPE, **limits: float) -> SimpleNamespace:
        found = gpu([*default_arguments(dataset_dir, tmp_path / "run", shape), *options], **limits)
        if found.failed is None:
            (start,) = read_events(tmp_path / "run", "start")
            found.micro_batch = start["per_device_train_batch_size"]
        return found

    return run


# ------------------------------------------------------------------ the host


def count_waits(found: SimpleNamespace, steps: set[int]) -> dict[str, int]:
    assert found.failed is None
    assert "warning" not in found.output.lower()
    return Counter(where for step, where in found.waits if step in steps)


def check_waits(found: SimpleNamespace) -> None:
    """Between log lines, evaluations and checkpoints, the host never waits; a log line reads once."""
    assert not count_waits(found, QUIET)
    in_loop = count_waits(found, set(range(5)))
    assert in_loop.keys() <= LOUD
    assert in_loop["run/log.py record_steps"] == LOG_LINES
    # For the losses and for the counts, when the device has already finished.
    assert in_loop["evaluation/scoring.py sum_losses"] == 2 * EVALUATIONS


FP32 = ["--mixed_precision", "no", "--activation_checkpointing", "--per_device_train_batch_size", "auto"]


@pytest.mark.parametrize(
    ("options", "shards", "shown"),
    [
        (["--optim", "adamw_torch_fused", "--dataloader_num_workers", "1"], {}, "flash kernels"),
        (["--optim", "muon", "--save_steps", "4"], {}, "flash kernels"),
        (["--mixed_precision", "fp16", "--label_smoothing_factor", "0.1", "--loss_chunks", "4"], {}, " scale 1"),
        (FP32, {}, "no flash kernel"),
        (["--optim", "adamw_torch_fused", "--save_steps", "4"], {"num_processes": 2}, "FSDP"),
        (["--optim", "muon", "--save_steps", "4"], {"num_processes": 2}, "FSDP"),
    ],
)
def test_the_host_waits_for_log_lines_evaluations_and_checkpoints_alone(rehearse, options, shards, shown):
    """Operators of different devices would fail, too. Gathering and reducing shards, the norm of all of them, and the
    matrices that Muon exchanges need no waiting. shown: in the start table or a log line."""
    check_waits(found := rehearse(*RUN, *options, **shards))
    assert shown in " ".join(found.output.split())


def test_a_run_of_the_cpu_resumes_on_the_gpu(rehearse, train_shared):
    """Weights, moments and counts of a checkpoint are loaded onto the device."""
    options = [*SHAPE, *RUN, "--mixed_precision", "no"]
    checkpoint = train_shared(*options, "--eval_steps", "0", "--save_steps", "2") / "checkpoint-2"
    assert not count_waits(rehearse(*options, "--resume_from_checkpoint", checkpoint), QUIET)


def test_hosts_of_two_machines_wait_no_more_than_one(gpu):
    """DistributedDataParallel, means over processes, and the updates that Muon exchanges need no waiting."""
    assert "2 processes" in gpu.two_machines[0].output
    for found in gpu.two_machines:
        check_waits(found)


def test_an_optimizer_that_is_not_fused_makes_the_host_wait_once_in_every_step(rehearse):
    """The tests above can fail."""
    found = rehearse(*RUN, "--optim", "adamw_torch")
    assert all(count_waits(found, {step}) == {"optim/guard.py allows": 1} for step in QUIET)


# ------------------------------------------------------------------ memory


def estimate_of(*options: object, num_shards: int = 1) -> float:
    """Return the estimate of a step of this run, without the CUDA context."""
    config = load_config(["--dataset_dir", "-", *default_arguments("-", "-", WIDE), *options])[0]
    plan = MemoryPlan(config.per_device_train_batch_size, config.activation_checkpointing == "true", 1)
    model_config = build_model_config(config, PADDED, 0)
    machine = Machine("cuda", num_shards, Sharding(num_shards) if num_shards > 1 else None)
    return estimate_bytes(plan, config, model_config, machine) - PROCESS_BYTES


def test_the_estimate_is_what_a_step_takes(rehearse):
    """A tensor that is kept for too long, such as second logits or gradients, would exceed the estimate."""
    found = rehearse(*LARGE, shape=WIDE)
    assert found.failed is None
    assert 0.95 < found.peak_bytes / estimate_of(*LARGE) < 1.02


@pytest.mark.parametrize(("share", "micro_batch"), [(1.02, 16), (0.93, 8)])
def test_the_trial_step_halves_the_micro_batch_until_a_step_fits(rehearse, share, micro_batch):
    """The GPU has less memory than it reports. The trial takes no more than a step of the run."""
    limits = {"shape": WIDE, "limit_bytes": share * estimate_of(*LARGE)}
    assert rehearse(*LARGE, "--per_device_train_batch_size", "auto", **limits).micro_batch == micro_batch


@pytest.mark.parametrize(
    ("bytes_per_parameter", "message"),
    [(16.1, "one step does not fit into the memory"), (15.9, "weights and optimizer alone do not fit")],
)
def test_what_cannot_fit_ends_with_one_sentence(rehearse, bytes_per_parameter, message):
    """Weights, gradients and two moments fit without any activation, or do not even do that."""
    config = load_config(["--dataset_dir", "-", *default_arguments("-", "-", WIDE)])[0]
    num_parameters = count_parameters(build_model_config(config, PADDED, 0))
    failed = rehearse(*LARGE, shape=WIDE, limit_bytes=bytes_per_parameter * num_parameters).failed
    assert message in failed.splitlines()[-1]


@pytest.mark.parametrize(("num_shards", "options"), [(2, ["--optim", "muon"]), (8, ["--activation_checkpointing"])])
def test_the_estimate_is_what_a_step_with_shards_takes(rehearse, num_shards, options):
    """Blocks that are gathered, and the gradients that are being reduced, among it."""
    options = [*LARGE, "--global_batch_size", "256", *options]
    found = rehearse(*options, shape=WIDE, num_processes=num_shards)
    assert found.failed is None
    assert found.peak_bytes == pytest.approx(estimate_of(*options, num_shards=num_shards), rel=0.1)


def test_a_trial_step_with_shards_leaves_half_of_the_micro_batch(rehearse):
    """The others wait for the process that runs out of memory, so it ends the start, and names a size that fits."""
    options = [*LARGE, "--block_size", "128", "--per_device_train_batch_size"]
    limits = {"shape": WIDE, "num_processes": 2, "limit_bytes": 0.9 * estimate_of(*options, "16", num_shards=2)}
    failed = rehearse(*options, "auto", **limits).failed.splitlines()[-1]
    assert "--per_device_train_batch_size 8" in failed and "--resume_from_checkpoint auto" in failed
    assert rehearse(*options, "8", **limits).failed is None
