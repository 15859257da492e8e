"""The seal of a checkpoint: every file's size and SHA-256, on disk before the folder gets its name."""

import hashlib
import json
import os
from pathlib import Path

import torch

from recipe.environment import describe_environment

MANIFEST_NAME = "manifest.json"


def seal_checkpoint(directory: Path, about: dict) -> None:
    """Flush every file to disk and write the manifest that `why_damaged` goes by. about: what it says of the run."""
    mode = directory.stat().st_mode & 0o666  # as the user's umask has it; safetensors makes its files private (0.8)
    files = {}
    for path in sorted(directory.iterdir()):
        path.chmod(mode)
        fsync(path)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": _file_sha256(path)}
    manifest = {**about, "environment": describe_environment(torch.device("cpu")), "files": files}
    manifest["manifest_sha256"] = _sha256_of(manifest)
    path = directory / MANIFEST_NAME
    path.write_text(json.dumps(manifest, indent=2) + "\n")
    fsync(path)
    fsync(directory)


def why_damaged(directory: Path) -> str | None:
    """What is wrong with a checkpoint, or None if every byte is as it was sealed."""
    try:
        manifest = json.loads((directory / MANIFEST_NAME).read_text())
        sealed = manifest.pop("manifest_sha256")
        if sealed != _sha256_of(manifest):
            return f"{MANIFEST_NAME} was changed"
        for name, expected in manifest["files"].items():
            path = directory / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != expected["bytes"]:
                return f"{name} has {path.stat().st_size} bytes instead of {expected['bytes']}"
            if _file_sha256(path) != expected["sha256"]:
                return f"{name} was changed: its SHA-256 is another"
    except FileNotFoundError:
        return f"{MANIFEST_NAME} is missing"
    except Exception as error:  # not JSON, JSON of another shape, a disk that cannot be read
        return f"{MANIFEST_NAME} cannot be used: {short_reason(error)}"
    return None


def short_reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"


def _sha256_of(manifest: dict) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
