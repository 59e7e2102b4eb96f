"""Our own averager as a peer of ``shoal bench averaging``: a real host, real links, no trainer."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Coroutine
from typing import Any, ClassVar, TypeVar

import numpy as np
import uvloop
from multiaddr import Multiaddr

from averaging.history.adoption import Parting
from averaging.history.state import FragmentState
from averaging.live.averager import Averager
from averaging.live.bulk import TransportSettings
from averaging.live.learner_port import Progress, Snapshot
from averaging.live.settings import AveragerSettings, Participant, RunTerms, Surroundings
from averaging.numbers.arithmetic import Cutting, MergeNumbers, room
from averaging.numbers.arrays import Float32s
from averaging.numbers.codec import Scratch
from averaging.numbers.layout import Layout, TensorSpec
from averaging.rules.due import DuePolicy
from averaging.rules.grouping import PeerView
from averaging.rules.policy import RoundPolicy
from averaging.rules.quorum import QuorumPolicy
from dht.addresses import peer_of
from dht.host import Stream
from dht.identity import Identity, PeerId, RunId
from dht.libp2p.hivemind_host import HivemindHost, HostSettings
from dht.libp2p.lane import LaneSettings
from peer.lab.bench.worker import Reply, Worker, contribution

_R = TypeVar("_R")

_RUN = RunId("bench")
_FLOOR = "shoal/bench/floor"
_MEET = "shoal/bench/meet"
_ANSWER_S = 120.0


class _BenchPort:
    """A learner that always offers the same numbers, and says when it got the next state."""

    def __init__(self, values: Float32s, state: FragmentState) -> None:
        self.values = values
        self.state = state
        self.step = 0
        self.adopted = asyncio.Event()
        self.adopted_at = 0.0

    def progress(self) -> Progress:
        return Progress(step=self.step, tokens=self.step, step_time_s=1.0, batch_tokens_max=1 << 20)

    async def snapshot(self, fragment: int, *, timeout_s: float) -> Snapshot | None:
        state = self.state
        return Snapshot(
            base=state.theta,
            values=self.values,
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

    def misses_base(self, fragment: int) -> bool:
        return False

    def write_off(self, fragment: int, tokens: int, *, reason: str) -> None:
        return

    def release(self, fragment: int) -> None:
        return


class ShoalWorker(Worker):
    """An ``Averager`` with one fragment. The loop runs in a thread beside the command loop."""

    system = "shoal"
    lane: ClassVar[LaneSettings | None] = LaneSettings()

    def open(self, meeting_point: str | None) -> str | None:
        self._loop = uvloop.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True, name="loop").start()
        return self._wait(self._open(meeting_point))

    def _wait(self, work: Coroutine[Any, Any, _R]) -> _R:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_ANSWER_S)

    async def _open(self, meeting_point: str | None) -> str:
        identity = Identity.generate()
        self._host = await HivemindHost.open(identity, HostSettings(lane=self.lane))
        self._met: dict[PeerId, Multiaddr] = {}
        await self._host.serve_calls(_MEET, self._meet, request_max_bytes=1024)
        await self._host.serve_streams(_FLOOR, self._swallow)
        columns = 1000
        if self.values % columns:
            columns = 1
        spec = TensorSpec("weights", (self.values // columns, columns))
        layout = Layout.build([spec], 1)
        policy = RoundPolicy(
            codec=self.codec,
            eta=1.0,
            mu=0.0,
            due=DuePolicy(cycle_steps=1, fragments=1, scale_by_speed=False),
            quorum=QuorumPolicy(required="all"),
        )
        self._policy, self._fragment = policy, layout.fragments[0]
        state = FragmentState.founded(layout.hash, 0, np.zeros(self.values, np.float32))
        self._port = _BenchPort(contribution(self.index, self.values), state)
        self._view: dict[PeerId, PeerView] = {}
        self._entered_at = 0.0
        self._averager = Averager(
            self._host,
            self._port,
            me=Participant(identity=identity, incarnation=1),
            terms=RunTerms(_RUN, layout, policy),
            around=Surroundings(view=self._view, on_event=self._on_event),
            states=[state],
            # One round's payload: what follows is measured above what is held anyway.
            settings=AveragerSettings(replay_bytes_max=0, transport=TransportSettings()),
        )
        self._running = asyncio.create_task(self._averager.run())
        mine = str((await self._host.addresses())[0])
        if meeting_point is not None:
            first = Multiaddr(meeting_point)
            leader = peer_of(first)
            assert leader is not None
            await self._host.connect(leader, [first], timeout_s=20.0)
            await self._host.call(leader, _MEET, mine.encode(), timeout_s=20.0)
            self._met[leader] = first
        else:
            self._met[self._host.peer_id] = Multiaddr(mine)
        return mine

    async def _meet(self, peer: PeerId, request: bytes) -> bytes:
        """The first peer knows everybody and tells."""
        self._met[peer] = Multiaddr(request.decode())
        return "\n".join(str(address) for _, address in sorted(self._met.items())).encode()

    def _on_event(self, event: str, fields: Any) -> None:
        if event == "entered":
            self._entered_at = time.perf_counter()

    def ready(self) -> None:
        self._wait(self._ready())
        gc.collect()

    async def _ready(self) -> None:
        me = self._host.peer_id
        while len(self._met) < self.peers:
            first = next(iter(self._met))
            if first == me:
                await asyncio.sleep(0.05)
                continue
            mine = str((await self._host.addresses())[0])
            told = await self._host.call(first, _MEET, mine.encode(), timeout_s=20.0)
            for text in told.decode().splitlines():
                address = Multiaddr(text)
                peer = peer_of(address)
                assert peer is not None
                if peer not in self._met:
                    self._met[peer] = address
                    if peer != me:
                        await self._host.connect(peer, [address], timeout_s=20.0)
            await asyncio.sleep(0.05)
        now = asyncio.get_running_loop().time()
        for peer in self._met:
            if peer != me:
                self._view[peer] = PeerView(first_seen=now - 1000.0, heard_at=now, step_time_s=1.0)
        # What is kept of the round before is let go first, or this one would look too cheap.
        await self._averager.quiet(timeout_s=30.0)
        self._port.adopted.clear()

    def form(self) -> None:
        return

    def exchange(self) -> None:
        self._wait(self._exchange())

    async def _exchange(self) -> None:
        self._began_at = time.perf_counter()
        self._port.step += 10
        self._averager.look()
        async with asyncio.timeout(_ANSWER_S):
            await self._port.adopted.wait()

    def do_times(self) -> Reply:
        """How long forming the group took, and everything after it."""
        return {
            "forming": self._entered_at - self._began_at,
            "exchange": self._port.adopted_at - self._entered_at,
        }

    def do_encoded_bytes(self) -> Reply:
        return {"bytes": self._numbers.encoded_size(self._fragment.unit_sizes)}

    @property
    def _numbers(self) -> MergeNumbers:
        policy = self._policy
        return MergeNumbers(codec=self.codec, merge=policy.merge, eta=policy.eta, mu=policy.mu)

    def result(self) -> Float32s:
        return self._port.state.theta

    def close(self) -> None:
        self._wait(self._close())

    async def _close(self) -> None:
        self._running.cancel()
        await asyncio.wait([self._running])
        await self._host.close()

    # The floor: the same bytes, and the same arithmetic, without a round around them.

    @property
    def _moved_bytes(self) -> int:
        """What each peer sends: the others' slices, and its own one merged to all of them."""
        size = self._numbers.encoded_size(self._fragment.unit_sizes)
        return 2 * (self.peers - 1) * size // self.peers

    async def _swallow(self, stream: Stream) -> None:
        into = room(1 << 20)
        while await stream.receive_into(into, timeout_s=20.0) is not None:
            pass

    @property
    def sent_apart(self) -> int:
        lane = self._host.lane
        return lane.sent_bytes if lane is not None else 0

    def do_floor(self, *, bulk: bool) -> Reply:
        return {"seconds": self._wait(self._floor(bulk=bulk))}

    async def _floor(self, *, bulk: bool) -> float:
        everybody = sorted(self._met)
        to = everybody[(everybody.index(self._host.peer_id) + 1) % len(everybody)]
        data = room(512 << 10)
        left = self._moved_bytes
        began = time.perf_counter()
        stream = await self._host.open_stream(to, _FLOOR, timeout_s=20.0, bulk=bulk)
        while left:
            size = min(left, len(data))
            await stream.send(data[:size], timeout_s=20.0)
            left -= size
        await stream.finish(timeout_s=20.0)
        seconds = time.perf_counter() - began
        stream.abort()
        return seconds

    def do_codec_time(self) -> Reply:
        """One thread: encode mine, merge my slice of everybody's, take the outer step.

        The second time counts, as in a round: all memory has been touched before.
        """
        numbers, scratch = self._numbers, Scratch()
        cutting = Cutting(self._fragment, numbers, [1] * self.peers)
        base, values = self._port.state.theta, self._port.values
        mine, merged = room(cutting.data_size), room(cutting.data_size)
        weights = [1.0 / self.peers] * self.peers
        theta, momentum = np.empty_like(base), np.zeros_like(base)
        for _ in range(2):
            began = time.perf_counter()
            for chunks in cutting.chunks:
                for chunk in chunks:
                    numbers.encode(chunk, base, values, mine[chunk.data], scratch)
            for chunk in cutting.chunks[self.index]:
                payloads = [mine[chunk.data]] * self.peers
                numbers.merge(chunk, payloads, weights, merged[chunk.data], scratch)
            step_began = time.perf_counter()
            for chunks in cutting.chunks:
                for chunk in chunks:
                    # The other slices would come from others: mine stands for what is merged.
                    numbers.step(chunk, mine[chunk.data], base, theta, momentum, scratch)
            ended = time.perf_counter()
        return {"seconds": ended - began, "step_seconds": ended - step_began}


class DaemonWorker(ShoalWorker):
    """The same without a lane."""

    system = "daemon"
    lane = None
