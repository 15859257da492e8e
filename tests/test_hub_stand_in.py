"""The real huggingface_hub client works against the stand-in for the Hub as it does against the Hub."""

import threading
import time

import pytest
from hub_repository import Repository
from hub_stand_in import HubStandIn
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    file_exists,
    hf_hub_download,
    snapshot_download,
)
from huggingface_hub.errors import (
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import disable_progress_bars, httpx

REPO = "someone/tiny"
BRANCH = "step-000010-0.0B"
WEIGHTS = bytes(range(256)) * 5000  # binary, so a large file
CARD = "---\nlicense: apache-2.0\n---\n# Tiny 猫\n".encode()


@pytest.fixture
def api(hub) -> HfApi:
    """A client of a stand-in with a private repository."""
    with disable_progress_bars():
        client = HfApi()
        client.create_repo(REPO, private=True)
        yield client


def add(**files: bytes) -> list[CommitOperationAdd]:
    return [CommitOperationAdd(path, content) for path, content in files.items()]


def failure(call, *arguments, **options) -> tuple[type[Exception], int | None]:
    """Return the class of the exception of a call, and the status of the answer."""
    with pytest.raises(Exception) as caught:  # noqa: PT011, B017
        call(*arguments, **options)
    return caught.type, getattr(getattr(caught.value, "response", None), "status_code", None)


def sent(hub, pattern: str) -> list[tuple[str, str]]:
    return [(method, path) for method, path, _, _ in hub.requests if pattern in path]


def test_preflight(hub, api):
    """A login is checked, and a repository created once; a token that cannot write, or is invalid, is refused."""
    assert api.whoami()["name"] == hub.user
    api.auth_check(REPO, write=True)
    assert api.create_repo(REPO, exist_ok=True).repo_id == REPO
    assert hub.is_private(REPO)
    assert failure(api.create_repo, REPO) == (HfHubHTTPError, 409)
    assert failure(api.create_repo, "other/tiny", exist_ok=True) == (HfHubHTTPError, 403)
    reader, stranger, nobody = HfApi(token=hub.read_only_token), HfApi(token="hf_unknown"), HfApi(token=False)
    reader.auth_check(REPO)
    for call in (reader.auth_check, reader.create_repo, reader.create_branch):
        options = {"auth_check": {"write": True}, "create_branch": {"branch": BRANCH}}.get(call.__name__, {})
        assert failure(call, REPO, **options) == (HfHubHTTPError, 403)
    assert failure(stranger.whoami) == failure(stranger.auth_check, REPO) == (HfHubHTTPError, 401)
    assert failure(nobody.auth_check, REPO) == (RepositoryNotFoundError, 401)
    assert failure(api.auth_check, "someone/missing") == (RepositoryNotFoundError, 404)
    hub.repositories["other/public"] = Repository(private=False)
    hub.repositories["other/private"] = Repository(private=True)
    api.auth_check("other/public")
    assert failure(api.auth_check, "other/public", write=True) == (HfHubHTTPError, 403)
    assert failure(api.auth_check, "other/private") == (RepositoryNotFoundError, 404)


def test_commits_round_trip(hub, api, tmp_path):
    """Small and large files arrive and return byte-identical, through one commit, in order, in the background."""
    (tmp_path / "weights").write_bytes(WEIGHTS)
    small = {"README.md": CARD, "empty": b"", "logs/a.txt": b"a"}
    large = [CommitOperationAdd(name, tmp_path / "weights") for name in ("model.safetensors", "logs/b.bin")]
    first = api.create_commit(REPO, add(**small) + large, commit_message="first", run_as_future=True)
    assert first.result().oid == hub.branches(REPO)["main"]
    assert hub.files(REPO) == {**small, "model.safetensors": WEIGHTS, "logs/b.bin": WEIGHTS}
    api.create_commit(REPO, [CommitOperationDelete("logs/"), *add(empty=b"no longer")], commit_message="second")
    assert hub.commits(REPO) == ["initial commit", "first", "second"]
    assert set(api.list_repo_files(REPO)) == {".gitattributes", "README.md", "empty", "model.safetensors"}
    old = snapshot_download(REPO, revision=first.result().oid, local_dir=tmp_path / "old", allow_patterns=["logs/*"])
    assert [(tmp_path / "old" / "logs" / name).read_bytes() for name in ("a.txt", "b.bin")] == [b"a", WEIGHTS]
    assert old == str(tmp_path / "old") and not (tmp_path / "old" / "README.md").exists()
    with open(hf_hub_download(REPO, "model.safetensors"), "rb") as file:
        assert file.read() == WEIGHTS
    api.super_squash_history(REPO, branch="main")
    assert len(hub.commits(REPO)) == 1 and hub.files(REPO)["empty"] == b"no longer"


def test_a_repeated_upload_sends_only_what_is_missing(hub, api):
    """A commit after a failed one does not upload its large files again, and an unchanged commit sends nothing."""
    files = {"model.safetensors": WEIGHTS, "optimizer.bin": WEIGHTS[1:], "config.json": b"{}"}
    hub.fail("POST .*/commit/main", 500)
    assert failure(api.create_commit, REPO, add(**files), commit_message="1") == (HfHubHTTPError, 500)
    assert len(sent(hub, "lfs-storage")) == 2 and hub.files(REPO) == {}
    api.create_commit(REPO, add(**files), commit_message="2")
    api.create_commit(REPO, add(**files), commit_message="3")
    assert len(sent(hub, "lfs-storage")) == 2 and len(sent(hub, "/commit/main")) == 2
    assert hub.files(REPO) == files


def test_branches(hub, api):
    """A branch starts at a commit and keeps its own history; a stale parent and missing revisions are refused."""
    start = api.create_commit(REPO, add(a=b"1"), commit_message="1").oid
    api.create_commit(REPO, add(a=b"2"), commit_message="2")
    api.create_branch(REPO, branch=BRANCH, revision=start)
    api.create_branch(REPO, branch=BRANCH, exist_ok=True)
    assert failure(api.create_branch, REPO, branch=BRANCH) == (HfHubHTTPError, 409)
    api.create_commit(REPO, add(b=b"3"), commit_message="3", revision=BRANCH, parent_commit=start)
    stale = {"commit_message": "4", "revision": BRANCH, "parent_commit": start}
    assert failure(api.create_commit, REPO, add(b=b"4"), **stale) == (HfHubHTTPError, 412)
    assert (hub.files(REPO), hub.files(REPO, BRANCH)) == ({"a": b"2"}, {"a": b"1", "b": b"3"})
    assert {ref.name: ref.target_commit for ref in api.list_repo_refs(REPO).branches} == hub.branches(REPO)
    assert api.model_info(REPO, revision=BRANCH).sha == hub.branches(REPO)[BRANCH]
    assert file_exists(REPO, "b", revision=BRANCH) and not file_exists(REPO, "b")
    assert failure(api.model_info, REPO, revision="none") == (RevisionNotFoundError, 404)
    assert failure(hf_hub_download, REPO, "a", revision="none") == (RevisionNotFoundError, 404)
    assert failure(hf_hub_download, REPO, "none") == (RemoteEntryNotFoundError, 404)
    commit = {"commit_message": "5", "revision": "none"}
    assert failure(api.create_commit, REPO, add(a=b"5"), **commit) == (RevisionNotFoundError, 404)
    assert failure(api.create_commit, REPO, [CommitOperationDelete("none")], commit_message="6")[1] == 404


@pytest.mark.parametrize("status", [401, 403, 404, 409, 429, 500, 503])
def test_statuses(hub, api, status):
    """Each status raises what the Hub's raises. A commit itself is never repeated by the client."""
    hub.fail("POST .*/commit/main", status)
    expected = RepositoryNotFoundError if status == 404 else HfHubHTTPError
    assert failure(api.create_commit, REPO, add(a=b"1"), commit_message="1") == (expected, status)
    assert hub.commits(REPO) == ["initial commit"] and hub.waits == []
    hub.fail("POST .*/preupload/main", status)  # is repeated
    repeated = status in (429, 500, 503)
    if not repeated:
        assert failure(api.create_commit, REPO, add(a=b"1"), commit_message="1") == (expected, status)
    api.create_commit(REPO, add(a=b"1"), commit_message="1")
    assert hub.waits == ([3.0 if status == 429 else 1] if repeated else [])


def test_a_corrupt_upload_is_refused(hub, api):
    """A large file that does not have the SHA-256 agreed on is neither stored nor committed."""
    (operation,) = add(**{"model.safetensors": WEIGHTS})
    operation.path_or_fileobj = WEIGHTS[::-1]  # it changes after it was hashed
    assert failure(api.create_commit, REPO, [operation], commit_message="1")[0] is RuntimeError
    assert len(sent(hub, "lfs-storage")) == 1 and not sent(hub, "verify") and hub.files(REPO) == {}


def test_it_stops_at_once(hub, capfd):
    """It leaves no thread and prints nothing, although connections are open and a client waits for an answer."""
    threads = set(threading.enumerate())
    with HubStandIn() as other:
        client, answers = HfApi(other.endpoint, token=other.token), []
        client.whoami()
        other.fail("GET /api/whoami", 60.0)
        waiting = threading.Thread(target=lambda: answers.append(failure(client.whoami)[0]))
        waiting.start()
        while len(other.requests) < 2:
            time.sleep(0.01)
        started = time.monotonic()
    waiting.join()
    assert time.monotonic() - started < 5 and answers == [httpx.RemoteProtocolError]
    assert set(threading.enumerate()) <= threads and tuple(capfd.readouterr()) == ("", "")
