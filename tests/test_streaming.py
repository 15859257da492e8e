"""Streaming: each row of the prepared dataset once, in an order that can be resumed anywhere."""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import BLOCK_SIZE, launch, make_documents, read_events

from recipe.command_line import load_config
from recipe.data import documents, encoder, prepare, streaming
from recipe.data.batches import TrainOrder
from recipe.data.documents import Piece, take_head
from recipe.data.prepare import open_dataset_for
from recipe.data.streaming import Position, StreamedRows
from recipe.data.text import TextSource
from recipe.errors import ProcessError, UserError


@pytest.fixture
def small_batches(monkeypatch):
    """Let windows begin inside a batch of encoded text."""
    monkeypatch.setattr(encoder, "BATCH_CHARACTERS", 700)


@pytest.fixture
def source(jsonl_file):
    return TextSource(train_files=(str(jsonl_file),))


BEGIN = Position()


def windows_of(source, tokenizer_dir, num_rows, start=BEGIN):
    return StreamedRows(source, tokenizer_dir, BLOCK_SIZE, TrainOrder(num_rows, 1, 1, 1), start, 2).windows()


@pytest.mark.parametrize("num_rows", [1, 7, 64, 10_000])
def test_streamed_rows_equal_the_prepared_rows(source, dataset, tokenizer_dir, small_batches, num_rows):
    """Before shuffling, they have the same order; after the last document the text starts over."""
    split = dataset.splits["train"]
    windows = itertools.islice(windows_of(source, tokenizer_dir, num_rows), -(-3 * len(split) // num_rows))
    rows = np.concatenate([rows for _, rows, _ in windows])
    np.testing.assert_array_equal(rows[: len(split)], split[np.arange(len(split))])
    # Row i begins with the last token of row i - 1, also between two passes over the text.
    np.testing.assert_array_equal(rows[1:, 0], rows[:-1, -1])
    tokens = rows[:, :-1].reshape(-1)
    length = dataset.metadata["splits"]["train"]["tokens"]
    assert len(tokens) > 2 * length
    np.testing.assert_array_equal(tokens[length:], tokens[:-length])


def test_each_window_can_be_read_from_its_position(source, tokenizer_dir, small_batches):
    """A position is two integers; reading from it yields the same windows, also in a later pass over the text."""
    windows = list(itertools.islice(windows_of(source, tokenizer_dir, 16), 80))
    pieces = [position.piece for _, _, position in windows]
    assert min(pieces[40:]) < pieces[39] and len(set(pieces)) > 40  # the text starts over
    for index in (0, 1, 17, 42, 79):
        number, rows, position = windows[index]
        assert number == index and position.token <= index * 16 * BLOCK_SIZE
        again = windows_of(source, tokenizer_dir, 16, Position(*json.loads(json.dumps(position))))
        found = {number: rows for number, rows, _ in itertools.islice(again, 20)}
        np.testing.assert_array_equal(found[index], rows)


def batches_of(source, tokenizer_dir, order, start=BEGIN):
    return iter(StreamedRows(source, tokenizer_dir, BLOCK_SIZE, order, start, num_threads=1))


@pytest.mark.parametrize("seed", [1, 2])
def test_each_row_is_an_example_once(source, dataset, tokenizer_dir, seed):
    """The shuffle buffer loses and repeats nothing: the same rows as the prepared dataset, in another order."""
    split = dataset.splits["train"]
    num_rows = 8
    count = len(split) // num_rows * num_rows
    batches = batches_of(source, tokenizer_dir, TrainOrder(num_rows, seed, 4, 4))
    found = np.concatenate([next(batches)[0].numpy() for _ in range(count // 4)])
    expected = split[np.arange(count)]
    assert not np.array_equal(found, expected)
    assert sorted(map(tuple, found.tolist())) == sorted(map(tuple, expected.tolist()))


@pytest.mark.parametrize(("micro_batch_size", "num_processes"), [(3, 1), (12, 1), (3, 2), (2, 3)])
def test_a_step_has_the_same_examples_for_any_batch_shape(source, tokenizer_dir, micro_batch_size, num_processes):
    """For any micro-batch and number of processes, from the start or from the position of an earlier step."""
    whole = batches_of(source, tokenizer_dir, TrainOrder(20, 5, 12, 12))
    steps = [next(whole) for _ in range(9)]
    for first_step in (0, 6):
        start = steps[first_step - 1][1] if first_step else BEGIN
        orders = [TrainOrder(20, 5, 12, micro_batch_size, first_step, p, num_processes) for p in range(num_processes)]
        parts = [batches_of(source, tokenizer_dir, order, start) for order in orders]
        for step in range(first_step, first_step + 3):
            micro_steps = 12 // micro_batch_size // num_processes
            found = torch.cat([next(part)[0] for _ in range(micro_steps) for part in parts])
            assert torch.equal(found, steps[step][0])


@pytest.mark.parametrize(("local", "expected"), [("2", 4), (None, 1)])
def test_a_process_encodes_with_its_share_of_the_cores(
    monkeypatch, jsonl_file, tokenizer_dir, dataset, local, expected
):
    """Two of 16 processes share 8 cores here; if the launcher does not say how many are local, all 16 are."""

    class Recorded(Exception):
        pass

    def record(source, tokenizer_dir, block_size, order, start, num_threads):
        raise Recorded(num_threads)

    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if local:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    monkeypatch.setattr(streaming, "count_cpus", lambda: 8)
    monkeypatch.setattr(streaming, "StreamedRows", record)
    argv = ["--streaming", "--train_file", str(jsonl_file), "--tokenizer_name", str(tokenizer_dir)]
    accelerator = SimpleNamespace(device=torch.device("cpu"), num_processes=16, process_index=0)
    with pytest.raises(Recorded, match=f"^{expected}$"):
        streaming.build_batches(load_config(argv)[0], dataset, accelerator, 4, 0, None)


def test_the_head_of_a_text_holds_complete_documents():
    """Reading stops when both splits have some."""
    train = [Piece("train", "x" * 10, i % 2 == 1) for i in range(20)]
    held_out = [Piece("validation", "y" * 10, True)] * 30
    head = list(take_head([*train, *held_out, *train], 35))
    assert [len([p for p in head if p.split == split]) for split in ("train", "validation")] == [4, 1]
    head = list(take_head([*held_out, *train], 35))
    assert [len([p for p in head if p.split == split]) for split in ("train", "validation")] == [4, 4]
    assert list(take_head(train[:2], 35)) == train[:2]


def test_only_the_head_of_a_streamed_text_is_prepared(tmp_path, jsonl_file, tokenizer_dir, monkeypatch):
    """A longer text with the same head has another fingerprint."""
    monkeypatch.setattr(prepare, "HEAD_CHARACTERS", 5000)
    text = tmp_path / "a.jsonl"
    text.write_bytes(jsonl_file.read_bytes())
    argv = ["--streaming", "--train_file", str(text), "--tokenizer_name", str(tokenizer_dir)]
    config = load_config([*argv, "--cache_dir", str(tmp_path / "cache"), "--block_size", "32"])[0]
    first = open_dataset_for(config).metadata
    assert 5000 <= first["splits"]["train"]["bytes"] < 7000
    text.write_bytes(jsonl_file.read_bytes() + json.dumps({"text": make_documents(1, seed=3)[0]}).encode())
    second = open_dataset_for(config).metadata
    assert first["content_sha256"] == second["content_sha256"]
    assert first["fingerprint"] != second["fingerprint"]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--dataset_dir", "d"], "--streaming requires --train_file or --dataset_name"),
        (["--train_file", "a.txt", "--data_placement", "ram"], "remove --data_placement and"),
        (["--train_file", "a.txt", "--dataloader_num_workers", "2"], "remove --data_placement and"),
        (["--train_file", "a.txt", "--shuffle_buffer_size", "0"], "shuffle_buffer_size must be at least 1"),
    ],
)
def test_options_that_conflict_with_streaming_are_errors(argv, expected):
    """The error names the options."""
    with pytest.raises(UserError, match=expected):
        load_config(["--streaming", *argv])


STREAMED = ["--streaming", "--shuffle_buffer_size", "12", "--global_batch_size", "4", "--max_steps", "6",
            "--logging_steps", "1", "--eval_steps", "0", "--save_steps", "4", "--mixed_precision", "no",
            "--dynamo_backend", "no", "--block_size", str(BLOCK_SIZE)]  # fmt: skip
SHAPE = "n_layer=2,n_head=2,n_embd=32"


@pytest.fixture
def stream(train, jsonl_file, tokenizer_dir, tmp_path, monkeypatch):
    """Train on a stream in this process; arguments override the defaults."""
    monkeypatch.chdir(tmp_path)
    text = ["--train_file", jsonl_file, "--tokenizer_name", tokenizer_dir, "--config_overrides", SHAPE]
    return lambda *arguments: train(*STREAMED, *text, *arguments, alone=True)


def test_a_streamed_run_resumes_bit_for_bit(tmp_path, stream, capsys):
    """A resumed run has the losses and weights of one that was never interrupted, with dropout on."""
    run = ["--output_dir", "run", "--config_overrides", f"{SHAPE},resid_pdrop=0.1"]
    stream(*run)
    weights, events = (tmp_path / "run" / "model.safetensors").read_bytes(), read_events(tmp_path / "run", "train")
    (tmp_path / "run" / "model.safetensors").unlink()
    capsys.readouterr()
    resume = [*run, "--resume_from_checkpoint", "run/checkpoint-4"]
    stream(*resume)
    assert "run/checkpoint-4" in capsys.readouterr().out
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == weights
    for before, after in zip(events, read_events(tmp_path / "run", "train"), strict=True):
        assert (before["loss"], before["grad_norm"]) == (after["loss"], after["grad_norm"])
    with pytest.raises(UserError, match="shuffle_buffer_size 12 -> 13"):
        stream(*resume, "--shuffle_buffer_size", "13")


def test_two_processes_train_on_a_stream_like_one(tmp_path, stream, jsonl_file, tokenizer_dir):
    """The losses agree within 1e-5."""
    stream("--output_dir", "one")
    text = ["--train_file", jsonl_file, "--tokenizer_name", tokenizer_dir, "--config_overrides", SHAPE]
    two = ("--multi_gpu", "--num_processes", "2")
    result = launch([*STREAMED, *text, "--output_dir", "two"], tmp_path, two, ACCELERATE_USE_CPU="true")
    assert result.returncode == 0, result.stderr
    for a, b in zip(read_events(tmp_path / "one", "train"), read_events(tmp_path / "two", "train"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)


def test_a_bad_line_in_a_stream_ends_the_run_with_one_sentence(tmp_path, stream, monkeypatch):
    """The error arises in the worker process, beyond the prepared head, and names the line."""
    monkeypatch.setattr(prepare, "HEAD_CHARACTERS", 30_000)
    monkeypatch.setattr(documents, "HELD_BACK_DOCUMENTS", 100)
    rows = [json.dumps({"text": text}) + "\n" for text in make_documents(600, seed=7)]
    (tmp_path / "broken.jsonl").write_text("".join(rows) + "{")
    with pytest.raises(ProcessError, match="^cannot read broken.jsonl: line 601 is not JSON"):
        stream("--train_file", "broken.jsonl", "--output_dir", "run", "--shuffle_buffer_size", "1000000")
