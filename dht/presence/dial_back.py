"""Asking other peers to dial us, and dialling others who ask.

A dial-back proves something only if it opens a *fresh* connection, and whoever is
asked is connected already. So a helper passes the request on to a third peer,
which is not. Where there is none (two peers in the world), the helper answers
"will redial", cuts its own connection and opens it again from its side. That
breaks whatever goes over it, so it is done only while nothing is known yet.

The proof is the nonce that comes in from a peer that was not connected when the
request was made, and that the asking peer has not dialled itself since.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from multiaddr import Multiaddr

from dht.addresses import (
    is_dialable,
    is_loopback,
    is_private,
    is_relayed,
    pack,
    unpack_all,
    with_peer,
)
from dht.errors import CallRefused, DhtError, HostClosed, PeerUnreachable
from dht.host import Host
from dht.identity import PeerId, parse_peer_id
from dht.membership import hello as wire
from dht.membership.call_budget import CallBudget

THIRD_PEERS_MAX = 3
REDIALS_MAX = 8
DIALS_AT_ONCE = 4
BEFORE_REDIAL_S = 0.2


@dataclass(frozen=True, slots=True)
class Reached:
    """``by`` opened a fresh connection to us."""

    by: PeerId


@dataclass(frozen=True, slots=True)
class NotReached:
    """Somebody tried and could not."""

    reason: str


@dataclass(frozen=True, slots=True)
class NotTried:
    """Says nothing about us: the helper could not help."""

    reason: str


class DialBacks:
    """Both sides of dial-backs on one host. ``run`` belongs in the owner's task group."""

    def __init__(
        self,
        host: Host,
        *,
        own_addresses: Callable[[], Sequence[Multiaddr]],
        rng: np.random.Generator,
        budget: CallBudget,
        call_timeout_s: float,
    ) -> None:
        self.asked = 0
        self.done = 0
        self._host = host
        self._own_addresses = own_addresses
        self._rng = rng
        self._budget = budget
        self._call_timeout_s = call_timeout_s
        self._nonces: dict[bytes, asyncio.Future[PeerId]] = {}
        self._known: set[PeerId] = set()
        """Peers connected when the present request was made, or dialled since: no proof."""

        self._awaited: PeerId | None = None
        self._redials: asyncio.Queue[wire.DialBack] = asyncio.Queue(maxsize=REDIALS_MAX)
        self._dialling = asyncio.Semaphore(DIALS_AT_ONCE)

    async def serve(self) -> None:
        """Answer others from now on."""
        await self._host.serve_calls(
            wire.DIAL_BACK_PROTOCOL, self._answer, request_max_bytes=wire.DIAL_BACK_MAX_BYTES
        )
        await self._host.serve_calls(
            wire.CONFIRM_PROTOCOL, self._answer_confirm, request_max_bytes=wire.NONCE_BYTES
        )

    async def run(self) -> None:
        """Cut and redial for those who know nobody else, one after the other, for ever."""
        while True:
            message = await self._redials.get()
            await asyncio.sleep(BEFORE_REDIAL_S)  # our answer is still on that connection
            try:
                self.done += 1
                target = parse_peer_id(message.peer)
                await self._host.disconnect(target)
                await self._dial(target, self._may_dial(message.addresses), message.nonce)
            except HostClosed:
                continue  # its daemon is being restarted; the other asks again

    def dials(self, peer: PeerId) -> None:
        """This peer is about to dial another: a connection with it will prove nothing."""
        self._known.add(peer)

    def is_awaited(self, peer: PeerId) -> bool:
        """Whether it has cut its connection to dial us. Whoever dials it now spoils the test."""
        return peer == self._awaited

    async def ask(
        self, helper: PeerId, addresses: Sequence[Multiaddr], *, may_cut: bool
    ) -> Reached | NotReached | NotTried:
        """Have a connected peer see to it that somebody dials us at these addresses.

        One request at a time. ``may_cut``: it may cut its own connection for that.
        """
        self.asked += 1
        try:
            self._known = {connection.peer for connection in await self._host.connections()}
        except HostClosed as error:
            return NotTried(error.reason)
        nonce = secrets.token_bytes(wire.NONCE_BYTES)
        arrived: asyncio.Future[PeerId] = asyncio.get_running_loop().create_future()
        self._nonces[nonce] = arrived
        request = wire.DialBack(
            peer=self._host.peer_id,
            nonce=nonce,
            addresses=tuple(pack(address) for address in addresses),
            relay=True,
            may_cut=may_cut,
        )
        try:
            data = await self._host.call(
                helper,
                wire.DIAL_BACK_PROTOCOL,
                wire.write(request),
                # It may ask three others, each of which connects and calls.
                timeout_s=(2 * THIRD_PEERS_MAX + 1) * self._call_timeout_s,
            )
            reply = wire.read(wire.DialBackReply, data)
            if reply.verdict == "will redial" and may_cut:
                self._known.discard(helper)
                self._awaited = helper
                await asyncio.wait([arrived], timeout=self._call_timeout_s + 2.0)
        except (DhtError, ValueError) as error:
            reply = wire.DialBackReply(verdict="cannot help", reason=str(error)[:200])
        finally:
            self._awaited = None
            del self._nonces[nonce]
        if arrived.done():  # what came in over a fresh connection outweighs what anybody says
            return Reached(arrived.result())
        if reply.verdict == "will redial" and helper in self._known:
            return NotTried("it was dialled while it was to dial")
        if reply.verdict in ("not reached", "will redial"):
            return NotReached(reply.reason or f"{helper} dialled and got no connection")
        return NotTried(reply.reason)

    async def _answer_confirm(self, peer: PeerId, request: bytes) -> bytes:
        arrived = self._nonces.get(bytes(request))
        if arrived is None or arrived.done():
            raise ValueError("nobody asked for this nonce")
        if peer in self._known:
            raise ValueError("we were connected already, which proves nothing")
        arrived.set_result(peer)
        return b""

    async def _answer(self, peer: PeerId, request: bytes) -> bytes:
        if not self._budget.spend(peer, asyncio.get_running_loop().time()):
            raise ValueError("too many dial-backs in this minute")
        message = wire.read(wire.DialBack, request, max_bytes=wire.DIAL_BACK_MAX_BYTES)
        target = parse_peer_id(message.peer)
        if message.relay and target != peer:
            raise ValueError("a dial-back is asked for oneself")
        addresses = self._may_dial(message.addresses)
        if message.relay:
            return await self._find_dialler(message, bool(addresses))
        if not addresses:
            return _NOWHERE_TO_DIAL
        async with self._dialling:
            return await self._dial_fresh(target, addresses, message.nonce)

    async def _find_dialler(self, message: wire.DialBack, could_redial: bool) -> bytes:
        """Have a third peer dial, whose connection will be a fresh one; else do it ourselves."""
        try:
            connections = await self._host.connections()
        except HostClosed as error:
            return _verdict("cannot help", error.reason)
        third = [c.peer for c in connections if not c.relayed and c.peer != message.peer]
        forwarded = wire.write(msgspec.structs.replace(message, relay=False))
        for i in self._rng.permutation(len(third))[:THIRD_PEERS_MAX]:
            try:
                data = await self._host.call(
                    third[int(i)],
                    wire.DIAL_BACK_PROTOCOL,
                    forwarded,
                    timeout_s=2 * self._call_timeout_s,
                )
                reply = wire.read(wire.DialBackReply, data)
            except (DhtError, ValueError):
                continue  # another one may be able to
            if reply.verdict in ("reached", "not reached"):
                return data
        if not could_redial:
            return _NOWHERE_TO_DIAL
        if not message.may_cut:
            return _verdict("cannot help", "everybody asked is connected already")
        if self._redials.full():
            return _verdict("cannot help", "too many dial-backs at once")
        self._redials.put_nowait(message)
        return _verdict("will redial")

    async def _dial_fresh(
        self, target: PeerId, addresses: Sequence[Multiaddr], nonce: bytes
    ) -> bytes:
        try:
            if any(c.peer == target for c in await self._host.connections()):
                return _verdict("cannot help", "is connected already")
            self.done += 1
            return await self._dial(target, addresses, nonce)
        except HostClosed as error:
            return _verdict("cannot help", error.reason)

    async def _dial(self, target: PeerId, addresses: Sequence[Multiaddr], nonce: bytes) -> bytes:
        """Connect to a peer that is not connected, and name the nonce over that connection."""
        timeout_s = self._call_timeout_s
        try:
            await self._host.connect(
                target, [with_peer(address, target) for address in addresses], timeout_s=timeout_s
            )
        except PeerUnreachable as error:
            return _verdict("not reached", error.reason)
        if any(c.peer == target and c.relayed for c in await self._host.connections()):
            return _verdict("not reached", "only a relay leads to it")
        try:
            await self._host.call(target, wire.CONFIRM_PROTOCOL, nonce, timeout_s=timeout_s)
        except (PeerUnreachable, CallRefused) as error:  # it may have dialled us meanwhile
            return _verdict("cannot help", error.reason)
        return _verdict("reached")

    def _may_dial(self, packed: Sequence[bytes]) -> tuple[Multiaddr, ...]:
        """The addresses we dial for somebody else.

        A private one only if we have one ourselves, or every peer could be used to
        knock at doors inside its own network.
        """
        own = self._own_addresses()
        loopback = any(is_loopback(address) for address in own)
        private = any(is_private(address) for address in own)
        return tuple(
            address
            for address in unpack_all(packed)
            if is_dialable(address)
            and not is_relayed(address)
            and (loopback or not is_loopback(address))
            and (private or not is_private(address))
        )


def _verdict(verdict: wire.DialBackVerdict, reason: str = "") -> bytes:
    return wire.write(wire.DialBackReply(verdict=verdict, reason=reason[:200]))


# The usual home computer: it announces addresses of its own network alone. That is an answer, or
# such a peer would wait for ever to hear that it can only dial out.
_NOWHERE_TO_DIAL = _verdict("not reached", "none of its addresses can be dialled from here")
