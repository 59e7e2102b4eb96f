"""A learner without torch: numpy parameters on a quadratic problem, and swarms of such learners.

Everybody minimises the distance to an own target; the common minimum is the mean of the
targets. It adopts versions as a real one does, so tests see what a trainer would.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from averaging.guard.door import Defences
from averaging.guard.kept_proofs import ProofShelf
from averaging.guard.loss_gate import LossGate
from averaging.guard.spot_checking import Judge
from averaging.history.adoption import Parting
from averaging.history.state import FragmentState
from averaging.live.averager import Averager
from averaging.live.learner_port import Progress, Snapshot
from averaging.live.settings import AveragerSettings, Participant, RunTerms, Surroundings
from averaging.live.slices.watch import Watch
from averaging.live.states.state_files import StateFiles
from averaging.numbers.arrays import Float32s
from averaging.numbers.layout import Layout, TensorSpec
from averaging.rules.due import DuePolicy
from averaging.rules.orders import RoundOrders
from averaging.rules.peer_view import PeerView
from averaging.rules.policy import RoundPolicy
from averaging.rules.quorum import QuorumPolicy
from averaging.rules.sites import site_name
from dht.host import Host
from dht.identity import Identity, PeerId, RunId
from dht.memory.host import MemoryNetwork, identity_of
from tests.averaging.virtual.truth import Learner

RUN = RunId("quadratic")


def layout_of(fragments: int) -> Layout:
    return Layout.build(
        [
            TensorSpec("embedding", (64, 16)),
            *(TensorSpec(f"block.{index}.weight", (12, 20)) for index in range(8)),
            *(TensorSpec(f"block.{index}.bias", (20,)) for index in range(8)),
            TensorSpec("head", (16, 64)),
        ],
        fragments,
        embeddings=["embedding"],
        heads=["head"],
    )


LAYOUT = layout_of(2)
"""Fragments wait for each other and share links whether there are two or more, and each of them has
its rounds: a swarm with four takes nearly twice the processor time."""

NOISE = np.float32(0.01)

POLICY = RoundPolicy(
    due=DuePolicy(cycle_steps=8, fragments=len(LAYOUT.fragments)),
    quorum=QuorumPolicy(wait_s=10.0),
    slice_bytes_min=128,
    codec="int8",
    snapshot_s=10.0,
    upload_s=10.0,
    round_s=60.0,
)


def start_of(layout: Layout) -> list[FragmentState]:
    """Version 0, the same for everybody: what founders make of the run's seed."""
    rng = np.random.default_rng(0)
    return [
        FragmentState.founded(layout.hash, f.index, rng.standard_normal(f.size, dtype=np.float32))
        for f in layout.fragments
    ]


class QuadraticLearner:
    """A ``LearnerPort``. ``train`` makes a step now and then; nothing ever waits for averaging."""

    def __init__(
        self,
        layout: Layout,
        *,
        seed: int,
        step_time_s: float = 1.0,
        batch_tokens: int = 100,
        rate: float = 0.05,
        states: Sequence[FragmentState] = (),
    ) -> None:
        self.layout = layout
        self.step_time_s = step_time_s
        self.batch_tokens = batch_tokens
        self.rate = rate
        self.is_noisy = True
        """Without, a step of a million values takes a tenth of the time."""
        self.rests = False
        """True while the learner makes no steps: it is at a safe point all the time."""
        self.step = 0
        self.went_through: list[tuple[int, int]] = []
        """Fragments and versions on the way of a replay."""
        self.wants_the_way = False
        self.released = 0
        self.on_step: Callable[[], object] = lambda: None
        """Called after each step, as the doorbell of a trainer calls the agent."""
        self._stepped = asyncio.Event()
        self._rng = np.random.default_rng(seed)
        self.parts: dict[int, Learner] = {}
        self.walked = {f.index: np.zeros(f.size, np.float32) for f in layout.fragments}
        """The sum of all steps made."""
        self.targets = [
            self._rng.standard_normal(f.size, dtype=np.float32) for f in layout.fragments
        ]
        for state in states:
            self._begin(state)

    def _begin(self, state: FragmentState) -> None:
        target = self.targets[state.fragment]
        self.parts[state.fragment] = Learner(state, target, self.batch_tokens, step=self.step)

    async def train(self) -> None:
        while True:
            await asyncio.sleep(self.step_time_s)
            if not self.rests:
                self.train_once()
                self.on_step()

    def train_once(self) -> None:
        self.step += 1
        self._stepped.set()
        self._stepped = asyncio.Event()
        for fragment, part in self.parts.items():
            before = part.values.copy()
            part.train(self.rate)
            if self.is_noisy:
                noise = self._rng.standard_normal(before.size, dtype=np.float32)
                part.values -= np.float32(self.rate) * NOISE * noise
            self.walked[fragment] += part.values - before

    def distance(self, optimum: Sequence[Float32s]) -> float:
        """Root mean square distance of the parameters from ``optimum``."""
        squares = sum(
            float(np.square(part.values - optimum[index]).sum())
            for index, part in self.parts.items()
        )
        return float(np.sqrt(squares / self.layout.size))

    def parameters(self, fragment: int) -> Float32s:
        return self.parts[fragment].values

    def pending(self, fragment: int) -> int:
        return self.parts[fragment].pending

    def discarded(self, fragment: int) -> int:
        return self.parts[fragment].discarded

    # LearnerPort

    def progress(self) -> Progress:
        return Progress(
            step=self.step,
            tokens=self.step * self.batch_tokens,
            step_time_s=self.step_time_s,
            batch_tokens_max=self.batch_tokens,
        )

    async def snapshot(self, fragment: int, *, timeout_s: float) -> Snapshot | None:
        part = self.parts.get(fragment)
        if part is None:
            return None
        assert part.snapshot is None, "one snapshot at a time"
        # The next safe point is the end of the step that is under way.
        try:
            async with asyncio.timeout(timeout_s):
                if not self.rests:
                    await self._stepped.wait()
        except TimeoutError:
            return None
        offer = part.offer()
        assert part.snapshot is not None
        return Snapshot(
            base=part.base,
            values=part.snapshot,
            base_version=offer.base_version,
            base_lineage=offer.base_lineage,
            mark=offer.mark,
            steps=offer.steps,
            tokens=offer.tokens,
        )

    def adopt(self, fragment: int, state: FragmentState, *, contained: int | None) -> None:
        if fragment in self.parts:
            self.parts[fragment].adopt(state, contained=contained)
        else:
            self._begin(state)

    def rebase(self, fragment: int, state: FragmentState, parting: Parting) -> int | None:
        return self.parts[fragment].rebase(state, parting)

    def discard(self, fragment: int, state: FragmentState, *, reason: str) -> None:
        self.parts[fragment].discard(state)

    def passed(self, fragment: int, state: FragmentState) -> None:
        self.went_through.append((fragment, state.version))

    def moved(self, fragment: int, before: FragmentState, after: FragmentState) -> None:
        own = self.parts[fragment].own
        if own.base is before.theta:
            own.base = after.theta

    def misses_base(self, fragment: int) -> bool:
        return self.wants_the_way

    def write_off(self, fragment: int, tokens: int) -> None:
        self.parts[fragment].written_off += tokens

    def release(self, fragment: int) -> None:
        self.released += 1
        self.parts[fragment].release()


@dataclass(eq=False)
class Peer:
    """One member of a swarm in memory."""

    name: str
    host: Host
    averager: Averager
    learner: QuadraticLearner | None
    view: dict[PeerId, PeerView]
    events: list[tuple[float, str, Mapping[str, Any]]] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    training: asyncio.Task[None] | None = None
    issued: Mapping[bytes, RoundOrders] = field(default_factory=dict)
    """Directives of the run's owner, by their bytes."""

    def take_directive(self, data: bytes) -> bool:
        """Follow a directive if it is newer; ``False`` if it is older than the one followed."""
        orders, mine = self.issued.get(data), self.averager.terms.book.orders
        number = 0 if orders is None or orders.stamp is None else orders.stamp.number
        known = 0 if mine.stamp is None else mine.stamp.number
        if orders is not None and number > known:
            self.averager.follow(orders)
        return number >= known

    @property
    def id(self) -> PeerId:
        return self.host.peer_id

    def told(self, event: str) -> list[Mapping[str, Any]]:
        return [fields for _, name, fields in self.events if name == event]

    def versions(self) -> list[int | None]:
        return [None if state is None else state.version for state in self.averager.states]

    async def stop(self) -> None:
        for task in (self.training, self.task):
            if task is not None:
                task.cancel()
        running = [task for task in (self.training, self.task) if task is not None]
        if running:
            await asyncio.wait(running)
        for task in running:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error


class Swarm:
    """Averagers with quadratic learners on one in-memory network, each in view of the others."""

    def __init__(self, network: MemoryNetwork, *, layout: Layout = LAYOUT) -> None:
        self.network = network
        self.layout = layout
        self.peers: list[Peer] = []
        self.start = start_of(layout)

    async def add(
        self,
        name: str,
        *,
        policy: RoundPolicy | None = None,
        settings: AveragerSettings | None = None,
        step_time_s: float = 1.0,
        trains: bool = True,
        knows_start: bool = True,
        reachable: bool = True,
        keeps: bool = True,
        founder: bool = False,
        site: str | None = None,
        incarnation: int = 1,
        states: Sequence[FragmentState] | None = None,
        shelf: ProofShelf | None = None,
        wrap: Callable[[Host], Host] = lambda host: host,
        issued: Mapping[bytes, RoundOrders] | None = None,
        gate: LossGate | None = None,
        judge: Judge | None = None,
        state_files: StateFiles | None = None,
        watch: Watch | None = None,
    ) -> Peer:
        """A peer that everybody else sees at once, as if presence had done its work.

        ``policy``: not set, ``POLICY`` with the number of fragments of the layout.
        """
        if policy is None:
            due = replace(POLICY.due, fragments=len(self.layout.fragments))
            policy = replace(POLICY, due=due)
        identity: Identity = identity_of(name)
        host = wrap(self.network.host(identity))
        if not reachable:
            self.network.dial_out_only(identity.peer_id)
        known = list(states) if states is not None else []
        if states is None and knows_start:
            # Each has numbers of its own: averaging steps on its momentum in place.
            known = [replace(state, momentum=state.momentum.copy()) for state in self.start]
        learner = None
        if trains:
            learner = QuadraticLearner(
                self.layout, seed=len(self.peers) + 1, step_time_s=step_time_s, states=known
            )
        events: list[tuple[float, str, Mapping[str, Any]]] = []
        loop = asyncio.get_running_loop()
        view: dict[PeerId, PeerView] = {}

        def ban(peer: PeerId, what: str) -> None:
            view.pop(peer, None)

        def on_event(event: str, fields: Mapping[str, Any]) -> None:
            events.append((loop.time(), event, fields))
            if event == "written_off" and learner is not None:
                learner.write_off(fields["fragment"], fields["tokens"])

        def take_directive(data: bytes) -> bool:
            return peer.take_directive(data)

        averager = Averager(
            host,
            learner,
            me=Participant(
                identity=identity,
                incarnation=incarnation,
                founder=founder,
                keeps=keeps,
                reachable=reachable,
                site=site,
            ),
            terms=RunTerms(RUN, self.layout, policy),
            around=Surroundings(
                view=view,
                state_files=state_files,
                take_directive=take_directive,
                draw_bits=random.Random(f"{name} {incarnation}").getrandbits,
                on_event=on_event,
                guard=Defences(gate=gate, judge=judge, shelf=shelf, on_convicted=ban),
                watch=watch or Watch(),
            ),
            states=known,
            settings=settings or AveragerSettings(progress_s=1.0),
        )
        if learner is not None:
            learner.on_step = averager.look
        peer = Peer(name, host, averager, learner, view, events)
        peer.issued = issued or {}
        for other in self.peers:
            for here, there in ((peer, other), (other, peer)):
                here.view[there.id] = PeerView(
                    first_seen=loop.time() - 1000.0,
                    heard_at=loop.time(),
                    reachable=there.averager.reachable,
                    trains=there.learner is not None,
                    keeps=there.learner is None and there.averager.keeps,
                    site=site_name(there.averager.me.site),
                    step_time_s=there.learner.step_time_s if there.learner else None,
                )
            if other.averager.reachable:
                await host.connect(other.id, await other.host.addresses(), timeout_s=10.0)
            elif reachable:
                await other.host.connect(peer.id, await host.addresses(), timeout_s=10.0)
        self.peers.append(peer)
        peer.task = asyncio.create_task(averager.run(), name=f"averager {name}")
        if learner is not None:
            peer.training = asyncio.create_task(learner.train(), name=f"learner {name}")
        return peer

    async def until(self, seen: Callable[[], bool], *, within_s: float) -> None:
        """Let time pass until something is seen. Fails when it is not, within this time."""
        end = asyncio.get_running_loop().time() + within_s
        while not seen():
            assert asyncio.get_running_loop().time() < end, f"not seen within {within_s:g} s"
            await self.live(1.0)

    async def live(self, seconds: float) -> None:
        """Let time pass, with everybody who runs heard of every five seconds."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while loop.time() < until:
            running = [peer for peer in self.peers if peer.task and not peer.task.done()]
            for peer in self.peers:
                for other in running:
                    if other is not peer and other.id in peer.view:
                        heard = msgspec.structs.replace(peer.view[other.id], heard_at=loop.time())
                        peer.view[other.id] = heard
            await asyncio.sleep(min(5.0, until - loop.time()))
            for peer in self.peers:
                if peer.task is not None and peer.task.done() and not peer.task.cancelled():
                    peer.task.result()

    def check(self) -> None:
        """Equal lineages have equal bits, and every token has a fate."""
        bits: dict[bytes, bytes] = {}
        for peer in self.peers:
            for state in peer.averager.states:
                if state is None:
                    continue
                assert np.isfinite(state.theta).all(), f"{peer.name}: fragment {state.fragment}"
                digest = state.digest()
                assert bits.setdefault(state.lineage, digest) == digest, (
                    f"{peer.name}: fragment {state.fragment} v{state.version} has other bits"
                )

    @property
    def optimum(self) -> list[Float32s]:
        learners = [peer.learner for peer in self.peers if peer.learner is not None]
        return [
            np.mean([learner.targets[f.index] for learner in learners], axis=0)
            for f in self.layout.fragments
        ]


@asynccontextmanager
async def swarm(network: MemoryNetwork, *, layout: Layout = LAYOUT) -> AsyncIterator[Swarm]:
    """A swarm whose peers are all stopped at the end."""
    made = Swarm(network, layout=layout)
    try:
        yield made
    finally:
        for peer in made.peers:
            await peer.stop()
        for peer in made.peers:
            await peer.host.close()


def check_tokens(peers: Sequence[Peer]) -> None:
    """Every token has a fate: processed = merged + pending + discarded, fragment by fragment.

    A peer that is behind, or in doubt, may not know yet that its work was merged, so the furthest
    state decides.
    """
    for index in range(len(peers[0].averager.states)):
        states = [state for peer in peers if (state := peer.averager.states[index]) is not None]
        furthest = max(states, key=lambda state: state.merged.tokens)
        for peer in peers:
            learner = peer.learner
            assert learner is not None
            mark = furthest.merged.get(peer.id)
            merged = mark.tokens if mark is not None else 0
            processed = learner.step * learner.batch_tokens
            pending = learner.pending(index)
            own = peer.averager.states[index]
            assert own is not None
            if own.lineage != furthest.lineage:
                continue
            fate = merged + pending + learner.discarded(index)
            assert fate == processed, f"{peer.name}, fragment {index}: {fate} of {processed}"


def lineages(made: Swarm) -> list[set[bytes]]:
    """Return, for each fragment, the lineages that its peers stand on."""
    return [
        {state.lineage for peer in made.peers if (state := peer.averager.states[index])}
        for index in range(len(made.layout.fragments))
    ]
