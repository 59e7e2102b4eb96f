"""Places at relays, by which peers reach one that cannot be dialled.

The daemon would ask its relays only when it is told at its start that nobody can dial it, and again
an hour later. A restart breaks every stream, so places are asked for here, over the relays' own
protocol (circuit relay v2), as soon as this peer knows that it needs them. The daemon takes what
comes in through a relay in any case. A place ends with the connection to the relay, or after an
hour; it is asked for again at each new connection, and every minute, which renews it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container, Iterable, Sequence

from multiaddr import Multiaddr

from dht import addresses
from dht.errors import DhtError
from dht.identity import PeerId

HOP_PROTOCOL = "/libp2p/circuit/relay/0.2.0/hop"
RESERVE = b"\x02\x08\x00"
"""The request: two bytes, of which the first field, the type, is RESERVE."""

RENEW_S = 60.0
"""A relay that was connected again between two looks has lost the place for so long at most."""

LOOK_S = 2.0
"""Pause between looks for the connection to the relay; longer and longer after refusals."""

GRANTED = b"\x28\x64"
"""The end of an answer that grants a place: its last field, the status, is OK (100)."""


class RelayPlaces:
    """The relays that keep a place for this peer."""

    def __init__(
        self,
        relays: Sequence[Multiaddr],
        *,
        connected: Callable[[], Awaitable[Container[PeerId]]],
        connect: Callable[[PeerId, Sequence[Multiaddr]], Awaitable[None]],
        ask: Callable[[PeerId], Awaitable[bytes]],
    ) -> None:
        """Each callable raises ``DhtError``; ``ask`` sends ``RESERVE`` and returns the answer."""
        self._at: dict[PeerId, list[Multiaddr]] = {}
        for relay in relays:
            if (peer := addresses.peer_of(relay)) is not None:
                self._at.setdefault(peer, []).append(relay)
        self._connected = connected
        self._connect = connect
        self._ask = ask
        self._wanted = asyncio.Event()
        self._kept: set[PeerId] = set()

    def want(self, wanted: bool) -> None:
        """Keep places from now on, or let them end."""
        if wanted:
            self._wanted.set()
        else:
            self._wanted.clear()
            self._kept.clear()

    def circuits(self, connected: Iterable[PeerId]) -> list[Multiaddr]:
        """The addresses through the relays that keep a place, of those that are connected."""
        kept = self._kept.intersection(connected)
        return [
            Multiaddr(f"{relay}/p2p-circuit")
            for peer in self._at
            if peer in kept
            for relay in self._at[peer]
        ]

    async def keep(self) -> None:
        """Keep a place at each relay, while they are wanted."""
        async with asyncio.TaskGroup() as group:
            for relay in self._at:
                group.create_task(self._keep_at(relay))

    async def _keep_at(self, relay: PeerId) -> None:
        loop = asyncio.get_running_loop()
        pause_s, renew_at = LOOK_S, 0.0
        while True:
            await self._wanted.wait()
            try:
                if relay not in await self._connected():
                    self._kept.discard(relay)
                    await self._connect(relay, self._at[relay])
                if relay not in self._kept or loop.time() >= renew_at:
                    self._kept.discard(relay)
                    granted = (await self._ask(relay)).endswith(GRANTED)
                    if granted and self._wanted.is_set():
                        self._kept.add(relay)
                        renew_at = loop.time() + RENEW_S
            except DhtError:
                pass  # it is away, or no relay at all
            pause_s = LOOK_S if relay in self._kept else min(2 * pause_s, RENEW_S)
            await asyncio.sleep(pause_s)
