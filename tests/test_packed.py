"""The packed dataset: every token a target once, documents intact, complete or not opened."""

import json
import pickle
import shutil

import datasets
import numpy as np
import pytest
from conftest import BLOCK_SIZE, VOCAB_SIZE, make_documents

from recipe.config import UserError, load_config
from recipe.data import packed
from recipe.data.packed import PackedSplit, SplitWriter, open_packed_dataset, write_packed_dataset
from recipe.data.prepare import open_dataset_for, prepare_dataset
from recipe.data.text import TextSource, split_documents
from recipe.data.tokenizer import encode_documents, load_tokenizer, tokenizer_sha256, train_tokenizer


def stream_of(rows: np.ndarray) -> np.ndarray:
    """Undo the overlap of one token."""
    return np.concatenate([rows[:, :-1].reshape(-1), rows[-1, -1:]])


def test_load_from_disk_opens_it(dataset_dir):
    """The contract: a DatasetDict of fixed-length rows, uint16 for a small vocabulary."""
    loaded = datasets.load_from_disk(str(dataset_dir))
    assert set(loaded) == {"train", "validation"}
    feature = loaded["train"].features["input_ids"]
    assert (feature.length, feature.feature.dtype) == (BLOCK_SIZE + 1, "uint16")
    assert len(loaded["train"][0]["input_ids"]) == BLOCK_SIZE + 1


def test_rows_decode_to_the_documents(dataset_dir, documents):
    """Decoding the rows gives every document, in order, with the separator, but for the tail that fills no row."""
    opened = open_packed_dataset(dataset_dir)
    tokenizer = opened.load_tokenizer()
    expected = {"train": [], "validation": []}
    for split, text in split_documents(documents, 5.0):
        expected[split].append(text + tokenizer.eos_token)
    for name, split in opened.splits.items():
        text = tokenizer.decode(stream_of(split[np.arange(len(split))]), clean_up_tokenization_spaces=False)
        whole = "".join(expected[name])
        assert whole.startswith(text.rstrip("\ufffd")) and len(whole) - len(text) < 6 * BLOCK_SIZE
        assert opened.metadata["splits"][name]["documents"] == len(expected[name])
        assert opened.metadata["splits"][name]["bytes"] == sum(len(t.encode()) for t in expected[name]) - len(
            tokenizer.eos_token
        ) * len(expected[name])


@pytest.mark.parametrize("flush_at", [1, 50, 10**9])
def test_every_token_is_a_target_exactly_once(tmp_path, monkeypatch, flush_at):
    """Row i is tokens [i*T, i*T + T + 1), whatever the size of the batches it was written in."""
    monkeypatch.setattr(packed, "BATCH_TOKENS", flush_at)
    writer = SplitWriter(tmp_path, "train", block_size=8, vocab_size=40_000)
    stream = np.arange(1000)
    for piece in np.split(stream, [3, 4, 90, 500, 501]):
        writer.add(piece, num_bytes=1)
    counts = writer.close()
    rows = PackedSplit(tmp_path / "train", 40_000)
    everything = rows[np.arange(len(rows))]
    assert counts["rows"] == len(rows) == 999 // 8
    np.testing.assert_array_equal(everything[:, 1:].reshape(-1), stream[1 : 1 + 124 * 8])  # the targets
    np.testing.assert_array_equal(everything[:, :-1].reshape(-1), stream[: 124 * 8])  # the inputs
    assert (counts["tokens"], counts["documents"], counts["max_token_id"]) == (1000, 6, 999)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, "uint16"), (65_537, "int32")])
def test_width_of_an_id(tmp_path, vocab_size, dtype):
    """Two bytes an id while the vocabulary allows it; the largest id survives."""
    writer = SplitWriter(tmp_path, "train", block_size=1, vocab_size=vocab_size)
    writer.add(np.array([0, vocab_size - 1]), num_bytes=1)
    writer.close()
    split = PackedSplit(tmp_path / "train", vocab_size)
    assert split.chunks[0].dtype == dtype and split[np.array([0])].tolist() == [[0, vocab_size - 1]]


def test_an_id_beyond_the_vocabulary_is_refused_when_written(tmp_path):
    """70000 as uint16 would silently become 4464."""
    writer = SplitWriter(tmp_path, "train", block_size=1, vocab_size=50_257)
    with pytest.raises(UserError, match="id 70000, beyond its vocabulary"):
        writer.add(np.array([1, 70_000]), num_bytes=1)


def test_text_that_looks_like_a_separator_is_text(tokenizer_dir):
    """Only the packer ends documents: `<|endoftext|>` inside a text is encoded as those characters."""
    tokenizer = load_tokenizer(str(tokenizer_dir))
    ((_, num_bytes, ids),) = encode_documents(tokenizer, [("train", "a <|endoftext|> b")])
    assert num_bytes == 17 and list(ids).count(tokenizer.eos_token_id) == 1
    assert tokenizer.decode(ids[:-1]) == "a <|endoftext|> b"


def test_any_text_can_be_encoded(tokenizer_dir):
    """Byte-level: characters never seen in training survive the round trip."""
    tokenizer = load_tokenizer(str(tokenizer_dir))
    text = "𝔘nseen ∑ymbols \x00\x7f\r\n\t  and\u2028more"
    ((_, _, ids),) = encode_documents(tokenizer, [("train", text)])
    assert tokenizer.decode(ids[:-1], clean_up_tokenization_spaces=False) == text


def test_ids_are_those_of_the_tokenizer(tokenizer_dir, documents):
    """Bulk encoding equals calling the tokenizer on each document."""
    tokenizer = load_tokenizer(str(tokenizer_dir))
    encoded = list(encode_documents(load_tokenizer(str(tokenizer_dir)), [("train", t) for t in documents]))
    for (_, _, ids), text in zip(encoded, documents, strict=True):
        assert ids.tolist() == [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]


def test_workers_map_the_file_themselves(dataset):
    """A split sent to a worker process is a few hundred bytes, not a copy of the corpus."""
    blob = pickle.dumps(dataset.splits["train"])
    assert len(blob) < 1000
    indices = np.array([3, 0, 5])
    np.testing.assert_array_equal(pickle.loads(blob)[indices], dataset.splits["train"][indices])


def test_second_preparation_reuses_the_first(tmp_path, jsonl_file, tokenizer_dir, capsys):
    """Same input, tokenizer and block size: opened, not made again. Anything else: refused, or replaced if asked."""
    source, directory = TextSource(train_files=(str(jsonl_file),)), tmp_path / "d"
    first = prepare_dataset(source, directory, 16, load_tokenizer(str(tokenizer_dir)))
    written_at = (directory / "metadata.json").stat().st_mtime_ns
    assert prepare_dataset(source, directory, 16, load_tokenizer(str(tokenizer_dir))).metadata == first.metadata
    assert (directory / "metadata.json").stat().st_mtime_ns == written_at
    with pytest.raises(UserError, match="was made from other input; pass --overwrite"):
        prepare_dataset(source, directory, 8, load_tokenizer(str(tokenizer_dir)))
    assert prepare_dataset(source, directory, 8, load_tokenizer(str(tokenizer_dir)), overwrite=True).block_size == 8


def test_overwrite_replaces_packed_datasets_only(tmp_path, jsonl_file, tokenizer_dir):
    """A folder of anything else is never removed, and an old dataset not before the new one is complete."""
    source, tokenizer = TextSource(train_files=(str(jsonl_file),)), load_tokenizer(str(tokenizer_dir))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("irreplaceable")
    with pytest.raises(UserError, match="is not a packed dataset; name another folder"):
        prepare_dataset(source, tmp_path / "home", 16, tokenizer, overwrite=True)
    assert (tmp_path / "home" / "thesis.txt").exists()
    (tmp_path / "d").mkdir()
    prepare_dataset(source, tmp_path / "d", 16, tokenizer)  # an empty folder is fine
    with pytest.raises(UserError, match="fewer than one row"):
        prepare_dataset(source, tmp_path / "d", 10**6, tokenizer, overwrite=True)
    assert open_packed_dataset(tmp_path / "d").block_size == 16
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d", "home"]


def test_nothing_is_left_behind_by_a_failure(tmp_path, tokenizer_dir):
    """A dataset appears under its name only when it is complete."""

    def fail():
        yield "train", 5, np.arange(400) % 5
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        write_packed_dataset(tmp_path / "d", fail(), load_tokenizer(str(tokenizer_dir)), 4, {}, "x")
    assert list(tmp_path.iterdir()) == []


def test_texts_too_short(tmp_path, tokenizer_dir):
    """Less than one row of training or validation text is an error that says how many tokens there are."""
    (tmp_path / "a.txt").write_text("short\ntext\n")
    source = TextSource(train_files=(str(tmp_path / "a.txt"),))
    with pytest.raises(UserError, match=r"the train text has \d+ tokens, fewer than one row of block_size \+ 1 = 65"):
        prepare_dataset(source, tmp_path / "d", 64, load_tokenizer(str(tokenizer_dir)))
    (tmp_path / "a.txt").write_text("short text\n" * 90)
    with pytest.raises(UserError, match="the validation text .* larger --validation_split_percentage"):
        prepare_dataset(source, tmp_path / "d", 64, load_tokenizer(str(tokenizer_dir)))
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n{"text": ""}\n')
    with pytest.raises(UserError, match="the text is empty"):
        prepare_dataset(
            TextSource((str(tmp_path / "empty.jsonl"),)), tmp_path / "d", 64, load_tokenizer(str(tokenizer_dir))
        )


def damage(directory, how):
    data = directory / "train" / "data-00000-of-00001.arrow"
    metadata = json.loads((directory / "metadata.json").read_text())
    if how == "no metadata":
        (directory / "metadata.json").unlink()
    elif how == "broken metadata":
        (directory / "metadata.json").write_text("{")
    elif how == "no rows":
        data.unlink()
    elif how == "truncated":
        data.write_bytes(data.read_bytes()[:-100])
    elif how == "no state":
        (directory / "validation" / "state.json").unlink()
    elif how == "format":
        (directory / "metadata.json").write_text(json.dumps({**metadata, "format_version": 99}))
    elif how == "ids":
        (directory / "metadata.json").write_text(json.dumps({**metadata, "vocab_size": 100}))
    elif how == "rows":
        (directory / "metadata.json").write_text(json.dumps({**metadata, "block_size": 31}))
    elif how == "tokenizer":
        train_tokenizer(make_documents(50, seed=9), 300).save_pretrained(directory / "tokenizer")


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("no metadata", "metadata.json is missing"),
        ("broken metadata", "is not a complete packed dataset"),
        ("no rows", "data-00000-of-00001.arrow is missing"),
        ("truncated", "bytes instead of"),
        ("no state", "is not a complete packed dataset"),
        ("format", "has format 99"),
        ("ids", "beyond its vocabulary of 100"),
        ("rows", "has not the .* rows of 32 ids"),
        ("tokenizer", "is not the tokenizer this dataset was made with"),
    ],
)
def test_incomplete_or_changed_datasets_are_not_opened(tmp_path, dataset_dir, how, expected):
    directory = tmp_path / "copy"
    shutil.copytree(dataset_dir, directory)
    damage(directory, how)
    with pytest.raises(UserError, match=expected):
        open_packed_dataset(directory).load_tokenizer()


def test_a_dataset_for_another_run(tmp_path, dataset_dir, tokenizer_dir):
    """Block size and tokenizer are those the run asks for, or it is an error."""

    def open_for(*argv):
        return open_dataset_for(load_config(["--dataset_dir", str(dataset_dir), *argv])[0])

    with pytest.raises(UserError, match="has block_size 32, the run asks for 64; pass --block_size 32"):
        open_for("--block_size", "64")
    train_tokenizer(make_documents(50, seed=9), 300).save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match="was made with another tokenizer"):
        open_for("--block_size", "32", "--tokenizer_name", str(tmp_path / "other"))
    assert open_for("--block_size", "32", "--tokenizer_name", str(tokenizer_dir)).vocab_size == VOCAB_SIZE
    with pytest.raises(UserError, match="there is no dataset"):
        open_packed_dataset(tmp_path / "gone")


def test_bad_tokenizers(tmp_path, tokenizer_dir):
    """Missing, without an end of text, or asked for more tokens than the text has."""
    with pytest.raises(UserError, match="no tokenizer at 'nowhere'"):
        load_tokenizer("nowhere")
    tokenizer = load_tokenizer(str(tokenizer_dir))
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "no_eos")
    config = json.loads((tmp_path / "no_eos" / "tokenizer_config.json").read_text())
    config["eos_token"] = None
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (tmp_path / "no_eos" / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="has no end-of-text token"):
        load_tokenizer(str(tmp_path / "no_eos"))
    with pytest.raises(UserError, match="gives only .* tokens, 5000 were asked for"):
        train_tokenizer(["only a little text"], 5000)


def test_identity_of_a_tokenizer_survives_saving(tmp_path, tokenizer_dir):
    tokenizer = load_tokenizer(str(tokenizer_dir))
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_sha256(load_tokenizer(str(tmp_path))) == tokenizer_sha256(tokenizer)
    other = train_tokenizer(make_documents(50, seed=9), 300)
    assert tokenizer_sha256(other) != tokenizer_sha256(tokenizer)
