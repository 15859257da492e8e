"""The table that a run prints before its first step, and the warnings after it."""

from typing import Any

import torch
from transformers import PreTrainedConfig

from recipe.checkpoint import RunState
from recipe.config import TrainConfig
from recipe.environment import describe_device
from recipe.errors import plural
from recipe.hardware.choices import ONE_PER_CPU, Choice, in_words
from recipe.hardware.devices import rounds_products, why_no_flash
from recipe.metrics import count_stage_tokens
from recipe.model.build import SDPA_WITHOUT_MASK, attention_of
from recipe.model.size import count_heads, describe_output_share, find_odd_size
from recipe.optim.schedule import describe_jump
from recipe.run.decide import Run, has_stalled, is_over, measure_progress, time_share
from recipe.run.log import RunLog, describe_epoch


def show_start(log: RunLog, record: dict[str, Any], state: RunState, eval_rows: int) -> None:
    """Print the table of the run, record its start, and print what a user should know before the first step.

    eval_rows: validation rows per evaluation.
    """
    run = log.run
    config = log.config
    saved = run.start.saved
    log.table(start_table(run, record, state, log.device, eval_rows))
    before = saved.mixed_precision if saved else None
    log.event("start", state.step, run_id=state.run_id, tokens_seen=state.tokens, precision_before=before, **record)
    if before not in (None, config.mixed_precision):
        changed = " to ".join(in_words("precision", name) for name in (before, config.mixed_precision))
        log.say(f"warning: the precision changes from {changed} at step {state.step:,}")
    problem = find_odd_size(run.model.config)
    if problem and not config.model_name_or_path:
        log.say(f"warning: {problem}")
    if config.hub_model_id and not config.push_to_hub:
        log.say("warning: --hub_model_id alone uploads nothing; add --push_to_hub")
    if is_over(run, state):
        was_stopped = has_stalled(state, config.early_stopping_patience)
        log.say(f"stopped early after {state.step:,} steps" if was_stopped else f"all {state.step:,} steps are done")
        return
    if config.dynamo_backend.startswith("inductor"):
        log.say("compiling; the first step takes longer, a minute or more for a large model")
    warmup = run.start.requested.warmup_steps
    if warmup >= 1 > config.warmup_steps:
        how = f"warming up for the first {config.warmup_steps:.0%} of it instead"
        log.say_sentence(f"warning: {warmup:,.0f} warm-up steps are not shorter than the run; {how}")
    if run.changes:
        log.record_changes(state.step, run.changes)
    for name, (then, now) in run.other_changes.items():
        log.say(f"{name} is {now}; the run's recorded options have {then}")
    if saved:
        progress = measure_progress(run.schedule, state)
        jump = describe_jump(saved.schedule, run.schedule, state.examples, saved.state.progress, progress)
        if jump:
            log.say(jump)


def start_table(
    run: Run, record: dict[str, Any], state: RunState, device: torch.device, eval_rows: int
) -> dict[str, str]:
    """Return the table printed before the first step: {label: text}."""
    config = run.config
    start = run.start
    num_processes = record["num_processes"]
    vocab_size = record["vocab_size"]
    data = record["data"]
    devices = describe_device(device)
    if device.type == "cpu":
        processes = f"{plural(num_processes, 'process', 'es')} of " if num_processes > 1 else ""
        devices += f", {processes}{plural(torch.get_num_threads(), 'thread')}"
    elif num_processes > 1:
        devices = f"{num_processes} x {devices}"
    rows = {name: split["rows"] for name, split in data["splits"].items()}
    text = "streamed in rows" if config.streaming else f"{rows['train']:,} training rows"
    shown = {}
    if num_processes > 1:
        shown["layout"] = "DDP: every process holds the whole model and its state"
    shown |= {
        label: f"{in_words(label, choice.value)}: {choice.reason}"
        for label, choice in run.choices.items()
        if choice.reason != ONE_PER_CPU
    }
    if device.type == "cuda" and rounds_products(device):
        rounded = "TF32" if config.matmul_precision == "high" else "bf16"
        shown["precision"] += f"; {rounded} for fp32 matmuls"
    shown["attention"] = describe_attention(config, run.model.config, run.choices, device)
    if config.deterministic:
        shown["precision"] += "; deterministic algorithms"
    rate = f"{config.optim}, learning rate {config.learning_rate:g}; {config.lr_scheduler_type}"
    arguments = ", ".join(f"{key} {value}" for key, value in (config.lr_scheduler_kwargs or {}).items())
    if arguments:
        rate += f" ({arguments})"
    padded = run.model.padded.vocab_size
    padding = f" padded to {padded:,}" if padded > vocab_size else ""
    rows_of = f"{eval_rows:,} of {rows['validation']:,} validation rows per evaluation"
    resumed = f", resumed from {start.resume.path}" if start.resume else ""
    weights = f", weights from {config.model_name_or_path}" if config.model_name_or_path and not start.resume else ""
    table = {
        "recipe": f"{record['recipe']}, output in {start.output_dir}{resumed}",
        "device": devices,
        **shown,
        "memory": run.plan.describe(),
        "model": f"{record['architecture']}, {record['num_parameters']:,} parameters, vocabulary "
        f"{vocab_size:,}{padding}, {record['n_positions']:,} positions{weights}",
        "data": f"{data['source']}: {text} of {config.block_size:,} tokens; {rows_of}",
        "batch": f"{config.global_batch_size} sequences ({config.tokens_per_step:,} tokens) per step: "
        f"{plural(num_processes, 'process', 'es')} x "
        f"{plural(record['gradient_accumulation_steps'], 'micro-batch', 'es')} x "
        f"{plural(run.plan.micro_batch_size, 'sequence')}",
        "optimizer": rate,
        "run": _describe_length(run, state),
    }
    share = describe_output_share(run.model.padded, record["flops_per_token"])
    if share and not config.model_name_or_path:
        table["vocabulary"] = share
    stages = count_stage_tokens(record["stages"], state.tokens)
    if len(stages) > 1:
        parts = [f"{stage['source']} from step {stage['step']:,}, {stage['tokens']:,} tokens" for stage in stages]
        table["stages"] = "; ".join(parts)
    if run.model.notes:
        table["changes"] = "; ".join(run.model.notes)  # to the model that is fine-tuned
    if config.push_to_hub:
        table["hub"] = f"{config.hub_model_id}, {config.hub_strategy}"
    return table


def describe_attention(
    config: TrainConfig, model_config: PreTrainedConfig, choices: dict[str, Choice], device: torch.device
) -> str:
    """Say which attention a run has, and why; on a GPU, try flash kernels on its own shapes."""
    chosen = choices["attention"]
    text = f"{in_words('attention', chosen.value)}: {chosen.reason}"
    if device.type != "cuda" or attention_of(config, model_config) != SDPA_WITHOUT_MASK:
        return text
    num_heads, head_dim = count_heads(model_config)
    reason = why_no_flash(device, choices["precision"].value, num_heads, head_dim, config.block_size)
    return text + (f"; no flash kernel ({reason})" if reason else "; flash kernels, no mask")


def _describe_length(run: Run, state: RunState) -> str:
    config = run.config
    limit = ""
    if config.max_minutes is not None:
        limit = f"{config.max_minutes:g} minute" + ("" if config.max_minutes == 1 else "s")
    warmup = plural(run.schedule.num_warmup_steps, "warm-up step")
    if 0 < config.warmup_steps < 1:
        warmup = f"{config.warmup_steps:.0%} of it warm-up"
    seen = describe_epoch(run, state)
    if limit and state.step and len(state.stages) == 1 and seen:
        limit += f", which is about {seen['epoch'] / time_share(run.schedule, state):.1f} epochs at the speed so far"
    if config.max_steps is None or run.schedule.num_examples is None:
        return f"as many steps as fit into {limit}, {warmup}"
    num_tokens = state.tokens + (run.schedule.num_examples - state.examples) * config.block_size
    text = f"{plural(config.max_steps, 'step')} = {num_tokens:,} tokens, "
    epochs = run.count_epochs(run.schedule.num_examples - state.stage.examples).items()
    new = " of this stage" if len(state.stages) > 1 else ""
    for name, count in epochs:
        text += f"{count:.2f} epochs" + (f" of {name}" if name else new) + ", "
    return text + warmup + (f"; fewer if they take longer than {limit}" if limit else "")
