"""Schedules the incidents of an experiment: its events, its late starts, and random churn."""

from __future__ import annotations

from peer.lab.simulate.swarm.environment import Environment
from peer.lab.simulate.swarm.experiment import BadExperiment, Event
from peer.lab.simulate.swarm.lifecycle import Lifecycle
from peer.lab.simulate.swarm.slots import Slot


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
        if self._environment.experiment.churn.share_per_cycle:
            self._environment.heap.call_in(self._until_churn_s(), self._churn)

    def _affected(self, event: Event) -> list[Slot]:
        slots = self._environment.slots
        if isinstance(event.peers, list):
            unknown = [number for number in event.peers if not 0 <= number < len(slots)]
            if unknown:
                raise BadExperiment(
                    f"event.peers names peer {unknown[0]}; there are 0 to {len(slots) - 1}"
                )
            return [slots[number] for number in event.peers]
        return slots[: max(1, round(event.peers * len(slots)))]

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
        share = env.experiment.churn.share_per_cycle
        mean_s = env.experiment.cycle_s / (share * len(env.slots))
        return float(env.rng.exponential(mean_s))

    def _churn(self) -> None:
        env = self._environment
        there = [slot for slot in env.slots if slot.living is not None]
        if len(there) > 2:
            slot = there[int(env.rng.integers(len(there)))]
            away_s = float(env.rng.exponential(env.experiment.churn.away_s))
            self._lifecycle.crash(slot, away_s)
        env.heap.call_in(self._until_churn_s(), self._churn)
