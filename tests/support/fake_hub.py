"""A Hugging Face hub on this machine, for the real client: listings, downloads, redirects and failures."""

import hashlib
import json
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = 512  # bytes from which a file is served by a redirect and named by its SHA-256


@dataclass
class Repository:
    """Files by path.

    `gated`: the list of files is public, the files are not. `private`: all is hidden without the token.
    """

    files: dict[str, bytes]
    gated: bool = False
    private: bool = False

    @property
    def commit(self) -> str:
        states = [(name, len(data), data[:64]) for name, data in sorted(self.files.items())]
        return hashlib.sha1(repr(states).encode()).hexdigest()


@dataclass
class FakeHub:
    """A hub that listens on this machine.

    `requests` lists the requests so far: method, path and range. `cut` ends each answer of a large file after that many
    bytes. With `ranges` False, a file is sent from its beginning, whatever range is requested.
    """

    repositories: dict[str, Repository]
    url: str = ""
    token: str = "hf_right"
    cut: int | None = None
    ranges: bool = True
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    sent: Counter[str] = field(default_factory=Counter)  # bytes of each file, by its name
    wheels: dict[str, bytes] = field(default_factory=dict)  # by file name, of an index of packages at /simple
    damaged: set[str] = field(default_factory=set)  # paths that are served with a wrong byte, once
    dies: bool = False  # after the first cut no request is answered any more
    dead: bool = False
    connections: list[socket.socket] = field(default_factory=list)
    stalled: threading.Event | None = None  # if there is one, an answer is cut when it is set

    def fetched(self) -> list[str]:
        """Return the names of the files from which clients requested bytes."""
        return [path.rpartition("/")[2] for method, path, _ in self.requests if (method == "GET" and "/cdn/" in path) or
                (method == "GET" and "/resolve/" in path)]  # fmt: skip


@contextmanager
def fake_hub(repositories: Mapping[str, Mapping[str, bytes]]) -> Iterator[FakeHub]:
    hub = FakeHub({name: Repository(dict(files)) for name, files in repositories.items()})

    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False  # it joins them then
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        if hub.stalled:
            hub.stalled.set()
        server.shutdown()
        for connection in hub.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    state: FakeHub
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        self.state.connections.append(self.request)
        super().setup()

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if self.state.dead:
            self.close_connection = True
            return
        self.state.requests.append((self.command, path, self.headers.get("Range")))
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self._api("/".join(parts[2:4]), parts[4:])
        elif parts[0] == "cdn":
            self._file("/".join(parts[1:3]), "/".join(parts[3:]), direct=True)
        elif parts[0] in ("simple", "packages"):
            self._package(parts[0], parts[1])
        elif parts[2:3] == ["resolve"]:
            self._file("/".join(parts[:2]), "/".join(parts[4:]), direct=False, revision=parts[3])
        else:
            self._send(404, b"{}")

    def _api(self, name: str, rest: list[str]) -> None:
        repository = self._readable(name)
        if repository is None:
            return
        if rest[:1] == ["revision"] and not self._known(repository, "/".join(rest[1:])):
            return
        if rest[:1] == ["tree"]:
            tree = [self._entry(path, data) for path, data in sorted(repository.files.items())]
            self._send(200, json.dumps(tree).encode())
            return
        siblings = [{"rfilename": path, "size": len(data)} for path, data in sorted(repository.files.items())]
        fields = {"id": name, "modelId": name, "sha": repository.commit, "siblings": siblings, "private": False,
                  "tags": [], "downloads": 0, "likes": 0}  # fmt: skip
        self._send(200, json.dumps(fields).encode())

    def _package(self, kind: str, name: str) -> None:
        if kind == "packages":
            self._bytes(name, self.state.wheels[name], {"Content-Type": "application/octet-stream"})
            return
        links = [
            f'<a href="/packages/{file}#sha256={_sha(data)}">{file}</a>' for file, data in self.state.wheels.items()
        ]
        self._send(200, "".join(links).encode(), {"Content-Type": "text/html"})

    def _entry(self, path: str, data: bytes) -> dict[str, Any]:
        entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": _git(data)}
        return entry | ({"lfs": {"oid": _sha(data), "size": len(data), "pointerSize": 1}} if len(data) >= LARGE else {})

    def _known(self, repository: Repository, revision: str) -> bool:
        if revision in ("main", repository.commit):
            return True
        self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        return False

    def _readable(self, name: str) -> Repository | None:
        repository = self.state.repositories.get(name)
        allowed = self.headers.get("Authorization") == f"Bearer {self.state.token}"
        if repository is None or (repository.private and not allowed):
            error = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
            self._send(404 if allowed else 401, b"{}", error)
            return None
        return repository

    def _file(self, name: str, path: str, direct: bool, revision: str = "main") -> None:
        if direct:  # the address itself is the permission, and a token must not come here
            if "Authorization" in self.headers:
                self._send(400, b"{}")
            else:
                self._bytes(path, self.state.repositories[name].files[path], {})
            return
        repository = self._readable(name)
        if repository is None or not self._known(repository, revision):
            return
        if repository.gated and self.headers.get("Authorization") != f"Bearer {self.state.token}":
            self._send(403 if "Authorization" in self.headers else 401, b"{}", {"X-Error-Code": "GatedRepo"})
            return
        if path not in repository.files:
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": repository.commit})
            return
        data = repository.files[path]
        headers = {"X-Repo-Commit": repository.commit, "ETag": f'"{_git(data)}"'}
        if len(data) >= LARGE:
            cdn = self.state.url.replace("127.0.0.1", "localhost")  # another host, as that of the hub
            linked = {"X-Linked-Etag": f'"{_sha(data)}"', "X-Linked-Size": str(len(data))}
            self._send(302, b"", headers | linked | {"Location": f"{cdn}/cdn/{name}/{path}"})
            return
        self._bytes(path, data, headers)

    def _bytes(self, path: str, data: bytes, headers: dict[str, str]) -> None:
        if path in self.state.damaged:
            self.state.damaged.remove(path)
            data = data[:-1] + bytes([data[-1] ^ 1])
        start, status = 0, 200
        if self.state.ranges and (asked := self.headers.get("Range")):
            start, status = int(asked.removeprefix("bytes=").split("-")[0]), 206
            if start >= len(data):
                self._send(416, b"", {"Content-Range": f"bytes */{len(data)}"})
                return
            headers |= {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
        body, cut = data[start:], self.state.cut if len(data) >= LARGE and self.command == "GET" else None
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(body)), "Accept-Ranges": "bytes"}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.state.sent[path.rpartition("/")[2]] += len(body[:cut])
        self.wfile.write(body[:cut])
        self.wfile.flush()
        if cut is not None and cut < len(body):
            if self.state.stalled:
                self.state.stalled.wait()
            self.state.dead = self.state.dies
            self.close_connection = True

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **(headers or {}),
        }.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _git(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
