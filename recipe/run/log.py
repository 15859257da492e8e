"""What a run shows and records: metrics.jsonl, trackers, the progress bar, and what could not be written.

Only the main process shows and records. On the others, a log only takes part in the means over all processes.
"""

import contextlib
import json
import math
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from accelerate import Accelerator
from tqdm import tqdm

from recipe.checkpoint import RunState
from recipe.data.batches import TrainBatches
from recipe.errors import UserError, plural, printable, short_reason
from recipe.hardware.devices import memory_bytes, peak_flops_per_second, peak_memory_bytes
from recipe.hardware.memory import measure_total_bytes
from recipe.metrics import (
    METRICS_NAME,
    find_train_loss,
    has_begun_to_diverge,
    measure_speed,
    read_events,
    without_nan,
)
from recipe.optim.guard import MOST_BAD_STEPS, UpdateGuard
from recipe.progress import progress_target
from recipe.run.decide import Run, has_stalled
from recipe.run.stop import kill_warning

LISTED = 6  # failures of one kind
PROJECT = "gpt2-recipe"  # for trackers, unless WANDB_PROJECT is set
WAITING_SHARE = 0.02  # of the time; less is not shown


class RunLog:
    """Records and shows the events of a run."""

    def __init__(
        self,
        run: Run,
        accelerator: Accelerator,
        state: RunState,
        record: dict[str, Any],
        batches: TrainBatches,
        optimizer: torch.optim.Optimizer,
        guard: UpdateGuard,
    ) -> None:
        self.run = run
        self.config = run.config
        self.accelerator = accelerator
        self.output_dir = run.start.output_dir
        self.device = accelerator.device
        self.enabled = accelerator.is_main_process
        # Log lines show the numbers of these three.
        self.batches = batches
        self.optimizer = optimizer
        self.guard = guard
        self.flops_per_token = record["flops_per_token"]
        self.previous_seconds = state.seconds
        self.events = read_events(self.output_dir) if self.enabled else []  # of all starts
        self.step_seconds = 0.0  # of a step, at the newest line
        self.total_bytes = measure_total_bytes(self.device)
        self.failures: dict[str, tuple[int, str]] = {}  # what could not be written -> how often, and why at first
        self.is_torn = False  # the last line of metrics.jsonl
        self.bar: tqdm | None = None  # from the first log line on: nothing before it shows the speed
        self.tolerate("tracker events", lambda: self._init_trackers(state, record))
        self.sums: dict[str, torch.Tensor] = {}  # over the steps since the last log line, on the device
        self.grad_norm = torch.zeros(())
        self.num_clipped = torch.zeros((), device=self.device)
        self.has_saved = False
        self.lap_steps = 0
        self.lap_seconds = 0.0
        self.lap_started_at = time.perf_counter()

    def _init_trackers(self, state: RunState, record: dict[str, Any]) -> None:
        """Start the trackers. Names and ids identify the run, even after it resumes."""
        name = self.config.run_name or self.output_dir.name
        options = {
            "wandb": {"name": name, "id": state.run_id, "resume": "allow"},
            # Trackio identifies runs by name, and "allow" would continue an older run of the same name.
            "trackio": {"name": name, "resume": "allow" if state.step else "never"},
            "mlflow": {"run_name": name},  # MLflow chooses the id; MLFLOW_RUN_ID continues a run
            # TensorBoard hides what an earlier start logged after the checkpoint.
            "tensorboard": {"purge_step": state.step + 1 if state.step else 0},
        }
        values = {**asdict(self.config), **record, "device": record["environment"]["device"]}
        scalars = {key: value for key, value in values.items() if isinstance(value, (int, float, str, bool))}
        project = os.environ.get("WANDB_PROJECT") or PROJECT
        self.accelerator.init_trackers(project, init_kwargs=options)
        for tracker in self.accelerator.trackers:
            # TensorBoard would write them into a new folder and show it as another run; MLflow refuses other values.
            if not (state.step and tracker.name in ("tensorboard", "mlflow")):
                tracker.store_init_configuration(scalars)

    # ------------------------------------------------------------------ lines

    def say(self, text: str) -> None:
        """Print above the progress bar."""
        if self.enabled:
            write = self.bar.write if self.bar else print
            write(printable(text), file=sys.stdout)
            sys.stdout.flush()

    def say_sentence(self, text: str) -> None:
        """Print a sentence in lines of up to 80 columns; a path that is longer stays whole."""
        self.say(textwrap.fill(text, 80, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))

    def table(self, rows: dict[str, str]) -> None:
        """Print labeled paragraphs as wide as the terminal."""
        width = min(shutil.get_terminal_size().columns, 120)
        for label, text in rows.items():
            lines = textwrap.TextWrapper(
                width, f"{label:11}", " " * 11, break_long_words=False, break_on_hyphens=False
            )
            self.say(lines.fill(text))

    def event(self, event: str, step: int, **values: Any) -> None:
        """Append a line to metrics.jsonl and send the numbers to the trackers. A failure does not end the run."""
        finite = without_nan(values)
        if self.enabled:
            self.events.append({"event": event, "step": step, **finite})
            self.tolerate(METRICS_NAME, lambda: self._append(self.events[-1]))
        parts = finite.get("mixture", {})
        flat = finite | {f"{name}/{key}": value for name, part in parts.items() for key, value in part.items()}
        numbers = {f"{event}/{key}": value for key, value in flat.items() if isinstance(value, (int, float))}
        at = values.get("last_step", step)  # the last step, because wandb drops an earlier, exported one
        self.tolerate("tracker events", lambda: self.accelerator.log(numbers, step=at))

    def _append(self, values: dict[str, Any]) -> None:
        line = json.dumps(values, allow_nan=False) + "\n"
        if self.is_torn:
            line = "\n" + line
        self.is_torn = True  # a full disk may take a part of the line
        with open(self.output_dir / METRICS_NAME, "a", encoding="utf-8") as file:
            file.write(line)
        self.is_torn = False

    # ------------------------------------------------------------------ failures, none of which ends the run

    def tolerate(self, what: str, write: Callable[[], object]) -> None:
        try:
            write()
        except Exception as error:  # a full disk, or a service that does not answer: each library raises its own
            self.failed(what, error)

    def failed(self, what: str, error: Exception) -> None:
        """Count what could not be written, and say so the first time. Any thread can call this."""
        count, reason = self.failures.get(what, (0, short_reason(error)))
        self.failures[what] = count + 1, reason
        if count == 0:
            self.say(f"warning: {what} could not be written: {reason}")

    def list_failures(self) -> None:
        """Say what is still missing. A later attempt may have written a checkpoint that failed at first."""
        missing: dict[str, list[str]] = {}
        for what, (count, reason) in self.failures.items():
            if not (self.output_dir / what).is_dir():  # of a checkpoint, or the best model
                missing.setdefault(reason, []).append(f"{what} ({count} times)" if count > 1 else what)
        for reason, names in missing.items():
            shown = names if len(names) < LISTED else [*names[:2], f"... {names[-1]} ({len(names)} in all)"]
            self.say(f"not written: {', '.join(shown)}: {reason}")

    # ------------------------------------------------------------------ steps

    def add(self, means: dict[str, torch.Tensor], grad_norm: torch.Tensor) -> None:
        """Add the scalars of one step, which stay on the device. Call it after every step."""
        for name, value in means.items():
            scalar = torch.as_tensor(value, device=self.device)
            if scalar.dim() > 0:
                raise UserError(
                    f"the module returned {name} of shape {list(scalar.shape)}; it may return only scalars"
                )
            self.sums[name] = self.sums.get(name, 0.0) + scalar
        self.grad_norm = grad_norm
        self.num_clipped = self.num_clipped + (grad_norm > (self.config.max_grad_norm or math.inf))
        self.lap_steps += 1

    def is_due(self, state: RunState) -> bool:
        """Return whether the step that has just been made ends with a log line."""
        return state.step % self.config.logging_steps == 0 or state.step in (1, self.config.max_steps)

    def record_steps(self, state: RunState) -> None:
        """Record and show the numbers since the last log line. The one routine wait for the device.

        Means are over steps and processes; waiting and memory are this process's. Raises `UserError` if too many
        updates in a row were bad.
        """
        sums = [value / self.lap_steps for value in self.sums.values()]
        scaler = self.accelerator.scaler
        scale = [] if scaler is None else [scaler._scale.view(())]  # pyright: ignore[reportOptionalMemberAccess]
        numbers = torch.stack([*sums, self.grad_norm, self.num_clipped, *self.guard.counts, *scale])
        reduced = self.accelerator.reduce(numbers, reduction="mean")
        assert isinstance(reduced, torch.Tensor)  # as what went in
        numbers = reduced.tolist()
        waited = self.batches.take_wait()  # after `tolist`, for which the device had to finish
        count = len(self.sums)
        means = dict(zip(self.sums, numbers[:count], strict=True))
        norm, clipped, skipped, bad, *scale = numbers[count:]
        loss_scale = {"loss_scale": scale[0]} if scale else {}
        self._stop_clock()
        steps = self.lap_steps
        seconds = self.lap_seconds
        num_tokens = steps * self.config.tokens_per_step
        self.step_seconds = seconds / steps
        state.train_seconds += seconds
        self.sums = {}
        self.num_clipped = torch.zeros((), device=self.device)
        self.lap_steps = 0
        self.lap_seconds = 0.0
        self.lap_started_at = time.perf_counter()
        peak = peak_flops_per_second(self.device)
        flops = num_tokens / seconds * self.flops_per_token / self.accelerator.num_processes
        values = {
            "tokens_seen": state.tokens,
            **describe_epoch(self.run, state),
            **means,
            **learning_rates(self.optimizer),
            "grad_norm": norm,
            "clipped_share": clipped / steps,
            **loss_scale,
            "step_ms": 1000 * seconds / steps,
            "tokens_per_second": num_tokens / seconds,
            "train_seconds": state.train_seconds,
            "mfu": flops / peak if peak else None,
            "skipped_steps": int(skipped),
            "share_waiting_for_data": min(1.0, waited / seconds),
            "memory_bytes": memory_bytes(self.device),
            "peak_memory_bytes": peak_memory_bytes(self.device),
        }
        self.event("train", state.step, **values)
        self._show_progress(state, values)
        if bad >= MOST_BAD_STEPS:
            raise UserError(
                f"stopped at step {state.step:,}: {bad:.0f} consecutive steps had a loss or gradients that are not "
                f"finite (loss {means['loss']}, gradient norm {norm}) and were skipped; resume from an earlier "
                "checkpoint into another --output_dir, or start a new run, with a lower --learning_rate"
            )

    def saved(self, seconds: float) -> None:
        """Warn after the first checkpoint, which took this long, if the launcher would not wait for one."""
        if not self.has_saved:
            warning = kill_warning(os.environ, self.step_seconds + seconds)
            if warning is not None:
                self.say_sentence(f"warning: {warning}")
        self.has_saved = True

    def _show_progress(self, state: RunState, values: dict[str, Any]) -> None:
        max_steps = self.config.max_steps
        progress = max(state.progress, state.step / (max_steps or math.inf))  # the first: before the step
        if self.bar is None:
            self.bar = tqdm(
                total=1.0,
                initial=progress,
                bar_format="{desc} {elapsed}<{remaining}{postfix}",
                dynamic_ncols=True,
                smoothing=0.1,
                delay=1e-9,  # or the bar appears before its numbers are set
                disable=not self.enabled,
                **progress_target(),
            )
        is_known = max_steps and not self.config.max_minutes
        steps = f"{state.step:,}/{max_steps:,}" if is_known else f"{state.step:,}, {progress:.0%}"
        self.bar.set_description_str(steps, refresh=False)
        parts = describe_progress(values, self.total_bytes)
        width = math.inf
        if sys.stderr.isatty():
            times = "1:00:00<1:00:00" if state.train_seconds > 3600 * progress else "00:00<00:00"
            width = shutil.get_terminal_size().columns - len(f"{steps} {times}, ")
        while len(parts) > 1 and len(", ".join(parts)) > width:
            parts.pop()
        self.bar.set_postfix_str(", ".join(parts), refresh=False)
        self.bar.update(progress - self.bar.n)

    def _stop_clock(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        self.lap_seconds += time.perf_counter() - self.lap_started_at

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock for evaluation, saving and reading the log, which do not count in the speed."""
        self._stop_clock()
        try:
            yield
        finally:
            self.lap_started_at = time.perf_counter()

    def seconds(self) -> float:
        """Return the wall time of the run so far, over all its starts."""
        return self.previous_seconds + time.perf_counter() - self.run.started_at

    # ------------------------------------------------------------------ events

    def record_evaluation(self, state: RunState, values: dict[str, Any]) -> None:
        step = state.step
        if self.lap_steps:
            self.record_steps(state)  # for the training loss up to here
        if (train_loss := find_train_loss(self.events)) is not None:
            values = {"train_loss": train_loss, **values}
        seen = {"tokens_seen": state.tokens, **describe_epoch(self.run, state)}
        recorded = seen | {key: value for key, value in values.items() if key != "sample"}
        self.event("eval", step, **recorded)
        if values["sample"] is not None:
            self.event("sample", step, prompt=self.config.sample_prompt, text=values["sample"])
        self.say(describe_evaluation(f"step {step:>6,}", values))
        if speed := measure_speed(self.events):
            self.say_sentence(f"  {describe_seen(self.run, state, speed)}")
        if has_begun_to_diverge(self.events):
            self.say("validation rises while training falls: the model begins to memorize its text")
        patience = self.config.early_stopping_patience
        if has_stalled(state, patience):
            self.say(f"stopping early: {plural(patience or 0, 'evaluation')} without a new lowest validation loss")

    def record_changes(self, step: int, changes: dict[str, tuple]) -> None:
        """Record that later steps follow another schedule, or other options. changes: {option: (old, new)}."""
        self.event("schedule", step, changes={key: list(values) for key, values in changes.items()})
        for name, values in changes.items():
            before, now = (f"{value:g}" if isinstance(value, float) else value for value in values)
            self.say(f"from step {step + 1:,}, {name} is {now} instead of {before}")

    def close(self, state: RunState) -> None:
        """Log the steps since the last log line, after a signal or the time limit, and remove the progress bar."""
        if self.lap_steps:
            self.record_steps(state)
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def end(self) -> None:
        """Let the trackers finish."""
        for tracker in self.accelerator.trackers:
            self.tolerate("tracker events", tracker.finish)


def learning_rates(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return the rate of the last group, and of each group that differs: Muon's matrices are group 0."""
    *others, last = [group["lr"] for group in optimizer.param_groups]
    differing = {f"learning_rate_group_{i}": rate for i, rate in enumerate(others) if rate != last}
    return {"learning_rate": last, **differing}


def describe_progress(values: dict[str, Any], total_bytes: int) -> list[str]:
    """Return the numbers of a log line, the most important ones first. total_bytes: the memory of the device."""
    parts = [f"loss {values['loss']:.3f}", f"lr {values['learning_rate']:.1e}", f"norm {values['grad_norm']:.2f}"]
    if values["skipped_steps"]:
        parts.append(f"skipped updates {values['skipped_steps']:,}")
    epoch = values.get("epoch", 0.0)
    if epoch > 1:  # before, the progress says it
        parts.append(f"epoch {epoch:.1f}")
    ms = values["step_ms"]
    parts.append(f"{ms:,.1f} ms" if ms < 10 else f"{ms:,.0f} ms")
    parts.append(f"{tqdm.format_sizeof(values['tokens_per_second'])} tok/s")
    waiting = values["share_waiting_for_data"]
    if waiting > WAITING_SHARE:
        parts.append(f"{waiting:.0%} waiting for data")
    if values["mfu"] is not None:
        parts.append(f"{values['mfu']:.0%} MFU")
    if "loss_scale" in values:
        parts.append(f"scale {values['loss_scale']:,.0f}")
    used = values["memory_bytes"] / total_bytes
    peak = values["peak_memory_bytes"] / total_bytes
    return [*parts, f"{used:.0%} of {total_bytes / 1e9:.0f} GB, peak {peak:.0%}"]


def describe_epoch(run: Run, state: RunState) -> dict[str, float]:
    """Return the epochs so far, in a mixture those of the dataset that is read most often; {} for a stream."""
    epochs = run.count_epochs(state.stage_examples)
    return {"epoch": max(epochs.values())} if epochs else {}


def describe_seen(run: Run, state: RunState, tokens_per_second: float) -> str:
    """Return the tokens and documents that a run has seen, the epoch, and the time per epoch."""
    validated = sum(evaluation["num_rows"] for evaluation in state.evaluations.values()) * run.config.block_size
    tokens = [tqdm.format_sizeof(number) for number in (state.tokens, validated, state.tokens + validated)]
    text = f"{tokens[0]} tokens + {tokens[1]} of validation = {tokens[2]}"
    if epochs := run.count_epochs(state.stage_examples):
        parts = run.data.metadata.get("mixture") or {"": run.data.metadata}
        documents = [parts[name]["splits"]["train"]["documents"] for name in epochs]
        if None not in documents and sum(documents) > 1:  # one is the whole text
            seen = sum(min(1, count) * total for count, total in zip(epochs.values(), documents, strict=True))
            text += f"; {plural(round(seen), 'document')}"
        shown = [f"{count:.2f} of {name}" if name else f"{count:.2f}" for name, count in epochs.items()]
        text += f"; epoch {', '.join(shown)}"
        if len(epochs) == 1:
            minutes = run.data.metadata["splits"]["train"]["rows"] * run.config.block_size / tokens_per_second / 60
            if minutes < 1:
                text += f" ({60 * minutes:.0f} s)"
            elif minutes < 60:
                text += f" ({minutes:.1f} min)"
            else:
                text += f" ({minutes / 60:.1f} h)"
    return text


def describe_bits(bits_per_byte: float | None) -> str:
    """Return a number, or a dash where the bytes of the text are not known."""
    return "-" if bits_per_byte is None or math.isnan(bits_per_byte) else f"{bits_per_byte:.4f}"


def describe_evaluation(what: str, values: dict[str, Any]) -> str:
    """Return one line with the results of an evaluation, and one more for each dataset of a mixture."""
    train = f"train {values['train_loss']:.4f}, " if "train_loss" in values else ""
    digits = 2 if values["perplexity"] < 100 else 0
    line = f"{what}: {train}validation {values['loss']:.4f}, perplexity {values['perplexity']:,.{digits}f}, "
    line += f"{describe_bits(values['bits_per_byte'])} bits/byte"
    for name, part in values.get("mixture", {}).items():
        line += f"\n  {name}: validation {part['loss']:.4f}, {describe_bits(part['bits_per_byte'])} bits/byte"
    return line
