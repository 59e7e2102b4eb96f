"""Directs the liars of a swarm: writes the way in which each of them lies now to its orders."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

from dht.whole_files import write_whole
from tests.chaos.judging.lies import SERVING, Act
from tests.chaos.members import Learner
from tests.chaos.process_swarm import ProcessSwarm

STARTS_WITHIN_S = 120.0
"""Time within which a learner has a state: it starts slowly on a busy machine."""


class Director:
    """The acts of one swarm. ``turn`` is called often; it begins and ends what is due.

    Before the first act all work honestly, and after the last one again. The learner that was held
    back joins when states are forged, so that there is somebody to serve them to. That act lasts
    until the learner trains, and the later ones begin later.
    """

    def __init__(
        self,
        swarm: ProcessSwarm,
        acts: Sequence[Act],
        *,
        began_s: float,
        tell: Callable[[str], None],
    ) -> None:
        self.done: list[Act] = []
        """Acts with their times on the clock of the swarm."""
        self._swarm = swarm
        self._acts = acts
        self._now: Act | None = None
        self._next_s = began_s + acts[0].begins_s if acts else 0.0
        self._tell = tell

    @property
    def over(self) -> bool:
        return len(self.done) == len(self._acts)

    def until(self, end_s: float) -> list[Act]:
        """The acts until the swarm ended, which may be in the middle of the last one."""
        going_on = [] if self._now is None else [replace(self._now, ends_s=end_s)]
        return [*self.done, *going_on]

    def turn(self) -> None:
        now = self._swarm.now()
        if self.over or now < self._next_s or self._is_awaited(now):
            return
        if self._now is not None:
            self.done.append(replace(self._now, ends_s=now))
            self._now = None
        following = self._acts[len(self.done) :]
        if not following:
            self._order(None)
            return
        planned = following[0]
        self._now = replace(planned, begins_s=now)
        self._next_s = now + planned.ends_s - planned.begins_s
        self._order(self._now)
        if self._swarm.liars:  # the control has none, and the same late learner
            self._tell(f"liars: {', '.join(self._now.lies)}")
        if len(self.done) == SERVING:
            self._swarm.launch_late()

    def _is_awaited(self, now: float) -> bool:
        """True if the act goes on because the late learner does not train yet."""
        return (
            self._now is not None
            and len(self.done) == SERVING
            and not self._swarm.learners[-1].whole
            and now < self._now.begins_s + STARTS_WITHIN_S
        )

    def _order(self, act: Act | None) -> None:
        victim = self._swarm.learners[0].peer_id
        for number, liar in enumerate(self._swarm.liars):
            give_orders(liar, {"lie": act and act.of(number), "victim": victim})


def give_orders(liar: Learner, orders: object) -> None:
    """Replace a liar's orders in one step, so that it never reads a half."""
    write_whole(liar.orders_path, json.dumps(orders).encode())
