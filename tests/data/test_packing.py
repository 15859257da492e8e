"""A packed dataset holds the ids of its text, and rows of it hold every token once."""

import json
import shutil
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
from corpora import all_rows, encode_plainly, read, write_jsonl, write_parquet, write_text
from helpers import BLOCK_SIZE, PLAIN, TINY, VOCAB_SIZE, make_documents, read_events, shard_of
from tokenizers import Tokenizer, models

from recipe.command_line import load_config
from recipe.config import SPLITS
from recipe.data.cache import open_dataset_for
from recipe.data.packed import COUNTS, PackedSplit, TokenWriter, open_packed_dataset
from recipe.data.prepare import prepare_dataset
from recipe.data.read import list_units
from recipe.data.source import TextSource
from recipe.data.tokenizer import TextTokenizer, count_token_bytes, train_tokenizer
from recipe.errors import UserError


def ids_in(directory: Path, split: str) -> np.ndarray:
    """Return the ids of a split as `datasets` reads them."""
    return datasets.load_from_disk(str(directory))[split].with_format("numpy")["input_ids"][:]


def packed_from(kind: str, folder: Path) -> TextSource:
    text = "".join(make_documents(200)) + " <|endoftext|> is text\n"
    if kind == "documents":
        return TextSource((write_jsonl(folder / "a.jsonl", make_documents(300)),))
    validation = (write_text(folder / "b.txt", text),) if kind == "validation file" else ()
    return TextSource((write_text(folder / "a.txt", text),), validation)


@pytest.mark.parametrize("kind", ["documents", "one text", "validation file"])
def test_rows_and_counts_are_those_of_a_plain_encoding(tmp_path, small_units, tokenizer_dir, tokenizer, kind):
    """Row i holds tokens [i*T, i*T + T + 1) of the stream that `datasets` reads, whatever T is."""
    source = packed_from(kind, tmp_path)
    metadata = prepare_dataset(source, tmp_path / "d", tokenizer)
    assert len(list_units(source)) > 9
    for split in SPLITS:
        texts = [text for of, text in read(source) if of == split]
        stream = encode_plainly(tokenizer_dir, texts)
        assert ids_in(tmp_path / "d", split).tolist() == stream
        for size in (1, 8, BLOCK_SIZE, len(stream) - 1):
            rows = [stream[i : i + size + 1] for i in range(0, len(stream) - size, size)]
            opened = PackedSplit(tmp_path / "d" / split, metadata["splits"][split]["chunks"], size, VOCAB_SIZE)
            np.testing.assert_array_equal(all_rows(opened), rows)
        counts = [metadata["splits"][split][name] for name in ("documents", "tokens", "bytes", "used_ids")]
        assert counts == [len(texts), len(stream), len("".join(texts).encode()), len(set(stream))]


@pytest.mark.parametrize("batch_tokens", [1, 100, 10**6])
@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, "uint16"), (65_537, "int32")])
def test_every_token_is_a_target_exactly_once(tmp_path, monkeypatch, batch_tokens, vocab_size, dtype):
    """In one chunk or many. Ids take two bytes if the vocabulary allows it."""
    monkeypatch.setattr("recipe.data.packed.BATCH_TOKENS", batch_tokens)
    writer = TokenWriter(tmp_path / "a.arrow", vocab_size)
    stream = np.arange(vocab_size - 1000, vocab_size)
    for piece in np.split(stream, [3, 4, 90, 500, 501]):
        writer.write(piece)
    writer.close()
    split = PackedSplit(tmp_path, [["a.arrow", *chunk] for chunk in writer.chunks], 8, vocab_size)
    assert len(split) == 999 // 8 and split.chunks[0].dtype == dtype
    assert (len(split.chunks) > 1) == (batch_tokens < 1000)
    np.testing.assert_array_equal(all_rows(split)[:, 1:].reshape(-1), stream[1 : 1 + 124 * 8])
    np.testing.assert_array_equal(all_rows(split)[:, :-1].reshape(-1), stream[: 124 * 8])
    with pa.OSFile(str(tmp_path / "a.arrow")) as file:
        column = pa.ipc.open_stream(file).read_all().column(0)
    assert column.type == dtype
    np.testing.assert_array_equal(column, stream)


# ------------------------------------------------------------------ text that others have tokenized

PARTS = {"train": slice(20, None), "validation": slice(20)}


@pytest.mark.parametrize(("kind", "write"), [("jsonl", write_jsonl), ("parquet", write_parquet)])
def test_token_ids_are_packed_like_their_text(tmp_path, small_units, documents, tokenizer_dir, tokenizer, kind, write):
    backend = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    ids, counts = [encoding.ids for encoding in backend.encode_batch(documents)], {}
    for name, rows in (("text", documents), ("ids", ids)):
        train, validation = (write(tmp_path / f"{split}.{kind}", rows[part]) for split, part in PARTS.items())
        source = TextSource((train,), (validation,))
        splits = prepare_dataset(source, tmp_path / name, tokenizer)["splits"]
        counts[name] = [splits[split][key] for split in SPLITS for key in (*COUNTS, "used_ids")]
    assert len(list_units(source)) > 9
    assert counts["text"] == counts["ids"]
    for split in SPLITS:
        np.testing.assert_array_equal(ids_in(tmp_path / "text", split), ids_in(tmp_path / "ids", split))


def test_a_document_ends_once(tmp_path, tokenizer):
    """Ids that already end with the end-of-text id get no second one."""
    end = tokenizer.eos_token_id
    rows = [[5, 6], [7, 8, end], [9, end, end], []]
    source = TextSource((write_jsonl(tmp_path / "a.jsonl", rows),), (write_jsonl(tmp_path / "b.jsonl", [[1, 2]]),))
    prepare_dataset(source, tmp_path / "d", tokenizer)
    assert ids_in(tmp_path / "d", "train").tolist() == [5, 6, end, 7, 8, end, 9, end, end, end]


def random_ids(seed: int, count: int = 5001) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, count).astype("<u2")


@pytest.mark.parametrize("write", [np.ndarray.tobytes, shard_of], ids=["nanoGPT", "shards"])
@pytest.mark.parametrize("is_large", [False, True])
def test_packed_ids_of_other_programs_are_copied(tmp_path, tokenizer, write, is_large, request, monkeypatch):
    """In the order of their files, in any units; documents end where the ids say so."""
    if is_large:
        request.getfixturevalue("small_units")
        monkeypatch.setattr("recipe.data.tokens.CHUNK", 100)
    for name, seed in (("train_1", 1), ("train_2", 2), ("val", 3)):
        (tmp_path / f"{name}.bin").write_bytes(write(random_ids(seed)))
    source = TextSource((str(tmp_path / "*.bin"),), (str(tmp_path / "val.bin"),))
    assert (len(list_units(source)) > 9) == is_large
    made = prepare_dataset(source, tmp_path / "d", tokenizer)
    byte_counts = count_token_bytes(tokenizer)
    for split, seeds in (("train", (1, 2)), ("validation", (3,))):
        ids, found = np.concatenate(list(map(random_ids, seeds))), made["splits"][split]
        np.testing.assert_array_equal(ids_in(tmp_path / "d", split), ids)
        assert (found["tokens"], found["documents"]) == (len(ids), (ids == tokenizer.eos_token_id).sum())
        assert (found["bytes"], found["used_ids"]) == (byte_counts[ids].sum(), len(set(ids.tolist())))


def large_tokenizer() -> TextTokenizer:
    """A tokenizer of 70,000 words."""
    words = {"<|endoftext|>": 0} | {f"w{number}": number for number in range(1, 70_000)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w1"))
    backend.add_special_tokens(["<|endoftext|>"])
    return TextTokenizer(backend, {"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"})


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (lambda ids: ids.astype("<u4").tobytes(), None),
        (lambda ids: shard_of((ids % 60_000).astype("<u2")), None),  # llm.c's header says 16 bits
        (lambda ids: ids.astype("<i8").tobytes(), "64 bits .*uint32"),
        (lambda ids: ids.astype("<u4").tobytes()[:-2], "19,998 bytes.*32 bits"),
        (lambda ids: (ids % 60_000).astype("<u2").tobytes(), "token id .*70,000 tokens"),
        (lambda ids: (ids + 40_000).astype("<u4").tobytes(), "token id .*70,000 tokens"),
    ],
)
@pytest.mark.usefixtures("small_units")
def test_ids_of_a_large_vocabulary_have_32_bits(tmp_path, write, expected):
    """They are copied, in any units, or refused: never read as twice as many of 16 bits."""
    ids, tokenizer = np.random.default_rng(0).integers(0, 70_000, 5000), large_tokenizer()
    (tmp_path / "a.bin").write_bytes(write(ids))
    source = TextSource((str(tmp_path / "a.bin"),))
    if expected:
        with pytest.raises(UserError, match=expected):
            prepare_dataset(source, tmp_path / "d", tokenizer)
        return
    prepare_dataset(source, tmp_path / "d", tokenizer)
    packed = [*ids_in(tmp_path / "d", "train"), *ids_in(tmp_path / "d", "validation")]
    assert packed == (ids if ids.tolist() == packed else ids % 60_000).tolist()


def test_the_last_ids_of_each_file_are_held_out(tmp_path, tokenizer, small_units):
    """5% of them."""
    first, second = random_ids(1, 2000), random_ids(2, 2000)
    for name, ids in (("a", first), ("b", second)):
        (tmp_path / f"{name}.bin").write_bytes(shard_of(ids))
    prepare_dataset(TextSource((str(tmp_path / "*.bin"),)), tmp_path / "d", tokenizer)
    assert ids_in(tmp_path / "d", "train").tolist() == [*first[:1900], *second[:1900]]
    assert ids_in(tmp_path / "d", "validation").tolist() == [*first[1900:], *second[1900:]]


@pytest.mark.parametrize("streaming", [(), ("--streaming",)])
def test_a_run_trains_on_packed_ids(tmp_path, train, tokenizer_dir, streaming):
    (tmp_path / "train.bin").write_bytes(random_ids(0, 20_000).tobytes())
    (tmp_path / "val.bin").write_bytes(random_ids(1).tobytes())
    data = ["--train_file", tmp_path / "train.bin", "--validation_file", tmp_path / "val.bin", *streaming]
    folders = ["--tokenizer_name", tokenizer_dir, "--output_dir", tmp_path / "run", "--cache_dir", tmp_path / "cache"]
    train(*data, *folders, *TINY, *PLAIN, "--global_batch_size", 4, "--max_steps", 2, alone=True)
    assert read_events(tmp_path / "run", "eval")[-1]["loss"] == pytest.approx(np.log(VOCAB_SIZE), abs=0.3)


# ------------------------------------------------------------------ damage


def damage(directory: Path, how: str) -> None:
    ids, metadata = directory / "train" / "00000.arrow", directory / "metadata.json"
    if how == "truncated":
        ids.write_bytes(ids.read_bytes()[:-100])
    elif how == "no rows":
        ids.unlink()
    elif how == "no metadata":
        metadata.unlink()
    elif how == "broken metadata":
        metadata.write_text("{")
    elif how == "other tokenizer":
        train_tokenizer(make_documents(50, seed=9), 300).save_pretrained(directory / "tokenizer")
    else:
        changes = {"other format": {"format_version": 99}, "fewer ids": {"vocab_size": 100}}
        metadata.write_text(json.dumps(json.loads(metadata.read_text()) | changes[how]))


DAMAGE = {  # what is damaged, and what the error must name
    "truncated": "train/00000.arrow",
    "no rows": "00000.arrow",
    "no metadata": "metadata.json",
    "broken metadata": "copy",
    "other format": "99",
    "fewer ids": "100",
    "other tokenizer": "tokenizer",
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_dataset_does_not_open(tmp_path, dataset_dir, how):
    shutil.copytree(dataset_dir, tmp_path / "copy")
    damage(tmp_path / "copy", how)
    with pytest.raises(UserError, match=DAMAGE[how]):
        opened = open_packed_dataset(tmp_path / "copy", BLOCK_SIZE)
        assert opened.tokenizer
        all_rows(opened.train)


@pytest.mark.parametrize("how", ["truncated", "broken metadata", "other format"])
def test_a_damaged_dataset_is_prepared_again(tmp_path, jsonl_file, tokenizer_dir, tokenizer, how):
    """On request, and automatically in the cache of a run."""
    argv = ["--train_file", str(jsonl_file), "--tokenizer_name", str(tokenizer_dir), "--block_size", "16"]
    config = load_config([*argv, "--cache_dir", str(tmp_path / "cache")])[0]
    cached = open_dataset_for(config)
    damage(cached.directory, how)
    with pytest.raises(UserError, match="--overwrite"):
        prepare_dataset(TextSource((str(jsonl_file),)), cached.directory, tokenizer)
    assert open_dataset_for(config).metadata == cached.metadata
