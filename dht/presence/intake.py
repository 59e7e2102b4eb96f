"""Records from the network: which ones count, and what they change.

Every record that a hello or the directory brings passes ``Intake.take``.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dht import protocol
from dht.errors import DhtError
from dht.identity import PeerId, RunId
from dht.membership.table import Change, bucket_key
from dht.presence.dial_back import ReachabilityChecks
from dht.presence.this_peer import DIRECTORY_TIMEOUT_S, ThisPeer
from dht.records import Sealed, check

OVERRULED_MAX = 3
MISFITS_MAX = 256
LOOK_UPS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Misfit:
    """The reason why another peer cannot be in one run with this peer, with both values."""

    what: Literal["run", "protocol versions"]
    ours: str
    theirs: str
    advice: str = ""
    """The side that has to be upgraded, in words."""


class Intake:
    """Passes records to the tables, and reports the peers that came, left or do not fit."""

    def __init__(self, this: ThisPeer, checks: ReachabilityChecks) -> None:
        self.misfits: dict[PeerId, Misfit] = {}
        """Peers that turned out to be of another run, or to speak no protocol of this peer's."""

        self._this = this
        self._checks = checks
        self._overruled = 0

    def take(
        self, data: bytes, *, peer: PeerId | None = None, key: str | None = None, age_s: float = 0.0
    ) -> bool:
        """Take a record from the network. Says whether it told anything new."""
        this, sealed = self._this, check(data)
        if isinstance(sealed, Sealed):
            if this.learn(sealed):
                self._was_overruled()
                return False
            if not self._speaks_with_us(sealed):
                return False
        member = this.table.take(data, now=this.now(), peer=peer, key=key, age_s=age_s)
        if member is not None and (on_record := this.events.on_record) is not None:
            on_record(member)
        return member is not None

    def note_misfit(self, peer: PeerId, misfit: Misfit, text: str) -> None:
        """Report a peer that cannot be in one run with this peer, once."""
        is_known = peer in self.misfits
        if is_known or len(self.misfits) < MISFITS_MAX:
            self.misfits[peer] = misfit
        if is_known or self.misfits.get(peer) != misfit:
            return
        both = {"ours": misfit.ours, "theirs": misfit.theirs}
        if misfit.what == "run":  # one bootstrap peer serves many runs, whose peers all meet
            self._this.events.tell("other_run", text, peer=peer, **both)
        else:
            self._this.events.tell("hello_refused", text, peer=peer, **both)

    def report_changes(self) -> None:
        """Report the peers that came or went since the last call."""
        if self._report(self._this.table.changes(self._this.now())):
            self._checks.choose_scope()

    def report_news(self) -> None:
        """Report changes at once if a record told of a peer that came or left.

        Nobody waits for them at a bootstrap peer, where strangers name members of any run.
        """
        if self._this.profile.run is not None:
            table = self._this.table
            if changed := self._report(table.news(self._this.now())):
                members = map(table.get, changed)
                self._checks.choose_scope([each for each in members if each is not None])

    def _report(self, changes: Sequence[Change]) -> list[PeerId]:
        for change in changes:
            name, peer, run = change.name or change.peer, change.peer, change.run
            events = self._this.events
            if change.kind == "joined":
                events.tell("peer_joined", f"{name} joined", peer=peer, run=run)
            elif change.kind == "left":
                events.tell("peer_left", f"{name} left", peer=peer, run=run)
            else:
                text = f"{name} has not been heard of for a while"
                events.tell("peer_lost", text, peer=peer, run=run)
        if changes:
            # A new member may live farther away than the peers that proved reachability, or be the
            # first that can help to find out.
            self._checks.wanted.set()
        return [change.peer for change in changes]

    def _speaks_with_us(self, sealed: Sealed) -> bool:
        """Say whether this peer and the author of a record have a protocol version in common.

        A peer with which we cannot talk is not taken in as a member: every round would wait for it.
        """
        if sealed.run != self._this.profile.run:
            return True  # for the keeper to reject
        ours, theirs = self._this.settings.protocol_versions, sealed.record.protocol
        if protocol.common(theirs, ours) is not None:
            return True
        if self._this.table.judge(sealed) is not None:
            return True  # a stranger says nothing about the run, and the keeper counts it
        here, there = protocol.text(ours), protocol.text(theirs)
        advice = protocol.advice(theirs, ours)
        self.note_misfit(
            sealed.peer,
            Misfit("protocol versions", here, there, advice),
            f"{sealed.peer} speaks protocol versions {there}, this peer {here}: {advice}",
        )
        return False

    def _was_overruled(self) -> None:
        """Our own key signed a higher number than we use: this machine's clock was set back."""
        self._this.outdate()
        self._overruled += 1
        if self._overruled <= OVERRULED_MAX:
            self._this.hurry()
        elif self._overruled == OVERRULED_MAX + 1:  # a record of the past would not keep growing
            self._this.events.tell(
                "identity_in_use",
                f"another peer uses the same key file as this one ({self._this.id}); "
                "give each of them an identity of its own",
            )


class BucketReading:
    """Looks up the buckets that the table asks for, at each heartbeat.

    Only one holder of a bucket is asked at a heartbeat, in turns. Reading each bucket from all of
    its holders made membership the largest traffic of an idle swarm (14.9 kB/s per peer at 100
    peers, 5.4 since). All are asked when that single reading would let a member expire.
    """

    def __init__(self, this: ThisPeer, intake: Intake) -> None:
        self._this = this
        self._intake = intake
        self._unsettled_until = math.inf
        """Every bucket is read from all holders until then: a peer that was met lately may have
        brought other peers, or another part of the directory, within reach."""

    def unsettle(self) -> None:
        """Read every bucket from all of its holders for the next while."""
        self._unsettled_until = self._this.now() + self._this.settings.membership.expiry_s

    async def read(self, run: RunId) -> None:
        """Read the buckets that are due."""
        this = self._this
        at_once = asyncio.Semaphore(LOOK_UPS_AT_ONCE)
        table, now = this.table, this.now()
        settled = now >= self._unsettled_until and bool(table.live(now))

        async def read(bucket: str) -> None:
            key = bucket_key(run, bucket)
            async with at_once:
                try:
                    await self._look_up(key, quick=settled)
                    if settled and table.misses_a_peer(bucket, this.now()):
                        await self._look_up(key, quick=False)
                except DhtError:
                    return
            table.was_read(bucket, this.now())

        async with asyncio.TaskGroup() as group:
            for bucket in table.buckets_due(now) if settled else table.buckets_to_read(now):
                group.create_task(read(bucket))

    async def _look_up(self, key: str, *, quick: bool) -> None:
        """Take the records under a key."""
        this = self._this
        this.stats.look_ups += 1
        found = await this.host.directory.look_up(key, timeout_s=DIRECTORY_TIMEOUT_S, quick=quick)
        for peer in sorted(found):
            self._intake.take(found[peer], peer=peer, key=key)
