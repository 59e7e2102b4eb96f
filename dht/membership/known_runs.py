"""The runs of which a peer knows members: its own, or at a bootstrap peer those of its callers.

Every record from the network passes ``take``. Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from multiaddr import Multiaddr

from dht.identity import PeerId, RunId
from dht.membership.hello import PASSED_MAX, Passed
from dht.membership.table import (
    SWEEP_EVERY_S,
    Member,
    MembershipSettings,
    PeerTable,
    bucket_of,
)
from dht.record_keeper import RecordKeeper
from dht.records import Rejected, Sealed, check, claimed_run

RUNS_MAX = 64
"""Limit of runs of which a bootstrap peer keeps tables. Keys cost nothing, and addresses do: a
silent run makes room, then one that was only named, then one of the network with the most runs."""

SILENT_S = 60.0
"""Silence after which a run may be replaced by another one."""

MEMBERS_MAX = 16_384
"""Limit of members of all runs together at a bootstrap peer, 90 MB: anybody may name members."""


@dataclass(slots=True)
class _Known:
    table: PeerTable
    heard_at: float
    met: bool = False
    """A member has called or answered, and was not only named by others."""

    network: str | None = None
    """Network of the first member that was met."""


@dataclass(slots=True)
class KnownRuns:
    """A table for each run, and one keeper for all, or its limits would hold for each of them."""

    me: PeerId
    run: RunId | None
    """The own run, the only one accepted; ``None`` at a bootstrap peer, which accepts all."""

    settings: MembershipSettings
    network_of: Callable[[PeerId], str | None] = lambda peer: None
    """The network from which a peer is connected, if that is known."""

    keeper: RecordKeeper = field(init=False)
    """Counts the records that were not believed, too. Repeats and replays are common."""

    _known: dict[RunId, _Known] = field(default_factory=dict)
    _swept_at: float = -math.inf

    def __post_init__(self) -> None:
        self.keeper = RecordKeeper(self.run)
        if self.run is not None:
            self._known[self.run] = _Known(PeerTable(self.run, self.me, self.settings), 0.0)

    @property
    def tables(self) -> Mapping[RunId, PeerTable]:
        return {run: self._known[run].table for run in sorted(self._known)}

    def own_table(self) -> PeerTable:
        if self.run is None:
            raise ValueError("a bootstrap peer has no run of its own; see tables")
        return self._known[self.run].table

    def is_member(self, peer: PeerId) -> bool:
        """Say whether a peer is known as a member of any of these runs."""
        return any(known.table.get(peer) is not None for known in self._known.values())

    def take(
        self,
        data: bytes,
        *,
        now: float,
        peer: PeerId | None = None,
        key: str | None = None,
        age_s: float = 0.0,
    ) -> bool:
        """Take a record if the keeper of its run admits it. Says whether it told anything new.

        ``peer``: the peer that showed this record as its own.
        """
        rejected = self.keeper.rejected
        if self.run is None and not self._has_room_for(claimed_run(data), peer, now):
            rejected["full"] += 1  # the signature costs a hundred times as much
            return False
        sealed = check(data, run=self.run, key=key, peer=peer)
        if isinstance(sealed, Rejected):
            rejected[sealed.reason] += 1
            return False
        if self.run is None and not self._left_other_runs(sealed, now):
            rejected["replayed"] += 1
            return False
        known = self._known_of(sealed.run, peer, now)
        bucket = sealed.key.rpartition("/")[2]
        if bucket != bucket_of(sealed.peer, len(bucket)):
            # In a deep bucket that is read alone one key counts for a thousand peers.
            rejected["misplaced"] += 1
            return False
        verdict = self.keeper.admit(data, now=now, key=key, peer=peer, age_s=age_s)
        if isinstance(verdict, Rejected):
            return False
        if self.run is None and not self._has_room_in(known.table, verdict.peer, now):
            rejected["full"] += 1
            return False
        if self.run is not None and peer is not None and key is None:
            known.table.make_room_for_a_caller(peer, now)
        return known.table.observe(verdict, data, now=now)

    def heard(self, peer: PeerId, now: float) -> None:
        """Note that a peer called this one or answered it."""
        for known in self._known.values():
            if known.table.get(peer) is not None:
                known.table.heard(peer, now)
                known.heard_at = now
                known.met = True
                known.network = known.network or self.network_of(peer)

    def failed(self, peer: PeerId, now: float) -> None:
        """Note that a call to a peer failed."""
        for known in self._known.values():
            known.table.failed(peer, now)

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
        fresh = [
            member
            for known_run, known in sorted(self._known.items())
            if run is None or known_run == run
            for member in known.table.live(now)
            if now - member.record_seen_at < self.settings.expiry_s / 2
            and member.peer != to
            and member.sealed not in known_there
        ]
        chosen = rng.permutation(len(fresh))[:PASSED_MAX]
        return tuple(
            Passed(fresh[int(i)].sealed, max(0.0, now - fresh[int(i)].record_seen_at))
            for i in chosen
        )

    def newer_than(self, record: bytes, peer: PeerId) -> bytes:
        """A newer record of a peer than the one it just sent; empty if there is none."""
        sent = check(record, peer=peer)
        if not isinstance(sent, Sealed):
            return b""
        # Of another run too: the numbers of a peer increase over all its runs.
        entries = (known.table.get(peer) for known in self._known.values())
        newest = max((m for m in entries if m), key=lambda m: m.sequence, default=None)
        return newest.sealed if newest is not None and newest.sequence > sent.sequence else b""

    def member(self, peer: PeerId) -> Member | None:
        """The entry of a peer in the table of any of these runs; ``None`` if it is not known."""
        for known in self._known.values():
            member = known.table.get(peer)
            if member is not None:
                return member
        return None

    def addresses_of(self, peer: PeerId) -> tuple[Multiaddr, ...]:
        """The addresses that a member announces; none for a peer that is not known."""
        member = self.member(peer)
        return () if member is None else member.addresses

    def _has_room_for(self, run: RunId | None, caller: PeerId | None, now: float) -> bool:
        """Say whether a run is known, or may take the place of another one."""
        if run is None or run in self._known or len(self._known) < RUNS_MAX:
            return True
        return self._run_to_replace(caller, now) is not None

    def _run_to_replace(self, caller: PeerId | None, now: float) -> RunId | None:
        """The run that makes room for one that ``caller`` is in, or that nobody has called for."""
        longest_silent = self._longest_silent(self._known)
        if now - self._known[longest_silent].heard_at >= SILENT_S:
            return longest_silent
        if caller is None:
            return None
        named = [run for run, known in self._known.items() if not known.met]
        if named:
            return self._longest_silent(named)
        runs_of = Counter(known.network for known in self._known.values())
        most = max(runs_of.values())
        if most <= runs_of[self.network_of(caller)] + 1:
            return None
        crowded = [run for run, known in self._known.items() if runs_of[known.network] == most]
        return self._longest_silent(crowded)

    def _left_other_runs(self, sealed: Sealed, now: float) -> bool:
        """Take a peer out of the runs that it was in before; ``False``: it is in a newer one.

        A host is in one run at a time, or one key would hold the places of all runs.
        """
        others = [run for run in self._known if run != sealed.run]
        for run in others:
            table = self._known[run].table
            member = table.get(sealed.peer)
            if member is None:
                continue
            if member.sequence > sealed.sequence:
                if table.is_live(sealed.peer, now):
                    return False
                continue
            table.remove(sealed.peer)
            if not len(table):
                del self._known[run]
        return True

    def _has_room_in(self, table: PeerTable, peer: PeerId, now: float) -> bool:
        """Say whether a peer is known or may be taken in: the largest run gives way to others."""
        if table.get(peer) is not None or self._members() < MEMBERS_MAX:
            return True
        if now - self._swept_at >= SWEEP_EVERY_S:  # a sweep is not free
            self._swept_at = now
            for known in self._known.values():
                known.table.forget_lost(now)
        if self._members() < MEMBERS_MAX:
            return True
        largest = max((known.table for known in self._known.values()), key=len)
        if len(largest) <= len(table) + 1:
            return False
        largest.forget_one()
        return True

    def _members(self) -> int:
        return sum(len(known.table) for known in self._known.values())

    def _longest_silent(self, runs: Iterable[RunId]) -> RunId:
        return min(runs, key=lambda run: (self._known[run].heard_at, run))

    def _known_of(self, run: RunId, caller: PeerId | None, now: float) -> _Known:
        if run not in self._known:
            if len(self._known) >= RUNS_MAX:
                replaced = self._run_to_replace(caller, now)
                assert replaced is not None, "there was room"
                del self._known[replaced]
            self._known[run] = _Known(PeerTable(run, None, self.settings), now)
        return self._known[run]
