"""Streaming: each row of a unit once per epoch, in an order that any number of processes can resume anywhere."""

import errno
import itertools
import json
import os
import resource
import signal
import socket
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import psutil
import pytest
import torch
from corpora import encode_plainly, start_program, write_jsonl
from helpers import BLOCK_SIZE, PLAIN, TINY, launch, make_documents, read_weights, values_of
from hub_repository import File, Repository

from recipe.command_line import load_config
from recipe.data.batches import TrainBatches, TrainOrder, row_shift
from recipe.data.cache import open_dataset_for
from recipe.data.pack import Encoding, Job
from recipe.data.read import Report, list_units, read_unit
from recipe.data.source import TextSource
from recipe.data.stream import TextStream, open_stream, read_stream
from recipe.errors import UserError

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
    texts = [text * (1 + 5 * (number % 9 == 0)) for number, text in enumerate(make_documents(60))]
    return write_jsonl(tmp_path_factory.mktemp("stream") / "a.jsonl", texts)


@pytest.fixture
def source(text, small_units):
    return TextSource((text,), validation_split_percentage=20.0)


@pytest.fixture
def unit_rows(source, tokenizer_dir):
    """The training rows of each unit, as they would be alone."""
    rows = []
    for unit in list_units(source):
        texts = [text for split, text in read_unit(source, unit, Report()) if split == "train"]
        ids = encode_plainly(tokenizer_dir, texts)
        rows.append([tuple(ids[i : i + BLOCK_SIZE + 1]) for i in range(0, len(ids) - BLOCK_SIZE, BLOCK_SIZE)])
    counts = list(map(len, rows))
    assert len(counts) > 10 and 0 in counts and max(counts) > 6
    return rows


@pytest.fixture
def open_streams(source, tokenizer):
    """Open the stream of each process of a run. The processes are threads, which gather from each other."""

    def start(count=1, seed=1, hosts=None, source=source) -> list[TextStream]:
        parts = [None] * count
        barrier = threading.Barrier(count)
        here = threading.local()
        job = Job(source, "", Encoding.of(tokenizer), ("train",), is_temporary=True)
        dataset = SimpleNamespace(block_size=BLOCK_SIZE, vocab_size=len(tokenizer))

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

    return start


def batches_of(streams, position=(0, 0), micro_batch_size=3, seed=1, shift_below=1) -> list[TrainBatches]:
    """Return the batches of each process, which fetches one ahead."""
    options = seed, GLOBAL_BATCH, micro_batch_size
    orders = [TrainOrder(1, *options, 0, rank, len(streams), shift_below) for rank in range(len(streams))]
    readers = [read_stream(stream, order, position) for stream, order in zip(streams, orders, strict=True)]
    return [TrainBatches(reader, torch.device("cpu")) for reader in readers]


@pytest.fixture
def read_steps(open_streams):
    """Return the rows of each step from a position, and the position after it.

    Each process takes its part of a step, and the beginning of the next, before the following process does.
    """

    def read(num_steps, position=(0, 0), micro_batch_size=3, num_processes=1, seed=1, shift_below=1):
        processes = batches_of(open_streams(num_processes, seed), position, micro_batch_size, seed, shift_below)
        micro_steps = GLOBAL_BATCH // micro_batch_size // num_processes
        steps = []
        for _ in range(num_steps):
            taken = [[next(batches) for _ in range(micro_steps)] for batches in processes]
            pairs = [pair for of_all in zip(*taken, strict=True) for pair in of_all]
            rows = torch.cat([torch.cat([inputs, targets[:, -1:]], dim=1) for inputs, targets in pairs])
            assert len({batches.position for batches in processes}) == 1
            steps.append((rows, processes[0].position))
        for batches in processes:
            batches.close()
        return steps

    return read


# ------------------------------------------------------------------ order


def cut_later(rows: list[tuple], shift: int) -> list[tuple]:
    """Return rows that begin some tokens later than those of a unit, but for the last: no text follows it."""
    tokens = [token for row in rows for token in row[:-1]]
    starts = range(shift, len(tokens) - BLOCK_SIZE, BLOCK_SIZE)
    return [tuple(tokens[start : start + BLOCK_SIZE + 1]) for start in starts] + rows[-1:]


def test_each_row_of_a_unit_comes_once_per_epoch(read_steps, unit_rows):
    """All rows of one unit, shuffled, then those of another; another order for another seed and in the next epoch.

    There, the rows begin elsewhere.
    """
    num_rows = sum(map(len, unit_rows))
    shift = int(row_shift(np.array([1]), BLOCK_SIZE)[0])
    later = [cut_later(rows, shift) for rows in unit_rows]
    streams = {}
    for seed in (1, 2):
        steps = read_steps(2 * num_rows // GLOBAL_BATCH + 1, seed=seed, shift_below=BLOCK_SIZE)
        streams[seed] = [tuple(row) for rows, _ in steps for row in rows.tolist()]
    orders = []
    for seed, first, expected in ((1, 0, unit_rows), (1, num_rows, later), (2, 0, unit_rows)):
        by_row = {row: number for number, rows in enumerate(expected) for row in rows}
        found = itertools.groupby(streams[seed][first : first + num_rows], key=by_row.__getitem__)
        groups = {number: list(rows) for number, rows in found}
        assert {number: sorted(rows) for number, rows in groups.items()} == {
            number: sorted(rows) for number, rows in enumerate(expected) if rows
        }
        orders.append(list(groups))
    assert shift > 0
    assert orders[1] not in (orders[0], sorted(orders[1]))
    assert orders[2] != orders[0]
    assert streams[1][:num_rows] != [row for number in orders[0] for row in unit_rows[number]]


def test_a_stream_resumes_at_any_step_on_any_number_of_processes(read_steps, unit_rows):
    """Bit for bit, also in the second epoch, whose rows begin elsewhere.

    Steps span several units and units without rows; one process may be a step ahead of the others.
    """
    whole = read_steps(9, shift_below=BLOCK_SIZE)
    assert whole[3][1][0] < len(unit_rows) < whole[6][1][0]  # where two of the resumes below begin
    assert max(after[0] - before[0] for (_, before), (_, after) in itertools.pairwise(whole)) > 2
    for first, micro_batch_size, num_processes in ((0, 24, 1), (0, 3, 2), (0, 2, 3), (4, 3, 2), (7, 6, 2)):
        position = tuple(json.loads(json.dumps(whole[first - 1][1]))) if first else (0, 0)
        found = read_steps(2, position, micro_batch_size, num_processes, shift_below=BLOCK_SIZE)
        for (rows, after), (expected, expected_after) in zip(found, whole[first:], strict=False):
            assert torch.equal(rows, expected) and after == expected_after


# ------------------------------------------------------------------ processes and folders


def test_a_stream_has_a_bounded_number_of_files(open_streams, folders):
    processes = batches_of(open_streams(2))
    counts = []
    for _ in range(40):
        for batches in processes:
            inputs, targets = next(batches)
            assert torch.equal(inputs[:, 1:], targets[:, :-1])
        counts.append(len(list(folders()[0].rglob("train-*.bin"))))
    assert processes[0].position[0] > 30 and max(counts) < 20
    for batches in processes:
        batches.close()


def test_a_machine_tokenizes_once(open_streams, folders):
    """Machines may have different numbers of processes, and a scheduler may deal the ranks out in turn."""
    streams = open_streams(5, hosts="abaaa")
    assert [stream.workers is not None for stream in streams] == [True, True, False, False, False]
    assert [stream.folder == streams[0].folder for stream in streams] == [True, False, True, True, True]
    assert len(folders()) == 2
    rows = [stream.window(0)[np.arange(1)].tolist() for stream in streams if len(streams[0].window(0))]
    assert all(row == rows[0] for row in rows)
    for stream in streams:
        stream.close()


@pytest.mark.parametrize("state", ["idle", "tokenizing"])
def test_nothing_remains_of_a_killed_owner(tmp_path, text, tokenizer_dir, folders, state):
    """Its processes end and its folder disappears, even in the middle of a unit."""
    if state == "tokenizing":
        text = write_jsonl(tmp_path / "long.jsonl", make_documents(60) * 300)  # takes about five seconds
    owner = start_program("stream_owner.py", text, tokenizer_dir, state)
    assert owner.stdout.readline() == "started\n" and folders()
    workers = psutil.Process(owner.pid).children()
    os.killpg(owner.pid, signal.SIGKILL)
    owner.communicate()
    assert workers and not psutil.wait_procs(workers, timeout=30)[1]
    assert not folders()


def error_of(stream: TextStream) -> str:
    with pytest.raises(UserError) as caught:
        for number in range(100):
            stream.window(number)
    stream.close()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_unreadable_text_ends_all_processes_of_the_machine(tmp_path, open_streams):
    """The one that tokenizes names the file."""
    path = tmp_path / "broken.jsonl"
    write_jsonl(path, make_documents(50))
    path.write_text(path.read_text() + "{")
    streams = open_streams(2, source=TextSource((str(path),)))
    assert "broken.jsonl" in error_of(streams[0])
    assert error_of(streams[1])


def test_the_end_of_a_tokenizing_process_ends_the_run(open_streams):
    (stream,) = open_streams()
    for process in stream.workers.processes:
        process.kill()
    assert error_of(stream)


def test_a_full_disk_names_the_variable_of_the_folder(open_streams, monkeypatch):
    """For the folder itself, and for a unit in it."""

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "mkdtemp", fail)
        with pytest.raises(UserError, match="TMPDIR"):
            open_streams()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))  # of the process that tokenizes
    try:
        (stream,) = open_streams()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "TMPDIR" in error_of(stream)


# ------------------------------------------------------------------ runs


@pytest.fixture
def streamed(tmp_path, text, tokenizer_dir, hub, monkeypatch):
    """Options of a run on a dataset of the Hub, in several files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.endpoint)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    lines = Path(text).read_bytes().splitlines(keepends=True)
    content = {f"{number}.jsonl": File(b"".join(lines[number::6]), False) for number in range(6)}
    hub.repositories["datasets/org/data"] = repository = Repository(False)
    repository.write_commit("main", None, "", content)
    options = ["--global_batch_size", 4, "--max_steps", 6, "--logging_steps", 1, "--eval_steps", 0, "--save_steps", 4]
    data = ["--streaming", "--dataset_name", "org/data", "--validation_split_percentage", 20]
    return [*data, *options, *TINY, *PLAIN, "--tokenizer_name", tokenizer_dir, "--cache_dir", tmp_path / "cache"]


def test_a_part_of_a_streamed_text_is_prepared(streamed, unit_rows, small_units):
    """From four units of six; the run then reads all of them."""
    config = load_config([*map(str, streamed), "--seed", "1"])[0]
    dataset = open_dataset_for(config)
    num_rows = sum(map(len, unit_rows))
    assert 0.3 * num_rows < len(dataset.train) < 0.9 * num_rows and len(dataset.validation)
    stream = open_stream(config, dataset, 0, lambda part: [part])
    assert len(stream.units) == 6
    assert 0.8 * num_rows < sum(len(stream.window(number)) for number in range(6)) < 1.1 * num_rows
    stream.close()


def test_a_local_dataset_is_not_streamed(tmp_path, streamed, train):
    """It would take more time, and hardly less space."""
    (tmp_path / "folder").mkdir()
    write_jsonl(tmp_path / "folder" / "a.jsonl", make_documents(9))
    with pytest.raises(UserError, match="two bytes a token"):
        train(*streamed, "--dataset_name", "folder", "--output_dir", tmp_path / "run", alone=True)


def test_two_processes_continue_a_streamed_run_of_one(train, streamed, tmp_path):
    """The losses are those of one process that continues it, which are those of a run without a stop, bit for bit."""
    run = train(*streamed, "--output_dir", tmp_path / "run", alone=True)
    resume = ["--resume_from_checkpoint", run / "checkpoint-4"]
    train(*streamed, *resume, "--output_dir", tmp_path / "again", alone=True)
    assert read_weights(tmp_path / "again") == read_weights(run)
    launcher = ("--multi_gpu", "--num_processes", "2")
    result = launch([*streamed, *resume, "--output_dir", "two"], tmp_path, launcher, ACCELERATE_USE_CPU="true")
    assert result.returncode == 0, result.stderr
    assert values_of(tmp_path / "two", "loss") == pytest.approx(values_of(run, "loss", after=4), abs=1e-5)
