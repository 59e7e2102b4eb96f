"""Objections to a commit: it is compared with this peer's promise and standing, and with the commit
that an honest leader makes of the joins of its members.

All of a commit follows from the signed joins and the run's settings, but for what the leader
chooses: who is in, who of them votes, and f32 in place of the run's codecs. So whatever it says of
members, slices, weights, deadlines and the outer step, one comparison finds it.

**Parents.** A meld averages what its members bring: displacement, theta and momentum. Without more
a member could join on a state of its own invention, with a merged map that fits it, and pull the
average. So a commit is taken only if each of its parents is the own one, or certified by peers that
count for this one (``averaging.round.opinions.certificates``), or if the peer is stuck and takes
the word of one (``averaging.round.gathering.catching_up``). A leader does not admit a join on
another parent, its own included.

The signatures that its round has gathered are in the join of each member that
may stand elsewhere than its leader. The leader sends each member the ones that it needs beside the
commit (``Certificates.beside``), not in it: the commit is signed, kept in replay logs, and opens
every stream of an upload. Names are short there. Two spare signatures are sent with each, because
members may count other peers than their leader does.
A stream may bring the commit before the leader's message does. Then nothing is declined: the stream
is refused for now, and the leader is asked again.

Each parent costs ``parent_needed`` signatures of 77 bytes for each member that stands
elsewhere. Lineages are new at each version, so there is nothing to cache.
The chain that a member shows beside its parent is not certified.
"""

from __future__ import annotations

from dataclasses import dataclass

from averaging import messages
from averaging.history.standing import tokens_of
from averaging.messages import Commit, Entry, Link, ParentCertificate
from averaging.round.gathering.catching_up import CatchingUp
from averaging.round.gathering.joining import Attempt
from averaging.round.gathering.roster import recomposed
from averaging.round.interface.identity import Identity
from averaging.round.opinions.certificates import Certificates
from averaging.round.opinions.fragment import Fragment
from averaging.round.opinions.neighbourhood import Neighbourhood
from averaging.rules.plausible import SLACK
from dht import protocol


def objection(
    commit: Commit, fragment: Fragment, attempt: Attempt | None, now: float
) -> str | None:
    """The reason not to enter the round; ``None`` if there is none.

    ``attempt``: of this peer to get into a round.
    """
    identity, peers = fragment.identity, fragment.peers
    oldest, newest = identity.speaks
    if not oldest <= commit.protocol <= newest:
        return protocol.not_spoken(commit.protocol, identity.speaks)
    return (
        identity.book.objection(commit.directive)
        or _unknown_codec(commit, identity)
        or _own_objection(commit, fragment, attempt)
        or _not_of_its_joins(commit, identity)
        or _strange_roster(commit, peers)
        or _lonely(commit, identity, peers, now)
        or _overstated(commit, peers, fragment.pace.median_step_s(now), now)
        or peers.electors.objection(commit, peers.required_work(now), now, me=identity.me)
    )


def _unknown_codec(commit: Commit, identity: Identity) -> str | None:
    codec = commit.displacement_codec
    lacking = {codec, commit.codec_down or codec}.difference(identity.codecs)
    if not lacking:
        return None
    return f"I lack its codec {min(lacking)!r}; I have {', '.join(identity.codecs)}"


def _own_objection(commit: Commit, fragment: Fragment, attempt: Attempt | None) -> str | None:
    identity = fragment.identity
    index = commit.index(identity.me)
    if index is None:
        return None if fragment.peers.reachable else "I can only dial out"
    entry = commit.members[index]
    reason = _broken_promise(commit, entry, identity, attempt)
    if reason is not None:
        return reason
    return _wrong_place(commit, entry, fragment)


def _not_of_its_joins(commit: Commit, identity: Identity) -> str | None:
    """Order, reducers, shares, delegates, weights: all of it follows from the signed joins.

    Each member signed what its entry says, this peer as well: a mark that was changed would lose
    its work, or have it merged a second time.
    """
    policy = identity.policy_at(commit.version)
    made = recomposed(commit, policy, encoded_bytes=identity.encoded_bytes)
    for field in commit.__struct_fields__:
        if getattr(made, field) != getattr(commit, field):
            return f"its {field!r} is not what follows from the joins and the run's settings"
    for entry in commit.members:
        claim = messages.claim_in(commit, entry)
        if not identity.verify(entry.peer, claim, entry.signature):
            return f"{entry.peer} did not sign what it says of it"
    return None


def _strange_roster(commit: Commit, peers: Neighbourhood) -> str | None:
    """Without voters that I know there would be no majority: strangers cannot be one."""
    voters = commit.voters
    known = sum(peers.knows(commit.members[index].peer) for index in voters)
    if known >= commit.majority:
        return None
    return f"I know {known} of its {len(voters)} voters; a majority is {commit.majority}"


def _lonely(commit: Commit, identity: Identity, peers: Neighbourhood, now: float) -> str | None:
    """A round of one is for a peer that leaves its work to a keeper, where no other trains."""
    if commit.index(identity.me) is None or len(commit.members) > 1 or not peers.others_train(now):
        return None
    return "I am alone in it, and others train"


def _overstated(
    commit: Commit, peers: Neighbourhood, median_step_s: float, now: float
) -> str | None:
    for entry in commit.members:
        reason = peers.overstates(entry.peer, entry.steps, median_step_s, now, slack=SLACK)
        if reason is not None:
            return f"{entry.peer} claims {reason}"
    return None


def overstatement_of_leader(commit: Commit, fragment: Fragment, now: float) -> str | None:
    """The reason why the leader cannot have made as many steps as it claims; ``None``: it may have.

    Of a claim of another member it may have seen more than this peer.
    """
    index = commit.index(commit.leader)
    if index is None:
        return None
    steps, median_step_s = commit.members[index].steps, fragment.pace.median_step_s(now)
    return fragment.peers.overstates(commit.leader, steps, median_step_s, now, slack=SLACK)


def _broken_promise(
    commit: Commit, entry: Entry, identity: Identity, attempt: Attempt | None
) -> str | None:
    if entry.incarnation != identity.incarnation:
        return "I have been restarted since"
    if attempt is None or attempt.leader != commit.leader:
        return "I am not promised to this leader"
    if entry.join != attempt.join.join:
        return "I have withdrawn that join"
    return None


def _wrong_place(commit: Commit, entry: Entry, fragment: Fragment) -> str | None:
    standing = fragment.standing
    parent = commit.parents[entry.parent]
    if standing is None or parent.lineage != standing.lineage:
        return "I stand elsewhere now"
    if (parent.version, parent.tokens) != (standing.version, tokens_of(standing.head())):
        return "it gives my lineage another version, or other tokens"
    return None


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
