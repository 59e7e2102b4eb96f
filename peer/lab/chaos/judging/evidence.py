"""What is known of a hurt swarm when it is over: values only, collected by
``peer.lab.chaos.collect``.

All times are seconds on the clock of whoever watched, from the start of the swarm. A peer is
called by its name here, except in the maps of states, where it has its peer id.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from peer.lab.chaos.judging.schedule import FaultKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A learner's own report, once a second."""

    at_s: float
    steps: int
    """Of this life."""
    trained_s: float
    """From the first step of this life to the last one, on the learner's clock."""
    merged_tokens: float
    """Of this learner, over all its lives."""
    global_tokens: int
    loss: float | None
    blocked_p99_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One start of a learner until its end."""

    began_s: float
    ready_s: float | None
    """In the run for the first time."""
    ended_s: float
    killed: bool
    """We did it; otherwise it ended by itself."""
    exit_code: int | None
    reports: tuple[Report, ...]
    merged_after_steps: int | None
    """Steps of this life when its work was in a round for the first time, to the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTold:
    """A round as one peer lived it."""

    at_s: float
    fragment: int
    round: str
    version: int
    lineage: str | None
    """Of the state after it; ``None`` when it did not finish here."""
    contributors: tuple[str, ...]
    """Peer ids, in the order of the roster."""
    marks: Mapping[str, tuple[int, int, int, int]]
    """Of each contributor: incarnation, step at the end, steps, tokens."""
    contributed: bool
    seconds: float
    kind: str
    refused: Mapping[str, str] = field(default_factory=dict)
    """Members left out because of what they sent, and why, as this peer saw it."""

    @property
    def finished(self) -> bool:
        return self.lineage is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalFragment:
    """A fragment as a peer saved it when it left."""

    fragment: int
    size: int
    version: int
    lineage: str
    chain: frozenset[tuple[int, str]]
    bits: str
    """Digest of every number of the state."""
    finite: bool
    merged: Mapping[str, int]
    """Tokens of each peer, by peer id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """A peer's ledger of one fragment, in tokens (``peer.rules.ledger``)."""

    fragment: int
    processed: int
    merged: int
    pending: int
    discarded: Mapping[str, int]
    excess: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What a process held at a moment."""

    at_s: float
    pid: int
    role: str
    descriptors: int
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerEvidence:
    """All that is known of one learner."""

    name: str
    peer_id: str
    hostile: bool
    lives: tuple[Life, ...]
    rounds: tuple[RoundTold, ...]
    fragments: tuple[FinalFragment, ...]
    """Empty when it never saved."""
    accounts: tuple[Account, ...]
    processed_tokens: int
    """As its own counter says, which is written at every step and outlives a kill -9."""
    samples: tuple[Sample, ...] = ()
    agents_in_s: tuple[float, ...] = ()
    """When each of its agents was in the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultDone:
    """Something that was done to the swarm."""

    kind: FaultKind
    at_s: float
    until_s: float
    """When it was over: healed, thawed, started again."""
    victim: str | None
    """``None``: no learner, or all of them."""
    detail: str = ""
    did: Mapping[str, int] = field(default_factory=dict)
    """What a stranger did, by its own count; empty when it came to nothing before its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutPoint:
    """The held-out loss of the swarm, as somebody measured and published it."""

    at_s: float
    global_tokens: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostileUpload:
    """What a hostile peer sent instead of its contribution."""

    round: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaks:
    """What was still there when everything had ended."""

    processes: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    shared_memory: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.processes or self.files or self.shared_memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One swarm's life."""

    scenario: str
    peers: tuple[PeerEvidence, ...]
    faults: tuple[FaultDone, ...]
    held_out: tuple[HeldOutPoint, ...]
    ready_s: float
    """Everybody was in the run."""
    hurt_s: float
    """Not before this was anything done."""
    quiet_s: float
    """From here on nothing was done any more."""
    ended_s: float
    """The learners were asked to leave."""
    cycle_steps: int
    step_tokens: int
    pace_s: float
    quorum_deadline_s: float
    round_deadline_s: float
    others_share: float = 0.0
    """Of this machine's processors, from ``ready_s`` to ``ended_s``: what was used by processes
    that are none of ours."""
    hostile_uploads: tuple[HostileUpload, ...] = ()
    leaks: Leaks = field(default_factory=Leaks)

    @property
    def honest(self) -> tuple[PeerEvidence, ...]:
        return tuple(peer for peer in self.peers if not peer.hostile)
