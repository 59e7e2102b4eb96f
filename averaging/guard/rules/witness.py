"""Noticing that a peer has signed two different statements where an honest one makes one.

A ``Witness`` is shown what comes by: commits, and the votes, promises and claims of their members.
It keeps the first of each and compares. It keeps nothing about a round whose commit it has not
seen, or whose leader has not signed that, so a stranger's statements take nobody's place; when
there are too many rounds, those are forgotten whose leaders have worked the least. Other signatures
are checked only when two statements differ, so that watching costs next to nothing; one that is
forged gives way to the other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from averaging import messages
from averaging.guard.rules.proofs import (
    BadProof,
    Contradiction,
    Court,
    DeniedVote,
    Promised,
    Proof,
    SignedBytes,
    TwoClaims,
    TwoCommits,
    TwoVotes,
    Vote,
    check,
    is_denied,
)
from averaging.history.claims import Claim
from averaging.messages import BadMessage, Commit, Message
from dht.bounded_mapping import BoundedMapping
from dht.identity import PeerId

BALLOTS_MAX = 64
"""Ballots before that of a promise in which a vote is looked for, the last ones; and votes of one
voter in a round that are kept."""
PROMISES_MAX = 4
"""Promises of one voter in one round that are kept, the first ones."""
CLAIMS_MAX = 256
"""Claims of one member in one round that are kept, the first ones."""
ROUNDS_KEPT_MAX = 256


@dataclass(slots=True)
class _Round:
    """The statements of one round."""

    commit: Commit
    votes: dict[PeerId, dict[int, Vote]] = field(default_factory=dict)
    """Votes of each member by ballot."""
    promises: dict[PeerId, tuple[Promised, ...]] = field(default_factory=dict)
    """Promises of voters whose signatures hold, until the round is over."""
    claims: dict[int, dict[Hashable, Claim]] = field(default_factory=dict)
    """Claims of each member about a slice, by its index."""


class Witness:
    """The statements that one peer has seen lately."""

    __slots__ = ("_commits", "_court", "_rounds")

    def __init__(self, court: Court, worth: Callable[[PeerId], float] = lambda peer: 0.0) -> None:
        """``worth``: how much the work of a leader counts here."""
        self._court = court
        self._rounds = BoundedMapping[bytes, _Round](
            "witnessed rounds",
            ROUNDS_KEPT_MAX,
            worth=lambda _, round_: worth(round_.commit.leader),
            author=lambda _, round_: round_.commit.leader,
        )
        self._commits = BoundedMapping[tuple[int, PeerId, int, int], SignedBytes](
            "witnessed commits",
            ROUNDS_KEPT_MAX,
            worth=lambda attempt, _: worth(attempt[1]),
            author=lambda attempt, _: attempt[1],
        )
        """The first commit of each attempt at a round."""

    def sees(self, sender: PeerId, message: Message) -> list[Proof]:
        """Look at a message of any peer. Returns what it proves."""
        match message:
            case messages.Committed():
                return self.sees_commit(message.commit, message.signature)
            case messages.Propose() if message.signature:
                vote = Vote(message.seal, message.signature)
                return self._vote(sender, message.round, message.ballot, vote)
            case messages.Promise() if message.signature:
                return self._promised(sender, message)
            case messages.Sealed():
                return self._all_voted(message.round, message.ballot, message.seal, message.votes)
            case messages.Void() if not message.forsworn:
                return self._all_voted(message.round, message.ballot, (), message.votes)
        return []

    def sees_commit(self, encoded: bytes, signature: bytes) -> list[Proof]:
        """Look at a commit, from wherever it comes."""
        name = messages.digest(encoded)
        if name in self._rounds:
            return []
        commit = self._decoded(encoded)
        if commit is None or not self._court.verify(commit.leader, encoded, signature):
            return []
        self._rounds[name] = _Round(commit)
        attempt = commit.fragment, commit.leader, commit.leader_incarnation, commit.nonce
        new = SignedBytes(encoded, signature)
        old = self._commits.setdefault(attempt, new)
        return [] if old.commit == encoded else self._proved(TwoCommits(first=old, second=new))

    def sees_claim(
        self, encoded: bytes, slice_index: int, claim: Claim, *, merged: bool
    ) -> list[Proof]:
        """Look at a claim whose signature holds, about a slice of the round of a commit."""
        name = messages.digest(encoded)
        round_ = self._rounds.get(name)
        if round_ is None:
            return []
        claims = round_.claims.setdefault(claim.by, {})
        key = slice_index, merged, claim.members
        old = claims.get(key)
        if old is None:
            if len(claims) < CLAIMS_MAX:
                claims[key] = claim
            return []
        if (old.made, old.sources) == (claim.made, claim.sources):
            return []
        found = TwoClaims(commit=encoded, slice=slice_index, merged=merged, first=old, second=claim)
        return self._proved(found)

    def round_is_over(self, round_id: bytes) -> None:
        """Forget the promises of a round that nobody needs any more: nobody shows votes that they
        could deny."""
        if (round_ := self._rounds.get(round_id)) is not None:
            round_.promises.clear()

    def _decoded(self, encoded: bytes) -> Commit | None:
        try:
            commit = messages.decode_commit(encoded)
        except BadMessage:
            return None
        return commit if self._court.is_ours(commit) else None

    def _all_voted(
        self, round_id: bytes, ballot: int, seal: tuple[int, ...], votes: messages.Votes
    ) -> list[Proof]:
        round_ = self._rounds.get(round_id)
        if round_ is None:
            return []
        members = round_.commit.members
        return [
            proof
            for index, signature in votes
            if index < len(members)
            for proof in self._vote(members[index].peer, round_id, ballot, Vote(seal, signature))
        ]

    def _vote(self, peer: PeerId, round_id: bytes, ballot: int, new: Vote) -> list[Proof]:
        round_ = self._rounds.get(round_id)
        if round_ is None or round_.commit.index(peer) is None:
            return []
        votes = round_.votes.setdefault(peer, {})
        old = votes.get(ballot)
        if old is not None and old.seal == new.seal:
            if old.signature == new.signature or not self._is_signed(peer, round_id, ballot, new):
                return []  # else the old one was forged
        elif old is not None:
            head = TwoVotes(peer=peer, round=round_id, ballot=ballot, first=old, second=new)
            proof = self._proved(head)
            if proof or not self._is_signed(peer, round_id, ballot, new):
                return proof
        elif len(votes) >= BALLOTS_MAX:
            for kept in [
                each for each in votes if not self._is_signed(peer, round_id, each, votes[each])
            ]:
                del votes[kept]
            if len(votes) >= BALLOTS_MAX:
                return []
        votes[ballot] = new
        found = []
        for given in round_.promises.get(peer, ()):
            found += self._denied(peer, round_id, ballot, new, given)
        return found

    def _is_signed(self, peer: PeerId, round_id: bytes, ballot: int, vote: Vote) -> bool:
        said = messages.vote(round_id, ballot, vote.seal)
        return self._court.verify(peer, said, vote.signature)

    def _promised(self, peer: PeerId, message: messages.Promise) -> list[Proof]:
        """Compare a promise with the votes of its sender in earlier ballots of the round."""
        round_ = self._rounds.get(message.round)
        if round_ is None or round_.commit.index(peer) is None:
            return []
        last = message.accepted_ballot, message.accepted
        given = Promised(message.ballot, *last, message.signature)
        kept = round_.promises.get(peer, ())
        said = messages.promise_text(message.round, message.ballot, *last)
        if given in kept or len(kept) >= PROMISES_MAX:
            return []
        if not self._court.verify(peer, said, given.signature):
            return []
        round_.promises[peer] = (*kept, given)
        found = []
        for ballot, vote in sorted(round_.votes.get(peer, {}).items()):
            if given.ballot - BALLOTS_MAX <= ballot < given.ballot:
                found += self._denied(peer, message.round, ballot, vote, given)
        return found

    def _denied(
        self, peer: PeerId, round_id: bytes, ballot: int, vote: Vote, given: Promised
    ) -> list[Proof]:
        if not is_denied(given, ballot, vote.seal):
            return []
        return self._proved(
            DeniedVote(peer=peer, round=round_id, ballot=ballot, vote=vote, promise=given)
        )

    def _proved(self, head: Contradiction) -> list[Proof]:
        proof = Proof(head)
        try:
            check(proof, self._court)
        except BadProof:
            return []
        return [proof]
