"""Difference between this machine's clock and those of other peers: an estimate for users.

No record is judged by it (see ``dht.records``). A wrong clock is reported because it confuses
people who read logs, and breaks TLS certificates and dates of runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from dht.bounded_mapping import BoundedMapping, by_age
from dht.identity import PeerId

SAMPLES_MAX = 128
SAMPLE_LIFE_S = 900.0
ROUND_TRIP_MAX_S = 2.0


@dataclass(frozen=True, slots=True)
class ClockSample:
    """Result of one exchange: the own clock plus ``offset_s`` is the other peer's clock."""

    offset_s: float
    round_trip_s: float
    at: float


@dataclass(frozen=True, slots=True)
class ClockEstimate:
    """Estimate from all recent exchanges."""

    offset_s: float
    """The own clock plus this is the clock of the swarm."""

    error_s: float
    """Half the median round trip, the accuracy of an exchange."""

    peers: int


def sample(
    *, sent_at: float, received_at: float, replied_at: float, returned_at: float, now: float
) -> ClockSample:
    """Evaluate one exchange like NTP (RFC 5905, section 8), which assumes equal delays both ways.

    ``sent_at`` and ``returned_at`` are times of the own wall clock, ``received_at`` and
    ``replied_at`` of the other peer's.
    """
    offset_s = ((received_at - sent_at) + (replied_at - returned_at)) / 2
    round_trip_s = (returned_at - sent_at) - (replied_at - received_at)
    return ClockSample(offset_s, max(0.0, round_trip_s), now)


class ClockOffsets:
    """The last exchange with each peer, and the median of their offsets.

    A minority of the peers cannot move the median beyond the values of the others.
    """

    def __init__(self) -> None:
        self._samples = BoundedMapping[PeerId, ClockSample](
            "clock samples", SAMPLES_MAX, worth=by_age
        )

    def add(self, peer: PeerId, measured: ClockSample) -> None:
        if measured.round_trip_s <= ROUND_TRIP_MAX_S:
            self._samples.renew(peer, measured)

    def estimate(
        self, now: float, counts: Callable[[PeerId], bool] = lambda peer: True
    ) -> ClockEstimate | None:
        """The estimate by the peers that count; ``None`` without a recent exchange."""
        recent = [
            each
            for peer, each in self._samples.items()
            if now - each.at <= SAMPLE_LIFE_S and counts(peer)
        ]
        if not recent:
            return None
        return ClockEstimate(
            offset_s=statistics.median(s.offset_s for s in recent),
            error_s=statistics.median(s.round_trip_s for s in recent) / 2,
            peers=len(recent),
        )
