"""The states that a round of several lineages continues: each is certified, or the round is not for
this peer.

A meld averages what its members bring: displacement, theta and momentum. Without this a
member could join on a state of its own invention, with a merged map that fits it, and pull the
average. So a commit is taken only if each of its parents is the own one, or certified by peers that
count for this one (``averaging.round.opinions.certificates``), or if the peer is stuck and takes
the word of one (``averaging.round.gathering.catching_up``). A leader does not admit a join on
another parent, its own included.

**The way of the signatures.** Those that its round has gathered are in the join of each member that
may stand elsewhere than its leader. The leader sends each member the ones that it needs beside the
commit (``Certificates.beside``), not in it: the commit is signed, kept in replay logs, and opens
every stream of an upload. Names are short there. Spare signatures are sent, because members may
count other peers than their leader does: among several groups, which meld at every version, as far
as they fit into a kilobyte and a half, and always with the rare meld of a fork or of the run's end.
A stream may bring the commit before the leader's message does. Then nothing is declined: the stream
is refused for now, and the leader is asked again.

**Cost.** Each parent costs ``parent_needed`` signatures of 77 bytes for each member that stands
elsewhere. Lineages are new at each version, so there is nothing to cache.

The chain that a member shows beside its parent is not certified.
"""

from __future__ import annotations

from dataclasses import dataclass

from averaging import messages
from averaging.messages import Commit, Link, ParentCertificate
from averaging.round.gathering.catching_up import CatchingUp
from averaging.round.opinions.certificates import Certificates
from averaging.round.opinions.neighbourhood import Neighbourhood


@dataclass(slots=True, eq=False, repr=False)
class Parents:
    """One peer as a judge of the parents of commits, and as a leader that proves them to others."""

    peers: Neighbourhood
    certificates: Certificates
    catching_up: CatchingUp

    def objection(self, commit: Commit, now: float) -> str | None:
        """Return why this peer is in no round that continues these states; ``None``: it may be."""
        standing = self.certificates.standing
        if len(commit.parents) == 1 or standing is None:
            return None  # it is the own one, or this peer has none and only reduces
        for place, parent in enumerate(commit.parents):
            if parent.lineage != standing.lineage and not self.may_join(parent, now):
                self.catching_up.met_unproven(now)
                members = [entry.peer for entry in commit.members if entry.parent == place]
                return (
                    f"too few that count have signed version {parent.version} "
                    f"({parent.lineage.hex()[:8]}), on which {', '.join(members)} stand"
                )[:300]
        return None

    def hear(self, commit: Commit, given: tuple[ParentCertificate, ...], now: float) -> None:
        """Keep the signatures that came beside a commit."""
        if not given or len(commit.parents) == 1:
            return
        names = {messages.short_name(peer): peer for peer in self.peers.view}
        for certificate in given[: len(commit.parents)]:
            if certificate.parent >= len(commit.parents):
                return
            signatures = tuple(
                (names[name], signature)
                for name, signature in certificate.signatures
                if name in names
            )
            self.certificates.hear(commit.parents[certificate.parent], signatures, now)

    def may_join(self, parent: Link, now: float) -> bool:
        """True if this peer, as a leader or a member, takes a state that others stand on.

        A version that it went through needs no signatures: its own state is made of it.
        """
        return self._is_behind(parent) or self.catching_up.may_continue(parent, now)

    def _is_behind(self, parent: Link) -> bool:
        standing = self.certificates.standing
        return (
            standing is not None and standing.chain.find(parent.version, parent.lineage) is not None
        )
