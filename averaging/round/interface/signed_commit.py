"""A commit as its leader signed it, and reading one from the network."""

from __future__ import annotations

from dataclasses import dataclass

from averaging import messages
from averaging.messages import BadMessage, Commit
from averaging.round.interface.identity import Identity


@dataclass(frozen=True, slots=True)
class SignedCommit:
    """A commit, its bytes and its leader's signature."""

    round: bytes
    """Name of the round: the digest of ``encoded``."""
    commit: Commit
    encoded: bytes
    signature: bytes

    def message(self) -> messages.Committed:
        return messages.Committed(self.commit.fragment, self.encoded, self.signature)


class NotForThisPeer(ValueError):
    """A commit that is malformed, forged, or of a round in which this peer has no part."""


def read_commit(encoded: bytes, signature: bytes, identity: Identity) -> SignedCommit:
    """Raises ``NotForThisPeer``; a false signature is a ``BadSignature``."""
    try:
        commit = messages.decode_commit(encoded)
    except BadMessage as error:
        raise NotACommit(str(error)) from error
    if commit.topic != identity.topic or commit.fragment != identity.fragment:
        raise NotForThisPeer("the commit is of another run, layout or fragment")
    if not identity.verify(commit.leader, encoded, signature):
        raise BadSignature("the commit is not signed by its leader")
    if commit.index(identity.me) is None and identity.me not in commit.reducers:
        raise NotForThisPeer("the commit does not name me")
    return SignedCommit(messages.digest(encoded), commit, encoded, signature)


class NotACommit(NotForThisPeer):
    """Bytes that no peer of this version sends as a commit."""


class BadSignature(NotForThisPeer):
    """The leader that the commit names did not sign it."""
