"""How long a round may take: what every round takes, and what its bytes need on the slowest link.

The leader says it in its commit, so that all members go by the same; a member only checks that it
is not absurdly long. Pure arithmetic: no clock, no measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from averaging.messages import Commit
from averaging.rules.policy import RoundPolicy

SLACK = 2.0
"""A link carries other things too, and says what it can do at best."""

TRANSFERS_PER_ROUND = 4
"""Up and down, and both once more when a reducer dies after it was sent everything."""

TOLERANCE = 2.0
"""So many times longer than I would have it may another leader's deadlines be."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Durations from when a peer hears of the commit, on its own clock."""

    upload_s: float
    round_s: float


def deadlines(policy: RoundPolicy, *, encoded_bytes: int, loads: Sequence[Load]) -> Deadlines:
    """For a round in which each member moves its load once up and once down."""
    slowest_s = max(
        (load.bytes_of(encoded_bytes) / load.speed(policy) for load in loads), default=0
    )
    return _with_transfer(policy, SLACK * slowest_s)


def longest(policy: RoundPolicy, *, encoded_bytes: int, commit: Commit) -> Deadlines:
    """What a member puts up with: the slowest link that is waited for, and some more."""
    members = len(commit.members)
    share_max = max(commit.shares) / max(1, sum(commit.shares))
    load = Load(share=share_max, members=members, bytes_per_s=0.0)
    slowest_s = load.bytes_of(encoded_bytes) / load.speed(policy)
    plain = _with_transfer(policy, SLACK * slowest_s)
    return Deadlines(TOLERANCE * plain.upload_s, TOLERANCE * plain.round_s)


@dataclass(frozen=True, slots=True)
class Load:
    """What one member has to do in a round."""

    share: float
    """Of the fragment, that it reduces."""
    members: int
    bytes_per_s: float
    """As it says; 0 when it does not."""

    def bytes_of(self, encoded_bytes: int) -> float:
        """Sent as a member, and received as a reducer. The way back is the same turned round."""
        return encoded_bytes * ((1.0 - self.share) + (self.members - 1) * self.share)

    def speed(self, policy: RoundPolicy) -> float:
        return max(self.bytes_per_s, policy.slow_link_bytes_s)


def _with_transfer(policy: RoundPolicy, transfer_s: float) -> Deadlines:
    return Deadlines(
        upload_s=policy.upload_s + transfer_s,
        round_s=policy.round_s + TRANSFERS_PER_ROUND * transfer_s,
    )
