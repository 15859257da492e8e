"""Two processes are one run, however they share the work, and what happens to one of them happens to both.

All runs of two processes are made by one launch of tests/programs/two_processes.py, which says what their names mean.
Each is compared with the run of one process that has the same options.
"""

import json
import shutil

import pytest
import torch
from helpers import ROOT, TINY, default_arguments, launch, read_events, read_summary, read_weights, values_of
from safetensors.torch import load_file
from tiny_runs import assert_equal_losses, options_of, start_from
from transformers import AutoModelForCausalLM

from recipe.checkpoint import OPTIMIZER_NAME, list_checkpoints, read_exported

STEPS = 5
SHORT = ["--max_steps", STEPS, "--eval_steps", "3", "--save_steps", "2", "--global_batch_size", "8"]
SHAPE = [*TINY, "--config_overrides", "n_layer=1"]
ODD = ["--config_overrides", "n_head=3,n_embd=33"]  # a width that two processes cut unevenly
INDUCTOR = ["--per_device_train_batch_size", "2", "--dynamo_backend", "inductor"]
LESS_MEMORY = ["--activation_checkpointing", "--loss_chunks", "3"]
AUTO = ["--resume_from_checkpoint", "auto"]  # a run of one process, whose second checkpoint is there
REFERENCES = {
    "plain": [],
    "smoothed": ["--label_smoothing_factor", "0.1"],
    "muon": ["--optim", "muon", "--learning_rate", "0.02", "--max_grad_norm", "0.5"],
    "deep": ["--config_overrides", "n_layer=12,n_head=2,n_embd=16"],
    "odd muon": [*ODD, "--optim", "muon"],
    "llama": [*options_of("llama"), "--optim", "muon"],  # whose square matrices are Linear
    "odd adamw": [*ODD, "--optim", "adamw_torch"],  # not fused
}
SPLITS = {"ddp traced 1x4": 4, "ddp traced 2x2": 2, "ddp traced 4x1": 1}  # micro-batches of each process
LAYOUTS = {
    **{name: ("plain", ["--per_device_train_batch_size", str(size)]) for name, size in SPLITS.items()},
    "ddp inductor": ("plain", INDUCTOR),
    "ddp other machine": ("plain", ["--dynamo_backend", "auto", "--attn_implementation", "auto"]),
    "ddp inductor, less memory": ("plain", [*INDUCTOR, *LESS_MEMORY]),
    "ddp continued": ("plain", AUTO),
    "ddp muon, small stacks": ("muon", []),
    "fsdp muon": ("odd muon", []),
    "fsdp adamw": ("odd adamw", []),
    "fsdp llama": ("llama", []),
    "fsdp continued": ("odd muon", AUTO),
    "ddp continued after fsdp": ("odd muon", ["--resume_from_checkpoint", "fsdp muon/checkpoint-2"]),
    "fsdp compiled": ("plain", [*INDUCTOR, *LESS_MEMORY]),
    "fsdp compiled, twelve layers": ("deep", INDUCTOR),  # more than a function may be compiled again (8, torch 2.13)
    "fsdp without resharding": ("smoothed", INDUCTOR),
}
DROPOUT = ["--config_overrides", "resid_pdrop=0.1"]
FAULTY = {
    "ddp bad loss": [*INDUCTOR, "--lr_scheduler_type", "constant"],
    **dict.fromkeys(("ddp signal", "ddp slow disk", "ddp other options", "ddp missing data"), []),
    "ddp other micro-batch": [],
    "ddp other launcher": ["--mixed_precision", "auto"],
}


@pytest.fixture(scope="module")
def references(train_shared, other):
    """The runs of one process."""

    def make(options, real=False):
        return train_shared(*SHORT, *with_shape(options), shape=[], real=real)

    runs = {name: make(options, "odd" in name) for name, options in REFERENCES.items()}
    runs["mixture"] = make(mixture_with(other))
    runs["stage"] = make(stage_of(other, runs["odd muon"]))
    return runs


def with_shape(options):
    return options if "--model_type" in options else [*SHAPE, *options]


def mixture_with(other):
    """Add a dataset to the usual one: a list that is typed twice is joined."""
    return ["--dataset_dir", str(other), "--dataset_weights", "0.3", "0.7"]


def stage_of(other, run):
    """Go on from a run with other data, and keep the best model."""
    keep = ["--optim", "muon", "--load_best_model_at_end", "true", "--eval_steps", "1"]
    return [*ODD, *keep, *mixture_with(other), *start_from(run, 2)]


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory, dataset_dir, other, references):
    """Start two processes as accelerate_configs/multi_cpu.yaml says. Returns the folder of their runs."""
    folder = tmp_path_factory.mktemp("two_processes")
    runs = FAULTY | {"ddp mixture": mixture_with(other), "ddp dropout": DROPOUT}
    runs["ddp dropout, resumed"] = [*DROPOUT, "--resume_from_checkpoint", "ddp dropout/checkpoint-2"]
    runs |= dict.fromkeys(("ddp stage", "fsdp stage"), stage_of(other, references["odd muon"]))
    for name, (reference, options) in LAYOUTS.items():
        runs[name] = [*REFERENCES[reference], *options]
        if options == AUTO:
            shutil.copytree(references[reference] / "checkpoint-2", folder / name / "checkpoint-2")
            shutil.copy(references[reference] / "metrics.jsonl", folder / name)
    runs = {name: with_shape(options) for name, options in runs.items()}
    result = launch(
        [json.dumps(runs), *default_arguments(dataset_dir, folder / "unused", []), *SHORT],
        folder,
        ("--config_file", str(ROOT / "accelerate_configs" / "multi_cpu.yaml")),
        ROOT / "tests" / "programs" / "two_processes.py",
        OMP_NUM_THREADS="1",
        CUDA_VISIBLE_DEVICES="",
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return folder


@pytest.fixture
def found(two_processes):
    """What each of the two processes saw."""
    return [json.loads((two_processes / f"found{rank}.json").read_text()) for rank in (0, 1)]


# ------------------------------------------------------------------ one run


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_has_the_losses_of_one_process(two_processes, references, name):
    """In training and validation, in fp32 to 1e-5; also compiled, with less memory, and continued from another."""
    assert read_summary(two_processes / name)["num_processes"] == 2
    after = 2 if "continued" in name else -1
    assert_equal_losses(two_processes / name, references[LAYOUTS[name][0]], after)


@pytest.mark.parametrize("name", ["fsdp muon", "fsdp adamw", "fsdp continued", "ddp continued after fsdp"])
def test_samples_do_not_depend_on_the_layout(two_processes, references, name):
    samples = [read_events(run, "sample")[-1] for run in (two_processes / name, references[LAYOUTS[name][0]])]
    assert samples[0] == samples[1]


@pytest.mark.parametrize("name", SPLITS)
def test_gradients_are_exchanged_once_per_step(two_processes, found, name):
    """However many micro-batches a step has, each process sends every gradient once, in fp32."""
    assert read_summary(two_processes / name)["per_device_train_batch_size"] == SPLITS[name]
    num_parameters = AutoModelForCausalLM.from_pretrained(two_processes / name).num_parameters()
    num_parameters += 12 * 32  # the vocabulary of 500 is padded
    for process in found:
        assert process[name]["gradients"] == [["float", num_parameters]] * STEPS


def test_two_processes_share_the_work_of_muon_and_have_the_same_bits(two_processes, references, found):
    """Each process orthogonalizes four of the padded stacks: three and one square matrices, and two others."""
    name = "ddp muon, small stacks"
    assert [process[name]["matrices"] for process in found] == [4 * STEPS] * 2
    assert found[0][name]["weights"] == found[1][name]["weights"]
    assert len(set(found[0][name]["weights"])) == STEPS
    weights, expected = (load_file(run / "model.safetensors") for run in (two_processes / name, references["muon"]))
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-5)


def test_the_order_and_the_scores_of_a_mixture_do_not_depend_on_the_layout(two_processes, references):
    runs = two_processes / "ddp mixture", references["mixture"]
    assert_equal_losses(*runs)
    parts, expected = (read_events(run, "eval")[-1]["mixture"] for run in runs)
    assert [of["loss"] for of in parts.values()] == pytest.approx([of["loss"] for of in expected.values()], abs=1e-5)


@pytest.mark.parametrize("name", ["ddp stage", "fsdp stage"])
def test_a_stage_has_the_same_examples_and_the_same_best_model_in_every_layout(two_processes, references, name):
    runs = two_processes / name, references["stage"]
    assert_equal_losses(*runs, tolerance=1e-6)
    assert values_of(runs[0], "step", "eval") == [2, 3, 4, 5]
    step, expected = (read_exported(run)[0] for run in runs)
    assert step == expected
    weights, expected = (load_file(run / "model.safetensors") for run in runs)
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-5)


def test_each_of_two_processes_resumes_with_its_own_random_numbers(two_processes):
    """The runs are equal bit for bit, with dropout."""
    whole = two_processes / "ddp dropout"
    resumed = two_processes / "ddp dropout, resumed"
    assert values_of(resumed, "loss") == values_of(whole, "loss", after=2)
    assert read_weights(resumed) == read_weights(whole)


def test_a_checkpoint_of_shards_holds_the_whole_tensors_of_one_process(two_processes, references):
    checkpoints = [run / "checkpoint-2" for run in (two_processes / "fsdp muon", references["odd muon"])]
    for name, load in (("model.safetensors", load_file), (OPTIMIZER_NAME, torch.load)):
        found, expected = (load(checkpoint / name) for checkpoint in checkpoints)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert AutoModelForCausalLM.from_pretrained(checkpoints[0]).config.vocab_size == 500


@pytest.mark.parametrize(
    ("name", "reference", "options"),
    [("ddp signal", "plain", []), ("fsdp muon", "odd muon", [*ODD, "--optim", "muon"])],
)
def test_one_process_continues_a_run_of_two(two_processes, references, train, name, reference, options):
    resumed = train(*SHORT, *with_shape(options), *start_from(two_processes / name, 2))
    assert values_of(resumed, "loss") == pytest.approx(values_of(references[reference], "loss", after=2), abs=1e-5)


# ------------------------------------------------------------------ what happens to one happens to both


def test_a_bad_loss_on_one_process_skips_the_update_on_both(two_processes, found):
    """Though the graph is compiled and no gradient is bad. The other steps count."""
    weights, others = (process["ddp bad loss"]["weights"] for process in found)
    assert weights == others
    assert [before == now for before, now in zip(weights, weights[1:], strict=False)] == [False, True, False, False]
    losses = values_of(two_processes / "ddp bad loss", "loss")
    assert [loss is None for loss in losses] == [False, False, True, False, False]
    assert values_of(two_processes / "ddp bad loss", "skipped_steps") == [0, 0, 1, 1, 1]


def test_a_signal_to_one_of_two_processes_stops_both_after_the_same_step(two_processes, found):
    """Both processes leave together, after the checkpoint: if one left first, the launcher would end the other."""
    signaled, others = (process["ddp signal"] for process in found)
    assert (signaled["status"], others["status"]) == (75, 75)
    assert abs(signaled["left at"] - others["left at"]) < 1
    assert [path.name for path in list_checkpoints(two_processes / "ddp signal")] == ["checkpoint-2"]


def test_time_passes_alike_on_all_processes(found):
    """Progress follows from it, and from progress the learning rate and when to save; one process makes the sample."""
    seconds, others = (process["ddp traced 1x4"]["evaluation seconds"] for process in found)
    assert seconds == others
    assert any(seconds)


def test_a_slow_disk_does_not_end_a_run(two_processes, found):
    """If a checkpoint is due before the previous one is on disk, all processes wait, longer than for a step."""
    name = "ddp slow disk"
    assert [process[name]["status"] for process in found] == [0, 0]
    assert [path.name for path in list_checkpoints(two_processes / name)] == [f"checkpoint-{n}" for n in (2, 4, 5)]


def test_a_process_that_hangs_ends_the_others_after_ten_minutes(found):
    """As accelerate_configs/README.md says."""
    assert [process["minutes"] for process in found] == [10, 10]


def test_what_all_machines_can_do_decides(two_processes, found):
    """A compiler that only one machine has is not used. The memory and the cores of the smaller one count."""
    (start,) = read_events(two_processes / "ddp other machine", "start")
    assert start["dynamo_backend"] == "no"
    assert {process["ddp other machine"]["status"] for process in found} == {0}


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("other options", ["learning_rate 0.003 and 1.1"]),
        ("other micro-batch", ["per_device_train_batch_size 'auto' and 2"]),
        ("other launcher", ["launcher_precision 'no' and 'bf16'"]),
        ("missing data", ["missing", "process 1"]),
    ],
)
def test_a_mistake_on_one_process_is_reported_by_both(found, mistake, words):
    """Different options, and data that one machine lacks."""
    for process in found:
        for word in words:
            assert word in process[f"ddp {mistake}"]["status"]
