"""Noticing that a peer has signed two different statements where an honest one makes one.

A ``Witness`` is shown what comes by: commits, votes and proposals, claims. It keeps the first of
each and compares. Signatures are checked only when two differ, so that watching costs next to
nothing; one that is forged gives way to the other.
"""

from __future__ import annotations

from collections.abc import Hashable

from averaging import messages
from averaging.audit.claims import Claim, Subject
from averaging.audit.proofs import (
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
from averaging.messages import BadMessage, Commit, Message
from dht.bounded_mapping import BoundedMapping
from dht.identity import PeerId

BALLOTS_MAX = 64
"""Ballots before that of a promise in which a vote is looked for, the last ones."""
PROMISES_MAX = 4
"""Promises of one voter in one round that are kept, the first ones."""
KEPT_MAX = 4096
"""Votes and claims that are kept: those of the last dozens of rounds, a few megabytes."""
ROUNDS_KEPT_MAX = 256
"""Commits that are kept: each takes as much as dozens of them."""


class Witness:
    """The statements that one peer has seen lately."""

    __slots__ = ("_claims", "_commits", "_court", "_promises", "_rounds", "_votes")

    def __init__(self, court: Court) -> None:
        self._court = court
        self._rounds = BoundedMapping[bytes, bytes](ROUNDS_KEPT_MAX)
        """Encoded commits by the names of their rounds."""
        self._commits = BoundedMapping[Hashable, SignedBytes](ROUNDS_KEPT_MAX)
        self._votes = BoundedMapping[tuple[PeerId, bytes, int], Vote](KEPT_MAX)
        """Votes by voter, round and ballot."""
        self._promises = BoundedMapping[tuple[PeerId, bytes], tuple[Promised, ...]](ROUNDS_KEPT_MAX)
        """Promises of voters whose signatures hold, by voter and round, until the round is over."""
        self._claims = BoundedMapping[Hashable, Claim](KEPT_MAX)

    def __repr__(self) -> str:
        return f"Witness({len(self._rounds)} rounds, {len(self._votes)} votes)"

    def sees(self, sender: PeerId, message: Message) -> list[Proof]:
        """Look at a message of any peer. Returns what it proves."""
        match message:
            case messages.Committed():
                return self.sees_commit(message.commit, message.signature)
            case messages.Propose() if message.signature:
                return self._voted(sender, message.round, message.ballot, message)
            case messages.Promise() if message.signature:
                return self._promised(sender, message)
            case messages.Sealed():
                return self._all_voted(message.round, message.ballot, message.seal, message.votes)
            case messages.Void() if not message.forsworn:
                return self._all_voted(message.round, message.ballot, (), message.votes)
        return []

    def sees_commit(self, encoded: bytes, signature: bytes) -> list[Proof]:
        """Look at a commit, from wherever it comes."""
        commit = self._decoded(encoded)
        if commit is None:
            return []
        self._rounds[messages.digest(encoded)] = encoded
        attempt = commit.fragment, commit.leader, commit.leader_incarnation, commit.nonce
        new = SignedBytes(encoded, signature)
        old = self._commits.get(attempt)
        if old is None or old.commit == encoded:
            self._commits[attempt] = new
            return []
        proof = self._proved(TwoCommits(first=old, second=new))
        if not proof and self._court.verify(commit.leader, encoded, signature):
            self._commits[attempt] = new
        return proof

    def sees_claim(
        self, encoded: bytes, slice_index: int, claim: Claim, *, merged: bool
    ) -> list[Proof]:
        """Look at a claim whose signature holds, about a slice of the round of a commit."""
        subject = Subject(messages.digest(encoded), slice_index, merged)
        key = subject.round, slice_index, merged, claim.by, claim.members
        old = self._claims.setdefault(key, claim)
        if (old.made, old.sources) == (claim.made, claim.sources):
            return []
        found = TwoClaims(commit=encoded, slice=slice_index, merged=merged, first=old, second=claim)
        return self._proved(found)

    def round_is_over(self, round_id: bytes) -> None:
        """Forget a round that nobody needs any more: nobody shows votes that its promises could
        deny."""
        for key in [key for key in self._promises if key[1] == round_id]:
            del self._promises[key]

    def _decoded(self, encoded: bytes) -> Commit | None:
        try:
            commit = messages.decode_commit(encoded)
        except BadMessage:
            return None
        return commit if self._court.is_ours(commit) else None

    def _all_voted(
        self, round_id: bytes, ballot: int, seal: tuple[int, ...], votes: messages.Votes
    ) -> list[Proof]:
        encoded = self._rounds.get(round_id)
        commit = None if encoded is None else self._decoded(encoded)
        if commit is None:
            return []
        found = []
        for index, signature in votes:
            if index < len(commit.members):
                peer = commit.members[index].peer
                found += self._vote(peer, round_id, ballot, Vote(seal, signature))
        return found

    def _voted(
        self, sender: PeerId, round_id: bytes, ballot: int, message: messages.Propose
    ) -> list[Proof]:
        return self._vote(sender, round_id, ballot, Vote(message.seal, message.signature))

    def _vote(self, peer: PeerId, round_id: bytes, ballot: int, new: Vote) -> list[Proof]:
        key = peer, round_id, ballot
        old = self._votes.get(key)
        if old is None or (old.seal == new.seal and old.signature != new.signature):
            return self._first_vote(key, new)
        if old.seal == new.seal:
            return []
        head = TwoVotes(peer=peer, round=round_id, ballot=ballot, first=old, second=new)
        proof = self._proved(head)
        said = messages.vote(round_id, ballot, new.seal)
        if not proof and self._court.verify(peer, said, new.signature):
            self._votes[key] = new
        return proof

    def _first_vote(self, key: tuple[PeerId, bytes, int], new: Vote) -> list[Proof]:
        """Keep a vote. A genuine one replaces another for the same seal, which is forged then."""
        peer, round_id, ballot = key
        said = messages.vote(round_id, ballot, new.seal)
        if key in self._votes and not self._court.verify(peer, said, new.signature):
            return []
        self._votes[key] = new
        found = []
        for given in self._promises.get((peer, round_id), ()):
            found += self._denied(peer, round_id, ballot, new, given)
        return found

    def _promised(self, peer: PeerId, message: messages.Promise) -> list[Proof]:
        """Compare a promise with the votes of its sender in earlier ballots of the round."""
        last = message.accepted_ballot, message.accepted
        given = Promised(message.ballot, *last, message.signature)
        kept = self._promises.get((peer, message.round), ())
        said = messages.promise_text(message.round, message.ballot, *last)
        if given in kept or len(kept) >= PROMISES_MAX:
            return []
        if not self._court.verify(peer, said, given.signature):
            return []
        self._promises[peer, message.round] = (*kept, given)
        found = []
        for ballot in range(max(0, given.ballot - BALLOTS_MAX), given.ballot):
            vote = self._votes.get((peer, message.round, ballot))
            if vote is not None:
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
