"""Schedules the incidents of an experiment: events and churn."""

from __future__ import annotations

from peer.simulate.lifecycle import Lives
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
