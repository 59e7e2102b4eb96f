"""Certificates: which versions of other peers' histories this peer takes.

Every head that a peer shows is signed by it and by others that stand, or stood, on the same link:
version, lineage and tokens. The lineage is a hash over everything that made the state, so a peer
that signs it answers for the commits, the seals and the merged bytes of the whole chain, and
replaying from a known lineage to a certified one needs no further proof. A peer signs a link when
it first shows it, whether it made it in a round, folded it, or took it over.

A link is **certified** for this peer when enough peers whose word counts here have signed it: a
majority of the smallest round that the run's quorum allows among those in sight (a quorum counts as
a majority of them at most), at least two, or all there are if they are fewer
(``Neighbourhood.electorate``). So nobody's word alone moves a peer that sees more than one other.
Nothing is learned from signatures of strangers or of newcomers. Peers that contributed to the state
that this peer holds count by themselves: newcomers that come all at once beside a founder follow
it, however many they are.

A state that the run's owner has attested needs no certificate. Nor does the one that this peer left
for a meld of two sides of a fork, to which it may have to go back
(``averaging.round.gathering.catching_up``): it knows its digest.

Members sign as they finish a round. The coordinator gathers their signatures and sends them along
when all have finished; a peer that is shown a head with too few of them asks others
(``averaging.round.gathering.catching_up``). Everybody keeps all signatures under its own standing,
and shows them to peers that are behind: these may count others. Joins and calls carry the sender's
signature alone where most of them are read by peers that stand on the same link.

``averaging.round.gathering.objections`` judges the states that a round of several lineages
continues. Among several groups a link can have no more signatures than its group has peers, and
groups are smaller than they may be: there a majority of the smallest quorum of the smallest group
is enough, which is two for groups of 16. So colluding peers in that number can bring a state of
their invention into a meld, where it counts as one member's of many. A higher bar would keep small
groups out of every meld.
"""

from __future__ import annotations

import msgspec

from averaging import messages
from averaging.history.standing import Standing, brief, tokens_of
from averaging.messages import Committed, Head, Link, Message, ParentCertificate, Signatures
from averaging.round.interface.identity import Identity
from averaging.round.opinions.neighbourhood import Neighbourhood
from dht.bounded_mapping import BoundedMapping
from dht.identity import PeerId

HOLDERS_MIN = 2
"""Peers that must hold the same bits of a state before it is taken, where as many are in sight."""
LINKS_KEPT = messages.ROSTER_MAX
"""Links whose signatures are kept: as many as the members of a round can stand on. Older ones are
of no use: a round's link follows on them."""
SIGNATURES_SPARE = 1
"""Signatures shown beyond those that this peer would need itself: others may count fewer peers."""
SIGNATURE_BYTES = 77
"""A signature with a short name, encoded."""
SPARE_OF_PARENT = 2
"""Spare signatures in the certificate of a parent, as far as there is room in a message."""
ENVELOPE_BYTES = 1_024
"""Largest size of a message beside commit and certificates."""


class Certificates:
    """The signatures under the newest links that this peer stands on or has heard of."""

    __slots__ = (
        "_contributed",
        "_counting",
        "_id",
        "_kept",
        "_left",
        "_peers",
        "among_groups_at",
        "shows_all",
        "standing",
    )

    def __init__(self, identity: Identity, peers: Neighbourhood, standing: Standing | None) -> None:
        self._id = identity
        self.standing = standing
        """This peer's standing; the machine changes it."""
        self._peers = peers
        self.among_groups_at: int | None = None
        """The version of the last own round beside which other groups had theirs, as far as this
        peer saw then."""
        self._kept = BoundedMapping[Link, dict[PeerId, bytes]](
            "certificates",
            LINKS_KEPT,
            # Links that only newcomers have signed take no other's place.
            worth=lambda _, signed: any(p == identity.me or peers.worth(p) > 0 for p in signed),
        )
        self._counting: tuple[float, frozenset[PeerId]] | None = None
        """The electorate while the machine takes one input."""
        self._contributed: tuple[Standing, frozenset[PeerId]] | None = None
        """The contributors to a standing."""
        self._left: dict[Link, bytes] = {}
        """The digest of the numbers at the link that this peer stood on before its last meld."""

        self.shows_all = False
        """True if others stand elsewhere: joins show all signatures under the own standing."""

    def show_in(self, message: Message, head: Head, now: float) -> Head:
        """Return the head of a message as its receiver needs it.

        Joins, calls and words of a finished round are mostly read by peers that stand on the same
        link, and show its newest links alone; joins and calls the own signature. Where others may
        stand elsewhere, a join has as many as a round needs to continue its link. A peer that is
        behind is shown all, others as many as certify what they are shown.
        """
        brief_kinds = messages.Join, messages.Call, messages.Finished
        proves = self.shows_all or self._peers.has_several_groups(now)
        most: int | None = messages.ROSTER_MAX if isinstance(message, messages.Behind) else None
        if isinstance(message, messages.Join) and proves:
            most = self.parent_needed(now) + SIGNATURES_SPARE
        elif isinstance(message, messages.Join | messages.Call):
            most = 1
        shown = self.show(head, now, signatures_max=most)
        return brief(shown) if isinstance(message, brief_kinds) and not proves else shown

    def show(self, head: Head, now: float, *, signatures_max: int | None = None) -> Head:
        """Return a head with the signatures under it; the own one if this peer stands on it.

        The own signature comes first, then those of peers that count. ``signatures_max``: not set,
        as many as certify a state, and a spare one.
        """
        link = link_of(head)
        if signatures_max is None:
            signatures_max = self._needed(len(self._electorate(now))) + SIGNATURES_SPARE
        return msgspec.structs.replace(head, signatures=self.under(link, now)[:signatures_max])

    def beside(self, message: Committed, to: PeerId, now: float) -> Committed:
        """Return the message of a commit with the certificates that its receiver needs."""
        commit = messages.decode_commit(message.commit)
        if len(commit.parents) == 1:
            return message
        index = commit.index(to)
        own = None if index is None else commit.members[index].parent
        # Nobody counts its own signature: a member that signed a parent before needs the others'.
        foreign = {
            place: tuple(signed for signed in self.under(parent, now) if signed[0] != to)
            for place, parent in enumerate(commit.parents)
            if place != own
        }
        room = messages.MESSAGE_MAX_BYTES - len(message.commit) - ENVELOPE_BYTES
        each = room // (SIGNATURE_BYTES * max(1, len(foreign)))
        each = min(each, self.parent_needed(now) + SPARE_OF_PARENT)
        certificates = tuple(
            ParentCertificate(place, _shortened(signatures[:each]))
            for place, signatures in foreign.items()
        )
        return messages.Committed(message.fragment, message.commit, message.signature, certificates)

    def under(self, link: Link, now: float) -> Signatures:
        """Return the known signatures under a link, those that count most first.

        The own one is made here if this peer stands on it: one that leads a meld may not have shown
        its standing to anybody before.
        """
        if self.standing is not None and link == link_of(self.standing.head()):
            self._sign(link)
        known = self._kept.get(link)
        if not known:
            return ()
        electorate, me = self._electorate(now), self._id.me
        order = sorted(known, key=lambda peer: (peer != me, peer not in electorate, peer))
        return tuple((peer, known[peer]) for peer in order)

    def _sign(self, link: Link) -> None:
        me = self._id.me
        known = self._kept.get(link, {})
        self._keep(link, me, known.get(me) or self._id.sign(self._claim(link)))

    def _claim(self, link: Link) -> bytes:
        return messages.link_claim(self._id.topic, self._id.fragment, link)

    def _keep(self, link: Link, peer: PeerId, signature: bytes) -> None:
        """Keep a signature under a link, which is the youngest of those that are kept now."""
        known = self._kept.get(link, {})
        known[peer] = signature
        self._kept.renew(link, known)

    def hear(self, link: Link, signatures: Signatures, now: float) -> None:
        """Keep the signatures under a link of known peers, until there are enough; under the link
        that this peer stands on, until there are ``ROSTER_MAX``, too.

        The own one is kept as well: it does not count here, and others are shown it.
        After a false one the rest is not looked at: the peer that shows it lies, and checking costs
        time.
        """
        is_here = self.standing is not None and link == link_of(self.standing.head())
        least = messages.ROSTER_MAX if is_here else 0
        if len(self._kept.get(link, ())) >= least and self.is_certified(link, now):
            return
        claim = self._claim(link)
        for peer, signature in signatures:
            known = self._kept.get(link, {})
            if peer in known or not self._peers.knows(peer):
                continue
            if not self._id.verify(peer, claim, signature):
                return
            self._keep(link, peer, signature)

    def is_certified(self, link: Link, now: float, *, by_one: bool = False) -> bool:
        """True if the owner attests this link, or enough peers that count have signed it.

        ``by_one``: one is enough.
        """
        if self._attested_digest(link) is not None:
            return True
        signers = frozenset(self._kept.get(link, ()))
        return bool(signers) and self._are_enough(signers, now, by_one=by_one)

    def _are_enough(self, signers: frozenset[PeerId], now: float, *, by_one: bool = False) -> bool:
        electorate = self._electorate(now)
        signed = len(electorate & signers)
        if signed >= (1 if by_one else self._needed(len(electorate))):
            return True
        contributors = self._contributors
        return self._needed(len(contributors)) <= len(contributors & signers)

    def left(self, link: Link, digest: bytes) -> None:
        """A meld took this peer away from a link with these numbers."""
        self._left = {link: digest}

    def has_left(self, link: Link) -> bool:
        """True if this peer stood on this link before its last meld."""
        return link in self._left

    def known_digest(self, link: Link) -> bytes | None:
        """Digest of the numbers at this link, if no other peer has to tell it."""
        return self._left.get(link) or self._attested_digest(link)

    def _attested_digest(self, link: Link) -> bytes | None:
        """Digest of the numbers at this link, if the run's owner has attested the state."""
        attested = self._id.book.orders.attested
        if not attested:
            return None
        return attested.get((self._id.fragment, link.version, link.lineage))

    def holds(self, parent: Link, now: float, *, by_one: bool = False) -> bool:
        """True if this peer may be in a round that continues this link of other members."""
        return self.is_certified(parent, now, by_one=by_one) or (
            self.parent_needed(now) <= len(self._counted(parent, now))
        )

    def is_proven(self, now: float) -> bool:
        """True if others may be in a round that continues the link that this peer stands on."""
        return self._signed(now) + 1 >= self.parent_needed(now)

    def _counted(self, link: Link, now: float) -> frozenset[PeerId]:
        return self._electorate(now).intersection(self._kept.get(link, ()))

    def parent_needed(self, now: float) -> int:
        """Number of signatures that a link needs for a round to continue it."""
        others = len(self._electorate(now))
        if self._are_among_groups(now):
            return self._majority_of_quorum(self._peers.smallest_group(now), others)
        return self._needed(others)

    def is_certifiable(self, now: float) -> bool:
        """True if others can be shown enough signatures to take the state of this peer.

        Where no lineage can have enough it does not matter that all have signed the first version:
        a peer that is left there has to take the word of one.

        So does one whose state has only as many as a majority of a run that waits for all: others
        may take it, but a state that only one still holds cannot be fetched.
        """
        others = len(self._electorate(now))
        quorum = self._id.policy.quorum.needed(self._roster(others))
        return self._signed(now) + 1 >= _majority_of(quorum, others)

    def _signed(self, now: float) -> int:
        """Number of others that count and have signed the link that this peer stands on."""
        if self.standing is None:
            return messages.ROSTER_MAX  # it has none to prove
        return len(self._counted(link_of(self.standing.head()), now))

    def _are_among_groups(self, now: float) -> bool:
        return self.among_groups_at is not None or self._peers.lineages_part(now)

    def input_taken(self) -> None:
        """The next input may show others. Thousands of them are not kept until then."""
        self._counting = None

    def _electorate(self, now: float) -> frozenset[PeerId]:
        """A commit of several lineages has it asked for dozens of times."""
        if self._counting is None or self._counting[0] != now:
            self._counting = now, self._peers.electorate(now)
        return self._counting[1]

    def counts(self, peer: PeerId, now: float) -> bool:
        """True if a peer's word counts when a state is taken."""
        return peer in self._electorate(now) or peer in self._contributors

    def holders_min(self, now: float) -> int:
        """Number of peers that count and must hold the same bits of a state that is fetched."""
        alone = len(self._contributors) == 1
        return 1 if alone else min(HOLDERS_MIN, len(self._electorate(now)))

    @property
    def _contributors(self) -> frozenset[PeerId]:
        """The other peers whose work is in the state that this peer holds."""
        standing = self.standing
        if standing is None:
            return frozenset()
        if self._contributed is None or self._contributed[0] is not standing:
            self._contributed = standing, frozenset(standing.merged) - {self._id.me}
        return self._contributed[1]

    def signers(self, link: Link) -> tuple[PeerId, ...]:
        """Return the other peers that are known to have signed a link."""
        return tuple(sorted(peer for peer in self._kept.get(link, {}) if peer != self._id.me))

    def _needed(self, others: int) -> int:
        """The number of peers that must have signed a link, of so many that count."""
        return self._majority_of_quorum(self._roster(others), others)

    def _roster(self, others: int) -> int:
        return min(others + self._peers.trains, self._peers.group_size)

    def _majority_of_quorum(self, roster: int, others: int) -> int:
        """A majority of a quorum of a roster, where so many others count.

        A run may ask for more than a majority of the live peers. A partition hides the others, so
        a side of it had rounds with fewer: a quorum counts as a majority at most.
        """
        quorum = min(self._id.policy.quorum.needed(roster), roster // 2 + 1)
        return _majority_of(quorum, others)


def _majority_of(quorum: int, others: int) -> int:
    """A majority of a quorum, where so many others count: two at least, if there are as many."""
    return max(1, min(others, max(2, quorum // 2 + 1)))


def _shortened(signatures: Signatures) -> tuple[tuple[bytes, bytes], ...]:
    return tuple((messages.short_name(peer), signature) for peer, signature in signatures)


def link_of(head: Head) -> Link:
    """Return the newest link of a head."""
    return Link(head.version, head.lineage, tokens_of(head))
