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
    Court,
    Proof,
    SignedBytes,
    TwoClaims,
    TwoCommits,
    TwoVotes,
    Vote,
    check,
)
from averaging.bounded_mapping import BoundedMapping
from averaging.messages import BadMessage, Commit, Message
from dht.identity import PeerId

KEPT_MAX = 4096
"""Votes and claims that are kept: those of the last dozens of rounds, a few megabytes."""
ROUNDS_KEPT_MAX = 256
"""Commits that are kept: each takes as much as dozens of them."""


class Witness:
    """The statements that one peer has seen lately."""

    __slots__ = ("_claims", "_commits", "_court", "_rounds", "_votes")

    def __init__(self, court: Court) -> None:
        self._court = court
        self._rounds = BoundedMapping[bytes, bytes](ROUNDS_KEPT_MAX)
        """Encoded commits by the names of their rounds."""
        self._commits = BoundedMapping[Hashable, SignedBytes](ROUNDS_KEPT_MAX)
        self._votes = BoundedMapping[Hashable, Vote](KEPT_MAX)
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

    def _decoded(self, encoded: bytes) -> Commit | None:
        try:
            commit = messages.decode_commit(encoded)
        except BadMessage:
            return None
        return commit if commit.topic == self._court.topic else None

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
        old = self._votes.setdefault(key, new)
        if old.seal == new.seal:
            return []
        head = TwoVotes(peer=peer, round=round_id, ballot=ballot, first=old, second=new)
        proof = self._proved(head)
        said = messages.vote(round_id, ballot, new.seal)
        if not proof and self._court.verify(peer, said, new.signature):
            self._votes[key] = new
        return proof

    def _proved(self, head: TwoClaims | TwoVotes | TwoCommits) -> list[Proof]:
        proof = Proof(head)
        try:
            check(proof, self._court)
        except BadProof:
            return []
        return [proof]
