"""What a run leaves in its folder and on the screen: metrics.jsonl, summary.json, progress bar, closing words."""

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

from recipe.checkpoint.load import list_checkpoints
from recipe.checkpoint.manifest import why_damaged
from recipe.config import TrainConfig
from recipe.errors import UserError
from recipe.progress import progress_target
from recipe.run.output_dir import (
    METRICS_NAME,
    SUMMARY_NAME,
    tracker_id,
)
from recipe.run.profile import TRACE_NAME, describe
from recipe.run.summary import describe_evaluation


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
