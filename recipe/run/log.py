"""What a run leaves in its folder and on the screen: metrics.jsonl, summary.json, progress bar, closing words."""

import json
import math
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from tqdm import tqdm
from transformers import PreTrainedModel

from recipe.checkpoint.load import list_checkpoints
from recipe.checkpoint.manifest import why_damaged
from recipe.config import STANDARD_LIBRARY, TrainConfig, UserError
from recipe.data.packed import PackedDataset
from recipe.environment import describe_device
from recipe.hardware.accelerator import Choice
from recipe.optim.guard import count_warmup_steps
from recipe.progress import progress_target
from recipe.run.meter import count_parameters
from recipe.run.output_dir import (
    METRICS_NAME,
    SUMMARY_NAME,
    launch_command,
    resume_command,
    tracker_id,
)
from recipe.run.profile import TRACE_NAME, describe


class RunReport:
    """Writes and shows the events of a run; on every process but the first it does nothing."""

    def __init__(self, accelerator: Accelerator, config: TrainConfig, output_dir: Path, first_step: int) -> None:
        self.accelerator, self.output_dir = accelerator, output_dir
        self.enabled = accelerator.is_main_process
        self.stop_on_save_failure = config.on_save_failure == "stop"
        self.failures: set[str] = set()  # what could not be recorded, said once
        scalars = {k: v for k, v in asdict(config).items() if isinstance(v, (int, float, str, bool))}
        if self.enabled and (output_dir / METRICS_NAME).exists():
            drop_events_after(output_dir / METRICS_NAME, first_step or -1)  # a new run keeps nothing of an older one
        self.bar = tqdm(
            total=config.max_steps,
            initial=first_step,
            unit="step",
            desc="train",
            dynamic_ncols=True,
            disable=not self.enabled,
            smoothing=0.1,
            bar_format="{desc} {percentage:3.0f}%|{bar}| {n:.0f}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
            **progress_target(),
        )
        self._unless_it_fails("the tracker", lambda: self._init_trackers(config, scalars, first_step))

    def _init_trackers(self, config: TrainConfig, scalars: dict[str, Any], first_step: int) -> None:
        """Accelerate's first argument is the project (1.15); the run is named, and known again on resume, by these."""
        name = config.run_name or self.output_dir.name
        run_id = tracker_id(self.output_dir) if config.report_to and self.enabled else ""
        options = {
            "wandb": {"name": name, "id": run_id, "resume": "allow"},
            # It knows runs by name, and "allow" would continue an older run of the same name.
            "trackio": {"name": name, "resume": "allow" if first_step else "never"},
            "mlflow": {"run_name": name},
        }
        self.accelerator.init_trackers(config.project, config=scalars, init_kwargs=options)

    def event(self, event: str, step: int, **values: Any) -> None:
        """Append one line to metrics.jsonl and hand the numbers to the trackers; neither may end a run."""
        finite = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in values.items()}
        if self.enabled:
            self._unless_it_fails(METRICS_NAME, lambda: self._append({"event": event, "step": step, **finite}))
        numbers = {f"{event}/{key}": value for key, value in finite.items() if isinstance(value, (int, float))}
        self._unless_it_fails("the tracker", lambda: self.accelerator.log(numbers, step=step))

    def _append(self, values: dict[str, Any]) -> None:
        with open(self.output_dir / METRICS_NAME, "a", encoding="utf-8") as file:
            file.write(json.dumps(values, allow_nan=False) + "\n")

    def _unless_it_fails(self, what: str, write: Callable[[], object]) -> None:
        try:
            write()
        except Exception as error:  # a full disk, a service that does not answer: each raises its own
            if what not in self.failures:
                self.failures.add(what)
                self.say(f"warning: {what} fails and the run goes on ({type(error).__name__}: {str(error)[:200]})")

    def train(self, step: int, **values: Any) -> None:
        self.event("train", step, **values)
        shown = f"loss {values['loss']:.3f}, {values['tokens_per_second']:,.0f} tokens/s"
        self.bar.set_postfix_str(shown, refresh=False)

    def evaluation(self, step: int, values: dict[str, float]) -> None:
        self.event("eval", step, **values)
        self.say(describe_evaluation(f"step {step:>6,}", values))

    def schedule(self, step: int, changes: dict[str, tuple]) -> None:
        """Record that the steps after this one follow another schedule. changes: {option: (before, now)}."""
        self.event("schedule", step, changes={key: list(values) for key, values in changes.items()})
        for key, (before, now) in changes.items():
            self.say(f"from step {step + 1:,} on, {key} is {now} instead of {before}")

    def shorten(self, step: int, max_steps: int, config: TrainConfig) -> None:
        """Say and record how many steps `max_minutes` allows."""
        self.bar.total = max_steps
        self.event("max_minutes", step, max_steps=max_steps, max_minutes=config.max_minutes)
        self.say(
            f"at the speed of the first steps, {max_steps:,} of {config.max_steps:,} steps fit into "
            f"{config.max_minutes:g} minutes"
        )

    def profile(self, step: int, numbers: dict[str, Any]) -> None:
        self.event("profile", step, **numbers)
        self.say(f"{describe(numbers)}\n  the trace is {self.output_dir / TRACE_NAME}")

    def checkpoint_failure(self, reason: str) -> None:
        """Say it, and stop if that is what the run asks for."""
        if self.stop_on_save_failure:
            raise UserError(f"{reason} (--on_save_failure stop)")
        self.say(f"warning: {reason}")

    def bad_numbers(self, step: int, count: int, loss: float, grad_norm: float) -> UserError:
        """Why a run stops whose numbers stay bad."""
        whole = (path for path in reversed(list_checkpoints(self.output_dir)) if why_damaged(path) is None)
        return UserError(
            f"stopped at step {step:,}: {count} steps in a row had a loss or gradients that are not finite, or spikes "
            f"(loss {loss}, gradient norm {grad_norm}), and were left out; last good checkpoint: "
            f"{next(whole, 'none')}; a lower --learning_rate in a new run may help"
        )

    def table(self, rows: dict[str, str]) -> None:
        """Print labelled paragraphs, as wide as the terminal."""
        width = min(shutil.get_terminal_size().columns, 120)
        for label, text in rows.items():
            self.say(
                textwrap.fill(
                    text,
                    width,
                    initial_indent=f"{label:11}",
                    subsequent_indent=" " * 11,
                    break_long_words=False,
                    break_on_hyphens=False,
                )
            )

    def advance(self, steps: float) -> None:
        """Move the bar by a part of a step: a step of many micro-batches may take minutes."""
        self.bar.update(steps)

    def say(self, text: str) -> None:
        if self.enabled:
            self.bar.write(text, file=sys.stdout)
            sys.stdout.flush()

    def close(self) -> None:
        self.bar.close()

    def end(self) -> None:
        """Let the trackers finish. Comes last: it takes the processes' connection down."""
        self._unless_it_fails("the tracker", self.accelerator.end_training)

    def summary(self, values: dict[str, Any]) -> None:
        (self.output_dir / SUMMARY_NAME).write_text(json.dumps(values, indent=2) + "\n")


def drop_events_after(path: Path, step: int) -> None:
    """Take back what a run has logged beyond the checkpoint it is resumed from: it will log it again."""
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):  # cut short when the process was killed, or the disk was full
            continue
    written = path.with_suffix(".new")
    written.write_text("".join(kept), encoding="utf-8")
    written.replace(path)


def describe_evaluation(what: str, values: dict[str, float]) -> str:
    return (
        f"{what}: validation loss {values['loss']:.4f}, perplexity {values['perplexity']:,.2f}, "
        f"{values['bits_per_byte']:.4f} bits per byte"
    )


def describe_run(
    config: TrainConfig,
    recipe: str,
    output_dir: Path,
    resume_dir: Path | None,
    device: torch.device,
    choices: dict[str, Choice],
    model: PreTrainedModel,
    dataset: PackedDataset,
    batch: tuple[int, int, int],
    eval_rows: int,
) -> dict[str, str]:
    """The table printed before the first step. batch: processes, micro-batches of each, rows of each."""
    num_processes, accumulation_steps, micro_batch_size = batch
    tokens_per_step = config.global_batch_size * config.block_size
    num_train_rows, num_validation_rows = (len(dataset.splits[split]) for split in ("train", "validation"))
    devices = describe_device(device)
    if device.type == "cpu":
        threads = _plural(torch.get_num_threads(), "thread")
        devices += f", {_plural(num_processes, 'process', 'es')} of {threads}" if num_processes > 1 else f", {threads}"
    elif num_processes > 1:
        devices = f"{num_processes} x {devices}"
    data = f"{dataset.directory}: {num_train_rows:,} training rows of {config.block_size} tokens"
    if config.streaming:
        data = f"streamed, shuffled over {config.shuffle_buffer_size:,} rows of {config.block_size} tokens"
    epochs = config.max_steps * config.global_batch_size / num_train_rows
    shown = {label: f"{choice.value}: {choice.reason}" for label, choice in choices.items()}
    if device.type == "cuda" and config.tf32:
        shown["precision"] += "; TF32 for what stays fp32"
    if config.deterministic:
        shown["precision"] += "; deterministic algorithms"
    return {
        "recipe": f"{recipe}, results in {output_dir}" + (f", resumed from {resume_dir}" if resume_dir else ""),
        "device": devices,
        **shown,
        "model": f"{type(model).__name__}, {count_parameters(model):,} parameters, vocabulary {dataset.vocab_size:,}"
        + (f" padded to {model.config.vocab_size:,}" if model.config.vocab_size > dataset.vocab_size else "")
        + f", {model.config.n_positions} positions"
        + (f", weights from {config.model_name_or_path}" if config.model_name_or_path and not resume_dir else ""),
        "data": f"{data}; {eval_rows:,} of {num_validation_rows:,} validation rows in an evaluation",
        "batch": f"{config.global_batch_size} sequences = {tokens_per_step:,} tokens a step = "
        f"{_plural(num_processes, 'process', 'es')} x {_plural(accumulation_steps, 'micro-batch', 'es')} x "
        f"{_plural(micro_batch_size, 'sequence')}",
        "run": f"{_plural(config.max_steps, 'step')} = {config.max_steps * tokens_per_step:,} tokens"
        + ("" if config.streaming else f", {epochs:.2f} epochs")
        + f", {_plural(count_warmup_steps(config), 'step')} of warm-up"
        + (f"; fewer if they take longer than {config.max_minutes:g} minutes" if config.max_minutes else ""),
    }


def _plural(count: int, word: str, ending: str = "s") -> str:
    return f"{count:,} {word}" + (ending if count != 1 else "")


def closing_words(
    config: TrainConfig, output_dir: Path, untrained: dict, trained: dict, share_outside_training: float | None
) -> str:
    """What was reached, where the model is, and the commands that may come next; the sample follows."""
    folder, prompt = shlex.quote(str(output_dir)), shlex.quote(config.sample_prompt)
    before, after = ("before", "after") if config.model_name_or_path else ("untrained", "trained")
    columns = {before: untrained, after: trained} if untrained else {after: trained}
    lines = ["", " " * 14 + "".join(f"{name:>15}" for name in columns)]
    for key in ("loss", "perplexity", "bits_per_byte"):
        lines.append(f"{key.replace('_', ' '):14}" + "".join(f"{values[key]:>15,.3f}" for values in columns.values()))
    if share_outside_training is not None:
        lines += ["", f"{share_outside_training:.1%} of the time went into evaluating and saving."]
    lines += [
        "",
        f"The model is in {output_dir}, in Hugging Face format. Next:",
        "",
        *_wrap_command("generate", f"python scripts/generate_text.py --model {folder} --prompt {prompt}"),
    ]
    if config.save_steps:
        longer = f"{resume_command(output_dir)} --max_steps {2 * config.max_steps} --change_schedule"
        lines += _wrap_command("train on", longer)
    if config.dataset_name == STANDARD_LIBRARY:
        lines += [
            *_wrap_command("your text", f"{launch_command()} --train_file TEXT.txt"),
            "  GPT-2 124M python scripts/prepare_data.py --dataset_name HUB_ID \\",
            "               --tokenizer_name openai-community/gpt2 --output_dir DIR",
            "             accelerate launch \\",
            "               --config_file accelerate_configs/single_gpu.yaml \\",
            "               recipe/train.py --config gpt2_124m --dataset_dir DIR",
        ]
    return "\n".join(lines)


def _wrap_command(label: str, command: str) -> list[str]:
    """A command in lines of 80 columns that a shell reads as one."""
    indent = {"initial_indent": f"  {label:10} ", "subsequent_indent": " " * 15}
    lines = textwrap.wrap(command, 78, break_long_words=False, break_on_hyphens=False, **indent)
    return [*(f"{line} \\" for line in lines[:-1]), lines[-1]]
