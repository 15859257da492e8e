"""Paths or a dataset -> units of text, each of which can be read on its own (recipe/data/read.py).

Unit k is a pure function of (source, k), so any process can read it, at any time, and gets the same documents.
"""

import contextlib
import functools
import glob
import hashlib
import json
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from recipe.config import STANDARD_LIBRARY
from recipe.environment import cache_dir
from recipe.errors import UserError, check_local_path, one_line

if TYPE_CHECKING:
    import datasets

KINDS = (".txt", ".md", ".jsonl", ".json", ".csv", ".parquet", ".wet")
COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz")
COMPRESSION_RATIO = 4  # bytes of text per byte of a compressed file, roughly
# A source up to this size is one unit. Its documents are held out exactly, and one core prepares it in a second.
SMALL_SOURCE = 32_000_000
SMALLEST_UNIT, LARGEST_UNIT, NUM_UNITS = 8_000_000, 128_000_000, 256  # 256 units, if their size permits
FEW_TEXTS = 40  # fewer text files have too few documents to hold some out, so the end of each is held out
HASHED_WHOLE = 64 * 2**20  # bytes; of a larger file, this much is hashed in evenly spaced blocks
BLOCK = 2**20


class Part(NamedTuple):
    """A stretch of a source: bytes of plain text or JSON lines, row groups of a Parquet file, shards of a dataset.

    Other files are read as a whole.
    """

    path: str
    start: int = 0
    stop: int | None = None  # None: to the end
    split: str | None = None  # None: each document by its hash; "tail": the end of the text is validation


class Unit(NamedTuple):
    """What one process reads and tokenizes at a time."""

    parts: list[Part]
    num_bytes: int  # bytes of text; 0 if unknown
    is_only: bool = False  # whether it is all the training text


@dataclass(frozen=True)
class TextSource:
    """Where documents come from. Without validation text, a share of the training documents is held out.

    train_files, validation_files: files, folders (all supported files in them) and glob patterns.
    document_separator: cuts text files into documents, for example a blank line; without it, a file is a document.
    """

    train_files: tuple[str, ...] = ()
    validation_files: tuple[str, ...] = ()
    dataset_name: str | None = None
    dataset_config_name: str | None = None
    dataset_split: str = "train"
    text_column_name: str = "text"
    document_separator: str | None = None
    validation_split_percentage: float = 5.0
    skip_bad_files: bool = False

    def __post_init__(self):
        for is_valid, message in (
            (bool(self.train_files) != bool(self.dataset_name), "pass exactly one of --train_file and --dataset_name"),
            (self.train_files or not self.validation_files, "--validation_file needs --train_file"),
            (self.document_separator != "", "document_separator must not be empty"),
        ):
            if not is_valid:
                raise UserError(message)

    @functools.cached_property
    def files(self) -> "Files":
        """The training files."""
        return find_files(self.train_files)

    @functools.cached_property
    def held_out_files(self) -> "Files":
        """The separate validation files."""
        return find_files(self.validation_files)

    @property
    def has_validation(self) -> bool:
        """Whether the validation text is separate, not held out of the training documents."""
        if self.dataset_name in (None, STANDARD_LIBRARY):
            return bool(self.validation_files)
        return self.dataset_split == "train" and "validation" in self.opened_dataset

    def units(self) -> list[Unit]:
        """Return the units in reading order, separate validation text first. Raises `UserError` for bad input."""
        if self.dataset_name == STANDARD_LIBRARY:
            return [Unit([Part(STANDARD_LIBRARY)], 0, is_only=True)]
        if self.dataset_name:
            return self._units_of_dataset()
        split = "train" if self.has_validation else None
        train = group(self._stretches(self.files.paths, split))
        if len(train) == 1:
            train = [train[0]._replace(is_only=True)]
        return group(self._stretches(self.held_out_files.paths, "validation")) + train

    def _stretches(self, paths: list[str], split: str | None) -> Iterator[tuple[Part, int]]:
        """Yield (part, bytes of text) of files, none much larger than a unit where the kind allows it."""
        kinds = [".compressed" if compression_of(path) else kind_of(path) for path in paths]
        ratios = [COMPRESSION_RATIO if kind in (".compressed", ".parquet") else 1 for kind in kinds]
        sizes = [os.path.getsize(path) * ratio for path, ratio in zip(paths, ratios, strict=True)]
        unit_bytes = unit_size(sum(sizes))
        for path, size in zip(paths, sizes, strict=True):
            kind = kind_of(path)
            if kind == ".parquet":
                yield from self._row_groups(path, unit_bytes, split)
                continue
            part = Part(path, split=split)
            is_text = kind in (".txt", ".md")
            if is_text and split is None and self.document_separator is None:
                is_whole = len(paths) * self.validation_split_percentage >= FEW_TEXTS * 5.0 and size <= unit_bytes
                part = part._replace(split=None if is_whole else "tail")
            if compression_of(path) or not (is_text or kind == ".jsonl"):
                yield part, size
                continue
            for start in range(0, max(1, size), unit_bytes):
                yield part._replace(start=start, stop=min(start + unit_bytes, size)), min(unit_bytes, size - start)

    def _row_groups(self, path: str, unit_bytes: int, split: str | None) -> Iterator[tuple[Part, int]]:
        """Yield the row groups of a Parquet file; a damaged file as a whole, whose reading says what is wrong."""
        try:
            metadata = pq.ParquetFile(path).metadata
        except (OSError, pa.ArrowException):
            metadata = None
        if metadata is None or not metadata.num_row_groups:
            yield Part(path, split=split), 0
            return
        columns = {metadata.schema.column(index).path: index for index in range(metadata.num_columns)}
        column, start, num_bytes = columns.get(self.text_column_name), 0, 0
        for number in range(metadata.num_row_groups):
            group_of_rows = metadata.row_group(number)
            num_bytes += 0 if column is None else group_of_rows.column(column).total_uncompressed_size
            if num_bytes >= unit_bytes or number + 1 == metadata.num_row_groups:
                yield Part(path, start, number + 1, split), num_bytes
                start, num_bytes = number + 1, 0

    @functools.cached_property
    def opened_dataset(self) -> "dict[str, datasets.IterableDataset]":
        """The splits of a Hub dataset, a local one, or one written by `save_to_disk`, in as many shards as it has."""
        import datasets  # imported here because it takes a second, which files do not need

        folder = Path(self.dataset_name)
        check_local_path(self.dataset_name)
        try:
            if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
                loaded = datasets.load_from_disk(folder)
                loaded = loaded if isinstance(loaded, dict) else {"train": loaded}
                return {
                    name: rows.with_format(None).to_iterable_dataset(
                        num_shards=max(1, min(len(rows), NUM_UNITS, (rows.data.nbytes or 0) // SMALLEST_UNIT))
                    )
                    for name, rows in loaded.items()
                }
            loaded = datasets.load_dataset(self.dataset_name, self.dataset_config_name, streaming=True)
        except Exception as error:  # the Hub client, datasets and the file system raise various errors
            raise UserError(f"cannot open dataset {self.dataset_name}: {one_line(error)}") from error
        loaded = loaded if isinstance(loaded, dict) else {"train": loaded}
        return {name: rows.reshard() for name, rows in loaded.items()}

    def _units_of_dataset(self) -> list[Unit]:
        if self.dataset_split not in self.opened_dataset:
            missing = f"has no split '{self.dataset_split}' (it has {', '.join(self.opened_dataset)})"
            raise UserError(f"dataset {self.dataset_name} {missing}; pass --dataset_split")
        units, split = [], None
        if self.has_validation:
            units, split = [Unit([Part("validation", 0, 1, "validation")], 0)], "train"
        num_bytes = COMPRESSION_RATIO * sum(size for _, _, size in self.dataset_files or ())
        num_shards = self.opened_dataset[self.dataset_split].num_shards
        count = min(num_shards, -(-num_bytes // unit_size(num_bytes)) or NUM_UNITS)
        is_only = count == 1 and split is None
        return units + [Unit([Part(self.dataset_split, k, count, split)], 0, is_only) for k in range(count)]

    def describe(self) -> dict:
        """Return the source as the metadata of a prepared dataset records it."""
        held_out = None if self.has_validation else self.validation_split_percentage
        names = ("dataset_name", "dataset_config_name") if self.dataset_name else ("train_files", "validation_files")
        return {**{name: getattr(self, name) for name in names}, "validation_split_percentage": held_out}

    @functools.cached_property
    def options_sha256(self) -> str:
        """Hash of the options that, with the content, determine the documents."""
        names = ("dataset_name", "dataset_config_name", "dataset_split") if self.dataset_name else ()
        names += ("text_column_name", "document_separator", "validation_split_percentage", "skip_bad_files")
        options = [getattr(self, name) for name in names]
        if self.dataset_name and Path(self.dataset_name).exists():
            options[0] = Path(self.dataset_name).name
        return hashlib.sha256(repr(options).encode()).hexdigest()

    @functools.cached_property
    def content_id(self) -> str | None:
        """Identify the content: names, sizes and content of the files. None for a dataset of a Hub out of reach."""
        if self.dataset_name == STANDARD_LIBRARY:
            return identify_files([*map(str, standard_library_files()), _topics_file()])
        if self.dataset_name is None:
            return identify_files(self.files.paths) + identify_files(self.held_out_files.paths)
        if self.dataset_files is None:
            return None
        return hashlib.sha256(repr(sorted(self.dataset_files)).encode()).hexdigest()

    @functools.cached_property
    def dataset_files(self) -> list[tuple[str, str, int]] | None:
        """The name, content hash and bytes of each data file of a dataset. None if the Hub does not say."""
        if (folder := Path(self.dataset_name)).exists():
            paths = [str(path) for path in folder.rglob("*") if path.is_file()]
            names = [os.path.relpath(path, folder) for path in paths]
            return list(zip(names, digest_files(paths), map(os.path.getsize, paths), strict=True))
        from huggingface_hub import HfApi  # imported here because it takes 0.1 s, which files do not need

        try:
            found = HfApi().dataset_info(self.dataset_name, files_metadata=True, timeout=30).siblings
        except Exception:  # no network or no such dataset: opening it raises the error that says which
            return None
        # An edit of the README makes a commit, but changes no data file.
        return [
            (f.rfilename, f.blob_id, f.size or 0) for f in found if not f.rfilename.endswith((".md", ".gitattributes"))
        ]


def unit_size(num_bytes: int) -> int:
    if num_bytes <= SMALL_SOURCE:
        return max(1, num_bytes)
    return min(LARGEST_UNIT, max(SMALLEST_UNIT, num_bytes // NUM_UNITS))


def group(stretches: Iterable[tuple[Part, int]]) -> list[Unit]:
    """Put consecutive parts together until they are a unit, so that small files share one."""
    stretches = list(stretches)
    unit_bytes, units, parts, num_bytes = unit_size(sum(size for _, size in stretches)), [], [], 0
    for part, size in stretches:
        parts.append(part)
        num_bytes += size
        if num_bytes >= unit_bytes:
            units.append(Unit(parts, num_bytes))
            parts, num_bytes = [], 0
    return units + ([Unit(parts, num_bytes)] if parts else [])


# ------------------------------------------------------------------ files


@dataclass
class Files:
    """Files to read, and how many others the folders hold, by suffix."""

    paths: list[str] = field(default_factory=list)
    ignored: Counter = field(default_factory=Counter)


def find_files(given: Iterable[str]) -> Files:
    """Replace folders and patterns by the supported files in them, sorted. Raises `UserError` if there is none."""
    found = Files()
    for path in given:
        if Path(path).is_file():
            kind_of(path)  # raises for an unsupported one
            found.paths.append(path)
            continue
        pattern = f"{glob.escape(path)}/**" if Path(path).is_dir() else path
        before = len(found.paths)
        for name in sorted(glob.glob(pattern, recursive=True)):
            if not Path(name).is_file():
                continue
            if _suffix(name) not in KINDS:
                found.ignored[Path(name).suffix or "no suffix"] += 1
            elif os.path.getsize(name) == 0:
                found.ignored["empty"] += 1
            else:
                found.paths.append(name)
        if len(found.paths) == before:
            if not found.ignored:
                raise UserError(f"the folder {path} is empty" if Path(path).is_dir() else f"there is no file {path}")
            kinds = f"it holds {_list(found.ignored)}, and not {', '.join(KINDS)}"
            raise UserError(f"there is no file of a supported kind in {path}: {kinds}")
    return found


def describe_files(files: Files) -> str | None:
    """Say how many files are read and which are not; None if that is evident."""
    return f"reading {len(files.paths):,} files; ignoring {_list(files.ignored)}" if files.ignored else None


def _list(ignored: Counter) -> str:
    return ", ".join(f"{count:,} {kind}" for kind, count in sorted(ignored.items()))


def compression_of(path: str) -> str | None:
    return next((suffix for suffix in COMPRESSIONS if path.lower().endswith(suffix)), None)


def _suffix(path: str) -> str:
    name = Path(path.lower())
    return (name.with_suffix("") if compression_of(path) else name).suffix


def kind_of(path: str) -> str:
    """Return a file's suffix, ignoring the compression's. Raises `UserError` for an unsupported one."""
    if (kind := _suffix(path)) not in KINDS:
        compressed = ", ".join(COMPRESSIONS)
        raise UserError(f"cannot read {path}: use {', '.join(KINDS)} files, plain or compressed ({compressed})")
    return kind


def name_of_text(text: str) -> str:
    """Derive a folder name from a path, pattern or Hub id: its last part without suffixes and special characters."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(text).name.split(".")[0]).strip("-.") or "text"


def standard_library_files() -> list[Path]:
    """Return the sources of Python's standard library without tests.

    Raises `UserError` if the interpreter ships without sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    # `encodings` holds tables of character names.
    skipped = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "pydoc_data", "encodings"}
    sources = sorted(p for p in root.rglob("*.py") if not skipped & set(p.relative_to(root).parts))
    if len(sources) < 50:
        remedy = "pass --train_file TEXT.txt with a megabyte of text or more"
        raise UserError(f"{root} holds no Python sources for the demo to train on; {remedy}")
    return sources


def read_standard_library() -> Iterator[str]:
    """Yield the documents of Python's standard library: reference documentation, then sources without tests."""
    with contextlib.suppress(ImportError):  # some distributions omit the documentation
        from pydoc_data.topics import topics

        yield from (text for _, text in sorted(topics.items()))
    for path in standard_library_files():
        with contextlib.suppress(UnicodeDecodeError, OSError):  # a few sources deliberately use another encoding
            yield path.read_text(encoding="utf-8")


def _topics_file() -> str:
    return str(Path(sysconfig.get_path("stdlib")) / "pydoc_data" / "topics.py")


# ------------------------------------------------------------------ identity


def identify_files(paths: list[str]) -> str:
    """Hash the names, sizes and content of files, wherever they are and whenever they were copied there."""
    names = [(Path(path).name, digest) for path, digest in zip(paths, digest_files(paths), strict=True)]
    return hashlib.sha256(repr(names).encode()).hexdigest()


def digest_files(paths: list[str]) -> list[str]:
    """Return size and hash of each file. They are cached by path, size and time, so that they are read once."""
    cache_file, cached, keys = cache_dir() / "digests.json", {}, []
    with contextlib.suppress(OSError, ValueError):
        cached = json.loads(cache_file.read_text())
    for path in paths:
        status = os.stat(path)
        keys.append(f"{os.path.abspath(path)} {status.st_size} {status.st_mtime_ns}")
    new = {key: path for key, path in zip(keys, paths, strict=True) if key not in cached}
    if new:
        with ThreadPoolExecutor() as threads:  # hashing releases Python's lock
            cached |= zip(new, threads.map(digest_file, new.values()), strict=True)
        with contextlib.suppress(OSError):
            cache_file.parent.mkdir(parents=True, exist_ok=True)
            partial = cache_file.with_name(f"digests-{os.getpid()}.json")
            partial.write_text(json.dumps(cached))
            os.replace(partial, cache_file)
    return [cached[key] for key in keys]


def digest_file(path: str) -> str:
    """Hash a file's size and content; of a large file, its first block, its last and evenly spaced ones."""
    import xxhash  # not at the top, because training on a packed dataset does not need it

    digest = xxhash.xxh3_128()
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            count = -(-min(size, HASHED_WHOLE) // BLOCK)
            for i in range(count):
                file.seek(i * BLOCK if size <= HASHED_WHOLE else i * (size - BLOCK) // (count - 1))
                digest.update(file.read(BLOCK))
    except OSError as error:
        return f"unreadable: {error.strerror}"
    return f"{size} {digest.hexdigest()}"
