"""A packed dataset holds the ids of its text, and rows of it hold every token once."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from corpora import all_rows, encode_plainly, ids_in, read, write_jsonl, write_parquet, write_text
from helpers import BLOCK_SIZE, VOCAB_SIZE, make_documents, shard_of
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from recipe.command_line import load_config
from recipe.config import SPLITS
from recipe.data.cache import open_dataset_for
from recipe.data.packed import COUNTS, PackedSplit, Stretch, list_stretches, open_packed_dataset
from recipe.data.prepare import prepare_dataset
from recipe.data.read import list_units
from recipe.data.source import TextSource
from recipe.data.tokenizer import count_token_bytes, save_tokenizer, train_tokenizer
from recipe.errors import UserError


def packed_from(kind: str, folder: Path) -> TextSource:
    text = "".join(make_documents(200)) + " <|endoftext|> is text\n"
    if kind == "documents":
        return TextSource((write_jsonl(folder / "a.jsonl", make_documents(300)),))
    validation = (write_text(folder / "b.txt", text * 2),) if kind == "validation file" else ()
    return TextSource((write_text(folder / "a.txt", text),), validation)


@pytest.mark.parametrize("kind", ["documents", "one text", "validation file"])
def test_rows_and_counts_are_those_of_a_plain_encoding(tmp_path, small_units, tokenizer_dir, tokenizer, kind):
    """Row i holds tokens [i*T, i*T + T + 1) of the files one after another, nanoGPT's format, whatever T is."""
    source = packed_from(kind, tmp_path)
    folder = tmp_path / "d"
    metadata = prepare_dataset(source, folder, tokenizer)
    assert len(list_units(source)) > 9
    for split in SPLITS:
        texts = [text for of, text in read(source) if of == split]
        stream = encode_plainly(tokenizer_dir, texts)
        files = [path.read_bytes() for path in sorted(folder.glob(f"{split}-*.bin"))]  # as `cat` reads them
        assert np.frombuffer(b"".join(files), "<u2").tolist() == stream
        for size in (1, 8, BLOCK_SIZE, len(stream) - 1):
            rows = [stream[i : i + size + 1] for i in range(0, len(stream) - size, size)]
            opened = PackedSplit("d", list_stretches(folder, metadata, split), size, VOCAB_SIZE)
            np.testing.assert_array_equal(all_rows(opened), rows)
        num_bytes = len("".join(texts).encode())
        counts = [metadata["splits"][split][name] for name in COUNTS]
        assert counts == [len(texts), len(stream), len(stream) - len(texts), num_bytes]


def test_a_dataset_of_many_units_keeps_no_file_open(tmp_path):
    before = psutil.Process().num_fds()
    np.arange(4000, dtype=np.uint16).tofile(tmp_path / "a.bin")
    stretches = [Stretch(str(tmp_path / "a.bin"), "uint16", 4 * n, 2) for n in range(2000)]
    split = PackedSplit("s", stretches, 1, 5000)
    assert split[np.arange(len(split))][:, 0].tolist() == list(range(3999))
    assert psutil.Process().num_fds() <= before


# ------------------------------------------------------------------ rows of ids

PARTS = {"train": slice(20, None), "validation": slice(20)}


@pytest.mark.parametrize(("kind", "write"), [("jsonl", write_jsonl), ("parquet", write_parquet)])
def test_token_ids_are_packed_like_their_text(tmp_path, small_units, documents, tokenizer_dir, tokenizer, kind, write):
    backend = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    ids = [encoding.ids for encoding in backend.encode_batch(documents)]
    counts = {}
    for name, rows in (("text", documents), ("ids", ids)):
        train, validation = (write(tmp_path / f"{split}.{kind}", rows[part]) for split, part in PARTS.items())
        source = TextSource((train,), (validation,))
        splits = prepare_dataset(source, tmp_path / name, tokenizer)["splits"]
        counts[name] = [splits[split][key] for split in SPLITS for key in COUNTS]
    assert len(list_units(source)) > 9
    assert counts["text"] == counts["ids"]
    for split in SPLITS:
        np.testing.assert_array_equal(ids_in(tmp_path / "text", split), ids_in(tmp_path / "ids", split))


@pytest.mark.parametrize("has_file", [False, True])
@pytest.mark.parametrize("last", [10, 3])
def test_blocks_of_one_length_are_a_stream(tmp_path, tokenizer, has_file, last):
    """As run_clm's `group_texts` writes them: nothing is added, and the last ones are for validation."""
    stream = np.random.default_rng(0).integers(1, VOCAB_SIZE, 3990 + last)
    blocks = [stream[start : start + 10].tolist() for start in range(0, 4000, 10)]
    validation = (write_jsonl(tmp_path / "b.jsonl", blocks[380:]),) if has_file else ()
    source = TextSource((write_jsonl(tmp_path / "a.jsonl", blocks[: 380 if has_file else 400]),), validation)
    prepare_dataset(source, tmp_path / "d", tokenizer)
    np.testing.assert_array_equal(ids_in(tmp_path / "d", "train"), stream[:3800])
    np.testing.assert_array_equal(ids_in(tmp_path / "d", "validation"), stream[3800:])


# ------------------------------------------------------------------ token files of other programs


def random_ids(seed: int, count: int = 5001) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, count).astype("<u2")


@pytest.mark.parametrize("write", [np.ndarray.tobytes, shard_of], ids=["nanoGPT", "shards"])
@pytest.mark.parametrize("has_file", [False, True])
def test_packed_ids_of_other_programs_are_used_in_place(tmp_path, tokenizer, write, has_file, capsys):
    """In the order of their files; the last 5% of each are held out, or a file. Documents end where the ids say so."""
    for name, seed in (("train_1", 1), ("train_2", 2), ("val", 3)):
        (tmp_path / f"{name}.bin").write_bytes(write(random_ids(seed)))
    source = TextSource((str(tmp_path / "train*.bin"),), (str(tmp_path / "val.bin"),) if has_file else ())
    made = prepare_dataset(source, tmp_path / "d", tokenizer)
    byte_counts = count_token_bytes(tokenizer)
    cut = 5001 if has_file else 4751
    parts = {"train": [random_ids(seed)[:cut] for seed in (1, 2)], "validation": [random_ids(3)]}
    parts["validation"] = parts["validation"] if has_file else [random_ids(seed)[cut:] for seed in (1, 2)]
    for split, pieces in parts.items():
        ids = np.concatenate(pieces)
        found = made["splits"][split]
        np.testing.assert_array_equal(ids_in(tmp_path / "d", split), ids)
        rows = all_rows(getattr(open_packed_dataset(tmp_path / "d", 8), split))
        np.testing.assert_array_equal(rows[:, 1:].reshape(-1), ids[1 : 1 + 8 * ((len(ids) - 1) // 8)])
        ends = int((ids == tokenizer.eos_token_id).sum())
        assert [found[name] for name in COUNTS] == [ends, len(ids), len(ids) - ends, byte_counts[ids].sum()]
    assert sum(path.stat().st_size for path in (tmp_path / "d").glob("*.bin")) == 0
    assert "must stay" in capsys.readouterr().out


def test_token_files_that_have_changed_are_refused(tmp_path, tokenizer):
    """Another time alone is no change."""
    path = tmp_path / "a.bin"
    path.write_bytes(random_ids(0).tobytes())
    prepare_dataset(TextSource((str(path),)), tmp_path / "d", tokenizer)
    os.utime(path, (1e9, 1e9))
    assert len(open_packed_dataset(tmp_path / "d", 8).train)
    others = ((random_ids(1), r"a\.bin has changed"), (random_ids(0, 5002), "10,004 bytes instead of 10,002"))
    for ids, named in (*others, (None, r"cannot read .*a\.bin")):
        path.unlink() if ids is None else path.write_bytes(ids.tobytes())
        with pytest.raises(UserError, match=named):
            open_packed_dataset(tmp_path / "d", 8)


def large_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 70,000 words."""
    words = {"<|endoftext|>": 0} | {f"w{number}": number for number in range(1, 70_000)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w1"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


@pytest.mark.parametrize(
    ("id_type", "highest", "write"),
    [
        ("<u4", 70_000, np.ndarray.tobytes),
        ("<u2", 60_000, shard_of),  # llm.c's header says 16 bits
    ],
)
def test_ids_of_a_large_vocabulary_have_32_bits_unless_a_header_says_16(tmp_path, id_type, highest, write):
    ids = np.random.default_rng(0).integers(0, highest, 5000).astype(id_type)
    (tmp_path / "a.bin").write_bytes(write(ids))
    prepare_dataset(TextSource((str(tmp_path / "a.bin"),)), tmp_path / "d", large_tokenizer())
    assert [*ids_in(tmp_path / "d", "train"), *ids_in(tmp_path / "d", "validation")] == ids.tolist()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda ids: ids, ""),
        (lambda ids: ids[ids != 0], "warning: the token ids contain no end of text"),
        (lambda ids: np.arange(9000) % 257, "warning: the first token ids do not stand for UTF-8"),
    ],
)
def test_ids_that_do_not_look_like_text_of_their_tokenizer_are_said(
    tmp_path, tokenizer_dir, tokenizer, change, said, capsys
):
    ids = np.array(encode_plainly(tokenizer_dir, make_documents(100)))
    (tmp_path / "a.bin").write_bytes(change(ids).astype("<u2").tobytes())
    prepare_dataset(TextSource((str(tmp_path / "a.bin"),)), tmp_path / "d", tokenizer)
    out = capsys.readouterr().out
    assert said in out
    assert ("warning" in out) == ("warning" in said)


# ------------------------------------------------------------------ damage


def in_metadata(change: Callable[[dict], object]) -> Callable[[Path], object]:
    """Return what changes the metadata of a dataset."""

    def damage(folder: Path) -> None:
        content = json.loads((folder / "metadata.json").read_text())
        change(content)
        (folder / "metadata.json").write_text(json.dumps(content))

    return damage


def name_elsewhere(content: dict) -> None:
    content["files"][f"../copy/{IDS}"] = content["files"][IDS]


IDS = "train-00000.bin"
OTHER = train_tokenizer(make_documents(50, seed=9), 300)
DAMAGE = {  # what is damaged: how, and what the error must name
    "truncated": (lambda folder: os.truncate(folder / IDS, 100), IDS),
    "no rows": (lambda folder: (folder / IDS).unlink(), IDS),
    "no metadata": (lambda folder: (folder / "metadata.json").unlink(), "metadata.json"),
    "broken metadata": (lambda folder: (folder / "metadata.json").write_text("{"), "copy"),
    "file elsewhere": (in_metadata(name_elsewhere), "../copy"),
    # A stranger says that it is used in place, by a name that is not absolute.
    "file of nobody": (in_metadata(lambda content: content["files"][IDS].update(digest="x")), IDS),
    "stretch": (in_metadata(lambda content: content["splits"]["train"]["stretches"][0].__setitem__(1, -5)), IDS),
    "other format": (in_metadata(lambda content: content.update(format_version=99)), "99"),
    "fewer ids": (in_metadata(lambda content: content.update(vocab_size=100)), "100"),
    "other tokenizer": (lambda folder: save_tokenizer(OTHER, folder / "tokenizer"), "tokenizer"),
}


@pytest.mark.parametrize(("damage", "named"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_dataset_does_not_open(tmp_path, dataset_dir, damage, named):
    shutil.copytree(dataset_dir, tmp_path / "copy")
    damage(tmp_path / "copy")
    with pytest.raises(UserError, match=re.escape(named)):
        opened = open_packed_dataset(tmp_path / "copy", BLOCK_SIZE)
        assert opened.tokenizer
        all_rows(opened.train)


@pytest.mark.parametrize("how", ["truncated", "broken metadata", "other format"])
def test_a_damaged_dataset_is_prepared_again(tmp_path, jsonl_file, tokenizer_dir, tokenizer, how):
    """On request, and automatically in the cache of a run."""
    argv = ["--train_file", str(jsonl_file), "--tokenizer_name", str(tokenizer_dir), "--block_size", "16"]
    config = load_config([*argv, "--cache_dir", str(tmp_path / "cache")])[0]
    cached = open_dataset_for(config)
    DAMAGE[how][0](cached.directory)
    with pytest.raises(UserError, match="--overwrite"):
        prepare_dataset(TextSource((str(jsonl_file),)), cached.directory, tokenizer)
    assert open_dataset_for(config).metadata == cached.metadata
