"""Starts, stops and cuts off the peers of a simulated swarm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import blake3
import numpy as np

from averaging.history.standing import Standing
from averaging.history.state import FragmentState
from averaging.messages import link_claim
from averaging.numbers.arithmetic import encoded_size
from averaging.numbers.arrays import Float32s
from averaging.numbers.layout import Fragment
from averaging.round.fetched_states import Life
from averaging.round.interface.identity import Circumstances, Identity
from averaging.round.interface.inputs import Due, Leave, LineMeasured, MergeBeforeLeaving
from averaging.round.machine import FragmentRounds
from averaging.round.opinions.certificates import link_of
from averaging.rules.probation import Probation
from averaging.rules.spacing import Spacing
from averaging.simulated.fetching import REQUEST_BYTES
from averaging.simulated.node import FragmentNode
from averaging.simulated.wires import MARK_BYTES
from dht.identity import PeerId
from peer.simulate.learner import Seat, Trainee, directions, poisoned
from peer.simulate.membership import Table
from peer.simulate.names import codecs_of
from peer.simulate.peer import SimulatedPeer
from peer.simulate.slots import Environment, Slot
from peer.simulate.spot_checking import SpotChecking

REPLAY_BYTES_MAX = 64 << 20

LINK_IDLE_S = 120.0
"""A live peer closes a link that is unused for so long."""
LAST_OFFERS_S = 12.0
"""Time in which a peer that leaves has its work merged, and ..."""
DRAIN_S = 12.0
"""... in which its last rounds end: shares of ``peer.agent.agent.LEAVE_WITHIN_S``, as in
``peer.agent.active_peer``."""
LEAVING_LOOK_S = 0.5


@dataclass(slots=True, eq=False, repr=False)
class Lifecycle:
    """Begins and ends incarnations of peers."""

    environment: Environment
    rate: Callable[[], float]
    """Current share of the peak learning rate."""
    spot_checking: SpotChecking | None
    live: int = 0
    """Number of living peers."""
    joining_bytes: int = 0
    """Traffic of newcomers that fetched their first states."""

    def start(self, slot: Slot, states: list[FragmentState]) -> None:
        """Begin an incarnation on these states."""
        env = self.environment
        slot.lives += 1
        trainee = Trainee(
            slot.training, env.places, step_tokens=env.problem.step_tokens, rate=self.rate
        )
        for state in states:
            env.places.write(state.fragment, slot.training.values, state.theta)
        peer = SimulatedPeer(
            slot.name,
            slot.number,
            slot.lives,
            heap=env.heap,
            network=env.network,
            trainee=trainee,
            pace=slot.pace,
            rng=np.random.default_rng([env.seed, 2, slot.number, slot.lives]),
        )
        view = env.membership.view(slot.number, slot.side)
        probation = Probation(env.policy.probation, struck=self._struck_by(slot.name))
        spacing = Spacing()
        for state in states:
            # Each has momentum of its own: the outer step moves it in place.
            own = replace(state, momentum=state.momentum.copy())
            seat = self._seat(slot, trainee, own)
            machine = self._machine(slot, own, view, probation, spacing)
            node = FragmentNode(
                peer,
                env.wires,
                env.layout.fragments[state.fragment],
                machine,
                own,
                seat,
                replay_bytes_max=REPLAY_BYTES_MAX,
            )
            peer.nodes.append(node)
            peer.seats.append(seat)
        slot.peer = peer
        self.live += 1
        env.record("start", peer=slot.name)
        peer.begin()
        if slot.bytes_per_s:
            self._tell_line(slot)

    def _seat(self, slot: Slot, trainee: Trainee, state: FragmentState) -> Seat:
        env = self.environment
        outer = env.experiment.outer
        kept = {"keep": 1.0, "damp": 0.5, "drop": 0.0}[outer.missed]
        rule, alpha = outer.adoption, outer.blend_alpha
        upload = self._poison_of(slot, env.layout.fragments[state.fragment]) if slot.lies else None
        return Seat(trainee, state, rule=rule, alpha=alpha, missed_kept=kept, upload=upload)

    def _poison_of(
        self, slot: Slot, fragment: Fragment
    ) -> Callable[[Float32s, Float32s], Float32s]:
        peers = self.environment.experiment.peers
        direction = directions(
            peers.poison,
            fragment.size,
            seed=self.environment.seed,
            fragment=fragment.index,
            peer=slot.number,
            life=slot.lives,
        )

        def upload(base: Float32s, values: Float32s) -> Float32s:
            length, sizes = peers.poison_length, fragment.unit_sizes
            return poisoned(base, values, direction=direction(), length=length, sizes=sizes)

        return upload

    def _machine(
        self,
        slot: Slot,
        state: FragmentState,
        view: Table,
        probation: Probation,
        spacing: Spacing,
    ) -> FragmentRounds:
        env, name = self.environment, slot.name
        fragment = env.layout.fragments[state.fragment]
        identity = Identity(
            fragment=fragment.index,
            me=name,
            incarnation=slot.lives,
            topic=env.layout.hash[:16],
            policy=env.policy.of_kinds(fragment.kinds),
            codecs=codecs_of(env.experiment),
            encoded_bytes=lambda codec: encoded_size(codec, fragment.unit_sizes),
            sign=lambda data: _signature(name, data),
            verify=lambda peer, data, signature: _signature(peer, data) == signature,
            founder=slot.number == 0,
            site=slot.seen.site,
            norm_ratio_max=env.wires.norm_ratio_max,
            refuses=self._refused_by(name),
            spacing=spacing,
        )
        machine = FragmentRounds(
            identity,
            Circumstances(bytes_per_s=slot.bytes_per_s / env.wires.bulk_factor),
            view=view,
            standing=Standing.of(state),
            probation=probation,
            now=env.heap.now,
        )
        if probation.counts_all:  # otherwise peers differ in who counts
            machine.peers.crowd = view
        if env.heap.now == 0.0:
            machine.peers.started_at = -1e6  # founders count as long-standing members
        return machine

    def _refused_by(self, me: PeerId) -> Callable[[PeerId], str | None]:
        checking = self.spot_checking
        if checking is None:
            return lambda peer: None
        return lambda peer: checking.refuses(me, peer, "proposals")

    def _struck_by(self, me: PeerId) -> Callable[[PeerId, float], bool] | None:
        """A peer that another one's spot checks refuse is on probation there, as at a live peer."""
        checking = self.spot_checking
        if checking is None:
            return None
        return lambda peer, now: checking.distrusts(me, peer)

    def sign_first_versions(self) -> None:
        """Let all present peers sign each other's versions, as after a past that they share."""
        present = self.environment.alive
        for peer in present:
            for node in peer.nodes:
                standing, machine = node.machine.standing, node.machine
                assert standing is not None
                link = link_of(standing.head())
                claim = link_claim(self.environment.layout.hash[:16], machine.fragment, link)
                signed = [(other.name, _signature(other.name, claim)) for other in present]
                machine.certificates.hear(link, tuple(signed), self.environment.heap.now)

    def change_line(self, slot: Slot, bytes_per_s: float) -> None:
        """Give a peer's line another speed, in both directions. The peer knows it at once."""
        env = self.environment
        env.network.set_link(slot.name, up_bytes_s=bytes_per_s, down_bytes_s=bytes_per_s)
        slot.bytes_per_s = bytes_per_s
        slot.seen = replace(slot.seen, bytes_per_s=bytes_per_s / env.wires.bulk_factor)
        self._tell_line(slot)

    def _tell_line(self, slot: Slot) -> None:
        told = slot.bytes_per_s / self.environment.wires.bulk_factor
        if slot.living is not None:
            for node in slot.living.nodes:
                node.take(LineMeasured(told))

    def join(self, slot: Slot) -> None:
        """Start a peer without a state: it fetches every fragment from other peers, then begins."""
        env, life = self.environment, slot.lives
        found: dict[int, FragmentState] = {}

        def ask(fragment: int) -> None:
            if slot.lives != life or fragment in found:
                return
            env.heap.call_in(env.policy.catch_up_s / 10, ask, fragment)
            source = self._source(slot)
            if source is None:
                return
            env.network.transfer(
                slot.name, source, REQUEST_BYTES, lambda: asked(fragment, source), lambda: None
            )

        def asked(fragment: int, source: PeerId) -> None:
            node = env.wires.node(source, fragment)
            if node is None or node.state is None:
                return
            state = node.state
            size = state.theta.nbytes + state.momentum.nbytes + MARK_BYTES * len(state.merged)
            self.joining_bytes += size
            env.network.transfer(
                source, slot.name, size, lambda: arrived(fragment, state), lambda: None
            )

        def arrived(fragment: int, state: FragmentState) -> None:
            if slot.lives != life:
                return
            found[fragment] = state
            if len(found) == len(env.layout.fragments):
                self.start(slot, [found[index] for index in range(len(found))])

        for fragment in range(len(env.layout.fragments)):
            ask(fragment)

    def _source(self, slot: Slot) -> PeerId | None:
        """A random peer that can be reached and has a state."""
        env = self.environment
        there = [
            other.name
            for other in env.slots
            if other is not slot
            and other.living is not None
            and other.side == slot.side
            and not env.network.is_paused(other.name)
        ]
        return there[int(env.rng.integers(len(there)))] if there else None

    def crash(self, slot: Slot, away_s: float) -> None:
        """Stop a peer without warning; it returns after ``away_s``, unless that is zero."""
        env, peer = self.environment, slot.living
        if peer is None:
            return
        env.record("crash", peer=slot.name)
        linked = env.network.linked_to(slot.name, within_s=LINK_IDLE_S)
        self._end(slot, peer)
        env.heap.call_in(env.network.weather.silence_s, self._links_broke, slot.name, linked)
        if env.experiment.weather.returns != "never" and away_s:
            env.heap.call_in(away_s, self._restart, slot)

    def _links_broke(self, dead: PeerId, linked: Sequence[PeerId]) -> None:
        """Have those with a stream or a link to a dead peer notice: heartbeats go over links."""
        env, names = self.environment, set(linked)
        env.wires.streams_to(dead)
        for peer in env.alive:
            if peer.name in names:
                for node in peer.nodes:
                    node.lost(dead)

    def leave(self, slot: Slot) -> None:
        """Let a peer leave in order: its work is offered once more, its rounds end, it is missed
        by nobody. Other than a live one, it goes on training meanwhile, and stays no longer where
        its line is slow."""
        env, peer = self.environment, slot.living
        if peer is None:
            return
        env.record("leave", peer=slot.name)
        step, life = peer.trainee.step, Life(slot.name, slot.lives)
        for node in peer.nodes:
            node.take(MergeBeforeLeaving())
        offers_until = env.heap.now + LAST_OFFERS_S
        drained_until = offers_until + DRAIN_S

        def offer() -> None:
            if not peer.alive:
                return
            lacking = [
                node
                for node in peer.nodes
                if node.state is not None and life.mark_in(node.state.merged) < step
            ]
            if not lacking or env.heap.now >= offers_until:
                for node in peer.nodes:
                    node.take(Leave("leaving"))
                env.heap.call_in(LEAVING_LOOK_S, drain)  # those who joined it are told first
                return
            for node in lacking:
                if not node.is_busy:
                    node.take(Due())
            env.heap.call_in(LEAVING_LOOK_S, offer)

        def drain() -> None:
            if not peer.alive:
                return
            under_way = any(node.machine.own_round is not None for node in peer.nodes)
            if under_way and env.heap.now < drained_until:
                env.heap.call_in(LEAVING_LOOK_S, drain)
                return
            self._end(slot, peer, left=True)
            env.membership.left(slot.name)
            env.wires.streams_to(slot.name)

        offer()

    def _end(self, slot: Slot, peer: SimulatedPeer, *, left: bool = False) -> None:
        peer.crash()
        self.live -= 1
        slot.bury(peer, left=left)
        self.environment.network.crash(slot.name)

    def _restart(self, slot: Slot) -> None:
        env = self.environment
        env.network.restart(slot.name)
        env.record("return", peer=slot.name)
        if env.experiment.weather.returns == "checkpoint" and slot.saved:
            self.start(slot, slot.saved)
        else:
            self.join(slot)

    def pause(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            if slot.peer is not None:
                slot.peer.pause()
            self.environment.network.pause(slot.name)

    def resume(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            self.environment.network.resume(slot.name)
            if slot.peer is not None:
                slot.peer.resume()

    def partition(self, apart: Sequence[Slot]) -> None:
        """Cut these peers off from all others."""
        env = self.environment
        env.network.partition([[slot.name for slot in apart]])
        env.membership.part()
        self._take_sides({slot.number for slot in apart})

    def heal(self) -> None:
        """End the partition."""
        env = self.environment
        env.record("heal")
        env.network.heal()
        env.membership.heal()
        self._take_sides(set())

    def _take_sides(self, apart: set[int]) -> None:
        for slot in self.environment.slots:
            slot.side = int(slot.number in apart)
            if slot.peer is not None:
                view = self.environment.membership.view(slot.number, slot.side)
                for node in slot.peer.nodes:
                    node.machine.peers.view = node.machine.peers.crowd = view


def _signature(peer: PeerId, data: bytes) -> bytes:
    """Stands for a signature: the machine only asks whether it is valid."""
    return blake3.blake3(peer.encode() + b"/" + data).digest()
