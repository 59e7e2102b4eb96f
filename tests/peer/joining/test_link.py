from __future__ import annotations

import contextlib
import http.server
import os
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from multiaddr import Multiaddr

from dht.identity import Identity
from peer.errors import LinkError, RunFileError, RunFileUnreadable, RunNotFound
from peer.joining.link import Link, find_run, is_news, only_from, parse_link, run_at, short_link
from peer.run_file.reading import TEXT_MAX_BYTES, parse
from peer.run_file.sections import RunFile
from peer.run_file.writing import to_toml
from tests.peer.certificates import tls_contexts

RUN = RunFile(name="a-run")
PEER = Identity.from_seed(bytes(32)).peer_id
SEED = f"/dns4/seed.example.org/tcp/7700/p2p/{PEER}"
OTHER = f"/ip6/2001:db8::1/tcp/7701/p2p/{PEER}"


def test_a_link_survives_being_written_and_read() -> None:
    text = f"shoal://{RUN.run_id}?seed={SEED}&seed={OTHER}"
    link = parse_link(text)
    assert link.run_id == RUN.run_id
    assert [str(seed) for seed in link.seeds] == [SEED, OTHER]
    assert str(link) == text


NEAR = f"/ip4/192.168.1.5/tcp/7700/p2p/{PEER}"
HERE = f"/ip4/127.0.0.1/tcp/7700/p2p/{PEER}"


@pytest.mark.parametrize(
    ("seeds", "kept", "works_only"),
    [
        ((NEAR, SEED, HERE), (SEED,), None),
        ((OTHER, NEAR), (OTHER,), None),
        ((HERE, NEAR), (NEAR,), "works only in this local network"),
        ((HERE,), (HERE,), "works only on this machine"),
        ((), (), None),
        ((f"{SEED}/p2p-circuit/p2p/{PEER}", NEAR), (f"{SEED}/p2p-circuit/p2p/{PEER}",), None),
    ],
)
def test_a_link_names_no_address_that_is_another_machine_where_it_is_pasted(
    seeds: tuple[str, ...], kept: tuple[str, ...], works_only: str | None
) -> None:
    text = str(Link(RUN.run_id, tuple(Multiaddr(seed) for seed in seeds)))
    assert [str(seed) for seed in parse_link(text).seeds] == list(kept)
    warning = only_from(text)
    if works_only is None:
        assert warning is None
    else:
        assert warning is not None and works_only in warning and "--announce" in warning


HOSTS = [
    f"/ip4/203.0.113.{number}/tcp/7700/p2p/{Identity.from_seed(bytes([number]) * 32).peer_id}"
    for number in range(1, 5)
]


@pytest.mark.parametrize(
    ("seeds", "own", "expected"),
    [
        ((), (OTHER,), (OTHER,)),
        (HOSTS, (OTHER,), (*HOSTS[:2], OTHER)),  # room for this peer among many seeds
        (HOSTS, (NEAR,), HOSTS[:3]),
        ((HOSTS[0], HOSTS[0].replace("7700", "443")), (OTHER,), (HOSTS[0], OTHER)),
        ((SEED,), (OTHER,), (OTHER,)),  # it was told its own address
        ((NEAR,), (HERE, NEAR), (NEAR,)),
    ],
)
def test_a_short_link_has_three_addresses_of_different_peers_and_one_of_its_own(
    seeds: tuple[str, ...], own: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    link = short_link(RUN.run_id, seeds=list(map(Multiaddr, seeds)), own=list(map(Multiaddr, own)))
    assert [str(seed) for seed in link.seeds] == list(expected)


@pytest.mark.parametrize(
    ("told", "new", "news"),
    [
        (None, (NEAR,), True),
        ((NEAR,), (NEAR,), False),
        ((NEAR,), (SEED,), True),  # a router has opened a port
        ((SEED, HOSTS[0]), (SEED, HOSTS[1]), False),
        ((HOSTS[0],), (HOSTS[1],), True),
        ((SEED,), (NEAR,), True),
        ((SEED,), (), False),
    ],
)
def test_a_link_is_told_again_only_if_the_one_before_leads_nowhere_or_less_far(
    told: tuple[str, ...] | None, new: tuple[str, ...], news: bool
) -> None:
    def text(seeds: tuple[str, ...]) -> str:
        return str(Link(RUN.run_id, tuple(map(Multiaddr, seeds))))

    assert is_news(text(new), None if told is None else text(told)) is news


@pytest.mark.parametrize(
    "text",
    [
        f"  shoal://{RUN.run_id}?seed={SEED}\n",
        f"SHOAL://{RUN.run_id.upper()}/?seed={SEED}",
        f"shoal://{RUN.run_id}?seed={SEED.replace('/', '%2F')}",
        f"shoal://{RUN.run_id}?seed={SEED}&seed={SEED}",
    ],
)
def test_a_link_with_changed_case_or_spaces_is_parsed(text: str) -> None:
    assert str(parse_link(text)) == f"shoal://{RUN.run_id}?seed={SEED}"


def test_a_link_may_come_without_seeds() -> None:
    assert str(parse_link(f"shoal://{RUN.run_id}")) == f"shoal://{RUN.run_id}"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            f"shoal://{RUN.run_id}?"
            + "&".join(f"seed=/ip4/1.2.3.4/tcp/{n}/p2p/{PEER}" for n in range(1, 34)),
            "33 seeds; at most 32",
        ),
        ("shoal://" + "a" * 9000, "longer than 8192 characters"),
    ],
)
def test_a_link_that_is_too_long_is_refused_in_a_short_sentence(text: str, reason: str) -> None:
    with pytest.raises(LinkError) as caught:
        parse_link(text)
    assert reason in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_run_is_found_in_a_file_with_its_seeds(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'seeds = ["{SEED}"]\n' + to_toml(RUN).replace("seeds = []", ""))
    found = run_at(str(path))
    assert found.run.run_id == parse(to_toml(RUN)).run_id
    assert [str(seed) for seed in found.seeds] == [SEED]
    assert found.folder == tmp_path


def test_a_run_from_peers_is_accepted_if_its_id_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def ask(link: Link, tell: object) -> bytes:
        asked.append(link)
        return RUN.canonical()

    monkeypatch.setattr("peer.joining.link.ask_peers", ask)
    found = find_run(f"shoal://{RUN.run_id}?seed={SEED}")
    assert found.run == RUN
    assert found.folder is None  # what strangers wrote names no files from anywhere here
    assert asked == [parse_link(f"shoal://{RUN.run_id}?seed={SEED}")]
    assert [str(seed) for seed in found.seeds] == [SEED]


def test_a_run_from_peers_with_another_id_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    other = RunFile().canonical()
    monkeypatch.setattr("peer.joining.link.ask_peers", lambda link, tell: other)
    with pytest.raises(RunFileError, match="the id asked for is"):
        find_run(f"shoal://{RUN.run_id}")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("missing.toml", None, "No such file"),
        ("large.toml", b"#" * (TEXT_MAX_BYTES + 1), "longer than 65536 bytes"),
        ("binary.toml", b"\xff\xfe", "not UTF-8 text"),
    ],
)
def test_a_file_that_cannot_be_a_run_file_is_refused_with_the_reason(
    tmp_path: Path, name: str, content: bytes | None, reason: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(RunFileUnreadable, match=reason):  # code 2, bad usage
        run_at(str(tmp_path / name))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("/ip4/127.0.0.1/tcp/7700/p2p/12D3Koo", "it is the address of a peer"),
        ("shaol://" + 64 * "a", "it begins with shaol:// and not with shoal://"),
        (" ", "it is empty"),
    ],
)
def test_a_text_that_was_meant_as_a_link_is_not_looked_for_in_files(
    text: str, problem: str
) -> None:
    """It was: no run file at shaol:/...: No such file or directory."""
    with pytest.raises(LinkError, match=f"is not a run link: {problem}"):
        run_at(text)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RunFileUnreadable, match="it is a pipe, which may never end"):
        run_at(str(tmp_path / "pipe"))


def test_an_endless_file_is_not_read_to_its_end() -> None:
    with pytest.raises(RunNotFound, match="longer than 65536 bytes"):
        run_at("/dev/zero")


# --- a real server with a real certificate -----------------------------------------------------


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        pages = {
            "/run.toml": [to_toml(RUN).encode()],
            "/large": [b"#" * 10_000_000],
            "/slow": [b"#"] * 1000,
        }
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/to/"))
            self.end_headers()
        elif self.path == "/garbage":
            self.wfile.write(b"no answer of http\r\n\r\n")
        elif self.path in pages:
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):  # whoever reads to the limit alone hangs up
                for piece in pages[self.path]:
                    self.wfile.write(piece)
                    time.sleep(0.05 if self.path == "/slow" else 0)
        else:
            self.send_error(404)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (its name)
        pass


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ssl.SSLContext]]:
    serving, trusting = tls_contexts(tmp_path_factory.mktemp("tls"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        httpd.socket = serving.wrap_socket(httpd.socket, server_side=True)
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"https://127.0.0.1:{httpd.server_port}", trusting
        httpd.shutdown()
        thread.join()


def test_a_run_is_found_at_an_https_address(server: tuple[str, ssl.SSLContext]) -> None:
    url, tls = server
    found = run_at(f"{url}/run.toml", tls=tls, timeout_s=60)
    assert found.run == RUN


def test_a_redirect_within_https_is_followed(server: tuple[str, ssl.SSLContext]) -> None:
    url, tls = server
    found = run_at(f"{url}/to/{url}/run.toml", tls=tls, timeout_s=60)
    assert found.run == RUN


def test_failures_of_an_https_address_are_reported(server: tuple[str, ssl.SSLContext]) -> None:
    url, tls = server
    for path, reason in [
        ("/missing", "the server answered 404"),
        ("/large", "longer than 65536 bytes"),
        ("/garbage", "answer is invalid: no answer of http"),
        ("/to/https://[::1/", "answer is invalid: Invalid IPv6 URL"),
        ("/to/http://127.0.0.1:9/run.toml", "which is not https"),
        ("/to/file:///etc/passwd", "Redirection to url 'file:///etc/passwd' is not allowed"),
    ]:
        with pytest.raises(RunNotFound, match=reason):
            run_at(url + path, tls=tls, timeout_s=60)


def test_a_slow_server_is_given_up_at_the_deadline(
    server: tuple[str, ssl.SSLContext],
) -> None:
    with pytest.raises(RunNotFound, match=r"not complete after 1 s"):
        run_at(f"{server[0]}/slow", tls=server[1], timeout_s=1)


def test_a_server_without_a_trusted_certificate_is_refused(
    server: tuple[str, ssl.SSLContext],
) -> None:
    with pytest.raises(RunNotFound, match="certificate"):
        run_at(f"{server[0]}/run.toml", timeout_s=60)


def test_an_unreachable_server_is_reported() -> None:
    with pytest.raises(RunNotFound, match="refused"):
        run_at("https://127.0.0.1:9/run.toml", timeout_s=60)


def test_a_host_without_an_address_is_reported_in_words() -> None:
    told = r"example\.invalid/run\.toml: the name of the host is not known .*check the address"
    with pytest.raises(RunNotFound, match=told):
        run_at("https://example.invalid/run.toml", timeout_s=60)


def test_plain_http_is_refused() -> None:
    with pytest.raises(RunNotFound, match="use https"):
        run_at("http://127.0.0.1:9/run.toml")
