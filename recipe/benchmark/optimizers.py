"""Compare optimizers and schedules: the same model, data and order, and as many learning rates for each side.

Every run is recipe/train.py in a fresh process. Results are a dictionary; a run that it holds is not repeated.
"""

import itertools
import json
import os
import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import exp
from pathlib import Path
from queue import Queue
from statistics import fmean, median
from threading import Lock
from typing import Any

from safetensors.torch import load_file, save_file

from recipe.benchmark.measure import TRAIN, end_program, end_programs, start_program, to_arguments, why_it_ended
from recipe.benchmark.tables import Column, markdown_table
from recipe.checkpoint.load import list_checkpoints
from recipe.environment import describe_machine
from recipe.errors import UserError
from recipe.model.weights import WEIGHTS_NAME

AVERAGED = 5  # checkpoints, from the last tenth of the run
TIMED_STEPS = 60
COSINE = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": "min_lr_rate=0.1"}
CONSTANT = {"lr_scheduler_type": "constant_with_warmup"}
ADAMW, MUON = {"optim": "adamw_torch_fused"}, {"optim": "muon"}


@dataclass(frozen=True)
class Side:
    """One choice. options: of recipe/train.py. averages: its result is the mean of its last checkpoints."""

    name: str
    what: str
    options: dict[str, Any]
    averages: bool = False

    @property
    def rate_option(self) -> str:
        """The learning rate that is tuned. With Muon, AdamW's rate for the other parameters is that of the recipe."""
        return "muon_learning_rate" if self.options["optim"] == "muon" else "learning_rate"


def build_sides(decay: float) -> dict[str, Side]:
    """Return the sides by name. decay: share of the run in which the learning rate falls to zero."""
    to_zero = {"lr_scheduler_type": "warmup_stable_decay"}
    to_zero["lr_scheduler_kwargs"] = f"num_decay_steps={decay:g},decay_type=linear"
    sides = [
        Side("adamw", "AdamW, cosine to a tenth", ADAMW | COSINE),
        Side("adamw_zero", "AdamW, decay to zero", ADAMW | to_zero),
        Side("muon_cosine", "Muon, cosine to a tenth", MUON | COSINE),
        Side("muon", "Muon, decay to zero", MUON | to_zero),
        Side("muon_cautious", "Muon, decay to zero, cautious", MUON | to_zero | {"cautious_weight_decay": True}),
        Side("muon_averaged", "Muon, constant, averaged tail", MUON | CONSTANT, averages=True),
    ]
    return {side.name: side for side in sides}


@dataclass(frozen=True)
class Run:
    """One training run of a side."""

    side: Side
    rate: float
    seed: int
    max_steps: int

    @property
    def name(self) -> str:
        return f"{self.side.name}-{self.rate:g}-{self.seed}-{self.max_steps}"


@dataclass
class Comparison:
    """Trains what is asked for. arguments: of recipe/train.py, for all runs. work: folder for the runs' output.

    jobs: runs at a time. results: gets every run; `save` is called after each.
    """

    arguments: list[str]
    dataset_dir: Path
    work: Path
    jobs: int
    results: dict[str, Any]
    save: Callable[[], None]

    def train(self, runs: Iterable[Run]) -> None:
        """Train the runs that have no result yet, each on its share of the CPUs. Raises `UserError` if one fails."""
        cpus = sorted(os.sched_getaffinity(0))
        share = max(1, len(cpus) // self.jobs)
        free: Queue[list[int]] = Queue()
        saving = Lock()
        for job in range(self.jobs):
            free.put(cpus[job * share :][:share] or cpus)

        def train_one(run: Run) -> None:
            mine = free.get()
            try:
                result = self._train(run, mine)
                with saving:
                    self.results["runs"][run.name] = result
                    self.save()
            finally:
                free.put(mine)

        missing = [run for name, run in {run.name: run for run in runs}.items() if name not in self.results["runs"]]
        with ThreadPoolExecutor(self.jobs) as pool:
            try:
                for finished in [pool.submit(train_one, run) for run in missing]:
                    finished.result()
            except BaseException:  # an error or Ctrl-C ends the other runs, too
                pool.shutdown(wait=False, cancel_futures=True)
                end_programs()
                raise

    def time(self, sides: Iterable[Side], rounds: int) -> None:
        """Measure the sides' tokens per second with all CPUs, in alternation."""
        speeds = {side.name: [] for side in sides}
        for _ in range(rounds):
            for side in sides:
                directory = self.work / f"time-{side.name}"
                options = side.options | {"max_steps": TIMED_STEPS, "eval_steps": 0, "exact_final_eval": False}
                options |= {"save_steps": 0, "overwrite": True, "output_dir": directory}
                self._run_training(
                    [*self.arguments, *to_arguments(options)], directory, sorted(os.sched_getaffinity(0))
                )
                speeds[side.name].append(round(self._read_summary(directory)["tokens_per_second"]))
                self.results["tokens_per_second"] |= speeds
        self.save()

    def _train(self, run: Run, cpus: list[int]) -> dict[str, Any]:
        directory = self.work / run.name
        result = {"side": run.side.name, "learning_rate": run.rate, "seed": run.seed, "max_steps": run.max_steps}
        options = {run.side.rate_option: run.rate, "seed": run.seed, "max_steps": run.max_steps}
        saves = {"save_steps": max(1, run.max_steps // (10 * AVERAGED)), "save_total_limit": AVERAGED}
        options |= run.side.options | (saves if run.side.averages else {"save_steps": 0}) | {"output_dir": directory}
        try:
            self._run_training([*self.arguments, *to_arguments(options)], directory, cpus)
        except UserError as error:
            if "not finite" not in str(error):
                raise
            return result | {"failed": str(error)}  # the learning rate is too high
        events = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        summary = self._read_summary(directory)
        tokens_per_step = summary["tokens_seen"] // summary["step"]
        result |= {
            "tokens": summary["tokens_seen"],
            "loss": summary["eval_loss"],
            "eval_rows": summary["eval_rows"],
            "num_parameters": summary["num_parameters"],
            "curve": [[e["step"] * tokens_per_step, round(e["loss"], 4)] for e in events if e["event"] == "eval"],
        }
        if run.side.averages:
            result |= {"loss_before_averaging": result["loss"], "loss": self._evaluate_average(directory, cpus)}
        shutil.rmtree(directory)
        return result

    def _run_training(self, arguments: list[str], directory: Path, cpus: list[int]) -> str:
        """Run recipe/train.py on these CPUs. Returns its output."""
        log = directory.with_suffix(".log")
        with open(log, "wb") as file:
            process = start_program([sys.executable, str(TRAIN), *arguments], file)
            os.sched_setaffinity(process.pid, cpus)
            try:
                process.wait()
            finally:
                end_program(process)
        text = log.read_text(errors="replace")
        if process.returncode:
            raise UserError(f"the run {directory.name} failed: {why_it_ended(text)}")
        return text

    def _read_summary(self, directory: Path) -> dict[str, Any]:
        return json.loads((directory / "summary.json").read_text())

    def _evaluate_average(self, directory: Path, cpus: list[int]) -> float:
        """Return the validation loss of the mean of the run's last checkpoints."""
        paths = list_checkpoints(directory)
        averaged = directory / "averaged"
        shutil.copytree(paths[-1], averaged)
        weights = [load_file(path / WEIGHTS_NAME) for path in paths]
        mean = {name: sum(w[name].double() for w in weights).div(len(weights)).float() for name in weights[0]}
        save_file(mean, averaged / WEIGHTS_NAME, metadata={"format": "pt"})
        options = {"dataset_dir": self.dataset_dir, "model_name_or_path": averaged, "eval_only": True}
        text = self._run_training(to_arguments(options), averaged, cpus)
        return float(re.search(r"validation loss ([\d.]+)", text)[1])


def summarize(results: dict[str, Any]) -> dict[str, Any]:
    """Return a row per side, AdamW's best side, and the tokens that it and `muon` need for each other's loss.

    A row: the loss at each learning rate of the grid with the first seed, and the losses of all seeds at the best one.
    """
    runs, rows = [run for run in results["runs"].values() if "failed" not in run], []
    for name, what in results["sides"].items():
        mine = [run for run in runs if run["side"] == name and run["max_steps"] == results["max_steps"]]
        grid = {run["learning_rate"]: run["loss"] for run in mine if run["seed"] == results["seed"]}
        if not grid:
            continue
        of_rate = {rate: [run["loss"] for run in mine if run["learning_rate"] == rate] for rate in grid}
        rate = min(grid, key=lambda rate: (-len(of_rate[rate]), fmean(of_rate[rate])))  # of those with most seeds
        losses = of_rate[rate]
        row = {"side": name, "what": what, "learning_rate": rate, "losses": losses, "loss": fmean(losses)}
        row |= {"spread": max(losses) - min(losses), "perplexity": exp(fmean(losses))}
        row["grid"] = {f"{rate:g}": loss for rate, loss in sorted(grid.items())}
        if speed := results["tokens_per_second"].get(name):
            row["tokens_per_second"] = median(speed)
        rows.append(row)
    summary = {"rows": rows}
    by_side = {row["side"]: row for row in rows}
    if adamw := [row for row in rows if row["side"].startswith("adamw")]:
        summary["best_adamw"] = best = min(adamw, key=lambda row: row["loss"])["side"]
        if "muon" in by_side:
            summary["comparison"] = [
                {
                    "side": name,
                    "points": points_of(runs, name, results["seed"]),
                    "tokens": tokens_to_reach(
                        points_of(runs, name, results["seed"]), min(by_side[other]["grid"].values())
                    ),
                }
                for name, other in (("muon", best), (best, "muon"))
            ]
    return summary


def points_of(runs: Iterable[dict[str, Any]], side: str, seed: int) -> list[tuple[int, float]]:
    """Return the (tokens, lowest final loss) of a side's runs of each length, with one seed."""
    losses = defaultdict(list)
    for run in runs:
        if (run["side"], run["seed"]) == (side, seed):
            losses[run["tokens"]].append(run["loss"])
    return sorted((tokens, min(found)) for tokens, found in losses.items())


def tokens_to_reach(points: list[tuple[int, float]], loss: float) -> float | None:
    """Return the tokens at which runs of several lengths reach a loss, log-linear between two runs.

    points: (tokens, final loss), sorted. None if no run reaches it.
    """
    for (tokens, before), (more, after) in itertools.pairwise(points):
        if after <= loss <= before:
            return tokens * (more / tokens) ** ((before - loss) / (before - after))
    return None


COLUMNS = [
    Column("", 0, lambda row: row["what"]),
    Column("best learning rate", 0, lambda row: f"{row['learning_rate']:g}"),
    Column("validation loss", 0, lambda row: f"{row['loss']:.4f}"),
    Column("seeds", 0, lambda row: str(len(row["losses"]))),
    Column("highest - lowest", 0, lambda row: f"{row['spread']:.4f}" if len(row["losses"]) > 1 else ""),
    Column("perplexity", 0, lambda row: f"{row['perplexity']:.2f}"),
    Column("tokens/s", 0, lambda row: f"{row['tokens_per_second']:,.0f}" if "tokens_per_second" in row else ""),
    Column("loss at each learning rate", 0, lambda row: ", ".join(f"{r}: {x:.4f}" for r, x in row["grid"].items())),
]


def to_markdown(results: dict[str, Any]) -> str:
    """Format the comparison: what was trained, a row per side, and how many tokens AdamW needs for Muon's loss."""
    summary = summarize(results)
    finished = (r for r in results["runs"].values() if r["max_steps"] == results["max_steps"] and "failed" not in r)
    if (run := next(finished, None)) is None:
        return "No run has finished yet.\n"
    environment = results.get("environment")
    machine = f" Machine: {describe_machine(environment)}." if environment else ""
    lines = [
        f"GPT-2 with {run['num_parameters'] / 1e6:.1f} M parameters, {run['tokens'] / 1e6:.2f} M tokens in "
        f"{run['max_steps']:,} steps, {run['eval_rows']:,} validation rows at the end.{machine}",
        markdown_table(summary["rows"], COLUMNS),
        "Each side's learning rate is the best of its grid (with Muon: of the hidden matrices), tuned with one seed; "
        "the loss is the mean over the seeds. The charts show the loss of 64 validation rows, at the end that of all.",
    ]
    base, grids = run["tokens"], {row["side"]: row["grid"] for row in summary["rows"]}
    for found, other in zip(summary.get("comparison", ()), summary.get("comparison", ())[::-1], strict=True):
        points = ", ".join(f"{tokens / 1e6:.2f} M: {loss:.4f}" for tokens, loss in found["points"])
        if found["tokens"]:
            needs = f"{found['tokens'] / base:.2f} of them"
        else:
            is_less = found["points"][0][1] < min(grids[other["side"]].values())
            needs = "fewer than any of these" if is_less else "more than any of these"
        name, others = results["sides"][found["side"]], results["sides"][other["side"]]
        lines.append(
            f"{name}, loss by tokens, one seed: {points}. It reaches the lowest loss of {others} "
            f"after {base / 1e6:.2f} M tokens with {needs}."
        )
    return "\n\n".join(lines) + "\n"
