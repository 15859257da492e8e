"""Paths -> files of text: which of them are text, how they are opened, and what identifies them."""

import bz2
import contextlib
import functools
import glob
import gzip
import hashlib
import io
import itertools
import json
import lzma
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from recipe.disk import file_identity, has_settled
from recipe.environment import cache_dir
from recipe.errors import UserError
from recipe.progress import progress_target

KINDS = (".txt", ".md", ".jsonl", ".json", ".csv", ".parquet")
TOKENS = ".bin"  # token ids (recipe/data/tokens.py); used only if named, because other programs use this suffix, too
COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz")
BLOCK = 2**20
HELD_OUT_NAMES = {"val", "valid", "validation", "test", "dev"}
# A folder with one of these holds a run, a model, a tokenizer, a dataset or a virtual environment.
RESULTS = {"training_config.yaml", "model.safetensors", "tokenizer_config.json", "pyvenv.cfg"}
SAVED = {"dataset_dict.json", "dataset_info.json"}  # written by `save_to_disk` of datasets
PACKED = ("metadata.json", "tokenizer/tokenizer.json")  # a packed dataset has both


@dataclass
class Files:
    """Files to read, and the number of ignored files by reason."""

    paths: list[str] = field(default_factory=list)
    ignored: Counter = field(default_factory=Counter)


def find_files(paths: Iterable[str], held_out: Sequence[str] = ()) -> Files:
    """Replace folders and patterns by the supported files in them, sorted, each file once.

    held_out: files to ignore, and copies of them, because they are the validation text. Raises `UserError` if nothing
    is left.
    """
    files = Files()
    seen = {file_identity(path): "named as validation text" for path in held_out}
    counted = set()
    for path in paths:
        if Path(path).is_file():
            kind_of(path)  # raises for an unsupported one
            names = {path: None}
        elif Path(path).is_dir():
            if is_packed(path) or holds(path, SAVED):
                option = "--dataset_dir" if is_packed(path) else "--dataset_name"
                raise UserError(f"{path} is a dataset, not a folder of text; pass it as {option}")
            names = {name: _reason(name) for name in sorted(_walk(path))}
        else:
            names = _match(path)
        if not names:
            if Path(path).is_dir():
                raise UserError(f"there is no text in the folder {path}")
            missing = f"there is no file {path}"
            if "://" in path:
                missing += "; download it first"
            if "[" in path:
                missing += "; in a pattern, [ starts a set of characters, so write [[] for a literal ["
            raise UserError(missing)
        if all(names.values()):
            kinds = f"it holds {_list(Counter(names.values()))}, and not {', '.join(KINDS)}"
            if TOKENS in names.values():
                kinds += f"; name token ids by a pattern, such as '{Path(path, '*.bin')}'"
            raise UserError(f"there is no file of a supported kind in {path}: {kinds}")
        for name, ignored in names.items():
            reason = ignored or seen.get(file_identity(name))
            if compression_of(name) and names.get(os.path.splitext(name)[0], "no such file") is None:
                reason = reason or "compressed copy of a file beside it"
            if reason:
                files.ignored[reason] += os.path.realpath(name) not in counted
                counted.add(os.path.realpath(name))
            else:
                files.paths.append(name)
                seen[file_identity(name)] = "named twice"
    copies = find_copies(files.paths, held_out)
    files.paths = [path for path in files.paths if path not in copies]
    if copies:
        files.ignored["copy of validation text"] = len(copies)
    if not files.paths and files.ignored:
        raise UserError("all files of --train_file are files of --validation_file, too, or copies of them")
    return files


def find_copies(paths: Sequence[str], others: Sequence[str]) -> set[str]:
    """Return the paths of text with the content of another file. Token files are compared when they are read."""
    sizes = {os.path.getsize(path) for path in others}
    same_size = [path for path in paths if kind_of(path) != TOKENS and os.path.getsize(path) in sizes]
    digests = digest_files([*same_size, *others]) if same_size else []
    return {path for path, digest in zip(same_size, digests, strict=False) if digest in digests[len(same_size) :]}


def name_splits(paths: Sequence[str]) -> str | None:
    """Return a warning if files named for validation or tests are among those for training, else None."""
    words = {path: set(re.split(r"[^a-z]+", Path(path).name.lower())) for path in paths}
    others = [path for path in paths if words[path] & HELD_OUT_NAMES and "train" not in words[path]]
    if not others or not any("train" in of for of in words.values()):
        return None
    names = ", ".join(others[:3]) + (", ..." if others[3:] else "")
    return f"warning: used for training, too: {names}; name the files for training, and others as --validation_file"


def _walk(folder: str) -> Iterator[str]:
    """Yield the files in a folder, except hidden ones. A folder of results is yielded whole."""
    entered = {os.path.realpath(folder)}  # links may lead in a circle
    for root, folders, names in os.walk(folder, onerror=_refuse, followlinks=True):
        listed = [name for name in folders if not name.startswith(".")]
        folders.clear()
        for name in listed:
            real = os.path.realpath(Path(root, name))
            if holds_results(Path(root, name)):
                yield os.path.join(root, name)
            elif real not in entered:
                entered.add(real)
                folders.append(name)
        yield from (os.path.join(root, name) for name in names if not name.startswith("."))


def _refuse(error: OSError) -> None:
    raise UserError(f"cannot list the folder {error.filename}: {error.strerror}") from error


def _match(pattern: str) -> dict[str, str | None]:
    """Return the files that match a pattern, sorted, each with the reason why it is not read, or None."""
    if not glob.has_magic(pattern):
        return {}
    base = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), Path(pattern).parts))
    below_base = str(Path(pattern).relative_to(base))
    # Path.glob does not follow links, which may lead in a circle, and takes ** at the end for folders (Python 3.12).
    found = base.glob(f"{below_base}/*" if below_base.endswith("**") else below_base)
    is_result = functools.cache(holds_results)
    names = {}
    for path in sorted(filter(Path.is_file, found), key=str):
        *below, _ = path.relative_to(base).parents
        if "/." in f"/{path.relative_to(base)}" and "/." not in f"/{below_base}":  # hidden
            continue
        in_results = any(is_result(base / folder) for folder in below)
        kinds = (TOKENS,) if pattern.endswith(TOKENS) else KINDS
        names[str(path)] = "of runs, models or datasets" if in_results else _reason(str(path), kinds)
    return names


def _reason(name: str, kinds: Sequence[str] = KINDS) -> str | None:
    """Return why a file of a folder or pattern is not read, or None."""
    if os.path.isdir(name):
        return "folders of runs, models or datasets"
    if not os.path.exists(name):
        return "broken link"
    if _suffix(name) not in kinds:
        return Path(name).suffix or "no suffix"
    return None if os.path.getsize(name) else "empty"


def holds_results(folder: Path) -> bool:
    return folder.resolve() == Path("runs").resolve() or holds(folder, RESULTS | SAVED) or is_packed(folder)


def holds(folder: Path | str, names: Iterable[str]) -> bool:
    return any(os.path.exists(Path(folder, name)) for name in names)


def is_packed(folder: Path | str) -> bool:
    return all(os.path.exists(Path(folder, name)) for name in PACKED)


def describe_files(files: Files) -> str | None:
    """Say how many files are read, and which are ignored; None if none is."""
    return f"files read: {len(files.paths):,}; ignored: {_list(files.ignored)}" if files.ignored else None


def _list(ignored: Counter) -> str:
    return ", ".join(f"{reason} ({count:,})" for reason, count in sorted(ignored.items()))


def compression_of(path: str) -> str | None:
    return next((suffix for suffix in COMPRESSIONS if path.lower().endswith(suffix)), None)


def _suffix(path: str) -> str:
    name = Path(path.lower())
    if compression_of(path):
        name = name.with_suffix("")
    return name.suffix


def kind_of(path: str) -> str:
    """Return a file's suffix, ignoring the compression's. Raises `UserError` for an unsupported one."""
    kind = _suffix(path)
    if kind not in KINDS and (kind != TOKENS or compression_of(path)):
        compressed = ", ".join(COMPRESSIONS)
        known = f"{', '.join(KINDS)} files, plain or compressed ({compressed}), or token ids in {TOKENS} files"
        raise UserError(f"cannot read {path}: use {known}")
    return kind


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


def open_decompressed(path: str) -> Any:
    """Open a file as a stream of decompressed bytes with the methods of `io.BufferedReader`."""
    match compression_of(path):
        case None:
            return open(path, "rb", buffering=BLOCK // 8)
        case ".gz":
            return gzip.GzipFile(path)
        case ".bz2":
            return bz2.BZ2File(path)
        case ".xz":
            return lzma.LZMAFile(path)
        case _:  # pyarrow itself opens only names in UTF-8, but it accepts open files
            import pyarrow as pa  # not at the top, because training on a packed dataset does not need it

            file = pa.PythonFile(io.FileIO(path))
            return io.BufferedReader(pa.input_stream(file, compression="zstd"), BLOCK)


# ------------------------------------------------------------------ identity


def identify_files(paths: list[str], digest: Callable[[str], str] | None = None) -> str:
    """Hash the names, sizes and contents of files. Folders and times do not matter. digest: as for `digest_files`."""
    names = [(Path(path).name, found) for path, found in zip(paths, digest_files(paths, digest), strict=True)]
    return hashlib.sha256(repr(names).encode()).hexdigest()


def identify_standard_library() -> str:
    """Hash the files of the demo's text."""
    topics = Path(sysconfig.get_path("stdlib"), "pydoc_data", "topics.py")
    return identify_files([*map(str, standard_library_files()), str(topics)])


def digest_files(paths: list[str], digest: Callable[[str], str] | None = None) -> list[str]:
    """Return size and hash of each file, cached by path, size and times, so that each file is read once.

    digest: reads a file, instead of `digest_file`.

    A file that has just changed is not cached, because another change may show the same time.
    """
    cache_file = cache_dir() / "file_digests.json"
    cached = {}
    keys = []
    fresh = set()
    with contextlib.suppress(OSError, ValueError):
        cached = json.loads(cache_file.read_text())
    for path in paths:
        status = os.stat(path)
        # An edit may restore the modification time, but not the time of the change.
        keys.append(f"{os.path.abspath(path)} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}")
        if not has_settled(status):
            fresh.add(keys[-1])
    new = {key: path for key, path in zip(keys, paths, strict=True) if key not in cached or key in fresh}
    if new:
        with ThreadPoolExecutor() as threads:  # hashing releases Python's lock
            options = {"total": len(new), "desc": "hash", "unit": "file", "delay": 2, **progress_target()}
            cached |= zip(new, tqdm(threads.map(digest or digest_file, new.values()), **options), strict=True)
        with contextlib.suppress(OSError):
            cache_file.parent.mkdir(parents=True, exist_ok=True)
            partial = cache_file.with_name(f"{cache_file.stem}-{os.getpid()}.json")
            lasting = {key: found for key, found in cached.items() if key not in fresh and "unreadable" not in found}
            partial.write_text(json.dumps(lasting))
            os.replace(partial, cache_file)
    return [cached[key] for key in keys]


def digest_file(path: str) -> str:
    """Hash a file's size and content."""
    import xxhash  # not at the top, because training on a packed dataset does not need it

    digest = xxhash.xxh3_128()
    try:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            while block := file.read(BLOCK):
                digest.update(block)
    except OSError as error:
        return f"unreadable: {error.strerror}"
    return f"{size} {digest.hexdigest()}"
