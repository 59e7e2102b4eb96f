"""A learner without torch: numpy parameters on a quadratic problem, and swarms of such learners.

Everybody minimises the distance to an own target; the common minimum is the mean of the
targets. It adopts versions as a real one does, so tests see what a trainer would.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from averaging.guard.door import Defences
from averaging.guard.kept_proofs import ProofShelf
from averaging.guard.loss_gate import LossGate
from averaging.guard.spot_checking import Judge
from averaging.history.state import FragmentState, Pieces
from averaging.live.settings import AveragerSettings, RunTerms
from averaging.live.states.state_files import StateFiles
from averaging.numbers.arrays import Float32s
from averaging.numbers.layout import Layout, TensorSpec
from averaging.round.fetched_states import Life
from averaging.rules.due import DuePolicy
from averaging.rules.peer_view import PeerView
from averaging.rules.policy import RoundPolicy
from averaging.rules.quorum import QuorumPolicy
from averaging.rules.sites import site_name
from averaging.virtual import swarm as virtual
from averaging.virtual.keys import Keys
from averaging.virtual.swarm import PeerPlan, VirtualRun
from dht.host import Messaging
from dht.identity import PeerId, RunId, verify
from dht.memory.host import MemoryHost, MemoryNetwork, identity_of
from tests.averaging.virtual.membership import Everybody
from tests.averaging.virtual.truth import Learner, Port

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

SETTINGS = AveragerSettings(progress_s=1.0)


def start_of(layout: Layout) -> list[FragmentState]:
    """Version 0, the same for everybody: what founders make of the run's seed."""
    rng = np.random.default_rng(0)
    thetas = [rng.standard_normal(each.size, dtype=np.float32) for each in layout.fragments]
    return [
        FragmentState.founded(layout.hash, each.index, theta, Pieces.of(each, POLICY.mu).momentum)
        for each, theta in zip(layout.fragments, thetas, strict=True)
    ]


class QuadraticLearner(Port):
    """``train`` makes a step now and then; nothing ever waits for averaging."""

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
        super().__init__(step_time_s=step_time_s, batch_tokens=batch_tokens)
        self.layout = layout
        self.rate = rate
        self.is_noisy = True
        """Without, a step of a million values takes a tenth of the time."""
        self.went_through: list[tuple[int, int]] = []
        """Fragments and versions on the way of a replay."""
        self.wants_the_way = False
        self.released = 0
        self.on_step: Callable[[], object] = lambda: None
        """Called after each step, as the doorbell of a trainer calls the agent."""
        self._training: asyncio.Task[None] | None = None
        self._rng = np.random.default_rng(seed)
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

    def begin(self, peer: virtual.Peer) -> None:
        self.on_step = peer.stepped
        self._training = asyncio.get_running_loop().create_task(self.train())

    def end(self) -> None:
        if self._training is not None:
            self._training.cancel()

    async def train(self) -> None:
        while True:
            await asyncio.sleep(self.step_time_s)
            if not self.rests:
                self.train_once()
                self.on_step()

    def train_once(self) -> None:
        self.step += 1
        self.stepped()
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

    def adopt(self, fragment: int, state: FragmentState, *, contained: int | None) -> None:
        if fragment in self.parts:
            super().adopt(fragment, state, contained=contained)
        else:
            self._begin(state)

    def passed(self, fragment: int, state: FragmentState) -> None:
        self.went_through.append((fragment, state.version))

    def misses_base(self, fragment: int) -> bool:
        return self.wants_the_way

    def write_off(self, fragment: int, tokens: int) -> None:
        self.parts[fragment].written_off += tokens

    def release(self, fragment: int) -> None:
        self.released += 1
        super().release(fragment)


class Peer(virtual.Peer):
    """A member of a swarm whose events are kept."""

    learner: QuadraticLearner | None

    def __init__(self, swarm: Swarm, life: Life, *, nick: str, host: MemoryHost) -> None:
        """``host``: that below the one which the averager has."""
        self.nick = nick
        self.host = host
        self.events: list[tuple[float, str, Mapping[str, Any]]] = []
        super().__init__(swarm, life)

    @property
    def id(self) -> PeerId:
        return self.name

    def told(self, event: str) -> list[Mapping[str, Any]]:
        return [fields for _, name, fields in self.events if name == event]

    def versions(self) -> list[int | None]:
        return [None if state is None else state.version for state in self.averager.states]

    async def ended(self) -> None:
        """Stop it, and raise the error that has ended it before, if there is one."""
        self.stop()
        assert self.task is not None
        await asyncio.wait([self.task])
        if not self.task.cancelled():
            self.task.result()


class InView(Everybody):
    """Everybody has long seen all others. Who runs is heard of while the swarm ``live``s."""

    def begin(self, swarm: object) -> None: ...

    def look(self, peer: virtual.Peer, other: virtual.Peer, since: float = 0.0) -> None:
        peer.view[other.name] = PeerView(
            first_seen=peer.now() - 1000.0,
            heard_at=peer.now(),
            reachable=not other.plan.dial_out_only,
            trains=other.learner is not None and other.is_complete,
            arrives=other.learner is not None and not other.is_complete,
            keeps=other.learner is None,
            site=site_name(other.plan.site),
            step_time_s=other.plan.step_time_s if other.learner else None,
        )


@dataclass(frozen=True, slots=True)
class Wanted:
    """The things with which a test has a peer begin."""

    host: Messaging
    terms: RunTerms
    states: list[FragmentState]
    defences: Defences
    state_files: StateFiles | None


class Swarm(virtual.Swarm, virtual.Watch):
    """Averagers with quadratic learners on the network of a test, which adds them one by one."""

    def __init__(self, network: MemoryNetwork, *, layout: Layout = LAYOUT) -> None:
        self.peers: list[Peer] = []
        self.first = start_of(layout)
        run = VirtualRun(layout, POLICY, self.first, RUN, memory=network)
        self.in_view = InView()
        self.wanted: dict[PeerId, Wanted] = {}
        super().__init__(
            [],
            run,
            learner=self._quadratic,
            membership=self.in_view,
            watch=self,
            keys=Keys(verify=verify),
        )

    def host_of(self, name: PeerId) -> Messaging:
        return self.wanted[name].host

    def terms_of(self, name: PeerId) -> RunTerms:
        return self.wanted[name].terms

    def states_of(self, name: PeerId) -> list[FragmentState]:
        return self.wanted[name].states

    def defences(self, name: PeerId) -> Defences:
        return self.wanted[name].defences

    def around(self, name: PeerId) -> Mapping[str, Any]:
        wanted = self.wanted[name]

        def keeps_to_its_own(directive: bytes) -> bool:
            """No directive that others show is known; one is older than the own, if it has one."""
            return wanted.terms.book.orders.stamp is None

        return {"take_directive": keeps_to_its_own, "state_files": wanted.state_files}

    def _quadratic(
        self, swarm: object, name: PeerId, plan: PeerPlan, states: Sequence[FragmentState]
    ) -> QuadraticLearner:
        seed = len(self.peers) + 1
        return QuadraticLearner(self.layout, seed=seed, step_time_s=plan.step_time_s, states=states)

    async def add(
        self,
        nick: str,
        *,
        policy: RoundPolicy | None = None,
        settings: AveragerSettings | None = None,
        reachable: bool = True,
        knows_start: bool = True,
        incarnation: int = 1,
        states: Sequence[FragmentState] | None = None,
        wrap: Callable[[MemoryHost], Messaging] = lambda host: host,
        shelf: ProofShelf | None = None,
        gate: LossGate | None = None,
        judge: Judge | None = None,
        state_files: StateFiles | None = None,
        **plan: Any,
    ) -> Peer:
        """A peer that everybody else sees at once, as if presence had done its work.

        ``policy``: not set, ``POLICY`` with the number of fragments of the layout. ``plan``: more
        of the ``PeerPlan``.
        """
        if policy is None:
            due = replace(POLICY.due, fragments=len(self.layout.fragments))
            policy = replace(POLICY, due=due)
        key = identity_of(nick)
        made = PeerPlan(dial_out_only=not reachable, **plan)
        self.keys[key.peer_id], self.plans[key.peer_id] = key, made
        host = self.memory.host(key)
        if not reachable:
            self.memory.simulated.dial_out_only(key.peer_id)
        known = list(states) if states is not None else []
        if states is None and knows_start:
            pieces = [Pieces.of(fragment, policy.mu) for fragment in self.layout.fragments]
            known = [
                replace(state, momentum=np.zeros(each.momentum, np.float32))
                for state, each in zip(self.first, pieces, strict=True)
            ]
        self.wanted[key.peer_id] = Wanted(
            wrap(host),
            RunTerms(RUN, self.layout, policy),
            known,
            Defences(gate=gate, judge=judge, shelf=shelf),
            state_files,
        )
        self.of = replace(self.of, settings=settings or SETTINGS)
        peer = Peer(self, Life(key.peer_id, incarnation), nick=nick, host=host)
        self.membership.came(peer)
        for other in self.peers:
            if other.averager.reachable:
                await host.connect(other.id, await other.host.addresses(), timeout_s=10.0)
            elif reachable:
                await other.host.connect(peer.id, await host.addresses(), timeout_s=10.0)
        self.nodes[peer.id] = peer
        self.peers.append(peer)
        peer.start()
        return peer

    def told(self, peer: virtual.Peer, event: str, fields: Mapping[str, Any]) -> None:
        assert isinstance(peer, Peer)
        peer.events.append((self.now, event, fields))
        if event == "written_off" and peer.learner is not None:
            peer.learner.write_off(fields["fragment"], fields["tokens"])

    async def until(self, seen: Callable[[], bool], *, within_s: float) -> None:
        """Let time pass until something is seen. Fails when it is not, within this time."""
        end = self.now + within_s
        while not seen():
            assert self.now < end, f"not seen within {within_s:g} s"
            await self.live(1.0)

    async def live(self, seconds: float) -> None:
        """Let time pass, with everybody who runs heard of every five seconds."""
        until = self.now + seconds
        while self.now < until:
            running = [peer for peer in self.peers if peer.task and not peer.task.done()]
            for peer in self.peers:
                for other in running:
                    if other is not peer and other.name in peer.view:
                        self.in_view.look(peer, other)
            await asyncio.sleep(min(5.0, until - self.now))
            self.check_errors()

    def check(self) -> None:
        """Equal lineages have equal bits, and every token has a fate."""
        bits: dict[bytes, bytes] = {}
        for peer in self.peers:
            for state in peer.averager.states:
                if state is None:
                    continue
                assert np.isfinite(state.theta).all(), f"{peer.nick}: fragment {state.fragment}"
                digest = state.digest()
                assert bits.setdefault(state.lineage, digest) == digest, (
                    f"{peer.nick}: fragment {state.fragment} v{state.version} has other bits"
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
            await peer.ended()
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
            assert fate == processed, f"{peer.nick}, fragment {index}: {fate} of {processed}"


def lineages(made: Swarm) -> list[set[bytes]]:
    """Return, for each fragment, the lineages that its peers stand on."""
    return [
        {state.lineage for peer in made.peers if (state := peer.averager.states[index])}
        for index in range(len(made.layout.fragments))
    ]
