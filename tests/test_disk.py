"""Disks that lack an operation: the program continues with one warning, and real errors are still raised."""

import errno
import fcntl
import mmap
import os
import shutil
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import BLOCK_SIZE, make_documents

import recipe.checkpoint
import recipe.model.weights
from recipe import disk
from recipe.checkpoint import list_checkpoints, remove_checkpoint, why_damaged
from recipe.command_line import load_config
from recipe.data.cache import open_dataset_for
from recipe.data.files import digest_files, find_files
from recipe.data.packed import open_packed_dataset
from recipe.data.prepare import prepare_dataset
from recipe.data.source import TextSource
from recipe.data.tokenizer import read_tokenizer
from recipe.errors import UserError
from recipe.publish.hub import stage
from recipe.run.folder import lock_output_dir, release_output_dirs

AUTO = ["--resume_from_checkpoint", "auto"]


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch):
    """Say again what an earlier test has said."""
    monkeypatch.setattr(disk, "WARNED", set())


@pytest.fixture
def tokenizer(tokenizer_dir):
    return read_tokenizer(str(tokenizer_dir))


def fail(number: int):
    """Return a function that fails as a system call does."""

    def call(*arguments, **options):
        raise OSError(number, os.strerror(number))

    return call


def count_warnings(capsys) -> int:
    return capsys.readouterr().out.count("warning: the file system of ")


# ------------------------------------------------------------------ locks


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_disk_without_locks(tmp_path, jsonl_file, tokenizer, monkeypatch, capsys, number):
    """Runs and preparations go on, and no lock by existence is left, which would outlive a SIGKILL."""
    monkeypatch.setattr(fcntl, "flock", fail(number))
    for _ in range(2):  # the file of an earlier run locks nothing
        lock_output_dir(tmp_path / "run")
        release_output_dirs()
    assert prepare_dataset(TextSource((str(jsonl_file),)), tmp_path / "d", tokenizer)
    assert count_warnings(capsys) == 1 and not (tmp_path / "d" / ".lock").exists()


def test_a_lock_that_fails_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", fail(errno.EIO))
    with pytest.raises(UserError, match="cannot write to output_dir .*Input/output error"):
        lock_output_dir(tmp_path / "run")


# ------------------------------------------------------------------ flushes


@pytest.mark.parametrize("what", ["files and folders", "folders"])
def test_a_disk_that_cannot_flush(train, monkeypatch, capsys, what):
    """Checkpoints and the model are written."""
    sync, invalid = os.fsync, fail(errno.EINVAL)

    def sync_some(file):
        is_folder = stat.S_ISDIR(os.fstat(file).st_mode)
        return invalid() if is_folder or what != "folders" else sync(file)

    monkeypatch.setattr(os, "fsync", sync_some)
    run = train("--save_steps", 2)
    assert [why_damaged(path) for path in list_checkpoints(run)] == [None, None]
    assert (run / "model.safetensors").is_file() and count_warnings(capsys) == 1
    monkeypatch.setattr(os, "fsync", fail(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        disk.flush(run / "model.safetensors")


# ------------------------------------------------------------------ modes and links


def test_a_disk_without_modes(train, tmp_path, jsonl_file, tokenizer, monkeypatch, capsys):
    """Text is prepared, and checkpoints and the model are written."""
    monkeypatch.setattr(os, "chmod", fail(errno.EPERM))
    prepare_dataset(TextSource((str(jsonl_file),)), tmp_path / "d", tokenizer)
    run = train("--save_steps", 2, dataset_dir=tmp_path / "d")
    assert why_damaged(run / "checkpoint-4") is None and (run / "model.safetensors").is_file()
    assert count_warnings(capsys) == 1
    monkeypatch.setattr(os, "chmod", fail(errno.EROFS))
    with pytest.raises(OSError, match="Read-only"):
        disk.share(run / "model.safetensors")


def test_a_disk_without_links(tmp_path, monkeypatch):
    """As on exFAT, which has no modes either, what waits for its upload is a copy."""
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "config.json").write_text("{}")
    for name in ("link", "chmod"):
        monkeypatch.setattr(os, name, fail(errno.EPERM))
    stage(tmp_path / "checkpoint-2", tmp_path / ".hub" / "step-000002", ("config.json", "absent.json"))
    shutil.rmtree(tmp_path / "checkpoint-2")
    assert (tmp_path / ".hub" / "step-000002" / "config.json").read_text() == "{}"


# ------------------------------------------------------------------ renames across mounts


def fail_renames(monkeypatch, fails, number: int) -> None:
    """Let os.rename fail for the pairs of paths for which `fails` returns true."""
    rename, failed = os.rename, fail(number)
    monkeypatch.setattr(os, "rename", lambda a, b: failed() if fails(Path(a), Path(b)) else rename(a, b))


def test_a_dataset_in_a_mount_point(tmp_path, jsonl_file, tokenizer, monkeypatch):
    """It cannot be renamed, holds a folder of its own, and nothing can be written beside it."""
    directory, mkdir, read_only = tmp_path / "mounts" / "d", os.mkdir, fail(errno.EROFS)
    (directory / "lost+found").mkdir(parents=True)

    def mkdir_inside(path, *arguments):
        path = Path(path)
        return read_only() if path.parent == directory.parent and path != directory else mkdir(path, *arguments)

    monkeypatch.setattr(os, "mkdir", mkdir_inside)
    fail_renames(monkeypatch, lambda a, b: directory in (a, b), errno.EBUSY)
    source = TextSource((str(jsonl_file),))
    made = prepare_dataset(source, directory, tokenizer)
    assert prepare_dataset(TextSource((str(jsonl_file),), skip_bad_files=True), directory, tokenizer, overwrite=True)
    assert prepare_dataset(source, directory, tokenizer, overwrite=True) == made
    assert (directory / "lost+found").is_dir()


def test_a_checkpoint_in_the_image_of_a_container(tmp_path, monkeypatch):
    """An overlay cannot rename the folder, and pruning removes it."""
    (tmp_path / "checkpoint-2").mkdir()
    fail_renames(monkeypatch, lambda a, b: a.name == "checkpoint-2", errno.EXDEV)
    remove_checkpoint(tmp_path / "checkpoint-2")
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------ memory maps


def test_a_disk_without_memory_maps(train, tmp_path, dataset_dir, monkeypatch, capsys):
    """Rows are the same, and a run resumes."""
    expected = open_packed_dataset(dataset_dir, BLOCK_SIZE).train[np.arange(9)]
    run = train("--save_steps", 2)
    shutil.rmtree(run / "checkpoint-4")
    (run / "model.safetensors").unlink()
    (run / "summary.json").unlink()
    unmapped = fail(errno.ENODEV)
    for module, name in ((mmap, "mmap"), (torch, "from_file"), (recipe.model.weights, "load_file")):
        monkeypatch.setattr(module, name, unmapped)
    load = torch.load
    monkeypatch.setattr(torch, "load", lambda *a, mmap=False, **o: unmapped() if mmap else load(*a, **o))
    monkeypatch.setattr(recipe.checkpoint, "DTensor", torch.Tensor)  # shards are read through a map
    assert (open_packed_dataset(dataset_dir, BLOCK_SIZE).train[np.arange(9)] == expected).all()
    capsys.readouterr()
    train(*AUTO)
    assert (run / "model.safetensors").is_file() and "resum" in capsys.readouterr().out


# ------------------------------------------------------------------ names and times


def test_one_file_in_different_case(tmp_path, dataset_dir):
    """On a disk without case, validation text is not trained on; two names of a file are as good as such a disk."""
    for name in ("Text.jsonl", "other.jsonl"):
        (tmp_path / name).write_text('{"text": "a"}\n')
    os.link(tmp_path / "Text.jsonl", tmp_path / "text.jsonl")
    text, same, other = (str(tmp_path / name) for name in ("Text.jsonl", "text.jsonl", "other.jsonl"))
    assert find_files([other, same], held_out=[text]).paths == [other]
    assert find_files([text, same, other]).paths == [text, other]


def test_long_names(tmp_path, tokenizer_dir, tokenizer):
    """A name may have 255 characters, and 143 on an encrypted disk."""
    text = tmp_path / f"{'a' * 249}.jsonl"
    text.write_text("".join(f'{{"text": "{words.strip()}"}}\n' for words in make_documents(60)))
    argv = ["--train_file", str(text), "--tokenizer_name", str(tokenizer_dir), "--block_size", "16"]
    made = open_dataset_for(load_config([*argv, "--cache_dir", str(tmp_path / "cache")])[0]).directory
    assert len(made.name) <= 143 - len(".123456789abc.partial")
    assert prepare_dataset(TextSource((str(text),)), tmp_path / ("b" * 255), tokenizer)


def test_two_changes_within_the_steps_of_the_clock(tmp_path, monkeypatch):
    """A file whose size and time stay the same has another digest; one that is older is read once."""
    path = tmp_path / "a.txt"
    path.write_text("one")
    status = path.stat()
    (first,) = digest_files([str(path)])
    path.write_text("two")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    (second,) = digest_files([str(path)])
    assert second != first
    os.utime(path, (1e9, 1e9))
    assert digest_files([str(path)]) == [second]
    monkeypatch.setattr("recipe.data.files.digest_file", lambda _: 1 / 0)
    assert digest_files([str(path)]) == [second]
