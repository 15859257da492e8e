"""The synthetic corpora, and the comparison of a prepared dataset with them."""

import gzip
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import BLOCK_SIZE, load_program

from recipe.data.prepare import prepare_dataset
from recipe.data.shards import merge_shards, shard_dir
from recipe.data.text import TextSource
from recipe.data.tokenizer import read_tokenizer

NUM_SHARDS = 3


@pytest.fixture(scope="module")
def synthetic():
    return load_program("scripts/benchmarks/synthetic_corpus.py")


@pytest.fixture
def prepared(tmp_path, synthetic, tokenizer_dir):
    """What was written to two Parquet files, and the dataset prepared from them in three shards."""
    tokenizer, tokenizer_file = read_tokenizer(str(tokenizer_dir)), str(tokenizer_dir / "tokenizer.json")
    written = [synthetic.write_file(tmp_path, "fineweb_edu", 3e5, tokenizer_file, number) for number in range(2)]
    directory = tmp_path / "packed"
    for index in range(NUM_SHARDS):
        source = TextSource((f"{tmp_path}/*.parquet",), num_shards=NUM_SHARDS, shard_index=index)
        prepare_dataset(source, shard_dir(directory, index, NUM_SHARDS), BLOCK_SIZE, tokenizer)
    merge_shards(directory, NUM_SHARDS)
    return directory, np.concatenate(written)


def test_the_comparison_finds_each_kind_of_difference(prepared, monkeypatch):
    """A sharded preparation is equal to what was written; removed, changed and reordered documents are noticed."""
    corpora = load_program("scripts/benchmarks/corpora.py")
    monkeypatch.setattr(corpora, "BLOCK_SIZE", BLOCK_SIZE)
    monkeypatch.setattr(corpora, "ProcessPoolExecutor", ThreadPoolExecutor)
    directory, written = prepared
    assert not any(corpora.compare(directory, written, NUM_SHARDS).values())
    assert corpora.compare(directory, written[1:], NUM_SHARDS)["documents"] == 1
    changed = written.copy()
    changed["hash"][0] += 1
    assert corpora.compare(directory, changed, NUM_SHARDS)["unknown"] == 1
    changed = written.copy()
    changed["held_out"] ^= True
    assert corpora.compare(directory, changed, NUM_SHARDS)["wrong_split"] > len(written) / 2
    assert corpora.compare(directory, written[::-1].copy(), NUM_SHARDS)["out_of_order"] > len(written) / 2


def test_the_lengths_of_documents_are_those_of_the_corpus(synthetic):
    """The mean is within 10% of that of FineWeb-Edu, and half of the documents are much shorter."""
    texts = [text for group in synthetic.make_row_groups(4763, 4e6, seed=0) for text in group]
    lengths = np.array([len(text) for text in texts])
    assert len(set(texts)) == len(texts)
    assert lengths.mean() == pytest.approx(4763, rel=0.1)
    assert np.median(lengths) < 0.7 * 4763


def test_parquet_files_have_the_columns_and_row_groups_of_fineweb_edu(tmp_path, synthetic, tokenizer_dir):
    """The columns are those on the dataset's card, and a row group holds 1,000 documents."""
    documents = synthetic.write_file(tmp_path, "fineweb_edu", 1001 * 4763, str(tokenizer_dir / "tokenizer.json"), 0)
    file = pq.ParquetFile(tmp_path / "000_00000.parquet")
    names = "text id dump url file_path language language_score token_count score int_score"
    assert file.schema_arrow.names == names.split()
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [1000, 1]
    table = file.read(["text", "token_count"])
    encoding = read_tokenizer(str(tokenizer_dir)).backend_tokenizer.encode(table["text"][0].as_py())
    assert table["token_count"][0].as_py() == len(encoding.ids) == documents["tokens"][0] - 1


def test_a_wet_record_is_compressed_on_its_own(tmp_path, synthetic, tokenizer_dir):
    """The header states the length of the text in bytes, and lines of the header end as WARC prescribes."""
    text = "naïve 猫\nsecond line"
    header, _, rest = synthetic.to_warc_record(text).partition(b"\r\n\r\n")
    assert header.startswith(b"WARC/1.0\r\nWARC-Type: conversion\r\n")
    assert rest == text.encode() + b"\r\n\r\n"
    assert header.endswith(b"Content-Length: %d" % len(text.encode()))
    synthetic.write_file(tmp_path, "common_crawl", 1e5, str(tokenizer_dir / "tokenizer.json"), 0)
    content = (tmp_path / "000_00000.warc.wet.gz").read_bytes()
    assert gzip.decompress(content).count(b"WARC/1.0\r\n") == content.count(b"\x1f\x8b\x08") > 10
