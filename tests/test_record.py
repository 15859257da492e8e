"""What people look at: the numbers of a log line, training beside validation, and what a log says at the end."""

import types
from functools import partial

import pytest
from conftest import BLOCK_SIZE, read_events

from recipe.checkpoint import RunState, Stage
from recipe.command_line import load_config
from recipe.run.decide import count_epochs
from recipe.run.log import describe_progress, describe_seen
from recipe.run.record import find_train_loss, has_begun_to_diverge, read_record

LINE = {"loss": 3.9123, "learning_rate": 6e-4, "grad_norm": 0.5, "step_ms": 93.2, "tokens_per_second": 5.25e5}
LINE |= {"share_waiting_for_data": 0.01, "mfu": 0.45, "memory_bytes": 12e9, "peak_memory_bytes": 36e9}
TRAIN = {"event": "train", "step": 200, "clipped_share": 0.0, "skipped_steps": 0, "share_waiting_for_data": 0.0}
TRAIN |= {"peak_memory_bytes": 34e9}


def test_a_log_line_has_the_most_important_numbers_first():
    parts = ["loss 3.912", "lr 6.0e-04", "norm 0.50", "93 ms", "525k tok/s", "45% MFU"]
    memory = "30% of 40 GB, peak 90%"
    assert describe_progress(LINE, 40 * 10**9) == [*parts, memory]
    later = [*parts[:3], "epoch 2.5", *parts[3:], memory]
    assert describe_progress(LINE | {"epoch": 2.51}, 40 * 10**9) == later
    more = {"share_waiting_for_data": 0.12, "loss_scale": 65536.0}
    assert describe_progress(LINE | more, 40 * 10**9) == [
        *parts[:5], "12% waiting for data", parts[5], "scale 65,536", memory]  # fmt: skip


@pytest.mark.parametrize(
    ("events", "options", "device", "words"),
    [
        ({}, [], "cuda", []),
        ({"clipped_share": 0.4}, [], "cpu", []),
        ({"clipped_share": 0.7}, [], "cpu", ["70% of the newest gradients were clipped to --max_grad_norm 1"]),
        ({"skipped_steps": 3}, [], "cpu", ["skipped updates: 3"]),
        ({"share_waiting_for_data": 0.1}, [], "cpu", ["10% of the time waits for data: try --data_placement ram"]),
        ({"peak_memory_bytes": 37e9}, [], "cuda", []),
        ({"peak_memory_bytes": 20e9}, [], "cuda", []),  # auto has chosen
        ({"peak_memory_bytes": 20e9}, ["--per_device_train_batch_size", "8"], "cuda", ["50% of the GPU's memory"]),
        ({"peak_memory_bytes": 20e9}, ["--per_device_train_batch_size", "8"], "cpu", []),
    ],
)
def test_what_the_log_says_that_a_user_may_want_to_change(events, options, device, words):
    config = load_config(["--dataset_dir", "d", *options])[0]
    found = read_record([TRAIN | events] * 4, config, device, 40 * 10**9)
    assert len(found) == len(words) and all(line.startswith(start) for line, start in zip(found, words, strict=True))
    assert read_record([], config, device, 40 * 10**9) == []


def test_only_the_later_half_of_the_gradients_counts():
    """They are large at the start of every run."""
    config = load_config(["--dataset_dir", "d"])[0]
    events = [TRAIN | {"clipped_share": 1.0}] * 4 + [TRAIN] * 4
    assert read_record(events, config, "cpu", 10**12) == []
    assert len(read_record(events[:4], config, "cpu", 10**12)) == 1
    assert read_record([event | {"step": 100} for event in events[:4]], config, "cpu", 10**12) == []


def test_tokens_documents_and_hours_by_hand():
    """Of 1,000 rows, 250 were seen, with a quarter of the documents; a mixture has those of each dataset."""

    def run(streaming=False, **metadata):
        config = types.SimpleNamespace(block_size=512, streaming=streaming)
        counting = partial(count_epochs, metadata, streaming=streaming)
        return types.SimpleNamespace(config=config, metadata=metadata, count_epochs=counting)

    splits = {"train": {"rows": 1000, "documents": 80}}
    evaluations = {0: {"num_rows": 10}, 5: {"num_rows": 10}}
    state = RunState(examples=250, evaluations=evaluations, stages=[Stage(512)])
    found = describe_seen(run(splits=splits), state, 512000 / 3600)
    assert found == "128k tokens + 10.2k of validation = 138k; 20 documents; epoch 0.25 (1.0 h)"
    parts = {name: {"splits": splits, "share": share} for name, share in (("a", 0.2), ("b", 0.8))}
    mixed = describe_seen(run(splits=splits, mixture=parts), state, 1.0)
    assert mixed.endswith("= 138k; 20 documents; epoch 0.05 of a, 0.20 of b")
    assert describe_seen(run(True, splits=splits), state, 1.0) == "128k tokens + 10.2k of validation = 138k"
    state.examples = 2500  # every document is seen once, and then again
    assert "; 80 documents; epoch 2.50 (1.0 h)" in describe_seen(run(splits=splits), state, 512000 / 3600)
    state.begin_stage(256, "")  # with other data, which begin at their first example
    state.examples += 500
    assert state.tokens == 2500 * 512 + 500 * 256
    assert describe_seen(run(splits=splits), state, 1.0).startswith("1.41M tokens + 0.00 of validation")
    assert "; epoch 0.50 (" in describe_seen(run(splits=splits), state, 1.0)


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([(5, 5), (4, 4), (3, 4.1), (2, 4.2), (1, 4.3)], True),
        ([(5, 5), (4, 4), (3, 4.1), (2, 4.2)], False),  # twice
        ([(5, 5), (4, 4), (3, 4.1), (2, 4.2), (1, 4.1)], False),  # it falls again
        ([(4, 4), (3, 4.1), (3.5, 4.2), (3, 4.3)], False),  # training rises, too
        ([(4, 4), (3, 4.1), (2, 4.2), (1, 4.3), (0.5, 4.4)], False),  # said before
        ([(4, 4), (3, 4.1), (2, 4.2), (1, None)], False),  # not finite
        ([], False),
    ],
)
def test_when_a_run_is_said_to_diverge(losses, expected):
    events = [{"event": "eval", "loss": 9.0}]  # before the first step
    events += [{"event": "eval", "train_loss": train, "loss": validation} for train, validation in losses]
    assert has_begun_to_diverge(events) == expected


def test_the_mean_training_loss_since_the_last_evaluation():
    """Each line counts as often as it has steps, after a resume those since it. NaN (null in the file) does not."""
    lines = [("start", 0, 0.0), ("train", 1, 9.0), ("eval", 1, 9.0), ("train", 4, 5.0), ("sample", 4, 0.0)]
    lines += [("start", 6, 0.0), ("train", 7, 1.0)]  # from checkpoint-6, which no log line precedes
    events = [{"event": event, "step": step, "loss": loss} for event, step, loss in lines]
    assert find_train_loss(events) == pytest.approx((3 * 5 + 1) / 4) and find_train_loss(events[:3]) is None
    skipped = {"event": "train", "step": 2, "loss": None}
    assert find_train_loss(events[:2]) == find_train_loss([events[1], skipped]) == 9.0
    other_folder = [{"event": "start", "step": 1000}, {"event": "train", "step": 1001, "loss": 9.0}]
    other_folder += [{"event": "train", "step": 1004, "loss": 1.0}]
    assert find_train_loss(other_folder) == pytest.approx(3.0)


def test_an_evaluation_has_the_mean_training_loss_since_the_last_one(train, capsys):
    """Also between two log lines."""
    output_dir = train("--max_steps", "6", "--logging_steps", "4", "--eval_steps", "3")
    each = train("--max_steps", "6", "--logging_steps", "1", output_dir=output_dir.with_name("each"))
    losses = [event["loss"] for event in read_events(each, "train")]
    evaluations = read_events(output_dir, "eval")
    assert "train_loss" not in evaluations[0]
    means = [event["train_loss"] for event in evaluations[1:]]
    assert means == pytest.approx([sum(losses[:3]) / 3, sum(losses[3:]) / 3], abs=1e-6)
    shown = capsys.readouterr().out
    assert f"step      3: train {means[0]:.4f}, validation {evaluations[1]['loss']:.4f}, perplexity" in shown
    assert f"  {3 * 4 * BLOCK_SIZE} tokens + " in shown.replace(".00", "")
