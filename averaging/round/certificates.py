"""Certificates: which versions of other peers' histories this peer takes.

Every head that a peer shows is signed by it and by others that stand, or stood, on the same link:
version, lineage and tokens. The lineage is a hash over everything that made the state, so whoever
signs it answers for the commits, the seals and the merged bytes of the whole chain, and replaying
from a known lineage to a certified one needs no further proof. A peer signs a link when it first
shows it, whether it made it in a round, folded it, or took it over.

A link is **certified** for this peer when enough peers have signed whose word counts here: a
majority of the smallest round that the run's quorum allows among those in sight, at least two, or
all there are if they are fewer (``Neighbourhood.electorate``). So nobody's word alone moves a peer
that sees more than one other. Nothing is learned from signatures of strangers or of newcomers.
Peers that contributed to the state that this peer holds count by themselves: newcomers that come
all at once beside a founder follow it, however many they are.

Members sign as they finish a round. The coordinator gathers their signatures and sends them along
when all have finished; a peer that is shown a head with too few of them asks others
(``averaging.round.catching_up``). Joins and calls carry the sender's signature alone, because most
of them are read by peers that stand on the same link.
"""

from __future__ import annotations

import msgspec

from averaging import messages
from averaging.bounded_mapping import BoundedMapping
from averaging.history.standing import Standing, tokens_of
from averaging.messages import Head, Link, Signatures
from averaging.round.identity import Identity
from averaging.round.neighbourhood import Neighbourhood
from dht.identity import PeerId

HOLDERS_MIN = 2
"""Peers that must hold the same bits of a state before it is taken, where as many are in sight."""
LINKS_KEPT = 16
"""Links whose signatures are kept. Older ones are of no use: a round's link follows on them."""
SIGNATURES_SPARE = 1
"""Signatures shown beyond those that this peer would need itself: others may count fewer peers."""


class Certificates:
    """The signatures under the newest links that this peer stands on or has heard of."""

    __slots__ = ("_id", "_kept", "_peers", "standing")

    def __init__(self, identity: Identity, peers: Neighbourhood, standing: Standing | None) -> None:
        self._id = identity
        self.standing = standing
        """This peer's standing; the machine keeps it up to date."""
        self._peers = peers
        self._kept = BoundedMapping[Link, dict[PeerId, bytes]](LINKS_KEPT)

    def __repr__(self) -> str:
        return f"Certificates({self._id.me}, {len(self._kept)} links)"

    def show(self, head: Head, now: float, *, briefly: bool = False) -> Head:
        """Return a head with the signatures under it; the own one if this peer stands on it.

        ``briefly``: with the own one alone.
        """
        link = link_of(head)
        if self.standing is not None and link == link_of(self.standing.head()):
            self._sign(link)
        most = 1 if briefly else self._needed(len(self._peers.electorate(now))) + SIGNATURES_SPARE
        known = self._kept.get(link, {})
        order = sorted(known, key=lambda peer: (peer != self._id.me, peer))
        signatures = tuple((peer, known[peer]) for peer in order[:most])
        return msgspec.structs.replace(head, signatures=signatures)

    def _sign(self, link: Link) -> None:
        known = self._of(link)
        if self._id.me not in known:
            known[self._id.me] = self._id.sign(self._claim(link))

    def _claim(self, link: Link) -> bytes:
        return messages.link_claim(self._id.topic, self._id.fragment, link)

    def _of(self, link: Link) -> dict[PeerId, bytes]:
        """The signatures under a link, which is the youngest of those that are kept now."""
        known = self._kept.pop(link, {})
        self._kept[link] = known
        return known

    def hear(self, link: Link, signatures: Signatures, now: float) -> None:
        """Keep the signatures under a link of known peers, until there are enough."""
        if not signatures or self.is_certified(link, now):
            return
        known, claim = self._kept.get(link, {}), self._claim(link)
        new = {
            peer: signature
            for peer, signature in signatures
            if peer not in known
            and peer != self._id.me
            and self._peers.knows(peer)
            and self._id.verify(peer, claim, signature)
        }
        if new:
            self._of(link).update(new)

    def is_certified(self, link: Link, now: float, *, by_one: bool = False) -> bool:
        """True if enough peers that count have signed this link. ``by_one``: one is enough."""
        known = self._kept.get(link)
        if not known:
            return False
        electorate = self._peers.electorate(now)
        signed = len(electorate.intersection(known))
        if signed >= (1 if by_one else self._needed(len(electorate))):
            return True
        contributors = self._contributors
        return self._needed(len(contributors)) <= len(contributors & known.keys())

    def counts(self, peer: PeerId, now: float) -> bool:
        """True if a peer's word counts when a state is taken."""
        return peer in self._peers.electorate(now) or peer in self._contributors

    def holders_min(self, now: float) -> int:
        """Number of peers that count and must hold the same bits of a state that is fetched."""
        alone = len(self._contributors) == 1
        return 1 if alone else min(HOLDERS_MIN, len(self._peers.electorate(now)))

    @property
    def _contributors(self) -> frozenset[PeerId]:
        """The other peers whose work is in the state that this peer holds."""
        if self.standing is None:
            return frozenset()
        return frozenset(self.standing.merged) - {self._id.me}

    def signers(self, link: Link) -> tuple[PeerId, ...]:
        """Return the other peers that are known to have signed a link."""
        return tuple(sorted(peer for peer in self._kept.get(link, {}) if peer != self._id.me))

    def _needed(self, others: int) -> int:
        """The number of peers that must have signed a link, of so many that count."""
        roster = min(others + self._peers.trains, self._peers.group_size)
        majority = self._id.policy.quorum.needed(roster) // 2 + 1
        return max(1, min(others, max(2, majority)))


def link_of(head: Head) -> Link:
    """Return the newest link of a head."""
    return Link(head.version, head.lineage, tokens_of(head))
