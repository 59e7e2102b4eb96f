from __future__ import annotations

import hashlib
import re
import resource
import socket
import socketserver
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dht.public_ip import is_public
from peer.data.text.downloads import Downloads, KnownHashes
from peer.errors import DataUnavailable
from peer.https import https_opener
from peer.run_file.places import Place
from tests.peer.certificates import tls_contexts

CONTENT = bytes(range(256)) * 4096 * 3
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    """A web server with faults."""

    daemon_threads = True

    def __init__(self, tls: ssl.SSLContext) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.socket = tls.wrap_socket(self.socket, server_side=True)
        self.content = CONTENT
        self.ends_after: list[int] = []
        """Bytes after which each of the next connections ends."""
        self.ignores_range = False
        self.codes: list[int] = []
        self.redirect: str | None = None
        self.raw: bytes | None = None
        """What is sent in place of an answer."""
        self.asked: list[str | None] = []
        """The range that each request asked for."""

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.server_port}/a.bin"

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is no fault of the server."""


class Answer(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        server, wanted = self.server, self.headers["Range"]
        server.asked.append(wanted)
        if server.raw is not None:
            self.wfile.write(server.raw)
            return
        if server.redirect is not None:
            self.send_response(302)
            self.send_header("Location", server.redirect)
            self.end_headers()
            return
        if server.codes:
            self.send_error(server.codes.pop(0))
            return
        start = 0
        if wanted and not server.ignores_range:
            start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1])  # type: ignore[index]
        if start >= len(server.content):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        if start:
            last = len(server.content) - 1
            self.send_header("Content-Range", f"bytes {start}-{last}/{len(server.content)}")
        rest = server.content[start:]
        self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        self.wfile.write(rest[: server.ends_after.pop(0)] if server.ends_after else rest)

    def log_message(self, *args: object) -> None: ...


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    return tls_contexts(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def server(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> Iterator[Server]:
    with Server(contexts[0]) as serving:
        thread = threading.Thread(target=serving.serve_forever, args=(0.01,))
        thread.start()
        yield serving
        serving.shutdown()
        thread.join()


@pytest.fixture
def downloads(tmp_path: Path, contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> Downloads:
    return Downloads(
        tmp_path / "downloads",
        file_bytes_max=len(CONTENT),
        opener=https_opener(contexts[1]),
        pause=lambda seconds: None,
    )


def test_a_file_is_downloaded_once(server: Server, downloads: Downloads) -> None:
    place = Place(server.url, SHA256)
    path = downloads.fetch(place)
    assert path.read_bytes() == CONTENT
    assert downloads.fetch(place) == path
    assert server.asked == [None]
    assert [file.name for file in path.parent.iterdir()] == [SHA256]


def test_the_progress_of_each_file_is_told(
    server: Server, tmp_path: Path, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    told: list[tuple[str, int, int]] = []
    downloads = Downloads(
        tmp_path / "downloads",
        opener=https_opener(contexts[1]),
        tell=lambda place, done, whole: told.append((place.name, done, whole)),
    )
    downloads.fetch(Place(server.url, SHA256))
    assert told[-1] == (server.url, len(CONTENT), len(CONTENT))
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    heard: list[int] = []
    (tmp_path / "downloads" / SHA256).unlink()
    downloads.fetch(Place(server.url, SHA256), tell=lambda done, whole: heard.append(done))
    assert heard[-1] == len(CONTENT)


def test_an_interrupted_download_continues_where_it_ended(
    server: Server, downloads: Downloads, caplog: pytest.LogCaptureFixture
) -> None:
    server.ends_after = [1 << 20, 100, 0, 0]
    assert downloads.fetch(Place(server.url, SHA256)).read_bytes() == CONTENT
    places = [None, 1 << 20, (1 << 20) + 100, (1 << 20) + 100, (1 << 20) + 100]
    assert server.asked == [n and f"bytes={n}-" for n in places]
    pauses = [each.getMessage().rpartition(" ")[2] for each in caplog.records]
    assert pauses == ["again_in_s=1", "again_in_s=4"], "it waited 80 s without a word"


def test_a_download_continues_in_another_process(
    server: Server, downloads: Downloads, tmp_path: Path
) -> None:
    (tmp_path / "downloads").mkdir()
    (tmp_path / "downloads" / f"{SHA256}.part").write_bytes(CONTENT[:1000])
    assert downloads.fetch(Place(server.url, SHA256)).read_bytes() == CONTENT
    assert server.asked == ["bytes=1000-"]


def test_the_part_of_a_piece_that_a_disk_took_is_not_in_the_file_twice(
    server: Server, tmp_path: Path, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    """A write may end in the middle; the rest was then appended to a part with more than known."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def room_again(seconds: float = 0.0) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    downloads = Downloads(
        tmp_path / "downloads", opener=https_opener(contexts[1]), pause=room_again
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 19, hard))
    try:
        path = downloads.fetch(Place(server.url, SHA256))
    except DataUnavailable as error:
        assert "takes no more of it (File too large); free some space" in str(error)
        room_again()
        path = downloads.fetch(Place(server.url, SHA256))
    finally:
        room_again()
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize("there", [b"damaged", CONTENT + b"too much", CONTENT])
def test_a_damaged_beginning_is_downloaded_again(
    server: Server, downloads: Downloads, tmp_path: Path, there: bytes
) -> None:
    (tmp_path / "downloads").mkdir()
    (tmp_path / "downloads" / f"{SHA256}.part").write_bytes(there)
    assert downloads.fetch(Place(server.url, SHA256)).read_bytes() == CONTENT


def test_a_server_without_ranges_sends_all_again(server: Server, downloads: Downloads) -> None:
    server.ends_after, server.ignores_range = [1 << 20], True
    assert downloads.fetch(Place(server.url, SHA256)).read_bytes() == CONTENT


def test_processes_that_download_at_once_share_one_download(
    server: Server, downloads: Downloads
) -> None:
    found: list[bytes] = []
    threads = [
        threading.Thread(
            target=lambda: found.append(downloads.fetch(Place(server.url, SHA256)).read_bytes())
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CONTENT] * 4
    assert server.asked == [None]


def test_a_wrong_hash_is_an_error_with_both_and_leaves_nothing(
    server: Server, downloads: Downloads, tmp_path: Path
) -> None:
    with pytest.raises(DataUnavailable, match=f"has the sha256 {SHA256}, the run file demands 00"):
        downloads.fetch(Place(server.url, "00" * 32))
    assert [file.stat().st_size for file in (tmp_path / "downloads").iterdir()] == [0]


def test_a_file_over_the_limit_is_refused(server: Server, downloads: Downloads) -> None:
    server.content = CONTENT + b"x"
    with pytest.raises(DataUnavailable, match=r"more than 3\.15 MB, the limit for one file; ask"):
        downloads.fetch(Place(server.url, SHA256))


@pytest.mark.parametrize("target", ["http://127.0.0.1:1/a.bin", "file:///etc/passwd"])
def test_a_redirect_to_anything_but_https_is_refused(
    server: Server, downloads: Downloads, target: str
) -> None:
    server.redirect = target
    with pytest.raises(DataUnavailable, match=f"{target}.* is not (https|allowed)"):
        downloads.fetch(Place(server.url, SHA256))


_OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (b"no answer of http\r\n\r\n", "answer is invalid: no answer of http"),
        (_OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhel", "answer is invalid: IncompleteRead"),
        (_OK + b"X: y\r\n" * 200, "answer is invalid: got more than 100 headers"),
        (_OK + b"Content-Length: many\r\n\r\nhello", "its content has the sha256"),
        (b"HTTP/1.1 302 Found\r\nLocation: https://[::1/\r\n\r\n", "Invalid IPv6 URL"),
        (b"HTTP/1.1 302 Found\r\nLocation: https://a..b/\r\n\r\n", "label empty or too long"),
    ],
)
def test_an_answer_that_is_none_of_http_is_reported(
    server: Server, downloads: Downloads, raw: bytes, told: str
) -> None:
    server.raw = raw
    with pytest.raises(DataUnavailable, match=re.escape(told)):
        downloads.fetch(Place(server.url, SHA256))
    assert downloads.size_bytes(Place("https://a..b/a.bin", SHA256)) is None


def test_a_folder_that_cannot_be_written_is_named(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataUnavailable, match=r"file/downloads: Not a directory.*writable"):
        Downloads(tmp_path / "file" / "downloads").fetch(Place(server.url, SHA256))


def test_a_missing_file_is_reported_at_once_and_a_busy_server_asked_again(
    server: Server, downloads: Downloads
) -> None:
    server.codes = [503, 429]
    assert downloads.fetch(Place(server.url, SHA256)).read_bytes() == CONTENT
    server.codes = [404]
    with pytest.raises(DataUnavailable, match="the server answered 404"):
        downloads.fetch(Place(server.url, "00" * 32))
    assert server.codes == []


def test_no_request_is_sent_to_an_address_that_is_not_public(
    server: Server, tmp_path: Path, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    strict = Downloads(
        tmp_path,
        opener=https_opener(contexts[1], allowed=is_public),
        pause=lambda seconds: None,
    )
    with pytest.raises(DataUnavailable, match=r"127\.0\.0\.1, which is not public"):
        strict.fetch(Place(f"https://localhost:{server.server_port}/a.bin", SHA256))
    assert server.asked == []


class Tunnel(socketserver.BaseRequestHandler):
    """A proxy that opens one tunnel to the server of the test, whatever is asked for."""

    server: TunnelServer

    def handle(self) -> None:
        self.server.asked.append(self.request.recv(4096).split(b"\r\n")[0].decode())
        with socket.create_connection(("127.0.0.1", self.server.leads_to)) as there:
            self.request.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            back = threading.Thread(target=_pass_on, args=(there, self.request))
            back.start()
            _pass_on(self.request, there)
            back.join()


class TunnelServer(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def __init__(self, leads_to: int) -> None:
        super().__init__(("127.0.0.1", 0), Tunnel)
        self.leads_to = leads_to
        self.asked: list[str] = []


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while part := source.recv(1 << 16):
            target.sendall(part)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def test_a_proxy_of_the_user_may_have_any_address(
    server: Server,
    tmp_path: Path,
    contexts: tuple[ssl.SSLContext, ssl.SSLContext],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with TunnelServer(server.server_port) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.server_address[1]}")
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        strict = Downloads(tmp_path, opener=https_opener(contexts[1], allowed=is_public))
        place = Place(f"https://localhost:{server.server_port}/a.bin", SHA256)
        try:
            assert strict.fetch(place).read_bytes() == CONTENT
        finally:
            proxy.shutdown()
            thread.join()
    assert [line.split()[0] for line in proxy.asked] == ["CONNECT"]


def test_the_hash_of_a_local_file_is_remembered_until_it_changes(tmp_path: Path) -> None:
    known = KnownHashes(tmp_path / "hashes")
    path = tmp_path / "a"
    path.write_bytes(b"abc")
    right = hashlib.sha256(b"abc").hexdigest()
    assert known.of([(path, Place("a"))]) == right
    (memory,) = (tmp_path / "hashes").iterdir()
    memory.write_text("damaged")
    assert known.of([(path, Place("a"))]) == right
    assert known.of([(path, Place("a", right))]) == right
    path.write_bytes(b"abcd")
    with pytest.raises(DataUnavailable, match=f"the run file demands {right}: replace"):
        known.of([(path, Place("a", right))])
