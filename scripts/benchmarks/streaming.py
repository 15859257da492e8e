"""Measure streaming with one and two processes on this machine, where one tokenizes for all and where each does.

python scripts/benchmarks/streaming.py --tokenizer_name DIR --output_file scripts/benchmarks/streaming_cpu.json

DIR holds GPT-2's tokenizer.json. The text is synthetic: lines of the Python standard library in random order. Nothing
is done with the examples. Each process that tokenizes uses its share of the cores, as in training.
"""

import contextlib
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import torch.distributed as dist
from torch import multiprocessing

from recipe.arguments import CommandLine
from recipe.benchmark.measure import finish_results
from recipe.benchmark.text import write_text
from recipe.data.batches import TrainOrder
from recipe.data.encoder import encode_pieces
from recipe.data.prepare import open_pieces
from recipe.data.streaming import SharedWindows, take_examples
from recipe.data.text import TextSource
from recipe.data.tokenizer import read_tokenizer
from recipe.data.windows import Position, TextWindows
from recipe.environment import count_cpus
from recipe.errors import run_main

MEGABYTES, RESUMED_AT = 200, 0.95  # of text, and its share before the resumed batch
BLOCK_SIZE, NUM_ROWS, MICRO_BATCH = 1024, 1024, 16
SKIPPED_WINDOWS, NUM_WINDOWS = 4, 36  # of a million tokens; the first ones are read in advance


def main() -> None:
    parser = CommandLine(description="Measure streaming.")
    parser.add_argument("--tokenizer_name", required=True, help="folder of a tokenizer")
    parser.add_argument("--output_file", type=Path, help="JSON to write")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_text(text := Path(folder) / "text.jsonl", MEGABYTES)
        source = TextSource(train_files=(str(text),))
        results = {"megabytes": MEGABYTES, "tokens": NUM_WINDOWS * NUM_ROWS * BLOCK_SIZE}
        results["processes"] = measure_processes(source, args.tokenizer_name)
        results["first_batch_seconds"] = measure_resume(source, args.tokenizer_name)
    finish_results(results, args.output_file)


def measure_processes(source: TextSource, tokenizer: str) -> dict[str, dict]:
    """Measure each setting twice, in turn."""
    settings = {"1": (1, True), "2, each tokenizes": (2, False), "2, one tokenizes": (2, True)}
    found: dict[str, list] = {name: [] for name in settings}
    for _ in range(2):
        for name, (count, share) in settings.items():
            windows = TextWindows(source, tokenizer, BLOCK_SIZE, NUM_ROWS, Position(), max(1, count_cpus() // count))
            with tempfile.TemporaryDirectory() as folder:
                multiprocessing.spawn(take_steps, (windows, count, share, folder), count)
                of_ranks = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
            seconds, cpu_seconds = np.mean(of_ranks, axis=0) * (1, count)
            rate = round(NUM_WINDOWS * NUM_ROWS * BLOCK_SIZE / seconds)
            found[name].append({"tokens_per_second": rate, "tokenizing_cpu_seconds": round(cpu_seconds, 1)})
    return found


def take_steps(rank: int, windows: TextWindows, count: int, share: bool, folder: str) -> None:
    """Take the examples of all windows and write [seconds, CPU seconds of the process that tokenizes for this one]."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count)

    def gather(part: object) -> list:
        dist.all_gather_object(parts := [None] * count, part)
        return parts

    order = TrainOrder(NUM_ROWS, 1, NUM_ROWS, MICRO_BATCH, 0, rank, count)
    group = (rank, count, gather) if share else (0, 1, lambda part: [part])
    with contextlib.closing(SharedWindows(windows, *group)) as shared:
        batches, (before, after) = take_examples(order, shared.wait_for), ([], [])
        for num_windows, times in ((SKIPPED_WINDOWS, before), (NUM_WINDOWS, after)):
            for _ in range(num_windows * NUM_ROWS // MICRO_BATCH // count):
                next(batches)
            cpu_seconds = sum(psutil.Process(shared.process.pid).cpu_times()[:2]) if shared.process else 0.0
            times.extend((time.perf_counter(), cpu_seconds))
        dist.barrier()
    (Path(folder) / f"{rank}.json").write_text(json.dumps([b - a for a, b in zip(before, after, strict=True)]))


def measure_resume(source: TextSource, tokenizer: str) -> dict[str, list[float]]:
    """Time the first batch at the start and near the end of the text, three times each, in turn."""
    encode, _, pieces = open_pieces(source, read_tokenizer(tokenizer))
    piece, token, positions = 0, 0, []
    for num_pieces, place, batch in encode_pieces(encode, (p for p in pieces if p.split == "train"), count_cpus()):
        piece, token = piece + num_pieces, token + len(batch[0].ids)
        positions.append((Position(0, token, place), Position(piece, token)))
    by_place, by_piece = positions[int(RESUMED_AT * len(positions))]
    starts = {"at_the_start": Position(), "near_the_end": by_place, "near_the_end_without_place": by_piece}
    seconds: dict[str, list[float]] = {name: [] for name in starts}
    for name, start in [*starts.items()] * 3:
        windows = TextWindows(source, tokenizer, BLOCK_SIZE, NUM_ROWS, start, count_cpus())
        order = TrainOrder(NUM_ROWS, 1, NUM_ROWS, MICRO_BATCH, -(-start.token // (NUM_ROWS * BLOCK_SIZE)))
        started_at = time.perf_counter()
        with contextlib.closing(SharedWindows(windows, 0, 1, lambda part: [part])) as shared:
            next(take_examples(order, shared.wait_for))
            seconds[name].append(round(time.perf_counter() - started_at, 2))
    return seconds


if __name__ == "__main__":
    run_main(main)
