"""Token ids that nanoGPT, llm.c and modded-nanogpt have packed train as they are."""

import datasets
import numpy as np
import pytest
from conftest import PLAIN, TINY, VOCAB_SIZE

from recipe.data.prepare import prepare_dataset
from recipe.data.read import list_units
from recipe.data.source import TextSource
from recipe.data.tokenizer import count_token_bytes, read_tokenizer
from recipe.errors import UserError


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir):
    return read_tokenizer(str(tokenizer_dir))


def ids_of(seed: int, count: int = 5001) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, count).astype("<u2")


def shard(ids: np.ndarray, magic: int = 20240520, version: int = 1, count: int | None = None) -> bytes:
    """Return what llm.c and modded-nanogpt write."""
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    return header.tobytes() + ids.tobytes()


FORMATS = {"nanoGPT": np.ndarray.tobytes, "shards": shard}


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("is_large", [False, True])
def test_tokens_are_copied(tmp_path, tokenizer, kind, is_large, request, monkeypatch):
    """In the order of their files, in any units; documents end where the ids say so."""
    if is_large:
        request.getfixturevalue("small_units")
        monkeypatch.setattr("recipe.data.tokens.CHUNK", 100)
    for name, seed in (("train_1", 1), ("train_2", 2), ("val", 3)):
        (tmp_path / f"{name}.bin").write_bytes(FORMATS[kind](ids_of(seed)))
    source = TextSource((str(tmp_path / "*.bin"),), (str(tmp_path / "val.bin"),))
    assert (len(list_units(source)) > 9) == is_large
    made = prepare_dataset(source, tmp_path / "d", tokenizer)
    loaded = datasets.load_from_disk(str(tmp_path / "d"))
    expected = {"train": np.concatenate([ids_of(1), ids_of(2)]), "validation": ids_of(3)}
    counts = count_token_bytes(tokenizer)
    for split, ids in expected.items():
        np.testing.assert_array_equal(loaded[split].with_format("numpy")["input_ids"][:], ids)
        found = made["splits"][split]
        assert (found["tokens"], found["documents"]) == (len(ids), (ids == tokenizer.eos_token_id).sum())
        assert (found["bytes"], found["used_ids"]) == (counts[ids].sum(), len(set(ids.tolist())))


def test_the_last_tokens_of_each_file_are_held_out(tmp_path, tokenizer, small_units):
    """5% of them."""
    for name, seed in (("a", 1), ("b", 2)):
        (tmp_path / f"{name}.bin").write_bytes(shard(ids_of(seed, 2000)))
    prepare_dataset(TextSource((str(tmp_path / "*.bin"),)), tmp_path / "d", tokenizer)
    loaded = datasets.load_from_disk(str(tmp_path / "d"))
    a, b = ids_of(1, 2000).tolist(), ids_of(2, 2000).tolist()
    assert loaded["train"]["input_ids"][:] == a[:1900] + b[:1900]
    assert loaded["validation"]["input_ids"][:] == a[1900:] + b[1900:]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (ids_of(0).tobytes()[:-1], "a.bin has 10,001 bytes, an odd number"),
        (ids_of(0).astype(np.uint32).tobytes(), "a.bin seems to hold token ids of 32 or 64 bits"),
        (ids_of(0).astype(np.int64).tobytes(), "a.bin seems to hold token ids of 32 or 64 bits"),
        (shard(ids_of(0), magic=20240801), "a.bin begins with magic number 20240801 and version 1; expected 20240520"),
        (shard(ids_of(0), version=2), "version 2; expected 20240520 and 1"),
        (shard(ids_of(0), count=9999), "a.bin should hold 9,999 token ids in 21,022 bytes, but has 11,026"),
        (shard(ids_of(0) + VOCAB_SIZE), "but the tokenizer has 500 tokens; pass the tokenizer that made the data"),
    ],
)
def test_files_that_hold_something_else_are_errors(tmp_path, tokenizer, content, expected):
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(UserError, match=expected):
        prepare_dataset(TextSource((str(tmp_path / "a.bin"),)), tmp_path / "d", tokenizer)


def test_only_named_files_are_tokens(tmp_path, tokenizer):
    """Other programs use the suffix, too."""
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(
        UserError, match=r"no file of a supported kind .*; name token ids by a pattern, such as .*\*.bin"
    ):
        _ = TextSource((str(tmp_path),)).files
    (tmp_path / "a.txt").write_text("text")
    assert TextSource((str(tmp_path),)).files.ignored == {".bin": 1}
    (tmp_path / "b.bin").write_bytes(ids_of(0).tobytes())
    with pytest.raises(UserError, match="is already tokenized; pass its --tokenizer_name"):
        prepare_dataset(TextSource((str(tmp_path / "b.bin"),)), tmp_path / "d", None, 300)


@pytest.mark.parametrize("streaming", [(), ("--streaming",)])
def test_a_run_trains_on_them(tmp_path, train, tokenizer_dir, streaming, capsys):
    (tmp_path / "train.bin").write_bytes(ids_of(0, 20_000).tobytes())
    (tmp_path / "val.bin").write_bytes(ids_of(1).tobytes())
    data = ["--train_file", tmp_path / "train.bin", "--validation_file", tmp_path / "val.bin", *streaming]
    folders = ["--tokenizer_name", tokenizer_dir, "--output_dir", tmp_path / "run", "--cache_dir", tmp_path / "cache"]
    train(*data, *folders, *TINY, *PLAIN, "--global_batch_size", 4, "--max_steps", 2, alone=True)
    assert "eval_loss:" in capsys.readouterr().out
