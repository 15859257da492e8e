"""Write a synthetic corpus with the format of a real one, to try and to measure the preparation of data.

python scripts/benchmarks/synthetic_corpus.py --corpus fineweb_edu --gigabytes 5 --num_files 14 \
    --tokenizer_file DIR/tokenizer.json --output_dir runs/synthetic

fineweb_edu has the columns, row groups, document lengths and tokens per byte of FineWeb-Edu; common_crawl consists of
WET files. The words come from the prose in Python's standard library. OUTPUT_DIR/documents.npy lists the documents in
reading order: hash and bytes of the text, tokens with the end-of-text id, and whether it is to be held out.
"""

import functools
import gzip
import math
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from hashlib import blake2b
from pathlib import Path

import gigatoken
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recipe.arguments import CommandLine
from recipe.data.documents import hash64
from recipe.data.files import read_standard_library
from recipe.environment import count_cpus
from recipe.errors import run_main

ROW_GROUP = 1000  # documents: the batch_size of ParquetWriter in github.com/huggingface/datatrove
UNUSUAL_SHARE = 0.02  # of words that no tokenizer has seen; gives 4.6 bytes per token of GPT-2, like FineWeb-Edu
HELD_OUT_HASHES = math.floor(0.05 * 2**64)  # a document is held out if its hash is not greater: 5%
DOCUMENT = np.dtype([("hash", np.uint64), ("held_out", bool), ("bytes", np.int64), ("tokens", np.int64)])
MEAN_BYTES = {
    "fineweb_edu": 4_763,  # of huggingface.co/datasets/codelion/fineweb-edu-1B, a random sample of it
    "common_crawl": 8_000,  # an assumption: gzip reduces text to three eighths
}
COLUMNS = pa.schema(
    [(name, pa.string()) for name in ("text", "id", "dump", "url", "file_path", "language")]
    + [
        ("language_score", pa.float64()),
        ("token_count", pa.int64()),
        ("score", pa.float64()),
        ("int_score", pa.int64()),
    ]
)
MEDIAN_SHARE = 0.6  # of the mean length, an assumption: the lengths of documents have a log-normal distribution


def main() -> None:
    parser = CommandLine(description="Write a synthetic corpus with the format of a real one.")
    parser.add_argument("--corpus", choices=list(MEAN_BYTES), default="fineweb_edu", help="default: fineweb_edu")
    parser.add_argument("--gigabytes", type=float, default=0.2, help="bytes of text / 1e9 (default: 0.2)")
    parser.add_argument("--num_files", type=int, default=14, help="default: 14")
    parser.add_argument("--tokenizer_file", required=True, help="tokenizer.json that counts tokens")
    parser.add_argument("--output_dir", required=True, type=Path, help="folder to create")
    args = parser.parse_args()
    (args.output_dir / "text").mkdir(parents=True)
    num_bytes = args.gigabytes * 1e9 / args.num_files
    write = functools.partial(write_file, args.output_dir / "text", args.corpus, num_bytes, args.tokenizer_file)
    with ProcessPoolExecutor(count_cpus()) as processes:
        documents = np.concatenate(list(processes.map(write, range(args.num_files))))
    np.save(args.output_dir / "documents.npy", documents)
    print(f"{args.output_dir / 'text'}: {len(documents):,} documents, {documents['bytes'].sum() / 1e9:.2f} GB")


def write_file(folder: Path, corpus: str, num_bytes: float, tokenizer_file: str, number: int) -> np.ndarray:
    """Write one file of about num_bytes of text. Returns its documents, `DOCUMENT` [documents]."""
    tokenizer, is_parquet, written = gigatoken.Tokenizer(tokenizer_file), corpus == "fineweb_edu", []
    with open(folder / f"{number:03d}_00000.{'parquet' if is_parquet else 'warc.wet.gz'}", "wb") as file:
        parquet = pq.ParquetWriter(file, COLUMNS) if is_parquet else None
        for texts in make_row_groups(MEAN_BYTES[corpus], num_bytes, seed=number):
            num_tokens = np.diff(np.asarray(tokenizer.encode_batch(texts, parallel=False).layout.offsets))
            for text, count in zip(texts, num_tokens, strict=True):
                written.append((hash_text(text), hash64(text) <= HELD_OUT_HASHES, len(text.encode()), count + 1))
            if parquet:
                parquet.write_table(to_table(texts, num_tokens))
            else:
                file.writelines(gzip.compress(to_warc_record(text)) for text in texts)
        if parquet:
            parquet.close()
    return np.array(written, DOCUMENT)


def make_row_groups(mean_bytes: float, num_bytes: float, seed: int) -> Iterator[list[str]]:
    """Yield documents of about num_bytes in all: words in random order, lengths with a log-normal distribution."""
    prose = " ".join(read_standard_library()).replace("\n", " ")
    words = np.array(" ".join(re.findall(r"(?:[A-Za-z'-]+[,.;:]? ){5,}", prose)).split(), object)
    rng, sigma = np.random.default_rng(seed), math.sqrt(-2 * math.log(MEDIAN_SHARE))
    median = MEDIAN_SHARE * mean_bytes / (1 + np.mean([len(word) for word in words]))  # words
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
    ids, n = [f"<urn:uuid:{hash_text(text):032x}>" for text in texts], len(texts)
    urls = [f"https://www.example.org/articles/{name[10:-1]}.html" for name in ids]
    path = "s3://commoncrawl/crawl-data/CC-MAIN-2024-10/segments/1707947474569.64/warc/CC-MAIN-20240224-00880.warc.gz"
    columns = [texts, ids, ["CC-MAIN-2024-10"] * n, urls, [path] * n, ["en"] * n]
    columns += [[0.97] * n, num_tokens, [3.2] * n, [3] * n]
    return pa.table(columns, COLUMNS)


def to_warc_record(text: str) -> bytes:
    content, headers = text.encode(), ("WARC/1.0", "WARC-Type: conversion", "WARC-Date: 2024-05-18T01:58:10Z")
    headers += (f"WARC-Target-URI: https://example.org/{hash_text(text)}", "WARC-Identified-Content-Language: eng")
    headers += ("Content-Type: text/plain", f"Content-Length: {len(content)}")
    return "\r\n".join(headers).encode() + b"\r\n\r\n" + content + b"\r\n\r\n"


if __name__ == "__main__":
    run_main(main)
