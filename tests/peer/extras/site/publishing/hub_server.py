"""A stand-in on loopback for the hub's HTTP API, as far as an upload of a folder uses it.

It speaks the calls of huggingface_hub without its Xet protocol: create a repository, list its tree,
ask which files are large, upload those by Git LFS, and commit.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_" + "t" * 34


class Hub:
    """Repositories by name: the files of each, and the messages of its commits."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.commits: dict[str, list[str]] = {}
        self.objects: dict[str, bytes] = {}
        self.refuses: int | None = None
        """HTTP status with which commits are refused."""
        self.url = ""

    def create(self, body: Any) -> Any:
        name = f"{body['organization']}/{body['name']}"
        self.files.setdefault(name, {})
        self.commits.setdefault(name, [])
        return {"url": f"{self.url}/{name}", "name": name, "id": name}

    def tree(self, name: str) -> Any:
        return [
            {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for path, data in sorted(self.files[name].items())
        ]

    def preupload(self, body: Any) -> Any:
        return {
            "files": [
                {
                    "path": each["path"],
                    "uploadMode": "lfs" if each["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                    "oid": None,
                }
                for each in body["files"]
            ]
        }

    def batch(self, body: Any) -> Any:
        return {
            "transfer": "basic",
            "objects": [
                {
                    **each,
                    "actions": {"upload": {"href": f"{self.url}/objects/{each['oid']}"}},
                }
                for each in body["objects"]
            ],
        }

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


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, content: Any, status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _is_known(self) -> bool:
        if self.headers.get("Authorization") == f"Bearer {TOKEN}":
            return True
        self._answer({"error": "Invalid username or password."}, 401)
        return False

    def do_GET(self) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        if self._is_known() and parts[0:2] == ["api", "models"]:
            name = "/".join(parts[2:4])
            if parts[4:5] == ["tree"]:
                self._answer(self.hub.tree(name))
            else:
                siblings = [{"rfilename": path} for path in sorted(self.hub.files[name])]
                self._answer({"id": name, "sha": "0" * 40, "siblings": siblings})

    def do_POST(self) -> None:
        body = self._body()
        if not self._is_known():
            return
        path = self.path.partition("?")[0].strip("/")
        parts = path.split("/")
        if path == "api/validate-yaml":  # of the model card
            self._answer({"errors": [], "warnings": []})
        elif path == "api/repos/create":
            self._answer(self.hub.create(json.loads(body)))
        elif "preupload" in parts:
            self._answer(self.hub.preupload(json.loads(body)))
        elif path.endswith(".git/info/lfs/objects/batch"):
            self._answer(self.hub.batch(json.loads(body)))
        elif "commit" in parts and self.hub.refuses is not None:
            self._answer({"error": "You have run out of storage."}, self.hub.refuses)
        elif "commit" in parts:
            lines = [json.loads(line) for line in body.splitlines()]
            self._answer(self.hub.commit("/".join(parts[2:4]), lines))
        else:
            self._answer({"error": f"no such call: {path}"}, 404)

    def do_PUT(self) -> None:
        data = self._body()
        oid = self.path.rpartition("/")[2]
        assert hashlib.sha256(data).hexdigest() == oid
        self.hub.objects[oid] = data
        self._answer({})

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the name of the library
        return


@contextmanager
def hub_server() -> Iterator[Hub]:
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
