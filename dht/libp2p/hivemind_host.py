"""``dht.host.Host`` on a libp2p daemon: the host of every real peer.

The host owns the daemon and supervises it. When the daemon ends, pending calls and streams fail at
once, and it is started again with the same key, port and protocols; whoever wants a connection
dials again. Requests of other peers are bounded here in size, number and time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from multiaddr import Multiaddr

from dht import addresses as address_rules
from dht.bounded_mapping import BoundedMapping, by_age
from dht.errors import (
    NOT_SERVED,
    CallRefused,
    DhtError,
    HostClosed,
    PeerUnreachable,
)
from dht.host import (
    UNARY_MAX_BYTES,
    CallHandler,
    Connection,
    Served,
    Stream,
    StreamHandler,
    Tasks,
)
from dht.identity import Identity, PeerId
from dht.libp2p.dialling import by_ip, in_short, why_silent
from dht.libp2p.framing.frame_stream import FrameStream
from dht.libp2p.hivemind_calls import RefusedByHandler
from dht.libp2p.hivemind_daemon import (
    DAEMON_TIMEOUT_S,
    Daemon,
    DaemonSettings,
    RunDirectory,
    introduce,
    peer_bytes,
)
from dht.libp2p.hivemind_directory import HivemindDirectory
from dht.libp2p.hivemind_imports import P2PDaemonError, P2PHandlerError, PeerID, p2pd_pb2
from dht.libp2p.lane.connection import LaneSettings
from dht.libp2p.lane.lane import Lane
from dht.libp2p.lane.meetings import Meetings
from dht.libp2p.lane.observers import OBSERVERS_MAX, seen_by
from dht.libp2p.lane.port_mapping import keep_mapped, own_gateway
from dht.libp2p.lane.wire import (
    CIRCUIT_MAX_BYTES,
    CIRCUIT_PROTOCOL,
    LANE_PROTOCOL,
    PUNCH_MAX_BYTES,
    PUNCH_PROTOCOL,
    SEEN_PROTOCOL,
    VIA_PROTOCOL,
    is_outer,
)
from dht.libp2p.places import HOP_PROTOCOL, RESERVE, RelayPlaces
from dht.record_keeper import RecordKeeper
from dht.wrapped_host import GuardedHost, Refusal

_logger = logging.getLogger("dht.host")

HANG_AFTER_S = 30.0
"""A daemon that does not answer for this long is killed and started again."""

RESTART_DELAYS_S = (0.0, 0.2, 0.5, 1.0, 2.0, 5.0)
EARLY_S = 10.0
"""A daemon that ends sooner than this several times is restarted with longer pauses."""

NAME_WITHIN_S = 2.0
"""Limit of looking up names for a meeting of two lanes, which has ten seconds in all."""

LISTENS_WITHIN_S = 2.0
UNANSWERED_MAX = 256
LOOK_OUTSIDE_S = 60.0
"""Pause between questions at which public address this host is seen, while its port is mapped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSettings(DaemonSettings):
    """Settings by which a host listens, and its limits for other peers."""

    listen: tuple[Multiaddr, ...] = (Multiaddr("/ip4/127.0.0.1/tcp/0"),)
    relays: tuple[Multiaddr, ...] = ()
    """Relays at which this host has places while others cannot dial it, each ending in /p2p/PEER.
    Other relays are not searched for."""

    serve_directory: bool = True
    """Store records for other peers. One that does not can only dial out, as is known from the
    start: it has places at its relays at once."""

    watch_period_s: float = 2.0
    """Interval of checks of the daemon's connections and of the routing table."""

    lane: LaneSettings | None = None
    """The direct lane for bulk streams. ``None``: they go through the daemon."""

    def __post_init__(self) -> None:
        DaemonSettings.__post_init__(self)
        for relay in self.relays:
            if address_rules.peer_of(relay) is None:
                raise ValueError(f"relay {relay} does not end in /p2p/PEER")


STRANGER = HostSettings(listen=(), port_mapping=False, serve_directory=False)


class HivemindHost:
    """One peer's presence on the network. Made by ``open``, ended by ``close``."""

    def __init__(self, identity: Identity, settings: HostSettings, keeper: RecordKeeper) -> None:
        self._identity = identity
        self._settings = settings
        self.keeper = keeper
        """Decides which records this node believes, and counts them."""

        self.restarts = 0
        """Number of restarts of the daemon."""

        self.prefers: Callable[[PeerId], object] = lambda peer: False
        """Says of a peer whether its streams, connections and circuits go before those of others
        when there are too many."""

        self._run_directory = RunDirectory()
        self._daemon: Daemon | None = None
        self._down_reason = "it is being opened"
        self._closed = False
        self._closing: asyncio.Future[None] | None = None
        self.directory = HivemindDirectory(identity.peer_id, keeper)
        self._tasks = Tasks()
        self.served = Served(self._tasks, prefers=self._prefers)
        self._supervisor: asyncio.Task[None] | None = None
        self._unanswered = BoundedMapping[PeerId, None]("unanswered", UNANSWERED_MAX, worth=by_age)
        """Peers whose last request failed: they are dialled when they listen, and by ``connect``
        alone, which has their addresses."""
        self._places = RelayPlaces(
            settings.relays,
            connected=self._connected,
            connect=partial(self.connect, timeout_s=DAEMON_TIMEOUT_S),
            ask=self._ask_for_place,
        )
        self._places.want(not settings.serve_directory)
        self._role_lock = asyncio.Lock()
        self.lane: Lane | None = None
        self.meetings: Meetings | None = None
        """The direct lane, and its way to peers behind routers; ``None`` if the settings have none.
        """

        self._mapped_port: int | None = None
        """Port of the router's public address that leads to the daemon."""

        self._outside = _Outside(self)
        self._outer_ip = ""
        self._look_outside_at = 0.0
        self.lane_refusal: Refusal = _admit_all
        """Whom the lane refuses tickets and meetings."""

    @classmethod
    async def open(
        cls,
        identity: Identity,
        settings: HostSettings,
        *,
        keeper: RecordKeeper | None = None,
    ) -> Self:
        """Start a daemon with this identity. Raises ``HostClosed``."""
        self = cls(identity, settings, keeper or RecordKeeper())
        try:
            await self._bring_up()
        except BaseException:
            self._run_directory.remove()
            raise
        self._supervisor = asyncio.create_task(self._supervise(), name="daemon supervisor")
        self._tasks.spawn(self._places.keep(), "places at relays")
        try:
            await self._open_lane()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def peer_id(self) -> PeerId:
        return self._identity.peer_id

    @property
    def daemon_pid(self) -> int | None:
        """The daemon's process id, while it runs."""
        if self._daemon is None:
            return None
        return self._daemon.pid

    def wall_time(self) -> float:
        return time.time()

    def _prefers(self, peer: PeerId) -> object:
        return self.prefers(peer)

    # --- life of the daemon ----------------------------------------------------------------

    async def _bring_up(self) -> None:
        key_file = self._run_directory.path / "key"
        try:
            key_file.touch(mode=0o600)
            key_file.write_bytes(self._identity.to_bytes())
            daemon = await Daemon.start(
                self._settings,
                key_file=key_file,
                directory=self._run_directory,
                on_stream=self._accept,
            )
        finally:
            # The daemon has read it: no key is left behind if we are killed.
            key_file.unlink(missing_ok=True)
        calls, streams = list(self.served.calls), list(self.served.streams)
        self._daemon = daemon  # whatever is served from now on is told to it at once
        try:
            if daemon.peer_id.to_base58() != self.peer_id:
                raise HostClosed(f"the daemon calls itself {daemon.peer_id}, not {self.peer_id}")
            await self._keep_port(daemon)
            for protocol in calls:
                await self._register_calls(daemon, protocol)
            for protocol in streams:
                await daemon.serve_streams(protocol)
            await self.directory.start(daemon, serve=self._settings.serve_directory)
        except BaseException:
            self._daemon = None
            self.directory.drop()
            await daemon.stop()
            raise

    async def _keep_port(self, daemon: Daemon) -> None:
        """Note the port that was chosen for port 0, so that a restart keeps the address."""
        listen = self._settings.listen
        if not any(address.value_for_protocol("tcp") == "0" for address in listen):
            return
        ports = {
            port
            for address in await daemon.identify()
            if not address_rules.is_relayed(address)
            and (port := address.value_for_protocol("tcp")) is not None
        }
        if len(listen) == 1 and len(ports) == 1:
            # /tcp/0 can only be the end of a listen address.
            fixed = Multiaddr(f"{str(listen[0]).removesuffix('/0')}/{ports.pop()}")
            self._settings = replace(self._settings, listen=(fixed,))

    async def _supervise(self) -> None:
        loop = asyncio.get_running_loop()
        ended_early = 0
        while not self._closed:
            daemon = self._daemon
            assert daemon is not None
            began = loop.time()
            watch = asyncio.create_task(self._watch(daemon), name="daemon watch")
            ended = asyncio.create_task(daemon.ended(), name="daemon end")
            try:
                await asyncio.wait({watch, ended}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                watch.cancel()
                ended.cancel()
            how = ended.result() if ended.done() and not ended.cancelled() else watch.result()
            self._daemon = None
            self._down_reason = f"the daemon is being restarted: {how}"
            self.directory.drop()
            _logger.warning(
                "daemon_lost pid=%s reason=%r last_line=%r",
                daemon.pid,
                how,
                daemon.last_lines[-1] if daemon.last_lines else "",
            )
            await daemon.stop()
            ended_early = ended_early + 1 if loop.time() - began < EARLY_S else 0
            await self._restart(after_early_ends=ended_early)

    async def _restart(self, *, after_early_ends: int) -> None:
        attempt = 0
        while True:
            delay = min(attempt + after_early_ends // 2, len(RESTART_DELAYS_S) - 1)
            await asyncio.sleep(RESTART_DELAYS_S[delay])
            attempt += 1
            try:
                await self._bring_up()
                break
            except (DhtError, P2PDaemonError, TimeoutError, OSError) as error:
                self._down_reason = f"the daemon could not be restarted: {error}"
                _logger.warning("daemon_restart_failed attempt=%d reason=%r", attempt, str(error))
        self.restarts += 1
        _logger.info("daemon_restarted pid=%s attempts=%d", self.daemon_pid, attempt)

    async def _watch(self, daemon: Daemon) -> str:
        """Keep the routing table filled. Returns when the daemon does not answer any more."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._settings.watch_period_s)
            try:
                connected = await daemon.connected(timeout_s=HANG_AFTER_S)
            except TimeoutError:
                return f"it did not answer for {HANG_AFTER_S:g} s"
            except (OSError, P2PDaemonError) as error:
                return f"it does not answer: {error}"
            await self.directory.watch(connected, now=loop.time())

    def _running(self) -> Daemon:
        if self._closed:
            raise HostClosed("it was closed")
        if self._daemon is None:
            raise HostClosed(self._down_reason)
        if self._daemon.lost:
            raise HostClosed("the daemon has just ended")
        return self._daemon

    async def close(self) -> None:
        self._closed = True
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        # An owner that is cancelled meanwhile would leave the daemon and its folder behind.
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            if self._supervisor is not None:
                self._supervisor.cancel()
                await asyncio.gather(self._supervisor, return_exceptions=True)
            self._tasks.cancel()
            await self._tasks.wait()
            if self.lane is not None:
                await self.lane.close()
            self.directory.drop()
            if self._daemon is not None:
                await self._daemon.stop()
                self._daemon = None
        finally:
            self._run_directory.remove()

    # --- addresses and connections ---------------------------------------------------------

    @property
    def listen(self) -> tuple[Multiaddr, ...]:
        """The addresses that it listens at; port 0 of a single one is the port chosen."""
        return self._settings.listen

    async def addresses(self) -> tuple[Multiaddr, ...]:
        with _own_daemon_answers():
            found = await self._running().identify()
        circuits = self._places.circuits(await self._connected())
        mapped = await self._mapped_address()
        every = address_rules.deduplicate((*found, *mapped, *circuits))
        return tuple(
            address_rules.with_peer(address, self.peer_id) for address in address_rules.rank(every)
        )

    async def _mapped_address(self) -> list[Multiaddr]:
        """The address at the router that leads to the daemon, if there is one."""
        if self._mapped_port is None or self._settings.announce:
            return []
        if (now := asyncio.get_running_loop().time()) >= self._look_outside_at:
            self._look_outside_at = now + LOOK_OUTSIDE_S
            with suppress(DhtError):
                for peer, _ in (await self._outside.observers())[:OBSERVERS_MAX]:
                    seen = await seen_by(self._outside, peer)
                    if is_outer(seen) and ":" not in seen:
                        self._outer_ip = seen
                        break
                else:
                    self._look_outside_at = now  # nobody could tell yet
        ip = self._outer_ip
        return [Multiaddr(f"/ip4/{ip}/tcp/{self._mapped_port}")] if ip else []

    async def _connected(self) -> dict[PeerId, tuple[Multiaddr, ...]]:
        """Every peer with a live connection, and the remote address of each connection."""
        with _own_daemon_answers():
            return await self._running().connected()

    async def _ask_for_place(self, relay: PeerId) -> bytes:
        async with self._asked(relay, DAEMON_TIMEOUT_S) as daemon:
            return await daemon.exchange(relay, HOP_PROTOCOL, RESERVE)

    @asynccontextmanager
    async def _asked(
        self, peer: PeerId, within_s: float, tried: Sequence[Multiaddr] = ()
    ) -> AsyncIterator[Daemon]:
        """A request to a peer by the daemon. ``tried``: the addresses that it dials.

        Raises ``PeerUnreachable``, or ``HostClosed`` if our own daemon is gone.
        """
        daemon = self._running()
        try:
            async with asyncio.timeout(within_s):
                yield daemon
        except (TimeoutError, OSError, P2PDaemonError) as error:
            if daemon.lost:
                raise HostClosed("the daemon has just ended") from error
            self._unanswered.renew(peer, None)
            silent = f"no answer within {within_s:g} s"
            said = silent if isinstance(error, TimeoutError) else in_short(str(error), tried)
            raise PeerUnreachable(peer, said or type(error).__name__) from error
        self._unanswered.pop(peer, None)

    async def connect(
        self, peer: PeerId, addresses: Sequence[Multiaddr], *, timeout_s: float
    ) -> None:
        dialled = [address_rules.without_peer(address) for address in addresses]
        async with self._asked(peer, timeout_s, dialled) as daemon:
            dialled[:] = await by_ip(dialled, within_s=timeout_s / 2)
            if dialled:
                await self._until_it_listens(peer, dialled)
            await daemon.connect(peer, dialled, timeout_s=timeout_s)
            # Peers without a directory node count as connected too.
            await self.directory.introduce(peer)

    async def _until_it_listens(self, peer: PeerId, addresses: Sequence[Multiaddr] = ()) -> None:
        """Have the daemon not dial in vain (``dht.libp2p.dialling``).

        Raises ``PeerUnreachable`` for a peer that has not answered, and does not listen at these
        addresses either. One that may be reached by a relay is dialled all the same.
        """
        if peer not in self._unanswered or any(map(address_rules.is_relayed, addresses)):
            return
        if peer in await self._connected():
            return
        reason: str | None = "it did not answer, and has not been dialled again since"
        if addresses:
            reason = await why_silent(addresses, within_s=LISTENS_WITHIN_S)
        if reason is not None:
            raise PeerUnreachable(peer, reason)

    async def improve(
        self, peer: PeerId, addresses: Sequence[Multiaddr], *, timeout_s: float
    ) -> None:
        # The daemon dials nobody to whom it has a connection of any kind. Nothing is cut before a
        # stranger has shown that somebody with this key answers there.
        async with self.stranger() as stranger:
            await stranger.connect(peer, addresses, timeout_s=timeout_s)
        if any(c.peer == peer and c.relayed for c in await self.connections()):
            with _own_daemon_answers():
                await self._running().disconnect(peer)  # what goes over the lane goes on
        await self.connect(peer, addresses, timeout_s=timeout_s)

    async def disconnect(self, peer: PeerId) -> None:
        daemon = self._running()
        if self.lane is not None:
            self.lane.forget(peer)
        with _own_daemon_answers():
            await daemon.disconnect(peer)

    @asynccontextmanager
    async def stranger(self) -> AsyncIterator[HivemindHost]:
        async with await HivemindHost.open(Identity.generate(), STRANGER) as host:
            yield host

    async def connections(self) -> tuple[Connection, ...]:
        connected = await self._connected()
        result = []
        for peer in sorted(connected):
            best = address_rules.rank(connected[peer])  # relayed ones last
            if best:
                result.append(Connection(peer, best[0], address_rules.is_relayed(best[0])))
        return tuple(result)

    async def set_reachable(self, reachable: bool) -> None:
        """Adapt to the result of a dial-back (``dht.presence.dial_back``).

        A peer that cannot be dialled stops storing records for other peers, and has places at its
        relays. Its daemon knows nothing of either.
        """
        self._places.want(not reachable)
        async with self._role_lock:
            if reachable == self._settings.serve_directory:
                return
            self._settings = replace(self._settings, serve_directory=reachable)
            daemon = self._running()
            neighbours = await self.connections()
            with _own_daemon_answers():
                async with asyncio.timeout(DAEMON_TIMEOUT_S):
                    await self.directory.stop()
                    await self.directory.start(daemon, serve=reachable)
            await self.directory.watch({c.peer: (c.address,) for c in neighbours}, now=0.0)

    # --- unary calls -----------------------------------------------------------------------

    async def serve_calls(
        self, protocol: str, handler: CallHandler, *, request_max_bytes: int
    ) -> None:
        self.served.check_unserved(protocol)
        self.served.serve_calls(protocol, handler, request_max_bytes=request_max_bytes)
        await self._register(lambda daemon: self._register_calls(daemon, protocol))

    async def _register(self, serve: Callable[[Daemon], Awaitable[None]]) -> None:
        """Tell the daemon of a protocol that is served. The next one gets every such protocol."""
        if self._closed:
            raise HostClosed("it was closed")
        if (daemon := self._daemon) is None:
            return
        try:
            await serve(daemon)
        except (TimeoutError, OSError, P2PDaemonError) as error:
            if self._daemon is daemon and not daemon.lost:
                raise HostClosed(f"the daemon does not answer: {error}") from error

    async def _register_calls(self, daemon: Daemon, protocol: str) -> None:
        async def answer(request: bytes, peer: PeerID) -> bytes:
            try:
                return await self.served.answer(PeerId(peer.to_base58()), protocol, request)
            except ValueError as error:
                raise RefusedByHandler(str(error)) from error

        async with asyncio.timeout(DAEMON_TIMEOUT_S):
            await daemon.calls.serve(protocol, answer)

    async def call(self, peer: PeerId, protocol: str, request: bytes, *, timeout_s: float) -> bytes:
        if len(request) > UNARY_MAX_BYTES:
            raise ValueError(f"request has {len(request)} bytes; at most {UNARY_MAX_BYTES}")
        target = PeerID(_valid(peer))
        async with self._asked(peer, timeout_s) as daemon:
            await self._until_it_listens(peer)
            try:
                reply = await daemon.calls.call(target, protocol, request)
            except P2PHandlerError as error:
                raise CallRefused(peer, protocol, str(error)) from error
            except P2PDaemonError as error:
                if "protocols not supported" in str(error):
                    raise CallRefused(peer, protocol, NOT_SERVED) from error
                raise
        if len(reply) > UNARY_MAX_BYTES:
            raise CallRefused(peer, protocol, f"the reply has {len(reply)} bytes")
        return reply

    # --- streams ---------------------------------------------------------------------------

    async def serve_streams(self, protocol: str, handler: StreamHandler) -> None:
        self.served.check_unserved(protocol)
        self.served.streams[protocol] = handler
        await self._register(lambda daemon: daemon.serve_streams(protocol))

    def _accept(self, stream: FrameStream, message: bytes) -> None:
        """Take an incoming stream from the daemon."""
        info = p2pd_pb2.StreamInfo()
        info.ParseFromString(message)
        if self._serve(stream, introduce(stream, info)) is not None:
            stream.abort()

    def _serve(self, stream: FrameStream, protocol: str) -> str | None:
        """Start the handler of an incoming stream, or return the reason of a refusal."""
        reason = NOT_SERVED if self._closed else self.served.accept(stream, protocol)
        if reason is not None:
            peer = stream.remote
            _logger.debug("stream_refused peer=%s protocol=%s reason=%r", peer, protocol, reason)
        return reason

    async def open_stream(
        self, peer: PeerId, protocol: str, *, timeout_s: float, bulk: bool = False
    ) -> Stream:
        self._running()
        _valid(peer)
        if bulk and self.lane is not None:
            loop = asyncio.get_running_loop()
            began = loop.time()
            direct = await self.lane.open(peer, protocol, timeout_s=timeout_s)
            if direct is not None:
                return direct
            timeout_s = max(0.0, timeout_s - (loop.time() - began))
        async with self._asked(peer, timeout_s) as daemon:
            await self._until_it_listens(peer)
            return await daemon.open_stream(peer, protocol, timeout_s=timeout_s)

    # --- the direct lane -------------------------------------------------------------------

    async def _open_lane(self) -> None:
        await self.serve_calls(SEEN_PROTOCOL, self._tell_seen, request_max_bytes=0)
        listen = self._settings.listen
        outwards = [at for at in listen if not address_rules.is_loopback(at)]
        router = own_gateway() if self._settings.port_mapping and outwards else None
        if router is not None and (port := address_rules.port_of(outwards[0])):
            self._tasks.spawn(keep_mapped(router, port, self._port_mapped), "port mapping")
        if self._settings.lane is None:
            return
        lane = self.lane = Lane(
            self._settings.lane, outside=self._outside, serve=self._serve, prefers=self._prefers
        )
        self.meetings = meetings = Meetings(lane, self._outside)
        lane.start([host for at in listen if (host := address_rules.ip_of(at)) is not None])
        if router is not None:
            lane.map_port(router)

        async def offer(peer: PeerId, request: bytes) -> bytes:
            return await lane.offer(peer)

        guarded = GuardedHost(self, lambda peer: self.lane_refusal(peer))  # noqa: PLW0108  # set later
        await guarded.serve_calls(LANE_PROTOCOL, offer, request_max_bytes=0)
        # The relay has a judge of its own, for both ends of a circuit.
        await self.serve_calls(CIRCUIT_PROTOCOL, lane.grant, request_max_bytes=CIRCUIT_MAX_BYTES)
        if self._settings.is_bootstrap:
            return  # a host for all runs does not dial addresses that strangers name
        await guarded.serve_calls(PUNCH_PROTOCOL, meetings.meet, request_max_bytes=PUNCH_MAX_BYTES)
        await guarded.serve_calls(VIA_PROTOCOL, meetings.come, request_max_bytes=CIRCUIT_MAX_BYTES)

    def _port_mapped(self, port: int | None) -> None:
        self._mapped_port = port

    async def _tell_seen(self, peer: PeerId, request: bytes) -> bytes:
        """Tell a peer at which IP address this host sees it; empty behind a relay."""
        return "".join((await self._outside.where(peer))[:1]).encode()


class _Outside:
    """The daemon's part in connections of a lane."""

    def __init__(self, host: HivemindHost) -> None:
        self._host = host

    async def where(self, peer: PeerId) -> tuple[str, ...]:
        connected = await self._host._connected()
        direct = [at for at in connected.get(peer, ()) if not address_rules.is_relayed(at)]
        found = (address_rules.ip_of(at) for at in address_rules.rank(direct))
        return tuple(dict.fromkeys(ip for ip in found if ip is not None))

    async def call(self, peer: PeerId, protocol: str, message: bytes) -> bytes:
        return await self._host.call(peer, protocol, message, timeout_s=DAEMON_TIMEOUT_S)

    async def observers(self) -> list[tuple[PeerId, str]]:
        relays, connections = self._host._settings.relays, await self._host.connections()
        return outside(connections, [*relays, *await looked_up(relays, connections)])


def outside(
    connections: Iterable[Connection], relays: Iterable[Multiaddr]
) -> list[tuple[PeerId, str]]:
    """Directly connected peers on the internet, and their IP addresses.

    A relay comes with all addresses at which this host was told to use it: the daemon prefers IPv6,
    and sees of such a relay no address of IPv4, at which the relay could tell this host's own.
    """
    found = [(c.peer, address_rules.ip_of(c.address)) for c in connections if not c.relayed]
    there = {peer for peer, _ in found}
    told = [(address_rules.peer_of(at), address_rules.ip_of(at)) for at in relays]
    found += [(peer, ip) for peer, ip in told if peer is not None and peer in there]
    return [(peer, ip) for peer, ip in dict.fromkeys(found) if ip is not None and is_outer(ip)]


async def looked_up(
    relays: Iterable[Multiaddr], connections: Iterable[Connection]
) -> list[Multiaddr]:
    """The addresses behind names for IPv4 of relays that are connected over IPv6."""
    direct = [c for c in connections if not c.relayed]
    over_ipv6 = {c.peer for c in direct if ":" in (address_rules.ip_of(c.address) or "")}
    named = [
        relay
        for relay in relays
        if address_rules.peer_of(relay) in over_ipv6 and address_rules.host_of(relay)[0] == "dns4"
    ]
    try:
        return await by_ip(named, within_s=NAME_WITHIN_S)
    except OSError:
        return []


@contextmanager
def _own_daemon_answers() -> Iterator[None]:
    """Requests to our own daemon. Raises ``HostClosed`` if it does not answer one."""
    try:
        yield
    except (TimeoutError, OSError, P2PDaemonError) as error:
        raise HostClosed(f"the daemon does not answer: {error}") from error


async def _admit_all(peer: PeerId) -> str | None:
    return None


def _valid(peer: PeerId) -> bytes:
    try:
        return peer_bytes(peer)
    except ValueError as error:
        raise PeerUnreachable(peer, f"this is no peer id: {error}") from error
