"""The memory estimate: its parts, what it counts, and the options that it chooses."""

import contextlib
import dataclasses
import json
import re
from types import SimpleNamespace

import pytest
import torch
from conftest import read_events
from transformers import AutoModelForCausalLM, GPT2Config

from recipe.command_line import load_config
from recipe.errors import UserError
from recipe.hardware import memory
from recipe.hardware.choices import Choice
from recipe.hardware.memory import Setting, estimate_parts, plan_memory, step_cost
from recipe.model.build import build_model, build_model_config
from recipe.model.loss import LanguageModelingLoss
from recipe.model.size import count_parameters

GB = 10**9
GPU = Setting("cuda", "bf16", compiled=True)
CPU = Setting("cpu", "no", compiled=False)
SIZES = ("124m", "355m", "774m", "1558m")
FUSED = "adamw_torch_fused"


def recipe_of(size, *argv):
    """Return the config of a recipe and its model's config with the padded vocabulary."""
    config = load_config(["--config", f"gpt2_{size}", "--dataset_dir", "d", *argv])[0]
    return config, build_model_config(config, 50304, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_inner": 7},
        {"tie_word_embeddings": False},
        {"n_layer": 1, "n_embd": 24, "n_head": 2},
        {"n_positions": 3},
    ],
)
def test_parameters_are_counted_from_the_config(changes):
    """The count equals that of the built model."""
    model_config = GPT2Config(**{"vocab_size": 50304, **changes})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
    assert count_parameters(model_config) == model.num_parameters()


def test_the_parts_of_gpt2_124m():
    """Computed by hand for 8 rows of 1,024 tokens, compiled, bf16 with a bf16 residual stream, fused AdamW."""
    parts = estimate_parts(*recipe_of("124m", "--bf16_residual"), GPU, 8, False, 1, FUSED)
    num_parameters, tokens, head = 124_475_904, 8192, 50304 * 768
    block = tokens * 768 * (2 * 2 + 6 * 2 + 4 * 2 * 2) + 2 * 12 * 768 * 768
    assert parts["weights"] == 4 * num_parameters == 497_903_616
    assert parts["optimizer"] == 8 * num_parameters
    assert parts["gradients"] == 4 * num_parameters  # accumulated: 512 rows per step
    assert parts["activations"] == 12 * block + tokens * 768 * (2 + 2)
    assert parts["logits"] == tokens * 50304 * 2
    assert parts["workspace"] == 4 * head + 2 * head  # the fp32 gradient of the embeddings, and their bf16 copy


def test_a_compiled_backward_returns_all_gradients_beside_the_accumulated_ones():
    """With few activations, the end of backward takes the most: two copies of the gradients, and one of the head's."""
    config, model_config = recipe_of("1558m")
    num_parameters = count_parameters(model_config)
    accumulating = estimate_parts(config, model_config, GPU, 1, True, 8, FUSED)
    assert accumulating["gradients"] == 8 * num_parameters and accumulating["logits"] == 0
    alone = dataclasses.replace(config, global_batch_size=1)
    assert estimate_parts(alone, model_config, GPU, 1, True, 8, FUSED)["gradients"] == 4 * num_parameters
    two = dataclasses.replace(GPU, num_processes=2)  # DDP's buckets hold another copy
    assert estimate_parts(alone, model_config, two, 1, True, 8, FUSED)["gradients"] == 8 * num_parameters
    eager = estimate_parts(config, model_config, dataclasses.replace(GPU, compiled=False), 1, True, 8, FUSED)
    assert eager["gradients"] == 4 * num_parameters


def test_8_bit_moments_leave_embeddings_in_32():
    config, model_config = recipe_of("124m")
    blocks, num_parameters = 12 * 12 * 768 * 768, 124_475_904
    parts = estimate_parts(config, model_config, GPU, 8, False, 1, "adamw_bnb_8bit")
    assert parts["optimizer"] == 8 * (num_parameters - blocks) + blocks * 2 + blocks // 256 * 2 * 4


@pytest.mark.parametrize(
    ("precision", "attention", "bf16_residual", "checkpointing"),
    [
        ("bf16", "sdpa", False, False),
        ("bf16", "sdpa", True, False),
        ("bf16", "eager", False, False),
        ("bf16", "sdpa", False, True),
        ("no", "sdpa", False, False),
        ("no", "eager", False, False),
    ],
)
def test_the_activations_are_what_autograd_keeps(precision, attention, bf16_residual, checkpointing):
    """Without compilation, counted through autograd's hooks, except the logits: within 3%."""
    shape = ["--config_overrides", "n_layer=4,n_head=2,n_embd=128", "--block_size", "128"]
    options = ["--dataset_dir", "d", "--attn_implementation", attention, "--global_batch_size", "8"]
    options += ["--activation_checkpointing", str(checkpointing), "--bf16_residual", str(bf16_residual)]
    config = load_config([*shape, *options])[0]
    model_config = build_model_config(config, 640, 0)
    module = LanguageModelingLoss(build_model(config, model_config, attention), 640).train()
    saved, weights = {}, {p.data_ptr() for p in module.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and 640 not in tensor.shape:  # neither weights nor logits
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    rows = torch.randint(640, (8, 129))
    autocast = torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast:
        module(rows[:, :-1], rows[:, 1:])
    setting = Setting("cpu", precision, compiled=False)
    expected = estimate_parts(config, model_config, setting, 8, checkpointing, 1, FUSED)["activations"]
    if checkpointing:  # by hand: the estimate's largest moment comes later, when backward computes a block again
        expected = 8 * 128 * 128 * (4 * 4 + 4 + 2)
    assert sum(saved.values()) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("compiled", [False, True])
def test_what_saves_memory_lowers_the_estimate(compiled):
    """Fewer rows, checkpointing, chunks, a bf16 residual stream and 8 bits take less; processes and fp32 more."""
    config, model_config = recipe_of("355m")

    def total(rows, checkpointing=False, chunks=1, optim=FUSED, config=config, **changes):
        setting = dataclasses.replace(GPU, compiled=compiled, **changes)
        return sum(estimate_parts(config, model_config, setting, rows, checkpointing, chunks, optim).values())

    base = total(64)
    assert total(4) < base and total(64, checkpointing=True) < base and total(64, chunks=8) < base
    assert total(64, optim="adamw_bnb_8bit") < base < total(64, mixed_precision="no")
    assert total(64, config=dataclasses.replace(config, bf16_residual=True)) < base
    assert total(64, True, 8) < min(total(64, True), total(64, chunks=8))
    assert total(64, num_processes=8) >= base


@pytest.mark.parametrize(
    ("size", "memory_gb", "expected"),
    [
        ("124m", 8, True),
        ("355m", 8, True),
        ("355m", 12, True),
        ("774m", 16, True),
        ("774m", 25.4, True),
        ("1558m", 25.4, True),
        ("1558m", 40, True),
        ("1558m", 16, False),
        ("774m", 8, False),
    ],
)
@pytest.mark.parametrize("num_processes", [1, 8])
def test_the_recipes_fit_the_memory_classes(size, memory_gb, expected, num_processes):
    """memory_gb: of a card, as the driver reports it; a "24 GB" card has 25.4e9 bytes. A share of 8% stays free."""
    config, model_config = recipe_of(size)
    setting = dataclasses.replace(GPU, num_processes=num_processes)
    plan = plan_memory(config, model_config, setting, memory_gb * GB)
    assert (plan is not None) == expected
    if plan:
        assert plan.total_bytes <= 0.92 * memory_gb * GB
        assert config.global_batch_size % (plan.micro_batch_size * num_processes) == 0


@pytest.mark.parametrize("size", SIZES)
def test_more_memory_is_never_slower(size):
    config, model_config = recipe_of(size)
    plans = [plan_memory(config, model_config, GPU, gb * GB) for gb in (16, 25.4, 40, 80, 141)]
    costs = [(plan.optim != FUSED, step_cost(plan, config, model_config)) for plan in plans if plan]
    assert costs == sorted(costs, reverse=True) and len(costs) >= 4


def test_enough_memory_leaves_the_defaults():
    """The largest micro-batch, nothing computed twice, fused AdamW."""
    config, model_config = recipe_of("124m")
    plan = plan_memory(config, model_config, GPU, 80 * GB)
    assert (plan.micro_batch_size, plan.activation_checkpointing, plan.loss_chunks) == (64, False, 1)
    assert plan.optim == FUSED
    on_cpu = plan_memory(config, model_config, CPU, 80 * GB)
    assert (on_cpu.micro_batch_size, on_cpu.activation_checkpointing, on_cpu.loss_chunks) == (4, False, 1)
    assert on_cpu.optim == FUSED


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--per_device_train_batch_size", "2"], "micro_batch_size", 2),
        (["--activation_checkpointing"], "activation_checkpointing", True),
        (["--activation_checkpointing", "false"], "activation_checkpointing", False),
        (["--loss_chunks", "3"], "loss_chunks", 3),
        (["--optim", "adamw_torch"], "optim", "adamw_torch"),
        (["--optim", "adamw_bnb_8bit"], "optim", "adamw_bnb_8bit"),
    ],
)
@pytest.mark.parametrize("memory_gb", [16, 141])
def test_options_that_are_not_auto_are_kept(argv, name, value, memory_gb):
    plan = plan_memory(*recipe_of("355m", *argv), GPU, memory_gb * GB)
    assert getattr(plan, name) == value


def test_8_bit_is_the_last_resort():
    """Whatever fp32 moments cost in speed, they are kept where they fit; a CPU, which can swap, always keeps them."""
    config, model_config = recipe_of("774m")
    assert plan_memory(config, model_config, GPU, 25.4 * GB).optim == FUSED
    assert plan_memory(config, model_config, GPU, 16 * GB).optim == "adamw_bnb_8bit"
    assert not plan_memory(dataclasses.replace(config, optim=FUSED), model_config, GPU, 16 * GB).compiled
    fixed = dataclasses.replace(config, optim=FUSED, dynamo_backend="inductor")
    assert plan_memory(fixed, model_config, GPU, 16 * GB) is None
    on_cpu = dataclasses.replace(CPU, mixed_precision="bf16")
    assert plan_memory(config, model_config, on_cpu, 12 * GB) is None


def test_only_an_eager_step_on_cuda_gets_loss_chunks_unasked():
    """Inductor would fuse them there, so that they take more memory. On a CPU it does not."""

    def chunks(setting, *argv):
        plans = memory.list_plans(*recipe_of("355m", *argv), setting)
        return {(plan.compiled, plan.loss_chunks) for plan in plans}

    assert chunks(GPU) == {(True, 1), (False, 1), (False, 8)}
    assert chunks(GPU, "--loss_chunks", "3") == {(True, 3), (False, 3)}
    assert chunks(dataclasses.replace(CPU, compiled=True)) == {(True, 1), (True, 8), (False, 1), (False, 8)}


SHAPES = {
    "1M": "n_layer=4,n_head=2,n_embd=128 --pad_vocab_to_multiple_of 2048 --block_size 256 --global_batch_size 8",
    "30M": "n_layer=6,n_head=6,n_embd=384 --pad_vocab_to_multiple_of 50304 --block_size 512 --global_batch_size 4",
    "124M": "n_layer=12,n_head=12,n_embd=768 --pad_vocab_to_multiple_of 50304 --block_size 1024 --global_batch_size 2",
}


# Resident memory of recipe/train.py on two cores (torch 2.13). Commit 90dd1a3 has the program and all 18 peaks.
@pytest.mark.parametrize(
    ("shape", "rows", "precision", "backend", "attention", "checkpointing", "chunks", "peak_bytes"),
    [
        ("124M", 2, "bf16", "no", "sdpa", False, 1, 5_037_064_192),
        ("30M", 4, "no", "inductor", "sdpa", False, 1, 1_749_946_368),
        ("30M", 4, "bf16", "inductor", "sdpa", False, 8, 1_637_400_576),
        ("30M", 4, "bf16", "no", "sdpa", False, 8, 1_581_395_968),
        ("30M", 4, "bf16", "inductor", "sdpa", True, 1, 1_290_371_072),
        ("30M", 1, "bf16", "no", "sdpa", False, 1, 1_428_680_704),
        ("1M", 8, "bf16", "no", "eager", False, 1, 686_022_656),
    ],
)
def test_the_estimate_agrees_with_measured_peaks(
    shape, rows, precision, backend, attention, checkpointing, chunks, peak_bytes
):
    """Within 15%."""
    argv = ["--dataset_dir", "d", "--attn_implementation", attention, "--config_overrides", *SHAPES[shape].split()]
    config = load_config(argv)[0]
    model_config = build_model_config(config, config.pad_vocab_to_multiple_of, 0)
    setting = Setting("cpu", precision, backend == "inductor")
    parts = estimate_parts(config, model_config, setting, rows, checkpointing, chunks, FUSED)
    assert sum(parts.values()) == pytest.approx(peak_bytes, rel=0.15)


# ------------------------------------------------------------------ in a run


def test_the_start_table_and_the_config_of_a_run(train, capsys):
    """The table says what was chosen; the config keeps auto, except for the optimizer, whose state has a type."""
    output_dir = train()
    assert "fits without recomputation" in capsys.readouterr().out
    config = (output_dir / "training_config.yaml").read_text()
    assert "activation_checkpointing: auto" in config and "loss_chunks: auto" in config and f"optim: {FUSED}" in config


class CpuNamedCuda(str):
    """The name of the CPU, with the type of a GPU."""

    type = "cuda"


def test_8_bit_that_is_needed_but_not_installed_names_its_extra(monkeypatch):
    """The plan of a device on which nothing else fits ends the run in one sentence."""
    config, _ = recipe_of("774m", "--mixed_precision", "bf16")
    monkeypatch.setattr(memory, "measure_usable_bytes", lambda *_: 16 * GB)
    monkeypatch.setattr(memory.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(memory, "choose_dynamo_backend", lambda *_: Choice("inductor", "a test"))
    accelerator = SimpleNamespace(device=CpuNamedCuda("cpu"), num_processes=1, gather=lambda tensor: tensor)
    model_config = build_model_config(config, 50257, 0)
    with pytest.raises(UserError, match=r"only 8-bit AdamW fits into the 16.0 GB .*\[adamw_8bit\]"):
        memory.plan_device(config, model_config, accelerator, Choice("bf16", "a test"))


def test_a_run_that_does_not_fit_is_tried_with_all_that_saves_memory(train, monkeypatch, capsys):
    """An estimate refuses nothing, and the losses are the same."""
    plain = [event["loss"] for event in read_events(train(), "train")]
    monkeypatch.setattr(memory, "measure_usable_bytes", lambda *_: 10**6)
    frugal = train("--overwrite")
    assert "does not fit, but is tried" in capsys.readouterr().out
    assert [event["loss"] for event in read_events(frugal, "train")] == pytest.approx(plain, abs=2e-5)
    (start,) = read_events(frugal, "start")
    assert start["per_device_train_batch_size"] == 1


def test_a_resumed_run_keeps_the_choices_that_fit(train, monkeypatch, capsys):
    """Free memory differs from one start to the next; the weights do not, unless the choices no longer fit at all."""
    usable = int(8e9)
    monkeypatch.setattr(memory, "measure_usable_bytes", lambda *_: usable)
    run = train("--max_steps", 2, "--save_steps", 2)
    state = json.loads((run / "checkpoint-2" / "training_state.json").read_text())
    assert state["memory_choices"]["activation_checkpointing"] is False
    found = re.search(r"memory +([\d.]+) of 8.0 GB", capsys.readouterr().out)
    usable = int(1e9 * (float(found[1]) + 0.01))  # enough, but not with the margin
    extended = ["--max_steps", 4, "--resume_from_checkpoint", "latest", "--save_steps", 2]
    train(*extended)
    assert "the choices of the checkpoint" in capsys.readouterr().out
    usable = 10**6
    train("--max_steps", 6, *extended[2:])
    assert "does not fit, but is tried" in capsys.readouterr().out


def test_an_evaluation_needs_no_moments():
    """It is never refused for an optimizer that is not installed."""
    config, model_config = recipe_of("1558m")
    evaluates = dataclasses.replace(config, eval_only=True, model_name_or_path="m")
    assert plan_memory(config, model_config, GPU, 25.4 * GB).optim == "adamw_bnb_8bit"
    assert all(plan.optim == FUSED for plan in memory.list_plans(evaluates, model_config, GPU))


def test_a_resumed_run_keeps_its_optimizer(train):
    """`auto` takes the checkpoint's, whatever it would choose now; another one is refused."""
    output_dir = train("--optim", "adamw_torch", "--save_steps", "2", "--max_steps", "2")
    train("--max_steps", "4", "--resume_from_checkpoint", "auto")
    assert "optim: adamw_torch\n" in (output_dir / "training_config.yaml").read_text()
    with pytest.raises(UserError, match="optim 'adamw_torch' -> 'adamw_torch_fused'"):
        train("--optim", FUSED, "--resume_from_checkpoint", "auto")
