"""Asking a router for a port: the bytes of NAT-PMP, and a router of our own on loopback."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import pytest

from dht.libp2p.lane import port_mapping
from dht.libp2p.lane.port_mapping import (
    LIFE_MIN_S,
    LIFE_S,
    Mapped,
    NotMapped,
    gateway,
    keep_mapped,
    read_reply,
    request,
)
from tests.dht.libp2p.lane_ends import HERE
from tests.integration.loopback import WAIT_S

PORT = 7710
ROUTES = """\
Iface	Destination	Gateway 	Flags	RefCnt	Use	Metric	Mask		MTU	Window	IRTT
wlan0	0001A8C0	00000000	0001	0	0	600	00FFFFFF	0	0	0
wlan0	00000000	0101A8C0	0003	0	0	600	00000000	0	0	0
"""


def reply(inner: int, outer: int, life_s: int, *, result: int = 0, version: int = 0) -> bytes:
    return struct.pack("!BBHIHHI", version, 130, result, 77, inner, outer, life_s)


def test_a_request_has_the_twelve_bytes_of_the_rfc() -> None:
    assert request(0x1E1E, outer_port=0x1E1F, life_s=1200).hex() == "000200001e1e1e1f000004b0"


def test_a_reply_tells_the_outer_port_and_its_life_is_bounded() -> None:
    assert read_reply(reply(PORT, 40000, 600), PORT) == Mapped(40000, 600)
    assert read_reply(reply(PORT, 40000, 1), PORT) == Mapped(40000, LIFE_MIN_S)
    assert read_reply(reply(PORT, 40000, 2**32 - 1), PORT) == Mapped(40000, LIFE_S)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00\x82",
        reply(PORT, 40000, 600)[:-1],
        reply(PORT, 40000, 600) + b"x",
        reply(PORT + 1, 40000, 600),
        b"\x00\x80\x00\x00" + bytes(8),
    ],
)
def test_bytes_that_are_no_answer_to_the_request_are_passed_over(data: bytes) -> None:
    assert read_reply(data, PORT) is None


@pytest.mark.parametrize(
    "data",
    [
        reply(PORT, 40000, 600, result=2),
        reply(PORT, 40000, 600, version=2),
        b"\x00\x82\x00\x05",
        reply(PORT, 0, 600),
        reply(PORT, 40000, 0),
    ],
)
def test_a_refusal_is_told(data: bytes) -> None:
    with pytest.raises(NotMapped):
        read_reply(data, PORT)


def test_the_default_gateway_is_read_from_the_kernels_routes() -> None:
    assert gateway(ROUTES) == "192.168.1.1"
    assert gateway("\n".join(ROUTES.splitlines()[:2])) is None
    assert gateway("") is None


class Router(asyncio.DatagramProtocol):
    """Maps every port to another one, and forgets the first requests."""

    def __init__(self, *, forgets: int = 0, result: int = 0) -> None:
        self.outer = 40000
        self.forgets = forgets
        self.result = result
        self.asked: asyncio.Queue[tuple[int, int, int]] = asyncio.Queue()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        version, kind, _, inner, outer, life_s = struct.unpack("!BBHHHI", data)
        assert (version, kind) == (0, 2)
        self.asked.put_nowait((inner, outer, life_s))
        if self.forgets:
            self.forgets -= 1
        elif life_s:
            self.transport.sendto(b"\x00\x80\x00\x00" + bytes(8), addr)  # of another program
            self.transport.sendto(reply(inner, self.outer, life_s, result=self.result), addr)


@asynccontextmanager
async def mapping(
    monkeypatch: pytest.MonkeyPatch, router: Router
) -> AsyncIterator[asyncio.Queue[int | None]]:
    """``PORT`` is kept mapped; the queue receives what is told."""
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(lambda: router, local_addr=(HERE, 0))
    monkeypatch.setattr(port_mapping, "ROUTER_PORT", transport.get_extra_info("sockname")[1])
    monkeypatch.setattr(port_mapping, "ANSWER_FIRST_S", 0.02)
    monkeypatch.setattr(port_mapping, "LIBRARY", "a_library_that_nobody_has")
    told: asyncio.Queue[int | None] = asyncio.Queue()
    keeping = asyncio.create_task(keep_mapped(HERE, PORT, told.put_nowait))
    try:
        yield told
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await asyncio.sleep(0.05)  # the last request is on the way
        transport.close()


async def test_a_port_is_mapped_although_requests_are_lost_and_the_mapping_is_removed_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router = Router(forgets=2)
    async with mapping(monkeypatch, router) as told:
        assert await asyncio.wait_for(told.get(), WAIT_S) == 40000
        asked = [router.asked.get_nowait() for _ in range(3)]
        assert asked == [(PORT, PORT, LIFE_S)] * 3
    assert await asyncio.wait_for(router.asked.get(), WAIT_S) == (PORT, 0, 0)


async def test_a_mapping_is_renewed_before_it_ends_and_another_port_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(port_mapping, "LIFE_S", 0.4)
    monkeypatch.setattr(port_mapping, "LIFE_MIN_S", 0.4)
    monkeypatch.setattr(
        port_mapping,
        "request",
        lambda port, *, outer_port, life_s: request(
            port, outer_port=outer_port, life_s=bool(life_s)
        ),
    )

    router = Router()
    async with mapping(monkeypatch, router) as told:
        assert await asyncio.wait_for(told.get(), WAIT_S) == 40000
        router.outer = 40001
        assert await asyncio.wait_for(told.get(), WAIT_S) == 40001
        assert router.asked.get_nowait()[1] == PORT
        assert router.asked.get_nowait()[1] == 40000, "it asks for the port that it has"


@pytest.mark.parametrize("router", [Router(result=2), Router(forgets=100)])
async def test_a_router_that_refuses_or_is_silent_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, router: Router
) -> None:
    router.asked = asyncio.Queue()
    async with mapping(monkeypatch, router) as told:
        await asyncio.sleep(1.0)
        assert told.empty()
        assert 1 <= router.asked.qsize() <= port_mapping.TRIES
        before = router.asked.qsize()
    assert router.asked.qsize() == before, "there is nothing to remove"


async def test_a_router_where_nothing_listens_is_given_up_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
        free.bind((HERE, 0))
        monkeypatch.setattr(port_mapping, "ROUTER_PORT", free.getsockname()[1])
    monkeypatch.setattr(port_mapping, "ANSWER_FIRST_S", WAIT_S)

    with pytest.raises(NotMapped, match="does not speak NAT-PMP"):
        async with asyncio.timeout(WAIT_S / 2):
            await port_mapping.NatPmp(HERE).map(PORT, outer_port=PORT)
