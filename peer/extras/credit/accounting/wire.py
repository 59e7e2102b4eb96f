"""A tally as bytes: digests that ask for missing names, an answer, and a peer's file."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import blake3
import msgspec
from msgspec import Meta, Struct

from averaging.messages import Count, Peer
from dht.decoding import decoded
from dht.identity import PeerId
from peer.calls import Call
from peer.extras.credit.accounting.tally import Statement, Tally

VERSION: Final = 1
ANSWER_MAX_BYTES: Final = 960 << 10
TOTALS_MAX, STATEMENTS_MAX = 4000, 2000
"""Contributors in one answer, and names, the rest of which is answered to the next question."""

FILE_MAX_BYTES: Final = 256 << 20
BUCKETS: Final = 16
"""Groups of statements that are compared by one digest each."""

_PEERS_MAX: Final = 1 << 20
_SHORT: Final = 8


class Packed(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tally, or some of one, as it travels and lies in a file."""

    version: Annotated[int, Meta(ge=VERSION, le=VERSION)] = VERSION
    totals: Annotated[dict[Peer, Count], Meta(max_length=_PEERS_MAX)] = {}
    statements: Annotated[tuple[Statement, ...], Meta(max_length=_PEERS_MAX)] = ()


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Packed).decode

Digests: TypeAlias = Annotated[bytes, Meta(max_length=_SHORT * BUCKETS)]
NONE: Final = b""
"""The question of a reader outside the run, who has no tally."""

CALL: Call[bytes, Packed] = Call(
    "/shoal/credit/1", Packed, "a part of a tally", ANSWER_MAX_BYTES, asks=Digests
)
"""The question of this call is what the asking peer knows, and the answer what it lacks."""


def digests(tally: Tally) -> bytes:
    """A peer's knowledge of names, by which it asks for those that it lacks."""
    content = [b""] * BUCKETS
    for peer, statement in sorted(tally.statements.items()):
        content[_bucket_of(peer)] += statement.signature
    return b"".join(blake3.blake3(each).digest(_SHORT) for each in content)


def _bucket_of(peer: PeerId) -> int:
    return peer.encode()[-1] % BUCKETS


def answer(tally: Tally, asked: bytes) -> Packed:
    """The names that the asking peer lacks; the largest contributors, if it has no tally."""
    if asked == NONE:
        listed = tally.largest[:TOTALS_MAX]
        named = [tally.statements[peer] for peer in listed if peer in tally.statements]
        totals = {peer: tally.totals[peer] for peer in listed}
        return Packed(totals=totals, statements=tuple(named[:STATEMENTS_MAX]))
    own = digests(tally)
    places = ((bucket, slice(bucket * _SHORT, (bucket + 1) * _SHORT)) for bucket in range(BUCKETS))
    differing = {bucket for bucket, place in places if own[place] != asked[place]}
    # Bucket by bucket: one that arrives whole is not asked for again.
    there = sorted(tally.statements, key=lambda peer: (_bucket_of(peer), peer))
    lacking = [tally.statements[peer] for peer in there if _bucket_of(peer) in differing]
    return Packed(statements=tuple(lacking[:STATEMENTS_MAX]))


def encode(tally: Tally) -> bytes:
    """The bytes of a tally for a file."""
    statements = (tally.statements[peer] for peer in sorted(tally.statements))
    return _encode(Packed(totals=dict(tally.totals), statements=tuple(statements)))


def decode(data: bytes) -> Packed:
    """Decode the tally in a file. Raises ``ValueError``."""
    return decoded(data, _decode, CALL.what, max_bytes=FILE_MAX_BYTES)
