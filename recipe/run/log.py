"""The events of a run: metrics.jsonl, the trackers, the progress bar and the lines on the screen."""

import json
import math
import shutil
import sys
import textwrap
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from tqdm import tqdm

from recipe.checkpoint.load import checkpoint_dir, list_checkpoints
from recipe.checkpoint.manifest import why_damaged
from recipe.config import TrainConfig
from recipe.errors import UserError, short_reason
from recipe.progress import progress_target
from recipe.publish.card import write_model_card
from recipe.run.output_dir import METRICS_NAME, SUMMARY_NAME, resume_command, tracker_id
from recipe.run.profile import TRACE_NAME, describe
from recipe.run.summary import describe_evaluation, describe_start

PROJECT = "gpt2-recipe"  # for trackers


class RunReport:
    """Records and shows the events of a run. On every process but the main one it does nothing."""

    def __init__(self, accelerator: Accelerator, config: TrainConfig, output_dir: Path, first_step: int) -> None:
        self.accelerator, self.output_dir = accelerator, output_dir
        self.enabled = accelerator.is_main_process
        self.sample_prompt = config.sample_prompt
        self.failures: set[str] = set()  # reported once each
        self.has_trained = False
        if self.enabled and (output_dir / METRICS_NAME).exists():
            drop_events_after(output_dir / METRICS_NAME, first_step or -1)  # a new run keeps none of an older one's
        self.bar = tqdm(
            total=None if config.is_open_ended else config.max_steps,
            initial=first_step,
            unit="step",
            dynamic_ncols=True,
            disable=not self.enabled,
            smoothing=0.1,
            bar_format="{percentage:3.0f}%|{bar}| {n:.0f}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
            **progress_target(),
        )
        self._tolerate("the tracker", lambda: self._init_trackers(config, first_step))

    def _init_trackers(self, config: TrainConfig, first_step: int) -> None:
        """Start the trackers. Names and ids identify the run, even after it resumes."""
        name = config.run_name or self.output_dir.name
        run_id = tracker_id(self.output_dir) if config.report_to and self.enabled else ""
        options = {
            "wandb": {"name": name, "id": run_id, "resume": "allow"},
            # Trackio identifies runs by name, and "allow" would continue an older run of the same name.
            "trackio": {"name": name, "resume": "allow" if first_step else "never"},
            "mlflow": {"run_name": name},
        }
        scalars = {key: value for key, value in asdict(config).items() if isinstance(value, (int, float, str, bool))}
        self.accelerator.init_trackers(PROJECT, config=scalars, init_kwargs=options)

    def event(self, event: str, step: int, **values: Any) -> None:
        """Append a line to metrics.jsonl and send the numbers to the trackers. A failure does not end the run."""
        finite = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in values.items()}
        if self.enabled:
            self._tolerate(METRICS_NAME, lambda: self._append({"event": event, "step": step, **finite}))
        numbers = {f"{event}/{key}": value for key, value in finite.items() if isinstance(value, (int, float))}
        self._tolerate("the tracker", lambda: self.accelerator.log(numbers, step=step))

    def _append(self, values: dict[str, Any]) -> None:
        with open(self.output_dir / METRICS_NAME, "a", encoding="utf-8") as file:
            file.write(json.dumps(values, allow_nan=False) + "\n")

    def _tolerate(self, what: str, write: Callable[[], object]) -> None:
        try:
            write()
        except Exception as error:  # a full disk, or a service that does not answer: each library raises its own
            if what not in self.failures:
                self.failures.add(what)
                self.say(f"warning: writing to {what} failed; training continues without it ({short_reason(error)})")

    def start(self, step: int, *run: Any) -> None:
        """Record what the run is, for its model card. run: the arguments of `describe_start`."""
        if self.enabled:
            self.event("start", step, **describe_start(*run))

    def train(self, step: int, values: dict[str, Any]) -> None:
        """Record and show a log line. values: from `StepMeter.read`."""
        self.event("train", step, **values)
        self.has_trained = True
        self.bar.set_postfix_str(describe_progress(values), refresh=False)
        self.bar.n = step  # a step that ran out of memory advanced the bar twice

    def evaluation(self, step: int, values: dict[str, Any]) -> None:
        self.event("eval", step, **{key: value for key, value in values.items() if key != "sample"})
        if values["sample"] is not None:
            self.event("sample", step, prompt=self.sample_prompt, text=values["sample"])
        self.say(describe_evaluation(f"step {step:>6,}", values))

    def schedule(self, step: int, changes: dict[str, tuple]) -> None:
        """Record that later steps follow another schedule. changes: {option: (old, new)}."""
        self.event("schedule", step, changes={key: list(values) for key, values in changes.items()})
        for key, (before, now) in changes.items():
            self.say(f"from step {step + 1:,}, {key} is {now} instead of {before}")

    def shorten(self, step: int, max_steps: int, config: TrainConfig) -> None:
        """Record how many steps fit into `max_minutes`. config: before it is shortened."""
        self.bar.total = max_steps
        self.event("max_minutes", step, max_steps=max_steps, max_minutes=config.max_minutes)
        bound = "" if config.is_open_ended else f"of {config.max_steps:,} "
        fits = f"{max_steps:,} {bound}steps fit into {config.max_minutes:g} minutes"
        if bound and max_steps < config.max_steps:
            fits += f" at the speed of the first ones; --max_steps {config.max_steps} runs them all"
        self.say(fits)

    def profile(self, step: int, numbers: dict[str, Any]) -> None:
        self.event("profile", step, **numbers)
        self.say(f"{describe(numbers)}\n  trace: {self.output_dir / TRACE_NAME}")

    def checkpoint_failure(self, reason: str) -> None:
        """Report that a checkpoint could not be written."""
        self.say(f"warning: {reason}")

    def bad_numbers(self, step: int, values: dict[str, Any]) -> UserError:
        """Return the error of a run whose numbers stay bad. values: of the log line."""
        valid = (path for path in reversed(list_checkpoints(self.output_dir)) if why_damaged(path) is None)
        return UserError(
            f"stopped at step {step:,}: {values['bad_steps_in_a_row']} consecutive steps had a loss or gradients that "
            f"are not finite (loss {values['loss']}, gradient norm {values['grad_norm']}) and were skipped; newest "
            f"valid checkpoint: {next(valid, 'none')}; try a lower --learning_rate in a new run"
        )

    def stopped(self, step: int, reason: str, saved: bool) -> None:
        """Say why the run stopped and how to resume it."""
        where = f"saved in {checkpoint_dir(self.output_dir, step)}" if saved else "but could not be saved"
        self.say(f"stopped by {reason} after step {step:,}, {where}; to resume:\n{resume_command(self.output_dir)}")

    def table(self, rows: dict[str, str]) -> None:
        """Print labeled paragraphs as wide as the terminal."""
        width = min(shutil.get_terminal_size().columns, 120)
        for label, text in rows.items():
            indent = {"initial_indent": f"{label:11}", "subsequent_indent": " " * 11}
            self.say(textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False, **indent))

    def advance(self, steps: float) -> None:
        """Move the bar by a fraction of a step: a step of many micro-batches may take minutes."""
        self.bar.update(steps)

    def say(self, text: str) -> None:
        """Print above the progress bar."""
        if self.enabled:
            self.bar.write(text, file=sys.stdout)
            sys.stdout.flush()

    def close(self) -> None:
        """Remove the progress bar."""
        self.bar.close()

    def end(self) -> None:
        """Let the trackers finish. Call it last: it disconnects the processes."""
        self._tolerate("the tracker", self.accelerator.end_training)

    def summary(self, values: dict[str, Any]) -> None:
        """Write summary.json, which appears only when it is complete, and the model card.

        A finished run that is only exported again keeps its own.
        """
        if not self.has_trained and (self.output_dir / SUMMARY_NAME).exists():
            return
        written = self.output_dir / f".{SUMMARY_NAME}.new"
        written.write_text(json.dumps(values, indent=2) + "\n")
        written.replace(self.output_dir / SUMMARY_NAME)
        self._tolerate("the model card", lambda: write_model_card(self.output_dir, values["step"]))


def describe_progress(values: dict[str, Any]) -> str:
    """Return the main numbers of a log line, short enough to leave room for a bar in 80 columns."""
    gigabytes = values["peak_memory_bytes"] / 1e9
    parts = [f"loss {values['loss']:.3f}", f"{tqdm.format_sizeof(values['tokens_per_second'])} tok/s"]
    parts += [f"{values['mfu']:.0%} MFU"] if values["mfu"] is not None else []
    return ", ".join([*parts, f"{gigabytes:.{0 if gigabytes > 10 else 1}f} GB"])


def drop_events_after(path: Path, step: int) -> None:
    """Remove the events after the checkpoint that a run resumes from: they will be logged again."""
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):  # cut off by a kill or a full disk
            continue
    written = path.with_suffix(".new")
    written.write_text("".join(kept), encoding="utf-8")
    written.replace(path)
