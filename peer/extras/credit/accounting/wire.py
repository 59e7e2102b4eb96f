"""A tally as bytes: a summary that asks for what is missing, parts of it, and the file of a peer.

Maps travel as those of a meld do (``averaging.history.parent_maps``): columns of differences, so
twenty fragments cost little more than one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Final, TypeAlias, TypeVar

import blake3
import msgspec
from msgspec import Meta, Struct

from averaging.errors import BadPayload
from averaging.history.parent_maps import decode_maps, encode_maps
from averaging.messages import ROSTER_MAX, Count, Index, Link, Signatures
from dht.decoding import decoded
from dht.identity import PeerId
from peer.calls import Call
from peer.extras.credit.accounting.tally import Part, ProvenMap, Statement, Tally

T = TypeVar("T")

VERSION: Final = 1
SUMMARY_MAX_BYTES: Final = 64 << 10
PART_MAX_BYTES: Final = 960 << 10
"""Largest answer to a summary. The rest is answered to the next one."""

FILE_MAX_BYTES: Final = 256 << 20
BUCKETS: Final = 16
"""Groups of statements that are compared by one digest each."""

_PEERS_MAX: Final = 50_000
_SHORT: Final = 8
_Short: TypeAlias = Annotated[bytes, Meta(min_length=_SHORT, max_length=_SHORT)]


class _Seen(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The version of a fragment that the asking peer has a map of."""

    fragment: Index
    tokens: Count
    version: Count
    lineage: _Short


class Summary(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Digests of what a peer knows: the answer is what it lacks."""

    maps: Annotated[tuple[_Seen, ...], Meta(max_length=2**16)]
    statements: Annotated[bytes, Meta(max_length=_SHORT * BUCKETS)]


class _Map(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    fragment: Index
    link: Link
    signatures: Signatures


class _Maps(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Some maps, each by the index of its row."""

    rows: Annotated[tuple[_Map, ...], Meta(max_length=ROSTER_MAX)]
    data: bytes


class Packed(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A part of a tally, as it travels and lies in a file."""

    version: Annotated[int, Meta(ge=VERSION, le=VERSION)]
    maps: Annotated[tuple[_Maps, ...], Meta(max_length=4096)]
    statements: Annotated[tuple[Statement, ...], Meta(max_length=_PEERS_MAX)]
    topic: Annotated[bytes, Meta(max_length=16)]


_encoder = msgspec.msgpack.Encoder()
_parts = msgspec.msgpack.Decoder(Packed)

CALL: Call[Summary, Packed] = Call(
    "/shoal/credit/1",
    Packed,
    "a part of a tally",
    PART_MAX_BYTES,
    asks=Summary,
    request_max_bytes=SUMMARY_MAX_BYTES,
)
"""The question of this call is what the asking peer knows, and the answer what it lacks."""


def summary(tally: Tally) -> Summary:
    """A peer's knowledge, by which it asks for the parts that it lacks."""
    seen = tuple(
        _Seen(each.fragment, tokens, version, lineage[:_SHORT])
        for _, each in sorted(tally.maps.items())
        for tokens, version, lineage in [each.rank]
    )
    return Summary(seen, b"".join(_bucket_digests(tally)))


def _bucket_of(peer: PeerId) -> int:
    return peer.encode()[-1] % BUCKETS


def _bucket_digests(tally: Tally) -> list[bytes]:
    content = [b""] * BUCKETS
    for peer, statement in sorted(tally.statements.items()):
        content[_bucket_of(peer)] += statement.signature
    return [blake3.blake3(each).digest(_SHORT) for each in content]


def missing(tally: Tally, asked: Summary) -> Part:
    """Parts that this peer knows and the asking one does not."""
    seen = {each.fragment: (each.tokens, each.version, each.lineage) for each in asked.maps}
    maps = []
    for fragment, proven in sorted(tally.maps.items()):
        tokens, version, lineage = proven.rank
        if (tokens, version, lineage[:_SHORT]) > seen.get(fragment, (-1, 0, b"")):
            maps.append(proven)
    theirs = [asked.statements[at : at + _SHORT] for at in range(0, len(asked.statements), _SHORT)]
    differing = {
        bucket
        for bucket, digest in enumerate(_bucket_digests(tally))
        if bucket >= len(theirs) or theirs[bucket] != digest
    }
    stated = [s for peer, s in sorted(tally.statements.items()) if _bucket_of(peer) in differing]
    return Part(tuple(maps), tuple(stated), tally.topic if maps or stated else b"")


def encode_some(part: Part) -> bytes:
    """The beginning of a part that fits an answer."""
    for share in (1.0, 0.5, 0.25, 0.1, 0.03, 0.01):
        data = encode(Part(_some(part.maps, share), _some(part.statements, share), part.topic))
        if len(data) <= PART_MAX_BYTES:
            return data
    return encode(Part())


def _some(items: tuple[T, ...], share: float) -> tuple[T, ...]:
    return items[: max(1, round(share * len(items)))]


def encode(part: Part) -> bytes:
    """The bytes of a part, whatever its size."""
    tables = tuple(_encoded_maps(part.maps))
    return _encoder.encode(Packed(VERSION, tables, part.statements, part.topic))


def _encoded_maps(maps: Sequence[ProvenMap]) -> Iterable[_Maps]:
    """The maps in as few tables as fit. A map that fits none is left out."""
    while maps:
        count = min(len(maps), ROSTER_MAX)
        while count:
            try:
                data = encode_maps({row: each.map for row, each in enumerate(maps[:count])})
            except BadPayload:
                count //= 2
                continue
            rows = tuple(_Map(each.fragment, each.link, each.signatures) for each in maps[:count])
            yield _Maps(rows, data)
            break
        maps = maps[max(1, count) :]


def decode(data: bytes) -> Part:
    """Decode the part in a file. Raises ``ValueError``."""
    return unpacked(decoded(data, _parts.decode, CALL.what, max_bytes=FILE_MAX_BYTES))


def unpacked(found: Packed) -> Part:
    """A part, which is compared with nothing. Raises ``ValueError``."""
    try:
        maps = tuple(each for table in found.maps for each in _read_maps(table))
    except BadPayload as error:
        raise ValueError(f"not a part of a tally: {error}") from error
    return Part(maps, found.statements, found.topic)


def _read_maps(table: _Maps) -> Iterable[ProvenMap]:
    maps = decode_maps(table.data)
    if maps.keys() != set(range(len(table.rows))):
        raise ValueError("not a part of a tally: a map has no link, or a link no map")
    for row, each in enumerate(table.rows):
        yield ProvenMap(each.fragment, each.link, maps[row], each.signatures)
