"""A small published model in a folder, and a server that answers like the hub.

``huggingface_hub`` talks to the server as it does to the hub: its ``HF_ENDPOINT`` is the server's
address. Only what this repository asks of the hub is answered.
"""

from __future__ import annotations

import hashlib
import json
import re
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "c0ffee" + "0" * 33 + "1"
NAME = "owner/tiny"

CONFIG = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}


def publish(folder: Path, *, seed: int = 1, shard: str | None = None) -> Path:
    """Write a model as transformers saves it. ``shard``: the largest size of one file."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**{k: v for k, v in CONFIG.items() if k != "model_type"})
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder, **({} if shard is None else {"max_shard_size": shard}))
    return folder


class Hub(ThreadingHTTPServer):
    """One model at one commit."""

    daemon_threads = True

    def __init__(self, folder: Path, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
        self.folder = folder
        self.token: str | None = None
        """The token that a gated model asks for."""
        self.asked: list[tuple[str, str | None]] = []
        """Path and range of each request."""
        self.seen_by_store: list[str | None] = []
        """The tokens that came to where the large files are, on another host."""
        self.ends_after: list[int] = []
        """Bytes after which each of the next answers with a large file ends."""

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is no fault of the server."""


class _Answer(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        hub = self.server
        path = self.path.partition("?")[0]
        hub.asked.append((path, self.headers["Range"]))
        if path.startswith("/store/"):
            hub.seen_by_store.append(self.headers["Authorization"])
            stored = hub.folder / path.rpartition("/")[2]
            if stored.is_file():
                self._send_file(stored, with_body=with_body)
            else:
                self.send_error(404)
            return
        if hub.token is not None and self.headers["Authorization"] != f"Bearer {hub.token}":
            self.send_response(401)
            self.send_header("X-Error-Code", "GatedRepo")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if re.fullmatch(rf"/api/models/{NAME}(/revision/(main|{COMMIT}))?", path):
            self._send(json.dumps(self._info()).encode(), with_body=with_body)
            return
        found = re.fullmatch(rf"/{NAME}/resolve/{COMMIT}/([^/]+)", path)
        file = hub.folder / found[1] if found else None
        if file is None or not file.is_file():
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif file.suffix == ".safetensors":
            # Large files are elsewhere, and the address of that place has its own signature.
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{hub.server_port}/store/{file.name}")
            self.send_header("X-Linked-Etag", f'"{_sha256(file)}"')
            self.send_header("X-Linked-Size", str(file.stat().st_size))
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self._send(file.read_bytes(), with_body=with_body)

    def _info(self) -> dict[str, object]:
        siblings = []
        for file in sorted(self.server.folder.iterdir()):
            entry: dict[str, object] = {"rfilename": file.name, "size": file.stat().st_size}
            if file.suffix in (".safetensors", ".bin"):
                size = file.stat().st_size
                entry["lfs"] = {"size": size, "sha256": _sha256(file), "pointerSize": 130}
            siblings.append(entry)
        return {"id": NAME, "modelId": NAME, "sha": COMMIT, "tags": [], "siblings": siblings}

    def _send(self, content: bytes, *, with_body: bool) -> None:
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if with_body:
            self.wfile.write(content)

    def _send_file(self, file: Path, *, with_body: bool) -> None:
        content, wanted = file.read_bytes(), self.headers["Range"]
        start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1]) if wanted else 0  # type: ignore[index]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if with_body:
            rest, ends_after = content[start:], self.server.ends_after
            self.wfile.write(rest[: ends_after.pop(0)] if ends_after else rest)
            self.close_connection = True

    def log_message(self, *args: object) -> None: ...


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@contextmanager
def serving(folder: Path, tls: ssl.SSLContext | None = None) -> Iterator[Hub]:
    with Hub(folder, tls) as hub:
        thread = threading.Thread(target=hub.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
