"""Atomic writes, and file operations that some file systems do not support: each is tried, and done without otherwise.

Lustre and FUSE may have no locks, network shares no flushes, exFAT and CIFS neither modes nor hard links. One line per
process and file system says what is missing. A real error, such as a full disk, is raised as usual.
"""

import contextlib
import errno
import mmap
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock

UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}
SETTLED_SECONDS = 10  # FAT counts in steps of two seconds, and the clock of a file server may differ
WARNED: set[tuple[str, int]] = set()  # the warnings so far: (what is missing, device of the file system)


def _warn(error: OSError, expected: set[int], path: Path, what: str, so: str) -> None:
    """Warn once of what the file system of a path cannot do. Raises an error that is not of the expected kinds."""
    if error.errno not in expected:
        raise error
    folder = path if path.is_dir() else path.parent
    key = (what, folder.stat().st_dev)
    if key not in WARNED:
        WARNED.add(key)
        print(f"warning: the file system of {folder} {what} ({error.strerror}); {so}", flush=True)


def lock(path: Path, blocking: bool = True) -> FileLock | None:
    """Create and lock a file; return None if the file system has no locks. Any end of the process releases the lock.

    If another process holds the lock, waits, or raises `filelock.Timeout` if not `blocking`.
    """
    held = FileLock(path, fallback_to_soft=False)  # a lock by existence would outlive a SIGKILL
    try:
        held.acquire(blocking=blocking)
    except OSError as error:
        _warn(error, UNSUPPORTED | {errno.ENOLCK}, path, "has no locks", "make sure that nothing else writes there")
        return None
    return held


def flush(path: Path) -> None:
    """Wait until a file or folder is on disk."""
    is_folder = path.is_dir()
    if is_folder and os.name == "nt":  # Windows opens files only
        return
    descriptor = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)  # SMB flushes what is open for writing
    try:
        os.fsync(descriptor)
    except OSError as error:
        _warn(error, UNSUPPORTED, path, "cannot flush", "a power cut may damage what was written last")
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replaced(final: Path) -> Iterator[Path]:
    """Yield a hidden path at which to write a file, or a folder. It then replaces `final`, on disk and complete.

    After an error, `final` stays as it is. After a kill, what is left has hidden names, from which the next start of a
    run restores it.
    """
    partial = final.with_name(f".{final.name}.partial")
    before = final.with_name(f".{final.name}.replaced")
    try:
        _delete(partial)
        final.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        flush(partial)
        if final.is_dir():  # which `os.replace` would refuse
            os.rename(final, before)
        os.replace(partial, final)
        flush(final.parent)
    except BaseException:
        _delete(partial)
        if before.exists() and not final.exists():
            os.rename(before, final)
        raise
    _delete(before)


def write_file(path: Path, content: str | bytes) -> None:
    """Write or replace a file, which nobody ever sees half written."""
    with replaced(path) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def share(path: Path, other: Path) -> None:
    """Copy the mode of another file, which was created under the umask."""
    mode = other.stat().st_mode
    if path.stat().st_mode == mode:
        return
    try:
        path.chmod(mode & 0o777)
    except OSError as error:
        _warn(error, UNSUPPORTED | {errno.EPERM}, path, "has no modes", "other users may be unable to read its files")


def link_or_copy(source: Path, target: Path) -> None:
    """Make a hard link to a file, or a copy of it."""
    try:
        os.link(source, target)
    except OSError:  # a copy raises a real error again
        shutil.copyfile(source, target)


def remove(folder: Path, hidden: Path) -> None:
    """Remove a folder. Rename it first, so that a process killed in between does not leave half of it."""
    try:
        os.rename(folder, hidden)
    except OSError as error:
        if error.errno != errno.EXDEV:  # an overlay cannot rename a folder of its lower layers, the image
            raise
        hidden = folder
    shutil.rmtree(hidden)


def can_map(path: Path) -> bool:
    """Return whether a non-empty file can be mapped privately into memory, as torch and safetensors do."""
    with open(path, "rb") as file:
        try:
            mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_COPY).close()
        except OSError as error:
            expected = UNSUPPORTED | {errno.ENODEV}
            _warn(error, expected, path, "cannot map files", "they are read into memory instead")
            return False
    return True


def file_identity(path: str | Path) -> tuple[str, int]:
    """Return a value that all names of a file share: links, and another spelling of case where case does not matter.

    The inode number alone is not enough, because some file systems give all files the same one.
    """
    return os.path.realpath(path).casefold(), os.stat(path).st_ino


def has_settled(status: os.stat_result) -> bool:
    """Return whether a file's modification time is old enough that any later change would show."""
    return time.time() - status.st_mtime > SETTLED_SECONDS
