"""The identity of a peer in one fragment, and a commit as its leader signed it.

All parts of a round machine share these values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import msgspec

from averaging import messages
from averaging.messages import BadMessage, Commit, Join
from averaging.numbers.layout import Kind
from averaging.rules.due import Spacing
from averaging.rules.orders import OrderBook
from averaging.rules.policy import RoundPolicy
from dht import protocol
from dht.identity import PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Facts that never change while a machine runs."""

    me: PeerId
    incarnation: int
    """Number of this life of the peer. A restarted peer is another incarnation."""
    fragment: int
    topic: bytes
    """16 bytes that name the run and its layout."""
    policy: RoundPolicy
    codecs: tuple[str, ...]
    encoded_bytes: Callable[[str], int]
    """Size of the fragment under a codec."""
    sign: Callable[[bytes], bytes]
    verify: Callable[[PeerId, bytes, bytes], bool]
    """True if a peer signed these bytes: ``verify(peer, bytes, signature)``."""
    founder: bool = False
    """True if nobody else had worked in the run when this peer began."""
    site: str | None = None
    """Name of a local network. Peers with the same name are near (``averaging.rules.sites``)."""
    norm_ratio_max: float = math.inf
    """A reducer refuses an upload whose norm is this many times the usual one."""
    refuses: Callable[[PeerId], str | None] = lambda peer: None
    """The reason why this peer, now, proposes to merge nothing of another one, if it has one."""
    first_number: int = 0
    """Commits and joins are numbered from here. An agent that is restarted is the same incarnation
    and remembers none of them, so it begins at random: it must not use a number twice, and knows
    by it which joins it has made."""
    book: OrderBook = field(default_factory=OrderBook)
    """Orders of the run's owner, which all fragments of this peer share. They change."""
    spacing: Spacing = field(default_factory=Spacing)
    """Places of this peer's fragments in a cycle, which all of them share. They change."""
    speaks: protocol.Range = protocol.SPOKEN
    """Oldest and newest protocol number of the rounds that this peer can be in."""
    kinds: Collection[Kind] = ()
    """Kinds of the fragment's tensors, which may have a policy of their own."""

    def signed(self, join: Join, leader: PeerId) -> Join:
        """The join with this peer's signatures, one for each protocol number that it speaks."""
        oldest, newest = self.speaks
        made = tuple(
            (number, self.sign(messages.claim_of(join, leader, number)))
            for number in range(oldest, newest + 1)
        )
        return msgspec.structs.replace(join, signatures=made)

    def policy_at(self, version: int) -> RoundPolicy:
        """The policy of a round that makes this version."""
        amended = self.book.orders.policy_at(version, self.policy)
        return amended if amended is self.policy else amended.of_kinds(self.kinds)


@dataclass(frozen=True, slots=True)
class Circumstances:
    """Facts that may change later, as they are when a machine begins."""

    trains: bool = True
    """True if a learner takes part. Without one the peer may still lead and reduce."""
    reachable: bool = True
    """True if other peers can dial this one. If not, it neither leads nor reduces."""
    bytes_per_s: float = 0.0
    """Measured speed of the line; 0: not known."""
    absent: Mapping[PeerId, float | None] = field(default_factory=dict)
    """Peers that are not live: when one was last heard that may train on unseen; ``None``: it said
    goodbye, or had no work to do. Kept up to date by the owner."""


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
