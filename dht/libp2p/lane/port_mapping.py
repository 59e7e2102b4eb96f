"""Asks the router to lead a TCP port of its public address to this machine.

The daemon's port and the lane's are each mapped: the daemon has no UDP to ask by itself
(``dht.libp2p.confinement``). The default gateway is asked with NAT-PMP (RFC 6886), by 12 bytes over
UDP, then over UPnP, which most home routers have instead. The mapping ends by itself unless it is
renewed, and is removed when the lane is closed.

A router that lies makes peers dial a wrong port, which they give up as one that does not answer.
Only the default gateway is asked to map a port, replies count from its address only, and only
values that their format allows are believed. The address of a machine without a router in front
is public; then nothing is asked. Gateways are found on Linux only. PCP, the successor of NAT-PMP,
is not spoken: routers that have it answer NAT-PMP too.

UPnP is spoken by ``miniupnpc`` (an extra). The library reads, in C, whatever a machine of the local
network answers to its search, and fetches the description that the answer names. So it works in a
process of its own, this module run as a script, which is ended after ``WITHIN_S``. Mappings have a
lease, so that one ends by itself after a crash. Routers that grant permanent ones only are left
alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import secrets
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit

from dht.libp2p.lane.punching import own_address_towards
from dht.libp2p.lane.wire import is_outer

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


LIBRARY = "miniupnpc"
WITHIN_S = 15.0
"""Time for one question, the search for the router among it."""

SEARCH_MS = 1000
"""Time in which a router answers the search; its removal at the end takes that long, too."""

OTHER_PORTS = range(49152, 65536)
"""Outer ports to choose from when the wanted one is taken, as by another computer at home."""

PORTS_TRIED_MAX = 4
TAKEN = "ConflictInMappingEntry"
"""The library's words for a router where the outer port leads elsewhere already."""


class Upnp:
    """One router, asked over UPnP."""

    name = "UPnP"

    def __init__(self, router: str) -> None:
        self._router = router

    async def map(self, port: int, *, outer_port: int) -> Mapped:
        """Ask for a mapping, from another outer port if that one is taken.

        Raises ``NotMapped`` or ``OSError``.
        """
        return Mapped(int(await self._ask("map", port, outer_port)), LIFE_S)

    async def remove(self, port: int, *, outer_port: int) -> None:
        await self._ask("remove", port, outer_port)

    async def _ask(self, *words: str | int) -> str:
        """The answer of this module as a script. Raises ``NotMapped`` or ``OSError``."""
        if importlib.util.find_spec(LIBRARY) is None:
            raise NotMapped(f"{LIBRARY} is not installed: `pip install 'shoal[upnp]'`")
        asking = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", __name__, self._router, *map(str, words)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(WITHIN_S):
                told, _ = await asking.communicate()
        finally:
            if asking.returncode is None:
                asking.kill()
                await asking.wait()
        answer = told.decode("utf-8", "replace").strip().rpartition("\n")[2]
        if asking.returncode:
            raise NotMapped(answer or f"{LIBRARY} ended with status {asking.returncode}")
        return answer


def ask(router: str, what: str, port: int, outer_port: int) -> int:
    """Have a router map a port, or remove the mapping. Returns the outer port.

    Raises ``NotMapped``, or ``Exception`` with what the library says.
    """
    from miniupnpc import UPnP  # an extra, in this process only

    known = UPnP(multicastif=own_address_towards(router), discoverdelay=SEARCH_MS)
    known.discover()
    control = known.selectigd()
    if urlsplit(control).hostname != router:
        raise NotMapped(f"{control} answers, which is not on the router {router}")
    if what == "remove":
        known.deleteportmapping(outer_port, "TCP")
        return outer_port
    for tries_left in reversed(range(PORTS_TRIED_MAX)):
        try:
            known.addportmapping(outer_port, "TCP", known.lanaddr, port, "shoal", "", LIFE_S)
            break
        except Exception as error:  # the library has no class of its own
            if str(error) != TAKEN or not tries_left:
                raise
            outer_port = secrets.choice(OTHER_PORTS)
    return outer_port


Way: TypeAlias = NatPmp | Upnp
"""A protocol for asking one router."""

_logger = logging.getLogger("dht.libp2p.lane.port_mapping")

ROUTES = Path("/proc/net/route")
"""The kernel's routes (Linux)."""

ASK_AGAIN_S = 300.0
"""Pause after a router that does not answer, or refuses."""

REMOVE_WITHIN_S = 2.5
"""Time for removing the mapping at the end; it ends by itself soon after."""

_GATEWAY_FLAG = 0x2


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
    except (OSError, ValueError):
        return None
    own = "" if found is None else own_address_towards(found)
    return found if own and not is_outer(own) else None


async def keep_mapped(router: str, port: int, changed: Callable[[int | None], None]) -> None:
    """Keep a port mapped until cancelled, and remove the mapping then.

    ``changed`` receives the outer port whenever it changes; ``None``: there is no mapping.
    """
    ways: list[Way] = [NatPmp(router), Upnp(router)]
    told: int | None = None
    try:
        while True:
            mapped, way = await _map(ways, router, port, told or port)
            if way is not None:  # the one that this router speaks is the first from now on
                ways.sort(key=lambda each: each is not way)
            outer = None if mapped is None else mapped.port
            if outer != told:
                name = None if way is None else way.name
                _logger.info(
                    "port_mapped port=%d router=%s outer=%s way=%s", port, router, outer, name
                )
                told = outer
                changed(outer)
            await asyncio.sleep(ASK_AGAIN_S if mapped is None else mapped.life_s / 2)
    finally:
        if told is not None:
            with contextlib.suppress(NotMapped, OSError):  # TimeoutError is one
                async with asyncio.timeout(REMOVE_WITHIN_S):
                    await ways[0].remove(port, outer_port=told)


async def _map(
    ways: Sequence[Way], router: str, port: int, outer_port: int
) -> tuple[Mapped | None, Way | None]:
    """Ask in one way after the other."""
    for way in ways:
        try:
            return await way.map(port, outer_port=outer_port), way
        except (NotMapped, OSError) as error:
            _logger.info(
                "port_not_mapped port=%d router=%s way=%s reason=%s", port, router, way.name, error
            )
    return None, None


def main() -> None:
    """Ask as the arguments say, and print the outer port, or why there is none."""
    router, what, port, outer_port = sys.argv[1:]
    try:
        said = str(ask(router, what, int(port), int(outer_port)))
    except Exception as error:
        sys.exit(f"no port is mapped over UPnP: {error}")
    sys.stdout.write(said)


if __name__ == "__main__":
    main()
