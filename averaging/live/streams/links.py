"""Control links between peers, and the opening of bulk streams.

A **control link** carries small messages both ways between two peers, each at most once. The peer
that needs it opens it; a peer that can only dial out keeps one open to a few others and is reached
over it. ``Transport.send`` never waits. A failed delivery is reported by ``lost`` for the peer, not
for the message: the round machine decides what that means.

``averaging.live.streams.bulk`` has the streams that carry slices. This module opens and accepts
them.

Nothing here knows rounds, fragments or codecs; headers and messages are bytes.

There is one control link per pair of peers: a two-way stream opened by the side that can dial, over
which all small messages of all rounds travel. Nothing ever dials a peer that can only dial out, and
losing the link is one event. Answers on the stream of each ``Join`` would need one mechanism per
message.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from averaging.errors import BulkRefused
from averaging.live.streams.bulk import HEADER_MAX_BYTES, Bulk, TransportSettings, Uplink
from averaging.live.streams.questions import RELAYED
from averaging.rules.line_speed import paired
from dht.errors import HostClosed, PeerUnreachable, StreamBroken
from dht.host import Messaging, Stream
from dht.identity import PeerId, RunId
from dht.limits import Rate
from dht.wrapped_host import REASON_MAX_BYTES, REFUSED

logger = logging.getLogger(__name__)

_PING = 0
_MESSAGE = 1
_PING_FRAME = bytes([_PING])
_MESSAGE_PREFIX = bytes([_MESSAGE])

MESSAGE_MAX_BYTES = 64 << 10
OPEN_TIMEOUT_S = 10.0
LINKS_MAX = 512
"""Peers with a link, in all. The longest unused one gives way, established peers last."""


def control_protocol(run: RunId) -> str:
    """The protocol of links, over which all small messages travel."""
    return f"shoal/{run}/control/1"


def bulk_protocol(run: RunId) -> str:
    """The protocol of bulk streams, over which slices travel."""
    return f"shoal/{run}/bulk/2"


@dataclass(slots=True, eq=False)
class _LinkStream:
    stream: Stream
    opened_by_me: bool
    used_at: float
    ending: bool = False
    """True once it said END, or was dropped on purpose: nothing is lost when it ends."""
    said_at: float = 0.0
    """Time at which something was last sent on it."""
    is_sending: bool = False
    """True while a task sends what could not be sent at once: nothing may overtake."""
    failure: str | None = None
    """The reason why nothing can be sent on it."""

    @property
    def takes_more(self) -> bool:
        """True if something may be sent on it now."""
        return not (self.ending or self.is_sending)


@dataclass(slots=True, eq=False)
class _Link:
    """Everything between this peer and another one: queued messages and open streams."""

    peer: PeerId
    waiting: deque[bytes] = field(default_factory=deque)
    waiting_bytes: int = 0
    streams: list[_LinkStream] = field(default_factory=list)
    """The first one, the newest, is spoken on; all are listened to."""
    dialling: bool = False
    used_at: float = 0.0

    def forget_waiting(self) -> int:
        dropped = len(self.waiting)
        self.waiting.clear()
        self.waiting_bytes = 0
        return dropped


class Transport:
    """Control links and bulk streams of one peer in one run.

    ``message(peer, bytes)`` is called for everything that arrives, ``lost(peer,
    reason)`` whenever something said to that peer may not have arrived. Both
    are plain functions: they return at once.
    """

    def __init__(
        self,
        host: Messaging,
        *,
        run: RunId,
        message: Callable[[PeerId, bytes], None],
        lost: Callable[[PeerId, str], None],
        bulk: Callable[[Bulk, bytes], Awaitable[None]],
        settings: TransportSettings | None = None,
        prefers: Callable[[PeerId], bool] = lambda peer: False,
        uplink: Uplink | None = None,
    ) -> None:
        """``prefers``: whether this peer keeps its link when there are too many.

        ``uplink``: the order of what bulk streams send.
        """
        self.host = host
        self.settings = settings or TransportSettings()
        self.counters: Counter[str] = Counter()
        self._message = message
        self._lost = lost
        self._bulk = bulk
        self._control_protocol = control_protocol(run)
        self._bulk_protocol = bulk_protocol(run)
        self._links: dict[PeerId, _Link] = {}
        self._kept: frozenset[PeerId] = frozenset()
        self._prefers = prefers
        self._received = Rate[PeerId](
            self.settings.received_per_s, self.settings.received_burst, debt=math.inf
        )
        self._uplink = uplink or Uplink()
        self.up, self.down = paired()
        """Speeds of this peer's line, as measured on bulk streams."""
        self._tasks: asyncio.TaskGroup | None = None
        self._own: set[asyncio.Task[Any]] = set()
        self._closing = False

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Serve, with every task in ``tasks``: a bug in one of them ends the group."""
        self._tasks = tasks
        await self.host.serve_streams(self._control_protocol, self._serve_link)
        await self.host.serve_streams(self._bulk_protocol, self._serve_bulk)
        self._spawn(self._keep_links(), "transport keep links")

    async def close(self) -> None:
        """End every task and drop every stream. Messages that wait are not sent."""
        self._closing = True
        for link in self._links.values():
            link.forget_waiting()
            for held in link.streams:
                held.stream.abort()
        pending = [task for task in self._own if task is not asyncio.current_task()]
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)
        self._links.clear()

    def _spawn(self, work: Awaitable[None], name: str) -> asyncio.Task[None]:
        assert self._tasks is not None, "Transport.start() comes first"
        task: asyncio.Task[None] = self._tasks.create_task(work, name=name)  # type: ignore[arg-type]
        self._own.add(task)
        task.add_done_callback(self._own.discard)
        return task

    # -- control links ------------------------------------------------------------------------

    def send(self, peer: PeerId, message: bytes) -> None:
        """Queue ``message`` for ``peer``; it arrives at most once. Never waits."""
        if len(message) > MESSAGE_MAX_BYTES:
            raise ValueError(
                f"a message of {len(message)} bytes to {peer}; the limit is {MESSAGE_MAX_BYTES}"
            )
        if self._closing:
            return
        if peer == self.host.peer_id:
            raise ValueError("a peer does not send messages to itself")
        link = self._link(peer)
        link.used_at = now = self._now
        if self._say_at_once(link, message, now):
            return
        link.waiting.append(message)
        link.waiting_bytes += len(message)
        dropped = 0
        while (
            len(link.waiting) > self.settings.queue_max_messages
            or link.waiting_bytes > self.settings.queue_max_bytes
        ):
            # The newest says more about the present than the oldest.
            link.waiting_bytes -= len(link.waiting.popleft())
            dropped += 1
        if dropped:
            self.counters["messages_dropped"] += dropped
            self._lost(peer, "its queue is full: it reads too slowly")
        self._speak(link)
        self._dial_if_needed(link)

    def _say_at_once(self, link: _Link, message: bytes, now: float) -> bool:
        """Send a message without a task, which is there for slow readers."""
        if link.waiting or not link.streams:
            return False
        held = link.streams[0]
        if not (held.takes_more and held.stream.send_now(_MESSAGE_PREFIX, message)):
            return False
        held.used_at = held.said_at = now
        self.counters["messages_sent"] += 1
        return True

    def linked(self) -> tuple[PeerId, ...]:
        """The peers with an open link."""
        return tuple(sorted(peer for peer, link in self._links.items() if link.streams))

    def keep(self, peers: Iterable[PeerId]) -> None:
        """Hold links open to these peers. For a peer that nobody can dial."""
        self._kept = frozenset(peers) - {self.host.peer_id}
        for peer in sorted(self._kept):
            self._dial_if_needed(self._link(peer))

    def _link(self, peer: PeerId) -> _Link:
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = _Link(peer, used_at=self._now)
            if len(self._links) > LINKS_MAX:
                self._evict(besides=peer)
        return link

    def _evict(self, *, besides: PeerId) -> None:
        idle = min(
            (link for peer, link in self._links.items() if peer not in self._kept | {besides}),
            key=lambda link: (self._prefers(link.peer), link.used_at, link.peer),
            default=None,
        )
        if idle is None:
            return
        unsaid = idle.forget_waiting()
        for held in idle.streams:
            held.ending = True
            held.stream.abort()
        del self._links[idle.peer]
        if unsaid:
            self._lost(idle.peer, f"more than {LINKS_MAX} links")

    def _dial_if_needed(self, link: _Link) -> None:
        wanted = bool(link.waiting) or link.peer in self._kept
        if wanted and not link.streams and not link.dialling and not self._closing:
            link.dialling = True
            self._spawn(self._dial(link), f"link to {link.peer}")

    async def _dial(self, link: _Link) -> None:
        try:
            stream = await self._open(link.peer, self._control_protocol)
        except (PeerUnreachable, StreamBroken, HostClosed) as error:
            link.dialling = False
            self.counters["dials_failed"] += 1
            if link.streams:
                return  # it dialled us meanwhile
            link.forget_waiting()
            self._lost(link.peer, str(error))
            return
        link.dialling = False
        await self._hold(link, _LinkStream(stream, True, self._now, said_at=self._now))

    async def _open(self, peer: PeerId, protocol: str, *, bulk: bool = False) -> Stream:
        timeout_s = OPEN_TIMEOUT_S
        return await self.host.open_stream(peer, protocol, timeout_s=timeout_s, bulk=bulk)

    async def _serve_link(self, stream: Stream) -> None:
        if self._closing:
            return
        link = self._link(stream.remote)
        # Who opens a link has none that works: one that it opened before leads nowhere any more, as
        # after a change of its address. To wait for its silence would lose what is said meanwhile.
        for earlier in [held for held in link.streams if not held.opened_by_me]:
            earlier.stream.abort()
        held = _LinkStream(stream, False, self._now, said_at=self._now)
        await self._in_group(self._hold(link, held))

    async def _in_group(self, work: Awaitable[None]) -> None:
        """Run a handler so that a bug in it ends our task group, and is not the host's to swallow.

        The host has a task for each handler; a second one for each would be half of all tasks.
        """
        task = asyncio.current_task()
        assert task is not None
        self._own.add(task)
        try:
            await work
        except Exception as error:
            self._spawn(_raise(error), "bug in a handler")
        finally:
            self._own.discard(task)

    async def _hold(self, link: _Link, held: _LinkStream) -> None:
        """Listen on one stream of a link until it breaks or is no longer needed."""
        link.streams.insert(0, held)
        self._speak(link)
        began, reason = self._now, None
        try:
            await self._listen(link, held)
        except (StreamBroken, HostClosed) as broken:
            reason = held.failure or str(broken)
        finally:
            held.stream.abort()
            link.streams.remove(held)
        if reason is not None and not held.ending and not self._closing:
            self._lost(link.peer, reason)
        if self._links.get(link.peer) is link:
            self._speak(link)
            # One that broke soon may be refused, as by a peer that does not admit this one: it is
            # opened again with the next heartbeat, or by the next message.
            if link.waiting or self._now - began >= self.settings.heartbeat_s:
                self._dial_if_needed(link)

    def _speak(self, link: _Link) -> None:
        """Send what waits for a link on its newest stream. One that ends is waited for."""
        if link.waiting and link.streams and link.streams[0].takes_more:
            self._send(link, link.streams[0])

    def _send(self, link: _Link, held: _LinkStream, *first: bytes) -> None:
        held.is_sending = True
        self._spawn(self._send_all(link, held, *first), f"send to {link.peer}")

    async def _send_all(self, link: _Link, held: _LinkStream, *first: bytes) -> None:
        """Send a frame, if there is one, and then what waits for the link."""
        timeout_s = self.settings.silence_max_s
        try:
            if first:
                await held.stream.send(*first, timeout_s=timeout_s)
            while link.waiting and link.streams and link.streams[0] is held:
                message = link.waiting.popleft()
                link.waiting_bytes -= len(message)
                held.used_at = held.said_at = link.used_at = self._now
                self.counters["messages_sent"] += 1
                await held.stream.send(_MESSAGE_PREFIX, message, timeout_s=timeout_s)
        except (StreamBroken, HostClosed) as broken:
            held.failure = str(broken)
            held.stream.abort()  # who listens on it hears the last
        finally:
            held.is_sending = False

    async def _end(self, held: _LinkStream) -> None:
        """Say END. Messages that were sent before it arrives are still read."""
        try:
            await held.stream.finish(timeout_s=self.settings.silence_max_s)
        except (StreamBroken, HostClosed):
            held.stream.abort()

    def _tend(self, link: _Link, held: _LinkStream, now: float) -> None:
        """Say that a stream is alive, or end it if it is not used any more."""
        if not held.takes_more:
            return
        settings = self.settings
        is_wanted = link.peer in self._kept or now - held.used_at <= settings.idle_max_s
        if held.opened_by_me and not is_wanted:
            held.ending = True
            self._spawn(self._end(held), f"end of a link to {link.peer}")
        elif now - held.said_at >= settings.heartbeat_s / 2:
            held.said_at = now
            if not held.stream.send_now(_PING_FRAME):
                self._send(link, held, _PING_FRAME)

    async def _listen(self, link: _Link, held: _LinkStream) -> None:
        while True:
            frame = await held.stream.receive(timeout_s=self.settings.silence_max_s)
            if frame is None:
                held.ending = True  # said END: nothing was lost
                return
            if frame == _PING_FRAME:
                continue
            if frame[:1] == REFUSED and len(frame) <= 1 + REASON_MAX_BYTES:
                raise StreamBroken(link.peer, frame[1:].decode("utf-8", "replace"))
            if len(frame) > MESSAGE_MAX_BYTES + 1 or frame[:1] != _MESSAGE_PREFIX:
                self.counters["frames_refused"] += 1
                raise StreamBroken(link.peer, f"a link frame of {len(frame)} bytes, unknown kind")
            now = self._now
            held.used_at = link.used_at = now
            self._message(link.peer, frame[1:])
            self._received.spend(link.peer, now)
            if (pause_s := self._received.wait_s(link.peer, now)) > 0:
                self.counters["senders_slowed"] += 1
                await asyncio.sleep(pause_s)

    async def _keep_links(self) -> None:
        """Reopen kept links that broke, and say that the others are alive. Ordinary ones are opened
        by the next message."""
        while True:
            await asyncio.sleep(self.settings.heartbeat_s)
            for peer in sorted(self._kept):
                self._dial_if_needed(self._link(peer))
            now = self._now
            horizon = now - self.settings.idle_max_s
            for peer, link in list(self._links.items()):
                for held in list(link.streams):
                    self._tend(link, held, now)
                gone = not (link.streams or link.waiting or link.dialling)
                if gone and link.used_at < horizon and peer not in self._kept:
                    del self._links[peer]

    # -- bulk streams -------------------------------------------------------------------------

    async def open_bulk(self, peer: PeerId, header: bytes) -> Bulk:
        """Open a bulk stream to ``peer`` and say what it is for.

        Raises ``PeerUnreachable``, ``StreamBroken``, or ``BulkRefused`` over a relay: a circuit
        is cut after 128 KiB.
        """
        if len(header) > HEADER_MAX_BYTES:
            raise ValueError(
                f"a bulk header of {len(header)} bytes; the limit is {HEADER_MAX_BYTES}"
            )
        stream = await self._open(peer, self._bulk_protocol, bulk=True)
        if stream.relayed:
            stream.abort()
            raise BulkRefused(peer, RELAYED)
        bulk = self._over(stream)
        try:
            await stream.send(header, timeout_s=self.settings.stall_max_s)
        except BaseException:
            stream.abort()
            raise
        return bulk

    def _over(self, stream: Stream) -> Bulk:
        return Bulk(stream, self.settings, up=self.up, down=self.down, uplink=self._uplink)

    async def _serve_bulk(self, stream: Stream) -> None:
        if not self._closing:
            await self._in_group(self._receive_bulk(stream))

    async def _receive_bulk(self, stream: Stream) -> None:
        peer = stream.remote
        bulk = self._over(stream)
        try:
            if stream.relayed:
                await bulk.refuse(RELAYED)
                return
            header = await stream.receive(timeout_s=self.settings.stall_max_s)
            if header is None or len(header) > HEADER_MAX_BYTES:
                await bulk.refuse("no header, or one over the limit")
                return
            bulk.heard_at = self._now
            await self._bulk(bulk, header)
        except (StreamBroken, HostClosed) as error:
            logger.debug("bulk_broken peer=%s reason=%s", peer, error)
        finally:
            stream.abort()


async def _raise(error: Exception) -> None:
    raise error
