"""What is in a packed dataset: the printed numbers equal a count in plain Python."""

import itertools
import json
import random
import subprocess
import sys
import tracemalloc

import datasets
import numpy as np
import pytest
from conftest import BLOCK_SIZE, ROOT, make_documents, run_script

from recipe.data import contents, prepare
from recipe.data.contents import count_shared, fill_lines, print_contents, read_contents
from recipe.data.packed import PackedSplit, open_packed_dataset
from recipe.data.prepare import prepare_dataset
from recipe.data.shards import merge_shards, shard_dir
from recipe.data.text import TextSource
from recipe.data.tokenizer import read_tokenizer
from recipe.data.writer import SplitWriter
from recipe.errors import UserError

EOS = 7


def count(shards: list[list[list[int]]], block_size: int) -> dict:
    """Count the documents of each shard (ids with the end-of-text id), which lacks the tokens that fill no row."""
    complete, seen, longest, first_row = [], set(), (0, 0, True), 0
    for documents in shards:
        num_rows = max(0, sum(map(len, documents)) - 1) // block_size
        num_tokens = num_rows * block_size + 1 if num_rows else 0
        position = 0
        for document in documents:
            inside = document[: max(0, num_tokens - position)]
            seen |= set(inside)
            if len(inside) == len(document):
                complete.append(tuple(document))
            if len(inside) > longest[0]:
                longest = (len(inside), first_row + position // block_size, len(inside) == len(document))
            position += len(document)
        first_row += num_rows
    return {"complete": complete, "seen": seen, "longest": longest}


def check(found: contents.SplitContents, expected: dict) -> None:
    assert len(found.hashes) == len(expected["complete"])
    assert len(set(found.hashes.tolist())) == len(set(expected["complete"]))
    assert found.num_repeats == len(expected["complete"]) - len(set(expected["complete"]))
    assert set(np.flatnonzero(~found.unseen).tolist()) == expected["seen"]
    assert found.share_seen == pytest.approx(len(expected["seen"]) / len(found.unseen))
    assert (found.longest, found.longest_row, found.longest_is_complete) == expected["longest"]


def make_ids(rng: random.Random, count: int, vocab_size: int, most: int) -> list[list[int]]:
    """Return documents of up to `most` ids and the end-of-text id. Some are empty and some repeat earlier ones."""
    documents = []
    for _ in range(count):
        ids = [rng.choice((rng.randrange(8, 20), rng.randrange(8, vocab_size))) for _ in range(rng.randrange(most))]
        documents.append(rng.choice(documents) if documents and rng.random() < 0.2 else [*ids, EOS])
    return documents


@pytest.mark.parametrize("vocab_size", [300, 70_000])
@pytest.mark.parametrize("block_tokens", [1, 40, 2**18])
@pytest.mark.parametrize(("block_size", "most"), [(1, 20), (8, 3), (8, 100), (64, 9000)])
def test_contents_of_rows(tmp_path, monkeypatch, vocab_size, block_tokens, block_size, most):
    """Documents may extend over blocks, commits and parts, and ids may be uint16 or int32."""
    monkeypatch.setattr(contents, "BLOCK_TOKENS", block_tokens)
    rng = random.Random(f"{vocab_size} {block_size} {most}")
    documents = make_ids(rng, 40, vocab_size, most)
    writer = SplitWriter(tmp_path, "train", block_size, vocab_size)
    for document in documents:
        cut = rng.randrange(len(document))
        for part in (document[:cut], document[cut:]):
            ends = [len(part)] if part[-1:] == [EOS] else []
            writer.add(np.array(part, np.uint32), 1, np.array(ends, np.int64))
            if rng.random() < 0.3:
                writer.commit()
    writer.close()
    split = PackedSplit(tmp_path / "train", vocab_size)
    assert split.chunks[0].dtype == (np.uint16 if vocab_size == 300 else np.int32) and len(split.chunks) > 3
    check(read_contents(split, EOS), count([documents], block_size))


@pytest.mark.parametrize(("num_shards", "block_size"), [(1, 16), (3, 16), (5, 1)])
def test_contents_of_prepared_text(tmp_path, tokenizer_dir, monkeypatch, capsys, num_shards, block_size):
    """A shard's last document may be cut off; it is neither joined with the next shard's nor compared."""
    monkeypatch.setattr(prepare, "COMMIT_BYTES", 2000)
    texts = [*make_documents(90), *make_documents(30), *make_documents(20)]
    random.Random(1).shuffle(texts)
    texts.insert(4, " ".join(make_documents(40, seed=9)))  # not in the first shard
    held_out = [*texts[:5], *make_documents(15, seed=3)]
    for name, lines in (("a", texts), ("b", held_out)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in lines))
    tokenizer, shards = read_tokenizer(str(tokenizer_dir)), {"train": [], "validation": []}
    for index in range(num_shards):
        files = (str(tmp_path / "a.jsonl"),), (str(tmp_path / "b.jsonl"),)
        source = TextSource(*files, num_shards=num_shards, shard_index=index)
        directory = tmp_path / "d" if num_shards == 1 else shard_dir(tmp_path / "d", index, num_shards)
        prepare_dataset(source, directory, block_size, tokenizer)
        pieces = [piece for piece in source.pieces() if piece.split == "train" or index == 0]
        for split, parts in shards.items():
            encoded = [tokenizer.backend_tokenizer.encode(p.text).ids for p in pieces if p.split == split]
            parts.append([[*ids, tokenizer.eos_token_id] for ids in encoded])
    if num_shards > 1:
        merge_shards(tmp_path / "d", num_shards)
    dataset = open_packed_dataset(tmp_path / "d")
    expected = {split: count(parts, block_size) for split, parts in shards.items()}
    found = {split: read_contents(rows, tokenizer.eos_token_id) for split, rows in dataset.splits.items()}
    for split, of_split in found.items():
        check(of_split, expected[split])
    train, validation = (expected[split]["complete"] for split in ("train", "validation"))
    num_shared = sum(document in set(train) for document in validation)
    assert count_shared(found["validation"].hashes, found["train"].hashes) == num_shared > 3
    assert count_shared(found["train"].hashes, found["validation"].hashes) == sum(d in set(validation) for d in train)

    capsys.readouterr()
    print_contents(dataset)
    table = read_table(capsys.readouterr().out)
    assert table["documents"] == ["141", "20"]
    assert table["that repeat an earlier one"][0] == str(len(train) - len(set(train))) != "0"
    assert table["that are also in the other split"][1] == str(num_shared)
    assert table["cut off at the end, not compared"] == [str(141 - len(train)), str(20 - len(validation))]
    tokens = {split: sum(len(d) for documents in parts for d in documents) for split, parts in shards.items()}
    assert table["tokens"] == [f"{n:,}" for n in tokens.values()]
    num_bytes = sum(len(text.encode()) for text in held_out)
    assert table["bytes per token"][1] == f"{num_bytes / tokens['validation']:.2f}"
    share = len(expected["train"]["seen"]) / len(tokenizer)
    assert table["share of the vocabulary seen"][0] == f"{100 * share:.1f}%"


def read_table(out: str) -> dict[str, list[str]]:
    """Map the labels of the printed table to the numbers of both splits."""
    lines = itertools.takewhile(lambda line: not line.startswith(("row ", "warning: ")), out.splitlines())
    return {line[:36].strip(): line[36:].replace("> ", ">").split() for line in lines}


def test_a_document_that_is_cut_off(tmp_path, tokenizer_dir, capsys):
    """The length of the only document is a lower bound, and nothing is compared."""
    (tmp_path / "a.txt").write_text("".join(make_documents(200)))
    source = TextSource((str(tmp_path / "a.txt"),))
    dataset = prepare_dataset(source, tmp_path / "d", 64, read_tokenizer(str(tokenizer_dir)))
    capsys.readouterr()
    print_contents(dataset)
    out = capsys.readouterr().out
    table, rows = read_table(out), len(dataset.splits["train"])
    assert table["tokens of the longest document"][0] == f">{rows * 64 + 1:,}" and "warning" not in out
    assert table["cut off at the end, not compared"] == ["1", "1"]


def test_a_shard_without_validation_text(tmp_path, jsonl_file, tokenizer_dir, capsys):
    """An empty split prints zeros."""
    source = TextSource((str(jsonl_file),), (str(jsonl_file),), num_shards=2, shard_index=1)
    dataset = prepare_dataset(source, tmp_path / "d", 16, read_tokenizer(str(tokenizer_dir)))
    capsys.readouterr()
    print_contents(dataset)
    table = read_table(capsys.readouterr().out)
    assert [numbers[1] for numbers in table.values()][1:] == ["0", "0", "0", "0", "0", "0.0%", "-", "0", "0", "0.0%"]


def test_contents_of_token_ids(tmp_path, documents, tokenizer_dir, capsys):
    """A dataset made of token ids holds the same as one made of their text."""
    tokenizer = read_tokenizer(str(tokenizer_dir))
    for name in ("train", "validation"):
        texts = documents[:200] + documents[:30] if name == "train" else documents[190:]
        rows = [{"input_ids": tokenizer.backend_tokenizer.encode(text).ids, "text": text} for text in texts]
        datasets.Dataset.from_list(rows).to_json(tmp_path / f"{name}.jsonl")
    tables = []
    for column in ("input_ids", "text"):
        files = (str(tmp_path / "train.jsonl"),), (str(tmp_path / "validation.jsonl"),)
        dataset = prepare_dataset(TextSource(*files, text_column_name=column), tmp_path / column, 16, tokenizer)
        capsys.readouterr()
        print_contents(dataset)
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1] and read_table(tables[0])["documents"] == ["230", "110"]


def test_warnings(tmp_path, tokenizer_dir, capsys):
    """One for repeated documents, validation text in train, a document of most tokens, or a vocabulary barely used."""
    once, held_out = make_documents(40), make_documents(10, seed=8)
    cases = {
        "22% of the training documents repeat": ([*once, *once[:11]], held_out),
        "30% of the validation documents also": ([*once, *held_out[:3]], held_out),
        "one document holds 8": ([*once[:20], "".join(make_documents(90, seed=2))], held_out),
        "vocabulary occurs": (["a b" * n for n in range(1, 9)], ["b a b a b a b a b a", "b", "b b"]),
        "": (once, held_out),
    }
    for number, (expected, texts) in enumerate(cases.items()):
        for name, lines in zip("ab", texts, strict=True):
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in lines))
        source = TextSource((str(tmp_path / "a.jsonl"),), (str(tmp_path / "b.jsonl"),))
        dataset = prepare_dataset(source, tmp_path / f"{number}", 1, read_tokenizer(str(tokenizer_dir)))
        capsys.readouterr()
        print_contents(dataset)
        warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
        assert len(warnings) == bool(expected) and expected in "".join(warnings), (expected, warnings)


def test_an_id_outside_the_vocabulary(tmp_path):
    """A damaged file is an error."""
    writer = SplitWriter(tmp_path, "train", 4, 300)
    writer.add(np.arange(100), 1, np.array([100]))
    writer.close()
    with pytest.raises(UserError, match="contains token id 9[0-9], beyond its vocabulary of 50; prepare it again"):
        read_contents(PackedSplit(tmp_path / "train", 50), EOS)


def test_memory_does_not_grow_with_the_rows(tmp_path, monkeypatch):
    """Four times the tokens, in one document, take the same memory."""
    monkeypatch.setattr(contents, "BLOCK_TOKENS", 2**12)
    peaks = []
    for num_tokens in (250_000, 1_000_000):
        writer = SplitWriter(tmp_path / f"{num_tokens}", "train", 64, 50_257)
        writer.add(np.random.default_rng(0).integers(8, 50_257, num_tokens), 1, np.array([num_tokens]))
        writer.close()
        split = PackedSplit(tmp_path / f"{num_tokens}" / "train", 50_257)
        tracemalloc.start()
        read_contents(split, EOS)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0] < 1_000_000


def test_lines_fit_the_terminal():
    """Lines take at most 80 columns, of which a wide character takes two, and show control characters as escapes."""
    text = 'say "x"\n\t\x1b[31m\u202eabc\\' + "猫" * 60 + "é" * 100
    lines = fill_lines("row 1: ", text)
    assert all(line.startswith("  ") for line in lines[1:]) and len(lines) == 4
    assert all(len(line) + line.count("猫") in (79, 80) for line in lines[:-1])
    joined = lines[0] + "".join(line[2:] for line in lines[1:])
    assert joined == 'row 1: say "x"\\n\\t\\x1b[31m\\u202eabc\\' + "猫" * 60 + "é" * 100


def test_the_printed_rows_are_rows_of_the_dataset(dataset, capsys):
    """Three rows of train, evenly spread, under their numbers."""
    print_contents(dataset)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) <= 17
    rows = dataset.splits["train"]
    numbers = [0, len(rows) // 3, 2 * len(rows) // 3]
    starts = [index for index, line in enumerate(lines) if line.startswith("row ")]
    for number, start, end in zip(numbers, starts, [*starts[1:], len(lines)], strict=True):
        shown = lines[start] + "".join(line[2:] for line in lines[start + 1 : end])
        text = dataset.load_tokenizer().decode(rows[np.array([number])][0])
        assert shown == f"row {number:,}: " + text.replace("\n", "\\n")[: len(shown) - len(f"row {number:,}: ")]
        assert len(shown) > min(140, len(text))


def test_the_script_prints_the_contents(tmp_path, jsonl_file, tokenizer_dir, capsys):
    """It does so after preparing and after merging shards, and --inspect prints the same."""
    common = ["--train_file", jsonl_file, "--tokenizer_name", tokenizer_dir, "--block_size", BLOCK_SIZE]
    common += ["--validation_split_percentage", 20, "--output_dir"]
    shards = [[tmp_path / "s", "--num_shards", 2, *more] for more in (["--shard_index", 0], ["--shard_index", 1])]
    for name, runs in (
        ("d", [[tmp_path / "d"]]),
        ("s", [*shards, [tmp_path / "s", "--num_shards", 2, "--merge_shards"]]),
    ):
        for run in runs:
            assert not run_script("scripts/prepare_data.py", *common, *run)
        printed = capsys.readouterr().out
        assert not run_script("scripts/prepare_data.py", "--inspect", tmp_path / name)
        inspected = capsys.readouterr().out
        assert printed.count(inspected) == 1 and len(inspected.splitlines()) == 17
        assert sum(map(int, read_table(inspected)["documents"])) == 300


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--inspect gone", "there is no dataset gone; create it with"),
        ("--inspect .", ". is not a packed dataset; pass the --output_dir of a preparation"),
        ("--inspect d --block_size 8", "--inspect only reads a packed dataset, so --block_size has no effect"),
        ("--inspect d --output_dir d", "--inspect only reads a packed dataset, so --output_dir has no effect"),
        ("--train_file a.txt --tokenizer_name t", "pass --output_dir, the folder to create, or --inspect"),
    ],
)
def test_mistakes_with_inspect(tmp_path, monkeypatch, arguments, expected):
    """Each is one sentence."""
    monkeypatch.chdir(tmp_path)
    error = run_script("scripts/prepare_data.py", *arguments.split())
    assert error.startswith("error: ") and expected in error and "\n" not in error


def test_preparing_and_inspecting_import_no_framework(tmp_path, jsonl_file, tokenizer_dir):
    """They start fast because they import neither torch nor transformers nor datasets."""
    code = (
        "import runpy, sys; runpy.run_path('scripts/prepare_data.py', run_name='__main__'); "
        "print({'torch', 'transformers', 'datasets'} & set(sys.modules))"
    )
    prepare = ["--train_file", jsonl_file, "--tokenizer_name", tokenizer_dir, "--output_dir", tmp_path / "d"]
    for arguments in ([*prepare, "--block_size", "16"], ["--inspect", tmp_path / "d"]):
        command = [sys.executable, "-c", code, *arguments]
        result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        assert result.stdout.endswith("\nset()\n"), result.stderr
