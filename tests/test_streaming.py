"""Streaming: the rows of the prepared dataset, each once, in an order that can be gone back to."""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import BLOCK_SIZE, launch, make_documents, read_events

from recipe.command_line import load_config
from recipe.data import encoder, prepare, streaming
from recipe.data.batches import TrainOrder
from recipe.data.documents import Piece, take_head
from recipe.data.prepare import open_dataset_for
from recipe.data.streaming import Position, StreamedRows, read_windows
from recipe.data.text import TextSource
from recipe.data.tokenizer import load_tokenizer
from recipe.errors import UserError


@pytest.fixture
def small_batches(monkeypatch):
    """Windows begin in the middle of what is encoded at once."""
    monkeypatch.setattr(encoder, "BATCH_CHARACTERS", 700)


@pytest.fixture
def source(jsonl_file):
    return TextSource(train_files=(str(jsonl_file),))


BEGIN = Position()


def windows_of(source, tokenizer_dir, num_rows, start=BEGIN):
    return read_windows(source, load_tokenizer(str(tokenizer_dir)), BLOCK_SIZE, num_rows, start, num_workers=2)


@pytest.mark.parametrize("num_rows", [1, 7, 64, 10_000])
def test_the_rows_are_those_of_the_prepared_dataset(source, dataset, tokenizer_dir, small_batches, num_rows):
    """In the same order before they are shuffled, so every token once; then the text begins again where it ended."""
    split = dataset.splits["train"]
    windows = itertools.islice(windows_of(source, tokenizer_dir, num_rows), -(-3 * len(split) // num_rows))
    rows = np.concatenate([rows for _, rows, _ in windows])
    np.testing.assert_array_equal(rows[: len(split)], split[np.arange(len(split))])
    # Row i begins with the last token of row i - 1, also where one pass over the text goes over into the next.
    np.testing.assert_array_equal(rows[1:, 0], rows[:-1, -1])
    tokens = rows[:, :-1].reshape(-1)
    length = dataset.metadata["splits"]["train"]["tokens"]
    assert len(tokens) > 2 * length
    np.testing.assert_array_equal(tokens[length:], tokens[:-length])


def test_each_window_can_be_read_from_its_position(source, tokenizer_dir, small_batches):
    """A position is two integers; from there on the windows are the same, also in a later pass over the text."""
    windows = list(itertools.islice(windows_of(source, tokenizer_dir, 16), 80))
    pieces = [position.piece for _, _, position in windows]
    assert min(pieces[40:]) < pieces[39] and len(set(pieces)) > 40  # the text was begun again
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
    """The shuffle buffer loses and repeats nothing: the same tokens as the prepared data, in another order."""
    split = dataset.splits["train"]
    num_rows = 8
    count = len(split) // num_rows * num_rows
    batches = batches_of(source, tokenizer_dir, TrainOrder(num_rows, seed, 4, 4))
    found = np.concatenate([next(batches)[0].numpy() for _ in range(count // 4)])
    expected = split[np.arange(count)]
    assert not np.array_equal(found, expected)
    assert sorted(map(tuple, found.tolist())) == sorted(map(tuple, expected.tolist()))


@pytest.mark.parametrize(("micro_batch_size", "num_processes"), [(3, 1), (12, 1), (3, 2), (2, 3)])
def test_a_step_has_the_same_examples_however_it_is_cut(source, tokenizer_dir, micro_batch_size, num_processes):
    """Over processes without overlap, whatever the micro-batch; and from the position of an earlier step."""
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
def test_a_process_encodes_with_its_share_of_this_machine(
    monkeypatch, jsonl_file, tokenizer_dir, dataset, local, expected
):
    """Eight cores among the processes on this machine, of 16 on all; without a launcher's word all 16 are here."""

    class Recorded(Exception):
        pass

    def record(*args):
        raise Recorded(args[-1])

    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if local:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    monkeypatch.setattr(streaming, "count_cpus", lambda: 8)
    monkeypatch.setattr(streaming, "StreamedRows", record)
    argv = ["--streaming", "--train_file", str(jsonl_file), "--tokenizer_name", str(tokenizer_dir)]
    accelerator = SimpleNamespace(device=torch.device("cpu"), num_processes=16, process_index=0)
    with pytest.raises(Recorded, match=f"^{expected}$"):
        streaming.build_batches(load_config(argv)[0], dataset, accelerator, 4, 0, None)


def test_the_head_of_a_text():
    """Documents are whole; reading stops when both splits have something."""
    train = [Piece("train", "x" * 10, i % 2 == 1) for i in range(20)]
    held_out = [Piece("validation", "y" * 10, True)] * 30
    head = list(take_head([*train, *held_out, *train], 35))
    assert [len([p for p in head if p.split == split]) for split in ("train", "validation")] == [4, 1]
    head = list(take_head([*held_out, *train], 35))
    assert [len([p for p in head if p.split == split]) for split in ("train", "validation")] == [4, 4]
    assert list(take_head(train[:2], 35)) == train[:2]


def test_what_is_prepared_of_a_streamed_text(tmp_path, jsonl_file, tokenizer_dir, monkeypatch):
    """The head alone; a longer text of the same beginning is another one."""
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
        (["--dataset_dir", "d"], "--streaming reads --train_file or --dataset_name"),
        (["--train_file", "a.txt", "--data_placement", "ram"], "leave --data_placement and"),
        (["--train_file", "a.txt", "--dataloader_num_workers", "2"], "leave --data_placement and"),
        (["--train_file", "a.txt", "--shuffle_buffer_size", "0"], "shuffle_buffer_size must be at least 1"),
    ],
)
def test_options_that_do_not_go_with_it(argv, expected):
    with pytest.raises(UserError, match=expected):
        load_config(["--streaming", *argv])


STREAMED = ["--streaming", "--shuffle_buffer_size", "12", "--global_batch_size", "4", "--max_steps", "6",
            "--logging_steps", "1", "--eval_steps", "0", "--save_steps", "4", "--mixed_precision", "no",
            "--dynamo_backend", "no", "--config_overrides", "n_layer=2,n_head=2,n_embd=32,resid_pdrop=0.1",
            "--block_size", str(BLOCK_SIZE)]  # fmt: skip
TWO = ("--multi_gpu", "--num_processes", "2")


def test_a_streamed_run_resumes_bit_for_bit(tmp_path, jsonl_file, tokenizer_dir):
    """Stopped and resumed: the losses and weights of a run that went through, with dropout on."""
    text = ["--train_file", str(jsonl_file), "--tokenizer_name", str(tokenizer_dir)]
    whole = launch([*STREAMED, *text, "--output_dir", "whole"], tmp_path)
    assert whole.returncode == 0, whole.stderr
    resumed = [*STREAMED, *text, "--resume_from_checkpoint", "whole/checkpoint-4", "--output_dir", "whole"]
    weights = (tmp_path / "whole" / "model.safetensors").read_bytes()
    events = read_events(tmp_path / "whole", "train")
    (tmp_path / "whole" / "model.safetensors").unlink()
    again = launch(resumed, tmp_path)
    assert again.returncode == 0, again.stderr
    assert "resumed from whole/checkpoint-4" in again.stdout.replace("\n           ", " ")
    assert (tmp_path / "whole" / "model.safetensors").read_bytes() == weights
    for before, after in zip(events, read_events(tmp_path / "whole", "train"), strict=True):
        assert (before["loss"], before["grad_norm"]) == (after["loss"], after["grad_norm"])
    refused = launch([*resumed, "--shuffle_buffer_size", "13"], tmp_path)
    assert refused.returncode != 0 and "shuffle_buffer_size 12 -> 13" in refused.stderr


def test_two_processes_and_a_bad_line(tmp_path, jsonl_file, tokenizer_dir):
    """Two processes train as one does; a text that breaks off during the run is one sentence."""
    text = ["--tokenizer_name", str(tokenizer_dir), "--config_overrides", "n_layer=2,n_head=2,n_embd=32"]
    one = launch([*STREAMED, *text, "--train_file", str(jsonl_file), "--output_dir", "one"], tmp_path)
    two = launch(
        [*STREAMED, *text, "--train_file", str(jsonl_file), "--output_dir", "two"],
        tmp_path,
        TWO,
        ACCELERATE_USE_CPU="true",
    )
    assert one.returncode == two.returncode == 0, two.stderr
    for a, b in zip(read_events(tmp_path / "one", "train"), read_events(tmp_path / "two", "train"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)

    broken = tmp_path / "broken.jsonl"
    documents = make_documents(60_000, seed=7)  # longer than the head
    broken.write_text("".join(json.dumps({"text": text * 3}) + "\n" for text in documents) + "{")
    result = launch(
        [*STREAMED, *text, "--train_file", str(broken), "--output_dir", "broken", "--shuffle_buffer_size", "1000000"],
        tmp_path,
    )
    assert result.returncode == 1
    assert "error: cannot read" in result.stderr and "line 60001 is not JSON" in result.stderr
    assert "Traceback" not in result.stderr.partition("error: cannot read")[0]
