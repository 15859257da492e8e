"""Measure data preparation and reading on this machine, each against a baseline in the same run.

python scripts/benchmark_data.py --tokenizer_name openai-community/gpt2 --output_file scripts/benchmarks/data_cpu.json

Text is synthetic: lines of the Python standard library in random order. Every whole-command figure is a process of
its own, start-up included.
"""

import json
import random
import resource
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from recipe.command_line import CommandLine
from recipe.data.batches import TrainOrder, build_train_batches
from recipe.data.packed import open_packed_dataset
from recipe.data.packing import PackedWriter
from recipe.data.standard_library import read_standard_library
from recipe.data.tokenizer import load_tokenizer
from recipe.environment import describe_environment
from recipe.errors import run_main

# The usual preparation script (after nanoGPT's): datasets.map with tiktoken, Python lists, then a memory map.
# tiktoken's own encoding of GPT-2 needs a download; this is the same one, its pattern with the tokenizer's merges.
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
    parser.add_argument(
        "--memory_megabytes", type=int, nargs="+", default=[50, 500, 2000], help="texts for peak memory"
    )
    parser.add_argument("--open_tokens", type=int, default=1_000_000_000, help="tokens of the large dataset to open")
    args = parser.parse_args()
    results = {"command": shlex.join(sys.argv), "finished_at": None}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        results["speed"] = measure_speed(work, args.tokenizer_name, args.speed_megabytes)
        results["memory"] = measure_memory(work, args.tokenizer_name, args.memory_megabytes)
        results["reading"] = measure_reading(work, args.tokenizer_name, args.open_tokens)
    results["finished_at"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    results["environment"] = describe_environment(torch.device("cpu"))
    text = json.dumps(results, indent=2)
    print(text)
    if args.output_file:
        args.output_file.write_text(text + "\n")


def write_text(path: Path, megabytes: int) -> None:
    """JSON lines, or one text, of documents of about 4 kB of source lines, different ones."""
    lines = [line for text in read_standard_library() for line in text.splitlines() if line.strip()]
    rng, size = random.Random(0), 0
    with open(path, "w", encoding="utf-8") as file:
        while size < megabytes * 1e6:
            text = "\n".join(rng.choices(lines, k=100))
            size += len(text.encode())
            file.write(json.dumps({"text": text}) + "\n" if path.suffix == ".jsonl" else text + "\n")


def run(command: list[str]) -> tuple[float, float]:
    """Seconds of a process, and the peak resident megabytes of the largest of its processes."""
    started_at = time.perf_counter()
    code = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=2); " \
           "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"  # fmt: skip
    result = subprocess.run([sys.executable, "-c", code, *command], stdout=subprocess.PIPE, text=True, check=True)
    return time.perf_counter() - started_at, int(result.stdout) / 1024


def prepare_command(text: Path, tokenizer: str, out: Path) -> list[str]:
    script = Path(__file__).parent / "prepare_data.py"
    return [sys.executable, str(script), "--train_file", str(text), "--tokenizer_name", tokenizer,
            "--output_dir", str(out)]  # fmt: skip


def measure_speed(work: Path, tokenizer: str, megabytes: int) -> dict:
    """The whole command against the usual script, in turn, twice each; and the share of packing."""
    text = work / "speed.jsonl"
    write_text(text, megabytes)
    num_cpus = int(describe_environment(torch.device("cpu"))["num_cpus"])
    seconds: dict[str, list[float]] = {"prepare_data": [], "datasets_map": []}
    for number in range(2):
        seconds["prepare_data"].append(run(prepare_command(text, tokenizer, work / f"packed-{number}"))[0])
        baseline = [sys.executable, "-c", BASELINE, str(text), tokenizer, str(num_cpus), str(work / f"map-{number}")]
        seconds["datasets_map"].append(run(baseline)[0])
    opened = open_packed_dataset(work / "packed-0")
    stream, started_at = opened.splits["train"].stream(), time.perf_counter()
    writer = PackedWriter(work / "again", "packing alone", opened.block_size, opened.vocab_size)
    for part in np.array_split(stream, 8):
        writer.splits["train"].add(part, len(part), np.array([len(part)]))
        writer.commit(0)
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
    """Peak resident memory of the whole command for texts of several sizes."""
    peaks = {}
    for kind in ("jsonl", "txt"):
        peaks[kind] = {}
        for megabytes in sizes:
            text, out = work / f"memory-{megabytes}.{kind}", work / f"memory-{megabytes}"
            write_text(text, megabytes)
            seconds, peak = run(prepare_command(text, tokenizer, out))
            rate = round(megabytes / seconds, 1)
            peaks[kind][megabytes] = {"peak_megabytes": round(peak), "megabytes_per_second": rate}
            text.unlink()
            shutil.rmtree(out)
        values = [peaks[kind][megabytes]["peak_megabytes"] for megabytes in sizes]
        peaks[kind]["largest_over_smallest"] = max(values) / min(values)
    return peaks


def measure_reading(work: Path, tokenizer_name: str, num_tokens: int) -> dict:
    """Opening a large dataset, and the time of a batch from it, from a small one, and built as tutorials do."""
    tokenizer = load_tokenizer(tokenizer_name)
    rng = np.random.default_rng(0)
    part = rng.integers(0, len(tokenizer) - 1, 10_000_000)
    folders = {}
    for name, count in (("small", 1_000_000), ("large", num_tokens)):
        folders[name] = work / name
        writer = PackedWriter(folders[name], name, 1024, len(tokenizer))
        for start in range(0, count, len(part)):
            writer.splits["train"].add(part[: count - start], len(part), np.array([], np.int64))
            writer.commit(0)
        writer.splits["validation"].add(part[:100_000], 100_000, np.array([100_000]))
        writer.finish(tokenizer, {}, name)
    before, started_at = _resident_megabytes(), time.perf_counter()
    large = open_packed_dataset(folders["large"]).splits["train"]
    open_seconds, added = time.perf_counter() - started_at, _resident_megabytes() - before
    small = open_packed_dataset(folders["small"]).splits["train"]
    stream, device = small.stream(), torch.device("cpu")

    def batches(split, placement):
        return build_train_batches(split, TrainOrder(len(split), 1, 32, 32), device, placement=placement)

    from_large, from_small, from_ram = batches(large, "mmap"), batches(small, "mmap"), batches(small, "ram")

    def python_loop():  # one sample at a time, lists of ids, as in many tutorials
        inputs = []
        for _ in range(32):
            start = random.randrange(len(stream) - 1025)
            inputs.append(torch.tensor([int(token) for token in stream[start : start + 1025]]))
        return torch.stack(inputs)

    times = {
        "large_mmap": _median_ms(lambda: next(from_large)),
        "small_mmap": _median_ms(lambda: next(from_small)),
        "small_ram": _median_ms(lambda: next(from_ram)),
        "python_loop": _median_ms(python_loop, 20),
    }
    batches_of_4 = build_train_batches(large, TrainOrder(len(large), 1, 4, 4), device)
    model = GPT2LMHeadModel(GPT2Config(n_layer=6, n_head=6, n_embd=384, vocab_size=50304))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    fetch_ms, step_ms = [], []
    for _ in range(6):  # the first is a warm-up
        started_at = time.perf_counter()
        inputs, _ = next(batches_of_4)
        fetched_at = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16):
            model(inputs, labels=inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        fetch_ms.append((fetched_at - started_at) * 1000)
        step_ms.append((time.perf_counter() - started_at) * 1000)
    return {
        "tokens": num_tokens,
        "open_seconds": open_seconds,
        "open_added_resident_megabytes": added,
        "batch_of_32_rows_ms": times,
        "large_over_small": times["large_mmap"] / times["small_mmap"],
        "python_loop_over_mmap": times["python_loop"] / times["small_mmap"],
        "loader_share_of_a_step": {
            "parameters": model.num_parameters(),
            "batch": "4 rows of 1,024 tokens",
            "step_ms": statistics.median(step_ms[1:]),
            "share": statistics.median(fetch_ms[1:]) / statistics.median(step_ms[1:]),
        },
    }


def _resident_megabytes() -> float:
    status = Path("/proc/self/status")
    if not status.is_file():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return int(status.read_text().split("VmRSS:")[1].split()[0]) / 1024


def _median_ms(function: Callable[[], object], repeats: int = 300) -> float:
    durations = []
    for _ in range(repeats):
        started_at = time.perf_counter()
        function()
        durations.append(time.perf_counter() - started_at)
    return statistics.median(durations) * 1000


if __name__ == "__main__":
    run_main(main)
