"""The signed claims about one slice of one round, and the hashes that they name.

A claim says: *of these members' work I have made bytes with this digest, out of those claims*. A
member claims its upload (no sources), a delegate its bundle, a reducer the merged slice. The claim
names the round by the digest of its commit, so it follows from it what an honest peer would have
made: codec, merge rule, weights and cut. A claim whose bytes do not follow from its sources is a
lie whatever the round's seal was.

The digest of the bytes is the root of a hash tree over their pieces
(``averaging.numbers.chunks``), so that one piece can be shown without the others. That of a
merged slice is the one by which the lineage knows it. The rest that a claim needs travels with the
bytes and is not sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, TypeAlias

import blake3
import msgspec
from msgspec import Meta, Struct

from averaging.messages import Commit, Digest, Index, Indices, Signature, unpacked
from averaging.numbers.chunks import DIGEST_BYTES
from dht.identity import PeerId

STATEMENT_MAX_BYTES = 512
"""Encoded size of a statement of a roster of 64."""

Sources: TypeAlias = Annotated[bytes, Meta(max_length=DIGEST_BYTES)]
"""Hash over the claims that went in; empty: the peer's own work."""
Verify: TypeAlias = Callable[[PeerId, bytes, bytes], bool]


class _Part(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A part of a claim."""


class Statement(_Part, frozen=True):
    """The part of a claim that travels behind the bytes that it is about."""

    by: Index
    """The claim's author, as an index into ``authors``."""
    members: Indices
    """Roster indices of those whose work is in the bytes, ascending."""
    sources: Sources
    signature: Signature


class Claim(_Part, frozen=True):
    """A statement with the digest of its bytes. Round, slice and way are known from elsewhere."""

    by: Index
    members: Indices
    sources: Sources
    made: Digest
    signature: Signature

    @property
    def statement(self) -> Statement:
        return Statement(self.by, self.members, self.sources, self.signature)


Claims: TypeAlias = Annotated[tuple[Claim, ...], Meta(max_length=64)]


class Subject(_Part, frozen=True):
    """The subject of a claim: a slice on its way to its reducer, or back (``merged``)."""

    round: Digest
    slice: Index
    merged: bool


_encoder = msgspec.msgpack.Encoder()
_statements = msgspec.msgpack.Decoder(Statement)
_claims: msgspec.msgpack.Decoder[tuple[Claim, ...]] = msgspec.msgpack.Decoder(Claims)


def authors(commit: Commit) -> tuple[PeerId, ...]:
    """The peers that may make claims about a round: its members, then other reducers."""
    return tuple(dict.fromkeys([*(entry.peer for entry in commit.members), *commit.reducers]))


def text(
    subject: Subject, by: PeerId, members: Sequence[int], sources: bytes, made: bytes
) -> bytes:
    """Return what the author of a claim signs."""
    said = (subject, by, tuple(members), sources, made)
    return b"shoal slice 1 " + _encoder.encode(said)


def claim(
    subject: Subject,
    commit: Commit,
    me: PeerId,
    members: Iterable[int],
    made: bytes,
    *,
    sources: Sequence[Claim] = (),
    sign: Callable[[bytes], bytes],
) -> Claim:
    """Return a peer's signed claim. ``sources``: those of the uploads that went in."""
    named, hashed = tuple(sorted(members)), hash_of(sources)
    signature = sign(text(subject, me, named, hashed, made))
    return Claim(authors(commit).index(me), named, hashed, made, signature)


def is_signed(subject: Subject, commit: Commit, said: Claim, verify: Verify) -> bool:
    """True if the peer that a claim names as its author has signed it."""
    who = authors(commit)
    return said.by < len(who) and is_signed_by(who[said.by], subject, said, verify)


def is_signed_by(author: PeerId, subject: Subject, said: Claim, verify: Verify) -> bool:
    """True if this peer has signed a claim."""
    signed = text(subject, author, said.members, said.sources, said.made)
    return verify(author, signed, said.signature)


def hash_of(sources: Sequence[Claim]) -> bytes:
    """Return the hash by which a claim names its sources; empty if it has none."""
    return blake3.blake3(_encoder.encode(tuple(sources))).digest() if sources else b""


def claimed(statement: Statement, made: bytes) -> Claim:
    """Return the claim that a statement makes about bytes with this digest."""
    return Claim(statement.by, statement.members, statement.sources, made, statement.signature)


def encode_statement(statement: Statement) -> bytes:
    return _encoder.encode(statement)


def decode_statement(data: bytes) -> Statement:
    """Decode what came behind a slice. Raises ``BadMessage``, whatever the bytes are."""
    return unpacked(data, _statements, "a statement", max_bytes=STATEMENT_MAX_BYTES)


def encode_claims(claims: Sequence[Claim]) -> bytes:
    return _encoder.encode(tuple(claims))


def decode_claims(data: bytes) -> tuple[Claim, ...]:
    """Decode the sources of a claim. Raises ``BadMessage``, whatever the bytes are."""
    return unpacked(data, _claims, "claims")
