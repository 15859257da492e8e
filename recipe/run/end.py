"""How a run ends: stopped by a signal, or finished with the model, summary.json, the card and closing lines."""

import json
import math
import re
import textwrap
import time
from collections.abc import Iterator
from typing import Any

from recipe.arguments import shell_command
from recipe.checkpoint import (
    CheckpointSaver,
    RunState,
    checkpoint_dir,
    list_checkpoints,
    mark_resumable,
    read_exported,
    read_summary,
)
from recipe.config import STANDARD_LIBRARY, TrainConfig
from recipe.disk import write_file
from recipe.errors import UserError
from recipe.evaluation.scoring import exp_or_inf
from recipe.hardware.processes import on_main_process
from recipe.metrics import (
    SUMMARY_NAME,
    count_stage_tokens,
    measure_speed,
    with_nan,
    without_nan,
)
from recipe.publish.card import write_model_card
from recipe.publish.uploads import HubUploads
from recipe.run.decide import Run, has_stalled
from recipe.run.log import RunLog, describe_bits, describe_epoch
from recipe.run.stop import EXIT_STOPPED, StopSignals, describe_signal

STOP_SECONDS = 60.0  # for uploads after a signal: Slurm's batch files leave 300 s for all of the end
SUMMARIZED = (  # of the record
    "num_parameters",
    "command",
    "num_processes",
    "mixed_precision",
    "dynamo_backend",
    "attn_implementation",
    "per_device_train_batch_size",
    "environment",
)
INDENTED = {"initial_indent": "    ", "subsequent_indent": "    ", "replace_whitespace": False}
SAME_LENGTH = 0.05  # a run is compared with one whose number of tokens differs by at most this share


def stop_run(log: RunLog, uploads: HubUploads, state: RunState, signals: StopSignals, saved: bool) -> int:
    """Say why the run stopped and how to resume it. Returns the exit status once all processes may leave."""

    def stop() -> None:
        options = shell_command(output_dir=log.output_dir, resume_from_checkpoint="auto")
        where = f"saved in {checkpoint_dir(log.output_dir, state.step)}" if saved else "but could not be saved"
        how = "resume" if saved or list_checkpoints(log.output_dir) else "start again"
        how = f"to {how}, repeat your command with"
        if state.step == 0:
            where = "with nothing to save"
            how = "the same command starts again"
            options = ""
        mark_resumable(True)  # also if the run had nothing new to save, or could not save it
        log.say_sentence(f"stopped by {describe_signal(signals.agreed)} after step {state.step:,}, {where}; {how}")
        if options:
            log.say(f"    {options}")
        log.list_failures()
        num_signals = signals.count
        signals.interrupted_at = None  # the next Ctrl-C only ends the uploads
        uploads.finish(None, STOP_SECONDS, lambda: signals.count > num_signals)
        log.end()

    on_main_process(stop)
    return uploads.leave(EXIT_STOPPED if saved or state.step == 0 else 1)


def finish_run(
    log: RunLog,
    uploads: HubUploads,
    state: RunState,
    signals: StopSignals,
    record: dict[str, Any],
    saver: CheckpointSaver,
) -> int:
    """Export the model, write summary and card, print the results, and publish. It can be repeated.

    Returns the exit status once all processes may leave.
    """
    signals.reaction = "writing the results, and ending the upload"
    folder = log.output_dir
    try:
        saver.export(state, is_last=True)
    except UserError:
        log.list_failures()
        raise

    def finish() -> int:
        step, loss = read_exported(folder) or (state.step, state.loss)
        evaluation = {"loss": loss, "perplexity": exp_or_inf(loss), "bits_per_byte": math.nan, "num_rows": None}
        evaluation["sample"] = None
        evaluation |= state.evaluations.get(step, {})  # nothing, if it was not logged
        evaluation["step"] = step
        summary = read_summary(folder, state.run_id)
        if summary.get("step") != state.step:
            summary = write_summary(log, build_summary(log, state, record, evaluation))
        log.tolerate("the model card", lambda: write_model_card(folder, step))
        mark_resumable(False)
        for line in describe_end(log.run, state, evaluation):
            log.say_sentence(line)
        log.say(closing_lines(log.run, summary, evaluation["sample"], state))
        log.list_failures()
        is_complete = uploads.finish(step, interrupted=lambda: signals.count > 0)
        log.end()
        if is_complete:
            return 0
        return 128 + signals.newest if signals.count else 1  # the model is on this disk only

    return uploads.leave(on_main_process(finish))


def describe_end(run: Run, state: RunState, exported: dict[str, Any]) -> Iterator[str]:
    """Yield which model has the lowest validation loss, and what ended a run that had more time.

    exported: step and evaluation.
    """
    losses = {exported["step"]: exported["loss"]} | {int(step): loss for step, loss in state.losses.items()}
    lowest = min(losses, key=losses.__getitem__)
    epochs = run.count_epochs(state.stage_examples)
    steps = max(1, state.step - state.stage.step)
    counts = [max(epochs.values(), default=0.0) * (step - state.stage.step) / steps for step in (lowest, state.step)]
    text = f"lowest validation loss {losses[lowest]:.4f} at step {lowest:,} of {state.step:,}"
    if epochs:
        text += f" ({counts[0]:.1f} of {counts[1]:.1f} epochs)"
    is_kept = run.config.load_best_model_at_end == "true"
    if lowest == exported["step"]:
        if is_kept or lowest != state.step:
            yield f"{text}: exported"
    else:
        remedy = "its weights are gone" if is_kept else "a run with --load_best_model_at_end true keeps and exports it"
        yield f"{text}, and {exported['loss']:.4f} at step {exported['step']:,}, which is exported; {remedy}"
    if state.initial.get("loss", math.inf) < losses[lowest]:
        before = f"{state.initial['loss']:.4f} at step {state.stage.step:,}"
        yield f"the validation loss was lower before this training: {before}"
    if was_capped(run, state):
        used = f"{state.seconds / 60:.1f} of {run.config.max_minutes:g} minutes"
        most = run.start.requested.num_train_epochs
        yield f"ended after {most:g} epochs and {used}; --num_train_epochs lifts this limit"


def was_capped(run: Run, state: RunState) -> bool:
    """Return whether the recipe's number of epochs ended a run that had more time."""
    both = run.config.max_minutes and run.start.requested.num_train_epochs
    return (
        bool(both)
        and "num_train_epochs" not in run.start.typed_options
        and state.examples >= (run.schedule.num_examples or math.inf)
    )


def write_summary(log: RunLog, values: dict[str, Any]) -> dict[str, Any]:
    """Write summary.json, and note the end in the log unless an earlier start has. Returns what the file says."""
    steps = {"last_step": values["step"], "exported_step": values["exported_step"]}
    ends = [event for event in log.events if event["event"] == "end"]
    if not any(steps.items() <= event.items() for event in ends):
        log.event("end", values["exported_step"], **steps, tokens_seen=values["tokens_seen"])
    finite = without_nan(values)
    write_file(log.output_dir / SUMMARY_NAME, json.dumps(finite, indent=2, allow_nan=False) + "\n")
    return with_nan(finite)


def build_summary(log: RunLog, state: RunState, record: dict[str, Any], evaluation: dict[str, Any]) -> dict[str, Any]:
    """Return the content of summary.json. evaluation: of the exported model, with its step."""
    peaks = [event["peak_memory_bytes"] for event in log.events if event["event"] == "train"]
    mixture = {"mixture": evaluation["mixture"]} if "mixture" in evaluation else {}
    return {
        "run_id": state.run_id,
        "step": state.step,
        "exported_step": evaluation["step"],
        "tokens_seen": state.tokens,
        **describe_epoch(log.run, state),
        "stages": count_stage_tokens(record["stages"], state.tokens),
        "eval_loss": evaluation["loss"],
        "perplexity": evaluation["perplexity"],
        "bits_per_byte": evaluation["bits_per_byte"],
        "eval_rows": evaluation["num_rows"],
        **mixture,
        "initial": {key: value for key, value in state.initial.items() if key != "sample"},
        "tokens_per_second": measure_speed(log.events),
        "peak_memory_bytes": max(peaks, default=0),
        "train_seconds": state.train_seconds,
        "wall_seconds": log.seconds(),
        "dataset_content_sha256": record["data"]["content_sha256"],
        "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **{name: record[name] for name in SUMMARIZED},
    }


def closing_lines(run: Run, summary: dict[str, Any], sample: str | None, state: RunState) -> str:
    """Return the results as lines to grep, a sample, and the commands that may come next."""
    config = run.config
    output_dir = run.start.output_dir
    block: dict[str, object] = {}
    if summary["initial"]:
        block["initial_loss"] = f"{summary['initial']['loss']:.4f}"
    block["eval_loss"] = f"{summary['eval_loss']:.4f}"
    for name, part in summary.get("mixture", {}).items():
        block[f"eval_loss/{name}"] = f"{part['loss']:.4f}"
    block["perplexity"] = f"{summary['perplexity']:.2f}"
    block["bits_per_byte"] = describe_bits(summary["bits_per_byte"])
    if config.load_best_model_at_end == "true":
        block["best_step"] = summary["exported_step"]
    block["steps"] = summary["step"]
    block["tokens"] = summary["tokens_seen"]
    block["tokens_per_second"] = f"{summary['tokens_per_second']:.0f}"
    block["train_seconds"] = f"{summary['train_seconds']:.1f}"
    block["total_seconds"] = f"{summary['wall_seconds']:.1f}"
    block["peak_memory_gb"] = f"{summary['peak_memory_bytes'] / 1e9:.2f}"
    block["model"] = output_dir
    width = max(19, *(len(key) + 2 for key in block))
    lines = ["---", *(f"{key + ':':{width}}{value}" for key, value in block.items())]
    if len(state.stages) == 1:
        compared = compare_with_expected(config, run.data.metadata, summary["tokens_seen"], summary["eval_loss"])
        if compared is not None:
            lines += ["", *textwrap.wrap(compared, 80, break_on_hyphens=False)]
    if sample is not None:
        lines += ["", f"A sample for the prompt {config.sample_prompt!r}:"]
        lines += [textwrap.fill(line, 80, **INDENTED) for line in sample.splitlines()]
    if not math.isfinite(summary["eval_loss"]):
        remedy = "start a new run, or resume from an earlier checkpoint, with a lower --learning_rate"
        return "\n".join([*lines, "", *textwrap.wrap(f"The loss is not finite: {remedy}.", 80)])
    how: dict[str, object] = {"interactive": True} if run.model.is_chat else {"prompt": config.sample_prompt}
    if getattr(run.model.config, "auto_map", None):  # its layers are the user's own
        how["trust_remote_code"] = True
    generate = shell_command("python", "scripts/generate_text.py", model=output_dir, **how)
    lines += ["", f"  generate   {generate}"]
    # To train twice as long, from before the decay if there is one.
    start = checkpoint_dir(output_dir, state.step if state.decay_start is None else state.decay_start)
    last = state.evaluations[state.step]["loss"]
    overfits = min(state.losses.values(), default=last) < last or was_capped(run, state)
    if start.is_dir() and not overfits and not has_stalled(state, config.early_stopping_patience):
        # Only a typed limit: the recipe's epochs fit its minutes.
        is_own = not config.max_minutes or "num_train_epochs" in run.start.typed_options
        epochs = run.start.requested.num_train_epochs if is_own else None
        length = {"num_train_epochs": epochs, "max_minutes": config.max_minutes}
        length = {name: f"{2 * value:g}" for name, value in length.items() if value}
        if config.max_steps and not run.start.requested.num_train_epochs:
            length["max_steps"] = str(2 * state.step)
        longer = shell_command(output_dir=f"{output_dir}-{2 * state.step}", **length)
        lines += ["  longer     repeat your command with"]
        lines += [f"             {shell_command(resume_from_checkpoint=start)} \\", f"             {longer}"]
    if config.dataset_name == STANDARD_LIBRARY:
        lines += ["  your text  accelerate launch recipe/train.py --train_file TEXT.txt"]
        lines += ["  GPT-2 124M see README.md, Where to start"]
    return "\n".join(lines)


def compare_with_expected(config: TrainConfig, metadata: dict[str, Any], num_tokens: int, loss: float) -> str | None:
    """Return a sentence that compares the final loss with the recipe's, or None if the run is another one.

    metadata: the dataset's. The recipe of a published run holds the hash of its text. Other recipes name a dataset;
    the last part of that name must occur in the name of the text, or in its path as typed.
    """
    expected = config.expected_loss
    if expected is None:
        return None
    difference = loss - expected["value"]
    tolerance = expected["tolerance"]
    if abs(difference) <= tolerance:
        verdict = "as expected"
    elif math.isfinite(loss):
        verdict = f"{abs(difference):.2f} " + ("lower" if difference < 0 else "higher")
    else:
        verdict = "not finite"
    name = re.escape(expected["dataset"].rpartition("/")[2])
    source = metadata["source"]
    texts = [source.get("dataset_name") or "", *(source.get("train_files") or ())]  # a mixture is no known dataset
    pattern = re.compile(rf"(?<![\w-]){name}(?![\w-])", re.IGNORECASE)  # fineweb-edu is not fineweb
    is_other = not any(map(pattern.search, texts))
    if "content_sha256" in expected:
        is_other = metadata["content_sha256"] != expected["content_sha256"]
    if is_other or abs(num_tokens / expected["tokens"] - 1) > SAME_LENGTH:
        if "content_sha256" not in expected:
            return None
        difference_from = "other text" if is_other else f"{num_tokens:,} instead of {expected['tokens']:,} tokens"
        verdict = f"after {difference_from}, so the two do not compare"
    known = f"{expected['value']:g} +/- {tolerance:g} ({expected['source']})"
    return f"Expected validation loss on {expected['dataset']}: {known}. This run: {loss:.3f}, {verdict}."
