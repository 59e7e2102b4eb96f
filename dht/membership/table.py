"""The members of a run as one peer knows them: their signed records, and its own observations.

A bootstrap peer, which is in no run, has the members of all runs in one table: a peer is in one run
at a time.

The directory holds a run's records in buckets, by the first bits of a hash of the peer id. With n
peers the buckets have depth d = ceil(log2(n / 64)): a peer writes its record at depth d and reads
depths d - 1 to d + 1, because other peers' estimates of n may differ a little. So one reply of the
directory holds about 64 records, however large the swarm is.

``PeerTable`` decides which records from the network count, which buckets to read and which peers
are alive. It reads no clock and sends nothing: ``dht.presence`` reports to it. All times are on the
own clock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

import numpy as np
from blake3 import blake3
from multiaddr import Multiaddr

from dht.addresses import unpack_all
from dht.identity import PeerId, RunId
from dht.membership.hello import PASSED_MAX, Passed
from dht.records import PeerRecord, Reason, Rejected, Sealed, check

DEPTH_MAX = 10
"""Depth of the buckets of 65 000 peers, eight times as many as a table has."""

ESTABLISHED_AFTER_S = 30.0
"""Time for which a peer has to be known before it may have a role in a round."""


SWEEP_EVERY_S = 1.0
"""Pause between two searches for lost peers in a table that is full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipSettings:
    """Settings of a peer's table of other members."""

    heartbeat_s: float = 10.0
    """Interval at which a peer renews its record and reads those of the others."""

    expiry_s: float = 30.0
    """Silence after which a peer is no longer live."""

    bucket_peers: int = 64
    look_ups_max: int = 32
    """Limit of buckets read per heartbeat. Beyond about 1500 peers they are read in turns."""

    members_max: int = 8192
    memory_s: float = 6 * 3600.0
    """Time for which a lost peer is remembered: its old records cannot revive it, and it is looked
    for sometimes, so that a healed partition reunites without a seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One other peer of the run."""

    peer: PeerId
    run: RunId
    record: PeerRecord
    sequence: int
    sealed: bytes
    """The signed record, to be passed on."""

    depth: int
    """Depth of the bucket that it wrote to: its own idea of the size of the swarm."""

    first_seen: float
    """Time at which this incarnation was first seen."""

    record_seen_at: float
    expires_at: float
    heard_at: float | None = None
    """Time at which it last answered us or called us."""

    failed_at: float | None = None
    """Time at which a call to it last failed."""

    worked_at: float = -math.inf
    """Time at which a record last said that it trains; if none did, that of its first one."""

    network: str | None = None
    """Network from which it was connected when it called or answered first."""

    @property
    def reachable(self) -> bool | None:
        return self.record.reachable

    @property
    def last_sign_at(self) -> float:
        """Time at which a record or a message of the peer was last seen."""
        return max(self.record_seen_at, self.heard_at or -math.inf)

    @property
    def addresses(self) -> tuple[Multiaddr, ...]:
        """The announced addresses, best first, without the peer id; invalid ones are left out."""
        return unpack_all(self.record.addresses)


@dataclass(frozen=True, slots=True)
class Change:
    """A peer that came or went, as seen by this table."""

    peer: PeerId
    kind: Literal["joined", "left", "lost"]
    """``left`` said goodbye, ``lost`` fell silent."""

    name: str
    run: RunId


@lru_cache(maxsize=16_384)
def _hash_bits(peer: PeerId) -> str:
    # A hash, because all ids begin alike and keys with chosen first bits are cheap to make.
    return f"{int.from_bytes(blake3(peer.encode()).digest(4), 'big'):032b}"


def bucket_of(peer: PeerId, depth: int) -> str:
    """The bits that name a peer's bucket at a depth; the empty string at depth 0."""
    return _hash_bits(peer)[:depth]


def bucket_key(run: RunId, bucket: str) -> str:
    """The directory's key of a bucket."""
    return f"{run}/peers/{bucket}"


def depth_for(peers: float, *, bucket_peers: int = 64) -> int:
    """Depth of the buckets for this number of peers."""
    if peers <= bucket_peers:
        return 0
    return min(DEPTH_MAX, math.ceil(math.log2(peers / bucket_peers)))


@dataclass(slots=True)
class PeerTable:
    """One peer's knowledge about the other peers of its run. Never holds the peer itself."""

    run: RunId | None
    """The own run, the only one accepted; ``None`` at a bootstrap peer, which accepts all."""

    me: PeerId
    settings: MembershipSettings = field(default_factory=MembershipSettings)
    network_of: Callable[[PeerId], str | None] = lambda peer: None
    """The network from which a peer is connected, if that is known."""

    judge: Callable[[Sealed], str | None] = lambda sealed: None
    """Reason why the run of a record does not admit it; ``None`` if it does."""

    rejected: Counter[Reason] = field(default_factory=Counter)
    """Number of records that were not believed, by reason. Replays are common."""

    _members: dict[PeerId, Member] = field(default_factory=dict)
    _read_at: dict[str, float] = field(default_factory=dict)
    """Time at which each bucket was last read."""

    _present_before: dict[PeerId, Member] = field(default_factory=dict)
    _news: set[PeerId] = field(default_factory=set)
    """Members that a record said to have come or to leave since the last look for changes."""

    _swept_at: float = -math.inf
    _order: list[PeerId] | None = None
    """Cache of the sorted peers, until one is added or dropped."""

    def __len__(self) -> int:
        """Number of remembered peers, including lost ones."""
        return len(self._members)

    def __iter__(self) -> Iterator[Member]:
        if self._order is None:
            self._order = sorted(self._members)
        return iter([self._members[peer] for peer in self._order])

    def __contains__(self, peer: PeerId) -> bool:
        """Say whether a peer is known as a member, live or not."""
        return peer in self._members

    def get(self, peer: PeerId) -> Member | None:
        """The entry of a peer, live or not."""
        return self._members.get(peer)

    def addresses_of(self, peer: PeerId) -> tuple[Multiaddr, ...]:
        """The addresses that a member announces; none for a peer that is not known."""
        member = self._members.get(peer)
        return () if member is None else member.addresses

    # --- observations ----------------------------------------------------------------------

    def take(
        self,
        data: bytes,
        *,
        now: float,
        peer: PeerId | None = None,
        key: str | None = None,
        age_s: float = 0.0,
    ) -> Member | None:
        """Take in a record from the network. Returns its member; ``None``: it told nothing new.

        ``peer``: the peer that showed this record as its own, itself unless it was found under
        ``key``. ``age_s``: time since the peer that passed it on first saw it. Without it, peers
        that pass on the record of a dead peer would keep it alive for ever.
        """
        sealed = check(data, run=self.run, key=key, peer=peer)
        verdict = sealed if isinstance(sealed, Rejected) else self._judged(sealed, data, now, age_s)
        if isinstance(verdict, Rejected):
            self.rejected[verdict.reason] += 1
            return None
        if verdict is None:
            return None
        if verdict.peer not in self._members:
            if not self._make_room(verdict.peer, calls=peer is not None and key is None, now=now):
                self.rejected["full"] += 1
                return None
            self._order = None
        if verdict.peer not in self._present_before or verdict.record.leaving:
            self._news.add(verdict.peer)
        self._members[verdict.peer] = verdict
        return verdict

    def _judged(
        self, sealed: Sealed, data: bytes, now: float, age_s: float
    ) -> Member | Rejected | None:
        """The member by a record; ``None``: it is known already, or is this peer's own.

        A peer's sequence numbers increase over all its keys and runs, so an old record in a bucket
        of another depth does not replace a newer one.
        """
        record, bucket = sealed.record, sealed.key.rpartition("/")[2]
        if bucket != bucket_of(sealed.peer, len(bucket)):
            # In a deep bucket that is read alone one key counts for a thousand peers.
            return Rejected("misplaced", f"bucket {bucket}")
        if (reason := self.judge(sealed)) is not None:
            return Rejected("unadmitted", reason)
        known = self._members.get(sealed.peer)
        if sealed.peer == self.me or (known is not None and known.sealed == data):
            return None
        if known is not None and sealed.sequence <= known.sequence:
            return Rejected("replayed", f"sequence {sealed.sequence} after {known.sequence}")
        seen_at = now - max(0.0, age_s)
        if sealed.ttl_s > 0 and now >= seen_at + sealed.ttl_s:
            return Rejected("stale", f"first seen {age_s:.1f} s ago, ttl {sealed.ttl_s:g}")
        # One that was out of reach is the same again: were it new, the two sides of a partition
        # would each have leaders of its own for as long as a peer takes to become established.
        same = known is not None and known.record.incarnation == record.incarnation
        return Member(
            peer=sealed.peer,
            run=sealed.run,
            record=record,
            sequence=sealed.sequence,
            sealed=data,
            depth=len(bucket),
            # By the own eyes: the age of a record that was passed on is the word of another peer.
            first_seen=known.first_seen if known is not None and same else now,
            record_seen_at=seen_at,
            worked_at=now if known is None or not same or record.trains else known.worked_at,
            expires_at=seen_at + sealed.ttl_s,
            heard_at=known.heard_at if known is not None else None,
            failed_at=known.failed_at if known is not None else None,
            network=known.network if known is not None else None,
        )

    def heard(self, peer: PeerId, now: float) -> None:
        """Note a message from a peer. Ignored if its record is not known."""
        member = self._members.get(peer)
        if member is not None:
            network = member.network or self.network_of(peer)
            self._members[peer] = replace(member, heard_at=now, network=network)

    def remove(self, peer: PeerId) -> None:
        """Forget a peer that the run no longer admits: ``changes`` reports it as lost."""
        if self._members.pop(peer, None) is not None:
            self._order = None
            self._news.add(peer)

    def failed(self, peer: PeerId, now: float) -> None:
        """Note that a call to a peer failed: it is not live until there is a later sign of life."""
        member = self._members.get(peer)
        if member is not None:
            self._members[peer] = replace(member, failed_at=now)

    def was_read(self, bucket: str, now: float) -> None:
        """Note that a bucket was read."""
        self._read_at[bucket] = now

    # --- conclusions -----------------------------------------------------------------------

    def is_live(self, peer: PeerId, now: float) -> bool:
        """Say whether a peer is believed to be taking part now."""
        member = self._members.get(peer)
        return member is not None and self._is_live(member, now)

    def live(self, now: float) -> tuple[Member, ...]:
        """The peers believed to be taking part now, by peer id."""
        return tuple(member for member in self if self._is_live(member, now))

    def live_by_run(self, now: float) -> dict[RunId, list[Member]]:
        """The peers believed to be taking part now, by run and peer id."""
        found: dict[RunId, list[Member]] = {}
        for member in self.live(now):
            found.setdefault(member.run, []).append(member)
        return dict(sorted(found.items()))

    def present(self, now: float) -> tuple[Member, ...]:
        """Like ``live``, but regardless of failed calls: links break while peers stay."""
        return tuple(member for member in self if self._is_present(member, now))

    def established(self, now: float) -> tuple[Member, ...]:
        """Peers that can be dialled and have been live for a while, without a failed call since.

        After a failed call only a message of the peer counts, not a record: other peers may reach
        it and keep its record fresh where this one cannot.
        """
        return tuple(
            member
            for member in self.live(now)
            if member.reachable
            and now - member.first_seen >= ESTABLISHED_AFTER_S
            and (
                member.failed_at is None
                or (member.heard_at is not None and member.heard_at > member.failed_at)
            )
        )

    def gone(self, now: float) -> tuple[Member, ...]:
        """Lost peers: silent without a goodbye, and not known to be unreachable."""
        return tuple(
            member
            for member in self
            if not self._is_present(member, now)
            and not member.record.leaving
            and member.reachable is not False
        )

    def absent(self, now: float) -> dict[PeerId, float | None]:
        """The remembered peers that are not live, with the last sign of those that may train on
        where this peer does not see them; ``None``: it said goodbye, or had no work to do."""
        return {
            member.peer: member.last_sign_at
            if member.record.trains and not member.record.leaving
            else None
            for member in self
            if not self._is_live(member, now)
        }

    def changes(self, now: float) -> list[Change]:
        """The peers that came or went since the last call, by peer id."""
        return self._changes({*self._members, *self._present_before}, now)

    def news(self, now: float) -> list[Change]:
        """Those of ``changes`` that a record told of. Any key may cause one with each call, while
        thousands of members are known: only that one is looked at."""
        return self._changes(self._news, now)

    def _changes(self, peers: Iterable[PeerId], now: float) -> list[Change]:
        changes: list[Change] = []
        for peer in sorted(peers):
            member, last = self._members.get(peer), self._present_before.pop(peer, None)
            if member is not None and self._is_present(member, now):
                self._present_before[peer] = member
                if last is None:
                    changes.append(Change(peer, "joined", member.record.name, member.run))
            elif last is not None:
                said_so = member is not None and member.record.leaving
                how: Literal["left", "lost"] = "left" if said_so else "lost"
                changes.append(Change(peer, how, last.record.name, last.run))
        self._news.clear()
        return changes

    def pass_on(
        self,
        run: str | None,
        *,
        to: PeerId,
        now: float,
        rng: np.random.Generator,
        but: Iterable[Passed] = (),
    ) -> tuple[Passed, ...]:
        """Random fresh records, of one run or of all, to pass on: so split swarms reunite.

        ``but``: those that the other peer has just passed on itself.
        """
        known_there = {passed.sealed for passed in but}
        oldest = now - self.settings.expiry_s / 2
        # All members are looked at for each hello: what costs more is asked of a few of them.
        fresh = [
            member
            for member in self._members.values()
            if member.record_seen_at > oldest and (run is None or member.run == run)
        ]
        chosen: list[Passed] = []
        for index in rng.permutation(len(fresh)):
            member = fresh[int(index)]
            told = member.peer == to or member.sealed in known_there
            if not told and self._is_live(member, now):
                chosen.append(Passed(member.sealed, max(0.0, now - member.record_seen_at)))
                if len(chosen) == PASSED_MAX:
                    break
        return tuple(chosen)

    def newer_than(self, record: bytes, peer: PeerId) -> bytes:
        """A newer record of a peer than the one it just sent; empty if there is none."""
        sent, known = check(record, peer=peer), self._members.get(peer)
        if isinstance(sent, Rejected) or known is None or known.sequence <= sent.sequence:
            return b""
        return known.sealed

    def size_estimate(self, now: float) -> float:
        """Estimated number of peers in the run, including this one.

        A peer found at depth k is weighted by the inverse of the share of buckets at depth k that
        were read recently (a Horvitz-Thompson estimate).
        """
        window_s = 3 * self.settings.heartbeat_s
        read: dict[int, int] = {}
        for bucket, read_at in self._read_at.items():
            if now - read_at <= window_s:
                read[len(bucket)] = read.get(len(bucket), 0) + 1
        size = 0.0 if self.run is None else 1.0
        for member in self._members.values():
            if self._is_present(member, now):
                share = read.get(member.depth, 0) / 2**member.depth
                # A peer known only by a call, at a depth that was not read, counts once.
                size += 1 / share if share else 1.0
        return size

    def depth(self, now: float) -> int:
        """Estimated depth of the buckets."""
        return depth_for(self.size_estimate(now), bucket_peers=self.settings.bucket_peers)

    def own_bucket(self, now: float) -> str:
        """The bucket in which this peer's record belongs now."""
        return bucket_of(self.me, self.depth(now))

    def buckets_to_read(self, now: float) -> tuple[str, ...]:
        """The buckets to read in this heartbeat: at most ``look_ups_max``, the own one first.

        Up to three quarters of them are at the own depth, the rest at the depths beside it. Buckets
        that were read longest ago come first.
        """
        depth = self.depth(now)
        at_depth = self._longest_unread(depth)
        beside = [
            bucket
            for neighbour in (depth - 1, depth + 1)
            if 0 <= neighbour <= DEPTH_MAX
            for bucket in self._longest_unread(neighbour)
        ]
        beside.sort(key=self._unread_order)
        if not any(self._is_live(m, now) for m in self._members.values()):
            # No peer is known: the swarm may be large, with all records deeper than depth 1.
            path = [bucket_of(self.me, probe) for probe in range(DEPTH_MAX + 1)]
            beside = [*path, *(bucket for bucket in beside if bucket not in path)]
            at_depth = [bucket for bucket in at_depth if bucket not in path]
        limit = self.settings.look_ups_max
        kept = at_depth[: max(limit * 3 // 4, limit - len(beside))]
        kept += beside[: limit - len(kept)]
        return tuple(kept)

    def buckets_due(self, now: float) -> tuple[str, ...]:
        """The part of ``buckets_to_read`` that cannot wait.

        Buckets with peers are read each time: a record may be a heartbeat old when it is read, and
        has to last until the reading after the next, in case the next one misses it. Peers that
        were heard themselves need no record. An empty bucket costs a request to each of the nearest
        peers. Deeper than the own level it waits longest, unless a swarm half as large again would
        write there: no peer is that far off for long.
        """
        heard_after = now - 1.5 * self.settings.heartbeat_s
        unheard = (m for m in self.present(now) if (m.heard_at or -math.inf) < heard_after)
        with_unheard = {bucket_of(m.peer, m.depth) for m in unheard}
        size = self.size_estimate(now)
        depth = depth_for(size, bucket_peers=self.settings.bucket_peers)
        deeper = depth_for(1.5 * size, bucket_peers=self.settings.bucket_peers) > depth

        def rests_until(bucket: str) -> float:
            # Heartbeats come a little early or late: every other one, or every eighth.
            beats = 1.5 if deeper or len(bucket) <= depth else 7.5
            return self._read_at.get(bucket, -math.inf) + beats * self.settings.heartbeat_s

        return tuple(
            bucket
            for bucket in self.buckets_to_read(now)
            if bucket in with_unheard or rests_until(bucket) <= now
        )

    def misses_a_peer(self, bucket: str, now: float) -> bool:
        """Say whether a peer of this bucket would expire before the next reading is over."""
        gone_by = now + 1.25 * self.settings.heartbeat_s
        return any(
            member.depth == len(bucket)
            and bucket_of(member.peer, member.depth) == bucket
            and self._is_present(member, now)
            and not self._is_present(member, gone_by)
            for member in self._members.values()
        )

    def _longest_unread(self, depth: int) -> list[str]:
        # A level that is too large to read whole is read in turns, the own bucket always first.
        level = [f"{number:0{depth}b}" if depth else "" for number in range(2**depth)]
        own = bucket_of(self.me, depth)
        return sorted(level, key=lambda bucket: (bucket != own, *self._unread_order(bucket)))

    def _unread_order(self, bucket: str) -> tuple[float, str]:
        return self._read_at.get(bucket, -math.inf), bucket

    def _is_live(self, member: Member, now: float) -> bool:
        if not self._is_present(member, now):
            return False
        if member.failed_at is None or member.reachable is False:
            return True  # a call that could not reach a dial-out-only peer says nothing about it
        return member.last_sign_at > member.failed_at

    def _is_present(self, member: Member, now: float) -> bool:
        if member.record.leaving:
            return False
        heard_at = member.heard_at
        heard = heard_at is not None and now - heard_at < self.settings.expiry_s
        return heard or now < member.expires_at

    def _has_room(self, now: float) -> bool:
        full = len(self._members) >= self.settings.members_max
        if full and now - self._swept_at >= SWEEP_EVERY_S:  # many may come at once
            self._swept_at = now
            self.forget_lost(now)
        return len(self._members) < self.settings.members_max

    def _make_room(self, peer: PeerId, *, calls: bool, now: float) -> bool:
        """Say whether a peer that is not known may be taken in, for which another one may give way.

        In a full table a peer that calls takes the place of one of which others only tell: anybody
        can sign records of thousands of keys, and has to call with each of them from here. Then
        one of the network with the most members gives way to a peer of another network.
        """
        if self._has_room(now):
            return True
        if not calls:
            return False
        crowd = [member for member in self._members.values() if member.heard_at is None]
        if not crowd:
            sizes = Counter(member.network for member in self._members.values())
            most = max(sizes.values())
            if most <= sizes[self.network_of(peer)] + 1:
                return False
            crowd = [m for m in self._members.values() if sizes[m.network] == most]
        self._drop([min(crowd, key=lambda member: member.last_sign_at).peer])
        return True

    def forget(self, now: float) -> None:
        """Drop peers that were lost long ago, or all lost peers if the table is full."""
        if len(self._members) >= self.settings.members_max:
            self.forget_lost(now)
        longest = now - self.settings.memory_s
        self._drop([peer for peer, each in self._members.items() if each.last_sign_at < longest])
        oldest = now - 10 * self.settings.expiry_s
        self._read_at = {bucket: at for bucket, at in self._read_at.items() if at >= oldest}

    def forget_lost(self, now: float) -> None:
        """Drop all lost peers."""
        self._drop([peer for peer, each in self._members.items() if not self._is_live(each, now)])

    def _drop(self, peers: Sequence[PeerId]) -> None:
        for peer in peers:
            del self._members[peer]
            self._order = None
