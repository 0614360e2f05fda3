"""A hub on loopback for the real huggingface_hub client: commits, listings, etags, redirects to a CDN, ranges."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

# Of a client's own.
API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+)(/.+)?)?")
FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
CHUNK = 1024


def model_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@dataclass
class LocalHub:
    """Repositories by name, each a list of commits; a commit is a dictionary from file names to contents.

    Files that end in .safetensors are in LFS: they come from another host, which must not see the token.
    """

    commits: dict[str, list[dict[str, bytes]]] = field(default_factory=dict)
    # The token with access to a repository, by the repositories that need one; and all tokens that are valid.
    gated: dict[str, str] = field(default_factory=dict)
    tokens: tuple[str, ...] = ("hf_mine", "hf_other")
    # Bytes of an LFS file after which the connection ends; and the status that later requests for LFS files get.
    cut_after: int | None = None
    status_after_cut: int | None = None
    # Set: LFS files are sent. Otherwise their requests wait after the first half.
    sending: threading.Event = field(default_factory=threading.Event)
    halves: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    # Bytes of bodies by file, and all requests as (method, path, token).
    sent: Counter[str] = field(default_factory=Counter)
    requests: list[tuple[str, str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sending.set()
        hub = self
        handler = type("Handler", (_Handler,), {"hub": hub})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def push(self, repo: str, files: Mapping[str, bytes]) -> str:
        """Adds a commit, and returns its name."""
        self.commits.setdefault(repo, []).append(dict(files))
        return self.commit(repo, "main")

    def commit(self, repo: str, revision: str) -> str:
        names = [hashlib.sha1(f"{repo} {number}".encode()).hexdigest() for number in range(len(self.commits[repo]))]
        return names[-1] if revision == "main" else revision if revision in names else ""

    def files(self, repo: str, commit: str) -> dict[str, bytes]:
        names = [hashlib.sha1(f"{repo} {number}".encode()).hexdigest() for number in range(len(self.commits[repo]))]
        return self.commits[repo][names.index(commit)]

    def downloads(self) -> list[str]:
        return [path for method, path, _ in self.requests if method == "GET" and path.startswith("/lfs/")]

    def close(self) -> None:
        self.sending.set()
        self.server.shutdown()
        self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: LocalHub

    def log_message(self, *_: object) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        self.hub.requests.append((self.command, path, token))
        if path.startswith("/lfs/"):
            self._lfs(path.removeprefix("/lfs/"), token)
        elif token and token not in self.hub.tokens:
            self._answer(401, b"", {"X-Error-Message": "Invalid credentials in Authorization header"})
        elif found := API.fullmatch(path):
            self._api(*found.groups())
        elif found := FILE.fullmatch(path):
            self._file(*found.groups()[1:], token)
        else:
            self._answer(404, b"", {})

    def _api(self, kind: str, repo: str, part: str | None, revision: str | None, below: str | None) -> None:
        if (commit := self._commit(repo, revision or "main")) is None:
            return
        if below is not None:  # no repository here has folders
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        files = self.hub.files(repo, commit)
        if part == "tree":
            self._json([_entry(name, content) for name, content in files.items()])
        else:
            self._json({"id": repo, "sha": commit, "siblings": [{"rfilename": name} for name in files], "tags": []})

    def _file(self, repo: str, revision: str, name: str, token: str) -> None:
        if (commit := self._commit(repo, revision)) is None:
            return
        if self.hub.gated.get(repo, token) != token:
            self._answer(403 if token else 401, b"", {"X-Error-Code": "GatedRepo"})
            return
        content = self.hub.files(repo, commit).get(name)
        if content is None:
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        known = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
        if not name.endswith(".safetensors"):
            self._answer(200, content, known)
            return
        digest = hashlib.sha256(content).hexdigest()
        elsewhere = f"http://localhost:{self.hub.server.server_port}/lfs/{repo}/{commit}/{name}"
        linked = {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content)), "Location": elsewhere}
        self._answer(302, b"", known | linked)

    def _lfs(self, path: str, token: str) -> None:
        """A file's content, from where the client asks."""
        hub = self.hub
        owner, name, commit, file = path.split("/", 3)
        content = hub.files(f"{owner}/{name}", commit)[file]
        assert not token, "the token was sent to another host than the hub"
        if hub.status_after_cut is not None and hub.cut_after is None:
            self._answer(hub.status_after_cut, b"", {})
            return
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        body = content[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if hub.cut_after is not None:
            body, hub.cut_after = body[: hub.cut_after], None
            self.close_connection = True
        half = len(body) // 2
        for piece in (body[:half], body[half:]):
            self.wfile.write(piece)
            self.wfile.flush()
            hub.sent[file] += len(piece)
            hub.halves.release()
            hub.sending.wait()

    def _commit(self, repo: str, revision: str) -> str | None:
        """The commit of a revision; otherwise answers that there is none."""
        if repo not in self.hub.commits:
            self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif not (commit := self.hub.commit(repo, revision)):
            self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        else:
            return commit
        return None

    def _json(self, value: object) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | dict(headers)).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _entry(name: str, content: bytes) -> dict[str, object]:
    entry: dict[str, object] = {"type": "file", "path": name, "size": len(content)}
    entry["oid"] = hashlib.sha1(content).hexdigest()
    if name.endswith(".safetensors"):
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return entry


def use(hub: LocalHub, home: Path, patch: pytest.MonkeyPatch) -> None:
    """Makes the client of this process use the hub, with its own cache and no token."""
    for name, value in {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_TOKEN_PATH": str(home / "token"),
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_OFFLINE": False,
        "DOWNLOAD_CHUNK_SIZE": CHUNK,
    }.items():
        patch.setattr(constants, name, value)
    patch.delenv("HF_TOKEN", raising=False)


def environment(hub: LocalHub, home: Path) -> dict[str, str]:
    """The same for another process."""
    return {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DOWNLOAD_TIMEOUT": "2",
        "HF_TOKEN": "",
        "NO_PROXY": "127.0.0.1,localhost",
    }
