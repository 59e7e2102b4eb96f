"""Two peers with a lane each, on loopback; a plain function stands for the daemon between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from ipaddress import ip_address

from dht.errors import CallRefused, PeerUnreachable
from dht.host import FRAME_MAX_BYTES
from dht.identity import PeerId
from dht.libp2p.framing.frame_stream import FrameStream
from dht.libp2p.lane.connection import LaneSettings, Outside
from dht.libp2p.lane.lane import Lane
from dht.libp2p.lane.meetings import Meetings
from dht.libp2p.lane.wire import (
    CIRCUIT_PROTOCOL,
    LANE_PROTOCOL,
    PUNCH_PROTOCOL,
    SEEN_PROTOCOL,
    VIA_PROTOCOL,
    is_outer,
)
from tests.integration.loopback import WAIT_S

HERE = "127.0.0.1"
ANNA, BORIS, CLARA = PeerId("anna"), PeerId("boris"), PeerId("clara")
PATIENT = LaneSettings(wait_s=5.0)
"""Long limits, so that no stream falls back to the daemon on a busy machine."""


class End:
    """One peer: its lane, and what it serves."""

    def __init__(self, me: PeerId, settings: LaneSettings) -> None:
        self.me = me
        self.others: dict[PeerId, End] = {}
        self.at: Sequence[str] = (HERE,)
        self.asked = 0
        self.change: Callable[[bytes], bytes] = bytes
        self.served: asyncio.Queue[FrameStream] = asyncio.Queue()
        self.refuses: str | None = None
        self.open_lane(settings, OnLoopback(self))

    def open_lane(self, settings: LaneSettings, outside: Outside) -> None:
        self.lane = Lane(settings, outside=outside, serve=self.serve)
        self.meetings = Meetings(self.lane, outside)

    @property
    def connections(self) -> int:
        return len(list(self.lane._all()))

    def idle(self, peer: PeerId) -> int:
        """Number of unused connections to a peer."""
        known = self.lane._peers.get(peer)
        return 0 if known is None else len(known.idle)

    async def ask(self, peer: PeerId) -> bytes:
        self.asked += 1
        if peer not in self.others:
            raise PeerUnreachable(peer, "nobody knows it")
        return self.change(await self.others[peer].lane.offer(self.me))

    async def where(self, peer: PeerId) -> Sequence[str]:
        return self.at

    def serve(self, stream: FrameStream, protocol: str) -> str | None:
        if self.refuses is None:
            self.served.put_nowait(stream)
        return self.refuses


class OnLoopback(Outside):
    """A daemon whose peers are all on this machine."""

    def __init__(self, end: End, observers: Sequence[PeerId] = ()) -> None:
        self.end = end
        self.seen = HERE
        self.outside = observers
        self.called = 0

    async def where(self, peer: PeerId) -> Sequence[str]:
        return await self.end.where(peer)

    async def call(self, peer: PeerId, protocol: str, message: bytes) -> bytes:
        if protocol == SEEN_PROTOCOL:
            return (await self.seen_by(peer)).encode()
        if protocol == LANE_PROTOCOL:
            return await self.end.ask(peer)
        if peer not in self.end.others:
            raise PeerUnreachable(peer, "nobody knows it")
        other = self.end.others[peer]
        answer = {
            PUNCH_PROTOCOL: other.meetings.meet,
            VIA_PROTOCOL: other.meetings.come,
            CIRCUIT_PROTOCOL: other.lane.grant,
        }
        self.called += protocol == PUNCH_PROTOCOL
        try:
            return await answer[protocol](self.end.me, message)
        except ValueError as error:
            raise CallRefused(peer, protocol, str(error)) from error

    async def seen_by(self, peer: PeerId) -> str:
        return self.seen

    async def observers(self) -> Sequence[tuple[PeerId, str]]:
        return [(peer, HERE) for peer in (*self.outside, CLARA)]


def with_loopback(ip: str) -> bool:
    return is_outer(ip) or (ip != "" and ip_address(ip).is_loopback)


async def closed(*ends: End) -> None:
    for end in ends:
        await end.lane.close()
    await asyncio.sleep(0.01)


@asynccontextmanager
async def pair(
    here: LaneSettings = PATIENT, there: LaneSettings = PATIENT
) -> AsyncIterator[tuple[End, End]]:
    anna, boris = End(ANNA, here), End(BORIS, there)
    anna.others[BORIS], boris.others[ANNA] = boris, anna
    anna.lane.start([])
    boris.lane.start([HERE])
    try:
        yield anna, boris
    finally:
        await anna.lane.close()
        await boris.lane.close()
        await asyncio.sleep(0.01)  # transports close in the loop's next turns


async def opened(end: End, other: PeerId = BORIS) -> FrameStream:
    stream = await end.lane.open(other, "/test", timeout_s=WAIT_S)
    assert stream is not None
    return stream


async def one_round(anna: End, boris: End, size: int) -> None:
    """Exchange frames as a round does: bytes there, a short frame, bytes back, END."""
    ours = await opened(anna)
    theirs = await boris.served.get()
    assert (ours.remote, theirs.remote) == (BORIS, ANNA)
    assert not ours.relayed
    there, back = bytes(size), bytes(range(256))
    target = memoryview(bytearray(FRAME_MAX_BYTES))

    async def serve() -> None:
        assert await theirs.receive_into(target, timeout_s=WAIT_S) == size
        await theirs.send(back, timeout_s=WAIT_S)
        await theirs.finish(timeout_s=WAIT_S)
        theirs.abort()

    async def use() -> None:
        await ours.send(there, timeout_s=WAIT_S)
        assert await ours.receive(timeout_s=WAIT_S) == back
        assert await ours.receive(timeout_s=WAIT_S) is None
        ours.abort()

    await asyncio.gather(serve(), use())
