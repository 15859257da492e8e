"""A stand-in for the Hugging Face Hub on loopback, for the real client: repositories in memory, faults on demand.

It answers the requests of huggingface_hub 2.4 for model repositories, and those that read datasets (named datasets/...
here), with the status codes and the headers from which the client chooses its exceptions. It has no Xet storage, and
takes any token for its user's.
"""

import json
import re
import secrets
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

from hub_repository import Refused, Repository, check_card

# The status of an answer; the seconds before a normal answer; "drop": close the connection after half of the request's
# body; "lose": do what was asked, then close it.
Fault = int | float | str

# The environment of a client. It never falls back from Xet to LFS by itself.
CLIENT = {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1"}


class HubStandIn:
    """The server and what it holds. Use it as a context manager."""

    def __init__(self):
        self.token = f"hf_{secrets.token_hex(17)}"
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []  # method, path, headers by lower case, body
        self.errors: list[Exception] = []  # of the stand-in itself: a test must leave none
        self.repositories: dict[str, Repository] = {}
        self.faults: list[list] = []  # [regular expression, Fault, times left]
        self.lock = threading.RLock()
        self.stopped = threading.Event()
        self.server = Server(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": self}))
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> "HubStandIn":
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        self.thread.start()
        return self

    def __exit__(self, *error) -> None:
        self.stopped.set()  # ends delays, and the connections that clients keep open
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """Return the files of a revision by path, without the .gitattributes that every repository starts with."""
        files = self.repositories[repo_id].files(revision)
        return {path: file.content for path, file in files.items() if path != ".gitattributes"}

    def branches(self, repo_id: str) -> dict[str, str]:
        """Return the id of the last commit of every branch."""
        return dict(self.repositories[repo_id].branches)

    def fail(self, pattern: str, how: Fault, times: int | None = 1) -> None:
        """Make the next requests fail whose "METHOD path" matches a regular expression. times: None for all."""
        with self.lock:
            self.faults.append([re.compile(pattern), how, times])

    def heal(self) -> None:
        """Remove all faults."""
        with self.lock:
            self.faults.clear()

    def take_fault(self, request: str) -> Fault | None:
        """Return how a request fails, or None."""
        with self.lock:
            for fault in self.faults:
                pattern, how, times = fault
                if times != 0 and pattern.search(request):
                    fault[2] = times and times - 1
                    return how
        return None

    def open(self, repo_id: str) -> Repository:
        if repo_id not in self.repositories:
            raise Refused(404, "Repository not found", "RepoNotFound")
        return self.repositories[repo_id]

    def create_repository(self, asked: dict) -> dict:
        repo_id = f"{asked['organization']}/{asked['name']}"
        answer = {"name": repo_id, "url": f"{self.endpoint}/{repo_id}"}
        if repo_id in self.repositories:
            raise Refused(409, "You already created this model repo", **answer)
        self.repositories[repo_id] = Repository(asked.get("visibility") == "private")
        return answer

    def answer(self, method: str, target: str, body: bytes) -> tuple[object, dict[str, str]]:
        """Return the payload and the headers of a successful answer."""
        url = urlsplit(target)
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        prefix = "datasets/" * (parts[0] == "datasets" or parts[:2] == ["api", "datasets"])
        match method, parts[1:] if parts[0] == "datasets" else parts:
            case "PUT", ["lfs-storage", owner, name, oid]:
                self.open(f"{owner}/{name}").large_files[oid] = body
                return {}, {}
            case "GET", ["api", "agent-harnesses"]:
                return {}, {}
            case "POST", ["api", "validate-yaml"]:
                return check_card(json.loads(body)["content"]), {}
            case "POST", ["api", "repos", "create"]:
                return self.create_repository(json.loads(body)), {}
            case "GET" | "HEAD", [owner, name, "resolve", revision, *path]:
                return self.open(f"{prefix}{owner}/{name}").read_file(revision, "/".join(path))
            case "POST", [owner, name, "info", "lfs", "objects", "batch"]:
                repo_id = f"{owner}/{name.removesuffix('.git')}"
                return self.answer_lfs(repo_id, self.open(repo_id), json.loads(body)), {}
            case _, ["api", "models" | "datasets", owner, name, *rest]:
                repo_id = f"{prefix}{owner}/{name}"
                return self.answer_api(repo_id, self.open(repo_id), [method, *rest], parse_qs(url.query), body), {}
        raise Refused(404, f"The stand-in does not know {method} {url.path}")

    def answer_api(self, repo_id: str, repository: Repository, request: list[str], query: dict, body: bytes) -> object:
        """Answer a request under /api/models/{repo_id}."""
        match request:
            case ["GET", "auth-check", *_]:
                return {}
            case ["GET"] | ["GET", "revision", _]:
                revision = request[-1] if request[1:] else "main"
                files = [
                    {"rfilename": path, "blobId": file.oid, "size": len(file.content)}
                    for path, file in repository.files(revision).items()
                ]
                info = {"id": repo_id, "sha": repository.resolve(revision), "private": repository.private}
                return {**info, "siblings": files, "tags": []}
            case ["GET", "refs"]:
                heads = repository.branches.items()
                branches = [{"name": name, "ref": f"refs/heads/{name}", "targetCommit": head} for name, head in heads]
                return {"branches": branches, "converts": [], "tags": []}
            case ["GET", "tree", revision, *folder]:
                return repository.list_tree(revision, "/".join(folder), query.get("recursive") == ["true"])
            case ["POST", "branch", branch]:
                return repository.create_branch(branch, json.loads(body).get("startingPoint", "main"))
            case ["DELETE", "branch", branch]:
                del repository.branches[branch]
                return {}
            case ["POST", "super-squash", branch]:
                repository.write_commit(branch, None, json.loads(body)["message"], repository.files(branch))
                return {}
            case ["POST", "preupload", revision]:
                return {"files": [repository.choose_upload(revision, file) for file in json.loads(body)["files"]]}
            case ["POST", "commit", branch]:
                commit_id = repository.add_commit(branch, [json.loads(line) for line in body.splitlines()])
                return {"commitOid": commit_id, "commitUrl": f"{self.endpoint}/{repo_id}/commit/{commit_id}"}
        raise Refused(404, f"The stand-in does not know {' '.join(request)}")  # such as xet-write-token

    def answer_lfs(self, repo_id: str, repository: Repository, asked: dict) -> object:
        """Say where to upload the large files that a repository lacks, each in one piece."""
        objects = [{"oid": entry["oid"], "size": entry["size"]} for entry in asked["objects"]]
        for entry in objects:
            if entry["oid"] not in repository.large_files:
                entry["actions"] = {"upload": {"href": f"{self.endpoint}/lfs-storage/{repo_id}/{entry['oid']}"}}
        return {"transfer": "basic", "objects": objects}


class Server(ThreadingHTTPServer):
    daemon_threads = False  # so that server_close() joins them
    request_queue_size = 64

    def handle_error(self, request, client_address) -> None:
        """Print nothing about a connection that the client closed."""


class Handler(BaseHTTPRequestHandler):
    """One connection, on a thread of its own."""

    hub: HubStandIn
    protocol_version = "HTTP/1.1"  # keeps connections open, as the Hub does
    wbufsize = -1  # headers and body leave together

    def log_message(self, format, *args) -> None:
        """Print nothing."""

    def handle_request(self) -> None:
        how = self.hub.take_fault(f"{self.command} {unquote(urlsplit(self.path).path)}")
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = self.read_body(half=how == "drop")
        self.hub.requests.append((self.command, self.path, headers, body))
        is_over = self.hub.stopped.wait(how if isinstance(how, float) else 0)
        self.close_connection |= is_over or isinstance(how, str)
        if is_over or how == "drop":
            return
        status, payload, answered = self.find_answer(body, how)
        if how == "lose":
            return
        data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **answered, "Content-Length": len(data)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_request

    def read_body(self, half: bool) -> bytes:
        size = int(self.headers.get("Content-Length", 0))
        return self.rfile.read(size // 2 if half else size)

    def find_answer(self, body: bytes, how: Fault | None) -> tuple[int, object, dict]:
        """Return status, payload and headers."""
        try:
            if isinstance(how, int):
                raise Refused(how, f"The stand-in was told to answer {how}", "RepoNotFound" if how == 404 else "")
            with self.hub.lock:
                return 200, *self.hub.answer(self.command, self.path, body)
        except Refused as refused:
            return refused.status, refused.payload, refused.headers
        except Exception as error:
            self.hub.errors.append(error)
            return 500, {"error": repr(error)}, {}
