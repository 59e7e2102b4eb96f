"""Asking a router for a port over UPnP: what is read, and a router of our own on loopback."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from dht.libp2p.lane import nat_pmp, upnp
from dht.libp2p.lane.port_lease import LIFE_S, Mapped, NotMapped
from dht.libp2p.lane.port_mapping import keep_mapped
from dht.libp2p.lane.upnp import (
    DEVICES,
    DOCUMENT_MAX_BYTES,
    OTHER_PORTS,
    Control,
    Place,
    Refused,
    Upnp,
    control_of,
    place_at,
    read_answer,
    read_description,
    search,
)
from tests.dht.libp2p.gateway_device import DESCRIPTION, DEVICE, SERVICE, GatewayDevice
from tests.dht.libp2p.lane_ends import HERE
from tests.integration.loopback import WAIT_S, run

PORT = 7710
ROUTER = "192.168.1.1"
ROOT = f"http://{ROUTER}:5000/root.xml"


def answer(status: str = "HTTP/1.1 200 OK", device: str = DEVICE, location: str = ROOT) -> bytes:
    return f"{status}\r\nST: {device}\r\nLOCATION: {location}\r\n\r\n".encode()


def test_a_search_names_the_kind_of_device_that_is_wanted() -> None:
    assert search(DEVICES[0]).decode().split("\r\n") == [
        "M-SEARCH * HTTP/1.1",
        "HOST: 239.255.255.250:1900",
        'MAN: "ssdp:discover"',
        "MX: 1",
        "ST: urn:schemas-upnp-org:device:InternetGatewayDevice:1",
        "",
        "",
    ]


def test_an_answer_names_the_address_of_the_description() -> None:
    assert read_answer(answer()) == ROOT
    assert read_answer(answer("HTTP/1.1 404 Not Found")) is None
    assert read_answer(answer(device="urn:schemas-upnp-org:device:MediaServer:1")) is None
    assert read_answer(b"NOTIFY * HTTP/1.1\r\nLOCATION: http://192.168.1.1/\r\n\r\n") is None
    assert read_answer(b"") is None
    assert read_answer(b"\xff" * 100) is None


def test_only_addresses_on_the_router_are_asked() -> None:
    assert place_at(ROUTER, ROOT) == Place(5000, "/root.xml")
    assert place_at(ROUTER, f"http://{ROUTER}") == Place(80, "/")
    assert place_at(ROUTER, f"http://{ROUTER}/a?b=c") == Place(80, "/a?b=c")


@pytest.mark.parametrize(
    "address",
    [
        "http://192.168.1.2:5000/root.xml",
        "http://192.168.1.1.example.org/root.xml",
        "http://192.168.1.1@example.org/root.xml",
        "https://192.168.1.1/root.xml",
        "file:///etc/passwd",
        "http://192.168.1.1:70000/",
        "http://[192.168.1.1/",
        "http://192.168.1.1/a b",
        "http://192.168.1.1/" + "a" * 600,
        "/root.xml",
        "",
    ],
)
def test_an_address_elsewhere_or_a_malformed_one_is_not_asked(address: str) -> None:
    with pytest.raises(NotMapped):
        place_at(ROUTER, address)


def test_the_service_that_maps_ports_is_found_in_the_description() -> None:
    found = control_of(ROUTER, ROOT, DESCRIPTION.encode())
    assert found == Control(Place(5000, "/ctl/IPConn"), SERVICE)


def test_control_addresses_may_be_relative_to_an_address_of_the_description() -> None:
    with_base = DESCRIPTION.replace(
        "<device>", f"<URLBase>http://{ROUTER}:6000</URLBase><device>", 1
    )
    assert control_of(ROUTER, ROOT, with_base.encode()).place == Place(6000, "/ctl/IPConn")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("/ctl/IPConn", "http://192.168.1.2/ctl"),
        ("<device>", "<URLBase>http://192.168.1.2/</URLBase><device>"),
        ("WANIPConnection", "WANCableLink"),
        ("<root", '<!DOCTYPE root [<!ENTITY a "aaaa">]><root'),
        ("</root>", ""),
        ("<?xml version", "\0"),
        ('<?xml version="1.0"', '<?xml version="1.0" encoding="unheard-of"'),
        ('<?xml version="1.0"', '<?xml version="1.0" encoding="utf-7"'),
        ("/ctl/IPConn", "//[x"),
        ("/ctl/IPConn", "http://[::1/"),
    ],
)
def test_a_description_without_a_usable_service_on_the_router_is_refused(
    old: str, new: str
) -> None:
    assert old in DESCRIPTION
    with pytest.raises(NotMapped):
        control_of(ROUTER, ROOT, DESCRIPTION.replace(old, new, 1).encode())


def test_a_description_of_many_nested_elements_is_read_quickly() -> None:
    deep = b"<service>" * 7000
    with pytest.raises(NotMapped):
        read_description(deep[:DOCUMENT_MAX_BYTES])


@asynccontextmanager
async def device(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[GatewayDevice]:
    """A router on loopback; what is asked with NAT-PMP goes nowhere."""
    router = GatewayDevice(HERE)
    await router.open()
    monkeypatch.setattr(upnp, "SEARCH_PORT", router.search_port)
    monkeypatch.setattr(upnp, "ANSWER_S", 0.3)
    monkeypatch.setattr(nat_pmp, "ROUTER_PORT", 9)
    monkeypatch.setattr(nat_pmp, "TRIES", 1)
    try:
        yield router
    finally:
        await router.close()


@pytest.mark.parametrize("run_in", [run, uvloop.run])
def test_a_port_is_mapped_with_a_lease_renewed_and_removed(
    monkeypatch: pytest.MonkeyPatch, run_in: Callable[[Coroutine[Any, Any, None]], None]
) -> None:
    async def main() -> None:
        async with device(monkeypatch) as router:
            way = Upnp(HERE)
            for _ in range(2):
                assert await way.map(PORT, outer_port=PORT) == Mapped(PORT, LIFE_S)
            assert router.mapped == {PORT: (HERE, PORT, LIFE_S)}
            assert router.requests["/root.xml"] == 1, "it is found once"
            await way.remove(PORT, outer_port=PORT)
            assert router.mapped == {}

    run_in(main())


async def test_a_router_without_nat_pmp_is_asked_over_upnp_until_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with device(monkeypatch) as router:
        told: asyncio.Queue[int | None] = asyncio.Queue()
        keeping = asyncio.create_task(keep_mapped(HERE, PORT, told.put_nowait))
        assert await asyncio.wait_for(told.get(), WAIT_S) == PORT
        assert router.mapped == {PORT: (HERE, PORT, LIFE_S)}
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        assert router.mapped == {}


async def test_a_port_that_leads_elsewhere_already_is_left_to_its_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with device(monkeypatch) as router:
        router.mapped[PORT] = "192.168.1.9", PORT, 0
        mapped = await Upnp(HERE).map(PORT, outer_port=PORT)
        assert mapped.port in OTHER_PORTS
        assert router.mapped[PORT][0] == "192.168.1.9"
        assert router.mapped[mapped.port] == (HERE, PORT, LIFE_S)


@pytest.mark.parametrize("code", [606, 718, 725])
async def test_a_refusal_is_told_after_a_few_requests(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    async with device(monkeypatch) as router:
        router.refuses = code
        with pytest.raises(Refused, match=f"AddPortMapping: status 500, error {code}"):
            await Upnp(HERE).map(PORT, outer_port=PORT)
        asked = router.requests["AddPortMapping"]
        assert asked == (upnp.PORTS_TRIED_MAX if code == upnp.TAKEN else 1)


async def test_a_router_that_was_started_again_is_found_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with device(monkeypatch) as first:
        way = Upnp(HERE)
        await way.map(PORT, outer_port=PORT)
        await first.close()
        async with device(monkeypatch) as second:
            assert second.port != first.port
            assert await way.map(PORT, outer_port=PORT) == Mapped(PORT, LIFE_S)
            assert second.mapped == {PORT: (HERE, PORT, LIFE_S)}


async def test_an_answer_from_another_address_than_the_routers_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with device(monkeypatch) as router:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as forger:
            forger.bind(("127.0.0.2", 0))
            forged = 0

            def forge(searcher: tuple[str, int]) -> bool:
                nonlocal forged
                forged += 1
                forger.sendto(router.answer(), searcher)
                return False

            router.on_search = forge
            with pytest.raises(NotMapped, match="does not answer"):
                await Upnp(HERE).map(PORT, outer_port=PORT)
            assert forged
            assert not router.requests


async def test_a_description_elsewhere_is_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    async with device(monkeypatch) as router:
        other = GatewayDevice("127.0.0.2")
        await other.open()
        router.location = f"http://127.0.0.2:{other.port}/root.xml"
        with pytest.raises(NotMapped, match="not on the router"):
            await Upnp(HERE).map(PORT, outer_port=PORT)
        assert not other.requests
        await other.close()


def chunked(content: bytes) -> bytes:
    pieces = [content[at : at + 100] for at in range(0, len(content), 100)]
    body = b"".join(b"%x;name=value\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return b"Transfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"


def unframed(content: bytes) -> bytes:
    return b"\r\n" + content


@pytest.mark.parametrize("frame", [chunked, unframed])
async def test_answers_are_read_in_each_framing_of_http(
    monkeypatch: pytest.MonkeyPatch, frame: Callable[[bytes], bytes]
) -> None:
    async with device(monkeypatch) as router:
        router.frame = frame
        assert await Upnp(HERE).map(PORT, outer_port=PORT) == Mapped(PORT, LIFE_S)


@pytest.mark.parametrize(
    "message",
    [
        b"Content-Length: 65537\r\n\r\n" + b" " * 65537,
        b"Content-Length: -1\r\n\r\n",
        b"Content-Length: 100\r\n\r\n",
        b"\r\n" + b" " * 65537,
        b"Transfer-Encoding: chunked\r\n\r\nffffffff\r\n",
        b"Transfer-Encoding: chunked\r\n\r\nx\r\n",
        b"X: y\r\n" * 70 + b"\r\n",
        b"X: " + b"y" * 10_000 + b"\r\n\r\n",
    ],
)
async def test_an_answer_that_is_too_long_or_malformed_is_refused(
    monkeypatch: pytest.MonkeyPatch, message: bytes
) -> None:
    async with device(monkeypatch) as router:
        router.frame = lambda _: message
        with pytest.raises(NotMapped, match="answer cannot be read"):
            await Upnp(HERE).map(PORT, outer_port=PORT)


async def test_an_answer_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upnp, "REQUEST_S", 0.2)

    left = asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        left.set()

    server = await asyncio.start_server(hang, HERE, 0)
    async with device(monkeypatch) as router:
        router.location = f"http://{HERE}:{server.sockets[0].getsockname()[1]}/"
        with pytest.raises(TimeoutError):
            await Upnp(HERE).map(PORT, outer_port=PORT)
        await asyncio.wait_for(left.wait(), WAIT_S)  # the connection is closed
    server.close()
