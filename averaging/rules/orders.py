"""The directive of the run's owner, as far as rounds follow it.

A peer's ``OrderBook`` is shared by all of its fragments; its owner puts the orders of the newest
directive there. Commits name the directive that their leader follows, and a member with another one
declines, so no round has members with different settings. A leader sends its directive ahead of the
commit to each peer that may not know it; a member with a newer one sends that to the leader.

The settings of a round are a function of the directive and of the version that the round makes. A
run without an owner has an empty book for ever.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from averaging.history.lineage import Lineage
from averaging.messages import Stamp
from averaging.rules.policy import RoundPolicy
from dht.bounded_mapping import BoundedMapping, by_age
from dht.identity import PeerId

ANSWER_EVERY_S = 2.0
"""A peer with an older directive is sent the one in force at most this often."""

TOLD_MAX = 1024
"""Peers of which it is remembered which directive they were sent."""

Place: TypeAlias = tuple[int, int, Lineage]
"""Fragment, version and lineage of a state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOrders:
    """The part of a directive that rounds follow."""

    stamp: Stamp | None = None
    """``None``: there is no directive, and the run file says everything."""
    encoded: bytes = b""
    """The directive itself, for peers that do not know it."""
    paused: str | None = None
    """Reason why no round begins; ``None``: rounds begin as usual."""
    last_version: int | None = None
    """Version with which every fragment is done; ``None``: not ordered."""
    policies: tuple[tuple[int, RoundPolicy], ...] = ()
    """Policies of rounds that make these versions or later ones, in ascending order."""
    attested: Mapping[Place, bytes] = field(default_factory=dict)
    """States that are taken without a certificate, with the digests of their numbers
    (``averaging.history.manifest``)."""

    def policy_at(self, version: int, policy: RoundPolicy) -> RoundPolicy:
        """The policy of a round that makes this version. ``policy``: that of the run file."""
        for since, amended in self.policies:
            if version >= since:
                policy = amended
        return policy


class OrderBook:
    """The orders in force at one peer, and the peers that know of them."""

    __slots__ = ("_answered_at", "_told", "orders")

    def __init__(self) -> None:
        self.orders = RoundOrders()
        self._told = BoundedMapping[PeerId, Stamp]("told of orders", TOLD_MAX, worth=by_age)
        self._answered_at = BoundedMapping[PeerId, float](
            "answered with orders", TOLD_MAX, worth=by_age
        )

    def must_tell(self, peer: PeerId) -> bool:
        """True if a peer was not sent the directive in force. From now on it counts as sent."""
        stamp = self.orders.stamp
        if stamp is None or self._told.get(peer) == stamp:
            return False
        self._told.pop(peer, None)
        self._told[peer] = stamp
        return True

    def may_answer(self, peer: PeerId, now: float) -> bool:
        """True if a peer that sent an older directive is to be sent the one in force.

        A peer that asks again and again is answered now and then.
        """
        if not self.orders.encoded or now - self._answered_at.get(peer, -math.inf) < ANSWER_EVERY_S:
            return False
        self._answered_at.pop(peer, None)
        self._answered_at[peer] = now
        return True

    def objection(self, theirs: Stamp | None) -> str | None:
        """Reason why this peer is in no round that follows another directive."""
        mine = self.orders.stamp
        if theirs == mine:
            return None
        return f"it follows {_named(theirs)} of the run's owner; I follow {_named(mine)}"


def _named(stamp: Stamp | None) -> str:
    return "no directive" if stamp is None else f"directive {stamp.number}"
