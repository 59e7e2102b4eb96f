"""Results of one simulated swarm: measured points, finished rounds, and the fate of every token."""

from __future__ import annotations

from dataclasses import dataclass

from peer.rules.ledger import Fate
from peer.simulate.swarm.experiment import Experiment


@dataclass(frozen=True, slots=True)
class Point:
    """State of the swarm at one moment."""

    time_s: float
    processed_tokens: float
    merged_tokens: float
    bytes_sent: int
    loss: float
    """Held-out loss of the mean of all peers' slow weights."""
    peer_loss: float
    """Mean held-out loss of a sample of peers, each with its own slow weights."""
    dispersion: float
    """Rms distance of the peers' slow weights from their mean, over the norm of the mean."""
    live: int
    lineages: float
    """Distinct states of a fragment, averaged over the fragments."""
    version: float
    """Mean version over all peers and fragments."""


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """A round that at least one member finished."""

    time_s: float
    fragment: int
    version: int
    kind: str
    members: int
    contributors: int
    live: int
    """Peers in training in the whole swarm at that moment."""
    leader: str


@dataclass(frozen=True, slots=True)
class SwarmResult:
    """Everything measured in one simulated swarm."""

    experiment: Experiment
    seed: int
    points: list[Point]
    rounds: list[RoundRecord]
    fate: Fate
    """Fate of all processed tokens, as the mean over fragments weighted by their size."""
    staleness: dict[int, int]
    """Number of contributions by staleness: versions between base and merge."""
    goodput: float
    """Tokens processed, over those that all peers would process without absence or waiting."""
    blocked_share: float
    """Share of the peers' uptime in which their learners waited."""
    fetched_bytes: int
    """Traffic of catching up and joining."""
    bytes_sent: int
    duration_s: float
    events: int
    notes: dict[str, int]
    """Number of occurrences of each transition of a round."""
    trace: str
    """Digest of all events and of the final bits."""
    learners_loss: float
    """Held-out loss of the mean of all learners' parameters at the end: with work that no round
    has merged yet."""

    @property
    def final(self) -> Point:
        return self.points[-1]

    @property
    def mean_staleness(self) -> float:
        versions = sum(versions * count for versions, count in self.staleness.items())
        return versions / max(1, sum(self.staleness.values()))
