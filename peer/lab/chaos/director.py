"""Directs the liars of a swarm: writes the way in which each of them lies now to its orders."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

from peer.lab.chaos.judging.lies import SERVING, Act
from peer.lab.chaos.members import Learner
from peer.lab.chaos.process_swarm import ProcessSwarm


class Director:
    """The acts of one swarm. ``turn`` is called often; it begins and ends what is due.

    Before the first act all work honestly, and after the last one again. The learner that was held
    back joins when states are forged, so that there is somebody to serve them to.
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
        self._waiting = [
            replace(act, begins_s=began_s + act.begins_s, ends_s=began_s + act.ends_s)
            for act in acts
        ]
        self._late_s = self._waiting[SERVING].begins_s if acts else None
        self._now: Act | None = None
        self._tell = tell

    @property
    def over(self) -> bool:
        return not self._waiting and self._now is None

    def turn(self) -> None:
        now = self._swarm.now()
        if self._late_s is not None and now >= self._late_s:
            self._late_s = None
            self._swarm.launch_late()
        if self._now is not None and now >= self._now.ends_s:
            self.done.append(replace(self._now, ends_s=now))
            self._now = None
            self._order(None)
        if self._now is None and self._waiting and now >= self._waiting[0].begins_s:
            self._now = replace(self._waiting.pop(0), begins_s=now)
            self._order(self._now)
            self._tell(f"liars: {', '.join(self._now.lies)}")

    def _order(self, act: Act | None) -> None:
        victim = self._swarm.learners[0].peer_id
        for number, liar in enumerate(self._swarm.liars):
            give_orders(liar, {"lie": act and act.of(number), "victim": victim})


def give_orders(liar: Learner, orders: object) -> None:
    """Replace a liar's orders in one step, so that it never reads a half."""
    path = liar.orders_path
    new = path.with_suffix(".new")
    new.write_text(json.dumps(orders), encoding="utf-8")
    new.replace(path)
