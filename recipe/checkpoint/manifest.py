"""The manifest of a checkpoint: every file's size and SHA-256."""

import hashlib
import json
import os
from pathlib import Path

import torch
from huggingface_hub.utils.sha import sha_fileobj

from recipe.environment import describe_environment
from recipe.errors import short_reason

MANIFEST_NAME = "manifest.json"


def seal_checkpoint(directory: Path, about: dict) -> None:
    """Write the manifest that `why_damaged` checks, and flush every file to disk. about: more entries for it."""
    files = {}
    for path in sorted(directory.iterdir()):
        fsync(path)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": _file_sha256(path)}
    manifest = {**about, "environment": describe_environment(torch.device("cpu")), "files": files}
    manifest["manifest_sha256"] = _sha256_of(manifest)
    path = directory / MANIFEST_NAME
    path.write_text(json.dumps(manifest, indent=2) + "\n")
    fsync(path)
    fsync(directory)


def why_damaged(directory: Path) -> str | None:
    """Return what is wrong with a checkpoint, or None if every byte is as it was written."""
    try:
        manifest = json.loads((directory / MANIFEST_NAME).read_text())
        if manifest.pop("manifest_sha256") != _sha256_of(manifest):
            return f"{MANIFEST_NAME} has changed"
        for name, expected in manifest["files"].items():
            path = directory / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != expected["bytes"]:
                return f"{name} has {path.stat().st_size} bytes instead of {expected['bytes']}"
            if _file_sha256(path) != expected["sha256"]:
                return f"{name} has changed: its SHA-256 differs"
    except FileNotFoundError:
        return f"{MANIFEST_NAME} is missing"
    except Exception as error:  # not JSON, other JSON, or a disk that cannot be read
        return f"{MANIFEST_NAME} cannot be used: {short_reason(error)}"
    return None


def fsync(path: Path) -> None:
    """Wait until a file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256_of(manifest: dict) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return sha_fileobj(file).hex()
