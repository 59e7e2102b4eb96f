"""A whole swarm in virtual time: real rounds and real numbers, in one thread, from one seed.

``run(experiment, seed)`` is the entry point. Round machines, grouping, codecs, merge rules, outer
step and replay are those of a live peer; ``averaging.simulated.node`` carries out their effects.
Network, time, membership and the learners' training are simulated.

Simplifications compared with a live peer: a learner adopts a version at once instead of at its next
step; a newcomer fetches all fragments before it takes part in any round; signatures are hashes.
"""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import blake3
import msgspec
import numpy as np

from averaging.history.state import FragmentState
from averaging.numbers.arrays import Float32s
from averaging.round.interface.effects import Apply, Note
from averaging.simulated.node import FragmentNode, Watch
from averaging.simulated.wires import Wires
from dht.identity import PeerId
from dht.memory.event_heap import EventHeap
from dht.memory.network import SimulatedNetwork, Weather
from peer.rules.ledger import Fate
from peer.simulate.incidents import DateOfEnd, Incidents
from peer.simulate.lifecycle import Lifecycle
from peer.simulate.lines import BYTES_S_PER_MBIT
from peer.simulate.membership import Membership, Seen
from peer.simulate.names import check_names, optimizer_of, problem_of
from peer.simulate.outcome import Point, RoundRecord, SwarmResult, TokenBooks
from peer.simulate.peer import SimulatedPeer
from peer.simulate.problems.problem import Places, Problem, layout_of
from peer.simulate.settings import Swarm
from peer.simulate.slots import Environment, Slot, slots_of
from peer.simulate.spot_checking import SpotChecking

TIME_FACTOR = 3.0
"""Default time limit of an experiment, as a multiple of its duration without any waiting."""
GARBAGE_MIN = 1_000_000
"""Allocations between collections: more objects than rounds in progress hold."""

LINE_EVENTS = ("line_needs", "level")
"""Notes of round machines that the event log has."""

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
    return SimulatedSwarm(experiment, seed, on_event=on_event).run(progress)


class SimulatedSwarm(Watch):
    """A running simulation. Callers use ``run``; tests look inside."""

    def __init__(
        self,
        experiment: Swarm,
        seed: int = 0,
        *,
        problem: Problem | None = None,
        on_event: EventLog | None = None,
        begins_at: Callable[[int], Float32s] | None = None,
    ) -> None:
        """``problem`` replaces the one that the experiment names. ``begins_at(number)``: parameters
        of one peer at version 1, where it came to alone."""
        check_names(experiment)
        self.experiment = experiment
        self.seed = seed
        self.problem = problem or problem_of(experiment)
        self.layout = layout_of(self.problem, experiment.outer.fragments)
        self.places = Places(self.layout, self.problem.specs)
        self.heap = EventHeap()
        self.network = SimulatedNetwork(self.heap, weather_of(experiment), seed)
        self.wires = self._wires()
        self.slots: list[Slot] = []
        membership = Membership(self.heap, experiment.peers.views, self._present)
        rng = np.random.default_rng([seed, 1])
        self.slots += slots_of(experiment, self.problem, self.network, seed=seed, rng=rng)
        self.tokens_end = self._tokens_end()
        self.policy = experiment.policy()
        if experiment.end.together:
            self.policy = replace(self.policy, tokens_end=self.tokens_end)
        self.points: list[Point] = []
        self.rounds: list[RoundRecord] = []
        self.notes: Counter[str] = Counter()
        self.trace = blake3.blake3()
        self._on_event = on_event
        self._books = TokenBooks(self.layout)
        self._seen_rounds: set[bytes] = set()
        self.environment = Environment(
            experiment=experiment,
            seed=seed,
            problem=self.problem,
            layout=self.layout,
            places=self.places,
            policy=self.policy,
            heap=self.heap,
            network=self.network,
            wires=self.wires,
            membership=membership,
            slots=self.slots,
            rng=rng,
            record=self.record,
        )
        self._spot_checking: SpotChecking | None = None
        if experiment.rounds.spot_checks:
            self._spot_checking = SpotChecking(
                self.environment, per_cycle=experiment.rounds.spot_checks
            )
        self.lifecycle = Lifecycle(
            self.environment, rate=self._rate, spot_checking=self._spot_checking
        )
        if experiment.end.date_s is not None:
            DateOfEnd(self.environment, experiment.end.date_s)
        self._begin(begins_at)

    def _wires(self) -> Wires[Watch]:
        return Wires(
            self.heap,
            self.network,
            self,
            bulk_factor=self.experiment.weather.bulk_factor,
            shortcuts=True,
            norm_ratio_max=self.experiment.rounds.norm_max_ratio or math.inf,
        )

    def _tokens_end(self) -> int:
        end, outer = self.experiment.end, self.experiment.outer
        if end.tokens is not None:
            return end.tokens
        steps = sum(
            self.experiment.peers.step_time_s / slot.pace.step_time_s for slot in self.slots
        )
        return max(1, int(end.cycles * outer.steps_per_cycle * steps * self.problem.step_tokens))

    @property
    def time_end_s(self) -> float:
        if self.experiment.end.time_s is not None:
            return self.experiment.end.time_s
        per_s = sum(self.problem.step_tokens / slot.pace.step_time_s for slot in self.slots)
        return TIME_FACTOR * self.tokens_end / per_s

    def _begin(self, begins_at: Callable[[int], Float32s] | None) -> None:
        env = self.environment
        incidents = Incidents(env, self.lifecycle)
        founders = incidents.schedule_events()
        within_s = self.experiment.peers.starts_within_s
        at_once = founders if not within_s else founders[:1]
        env.membership.founded([slot.seen for slot in at_once])
        origin = env.founded(self.problem.first_values(self.seed))
        for slot in at_once:
            # The first state follows from the seed of the run, so every founder has it.
            own = origin
            if begins_at is not None:
                own = env.drifted(origin, begins_at(slot.number))
            self.lifecycle.start(slot, own)
        if begins_at is not None:
            self.lifecycle.sign_first_versions()
        for slot in founders[len(at_once) :]:
            self.heap.call_at(within_s * env.rng.random(), self.lifecycle.join, slot)
        incidents.schedule_churn()
        self.heap.call_at(0.0, self._measure)

    def _present(self, side: int) -> list[Seen]:
        return [
            slot.seen
            for slot in self.slots
            if slot.side == side
            and slot.living is not None
            and not self.network.is_paused(slot.name)
        ]

    def _rate(self) -> float:
        """Share of the peak learning rate, from the tokens so far."""
        return self.experiment.problem.rate_at(self._tokens_done / self.tokens_end)

    # Watching

    def record(self, event: str, **fields: Any) -> None:
        """Note an incident in the trace and in the event log."""
        self.trace.update(f"{self.heap.now!r} {event} {fields}\n".encode())
        if self._on_event is not None:
            self._on_event({"time_s": self.heap.now, "event": event, **fields})

    def noted(self, node: FragmentNode, note: Note) -> None:
        self.notes[note.event] += 1
        what = self.heap.now, node.name, node.fragment.index, note.event, note.fields
        self.trace.update(_encoder.encode(what))  # formatting it as text takes five times as long
        if self._on_event is not None and note.event in LINE_EVENTS:
            place = {"peer": node.name, "fragment": node.fragment.index}
            self._on_event(
                {"time_s": self.heap.now, "event": note.event, **place, **dict(note.fields)}
            )

    def uploaded(self, node: FragmentNode, round_id: bytes) -> None:
        if self._spot_checking is not None:
            self._spot_checking.uploaded(node, round_id)

    def fault_of(self, node: FragmentNode, sender: PeerId) -> str | None:
        checking = self._spot_checking
        return None if checking is None else checking.refuses(node.name, sender, "uploads")

    def merged(self, node: FragmentNode, after: FragmentState, apply: Apply) -> None:
        if self._spot_checking is not None:
            self._spot_checking.finished(node, apply)
        if apply.round in self._seen_rounds:
            return
        self._seen_rounds.add(apply.round)
        commit = apply.commit
        fragment = node.fragment.index
        entries = [commit.members[index] for index in apply.seal]
        self._books.enter(fragment, apply)
        record = RoundRecord(
            time_s=self.heap.now,
            fragment=fragment,
            version=commit.version,
            kind=commit.kind,
            members=len(commit.members),
            contributors=len(entries),
            live=self.lifecycle.live,
            leader=commit.leader,
        )
        self.rounds.append(record)
        if self._on_event is not None:
            self._on_event(
                {
                    "time_s": self.heap.now,
                    "event": "round",
                    "fragment": fragment,
                    "version": commit.version,
                    "kind": commit.kind,
                    "leader": commit.leader,
                    "members": [entry.peer for entry in commit.members],
                    "contributors": [entry.peer for entry in entries],
                    "weights": list(apply.weights),
                }
            )

    @property
    def processed_tokens(self) -> float:
        return float(sum(slot.steps for slot in self.slots) * self.problem.step_tokens)

    @property
    def _tokens_done(self) -> float:
        """Tokens of the kind that ``end.counts`` names."""
        processed = self.experiment.end.counts == "processed"
        return self.processed_tokens if processed else self._books.merged_tokens

    @property
    def alive(self) -> list[SimulatedPeer]:
        return self.environment.alive

    def _measure(self) -> None:
        self.points.append(self.look())
        every_s = self.experiment.measure.every_cycles * self.experiment.cycle_s
        self.heap.call_in(every_s, self._measure)

    def look(self) -> Point:
        """Measure the present state of the swarm."""
        peers = self.alive
        for peer in peers:
            peer.now()
        thetas = [[state.theta for state in peer.states] for peer in peers]
        mean, dispersion = spread(thetas)
        sample = thetas[:: max(1, len(thetas) // max(1, self.experiment.measure.peers_max))]
        sample = sample[: self.experiment.measure.peers_max]
        loss = self._loss(mean)
        one_loss = dispersion == 0.0 or not sample
        peer_loss = loss if one_loss else float(np.mean([self._loss(theta) for theta in sample]))
        lineages = [len({peer.states[i].lineage for peer in peers}) for i in range(len(mean))]
        versions = [state.version for peer in peers for state in peer.states]
        return Point(
            time_s=self.heap.now,
            processed_tokens=self.processed_tokens,
            merged_tokens=self._books.merged_tokens,
            bytes_sent=self.network.bytes_sent,
            loss=loss,
            peer_loss=peer_loss,
            dispersion=dispersion,
            live=len(peers),
            lineages=float(np.mean(lineages)),
            version=float(np.mean(versions)),
        )

    def fate(self) -> Fate:
        """The fate of all tokens that were processed so far."""
        return self._books.fate(self.slots, self.alive, step_tokens=self.problem.step_tokens)

    @property
    def _learners_loss(self) -> float:
        """The loss of the mean of all learners' parameters: after a last merge of all work."""
        if not self.alive:
            return math.nan
        values = [peer.trainee.values.astype(np.float64) for peer in self.alive]
        return self.problem.evaluate(np.mean(values, axis=0).astype(np.float32))

    def _loss(self, thetas: Sequence[Float32s]) -> float:
        return self.problem.evaluate(self.places.join(thetas))

    # Running

    @property
    def _is_over(self) -> bool:
        date_s = self.experiment.end.date_s
        if date_s is not None:
            return self.heap.now > date_s and self.is_agreed
        if self._tokens_done < self.tokens_end:
            return False
        return not self.experiment.end.together or self.is_agreed

    @property
    def is_agreed(self) -> bool:
        """True if all peers stand on one final version of each fragment."""
        nodes = [node for peer in self.alive for node in peer.nodes]
        lineages = {(node.fragment.index, node.state.lineage) for node in nodes if node.state}
        final = all(node.machine.ending.is_final(self.heap.now) for node in nodes)
        return final and len(lineages) == len(self.layout.fragments)

    def run(self, progress: Callable[[float], None] = lambda share: None) -> SwarmResult:
        """Run to the end of the experiment."""
        end_s = self.time_end_s
        step_s = self.experiment.cycle_s / 4
        with _collecting_seldom(), optimizer_of(self.experiment):
            while not self._is_over and self.heap.now < end_s:
                self.heap.run(min(end_s, self.heap.now + step_s))
                progress(min(1.0, max(self._tokens_done / self.tokens_end, self.heap.now / end_s)))
        if self.points[-1].time_s < self.heap.now:
            self.points.append(self.look())
        return self._result()

    def _result(self) -> SwarmResult:
        if self._spot_checking is not None:
            self.notes += self._spot_checking.counts
        for peer in self.alive:
            for state in peer.states:
                self.trace.update(state.digest())
        up_s = sum(slot.up_s for slot in self.slots)
        possible = sum(self.heap.now / slot.pace.step_time_s for slot in self.slots)
        fetched = sum(node.fetched_bytes for peer in self.alive for node in peer.nodes)
        return SwarmResult(
            experiment=self.experiment,
            seed=self.seed,
            points=self.points,
            rounds=self.rounds,
            fate=self.fate(),
            staleness=dict(sorted(self._books.staleness.items())),
            goodput=self.processed_tokens / max(1.0, possible * self.problem.step_tokens),
            blocked_share=sum(slot.blocked_s for slot in self.slots) / max(1e-9, up_s),
            fetched_bytes=self.lifecycle.joining_bytes + fetched,
            bytes_sent=self.network.bytes_sent,
            duration_s=self.heap.now,
            events=self.heap.events,
            notes=dict(sorted(self.notes.items())),
            trace=self.trace.hexdigest(),
            learners_loss=self._learners_loss,
        )


def weather_of(experiment: Swarm) -> Weather:
    network = experiment.weather
    return Weather(
        latency_s=network.latency_s,
        jitter_s=network.jitter_s,
        bandwidth_bytes_s=network.mbit_s[1] * BYTES_S_PER_MBIT,
        connection_loss=network.loss,
        silence_s=network.silence_s,
    )


@contextmanager
def _collecting_seldom() -> Iterator[None]:
    """Collect garbage rarely: a swarm has hardly any cycles, and each collection visits all of its
    million objects."""
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
