"""Asks the router to lead a TCP port of its public address to this machine (NAT-PMP, RFC 6886).

The daemon maps its own port. The lane has another one, and without a mapping others cannot dial it
even where they can dial the daemon. A request has 12 bytes and goes to the default gateway over
UDP. The mapping ends by itself unless it is renewed, and is removed when the lane is closed. The
library for this in most programs, miniupnpc, is a C extension; aioupnp is not maintained.

Only what a reply's format allows is believed: a router that lies makes peers dial a wrong port,
which they give up as one that does not answer. Replies count from the gateway's address only. The
address of a machine without a router in front is public; then nothing is asked. UPnP, which some
routers have instead, is not spoken, and gateways are found on Linux only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dht.libp2p.lane_wire import is_outer

_logger = logging.getLogger("dht.libp2p.port_mapping")

ROUTER_PORT = 5351
ROUTES = Path("/proc/net/route")
"""The kernel's routes (Linux)."""

LIFE_S = 1200
"""Lifetime that is asked for. A router that was restarted has lost the mapping for half of it."""

LIFE_MIN_S = 120
"""A router that grants less is asked again no sooner than after half of this."""

ANSWER_FIRST_S = 0.25
TRIES = 5
"""The first answer is waited for that long, each later one twice as long as the one before."""

ASK_AGAIN_S = 300.0
"""Pause after a router that does not answer, or refuses."""

_MAP_TCP, _MAPPED_TCP = 2, 130
_REQUEST = struct.Struct("!BBHHHI")
_REPLY = struct.Struct("!BBHIHHI")
_GATEWAY_FLAG = 0x2


class NotMapped(Exception):
    """The router did not map the port."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """A port of the router's public address that leads here."""

    port: int
    life_s: int


def request(port: int, *, outer_port: int, life_s: int) -> bytes:
    """A request to map ``port``, if possible from this outer port; both 0 with no life remove."""
    return _REQUEST.pack(0, _MAP_TCP, 0, port, outer_port, life_s)


def read_reply(data: bytes, port: int) -> Mapped | None:
    """The mapping of ``port``; ``None`` if this answers something else. Raises ``NotMapped``."""
    if len(data) < 4 or data[1] != _MAPPED_TCP:
        return None
    version, _, result = struct.unpack_from("!BBH", data)
    if version != 0 or result:
        raise NotMapped(f"the router refused: version {version}, result {result}")
    if len(data) != _REPLY.size:
        return None
    *_, inner, outer, life_s = _REPLY.unpack(data)
    if inner != port:
        return None
    if not outer or not life_s:
        raise NotMapped(f"the router mapped port {outer} for {life_s} s")
    return Mapped(outer, min(max(life_s, LIFE_MIN_S), LIFE_S))


def gateway(routes: str) -> str | None:
    """The address of the default gateway, from the text of ``ROUTES``."""
    for line in routes.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 3 and fields[1] == "00000000" and int(fields[3], 16) & _GATEWAY_FLAG:
            return socket.inet_ntoa(struct.pack("<I", int(fields[2], 16)))
    return None


def own_gateway() -> str | None:
    """The router in front of this machine; ``None`` if there is none, or it is not known."""
    try:
        found = gateway(ROUTES.read_text())
        if found is None:
            return None
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((found, ROUTER_PORT))  # sends nothing
            return None if is_outer(probe.getsockname()[0]) else found
    except (OSError, ValueError):
        return None


class _Answers(asyncio.DatagramProtocol):
    def __init__(self) -> None:
        self.received: asyncio.Queue[bytes] = asyncio.Queue(16)

    def datagram_received(self, data: bytes, addr: object) -> None:
        with contextlib.suppress(asyncio.QueueFull):
            self.received.put_nowait(data)


async def keep_mapped(router: str, port: int, changed: Callable[[int | None], None]) -> None:
    """Keep a port mapped until cancelled, and remove the mapping then.

    ``changed`` receives the outer port whenever it changes; ``None``: there is no mapping.
    """
    told: int | None = None
    try:
        while True:
            try:
                mapped = await _map(router, port, told or port)
            except (NotMapped, OSError) as error:
                _logger.info("port_not_mapped port=%d router=%s reason=%s", port, router, error)
                mapped = None
            outer = None if mapped is None else mapped.port
            if outer != told:
                _logger.info("port_mapped port=%d router=%s outer=%s", port, router, outer)
                told = outer
                changed(outer)
            await asyncio.sleep(ASK_AGAIN_S if mapped is None else mapped.life_s / 2)
    finally:
        if told is not None:
            _remove(router, port)


async def _map(router: str, port: int, outer_port: int) -> Mapped:
    """Ask for a mapping, several times if need be. Raises ``NotMapped`` or ``OSError``."""
    loop = asyncio.get_running_loop()
    # A connected socket receives from this address only.
    transport, answers = await loop.create_datagram_endpoint(
        _Answers, remote_addr=(router, ROUTER_PORT)
    )
    try:
        for turn in range(TRIES):
            transport.sendto(request(port, outer_port=outer_port, life_s=LIFE_S))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_FIRST_S * 2**turn):
                    while True:
                        mapped = read_reply(await answers.received.get(), port)
                        if mapped is not None:
                            return mapped
        raise NotMapped("the router does not answer NAT-PMP")
    finally:
        transport.close()


def _remove(router: str, port: int) -> None:
    """Ask once to remove the mapping, which would end by itself."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.setblocking(False)
        asking.sendto(request(port, outer_port=0, life_s=0), (router, ROUTER_PORT))
