"""Do all on one lineage hold the same bits? Digests are compared, and a minority gives way.

Equal lineages mean equal bits unless a machine computes wrongly: bad memory, a processor that
flushes subnormals, a bug. Nobody would notice, and everything that such a peer offers from then on
is relative to numbers that nobody else has. So after some versions the members of a round tell each
other the digest of what they hold. Pure: it counts votes, and whoever drives it acts on them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from averaging.history.lineage import Lineage
from dht.identity import PeerId

LINEAGES_MAX = 4
"""Versions whose digests are kept: votes may come before the own one is taken, or late."""
VOTES_MAX = 64
MAJORITY_MIN = 2
"""So many others must agree with each other before anybody gives way to them."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """Nobody has other bits, as far as is known."""


@dataclass(frozen=True, slots=True)
class Others:
    """Some have other bits, and more have mine, or nobody can tell: they are told by theirs."""

    peers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Minority:
    """More have the same other bits than have mine: take theirs."""

    digest: bytes
    holders: tuple[PeerId, ...]
    with_me: int
    """How many have what I have, myself included."""


Verdict: TypeAlias = Agreed | Others | Minority


class Audit:
    """The digests of one fragment's last audited states."""

    __slots__ = ("_mine", "_voters", "_votes")

    def __init__(self) -> None:
        self._votes: OrderedDict[Lineage, dict[PeerId, bytes]] = OrderedDict()
        self._mine: dict[Lineage, bytes] = {}
        self._voters: dict[Lineage, frozenset[PeerId]] = {}

    def __repr__(self) -> str:
        return f"Audit({len(self._mine)} own digests, {len(self._votes)} lineages)"

    def took(self, lineage: Lineage, digest: bytes, voters: Iterable[PeerId]) -> Verdict:
        """My own digest of a state, and whose word about it counts: who made it with me."""
        self._of(lineage)
        self._mine[lineage] = digest
        self._voters[lineage] = frozenset(voters)
        return self._verdict(lineage)

    def heard(self, sender: PeerId, lineage: Lineage, digest: bytes) -> Verdict:
        """Somebody's digest. Its word on a lineage is its last one."""
        votes = self._of(lineage)
        if sender in votes or len(votes) < VOTES_MAX:
            votes[sender] = digest
        return self._verdict(lineage)

    def _of(self, lineage: Lineage) -> dict[PeerId, bytes]:
        votes = self._votes.setdefault(lineage, {})
        while len(self._votes) > LINEAGES_MAX:
            old, _ = self._votes.popitem(last=False)
            self._mine.pop(old, None)
            self._voters.pop(old, None)
        return votes

    def _verdict(self, lineage: Lineage) -> Verdict:
        mine = self._mine.get(lineage)
        if mine is None:
            return Agreed()
        voters = self._voters[lineage]
        votes = {p: d for p, d in self._votes[lineage].items() if p in voters}
        apart = tuple(sorted(peer for peer, digest in votes.items() if digest != mine))
        if not apart:
            return Agreed()
        with_me = 1 + sum(digest == mine for digest in votes.values())
        count = Counter(votes[peer] for peer in apart)
        digest, most = min(count.items(), key=lambda item: (-item[1], item[0]))
        if most < MAJORITY_MIN or most <= with_me:
            return Others(apart)
        return Minority(digest, tuple(p for p in apart if votes[p] == digest), with_me)
