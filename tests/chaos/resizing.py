"""Starts and ends learners of a swarm on a schedule of sizes."""

from __future__ import annotations

from collections.abc import Callable

from tests.chaos.members import START_WITHIN_S
from tests.chaos.process_swarm import ProcessSwarm
from tests.swarms.sizes import Change, Sizes


class Resizer:
    """The schedule of one swarm. ``turn`` is called often; it carries out what is due.

    Learners that end together are killed. Of those that end alone, every second one is killed, and
    the others are asked to leave. Nobody ends while others are still starting, or a slow machine
    would leave only learners without a state; the rest of the schedule is later by that time.
    """

    def __init__(
        self, swarm: ProcessSwarm, sizes: Sizes, *, began_s: float, tell: Callable[[str], None]
    ) -> None:
        self.done: list[tuple[float, int]] = [(began_s, sizes.founders)]
        """Times at which the number of learners changed, on the clock of the swarm, with the new
        numbers."""
        self._swarm = swarm
        self._began_s = began_s
        self._tell = tell
        self._left = list(sizes.changes)

    @property
    def over(self) -> bool:
        return not self._left

    def turn(self) -> None:
        if not self._left:
            return
        swarm, change = self._swarm, self._left[0]
        if change.ends and self._is_starting():
            self._began_s = max(self._began_s, swarm.now() - change.at_s)
        elif swarm.now() >= self._began_s + change.at_s:
            self._left.pop(0)
            self._carry_out(change)

    def _is_starting(self) -> bool:
        swarm = self._swarm
        return any(
            learner.up
            and learner.life.ready_s is None
            and swarm.now() - learner.life.began_s < START_WITHIN_S
            for learner in swarm.learners
        )

    def _carry_out(self, change: Change) -> None:
        swarm = self._swarm
        for _ in change.starts:
            swarm.add()
        for number in change.ends:
            learner = swarm.learners[number]
            if not learner.up:
                continue
            if len(change.ends) > 1 or number % 2:
                learner.kill()
            else:
                learner.leave()
        size = self.done[-1][1] + len(change.starts) - len(change.ends)
        self.done.append((swarm.now(), size))
        self._tell(f"resize: {size} learners")
