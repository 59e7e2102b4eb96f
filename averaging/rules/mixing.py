"""Mixing: rounds whose members stand on different lineages, and how often they average states.

Where all peers fit into one group, two lineages are a healed fork. They are **mixed** once,
weighted by the tokens merged since they parted (``averaging.round.gathering.roster``), and nothing
below applies.

With more peers than one group holds, peers are dealt into groups by a hash that changes with every
version. Every round leaves its group on a lineage of its own, so the members of the next round all
differ. If only displacements were averaged then (a **merge**, after which everybody steps on its
own weights), peers would drift apart without bound. Such a round is a **meld**: every member
uploads its displacement, its theta and its momentum. The reducers average all three, and everybody
takes the outer step on the reducers' bytes and leaves with equal bits, on a lineage that grew out
of those that a contributor stands on. A meld is a barrier for replay: a peer that was away fetches
a state.

- **Each member counts the same**, not each lineage by its tokens (displacements have their
  weights). That keeps the mean of the whole swarm where it is, whichever peers meet, and the
  variance between peers falls by (r-1)/(N-1) with r random equal groups of N peers:
  ``test_swarm_mixing.py`` holds it within 20%, the first meld within 5%. Tokens since the fork
  would count a side once for every lineage it has.
- **Every member carries its state**, so a seal may leave out any of them, as in a merge. One copy
  per lineage saves little (members seldom share one) and would void the round with each death.
- **Peers one or two versions behind take part as they are**, weights and all: such a peer counts
  for one of the group, and a state transfer would bring it the same a round later.
- **One lineage is no authority any more.** That a state lacks some work does not mean that no
  other state has it, and all are mixed eventually. So a doubt ends with the work counted as merged
  elsewhere, and the lighter side of a fork does not offer again what others carry on with;
  otherwise work was merged twice (storms of several groups, seeds 18 and 64; soak seeds 7079, 7319
  and 201069). The price: work on a lighter side, or in a round that a majority gives up and nobody
  finishes, can be lost.

The default is a meld at every version. A value then costs 6.5 bytes up and as many down, where a
merge in int4 costs half a byte each way, so it wants long cycles. Rarer melds, smaller codecs and
other dealings were measured on 21 November 2026 (``shoal simulate swarm
tests/benchmark/swarm_mixing.toml``; docs/research/results-groups.md has the set-up). The
columns: loss of the mean model, of peers' own models, dispersion, merged tokens, bytes per token.

    meld every version, f32 theta, f16 momentum   0.0049  0.069  3.3  95%  19.4
    f16 theta, int8 momentum                      0.0051  0.069  3.3  96%  16.7
    groups of even size                           0.0048  0.054  2.9  96%  20.6
    every second version                          0.0047  0.080  3.7  95%  13.4
    every fourth                                  0.0051  0.143  5.2  88%   9.9
    mixing.dispersion_max = 0.5                   0.0048  0.074  3.6  88%  15.6
    mixing.dispersion_max = 1.0                   0.0051  0.092  3.7  74%  10.7
    never                                         0.0041  0.294  7.8  79%   5.5

Every second version comes near for two thirds of the bytes. A bound on the dispersion spends as
many bytes no better, and fewer tokens stay merged, because between melds each peer has a lineage of
its own, which dies with its peer. f16 and int8 for the state cost nothing measurable and save
almost half, but theta stays f32 until somebody has looked at the end of a long run, where steps are
smaller than the grid of an f16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from averaging.history.standing import Apart, IAmBehind, Relation, Same, TheyAreBehind
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
        case Apart(founded_apart=True):
            return False
        case Apart() as apart:
            newest = max(mine.version, theirs.version)
            recent = apart.ancestor is not None and newest - apart.ancestor <= RECENT
            return recent or not (apart.i_am_light or apart.they_are_light)
    raise AssertionError("a relation without a case")


@dataclass(frozen=True, slots=True, kw_only=True)
class MixingPolicy:
    """The frequency of melds in rounds of several groups, and the codec of each part of a state."""

    every: int = 1
    """Versions from one meld to the next; 0: no melds, and peers drift apart."""
    dispersion_max: float | None = None
    """Meld only when a peer is about to be further than this from its group.

    The distance (over the norm) was measured at the peer's last meld, and grows with the root of
    the versions since.
    """
    theta: str = "f32"
    momentum: str = "f16"

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ValueError(
                f"every is {self.every}; it must be a number of versions, or 0 for never"
            )
        if self.dispersion_max is not None and not self.dispersion_max > 0:
            raise ValueError(f"dispersion_max is {self.dispersion_max}; it must be above 0")

    @property
    def always(self) -> bool:
        """True if every round of several groups melds, so that its members leave with one lineage.

        Otherwise each peer has a lineage of its own between melds, which no other can certify: a
        member's word is taken for it (``averaging.round.gathering.parents``).
        """
        return self.every == 1 and self.dispersion_max is None

    def melds(self, version: int, measured: Measured | None) -> bool:
        """Return whether the round that makes ``version`` melds, as its leader sees it."""
        if not self.every:
            return False
        if self.dispersion_max is None:
            return version % self.every == 0
        if measured is None:
            return True
        return measured.expected(version) >= self.dispersion_max

    def codec(self, displacement: str) -> str:
        """Return the codec of a meld's uploads, as ``averaging.numbers.arithmetic`` reads it."""
        return f"{displacement}/{self.theta}/{self.momentum}"


@dataclass(frozen=True, slots=True)
class Measured:
    """A peer's distance from its group at its last meld."""

    version: int
    dispersion: float
    after: int
    """Versions since the meld before that."""

    def expected(self, version: int) -> float:
        """Return the dispersion expected at ``version``: a random walk since the last meld."""
        since = max(1, version - self.version)
        return self.dispersion * float((since / max(1, self.after)) ** 0.5)
