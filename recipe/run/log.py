"""What a run shows and records: metrics.jsonl, trackers, the progress bar, the start table, summary.json.

On every process but the main one, a log only takes part in the means over the processes.
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
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from recipe.checkpoint import RunState, read_state
from recipe.data.batches import TrainBatches
from recipe.errors import UserError, short_reason
from recipe.hardware.devices import peak_flops_per_second, peak_memory_bytes
from recipe.hardware.host_memory import FreedMemory, freeze_garbage
from recipe.hardware.processes import gather, on_main_process
from recipe.optim.guard import MOST_BAD_STEPS, UpdateGuard
from recipe.progress import progress_target
from recipe.publish.card import CARD_NAME, CURVE_NAME, write_model_card
from recipe.publish.public import METRICS_NAME, SUMMARY_NAME, read_events, split_scores
from recipe.run.folder import open_output_dir
from recipe.run.resume import with_schedule_of
from recipe.run.start import Run, measure_progress

PROJECT = "gpt2-recipe"  # for trackers, unless WANDB_PROJECT is set


class RunLog:
    """Records and shows the events of a run."""

    def __init__(
        self,
        run: Run,
        state: RunState,
        facts: dict[str, Any],
        batches: TrainBatches,
        optimizer: torch.optim.Optimizer,
        guard: UpdateGuard,
    ) -> None:
        """Open the output folder, and drop what an earlier start logged after the state. facts: `collect_facts`."""
        self.run, self.config, self.accelerator, self.output_dir = run, run.config, run.accelerator, run.output_dir
        self.device, self.enabled = run.accelerator.device, run.accelerator.is_main_process
        self.batches, self.optimizer, self.guard = batches, optimizer, guard  # log lines show their numbers
        self.flops_per_token, self.previous_seconds = facts["flops_per_token"], state.seconds
        self.is_over = state.step > 0 and measure_progress(run.config, state) >= 1  # no step is left to make
        # Another schedule without a step of its own is not that of these weights.
        typed = with_schedule_of(run.typed, read_state(run.resume_dir)) if self.is_over else run.typed
        on_main_process(lambda: open_output_dir(run.output_dir, typed, run.resume_dir))
        self.failures: set[str] = set()  # reported once each
        self.bar: tqdm | None = None  # from the first log line on: nothing before it shows the speed
        self.freed_memory = FreedMemory()
        if self.enabled and (run.output_dir / METRICS_NAME).exists():
            drop_events_after(run.output_dir / METRICS_NAME, state.step or -1)
        events = gather(read_events(run.output_dir) if self.enabled else [])[0]
        texts = {event["step"]: event["text"] for event in events if event["event"] == "sample"}
        evaluations = {event["step"]: with_nan(event) for event in events if event["event"] == "eval"}
        self.evaluated = {step: event | {"sample": texts.get(step)} for step, event in evaluations.items()}
        if state.step in evaluations:  # made after the checkpoint was saved
            note_loss(state, evaluations[state.step])
            self.is_over = measure_progress(run.config, state) >= 1
        self._tolerate("the tracker", lambda: self._init_trackers(state, facts))
        self.sums: dict[str, torch.Tensor] = {}  # over the steps since the last log line, on the device
        self.lap_steps, self.lap_seconds, self.lap_started_at = 0, 0.0, time.perf_counter()
        self.laps: list[tuple[int, float]] = []  # steps and seconds between log lines of this process

    def _init_trackers(self, state: RunState, facts: dict[str, Any]) -> None:
        """Start the trackers. Names and ids identify the run, even after it resumes."""
        name = self.config.run_name or self.output_dir.name
        options = {
            "wandb": {"name": name, "id": state.run_id, "resume": "allow"},
            # Trackio identifies runs by name, and "allow" would continue an older run of the same name.
            "trackio": {"name": name, "resume": "allow" if state.step else "never"},
            "mlflow": {"run_name": name},
        }
        values = {**asdict(self.config), **facts, **facts["model"], "device": facts["environment"]["device"]}
        scalars = {key: value for key, value in values.items() if isinstance(value, (int, float, str, bool))}
        project = os.environ.get("WANDB_PROJECT") or PROJECT
        self.accelerator.init_trackers(project, config=scalars, init_kwargs=options)

    # ------------------------------------------------------------------ lines

    def say(self, text: str) -> None:
        """Print above the progress bar."""
        if self.enabled:
            (self.bar.write if self.bar else print)(text, file=sys.stdout)
            sys.stdout.flush()

    def table(self, rows: dict[str, str]) -> None:
        """Print labeled paragraphs as wide as the terminal."""
        width = min(shutil.get_terminal_size().columns, 120)
        for label, text in rows.items():
            indent = {"initial_indent": f"{label:11}", "subsequent_indent": " " * 11}
            self.say(textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False, **indent))

    def event(self, event: str, step: int, **values: Any) -> None:
        """Append a line to metrics.jsonl and send the numbers to the trackers. A failure does not end the run."""
        finite = without_nan(values)
        if self.enabled:
            self._tolerate(METRICS_NAME, lambda: self._append({"event": event, "step": step, **finite}))
        flat = finite | {f"{name}/{key}": v for name, of in finite.get("mixture", {}).items() for key, v in of.items()}
        numbers = {f"{event}/{key}": value for key, value in flat.items() if isinstance(value, (int, float))}
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
        self.lap_steps += 1
        self.freed_memory.give_back()

    def is_due(self, state: RunState) -> bool:
        """Return whether the step that has just been made ends with a log line."""
        return state.step % self.config.logging_steps == 0 or state.step in (1, self.config.max_steps)

    def train(self, state: RunState) -> None:
        """Record and show the numbers since the last log line. The one routine wait for the device.

        Means are over steps and processes; waiting and memory are this process's. Raises `UserError` if too many
        updates in a row were bad.
        """
        sums = [value / self.lap_steps for value in self.sums.values()]
        numbers = torch.stack([*sums, self.grad_norm, *self.guard.counts])
        *means, norm, skipped, bad = self.accelerator.reduce(numbers, reduction="mean").tolist()
        waited = self.batches.take_wait()  # after `tolist`, for which the device had to finish
        means = dict(zip(self.sums, means, strict=True))
        self._stop_clock()
        seconds, num_tokens = self.lap_seconds, self.lap_steps * self.config.tokens_per_step
        self.laps.append((self.lap_steps, seconds))
        state.train_seconds += seconds
        self.sums, self.lap_steps, self.lap_seconds = {}, 0, 0.0
        self.lap_started_at = time.perf_counter()
        if len(self.laps) == 1:
            freeze_garbage()  # what set-up and compilation have left
        peak = peak_flops_per_second(self.device)
        flops = num_tokens / seconds * self.flops_per_token / self.accelerator.num_processes
        values = {
            "tokens_seen": state.examples * self.config.block_size,
            **means,
            **learning_rates(self.optimizer),
            "grad_norm": norm,
            "tokens_per_second": num_tokens / seconds,
            "train_seconds": state.train_seconds,
            "mfu": flops / peak if peak else None,
            "skipped_steps": int(skipped),
            "share_waiting_for_data": min(1.0, waited / seconds),
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

    def _show_progress(self, state: RunState, values: dict[str, Any]) -> None:
        total = f"/{self.config.max_steps:,}" if self.config.max_steps else ""
        progress = max(state.progress, state.step / (self.config.max_steps or math.inf))  # the first: before the step
        if self.bar is None:
            layout = "{percentage:3.0f}%|{bar}| {desc} [{elapsed}<{remaining}{postfix}]"
            options = {"total": 1.0, "initial": progress, "bar_format": layout, "dynamic_ncols": True}
            options["delay"] = 1e-9  # or the bar appears before its numbers are set
            self.bar = tqdm(disable=not self.enabled, smoothing=0.1, **options, **progress_target())
        self.bar.set_description_str(f"{state.step:,}{total}", refresh=False)
        self.bar.set_postfix_str(describe_progress(values), refresh=False)
        self.bar.update(progress - self.bar.n)

    def _stop_clock(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        self.lap_seconds += time.perf_counter() - self.lap_started_at

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Keep evaluation and saving out of the speed."""
        self._stop_clock()
        try:
            yield
        finally:
            self.lap_started_at = time.perf_counter()

    @property
    def tokens_per_second(self) -> float:
        """Over all laps except the first, which includes compilation and warm-up, unless it is the only one."""
        steps, seconds = map(sum, zip(*(self.laps[1:] or self.laps), strict=True)) if self.laps else (0, 0.0)
        return steps * self.config.tokens_per_step / seconds if seconds else 0.0

    def seconds(self) -> float:
        """Return the wall time of the run so far, over all its starts."""
        return self.previous_seconds + time.perf_counter() - self.run.started_at

    # ------------------------------------------------------------------ events

    def owes_evaluation(self, state: RunState) -> bool:
        """Return whether the log lacks an evaluation that is due; an earlier start may have made it."""
        is_due = state.step == 0 or state.is_due(self.config.eval_steps)
        is_due |= self.config.load_best_model_at_end and state.is_due(self.config.save_steps)
        return is_due and state.step not in self.evaluated

    def evaluation(self, state: RunState, values: dict[str, Any]) -> None:
        step = state.step
        self.evaluated[step] = values
        if step == 0:
            state.initial = {key: value for key, value in values.items() if key not in ("sample", "mixture")}
            # Of each dataset of a mixture. Their names are not in checkpoints, which may be published.
            state.initial["num_rows"] = max(of["num_rows"] for of in values.get("mixture", {"": values}).values())
        else:
            note_loss(state, values)
        num_tokens = state.examples * self.config.block_size
        self.event("eval", step, tokens_seen=num_tokens, **{k: v for k, v in values.items() if k != "sample"})
        if values["sample"] is not None:
            self.event("sample", step, prompt=self.config.sample_prompt, text=values["sample"])
        self.say(describe_evaluation(f"step {step:>6,}", values))
        if state.has_stalled(patience := self.config.early_stopping_patience):
            self.say(f"stopping early: {patience} evaluations without a new lowest validation loss")

    def schedule(self, step: int, changes: dict[str, tuple]) -> None:
        """Record that later steps follow another schedule. changes: {option: (old, new)}."""
        self.event("schedule", step, changes={key: list(values) for key, values in changes.items()})
        for key, (before, now) in changes.items():
            self.say(f"from step {step + 1:,}, {key} is {now} instead of {before}")

    def close(self, state: RunState) -> None:
        """Log the steps since the last log line, which a signal or the time has ended, and remove the progress bar."""
        if self.lap_steps:
            self.train(state)
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def summary(self, values: dict[str, Any]) -> dict[str, Any]:
        """Write summary.json, which appears only when it is complete, and the model card. Returns the summary.

        A run that had no step left to do keeps what it has, and writes what an earlier start did not get to write.
        """
        if self.laps or not (self.output_dir / SUMMARY_NAME).exists():
            self.event("end", values["exported_step"], last_step=values["step"], tokens_seen=values["tokens_seen"])
            written = self.output_dir / f".{SUMMARY_NAME}.new"
            written.write_text(json.dumps(without_nan(values), indent=2, allow_nan=False) + "\n")
            written.replace(self.output_dir / SUMMARY_NAME)
        if self.laps or not all((self.output_dir / name).exists() for name in (CARD_NAME, CURVE_NAME)):
            self._tolerate("the model card", lambda: write_model_card(self.output_dir, values["exported_step"]))
        found = with_nan(json.loads((self.output_dir / SUMMARY_NAME).read_text()))
        found.setdefault("initial", found.pop("untrained", {}))  # its earlier name
        return found

    def end(self) -> None:
        """Let the trackers finish."""
        for tracker in self.accelerator.trackers:
            self._tolerate("the tracker", tracker.finish)


def without_nan(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values as JSON has them: a number that is not finite becomes None, at any depth."""
    finite = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in values.items()}
    return {key: without_nan(v) if isinstance(v, dict) else v for key, v in finite.items()}


def with_nan(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of `without_nan` as numbers again, at any depth: its None is NaN."""
    return {
        key: with_nan(value) if isinstance(value, dict) else math.nan if value is None else value
        for key, value in values.items()
    }


def note_loss(state: RunState, values: dict[str, Any]) -> None:
    """Add the loss of an evaluation to the state; one that is not finite is the highest."""
    state.losses[str(state.step)] = values["loss"] if math.isfinite(values["loss"]) else math.inf


def learning_rates(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return the rate of the last group, and of each group that differs: Muon's matrices are group 0."""
    *others, last = [group["lr"] for group in optimizer.param_groups]
    found = {f"learning_rate_group_{i}": rate for i, rate in enumerate(others) if rate != last}
    return {"learning_rate": last, **found}


def describe_progress(values: dict[str, Any]) -> str:
    """Return the main numbers of a log line, short enough to leave room for a bar in 80 columns."""
    gigabytes = values["peak_memory_bytes"] / 1e9
    parts = [f"loss {values['loss']:.3f}", f"{tqdm.format_sizeof(values['tokens_per_second'])} tok/s"]
    parts += [f"{values['mfu']:.0%} MFU"] if values["mfu"] is not None else []
    return ", ".join([*parts, f"{gigabytes:.{0 if gigabytes > 10 else 1}f} GB"])


def describe_bits(bits_per_byte: float | None) -> str:
    """Return a number, or a dash where the bytes of the text are not known."""
    return "-" if bits_per_byte is None or math.isnan(bits_per_byte) else f"{bits_per_byte:.4f}"


def describe_evaluation(what: str, values: dict[str, Any]) -> str:
    """Return one line with the results of an evaluation, and one more for each task."""
    line = (
        f"{what}: validation loss {values['loss']:.4f}, perplexity {values['perplexity']:,.2f}, "
        f"{describe_bits(values['bits_per_byte'])} bits per byte"
    )
    for name, of in values.get("mixture", {}).items():
        line += f"\n  {name}: validation loss {of['loss']:.4f}, {describe_bits(of['bits_per_byte'])} bits per byte"
    for task, scores in split_scores(values).items():
        names = [name for name in ("acc", "acc_norm", "perplexity") if name in scores]
        shown = ", ".join(f"{name} {scores[name]:{'.4g' if scores[name] > 1 else '.4f'}}" for name in names)
        line += f"\n  {task}: {shown} ({scores['num_examples']:,} examples)"
    return line


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
