"""The rungs of the optimization ladder, from what tutorials write first up to the recipe's defaults.

Each rung adds one option of recipe/train.py to those below it. The machine decides which rungs can run. `Setting`
holds what all runs share.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from recipe.benchmark.machine import Machine
from recipe.benchmark.measure import LAP, Setting, combine, to_arguments
from recipe.command_line import load_config
from recipe.config import TrainConfig
from recipe.data.packed import open_packed_dataset
from recipe.data.prepare import open_dataset_for
from recipe.errors import UserError
from recipe.model.build import build_model, build_model_config
from recipe.model.size import count_flops_per_token

# A GPT-2 of 30 M parameters with GPT-2's vocabulary, because larger ones take minutes per step on a CPU.
CPU_SIZE = {"block_size": 256, "config_overrides": "n_layer=6,n_head=6,n_embd=384"}
CPU_MOST_PARAMETERS = 40_000_000
GPT2_VOCAB_SIZE = 50257

# Every rung trains at a constant rate and does nothing else.
RUN_OPTIONS = {
    "learning_rate": 3e-4,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
    "eval_on_start": False,
    "eval_steps": 0,
    "save_steps": 0,
}
BOTTOM = {
    "config_overrides": "tie_word_embeddings=false",
    "mixed_precision": "no",
    "tf32": False,
    "dynamo_backend": "no",
    "attn_implementation": "eager",
    "pad_vocab_to_multiple_of": 1,
    "optim": "adamw_torch",
    "python_lists": True,
    "logging_steps": 1,
    "loss_in_graph": False,
    "bf16_residual": False,
    "sigmoid_gelu": False,
    "index_mask": False,
    "huge_pages": False,
}
SMALL_CARD = "8gb"
REFERENCE = "tied"  # losses are compared with this rung: fp32, and the same model as all rungs above it


@dataclass(frozen=True)
class Rung:
    """One switch. on: the options of recipe/train.py that it changes. why_not: why this machine cannot run it."""

    name: str
    what: str  # at most 27 characters, with "off: " in front
    on: dict[str, Any] = field(default_factory=dict)
    why_not: str | None = None


def build_rungs(machine: Machine) -> list[Rung]:
    """Return the rungs from the bottom to the recipe's defaults."""
    cuda, cpu = machine.device == "cuda", machine.device == "cpu"
    half = "fp16" if cuda and not machine.bf16 else "bf16"
    no_huge_pages = None if cpu and machine.huge_pages else "needs a CPU run on Linux with transparent huge pages"
    no_tf32 = None if machine.tf32 else f"{machine.name} has no TF32"
    no_half = None if cuda or machine.bf16 else f"{machine.name} has no bf16 units"
    no_inductor = None if machine.compiler else "inductor needs a compiler"
    cuda_defaults = [
        _bf16_residual(machine),
        Rung("sigmoid_gelu", "GELU by a sigmoid", {"sigmoid_gelu": True}, no_inductor),
        Rung("index_mask", "index mask for padding", {"index_mask": True}, no_inductor),
    ]
    return [
        Rung("bottom", "what tutorials write first"),
        Rung("tied", "tied weights", {"config_overrides": "tie_word_embeddings=true"}),
        Rung("huge_pages", "huge pages", {"huge_pages": True}, no_huge_pages),
        Rung("tf32", "TF32", {"tf32": True}, no_tf32),
        Rung("half", half if half == "bf16" else "fp16 + gradient scaler", {"mixed_precision": half}, no_half),
        Rung("compile", "compile (inductor)", {"dynamo_backend": "inductor"}, no_inductor),
        Rung("flash", "sdpa (flash, no mask)", {"attn_implementation": "sdpa"}),
        Rung("padding", "padded vocabulary", {"pad_vocab_to_multiple_of": 128}),
        Rung("fused", "fused AdamW", {"optim": "adamw_torch_fused"}),
        Rung("packed", "prefetched packed rows", {"python_lists": False}),
        Rung("no_sync", "no host sync", {"logging_steps": LAP}),
        Rung("loss_in_graph", "loss in the graph", {"loss_in_graph": True}),
        Rung(
            "attention",
            "plain attention (auto)",
            {"attn_implementation": "auto"},
            None if cpu else "auto is sdpa on this device",
        ),
        *(cuda_defaults if cuda else []),
    ]


def _bf16_residual(machine: Machine) -> Rung:
    why_not = None if machine.bf16 else "needs bf16 units"
    return Rung("bf16_residual", "bf16 residual stream", {"bf16_residual": True}, why_not)


def build_extras(machine: Machine, micro_batch: int, global_batch: int) -> list[Rung]:
    """Return the switches beyond the defaults; each is added to those kept so far, and kept if it pays."""
    sizes = [micro_batch * 2**k for k in range(1, 8) if micro_batch * 2**k <= global_batch]
    tuned = {"dynamo_mode": "max-autotune-no-cudagraphs"}
    no_inductor = None if machine.compiler else "inductor needs a compiler"
    return [
        *(Rung(f"micro_batch_{n}", f"micro-batch {n}", {"per_device_train_batch_size": n}) for n in sizes),
        *([] if machine.device == "cuda" else [_bf16_residual(machine)]),  # CUDA's defaults include it
        Rung("tuned", "compile mode max-autotune", tuned, no_inductor),
    ]


def build_memory_rungs(machine: Machine) -> list[Rung]:
    """Return the options that save memory, on top of the defaults; the last rung also limits a GPU to 8 GB."""
    chunks = {"loss_chunks": 8}
    everything = {**chunks, "activation_checkpointing": True}
    small_card = {**everything, "gpu_memory_limit_gb": 8, "per_device_train_batch_size": "auto"}
    return [
        Rung("loss_chunks", "loss in 8 chunks", chunks),
        Rung("checkpointing", "+ activation checkpointing", everything),
        Rung(SMALL_CARD, "+ a limit of 8 GB", small_card, None if machine.device == "cuda" else "needs a GPU"),
    ]


def choose_setting(
    recipe: str | None,
    dataset_dir: str | None,
    machine: Machine,
    micro_batch: int | None = None,
    global_batch: int | None = None,
) -> Setting:
    """Choose the model, the data and the batch for this machine, and prepare the data if necessary.

    A recipe without data trains on the Python standard library with a tokenizer of GPT-2's size.
    """
    says = recipe = recipe or "gpt2_124m"
    arguments: dict[str, Any] = {"config": recipe}
    if dataset_dir is not None:
        arguments |= {"dataset_dir": dataset_dir, "block_size": open_packed_dataset(Path(dataset_dir)).block_size}
    try:
        config = load_config(to_arguments(arguments))[0]
    except UserError:  # the recipe names no data; an unknown recipe fails again below
        if dataset_dir is not None:
            raise
        arguments |= {"dataset_name": "python_standard_library", "tokenizer_vocab_size": GPT2_VOCAB_SIZE}
        arguments |= {"validation_split_percentage": 0.5}
        config = load_config(to_arguments(arguments))[0]
    if config.model_type != "gpt2":
        raise UserError(f"the ladder measures GPT-2, but {recipe} trains a {config.model_type}")
    num_parameters = _build_without_weights(config, GPT2_VOCAB_SIZE).num_parameters()
    if machine.device != "cuda" and num_parameters > CPU_MOST_PARAMETERS:
        says = f"a small GPT-2, because {recipe} ({num_parameters / 1e6:,.0f} M parameters) is too slow without a GPU"
        arguments = {**CPU_SIZE, **arguments}
        config = load_config(to_arguments(arguments))[0]
    dataset = open_dataset_for(config)
    model = _build_without_weights(config, dataset.vocab_size)
    num_parameters = model.num_parameters()
    micro_batch = micro_batch or choose_micro_batch(machine, num_parameters)
    global_batch = global_batch or 4 * micro_batch
    if global_batch % micro_batch:
        raise UserError(f"global_batch {global_batch} is not a multiple of micro_batch {micro_batch}")
    shape = {key: value for key, value in arguments.items() if key in CPU_SIZE}
    return Setting(
        says=f"{says}: {num_parameters / 1e6:,.1f} M parameters, {global_batch} rows of {config.block_size} "
        f"tokens per step, {micro_batch} rows per forward pass",
        options={**RUN_OPTIONS, **shape, "config": recipe, "dataset_dir": str(dataset.directory)},
        model_size={key: getattr(model.config, key) for key in ("n_layer", "n_head", "n_embd")},
        vocab_size=dataset.vocab_size,
        block_size=config.block_size,
        flops_per_token=count_flops_per_token(model.config, num_parameters, config.block_size),
        micro_batch=micro_batch,
        global_batch=global_batch,
    )


def choose_micro_batch(machine: Machine, num_parameters: int) -> int:
    """Return how many rows fit at the bottom rung: with 124 M parameters, a row of 1,024 tokens takes about 4 GB."""
    if machine.memory_bytes is None:
        return 4
    rows = (machine.memory_bytes / 4e9 - 1) * 124e6 / num_parameters
    return max(size for size in (1, 2, 4, 8, 16) if size <= max(rows, 1))


def _build_without_weights(config: TrainConfig, vocab_size: int) -> PreTrainedModel:
    """Build the unpadded model on the meta device, only to count its parameters."""
    with torch.device("meta"):
        return build_model(replace(config, pad_vocab_to_multiple_of=1), build_model_config(config, vocab_size, 0))


def options_of(rungs: Iterable[Rung]) -> dict[str, Any]:
    """Return the options of a run with all these switches on, except those that this machine cannot run."""
    return combine(BOTTOM, *(rung.on for rung in rungs if rung.why_not is None))


def climb(rungs: list[Rung]) -> list[tuple[Rung, dict[str, Any]]]:
    """Pair each rung with the options of its run: its own and those of the rungs below it."""
    return [(rung, combine(options_of(rungs[:i]), rung.on)) for i, rung in enumerate(rungs)]


def ablations(rungs: list[Rung]) -> list[tuple[Rung, dict[str, Any]]]:
    """Return runs with everything on, then with one switch at a time off, then with everything on again.

    The difference between the first and the last run is the machine's noise.
    """
    top = options_of(rungs)
    found = [(Rung("everything", "everything on"), top)]
    for i, rung in enumerate(rungs):
        changed_again = any(set(rung.on) & set(later.on) for later in rungs[i + 1 :] if later.why_not is None)
        if rung.on and not changed_again:
            below = options_of(rungs[:i])
            found.append((replace(rung, what=f"off: {rung.what}"), combine(top, {key: below[key] for key in rung.on})))
    return [*found, (Rung("again", "everything on, again"), top)]
