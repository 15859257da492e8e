"""Measure data preparation and reading on this machine, each against a baseline in the same run.

pip install tiktoken
python scripts/benchmarks/data.py --tokenizer_name DIR --output_file scripts/benchmarks/data_cpu.json

DIR holds GPT-2's tokenizer.json. The text is synthetic: lines of the Python standard library in random order. Times
of whole commands include the start of the process.
"""

import json
import shutil
import statistics
import tempfile
import time
import timeit
from pathlib import Path

import numpy as np
import psutil
import torch

from recipe.arguments import CommandLine
from recipe.benchmark.measure import finish_results, run_python
from recipe.benchmark.text import write_text
from recipe.data.batches import TrainOrder, build_train_batches
from recipe.data.packed import open_packed_dataset
from recipe.data.tokenizer import load_tokenizer
from recipe.data.writer import PackedWriter
from recipe.environment import count_cpus
from recipe.errors import run_main

SPEED_MEGABYTES = (200, 2000)  # of text in the comparison of speed; the other programs encode the first
MEMORY_MEGABYTES = (50, 500, 2000)  # texts whose preparation's peak memory is compared
WORDS_MEGABYTES = 300  # of text in which hardly a word occurs twice
NUM_TOKENS = 1_000_000_000  # of the large dataset that is opened
PART_TOKENS = 10_000_000  # written at a time

# tiktoken would download its GPT-2 encoding; this is the same one: its pattern with the tokenizer's vocabulary.
TIKTOKEN = """
import json, sys
import numpy as np, tiktoken
from tiktoken_ext.openai_public import r50k_pat_str

text_file, tokenizer_json, num_workers, out = sys.argv[1:]
vocabulary = json.load(open(tokenizer_json, encoding="utf-8"))["model"]["vocab"]
eos_token_id = vocabulary.pop("<|endoftext|>")
visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
others = [byte for byte in range(256) if byte not in visible]
to_byte = {chr(byte): byte for byte in visible} | {chr(256 + n): byte for n, byte in enumerate(others)}
ranks = {bytes(to_byte[c] for c in token): i for token, i in vocabulary.items()}
encoding = tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={})
"""
PROGRAMS = {
    # What a short script does: one document after the other.
    "tiktoken_loop": TIKTOKEN
    + """
with open(text_file, encoding="utf-8") as rows, open(out, "wb") as file:
    for row in rows:
        ids = encoding.encode_ordinary(json.loads(row)["text"])
        ids.append(eos_token_id)
        file.write(np.array(ids, dtype=np.uint16).tobytes())
""",
    # The usual preparation script (after nanoGPT's): datasets.map with tiktoken, Python lists, then a memory map.
    "datasets_map": TIKTOKEN
    + """
import datasets

def encode(row):
    ids = encoding.encode_ordinary(row["text"])
    ids.append(eos_token_id)
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
""",
}


def main() -> None:
    parser = CommandLine(description="Measure data preparation and reading.")
    parser.add_argument("--tokenizer_name", required=True, help="folder that holds GPT-2's tokenizer.json")
    parser.add_argument("--output_file", type=Path, help="JSON to write")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work, tokenizer = Path(folder), args.tokenizer_name
        results = {"speed": measure_speed(work, tokenizer), "memory": measure_memory(work, tokenizer)}
        results["reading"] = measure_reading(work, tokenizer)
    finish_results(results, args.output_file)


def prepare(text: Path, tokenizer: str, out: Path) -> tuple[float, float]:
    script = Path(__file__).parent.parent / "prepare_data.py"
    return run_python(script, "--train_file", text, "--tokenizer_name", tokenizer, "--output_dir", out)


def measure_speed(work: Path, tokenizer: str) -> dict:
    """Time the whole command and other programs in turn, twice each."""
    num_cpus, results = count_cpus(), {}
    for megabytes in SPEED_MEGABYTES:
        text = work / f"speed-{megabytes}.jsonl"
        write_text(text, megabytes)
        seconds: dict[str, list[float]] = {}
        for number in range(2):
            out = work / f"packed-{number}"
            seconds.setdefault("prepare_data", []).append(prepare(text, tokenizer, out)[0])
            shutil.rmtree(out)
            for name, program in PROGRAMS.items() if megabytes == SPEED_MEGABYTES[0] else ():
                arguments = (text, Path(tokenizer) / "tokenizer.json", num_cpus, work / f"{name}-{number}")
                seconds.setdefault(name, []).append(run_python("-c", program, *arguments)[0])
        text.unlink()
        best = {name: min(values) for name, values in seconds.items()}
        ours = best.pop("prepare_data")
        results[megabytes] = {"seconds": seconds, "megabytes_per_second_per_core": megabytes / ours / num_cpus}
        results[megabytes] |= {f"times_as_fast_as_{name}": theirs / ours for name, theirs in best.items()}
    return results


def measure_memory(work: Path, tokenizer: str) -> dict:
    """Measure the peak resident memory of the whole command for texts of several sizes."""
    peaks: dict[str, dict] = {"jsonl": {}, "txt": {}}
    for kind, of_kind in peaks.items():
        for megabytes in MEMORY_MEGABYTES:
            text, out = work / f"memory-{megabytes}.{kind}", work / f"memory-{megabytes}"
            write_text(text, megabytes)
            seconds, peak = prepare(text, tokenizer, out)
            rate = round(megabytes / seconds, 1)
            of_kind[megabytes] = {"peak_megabytes": round(peak), "megabytes_per_second": rate}
            text.unlink()
            shutil.rmtree(out)
        values = [measured["peak_megabytes"] for measured in of_kind.values()]
        of_kind["largest_over_smallest"] = max(values) / min(values)
    text = work / "words.jsonl"
    rng = np.random.default_rng(0)
    with open(text, "w", encoding="utf-8") as file:
        for _ in range(WORDS_MEGABYTES * 250):
            letters = rng.integers(97, 123, (500, 8), dtype=np.uint8)
            letters[:, 7] = 32  # words of seven letters and a space
            file.write(json.dumps({"text": letters.tobytes().decode()}) + "\n")
    peaks["words"] = {WORDS_MEGABYTES: {"peak_megabytes": round(prepare(text, tokenizer, work / "words")[1])}}
    return peaks


def measure_reading(work: Path, tokenizer_name: str) -> dict:
    """Measure opening a large dataset, and a batch from it and from a small one."""
    tokenizer = load_tokenizer(tokenizer_name)
    part = np.random.default_rng(0).integers(0, len(tokenizer) - 1, PART_TOKENS)
    for name, count in (("small", 1_000_000), ("large", NUM_TOKENS)):
        writer = PackedWriter(work / name, name, 1024, len(tokenizer))
        for start in range(0, count, PART_TOKENS):
            writer.splits["train"].add(part[: count - start], PART_TOKENS, np.array([], np.int64))
            writer.commit()
        writer.splits["validation"].add(part[:100_000], 100_000, np.array([100_000]))
        writer.finish(tokenizer, {"source": {}, "fingerprint": name, "whole_sha256": name, "shard": [0, 1]})
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
        "tokens": NUM_TOKENS,
        "open_seconds": open_seconds,
        "open_added_resident_megabytes": added / 2**20,
        "batch_of_32_rows_ms": times,
        "large_over_small": times["large_mmap"] / times["small_mmap"],
        "python_loop_over_mmap": times["python_loop"] / times["small_mmap"],
    }


if __name__ == "__main__":
    run_main(main)
