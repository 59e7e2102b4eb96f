"""Which fragment goes first, when more of them want a round than may be under way at one peer.

Whoever goes first by luck goes first again a cycle later, and the last never has its turn. So the
fragment with the fewest versions goes first. All peers of a lineage count the same versions, so
all prefer the same fragment, and meet. Two that hold their only place open for different
fragments, each waiting for the other, would wait in vain until the quorum's deadline: who is called
for the one that goes first gives up the other one, as long as nothing of it is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from averaging.round.machine import FragmentRounds
from averaging.round.phase import Phase

NO_PLACE = "as many rounds as may be are under way"
"""Why a fragment is turned away."""


def rank(machine: FragmentRounds) -> tuple[int, int]:
    """What goes first sorts first."""
    version = machine.standing.version if machine.standing is not None else 0
    return version, machine.fragment


class Turns:
    """The fragments of one peer that found no place. They get theirs when there is one."""

    __slots__ = ("_turned_away",)

    def __init__(self) -> None:
        self._turned_away: dict[int, FragmentRounds] = {}

    def __repr__(self) -> str:
        return f"Turns({sorted(self._turned_away)})"

    def __bool__(self) -> bool:
        return bool(self._turned_away)

    def __contains__(self, fragment: int) -> bool:
        return fragment in self._turned_away

    def turn_away(self, machine: FragmentRounds) -> bool:
        """There is no place for it now. ``False``: it has been told before."""
        known = machine.fragment in self._turned_away
        self._turned_away[machine.fragment] = machine
        return not known

    def next(self, now: float, *, is_free: Callable[[int], bool]) -> FragmentRounds | None:
        """There is a place: who goes first of those that were turned away and still want it.

        Who is not free, because something of it is still being put away, waits on.
        """
        for machine in sorted(self._turned_away.values(), key=rank):
            if not is_free(machine.fragment):
                continue
            del self._turned_away[machine.fragment]
            if machine.wants_a_round(now):
                return machine
        return None


def who_gives_way(
    called: FragmentRounds, holders: Iterable[FragmentRounds], now: float
) -> FragmentRounds | None:
    """Whose place this one may have because somebody waits for it: the last in order of those
    of which nothing is committed."""
    if not called.is_called(now):
        return None
    before = (Phase.WANTED, Phase.JOINING, Phase.PROMISED)
    behind = [m for m in holders if m.phase in before and rank(m) > rank(called)]
    return max(behind, key=rank, default=None)
