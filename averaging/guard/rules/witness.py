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
from typing import TypeAlias, TypeVar

from averaging import messages
from averaging.guard.rules.proofs import (
    BadProof,
    Contradiction,
    Court,
    Guilty,
    Proof,
    SignedClaim,
    SignedCommit,
    SignedPromise,
    SignedVote,
    Statement,
    check,
    deed_of,
)
from averaging.history.claims import Claim, Subject, authors
from averaging.messages import Commit, Message
from dht.bounded_mapping import BoundedMapping
from dht.identity import PeerId

BALLOTS_MAX = 64
"""Votes of one voter in one round that are kept."""
PROMISES_MAX = 4
"""Promises of one voter in one round that are kept, the first ones."""
CLAIMS_MAX = 256
"""Claims of one member in one round that are kept, the first ones."""
ROUNDS_KEPT_MAX = 256


@dataclass(slots=True)
class _Round:
    """The statements of one round."""

    commit: Commit
    signed: SignedCommit
    attempt: Hashable
    votes: dict[PeerId, dict[Hashable, SignedVote]] = field(default_factory=dict)
    promises: dict[PeerId, list[SignedPromise]] = field(default_factory=dict)
    """Promises of voters whose signatures hold, until the round is over."""
    claims: dict[PeerId, dict[Hashable, SignedClaim]] = field(default_factory=dict)


Proved: TypeAlias = tuple[Guilty, Proof]

_Said = TypeVar("_Said", SignedVote, SignedClaim)


class Witness:
    """The statements that one peer has seen lately."""

    __slots__ = ("_court", "_rounds")

    def __init__(self, court: Court, worth: Callable[[PeerId], float] = lambda peer: 0.0) -> None:
        """``worth``: how much the work of a leader counts here."""
        self._court = court
        self._rounds = BoundedMapping[bytes, _Round](
            "witnessed rounds",
            ROUNDS_KEPT_MAX,
            worth=lambda _, round_: worth(round_.commit.leader),
            author=lambda _, round_: round_.commit.leader,
        )

    def sees(self, sender: PeerId, message: Message) -> list[Proved]:
        """Look at a message of any peer. Returns what it proves."""
        match message:
            case messages.Committed():
                return self.sees_commit(message.commit, message.signature)
            case messages.Propose() if message.signature:
                return self._voted(sender, message, message.seal, message.signature)
            case messages.Promise() if message.signature:
                return self._promised(sender, message)
            case messages.Sealed():
                return self._all_voted(message, message.seal)
            case messages.Void() if not message.forsworn:
                return self._all_voted(message, ())
        return []

    def sees_commit(self, encoded: bytes, signature: bytes) -> list[Proved]:
        """Look at a commit, from wherever it comes."""
        name = messages.digest(encoded)
        if name in self._rounds:
            return []
        try:
            commit = self._court.read(encoded)
        except BadProof:
            return []
        new = SignedCommit(commit.leader, signature, encoded)
        if not self._court.has_signed(new):
            return []
        others = [old.signed for old in self._rounds.values() if old.attempt == new.once]
        self._rounds[name] = _Round(commit, new, new.once)
        return [proof for old in others for proof in self._proved(old, new)]

    def sees_claim(
        self, encoded: bytes, slice_index: int, claim: Claim, *, merged: bool
    ) -> list[Proved]:
        """Look at a claim about a slice of the round of a commit."""
        name = messages.digest(encoded)
        round_ = self._rounds.get(name)
        if round_ is None:
            return []
        by, subject = authors(round_.commit)[claim.by], Subject(name, slice_index, merged)
        new = SignedClaim(by, claim.signature, subject, claim.members, claim.sources, claim.made)
        claims = round_.claims.setdefault(by, {})
        if len(claims) >= CLAIMS_MAX and new.once not in claims:
            return []
        return self._compared(claims, new)

    def round_is_over(self, round_id: bytes) -> None:
        """Forget the promises of a round that nobody needs any more: nobody shows votes that they
        could deny."""
        if (round_ := self._rounds.get(round_id)) is not None:
            round_.promises.clear()

    def _all_voted(
        self, message: messages.Sealed | messages.Void, seal: tuple[int, ...]
    ) -> list[Proved]:
        round_ = self._rounds.get(message.round)
        if round_ is None:
            return []
        members = round_.commit.members
        return [
            proof
            for index, signature in message.votes
            if index < len(members)
            for proof in self._voted(members[index].peer, message, seal, signature)
        ]

    def _voted(
        self,
        peer: PeerId,
        message: messages.Propose | messages.Sealed | messages.Void,
        seal: tuple[int, ...],
        signature: bytes,
    ) -> list[Proved]:
        round_ = self._rounds.get(message.round)
        if round_ is None or round_.commit.index(peer) is None:
            return []
        new = SignedVote(peer, signature, message.round, message.ballot, seal)
        votes = round_.votes.setdefault(peer, {})
        if len(votes) >= BALLOTS_MAX and new.once not in votes:
            for once, vote in list(votes.items()):
                if not self._court.has_signed(vote):
                    del votes[once]
            if len(votes) >= BALLOTS_MAX:
                return []
        found = self._compared(votes, new)
        for promise in round_.promises.get(peer, ()):
            found += self._proved(new, promise)
        return found

    def _promised(self, peer: PeerId, message: messages.Promise) -> list[Proved]:
        """Compare a promise with the votes of its sender in the round."""
        round_ = self._rounds.get(message.round)
        if round_ is None or round_.commit.index(peer) is None:
            return []
        last = message.accepted_ballot, message.accepted
        new = SignedPromise(peer, message.signature, message.round, message.ballot, *last)
        kept = round_.promises.setdefault(peer, [])
        if new in kept or len(kept) >= PROMISES_MAX or not self._court.has_signed(new):
            return []
        kept.append(new)
        votes = round_.votes.get(peer, {}).values()
        return [proof for vote in votes for proof in self._proved(vote, new)]

    def _compared(self, known: dict[Hashable, _Said], new: _Said) -> list[Proved]:
        """Compare a statement with the one that is known of its kind, and keep it if there is none,
        or a forged one."""
        old = known.setdefault(new.once, new)
        if old == new:
            return []
        proofs = self._proved(old, new)
        if not proofs and self._court.has_signed(new):
            known[new.once] = new
        return proofs

    def _proved(self, first: Statement, second: Statement) -> list[Proved]:
        if deed_of(first, second) is None:
            return []
        proof = Proof(Contradiction(first, second))
        try:
            return [(check(proof, self._court), proof)]
        except BadProof:
            return []
