"""The table that a run prints before its first step, and the warnings after it."""

from dataclasses import asdict

import torch

from recipe.checkpoint import RunState
from recipe.environment import describe_device
from recipe.hardware.choices import ONE_PER_CPU
from recipe.hardware.devices import why_no_flash
from recipe.hardware.memory import optimizer_bytes
from recipe.hardware.processes import on_main_process
from recipe.model.size import count_heads, find_odd_size
from recipe.optim.schedule import describe_jump
from recipe.run.decide import Run, has_stalled, is_over, measure_progress, time_share
from recipe.run.facts import RunFacts, list_stages
from recipe.run.log import RunLog, describe_epoch
from recipe.run.stop import find_kill_warning


def show_start(log: RunLog, facts: RunFacts, state: RunState, eval_rows: int) -> None:
    """Print the table of the run, record its start, and print what a user should know before the first step.

    eval_rows: validation rows per evaluation.
    """
    run, config, saved = log.run, log.config, log.run.saved
    log.table(start_table(run, facts, state, log.device, eval_rows))
    before = saved.mixed_precision if saved else None
    values = {"precision_before": before, **asdict(facts)}
    log.event("start", state.step, run_id=state.run_id, tokens_seen=state.tokens, **values)
    if before not in (None, config.mixed_precision):
        log.say(f"warning: the precision changes from {before} to {config.mixed_precision} at step {state.step:,}")
    if (problem := find_odd_size(run.model.config)) and not config.model_name_or_path:
        log.say(f"warning: {problem}")
    if config.hub_model_id and not config.push_to_hub:
        log.say("warning: --hub_model_id alone uploads nothing; add --push_to_hub")
    if is_over(run, state):
        was_stopped = has_stalled(state, config.early_stopping_patience)
        log.say(f"stopped early after {state.step:,} steps" if was_stopped else f"all {state.step:,} steps are done")
        return
    state_bytes = 4 * facts.model.num_parameters + optimizer_bytes(run.model.config, config.optim)
    if warning := on_main_process(lambda: find_kill_warning(run.output_dir, state_bytes)):
        log.say(f"warning: {warning}")
    if config.dynamo_backend == "inductor":
        log.say("compiling; the first step takes a minute or more")
    if (warmup := run.requested.warmup_steps) >= 1 > config.warmup_steps:
        how = f"warming up for the first {config.warmup_steps:.0%} of it instead"
        log.say_sentence(f"warning: {warmup:,.0f} warm-up steps are not shorter than the run; {how}")
    if run.changes:
        log.schedule(state.step, run.changes)
    if saved:
        progress = saved.state.progress, measure_progress(run.schedule, state)
        if jump := describe_jump(saved.schedule, run.schedule, state.examples, *progress):
            log.say(jump)


def start_table(run: Run, facts: RunFacts, state: RunState, device: torch.device, eval_rows: int) -> dict[str, str]:
    """Return the table printed before the first step: {label: text}."""
    config, num_processes, model = run.config, facts.num_processes, facts.model
    devices = describe_device(device)
    if device.type == "cpu":
        processes = f"{_plural(num_processes, 'process', 'es')} of " if num_processes > 1 else ""
        devices += f", {processes}{_plural(torch.get_num_threads(), 'thread')}"
    elif num_processes > 1:
        devices = f"{num_processes} x {devices}"
    rows = {name: split["rows"] for name, split in facts.data.splits.items()}
    data = f"{facts.data.source}: "
    if config.streaming:
        data += f"streamed in rows of {config.block_size:,} tokens"
    else:
        data += f"{rows['train']:,} training rows of {config.block_size:,} tokens"
    shown = {"layout": "DDP: every process holds the whole model and its state"} if num_processes > 1 else {}
    shown |= {
        label: f"{choice.value}: {choice.reason}"
        for label, choice in run.choices.items()
        if choice.reason != ONE_PER_CPU
    }
    if device.type == "cuda" and config.matmul_precision != "highest":
        shown["precision"] += f"; {'TF32' if config.matmul_precision == 'high' else 'bf16'} for fp32 matmuls"
    if device.type == "cuda" and config.attn_implementation == "sdpa":
        shapes = *count_heads(run.model.config), config.block_size
        reason = why_no_flash(device, config.mixed_precision, *shapes)
        shown["attention"] += f"; no flash kernel ({reason})" if reason else "; flash kernels, no mask"
    if config.deterministic:
        shown["precision"] += "; deterministic algorithms"
    rate = f"{config.optim}, learning rate {config.learning_rate:g}"
    arguments = ", ".join(f"{key} {value}" for key, value in (config.lr_scheduler_kwargs or {}).items())
    rate += f"; {config.lr_scheduler_type}" + f" ({arguments})" * bool(arguments)
    padded = -(-model.vocab_size // config.pad_vocab_to_multiple_of) * config.pad_vocab_to_multiple_of
    padding = f" padded to {padded:,}" if padded > model.vocab_size else ""
    table = {
        "recipe": f"{facts.recipe}, output in {run.output_dir}"
        + (f", resumed from {run.resume.path}" if run.resume else ""),
        "device": devices,
        **shown,
        "memory": run.plan.describe(),
        "model": f"{model.architecture}, {model.num_parameters:,} parameters, vocabulary "
        f"{model.vocab_size:,}{padding}, {model.n_positions:,} positions"
        + (f", weights from {config.model_name_or_path}" if config.model_name_or_path and not run.resume else ""),
        "data": f"{data}; {eval_rows:,} of {rows['validation']:,} validation rows per evaluation",
        "batch": f"{config.global_batch_size} sequences ({config.tokens_per_step:,} tokens) per step: "
        f"{_plural(num_processes, 'process', 'es')} x "
        f"{_plural(facts.gradient_accumulation_steps, 'micro-batch', 'es')} x "
        f"{_plural(run.plan.micro_batch_size, 'sequence')}",
        "optimizer": rate,
        "run": _describe_length(run, state),
    }
    if len(facts.stages) > 1:
        parts = [
            f"{stage['source']} from step {stage['step']:,}, {stage['tokens']:,} tokens"
            for stage in list_stages(facts, state)
        ]
        table["stages"] = "; ".join(parts)
    table |= {"changes": "; ".join(run.model.notes)} if run.model.notes else {}  # to the model that is fine-tuned
    return table | ({"hub": f"{config.hub_model_id}, {config.hub_strategy}"} if config.push_to_hub else {})


def _describe_length(run: Run, state: RunState) -> str:
    config = run.config
    limit = "" if config.max_minutes is None else f"{config.max_minutes:g} minute{'s' * (config.max_minutes != 1)}"
    warmup = _plural(run.schedule.num_warmup_steps, "warm-up step")
    if 0 < config.warmup_steps < 1:
        warmup = f"{config.warmup_steps:.0%} of it warm-up"
    if limit and state.step and len(state.stages) == 1 and (seen := describe_epoch(run, state)):
        limit += f", which is about {seen['epoch'] / time_share(run.schedule, state):.1f} epochs at the speed so far"
    if config.max_steps is None or run.schedule.num_examples is None:
        return f"as many steps as fit into {limit}, {warmup}"
    num_tokens = state.tokens + (run.schedule.num_examples - state.examples) * config.block_size
    text = f"{_plural(config.max_steps, 'step')} = {num_tokens:,} tokens, "
    epochs = run.count_epochs(run.schedule.num_examples - state.stage.examples).items()
    new = " of the new data" * (len(state.stages) > 1)
    text += "".join(f"{count:.2f} epochs{f' of {name}' if name else new}, " for name, count in epochs)
    return text + warmup + (f"; fewer if they take longer than {limit}" if limit else "")


def _plural(count: int, word: str, ending: str = "s") -> str:
    return f"{count:,} {word}" + (ending if count != 1 else "")
