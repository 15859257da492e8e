"""Measure data preparation and reading on this machine, each against a baseline in the same run.

python scripts/benchmarks/data.py --tokenizer_name openai-community/gpt2 --output_file scripts/benchmarks/data_cpu.json

The text is synthetic: lines of the Python standard library in random order. Times of whole commands include the start
of the process.
"""

import json
import random
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from pathlib import Path

import numpy as np
import psutil
import torch

from recipe.command_line import CommandLine
from recipe.data.batches import TrainOrder, build_train_batches
from recipe.data.files import read_standard_library
from recipe.data.packed import open_packed_dataset
from recipe.data.tokenizer import load_tokenizer
from recipe.data.writer import PackedWriter
from recipe.environment import count_cpus, describe_environment
from recipe.errors import run_main

# The usual preparation script (after nanoGPT's): datasets.map with tiktoken, Python lists, then a memory map.
# tiktoken would download its GPT-2 encoding; this is the same one: its pattern with the tokenizer's merges.
BASELINE = """
import sys
import datasets, numpy as np, tiktoken
from tiktoken_ext.openai_public import r50k_pat_str
from recipe.data.encoder import to_tiktoken
from recipe.data.tokenizer import load_tokenizer

text_file, tokenizer_dir, num_workers, out = sys.argv[1:]
tokenizer = load_tokenizer(tokenizer_dir)
ranks = to_tiktoken(tokenizer)._mergeable_ranks
encoding = tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={})

def encode(row):
    ids = encoding.encode_ordinary(row["text"])
    ids.append(tokenizer.eos_token_id)
    return {"ids": ids, "len": len(ids)}

rows = datasets.load_dataset("json", data_files=text_file, split="train", cache_dir=out + ".cache")
rows = rows.map(encode, remove_columns=["text"], num_proc=int(num_workers))
array = np.memmap(out, dtype=np.uint16, mode="w+", shape=(sum(rows["len"]),))
start = 0
for number in range(64):
    part = np.concatenate(rows.shard(64, number, contiguous=True).with_format("numpy")["ids"])
    array[start : start + len(part)] = part
    start += len(part)
array.flush()
"""


def main() -> None:
    parser = CommandLine(description="Measure data preparation and reading.")
    parser.add_argument("--tokenizer_name", required=True, help="tokenizer folder or Hub id")
    parser.add_argument("--output_file", type=Path, help="JSON to write")
    parser.add_argument("--speed_megabytes", type=int, default=200, help="text for the speed comparison")
    sizes = [50, 500, 2000]
    parser.add_argument("--memory_megabytes", type=int, nargs="+", default=sizes, help="texts for peak memory")
    parser.add_argument("--open_tokens", type=int, default=1_000_000_000, help="tokens of the large dataset to open")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = {
            "command": shlex.join(sys.argv),
            "speed": measure_speed(Path(folder), args.tokenizer_name, args.speed_megabytes),
            "memory": measure_memory(Path(folder), args.tokenizer_name, args.memory_megabytes),
            "reading": measure_reading(Path(folder), args.tokenizer_name, args.open_tokens),
            "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "environment": describe_environment(torch.device("cpu")),
        }
    text = json.dumps(results, indent=2)
    print(text)
    if args.output_file:
        args.output_file.write_text(text + "\n")


def write_text(path: Path, megabytes: int) -> None:
    """Write distinct documents of about 4 kB of source lines, as JSON lines or as one text."""
    lines = [line for text in read_standard_library() for line in text.splitlines() if line.strip()]
    rng, size = random.Random(0), 0
    with open(path, "w", encoding="utf-8") as file:
        while size < megabytes * 1e6:
            text = "\n".join(rng.choices(lines, k=100))
            size += len(text.encode())
            file.write(json.dumps({"text": text}) + "\n" if path.suffix == ".jsonl" else text + "\n")


def run(*command: str | Path) -> tuple[float, float]:
    """Run a Python command. Returns its seconds, and the peak resident megabytes of its largest process."""
    # In a small process between, because a child starts with the peak memory of its parent.
    code = """import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=2)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"""
    started_at = time.perf_counter()
    between = [sys.executable, "-c", code, sys.executable, *map(str, command)]
    result = subprocess.run(between, stdout=subprocess.PIPE, text=True, check=True)
    return time.perf_counter() - started_at, int(result.stdout) / 1024


def prepare(text: Path, tokenizer: str, out: Path) -> tuple[float, float]:
    script = Path(__file__).parent.parent / "prepare_data.py"
    return run(script, "--train_file", text, "--tokenizer_name", tokenizer, "--output_dir", out)


def measure_speed(work: Path, tokenizer: str, megabytes: int) -> dict:
    """Time the whole command and the usual script in turn, twice each, and packing alone."""
    text, num_cpus = work / "speed.jsonl", count_cpus()
    write_text(text, megabytes)
    seconds: dict[str, list[float]] = {"prepare_data": [], "datasets_map": []}
    for number in range(2):
        seconds["prepare_data"].append(prepare(text, tokenizer, work / f"packed-{number}")[0])
        seconds["datasets_map"].append(run("-c", BASELINE, text, tokenizer, str(num_cpus), work / f"map-{number}")[0])
    opened = open_packed_dataset(work / "packed-0")
    parts, started_at = np.array_split(opened.splits["train"].stream(), 8), time.perf_counter()
    writer = PackedWriter(work / "again", "packing alone", opened.block_size, opened.vocab_size)
    for part in parts:
        writer.splits["train"].add(part, len(part), np.array([len(part)]))
        writer.commit()
    packing_seconds = time.perf_counter() - started_at
    writer.discard()
    ours, theirs = min(seconds["prepare_data"]), min(seconds["datasets_map"])
    return {
        "megabytes": megabytes,
        "seconds": seconds,
        "megabytes_per_second_per_core": megabytes / ours / num_cpus,
        "times_as_fast_as_datasets_map": theirs / ours,
        "packing_share": packing_seconds / ours,
    }


def measure_memory(work: Path, tokenizer: str, sizes: list[int]) -> dict:
    """Measure the peak resident memory of the whole command for texts of several sizes."""
    peaks: dict[str, dict] = {"jsonl": {}, "txt": {}}
    for kind, of_kind in peaks.items():
        for megabytes in sizes:
            text, out = work / f"memory-{megabytes}.{kind}", work / f"memory-{megabytes}"
            write_text(text, megabytes)
            seconds, peak = prepare(text, tokenizer, out)
            rate = round(megabytes / seconds, 1)
            of_kind[megabytes] = {"peak_megabytes": round(peak), "megabytes_per_second": rate}
            text.unlink()
            shutil.rmtree(out)
        values = [measured["peak_megabytes"] for measured in of_kind.values()]
        of_kind["largest_over_smallest"] = max(values) / min(values)
    return peaks


def measure_reading(work: Path, tokenizer_name: str, num_tokens: int) -> dict:
    """Measure opening a large dataset, and a batch from it and from a small one."""
    tokenizer, part_tokens = load_tokenizer(tokenizer_name), 10_000_000
    part = np.random.default_rng(0).integers(0, len(tokenizer) - 1, part_tokens)
    for name, count in (("small", 1_000_000), ("large", num_tokens)):
        writer = PackedWriter(work / name, name, 1024, len(tokenizer))
        for start in range(0, count, part_tokens):
            writer.splits["train"].add(part[: count - start], part_tokens, np.array([], np.int64))
            writer.commit()
        writer.splits["validation"].add(part[:100_000], 100_000, np.array([100_000]))
        writer.finish(tokenizer, {}, name)
    process = psutil.Process()
    before, started_at = process.memory_info().rss, time.perf_counter()
    large = open_packed_dataset(work / "large").splits["train"]
    open_seconds, added = time.perf_counter() - started_at, process.memory_info().rss - before
    small = open_packed_dataset(work / "small").splits["train"]
    times = {}
    for name, split, placement in (
        ("large_mmap", large, "mmap"),
        ("small_mmap", small, "mmap"),
        ("small_ram", small, "ram"),
        ("python_loop", small, "python_lists"),
    ):
        batches = build_train_batches(split, TrainOrder(len(split), 1, 32, 32), torch.device("cpu"), 0, placement)
        times[name] = statistics.median(timeit.repeat(batches.__next__, number=1, repeat=300)) * 1000
    return {
        "tokens": num_tokens,
        "open_seconds": open_seconds,
        "open_added_resident_megabytes": added / 2**20,
        "batch_of_32_rows_ms": times,
        "large_over_small": times["large_mmap"] / times["small_mmap"],
        "python_loop_over_mmap": times["python_loop"] / times["small_mmap"],
    }


if __name__ == "__main__":
    run_main(main)
