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
from dht.membership.table import SWEEP_EVERY_S, Member, MembershipSettings, PeerTable
from dht.record_keeper import RecordKeeper
from dht.records import Reason, Rejected, Sealed, check, claimed_run

RUNS_MAX = 64
"""Limit of runs of which a bootstrap peer keeps tables; the longest silent run makes room."""

SILENT_S = 60.0
"""Silence after which a run may be replaced by another one."""

MEMBERS_MAX = 16_384
"""Limit of members of all runs together at a bootstrap peer, 90 MB: anybody may name members."""


@dataclass(slots=True)
class _Known:
    keeper: RecordKeeper
    table: PeerTable
    heard_at: float


@dataclass(slots=True)
class KnownRuns:
    """A keeper and a table for each run."""

    me: PeerId
    run: RunId | None
    """The own run, the only one accepted; ``None`` at a bootstrap peer, which accepts all."""

    settings: MembershipSettings
    rejected: Counter[Reason] = field(default_factory=Counter)
    """Number of records that were not believed, by reason. Repeats and replays are common."""

    _known: dict[RunId, _Known] = field(default_factory=dict)
    _of_all_runs: RecordKeeper = field(default_factory=RecordKeeper)
    """Keeper of a bootstrap peer: one for all runs, or its limits would hold for each of them."""

    _swept_at: float = -math.inf

    def __post_init__(self) -> None:
        if self.run is not None:
            self._known[self.run] = self._new(self.run, self.me, 0.0)

    @property
    def tables(self) -> Mapping[RunId, PeerTable]:
        return {run: self._known[run].table for run in sorted(self._known)}

    def own_table(self) -> PeerTable:
        if self.run is None:
            raise ValueError("a bootstrap peer has no run of its own; see tables")
        return self._known[self.run].table

    def judge_own_run(self, judge: Callable[[Sealed], str | None]) -> None:
        """Take only records of the own run that ``judge`` has no objection to."""
        assert self.run is not None
        self._known[self.run].keeper.judge = judge

    def refuses(self, sealed: Sealed) -> bool:
        """Say whether the own run does not admit the author of a record."""
        assert self.run is not None
        return self._known[self.run].keeper.judge(sealed) is not None

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
        """Take a record if the keeper of its run admits it. Says whether it told anything new."""
        if self.run is None and not self._has_room_for(claimed_run(data), now):
            self.rejected["full"] += 1  # the signature costs a hundred times as much
            return False
        sealed = check(data, run=self.run, key=key, peer=peer)
        if isinstance(sealed, Rejected):
            self.rejected[sealed.reason] += 1
            return False
        known = self._known_of(sealed.run, now)
        verdict = known.keeper.admit(data, now=now, key=key, peer=peer, age_s=age_s)
        if isinstance(verdict, Rejected):
            self.rejected[verdict.reason] += 1
            return False
        if self.run is None and not self._has_room_in(known.table, verdict.peer, now):
            self.rejected["full"] += 1
            return False
        return known.table.observe(verdict, data, now=now)

    def heard(self, peer: PeerId, now: float) -> None:
        """Note that a peer called this one or answered it."""
        for known in self._known.values():
            if known.table.get(peer) is not None:
                known.table.heard(peer, now)
                known.heard_at = now

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
        if not isinstance(sent, Sealed) or sent.run not in self._known:
            return b""
        member = self._known[sent.run].table.get(peer)
        return member.sealed if member is not None and member.sequence > sent.sequence else b""

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

    def _has_room_for(self, run: RunId | None, now: float) -> bool:
        """Say whether a run is known, or may take the place of one that is silent."""
        if run is None or run in self._known or len(self._known) < RUNS_MAX:
            return True
        # When all are in use, a stranger cannot displace them.
        return now - self._known[self._longest_silent()].heard_at >= SILENT_S

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

    def _longest_silent(self) -> RunId:
        return min(self._known, key=lambda run: (self._known[run].heard_at, run))

    def _known_of(self, run: RunId, now: float) -> _Known:
        if run not in self._known:
            if len(self._known) >= RUNS_MAX:
                del self._known[self._longest_silent()]
            self._known[run] = self._new(run, None, now)
        return self._known[run]

    def _new(self, run: RunId, me: PeerId | None, now: float) -> _Known:
        keeper = self._of_all_runs if self.run is None else RecordKeeper(run)
        return _Known(keeper, PeerTable(run, me, self.settings), now)
