"""Kills the leader of a round when it reaches a given phase, by following the event logs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from tests.chaos.judging.evidence import FaultDone
from tests.chaos.judging.schedule import FaultKind
from tests.chaos.members import Learner
from tests.chaos.process_swarm import ProcessSwarm

AMBUSH_MAX_S = 15.0
LOOK_EVERY_S = 0.002
TURN_EVERY_S = 0.5

_PHASE_EVENTS = {
    "joining": "gathering",
    "committed": "closed",
    "exchanging": "entered",
    "recovering": "took_over",
}
"""The event that a leader logs when it reaches a phase; ``took_over`` is its successor's."""


@dataclass(frozen=True, slots=True)
class Killed:
    """A leader that was killed, and the phase that it had reached."""

    victim: Learner
    phase: str
    before: FaultDone | None = None
    """The kill of the first leader, for ``recovering``; it was started again at once."""


@dataclass(slots=True, eq=False)
class _Watched:
    """A learner whose event log is followed."""

    learner: Learner
    log: int
    agent_pids: Sequence[int]
    leading: bool = False

    def reaches(self, wanted: str) -> bool:
        """True if it has logged the wanted event, as the leader, since the last call."""
        reached = False
        for event in _new_events(self.log):
            name = event.get("event")
            if name in ("gathering", "round"):
                self.leading = name == "gathering"
            reached |= name == wanted and (name != "entered" or self.leading)
        return reached

    def kill_agent(self) -> None:
        for pid in self.agent_pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def kill_leader(
    swarm: ProcessSwarm,
    phase: str,
    *,
    whole_min: int,
    within_s: float,
    meanwhile: Callable[[], None],
) -> Killed | None:
    """Wait for a leader to reach ``phase`` and kill it; ``None`` when none did in time.

    ``meanwhile`` is called twice a second. At least ``whole_min`` learners are left alone.
    """
    whole = [learner for learner in swarm.learners if learner.whole]
    if len(whole) <= whole_min:
        return None
    if phase == "recovering" and len(whole) <= whole_min + 1:
        phase = "exchanging"
    deadline = time.monotonic() + min(AMBUSH_MAX_S, within_s)
    with ExitStack() as logs:
        watched = list(_watched(whole, logs))

        def killed_in(wanted: str, *, but: _Watched | None = None) -> _Watched | None:
            turn_at = time.monotonic()
            while time.monotonic() < deadline:
                for each in watched:
                    if each is not but and each.reaches(_PHASE_EVENTS[wanted]):
                        each.kill_agent()
                        return each
                time.sleep(LOOK_EVERY_S)
                if time.monotonic() - turn_at > TURN_EVERY_S:
                    turn_at = time.monotonic()
                    swarm.turn()
                    meanwhile()
            return None

        # A successor takes over once the leader of an exchange has been killed.
        first = killed_in("exchanging" if phase == "recovering" else phase)
        if first is None:
            return None
        second = killed_in("recovering", but=first) if phase == "recovering" else None
    if second is None:
        first.learner.kill()
        return Killed(first.learner, "exchanging" if phase == "recovering" else phase)
    at_s = swarm.now()
    first.learner.kill()
    first.learner.come_back()
    before = FaultDone(
        kind=FaultKind.LEADER,
        at_s=at_s,
        until_s=swarm.now(),
        victim=first.learner.name,
        detail="exchanging",
    )
    second.learner.kill()
    return Killed(second.learner, phase, before)


def _watched(learners: Sequence[Learner], logs: ExitStack) -> Iterator[_Watched]:
    for learner in learners:
        with contextlib.suppress(OSError):
            descriptor = os.open(learner.events_path, os.O_RDONLY)
            logs.callback(os.close, descriptor)
            os.lseek(descriptor, 0, os.SEEK_END)
            pids = [process.pid for process in learner.members("peer.agent")]
            yield _Watched(learner, descriptor, pids)


def _new_events(descriptor: int) -> list[dict[str, object]]:
    """Complete events that were appended to a log since the last read."""
    found = []
    for line in os.read(descriptor, 1 << 20).splitlines():
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict):
                found.append(event)
    return found
