"""What a run says about itself: the facts of its start event, the start table, summary.json and the closing lines."""

import contextlib
import math
import re
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import ProfileKwargs
from safetensors.torch import load_file
from transformers import PreTrainedModel

from recipe.arguments import shell_command
from recipe.checkpoint import (
    RunState,
    best_of,
    checkpoint_dir,
    list_checkpoints,
    mark_resumable,
    read_state,
    step_of,
    why_damaged,
)
from recipe.config import STANDARD_LIBRARY, TrainConfig, hub_id
from recipe.data.packed import COUNTS
from recipe.data.prepare import TRAINED
from recipe.environment import describe_device, describe_environment, find_commit
from recipe.hardware.choices import ONE_PER_CPU
from recipe.hardware.devices import peak_memory_bytes
from recipe.hardware.memory import optimizer_bytes
from recipe.hardware.processes import on_main_process
from recipe.model.size import count_exported_parameters, count_flops_per_token
from recipe.model.weights import WEIGHTS_NAME, copy_weights
from recipe.optim.schedule import count_warmup_steps
from recipe.publish.export import export_model
from recipe.publish.public import read_events, split_scores
from recipe.publish.uploads import HubUploads
from recipe.run.log import RunLog, describe_bits
from recipe.run.resume import describe_jump
from recipe.run.start import Run, measure_progress
from recipe.run.stop import EXIT_STOPPED, StopSignals, describe_signal, find_kill_warning

MANY_EPOCHS = 100
NAMED_FILES = 5  # a shell may expand a pattern to thousands
STOP_SECONDS = 60.0  # for uploads after a signal: Slurm's batch files leave 300 s for all of the end
PROFILED_STEPS = 3
TRACE_NAME = "trace.json.gz"
SAME_LENGTH = 0.05  # share of the tokens by which a run may differ from the one that it is compared with


def collect_facts(run: Run, model: PreTrainedModel) -> dict[str, Any]:
    """Return what the run is, for the start event, summary.json and the model card.

    dataset_id, tokenizer_id and base_model_id are set if these are on the Hub, or the dataset is the demo's;
    recipe/publish/public.py lists what is published.
    """
    config, metadata, environment = run.config, run.metadata, describe_environment(run.accelerator.device)
    shape, tokenizer, data = model.config, metadata.get("tokenizer") or config.tokenizer_name, describe_data(metadata)
    base_model_id, tokenizer_id = hub_id(config.model_name_or_path), hub_id(tokenizer)
    if run.resume_dir:  # a local model may be gone by now; the run of the checkpoint knew it when it began
        first = next((event for event in read_events(run.resume_dir.parent) if event["event"] == "start"), {})
        base_model_id, tokenizer_id = first.get("base_model_id"), first.get("data", {}).get("tokenizer_id")
    if config.streaming:  # only the head of the training text has been counted
        data["splits"].pop("train")
    return {
        "recipe": run.recipe,
        "command": shell_command(*sys.argv),
        "commit": find_commit(),
        "seed": config.seed,
        "data": {
            **data,
            "tokenizer_sha256": metadata["tokenizer_sha256"],
            "tokenizer_id": tokenizer_id,
            "is_own_tokenizer": metadata.get("inputs", {}).get("tokenizer", "").startswith(TRAINED),
        },
        "model": {
            "architecture": type(model).__name__,
            "num_parameters": count_exported_parameters(model, run.vocab_size),
            "n_layer": shape.num_hidden_layers,
            "n_head": shape.num_attention_heads,
            "n_embd": shape.hidden_size,
            "n_positions": shape.max_position_embeddings,
            "vocab_size": run.vocab_size,
        },
        "flops_per_token": count_flops_per_token(shape, model.num_parameters(), config.block_size),
        "base_model": config.model_name_or_path,
        "base_model_id": base_model_id,
        "num_processes": run.accelerator.num_processes,
        "mixed_precision": config.mixed_precision,
        "dynamo_backend": config.dynamo_backend,
        "attn_implementation": config.attn_implementation,
        "optim": config.optim,
        "per_device_train_batch_size": run.plan.micro_batch_size,
        "gradient_accumulation_steps": run.grad_accum,
        "environment": environment,
    }


def show_start(log: RunLog, facts: dict[str, Any], state: RunState, eval_rows: int) -> None:
    """Print the table of the run, record its start, and say what a user would want to know before it starts.

    eval_rows: validation rows per evaluation.
    """
    run, config = log.run, log.config
    num_examples = state.examples + max(0, (config.max_steps or state.step) - state.step) * config.global_batch_size
    log.table(start_table(run, facts, eval_rows, num_examples))
    before = read_state(run.resume_dir)["mixed_precision"] if run.resume_dir else None
    facts = {"precision_before": before, **facts}
    log.event("start", state.step, run_id=state.run_id, tokens_seen=state.examples * config.block_size, **facts)
    if before not in (None, config.mixed_precision):
        log.say(f"warning: the precision changes from {before} to {config.mixed_precision} at step {state.step:,}")
    if config.hub_model_id and not config.push_to_hub:
        log.say("warning: --hub_model_id alone uploads nothing; add --push_to_hub")
    for name, epochs in count_epochs(config, facts["data"], num_examples).items():
        if epochs > MANY_EPOCHS:
            text = f"so little text ({name})" if name else "so little text"
            log.say(f"warning: {epochs:,.0f} epochs over {text}: the model will memorize it")
    if log.is_over:
        log.say(f"all {state.step:,} steps are done")
        return
    state_bytes = 4 * facts["model"]["num_parameters"] + optimizer_bytes(run.model_config, config.optim)
    if warning := on_main_process(lambda: find_kill_warning(run.output_dir, state_bytes)):
        log.say(f"warning: {warning}")
    if config.dynamo_backend == "inductor":
        log.say("compiling; the first step takes a minute or more")
    is_warm = state.step >= count_warmup_steps(config)
    if changes := {key: values for key, values in run.changes.items() if not (is_warm and key == "warmup_steps")}:
        log.schedule(state.step, changes)
        if jump := describe_jump(config, run.resume_dir, measure_progress(config, state)):
            log.say(jump)


def describe_data(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return where a dataset comes from, and its counts and hash; for a mixture, also of each of its datasets."""
    source = metadata["source"]
    is_on_hub = bool(source.get("dataset_revision"))  # and not a local folder with a name of the same form
    dataset_id = hub_id(source.get("dataset_name")) if is_on_hub else None
    if source.get("dataset_name") == STANDARD_LIBRARY:
        dataset_id = STANDARD_LIBRARY
    found = {
        "source": describe_source(source),
        "dataset_id": dataset_id,
        "dataset_config_name": source.get("dataset_config_name") if is_on_hub else None,
        "validation_split_percentage": source.get("validation_split_percentage"),
        "splits": {split: {key: of[key] for key in (*COUNTS, "rows")} for split, of in metadata["splits"].items()},
        "content_sha256": metadata["content_sha256"],
    }
    if mixture := metadata.get("mixture"):
        parts = {name: describe_data(of) | {"share": of["share"]} for name, of in mixture.items()}
        found |= {"source": ", ".join(f"{100 * of['share']:.3g}% {name}" for name, of in parts.items())}
        found |= {"mixture": parts}
    return found


def count_epochs(config: TrainConfig, data: dict[str, Any], num_examples: int) -> dict[str, float]:
    """Return how often the run passes over its training rows, of a mixture those of each dataset, by name.

    data: from `describe_data`. {} if it is not known: of a stream, or a run that only its minutes limit.
    """
    parts = {name: of for name, of in data.get("mixture", {"": data | {"share": 1.0}}).items() if of["share"] > 0}
    if config.max_steps is None or config.streaming:
        return {}
    return {name: of["share"] * num_examples / of["splits"]["train"]["rows"] for name, of in parts.items()}


def describe_source(source: dict[str, Any]) -> str:
    """Return the dataset's name, or the names of its text files. source: of the metadata of a packed dataset."""
    if name := source.get("dataset_name"):
        return ", ".join(filter(None, [name, source.get("dataset_config_name")]))
    files = [Path(file).name for file in source.get("train_files") or ["unknown"]]
    more = [f"and {len(files) - NAMED_FILES:,} more files"] if len(files) > NAMED_FILES else []
    return ", ".join(files[:NAMED_FILES] + more)


def start_table(run: Run, facts: dict[str, Any], eval_rows: int, num_examples: int) -> dict[str, str]:
    """Return the table printed before the first step: {label: text}. num_examples: of the whole run."""
    config, device, num_processes, model = run.config, run.accelerator.device, facts["num_processes"], facts["model"]
    devices = describe_device(device)
    if device.type == "cpu":
        processes = f"{_plural(num_processes, 'process', 'es')} of " if num_processes > 1 else ""
        devices += f", {processes}{_plural(torch.get_num_threads(), 'thread')}"
    elif num_processes > 1:
        devices = f"{num_processes} x {devices}"
    rows = {name: split["rows"] for name, split in facts["data"]["splits"].items()}
    data = f"{facts['data']['source']}: "
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
    if device.type == "cuda" and config.tf32:
        shown["precision"] += "; TF32 for fp32 matmuls"
    if config.deterministic:
        shown["precision"] += "; deterministic algorithms"
    rate = f"{config.optim}, learning rate {config.learning_rate:g}"
    arguments = ", ".join(f"{key} {value}" for key, value in (config.lr_scheduler_kwargs or {}).items())
    rate += f"; {config.lr_scheduler_type}" + f" ({arguments})" * bool(arguments)
    padded = -(-model["vocab_size"] // config.pad_vocab_to_multiple_of) * config.pad_vocab_to_multiple_of
    padding = f" padded to {padded:,}" if padded > model["vocab_size"] else ""
    table = {
        "recipe": f"{facts['recipe']}, output in {run.output_dir}"
        + f", resumed from {run.resume_dir}" * bool(run.resume_dir),
        "device": devices,
        **shown,
        "memory": run.plan.describe(),
        "model": f"{model['architecture']}, {model['num_parameters']:,} parameters, vocabulary "
        f"{model['vocab_size']:,}{padding}, {model['n_positions']:,} positions"
        + (f", weights from {config.model_name_or_path}" if config.model_name_or_path and not run.resume_dir else ""),
        "data": f"{data}; {eval_rows:,} of {rows['validation']:,} validation rows per evaluation",
        "batch": f"{config.global_batch_size} sequences ({config.tokens_per_step:,} tokens) per step: "
        f"{_plural(num_processes, 'process', 'es')} x "
        f"{_plural(facts['gradient_accumulation_steps'], 'micro-batch', 'es')} x "
        f"{_plural(run.plan.micro_batch_size, 'sequence')}",
        "optimizer": rate,
        "run": _describe_length(config, num_examples, count_epochs(config, facts["data"], num_examples)),
    }
    table |= {"changes": "; ".join(run.notes)} if run.notes else {}  # to the model that is fine-tuned
    return table | ({"hub": f"{config.hub_model_id}, {config.hub_strategy}"} if config.push_to_hub else {})


def _describe_length(config: TrainConfig, num_examples: int, epochs: dict[str, float]) -> str:
    limit = "" if config.max_minutes is None else f"{config.max_minutes:g} minute{'s' * (config.max_minutes != 1)}"
    warmup = _plural(count_warmup_steps(config), "warm-up step")
    if config.warmup_steps < 1:
        warmup = f"{config.warmup_steps:.0%} of it warm-up"
    if config.max_steps is None:
        return f"as many steps as fit into {limit}, {warmup}"
    text = f"{_plural(config.max_steps, 'step')} = {num_examples * config.block_size:,} tokens, "
    text += "".join(f"{count:.2f} epochs{f' of {name}' if name else ''}, " for name, count in epochs.items())
    return text + warmup + (f"; fewer if they take longer than {limit}" if limit else "")


def build_profiler(run: Run, log: RunLog) -> contextlib.AbstractContextManager:
    """Return a context manager whose value is None, or a profiler that wants its `step` called after every step.

    It profiles three steps of the main process. Perfetto and chrome://tracing show the trace, which is in the run's
    folder. Writing it, which takes seconds, is kept out of the speed.
    """
    after, accelerator = run.config.profile, run.accelerator
    if after is None or not accelerator.is_main_process:
        return contextlib.nullcontext()

    def show(found: torch.profiler.profile) -> None:
        with log.paused():
            found.export_chrome_trace(str(run.output_dir / TRACE_NAME))
            key = f"self_{'cuda' if accelerator.device.type == 'cuda' else 'cpu'}_time_total"
            table = found.key_averages().table(sort_by=key, row_limit=15, max_name_column_width=30)
            log.say(f"{table}\nat most {PROFILED_STEPS} steps; trace: {run.output_dir / TRACE_NAME}")

    periods = {"wait": after - 1, "warmup": 1, "active": PROFILED_STEPS, "repeat": 1}
    return accelerator.profile(ProfileKwargs(schedule_option=periods, on_trace_ready=show))


def stop_run(log: RunLog, uploads: HubUploads, state: RunState, signals: StopSignals, saved: bool) -> int:
    """Say why the run stopped and how to resume it. Returns the exit status, when all processes may leave."""

    def stop() -> None:
        options = shell_command(output_dir=log.output_dir, resume_from_checkpoint="auto")
        how = f"to resume, repeat your command with\n    {options}"
        saved_in = checkpoint_dir(log.output_dir, state.step)
        where = f"saved in {saved_in}" if saved else "but could not be saved"
        if state.step == 0:
            where, how = "with nothing to save", "the same command starts again"
        mark_resumable(True)  # also if the run had nothing new to save, or could not save it
        log.say(f"stopped by {describe_signal(signals.agreed)} after step {state.step:,}, {where}; {how}")
        num_signals, signals.interrupted_at = signals.count, None  # the next Ctrl-C only ends the uploads
        uploads.finish(None, STOP_SECONDS, lambda: signals.count > num_signals)
        log.end()

    on_main_process(stop)
    return uploads.leave(EXIT_STOPPED if saved else 1)


def finish_run(
    log: RunLog,
    uploads: HubUploads,
    state: RunState,
    signals: StopSignals,
    facts: dict[str, Any],
    model: PreTrainedModel,
    dataset: Any,
) -> int:
    """Export the model, write summary and card, print the results, and publish.

    Returns the exit status, when all processes may leave.
    """
    signals.reaction = "writing the results, and ending the upload"
    weights = copy_weights(model, log.run.model_config, keep=log.enabled)

    def finish() -> int:
        best = find_best(log, state) if log.config.load_best_model_at_end else None
        step = step_of(best) if best else state.step
        exported = load_file(best / WEIGHTS_NAME) if best else weights
        export_model(model, log.run.model_config, exported, log.run.files, log.output_dir)
        evaluation = log.evaluated[step]
        summary = log.summary(build_summary(log, state, facts, evaluation, step))
        mark_resumable(False)
        print(closing_lines(log.run, summary, evaluation["sample"], state), flush=True)
        is_complete = uploads.finish(step, interrupted=lambda: signals.count > 0)
        log.end()
        if is_complete:
            return 0
        return 128 + signals.newest if signals.count else 1  # whoever deletes this disk now loses the model

    return uploads.leave(on_main_process(finish))


def find_best(log: RunLog, state: RunState) -> Path | None:
    """Return the run's valid checkpoint with the lowest validation loss. Says if a better one is not there."""
    candidates = [path for path in list_checkpoints(log.output_dir) if step_of(path) in log.evaluated]
    while (best := best_of(candidates, state.losses)) is not None and (reason := why_damaged(best)) is not None:
        log.say(f"warning: {best} had the lowest validation loss, but is damaged ({reason})")
        candidates.remove(best)
    period = log.config.save_steps or math.inf
    saved = {step: loss for step, loss in state.losses.items() if int(step) % period == 0}
    lowest = min(saved, key=saved.get, default=None)
    if lowest is not None and best is not None and saved[lowest] < state.losses[str(step_of(best))]:
        log.say(f"warning: checkpoint-{lowest}, whose loss was the lowest, is not in {log.output_dir}")
    return best


def build_summary(
    log: RunLog, state: RunState, facts: dict[str, Any], evaluation: dict[str, Any], exported_step: int
) -> dict[str, Any]:
    """Return the content of summary.json. evaluation: of the exported model."""
    same = ("num_processes", "mixed_precision", "dynamo_backend", "attn_implementation")
    same += ("per_device_train_batch_size", "environment")
    return {
        "run_id": state.run_id,
        "step": state.step,
        "exported_step": exported_step,
        "tokens_seen": state.examples * log.config.block_size,
        "eval_loss": evaluation["loss"],
        "perplexity": evaluation["perplexity"],
        "bits_per_byte": evaluation["bits_per_byte"],
        "eval_rows": evaluation["num_rows"],
        **({"mixture": evaluation["mixture"]} if "mixture" in evaluation else {}),
        "tasks": split_scores(evaluation),
        "initial": {key: value for key, value in state.initial.items() if key != "sample"},
        "tokens_per_second": log.tokens_per_second,
        "peak_memory_bytes": peak_memory_bytes(log.device),
        "train_seconds": state.train_seconds,
        "wall_seconds": log.seconds(),
        "num_parameters": facts["model"]["num_parameters"],
        "dataset_content_sha256": facts["data"]["content_sha256"],
        "command": shell_command(*sys.argv),
        "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **{key: facts[key] for key in same},
    }


def closing_lines(run: Run, summary: dict[str, Any], sample: str | None, state: RunState) -> str:
    """Return the results as lines to grep, a sample, and the commands that may come next."""
    config, output_dir = run.config, run.output_dir
    speed, memory = summary["tokens_per_second"], summary["peak_memory_bytes"] / 1e9
    block = {"initial_loss": f"{summary['initial']['loss']:.4f}"} if summary["initial"] else {}
    block |= {
        "eval_loss": f"{summary['eval_loss']:.4f}",
        **{f"eval_loss/{name}": f"{of['loss']:.4f}" for name, of in summary.get("mixture", {}).items()},
        "perplexity": f"{summary['perplexity']:.2f}",
        "bits_per_byte": describe_bits(summary["bits_per_byte"]),
        **({"best_step": summary["exported_step"]} if config.load_best_model_at_end else {}),
        "steps": summary["step"],
        "tokens": summary["tokens_seen"],
        "tokens_per_second": f"{speed:.0f}",
        "train_seconds": f"{summary['train_seconds']:.1f}",
        "total_seconds": f"{summary['wall_seconds']:.1f}",
        "peak_memory_gb": f"{memory:.2f}",
        "model": output_dir,
    }
    width = max(19, *(len(key) + 2 for key in block))
    lines = ["---", *(f"{key + ':':{width}}{value}" for key, value in block.items())]
    results = summary["tokens_seen"], summary["eval_loss"]
    if compared := compare_with_expected(config, run.metadata, *results):
        lines += ["", *textwrap.wrap(compared, 80, break_on_hyphens=False)]
    if sample is not None:
        lines += ["", f"A sample for the prompt {config.sample_prompt!r}:", textwrap.indent(sample, "    ")]
    if not math.isfinite(summary["eval_loss"]):
        remedy = "start a new run, or resume from an earlier checkpoint, with a lower --learning_rate"
        return "\n".join([*lines, "", *textwrap.wrap(f"The loss is not finite: {remedy}.", 80)])
    generate = shell_command("python", "scripts/generate_text.py", model=output_dir, prompt=config.sample_prompt)
    lines += ["", f"  generate   {generate}"]
    # Twice as long, from before the decay if there is one.
    start = checkpoint_dir(output_dir, state.step if state.decay_start is None else state.decay_start)
    if start.is_dir() and not state.has_stalled(config.early_stopping_patience):
        length = {"num_train_epochs": run.num_train_epochs, "max_minutes": config.max_minutes}
        length = {name: f"{2 * value:g}" for name, value in length.items() if value}
        if config.max_steps and not run.num_train_epochs:
            length["max_steps"] = 2 * state.step
        longer = shell_command(output_dir=f"{output_dir}-{2 * state.step}", **length)
        lines += ["  longer     repeat your command with"]
        lines += [f"             {shell_command(resume_from_checkpoint=start)} \\", f"             {longer}"]
    if config.dataset_name == STANDARD_LIBRARY:
        lines += ["  your text  accelerate launch recipe/train.py --train_file TEXT.txt"]
        lines += ["  GPT-2 124M see README.md, Where to start"]
    return "\n".join(lines)


def compare_with_expected(config: TrainConfig, metadata: dict[str, Any], num_tokens: int, loss: float) -> str | None:
    """Return a sentence that compares the final loss with the recipe's, or None if the run is another one.

    metadata: the dataset's. The recipe of a published run knows the hash of its text; for others, the dataset is the
    expected one if the last part of its name is in the name of the text, or in its path as it was typed.
    """
    if (expected := config.expected_loss) is None:
        return None
    difference, tolerance = loss - expected["value"], expected["tolerance"]
    verdict = f"{abs(difference):.2f} " + ("lower" if difference < 0 else "higher")
    verdict = "as expected" if abs(difference) <= tolerance else verdict if math.isfinite(loss) else "not finite"
    name, source = re.escape(expected["dataset"].rpartition("/")[2]), metadata["source"]
    texts = [source.get("dataset_name") or "", *(source.get("train_files") or ())]  # a mixture is no known dataset
    pattern = re.compile(rf"(?<![\w-]){name}(?![\w-])", re.IGNORECASE)  # fineweb-edu is not fineweb
    is_other = not any(map(pattern.search, texts))
    if "content_sha256" in expected:
        is_other = metadata["content_sha256"] != expected["content_sha256"]
    if is_other or abs(num_tokens / expected["tokens"] - 1) > SAME_LENGTH:
        if "content_sha256" not in expected:
            return None
        found = "other text" if is_other else f"{num_tokens:,} instead of {expected['tokens']:,} tokens"
        verdict = f"after {found}, so the two do not compare"
    known = f"{expected['value']:g} +/- {tolerance:g} ({expected['source']})"
    return f"Expected validation loss on {expected['dataset']}: {known}. This run: {loss:.3f}, {verdict}."


def _plural(count: int, word: str, ending: str = "s") -> str:
    return f"{count:,} {word}" + (ending if count != 1 else "")
