"""Memory: micro-batches that divide the batch, the estimate and what it chooses, and the trial step."""

import json
import re

import pytest
import torch
from accelerate import Accelerator
from helpers import ROOT, reset_accelerate

from recipe.command_line import load_config
from recipe.hardware import memory
from recipe.hardware.choices import Machine
from recipe.hardware.memory import PROCESS_BYTES, MemoryPlan, estimate_bytes, measure_usable_bytes
from recipe.hardware.trial import try_micro_batch
from recipe.model.build import build_model, build_model_config
from recipe.model.loss import LanguageModelingLoss
from recipe.model.size import count_block_matrices

GB = 10**9
EIGHT_BIT = ["--optim", "adamw_bnb_8bit"]


def config_of(*argv):
    return load_config(["--dataset_dir", "d", *argv])[0]


def recipe_of(size, *argv):
    """Return the config of a recipe, compiled in bf16, and its model's config with the padded vocabulary."""
    on_a_gpu = ["--mixed_precision", "bf16", "--dynamo_backend", "inductor"]
    config = config_of("--config", f"gpt2_{size}", *on_a_gpu, *argv)
    return config, build_model_config(config, 50304, 0)


def test_the_processes_of_a_machine_share_its_memory(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 8 * GB)
    assert measure_usable_bytes(torch.device("cpu"), 4) == 2 * GB


@pytest.mark.parametrize(
    ("argv", "num_processes", "device", "expected"),
    [
        (["--per_device_train_batch_size", "8"], 2, "cuda", [8]),
        ([], 1, "cuda", [64, 32, 16, 8, 4, 2, 1]),
        ([], 1, "cpu", [4, 2, 1]),
        (["--block_size", "8192"], 1, "cpu", [1]),
        (["--gradient_accumulation_steps", "16"], 2, "cuda", [16]),
        (["--gradient_accumulation_steps", "16", "--per_device_train_batch_size", "16"], 2, "cuda", [16]),
        (["--global_batch_size", "480"], 3, "cuda", [40, 32, 20, 16, 10, 8, 5, 4, 2, 1]),
    ],
)
def test_micro_batches_divide_the_global_batch(argv, num_processes, device, expected):
    """If one does not fit, the next is at most half of it. A typed one stays."""
    config = config_of("--block_size", "1024", "--global_batch_size", "512", *argv)
    machine = Machine(device, num_processes)
    assert memory.micro_batch_sizes(config, machine) == expected
    halves = [size for size in expected if size <= expected[0] / 2]
    assert memory.smaller_micro_batches(config, expected[0], machine) == halves


GPT2 = "n_layer=4,n_head=2,n_embd=128,activation_function="
LLAMA = "num_hidden_layers=4,hidden_size=128,intermediate_size=344,num_attention_heads=4,num_key_value_heads=2"


@pytest.mark.parametrize(
    ("overrides", "switches", "precision", "attention", "least", "most"),
    [
        (GPT2 + "gelu_new", [], "bf16", "sdpa", 0.97, 1.03),
        (GPT2 + "gelu_new", ["--bf16_residual"], "bf16", "sdpa", 0.97, 1.03),
        (GPT2 + "gelu_new", [], "bf16", "eager", 0.97, 1.03),
        (GPT2 + "gelu_new", [], "no", "sdpa", 0.97, 1.03),
        (GPT2 + "gelu_pytorch_tanh", [], "no", "eager", 0.97, 1.03),
        (LLAMA, ["--model_type", "llama"], "bf16", "sdpa", 0.7, 1.25),
    ],
)
def test_the_activations_are_what_autograd_keeps(overrides, switches, precision, attention, least, most):
    """Without compilation and logits; its hooks count them. For other types than GPT-2 only roughly."""
    options = [*switches, "--config_overrides", overrides, "--block_size", "128", "--global_batch_size", "512"]
    options += ["--attn_implementation", attention, "--mixed_precision", precision, "--dynamo_backend", "no"]
    config = config_of(*options)
    model_config = build_model_config(config, 640, 0)
    module = LanguageModelingLoss(build_model(config, model_config), 640).train()
    saved = {}
    alive = []
    weights = {p.data_ptr() for p in module.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and 640 not in tensor.shape:  # neither weights nor logits
            saved[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)  # so that no address is used twice
        return tensor

    rows = torch.randint(640, (8, 129))
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast:
        module(rows[:, :-1], rows[:, 1:])
    few, many = (estimate_bytes(MemoryPlan(n, False, 1), config, model_config, Machine("cpu")) for n in (128, 256))
    per_row = (many - few) / 128 - 128 * 640 * 12  # without the logits: three fp32 tensors
    casts = 4 * 2 * count_block_matrices(model_config) if precision == "bf16" else 0  # of weights, once for all rows
    assert least < sum(saved.values()) / (8 * per_row + casts) < most


DRY_RUNS = json.loads((ROOT / "scripts" / "benchmarks" / "memory_gpu.json").read_text())["entries"]


@pytest.mark.parametrize("name", DRY_RUNS)
def test_the_estimate_for_a_gpu_is_within_5_percent_of_dry_runs(name):
    """The dry run has two micro-batches on an absent H100, with the code that torch compiles for it."""
    size, rows = re.match(r"gpt2_(\w+), (\d+) rows", name).groups()
    options = ["--dynamo_backend", "inductor" if "compiled" in name else "no", "--global_batch_size", 2 * int(rows)]
    plan = MemoryPlan(int(rows), "checkpointing" in name, 8 if "chunks" in name else 1)
    estimate = estimate_bytes(plan, *recipe_of(size, *map(str, options)), Machine("cuda")) - PROCESS_BYTES
    tolerance = 0.05 if "compiled" in name else 0.01
    assert estimate / 1e9 == pytest.approx(DRY_RUNS[name]["dry_run_gb"], rel=tolerance)


@pytest.mark.parametrize(
    ("size", "memory_gb", "argv", "fitting"),
    [
        ("124m", 8, [], (1, 8)),
        ("774m", 16, [], ()),
        ("774m", 16, EIGHT_BIT, (1,)),
        ("1558m", 25.4, EIGHT_BIT, (1,)),
    ],
)
@pytest.mark.parametrize("num_processes", [1, 8])
def test_the_recipes_fit_the_memory_classes(size, memory_gb, argv, fitting, num_processes):
    """The classes have 8, 16 and 24 GB (25.4e9 bytes in the driver's report).

    Several processes hold the gradients twice: what they accumulate, and DDP's buckets.
    """
    plan = memory.plan_memory(*recipe_of(size, *argv), Machine("cuda", num_processes), memory_gb * GB)
    assert (plan is not None) == (num_processes in fitting)


@pytest.mark.parametrize("size", ["124m", "1558m"])
def test_more_memory_is_never_slower(size):
    """Enough of it leads to the largest micro-batch, and nothing is computed twice."""
    config, model_config = recipe_of(size)
    plans = [memory.plan_memory(config, model_config, Machine("cuda"), gb * GB) for gb in (8, 16, 25.4, 40, 80, 300)]
    costs = [memory.step_cost(plan, config, model_config) for plan in plans if plan]
    assert len(costs) >= 3
    assert costs == sorted(costs, reverse=True)
    assert plans[-1].options == {"micro_batch_size": 64, "activation_checkpointing": 0, "loss_chunks": 1}


@pytest.mark.parametrize("checkpointing", [True, False])
def test_options_that_are_not_auto_are_kept(checkpointing):
    typed = ["--per_device_train_batch_size", "2", "--loss_chunks", "3"]
    typed += ["--activation_checkpointing", str(checkpointing).lower()]
    plan = memory.plan_memory(*recipe_of("355m", *typed), Machine("cuda"), 141 * GB)
    assert plan.options == {"micro_batch_size": 2, "activation_checkpointing": checkpointing, "loss_chunks": 3}


def test_a_resumed_run_keeps_the_choices_that_fit(train, monkeypatch, tmp_path):
    """Less memory is free than a new run would want for them; if they no longer fit at all, others replace them.

    The config on disk keeps `auto`.
    """
    plans = []
    usable = int(8e9)

    def record(*arguments):
        plans.append(memory.choose_plan(*arguments))
        return plans[-1]

    monkeypatch.setattr("recipe.run.decide.choose_plan", record)
    monkeypatch.setattr("recipe.run.start.measure_usable_bytes", lambda *_: usable)
    options = ["--save_steps", 2, "--resume_from_checkpoint", "auto", "--max_steps"]
    train(*options, 3)
    usable = plans[0].total_bytes + 1  # enough, but not with the margin
    train(*options, 3, output_dir=tmp_path / "new")
    assert plans[1].options != plans[0].options
    train(*options, 4)
    assert plans[2].options == plans[0].options
    usable = 10**6
    run = train(*options, 6)
    assert plans[3].options["micro_batch_size"] == plans[3].options["activation_checkpointing"] == 1
    assert "\nactivation_checkpointing: auto\n" in (run / "training_config.yaml").read_text()


# ------------------------------------------------------------------ the trial step


class CpuWithATrial(str):
    """The name of the CPU, with another type: there, a trial step is made."""

    type = "another"


class Limited(torch.nn.Linear):
    """Runs out of memory above `most` rows, and records each trial."""

    most = 4

    def forward(self, inputs, targets):
        self.tried.append(len(inputs))
        if len(inputs) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return {"loss": super().forward(inputs.float()).mean()}


def try_limited(module):
    """Try 15 rows of 30 on a real Accelerator whose CPU does not look like one. Returns the size and the optimizer."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.5, fused=True)
    optimizer.param_groups[0]["initial_lr"] = 0.1
    module.tried = []
    reset_accelerate()
    accelerator = Accelerator(cpu=True)
    accelerator.state.device = CpuWithATrial("cpu")
    config = config_of("--block_size", "8", "--global_batch_size", "30")
    try:
        return try_micro_batch(accelerator, module, optimizer, 15, config, Machine("another")), optimizer
    finally:
        reset_accelerate()


def test_the_trial_changes_nothing_but_the_micro_batch():
    """The next one is at most half of a size that does not fit, and divides the batch."""
    module = Limited(8, 1)
    weights = [p.clone() for p in module.parameters()]
    size, optimizer = try_limited(module)
    assert size == 3
    assert list(dict.fromkeys(module.tried)) == [15, 6, 3]
    for parameter, before in zip(module.parameters(), weights, strict=True):
        assert torch.equal(parameter, before)
        assert parameter.grad is None
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_an_error_of_the_model_is_not_taken_for_a_lack_of_memory():
    module = Limited(7, 1)  # the inputs have 8 columns
    module.most = 15
    with pytest.raises(RuntimeError):  # the one of torch, neither a `UserError` nor another size
        try_limited(module)
    assert module.tried == [15]
