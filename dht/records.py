"""Signed records of peers, as the directory stores them.

A sealed record is ``signature (64) || public key (32) || body``, the body being a
msgpack array of format version, key, sequence, ttl and payload. The key is
``RUN/peers/PREFIX``, and the payload a ``PeerRecord``. Everything else that peers of a
run want of each other (the run file, the directives of its owner) they ask each other for: who
reads the directory finds the peers there.

``check`` judges a record by itself, ``dht.record_keeper`` also by what this node has seen before.

No timestamp of another peer is ever used: a record carries its time to live (ttl), which runs on
the reader's own clock from the moment it first saw the record's sequence number. Nothing here reads
a clock or the network.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal

import msgspec
from blake3 import blake3

from dht.decoding import UNDECODABLE
from dht.identity import (
    PUBLIC_KEY_BYTES,
    SIGNATURE_BYTES,
    Identity,
    PeerId,
    RunId,
    peer_id_of,
    verify,
)

FORMAT = 1
"""Version of the sealed form. A record of another version is refused as ``version``."""

PEER_RECORD_MAX_BYTES = 1024
TTL_MAX_S = 600.0
RUN_FILE_MAX_BYTES = 16 * 1024
KEY_MAX_BYTES = 256 * 1024
"""Limit of all records under one key together: one reply of the directory carries them all."""

CREDENTIAL_MAX_BYTES = 320
DIRECTIVE_MAX_BYTES = 5600
DIRECTIVES_MAX = 4
"""Limit of directives known of one run: the owner's, and those of a few delegates."""

ADDRESSES_MAX = 6
ADDRESS_MAX_BYTES = 128
FRAGMENTS_MAX = 256
SEQUENCE_MAX = 2**53 - 1

_KEY_TEXT = re.compile(r"(?P<run>[0-9A-Za-z._-]{1,64})/peers/[0-9a-z]{0,40}")
_SIGNED_PREFIX = b"shoal record\0"  # the signature of a record is valid for nothing else

Role = Literal["learner", "keeper", "bootstrap"]
COUNT_MAX = 2**62
Count = Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)]


class ContributionCounters(msgspec.Struct, frozen=True, array_like=True):
    """A peer's own count of its work for the run. Displayed, but never relied upon."""

    rounds: Count = 0
    tokens: Count = 0
    bytes_sent: Count = 0


NUMBER_MIN, NUMBER_MAX = 1e-9, 1e12
"""Bounds of speeds and times: others divide by them."""

VERSION_MAX = 2**53 - 1
Versions = Annotated[
    tuple[Annotated[int, msgspec.Meta(ge=0, le=VERSION_MAX)], ...],
    msgspec.Meta(max_length=FRAGMENTS_MAX + 1),
]
NAME_LENGTH_MAX = 32
SITE_LENGTH_MAX = 16
RELEASE_LENGTH_MAX = 24


def name_problem(name: str) -> str | None:
    """Reason why this cannot be a peer's name; ``None`` if it can."""
    if 0 < len(name) <= NAME_LENGTH_MAX and name.isprintable():
        return None
    return f"name is {name!r}; it has 1 to {NAME_LENGTH_MAX} printable characters"


def site_problem(site: str) -> str | None:
    """Reason why this cannot be the name of a site; ``None`` if it can."""
    if 0 < len(site) <= SITE_LENGTH_MAX and site.isprintable():
        return None
    return f"site is {site!r}; it is a name of 1 to {SITE_LENGTH_MAX} printable characters"


class PeerRecord(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A peer's description of itself. New fields are appended; older readers skip them."""

    protocol: tuple[Count, Count]
    """Oldest and newest protocol version it speaks."""

    role: Role
    incarnation: Count
    """Random number that differs after every start of the peer."""

    addresses: Annotated[
        tuple[Annotated[bytes, msgspec.Meta(max_length=ADDRESS_MAX_BYTES)], ...],
        msgspec.Meta(max_length=ADDRESSES_MAX),
    ] = ()
    """Binary multiaddrs without the peer id, best first. Hints: any of them may be wrong."""

    reachable: bool | None = None
    """Others could dial these addresses. ``False``: dial-out only; ``None``: not known yet."""

    leaving: bool = False
    name: Annotated[str, msgspec.Meta(max_length=NAME_LENGTH_MAX)] = ""
    site: Annotated[str, msgspec.Meta(max_length=SITE_LENGTH_MAX)] = ""
    trains: bool = False
    step_time_s: float | None = None
    link_bytes_s: float | None = None
    versions: Versions = ()
    """See ``pack_versions``."""

    counters: ContributionCounters = ContributionCounters()
    credential: Annotated[bytes, msgspec.Meta(max_length=CREDENTIAL_MAX_BYTES)] = b""
    """See ``dht.membership.credentials``."""

    release: Annotated[str, msgspec.Meta(max_length=RELEASE_LENGTH_MAX)] = ""
    """Release of the software, for people."""

    @property
    def arrives(self) -> bool:
        """True of a learner that is about to begin; one that has trained, and rests, is not."""
        return self.role == "learner" and not self.trains and self.step_time_s is None

    def __post_init__(self) -> None:
        if self.protocol[0] > self.protocol[1]:
            raise ValueError(f"protocol is {self.protocol}; its first version exceeds its last")
        if not 0 <= self.incarnation <= COUNT_MAX:  # other peers could not decode the record
            raise ValueError(f"incarnation is {self.incarnation}; it is at most {COUNT_MAX}")
        for name in ("name", "site", "release"):
            if not getattr(self, name).isprintable():  # it is displayed on terminals
                raise ValueError(f"{name} contains characters that cannot be printed")
        for name in ("step_time_s", "link_bytes_s"):
            value = getattr(self, name)
            if value is not None and not NUMBER_MIN <= value <= NUMBER_MAX:  # it is displayed, too
                raise ValueError(f"{name} is {value}; it is {NUMBER_MIN:g} to {NUMBER_MAX:g}")
        if self.versions and (self.versions[0] < 0 or 0 not in self.versions[1:]):
            raise ValueError("versions start at 0, and one of them is the lowest")
        if max(unpack_versions(self.versions), default=0) > VERSION_MAX:
            raise ValueError(f"a fragment's version is above {VERSION_MAX}")


Reason = Literal[
    "malformed",
    "oversized",
    "version",
    "forged",
    "foreign",
    "misplaced",
    "replayed",
    "stale",
    "full",
    "unadmitted",
]
"""The reason not to believe a record.

- ``malformed``: it does not decode, or a value breaks a rule;
- ``oversized``: it is larger than a record may be;
- ``version``: a form this version does not know;
- ``forged``: the signature does not fit, or another peer's id is claimed;
- ``foreign``: it belongs to another run;
- ``misplaced``: it was made for another key, or for a bucket in which its peer has no place;
- ``replayed``: a newer record of the same peer is known;
- ``stale``: its time is over on this node's clock;
- ``full``: no room under this key, or in this node's memory;
- ``unadmitted``: the run does not admit its peer.
"""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A record that is not believed, with the reason."""

    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class Sealed:
    """A record with correct signature, size and form, and the other signed values."""

    peer: PeerId
    run: RunId
    key: str
    sequence: int
    ttl_s: float
    record: PeerRecord
    digest: bytes
    """Hash of all bytes of the sealed record."""


class _Body(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    version: Annotated[int, msgspec.Meta(ge=0, le=2**31)]
    key: Annotated[str, msgspec.Meta(max_length=128)]
    sequence: Annotated[int, msgspec.Meta(ge=0, le=SEQUENCE_MAX)]
    ttl_ms: Annotated[int, msgspec.Meta(ge=0, le=int(TTL_MAX_S * 1000))]
    payload: bytes


class _VersionOnly(msgspec.Struct, frozen=True, array_like=True):
    version: int


_body_decoder = msgspec.msgpack.Decoder(_Body)
_version_decoder = msgspec.msgpack.Decoder(_VersionOnly)
_record_decoder = msgspec.msgpack.Decoder(PeerRecord)
_DECODE_ERRORS = (*UNDECODABLE, ValueError)


def seal(record: PeerRecord, identity: Identity, *, key: str, sequence: int, ttl_s: float) -> bytes:
    """Sign a record for this key. Raises ``ValueError`` when it could not pass ``check``."""
    body = _Body(
        version=FORMAT,
        key=key,
        sequence=sequence,
        ttl_ms=round(ttl_s * 1000),
        payload=msgspec.msgpack.encode(record),
    )
    encoded = msgspec.msgpack.encode(body)
    data = identity.sign(_SIGNED_PREFIX + encoded) + identity.public_key + encoded
    # Checked like any other record: no peer of this version refuses it for its form.
    verdict = check(data)
    if isinstance(verdict, Rejected):
        raise ValueError(f"the record cannot be sealed: {verdict.detail}")
    return data


def check(
    data: bytes, *, run: RunId | None = None, key: str | None = None, peer: PeerId | None = None
) -> Sealed | Rejected:
    """Judge a sealed record by itself: size, form, signature, and run, key and peer if given.

    Only a ``RecordKeeper`` can tell whether the record is a replay or has expired.
    """
    if len(data) > PEER_RECORD_MAX_BYTES:
        return Rejected(
            "oversized", f"{len(data)} bytes; no record has over {PEER_RECORD_MAX_BYTES}"
        )
    verdict = _check_alone(bytes(data))
    if isinstance(verdict, Rejected):
        return verdict
    if run is not None and verdict.run != run:
        return Rejected("foreign", f"run is {verdict.run}; this is {run}")
    if key is not None and verdict.key != key:
        return Rejected("misplaced", f"made for key {verdict.key}, found under {key}")
    if peer is not None and verdict.peer != peer:
        return Rejected("forged", f"signed by {verdict.peer}, stored as {peer}")
    return verdict


# The same record comes from several replicas, is checked by the directory and by its reader, and
# comes again until the next one is published. There is room for one of every member of a table.
@lru_cache(maxsize=8192)
def _check_alone(data: bytes) -> Sealed | Rejected:
    signature = data[:SIGNATURE_BYTES]
    public_key = data[SIGNATURE_BYTES : SIGNATURE_BYTES + PUBLIC_KEY_BYTES]
    encoded = data[SIGNATURE_BYTES + PUBLIC_KEY_BYTES :]
    if not encoded:
        return Rejected("malformed", f"{len(data)} bytes are no record")
    try:
        version = _version_decoder.decode(encoded).version
        if version != FORMAT:
            return Rejected("version", f"format {version}; this version reads {FORMAT}")
        body = _body_decoder.decode(encoded)
    except _DECODE_ERRORS as error:
        return Rejected("malformed", f"body: {error}")
    match = _KEY_TEXT.fullmatch(body.key)
    if match is None:
        return Rejected("malformed", f"key {body.key!r} is not RUN/peers/PREFIX")
    ttl_s = body.ttl_ms / 1000
    # The cheap checks come first: a signature costs a hundred times the rest.
    peer = peer_id_of(public_key)
    if not verify(peer, _SIGNED_PREFIX + encoded, signature):
        return Rejected("forged", f"the signature is not that of {peer}")
    try:
        record = _record_decoder.decode(body.payload)
    except _DECODE_ERRORS as error:
        return Rejected("malformed", f"payload: {error}")
    digest = blake3(data).digest(16)
    return Sealed(peer, RunId(match["run"]), body.key, body.sequence, ttl_s, record, digest)


def pack_versions(versions: Sequence[int]) -> tuple[int, ...]:
    """The lowest version, then the excess of each fragment over it.

    Fragments of one run advance together, so an excess takes a byte or two.
    """
    if not versions:
        return ()
    lowest = min(versions)
    return lowest, *(version - lowest for version in versions)


def unpack_versions(packed: Sequence[int]) -> tuple[int, ...]:
    """The versions of a record's fragments."""
    return tuple(packed[0] + excess for excess in packed[1:])
