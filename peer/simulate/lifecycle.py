"""The peers of a simulated swarm: live averagers in virtual time, which start, crash and return."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from averaging.guard.door import Defences
from averaging.history.state import FragmentState, Pieces
from averaging.live.settings import RunTerms
from averaging.live.streams.bulk import TransportSettings
from averaging.numbers.arrays import Float32s
from averaging.numbers.layout import Fragment, Layout
from averaging.virtual import swarm as virtual
from averaging.virtual.membership import Observers
from averaging.virtual.swarm import Peer, PeerPlan, Watch
from dht.identity import PeerId
from dht.memory.network import Weather
from peer.simulate.learner import Learner, Seat, Trainee
from peer.simulate.problems.problem import ChecksOthers, Places, Problem, layout_of
from peer.simulate.roles import Judge, Owner, directions, poisoned
from peer.simulate.settings import Swarm
from peer.simulate.slots import BYTES_S_PER_MBIT, Slot, chosen, draw_lines, slots_of

REPLAY_BYTES_MAX = 64 << 20
VIEWS = 4
"""Number of different views of the membership, each with heartbeats at other moments."""
QUIET_LINKS = TransportSettings(heartbeat_s=20.0, silence_max_s=61.0)
"""Three of four messages of a live peer say that a link is alive, and a simulated one breaks of
itself. So they are said less often here, and a machine that sleeps is missed later."""


class Overseer(Watch):
    """Watches the peers of an experiment, and knows how far it is."""

    @abstractmethod
    def record(self, event: str, **fields: Any) -> None:
        """Note an incident."""

    @abstractmethod
    def rate(self) -> float:
        """The present share of the peak learning rate."""


class Lives(virtual.Swarm):
    """All peers of one experiment, over all their lives."""

    def __init__(
        self,
        experiment: Swarm,
        problem: Problem,
        *,
        seed: int,
        overseer: Overseer,
    ) -> None:
        if experiment.rounds.spot_checks and not isinstance(problem, ChecksOthers):
            raise ValueError(f"problem.name is {problem.name!r}, which has no spot checks")
        self.experiment = experiment
        self.problem = problem
        layout = layout_of(problem, experiment.outer.fragments)
        self.places = Places(layout, problem.specs)
        self.owner = Owner(experiment)
        self.rng = np.random.default_rng([seed, 1])
        """Draws everything that the experiment leaves to chance."""
        self.slots = slots_of(experiment, problem, seed=seed, rng=self.rng)
        self.slot_of = {slot.name: slot for slot in self.slots}
        self.record = overseer.record
        self.tokens_end = self._tokens_end()
        """Tokens with which the experiment ends, of all peers."""
        self._rate = overseer.rate
        values = problem.first_values(seed)
        settings = replace(
            virtual.SETTINGS,
            norm_ratio_max=experiment.rounds.norm_max_ratio or math.inf,
            replay_bytes_max=REPLAY_BYTES_MAX * len(layout.fragments),
            transport=QUIET_LINKS,
        )
        policy = experiment.policy()
        if experiment.end.together:
            policy = replace(policy, tokens_end=self.tokens_end)
        super().__init__(
            [slot.plan for slot in self.slots],
            virtual.VirtualRun(
                layout,
                policy,
                self._founded(layout, policy.mu, values),
                settings=settings,
                bulk_factor=experiment.weather.bulk_factor,
            ),
            learner=self._new_learner,
            seed=seed,
            weather=weather_of(experiment),
            membership=Observers(VIEWS, apart=self._sides),
            watch=overseer,
        )
        draw_lines(experiment, self.slots, self.network, self.rng)

    def _tokens_end(self) -> int:
        end, peers = self.experiment.end, self.experiment.peers
        if end.tokens is not None:
            return end.tokens
        steps = sum(peers.step_time_s / slot.pace.step_time_s for slot in self.slots)
        steps *= self.experiment.outer.steps_per_cycle
        return max(1, int(end.cycles * steps * self.problem.step_tokens))

    @property
    def in_training(self) -> list[Peer]:
        """The peers that are up and have a state of each fragment."""
        return [self.nodes[slot.name] for slot in self.slots if slot.is_in_training]

    def _sides(self, name: PeerId) -> tuple[bool, ...]:
        """On which side of each partition a peer will be."""
        number, count = self.slot_of[name].number, len(self.slots)
        partitions = (event for event in self.experiment.event if event.kind == "partition")
        return tuple(number in chosen(event.peers, count) for event in partitions)

    # What a life begins with

    def _founded(self, layout: Layout, mu: float, values: Float32s) -> list[FragmentState]:
        """The first state of each fragment, made from these parameters."""
        pieces = [Pieces.of(fragment, mu) for fragment in layout.fragments]
        return [
            FragmentState.founded(layout.hash, i, self.places.read(i, values), each.momentum)
            for i, each in enumerate(pieces)
        ]

    def states_of(self, name: PeerId) -> list[FragmentState]:
        """The first states follow from the seed, so every founder has them; others fetch theirs,
        unless they return with a checkpoint."""
        slot = self.slot_of[name]
        returns = self.experiment.weather.returns == "checkpoint" and name in self.disks
        if not returns and (self.lives[name] > 1 or slot.plan.starts_at > 0.0):
            return []
        return super().states_of(name)

    def _new_learner(
        self, swarm: virtual.Swarm, name: PeerId, plan: PeerPlan, states: Sequence[FragmentState]
    ) -> Learner:
        slot, life = self.slot_of[name], self.lives[name]
        tokens = self.problem.step_tokens
        slot.learner = Learner(
            self,
            slot.pace,
            Trainee(slot.training, self.places, step_tokens=tokens, rate=self._rate),
            fragments=len(self.layout.fragments),
            seat=lambda trainee, state: self._new_seat(slot, life, trainee, state),
            states=states,
            rng=np.random.default_rng([self.seed, 2, slot.number, life]),
            begins=lambda: self.record("start", peer=slot.label),
        )
        return slot.learner

    def _new_seat(self, slot: Slot, life: int, trainee: Trainee, state: FragmentState) -> Seat:
        outer = self.experiment.outer
        kept = {"keep": 1.0, "damp": 0.5, "drop": 0.0}[outer.missed]
        fragment = self.layout.fragments[state.fragment]
        upload = self._poison_of(slot, life, fragment) if slot.lies else None
        return Seat(trainee, state, missed_kept=kept, upload=upload)

    def _poison_of(
        self, slot: Slot, life: int, fragment: Fragment
    ) -> Callable[[Float32s, Float32s], Float32s]:
        peers = self.experiment.peers
        direction = directions(
            peers.poison,
            fragment.size,
            seed=self.seed,
            fragment=fragment.index,
            peer=slot.number,
            life=life,
        )

        def upload(base: Float32s, values: Float32s) -> Float32s:
            length, sizes = peers.poison_length, fragment.unit_sizes
            return poisoned(base, values, direction=direction(), length=length, sizes=sizes)

        return upload

    def terms_of(self, name: PeerId) -> RunTerms:
        terms = super().terms_of(name)
        terms.book.orders = self.owner.known.get(name, terms.book.orders)
        return terms

    def around(self, name: PeerId) -> Mapping[str, Any]:
        return {"take_directive": lambda directive: self.owner.take(self.nodes[name], directive)}

    def defences(self, name: PeerId) -> Defences:
        if not isinstance(self.problem, ChecksOthers):
            return Defences()
        slot = self.slot_of[name]
        judge = Judge(
            self.problem,
            self.places,
            number=slot.number,
            seed=self.seed,
            steps_before=slot.past_steps,
            states=lambda: self.nodes[name].averager.states,
            judges=not slot.lies,
        )
        return Defences(judge=judge)

    # What happens to peers

    def fail(self, slot: Slot, away_s: float) -> None:
        """Stop a peer without warning; it returns after ``away_s``, unless that is zero."""
        if slot.learner is None:
            return
        self.record("crash", peer=slot.label)
        self.crash(slot.name)
        if self.experiment.weather.returns != "never" and away_s:
            self.call_in(away_s, self._return, slot)

    def _return(self, slot: Slot) -> None:
        self.record("return", peer=slot.label)
        self.restart(slot.name)

    def _crash(self, peer: Peer) -> None:
        for state in peer.averager.states:
            if state is not None:
                self.save(peer, state)
        super()._crash(peer)
        self.slot_of[peer.name].bury()

    def leave_in_order(self, slot: Slot) -> None:
        if slot.learner is not None:
            self.record("leave", peer=slot.label)
            self.leave(slot.name)

    def say_goodbye(self, name: PeerId) -> None:
        super().say_goodbye(name)
        self.slot_of[name].past[-1].left = True


def weather_of(experiment: Swarm) -> Weather:
    network = experiment.weather
    return Weather(
        latency_s=network.latency_s,
        jitter_s=network.jitter_s,
        bandwidth_bytes_s=network.mbit_s[1] * BYTES_S_PER_MBIT,
        connection_loss=network.loss,
        silence_s=network.silence_s,
    )


def states_of(peer: Peer) -> list[FragmentState]:
    """The states of a peer in training, one for each fragment."""
    return [state for state in peer.averager.states if state is not None]
