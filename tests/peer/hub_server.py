"""A stand-in on loopback for the hub, as far as this repository asks it: it serves the files of
datasets and models at one commit, and takes uploads of folders.

It speaks HTTP without the hub's Xet protocol. Large files are elsewhere, as the hub's are: they are
answered with another address of this server, and uploaded by Git LFS.
"""

from __future__ import annotations

import base64
import hashlib
import json
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest

COMMIT = "c0ffee" + "0" * 34
TIME = "2026-01-01T00:00:00.000Z"
TOKEN = "hf_" + "t" * 34
LARGE = (".safetensors", ".bin")


class Hub(ThreadingHTTPServer):
    """Repositories by name: the files of each, and the messages of its commits."""

    daemon_threads = True

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
        self.files: dict[str, dict[str, bytes]] = {}
        self.commits: dict[str, list[str]] = {}
        self.objects: dict[str, bytes] = {}
        """Large files that were uploaded, by their hash."""
        self.token: str | None = None
        """The token that this hub asks for."""
        self.asked: list[tuple[str, str | None]] = []
        """Path and range of each request."""
        self.seen_by_store: list[str | None] = []
        """The tokens that came to where the large files are, on another host."""
        self.ends_after: list[int] = []
        """Bytes after which each of the next answers with a large file ends."""
        self.refuses_parts = 0
        """Number of requests for parts of files that are answered with an error from now on."""
        self.refuses_commits: int | None = None
        """HTTP status with which commits are refused."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is no fault of the server."""

    def info(self, name: str) -> Any:
        siblings = [
            {"rfilename": path, "size": len(content), **_stored(path, content)}
            for path, content in sorted(self.files[name].items())
        ]
        told = {"id": name, "_id": "0", "sha": COMMIT, "private": False, "tags": []}
        return {**told, "lastModified": TIME, "siblings": siblings}

    def tree(self, name: str, folder: str, *, recursive: bool) -> Any:
        below = folder + "/" if folder else ""
        inside = sorted(path for path in self.files[name] if path.startswith(below))
        files = [path for path in inside if recursive or "/" not in path.removeprefix(below)]
        folders = {below + path.removeprefix(below).partition("/")[0] for path in inside}
        return [
            *({"type": "directory", "path": path, "oid": "0"} for path in folders - set(files)),
            *self.paths(name, files),
        ]

    def paths(self, name: str, paths: list[str]) -> Any:
        commit = {"id": COMMIT, "title": "", "date": TIME}
        found = {path: self.files[name][path] for path in paths if path in self.files[name]}
        return [
            {"type": "file", "path": path, "size": len(content), "oid": _sha1(content)}
            | {"lastCommit": commit}
            for path, content in found.items()
        ]

    def create(self, body: Any) -> Any:
        name = f"{body['organization']}/{body['name']}"
        self.files.setdefault(name, {})
        self.commits.setdefault(name, [])
        return {"url": f"{self.url}/{name}", "name": name, "id": name}

    def commit(self, name: str, lines: list[Any]) -> Any:
        files = self.files[name]
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.commits[name].append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        oid = f"{len(self.commits[name]):040x}"
        return {"success": True, "commitOid": oid, "commitUrl": f"{self.url}/{name}/commit/{oid}"}


def _sha1(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _stored(path: str, content: bytes) -> dict[str, Any]:
    if not path.endswith(LARGE):
        return {}
    sha256 = hashlib.sha256(content).hexdigest()
    return {"lfs": {"size": len(content), "sha256": sha256, "pointerSize": 130}}


def _upload_mode(path: str) -> dict[str, Any]:
    mode = "lfs" if path.endswith(LARGE) else "regular"
    return {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": None}


class _Answer(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def _json(self, content: Any, status: int = 200, **headers: str) -> None:
        data = json.dumps(content).encode()
        self._send(data, status, {"Content-Type": "application/json", **headers})

    def _send(self, data: bytes, status: int = 200, headers: Mapping[str, str] = {}) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _admits(self, path: str) -> bool:
        hub = self.server
        if hub.token is None or self.headers["Authorization"] == f"Bearer {hub.token}":
            return True
        refusal = {"error": "Invalid username or password."}
        self._json(refusal, 401, **{"X-Error-Code": "GatedRepo"})
        return False

    def do_GET(self) -> None:
        hub, (path, _, query) = self.server, self.path.partition("?")
        hub.asked.append((path, self.headers["Range"]))
        parts = path.strip("/").split("/")
        if parts[0] == "store":
            self._send_stored(parts[-1])
        elif self._admits(path):
            if parts[0] == "api":
                self._tell_of("/".join(parts[2:4]), parts[4:], query)
            else:
                parts = parts[1:] if parts[0] == "datasets" else parts
                self._send_file("/".join(parts[:2]), "/".join(parts[4:]))

    do_HEAD = do_GET  # noqa: N815  # of the base class

    def _tell_of(self, name: str, what: list[str], query: str) -> None:
        if name not in self.server.files or (
            what[:1] == ["revision"]
            and what[1]
            not in (
                "main",
                COMMIT,
            )
        ):
            self._json({"error": "Repository not found"}, 404)
        elif what[:1] == ["tree"]:
            recursive = "recursive=true" in query.lower()
            self._json(self.server.tree(name, "/".join(what[2:]), recursive=recursive))
        else:
            self._json(self.server.info(name))

    def _send_file(self, name: str, file: str) -> None:
        hub = self.server
        content, wanted = hub.files.get(name, {}).get(file), self.headers["Range"]
        of_commit = {"X-Repo-Commit": COMMIT}
        if content is None:
            self._send(b"", 404, {"X-Error-Code": "EntryNotFound", **of_commit})
        elif stored := _stored(file, content):
            # The address of that place has its own signature.
            place = f"http://localhost:{hub.server_port}/store/{file}"
            linked = {"X-Linked-Etag": f'"{stored["lfs"]["sha256"]}"'}
            size = {"X-Linked-Size": str(len(content))}
            self._send(b"", 302, {"Location": place, **linked, **size, **of_commit})
        elif wanted and hub.refuses_parts:
            hub.refuses_parts -= 1
            self._send(b"", 403)
        else:
            headers = {"ETag": f'"{_sha1(content)}"', "Accept-Ranges": "bytes", **of_commit}
            self._send_part(content, headers)

    def _send_part(self, content: bytes, headers: Mapping[str, str]) -> None:
        wanted = self.headers["Range"]
        if wanted is None:
            self._send(content, 200, headers)
            return
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, stop = int(first), min(len(content), int(last or len(content)) + 1)
        part = {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}
        self._send(content[start:stop], 206, {**headers, **part})

    def _send_stored(self, file: str) -> None:
        hub = self.server
        hub.seen_by_store.append(self.headers["Authorization"])
        stored = [files[file] for files in hub.files.values() if file in files]
        if not stored:
            self._send(b"", 404)
        elif hub.ends_after and self.command == "GET":
            content, wanted = stored[0], self.headers["Range"]
            start = 0 if wanted is None else int(wanted.removeprefix("bytes=").partition("-")[0])
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            self.wfile.write(content[start : start + hub.ends_after.pop(0)])
            self.close_connection = True
        else:
            self._send_part(stored[0], {})

    def do_POST(self) -> None:
        hub, body = self.server, self._body()
        path = self.path.partition("?")[0].strip("/")
        hub.asked.append((f"/{path}", None))
        if not self._admits(path):
            return
        name, last = "/".join(path.split("/")[2:4]), path.split("/")[4:5]
        if path == "api/validate-yaml":  # of the model card
            self._json({"errors": [], "warnings": []})
        elif path == "api/repos/create":
            self._json(hub.create(json.loads(body)))
        elif last == ["paths-info"]:
            # Clients before 2.0 send a form.
            is_form = self.headers.get_content_subtype() != "json"
            asked = parse_qs(body.decode()) if is_form else json.loads(body)
            self._json(hub.paths(name, asked["paths"]))
        elif last == ["preupload"]:
            files = json.loads(body)["files"]
            self._json({"files": [_upload_mode(each["path"]) for each in files]})
        elif path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                {**each, "actions": {"upload": {"href": f"{hub.url}/objects/{each['oid']}"}}}
                for each in json.loads(body)["objects"]
            ]
            self._json({"transfer": "basic", "objects": objects})
        elif last == ["commit"] and hub.refuses_commits is not None:
            self._json({"error": "You have run out of storage."}, hub.refuses_commits)
        elif last == ["commit"]:
            self._json(hub.commit(name, [json.loads(line) for line in body.splitlines()]))
        else:
            self._json({"error": f"no such call: {path}"}, 404)

    def do_PUT(self) -> None:
        data, oid = self._body(), self.path.rpartition("/")[2]
        assert hashlib.sha256(data).hexdigest() == oid
        self.server.objects[oid] = data
        self._json({})

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def log_message(self, *args: object) -> None: ...


@contextmanager
def hub_server(
    files: Mapping[str, Path] | None = None, tls: ssl.SSLContext | None = None
) -> Iterator[Hub]:
    """A hub with the files of these folders, by the names of repositories."""
    with Hub(tls) as hub:
        for name, folder in (files or {}).items():
            hub.files[name] = {path.name: path.read_bytes() for path in folder.iterdir()}
        thread = threading.Thread(target=hub.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


def leave_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the hub an address at which nothing listens."""
    hub = pytest.importorskip("huggingface_hub", reason="the extra 'hf' is not installed")
    pytest.importorskip("datasets", reason="the extra 'hf' is not installed")
    monkeypatch.setattr(hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(hub, "create_repo", hub.HfApi().create_repo)  # made with the endpoint
    monkeypatch.setenv("HF_TOKEN", "hf_none")
