"""Injects the faults of a schedule into a swarm, and ends each when its time is over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tests.chaos.ambush import kill_leader
from tests.chaos.fault_actions import FaultActions, Undo
from tests.chaos.judging.evidence import FaultDone
from tests.chaos.judging.schedule import ABSENT, STRANGERS, Fault, FaultKind
from tests.chaos.members import Learner
from tests.chaos.process_swarm import ProcessSwarm

STRANGER_START_S = 8.0
"""Added to the duration of a stranger's visit: its process starts slowly on a busy machine."""


@dataclass(slots=True, eq=False)
class _Active:
    """A fault that is not over."""

    done: FaultDone
    over_s: float
    undo: Undo


class FaultInjector:
    """The faults of one swarm. ``turn`` is called often; it begins and ends what is due."""

    def __init__(
        self,
        swarm: ProcessSwarm,
        faults: Sequence[Fault],
        *,
        began_s: float,
        quiet_s: float,
        whole_min: int,
        tell: Callable[[str], None],
        rng: np.random.Generator,
    ) -> None:
        """``whole_min``: number of learners that are always left alone."""
        self.done: list[FaultDone] = []
        self._swarm = swarm
        self._waiting = list(faults)
        self._began_s = began_s
        self._quiet_s = quiet_s
        self._whole_min = whole_min
        self._tell = tell
        self._actions = FaultActions(swarm, rng)
        self._active: list[_Active] = []

    @property
    def over(self) -> bool:
        return not (self._waiting or self._active)

    def turn(self) -> None:
        """Begin and end what is due. Nothing begins after ``quiet_s``."""
        now = self._swarm.now()
        self._end_those_over()
        while self._waiting and self._began_s + self._waiting[0].at_s <= now:
            fault = self._waiting.pop(0)
            if now < self._quiet_s - 1.0:
                self._begin(fault)
        self._actions.turn()

    def heal(self) -> None:
        """End all active faults, and begin no more."""
        self._waiting.clear()
        for active in list(self._active):
            self._end(active)

    def _end_those_over(self) -> None:
        now = self._swarm.now()
        for active in [each for each in self._active if each.over_s <= now]:
            self._end(active)

    def _end(self, active: _Active) -> None:
        self._active.remove(active)
        did = active.undo() or {}
        self.done.append(replace(active.done, until_s=self._swarm.now(), did=did))

    def _begin(self, fault: Fault) -> None:
        swarm = self._swarm
        victim = None
        # On a busy machine a start may take longer than the schedule allows for.
        whole = sum(learner.whole for learner in swarm.learners)
        if fault.kind in ABSENT and whole <= self._whole_min:
            return
        if fault.victim is not None:
            victim = self._whole_one(fault.victim)
            if victim is None:
                return
        began = swarm.now()
        if fault.kind is FaultKind.LEADER:
            # No other fault begins during the ambush; those that become due begin after it.
            killed = kill_leader(
                swarm,
                fault.detail,
                whole_min=self._whole_min,
                within_s=self._quiet_s - began,
                meanwhile=self._end_those_over,
            )
            if killed is None:
                return
            if killed.before is not None:
                self.done.append(killed.before)
            victim, began, fault = killed.victim, swarm.now(), replace(fault, detail=killed.phase)
        undo = self._actions.apply(fault, victim)
        if undo is None:
            return
        name = None if victim is None else victim.name
        self._tell(f"{fault.kind}: {name or 'swarm'} {fault.detail}".rstrip())
        done = FaultDone(
            kind=fault.kind, at_s=began, until_s=began, victim=name, detail=fault.detail
        )
        start_s = STRANGER_START_S if fault.kind in STRANGERS else 0.0
        self._active.append(_Active(done, swarm.now() + start_s + fault.lasts_s, undo))

    def _whole_one(self, index: int) -> Learner | None:
        """The planned learner, or the next one if that is down or already affected."""
        learners = self._swarm.learners
        affected = {active.done.victim for active in self._active}
        for learner in (*learners[index:], *learners[:index]):
            if learner.whole and learner.name not in affected:
                return learner
        return None
