"""How far this machine's clock is from those of the others: estimated and shown, never used.

No record is judged by it, see ``dht.records``. It is here because a wrong clock
confuses people who read logs, and TLS certificates and dates of runs.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from dht.identity import PeerId

SAMPLES_MAX = 128
SAMPLE_LIFE_S = 900.0
ROUND_TRIP_MAX_S = 2.0


@dataclass(frozen=True, slots=True)
class ClockSample:
    """One exchange: ``offset_s`` is what to add to the own clock to get the other's."""

    offset_s: float
    round_trip_s: float
    at: float


@dataclass(frozen=True, slots=True)
class ClockEstimate:
    offset_s: float
    """What to add to the own clock to get that of the swarm."""

    error_s: float
    """Half the middle round trip: no exchange tells more than that."""

    peers: int


def sample(
    *, sent_at: float, received_at: float, replied_at: float, returned_at: float, now: float
) -> ClockSample:
    """One exchange as NTP reckons it (RFC 5905, section 8): both ways are taken to be equally long.

    ``sent_at`` and ``returned_at`` are of the own wall clock, the two others of the other's.
    """
    offset_s = ((received_at - sent_at) + (replied_at - returned_at)) / 2
    round_trip_s = (returned_at - sent_at) - (replied_at - received_at)
    return ClockSample(offset_s, max(0.0, round_trip_s), now)


@dataclass(slots=True)
class ClockOffsets:
    """The last exchange with each of a number of peers, and the middle of what they say.

    The median: fewer than half of the peers cannot move it beyond what the others say.
    """

    _samples: dict[PeerId, ClockSample] = field(default_factory=dict)

    def add(self, peer: PeerId, measured: ClockSample) -> None:
        if measured.round_trip_s > ROUND_TRIP_MAX_S:
            return
        self._samples.pop(peer, None)  # to the end: the longest unheard of is dropped first
        self._samples[peer] = measured
        while len(self._samples) > SAMPLES_MAX:
            del self._samples[next(iter(self._samples))]

    def estimate(self, now: float) -> ClockEstimate | None:
        """``None`` before any peer was asked."""
        recent = [s for s in self._samples.values() if now - s.at <= SAMPLE_LIFE_S]
        if not recent:
            return None
        return ClockEstimate(
            offset_s=statistics.median(s.offset_s for s in recent),
            error_s=statistics.median(s.round_trip_s for s in recent) / 2,
            peers=len(recent),
        )
