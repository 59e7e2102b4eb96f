"""The tools of fault injection, each without a swarm: their effects, and the end of them."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest

from averaging.errors import BadPayload
from averaging.numbers.codec import Scratch
from averaging.numbers.codecs import codec_named
from tests.chaos.attackers.hostile_agent import KINDS, NORM_FACTOR, KindOfUpload, spoilt
from tests.chaos.fault_actions import make_unwritable
from tests.chaos.proxy import LinkRule, Proxies
from tests.chaos.workspace import set_clock, write_hook
from tests.processes import Child

# --- spoilt uploads

SIZES = (300, 7)


def encoded(codec: str) -> tuple[bytes, np.ndarray]:
    values = np.random.default_rng(0).normal(size=sum(SIZES)).astype(np.float32)
    coder = codec_named(codec)
    out = bytearray(coder.encoded_size(SIZES))
    coder.encode(values, SIZES, out, Scratch())
    return bytes(out), decoded(codec, bytes(out))


def decoded(codec: str, data: bytes) -> np.ndarray:
    values = np.empty(sum(SIZES), np.float32)
    codec_named(codec).decode(data, SIZES, values, Scratch())
    return values


@pytest.mark.parametrize("codec", ["f32", "f16", "int8", "int4"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_spoilt_upload_is_as_described_in_every_codec(codec: str, kind: str) -> None:
    honest, values = encoded(codec)
    data = spoilt(kind, honest, codec=codec, sizes=SIZES)
    if kind in ("short", "long"):
        assert len(data) != len(honest)
    elif kind in ("nan", "inf"):
        with pytest.raises(BadPayload):
            codec_named(codec).check(data, SIZES, Scratch())
    else:
        factor = NORM_FACTOR if kind == "norm" else -1.0
        assert decoded(codec, data) == pytest.approx(
            factor * values, rel=0.2, abs=0.2 * abs(factor)
        )


def test_a_repeated_upload_is_spoilt_as_before() -> None:
    kinds = KindOfUpload()
    first = [kinds.of(bytes([number]), number % 2) for number in range(len(KINDS))]
    again = [kinds.of(bytes([number]), number % 2) for number in range(len(KINDS))]
    assert first == again == list(KINDS)
    # Another slice of a round has its own turn.
    assert [kinds.of(b"other", index) for index in (0, 1, 0)] == [*KINDS[:2], KINDS[0]]


# --- links


def echo() -> Iterator[int]:
    """The port of a server that echoes all data."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    def answer(connection: socket.socket) -> None:
        with closing(connection):
            try:
                while data := connection.recv(1 << 16):
                    connection.sendall(data)
            except OSError:
                return

    threading.Thread(target=serve, daemon=True).start()
    yield server.getsockname()[1]
    server.close()


@pytest.fixture
def echo_port() -> Iterator[int]:
    yield from echo()


@pytest.fixture
def proxies(echo_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxies]:
    """Proxies with one peer, anna, which is an echo server."""
    monkeypatch.setattr("tests.chaos.proxy.free_port", lambda: echo_port)
    made = Proxies()
    made.find_diallers(lambda port: "boris")
    yield made
    made.close()


def dial(proxies: Proxies) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxies.ports("anna")[1]), timeout=60.0)


def exchange(connection: socket.socket, data: bytes) -> bytes:
    threading.Thread(target=connection.sendall, args=(data,), daemon=True).start()
    heard = b""
    while len(heard) < len(data):
        piece = connection.recv(1 << 16)
        if not piece:
            return heard
        heard += piece
    return heard


def test_a_proxy_carries_everything_both_ways(proxies: Proxies) -> None:
    data = np.random.default_rng(1).bytes(3 << 20)
    with dial(proxies) as connection:
        assert exchange(connection, data) == data
    assert proxies.carried_bytes == 2 * len(data)


def test_proxies_that_end_while_a_connection_ends_close_it(
    proxies: Proxies, monkeypatch: pytest.MonkeyPatch
) -> None:
    ending = threading.Event()
    writers: list[asyncio.StreamWriter] = []

    async def pump(pair: object, reader: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        writers.append(to)
        if len(writers) == 2:
            return
        try:
            await asyncio.sleep(60.0)
        except asyncio.CancelledError:
            ending.set()
            await asyncio.sleep(60.0)  # until it is cancelled once more

    monkeypatch.setattr(proxies, "_pump", pump)
    with dial(proxies):
        assert ending.wait(60.0)
        proxies.close()
    assert len(writers) == 2 and all(writer.transport.is_closing() for writer in writers)


def test_a_narrow_link_is_slow_and_a_clear_one_is_not(proxies: Proxies) -> None:
    data = bytes(60_000)
    with dial(proxies) as connection:
        proxies.set_rule("boris", LinkRule(bytes_per_s=100_000.0))
        began = time.monotonic()
        assert exchange(connection, data) == data
        assert time.monotonic() - began >= 0.5  # 0.6 s each way, which overlap
        proxies.set_rule("boris", LinkRule())
        data = bytes(8_000_000)
        began = time.monotonic()
        assert exchange(connection, data) == data
        assert time.monotonic() - began < 60.0  # the narrow one would take 80 s, each way


def test_a_link_with_latency_delivers_late(proxies: Proxies) -> None:
    proxies.set_rule("anna", LinkRule(delay_s=0.15))
    with dial(proxies) as connection:
        began = time.monotonic()
        assert exchange(connection, b"hello") == b"hello"
        assert time.monotonic() - began >= 0.3


def test_a_torn_connection_ends_in_the_middle(proxies: Proxies) -> None:
    proxies.set_rule("anna", LinkRule(torn_share=1.0))
    with dial(proxies) as connection:
        try:
            heard = connection.recv(10)
        except ConnectionError:
            heard = b""
        assert heard == b""
    assert proxies.torn == 1


def test_a_partition_cuts_connections_and_refuses_new_ones_until_it_is_healed(
    proxies: Proxies,
) -> None:
    with dial(proxies) as connection:
        assert exchange(connection, b"hello") == b"hello"
        proxies.cut({"anna": 0, "boris": 1})
        with suppress(ConnectionError):
            assert connection.recv(10) == b""
    with dial(proxies) as connection, suppress(ConnectionError):
        assert connection.recv(10) == b""
    assert proxies.refused == 1
    proxies.cut({"anna": 1, "boris": 1})
    with dial(proxies) as connection:
        assert exchange(connection, b"hello") == b"hello"
    proxies.cut({"anna": 0, "boris": 1})
    proxies.heal()
    with dial(proxies) as connection:
        assert exchange(connection, b"hello") == b"hello"


# --- clocks and disks


def test_a_process_sees_its_false_clock_and_the_jumps_of_that_clock(
    tmp_path: Path,
) -> None:
    write_hook(tmp_path / "hook")
    clock = tmp_path / "clock"
    set_clock(clock, 7200.0)
    script = (
        "import sys, time\n"
        "print(time.time(), flush=True); sys.stdin.readline(); time.sleep(0.3)\n"
        "print(time.time(), time.time_ns() / 1e9, flush=True)\n"
    )
    environment = {"PYTHONPATH": str(tmp_path / "hook"), "SHOAL_CHAOS_CLOCK": str(clock)}
    with Child("-P", "-c", script, env=environment) as process:
        assert float(process.line()) - time.time() == pytest.approx(7200.0, abs=60.0)
        set_clock(clock, -30.0)
        process.tell()
        for text in process.line().split():
            assert float(text) - time.time() == pytest.approx(-30.0, abs=20.0)


def test_an_unwritable_folder_is_restored(tmp_path: Path) -> None:
    folder = tmp_path / "outer"
    folder.mkdir()
    (folder / "kept").write_text("as it was")
    undo = make_unwritable(folder)
    with pytest.raises(OSError, match="Not a directory"):
        (folder / "new").mkdir()
    undo()
    assert (folder / "kept").read_text() == "as it was"
