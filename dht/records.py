"""Signed records about peers and runs, as the directory stores them.

A sealed record is ``signature (64) || public key (32) || body``, the body being a
msgpack array of format version, key, sequence, ttl and payload. The key begins
with the run id, and its second part says what kind of record it holds:

    RUN/peers/PREFIX   PeerRecord, one per peer         1 KiB sealed
    RUN/file           RunRecord, the run file itself   16 KiB of content
    RUN/directives     DirectivesRecord, of the run's owner and delegates

``check`` judges a record by itself. ``RecordKeeper`` also considers the records that this node has
seen before, and at a member of a run that admits only some peers, who may take part; both
directories ask it when a record is stored and when it is read. A node that does not know the run
(a bootstrap host) stores the records of anybody, which the run's members then do not believe.

No timestamp of another peer is ever used: a record carries its time to live (ttl), which runs on
the reader's own clock from the moment it first saw the record's sequence number. Nothing here reads
a clock or the network.
"""

from __future__ import annotations

import heapq
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Literal

import msgspec
from blake3 import blake3

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
RUN_FILE_MAX_BYTES = 16 * 1024
RUN_RECORD_MAX_BYTES = RUN_FILE_MAX_BYTES + 512
KEY_MAX_BYTES = 256 * 1024
"""Limit of all records under one key together: one reply of the directory carries them all."""

SEALED_MAX_BYTES = RUN_RECORD_MAX_BYTES
CREDENTIAL_MAX_BYTES = 320
DIRECTIVE_MAX_BYTES = 5600
DIRECTIVES_MAX = 4
"""Limit of directives known of one run: the owner's, and those of a few delegates."""

ADDRESSES_MAX = 6
ADDRESS_MAX_BYTES = 128
FRAGMENTS_MAX = 256
SEQUENCE_MAX = 2**53 - 1

HEAP_SLACK = 256
"""Times and ranks of entries that are gone which a heap may hold, besides one for each entry."""

_KEY_TEXT = re.compile(r"(?P<run>[0-9A-Za-z._-]{1,64})/(?P<kind>[a-z]{1,16})(?:/[0-9a-z]{0,40})?")
_SIGNED_PREFIX = b"shoal record\0"  # the signature of a record is valid for nothing else

Role = Literal["learner", "keeper", "bootstrap"]
COUNT_MAX = 2**62
Count = Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)]
Versions = Annotated[bytes, msgspec.Meta(max_length=512)]


class ContributionCounters(msgspec.Struct, frozen=True, array_like=True):
    """A peer's own count of its work for the run. Displayed, but never relied upon."""

    rounds: Count = 0
    tokens: Count = 0
    bytes_sent: Count = 0


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
    versions: Versions = b""
    """See ``pack_versions``."""

    counters: ContributionCounters = ContributionCounters()
    credential: Annotated[bytes, msgspec.Meta(max_length=CREDENTIAL_MAX_BYTES)] = b""
    """See ``dht.membership.credentials``. Not written when it is empty and the last."""

    release: Annotated[str, msgspec.Meta(max_length=RELEASE_LENGTH_MAX)] = ""
    """Release of the software, for people. Not written when it is empty."""

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
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value}; it is positive and finite when known")


class RunRecord(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A run file, whose hash is the run id. Anybody may publish it: the signer proves nothing."""

    content: Annotated[bytes, msgspec.Meta(max_length=RUN_FILE_MAX_BYTES)]


class DirectivesRecord(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The directives that its signer knows. Each of them proves itself."""

    directives: Annotated[
        tuple[Annotated[bytes, msgspec.Meta(max_length=DIRECTIVE_MAX_BYTES)], ...],
        msgspec.Meta(max_length=DIRECTIVES_MAX),
    ]


Record = PeerRecord | RunRecord | DirectivesRecord

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
"""Why a record is not believed.

- ``malformed``: it does not decode, or a value breaks a rule;
- ``oversized``: it is larger than its kind may be;
- ``version``: a form this version does not know;
- ``forged``: the signature does not fit, another peer's id is claimed, or the content is not the
  run file whose hash is the run id;
- ``foreign``: it belongs to another run;
- ``misplaced``: it was made for another key;
- ``replayed``: a newer record of the same peer is known;
- ``stale``: its time is over on this node's clock;
- ``full``: no room under this key, or in this node's memory;
- ``unadmitted``: the run does not admit its peer, or it holds a directive that proves nothing.
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
    record: Record
    digest: bytes
    """Hash of all bytes of the sealed record."""


@dataclass(frozen=True, slots=True)
class _Kind:
    record: type[Record]
    sealed_max_bytes: int
    ttl_max_s: float
    decode: Callable[[bytes], Record]


def _kind(record: type[Record], sealed_max_bytes: int, ttl_max_s: float) -> _Kind:
    return _Kind(record, sealed_max_bytes, ttl_max_s, msgspec.msgpack.Decoder(record).decode)


_KINDS: Mapping[str, _Kind] = {
    "peers": _kind(PeerRecord, PEER_RECORD_MAX_BYTES, 600.0),
    "file": _kind(RunRecord, RUN_RECORD_MAX_BYTES, 3600.0),
    "directives": _kind(DirectivesRecord, RUN_RECORD_MAX_BYTES, 3600.0),
}
TTL_MAX_S = max(kind.ttl_max_s for kind in _KINDS.values())


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
# RecursionError: msgspec's answer to arrays nested a thousand deep.
_DECODE_ERRORS = (msgspec.DecodeError, msgspec.ValidationError, RecursionError, ValueError)


def file_key(run: RunId) -> str:
    """The directory's key of the run file."""
    return f"{run}/file"


def directives_key(run: RunId) -> str:
    """The directory's key of the directives of a run's owner."""
    return f"{run}/directives"


def seal(record: Record, identity: Identity, *, key: str, sequence: int, ttl_s: float) -> bytes:
    """Sign a record for this key. Raises ``ValueError`` when it could not pass ``check``."""
    body = _Body(
        version=FORMAT,
        key=key,
        sequence=sequence,
        ttl_ms=round(ttl_s * 1000),
        payload=_payload(record),
    )
    encoded = msgspec.msgpack.encode(body)
    data = identity.sign(_SIGNED_PREFIX + encoded) + identity.public_key + encoded
    # Checked like any other record: no peer of this version refuses it for its form.
    verdict = check(data)
    if isinstance(verdict, Rejected):
        raise ValueError(f"{type(record).__name__} cannot be sealed: {verdict.detail}")
    return data


def _payload(record: Record) -> bytes:
    fields = list(msgspec.structs.astuple(record))
    if isinstance(record, PeerRecord):
        for _ in ("release", "credential"):  # the last fields are newer than the first peers
            if fields[-1]:
                break
            del fields[-1]
    return msgspec.msgpack.encode(fields)


def check(
    data: bytes, *, run: RunId | None = None, key: str | None = None, peer: PeerId | None = None
) -> Sealed | Rejected:
    """Judge a sealed record by itself: size, form, signature, and run, key and peer if given.

    Only a ``RecordKeeper`` can tell whether the record is a replay or has expired.
    """
    if len(data) > SEALED_MAX_BYTES:
        return Rejected("oversized", f"{len(data)} bytes; no record has over {SEALED_MAX_BYTES}")
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


def claimed_run(data: bytes) -> RunId | None:
    """The run that a sealed record says it belongs to, unchecked; ``None``: it cannot be read."""
    if len(data) > SEALED_MAX_BYTES:
        return None
    try:
        key = _body_decoder.decode(data[SIGNATURE_BYTES + PUBLIC_KEY_BYTES :]).key
    except _DECODE_ERRORS:
        return None
    match = _KEY_TEXT.fullmatch(key)
    return None if match is None else RunId(match["run"])


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
    kind = _KINDS.get(match["kind"]) if match else None
    if match is None or kind is None:
        return Rejected(
            "malformed", f"key {body.key!r} is none of RUN/peers/PREFIX, RUN/file, RUN/directives"
        )
    if len(data) > kind.sealed_max_bytes:
        return Rejected(
            "oversized",
            f"{len(data)} bytes; a {kind.record.__name__} has at most {kind.sealed_max_bytes}",
        )
    ttl_s = body.ttl_ms / 1000
    if ttl_s > kind.ttl_max_s:
        return Rejected("malformed", f"ttl is {ttl_s:g} s; at most {kind.ttl_max_s:g} s")
    # The cheap checks come first: a signature costs a hundred times the rest.
    peer = peer_id_of(public_key)
    if not verify(peer, _SIGNED_PREFIX + encoded, signature):
        return Rejected("forged", f"the signature is not that of {peer}")
    try:
        record = kind.decode(body.payload)
    except _DECODE_ERRORS as error:
        return Rejected("malformed", f"{kind.record.__name__}: {error}")
    digest = blake3(data).digest(16)
    return Sealed(peer, RunId(match["run"]), body.key, body.sequence, ttl_s, record, digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperLimits:
    """Limits of a node's memory about other peers' records."""

    records_max: int = 65_536
    """Limit of all remembered sequence numbers, including those of expired records."""

    memory_s: float = 900.0
    """Time for which a sequence number is remembered, so that older records stay refused."""

    key_max_bytes: int = KEY_MAX_BYTES
    """Limit of the records under one key."""

    bytes_max: int = 64 << 20
    """Limit of all records together."""

    def __post_init__(self) -> None:
        if self.records_max < 2:
            raise ValueError(f"records_max is {self.records_max}; it is at least 2")
        if self.bytes_max < self.key_max_bytes:
            raise ValueError(
                f"bytes_max is {self.bytes_max}; it is at least key_max_bytes, {self.key_max_bytes}"
            )
        if self.memory_s < 0:
            raise ValueError(f"memory_s is {self.memory_s}; it is not negative")


@dataclass(frozen=True, slots=True)
class Admitted:
    """A record that is believed until it expires on this node's clock."""

    sealed: Sealed
    first_seen: float
    """Time on this node's clock at which it first saw this sequence number."""

    expires_at: float
    """Time on this node's clock at which the record expires."""

    @property
    def peer(self) -> PeerId:
        return self.sealed.peer

    @property
    def record(self) -> Record:
        return self.sealed.record


@dataclass(slots=True)
class _Entry:
    sequence: int
    digest: bytes
    size_bytes: int
    first_seen: float
    expires_at: float
    forget_at: float
    rank: int
    settled: bool
    """It was among the first that came, and keeps its place. The others are a sample."""


@dataclass(slots=True)
class _Shelf:
    """The remembered entries under one key."""

    entries: dict[PeerId, _Entry] = field(default_factory=dict)
    size_bytes: int = 0
    """Size of all entries, including expired ones: a cheap upper bound."""

    settled_bytes: int = 0


@dataclass(slots=True)
class _Deadlines:
    """Times at which entries are over, for which nobody has to look at all entries.

    An entry has one time here; where it has another one by then, it is asked for again later.
    """

    _heap: list[tuple[float, str, PeerId]] = field(default_factory=list)

    def add(self, at: float, key: str, peer: PeerId) -> None:
        heapq.heappush(self._heap, (at, key, peer))

    def pop(
        self, now: float, at: Callable[[str, PeerId], float | None]
    ) -> list[tuple[str, PeerId]]:
        """Remove and return the entries that are over; ``at``: the present time of an entry."""
        over, later = [], []
        while self._heap and self._heap[0][0] <= now:
            _, key, peer = heapq.heappop(self._heap)
            time = at(key, peer)
            if time is not None and time <= now:
                over.append((key, peer))
            elif time is not None:
                later.append((time, key, peer))
        for item in dict.fromkeys(later):
            heapq.heappush(self._heap, item)
        return over

    def shrink(self, entries: Iterable[tuple[float, str, PeerId]], count: int) -> None:
        """Begin anew with these entries if most of the times are of entries that are gone."""
        if len(self._heap) > 2 * count + HEAP_SLACK:
            self._heap = list(entries)
            heapq.heapify(self._heap)


@dataclass(slots=True)
class RecordKeeper:
    """Decides which records a node believes, both when they are stored and when they are read.

    It remembers, per key and peer, the highest sequence number and when that was first seen on the
    own clock (``now``: any clock that only runs forward). With ``run`` set, records of other runs
    are foreign; a bootstrap peer, which serves every run, leaves it unset.

    Half of the room, under each key and in all, belongs to the records that came first, for as long
    as they are renewed. When the other half is full, those of the lowest rank stay, and a rank is a
    hash that only this node can compute. So a flood of identities neither displaces the peers that
    were there before, nor keeps newcomers out at every replica.

    The records themselves are not kept here but in the directory.
    """

    run: RunId | None = None
    limits: KeeperLimits = field(default_factory=KeeperLimits)
    rejected: Counter[Reason] = field(default_factory=Counter)
    """Number of refused records, by reason."""

    admitted: int = 0
    judge: Callable[[Sealed], str | None] = lambda sealed: None
    """Reason why the run of a record does not admit it; ``None`` if it does."""

    salt: bytes = field(default_factory=lambda: os.urandom(16), repr=False)
    """Secret of this node, from which ranks are computed."""

    on_evicted: Callable[[str, PeerId], None] = lambda key, peer: None
    """Called with key and peer of a record that was believed and made room for another one."""

    _shelves: dict[str, _Shelf] = field(default_factory=dict)
    _remembered: int = 0
    _size_bytes: int = 0
    _settled: int = 0
    _settled_bytes: int = 0
    _sample: list[tuple[int, str, PeerId]] = field(default_factory=list)
    """Heap of entries that are not settled, highest rank first. Some of them are gone."""

    _expiries: _Deadlines = field(default_factory=_Deadlines)
    _forgets: _Deadlines = field(default_factory=_Deadlines)
    _swept_at: float = -math.inf
    _pressed_at: float = -math.inf

    def __repr__(self) -> str:
        return (
            f"RecordKeeper(run={self.run}, keys={len(self._shelves)}, "
            f"remembered={self._remembered}, admitted={self.admitted}, "
            f"rejected={dict(self.rejected)})"
        )

    def admit(
        self,
        data: bytes,
        *,
        now: float,
        key: str | None = None,
        peer: PeerId | None = None,
        age_s: float = 0.0,
    ) -> Admitted | Rejected:
        """Judge a record that was found, or is to be stored, under ``key`` as that of ``peer``.

        The same record is admitted again until it expires. A rejected record does not change what
        is remembered. ``age_s`` is the time since the peer that passed the record on first saw it:
        without it, peers that pass on the record of a dead peer would keep it alive for ever.
        """
        verdict = self._judge(data, now=now, key=key, peer=peer, age_s=max(0.0, age_s))
        if isinstance(verdict, Rejected):
            self.rejected[verdict.reason] += 1
        else:
            self.admitted += 1
        return verdict

    def _entry(self, key: str, peer: PeerId) -> _Entry | None:
        shelf = self._shelves.get(key)
        return None if shelf is None else shelf.entries.get(peer)

    def _judge(
        self, data: bytes, *, now: float, key: str | None, peer: PeerId | None, age_s: float
    ) -> Admitted | Rejected:
        sealed = check(data, run=self.run, key=key, peer=peer)
        if isinstance(sealed, Rejected):
            return sealed
        if (reason := self.judge(sealed)) is not None:
            return Rejected("unadmitted", reason)
        entry = self._entry(sealed.key, sealed.peer)
        if entry is not None and entry.forget_at <= now:
            entry = None
        if entry is not None:
            if sealed.sequence < entry.sequence:
                return Rejected(
                    "replayed", f"sequence {sealed.sequence}; {entry.sequence} was seen already"
                )
            if sealed.sequence == entry.sequence:
                if sealed.digest != entry.digest:
                    return Rejected("replayed", f"sequence {sealed.sequence} is used twice")
                if now >= entry.expires_at:
                    age_s = now - entry.first_seen
                    return Rejected("stale", f"first seen {age_s:.1f} s ago, ttl {sealed.ttl_s:g}")
                return Admitted(sealed, entry.first_seen, entry.expires_at)
        first_seen = now - age_s
        expires_at = first_seen + sealed.ttl_s
        if sealed.ttl_s > 0 and now >= expires_at:
            return Rejected("stale", f"first seen {age_s:.1f} s ago, ttl {sealed.ttl_s:g}")
        content = sealed.record
        if isinstance(content, RunRecord) and blake3(content.content).hexdigest() != sealed.run:
            return Rejected("forged", "the content is not the run file of this run")
        if now - self._swept_at >= 1.0:
            self._swept_at = now
            self._forget(self._forgets.pop(now, self._forget_at))
        new = _Entry(
            sequence=sealed.sequence,
            digest=sealed.digest,
            size_bytes=len(data),
            first_seen=first_seen,
            expires_at=expires_at,
            forget_at=max(expires_at, now + self.limits.memory_s),
            rank=self._rank(sealed.key, sealed.peer),
            settled=False,
        )
        refusal = self._place(sealed.key, sealed.peer, new, now)
        return refusal or Admitted(sealed, first_seen, expires_at)

    def _rank(self, key: str, peer: PeerId) -> int:
        return int.from_bytes(blake3(f"{key} {peer}".encode() + self.salt).digest(8), "big")

    # --- room ------------------------------------------------------------------------------

    def _place(self, key: str, peer: PeerId, new: _Entry, now: float) -> Rejected | None:
        """Take an entry in the place of the peer's older one, or say that there is no room."""
        old = self._entry(key, peer)
        # A record that has settled does not compete with the others when it is renewed.
        rank = -1 if old is not None and old.settled else new.rank
        refusal = self._make_room_under_key(key, peer, new.size_bytes, rank, now)
        if refusal is None:
            refusal = self._make_room_in_all(new.size_bytes, old, rank, now)
        if refusal is not None:
            return refusal
        if old is not None:
            self._remove(key, peer)
        shelf, limits = self._shelves.setdefault(key, _Shelf()), self.limits
        new.settled = (
            shelf.settled_bytes + new.size_bytes <= limits.key_max_bytes // 2
            and self._settled_bytes + new.size_bytes <= limits.bytes_max // 2
            and self._settled < limits.records_max // 2
        )
        shelf.entries[peer] = new
        self._count(shelf, new, 1)
        if not new.settled:
            heapq.heappush(self._sample, (-new.rank, key, peer))
        if old is None:
            self._expiries.add(new.expires_at, key, peer)
            self._forgets.add(new.forget_at, key, peer)
        self._shrink()
        return None

    def _make_room_under_key(
        self, key: str, peer: PeerId, size_bytes: int, rank: int, now: float
    ) -> Rejected | None:
        shelf, limit = self._shelves.get(key), self.limits.key_max_bytes
        if shelf is None or shelf.size_bytes + size_bytes <= limit:
            return None
        others = {p: e for p, e in shelf.entries.items() if p != peer and e.expires_at > now}
        used_bytes = sum(entry.size_bytes for entry in others.values())
        higher = sorted((e.rank, p) for p, e in others.items() if not e.settled and e.rank > rank)
        evicted = []
        while higher and used_bytes + size_bytes > limit:
            evicted.append(higher.pop()[1])
            used_bytes -= others[evicted[-1]].size_bytes
        if used_bytes + size_bytes > limit:
            return Rejected("full", f"key holds {used_bytes} bytes already, at most {limit}")
        for other in evicted:
            self._evict(key, other)
        return None

    def _make_room_in_all(
        self, size_bytes: int, old: _Entry | None, rank: int, now: float
    ) -> Rejected | None:
        limits = self.limits
        more = 1 if old is None else 0
        more_bytes = size_bytes - (old.size_bytes if old is not None else 0)

        def full() -> bool:
            return (
                self._remembered + more > limits.records_max
                or self._size_bytes + more_bytes > limits.bytes_max
            )

        if full() and now - self._pressed_at >= 1.0:  # a sweep is not free
            self._pressed_at = now
            self._forget(self._expiries.pop(now, self._expires_at))
        while full():
            highest = self._highest_of_sample()
            if highest is None or -highest[0] <= rank:
                return Rejected(
                    "full",
                    f"{self._remembered} records with {self._size_bytes} bytes are held already",
                )
            self._evict(*highest[1:])
        return None

    def _highest_of_sample(self) -> tuple[int, str, PeerId] | None:
        while self._sample:
            negative_rank, key, peer = self._sample[0]
            entry = self._entry(key, peer)
            if entry is not None and not entry.settled and entry.rank == -negative_rank:
                return self._sample[0]
            heapq.heappop(self._sample)
        return None

    def _evict(self, key: str, peer: PeerId) -> None:
        self._remove(key, peer)
        self.on_evicted(key, peer)

    def _remove(self, key: str, peer: PeerId) -> None:
        shelf = self._shelves[key]
        self._count(shelf, shelf.entries.pop(peer), -1)
        if not shelf.entries:
            del self._shelves[key]

    def _count(self, shelf: _Shelf, entry: _Entry, sign: int) -> None:
        shelf.size_bytes += sign * entry.size_bytes
        self._size_bytes += sign * entry.size_bytes
        self._remembered += sign
        if entry.settled:
            shelf.settled_bytes += sign * entry.size_bytes
            self._settled_bytes += sign * entry.size_bytes
            self._settled += sign

    def _forget(self, over: Iterable[tuple[str, PeerId]]) -> None:
        for key, peer in over:
            self._remove(key, peer)

    def _expires_at(self, key: str, peer: PeerId) -> float | None:
        entry = self._entry(key, peer)
        return None if entry is None else entry.expires_at

    def _forget_at(self, key: str, peer: PeerId) -> float | None:
        entry = self._entry(key, peer)
        return None if entry is None else entry.forget_at

    def _entries(self) -> Iterator[tuple[str, PeerId, _Entry]]:
        for key, shelf in self._shelves.items():
            for peer, entry in shelf.entries.items():
                yield key, peer, entry

    def _shrink(self) -> None:
        """Drop what the heaps hold of entries that are gone, once that is most of it."""
        count = self._remembered
        self._expiries.shrink(((e.expires_at, k, p) for k, p, e in self._entries()), count)
        self._forgets.shrink(((e.forget_at, k, p) for k, p, e in self._entries()), count)
        if len(self._sample) > 2 * count + HEAP_SLACK:
            self._sample = [(-e.rank, k, p) for k, p, e in self._entries() if not e.settled]
            heapq.heapify(self._sample)


def pack_versions(versions: Sequence[int]) -> bytes:
    """Encode fragment versions: the lowest, then the excess of each, as LEB128 numbers.

    Fragments of one run advance together, so an excess takes a byte or two.
    """
    if len(versions) > FRAGMENTS_MAX:
        raise ValueError(f"{len(versions)} fragments; at most {FRAGMENTS_MAX}")
    if not versions:
        return b""
    lowest = min(versions)
    if lowest < 0:
        raise ValueError(f"a fragment's version is {lowest}; versions start at 0")
    out = bytearray()
    for number in (lowest, *(version - lowest for version in versions)):
        while number >= 0x80:
            out.append(number & 0x7F | 0x80)
            number >>= 7
        out.append(number)
    return bytes(out)


def unpack_versions(data: bytes) -> tuple[int, ...]:
    """Decode the output of ``pack_versions``. Raises ``ValueError`` for anything else."""
    numbers: list[int] = []
    number = shift = 0
    for byte in data:
        if shift > 56:
            raise ValueError("a version has more than nine bytes")
        number |= (byte & 0x7F) << shift
        if byte & 0x80:
            shift += 7
            continue
        if shift and not byte:
            raise ValueError("a version is written longer than it need be")
        numbers.append(number)
        number = shift = 0
    if shift:
        raise ValueError("the last version is cut off")
    if len(numbers) == 1 or len(numbers) > FRAGMENTS_MAX + 1:
        raise ValueError(f"{len(numbers) - 1} versions; between 1 and {FRAGMENTS_MAX}")
    if numbers and 0 not in numbers[1:]:
        raise ValueError("no version is the lowest one")
    return tuple(numbers[0] + excess for excess in numbers[1:])
