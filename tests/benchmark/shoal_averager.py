"""Shoal's averager as a peer of ``averaging``: real host, real links, no trainer."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import numpy as np
import uvloop
from multiaddr import Multiaddr

from averaging.guard.door import Defences
from averaging.history.adoption import Parting
from averaging.history.state import FragmentState
from averaging.live.averager import Averager
from averaging.live.learner_port import Progress, Snapshot
from averaging.live.settings import AveragerSettings, RunTerms, Surroundings
from averaging.live.settings import Participant as RunParticipant
from averaging.live.streams.bulk import TransportSettings
from averaging.numbers.arithmetic import Moved, Numbers, Weighted
from averaging.numbers.arrays import Float32s, uninitialised
from averaging.numbers.chunks import Cutting
from averaging.numbers.codec import Scratch
from averaging.numbers.layout import Layout, TensorSpec
from averaging.numbers.outer import Step
from averaging.round.contributing import Rest
from averaging.rules.due import DuePolicy
from averaging.rules.peer_view import PeerView
from averaging.rules.policy import RoundPolicy
from averaging.rules.quorum import QuorumPolicy
from dht.addresses import peer_of
from dht.host import Stream
from dht.identity import Identity, PeerId, RunId
from dht.libp2p.hivemind_host import HivemindHost, HostSettings
from dht.libp2p.lane.connection import LaneSettings
from peer.extras.compiled.loading import can_compile, use_compiled_codecs
from tests.benchmark.participant import Participant, Reply, Setup, contribution

_R = TypeVar("_R")

_RUN = RunId("bench")
_FLOOR = "shoal/bench/floor"
_MEET = "shoal/bench/meet"
_ANSWER_S = 120.0


class _ConstantPort:
    """A learner that always offers the same numbers and notes when it gets the next state."""

    def __init__(self, values: Float32s, state: FragmentState, *, feedback: bool) -> None:
        """``feedback``: offered numbers are written to, so they are a copy."""
        self.values = values
        self.feeds_back = feedback
        self.offered = values.copy() if feedback else values
        self.state = state
        self.step = 0
        self.adopted = asyncio.Event()
        self.adopted_at = 0.0

    def progress(self) -> Progress:
        return Progress(step=self.step, tokens=self.step, step_time_s=1.0, batch_tokens_max=1 << 20)

    async def snapshot(self, fragment: int, *, timeout_s: float) -> Snapshot | None:
        state = self.state
        if self.feeds_back:
            np.copyto(self.offered, self.values)
        return Snapshot(
            base=state.theta,
            values=self.offered,
            base_version=state.version,
            base_lineage=state.lineage,
            mark=self.step,
            steps=1,
            tokens=1,
        )

    def adopt(self, fragment: int, state: FragmentState, *, contained: int | None) -> None:
        self.adopted_at = time.perf_counter()
        self.state = state
        self.adopted.set()

    def rebase(self, fragment: int, state: FragmentState, parting: Parting) -> int | None:
        return None

    def discard(self, fragment: int, state: FragmentState, *, reason: str) -> None:
        self.state = state

    def passed(self, fragment: int, state: FragmentState) -> None:
        return

    def moved(self, fragment: int, before: FragmentState, after: FragmentState) -> None:
        return

    def misses_base(self, fragment: int) -> bool:
        return False

    def release(self, fragment: int) -> None:
        return


class ShoalParticipant(Participant):
    """An ``Averager`` with one fragment, on an event loop in a thread of its own."""

    def __init__(
        self, setup: Setup, meeting_point: str | None, *, direct: bool, compiled: bool
    ) -> None:
        """``direct``: with direct connections for bulk data; otherwise all traffic goes through
        the libp2p daemon. ``compiled``: with compiled codecs, if numba is installed."""
        super().__init__(setup)
        self._loop = uvloop.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True, name="loop").start()
        if compiled and can_compile():
            self._wait(use_compiled_codecs(niceness=0))
        self._peer = self._wait(_Peer.open(setup, meeting_point, direct=direct))

    def _wait(self, work: Coroutine[Any, Any, _R]) -> _R:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_ANSWER_S)

    @property
    def meeting_point(self) -> str:
        return str(self._peer.address)

    @property
    def direct_bytes_sent(self) -> int:
        lane = self._peer.host.lane
        return lane.sent_bytes if lane is not None else 0

    def ready(self) -> None:
        self._wait(self._peer.ready())
        gc.collect()

    def exchange(self) -> None:
        self._wait(self._peer.exchange())

    def result(self) -> Float32s:
        return self._peer.port.state.theta

    def close(self) -> None:
        self._wait(self._peer.close())

    def do_times(self) -> Reply:
        """Seconds of forming the group, and of everything after it."""
        peer = self._peer
        return {
            "forming": peer.entered_at - peer.began_at,
            "exchange": peer.port.adopted_at - peer.entered_at,
        }

    def do_encoded_bytes(self) -> Reply:
        peer = self._peer
        return {"bytes": sum(peer.encoded_sizes()) // 2}

    # The lower bound: the same bytes, and the same arithmetic, without a round around them.

    def do_floor(self, *, bulk: bool) -> Reply:
        return {"seconds": self._wait(self._peer.move_bytes(bulk=bulk))}

    def do_codec_time(self) -> Reply:
        """Encode one contribution, merge one slice, leave what both lose, step: in one thread.

        The second pass counts, as in a round: by then all memory has been touched.
        """
        numbers, scratch, peers = self._peer.numbers, Scratch(), self.setup.peers
        cutting = Cutting(self._peer.fragment, numbers.up, numbers.down, [1] * peers)
        port = self._peer.port
        base, values = port.state.theta, port.offered
        mine, merged = uninitialised(cutting.data_size), uninitialised(cutting.merged_size)
        weights = [1.0 / peers] * peers
        given = Moved(base, values, feedback=port.feeds_back)
        made = Step(base, np.empty_like(base), np.zeros_like(base))
        slot = cutting.slices[self.setup.index]
        rest = Rest(slot.values, np.empty(slot.size, np.float32)) if port.feeds_back else None
        # The other slices would come from other peers: this peer's displacement stands for them.
        for chunk in (chunk for chunks in cutting.chunks for chunk in chunks):
            moved = base[chunk.values] - values[chunk.values]
            numbers.down.codecs[0].encode(moved, chunk.sizes, merged[chunk.merged], scratch)
        for _ in range(2):
            began = time.perf_counter()
            for chunks in cutting.chunks:
                for chunk in chunks:
                    numbers.encode(chunk, given, mine[chunk.data], scratch)
            for chunk in cutting.chunks[self.setup.index]:
                payloads = Weighted([mine[chunk.data]] * peers, weights)
                lost = None if rest is None else rest.of(chunk)
                numbers.merge(chunk, payloads, merged[chunk.merged], scratch, rest=lost)
            if rest is not None:
                rest.leave(values, factor=peers)
            step_began = time.perf_counter()
            for chunks in cutting.chunks:
                for chunk in chunks:
                    numbers.step(chunk, merged[chunk.merged], made, scratch)
            ended = time.perf_counter()
        return {"seconds": ended - began, "step_seconds": ended - step_began}


class _Peer:
    """The averager with its host. Everything here runs in the event loop."""

    def __init__(
        self,
        setup: Setup,
        host: HivemindHost,
        identity: Identity,
        address: Multiaddr,
    ) -> None:
        self.host = host
        self.address = address
        self.began_at = 0.0
        self.entered_at = 0.0
        """Time at which the group of the last round was formed."""
        self._setup = setup
        self._met: dict[PeerId, Multiaddr] = {host.peer_id: address}
        self._view: dict[PeerId, PeerView] = {}
        columns = 1 if setup.values % 1000 else 1000
        layout = Layout.build([TensorSpec("weights", (setup.values // columns, columns))], 1)
        self.fragment = layout.fragments[0]
        up, down = setup.codecs
        policy = RoundPolicy(
            codec=up,
            codec_down=down,
            feedback=frozenset({"int2"}),
            eta=1.0,
            mu=0.0,
            due=DuePolicy(cycle_steps=1, fragments=1, scale_by_speed=False),
            quorum=QuorumPolicy(required="all"),
        )
        self.numbers = Numbers(
            codec=up, codec_down=down, merge=policy.merge, eta=policy.eta, mu=policy.mu
        )
        state = FragmentState.founded(layout.hash, 0, np.zeros(setup.values, np.float32), 0)
        self.port = _ConstantPort(
            contribution(setup), state, feedback=not policy.feedback.isdisjoint(setup.codecs)
        )
        self._averager = Averager(
            host,
            self.port,
            me=RunParticipant(identity=identity, incarnation=1),
            terms=RunTerms(_RUN, layout, policy),
            around=Surroundings(view=self._view, guard=Defences(), on_event=self._on_event),
            states=[state],
            # Without a replay log the measured memory is that of one round.
            settings=AveragerSettings(replay_bytes_max=0, transport=TransportSettings()),
        )
        self._running = asyncio.create_task(self._averager.run())

    @classmethod
    async def open(cls, setup: Setup, meeting_point: str | None, *, direct: bool) -> _Peer:
        identity = Identity.generate()
        settings = HostSettings(lane=LaneSettings() if direct else None)
        host = await HivemindHost.open(identity, settings)
        peer = cls(setup, host, identity, (await host.addresses())[0])
        await host.serve_calls(_MEET, peer._meet, request_max_bytes=1024)
        await host.serve_streams(_FLOOR, _swallow)
        if meeting_point is not None:
            await peer._connect(Multiaddr(meeting_point))
        return peer

    async def _meet(self, peer: PeerId, request: bytes) -> bytes:
        """Answer with the addresses of all peers that have called so far."""
        self._met[peer] = Multiaddr(request.decode())
        return "\n".join(str(address) for _, address in sorted(self._met.items())).encode()

    async def _connect(self, address: Multiaddr) -> None:
        """Connect to a peer and exchange the known addresses with it."""
        peer = peer_of(address)
        assert peer is not None
        await self.host.connect(peer, [address], timeout_s=20.0)
        self._met[peer] = address
        await self.host.call(peer, _MEET, str(self.address).encode(), timeout_s=20.0)

    def _on_event(self, event: str, fields: Any) -> None:
        if event == "entered":
            self.entered_at = time.perf_counter()

    async def ready(self) -> None:
        """Meet all peers, and release what the previous round has left."""
        me = self.host.peer_id
        while len(self._met) < self._setup.peers:
            first = next((peer for peer in self._met if peer != me), None)
            if first is not None:
                request = str(self.address).encode()
                answer = await self.host.call(first, _MEET, request, timeout_s=20.0)
                for address in map(Multiaddr, answer.decode().splitlines()):
                    if peer_of(address) not in self._met:
                        await self._connect(address)
            await asyncio.sleep(0.05)
        now = asyncio.get_running_loop().time()
        for peer in self._met:
            if peer != me:
                self._view[peer] = PeerView(first_seen=now, heard_at=now, step_time_s=1.0)
        # The buffers of the previous round would hide the memory that this one takes.
        async with asyncio.timeout(30.0):
            await self._averager.until(lambda: not self._averager.rounds_kept)
        self.port.adopted.clear()

    async def exchange(self) -> None:
        self.began_at = time.perf_counter()
        self.port.step += 10
        self._averager.look()
        async with asyncio.timeout(_ANSWER_S):
            await self.port.adopted.wait()

    def encoded_sizes(self) -> tuple[int, int]:
        """Bytes of a contribution and of what comes back."""
        sizes = self.fragment.unit_sizes
        return self.numbers.up.encoded_size(sizes), self.numbers.down.encoded_size(sizes)

    async def move_bytes(self, *, bulk: bool) -> float:
        """Seconds to send as many bytes as a round does: the slices of the other peers, and this
        peer's own merged slice to each of them."""
        peers = sorted(self._met)
        to = peers[(peers.index(self.host.peer_id) + 1) % len(peers)]
        data = uninitialised(512 << 10)
        left = (len(peers) - 1) * sum(self.encoded_sizes()) // len(peers)
        began = time.perf_counter()
        stream = await self.host.open_stream(to, _FLOOR, timeout_s=20.0, bulk=bulk)
        while left:
            size = min(left, len(data))
            await stream.send(data[:size], timeout_s=20.0)
            left -= size
        await stream.finish(timeout_s=20.0)
        seconds = time.perf_counter() - began
        stream.abort()
        return seconds

    async def close(self) -> None:
        self._running.cancel()
        await asyncio.wait([self._running])
        await self.host.close()


async def _swallow(stream: Stream) -> None:
    into = uninitialised(1 << 20)
    while await stream.receive_into(into, timeout_s=20.0) is not None:
        pass
