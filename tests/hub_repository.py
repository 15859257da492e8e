"""A model repository of the stand-in for the Hub, in memory: commits, branches, and what the API says of them."""

import base64
import hashlib
import re
import secrets
from dataclasses import dataclass, field
from typing import NamedTuple

LARGE = 10 * 2**20  # bytes from which a text file is stored as a large file (LFS); a binary file always is
# The Hub creates every repository with such a file.
ATTRIBUTES = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"


class Refused(Exception):
    """An answer other than success. code: the Hub's name of the error, from which the client chooses an exception."""

    def __init__(self, status: int, message: str, code: str = "", **payload: object):
        super().__init__(message)
        self.status, self.payload = status, {"error": message, **payload}
        self.headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})


class File(NamedTuple):
    content: bytes
    large: bool

    @property
    def oid(self) -> str:
        """SHA-256 of a large file, Git's SHA-1 of any other."""
        blob = b"blob %d\0" % len(self.content) + self.content
        return hashlib.sha256(self.content).hexdigest() if self.large else hashlib.sha1(blob).hexdigest()


@dataclass
class Commit:
    parent: str | None
    message: str
    files: dict[str, File]


@dataclass
class Repository:
    private: bool
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    large_files: dict[str, bytes] = field(default_factory=dict)  # by SHA-256

    def __post_init__(self):
        self.write_commit("main", None, "initial commit", {".gitattributes": File(ATTRIBUTES, large=False)})

    def write_commit(self, branch: str, parent: str | None, message: str, files: dict[str, File]) -> str:
        commit_id = secrets.token_hex(20)
        self.commits[commit_id] = Commit(parent, message, files)
        self.branches[branch] = commit_id
        return commit_id

    def resolve(self, revision: str) -> str:
        """Return the commit id of a branch or of a commit."""
        commit_id = self.branches.get(revision, revision)
        if commit_id not in self.commits:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit_id

    def files(self, revision: str) -> dict[str, File]:
        return self.commits[self.resolve(revision)].files

    def create_branch(self, branch: str, start: str) -> None:
        if branch in self.branches:
            raise Refused(409, "Reference already exists")
        self.branches[branch] = self.resolve(start)

    def add_commit(self, branch: str, lines: list[dict]) -> str:
        """Do everything that the lines of a request ask, or nothing. Returns the commit id."""
        if branch not in self.branches:
            raise Refused(404, f"Invalid rev id: {branch}", "RevisionNotFound")
        header, head = lines[0]["value"], self.branches[branch]
        if header.get("parentCommit") not in (None, head):
            raise Refused(412, "A commit has happened since. Please refresh and try again.")
        files = dict(self.commits[head].files)
        for key, value in ((line["key"], line["value"]) for line in lines[1:]):
            path = value["path"]
            if key == "file":
                files[path] = File(base64.b64decode(value["content"], validate=True), large=False)
            elif key == "lfsFile":
                if value["oid"] not in self.large_files:
                    raise Refused(400, f"LFS pointer pointed to a file that does not exist: {path}")
                files[path] = File(self.large_files[value["oid"]], large=True)
            elif files.pop(path, None) is None:  # deletedFile
                raise Refused(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
        return self.write_commit(branch, head, header["summary"], files)

    def choose_upload(self, revision: str, asked: dict) -> dict:
        """Say how to upload a file, and what is stored under its path."""
        large = asked["size"] >= LARGE or b"\0" in base64.b64decode(asked["sample"])
        stored = self.files(revision).get(asked["path"])
        known = {"oid": stored.oid} if stored else {}
        return {"path": asked["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, **known}

    def list_tree(self, revision: str, folder: str, recursive: bool) -> list[dict]:
        prefix = f"{folder}/" if folder else ""
        files = {
            path.removeprefix(prefix): file for path, file in self.files(revision).items() if path.startswith(prefix)
        }
        if not files:
            raise Refused(404, f"{folder} does not exist", "EntryNotFound")
        found = [
            {"type": "file", "path": prefix + path, "size": len(file.content), "oid": file.oid}
            for path, file in files.items()
            if recursive or "/" not in path
        ]
        folders = {prefix + path.split("/")[0] for path in files if "/" in path}
        return found + [{"type": "directory", "path": path, "oid": "0" * 40} for path in sorted(folders)]

    def read_file(self, revision: str, path: str) -> tuple[bytes, dict[str, str]]:
        """Return the content of a file, and the headers of the answer."""
        file = self.files(revision).get(path)
        if file is None:
            raise Refused(404, "Entry not found", "EntryNotFound")
        return file.content, {"X-Repo-Commit": self.resolve(revision), "ETag": f'"{file.oid}"'}


def check_card(content: str) -> dict:
    """Accept a model card whose license has no capital letters. The Hub checks the other values as well."""
    if re.search(r"^license: .*[A-Z]", content, re.MULTILINE):
        raise Refused(400, "Invalid metadata", errors=[{"message": '"license" is unknown'}])
    return {"errors": [], "warnings": [{"message": 'empty or missing "license" metadata in repo card'}]}
