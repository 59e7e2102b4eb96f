"""Small rounds with real signatures, and the evidence that an audit of them collects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from averaging import messages
from averaging.guard.rules.proofs import (
    Contradiction,
    Court,
    FalseMerge,
    Head,
    Proof,
    SignedClaim,
    SignedCommit,
    SignedPromise,
    SignedVote,
)
from averaging.history.claims import Claim, Subject, claim
from averaging.messages import Commit
from averaging.numbers.arithmetic import (
    Moved,
    Numbers,
    Weighted,
    cutting_of,
    numbers_of,
)
from averaging.numbers.chunks import digest_of, digests_of, path_to, root_of
from averaging.numbers.codec import Scratch
from averaging.rules.sites import shares
from averaging.rules.weights import weights_of
from dht.identity import Identity, verify
from tests.averaging.history.replayed_rounds import FRAGMENT, LAYOUT, commit_after, founded

WHO = [Identity.from_seed(bytes([number]) * 32) for number in range(4)]
COURT = Court(bytes(16), LAYOUT, verify)
SLICE = 0
REDUCER = 0
_scratch = Scratch()


class Audit(NamedTuple):
    """What an audit knows before it has the uploads."""

    head: FalseMerge
    result: bytes

    def proof(self) -> Proof:
        """What the sources prove alone."""
        return Proof(self.head)


def commit_of(kind: str = "merge", *, codec: str = "int8", merge: str = "mean") -> Commit:
    """A round of four. Its third and fourth members may be of one site."""
    plain = commit_after(founded(), codec=codec, melds=kind == "meld")
    entry = plain.members[0]
    members = tuple(
        msgspec.structs.replace(entry, peer=each.peer_id, tokens=1000 * (number + 1))
        for number, each in enumerate(WHO)
    )
    changed = msgspec.structs.replace(
        plain,
        leader=WHO[0].peer_id,
        members=members,
        reducers=(WHO[REDUCER].peer_id, WHO[1].peer_id),
        merge=merge,
        contributors_min=2,
    )
    if kind == "meld":
        changed = msgspec.structs.replace(changed, codec=f"{codec}/f32/f16")
    return changed


def in_pieces(commit: Commit) -> Commit:
    """The same round with one reducer for the fragment's three units, each of which is a piece."""
    return msgspec.structs.replace(commit, reducers=commit.reducers[:1], shares=(1,))


def of_a_site(commit: Commit) -> Commit:
    """The same round, in which the third member carries the fourth one's contribution."""
    *others, last = commit.members
    return msgspec.structs.replace(
        commit, members=(*others, msgspec.structs.replace(last, delegate=2))
    )


@dataclass(eq=False)
class Round:
    """A round of which everything is known."""

    commit: Commit
    uploads: dict[int, bytes] = field(default_factory=dict)
    """Uploads of the audited slice, by the roster index of who made them."""
    claims: dict[int, Claim] = field(default_factory=dict)
    alone: dict[int, tuple[bytes, Claim]] = field(default_factory=dict)
    piece: int = 0
    """The piece that is audited."""

    def __post_init__(self) -> None:
        self.encoded = messages.encode_commit(self.commit)
        self.name = messages.digest(self.encoded)
        self.numbers: Numbers = numbers_of(self.commit)
        self.cutting = cutting_of(self.commit, FRAGMENT, self.numbers)
        rng = np.random.default_rng(1)
        inside = range(len(self.commit.members))
        for number in inside:
            values, theta, momentum = (
                rng.standard_normal(FRAGMENT.size).astype(np.float32) for _ in range(3)
            )
            carried = (theta, momentum) if self.commit.melds else ()
            out = bytearray(self.cutting.upload_size(SLICE))
            for chunk, place in self.cutting.pieces(SLICE):
                given = Moved(theta, values, carried=carried)
                self.numbers.encode(chunk, given, memoryview(out)[place], _scratch)
            self._upload(number, [number], bytes(out))
        for number, entry in enumerate(self.commit.members):
            if entry.delegate is not None:
                self._bundle(entry.delegate, number)

    def leaves(self, data: bytes) -> list[bytes]:
        places = (place for _, place in self.cutting.pieces(SLICE))
        return digests_of(memoryview(data), places)

    @property
    def maps(self) -> bytes:
        """What stands for the merged maps, where states travel."""
        return b"" if self.commit.kind == "merge" else b"maps"

    @property
    def place(self) -> slice:
        """The place of the audited piece in an upload."""
        return self.cutting.pieces(SLICE)[self.piece][1]

    def _upload(
        self, number: int, members: Sequence[int], data: bytes, sources: Sequence[Claim] = ()
    ) -> None:
        made = root_of(self.leaves(data))
        self.uploads[number] = data
        self.claims[number] = self.signed(number, members, made, sources, merged=False)

    def signed(
        self,
        number: int,
        members: Sequence[int],
        made: bytes,
        sources: Sequence[Claim] = (),
        *,
        merged: bool,
    ) -> Claim:
        me, subject = WHO[number], Subject(self.name, SLICE, merged)
        return claim(subject, self.commit, me.peer_id, members, made, sources=sources, sign=me.sign)

    def _bundle(self, delegate: int, rider: int) -> None:
        self.alone[delegate] = self.uploads[delegate], self.claims[delegate]
        self.alone[rider] = self.uploads.pop(rider), self.claims.pop(rider)
        inside = sorted((delegate, rider))
        data = self.merged([self.alone[each][0] for each in inside], inside, again=True)
        self._upload(delegate, inside, data, [self.alone[each][1] for each in inside])

    def merged(
        self,
        payloads: Sequence[bytes],
        members: Sequence[int],
        *,
        again: bool = False,
        bundles: Mapping[int, Sequence[int]] | None = None,
    ) -> bytes:
        weights, heads = weights_of(self.commit, members), None
        if bundles:
            taken = shares(members, weights, bundles)
            weights = tuple(share.weight for share in taken)
            heads = tuple(share.members for share in taken)
        places = self.cutting.pieces(SLICE, merged=not again)
        out = bytearray(places[-1][1].stop)
        for (chunk, piece), (_, place) in zip(self.cutting.pieces(SLICE), places, strict=True):
            parts = [memoryview(data)[piece] for data in payloads]
            given = Weighted(parts, weights, heads, again)
            self.numbers.merge(chunk, given, memoryview(out)[place], _scratch)
        return bytes(out)

    @property
    def contributors(self) -> list[int]:
        return sorted(member for each in self.claims.values() for member in each.members)

    def right(self) -> bytes:
        """The slice as an honest reducer merges it."""
        bundles = {number: each.members[1:] for number, each in sorted(self.claims.items())}
        return self.merged(
            [data for _, data in sorted(self.uploads.items())],
            self.contributors,
            bundles=bundles if any(bundles.values()) else None,
        )

    def audit(
        self,
        result: bytes,
        *,
        sources: Sequence[Claim] | None = None,
        members: Sequence[int] | None = None,
        reducer: int = REDUCER,
    ) -> Audit:
        """The audit of a reducer that has signed this result."""
        sources = [each for _, each in sorted(self.claims.items())] if sources is None else sources
        places = [place for _, place in self.cutting.pieces(SLICE, merged=True)]
        leaves = digests_of(memoryview(result), places)
        if self.maps:
            leaves.append(digest_of(self.maps))
        made = root_of(leaves)
        members = self.contributors if members is None else members
        said = self.signed(reducer, members, made, sources, merged=True)
        head = self.head(said, sources, merged=True, path=path_to(self.piece, leaves))
        return Audit(head, result[places[self.piece]])

    def head(
        self, said: Claim, sources: Sequence[Claim], *, merged: bool, path: bytes
    ) -> FalseMerge:
        return FalseMerge(
            commit=self.encoded,
            slice=SLICE,
            merged=merged,
            claim=said,
            sources=tuple(sources),
            piece=self.piece,
            paths=(path,),
        )

    def proof(self, audit: Audit, *, alone: bool = False) -> Proof:
        """The evidence, with all uploads as their senders show them."""
        senders = [source.by for source in audit.head.sources]
        sent = [self.alone[by][0] if alone else self.uploads[by] for by in senders]
        paths = [path_to(self.piece, self.leaves(data)) for data in sent]
        head = msgspec.structs.replace(audit.head, paths=(*paths, *audit.head.paths))
        return Proof(head, b"".join([*(data[self.place] for data in sent), audit.result]))

    def audit_of_bundle(self, delegate: int, data: bytes) -> Audit:
        """The audit of a delegate that has signed this bundle."""
        inside = self.claims[delegate].members
        sources = [self.alone[each][1] for each in inside]
        leaves = self.leaves(data)
        said = self.signed(delegate, inside, root_of(leaves), sources, merged=False)
        head = self.head(said, sources, merged=False, path=path_to(self.piece, leaves))
        return Audit(head, data[self.place])


def signed_vote(
    seal: tuple[int, ...], by: Identity = WHO[1], *, ballot: int = 0, forged: bool = False
) -> SignedVote:
    name = bytes(32)
    signature = bytes(64) if forged else by.sign(messages.vote(name, ballot, seal))
    return SignedVote(by.peer_id, signature, name, ballot, seal)


def two_votes(
    second: tuple[int, ...], by: Identity = WHO[1], *, forged: bool = False
) -> Contradiction:
    return Contradiction(signed_vote((0, 1), by), signed_vote(second, by, forged=forged))


def denied_vote(
    last: tuple[int, tuple[int, ...]] | None, *, voted_in: int = 1, forged: bool = False
) -> Contradiction:
    """A vote for (0, 1), and a promise of its author in ballot 4. ``last``: what it says there to
    have accepted last: ballot and seal."""
    voter, name = WHO[1], bytes(32)
    accepted_ballot, accepted = last or (None, ())
    signs = WHO[2].sign if forged else voter.sign
    signature = signs(messages.promise_text(name, 4, accepted_ballot, accepted))
    promise = SignedPromise(voter.peer_id, signature, name, 4, accepted_ballot, accepted)
    return Contradiction(signed_vote((0, 1), voter, ballot=voted_in), promise)


def signed_claim(round_: Round, said: Claim, *, by: int | None = None) -> SignedClaim:
    """A claim about an upload. ``by``: who is said to have signed it, if not its author."""
    subject = Subject(round_.name, SLICE, merged=False)
    author = WHO[said.by if by is None else by].peer_id
    return SignedClaim(author, said.signature, subject, said.members, said.sources, said.made)


def heads_of_proofs() -> list[Head]:
    round_ = Round(of_a_site(commit_of()))
    merge = round_.proof(round_.audit(round_.right())).head
    first = signed_claim(round_, round_.claims[2])
    other = signed_claim(round_, round_.signed(2, [2], bytes(32), merged=False))
    signed = SignedCommit(round_.commit.leader, bytes(64), round_.encoded)
    commits = Contradiction(signed, signed)
    claims = Contradiction(first, other)
    return [merge, claims, two_votes((0, 2)), commits, denied_vote(None)]
