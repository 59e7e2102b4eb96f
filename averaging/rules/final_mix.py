"""The end of a run by tokens or at a version: one model, however many groups there are.

A fragment is done when it has reached the run's **goal**: ``merged`` has the run's tokens, or it is
at the version that the run's owner has ordered to be the last. The end is found in history and not
negotiated: where all peers fit into one group, the first such version is **final**, every peer that
follows the lineage finds it, and no absent peer is needed. Peers linger until the others have it.

Several groups reach the goal each on a lineage of its own. A peer that stands on such a version, or
hears of one, **closes ranks**: it takes all peers for one group (as far as a roster is long: 64),
comes whenever it is called, and closes no roster while others come. The groups meld, and a version
that grew out of one at the goal is final. (Groups that hear of the order when they are beyond its
version do not meld.) A majority in the meld is enough: the others take its state. Of two final
versions (more peers than a roster holds, or a partition, also of a single group), every peer takes
the heavier; peers that have ended go on to tell one another where they stand
(``averaging.round.gathering.lingering``).

The groups meld as they stand, also where one state grew out of another. No leader sees that of two
others, and a peer that is a version behind may be unable to catch up: a link has the signatures of
one small group at most, fewer than all peers as one group ask for.

Simulated with 90 and 256 peers in groups of 16: one lineage, at most three cycles after the tokens
are merged, with the quality of the mean of those who were in it (``test_swarm_end.py``, and with
real peers ``test_crowd.py``; in experiments ``[end] together = true``). A peer that
falsely claims to be at the goal makes others meet in one group and nothing worse, because
final is only a version that they have themselves.

This module says when a version is final and which side gives way; ``averaging.round.machine``
closes the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from msgspec import Struct

from averaging.history.chain import Chain
from averaging.history.standing import tokens_of
from averaging.messages import Head

LINKS_SEARCHED = 1024
"""Links searched for one at the goal. A meld of 64 lineages adds some links of each."""


class Goal(Struct, frozen=True):
    """The state with which a fragment is done: one with these tokens, or of this version."""

    tokens: int | None
    version: int | None = None

    def is_reached(self, version: int, tokens: int) -> bool:
        return (self.tokens is not None and tokens >= self.tokens) or (
            self.version is not None and version >= self.version
        )

    def is_reached_by(self, head: Head) -> bool:
        return self.is_reached(head.version, tokens_of(head))


def grew_from(chain: Chain, goal: Goal) -> bool:
    """Return whether a version behind the newest one was already at the goal."""
    before = islice(reversed(chain.before_tip()), LINKS_SEARCHED)
    return any(goal.is_reached(link.version, link.tokens) for link in before)


def shows_final(head: Head, goal: Goal) -> bool:
    """Return whether a head is final where ranks are closed, by the chain that it shows."""
    return goal.is_reached_by(head) and any(
        goal.is_reached(link.version, link.tokens)
        for link in head.links
        if link.lineage != head.lineage
    )


@dataclass(frozen=True, slots=True)
class RunsEnd:
    """The end of a run, as a peer sees it that is in its only group, has closed ranks, or stands on
    a final state."""

    goal: Goal
    melds: bool
    """Ranks are closed: a state at the goal is melded first. Else it is final."""

    def gives_way(self, mine: Head, theirs: Head) -> bool:
        """Return whether this peer takes the other's state, which is final and outranks its own."""
        is_final = shows_final(theirs, self.goal) if self.melds else self.goal.is_reached_by(theirs)
        return is_final and self._rank(mine) < self._rank(theirs)

    def settles(self, mine: Head, theirs: Head) -> bool:
        """Return whether one of two peers on different lineages takes the other's state."""
        return self.gives_way(mine, theirs) or self.gives_way(theirs, mine)

    def _rank(self, head: Head) -> tuple[bool, bool, int, bytes]:
        """A side that has not reached the last version may have merged more tokens."""
        ended, melded = self.goal.is_reached_by(head), shows_final(head, self.goal)
        return melded, ended, tokens_of(head), head.lineage
