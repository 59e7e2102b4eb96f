"""Mixing: rounds whose members stand on different lineages average states.

A round whose members stand on one state is a **merge** of their displacements. Where they stand on
several it is a **meld**: every member uploads its displacement, its theta and its momentum. The
reducers average all three, and everybody takes the outer step on the reducers' bytes and leaves
with equal bits, on a lineage that grew out of those that a contributor stands on. A meld is a
barrier for replay: a peer that was away fetches a state.

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

A value then costs 6.5 bytes up and as many down, where a merge in int4 costs half a byte each way,
so several groups want long cycles. Rarer melds and other codecs were measured on 21 November 2026
(RESULTS, 'Swarms of several groups', has the set-up). The columns: loss of the mean model, of
peers' own models, dispersion, merged tokens, bytes per token.

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
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from averaging.history.standing import Apart, IAmBehind, Relation, Same, TheyAreBehind, Unclear
from averaging.messages import Head

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

    def codec(self, displacement: str) -> str:
        """Return the codec of a meld's uploads, as ``averaging.numbers.arithmetic`` reads it."""
        return f"{displacement}/{self.theta}/{self.momentum}"
