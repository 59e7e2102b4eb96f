"""Can others dial this peer? Dial-backs: asked of other peers, and made for those that ask.

``ReachabilityChecks`` asks for some when there is a reason, takes the proofs, and reports the
verdict; ``DialBacks`` has them made for others. ``dht.membership.reachability`` decides what the
results mean.

A dial-back proves something only if it opens a *fresh* connection, and the helper that is asked is
connected already. Nothing may be cut for it: rounds go over that connection. So whoever dials does
it as a stranger (``dht.host.Host.stranger``), from a host with a new identity and a new port. A
router that lets in answers only, or only peers to which this one is connected, keeps it out. As
some routers let in every port of an address to which something was sent, the helper first passes
the request on to third peers, which are not connected with the asking one; it dials itself where
there are none.

The proof is the nonce, received over a direct connection from a peer that was not connected when
the request was made, and that this peer cannot have dialled.

A helper must not be usable as a tool for dialling others. It requests dials only to the IP address
at which it sees the asking peer. A third peer cannot see that address, so it dials only for helpers
that it knows, and only in networks at least as wide as the one that it shares with the helper. The
answer says whether the peer was reached but not why, and a failure is answered only after a fixed
time: nothing is learnt about other programs at that address.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
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
    scope_seen,
    unpack_all,
    with_ip,
    with_peer,
    without_peer,
)
from dht.errors import CallRefused, DhtError, HostClosed, PeerUnreachable
from dht.host import Host
from dht.identity import PeerId, parse_peer_id
from dht.limits import Rate
from dht.membership import hello as wire
from dht.membership.reachability import HELPERS_PER_CHECK, NO_ADDRESS, Proximity
from dht.membership.table import Member
from dht.presence.dialler import Dialler
from dht.presence.this_peer import CALL_TIMEOUT_S, ThisPeer, pause

THIRD_PEERS_MAX = 3
"""Number of third peers that are waited for until their time-out."""

THIRD_PEERS_ASKED_MAX = 8
"""Number of third peers asked: many refuse at once, being connected to the asking peer already."""

DIALS_AT_ONCE = 2
"""A real stranger takes a quarter of a second of a processor."""


@dataclass(slots=True, eq=False, repr=False)
class DialBacks:
    """Dial-backs for other peers: passed on to third peers, and made."""

    this: ThisPeer
    dialler: Dialler
    budget: Rate[PeerId]
    done: int = 0
    """Number of dials made for other peers."""
    _dialling: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(DIALS_AT_ONCE))

    async def serve(self) -> None:
        """Answer other peers from now on."""
        await self.this.host.serve_calls(
            wire.DIAL_BACK_PROTOCOL, self._answer, request_max_bytes=wire.DIAL_BACK_MAX_BYTES
        )

    async def _answer(self, peer: PeerId, request: bytes) -> bytes:
        if not self.budget.spend(peer, asyncio.get_running_loop().time()):
            raise ValueError("too many dial-backs in this minute")
        message = wire.read(wire.DialBack, request, max_bytes=wire.DIAL_BACK_MAX_BYTES)
        target = parse_peer_id(message.peer)
        if message.relay and target != peer:
            raise ValueError("a peer may ask for a dial-back to itself only")
        remote = await _remote_of(self.this.host, peer)
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
        if any(c.peer == target for c in await self.this.host.connections()):
            return _CANNOT_HELP
        return await self._dial(target, addresses, message.nonce)

    async def _find_dialler(self, message: wire.DialBack, remote: Multiaddr) -> bytes:
        """Ask third peers to dial, or dial where none of them can."""
        try:
            connections = await self.this.host.connections()
        except HostClosed:
            return _CANNOT_HELP
        third = [
            c.peer
            for c in connections
            if not c.relayed and c.peer != message.peer and _is_outside(c.address, remote)
        ]
        forwarded = wire.write(msgspec.structs.replace(message, relay=False))
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + 2 * (THIRD_PEERS_MAX - 1) * CALL_TIMEOUT_S
        for i in self.this.rng.permutation(len(third))[:THIRD_PEERS_ASKED_MAX]:
            if loop.time() > give_up_at:
                break
            try:
                data = await self.this.host.call(
                    third[int(i)],
                    wire.DIAL_BACK_PROTOCOL,
                    forwarded,
                    timeout_s=2 * CALL_TIMEOUT_S,
                )
                reply = wire.read(wire.DialBackReply, data)
            except (DhtError, ValueError):
                continue  # another one may be able to
            if reply.verdict in ("reached", "not reached"):
                return _verdict(reply.verdict)
        return await self._dial(
            parse_peer_id(message.peer), unpack_all(message.addresses), message.nonce
        )

    async def _dial(self, target: PeerId, addresses: Sequence[Multiaddr], nonce: bytes) -> bytes:
        """Connect to a peer as a stranger, and send the nonce over that connection."""
        at = [with_peer(address, target) for address in addresses]
        timeout_s = CALL_TIMEOUT_S
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with self._dialling, self.this.host.stranger() as stranger:
                self.done += 1
                began = loop.time()
                await stranger.connect(target, at, timeout_s=timeout_s)
                await stranger.call(target, wire.CONFIRM_PROTOCOL, nonce, timeout_s=timeout_s)
        except HostClosed:
            return _CANNOT_HELP
        except CallRefused:
            return _CANNOT_HELP  # the asking peer does not wait for it any more
        except PeerUnreachable:
            # A closed port answers at once and a filtered one never: the reply must not tell which.
            await asyncio.sleep(began + timeout_s - loop.time())
            return _verdict("not reached")
        return _verdict("reached")

    def _of_peer_at(self, remote: Multiaddr, packed: Sequence[bytes]) -> tuple[Multiaddr, ...]:
        """The addresses named by the asking peer that are at the IP it is connected from."""
        ip = ip_of(remote)
        if ip is None:
            return ()
        named = (a for a in unpack_all(packed) if not is_relayed(a) and is_dialable(a))
        at = deduplicate(with_ip(without_peer(a), ip) for a in named if ip_of(a) in (ip, None))
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
        own = self.this.addresses
        if is_loopback(address):
            return any(is_loopback(mine) for mine in own)
        return not is_private(address) or any(is_private(mine) for mine in own)


async def _remote_of(host: Host, peer: PeerId) -> Multiaddr | None:
    """Remote address of the direct connection with a peer; ``None`` without one."""
    for connection in await host.connections():
        if connection.peer == peer and not connection.relayed:
            return connection.address
    return None


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


LOOK_AGAIN_S = 5.0
"""Time after which a peer that is alone looks for one that could help. A new member wakes it."""

REPORT_AGAIN_S = 1.0
"""Pause before a verdict is reported again to an owner whose daemon was being restarted."""


@dataclass(frozen=True, slots=True)
class _Request:
    """A dial-back that this peer waits for."""

    connected: frozenset[PeerId]
    """The peers that were connected when it was asked for."""
    came_from: asyncio.Future[Multiaddr]
    """Remote address of the fresh connection over which the nonce came."""


@dataclass(slots=True, eq=False, repr=False)
class ReachabilityChecks:
    """Asks for dial-backs when there is a reason, and draws the verdict from all evidence."""

    this: ThisPeer
    dialler: Dialler
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a check may have become due."""
    _proximity: Proximity = field(default_factory=Proximity)
    _reported: bool | None = None
    _requests: dict[bytes, _Request] = field(default_factory=dict)
    """Those under way, by nonce."""

    async def serve(self) -> None:
        """Take proofs from now on."""
        await self.this.host.serve_calls(
            wire.CONFIRM_PROTOCOL, self._answer_confirm, request_max_bytes=wire.NONCE_BYTES
        )

    async def run(self) -> None:
        """Check and report for ever."""
        state = self.this.reachability
        while True:
            await self._report()
            if self.this.now() >= state.due_at:
                with contextlib.suppress(HostClosed):  # its daemon is being restarted
                    await self.look()
                if self.dialler.connected:
                    await self.check()
            alone_s = 0.5 if self.dialler.connected else LOOK_AGAIN_S
            pause_s = min(60.0, max(alone_s, state.due_at - self.this.now()))
            if self._reported is None and state.reachable is not None:
                pause_s = min(pause_s, REPORT_AGAIN_S)
            await pause(self.wanted, pause_s)

    async def check(self) -> None:
        """Ask a few peers for a dial-back, one after the other, until the matter is settled."""
        state, now = self.this.reachability, self.this.now
        state.asked(now=now())
        scope = state.scope
        near = self._proximity
        helpers = [p for p in sorted(near.present) if near.scope_of_connected(p) is scope]
        if scope is not None and helpers and not state.usable:
            # Nobody has to dial for that. Twice, as the daemon finds out about addresses slowly.
            state.denied(NO_ADDRESS, now=now())
        elif scope is not None and self.this.addresses:
            order = [helpers[int(i)] for i in self.this.rng.permutation(len(helpers))]
            for helper in order[:HELPERS_PER_CHECK]:
                if state.scope is not scope or await self._have_tried(helper):
                    break
        await self._report()

    async def look(self) -> None:
        """Take note of the present connections. Raises ``HostClosed``."""
        had_none = not self.dialler.connected
        connections = await self.dialler.look()
        if had_none and connections:
            self.wanted.set()
        self._proximity.look(connections)
        self.choose_scope()

    def announce(self, addresses: tuple[Multiaddr, ...]) -> None:
        """Take note of the own addresses, of which only direct ones can be dialled."""
        self._proximity.own = addresses
        direct = frozenset(str(address) for address in addresses if not is_relayed(address))
        if self.this.reachability.announce(direct, now=self.this.now()):
            self.wanted.set()
            self.choose_scope()

    def choose_scope(self, new: Sequence[Member] | None = None) -> None:
        """Find out in which scope the known peers live. That of a new member counts at once.

        ``new``: the members that have come since; ``None``: all are looked at.
        """
        this, now, known = self.this, self.this.now(), self.this.reachability.scope
        scope: Scope | None
        if new is not None and known is not None:
            scope = self._proximity.farthest(new, but=known)
        else:
            scope = self._proximity.scope_that_counts(
                () if this.profile.run is None else this.table.live(now),
                count_connected=self.this.profile.observes,
            )
        if scope is not None and self.this.reachability.count_in(scope, now=now):
            self.wanted.set()

    async def _have_tried(self, helper: PeerId) -> bool:
        """Have a connected peer arrange a dial-back. Says whether no other has to be asked."""
        state, scope, host = self.this.reachability, self.this.reachability.scope, self.this.host
        usable = [address for address in self.this.addresses if str(address) in state.usable]
        came_from: asyncio.Future[Multiaddr] = asyncio.get_running_loop().create_future()
        nonce = secrets.token_bytes(wire.NONCE_BYTES)
        verdict, reason = "cannot help", f"{helper} knows no peer that could dial"
        try:
            connected = frozenset(c.peer for c in await host.connections())
            self._requests[nonce] = _Request(connected, came_from)
            request = wire.DialBack(
                peer=host.peer_id,
                nonce=nonce,
                addresses=tuple(pack(address) for address in usable),
                relay=True,
            )
            # It may ask three others, each of which connects and calls.
            timeout_s = (2 * THIRD_PEERS_MAX + 1) * CALL_TIMEOUT_S
            data = await host.call(
                helper, wire.DIAL_BACK_PROTOCOL, wire.write(request), timeout_s=timeout_s
            )
            verdict = wire.read(wire.DialBackReply, data).verdict
        except (DhtError, ValueError) as error:
            reason = str(error)[: wire.REASON_MAX]
        finally:
            self._requests.pop(nonce, None)
        now = self.this.now()
        if came_from.done():  # the proof outweighs the reply
            seen = scope_seen(came_from.result(), self._proximity.own)
            state.confirmed(helper, now=now, scope=seen)
            return scope is not None and seen >= scope
        if state.scope is not scope:
            return True  # it was about addresses that do not count any more
        if verdict == "not reached":
            reason = f"no fresh connection came in when {helper} was asked for one"
            return state.denied(reason, now=now)
        state.not_tried(reason)
        return False

    async def _answer_confirm(self, peer: PeerId, request: bytes) -> bytes:
        asked = self._requests.get(bytes(request))
        if asked is None or asked.came_from.done():
            raise ValueError("this nonce is not expected")
        if peer in asked.connected or self.dialler.is_known(peer):
            raise ValueError("this peer may have dialled it, which proves nothing")
        remote = await _remote_of(self.this.host, peer)
        if remote is None:
            raise ValueError("there is no direct connection, which proves nothing")
        if not asked.came_from.done():
            asked.came_from.set_result(remote)
        return b""

    async def _report(self) -> None:
        reachable = self.this.reachability.reachable
        if reachable == self._reported or (reachable is None and not self._reported):
            return
        self._reported = reachable
        self.this.outdate()
        self.this.hurry()
        announced = ", ".join(str(address) for address in self.this.addresses) or "no address"
        state = {
            True: "reachable",
            False: "dial-out only, as behind a router or firewall",
            None: "not known any more whether others can dial it",
        }[reachable]
        self.this.events.tell(
            "reachability",
            f"{state}: {self.this.reachability.reason}; announced {announced}",
            reachable=reachable,
        )
        if (on_reachable := self.this.events.on_reachable) is not None:
            try:
                await on_reachable(reachable is True)
            except HostClosed:
                self._reported = None  # reported again as soon as the daemon is up
