"""Text: files, Hub datasets or the Python standard library -> a stream of documents, split by document.

A document is one string. Nothing here knows about tokens.
"""

import functools
import hashlib
import itertools
import math
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import datasets

from recipe.config import STANDARD_LIBRARY, UserError

FILE_KINDS = (".txt", ".jsonl", ".json", ".parquet")
SMALL_CORPUS_DOCUMENTS = 10_000  # up to here documents are held back to split them exactly


@dataclass(frozen=True)
class TextSource:
    """Where documents come from; `validation_files` empty: a share of the training documents is held out."""

    train_files: tuple[str, ...] = ()
    validation_files: tuple[str, ...] = ()
    dataset_name: str | None = None
    dataset_config_name: str | None = None
    text_column_name: str = "text"
    validation_split_percentage: float = 5.0

    def __post_init__(self):
        if bool(self.train_files) == bool(self.dataset_name):
            raise UserError("pass --train_file or --dataset_name, one of them")
        if self.validation_files and not self.train_files:
            raise UserError("--validation_file needs --train_file")
        for path in itertools.chain(self.train_files, self.validation_files):
            if not Path(path).is_file():
                raise UserError(f"there is no file {path}")
            if Path(path).suffix.lower() not in FILE_KINDS:
                raise UserError(f"cannot read {path}: use {', '.join(FILE_KINDS)} files")
        if not 0 < self.validation_split_percentage < 100:
            raise UserError(
                f"validation_split_percentage must be between 0 and 100, got {self.validation_split_percentage}"
            )

    def describe(self) -> dict:
        """What the metadata of a prepared dataset says of its source."""
        if self.dataset_name:
            return {"dataset_name": self.dataset_name, "dataset_config_name": self.dataset_config_name}
        return {"train_files": list(self.train_files), "validation_files": list(self.validation_files)}

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of everything that decides the documents: the files' bytes, or the dataset's name and files."""
        options = (
            self.dataset_name,
            self.dataset_config_name,
            self.text_column_name,
            self.validation_split_percentage,
            len(self.validation_files),
        )
        digest = hashlib.sha256(repr(options).encode())
        for path in itertools.chain(self.train_files, self.validation_files):
            digest.update(_file_sha256(path))
        if self.dataset_name == STANDARD_LIBRARY:
            for document in read_standard_library():
                digest.update(document.encode())
        elif self.dataset_name and Path(self.dataset_name).exists():
            for path in sorted(p for p in Path(self.dataset_name).rglob("*") if p.is_file()):
                digest.update(f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}".encode())
        return digest.hexdigest()

    def splits(self) -> Iterator[tuple[str, str]]:
        """Yield ("train" | "validation", document) in reading order. Raises `UserError` for bad input."""
        if self.validation_files:
            yield from (("train", text) for text in read_files(self.train_files, self.text_column_name))
            yield from (("validation", text) for text in read_files(self.validation_files, self.text_column_name))
        elif self._is_a_few_texts():  # too few documents to hold whole ones out: each gives its own tail
            for text in read_files(self.train_files, self.text_column_name):
                head, tail = cut_at_line(text, 1 - self.validation_split_percentage / 100)
                yield "train", head
                yield "validation", tail
        elif self.train_files:
            documents = read_files(self.train_files, self.text_column_name)
            yield from split_documents(documents, self.validation_split_percentage)
        elif self.dataset_name == STANDARD_LIBRARY:
            yield from split_documents(read_standard_library(), self.validation_split_percentage)
        else:
            streams = read_dataset(self.dataset_name, self.dataset_config_name, self.text_column_name)
            if "validation" in streams:
                yield from (("train", text) for text in streams["train"])
                yield from (("validation", text) for text in streams["validation"])
            else:
                yield from split_documents(streams["train"], self.validation_split_percentage)

    def _is_a_few_texts(self) -> bool:
        texts = [path for path in self.train_files if path.lower().endswith(".txt")]
        return len(texts) == len(self.train_files) > 0 and len(texts) * self.validation_split_percentage < 200


def split_documents(documents: Iterable[str], percentage: float) -> Iterator[tuple[str, str]]:
    """Assign each document by its own hash, so that equal documents never fall on both sides.

    A small corpus is split exactly (the smallest hashes, at least one document, never all); a larger one is
    streamed, and the share is met on average.
    """
    documents = iter(documents)
    held_back = list(itertools.islice(documents, SMALL_CORPUS_DOCUMENTS))
    if len(held_back) < SMALL_CORPUS_DOCUMENTS:
        hashes = sorted({_hash64(text) for text in held_back})
        count = min(max(1, round(len(hashes) * percentage / 100)), len(hashes) - 1)
        threshold = hashes[count - 1] if count > 0 else -1
    else:
        threshold = math.floor(percentage / 100 * 2**64)
    for text in itertools.chain(held_back, documents):
        yield ("validation" if _hash64(text) <= threshold else "train"), text


def _file_sha256(path: str) -> bytes:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.digest()


def _hash64(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def cut_at_line(text: str, share: float) -> tuple[str, str]:
    """Cut a text in two after the last line break before `share` of it (or, without one, right there)."""
    position = round(len(text) * share)
    position = text.rfind("\n", 0, position) + 1 or position
    return text[:position], text[position:]


def read_files(paths: Iterable[str], text_column_name: str) -> Iterator[str]:
    """Documents of .txt (the whole file is one), .jsonl/.json and .parquet (a row is one) files, in order."""
    for path in paths:
        suffix = Path(path).suffix.lower()
        if suffix == ".txt":
            yield _read_text_file(path)
        else:
            yield from _read_table("parquet" if suffix == ".parquet" else "json", path, text_column_name)


def _read_text_file(path: str) -> str:
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            text = file.read()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    if not text.strip():
        raise UserError(f"{path} is empty")
    return text


def _read_table(kind: str, path: str, column: str) -> Iterator[str]:
    try:
        table = datasets.load_dataset(kind, data_files=[path], split="train", streaming=True)
        yield from _texts(table, column, path)
    except UserError:
        raise
    except Exception as error:  # datasets wraps what pyarrow and json raise in several classes of its own
        raise UserError(f"cannot read {path} as {kind}: {' '.join(str(error).split())[:200]}") from error


def _texts(rows: Iterable[dict], column: str, where: str) -> Iterator[str]:
    """The text of each row; rows without any (null, or no character) are passed over."""
    for number, row in enumerate(rows):
        if column not in row:
            raise UserError(f"{where} has no column '{column}'; pass --text_column_name with one of {', '.join(row)}")
        if not isinstance(row[column], (str, type(None))):
            kind = type(row[column]).__name__
            raise UserError(f"{where}, row {number + 1}: column '{column}' holds {kind}, not text")
        if row[column]:
            yield row[column]


def read_dataset(name: str, config_name: str | None, column: str) -> dict[str, Iterator[str]]:
    """Documents of the splits of a Hub or local dataset (also one written by `save_to_disk`), "train" among them."""
    folder = Path(name)
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            loaded = datasets.load_from_disk(name)
        else:
            loaded = datasets.load_dataset(name, config_name, streaming=True)
    except Exception as error:  # the Hub client, datasets and the file system each raise their own
        raise UserError(f"cannot open dataset {name}: {' '.join(str(error).split())[:300]}") from error
    splits = loaded if isinstance(loaded, dict) else {"train": loaded}
    if "train" not in splits:
        raise UserError(f"dataset {name} has no split 'train' (it has {', '.join(splits)})")
    return {split: _texts(rows, column, f"dataset {name}") for split, rows in splits.items()}


def read_standard_library() -> Iterator[str]:
    """The Python standard library as installed: its reference documentation, then its sources without tests.

    Raises `UserError` where the interpreter ships without sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {
        "test",
        "tests",
        "idlelib",
        "lib2to3",
        "site-packages",
        "dist-packages",
        "pydoc_data",
        "encodings",
    }  # (encodings are tables of character names)
    sources = sorted(p for p in root.rglob("*.py") if not skipped & set(p.relative_to(root).parts))
    if len(sources) < 50:
        raise UserError(
            f"this Python has no library sources in {root} to train the demo on; "
            "pass --train_file TEXT.txt with any text of a megabyte or more"
        )
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave the documentation out; the sources alone will do
        topics = {}
    yield from (text for _, text in sorted(topics.items()))
    for path in sources:
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue  # a few sources are not UTF-8 on purpose
        if text.strip():
            yield text
