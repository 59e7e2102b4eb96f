"""Asks the router to lead a TCP port of its public address to this machine.

The daemon's port and the lane's are each mapped: the daemon has no UDP to ask by itself
(``dht.libp2p.confinement``). The default gateway is asked with NAT-PMP
(``dht.libp2p.lane.nat_pmp``), then over UPnP (``dht.libp2p.lane.upnp``), which most home routers
have instead. The mapping ends by itself unless it is renewed, and is removed when the lane is
closed.

A router that lies makes peers dial a wrong port, which they give up as one that does not answer.
Only the default gateway is asked to map a port. The address of a machine without a router in front
is public; then nothing is asked. Gateways are found on Linux only. PCP, the successor of NAT-PMP,
is not spoken: routers that have it answer NAT-PMP too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from dht.libp2p.lane.nat_pmp import Mapped, NatPmp, NotMapped
from dht.libp2p.lane.punching import own_address_towards
from dht.libp2p.lane.upnp import Upnp
from dht.libp2p.lane.wire import is_outer

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
