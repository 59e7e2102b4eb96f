"""Results of one simulated swarm: measured points, finished rounds, and the fate of every token.

``TokenBooks`` counts which tokens were merged, in any lineage, and accounts for all others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from averaging.history.merged_map import MergedMap
from averaging.numbers.layout import Layout
from averaging.round.interface.effects import Apply
from averaging.virtual.swarm import Peer
from dht.identity import PeerId
from peer.rules.ledger import APART, CRASH, LEFT, Fate
from peer.simulate.settings import Swarm
from peer.simulate.slots import Slot


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

    experiment: Swarm
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


class TokenBooks:
    """Merged work of every peer, by fragment."""

    def __init__(self, layout: Layout) -> None:
        self.staleness: Counter[int] = Counter()
        self._merged_total = [0] * len(layout.fragments)
        self._merged_steps: list[dict[tuple[PeerId, int], int]] = [{} for _ in layout.fragments]
        """Last merged step of each peer and incarnation, by fragment."""
        self._sizes = np.array([fragment.size for fragment in layout.fragments], np.float64)

    @property
    def merged_tokens(self) -> float:
        """Tokens of all peers in any lineage, as the mean over fragments weighted by size."""
        return float(np.dot(self._merged_total, self._sizes) / self._sizes.sum())

    def enter(self, fragment: int, apply: Apply) -> None:
        """Enter the contributions of a finished round. The caller passes each round once."""
        steps = self._merged_steps[fragment]
        for index in apply.seal:
            entry = apply.commit.members[index]
            self.staleness[entry.staleness] += 1
            # The merged map of the new state cannot say this: on a lineage of its own it lacks
            # contributions of the other lineages.
            life = (entry.peer, entry.incarnation)
            if entry.mark > steps.get(life, 0):
                steps[life] = entry.mark
                self._merged_total[fragment] += entry.tokens

    def fate(self, slots: Sequence[Slot], alive: Iterable[Peer], *, step_tokens: int) -> Fate:
        """The fate of every token that was ever processed.

        A peer has settled a step when it counts it as merged, there or elsewhere. Settled tokens in
        no state are ``apart``, as in a live peer's ledger; tokens in a state that were not settled
        are in excess, and a bug.
        """
        standing = self._standing_maps(alive)
        merged = pending = given_up = apart = excess = 0.0
        lost = {CRASH: 0.0, LEFT: 0.0}
        for fragment, share in enumerate(self._sizes / self._sizes.sum()):
            weight, per_step = float(share), float(share) * step_tokens
            for slot in slots:
                mark = standing[fragment].get(slot.name)
                held = mark.tokens if mark is not None else 0
                settled = 0
                for number, life in enumerate(slot.past, start=1):
                    # A round may have ended well after the death of its contributor.
                    done = self._merged_steps[fragment].get((slot.name, number), 0)
                    done = max(done, life.merged_steps[fragment])
                    settled += done - life.discarded_steps[fragment]
                    given_up += per_step * life.discarded_steps[fragment]
                    lost[LEFT if life.left else CRASH] += per_step * (life.steps - done)
                if (learner := slot.learner) is not None:
                    done, given = (
                        each[fragment] for each in (learner.merged_steps, learner.discarded_steps)
                    )
                    if mark is not None and mark.incarnation == len(slot.past) + 1:
                        done = max(done, mark.step)  # merged, and this peer does not know it yet
                    settled += done - given
                    given_up += per_step * given
                    pending += per_step * (learner.trainee.step - done)
                merged += weight * held
                apart += weight * max(0, settled * step_tokens - held)
                excess += weight * max(0, held - settled * step_tokens)
        return Fate(
            processed=float(sum(slot.steps for slot in slots) * step_tokens),
            merged=merged,
            pending=pending,
            discarded={"given up": given_up, **lost, APART: apart},
            excess=excess,
        )

    def _standing_maps(self, alive: Iterable[Peer]) -> list[MergedMap]:
        """Union of the living peers' merged maps, for each fragment."""
        united = [MergedMap() for _ in self._sizes]
        seen: list[set[bytes]] = [set() for _ in self._sizes]
        for peer in alive:
            for state in peer.averager.states:
                if state is None or state.lineage in seen[state.fragment]:
                    continue
                seen[state.fragment].add(state.lineage)
                united[state.fragment] = united[state.fragment].united(state.merged)
        return united
