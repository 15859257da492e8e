"""What kills cost a run: arithmetic on the times at which its steps were logged.

A run is a list of lives, one per process, in order. All times are in seconds of one clock, and step s means that s
optimizer steps are done.
"""

import itertools
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

UNSETTLED_STEPS = 10  # steps after a start or a save that do not count as undisturbed


@dataclass
class Life:
    """One process of a run. marks: when it reached a phase of its start. failed: why it ended by itself."""

    started_at: float
    steps: list[tuple[float, int]] = field(default_factory=list)  # (when it was logged, step)
    losses: dict[int, str] = field(default_factory=dict)  # as the program printed them
    marks: dict[str, float] = field(default_factory=dict)
    ended_at: float | None = None
    failed: str | None = None
    first_step: int = 1  # for logs that do not name the step

    @property
    def resumed_from(self) -> int | None:
        """The step of the checkpoint from which this process resumed, if it lived to show it."""
        return self.steps[0][1] - 1 if self.steps else None


def draw_kills(seconds_per_kill: float, num_kills: int, seed: int) -> list[float]:
    """Draw one kill in the first half of every interval of `seconds_per_kill`, in seconds from the first interval."""
    rng = random.Random(f"{seed} {seconds_per_kill:g}")
    return [(number + rng.uniform(0, 0.5)) * seconds_per_kill for number in range(num_kills)]


def undisturbed_step_seconds(lives: list[Life], save_steps: int) -> float | None:
    """Return the median time of a step, without the steps that follow a start or a save; None if there are none."""
    times = []
    for life in lives:
        for (before, _), (at, step) in list(zip(life.steps, life.steps[1:], strict=False))[UNSETTLED_STEPS:]:
            if (step - 1) % save_steps >= UNSETTLED_STEPS:
                times.append(at - before)
    return statistics.median(times) if times else None


def save_stalls(lives: list[Life], save_steps: int, step_seconds: float) -> list[float]:
    """Return by how many seconds each save delayed the `UNSETTLED_STEPS` steps after it.

    A save in the background slows down several steps, so the one that starts it does not show its cost.
    """
    stalls = []
    for life in lives:
        logged = {step: at for at, step in life.steps[UNSETTLED_STEPS:]}
        for step, at in logged.items():
            if step % save_steps == 0 and step + UNSETTLED_STEPS in logged:
                stalls.append(logged[step + UNSETTLED_STEPS] - at - UNSETTLED_STEPS * step_seconds)
    return stalls


def progress_at(lives: list[Life], seconds: float) -> int:
    """Return the steps that the run has done, or can resume from, at a time."""
    current = max(i for i, life in enumerate(lives) if life.started_at <= seconds)
    done = [step for at, step in lives[current].steps if at <= seconds]
    if done:
        return done[-1]
    return next((life.resumed_from for life in lives[current:] if life.steps), 0)


def kept_share(lives: list[Life], start: float, end: float, step_seconds: float) -> float:
    """Return the share of the time from `start` to `end` that undisturbed training needs for the steps done in it."""
    return (progress_at(lives, end) - progress_at(lives, start)) * step_seconds / (end - start)


def describe_kills(lives: list[Life]) -> Iterator[dict[str, Any]]:
    """Yield what each kill cost: steps lost, and seconds until the phases of the start, the first and a new step.

    A process that was killed before its first step lost nothing: the kill before it had already.
    """
    for i, killed in enumerate(lives):
        if killed.ended_at is None or killed.failed is not None:
            continue
        record: dict[str, Any] = {"killed_at_step": killed.steps[-1][1] if killed.steps else None}
        later = lives[i + 1 :]
        if killed.steps and (after := [life for life in later if life.steps]):
            record["steps_lost"] = killed.steps[-1][1] - after[0].resumed_from
        record["failed_starts"] = [life.failed for life in itertools.takewhile(lambda life: life.failed, later)]
        resumed = next((life for life in later if not life.failed), None)
        if resumed is not None and resumed.steps:
            done = max((step for life in lives[: i + 1] for _, step in life.steps), default=0)
            new = (at for at, step in resumed.steps if step > done)  # none if it was killed again before
            phases = {**resumed.marks, "first_step": resumed.steps[0][0], "new_step": next(new, None)}
            record["seconds_to"] = {name: round(at - killed.ended_at, 3) for name, at in phases.items() if at}
        yield record


def surviving_steps(lives: list[Life]) -> list[list[int]]:
    """Return the steps of each process that its successors built upon."""
    kept, resumed_from = [], None
    for life in reversed(lives):
        kept.append([step for _, step in life.steps if resumed_from is None or step <= resumed_from])
        if life.steps:
            earlier = life.resumed_from
            resumed_from = earlier if resumed_from is None else min(earlier, resumed_from)
    return kept[::-1]


def compare_losses(lives: list[Life], uninterrupted: Life) -> tuple[int, int]:
    """Return how many of the surviving steps (have another loss than in the uninterrupted run, were compared)."""
    kept = zip(lives, surviving_steps(lives), strict=True)
    losses = {step: life.losses[step] for life, steps in kept for step in steps}
    same = losses.keys() & uninterrupted.losses.keys()
    return sum(losses[step] != uninterrupted.losses[step] for step in same), len(same)


def count_examples(steps: list[int], batch_size: int) -> tuple[int, int]:
    """Return how many examples were (repeated, skipped), if step s takes examples [(s-1)*G, s*G), G = batch_size."""
    times = np.bincount(np.asarray(steps) - 1)
    return int((times - 1).clip(0).sum()) * batch_size, int((times == 0).sum()) * batch_size


def differing_bits(one: Any, other: Any) -> tuple[int, int]:
    """Return (differing, all) bits of two structures of tensors. A missing or reshaped tensor differs in every bit."""
    first, second = dict(_tensors(one)), dict(_tensors(other))
    differing = total = 0
    for name in first.keys() | second.keys():
        sides = [side[name].detach().cpu().contiguous() for side in (first, second) if name in side]
        total += (num_bits := 8 * max(side.nbytes for side in sides))
        if len(sides) == 1 or sides[0].shape != sides[1].shape or sides[0].dtype != sides[1].dtype:
            differing += num_bits
        else:
            a, b = (side.reshape(-1).view(torch.uint8).numpy() for side in sides)
            differing += int(np.unpackbits(a ^ b).sum())
    return differing, total


def _tensors(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors(item, f"{path}/{key}")
