"""A whole swarm in virtual time: live averagers and real numbers, in one thread, from one seed.

``run(experiment, seed)`` is the entry point. Peers are those of ``averaging.virtual``: rounds,
messages, streams, fetches and checks are the code of a live peer. Simulated are the network, time,
the membership and the learners' training.

Simplifications compared with a live peer: a learner adopts a version at once instead of at its next
step; signatures are hashes; work of processors takes no time.
"""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import blake3
import msgspec
import numpy as np

from averaging.guard.door import REFUSED
from averaging.history.parent_maps import ParentMap
from averaging.history.state import FragmentState
from averaging.live.states.fetch_server import fetch_protocol
from averaging.numbers.arrays import Float32s
from averaging.round.interface.effects import Apply, Effect, Merge, Note
from averaging.virtual.swarm import Peer
from dht.identity import PeerId
from peer.rules.ledger import Fate
from peer.simulate.incidents import DateOfEnd, Incidents
from peer.simulate.lifecycle import Lives, Overseer, states_of
from peer.simulate.names import check_names, optimizer_of, problem_of
from peer.simulate.outcome import Point, RoundRecord, SwarmResult, TokenBooks
from peer.simulate.problems.problem import Problem, layout_of
from peer.simulate.roles import merged_falsely
from peer.simulate.settings import Swarm

TIME_FACTOR = 3.0
"""Default time limit of an experiment, as a multiple of its duration without any waiting."""
GARBAGE_MIN = 4_000_000
"""Allocations between collections: more objects than rounds in progress hold."""

LINE_EVENTS = ("line_needs", "level")
"""Notes of round machines that the event log has."""
CHECKED = {"spot_check_passed": "passed", "spot_check_failed": "failed"}

_encoder = msgspec.msgpack.Encoder()

EventLog = Callable[[dict[str, Any]], None]


def run(
    experiment: Swarm,
    seed: int = 0,
    *,
    progress: Callable[[float], None] = lambda share: None,
    on_event: EventLog | None = None,
) -> SwarmResult:
    """Simulate a swarm. The same experiment and seed give the same result, to the last bit.

    ``on_event`` receives a record of every round, incident and change of a level.
    """
    with (
        _collecting_seldom(),
        SimulatedSwarm(experiment, seed, on_event=on_event) as swarm,
    ):
        return swarm.run(progress)


class SimulatedSwarm(Overseer):
    """A running simulation. Callers use ``run``; tests look inside, and close it."""

    def __init__(
        self,
        experiment: Swarm,
        seed: int = 0,
        *,
        problem: Problem | None = None,
        on_event: EventLog | None = None,
    ) -> None:
        """``problem`` replaces the one that the experiment names."""
        check_names(experiment)
        self.experiment = experiment
        self.seed = seed
        self.problem = problem or problem_of(experiment)
        self.layout = layout_of(self.problem, experiment.outer.fragments)
        self.points: list[Point] = []
        self.rounds: list[RoundRecord] = []
        self.notes: Counter[str] = Counter()
        self.trace = blake3.blake3()
        self._on_event = on_event
        self._books = TokenBooks(self.layout)
        self._seen_rounds: set[bytes] = set()
        self.lives = Lives(experiment, self.problem, seed=seed, overseer=self)
        Incidents(self.lives)
        if experiment.end.date_s is not None:
            DateOfEnd(self.lives, experiment.end.date_s)
        self.lives.call_at(0.0, self._measure)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.lives.close()

    @property
    def time_end_s(self) -> float:
        if self.experiment.end.time_s is not None:
            return self.experiment.end.time_s
        slots = self.lives.slots
        per_s = sum(self.problem.step_tokens / slot.pace.step_time_s for slot in slots)
        return TIME_FACTOR * self.lives.tokens_end / per_s

    def rate(self) -> float:
        """Share of the peak learning rate, from the tokens so far."""
        return self.experiment.problem.rate_at(self._tokens_done / self.lives.tokens_end)

    # Watching

    def record(self, event: str, **fields: Any) -> None:
        """Note an incident in the trace and in the event log."""
        now = self.lives.now
        self.trace.update(f"{now!r} {event} {fields}\n".encode())
        if self._on_event is not None:
            self._on_event({"time_s": now, "event": event, **fields})

    def label(self, peer: PeerId) -> str:
        """The name of a peer in logs."""
        return self.lives.slot_of[peer].label

    def noted(self, peer: Peer, fragment: int, note: Note) -> None:
        self.notes[note.event] += 1
        now = self.lives.now
        what = now, peer.name, fragment, note.event, note.fields
        self.trace.update(_encoder.encode(what))  # formatting it as text takes five times as long
        if self._on_event is not None and note.event in LINE_EVENTS:
            place = {"peer": self.label(peer.name), "fragment": fragment}
            self._on_event({"time_s": now, "event": note.event, **place, **dict(note.fields)})

    def effect(self, peer: Peer, fragment: int, effect: Effect) -> Effect | None:
        falsely = self.lives.slot_of[peer.name].merges_falsely
        return merged_falsely(effect) if falsely and isinstance(effect, Merge) else effect

    def convicted(self, peer: Peer, guilty: PeerId, what: str) -> None:
        falsely = self.lives.slot_of[guilty].merges_falsely
        self.notes[f"{'false reducers' if falsely else 'honest'} convicted"] += 1

    def told(self, peer: Peer, event: str, fields: Mapping[str, Any]) -> None:
        about = self.lives.slot_of.get(fields.get("peer", ""))
        if about is None:
            return
        who = "liars" if about.lies else "honest"
        if event in CHECKED:
            self.notes[f"checks of {who}, {CHECKED[event]}"] += 1
        elif event == "refused" and fields["kind"] == "upload_refused":
            self.notes[f"uploads of {who} refused"] += fields["reason"] == REFUSED

    def applied(
        self,
        peer: Peer,
        apply: Apply,
        before: FragmentState,
        after: FragmentState,
        merged: memoryview,
        maps: Mapping[int, ParentMap],
    ) -> None:
        if apply.round in self._seen_rounds:
            return
        self._seen_rounds.add(apply.round)
        commit, fragment = apply.commit, before.fragment
        entries = [commit.members[index] for index in apply.seal]
        self._books.enter(fragment, apply)
        record = RoundRecord(
            time_s=self.lives.now,
            fragment=fragment,
            version=commit.version,
            kind=commit.kind,
            members=len(commit.members),
            contributors=len(entries),
            live=len(self.alive),
            leader=self.label(commit.leader),
        )
        self.rounds.append(record)
        if self._on_event is not None:
            self._on_event(
                {
                    "time_s": record.time_s,
                    "event": "round",
                    "fragment": fragment,
                    "version": commit.version,
                    "kind": commit.kind,
                    "leader": record.leader,
                    "members": [self.label(entry.peer) for entry in commit.members],
                    "contributors": [self.label(entry.peer) for entry in entries],
                    "weights": list(apply.weights),
                }
            )

    @property
    def processed_tokens(self) -> float:
        return float(sum(slot.steps for slot in self.lives.slots) * self.problem.step_tokens)

    @property
    def _tokens_done(self) -> float:
        """Tokens of the kind that ``end.counts`` names."""
        processed = self.experiment.end.counts == "processed"
        return self.processed_tokens if processed else self._books.merged_tokens

    @property
    def alive(self) -> list[Peer]:
        """The peers in training."""
        return self.lives.in_training

    def _measure(self) -> None:
        self.points.append(self.point_now())
        every_s = self.experiment.measure.every_cycles * self.experiment.cycle_s
        self.lives.call_in(every_s, self._measure)

    def point_now(self) -> Point:
        """Measure the present state of the swarm."""
        peers = self.alive
        states = [states_of(peer) for peer in peers]
        thetas = [[state.theta for state in each] for each in states]
        mean, dispersion = spread(thetas)
        sample = thetas[:: max(1, len(thetas) // max(1, self.experiment.measure.peers_max))]
        sample = sample[: self.experiment.measure.peers_max]
        loss = self._loss(mean)
        one_loss = dispersion == 0.0 or not sample
        peer_loss = loss if one_loss else float(np.mean([self._loss(theta) for theta in sample]))
        lineages = [len({state.lineage for state in each}) for each in zip(*states, strict=True)]
        versions = [state.version for each in states for state in each]
        return Point(
            time_s=self.lives.now,
            processed_tokens=self.processed_tokens,
            merged_tokens=self._books.merged_tokens,
            bytes_sent=self.lives.network.bytes_sent,
            loss=loss,
            peer_loss=peer_loss,
            dispersion=dispersion,
            live=len(peers),
            lineages=float(np.mean(lineages)),
            version=float(np.mean(versions)),
        )

    def fate(self) -> Fate:
        """The fate of all tokens that were processed so far."""
        step_tokens = self.problem.step_tokens
        return self._books.fate(self.lives.slots, self.alive, step_tokens=step_tokens)

    @property
    def _learners_loss(self) -> float:
        """The loss of the mean of all learners' parameters: after a last merge of all work."""
        learners = [each.learner for each in self.lives.slots if each.is_in_training]
        if not learners:
            return math.nan
        values = [one.trainee.values.astype(np.float64) for one in learners if one is not None]
        return self.problem.evaluate(np.mean(values, axis=0).astype(np.float32))

    def _loss(self, thetas: Sequence[Float32s]) -> float:
        return self.problem.evaluate(self.lives.places.join(thetas))

    # Running

    @property
    def _is_over(self) -> bool:
        date_s = self.experiment.end.date_s
        if date_s is not None:
            return self.lives.now > date_s and self.is_agreed
        if self._tokens_done < self.lives.tokens_end:
            return False
        return not self.experiment.end.together or self.is_agreed

    @property
    def is_agreed(self) -> bool:
        """True if all peers stand on one final version of each fragment."""
        states = [state for peer in self.alive for state in states_of(peer)]
        lineages = {(state.fragment, state.lineage) for state in states}
        count = len(self.layout.fragments)
        final = all(
            machine.ending.is_final(peer.now())
            for peer in self.alive
            for machine in peer.machines.values()
        )
        return final and len(lineages) == count

    def pass_time(self, until: float) -> None:
        """Let time pass up to a moment."""
        with optimizer_of(self.experiment):
            self.lives.run(until)

    def run(self, progress: Callable[[float], None] = lambda share: None) -> SwarmResult:
        """Run to the end of the experiment."""
        end_s = self.time_end_s
        step_s = self.experiment.cycle_s / 4
        while not self._is_over and self.lives.now < end_s:
            self.pass_time(min(end_s, self.lives.now + step_s))
            done = max(self._tokens_done / self.lives.tokens_end, self.lives.now / end_s)
            progress(min(1.0, done))
        if not self.points or self.points[-1].time_s < self.lives.now:
            self.points.append(self.point_now())
        return self._result()

    def _result(self) -> SwarmResult:
        lives = self.lives
        for peer in self.alive:
            for state in states_of(peer):
                self.trace.update(state.digest())
        up_s = sum(slot.up_s for slot in lives.slots)
        possible = sum(lives.now / slot.pace.step_time_s for slot in lives.slots)
        return SwarmResult(
            experiment=self.experiment,
            seed=self.seed,
            points=self.points,
            rounds=self.rounds,
            fate=self.fate(),
            staleness=dict(sorted(self._books.staleness.items())),
            goodput=self.processed_tokens / max(1.0, possible * self.problem.step_tokens),
            blocked_share=sum(slot.blocked_s for slot in lives.slots) / max(1e-9, up_s),
            fetched_bytes=lives.memory.sent_bytes[fetch_protocol(lives.of.run_id)],
            bytes_sent=lives.network.bytes_sent,
            duration_s=lives.now,
            events=lives.heap.events,
            notes=dict(sorted(self.notes.items())),
            trace=self.trace.hexdigest(),
            learners_loss=self._learners_loss,
        )


@contextmanager
def _collecting_seldom() -> Iterator[None]:
    """Collect garbage rarely: each collection visits all of a swarm's million objects."""
    before = gc.get_threshold()
    gc.set_threshold(GARBAGE_MIN, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def spread(thetas: list[list[Float32s]]) -> tuple[list[Float32s], float]:
    """The mean of several peers' fragments, and the peers' dispersion about it."""
    mean: list[Float32s] = []
    distance = norm = 0.0
    for parts in zip(*thetas, strict=True):
        if all(part is parts[0] for part in parts):
            middle = parts[0].astype(np.float64)
        else:
            middle = np.zeros(parts[0].size)
            for part in parts:
                middle += part
            middle /= len(parts)
            for part in parts:
                distance += float(np.square(part - middle).sum())
        norm += float(np.square(middle).sum())
        mean.append(middle.astype(np.float32))
    count = max(1, len(thetas))
    return mean, math.sqrt(distance / count) / max(1e-30, math.sqrt(norm))
