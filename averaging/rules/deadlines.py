"""Deadlines of a round: a fixed part, and the time that its bytes need on the slowest link.

The fixed part is 15 s for uploads (``RoundPolicy.upload_s``); to it comes twice the time that the
slowest member's line takes for its load. A line of unknown speed counts as 5 Mbit/s, and a round
waits for lines of down to a tenth of that. The leader puts both deadlines into its commit, so that
all members have the same; they follow from what the members said of their lines. Pure arithmetic:
no clock, no measurement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from averaging.rules.policy import RoundPolicy
from dht.identity import PeerId

SLACK = 2.0
"""Factor on the transfer time: a link carries other traffic too, and its speed is a best case."""

TRANSFERS_PER_ROUND = 4
"""Up and down, and both once more if a reducer dies after it was sent everything."""

SLOWER_MAX = 10.0
"""A measured line may be so many times slower than one of unknown speed counts as."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Durations from the moment a peer hears of the commit, on its own clock."""

    upload_s: float
    round_s: float


def deadlines(policy: RoundPolicy, *, encoded_bytes: int, loads: Sequence[Load]) -> Deadlines:
    """Return the deadlines of a round in which each member moves its load once up and once down."""
    slowest_s = max(
        (load.bytes_of(encoded_bytes) / load.speed(policy) for load in loads), default=0
    )
    return _with_transfer(policy, SLACK * slowest_s)


def loads_of(
    roster: Sequence[PeerId], shares: Mapping[PeerId, int], speeds: Mapping[PeerId, float]
) -> list[Load]:
    """Return the load of each member and reducer of a round. ``shares``: of the reducers."""
    return [
        Load(
            shares.get(peer, 0) / sum(shares.values()),
            members=len(roster),
            bytes_per_s=speeds.get(peer, 0.0),
        )
        for peer in dict.fromkeys([*roster, *shares])
    ]


@dataclass(frozen=True, slots=True)
class Load:
    """The traffic of one member in a round."""

    share: float
    """Share of the fragment that this member reduces."""
    members: int
    bytes_per_s: float
    """Speed of its line as it said in its join; 0 if it did not."""

    def bytes_of(self, encoded_bytes: int) -> float:
        """Return the bytes sent as a member and received as a reducer; as many go back."""
        return encoded_bytes * ((1.0 - self.share) + (self.members - 1) * self.share)

    def speed(self, policy: RoundPolicy) -> float:
        """Return the speed that the round allows for."""
        if not self.bytes_per_s:
            return policy.slow_link_bytes_s
        return max(self.bytes_per_s, policy.slow_link_bytes_s / SLOWER_MAX)


def _with_transfer(policy: RoundPolicy, transfer_s: float) -> Deadlines:
    return Deadlines(
        upload_s=policy.upload_s + transfer_s,
        round_s=policy.round_s + TRANSFERS_PER_ROUND * transfer_s,
    )
