"""Prepare a synthetic copy of a large corpus in shards, check that nothing is lost, and compute the real one's time.

python scripts/benchmarks/corpora.py --tokenizer_name openai-community/gpt2 --work_dir runs/corpora --gigabytes 5 \
    --output_file scripts/benchmarks/fineweb_edu_cpu.json

The synthetic files have the format, columns and row groups of the real ones, documents as long, and as many tokens per
byte. Their words come from the prose in Python's standard library.
"""

import functools
import gzip
import math
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from hashlib import blake2b
from pathlib import Path

import gigatoken
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from recipe.benchmark.measure import finish_results, run_python
from recipe.command_line import CommandLine
from recipe.data.documents import SPLITS, hash64
from recipe.data.files import read_standard_library
from recipe.data.packed import open_packed_dataset
from recipe.data.shards import shard_dir
from recipe.data.tokenizer import load_tokenizer, save_tokenizer
from recipe.environment import count_cpus
from recipe.errors import UserError, run_main

BLOCK_SIZE, END_OF_TEXT = 1024, "<|endoftext|>"
PREPARE = Path(__file__).parent.parent / "prepare_data.py"
CORES = (2, 16, 64)  # of the machines for which the time is computed
VALIDATION_HASHES = math.floor(0.05 * 2**64)  # documents with such a hash or a lower one are held out (5%)
SAMPLE = 50  # documents of each split of each shard whose ids are compared with those of tokenizers
ROW_GROUP = 1000  # documents: the batch_size of ParquetWriter in github.com/huggingface/datatrove
UNUSUAL_SHARE = 0.05  # of words that a tokenizer has not seen; gives FineWeb-Edu's 4.63 bytes per token of GPT-2
CORPORA = {
    "fineweb_edu": {
        "name": "FineWeb-Edu `sample-10BT`",
        "suffix": ".parquet",
        # 14 files of 2.15 GB: huggingface.co/datasets/HuggingFaceFW/fineweb-edu/tree/main/sample/10BT
        "download_bytes": 14 * 2.15e9,
        "documents": 9_670_000,  # huggingface.co/datasets/mikasenghaas/fineweb-edu-10bt-tokenized/viewer
        "mean_bytes": 4_763,  # of a document in huggingface.co/datasets/codelion/fineweb-edu-1B, a random sample
        "median_share": 0.6,  # of the mean length; an assumption
        "tokens": 9_953_989_344,  # in the shards that build-nanogpt makes of it, with an end-of-text id per document
    },
    "common_crawl": {
        "name": "Common Crawl: 100 WET files of CC-MAIN-2024-22",
        "suffix": ".warc.wet.gz",
        # 7.31 TiB (github.com/eugenesiow/LLM-Insights) in 90,000 files (an assumption: 100 segments of 900 files)
        "download_bytes": 7.31 * 2**40 / 900,
        "documents": 3_000_000,  # of 2.7 billion: commoncrawl.org/blog/may-2024-crawl-archive-now-available
        "mean_bytes": 8_000,  # an assumption: gzip reduces text to three eighths
        "median_share": 0.5,  # an assumption
        "tokens": 8_000_000_000,  # an assumption: 3 bytes per token of GPT-2, because half of the text is not English
    },
}
DOCUMENT = np.dtype([("hash", np.uint64), ("held_out", bool), ("bytes", np.int64), ("tokens", np.int64)])


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
        (work / "tokenizer").mkdir(parents=True)
        save_tokenizer(load_tokenizer(args.tokenizer_name), work / "tokenizer", BLOCK_SIZE)
        written = write_corpus(work / "text", corpus, args.gigabytes * 1e9, args.num_files)
        measured = prepare(work, int(written["bytes"].sum()), args.num_shards)
        differences = compare(work / "packed", written, args.num_shards)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    computed = compute(corpus, measured, args.num_shards)
    results = {"corpus": args.corpus, "num_files": args.num_files, "num_shards": args.num_shards}
    finish_results(
        results | {"measured": measured, "differences": differences, "computed": computed}, args.output_file
    )
    if any(differences.values()):
        raise UserError(f"the prepared documents differ from those written: {differences}")


def write_corpus(folder: Path, corpus: dict, num_bytes: float, num_files: int) -> np.ndarray:
    """Write a corpus. Returns its documents in reading order, `DOCUMENT` [documents]. Needs folder/../tokenizer."""
    folder.mkdir(parents=True)
    write = functools.partial(write_file, folder, corpus, num_bytes / num_files)
    with ProcessPoolExecutor(count_cpus()) as processes:
        return np.concatenate(list(processes.map(write, range(num_files))))


def write_file(folder: Path, corpus: dict, num_bytes: float, number: int) -> np.ndarray:
    tokenizer = gigatoken.Tokenizer(str(folder.parent / "tokenizer" / "tokenizer.json"))
    written, parquet = [], None
    with open(folder / f"{number:03d}_00000{corpus['suffix']}", "wb") as file:
        for texts in make_row_groups(corpus["mean_bytes"], corpus["median_share"], num_bytes, seed=number):
            num_tokens = np.diff(np.asarray(tokenizer.encode_batch(texts, parallel=False).layout.offsets))
            about = ((hash_text(t), hash64(t) <= VALIDATION_HASHES, len(t.encode())) for t in texts)
            written += [(*of_text, count + 1) for of_text, count in zip(about, num_tokens, strict=True)]
            if corpus["suffix"] == ".parquet":
                table = to_table(texts, num_tokens)
                parquet = parquet or pq.ParquetWriter(file, table.schema)
                parquet.write_table(table)
            else:
                file.writelines(gzip.compress(to_warc_record(text)) for text in texts)
        if parquet:
            parquet.close()
    return np.array(written, DOCUMENT)


def make_row_groups(mean_bytes: float, median_share: float, num_bytes: float, seed: int) -> Iterator[list[str]]:
    """Yield documents of about num_bytes in all: words in random order; lengths with a log-normal distribution."""
    prose = " ".join(read_standard_library()).replace("\n", " ")
    words = np.array(" ".join(re.findall(r"(?:[A-Za-z'-]+[,.;:]? ){5,}", prose)).split(), object)
    rng, sigma = np.random.default_rng(seed), math.sqrt(-2 * math.log(median_share))
    median = median_share * mean_bytes / (1 + np.mean([len(word) for word in words]))  # words
    num_documents = math.ceil(num_bytes / mean_bytes)
    for start in range(0, num_documents, ROW_GROUP):
        texts = []
        for length in rng.lognormal(math.log(median), sigma, min(ROW_GROUP, num_documents - start)):
            text = words[rng.integers(len(words), size=10 + int(length))]
            unusual = np.flatnonzero(rng.random(len(text)) < UNUSUAL_SHARE)
            ends = words[rng.integers(len(words), size=len(unusual))]
            text[unusual] = [a[: len(a) // 2 + 1] + b[len(b) // 2 :] for a, b in zip(text[unusual], ends, strict=True)]
            texts.append(" ".join(text).replace(". ", ".\n"))
        yield texts


def hash_text(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def to_table(texts: list[str], num_tokens: np.ndarray) -> pa.Table:
    """Return a row group with FineWeb-Edu's columns."""
    ids = [f"<urn:uuid:{hash_text(text):032x}>" for text in texts]
    urls = [f"https://www.example.org/articles/{name[10:-1]}.html" for name in ids]
    path = "s3://commoncrawl/crawl-data/CC-MAIN-2024-10/segments/1707947474569.64/warc/CC-MAIN-20240224112548.warc.gz"
    columns = {"text": texts, "id": ids, "dump": "CC-MAIN-2024-10", "url": urls, "file_path": path, "language": "en"}
    columns |= {"language_score": 0.97, "token_count": num_tokens, "score": 3.2, "int_score": 3}
    return pa.table({k: [v] * len(texts) if isinstance(v, (str, float, int)) else v for k, v in columns.items()})


def to_warc_record(text: str) -> bytes:
    content = text.encode()
    headers = f"""WARC/1.0
WARC-Type: conversion
WARC-Target-URI: https://www.example.org/{hash_text(text)}.html
WARC-Date: 2024-05-18T01:58:10Z
WARC-Identified-Content-Language: eng
Content-Type: text/plain
Content-Length: {len(content)}\n\n"""
    return headers.replace("\n", "\r\n").encode() + content + b"\r\n\r\n"


def prepare(work: Path, text_bytes: int, num_shards: int) -> dict:
    """Prepare the shards of work/text, as many at once as there are cores, and merge them. Returns measurements."""
    (work / "start.txt").write_text("\n".join(next(make_row_groups(1000, 0.6, 1e6, seed=0))))
    options = ("--tokenizer_name", work / "tokenizer", "--preprocessing_num_workers", 1)
    start_seconds, _ = run_python(
        PREPARE, "--train_file", work / "start.txt", "--output_dir", work / "start", *options
    )
    options = ("--train_file", work / "text", *options, "--output_dir", work / "packed", "--num_shards", num_shards)
    command = shlex.join(map(str, (sys.executable, PREPARE, *options)))
    line = f"seq 0 {num_shards - 1} | xargs -P {count_cpus()} -I INDEX {command} --shard_index INDEX"
    seconds, peak = run_python("-c", f"import subprocess; subprocess.run({line!r}, shell=True, check=True)")
    merge_seconds, _ = run_python(PREPARE, *options, "--merge_shards")
    return {
        "text_bytes": text_bytes,
        "num_processes": count_cpus(),
        "start_seconds": start_seconds,  # of a process, with 1 MB of text
        "seconds": seconds,
        "megabytes_per_second_per_core": text_bytes / 1e6 / (seconds * count_cpus() - num_shards * start_seconds),
        "peak_megabytes_per_process": peak,
        "merge_seconds": merge_seconds,
        "file_bytes": sum(path.stat().st_size for path in (work / "text").iterdir()),
        "prepared_bytes": sum(path.stat().st_size for path in (work / "packed").rglob("*") if path.is_file()),
    }


def compare(directory: Path, written: np.ndarray, num_shards: int) -> dict[str, int]:
    """Compare the documents in a merged dataset with those written. Returns the number of each kind of difference.

    The end of each split of a shard fills no row: its documents are counted, but their text cannot be compared.
    """
    merged, by_hash, places = open_packed_dataset(directory), np.argsort(written["hash"]), []
    differences = dict.fromkeys(("unknown", "out_of_order", "wrong_split", "wrong_ids"), 0)
    with ProcessPoolExecutor(count_cpus()) as processes:
        parts = [(directory, split, index, num_shards) for split in SPLITS for index in range(num_shards)]
        for part, (hashes, wrong_ids) in zip(parts, processes.map(read_part, parts), strict=True):
            found = by_hash[np.searchsorted(written["hash"], hashes, sorter=by_hash) % len(written)]
            places.append(found)
            differences["unknown"] += int((written["hash"][found] != hashes).sum())
            differences["out_of_order"] += int((np.diff(found) <= 0).sum())
            differences["wrong_split"] += int((written["held_out"][found] != (part[1] == "validation")).sum())
            differences["wrong_ids"] += wrong_ids
    differences["doubled"] = sum(map(len, places)) - len(np.unique(np.concatenate(places)))
    for key, expected in (
        ("documents", len(written)),
        *((key, int(written[key].sum())) for key in ("bytes", "tokens")),
    ):
        differences[key] = sum(counts[key] for counts in merged.metadata["splits"].values()) - expected
    return differences


def read_part(part: tuple[Path, str, int, int]) -> tuple[np.ndarray, int]:
    """Decode a shard's rows of a split. Returns the hashes of its documents, and how many have other ids than expected.

    Nothing of the recipe takes part: a table decodes ids, and tokenizers encodes a sample again.
    """
    directory, split, index, num_shards = part
    stream = pa.memory_map(str(directory / split / f"data-{index:05d}-of-{num_shards:05d}.arrow"))
    chunks = pa.ipc.open_stream(stream).read_all()["input_ids"].chunks
    rows = np.concatenate(
        [np.zeros((0, BLOCK_SIZE + 1), int), *(c.flatten().to_numpy().reshape(len(c), -1) for c in chunks)]
    )
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer" / "tokenizer.json"))
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    to_byte = {character: byte for byte, character in bytes_to_unicode().items()}
    table = {i: bytes(map(to_byte.__getitem__, token)) for token, i in tokenizer.get_vocab().items()}
    ids = np.append(rows[:, :-1], rows[-1:, -1])
    documents = [document[:-1].tolist() for document in np.split(ids, np.flatnonzero(ids == end_of_text) + 1)[:-1]]
    texts = [b"".join(map(table.__getitem__, document)).decode() for document in documents]
    again = tokenizer.encode_batch(texts[:SAMPLE], add_special_tokens=False)
    wrong_ids = sum(encoding.ids != document for encoding, document in zip(again, documents))
    return np.array([hash_text(text) for text in texts], np.uint64), wrong_ids


def compute(corpus: dict, measured: dict, num_shards: int) -> list[dict]:
    """Compute, from the measurements, what the real corpus takes. Prints it as a table in Markdown."""
    text_bytes = corpus["documents"] * corpus["mean_bytes"]
    prepared_bytes = corpus["tokens"] * 2 * (1 + 1 / BLOCK_SIZE)
    seconds = measured["start_seconds"] + text_bytes / num_shards / 1e6 / measured["megabytes_per_second_per_core"]
    print(f"Computed: {corpus['name']}, {text_bytes / 1e9:.0f} GB of text, {corpus['tokens'] / 1e9:.2f} B tokens")
    print("| cores | minutes | files (GB) | prepared (GB) | disk (MB/s) |\n|---:|---:|---:|---:|---:|")
    rows = []
    for cores in CORES:
        total = math.ceil(num_shards / cores) * seconds
        rate = (corpus["download_bytes"] + prepared_bytes) / total / 1e6
        sizes = f"{corpus['download_bytes'] / 1e9:.1f} | {prepared_bytes / 1e9:.1f}"
        print(f"| {cores} | {total / 60:.1f} | {sizes} | {rate:.0f} |")
        rows.append(
            {"cores": cores, "seconds": total, "prepared_bytes": prepared_bytes, "disk_megabytes_per_second": rate}
        )
    return rows


if __name__ == "__main__":
    run_main(main)
