"""Proofs that a peer has lied, which anybody who knows the run's layout can check.

``FalseMerge``: a reducer, or a site's delegate, has signed a claim (``averaging.history.claims``)
whose bytes do not follow from its sources. The proof holds the commit, the claims, and for one
piece of the slice the uploads and the result. ``Contradiction``: a peer has signed two different
claims, votes or commits where an honest one makes one, or a vote, and that it has not voted so.

``check`` trusts nobody: not the author of the proof, nor the round's leader. All that it believes
is signed by the accused peer; the bytes are those whose digests it has signed. So a peer that
crashes, is slow, restarts or is cut off from others can never be convicted, because it signs
nothing false; nor can one whose disk is damaged, because rounds are in memory and a merge does not
depend on the state; nor can one in whose memory a kept upload rots, because nobody has signed that.
A reducer whose memory or processor fails between the check of an upload and the end of the merge
signs something false, and is convicted as if it had lied: nothing that others see tells the two
apart. Merging twice before signing would help, and costs as much as merging does: with
``centered_clip`` most of a round's arithmetic.

On the wire a proof is a head of bounded size and, of a ``FalseMerge``, the bytes that it is about.
``size_of_data`` tells their number from the layout, before any of them is read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, TypeAlias

import blake3
import msgspec
from msgspec import Meta, Struct

from averaging import messages
from averaging.errors import BadPayload, NotFinite
from averaging.history.claims import (
    Claim,
    Claims,
    Sources,
    Subject,
    Verify,
    authors,
    hash_of,
    is_signed_by,
    text,
)
from averaging.messages import (
    BadMessage,
    Ballot,
    Commit,
    Digest,
    Index,
    Indices,
    Peer,
    Signature,
    unpacked,
)
from averaging.numbers.arithmetic import Numbers, Weighted, cutting_of, numbers_of
from averaging.numbers.arrays import Buffer
from averaging.numbers.chunks import DIGEST_BYTES, LEVELS_MAX, Chunk, Cutting, leads_to
from averaging.numbers.codec import Scratch
from averaging.numbers.layout import Layout
from averaging.rules.sites import carriers, shares
from averaging.rules.weights import weights_of
from dht.identity import PeerId

VERSION = 1
HEAD_MAX_BYTES = 256 << 10
"""Largest head: a commit, a roster's claims, and the paths to the pieces of their uploads."""
DIRECTIVES_MAX = 1024
"""Directives of the run's owner up to that of a round, one of which may have taken the run back."""

EncodedCommit: TypeAlias = Annotated[bytes, Meta(max_length=messages.MESSAGE_MAX_BYTES)]
Path: TypeAlias = Annotated[bytes, Meta(max_length=DIGEST_BYTES * LEVELS_MAX)]
"""Digests that lead from a piece to the digest that was signed."""


class BadProof(ValueError):
    """Bytes that prove nothing against anybody."""


class Right(BadProof):
    """An audit's evidence, all of it in order, which shows that the merge was right."""


class _Head(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    pass


class FalseMerge(_Head, frozen=True, kw_only=True):
    """A claim whose bytes do not follow from its sources."""

    commit: EncodedCommit
    slice: Index
    merged: bool
    """False: the claim is a delegate's, about the bundle of its site."""
    claim: Claim
    sources: Claims
    piece: Index
    paths: Annotated[tuple[Path, ...], Meta(max_length=messages.ROSTER_MAX + 1)]
    """Digests of the piece of each source, in order; then of the piece of the result."""


class _Statement(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """A text that a peer has signed."""

    by: Peer
    signature: Signature


class SignedVote(_Statement, frozen=True):
    """A seal for one ballot, as its proposer or an acceptor signs it."""

    round: Digest
    ballot: Ballot
    seal: Indices

    @property
    def text(self) -> bytes:
        return messages.vote(self.round, self.ballot, self.seal)

    @property
    def once(self) -> Hashable:
        """An honest peer signs one vote with this."""
        return self.round, self.ballot


class SignedPromise(_Statement, frozen=True):
    """A promise to the coordinator of a ballot."""

    round: Digest
    ballot: Ballot
    accepted_ballot: Ballot | None
    accepted: Indices

    @property
    def text(self) -> bytes:
        last = self.accepted_ballot, self.accepted
        return messages.promise_text(self.round, self.ballot, *last)

    def denies(self, vote: SignedVote) -> bool:
        """True if no honest peer makes both this promise and a vote in an earlier ballot.

        A voter that made the promise first does not vote so later, and one that voted first says
        so.
        """
        last = self.accepted_ballot
        if vote.round != self.round:
            return False
        if last is None or last < vote.ballot:
            return vote.ballot < self.ballot
        return last == vote.ballot and self.accepted != vote.seal


class SignedClaim(_Statement, frozen=True):
    """A claim about a slice (``averaging.history.claims``)."""

    subject: Subject
    members: Indices
    sources: Sources
    made: Digest

    @property
    def text(self) -> bytes:
        return text(self.subject, self.by, self.members, self.sources, self.made)

    @property
    def once(self) -> Hashable:
        """An honest peer signs one claim with this."""
        return self.subject, self.members


class SignedCommit(_Statement, frozen=True):
    """A commit as its leader signed it."""

    text: EncodedCommit

    @property
    def once(self) -> Hashable:
        """An honest peer signs one commit with this. Raises ``BadMessage``."""
        commit = messages.decode_commit(self.text)
        return commit.fragment, commit.leader_incarnation, commit.nonce


Statement: TypeAlias = SignedVote | SignedPromise | SignedClaim | SignedCommit


class Contradiction(_Head, frozen=True):
    """Two statements of one peer of which an honest one signs one at most."""

    first: Statement
    second: Statement


Head: TypeAlias = FalseMerge | Contradiction

_encoder = msgspec.msgpack.Encoder()
_heads: msgspec.msgpack.Decoder[Head] = msgspec.msgpack.Decoder(Head)


@dataclass(frozen=True, slots=True)
class Proof:
    """A head, and the bytes that it is about: a piece of each source, then the result."""

    head: Head
    data: Buffer = b""

    def encode_head(self) -> bytes:
        return encode_head(self.head)

    @property
    def digest(self) -> bytes:
        """The name of the proof. The head names all of the bytes by their digests."""
        return blake3.blake3(self.encode_head()).digest()


@dataclass(frozen=True, slots=True)
class Guilty:
    """A peer that a proof convicts."""

    peer: PeerId
    what: str
    """The deed of the peer, as the rest of a sentence about it."""


@dataclass(frozen=True, slots=True)
class Court:
    """Facts that a peer needs to check a proof."""

    topic: bytes
    """Topic of the run and layout, before its owner has taken the run back."""
    layout: Layout
    verify: Verify
    believes: bool = False
    """Claims count as signed, and nobody looks at their signatures."""
    topic_after: Callable[[int], bytes] | None = None
    """The topic after the rollback that the directive with this number ordered."""

    def is_ours(self, commit: Commit) -> bool:
        """True if a commit is of this run and layout, before a rollback or after any.

        A proof is shown to peers that come after one. A commit names the directive in force, which
        is the one that ordered the last rollback, or a later one.
        """
        if commit.topic == self.topic:
            return True
        if self.topic_after is None or commit.directive is None:
            return False
        newest = commit.directive.number
        numbers = range(newest, max(0, newest - DIRECTIVES_MAX), -1)
        return any(self.topic_after(number) == commit.topic for number in numbers)

    def read(self, encoded: bytes) -> Commit:
        """Decode a commit of this run. Raises ``BadProof``."""
        try:
            commit = messages.decode_commit(encoded)
        except BadMessage as error:
            raise BadProof(str(error)) from error
        if not self.is_ours(commit) or commit.fragment >= len(self.layout.fragments):
            raise BadProof("the commit is of another run, layout or fragment")
        return commit

    def has_signed(self, said: Statement) -> bool:
        """True if the author of a statement has signed it."""
        return self.verify(said.by, said.text, said.signature)

    def takes(self, said: Claim, subject: Subject, who: Sequence[PeerId]) -> bool:
        """True if the author of a claim, one of these peers, has signed it."""
        return said.by < len(who) and (
            self.believes or is_signed_by(who[said.by], subject, said, self.verify)
        )


def encode_head(head: Head) -> bytes:
    return bytes([VERSION]) + _encoder.encode(head)


def decode_head(data: bytes) -> Head:
    """Decode a proof's head. Raises ``BadMessage``, whatever the bytes are."""
    if not data or data[0] != VERSION:
        raise BadMessage(f"proof version {data[0] if data else None}; this peer reads {VERSION}")
    return unpacked(memoryview(data)[1:], _heads, "a proof's head", max_bytes=HEAD_MAX_BYTES)


def size_of_data(head: Head, court: Court) -> int:
    """Return how many bytes follow a head, once its signatures hold. Raises ``BadProof``."""
    if not isinstance(head, FalseMerge):
        _conflict(head, court)
        return 0
    case = _Case.read(head, court)
    return 0 if case.verdict is not None else case.size


def check(
    proof: Proof,
    court: Court,
    scratch: Scratch | None = None,
    *,
    merges_first: bool = False,
    cutting: Cutting | None = None,
) -> Guilty:
    """Return whom a proof convicts. Raises ``BadProof``, whatever is in it.

    ``merges_first``: a right merge passes also if nobody has signed its sources, whose senders show
    their bytes: signatures take longer than most merges, and a sender who signed the same would
    have changed nothing.

    ``cutting``: of the round that a false merge is about, if the caller has it.
    """
    head = proof.head
    if not isinstance(head, FalseMerge):
        return _conflict(head, court)
    if merges_first:
        check(proof, replace(court, believes=True), scratch, cutting=cutting)
    case = _Case.read(head, court, cutting)
    if case.verdict is not None:
        return case.verdict
    return case.judge(memoryview(proof.data).cast("B"), scratch or Scratch())


# Merges


@dataclass(frozen=True, slots=True)
class _Case:
    """A ``FalseMerge`` whose accused has signed it."""

    head: FalseMerge
    accused: PeerId
    commit: Commit
    numbers: Numbers
    cutting: Cutting
    chunk: Chunk
    verdict: Guilty | None = None
    """The verdict, if the claim is false whatever the bytes are."""

    @classmethod
    def read(cls, head: FalseMerge, court: Court, cutting: Cutting | None = None) -> _Case:
        commit = court.read(head.commit)
        try:
            numbers = numbers_of(commit)
            fragment = court.layout.fragments[commit.fragment]
            cutting = cutting or cutting_of(commit, fragment, numbers)
        except ValueError as error:
            raise BadProof(f"this peer cannot merge such a round: {error}") from error
        if head.slice >= len(cutting.slices):
            raise BadProof(f"slice {head.slice} of {len(cutting.slices)}")
        pieces = cutting.pieces(head.slice)
        if head.piece >= len(pieces):
            raise BadProof(f"piece {head.piece} of {len(pieces)}")
        round_id = messages.digest(head.commit)
        subject = Subject(round_id, head.slice, head.merged)
        who = authors(commit)
        if not court.takes(head.claim, subject, who):
            raise BadProof("the accused peer has not signed the claim")
        if hash_of(head.sources) != head.claim.sources or not head.sources:
            raise BadProof("the sources are not those that the claim names")
        accused = who[head.claim.by]
        chunk, _ = pieces[head.piece]
        uploads = Subject(round_id, head.slice, merged=False)
        deed = _deed_of_sources(head, commit, lambda said: court.takes(said, uploads, who))
        verdict = None if deed is None else Guilty(accused, deed)
        return cls(head, accused, commit, numbers, cutting, chunk, verdict)

    @property
    def piece_size(self) -> int:
        """Bytes of the piece in an upload."""
        place = self.chunk.data
        size: int = place.stop - place.start
        return size

    @property
    def result_size(self) -> int:
        place = self.chunk.merged if self.head.merged else self.chunk.data
        size: int = place.stop - place.start
        return size

    @property
    def size(self) -> int:
        return self.piece_size * len(self.head.sources) + self.result_size

    def judge(self, data: memoryview, scratch: Scratch) -> Guilty:
        if len(data) != self.size:
            raise BadProof(f"{len(data)} bytes; the layout says {self.size}")
        head, chunk = self.head, self.chunk
        piece_bytes = self.piece_size
        count = len(head.sources)
        if len(head.paths) != count + 1:
            raise BadProof(f"paths to {len(head.paths)} pieces")
        payloads = [data[i * piece_bytes : (i + 1) * piece_bytes] for i in range(count)]
        result = data[count * piece_bytes :]
        pieces = len(self.cutting.chunks[head.slice])
        for source, path, payload in zip(head.sources, head.paths, payloads, strict=False):
            self._bind(source, path, payload, pieces)
        self._bind(head.claim, head.paths[-1], result, pieces + self._has_maps)
        given = self._given(payloads)
        out = memoryview(bytearray(len(result)))
        deed = f"merged slice {head.slice} falsely"
        try:
            self.numbers.merge(chunk, given, out, scratch)
        except NotFinite:
            deed = "merged uploads whose sum is not finite"
        else:
            if out == result:
                raise Right("the merge is right")
        for payload in payloads:
            try:  # only now: most audits end above, and this costs as much as they do
                self.numbers.up.check(chunk, payload, scratch)
            except BadPayload as error:
                deed = f"merged an upload that nobody can decode: {error}"
        return Guilty(self.accused, deed)

    @property
    def _has_maps(self) -> bool:
        """True if the digest of the merged maps comes after those of the merged pieces."""
        head = self.head
        return head.merged and head.slice == 0 and self.commit.kind != "merge"

    def _bind(self, claim: Claim, path: bytes, piece: memoryview, count: int) -> None:
        """Raise ``BadProof`` unless these are bytes that a claim is about."""
        if not leads_to(claim.made, path, piece, index=self.head.piece, count=count):
            raise BadProof("a piece is not the one that was signed")

    def _given(self, payloads: Sequence[memoryview]) -> Weighted:
        """The payloads of the slice with their weights; of a bundle, to be encoded again."""
        members, commit = self.head.claim.members, self.commit
        weights = weights_of(commit, members)
        if not self.head.merged:
            return Weighted(payloads, weights, again=True)
        bundles = _bundles(self.head.sources)
        taken = shares(members, weights, bundles, on_probation=commit.on_probation)
        weights, counts = zip(*((share.weight, share.members) for share in taken), strict=True)
        return Weighted(payloads, weights, counts)


def _deed_of_sources(
    head: FalseMerge, commit: Commit, is_signed: Callable[[Claim], bool]
) -> str | None:
    """The reason why no honest peer signs a claim with these sources; ``None``: one may."""
    members, count = head.claim.members, len(commit.members)
    if list(members) != sorted(set(members)) or not members or members[-1] >= count:
        return "claims contributors that the round does not have"
    for source in head.sources:
        named = source.by < count and source.by in source.members
        if not named or not is_signed(source):
            return "claims an upload that its sender has not signed"
        if any(
            member != source.by
            and (member >= count or commit.members[member].delegate != source.by)
            for member in source.members
        ):
            return "claims an upload with members of other sites"
    if head.merged:
        bundles = _bundles(head.sources)
        wanted = carriers(members, bundles)
        inside = sorted(member for source in head.sources for member in source.members)
    else:
        wanted = members
        inside = [source.by for source in head.sources]
        if head.claim.by not in members:
            return "claims a bundle without its own work"
    if head.merged and not set(members).intersection(commit.voters):
        return "claims contributors none of whom counts"
    if tuple(source.by for source in head.sources) != wanted or tuple(inside) != members:
        return "claims uploads that are not those of its contributors"
    return None


def _bundles(sources: Sequence[Claim]) -> dict[int, tuple[int, ...]]:
    return {
        source.by: tuple(member for member in source.members if member != source.by)
        for source in sources
    }


# Two statements where an honest peer makes one


def deed_of(first: Statement, second: Statement) -> str | None:
    """Return what a peer has done that has signed both; ``None``: an honest peer may sign them."""
    if first.by != second.by or first.text == second.text:
        return None
    match first, second:
        case SignedVote(), SignedPromise() if second.denies(first):
            return f"denied its vote in ballot {first.ballot}"
        case SignedVote(), SignedVote() if first.once == second.once:
            return f"signed two seals in ballot {first.ballot}"
        case SignedClaim(), SignedClaim() if first.once == second.once:
            what = "merged slices" if first.subject.merged else "uploads"
            return f"signed two {what} of slice {first.subject.slice}"
        case SignedCommit(), SignedCommit() if first.once == second.once:
            return "signed two commits for one attempt"
    return None


def _conflict(head: Contradiction, court: Court) -> Guilty:
    said = head.first, head.second
    for each in said:
        if isinstance(each, SignedCommit) and court.read(each.text).leader != each.by:
            raise BadProof("one of the commits is not signed by its leader")
    deed = deed_of(*said)
    if deed is None:
        raise BadProof("the two statements agree, or are about different things")
    if not all(map(court.has_signed, said)):
        raise BadProof("one of the two statements is not signed")
    return Guilty(head.first.by, deed)
