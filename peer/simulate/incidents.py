"""Schedules the incidents of an experiment: events, late starts, churn, and the end by a date."""

from __future__ import annotations

from averaging.round.interface.inputs import (
    Due,
    EndIsNear,
    Input,
    LastRoundOver,
)
from peer.rules.ending import LastRounds
from peer.simulate.lifecycle import Lifecycle
from peer.simulate.peer import SimulatedPeer
from peer.simulate.settings import Event
from peer.simulate.slots import Environment, Slot, chosen


class Incidents:
    """Events and churn of one swarm."""

    def __init__(self, environment: Environment, lifecycle: Lifecycle) -> None:
        self._environment = environment
        self._lifecycle = lifecycle

    def schedule_events(self) -> list[Slot]:
        """Schedule every ``[[event]]``. Returns the peers that found the swarm: all that no
        ``join`` event names."""
        heap = self._environment.heap
        late: set[int] = set()
        for event in self._environment.experiment.event:
            if event.kind == "join":
                for slot in self._affected(event):
                    late.add(slot.number)
                    heap.call_at(event.at_s, self._lifecycle.join, slot)
            else:
                heap.call_at(event.at_s, self._happen, event)
        return [slot for slot in self._environment.slots if slot.number not in late]

    def schedule_churn(self) -> None:
        if self._environment.experiment.weather.crash_share:
            self._environment.heap.call_in(self._until_churn_s(), self._churn)

    def _affected(self, event: Event) -> list[Slot]:
        slots = self._environment.slots
        return [slots[number] for number in chosen(event.peers, len(slots))]

    def _happen(self, event: Event) -> None:
        heap, lifecycle = self._environment.heap, self._lifecycle
        affected = self._affected(event)
        self._environment.record(event.kind, peers=len(affected), lasts_s=event.lasts_s)
        if event.kind == "crash":
            for slot in affected:
                lifecycle.crash(slot, event.lasts_s)
        elif event.kind == "leave":
            for slot in affected:
                lifecycle.leave(slot)
        elif event.kind == "pause":
            lifecycle.pause(affected)
            heap.call_in(event.lasts_s, lifecycle.resume, affected)
        elif event.kind == "partition":
            lifecycle.partition(affected)
            if event.lasts_s:
                heap.call_in(event.lasts_s, lifecycle.heal)
        if event.every_s:
            heap.call_in(event.every_s, self._happen, event)

    def _until_churn_s(self) -> float:
        """Time until the next crash: the rate adds up to the configured share per cycle."""
        env = self._environment
        share = env.experiment.weather.crash_share
        mean_s = env.experiment.cycle_s / (share * len(env.slots))
        return float(env.rng.exponential(mean_s))

    def _churn(self) -> None:
        env = self._environment
        there = [slot for slot in env.slots if slot.living is not None]
        if len(there) > 2:
            slot = there[int(env.rng.integers(len(there)))]
            away_s = float(env.rng.exponential(env.experiment.weather.away_s))
            self._lifecycle.crash(slot, away_s)
        env.heap.call_in(self._until_churn_s(), self._churn)


LOOK_EVERY_S = 0.5
WAIT_S = 30.0
"""Longest time for the last rounds, besides the quorum's deadline."""


class DateOfEnd:
    """Makes the peers' last rounds from a date on, on a clock that is right.

    Live peers do the same (``peer.agent.active_peer``).
    """

    def __init__(self, environment: Environment, date_s: float) -> None:
        self._env = environment
        self._rounds: dict[SimulatedPeer, tuple[LastRounds, float]] = {}
        """The last rounds of the peers that have begun them, and until when."""
        self._over: set[SimulatedPeer] = set()
        environment.heap.call_at(date_s, self._look)

    def _look(self) -> None:
        for peer in self._env.alive:
            if peer not in self._rounds:
                self._begin(peer)
            elif peer not in self._over:
                self._go_on(peer)
        self._env.heap.call_in(LOOK_EVERY_S, self._look)

    def _begin(self, peer: SimulatedPeer) -> None:
        until = self._env.heap.now + self._env.policy.quorum.wait_s + WAIT_S
        self._rounds[peer] = LastRounds(_versions(peer)), until
        _tell(peer, EndIsNear())

    def _go_on(self, peer: SimulatedPeer) -> None:
        rounds, until = self._rounds[peer]
        missing = rounds.missing(_versions(peer))
        company = any(other not in self._over for other in self._env.alive if other is not peer)
        if not missing or not company or self._env.heap.now >= until:
            self._over.add(peer)
            _tell(peer, LastRoundOver())
            return
        for node in peer.nodes:
            if node.fragment.index in missing and not node.is_busy:
                node.take(Due())


def _versions(peer: SimulatedPeer) -> tuple[int, ...]:
    return tuple(0 if node.state is None else node.state.version for node in peer.nodes)


def _tell(peer: SimulatedPeer, given: Input) -> None:
    for node in peer.nodes:
        node.take(given)
