"""Asking a router for a TCP port with NAT-PMP (RFC 6886), by 12 bytes over UDP; and a port's lease.

Only values that a reply's format allows are believed, and replies count from the router's address
only. A lease has the same form where it is asked for over UPnP (``dht.libp2p.lane.upnp``).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from dataclasses import dataclass

LIFE_S = 1200
"""Lifetime that is asked for. A router that was restarted has lost the mapping for half of it."""

LIFE_MIN_S = 120
"""A router that grants less is asked again no sooner than after half of this."""


class NotMapped(Exception):
    """The router did not map the port."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """A port of the router's public address that leads here."""

    port: int
    life_s: int


ROUTER_PORT = 5351

ANSWER_FIRST_S = 0.25
TRIES = 5
"""The first answer is waited for that long, each later one twice as long as the one before."""

_MAP_TCP, _MAPPED_TCP = 2, 130
_REQUEST = struct.Struct("!BBHHHI")
_REPLY = struct.Struct("!BBHIHHI")


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


class _Answers(asyncio.DatagramProtocol):
    def __init__(self) -> None:
        self.received: asyncio.Queue[bytes | Exception] = asyncio.Queue(16)

    def datagram_received(self, data: bytes, addr: object) -> None:
        with contextlib.suppress(asyncio.QueueFull):
            self.received.put_nowait(data)

    def error_received(self, exc: Exception) -> None:
        """The router says that nothing listens there."""
        with contextlib.suppress(asyncio.QueueFull):
            self.received.put_nowait(exc)


class NatPmp:
    """One router, asked with NAT-PMP."""

    name = "NAT-PMP"

    def __init__(self, router: str) -> None:
        self._router = router

    async def map(self, port: int, *, outer_port: int) -> Mapped:
        """Ask for a mapping, several times if need be, if possible from this outer port.

        Raises ``NotMapped`` or ``OSError``.
        """
        loop = asyncio.get_running_loop()
        # A connected socket receives from this address only.
        transport, answers = await loop.create_datagram_endpoint(
            _Answers, remote_addr=(self._router, ROUTER_PORT)
        )
        try:
            for turn in range(TRIES):
                transport.sendto(request(port, outer_port=outer_port, life_s=LIFE_S))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(ANSWER_FIRST_S * 2**turn):
                        while True:
                            answer = await answers.received.get()
                            if isinstance(answer, Exception):
                                raise NotMapped(f"the router does not speak NAT-PMP: {answer}")
                            mapped = read_reply(answer, port)
                            if mapped is not None:
                                return mapped
            raise NotMapped("the router does not answer NAT-PMP")
        finally:
            transport.close()

    async def remove(self, port: int, *, outer_port: int) -> None:
        """Ask once to remove a mapping, which would end by itself. Raises like ``map``."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            asking.setblocking(False)
            asking.sendto(request(port, outer_port=0, life_s=0), (self._router, ROUTER_PORT))
