"""The real huggingface_hub client works against the stand-in for the Hub as it does against the Hub."""

import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from hub_repository import Repository
from hub_stand_in import HubStandIn
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    constants,
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
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

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


def test_a_model_loads_by_revision(hub, api, tmp_path, tokenizer_dir):
    """An uploaded folder loads with from_pretrained(revision=...), from the branch and not from main."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=512, n_positions=32, n_embd=32, n_layer=1, n_head=2))
    model.save_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    tokenizer.save_pretrained(tmp_path / "model")
    api.create_branch(REPO, branch=BRANCH)
    api.upload_folder(repo_id=REPO, folder_path=tmp_path / "model", revision=BRANCH)
    saved = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    assert hub.files(REPO, BRANCH) == saved and hub.files(REPO) == {}
    loaded = AutoModelForCausalLM.from_pretrained(REPO, revision=BRANCH)
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in model.state_dict().items())
    text = "the cat sat über den Fluß"
    assert AutoTokenizer.from_pretrained(REPO, revision=BRANCH)(text) == tokenizer(text)
    with pytest.raises(OSError, match="not a valid git identifier|config.json"):
        AutoModelForCausalLM.from_pretrained(REPO, revision="none")


def test_uploads_without_xet(hub, api, monkeypatch, tmp_path):
    """Where the server has no Xet storage, the client with Xet enabled uploads open files by LFS, and no other."""
    (tmp_path / "weights").write_bytes(WEIGHTS)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    by_path = [CommitOperationAdd("model.safetensors", tmp_path / "weights")]
    assert failure(api.create_commit, REPO, by_path, commit_message="by path")[1] is None
    assert sent(hub, "xet-write-token") and not sent(hub, "lfs")
    with open(tmp_path / "weights", "rb") as file:
        api.create_commit(REPO, [CommitOperationAdd("model.safetensors", file)], commit_message="open")
    assert hub.files(REPO) == {"model.safetensors": WEIGHTS}


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


def test_lost_connections(hub, api, tmp_path):
    """The client repeats a dropped upload and a cut download, and reports a dropped commit."""
    hub.fail("PUT /lfs-storage", "drop", times=2)
    api.create_commit(REPO, add(**{"model.safetensors": WEIGHTS}), commit_message="1")
    assert hub.files(REPO) == {"model.safetensors": WEIGHTS} and hub.waits == [1, 2]
    hub.fail("GET .*/resolve/.*/model.safetensors", "cut")
    snapshot_download(REPO, local_dir=tmp_path / "copy")
    assert (tmp_path / "copy" / "model.safetensors").read_bytes() == WEIGHTS and hub.waits == [1, 2, 1]
    hub.fail("POST .*/commit/main", "drop")
    hub.fail("POST .*/commit/main", "lose")
    for message, count in (("dropped", 2), ("lost", 3)):  # a commit whose answer is lost has happened all the same
        error, _ = failure(api.create_commit, REPO, add(a=message.encode()), commit_message=message)
        assert issubclass(error, httpx.RemoteProtocolError | httpx.NetworkError) and len(hub.commits(REPO)) == count
    hub.fail("", "drop", times=None)
    assert failure(snapshot_download, REPO, local_dir=tmp_path / "other")[0] is httpx.RemoteProtocolError
    hub.heal()
    snapshot_download(REPO, local_dir=tmp_path / "other")


def test_parallel_uploads(hub, api):
    """Delayed uploads of several threads all arrive."""
    hub.fail("PUT /lfs-storage", 0.3, times=None)
    threads = []
    for index in range(4):
        api.create_branch(REPO, branch=f"b{index}")
        files = add(**{f"{index}-{part}.bin": bytes([index, part, 0]) * 30_000 for part in range(5)})
        options = {"commit_message": "m", "revision": f"b{index}"}
        threads.append(threading.Thread(target=api.create_commit, args=(REPO, files), kwargs=options))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(4):
        expected = {f"{index}-{part}.bin": bytes([index, part, 0]) * 30_000 for part in range(5)}
        assert hub.files(REPO, f"b{index}") == expected


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


def test_other_processes_see_it(hub, api):
    """A process that a test starts is logged in to the stand-in and caches nothing in the user's folders."""
    code = "from huggingface_hub import HfApi, constants; print(HfApi().whoami()['name'], constants.HF_HUB_CACHE)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == [hub.user, os.environ["HF_HUB_CACHE"]]
    assert os.environ["HF_HUB_CACHE"] == constants.HF_HUB_CACHE


def test_the_token_is_sent_in_one_header(hub, api):
    """The token appears in the Authorization header and nowhere else, and not at all where the file storage is."""
    api.create_commit(REPO, add(a=b"1", b=WEIGHTS), commit_message="1")
    hf_hub_download(REPO, "b")
    assert len(hub.requests) >= 8
    for method, path, headers, body in hub.requests:
        authorization = headers.pop("authorization", None)
        assert authorization == (None if method == "PUT" or "agent" in path else f"Bearer {hub.token}"), path
        assert hub.token not in path + str(headers) and hub.token.encode() not in body
