"""Audits by a simulated node: the decisions of ``averaging.audit``, the bytes over the wires.

Nodes keep what they have sent of the last rounds. After a round each draws pieces, collects the
uploads, merges them again and spreads what that proves; ``averaging.live.checks.auditing`` does the
same over a host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from averaging.audit import selection
from averaging.audit.claims import (
    Claim,
    Subject,
    authors,
    claim,
    digest_of_pieces,
    digests_of,
    is_signed,
)
from averaging.audit.inquiry import Inquiry
from averaging.audit.proofs import (
    BadProof,
    Court,
    FalseMerge,
    Guilty,
    Proof,
    Right,
    check,
    encode_head,
)
from averaging.audit.strikes import Strikes
from averaging.audit.witness import Witness
from averaging.history.parent_maps import encode_maps
from averaging.messages import Commit, Message
from averaging.numbers.chunks import Cutting
from averaging.simulated.wires import Part, Wires
from dht.bounded_mapping import BoundedMapping, by_age
from dht.identity import PeerId

ROUNDS_KEPT = 8
"""Rounds of one fragment whose uploads are kept for auditors."""
PROOFS_KEPT = 64

Found = TypeVar("Found")
REQUEST_BYTES = 120


@dataclass(slots=True, eq=False)
class Kept:
    """Evidence of one node on one round."""

    encoded: bytes
    commit: Commit
    cutting: Cutting
    own: dict[int, Part] = field(default_factory=dict)
    """Uploads of this node, by slice."""
    alone: dict[int, Part] = field(default_factory=dict)
    """The own contribution of a delegate, by slice."""
    sources: dict[int, tuple[Claim, ...]] = field(default_factory=dict)
    """The claims in the slices that this node merged."""
    bundled: dict[int, tuple[Claim, ...]] = field(default_factory=dict)
    """The claims in the bundle of a delegate."""

    def leaves(self, index: int, part: Part) -> list[bytes]:
        places = (place for _, place in self.cutting.audited(index))
        return digests_of(memoryview(part.data), places)


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """The means of one node to audit others."""

    me: PeerId
    court: Court
    sign: Callable[[bytes], bytes]
    rate: float
    now: Callable[[], float]


class NodeAudits:
    """One node's claims, audits and proofs."""

    def __init__(self, means: Means, wires: Wires[Any], fragment: int) -> None:
        self._means = means
        self._wires = wires
        self._fragment = fragment
        self._kept = BoundedMapping[bytes, Kept]("simulated rounds", ROUNDS_KEPT, worth=by_age)
        self.proofs = BoundedMapping[PeerId, Proof]("simulated proofs", PROOFS_KEPT, worth=by_age)
        """The first proof against each peer."""
        self.convicted: dict[PeerId, str] = {}
        self.strikes = Strikes()
        self.witness = Witness(means.court)
        self.audited = 0
        """Audits that came to an end."""
        self.inconclusive = 0
        self.fetched_bytes = 0

    def __repr__(self) -> str:
        return f"NodeAudits({self._means.me}, {len(self.convicted)} convicted)"

    # Claims

    def begin(self, encoded: bytes, round_id: bytes, commit: Commit, cutting: Cutting) -> None:
        self._kept[round_id] = Kept(encoded, commit, cutting)

    def signed_upload(
        self,
        round_id: bytes,
        index: int,
        part: Part,
        riders: Sequence[int] = (),
        sources: Sequence[Claim] = (),
        *,
        alone: bool = False,
    ) -> Part:
        """The own upload of a slice with the own claim about it."""
        kept = self._kept.get(round_id)
        if kept is None:
            return part
        uploads = kept.alone if alone else kept.own
        if index not in uploads:
            me = kept.commit.index(self._means.me)
            assert me is not None
            made = digest_of_pieces(kept.leaves(index, part))
            subject = Subject(round_id, index, merged=False)
            said = claim(
                subject, kept.commit, self._means.me, [me, *riders], made, sources=sources,
                sign=self._means.sign,
            )  # fmt: skip
            uploads[index] = replace(part, claim=said)
            if riders:
                kept.bundled[index] = tuple(sources)
        return uploads[index]

    def signed_merge(
        self, round_id: bytes, index: int, part: Part, members: Sequence[int], uploads: list[Part]
    ) -> Part:
        """A slice that this node merged, with its claim."""
        kept = self._kept.get(round_id)
        sources = [each.claim for each in uploads if each.claim is not None]
        if kept is None or len(sources) < len(uploads):
            return part
        kept.sources[index] = tuple(sources)
        subject = Subject(round_id, index, merged=True)
        said = claim(
            subject, kept.commit, self._means.me, members, part.digest, sources=sources,
            sign=self._means.sign,
        )  # fmt: skip
        return replace(part, claim=said)

    def problem_of_upload(
        self, round_id: bytes, index: int, part: Part, members: Sequence[int]
    ) -> str | None:
        """The reason to refuse an upload's claim; ``None``: it is in order."""
        kept, said = self._kept.get(round_id), part.claim
        if kept is None or said is None:
            return "nobody has signed the upload"
        made = digest_of_pieces(kept.leaves(index, part))
        subject = Subject(round_id, index, merged=False)
        if (said.by, said.members, said.made) != (members[0], tuple(sorted(members)), made):
            return "its claim is about another upload"
        if not is_signed(subject, kept.commit, said, self._means.court.verify):
            return "its claim is not signed"
        self._prove(self.witness.sees_claim(kept.encoded, index, said, merged=False))
        return None

    def problem_of_merge(self, round_id: bytes, index: int, part: Part) -> str | None:
        kept, said = self._kept.get(round_id), part.claim
        if kept is None or said is None:
            return "nobody has signed the merged slice"
        subject = Subject(round_id, index, merged=True)
        signed = is_signed(subject, kept.commit, said, self._means.court.verify)
        if said.made != part.digest or not signed:
            return "the claim about the merged slice is not signed"
        self._prove(self.witness.sees_claim(kept.encoded, index, said, merged=True))
        return None

    # Audits

    def audit(self, round_id: bytes, lineage: bytes, merged: Mapping[int, Part]) -> None:
        """Draw pieces of a round that is over, and audit them."""
        kept = self._kept.get(round_id)
        if kept is None or self._means.rate <= 0.0:
            return
        others = {
            index: part
            for index, part in merged.items()
            if part.claim is not None
            and authors(kept.commit)[part.claim.by] not in (self._means.me, *self.convicted)
        }
        ticket = self._means.sign(selection.ticket_text(lineage))
        chance = selection.chance(self._means.rate, len(kept.commit.members) - 1)
        pieces = {index: len(kept.cutting.audited(index)) for index in others}
        for index, piece in selection.drawn(ticket, pieces, chance=chance):
            part = others[index]
            assert part.claim is not None
            maps = b"" if part.maps is None else encode_maps(part.maps)
            head = FalseMerge(
                commit=kept.encoded, slice=index, merged=True, claim=part.claim, sources=(),
                piece=piece, leaves=(), maps_bytes=len(maps),
            )  # fmt: skip
            self._inquire(round_id, kept, head, part.data + maps)
            self._audit_bundles(round_id, kept, head)
        self.spread()  # to those that were away

    def _audit_bundles(self, round_id: bytes, kept: Kept, head: FalseMerge) -> None:
        """The delegates whose bundles are in a slice are audited like its reducer."""
        me = kept.commit.index(self._means.me)
        named = {entry.delegate for entry in kept.commit.members if entry.delegate is not None}
        for delegate in sorted(named - {me}):
            peer = kept.commit.members[delegate].peer

            def shown(found: tuple[Part, list[bytes]] | None) -> None:
                if found is None or found[0].claim is None or not found[0].claim.sources:
                    return
                part, leaves = found
                assert part.claim is not None
                bundle = FalseMerge(
                    commit=kept.encoded, slice=head.slice, merged=False, claim=part.claim,
                    sources=(), piece=head.piece, leaves=(b"".join(leaves),),
                )  # fmt: skip
                place = kept.cutting.audited(head.slice)[head.piece][1]
                self._inquire(round_id, kept, bundle, part.data[place])

            self._ask_upload(peer, round_id, head.slice, shown, alone=False)

    def _inquire(self, round_id: bytes, kept: Kept, head: FalseMerge, result: bytes) -> None:
        inquiry = Inquiry(kept.commit, head, result)
        if inquiry.accused in (self._means.me, *self.convicted):
            return

        def listed(sources: tuple[Claim, ...] | None) -> None:
            if sources is None:
                self._unproved(inquiry.accused)
                return
            if not inquiry.take_sources(sources):
                self._unproved(inquiry.accused)
                return
            if self._try(inquiry, kept.cutting):
                return
            for by, peer in inquiry.wanted():
                self._ask_upload(
                    peer, round_id, head.slice, partial(shown, by, peer), alone=not head.merged
                )

        def shown(by: int, peer: PeerId, found: tuple[Part, list[bytes]] | None) -> None:
            place = kept.cutting.audited(head.slice)[head.piece][1]
            if found is not None and inquiry.take_upload(
                by, b"".join(found[1]), found[0].data[place]
            ):
                if inquiry.is_complete:
                    self._try(inquiry, kept.cutting)
                return
            if self._try(inquiry, kept.cutting, in_full=True):
                return  # the accused has made up what this sender is said to have sent
            if found is not None:
                source = next(each for each in inquiry.sources if each.by == by)
                self._conflicting(kept, round_id, head.slice, source, found[0])
            self._unproved(peer)

        self._ask(
            inquiry.accused,
            lambda audits: audits.show_sources(round_id, head.slice, merged=head.merged),
            lambda found: 140 * len(found or ()),
            listed,
        )

    def _conflicting(
        self, kept: Kept, round_id: bytes, index: int, source: Claim, part: Part
    ) -> None:
        """A member shows another upload than the one that was merged: perhaps it signed both."""
        said, subject = part.claim, Subject(round_id, index, merged=False)
        if said is None or not is_signed(subject, kept.commit, said, self._means.court.verify):
            return
        self._prove(self.witness.sees_claim(kept.encoded, index, source, merged=False))
        self._prove(self.witness.sees_claim(kept.encoded, index, said, merged=False))

    def _try(self, inquiry: Inquiry, cutting: Cutting, *, in_full: bool = False) -> bool:
        """Judge what is here. ``True``: there is nothing left to ask."""
        proof = inquiry.proof()
        try:
            drawn = self._means.sign(selection.exact_text(proof.digest))
            exact = in_full or selection.is_exact(drawn)
            guilty = check(proof, self._means.court, exact=exact, cutting=cutting)
        except Right:
            self.audited += 1
            return True
        except BadProof:
            return False
        self.audited += 1
        self._convict(proof, guilty)
        return True

    def suspect(self, peer: PeerId) -> None:
        """A peer has not done what it had promised; a slow line may be the reason."""
        self.strikes.add_doubtful(peer, self._means.now())

    def hold_against(self, peer: PeerId) -> None:
        """A peer serves other bits than others do for the same lineage, or leads with a claim
        beyond belief."""
        self.strikes.add(peer, self._means.now())

    def _unproved(self, peer: PeerId) -> None:
        self.inconclusive += 1
        self.strikes.add_missing(peer, self._means.now())

    # Showing

    def show_sources(
        self, round_id: bytes, index: int, *, merged: bool
    ) -> tuple[Claim, ...] | None:
        kept = self._kept.get(round_id)
        if kept is None:
            return None
        return (kept.sources if merged else kept.bundled).get(index)

    def show_upload(
        self, round_id: bytes, index: int, *, alone: bool
    ) -> tuple[Part, list[bytes]] | None:
        kept = self._kept.get(round_id)
        if kept is None:
            return None
        part = kept.own.get(index)
        if alone:
            part = kept.alone.get(index, part)
        return None if part is None else (part, kept.leaves(index, part))

    def _ask_upload(
        self,
        peer: PeerId,
        round_id: bytes,
        index: int,
        then: Callable[[tuple[Part, list[bytes]] | None], None],
        *,
        alone: bool,
    ) -> None:
        self._ask(
            peer,
            lambda audits: audits.show_upload(round_id, index, alone=alone),
            lambda found: 0 if found is None else self._wires.bulk(len(found[0].data)),
            then,
        )

    def _ask(
        self,
        peer: PeerId,
        look: Callable[[NodeAudits], Found | None],
        size: Callable[[Found | None], int],
        then: Callable[[Found | None], None],
    ) -> None:
        """Ask another node. If it cannot be reached nothing is learned, and nobody is blamed."""
        me, network = self._means.me, self._wires.network

        def asked() -> None:
            other = self._audits_of(peer)
            if other is None:
                return
            found = look(other)
            self.fetched_bytes += size(found)
            network.transfer(peer, me, 100 + size(found), lambda: answered(found), lambda: None)

        def answered(found: Found | None) -> None:
            if self._audits_of(me) is self:
                then(found)

        if peer == me:
            then(look(self))
        else:
            network.transfer(me, peer, REQUEST_BYTES, asked, lambda: None)

    def _audits_of(self, peer: PeerId) -> NodeAudits | None:
        node = self._wires.node(peer, self._fragment)
        return None if node is None else node.audits

    # Proofs

    def sees(self, sender: PeerId, message: Message) -> None:
        """Look at a message: it may contradict another one of the same peer."""
        self._prove(self.witness.sees(sender, message))

    def sees_commit(self, encoded: bytes, signature: bytes) -> None:
        self._prove(self.witness.sees_commit(encoded, signature))

    def _prove(self, proofs: Iterable[Proof]) -> None:
        for proof in proofs:
            self._convict(proof, check(proof, self._means.court))

    def take_proof(self, proof: Proof) -> bool:
        """Take a proof from anybody. ``False``: it proves nothing."""
        try:
            guilty = check(proof, self._means.court)
        except BadProof:
            return False
        self._convict(proof, guilty)
        return True

    def _convict(self, proof: Proof, guilty: Guilty) -> None:
        if guilty.peer in self.convicted or guilty.peer == self._means.me:
            return
        self.convicted[guilty.peer] = guilty.what
        self.proofs[guilty.peer] = proof
        node = self._wires.node(self._means.me, self._fragment)
        if node is not None:
            node.convict(guilty)
        self.spread()

    def spread(self) -> None:
        """Show the proofs to all other nodes. One that hears of nothing new asks for nothing."""
        me, network = self._means.me, self._wires.network
        for about, proof in list(self.proofs.items()):
            for peer, fragment in sorted(self._wires.nodes):
                other = self._audits_of(peer) if fragment == self._fragment else None
                if other is None or peer in (me, about) or about in other.convicted:
                    continue
                size = len(encode_head(proof.head)) + self._wires.bulk(len(proof.data))
                take = partial(self._deliver, peer, proof)
                network.transfer(me, peer, size, take, lambda: None)

    def _deliver(self, peer: PeerId, proof: Proof) -> None:
        other = self._audits_of(peer)
        if other is not None:
            other.take_proof(proof)
