"""Whole runs on a GPU that is not there: devices match, the host does not wait for it, and what should fit fits."""

import json
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from conftest import default_arguments

from recipe.command_line import load_config
from recipe.hardware.choices import Facts
from recipe.hardware.memory import PROCESS_BYTES, MemoryPlan, estimate_bytes
from recipe.hardware.sharding import Sharding
from recipe.model.build import build_model_config
from recipe.model.size import count_parameters

SHAPE = ["--config_overrides", "n_layer=1,n_head=2,n_embd=32", "--block_size", "32"]
# Logs after the first and the last step, and evaluates before and after them.
RUN = ["--mixed_precision", "auto", "--max_steps", "4", "--logging_steps", "4", "--eval_steps", "4"]
RUN += ["--max_eval_samples", "16", "--per_device_train_batch_size", "2"]
LOG_LINES, EVALUATIONS, QUIET = 2, 2, {1, 2}  # counted at the top of the turns
LOUD = {"run/log.py train", "run/log.py paused", "run/log.py _stop_clock"}
LOUD |= {"evaluation/scoring.py sum_losses", "evaluation/generation.py generate_texts"}
LOUD |= {"checkpoint.py save", "checkpoint.py _copy", "model/weights.py copy_weights"}
PADDED = 8192
# Of this model, weights and optimizer, activations, and logits each take a good part of the memory.
WIDE = ["--config_overrides", "n_layer=4,n_head=4,n_embd=256", "--block_size", "32"]
LARGE = ["--mixed_precision", "bf16", "--pad_vocab_to_multiple_of", str(PADDED), "--global_batch_size", "32"]
LARGE += ["--per_device_train_batch_size", "16", "--max_steps", "2"]


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
    """`gpu`, on the packed dataset, with more options."""

    def run(*options: object, shape: list[str] = SHAPE, **limits: float) -> SimpleNamespace:
        return gpu([*default_arguments(dataset_dir, tmp_path / "run", shape), *options], **limits)

    return run


def count_waits(found: SimpleNamespace, steps: set[int]) -> dict[str, int]:
    return Counter(where for step, where in found.waits if step in steps)


def check_waits(found: SimpleNamespace) -> None:
    """Between log lines, evaluations and checkpoints, the host never waits; a log line reads once."""
    assert found.failed is None
    assert "warning" not in found.output.lower()
    assert not count_waits(found, QUIET)
    in_loop = count_waits(found, set(range(5)))
    assert in_loop.keys() <= LOUD
    assert in_loop["run/log.py train"] == LOG_LINES
    # For the losses and for the counts, when the device has already finished.
    assert in_loop["evaluation/scoring.py sum_losses"] == 2 * EVALUATIONS


@pytest.mark.parametrize(
    "options",
    [
        ["--optim", "adamw_torch_fused", "--dataloader_num_workers", "1"],
        ["--optim", "muon", "--data_placement", "device", "--save_steps", "4"],
        ["--mixed_precision", "fp16", "--label_smoothing_factor", "0.1", "--loss_chunks", "4"],
        ["--mixed_precision", "no", "--activation_checkpointing", "--per_device_train_batch_size", "auto"],
    ],
    ids=" ".join,
)
def test_the_host_waits_for_log_lines_evaluations_and_checkpoints_alone(rehearse, options):
    """Operators of different devices would fail, too. The start table and the log line say what the options mean."""
    check_waits(found := rehearse(*RUN, *options))
    shown = " ".join(found.output.split())
    assert ("no flash kernel (RuntimeError: No available" if "no" in options else "flash kernels, no mask") in shown
    assert (" scale 1" in shown) == ("fp16" in options)


def test_a_run_of_the_cpu_resumes_on_the_gpu(rehearse, train_shared):
    """Weights, moments and counts of a checkpoint are loaded onto the device."""
    options = [*SHAPE, *RUN, "--mixed_precision", "no"]
    checkpoint = train_shared(*options, "--eval_steps", "0", "--save_steps", "2") / "checkpoint-2"
    found = rehearse(*options, "--resume_from_checkpoint", checkpoint)
    assert found.failed is None and "warning" not in found.output.lower()
    assert not count_waits(found, QUIET)


def test_two_machines_make_their_hosts_wait_no_more(gpu):
    """Neither do DistributedDataParallel, means over processes, and the updates that Muon exchanges."""
    assert "2 processes" in gpu.two_machines[0].output
    for found in gpu.two_machines:
        check_waits(found)


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "muon"])
def test_shards_make_the_host_wait_no_more(rehearse, optim):
    """Neither do gathering and reducing, the norm of all shards, and the matrices that Muon exchanges."""
    found = rehearse(*RUN, "--optim", optim, "--save_steps", "4", num_processes=2)
    check_waits(found)
    assert "FSDP" in found.output and "2 processes x" in found.output


def test_an_optimizer_that_is_not_fused_waits_once_in_every_step(rehearse):
    """The tests above can fail."""
    found = rehearse(*RUN, "--optim", "adamw_torch")
    assert found.failed is None
    assert all(count_waits(found, {step}) == {"optim/guard.py allows": 1} for step in QUIET)


# ------------------------------------------------------------------ memory


@pytest.fixture(scope="module")
def step(gpu, tmp_path_factory, dataset_dir) -> SimpleNamespace:
    """A run with as much memory as it likes."""
    arguments = default_arguments(dataset_dir, tmp_path_factory.mktemp("step") / "run", WIDE)
    found = gpu([*arguments, *LARGE])
    config = load_config(["--dataset_dir", "-", *arguments, *LARGE])[0]
    model_config = build_model_config(config, PADDED, 0)
    found.num_parameters = count_parameters(model_config)
    found.estimate = estimate_bytes(MemoryPlan(16, False, 1), config, model_config, Facts("cuda")) - PROCESS_BYTES
    return found


def test_the_estimate_is_what_a_step_takes(step):
    """So a tensor that is kept for too long, such as other logits or gradients, would be found."""
    assert step.failed is None and "2 micro-batches x 16" in step.output
    assert 0.95 < step.peak_bytes / step.estimate < 1.02


def test_a_run_that_fits_is_left_as_it_is(rehearse, step):
    """The trial step takes no more than a step of the run."""
    found = rehearse(*LARGE, shape=WIDE, limit_bytes=step.peak_bytes)
    assert found.failed is None and "2 micro-batches x 16" in found.output


def test_the_trial_step_halves_the_micro_batch(rehearse, step, tmp_path):
    """The GPU has less memory than it reports. A size that was typed is not changed."""
    limits = {"shape": WIDE, "limit_bytes": 0.93 * step.peak_bytes}
    found = rehearse(*LARGE, "--per_device_train_batch_size", "auto", **limits)
    assert found.failed is None and "4 micro-batches x 8" in found.output
    typed = rehearse(*LARGE, "--output_dir", tmp_path / "typed", **limits)
    assert "one step does not fit into the memory" in typed.failed.splitlines()[-1]


@pytest.mark.parametrize(
    ("bytes_per_parameter", "message"),
    [(16.1, "one step does not fit into the memory"), (15.9, "weights and optimizer alone do not fit")],
)
def test_what_cannot_fit_ends_with_one_sentence(rehearse, step, bytes_per_parameter, message):
    """Weights, gradients and two moments fit without any activation, or do not even do that."""
    found = rehearse(*LARGE, shape=WIDE, limit_bytes=bytes_per_parameter * step.num_parameters)
    assert message in found.failed.splitlines()[-1]


# ------------------------------------------------------------------ memory, with shards


def estimate_of(*options: object, num_shards: int, shape: list[str] = WIDE) -> float:
    config = load_config(["--dataset_dir", "-", *default_arguments("-", "-", shape), *options])[0]
    plan = MemoryPlan(config.per_device_train_batch_size, config.activation_checkpointing == "true", 1)
    model_config = build_model_config(config, PADDED, 0)
    facts = Facts("cuda", num_shards, Sharding(num_shards))
    return estimate_bytes(plan, config, model_config, facts) - PROCESS_BYTES


@pytest.mark.parametrize("num_shards", [2, 8])
@pytest.mark.parametrize("options", [["--optim", "muon"], ["--activation_checkpointing"]], ids=" ".join)
def test_the_estimate_is_what_a_step_with_shards_takes(rehearse, num_shards, options):
    """Blocks that are gathered, and the gradients that are being reduced, among it."""
    options = [*LARGE, "--global_batch_size", "256", *options]
    found = rehearse(*options, shape=WIDE, num_processes=num_shards)
    assert found.failed is None
    assert found.peak_bytes == pytest.approx(estimate_of(*options, num_shards=num_shards), rel=0.1)


def test_a_trial_step_with_shards_leaves_half_of_the_micro_batch(rehearse):
    """The other processes wait for the one that runs out of memory, so it ends the start; the next one fits."""
    shape = ["--config_overrides", "n_layer=8,n_head=4,n_embd=512", "--block_size", "128"]
    options = [*LARGE, "--global_batch_size", "64", "--per_device_train_batch_size"]
    whole, half = (estimate_of(*options, rows, num_shards=2, shape=shape) for rows in ("32", "16"))
    limits = {"shape": shape, "num_processes": 2, "limit_bytes": 0.9 * whole}
    failed = rehearse(*options, "auto", **limits).failed.splitlines()[-1]
    assert "--resume_from_checkpoint auto starts again, with micro-batches of 16" in failed
    found = rehearse(*options, "auto", **limits)
    assert found.failed is None and "2 micro-batches x 16" in found.output
    assert found.peak_bytes == pytest.approx(half, rel=0.1)
