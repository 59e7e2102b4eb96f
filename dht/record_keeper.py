"""Decides which records the directory's part at this node believes, and has those it stores.

A ``RecordKeeper`` considers the records that this node has seen before, and at a member of a run
that admits only some peers, who may take part; both directories ask it when a record is stored and
when it is read. A node that does not know the run (a bootstrap host) stores the records of anybody,
which the run's members then do not believe.
"""

from __future__ import annotations

import heapq
import math
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, KeysView
from dataclasses import dataclass, field

from blake3 import blake3

from dht.identity import PeerId, RunId
from dht.records import KEY_MAX_BYTES, Reason, Rejected, Sealed, check

HEAP_SLACK = 256
"""Ranks of entries that are gone which the sample may hold, besides as many again as entries."""


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


@dataclass(slots=True)
class _Entry:
    sequence: int
    digest: bytes
    size_bytes: int
    first_seen: float
    expires_at: float
    """Its time to live runs on the own clock from when its sequence number was first seen."""

    forget_at: float
    rank: int
    settled: bool
    """True if it was among the first that came, and keeps its place. The others are a sample."""

    stored: bytes | None
    """The record itself, if this node stores it for others; ``None``: it has only read it."""


@dataclass(slots=True)
class _Shelf:
    """The remembered entries under one key."""

    entries: dict[PeerId, _Entry] = field(default_factory=dict)
    size_bytes: int = 0
    """Size of all entries, including expired ones: a cheap upper bound."""

    settled_bytes: int = 0


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

    A record that this node stores for others is in its entry, and gone with it. One that it has
    only read is not passed on: each reader counts a record's time from when it first saw it, and
    readers that served one another would keep the record of a dead peer alive.
    """

    run: RunId | None = None
    limits: KeeperLimits = field(default_factory=KeeperLimits)
    rejected: Counter[Reason] = field(default_factory=Counter)
    """Number of refused records, by reason."""

    judge: Callable[[Sealed], str | None] = lambda sealed: None
    """Reason why the run of a record does not admit it; ``None`` if it does."""

    salt: bytes = field(default_factory=lambda: os.urandom(16), repr=False)
    """Secret of this node, from which ranks are computed."""

    _shelves: dict[str, _Shelf] = field(default_factory=dict)
    _in_order: OrderedDict[tuple[str, PeerId], _Entry] = field(default_factory=OrderedDict)
    """All entries, the longest unrenewed first."""

    _size_bytes: int = 0
    _settled: int = 0
    _settled_bytes: int = 0
    _sample: list[tuple[int, str, PeerId]] = field(default_factory=list)
    """Heap of entries that are not settled, highest rank first. Some of them are gone."""

    _pressed_at: float = -math.inf

    def admit(
        self,
        data: bytes,
        *,
        now: float,
        key: str | None = None,
        store: bool = False,
    ) -> Sealed | Rejected:
        """Judge a record that was found, or is to be stored, under ``key``.

        The same record is admitted again until it expires. A rejected record does not change what
        is remembered. ``store``: keep the record for others, if it is believed.
        """
        verdict = self._judge(data, now=now, key=key)
        if isinstance(verdict, Rejected):
            self.rejected[verdict.reason] += 1
            return verdict
        if store:
            self._shelves[verdict.key].entries[verdict.peer].stored = bytes(data)
        return verdict

    @property
    def known_keys(self) -> KeysView[str]:
        """The keys of which a record is remembered."""
        return self._shelves.keys()

    def stored(self, key: str, *, now: float) -> dict[PeerId, bytes]:
        """The records under a key that this node stores for others, by peer."""
        entries = self._shelves[key].entries if key in self._shelves else {}
        return {
            peer: entry.stored
            for peer, entry in entries.items()
            if entry.stored is not None and now < entry.expires_at
        }

    def stored_bytes(self, *, now: float) -> int:
        """Size of all records that this node stores for others."""
        return sum(
            entry.size_bytes
            for entry in self._in_order.values()
            if entry.stored is not None and now < entry.expires_at
        )

    def newest(self, found: Iterable[bytes], *, key: str, now: float) -> dict[PeerId, bytes]:
        """Each believed peer's newest record, of those that were found under a key."""
        newest: dict[PeerId, bytes] = {}
        for data in dict.fromkeys(found):  # nodes that store a record mostly agree
            verdict = self.admit(data, now=now, key=key)
            if isinstance(verdict, Sealed):  # no older one than was admitted before
                newest[verdict.peer] = data
        return dict(sorted(newest.items()))

    def _entry(self, key: str, peer: PeerId) -> _Entry | None:
        shelf = self._shelves.get(key)
        return None if shelf is None else shelf.entries.get(peer)

    def _judge(self, data: bytes, *, now: float, key: str | None) -> Sealed | Rejected:
        sealed = check(data, run=self.run, key=key)
        if isinstance(sealed, Rejected):
            return sealed
        if (reason := self.judge(sealed)) is not None:
            return Rejected("unadmitted", reason)
        entry = self._entry(sealed.key, sealed.peer)
        if entry is not None and now < entry.forget_at:
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
                return sealed
        self._drop_while(lambda entry: entry.forget_at <= now)
        expires_at = now + sealed.ttl_s
        new = _Entry(
            sequence=sealed.sequence,
            digest=sealed.digest,
            size_bytes=len(data),
            first_seen=now,
            expires_at=expires_at,
            forget_at=max(expires_at, now + self.limits.memory_s),
            rank=self._rank(sealed.key, sealed.peer),
            settled=False,
            stored=None,
        )
        return self._place(sealed.key, sealed.peer, new, now) or sealed

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
        shelf.entries[peer] = self._in_order[key, peer] = new
        self._count(shelf, new, 1)
        if not new.settled:
            heapq.heappush(self._sample, (-new.rank, key, peer))
            if len(self._sample) > 2 * len(self._in_order) + HEAP_SLACK:
                known = self._in_order.items()
                self._sample = [(-e.rank, k, p) for (k, p), e in known if not e.settled]
                heapq.heapify(self._sample)
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
            self._remove(key, other)
        return None

    def _make_room_in_all(
        self, size_bytes: int, old: _Entry | None, rank: int, now: float
    ) -> Rejected | None:
        limits = self.limits
        more = 1 if old is None else 0
        more_bytes = size_bytes - (old.size_bytes if old is not None else 0)

        def full() -> bool:
            return (
                len(self._in_order) + more > limits.records_max
                or self._size_bytes + more_bytes > limits.bytes_max
            )

        if full() and now - self._pressed_at >= 1.0:  # a sweep is not free
            self._pressed_at = now
            self._drop_while(lambda entry: entry.expires_at <= now)
        while full():
            highest = self._highest_of_sample()
            if highest is None or -highest[0] <= rank:
                held = f"{len(self._in_order)} records with {self._size_bytes} bytes"
                return Rejected("full", f"{held} are held already")
            self._remove(*highest[1:])
        return None

    def _highest_of_sample(self) -> tuple[int, str, PeerId] | None:
        while self._sample:
            negative_rank, key, peer = self._sample[0]
            entry = self._entry(key, peer)
            if entry is not None and not entry.settled and entry.rank == -negative_rank:
                return self._sample[0]
            heapq.heappop(self._sample)
        return None

    def _remove(self, key: str, peer: PeerId) -> None:
        shelf = self._shelves[key]
        del self._in_order[key, peer]
        self._count(shelf, shelf.entries.pop(peer), -1)
        if not shelf.entries:
            del self._shelves[key]

    def _count(self, shelf: _Shelf, entry: _Entry, sign: int) -> None:
        shelf.size_bytes += sign * entry.size_bytes
        self._size_bytes += sign * entry.size_bytes
        if entry.settled:
            shelf.settled_bytes += sign * entry.size_bytes
            self._settled_bytes += sign * entry.size_bytes
            self._settled += sign

    def _drop_while(self, over: Callable[[_Entry], bool]) -> None:
        """Drop the longest unrenewed entries, up to the first that is not over.

        Those behind it are dropped later: nobody has to look at all entries.
        """
        while self._in_order and over(self._in_order[first := next(iter(self._in_order))]):
            self._remove(*first)
