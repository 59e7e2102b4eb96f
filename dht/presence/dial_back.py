"""Dial-backs: asking other peers to dial this one, and dialling peers that ask.

A dial-back proves something only if it opens a *fresh* connection, and the helper that is asked is
connected already. So the helper passes the request on to a third peer, which is not. Where there is
no third peer (two peers in all), the helper answers "will redial", cuts its own connection and
opens it again from its side. That breaks whatever goes over it (not what goes over a lane, such as
the state that a newcomer downloads), so it is done only while nothing is known yet.

The proof is the nonce, received from a peer that was not connected when the request was made, and
that the asking peer has not dialled itself since.

A helper must not be usable as a tool for dialling others. It requests dials only to the IP address
at which it sees the asking peer. A third peer cannot see that address, so it dials only for helpers
that it knows, and only in networks at least as wide as the one that it shares with the helper. The
answer says whether the peer was reached but not why, and a failure is answered only after a fixed
time: nothing is learnt about other programs at that address.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from multiaddr import Multiaddr

from dht.addresses import (
    Scope,
    deduplicate,
    ip_of,
    is_dialable,
    is_loopback,
    is_private,
    is_relayed,
    pack,
    scope_of,
    unpack_all,
    with_ip,
    with_peer,
)
from dht.errors import CallRefused, DhtError, HostClosed, PeerUnreachable
from dht.host import Host
from dht.identity import PeerId, parse_peer_id
from dht.membership import hello as wire
from dht.membership.call_budget import CallBudget
from dht.membership.reachability import was_tried
from dht.presence.dialler import Dialler

THIRD_PEERS_MAX = 3
"""Number of third peers that are waited for until their time-out."""

THIRD_PEERS_ASKED_MAX = 8
"""Number of third peers asked: many refuse at once, being connected to the asking peer already."""

REDIALS_MAX = 8
DIALS_AT_ONCE = 4
BEFORE_REDIAL_S = 0.2
BACKOFF_S = 5.1
"""Time during which the daemon does not dial a peer again after a failed dial."""


@dataclass(frozen=True, slots=True)
class Reached:
    """``by`` opened a fresh connection to this peer, from ``remote``."""

    by: PeerId
    remote: Multiaddr


@dataclass(frozen=True, slots=True)
class NotReached:
    """A peer tried to connect and failed."""

    reason: str


@dataclass(frozen=True, slots=True)
class NotTried:
    """The helper could not help, which says nothing about this peer."""

    reason: str


@dataclass(slots=True, eq=False, repr=False)
class DialBacks:
    """Both sides of dial-backs on one host. ``run`` belongs in the owner's task group."""

    host: Host
    dialler: Dialler
    own_addresses: Callable[[], Sequence[Multiaddr]]
    rng: np.random.Generator
    budget: CallBudget
    call_timeout_s: float
    asked: int = 0
    """Number of dial-backs requested from other peers."""
    done: int = 0
    """Number of dials made for other peers."""
    _nonces: dict[bytes, asyncio.Future[Reached]] = field(default_factory=dict)
    _redials: asyncio.Queue[wire.DialBack] = field(
        default_factory=lambda: asyncio.Queue(maxsize=REDIALS_MAX)
    )
    _dialling: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(DIALS_AT_ONCE))

    async def serve(self) -> None:
        """Answer other peers from now on."""
        await self.host.serve_calls(
            wire.DIAL_BACK_PROTOCOL, self._answer, request_max_bytes=wire.DIAL_BACK_MAX_BYTES
        )
        await self.host.serve_calls(
            wire.CONFIRM_PROTOCOL, self._answer_confirm, request_max_bytes=wire.NONCE_BYTES
        )

    async def run(self) -> None:
        """Cut and redial for peers that know no third peer, one after the other, for ever."""
        while True:
            message = await self._redials.get()
            await asyncio.sleep(BEFORE_REDIAL_S)  # our answer is still on that connection
            try:
                self.done += 1
                target = parse_peer_id(message.peer)
                # The proof is a fresh connection of libp2p: transfers over a lane need not break.
                await self.host.disconnect(target, lane=False)
                addresses = unpack_all(message.addresses)
                if await self._dial(target, addresses, message.nonce) == "cannot help":
                    await asyncio.sleep(BACKOFF_S)
                    if await self._remote_of(target) is None:
                        await self._dial(target, addresses, message.nonce)
            except HostClosed:
                continue  # its daemon is being restarted; the other asks again

    async def ask(
        self, helper: PeerId, addresses: Sequence[Multiaddr], *, may_cut: bool
    ) -> Reached | NotReached | NotTried:
        """Ask a connected peer to arrange that this peer is dialled at these addresses.

        One request at a time. ``may_cut``: the helper may cut its own connection for that.
        """
        self.asked += 1
        try:
            self.dialler.not_fresh = {
                connection.peer for connection in await self.host.connections()
            }
        except HostClosed as error:
            return NotTried(error.reason)
        nonce = secrets.token_bytes(wire.NONCE_BYTES)
        arrived: asyncio.Future[Reached] = asyncio.get_running_loop().create_future()
        self._nonces[nonce] = arrived
        request = wire.DialBack(
            peer=self.host.peer_id,
            nonce=nonce,
            addresses=tuple(pack(address) for address in addresses),
            relay=True,
            may_cut=may_cut,
        )
        try:
            data = await self.host.call(
                helper,
                wire.DIAL_BACK_PROTOCOL,
                wire.write(request),
                # It may ask three others, each of which connects and calls.
                timeout_s=(2 * THIRD_PEERS_MAX + 1) * self.call_timeout_s,
            )
            reply = wire.read(wire.DialBackReply, data)
            if reply.verdict == "will redial" and may_cut:
                self.dialler.not_fresh.discard(helper)
                self.dialler.awaited = helper
                await asyncio.wait([arrived], timeout=self.call_timeout_s + 2.0)
        except (DhtError, ValueError) as error:
            reply = wire.DialBackReply(verdict="cannot help", reason=str(error)[:200])
        finally:
            self.dialler.awaited = None
            del self._nonces[nonce]
        if arrived.done():  # the proof outweighs the reply
            return arrived.result()
        if reply.verdict == "will redial" and await self._is_back(helper):
            return NotTried("this peer dialled it while it was about to dial")
        if reply.verdict in ("not reached", "will redial"):
            return NotReached(f"no fresh connection came in when {helper} was asked for one")
        return NotTried(reply.reason or f"{helper} knows no peer that could dial")

    async def _is_back(self, helper: PeerId) -> bool:
        """Say whether the connection that the helper cut is open again without the nonce.

        Then this peer has dialled the helper, and not the other way round.
        """
        try:
            connections = await self.host.connections()
        except HostClosed:
            return True  # our own daemon is being restarted
        return helper in self.dialler.not_fresh or any(c.peer == helper for c in connections)

    async def _answer_confirm(self, peer: PeerId, request: bytes) -> bytes:
        arrived = self._nonces.get(bytes(request))
        if peer in self.dialler.not_fresh:
            raise ValueError("it was connected already, which proves nothing")
        remote = await self._remote_of(peer)
        if arrived is None or arrived.done():
            raise ValueError("this nonce is not expected")
        if remote is None:
            raise ValueError("there is no direct connection, which proves nothing")
        arrived.set_result(Reached(peer, remote))
        return b""

    async def _remote_of(self, peer: PeerId) -> Multiaddr | None:
        """Remote address of the direct connection with a peer; ``None`` without one."""
        for connection in await self.host.connections():
            if connection.peer == peer and not connection.relayed:
                return connection.address
        return None

    async def _answer(self, peer: PeerId, request: bytes) -> bytes:
        if not self.budget.spend(peer, asyncio.get_running_loop().time()):
            raise ValueError("too many dial-backs in this minute")
        message = wire.read(wire.DialBack, request, max_bytes=wire.DIAL_BACK_MAX_BYTES)
        target = parse_peer_id(message.peer)
        if message.relay and target != peer:
            raise ValueError("a peer may ask for a dial-back to itself only")
        remote = await self._remote_of(peer)
        if message.relay:
            # Names are not looked up: the port matters, at the address that the peer has.
            addresses = () if remote is None else self._of_peer_at(remote, message.addresses)
            if not addresses:
                return _NOWHERE_TO_DIAL
            assert remote is not None
            packed = tuple(pack(address) for address in addresses)
            return await self._find_dialler(
                msgspec.structs.replace(message, addresses=packed), remote
            )
        if not self.dialler.is_known(peer):
            return _CANNOT_HELP
        addresses = () if remote is None else self._for_helper_at(remote, message.addresses)
        if not addresses:
            return _NOWHERE_TO_DIAL
        async with self._dialling:
            return await self._dial_fresh(target, addresses, message.nonce)

    async def _find_dialler(self, message: wire.DialBack, remote: Multiaddr) -> bytes:
        """Ask third peers to dial, whose connection would be a fresh one; else redial ourselves."""
        try:
            connections = await self.host.connections()
        except HostClosed:
            return _CANNOT_HELP
        third = [
            c.peer
            for c in connections
            if not c.relayed
            and c.peer != message.peer
            and self.dialler.can_dial(c.peer)
            and _is_outside(c.address, remote)
        ]
        forwarded = wire.write(msgspec.structs.replace(message, relay=False))
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + 2 * (THIRD_PEERS_MAX - 1) * self.call_timeout_s
        for i in self.rng.permutation(len(third))[:THIRD_PEERS_ASKED_MAX]:
            if loop.time() > give_up_at:
                break
            try:
                data = await self.host.call(
                    third[int(i)],
                    wire.DIAL_BACK_PROTOCOL,
                    forwarded,
                    timeout_s=2 * self.call_timeout_s,
                )
                reply = wire.read(wire.DialBackReply, data)
            except (DhtError, ValueError):
                continue  # another one may be able to
            if reply.verdict in ("reached", "not reached"):
                return _verdict(reply.verdict)
        if (
            not message.may_cut
            or self._redials.full()
            or not self.dialler.can_dial(self.host.peer_id)
        ):
            return _CANNOT_HELP
        self._redials.put_nowait(message)
        return _verdict("will redial")

    async def _dial_fresh(
        self, target: PeerId, addresses: Sequence[Multiaddr], nonce: bytes
    ) -> bytes:
        loop = asyncio.get_running_loop()
        try:
            if any(c.peer == target for c in await self.host.connections()):
                return _CANNOT_HELP
            answer_at = loop.time() + self.call_timeout_s
            self.done += 1
            verdict = await self._dial(target, addresses, nonce)
        except HostClosed:
            return _CANNOT_HELP
        if verdict != "reached":
            # A closed port answers at once and a filtered one never: the reply must not tell which.
            await asyncio.sleep(answer_at - loop.time())
        return _verdict(verdict)

    async def _dial(
        self, target: PeerId, addresses: Sequence[Multiaddr], nonce: bytes
    ) -> wire.DialBackVerdict:
        """Connect to a peer that is not connected, and send the nonce over that connection."""
        timeout_s = self.call_timeout_s
        try:
            await self.host.connect(
                target, [with_peer(address, target) for address in addresses], timeout_s=timeout_s
            )
        except PeerUnreachable as error:
            return "not reached" if was_tried(error.reason) else "cannot help"
        if await self._remote_of(target) is None:
            return "not reached"  # only a relay leads to it
        try:
            await self.host.call(target, wire.CONFIRM_PROTOCOL, nonce, timeout_s=timeout_s)
        except (PeerUnreachable, CallRefused):
            return "cannot help"  # it may have dialled us meanwhile
        return "reached"

    def _of_peer_at(self, remote: Multiaddr, packed: Sequence[bytes]) -> tuple[Multiaddr, ...]:
        """The addresses named by the asking peer that are at the IP it is connected from."""
        ip = ip_of(remote)
        if ip is None:
            return ()
        named = (a for a in unpack_all(packed) if not is_relayed(a) and is_dialable(a))
        at = deduplicate(with_ip(a, ip) for a in named if ip_of(a) in (ip, None))
        return tuple(address for address in at if self._is_of_our_networks(address))

    def _for_helper_at(self, remote: Multiaddr, packed: Sequence[bytes]) -> tuple[Multiaddr, ...]:
        """The addresses that this peer dials for a helper: by IP, in networks that both share."""
        return tuple(
            address
            for address in unpack_all(packed)
            if is_dialable(address)
            and not is_relayed(address)
            and ip_of(address) is not None
            and scope_of(remote) <= scope_of(address)
            and self._is_of_our_networks(address)
        )

    def _is_of_our_networks(self, address: Multiaddr) -> bool:
        """Say whether an address is public, or private like one of our own.

        Otherwise every peer could be used to probe hosts inside its own network.
        """
        own = self.own_addresses()
        if is_loopback(address):
            return any(is_loopback(mine) for mine in own)
        return not is_private(address) or any(is_private(mine) for mine in own)


def _is_outside(third: Multiaddr, asking: Multiaddr) -> bool:
    """Say whether a third peer, as the helper sees it, is far enough from the asking peer.

    A peer behind the same router would dial from inside, and a peer on the internet cannot dial
    into a private network.
    """
    scope = scope_of(asking)
    if scope is Scope.INTERNET:
        return ip_of(third) != ip_of(asking)
    return scope_of(third) <= scope


def _verdict(verdict: wire.DialBackVerdict) -> bytes:
    """The reply without a reason, which would reveal other programs at that address."""
    return wire.write(wire.DialBackReply(verdict=verdict))


_CANNOT_HELP = _verdict("cannot help")

# The usual home computer announces addresses of its own network only. It gets a verdict, or it
# would wait for ever to learn that it can only dial out.
_NOWHERE_TO_DIAL = _verdict("not reached")
