"""The optimisation ladder: recipe/train.py in a fresh process for each rung, with one more switch than the one before.

In: a recipe and this machine. Out: for each rung its step time, memory, attention kernel and loss, or why it could not
run here. The bottom is what tutorials write first; the last of `build_rungs` is the recipe's own defaults.
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
from recipe.model.size import count_flops_per_token, count_parameters

PAYS = 1.01  # an extra rung is kept if it is so many times as fast, and faster than any lap before

# On a CPU: a 30 M-parameter GPT-2 with GPT-2's vocabulary, in place of recipes that would take minutes a step.
CPU_SIZE = {"block_size": 256, "config_overrides": "n_layer=6,n_head=6,n_embd=384"}
CPU_MOST_PARAMETERS = 40_000_000
GPT2_VOCAB_SIZE = 50257

# Of every rung: no schedule, so that all steps teach something, and nothing but training.
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
    "data_placement": "python_lists",
    "logging_steps": 1,
    "loss_in_graph": False,
    "bf16_residual": False,
    "sigmoid_gelu": False,
    "index_mask": False,
    "huge_pages": False,
}
BF16_RESIDUAL = "bf16 residual stream"
SMALL_CARD = "8gb"
REFERENCE = "tied"  # fp32, and the model that all rungs above it train


@dataclass(frozen=True)
class Rung:
    """One switch. `on`: the options of recipe/train.py that it changes."""

    name: str
    what: str
    on: dict[str, Any] = field(default_factory=dict)
    why_not: str | None = None  # why this machine cannot run it


def build_rungs(machine: Machine) -> list[Rung]:
    """From the bottom to the recipe's defaults."""
    cuda, cpu = machine.device == "cuda", machine.device == "cpu"
    half = "bf16" if machine.bf16 or not cuda else "fp16"
    no_inductor = _why_no_compile(machine)
    cuda_defaults = [
        Rung("bf16_residual", BF16_RESIDUAL, {"bf16_residual": True}, None if machine.bf16 else "needs bf16 units"),
        Rung("sigmoid_gelu", "GELU by a sigmoid", {"sigmoid_gelu": True}, no_inductor),
        Rung("index_mask", "padding masked by index", {"index_mask": True}, no_inductor),
    ]
    return [
        Rung("bottom", "what tutorials write first", {}),
        Rung("tied", "tied weights", {"config_overrides": "tie_word_embeddings=true"}),
        Rung(
            "huge_pages",
            "huge pages",
            {"huge_pages": True},
            None if cpu and machine.huge_pages else "for CPU runs on a Linux that has transparent huge pages",
        ),
        Rung("tf32", "TF32", {"tf32": True}, None if machine.tf32 else f"{machine.name} has no TF32"),
        Rung(
            "half",
            half if half == "bf16" else "fp16 + gradient scaler",
            {"mixed_precision": half},
            None if cuda or machine.bf16 else f"{machine.name} has no bf16 units",
        ),
        Rung(
            "compile",
            "compile (inductor)",
            {"dynamo_backend": "inductor"},
            no_inductor,
        ),
        Rung("flash", "flash attention, no mask", {"attn_implementation": "sdpa"}),
        Rung("padding", "padded vocabulary", {"pad_vocab_to_multiple_of": 128}),
        Rung("fused", "fused AdamW", {"optim": "adamw_torch_fused"}),
        Rung("packed", "packed rows, read ahead", {"data_placement": "mmap"}),
        Rung("no_sync", "no host synchronisation", {"logging_steps": LAP}),
        Rung("loss_in_graph", "loss in the graph", {"loss_in_graph": True}),
        Rung(
            "attention",
            "plain attention (auto)",
            {"attn_implementation": "auto"},
            None if cpu else "auto is sdpa on this device",
        ),
        *(cuda_defaults if cuda else []),
    ]


def _why_no_compile(machine: Machine) -> str | None:
    return None if machine.compiler else "inductor needs a compiler"


def build_extras(machine: Machine, micro_batch: int, global_batch: int) -> list[Rung]:
    """Above the defaults: tried one by one, kept where it pays on this machine."""
    doublings = [micro_batch * 2**k for k in range(1, 8) if micro_batch * 2**k <= global_batch]
    no_compiler = _why_no_compile(machine)
    residual = Rung(
        "bf16_residual", BF16_RESIDUAL, {"bf16_residual": True}, None if machine.bf16 else "needs bf16 units"
    )
    return [
        *(
            Rung(f"micro_batch_{size}", f"micro-batch {size}", {"per_device_train_batch_size": size})
            for size in doublings
        ),
        *([] if machine.device == "cuda" else [residual]),  # there it is a default, and a rung of the ladder
        Rung("tuned", "compile mode max-autotune", {"dynamo_mode": "max-autotune-no-cudagraphs"}, no_compiler),
    ]


def build_memory_rungs(machine: Machine) -> list[Rung]:
    """On the defaults, at the ladder's micro-batch: what frees memory, and what a card of 8 GB makes of it."""
    chunks = {"loss_chunks": 8}
    everything = {**chunks, "activation_checkpointing": True}
    small_card = {**everything, "gpu_memory_limit_gb": 8, "per_device_train_batch_size": "auto"}
    return [
        Rung("loss_chunks", "loss in 8 chunks", chunks),
        Rung("checkpointing", "and activation checkpointing", everything),
        Rung(SMALL_CARD, "and no more than 8 GB", small_card, None if machine.device == "cuda" else "needs a GPU"),
    ]


def choose_setting(
    recipe: str | None,
    dataset_dir: str | None,
    machine: Machine,
    micro_batch: int | None = None,
    global_batch: int | None = None,
) -> Setting:
    """Model, data and batch for this machine; prepares the data if it has to.

    Without data of its own a recipe gets the Python standard library, with a tokenizer of GPT-2's size trained on it.
    """
    recipe = recipe or "gpt2_124m"
    arguments: dict[str, Any] = {"config": recipe}
    try:
        load_config(to_arguments(arguments))
        has_data = True
    except UserError:  # it names no data, or is no recipe, which the next call says
        has_data = False
    if dataset_dir is not None:
        block_size = open_packed_dataset(Path(dataset_dir)).block_size
        arguments |= {"dataset_dir": dataset_dir, "block_size": block_size}
    elif not has_data:
        arguments |= {"dataset_name": "python_standard_library", "tokenizer_vocab_size": GPT2_VOCAB_SIZE}
        arguments |= {"validation_split_percentage": 0.5}
    config = load_config(to_arguments(arguments))[0]
    says = recipe
    num_parameters = count_parameters(_build_on_no_device(config, GPT2_VOCAB_SIZE))
    if machine.device != "cuda" and num_parameters > CPU_MOST_PARAMETERS:
        says = (
            f"a smaller GPT-2, because {recipe} ({num_parameters / 1e6:,.0f} M parameters) is too slow without a GPU"
        )
        arguments = {**CPU_SIZE, **arguments}
        config = load_config(to_arguments(arguments))[0]
    dataset = open_dataset_for(config)
    model = _build_on_no_device(config, dataset.vocab_size)
    micro_batch = micro_batch or choose_micro_batch(machine, count_parameters(model))
    global_batch = global_batch or 4 * micro_batch
    if global_batch % micro_batch:
        raise UserError(f"global_batch {global_batch} does not divide by micro_batch {micro_batch}")
    shape = {key: value for key, value in arguments.items() if key in CPU_SIZE}
    return Setting(
        says=f"{says}: {count_parameters(model) / 1e6:,.1f} M parameters, {global_batch} rows of {config.block_size} "
        f"tokens a step, {micro_batch} a forward",
        options={**RUN_OPTIONS, **shape, "config": recipe, "dataset_dir": str(dataset.directory)},
        model_size={key: getattr(model.config, key) for key in ("n_layer", "n_head", "n_embd")},
        vocab_size=dataset.vocab_size,
        block_size=config.block_size,
        flops_per_token=count_flops_per_token(model.config, count_parameters(model), config.block_size),
        micro_batch=micro_batch,
        global_batch=global_batch,
    )


def choose_micro_batch(machine: Machine, num_parameters: int) -> int:
    """Rows a forward that the bottom rung has memory for: at 124 M parameters and 1,024 tokens, about 4 GB each."""
    if machine.memory_bytes is None:
        return 4
    rows = (machine.memory_bytes / 4e9 - 1) * 124e6 / num_parameters
    return max(size for size in (1, 2, 4, 8, 16) if size <= max(rows, 1))


def _build_on_no_device(config: TrainConfig, vocab_size: int) -> PreTrainedModel:
    """The model without padding, to be counted."""
    with torch.device("meta"):
        return build_model(replace(config, pad_vocab_to_multiple_of=1), build_model_config(config, vocab_size, 0))


def options_of(rungs: Iterable[Rung]) -> dict[str, Any]:
    """The options of a run with all these switches on, but for those that cannot run here."""
    return combine(BOTTOM, *(rung.on for rung in rungs if rung.why_not is None))


def climb(rungs: list[Rung]) -> list[tuple[Rung, dict[str, Any]]]:
    """Each rung with all the options it runs with: its own, and those of the rungs below it."""
    return [(rung, combine(options_of(rungs[:i]), rung.on)) for i, rung in enumerate(rungs)]


def ablations(rungs: list[Rung]) -> list[tuple[Rung, dict[str, Any]]]:
    """Everything on, then each switch put back, alone, to what it was below its rung, and everything on again.

    How far the last is from the first is what the machine's own noise makes.
    """
    top = options_of(rungs)
    found = [(Rung("everything", "everything on"), top)]
    for i, rung in enumerate(rungs):
        changed_again = any(set(rung.on) & set(later.on) for later in rungs[i + 1 :] if later.why_not is None)
        if rung.on and not changed_again:
            below = options_of(rungs[:i])
            found.append((replace(rung, what=f"off: {rung.what}"), combine(top, {key: below[key] for key in rung.on})))
    return [*found, (Rung("again", "everything on, again"), top)]
