"""Mixing: how lineages become one, in rounds that average states and at the end of a run.

A round whose members stand on one state is a **merge** of their displacements. Where they stand on
several it is a **meld**: every member uploads its displacement, its theta and its momentum (if the
run has it: ``outer.keeps_momentum``). The reducers average each of them, and everybody takes the
outer step on the reducers' bytes and leaves with equal bits, on a lineage that grew out of those
that a contributor stands on. A meld is a barrier for replay: a peer that was away fetches a state.

Where all peers fit into one group, two lineages are the sides of a healed fork, and a meld makes
one of them. With more peers than one group holds, peers are dealt into groups by a hash that
changes with every version. Every round leaves its group on a lineage of its own, so the members of
the next round all differ. If only displacements were averaged then, after which everybody steps on
its own weights, peers would drift apart without bound.

- **Each member counts the same**, not each lineage by its tokens (displacements have their
  weights). That keeps the mean of the whole swarm where it is, whichever peers meet, and the
  variance between peers falls by (r-1)/(N-1) with r random groups of N peers:
  within 20% in simulated swarms of 20 and 32 peers, the first meld within 5%. Tokens since the
  fork would count a side once for every lineage it has.
- **Every member carries its state**, so a seal may leave out any of them, as in a merge. One copy
  per lineage saves little (members seldom share one) and would void the round with each death.
- **Peers one or two versions behind take part as they are** among several groups, weights and all:
  such a peer counts for one of the group, and a state transfer would bring it the same a round
  later.
- **One lineage is no authority any more** among several groups. That a state lacks some work does
  not mean that no other state has it, and all are melded eventually. So a doubt ends with the work
  counted as merged elsewhere, and the lighter side of a fork does not offer again what others carry
  on with; otherwise work was merged twice (storms of several groups, seeds 18 and 64; soak seeds
  7079, 7319 and 201069). The price: work on a lighter side, or in a round that a majority gives up
  and nobody finishes, can be lost.

A value then costs 6.5 bytes up and as many down (4.5 without momentum), where a merge in int4 costs
half a byte each way, so several groups want long cycles. Rarer melds and other codecs were measured
on 21 November 2026 (RESULTS, 'Swarms of several groups', has the set-up). The columns: loss of the
mean model, of peers' own models, dispersion, merged tokens, bytes per token.

    meld every version, f32 theta, f16 momentum   0.0049  0.069  3.3  95%  19.4
    f16 theta, int8 momentum                      0.0051  0.069  3.3  96%  16.7
    every second version                          0.0047  0.080  3.7  95%  13.4
    every fourth                                  0.0051  0.143  5.2  88%   9.9
    when peers are 0.5 of the norm apart          0.0048  0.074  3.6  88%  15.6
    never                                         0.0041  0.294  7.8  79%   5.5

Rarer melds are gone: they save a third of the bytes, but between two melds each peer has a lineage
of its own, which dies with its peer and which nobody else can certify. f16 and int8 for the state
cost nothing measurable and save almost half, but theta stays f32 until somebody has looked at the
end of a long run, where steps are smaller than the grid of an f16.

**The end of a run**, by tokens or at a version: one model, however many groups there are.

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
(``averaging.round.opinions.ending``).

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
from typing import Final

from msgspec import Struct

from averaging.history.chain import Chain
from averaging.history.standing import (
    Apart,
    IAmBehind,
    Relation,
    Same,
    TheyAreBehind,
    Unclear,
    tokens_of,
)
from averaging.messages import Head
from averaging.numbers.outer import keeps_momentum

MELD_LAG: Final = 2
"""Versions that a peer may be behind and still take part as it is, in a swarm of several groups."""

RECENT: Final = 8
"""Versions for which lineages of such a swarm may be apart before a peer asks which side is
lighter: they part at every round.
"""


def meets(relation: Relation, mine: Head, theirs: Head) -> bool:
    """Return whether two peers of a swarm of several groups meet in a round just as they stand."""
    match relation:
        case Same():
            return True
        case TheyAreBehind() | IAmBehind():
            return abs(mine.version - theirs.version) <= MELD_LAG
        case Apart(founded_apart=True) | Unclear():
            return False
        case Apart() as apart:
            newest = max(mine.version, theirs.version)
            recent = apart.ancestor is not None and newest - apart.ancestor <= RECENT
            return recent or not (apart.i_am_light or apart.they_are_light)
    raise AssertionError("a relation without a case")


@dataclass(frozen=True, slots=True, kw_only=True)
class MixingPolicy:
    """The codecs of a state in a meld."""

    theta: str = "f32"
    momentum: str = "f16"

    def codec(self, displacement: str, mu: float) -> str:
        """Return the codec of a meld's uploads, as ``averaging.numbers.arithmetic`` reads it."""
        states = (self.theta, self.momentum) if keeps_momentum(mu) else (self.theta,)
        return "/".join((displacement, *states))


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
