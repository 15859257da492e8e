"""Measure data preparation and reading, against a program that uses tiktoken on the same text.

pip install tiktoken
python scripts/benchmarks/data.py --tokenizer_name DIR --output_file scripts/benchmarks/data_cpu.json

DIR holds GPT-2's tokenizer.json. The text is synthetic: lines of the Python standard library in random order. Times
are those of whole commands, including their start.
"""

import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from pathlib import Path

import torch

from recipe.arguments import CommandLine
from recipe.data.batches import TrainBatches, TrainOrder, read_rows
from recipe.data.files import read_standard_library
from recipe.data.packed import open_packed_dataset
from recipe.environment import count_cpus, describe_environment
from recipe.errors import run_main

PREPARE = Path(__file__).resolve().parents[1] / "prepare_data.py"
MEGABYTES = (1, 50, 200, 500, 2000)  # of text: 1 shows the start-up; the tiktoken program encodes the 200
ROUNDS = 2  # the better one counts
# What a short script does, with tiktoken's threads. tiktoken would download its GPT-2 encoding; this is the same one.
TIKTOKEN = """
import json, sys
import numpy as np, tiktoken
from tiktoken_ext.openai_public import r50k_pat_str

text_file, tokenizer_json, num_threads, out = sys.argv[1:]
vocabulary = json.load(open(tokenizer_json, encoding="utf-8"))["model"]["vocab"]
eos_token_id = vocabulary.pop("<|endoftext|>")
visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
others = [byte for byte in range(256) if byte not in visible]
to_byte = {chr(byte): byte for byte in visible} | {chr(256 + n): byte for n, byte in enumerate(others)}
ranks = {bytes(to_byte[c] for c in token): i for token, i in vocabulary.items()}
encoding = tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={})
with open(text_file, encoding="utf-8") as rows, open(out, "wb") as file:
    while texts := [json.loads(row)["text"] for row, _ in zip(rows, range(1000))]:
        for ids in encoding.encode_ordinary_batch(texts, num_threads=int(num_threads)):
            file.write(np.array([*ids, eos_token_id], dtype=np.uint16).tobytes())
"""


def main() -> None:
    parser = CommandLine(description="Measure data preparation and reading.")
    parser.add_argument("--tokenizer_name", required=True, help="folder that holds GPT-2's tokenizer.json")
    parser.add_argument("--megabytes", type=int, nargs="+", default=MEGABYTES, help="sizes of text")
    parser.add_argument("--output_file", type=Path, help="JSON to write")
    args = parser.parse_args()
    num_cpus, results = count_cpus(), {}
    with tempfile.TemporaryDirectory() as folder:
        for megabytes in args.megabytes:
            text, out = Path(folder, f"{megabytes}.jsonl"), Path(folder, "packed")
            write_text(text, megabytes)
            ours, theirs, peaks = [], [], []
            for _ in range(ROUNDS):
                shutil.rmtree(out, ignore_errors=True)
                command = [PREPARE, "--train_file", text, "--tokenizer_name", args.tokenizer_name, "--output_dir", out]
                seconds, peak = run_python(*command)
                ours.append(seconds)
                peaks.append(peak)
                if megabytes == 200:
                    tokenizer_json = Path(args.tokenizer_name, "tokenizer.json")
                    theirs.append(run_python("-c", TIKTOKEN, text, tokenizer_json, num_cpus, f"{folder}/ids")[0])
            results[megabytes] = {"seconds": ours, "peak_megabytes": round(max(peaks))}
            results[megabytes]["megabytes_per_second_per_core"] = megabytes / min(ours) / num_cpus
            if theirs:
                results[megabytes] |= {"tiktoken_seconds": theirs, "times_as_fast": min(theirs) / min(ours)}
            print(f"{megabytes} MB: {json.dumps(results[megabytes])}", flush=True)
            text.unlink()
        split, cpu = open_packed_dataset(out, 1024).train, torch.device("cpu")
        batches = TrainBatches(read_rows(split, TrainOrder(len(split), 1, 32, 32), cpu), cpu)
        batch_ms = statistics.median(timeit.repeat(batches.__next__, number=1, repeat=300)) * 1000
    print(f"a batch of 32 rows: {batch_ms:.2f} ms")
    if args.output_file:
        about = {"batch_of_32_rows_ms": batch_ms, "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        about["environment"] = describe_environment(torch.device("cpu"))
        args.output_file.write_text(json.dumps({"sizes": results, **about}, indent=2) + "\n")


def write_text(path: Path, megabytes: float) -> None:
    """Write lines of the Python standard library in random order, as documents of 100 lines: about 4 kB each."""
    lines = [line for text in read_standard_library() for line in text.splitlines() if line.strip()]
    rng, size = random.Random(0), 0
    with open(path, "w", encoding="utf-8") as file:
        while size < megabytes * 1e6:
            text = "\n".join(rng.choices(lines, k=100))
            size += len(text.encode())
            file.write(json.dumps({"text": text}) + "\n")


def run_python(*command: object) -> tuple[float, float]:
    """Run a Python command. Returns its seconds, and the peak resident megabytes of its largest process."""
    # In a small intermediate process, because a child starts with the peak memory of its parent.
    code = """import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=2)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"""
    started_at = time.perf_counter()
    between = [sys.executable, "-c", code, sys.executable, *map(str, command)]
    result = subprocess.run(between, stdout=subprocess.PIPE, text=True, check=True)
    return time.perf_counter() - started_at, int(result.stdout) / 1024


if __name__ == "__main__":
    run_main(main)
