"""Streaming: each row of a unit once per epoch, in an order that any number of processes can resume anywhere."""

import dataclasses
import errno
import itertools
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from conftest import BLOCK_SIZE, PLAIN, ROOT, launch, make_documents, read_events

from recipe.command_line import load_config
from recipe.data import cache
from recipe.data.batches import TrainBatches, TrainOrder, row_shift
from recipe.data.cache import open_dataset_for
from recipe.data.packed import PackedSplit
from recipe.data.prepare import prepare_dataset
from recipe.data.read import list_units
from recipe.data.source import TextSource
from recipe.data.stream import TextStream, open_stream, read_stream
from recipe.data.tokenizer import read_tokenizer
from recipe.data.units import Job
from recipe.errors import ProcessError, UserError

GLOBAL_BATCH = 24


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """A temporary folder of its own for each test, in which every stream must have removed what it created."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield lambda: list((tmp_path / "temporary").glob("gpt2-recipe-*"))
    assert not list((tmp_path / "temporary").glob("gpt2-recipe-*"))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Lines of text, of which units of 1,500 bytes fill several rows, one, or none."""
    path = tmp_path_factory.mktemp("stream") / "a.jsonl"
    texts = [text * (1 + 5 * (number % 9 == 0)) for number, text in enumerate(make_documents(60))]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def source(text, small_units):
    return TextSource((str(text),), validation_split_percentage=20.0)


@pytest.fixture
def unit_rows(tmp_path, source, tokenizer_dir):
    """The training rows of each unit, as they would be alone."""
    made = prepare_dataset(source, tmp_path / "d", read_tokenizer(str(tokenizer_dir)), num_workers=1)
    rows, chunks = [], made["splits"]["train"]["chunks"]
    for number in range(len(list_units(source))):
        own = [chunk for chunk in chunks if chunk[0] == f"{number:05d}.arrow"]
        split = PackedSplit(tmp_path / "d" / "train", own, BLOCK_SIZE, made["vocab_size"])
        rows.append(split[np.arange(len(split))].tolist() if len(split) else [])
    counts = list(map(len, rows))
    assert len(counts) > 10 and 0 in counts and max(counts) > 6
    return rows


def open_streams(source, tokenizer_dir, count=1, seed=1, hosts=None) -> list[TextStream]:
    """Open the stream of each process of a run. The processes are threads, which gather from each other."""
    parts, barrier, here = [None] * count, threading.Barrier(count), threading.local()
    job = Job(source, "", str(tokenizer_dir), splits=("train",), is_temporary=True)
    dataset = SimpleNamespace(block_size=BLOCK_SIZE, vocab_size=len(read_tokenizer(str(tokenizer_dir))))

    def open_on(rank):
        here.host = (hosts or "a" * count)[rank]

        def gather(part):
            parts[rank] = part
            barrier.wait(30)
            found = list(parts)
            barrier.wait(30)
            return found

        return TextStream(job, list_units(source), "tokenizers", dataset, seed, rank, gather)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(count) as threads:
        patch.setattr(socket, "gethostname", lambda: here.host)
        return list(threads.map(open_on, range(count)))


def batches_of(streams, position=(0, 0), micro_batch_size=3, seed=1, shift_below=1) -> list[TrainBatches]:
    """Return the batches of each process, which fetches one ahead."""
    count = len(streams)
    options = seed, GLOBAL_BATCH, micro_batch_size
    orders = [TrainOrder(1, *options, 0, rank, count, shift_below) for rank in range(count)]
    readers = [read_stream(stream, order, position) for stream, order in zip(streams, orders, strict=True)]
    return [TrainBatches(reader, torch.device("cpu")) for reader in readers]


def read_steps(
    source, tokenizer_dir, num_steps, position=(0, 0), micro_batch_size=3, num_processes=1, seed=1, shift_below=1
):
    """Return the inputs and last targets of each step from a position, and the position after it.

    Each process takes its part of a step, and the beginning of the next, before the following process does.
    """
    streams = open_streams(source, tokenizer_dir, num_processes, seed)
    processes = batches_of(streams, position, micro_batch_size, seed, shift_below)
    micro_steps, steps = GLOBAL_BATCH // micro_batch_size // num_processes, []
    for _ in range(num_steps):
        taken = [[next(batches) for _ in range(micro_steps)] for batches in processes]
        pairs = [pair for of_all in zip(*taken, strict=True) for pair in of_all]
        rows = torch.cat([torch.cat([inputs, targets[:, -1:]], dim=1) for inputs, targets in pairs])
        assert len({batches.position for batches in processes}) == 1
        steps.append((rows, processes[0].position))
    for batches in processes:
        batches.close()
    return steps


def test_the_second_epoch_of_a_stream_cuts_its_units_elsewhere(source, tokenizer_dir, unit_rows):
    """All rows of a unit begin later by what belongs to the epoch, but for the last, which has no text after it."""
    num_rows, shift = sum(map(len, unit_rows)), int(row_shift(np.array([1]), BLOCK_SIZE)[0])
    steps = read_steps(source, tokenizer_dir, 2 * num_rows // GLOBAL_BATCH + 1, shift_below=BLOCK_SIZE)
    stream = [tuple(row) for rows, _ in steps for row in rows.tolist()]
    expected = [tuple(row) for rows in unit_rows for row in rows]
    assert sorted(stream[:num_rows]) == sorted(expected) and shift > 0
    later = []
    for rows in filter(None, unit_rows):
        tokens = rows[0] + [token for row in rows[1:] for token in row[1:]]
        starts = [*(i * BLOCK_SIZE + shift for i in range(len(rows) - 1)), (len(rows) - 1) * BLOCK_SIZE]
        later += [tuple(tokens[start : start + BLOCK_SIZE + 1]) for start in starts]
    assert sorted(stream[num_rows : 2 * num_rows]) == sorted(later)


@pytest.mark.parametrize("seed", [1, 2])
def test_each_row_of_a_unit_comes_once_per_epoch(source, tokenizer_dir, unit_rows, seed):
    """All rows of one unit, shuffled, then those of another; another order of units and rows in the next epoch."""
    num_rows, orders = sum(map(len, unit_rows)), []
    steps = read_steps(source, tokenizer_dir, 2 * num_rows // GLOBAL_BATCH + 1, seed=seed)
    stream = [tuple(row) for rows, _ in steps for row in rows.tolist()]
    by_row = {tuple(row): number for number, rows in enumerate(unit_rows) for row in rows}
    assert len(by_row) == num_rows
    for epoch in (stream[:num_rows], stream[num_rows : 2 * num_rows]):
        units = [number for number, _ in itertools.groupby(epoch, key=by_row.__getitem__)]
        assert sorted(units) == [number for number, rows in enumerate(unit_rows) if rows]
        for number, rows in itertools.groupby(epoch, key=by_row.__getitem__):
            assert sorted(map(list, rows)) == sorted(unit_rows[number])
        orders.append(units)
    in_order = [tuple(row) for number in orders[0] for row in unit_rows[number]]
    assert orders[0] != orders[1] != sorted(orders[1]) and stream[:num_rows] != in_order
    other = read_steps(source, tokenizer_dir, 1, seed=seed + 1)
    assert not torch.equal(other[0][0], steps[0][0])


def test_a_stream_resumes_at_any_step_on_any_number_of_processes(source, tokenizer_dir, unit_rows):
    """Bit for bit. Steps span several units and units without rows; one process may be a step ahead of the others."""
    whole = read_steps(source, tokenizer_dir, 9)
    assert max(after[0] - before[0] for (_, before), (_, after) in itertools.pairwise(whole)) > 2
    for first, micro_batch_size, num_processes in ((0, 24, 1), (0, 3, 2), (0, 2, 3), (4, 3, 2), (7, 6, 2)):
        position = tuple(json.loads(json.dumps(whole[first - 1][1]))) if first else (0, 0)
        found = read_steps(source, tokenizer_dir, 2, position, micro_batch_size, num_processes)
        for (rows, after), (expected, position) in zip(found, whole[first:], strict=False):
            assert torch.equal(rows, expected) and after == position


def test_old_units_are_deleted(source, tokenizer_dir, folders):
    """A bounded number of files exists at any time."""
    streams = open_streams(source, tokenizer_dir, 2)
    assert [stream.workers is not None for stream in streams] == [True, False] and len(folders()) == 1
    processes, counts = batches_of(streams), []
    for _ in range(40):
        for batches in processes:
            inputs, targets = next(batches)
            assert torch.equal(inputs[:, 1:], targets[:, :-1])
        counts.append(len(list(folders()[0].rglob("*.arrow"))))
    assert processes[0].position[0] > 30 and max(counts) < 20
    for batches in processes:
        batches.close()
    assert not folders()


def test_a_machine_tokenizes_once(source, tokenizer_dir, folders):
    """Machines may have different numbers of processes, and a scheduler may deal the ranks out in turn."""
    streams = open_streams(source, tokenizer_dir, 5, hosts="abaaa")
    assert [stream.workers is not None for stream in streams] == [True, True, False, False, False]
    assert [streams.index(next(s for s in streams if s.folder == of.folder)) for of in streams] == [0, 1, 0, 0, 0]
    assert len(folders()) == 2
    rows = [stream.window(0)[np.arange(1)].tolist() for stream in streams if len(streams[0].window(0))]
    assert all(row == rows[0] for row in rows)
    for stream in streams:
        stream.close()


OWNER = """
import sys, time
from types import SimpleNamespace
from recipe.data import cut as cut_module
from recipe.data.read import list_units
from recipe.data.source import TextSource
from recipe.data.stream import TextStream
from recipe.data.units import Job
source = TextSource((sys.argv[1],))
if sys.argv[3] == "idle":
    cut_module.SMALL_SOURCE = cut_module.SMALLEST_UNIT = 1500
job = Job(source, "", sys.argv[2], splits=("train",), is_temporary=True)
dataset = SimpleNamespace(block_size=32, vocab_size=500)
stream = TextStream(job, list_units(source), "tokenizers", dataset, 1, 0, lambda part: [part])
if sys.argv[3] == "idle":
    stream.window(0)
else:
    import threading
    threading.Thread(target=stream.window, args=(0,)).start()
time.sleep(0.5)
print("started", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("state", ["idle", "tokenizing"])
def test_nothing_remains_of_a_killed_owner(tmp_path, text, tokenizer_dir, folders, state):
    """Neither its processes nor its folder, also if they are in the middle of a unit."""
    if state == "tokenizing":
        (tmp_path / "long.jsonl").write_text(text.read_text() * 150)  # takes about five seconds
        text = tmp_path / "long.jsonl"
    command = [sys.executable, "-c", OWNER, str(text), str(tokenizer_dir), state]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, cwd=ROOT)
    assert owner.stdout.readline() == "started\n" and folders()
    workers = psutil.Process(owner.pid).children()
    os.killpg(owner.pid, signal.SIGKILL)
    owner.communicate()
    assert workers and not psutil.wait_procs(workers, timeout=30)[1]
    assert not folders()


def message_of(stream: TextStream) -> str:
    with pytest.raises(ProcessError) as caught:
        for number in range(100):
            stream.window(number)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_unreadable_text_is_one_sentence(tmp_path, small_units, tokenizer_dir):
    """It names the file. The other processes of the machine say that this one has ended."""
    rows = [json.dumps({"text": text}) + "\n" for text in make_documents(50)]
    (tmp_path / "broken.jsonl").write_text("".join(rows) + "{")
    streams = open_streams(TextSource((str(tmp_path / "broken.jsonl"),)), tokenizer_dir, 2)
    assert "broken.jsonl: the line that ends at byte" in message_of(streams[0])
    streams[0].close()
    assert "its output says why" in message_of(streams[1])


def test_the_end_of_a_tokenizing_process_ends_the_run(source, tokenizer_dir):
    streams = open_streams(source, tokenizer_dir)
    for process in streams[0].workers.processes:
        process.kill()
    assert "a process that tokenizes text has ended" in message_of(streams[0])
    streams[0].close()


def test_a_full_disk_names_the_variable(source, tokenizer_dir, monkeypatch):
    """For the folder itself, and for a unit in it."""

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "mkdtemp", fail)
        with pytest.raises(ProcessError, match="No space left on device; set TMPDIR"):
            open_streams(source, tokenizer_dir)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))  # of the process that tokenizes
    try:
        (stream,) = open_streams(source, tokenizer_dir)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "cannot write token ids to" in (message := message_of(stream)) and "TMPDIR" in message
    stream.close()


@pytest.fixture
def config(tmp_path, text, tokenizer_dir, small_units, monkeypatch):
    """A streamed run, of which about 6,000 bytes are prepared."""
    monkeypatch.setattr(cache, "HEAD_BYTES", 6_000)
    argv = ["--streaming", "--train_file", str(text), "--tokenizer_name", str(tokenizer_dir)]
    argv += ["--cache_dir", str(tmp_path / "cache"), "--block_size", str(BLOCK_SIZE), "--seed", "1"]
    return load_config([*argv, "--validation_split_percentage", "20"])[0]


def test_a_part_of_a_streamed_text_is_prepared(config, source, tokenizer_dir):
    """From units spread over the text; the run then reads all of it."""
    dataset = open_dataset_for(config)
    num_bytes = sum(of["bytes"] for of in dataset.metadata["splits"].values())
    assert 3_000 < num_bytes < 10_000 and len(dataset.validation)
    stream = open_stream(config, dataset, 0, lambda part: [part])
    found, _ = next(read_stream(stream, TrainOrder(1, 1, GLOBAL_BATCH, GLOBAL_BATCH), (0, 0)))
    assert torch.equal(found, read_steps(source, tokenizer_dir, 1)[0][0])
    stream.close()


def test_the_part_of_few_long_documents_has_one_for_validation(tmp_path, config):
    """Of ten units, four are prepared; one that holds the document for validation is added."""
    path = tmp_path / "long.jsonl"
    for seed in range(3):
        documents = ["".join(make_documents(6, seed=100 * seed + number)) for number in range(10)]
        path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
        options = {"train_file": [str(path)], "validation_split_percentage": 5}
        splits = open_dataset_for(dataclasses.replace(config, **options)).metadata["splits"]
        assert (splits["validation"]["documents"], splits["train"]["documents"] < 8) == (1, True)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--dataset_dir", "d"], "--streaming requires --train_file or --dataset_name"),
        (["--train_file", "a.txt", "--data_placement", "ram"], "remove --data_placement and"),
        (["--train_file", "a.txt", "--dataloader_num_workers", "2"], "remove --data_placement and"),
    ],
)
def test_options_that_conflict_with_streaming_are_errors(argv, expected):
    with pytest.raises(UserError, match=expected):
        load_config(["--streaming", "--tokenizer_name", "t", *argv])


STREAMED = ["--streaming", "--global_batch_size", "4", "--max_steps", "6", "--logging_steps", "1", "--eval_steps", "0",
            "--save_steps", "4", *PLAIN, "--block_size", str(BLOCK_SIZE)]  # fmt: skip


@pytest.fixture
def arguments(text, tokenizer_dir):
    shape = "n_layer=2,n_head=2,n_embd=32,resid_pdrop=0.1"
    return [*STREAMED, "--train_file", text, "--tokenizer_name", tokenizer_dir, "--config_overrides", shape]


def test_a_streamed_run_resumes_bit_for_bit(tmp_path, train, arguments, small_units, monkeypatch):
    """A resumed run has the losses and weights of one that was never interrupted, with dropout on."""
    monkeypatch.chdir(tmp_path)
    run = train(*arguments, "--output_dir", tmp_path / "run", alone=True)
    weights, events = (run / "model.safetensors").read_bytes(), read_events(run, "train")
    resume = ["--output_dir", tmp_path / "again", "--resume_from_checkpoint", run / "checkpoint-4"]
    train(*arguments, *resume, alone=True)
    again = tmp_path / "again"
    assert (again / "model.safetensors").read_bytes() == weights
    for before, after in zip(events[4:], read_events(again, "train"), strict=True):
        assert (before["loss"], before["grad_norm"]) == (after["loss"], after["grad_norm"])


def test_two_processes_train_on_a_stream_like_one(tmp_path, train, arguments, monkeypatch):
    """The losses agree within 1e-5."""
    monkeypatch.chdir(tmp_path)
    arguments = [str(argument).replace(",resid_pdrop=0.1", "") for argument in arguments]
    one = train(*arguments, "--output_dir", tmp_path / "run", alone=True)
    two = [*arguments, "--output_dir", "two"], tmp_path, ("--multi_gpu", "--num_processes", "2")
    result = launch(*two, ACCELERATE_USE_CPU="true")
    assert result.returncode == 0, result.stderr
    for a, b in zip(read_events(one, "train"), read_events(tmp_path / "two", "train"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
