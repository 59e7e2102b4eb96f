"""A stand-in on loopback for the hub, as far as reading a dataset uses it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

COMMIT = "c0ffee" + "0" * 34
TIME = "2026-01-01T00:00:00.000Z"


class Hub:
    """Datasets by name: the files of each at the one commit."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.asked: list[str] = []
        """Requests, each with the range of bytes that it wants."""
        self.refuses = 0
        """Number of requests for parts of files that are answered with an error from now on."""
        self.url = ""

    def info(self, name: str) -> Any:
        files = self.files[name]
        return {
            "id": name,
            "_id": "0",
            "sha": COMMIT,
            "private": False,
            "lastModified": TIME,
            "tags": [],
            "siblings": [{"rfilename": path} for path in sorted(files)],
        }

    def tree(self, name: str, folder: str, *, recursive: bool) -> Any:
        below = folder + "/" if folder else ""
        inside = sorted(path for path in self.files[name] if path.startswith(below))
        files = [path for path in inside if recursive or "/" not in path.removeprefix(below)]
        folders = {below + path.removeprefix(below).partition("/")[0] for path in inside}
        return [
            *({"type": "directory", "path": path, "oid": "0"} for path in folders - set(files)),
            *(self._entry(name, path) for path in files),
        ]

    def paths(self, name: str, paths: list[str]) -> Any:
        return [self._entry(name, path) for path in paths if path in self.files[name]]

    def _entry(self, name: str, path: str) -> Any:
        content = self.files[name][path]
        oid = hashlib.sha1(content).hexdigest()
        commit = {"id": COMMIT, "title": "", "date": TIME}
        return {
            **{"type": "file", "path": path, "size": len(content), "oid": oid},
            "lastCommit": commit,
        }


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def _json(self, content: Any, status: int = 200) -> None:
        self._send(json.dumps(content).encode(), status, {"Content-Type": "application/json"})

    def _send(self, data: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def do_GET(self) -> None:
        address, _, query = self.path.partition("?")
        path = address.strip("/")
        wanted = self.headers.get("Range", "")
        self.hub.asked.append(f"{self.command} {path} {wanted}".strip())
        parts = path.split("/")
        if parts[:2] == ["api", "datasets"]:
            name, what = "/".join(parts[2:4]), parts[4:5]
            if name not in self.hub.files:
                self._json({"error": "Repository not found"}, 404)
            elif what == ["tree"]:
                self._json(
                    self.hub.tree(
                        name, "/".join(parts[6:]), recursive="recursive=true" in query.lower()
                    )
                )
            else:
                self._json(self.hub.info(name))
            return
        name, file = "/".join(parts[1:3]), "/".join(parts[5:])
        content = self.hub.files.get(name, {}).get(file)
        if parts[0] != "datasets" or content is None:
            self._send(b"", 404, {"X-Error-Code": "EntryNotFound"})
            return
        if wanted and self.hub.refuses:
            self.hub.refuses -= 1
            self._send(b"", 403, {})
            return
        headers = {
            "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        if wanted:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(len(content), int(last) + 1)
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
            self._send(content[start:stop], 206, headers)
        else:
            self._send(content, 200, headers)

    do_HEAD = do_GET  # noqa: N815  # of the base class

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.partition("?")[0].strip("/")
        self.hub.asked.append(f"POST {path}")
        parts = path.split("/")
        if parts[4:5] == ["paths-info"]:
            wanted = json.loads(body)["paths"]
            self._json(self.hub.paths("/".join(parts[2:4]), wanted))
        else:
            self._json({"error": f"no such call: {path}"}, 404)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the name of the library
        return


@contextmanager
def hub_server() -> Iterator[Hub]:
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


def leave_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the hub an address at which nothing listens."""
    hub = pytest.importorskip("huggingface_hub", reason="the extra 'hf' is not installed")
    pytest.importorskip("datasets", reason="the extra 'hf' is not installed")
    monkeypatch.setattr(hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(hub, "create_repo", hub.HfApi().create_repo)  # made with the endpoint
    monkeypatch.setenv("HF_TOKEN", "hf_none")
