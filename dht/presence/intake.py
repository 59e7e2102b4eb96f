"""Records from the network: which ones count, and what they change.

Every record that a hello, a goodbye or the directory brings passes ``Intake.take``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dht import protocol
from dht.identity import PeerId
from dht.presence.announcement import Announcement
from dht.presence.reachability_checks import ReachabilityChecks
from dht.presence.this_peer import ThisPeer
from dht.records import PeerRecord, Sealed, check

OVERRULED_MAX = 3
MISFITS_MAX = 256


@dataclass(frozen=True, slots=True)
class Misfit:
    """Why another peer cannot be in one run with this peer, with both values."""

    what: Literal["run", "protocol versions"]
    ours: str
    theirs: str
    advice: str = ""
    """The side that has to be upgraded, in words."""


class Intake:
    """Passes records to the tables, and reports the peers that came, left or do not fit."""

    def __init__(
        self, this: ThisPeer, announcement: Announcement, checks: ReachabilityChecks
    ) -> None:
        self.misfits: dict[PeerId, Misfit] = {}
        """Peers that turned out to be of another run, or to speak no protocol of this peer's."""

        self._this = this
        self._announcement = announcement
        self._checks = checks
        self._overruled = 0

    def take(
        self, data: bytes, *, peer: PeerId | None = None, key: str | None = None, age_s: float = 0.0
    ) -> bool:
        """Take a record from the network. Says whether it told anything new."""
        sealed = check(data)
        if isinstance(sealed, Sealed):
            if self._this.own.learn(sealed):
                self._was_overruled()
                return False
            if not self._speaks_with_us(sealed):
                return False
        return self._this.runs.take(data, now=self._this.now(), peer=peer, key=key, age_s=age_s)

    def note_misfit(self, peer: PeerId, misfit: Misfit, text: str) -> None:
        """Report a peer that cannot be in one run with this peer, once."""
        if self.misfits.get(peer) == misfit or len(self.misfits) >= MISFITS_MAX:
            return
        self.misfits[peer] = misfit
        self._this.events.tell(
            "hello_refused", text, peer=peer, ours=misfit.ours, theirs=misfit.theirs
        )

    def report_changes(self) -> None:
        """Report the peers that came or went since the last call."""
        came_or_went = False
        for run, table in self._this.runs.tables.items():
            for change in table.changes(self._this.now()):
                came_or_went = True
                name, peer = change.name or change.peer, change.peer
                events = self._this.events
                if change.kind == "joined":
                    events.tell("peer_joined", f"{name} joined", peer=peer, run=run)
                elif change.kind == "left":
                    events.tell("peer_left", f"{name} left", peer=peer, run=run)
                else:
                    text = f"{name} has not been heard of for a while"
                    events.tell("peer_lost", text, peer=peer, run=run)
        if came_or_went and self._checks.reachable:
            # A new member may live farther away than the peers that proved reachability.
            self._checks.weigh_arrivals()

    def report_news(self) -> None:
        """Report changes at once if a record told of a peer that came or left."""
        if any(table.has_news for table in self._this.runs.tables.values()):
            self.report_changes()

    def _speaks_with_us(self, sealed: Sealed) -> bool:
        """Say whether this peer and the author of a record have a protocol version in common.

        A peer with which we cannot talk is not taken in as a member: every round would wait for it.
        """
        if sealed.run != self._this.profile.run or not isinstance(sealed.record, PeerRecord):
            return True  # of another kind, or for the keeper to reject
        ours, theirs = self._this.settings.protocol_versions, sealed.record.protocol
        if protocol.common(theirs, ours) is not None:
            return True
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
        self._announcement.outdate()
        self._overruled += 1
        if self._overruled <= OVERRULED_MAX:
            self._announcement.hurry()
        elif self._overruled == OVERRULED_MAX + 1:  # a record of the past would not keep growing
            self._this.events.tell(
                "identity_in_use",
                f"another peer uses the same key file as this one ({self._this.id}); "
                "give each of them an identity of its own",
            )
