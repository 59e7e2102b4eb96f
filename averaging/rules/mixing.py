"""What a round does when its members stand on different lineages, and how often.

With more peers than one group holds, every round leaves each group on a lineage of its own, so
the members of the next one all differ. If only displacements are averaged then, peers drift apart
without bound (REFERENCE 2.1). A **meld** averages slow weights and momentum of all its members,
each counting the same, merges their displacements, and takes the outer step on the means: everybody
leaves with the reducer's bytes. Each member counting the same keeps the mean of the whole swarm
where it is, whoever meets whom. Rounds in between only **merge**: everybody steps on its own
weights.

Where everybody fits into one group two lineages are a healed fork, which is a **mix** by the tokens
merged since they parted (``averaging.round.roster``), once; none of this applies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from averaging.history.standing import Apart, IAmBehind, Relation, Same, TheyAreBehind
from averaging.messages import Head

MELD_LAG: Final = 2
"""In a swarm of several groups, who is no further back than this takes part as it is: its weights
count for one of the group. Fetching a state would cost more, and bring the same a round later."""

RECENT: Final = 8
"""In such a swarm lineages part at every round. Which side is the lighter is only asked when they
have been apart for more versions than this."""


def meets(relation: Relation, mine: Head, theirs: Head) -> bool:
    """Whether two peers of a swarm of several groups take part in a round just as they stand."""
    match relation:
        case Same():
            return True
        case TheyAreBehind() | IAmBehind():
            return abs(mine.version - theirs.version) <= MELD_LAG
        case Apart() as apart:
            newest = max(mine.version, theirs.version)
            recent = apart.ancestor is not None and newest - apart.ancestor <= RECENT
            return recent or not (apart.i_am_light or apart.they_are_light)
    raise AssertionError("a relation without a case")


@dataclass(frozen=True, slots=True, kw_only=True)
class MixingPolicy:
    """How often the rounds of several groups meld, and what of a state travels in which codec."""

    every: int = 1
    """Melds come with every so many versions; 0: never, and peers drift apart."""
    dispersion_max: float | None = None
    """Meld only when a peer is about to be further than this from its group, as it measured
    at the last meld: the distance over the norm, growing with the root of the versions since."""
    theta: str = "f32"
    momentum: str = "f16"

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ValueError(f"every is {self.every}; it counts versions, 0 for never")
        if self.dispersion_max is not None and not self.dispersion_max > 0:
            raise ValueError(f"dispersion_max is {self.dispersion_max}; it is above 0")

    def melds(self, version: int, measured: Measured | None) -> bool:
        """Whether the round that makes ``version`` melds, as its leader sees it."""
        if not self.every:
            return False
        if self.dispersion_max is None:
            return version % self.every == 0
        if measured is None:
            return True
        return measured.expected(version) >= self.dispersion_max

    def codec(self, displacement: str) -> str:
        """The name of what a meld uploads, for ``averaging.numbers.arithmetic``."""
        return f"{displacement}/{self.theta}/{self.momentum}"


@dataclass(frozen=True, slots=True)
class Measured:
    """How far a peer was from its group when it last melded."""

    version: int
    dispersion: float
    after: int
    """Versions since the meld before."""

    def expected(self, version: int) -> float:
        """The dispersion when ``version`` is made: a random walk since the last meld."""
        since = max(1, version - self.version)
        return self.dispersion * float((since / max(1, self.after)) ** 0.5)
