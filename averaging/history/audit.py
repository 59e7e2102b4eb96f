"""An audit checks that peers on one lineage hold the same bits; a minority takes the others' state.

Equal lineages mean equal bits unless a machine computes wrongly: bad memory, a processor that
flushes subnormals, a bug. Nobody would notice, and everything that such a peer offers from then on
is relative to numbers that no other peer has. So after every 32 versions the members of a round
exchange digests of theta, momentum and ``merged``. A peer whose bits differ from those of a
majority logs ``diverged`` and fetches the majority's state. This module counts the votes; the
driver acts on the verdict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from averaging.history.lineage import Lineage
from dht.bounded_mapping import BoundedMapping, by_age
from dht.identity import PeerId

LINEAGES_MAX = 4
"""States whose digests are kept: votes may arrive before a peer's own digest is taken, or late."""
VOTES_MAX = 64
"""Votes kept per state, on average."""
MAJORITY_MIN = 2
"""Smallest number of other peers that must agree before a peer takes their state."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """No known vote differs from this peer's digest."""


@dataclass(frozen=True, slots=True)
class Others:
    """Some peers have other bits, but they are no majority. Each of them gets its own verdict."""

    peers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Minority:
    """More peers have one other digest than have this peer's: fetch their state."""

    digest: bytes
    holders: tuple[PeerId, ...]
    with_me: int
    """Number of peers with this peer's digest, itself included."""


Verdict: TypeAlias = Agreed | Others | Minority


class Audit:
    """The digests of the last audited states of one fragment."""

    __slots__ = ("_mine", "_votes")

    def __init__(self, worth: Callable[[PeerId], float] = lambda peer: 0.0) -> None:
        """``worth``: how much the work of a peer counts here. Votes come before the own digest."""
        self._votes = BoundedMapping[tuple[Lineage, PeerId], bytes](
            "votes on bits",
            LINEAGES_MAX * VOTES_MAX,
            worth=lambda vote, _: worth(vote[1]),
            author=lambda vote, _: vote[1],
        )
        self._mine = BoundedMapping[Lineage, tuple[bytes, frozenset[PeerId]]](
            "own digests", LINEAGES_MAX, worth=by_age
        )
        """This peer's digests, each with the peers whose votes count."""

    def took(self, lineage: Lineage, digest: bytes, voters: Iterable[PeerId]) -> Verdict:
        """Record this peer's own digest, and ``voters``, the peers that made the state with it.

        Only the votes of ``voters`` count.
        """
        self._mine[lineage] = digest, frozenset(voters)
        return self._verdict(lineage)

    def heard(self, sender: PeerId, lineage: Lineage, digest: bytes) -> Verdict:
        """Record another peer's digest, which replaces its earlier vote on the same lineage."""
        self._votes.renew((lineage, sender), digest)
        return self._verdict(lineage)

    def _verdict(self, lineage: Lineage) -> Verdict:
        if lineage not in self._mine:
            return Agreed()
        mine, voters = self._mine[lineage]
        votes = {p: self._votes[lineage, p] for p in voters if (lineage, p) in self._votes}
        apart = tuple(sorted(peer for peer, digest in votes.items() if digest != mine))
        if not apart:
            return Agreed()
        with_me = 1 + sum(digest == mine for digest in votes.values())
        count = Counter(votes[peer] for peer in apart)
        digest, most = min(count.items(), key=lambda item: (-item[1], item[0]))
        if most < MAJORITY_MIN or most <= with_me:
            return Others(apart)
        return Minority(digest, tuple(p for p in apart if votes[p] == digest), with_me)
