"""Starts and ends learners of a swarm on a schedule of sizes."""

from __future__ import annotations

from collections.abc import Callable

from peer.lab.chaos.process_swarm import ProcessSwarm
from peer.lab.sizes import Sizes


class Resizer:
    """The schedule of one swarm. ``turn`` is called often; it carries out what is due.

    Learners that end together are killed. Of those that end alone, every second one is killed, and
    the others are asked to leave.
    """

    def __init__(
        self, swarm: ProcessSwarm, sizes: Sizes, *, began_s: float, tell: Callable[[str], None]
    ) -> None:
        self.done: list[tuple[float, int]] = [(began_s, sizes.founders)]
        """When the number of learners changed, on the clock of the swarm, and the new number."""
        self._swarm = swarm
        self._sizes = sizes
        self._began_s = began_s
        self._tell = tell
        self._left = list(sizes.changes)

    def turn(self) -> None:
        swarm = self._swarm
        while self._left and swarm.now() >= self._began_s + self._left[0].at_s:
            change = self._left.pop(0)
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
