"""Turns of fragments, when more of them want a round than may be under way at one peer.

Without an order, the fragment that goes first by luck goes first again a cycle later, and the last
one never has its turn. So the fragment with the fewest versions goes first. All peers of a lineage
count the same versions, so they prefer the same fragment, and meet.

Two peers that hold their only place for different fragments would wait for each other until the
quorum's deadline. So a peer that is called for a fragment that goes first gives up the other one,
as long as it is not committed.

Only rounds that exchange data count as under way; a fragment that waits for others holds no place,
or in swarms of several groups it would block the fragment that another group waits for.

Where the first fragment to ask has the place, the last one never has a round (in brackets; four
rounds at once, 400 s of virtual time):

    peers, in groups of; slowest; line; fragments     versions                 no quorum
    4, 4; 1x; 1000 kB/s; 24                           16 to 17 (16 to 17)      0 (0)
    4, 4; 2x; 2 kB/s; 24                              11 (1 to 6)              0 (68)
    6, 6; 4x; 2 kB/s; 24                              6 to 7 (0 to 5)          10 (69)
    2, 2; 1x; 2 kB/s; 4, of which one at once         29 to 30 (1 to 17)       0 (15)
    12, 4; 1.5x; 4 kB/s; 24                           13 to 16 (1 to 9)        31 (238)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from averaging.round.interface.phase import UNCOMMITTED
from averaging.round.machine import FragmentRounds

NO_PLACE = "as many rounds as may be are under way"
"""The reason given for a fragment that is turned away."""


def rank(machine: FragmentRounds) -> tuple[int, int]:
    """The sort key of turns: the fragment that goes first has the lowest."""
    version = machine.standing.version if machine.standing is not None else 0
    return version, machine.fragment


class Turns:
    """The fragments of one peer that wait for a place."""

    __slots__ = ("_turned_away",)

    def __init__(self) -> None:
        self._turned_away: dict[int, FragmentRounds] = {}

    def __bool__(self) -> bool:
        return bool(self._turned_away)

    def __contains__(self, fragment: int) -> bool:
        return fragment in self._turned_away

    def turn_away(self, machine: FragmentRounds) -> bool:
        """Let a fragment wait for a place. ``False``: it waits already."""
        known = machine.fragment in self._turned_away
        self._turned_away[machine.fragment] = machine
        return not known

    def next(self, now: float, *, is_free: Callable[[int], bool]) -> FragmentRounds | None:
        """The first of the waiting fragments that still want a round, when there is a place for
        one.

        A fragment that is not free, because its last round is still being put away, waits on.
        """
        for machine in sorted(self._turned_away.values(), key=rank):
            if not is_free(machine.fragment):
                continue
            del self._turned_away[machine.fragment]
            if machine.joining.wants_a_round(now):
                return machine
        return None


def holder_that_gives_way(
    called: FragmentRounds, holders: Iterable[FragmentRounds], now: float
) -> FragmentRounds | None:
    """The holder of a place that must give way to this fragment, for which a leader waits.

    It is the last in order of the holders of which nothing is committed; ``None`` if there is none
    after ``called``.
    """
    if not called.joining.is_called(now):
        return None
    behind = [m for m in holders if m.phase in UNCOMMITTED and rank(m) > rank(called)]
    return max(behind, key=rank, default=None)
