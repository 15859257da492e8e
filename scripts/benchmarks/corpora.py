"""Prepare a synthetic copy of a large corpus in shards, check that nothing is lost, and compute the real one's time.

python scripts/benchmarks/corpora.py --tokenizer_name openai-community/gpt2 --work_dir runs/corpora --gigabytes 5 \
    --output_file scripts/benchmarks/fineweb_edu_cpu.json

synthetic_corpus.py writes the copy. A process per core prepares shards, as `xargs -P` starts them.
"""

import math
import os
import shlex
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from recipe.arguments import CommandLine
from recipe.benchmark.measure import finish_results, run_python
from recipe.data.documents import SPLITS
from recipe.data.files import read_standard_library
from recipe.data.packed import open_packed_dataset
from recipe.data.tokenizer import read_tokenizer, save_tokenizer
from recipe.environment import count_cpus
from recipe.errors import UserError, run_main

WRITE = Path(__file__).parent / "synthetic_corpus.py"
PREPARE = Path(__file__).parent.parent / "prepare_data.py"
CORES = (2, 16, 64)  # of the machines for which the time is computed
BLOCK_SIZE = 1024
SAMPLE = 50  # documents of each split of each shard whose ids are compared with those of tokenizers
CORPORA = {
    "fineweb_edu": {
        "name": "FineWeb-Edu `sample-10BT`",
        # 14 files of 2.15 GB: huggingface.co/datasets/HuggingFaceFW/fineweb-edu/tree/main/sample/10BT
        "file_bytes": 14 * 2.15e9,
        # 9.67 M documents (huggingface.co/datasets/mikasenghaas/fineweb-edu-10bt-tokenized/viewer) of 4,763 bytes
        # (the mean of huggingface.co/datasets/codelion/fineweb-edu-1B, a random sample of FineWeb-Edu)
        "text_bytes": 9.67e6 * 4_763,
        "tokens": 9_953_989_344,  # in build-nanogpt's shards of it, with an end-of-text id per document
    },
    "common_crawl": {
        "name": "Common Crawl, 128 WET files of CC-MAIN-2024-22",
        # 7.31 TiB (github.com/eugenesiow/LLM-Insights) in 90,000 files (an assumption: 100 segments of 900 files)
        "file_bytes": 128 * 7.31 * 2**40 / 90_000,
        # 2.7 G pages (commoncrawl.org/blog/may-2024-crawl-archive-now-available) of 8,000 bytes (an assumption: gzip
        # reduces text to three eighths)
        "text_bytes": 128 * 2.7e9 / 90_000 * 8_000,
        # 3 bytes per token of GPT-2, an assumption, because half of the text is not English
        "tokens": 128 * 2.7e9 / 90_000 * 8_000 / 3,
    },
}


def main() -> None:
    parser = CommandLine(description="Measure and check the preparation of a synthetic corpus in shards.")
    parser.add_argument("--tokenizer_name", required=True, help="tokenizer folder or Hub id")
    parser.add_argument("--work_dir", required=True, type=Path, help="folder to create and, at the end, delete")
    parser.add_argument("--corpus", choices=list(CORPORA), default="fineweb_edu", help="default: fineweb_edu")
    parser.add_argument("--gigabytes", type=float, default=0.2, help="text to prepare (default: 0.2)")
    parser.add_argument("--num_files", type=int, default=14, help="files that hold it (default: 14)")
    parser.add_argument("--num_shards", type=int, default=64, help="default: 64")
    parser.add_argument("--output_file", type=Path, help="JSON to write")
    args = parser.parse_args()
    if args.work_dir.exists():
        raise UserError(f"{args.work_dir} exists; choose a folder that this program may create and delete")
    work, corpus = args.work_dir.absolute(), CORPORA[args.corpus]
    try:
        tokenizer_file = work / "tokenizer" / "tokenizer.json"
        tokenizer_file.parent.mkdir(parents=True)
        save_tokenizer(read_tokenizer(args.tokenizer_name), tokenizer_file.parent, BLOCK_SIZE)
        options = ("--corpus", args.corpus, "--gigabytes", args.gigabytes, "--num_files", args.num_files)
        run_python(WRITE, *options, "--tokenizer_file", tokenizer_file, "--output_dir", work / "corpus")
        written, measured = np.load(work / "corpus" / "documents.npy"), prepare(work, args.num_shards)
        differences = compare(work / "packed", written, args.num_shards)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    core_seconds = measured["seconds"] * measured["num_processes"] - args.num_shards * measured["start_seconds"]
    measured["text_bytes"] = int(written["bytes"].sum())
    measured["megabytes_per_second_per_core"] = measured["text_bytes"] / 1e6 / core_seconds
    results = {"corpus": args.corpus, "num_files": args.num_files, "num_shards": args.num_shards, "measured": measured}
    results |= {"differences": differences, "computed": compute(corpus, measured)}
    finish_results(results, args.output_file)
    if any(differences.values()):
        raise UserError(f"the prepared documents differ from those written: {differences}")


def prepare(work: Path, num_shards: int) -> dict:
    """Prepare the shards of work/corpus, as many at once as there are cores, and merge them. Returns measurements."""
    (work / "start.txt").write_text("\n".join(read_standard_library())[:1_000_000])
    options = ("--tokenizer_name", work / "tokenizer", "--preprocessing_num_workers", 1)
    start = ("--train_file", work / "start.txt", *options, "--output_dir", work / "start")
    start_seconds, _ = run_python(PREPARE, *start)  # alone, so that it is not too long and the rate not too high
    options = ("--train_file", work / "corpus" / "text", *options, "--output_dir", work / "packed")
    command = shlex.join(map(str, (sys.executable, PREPARE, *options, "--num_shards", num_shards, "--shard_index")))
    line = f"seq 0 {num_shards - 1} | xargs -P {count_cpus()} -I INDEX {command} INDEX"
    before = os.times()
    seconds, peak = run_python("-c", f"import subprocess; subprocess.run({line!r}, shell=True, check=True)")
    after = os.times()
    merge_seconds, _ = run_python(PREPARE, *options, "--num_shards", num_shards, "--merge_shards")
    return {
        "num_processes": count_cpus(),
        "start_seconds": start_seconds,  # of one process, with 1 MB of text
        "seconds": seconds,
        "cpu_seconds": sum(after[2:4]) - sum(before[2:4]),  # user and system, of child processes
        "peak_megabytes_per_process": peak,
        "merge_seconds": merge_seconds,
        "file_bytes": sum(path.stat().st_size for path in (work / "corpus" / "text").iterdir()),
        "prepared_bytes": sum(path.stat().st_size for path in (work / "packed").rglob("*") if path.is_file()),
    }


def compare(directory: Path, written: np.ndarray, num_shards: int) -> dict[str, int]:
    """Compare the documents in a merged dataset with those written. Returns the number of each kind of difference.

    The end of each split of a shard fills no row: its documents are counted, but their text cannot be compared.
    """
    parts = [(directory, split, index, num_shards) for split in SPLITS for index in range(num_shards)]
    by_hash, places = np.argsort(written["hash"]), []
    differences = dict.fromkeys(("unknown", "out_of_order", "wrong_split", "wrong_ids"), 0)
    with ProcessPoolExecutor(count_cpus()) as processes:
        for part, (hashes, wrong_ids) in zip(parts, processes.map(read_part, parts), strict=True):
            found = by_hash[np.searchsorted(written["hash"], hashes, sorter=by_hash) % len(written)]
            places.append(found)
            differences["unknown"] += int((written["hash"][found] != hashes).sum())
            differences["out_of_order"] += int((np.diff(found) <= 0).sum())
            differences["wrong_split"] += int((written["held_out"][found] != (part[1] == "validation")).sum())
            differences["wrong_ids"] += wrong_ids
    differences["doubled"] = sum(map(len, places)) - len(np.unique(np.concatenate(places)))
    splits = open_packed_dataset(directory).metadata["splits"].values()
    for key, expected in (("documents", len(written)), ("bytes", written["bytes"]), ("tokens", written["tokens"])):
        differences[key] = sum(counts[key] for counts in splits) - int(np.sum(expected))
    return differences


def read_part(part: tuple[Path, str, int, int]) -> tuple[np.ndarray, int]:
    """Decode a shard's rows of a split. Returns the hashes of its documents, and how many have unexpected ids.

    Takes only pyarrow and tokenizers, because it checks the recipe's own code.
    """
    directory, split, index, num_shards = part
    stream = pa.memory_map(str(directory / split / f"data-{index:05d}-of-{num_shards:05d}.arrow"))
    column = pa.ipc.open_stream(stream).read_all()["input_ids"]
    rows = column.combine_chunks().flatten().to_numpy().reshape(-1, BLOCK_SIZE + 1)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer" / "tokenizer.json"))
    to_byte = {character: byte for byte, character in bytes_to_unicode().items()}
    token_bytes = {i: bytes(map(to_byte.__getitem__, token)) for token, i in tokenizer.get_vocab().items()}
    ids = np.append(rows[:, :-1], rows[-1:, -1])
    ends = np.flatnonzero(ids == tokenizer.token_to_id("<|endoftext|>"))
    documents = [document[:-1].tolist() for document in np.split(ids, ends + 1)[:-1]]
    texts = [b"".join(map(token_bytes.__getitem__, document)) for document in documents]
    again = tokenizer.encode_batch([text.decode() for text in texts[:SAMPLE]], add_special_tokens=False)
    wrong_ids = sum(encoding.ids != ids for encoding, ids in zip(again, documents[:SAMPLE], strict=True))
    hashes = [int.from_bytes(blake2b(text, digest_size=8).digest(), "big") for text in texts]
    return np.array(hashes, np.uint64), wrong_ids


def compute(corpus: dict, measured: dict) -> dict[int, dict]:
    """Compute what the real corpus takes in as many shards as the largest machine has cores. Prints a Markdown table.

    Merging, which ends with the summary, is one process on any machine.
    Each number of cores gets the seconds, and the megabytes per second that the disk then reads and writes.
    """
    num_shards, rate = max(CORES), measured["megabytes_per_second_per_core"] * 1e6
    prepared_bytes = 2 * corpus["tokens"]
    merge_seconds = measured["merge_seconds"] * prepared_bytes / measured["prepared_bytes"]  # one core reads all rows
    seconds_per_shard = measured["start_seconds"] + corpus["text_bytes"] / num_shards / rate
    computed = {}
    for cores in CORES:
        seconds = math.ceil(num_shards / cores) * seconds_per_shard + merge_seconds
        disk = (corpus["file_bytes"] + prepared_bytes) / 1e6 / seconds
        computed[cores] = {"seconds": seconds, "disk_megabytes_per_second": disk}
    sizes = (
        f"{corpus['text_bytes'] / 1e9:.0f} GB | {corpus['tokens'] / 1e9:.2f} G | {corpus['file_bytes'] / 1e9:.0f} GB"
    )
    times = [f"{v['seconds'] / 60:.1f} min, {v['disk_megabytes_per_second']:.0f} MB/s" for v in computed.values()]
    print("computed | text | tokens | download | prepared | " + " | ".join(f"{cores} cores, disk" for cores in CORES))
    print("--- | " + " | ".join(["---:"] * (4 + len(CORES))))
    print(f"{corpus['name']} | {sizes} | {prepared_bytes / 1e9:.0f} GB | " + " | ".join(times))
    return computed


if __name__ == "__main__":
    run_main(main)
