"""Connections with peers behind routers, for a lane: met, or through a relay.

Two peers whose routers let nobody in dial each other at once (``dht.libp2p.lane.punching``). For
that, each learns its outer address from peers outside (``dht.libp2p.lane.observers``), and they
agree on the moment over the daemon: the one that wants the connection calls ``Punch``. Where their
routers do not let that through, both dial a third peer that passes the sealed frames on
(``dht.libp2p.lane.relaying``): the one that wants the connection chooses it, and calls ``Via``. A
relayed pair tries to meet again later, after longer and longer pauses.

The lane keeps the connections, and proves who is at their ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Sequence

from dht.addresses import place_of
from dht.errors import NOT_SERVED, CallRefused, DhtError, PeerUnreachable
from dht.identity import PeerId
from dht.libp2p.framing.sealing import NUMBER_BYTES, Ticket
from dht.libp2p.lane.connection import (
    RELAY_S,
    RETRY_MAX_S,
    Connection,
    Outside,
    Partner,
    Path,
)
from dht.libp2p.lane.lane import Lane
from dht.libp2p.lane.observers import Address, Observers
from dht.libp2p.lane.punching import Opening, is_near
from dht.libp2p.lane.relaying import NO_BULK, reach_through
from dht.libp2p.lane.wire import (
    CIRCUIT_PROTOCOL,
    PUNCH_PROTOCOL,
    VIA_PROTOCOL,
    Circuit,
    Leg,
    Punch,
    PunchOffer,
    Via,
    decode,
    encode,
    is_outer,
)
from dht.limits import Rate

_logger = logging.getLogger("dht.libp2p.lane.meetings")

RELAYS_TRIED_MAX = 8
"""Number of connected peers that are asked to relay, before a relayed connection is given up."""

MEETINGS_PER_MINUTE = 16
"""Limit of meetings to which one peer calls, and of those at one address, or in one IPv6 network
(/48): nobody has seen that the address belongs to the peer that names it, and a pair that fails
pauses for longer each time."""

APART = "both are behind routers, which let no direct connection through"


class Meetings:
    """Opens connections with peers behind routers for a lane, and answers peers that want one."""

    def __init__(self, lane: Lane, outside: Outside) -> None:
        lane.meet = self.open
        self.lane = lane
        self.settings = lane.settings
        self.outside = outside
        self.observers = Observers(outside, lane)
        self._calls = Rate[PeerId].in_a_minute(MEETINGS_PER_MINUTE)
        self._dials = Rate[str].in_a_minute(MEETINGS_PER_MINUTE)
        self._under_way = 0
        """Number of meetings to which other peers have called."""

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    # --- wanting a connection --------------------------------------------------------------

    async def open(self, peer: PeerId, known: Partner) -> None:
        """Open a connection by the best path that there is. Raises as ``Outside`` and ``OSError``.

        A peer that must be met has no other path for bulk data: a relay is tried for it.
        """
        if known.must_meet:
            await self._meet_or_relay(peer, known)
        else:
            async with asyncio.timeout(self.settings.dial_timeout_s):
                await self._meet(peer, known)

    async def _meet_or_relay(self, peer: PeerId, known: Partner) -> None:
        """Open a connection to a peer behind a router, by the best path that there is."""
        apart = APART
        if self._now >= known.meet_after:
            try:
                async with asyncio.timeout(self.settings.dial_timeout_s):
                    await self._meet(peer, known)
            except (OSError, TimeoutError, ValueError, PeerUnreachable, CallRefused) as error:
                apart = str(error) or f"silent for {self.settings.dial_timeout_s:g} s"
                known.apart = min(known.apart + 1, 16)
            else:
                known.apart = 0
                return
        known.meet_after = 0.0
        try:
            async with asyncio.timeout(RELAY_S):
                await self._go_through_a_relay(peer, known)
        except TimeoutError:
            raise OSError(f"{apart}; no relay within {RELAY_S:g} s") from None
        except OSError as error:
            raise OSError(f"{apart}; {error}") from error
        # There is a path now: a better one is looked for later, and not for each connection.
        pause_s = self.settings.retry_first_s * 2 ** max(0, known.apart - 1)
        known.meet_after = self._now + min(pause_s, RETRY_MAX_S)

    async def _meet(self, peer: PeerId, known: Partner) -> None:
        """Dial a peer while it dials this one."""
        opening = Opening()
        try:
            async with self.observers.outer_addresses(opening) as own:
                punch = Punch(own)
                offer = decode(
                    PunchOffer, await self.outside.call(peer, PUNCH_PROTOCOL, encode(punch))
                )
                await self._meet_at(offer, opening, peer, known)
        finally:
            opening.close()
        self.lane.counters["met"] += 1

    async def _meet_at(
        self, offer: PunchOffer, opening: Opening, peer: PeerId, known: Partner
    ) -> None:
        addresses = self._dialled_of(offer.addresses)
        try:
            async with (
                asyncio.timeout(self.settings.meeting_s),
                opening.meeting(addresses) as found,
            ):
                while True:
                    dialled = await found.get()
                    # A stranger may have dialled this port: then the next connection counts.
                    with contextlib.suppress(OSError, ValueError, TimeoutError):
                        async with asyncio.timeout(self.settings.answer_timeout_s):
                            await self.lane.introduce(
                                peer, known, dialled, offer.ticket, Path.PUNCHED
                            )
                        return
        except TimeoutError:
            raise OSError(APART) from None

    async def _go_through_a_relay(self, peer: PeerId, known: Partner) -> None:
        """Open a connection through a third peer. Raises ``OSError``."""
        refusals: list[str] = []
        for relay, ip in await self._possible_relays(peer):
            circuit = Circuit(peer, secrets.token_bytes(NUMBER_BYTES))
            try:
                leg = decode(Leg, await self.outside.call(relay, CIRCUIT_PROTOCOL, encode(circuit)))
            except CallRefused as error:
                if error.reason not in (NO_BULK, NOT_SERVED):
                    refusals.append(f"{relay} refused: {error.reason}")
                continue
            except (ValueError, PeerUnreachable) as error:
                refusals.append(str(error))
                continue
            try:
                via = encode(Via(relay, circuit.number))
                ticket = decode(Ticket, await self.outside.call(peer, VIA_PROTOCOL, via))
                dialled = await reach_through(ip, leg.port, leg.number)
                await self.lane.introduce(peer, known, dialled, ticket, Path.RELAYED)
            except (OSError, ValueError, PeerUnreachable, CallRefused) as error:
                refusals.append(str(error))
                continue
            self.lane.counters["relayed"] += 1
            return
        raise OSError(
            f"no relay: {refusals[-1]}"
            if refusals
            else "no connected peer relays bulk data (`shoal keep --relay-bulk RATE`, or "
            "`shoal bootstrap --relay-bulk RATE`)"
        )

    async def _possible_relays(self, peer: PeerId) -> list[tuple[PeerId, str]]:
        """Connected peers that may relay, in random order, so that all of them are used."""
        found = [each for each in await self.outside.observers() if each[0] != peer]
        secrets.SystemRandom().shuffle(found)
        return found[:RELAYS_TRIED_MAX]

    # --- being asked for one ---------------------------------------------------------------

    async def meet(self, peer: PeerId, request: bytes) -> bytes:
        """Answer ``Punch``: dial the asking peer, and be dialled. Raises ``ValueError``."""
        punch = decode(Punch, request)
        if not self._calls.spend(peer, self._now):
            raise ValueError(f"more than {MEETINGS_PER_MINUTE} calls to meetings in a minute")
        if self._under_way >= self.settings.meetings_max:
            raise ValueError(f"more than {self.settings.meetings_max} meetings at once")
        addresses = self._dialled_of(punch.addresses)
        self._under_way += 1
        ready: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.lane.spawn(self._host_meeting(peer, addresses, ready), f"meeting {peer}")
        return await ready

    def _dialled_of(self, named: Sequence[Address]) -> list[Address]:
        """Those that are dialled now although another peer named them. Raises ``ValueError``.

        The others are left out: the meeting may succeed without them, and somebody else may have
        named them too often.
        """
        reasons = [self._not_dialled(ip) for ip, _ in named]
        dialled = [each for each, reason in zip(named, reasons, strict=True) if reason is None]
        if not dialled:
            raise ValueError("; ".join(reason for reason in reasons if reason is not None))
        return dialled

    def _not_dialled(self, ip: str) -> str | None:
        """Why an address is not dialled; ``None``: it is, and counts as dialled once more."""
        if not is_outer(ip):
            return f"{ip} is no public address"
        if is_near(ip):
            return f"{ip} is of this machine or its own network"
        if self._dials.spend(place_of(ip), self._now):
            return None
        return f"more than {MEETINGS_PER_MINUTE} meetings at {ip} in a minute"

    async def _host_meeting(
        self, peer: PeerId, addresses: Sequence[Address], ready: asyncio.Future[bytes]
    ) -> None:
        """Take part in a meeting to which ``peer`` has called, once ``ready`` has the offer."""
        opening = None
        try:
            opening = Opening()
            async with (
                asyncio.timeout(self.settings.dial_timeout_s),
                self.observers.outer_addresses(opening) as own,
                opening.meeting(addresses) as found,
            ):
                offer = PunchOffer(self.lane.issue(peer), own)
                if ready.done():
                    return  # the call was given up
                ready.set_result(encode(offer))
                met = asyncio.Event()
                admitting = self.lane.spawn(self._admit_all(found, met), "admit at a meeting")
                try:
                    await met.wait()
                finally:
                    admitting.cancel()
        except (OSError, TimeoutError, DhtError) as error:
            _logger.debug("lane_not_met peer=%s reason=%r", peer, str(error))
            if not ready.done():
                ready.set_exception(ValueError(f"it cannot meet now: {error}"))
        finally:
            ready.cancel()
            self._under_way -= 1
            if opening is not None:
                opening.close()

    async def _admit_all(self, found: asyncio.Queue[socket.socket], met: asyncio.Event) -> None:
        """Greet everybody who comes to a meeting, until one has shown a ticket."""

        async def greet(connection: Connection, dialled: socket.socket) -> None:
            await self.lane.greet(connection, dialled)
            if connection.peer is not None:
                met.set()

        while True:
            connection = self.lane.admit(dialled := await found.get(), Path.PUNCHED)
            self.lane.spawn(greet(connection, dialled), "lane greet")

    async def come(self, peer: PeerId, request: bytes) -> bytes:
        """Answer ``Via``: come to a relay that the asking peer has chosen. Raises ``ValueError``.

        It has to be one with which this peer is connected directly: nobody is sent elsewhere.
        """
        via = decode(Via, request)
        relay = PeerId(via.relay)
        if self._under_way >= self.settings.meetings_max:
            raise ValueError(f"more than {self.settings.meetings_max} meetings at once")
        self._under_way += 1
        try:
            hosts = await self.outside.where(relay)
            if not hosts:
                raise ValueError("it has no direct connection with this relay")
            circuit = encode(Circuit(peer, via.circuit))
            leg = decode(Leg, await self.outside.call(relay, CIRCUIT_PROTOCOL, circuit))
        except BaseException:
            self._under_way -= 1
            raise
        self.lane.spawn(self._come_to(hosts[0], leg), f"come to {relay}")
        return encode(self.lane.issue(peer))

    async def _come_to(self, ip: str, leg: Leg) -> None:
        """Take a connection that another peer makes through a relay."""
        try:
            async with asyncio.timeout(RELAY_S):
                dialled = await reach_through(ip, leg.port, leg.number)
        except (OSError, TimeoutError) as error:
            _logger.debug("lane_relay_left reason=%r", str(error))
            return
        finally:
            self._under_way -= 1
        connection = self.lane.admit(dialled, Path.RELAYED)
        await self.lane.greet(connection, dialled)
