"""Evidence about a swarm that has ended: plain values, collected by ``tests.chaos.collect``.

All times are seconds on the observer's clock, from the start of the swarm. Peers are identified by
name, except in the maps of states and rounds, which have peer ids.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from peer.rules.ledger import Fate
from tests.chaos.judging.lies import Act, Lie
from tests.chaos.judging.schedule import FaultKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A learner's own progress report, printed once a second."""

    at_s: float
    steps: int
    """Steps of this life."""
    trained_s: float
    """Time from the first step of this life to the last one, on the learner's clock."""
    merged_tokens: float
    """Merged tokens of this learner, over all its lives."""
    global_tokens: int
    loss: float | None
    blocked_p99_ms: float
    """The same of processor time, which does not depend on what other processes do."""
    peers: int = 1
    """Number of peers in the run that it knows, with itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One process of a learner, from its start until its end."""

    began_s: float
    ready_s: float | None
    """Time at which it was first in the run."""
    ended_s: float
    killed: bool
    """True if the experiment killed it; otherwise it ended by itself."""
    exit_code: int | None
    reports: tuple[Report, ...]
    merged_after_steps: int | None
    """Steps of this life before its work was first in a round, to the second."""
    asked_s: float | None = None
    """Time at which it was asked to leave, if that was before the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """A round as one peer reported it."""

    at_s: float
    fragment: int
    round: str
    version: int
    lineage: str | None
    """Lineage of the resulting state; ``None`` when the round did not finish at this peer."""
    contributors: tuple[str, ...]
    """Peer ids, in the order of the roster."""
    marks: Mapping[str, tuple[int, int, int, int]]
    """Incarnation, last step, number of steps and tokens of each contributor."""
    contributed: bool
    seconds: float
    kind: str
    parents: tuple[str, ...] = ()
    """Lineages of the states that it continued: several in a mix or a meld."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Members that this peer left out because of what they sent, with its reasons."""

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
    """Merged tokens of each peer, by peer id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Resources of one process at one moment."""

    at_s: float
    pid: int
    role: str
    descriptors: int
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """Something that a peer held against another one, as it logged it."""

    at_s: float
    peer_id: str
    """The peer that is blamed."""
    kind: str
    """``convicted``, ``strike``, or the kind of what was refused."""
    reason: str
    strikes: float = 0.0
    """Strikes of the other peer then, with this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LieTold:
    """A lie, as the liar's own process logged it."""

    at_s: float
    liar: str
    lie: Lie
    round: str = ""
    """The round that it was about, if it was about one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerEvidence:
    """Everything known about one learner."""

    name: str
    peer_id: str
    hostile: bool
    lives: tuple[Life, ...]
    rounds: tuple[RoundReport, ...]
    fragments: tuple[FinalFragment, ...]
    """Empty when it never saved."""
    fates: tuple[Fate, ...]
    """The peer's ledger: the fate of its tokens, for each fragment. Empty when it never saved."""
    processed_tokens: int
    """Value of its own counter, which is written at every step and survives SIGKILL."""
    samples: tuple[Sample, ...] = ()
    agents_in_s: tuple[float, ...] = ()
    """Times at which each of its agents entered the run."""
    blames: tuple[Blame, ...] = ()
    """Everything that it held against others, in the order of time."""
    counts_s: float | None = None
    """Time at which a round first counted a liar as established."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultDone:
    """A fault that was injected."""

    kind: FaultKind
    at_s: float
    until_s: float
    """Time at which it was over: healed, resumed, or started again."""
    victim: str | None
    """``None``: no learner in particular."""
    detail: str = ""
    did: Mapping[str, int] = field(default_factory=dict)
    """Counters of a stranger; empty when it did not start in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutPoint:
    """A held-out loss of the swarm, as a peer measured and published it."""

    at_s: float
    global_tokens: int
    loss: float
    honest_tokens: float = 0.0
    """Merged tokens of the honest learners: claims of liars are not in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostileUpload:
    """An upload that the hostile learner spoilt."""

    round: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaks:
    """Processes, files and shared memory that the swarm left behind."""

    processes: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    shared_memory: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.processes or self.files or self.shared_memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything known about one swarm."""

    scenario: str
    peers: tuple[PeerEvidence, ...]
    faults: tuple[FaultDone, ...]
    held_out: tuple[HeldOutPoint, ...]
    ready_s: float
    """Time at which every learner was in the run."""
    quiet_s: float
    """No fault was active after this."""
    ended_s: float
    """Time at which the learners were asked to leave."""
    cycle_steps: int
    step_tokens: int
    pace_s: float
    quorum_deadline_s: float
    round_deadline_s: float
    others_share: float = 0.0
    """Share of the machine's processors, from ``ready_s`` to ``ended_s``, that processes outside
    of the experiment used."""
    hostile_uploads: tuple[HostileUpload, ...] = ()
    acts: tuple[Act, ...] = ()
    """The lies of the liars with their times, which are the observer's."""
    lies: tuple[LieTold, ...] = ()
    """All lies, in the order of time."""
    sizes: tuple[tuple[float, int], ...] = ()
    """Number of learners that were to be there, and since when, if it changed by schedule."""
    bootstraps: Mapping[str, tuple[Sample, ...]] = field(default_factory=dict)
    """Resources of the bootstrap peers, by name."""
    leaks: Leaks = field(default_factory=Leaks)

    @property
    def honest(self) -> tuple[PeerEvidence, ...]:
        return tuple(peer for peer in self.peers if not peer.hostile)

    @property
    def liars(self) -> tuple[PeerEvidence, ...]:
        """The members that lie in some acts, in their order."""
        return tuple(peer for peer in self.peers if peer.hostile) if self.acts else ()

    def finished_rounds(self) -> Iterator[tuple[PeerEvidence, RoundReport]]:
        """Every finished round of every honest peer."""
        for peer in self.honest:
            for report in peer.rounds:
                if report.finished:
                    yield peer, report

    def round_times_s(self) -> list[float]:
        """Times at which any honest peer finished each round first, in order."""
        made: dict[str, float] = {}
        for _, report in self.finished_rounds():
            made[report.round] = min(report.at_s, made.get(report.round, math.inf))
        return sorted(made.values())

    def final_maps(self) -> dict[int, tuple[int, Mapping[str, int]]]:
        """Size and merged map of the heaviest final state of each fragment at an honest peer.

        A hostile peer, whose work was refused, merges it alone as it leaves.
        """
        found: dict[int, tuple[int, Mapping[str, int]]] = {}
        for peer in self.honest:
            for part in peer.fragments:
                before = found.get(part.fragment)
                if before is None or sum(part.merged.values()) > sum(before[1].values()):
                    found[part.fragment] = (part.size, part.merged)
        return found

    def was_starting(self, life: Life) -> bool:
        """True if a life was still starting at the end, so that nothing can be said about it."""
        return life.ready_s is None and life.ended_s >= self.ended_s
