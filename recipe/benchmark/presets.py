"""What `auto` chooses for every recipe size on every class of memory, by estimate or by measurement."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from recipe.benchmark.forecast import load_run, resolve_setting
from recipe.benchmark.measured import Measurement, find_measurement
from recipe.hardware.gpus import load_gpu
from recipe.hardware.memory import EIGHT_BIT, MemoryPlan, Setting, plan_memory
from recipe.model.size import count_parameters

SIZES = {"124M": "gpt2_124m", "355M": "gpt2_355m", "774M": "gpt2_774m", "1558M": "gpt2_1558m"}
# A card that stands for each class. An L4, A10 and A10G report 22.0 GiB, less than other cards of 24 GB.
CLASSES = {
    "8 GB": "rtx3070",
    "12 GB": "rtx3060",
    "16 GB": "t4",
    "24 GB": "rtx4090",
    "40 GB": "a100-40gb",
    "80 GB": "a100-80gb",
    "141 GB": "h200",
}
# Metal recommends a process to use two thirds of 16 GB of unified memory, and three quarters of larger ones.
OTHER_DEVICES = {
    "Apple, 16 GB": (Setting("mps", "no", False, False), 16 * 2**30 * 2 / 3),
    "Apple, 64 GB": (Setting("mps", "no", False, False), 64 * 2**30 * 3 / 4),
    "CPU, 32 GB": (Setting("cpu", "bf16", True, False), 32 * 2**30),
}

Preset = dict[str, Any]  # a `MemoryPlan`, its "memory_bytes" and their "source": "measured" or "estimated"


def plan_presets(options: list[str], measurements: Sequence[Measurement] = ()) -> dict[str, dict[str, Preset | None]]:
    """Plan every recipe size on every class of memory, one device each. Returns {class: {size: preset}}.

    options: of recipe/train.py, for all of them. A size that does not fit is None.
    """
    runs = {size: load_run(recipe, options) for size, recipe in SIZES.items()}
    presets: dict[str, dict[str, Preset | None]] = {}
    for memory, name in CLASSES.items():
        gpu, presets[memory] = load_gpu(name), {}
        for size, (config, model_config) in runs.items():
            plan = plan_memory(config, model_config, resolve_setting(config, gpu, 1), gpu.memory_bytes)
            num_parameters = count_parameters(model_config)
            found = find_measurement(measurements, gpu, num_parameters, config.block_size) if plan else None
            presets[memory][size] = plan and _preset(plan, found)
    for memory, (setting, usable_bytes) in OTHER_DEVICES.items():
        plans = {size: plan_memory(*run, setting, usable_bytes) for size, run in runs.items()}
        presets[memory] = {size: plan and _preset(plan, None) for size, plan in plans.items()}
    return presets


def _preset(plan: MemoryPlan, found: Measurement | None) -> Preset:
    """Replace the estimate by what was measured with the same micro-batch and nothing recomputed."""
    is_same = found is not None and (found.micro_batch_size, False, 1) == (
        plan.micro_batch_size,
        plan.activation_checkpointing,
        plan.loss_chunks,
    )
    memory_bytes, source = (found.peak_memory_bytes, "measured") if is_same else (plan.total_bytes, "estimated")
    return {**dataclasses.asdict(plan), "memory_bytes": memory_bytes, "source": source}


LEGEND = """Each cell: rows per forward pass, options, GB, estimated or measured.
C: activation checkpointing. L: loss in chunks. B: 8-bit AdamW. N: not compiled.
-: does not fit."""


def presets_table(presets: dict[str, dict[str, Preset | None]], markdown: bool) -> str:
    """Format the presets with a row for each class of memory, in at most 80 columns or in Markdown."""
    rows = [["memory", *SIZES]]
    rows += [[memory, *(_cell(preset, markdown) for preset in sizes.values())] for memory, sizes in presets.items()]
    if markdown:
        rows.insert(1, ["---"] * len(rows[0]))
        return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", LEGEND])
    return "\n".join([*("".join(f"{text:16}" for text in row).rstrip() for row in rows), "", LEGEND])


def _cell(preset: Preset | None, markdown: bool) -> str:
    if preset is None:
        return "-"
    used = {
        "C": preset["activation_checkpointing"],
        "L": preset["loss_chunks"] > 1,
        "B": preset["optim"] == EIGHT_BIT,
        "N": not preset["compiled"],
    }
    letters = "".join(letter for letter, is_used in used.items() if is_used)
    what = " ".join(part for part in (str(preset["micro_batch_size"]), letters) if part)
    gigabytes, source = f"{preset['memory_bytes'] / 1e9:.1f}", preset["source"]
    if markdown:
        return f"{what}: {gigabytes} GB {source}"
    return f"{what} {gigabytes} {'meas' if source == 'measured' else 'est'}"
