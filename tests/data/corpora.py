"""Texts written as files of every kind, and what the recipe reads or packs of them."""

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from helpers import ROOT
from tokenizers import Tokenizer

from recipe.data.packed import PackedSplit, list_stretches, map_ids, read_metadata
from recipe.data.read import Report, list_units, read_unit
from recipe.data.source import TextSource


def write_jsonl(path: Path, values: list, column: str = "text") -> str:
    path.write_text("".join(json.dumps({column: value, "n": 1}) + "\n" for value in values), encoding="utf-8")
    return str(path)


def write_parquet(path: Path, values: list, column: str = "text", row_group_size: int = 7) -> str:
    table = pa.table({column: values, "n": range(len(values))})
    pq.write_table(table, path, row_group_size=row_group_size)
    return str(path)


def write_text(path: Path, text: str) -> str:
    path.write_bytes(text.encode())
    return str(path)


def csv_of(texts: list[str], column: str) -> bytes:
    table = io.StringIO()
    csv.writer(table).writerows([["n", column], *([str(number), text] for number, text in enumerate(texts))])
    return table.getvalue().encode()


# Suffix of a file -> its content, of texts and the name of their column. Documents of plain text end with <sep>.
KINDS = {
    "txt": lambda texts, column: "<sep>".join(texts).encode(),
    "md": lambda texts, column: "<sep>".join(texts).encode(),
    "jsonl": lambda texts, column: "".join(json.dumps({column: text, "n": 1}) + "\n\n" for text in texts).encode(),
    "json": lambda texts, column: json.dumps([{column: text} for text in texts]).encode(),
    "lines.json": lambda texts, column: "".join(json.dumps({column: text}) + "\n" for text in texts).encode(),
    "csv": csv_of,
}


def read(source: TextSource, report: Report | None = None) -> list[tuple[str, str]]:
    """Return the split and the text of each document of all units, in order."""
    report = Report() if report is None else report
    return [tuple(document) for unit in list_units(source) for document in read_unit(source, unit, report)]


def texts_of(source: TextSource, split: str | None = None, report: Report | None = None) -> list[str]:
    return [text for name, text in read(source, report) if split in (None, name)]


def all_rows(split: PackedSplit) -> np.ndarray:
    return split[np.arange(len(split))] if len(split) else np.empty((0, split.block_size + 1), np.int64)


def ids_in(directory: Path, split: str) -> np.ndarray:
    """Return all ids of a split of a packed dataset."""
    return np.concatenate(list(map(map_ids, list_stretches(directory, read_metadata(directory), split))))


def encode_plainly(tokenizer_dir: Path, texts: list[str]) -> list[int]:
    """Return the ids that the library `tokenizers` has for documents, each with an end-of-text id after it."""
    backend = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    backend.encode_special_tokens = True
    end = backend.token_to_id("<|endoftext|>")
    return [index for text in texts for index in [*backend.encode(text).ids, end]]


def start_program(name: str, *arguments: object) -> subprocess.Popen:
    """Start a program of tests/programs in a session of its own."""
    command = [sys.executable, str(ROOT / "tests" / "programs" / name), *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
