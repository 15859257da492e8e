"""Streaming: each row of the prepared dataset once, in an order that can be resumed anywhere."""

import errno
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from conftest import BLOCK_SIZE, launch, make_documents, read_events, sigterm_when

from recipe.command_line import load_config
from recipe.data import documents, encoder, prepare, streaming
from recipe.data.batches import TrainOrder, example_rows
from recipe.data.documents import Piece, take_head
from recipe.data.prepare import open_dataset_for, open_pieces
from recipe.data.streaming import SharedWindows, take_examples
from recipe.data.text import TextSource
from recipe.data.tokenizer import read_tokenizer
from recipe.data.windows import Position, TextWindows, create_folder, publish
from recipe.errors import ProcessError, UserError


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """A temporary folder of its own for each test, in which every run must have removed what it created."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setenv("TMPDIR", str(directory))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield lambda: list(directory.glob("gpt2-recipe-stream-*"))
    assert not list(directory.glob("gpt2-recipe-stream-*"))


@pytest.fixture
def small_batches(monkeypatch):
    """Let windows begin inside a batch of encoded text."""
    monkeypatch.setattr(encoder, "BATCH_CHARACTERS", 700)


@pytest.fixture
def source(jsonl_file):
    return TextSource(train_files=(str(jsonl_file),))


BEGIN = Position()


def windows_of(source, tokenizer_dir, num_rows, start=BEGIN):
    return iter(TextWindows(source, str(tokenizer_dir), BLOCK_SIZE, num_rows, start, 2))


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
    """Reading from its JSON yields the same windows, also in a later pass over the text."""
    windows = list(itertools.islice(windows_of(source, tokenizer_dir, 16), 80))
    positions = [json.dumps([position.piece, position.place]) for _, _, position in windows]
    assert len(set(positions)) > 40 and set(positions[40:]) & set(positions[:40])  # the text starts over
    for index in (0, 1, 17, 42, 79):
        number, rows, position = windows[index]
        assert number == index and position.token <= index * 16 * BLOCK_SIZE
        again = windows_of(source, tokenizer_dir, 16, Position(*json.loads(json.dumps(position))))
        found = {number: rows for number, rows, _ in itertools.islice(again, 20)}
        np.testing.assert_array_equal(found[index], rows)


def batches_of(source, tokenizer_dir, order, start=BEGIN):
    windows, read = windows_of(source, tokenizer_dir, order.num_rows, start), {}

    def wait_for(number, oldest):
        assert oldest <= number
        while number not in read:
            read.update({number: content for number, *content in [next(windows)]})
        return read[number]

    return take_examples(order, wait_for)


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

    def record(source, tokenizer_dir, block_size, num_rows, start, num_threads):
        raise Recorded(num_threads)

    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if local:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    monkeypatch.setattr(streaming, "count_cpus", lambda: 8)
    monkeypatch.setattr(streaming, "TextWindows", record)
    argv = ["--streaming", "--train_file", str(jsonl_file), "--tokenizer_name", str(tokenizer_dir)]
    accelerator = SimpleNamespace(device=torch.device("cpu"), num_processes=16, process_index=0)
    with pytest.raises(Recorded, match=f"^{expected}$"):
        streaming.build_batches(load_config(argv)[0], dataset, accelerator, 4, 0, None)


def test_an_old_position_without_a_place_is_still_valid(source, tokenizer_dir, small_batches):
    """It counts the training pieces from the beginning of the text."""
    encode, _, pieces = open_pieces(source, read_tokenizer(str(tokenizer_dir)))
    head = list(itertools.islice((piece for piece in pieces if piece.split == "train"), 100))
    position = Position(*json.loads(f"[100, {len(encode(head).ids)}]"))
    windows = list(itertools.islice(windows_of(source, tokenizer_dir, 16), 40))
    for number, rows, _ in itertools.islice(windows_of(source, tokenizer_dir, 16, position), 5):
        assert number * 16 * BLOCK_SIZE >= position.token
        np.testing.assert_array_equal(rows, windows[number][1])


def test_a_resumed_stream_does_not_read_what_lies_before(tmp_path, jsonl_file, dataset, tokenizer_dir, small_batches):
    """The first half of the file can be destroyed."""
    text = tmp_path / "text.jsonl"
    text.write_bytes(jsonl_file.read_bytes())
    source = TextSource(train_files=(str(text),))
    last = len(dataset.splits["train"]) // 16 - 2
    *_, (number, rows, position) = itertools.islice(windows_of(source, tokenizer_dir, 16), last + 1)
    with open(text, "r+b") as file:
        file.write(b"?" * (text.stat().st_size // 2))
    again, rows_again, _ = next(windows_of(source, tokenizer_dir, 16, position))
    assert (number, again) == (last, last)
    np.testing.assert_array_equal(rows, rows_again)


class Processes:
    """The processes of a run as threads: each calls `function(rank, gather)`, and they gather from each other."""

    def __init__(self, count):
        self.count, self.parts, self.barrier = count, [None] * count, threading.Barrier(count)

    def gather_on(self, rank):
        def gather(part):
            self.parts[rank] = part
            self.barrier.wait(30)
            parts = list(self.parts)
            self.barrier.wait(30)
            return parts

        return gather

    def run(self, function):
        with ThreadPoolExecutor(self.count) as threads:
            running = [threads.submit(function, rank, self.gather_on(rank)) for rank in range(self.count)]
            return [future.result() for future in running]


def open_shared(source, tokenizer_dir, num_rows, start=BEGIN, count=2):
    windows = TextWindows(source, str(tokenizer_dir), BLOCK_SIZE, num_rows, start, num_threads=1)
    return Processes(count).run(lambda rank, gather: SharedWindows(windows, rank, count, gather))


def test_a_stream_resumes_on_another_number_of_processes(source, dataset, tokenizer_dir, folders):
    """Bit for bit, from one process to two and back, with one process that tokenizes for both.

    The steps are longer than the window, and one process takes all of its examples before the other takes any.
    """
    num_rows, length, start, found = 5, 24, BEGIN, []
    for first_step, num_processes in ((0, 1), (2, 2), (4, 1)):
        shared = open_shared(source, tokenizer_dir, num_rows, Position(*json.loads(json.dumps(start))), num_processes)
        assert [of_rank.process is not None for of_rank in shared] == [True, False][:num_processes]
        assert len(folders()) == 1
        orders = [TrainOrder(num_rows, 7, length, 3, first_step, rank, num_processes) for rank in range(num_processes)]
        taken = [take_examples(order, s.wait_for) for order, s in zip(orders, shared, strict=True)]
        for _ in range(2):
            batches = [[next(of_rank) for _ in range(length // 3 // num_processes)] for of_rank in reversed(taken)]
            found += [rows for of_all in zip(*reversed(batches), strict=True) for rows, _ in of_all]
            start = batches[-1][-1][1]  # of the main process
        for of_rank in shared:
            of_rank.close()
    examples = np.arange(6 * length)
    expected = examples // num_rows * num_rows + example_rows(examples, num_rows, seed=7)
    np.testing.assert_array_equal(torch.cat(found), dataset.splits["train"][expected])


def test_windows_are_removed_when_all_have_left_them(source, tokenizer_dir, folders):
    """The process that tokenizes stays two windows ahead of the furthest reader, also after it was told to end.

    A cluster sends a signal to all processes of a job, and the last step still needs its data.
    """
    shared = open_shared(source, tokenizer_dir, 4)

    def numbers():
        return sorted(int(path.stem) for path in folders()[0].glob("*.npy") if path.stem.isdigit())

    def expect(*expected):
        given_up_at = time.monotonic() + 20
        while numbers() != list(expected) and time.monotonic() < given_up_at:
            time.sleep(0.01)
        time.sleep(0.1)
        assert numbers() == list(expected)

    first, _ = shared[0].wait_for(0, 0)
    copied = first.copy()
    expect(0, 1, 2)
    os.kill(shared[0].pid, signal.SIGTERM)
    shared[0].wait_for(3, 3)
    expect(0, 1, 2, 3, 4, 5)
    shared[1].wait_for(2, 2)
    shared[0].wait_for(4, 4)
    expect(2, 3, 4, 5, 6)
    assert first.dtype == np.uint16
    np.testing.assert_array_equal(first, copied)  # a window that is in use remains readable
    for of_rank in shared:
        of_rank.close()


@pytest.mark.parametrize("last", [0, 1])
def test_closing_ends_the_process_that_tokenizes_at_once(source, tokenizer_dir, folders, last):
    """Whichever training process closes first, and whatever the other one waits for."""
    shared = open_shared(source, tokenizer_dir, 100_000_000)
    time.sleep(0.5)
    assert psutil.pid_exists(shared[0].pid) and folders()
    started_at = time.monotonic()
    for of_rank in (shared[1 - last], shared[last]):
        of_rank.close()
    assert time.monotonic() - started_at < 2
    assert not psutil.pid_exists(shared[0].pid) and not folders()


def test_one_process_of_each_host_tokenizes(source, tokenizer_dir, monkeypatch, folders):
    """Hosts may have different numbers of processes, and a scheduler may deal the ranks out in turn."""
    here = threading.local()
    monkeypatch.setattr(socket, "gethostname", lambda: here.host)
    windows = TextWindows(source, str(tokenizer_dir), BLOCK_SIZE, 4, BEGIN, num_threads=1)

    def open_on_host(rank, gather):
        here.host = "abaaa"[rank]
        return SharedWindows(windows, rank, 5, gather)

    shared = Processes(5).run(open_on_host)
    assert [of_rank.process is not None for of_rank in shared] == [True, True, False, False, False]
    assert [shared.index(next(s for s in shared if s.pid == of_rank.pid)) for of_rank in shared] == [0, 1, 0, 0, 0]
    assert len(folders()) == 2
    for of_rank in shared:
        of_rank.close()


def message_of(function):
    with pytest.raises(ProcessError) as caught:
        function()
    return str(caught.value)


def test_an_error_in_the_text_reaches_every_process(tmp_path, tokenizer_dir):
    """As the same sentence, also those that come to it when another one has ended already."""
    rows = [json.dumps({"text": text}) + "\n" for text in make_documents(50)]
    (tmp_path / "broken.jsonl").write_text("".join(rows) + "{")
    broken = TextSource(train_files=(str(tmp_path / "broken.jsonl"),))
    shared, messages = open_shared(broken, tokenizer_dir, 1_000_000), []
    for of_rank in shared:
        messages.append(message_of(lambda of_rank=of_rank: of_rank.wait_for(0, 0)))
        of_rank.close()
    assert messages[0] == messages[1] and "broken.jsonl: line 51 is not JSON" in messages[0]


def test_the_end_of_the_process_that_tokenizes_ends_the_others(source, tokenizer_dir, folders):
    """They do not wait for its next window, also while nobody has collected its exit status."""
    shared = open_shared(source, tokenizer_dir, 100_000_000)
    os.kill(shared[0].pid, signal.SIGKILL)
    for of_rank in reversed(shared):
        assert "tokenizes the streamed text has ended" in message_of(lambda of_rank=of_rank: of_rank.wait_for(0, 0))
        of_rank.close()


LEADER = """
import json, sys, time
from recipe.data.text import TextSource
from recipe.data.windows import TextWindows, create_folder, start_tokenizing
source = TextSource(train_files=(sys.argv[1],))
windows = TextWindows(source, sys.argv[2], 32, 100_000_000, (0, 0), 1)
print(start_tokenizing(windows, create_folder(1)).pid, flush=True)
time.sleep(60)
"""


def test_nothing_remains_of_a_training_process_that_was_killed(jsonl_file, tokenizer_dir, folders):
    """With its whole group, so that it can clean up nothing itself."""
    command = [sys.executable, "-c", LEADER, str(jsonl_file), str(tokenizer_dir)]
    leader = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    process = psutil.Process(int(leader.stdout.readline()))
    assert folders()
    os.killpg(leader.pid, signal.SIGKILL)
    leader.communicate()
    process.wait(timeout=20)
    assert not folders()


def test_a_full_disk_is_one_sentence(source, tokenizer_dir, monkeypatch):
    """It names the variable that chooses the folder, for the files of a window and for the folder itself."""
    windows, folder = TextWindows(source, str(tokenizer_dir), BLOCK_SIZE, 4, BEGIN, 1), create_folder(1)
    np.load(folder / "readers.npy", mmap_mode="r+")[:] = 0

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail)
        message = message_of(lambda: publish(windows, folder, threading.Lock()))
        assert message.startswith(f"cannot write token ids to {folder}: No space left on device; set TMPDIR to")
        patch.setattr(tempfile, "mkdtemp", fail)
        assert "a temporary folder: No space left on device; set TMPDIR to" in message_of(lambda: create_folder(1))
    shutil.rmtree(folder)


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


PROBE = """
import os, sys

def log(event, arguments):
    if event == "open" and str(arguments[0]).endswith("corpus.jsonl"):
        with open(os.path.join(os.path.dirname(__file__), "readers.log"), "a") as file:
            file.write(f"{os.getpid()} {sys.orig_argv}\\n")

sys.addaudithook(log)
"""


def test_a_streamed_run_that_is_told_to_end_saves(tmp_path, stream):
    """And leaves no temporary folder."""
    log = tmp_path / "run" / "metrics.jsonl"
    with sigterm_when(lambda: log.is_file() and '"train"' in log.read_text()), pytest.raises(SystemExit, match="75"):
        stream("--output_dir", "run", "--max_steps", "100000", "--save_steps", "100000")
    assert list((tmp_path / "run").glob("checkpoint-*"))


def test_two_processes_train_on_a_stream_like_one(tmp_path, stream, jsonl_file, tokenizer_dir):
    """The losses agree within 1e-5. Of all processes, one opens the text: the head is prepared already."""
    stream("--output_dir", "one")
    (tmp_path / "sitecustomize.py").write_text(PROBE)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    text = ["--train_file", jsonl_file, "--tokenizer_name", tokenizer_dir, "--config_overrides", SHAPE]
    two = ("--multi_gpu", "--num_processes", "2")
    environment = {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": path}
    result = launch([*STREAMED, *text, "--output_dir", "two"], tmp_path, two, **environment)
    assert result.returncode == 0, result.stderr
    (reader,) = set((tmp_path / "readers.log").read_text().splitlines())
    assert "recipe.data.windows" in reader
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
