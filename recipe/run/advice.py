"""Log of a run -> what a user may want to change, in a sentence each. See scripts/benchmarks/curves.md, too."""

import itertools
import statistics
from typing import Any

from recipe.config import TrainConfig

CLIPPED_SHARE = 0.5  # of the steps, whose gradient is clipped
EARLY_STEPS = 100  # in which gradients are large in every run
WAITING_SHARE = 0.02  # share of the time in which a step waits for data
RISES = 3  # evaluations in a row with a higher validation loss and a lower training loss
FULL_SHARE = 0.8  # share of a GPU's memory; a batch that uses less can grow
REMEDY = {"mmap": "try --data_placement ram", "ram": "try --data_placement device"}  # for waiting, by where rows are
REMEDY |= {"device": "the host is busy or too slow", "stream": "prepare the text first (scripts/prepare_data.py)"}


def advise(events: list[dict[str, Any]], config: TrainConfig, device_type: str, total_bytes: int) -> list[str]:
    """Return the sentences that apply, on clipped gradients, skipped updates, waiting for data, and a GPU's memory.

    events: the lines of metrics.jsonl. config: as requested. total_bytes: the memory of the device.
    """
    train = [event for event in events if event["event"] == "train"]
    if not train:
        return []
    advice, last = [], train[-1]
    shares = [event.get("clipped_share", 0.0) for event in train[len(train) // 2 :] if event["step"] > EARLY_STEPS]
    clipped = statistics.fmean(shares or [0.0])
    if clipped > CLIPPED_SHARE:
        advice.append(
            f"{clipped:.0%} of the newest gradients were clipped to --max_grad_norm {config.max_grad_norm:g}: often a "
            "sign that --learning_rate is far from its best"
        )
    if last["skipped_steps"]:
        advice.append(
            f"skipped updates: {last['skipped_steps']:,}, because a gradient was not finite; if more follow, lower "
            "--learning_rate or lengthen --warmup_steps"
        )
    waiting = statistics.median(event["share_waiting_for_data"] for event in train)
    if waiting > WAITING_SHARE:
        remedy = REMEDY["stream" if config.streaming else config.data_placement]
        advice.append(f"{waiting:.0%} of the time waits for data: {remedy}")
    share = last["peak_memory_bytes"] / total_bytes
    if device_type == "cuda" and share < FULL_SHARE and config.per_device_train_batch_size != "auto":
        advice.append(f"{share:.0%} of the GPU's memory is used: --per_device_train_batch_size auto uses more")
    return advice


def has_begun_to_diverge(events: list[dict[str, Any]]) -> bool:
    """Return whether the last evaluation is the third in a row in which validation rose while training fell.

    events: the lines of metrics.jsonl. False if this happened before, so that a run says it once.
    """
    evaluations = [event for event in events if event["event"] == "eval" and "train_loss" in event]
    pairs = list(itertools.pairwise((event["train_loss"], event["loss"]) for event in evaluations))
    apart = [None not in (*a, *b) and b[0] < a[0] and b[1] > a[1] for a, b in pairs]
    times = [all(apart[i : i + RISES]) for i in range(len(apart) - RISES + 1)]
    return times[-1:] == [True] and sum(times) == 1


def find_train_loss(events: list[dict[str, Any]]) -> float | None:
    """Return the mean training loss since the last evaluation, including steps before a resume; None without steps.

    events: the lines of metrics.jsonl. Each has the mean since the previous line or the start. A line that is not
    finite does not count, because one of its steps was skipped.
    """
    total, num_steps, last = 0.0, 0, 0
    for event in events:
        if event["event"] == "eval":
            total, num_steps = 0.0, 0
        elif event["event"] == "start":
            last = event["step"]
        elif event["event"] == "train":
            count, last = event["step"] - last, event["step"]
            if event["loss"] is not None:
                total, num_steps = total + count * event["loss"], num_steps + count
    return total / num_steps if num_steps else None
