"""Schedules the incidents of an experiment: events, churn, and the end by a date."""

from __future__ import annotations

from averaging.virtual.swarm import Peer
from peer.rules.ending import LastRounds
from peer.simulate.lifecycle import Lives, states_of
from peer.simulate.settings import Event
from peer.simulate.slots import Slot, chosen


class Incidents:
    """Events and churn of one swarm."""

    def __init__(self, lives: Lives) -> None:
        self._lives = lives
        for event in lives.experiment.event:
            affected = [lives.slots[number] for number in chosen(event.peers, len(lives.slots))]
            if event.kind != "join":  # the peers' plans have those
                lives.call_at(event.at_s, self._happen, event, affected)
        if lives.experiment.weather.crash_share:
            lives.call_in(self._until_churn_s(), self._churn)

    def _happen(self, event: Event, affected: list[Slot]) -> None:
        lives = self._lives
        lives.record(event.kind, peers=len(affected), lasts_s=event.lasts_s)
        if event.kind == "crash":
            for slot in affected:
                lives.fail(slot, event.lasts_s)
        elif event.kind == "leave":
            for slot in affected:
                lives.leave_in_order(slot)
        elif event.kind == "pause":
            asleep = [slot for slot in affected if slot.learner is not None]
            for slot in asleep:
                lives.pause(slot.name)
            lives.call_in(event.lasts_s, self._resume, asleep)
        elif event.kind == "partition":
            lives.partition([[slot.name for slot in affected]])
            if event.lasts_s:
                lives.call_in(event.lasts_s, self._heal)
        elif event.kind == "order":
            there = [lives.nodes[slot.name] for slot in affected if slot.is_in_training]
            versions = [s.version for each in lives.in_training for s in states_of(each)]
            lives.owner.issue(event, there, version=max(versions, default=0))
        if event.every_s:
            lives.call_in(event.every_s, self._happen, event, affected)

    def _resume(self, asleep: list[Slot]) -> None:
        for slot in asleep:
            self._lives.resume(slot.name)

    def _heal(self) -> None:
        self._lives.record("heal")
        self._lives.heal()

    def _until_churn_s(self) -> float:
        """Time until the next crash: the rate adds up to the configured share per cycle."""
        lives = self._lives
        share = lives.experiment.weather.crash_share
        mean_s = lives.experiment.cycle_s / (share * len(lives.slots))
        return float(lives.rng.exponential(mean_s))

    def _churn(self) -> None:
        lives = self._lives
        there = [slot for slot in lives.slots if slot.learner is not None]
        if len(there) > 2:
            slot = there[int(lives.rng.integers(len(there)))]
            away_s = float(lives.rng.exponential(lives.experiment.weather.away_s))
            lives.fail(slot, away_s)
        lives.call_in(self._until_churn_s(), self._churn)


LOOK_EVERY_S = 0.5
WAIT_S = 30.0
"""Longest time for the last rounds, besides the quorum's deadline."""


class DateOfEnd:
    """Makes the peers' last rounds from a date on, on a clock that is right.

    Live peers do the same (``peer.rules.ending``). One that comes after the date makes none.
    """

    def __init__(self, lives: Lives, date_s: float) -> None:
        self._lives = lives
        self._rounds: dict[Peer, tuple[LastRounds, float]] = {}
        """The last rounds of the peers that have begun them, and until when."""
        self._over: set[Peer] = set()
        lives.call_at(date_s, self._begin)

    def _begin(self) -> None:
        lives = self._lives
        until = lives.now + lives.policy.quorum.wait_s + WAIT_S
        for peer in lives.in_training:
            self._rounds[peer] = LastRounds(_versions(peer)), until
            lives.within(peer.averager.gather_everybody)
        lives.call_in(LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        lives = self._lives
        there = [peer for peer in lives.in_training if not peer.sleeps]
        for peer in there:
            if peer not in self._rounds:
                self._end(peer)
            elif peer not in self._over:
                self._go_on(peer, there)
        lives.call_in(LOOK_EVERY_S, self._look)

    def _go_on(self, peer: Peer, there: list[Peer]) -> None:
        lives = self._lives
        rounds, until = self._rounds[peer]
        missing = rounds.missing(_versions(peer))
        company = any(other not in self._over for other in there if other is not peer)
        if not missing or not company or lives.now >= until:
            self._end(peer)
        else:
            lives.within(lambda: peer.averager.make_due(missing))

    def _end(self, peer: Peer) -> None:
        if peer not in self._over:
            self._over.add(peer)
            self._lives.within(peer.averager.end_merges)


def _versions(peer: Peer) -> tuple[int, ...]:
    return tuple(0 if state is None else state.version for state in peer.averager.states)
