"""A whole swarm in virtual time: real rounds, real numbers, one thread, one seed.

``run(experiment, seed)`` is all there is to call. The machines, grouping, codecs, merge rules,
outer step and replay are those of a live peer; ``averaging.simulated.node`` carries out what they
decide. Simulated are the network, time, membership and the learners' training
(``peer.lab.simulate.problems.problem``).

What is simpler than in a live peer: a learner adopts at once instead of at its next step; a
newcomer fetches all fragments before it takes part in any round; signatures are hashes.
"""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import blake3
import msgspec
import numpy as np

from averaging.history.lineage import MergedMap
from averaging.history.standing import Standing
from averaging.history.state import FragmentState
from averaging.messages import Compare
from averaging.numbers.arithmetic import encoded_size
from averaging.numbers.arrays import Float32s
from averaging.numbers.codec import codec_named, codec_names
from averaging.numbers.merge import rule_named
from averaging.round.effects import Apply, Note
from averaging.round.machine import FragmentRounds
from averaging.rules.grouping import grouping_named
from averaging.simulated.node import REQUEST_BYTES, FragmentNode, Watch
from averaging.simulated.wires import MARK_BYTES, Wires
from dht.identity import PeerId
from dht.memory.network import EventHeap, SimulatedNetwork, Weather
from peer.lab.simulate.problems.problem import (
    LocalTraining,
    Places,
    Problem,
    Quadratic,
    layout_of,
    problem_named,
)
from peer.lab.simulate.swarm.experiment import BadExperiment, Event, Experiment
from peer.lab.simulate.swarm.learner import Seat, Trainee
from peer.lab.simulate.swarm.membership import Membership, Seen, Table
from peer.lab.simulate.swarm.peer import Pace, SimulatedPeer

TIME_FACTOR = 3.0
"""An experiment ends after so many times the time that its tokens take if nobody waits."""
REPLAY_BYTES_MAX = 64 << 20
SITE_LATENCY_S = 0.0005
GARBAGE_MIN = 1_000_000
"""New objects before garbage is looked for: more than rounds under way have. Those go anyway."""
SHOWS_EVERY_S = 1.0
"""As ``peer.agent.station`` does."""

_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class Point:
    """How the swarm did at one moment."""

    time_s: float
    processed_tokens: float
    merged_tokens: float
    bytes_sent: int
    loss: float
    """Held-out loss of the mean of all peers' slow weights."""
    peer_loss: float
    """Mean held-out loss of some peers' own slow weights."""
    dispersion: float
    """Rms distance of a peer's slow weights from their mean, over the norm of the mean."""
    live: int
    lineages: float
    """Distinct states of a fragment, on average."""
    version: float
    """Mean version of all peers and fragments."""


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """A round that somebody finished."""

    time_s: float
    fragment: int
    version: int
    kind: str
    members: int
    contributors: int
    live: int
    """Peers that train, at that moment, in the whole swarm."""
    staleness_mean: float
    leader: str


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of all tokens that were processed: the size-weighted mean of the fragments."""

    processed: float
    merged: float
    pending: float
    discarded: dict[str, float]


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one simulated swarm."""

    experiment: Experiment
    seed: int
    points: list[Point]
    rounds: list[RoundRecord]
    fate: Fate
    staleness: dict[int, int]
    """How many contributions began so many versions before the one they were merged into."""
    goodput: float
    """Tokens processed, over what all peers would have if none was ever away or waited."""
    blocked_share: float
    """Of the time in which peers were there, how much their learners waited."""
    fetched_bytes: int
    """For catching up and joining."""
    bytes_sent: int
    duration_s: float
    events: int
    notes: dict[str, int]
    """How often each transition of a round happened."""
    trace: str
    """A digest of everything that happened, and of the final bits."""

    @property
    def final(self) -> Point:
        return self.points[-1]

    def loss_at(self, merged_tokens: float) -> float:
        """Of the mean model, interpolated: to compare runs at equal merged tokens."""
        tokens = [point.merged_tokens for point in self.points]
        return float(np.interp(merged_tokens, tokens, [point.loss for point in self.points]))


def problem_of(experiment: Experiment) -> Problem:
    """The problem that an experiment names, at the size it wants."""
    choice = experiment.problem
    try:
        problem = problem_named(choice.name)
    except ValueError as error:
        raise BadExperiment(f"problem.{error}") from error
    changes: dict[str, Any] = {}
    if choice.size is not None:
        changes["tensors" if isinstance(problem, Quadratic) else "width"] = choice.size
    if choice.learning_rate is not None:
        changes["learning_rate"] = choice.learning_rate
    changed: Problem = replace(problem, **changes) if changes else problem  # type: ignore[type-var]
    return changed


def run(
    experiment: Experiment,
    seed: int = 0,
    *,
    problem: Problem | None = None,
    progress: Callable[[float], None] = lambda share: None,
    on_event: Callable[[dict[str, Any]], None] | None = None,
) -> Result:
    """Simulate it. Same experiment and seed, same result, to the last bit.

    ``problem``: instead of the one that the experiment names. ``on_event`` gets a record of every
    round and accident, for an event log.
    """
    return Swarm(experiment, seed, problem=problem, on_event=on_event).run(progress)


@dataclass(slots=True)
class _Life:
    """What is left of an incarnation that crashed."""

    steps: int
    merged_steps: list[int]
    discarded_steps: list[int]


@dataclass(slots=True)
class _Slot:
    """One peer, over all its incarnations."""

    number: int
    name: PeerId
    pace: Pace
    seen: Seen
    training: LocalTraining
    side: int = 0
    lives: int = 0
    peer: SimulatedPeer | None = None
    past: list[_Life] = field(default_factory=list)
    saved: list[FragmentState] | None = None
    blocked_s: float = 0.0
    up_s: float = 0.0


class Swarm(Watch):
    """The swarm while it runs. ``run`` is the way to use it; tests look inside."""

    def __init__(
        self,
        experiment: Experiment,
        seed: int = 0,
        *,
        problem: Problem | None = None,
        on_event: Callable[[dict[str, Any]], None] | None = None,
        begins_at: Callable[[int], Float32s] | None = None,
    ) -> None:
        """``begins_at(number)``: a peer's own first values, instead of the same for everybody."""
        self.experiment = experiment
        self.seed = seed
        self.problem = problem or problem_of(experiment)
        self.layout = layout_of(self.problem, experiment.outer.fragments)
        self.places = Places(self.layout, self.problem.specs)
        _check_names(experiment)
        self.policy = experiment.policy()
        self.heap = EventHeap()
        network = experiment.network
        weather = Weather(
            latency_s=network.latency_s,
            jitter_s=network.jitter_s,
            bandwidth_bytes_s=network.mbit_s[1] * 125e3,
            connection_loss=network.loss,
            silence_s=network.silence_s,
        )
        self.network = SimulatedNetwork(self.heap, weather, seed)
        self.wires: Wires[Watch] = Wires(
            self.heap, self.network, self, bulk_factor=network.bulk_factor, shortcuts=True
        )
        self.membership = Membership(self.heap, experiment.peers.views, self._present)
        self.topic = self.layout.hash[:16]
        self.points: list[Point] = []
        self.rounds: list[RoundRecord] = []
        self.staleness: Counter[int] = Counter()
        self.notes: Counter[str] = Counter()
        self.trace = blake3.blake3()
        self._on_event = on_event
        self._rng = np.random.default_rng([seed, 1])
        self._seen_rounds: set[bytes] = set()
        self._best: list[dict[PeerId, int]] = [{} for _ in self.layout.fragments]
        """Tokens ever merged of each peer, by fragment, in whatever lineage."""
        self._best_total = [0] * len(self.layout.fragments)
        self._covered: list[dict[tuple[PeerId, int], int]] = [{} for _ in self.layout.fragments]
        """By peer and incarnation: its steps that were ever merged, by fragment."""
        self._fetched_bytes = 0
        self._sizes = np.array([fragment.size for fragment in self.layout.fragments], np.float64)
        self._begins_at = begins_at
        self.origin = self._founded(self.problem.first_values(seed))
        self._live = 0
        """Peers that are there now."""
        self._sites: list[list[PeerId]] = []
        self.slots = [self._slot(number) for number in range(experiment.peers.count)]
        self._by_name = {slot.name: slot for slot in self.slots}
        self.tokens_end = self._tokens_end()
        if experiment.end.together:
            self.heap.call_in(SHOWS_EVERY_S, self._show_standing)
            self.policy = replace(self.policy, tokens_end=self.tokens_end)
        self._begin()

    def _founded(self, values: Float32s) -> list[FragmentState]:
        return [
            FragmentState.founded(self.layout.hash, index, self.places.read(index, values))
            for index in range(len(self.layout.fragments))
        ]

    def _slot(self, number: int) -> _Slot:
        settings, network = self.experiment.peers, self.experiment.network
        width = len(str(settings.count - 1))
        name = PeerId(f"peer-{number:0{width}}")
        factor = settings.speeds[number % len(settings.speeds)]
        if settings.speed_spread:
            factor *= math.exp(settings.speed_spread * self._rng.standard_normal())
        low, high = (math.log(mbit) for mbit in network.mbit_s)
        line = math.exp(low + (high - low) * self._rng.random()) * 125e3
        if network.site_size > 1:
            self._share(name, number, line)
            line = network.site_mbit_s * 125e3
        self.network.set_link(name, up_bytes_s=line, down_bytes_s=line)
        outer = self.experiment.outer
        pace = Pace(
            step_time_s=settings.step_time_s * factor,
            jitter=settings.step_jitter,
            waits_after_steps=outer.overlap_steps if outer.waits else None,
            exchanges_max=settings.exchanges_max,
            misses=settings.misses,
            miss_steps=outer.steps_per_cycle // 2,
        )
        seen = Seen(name, pace.step_time_s, site=self._site(number))
        return _Slot(number, name, pace, seen, self.problem.learner([number], seed=self.seed))

    def _share(self, name: PeerId, number: int, bytes_s: float) -> None:
        """Put a peer to the others of its place; the first one brings the line."""
        size = self.experiment.network.site_size
        if number % size == 0:
            self._sites.append([])
        self._sites[-1].append(name)
        if len(self._sites[-1]) == min(size, self.experiment.peers.count - number // size * size):
            self.network.share_line(
                self._sites[-1], up_bytes_s=bytes_s, down_bytes_s=bytes_s, latency_s=SITE_LATENCY_S
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

    # What happens to peers

    def _begin(self) -> None:
        experiment = self.experiment
        late: set[int] = set()
        for event in experiment.event:
            if event.kind == "join":
                for slot in self._meant(event):
                    late.add(slot.number)
                    self.heap.call_at(event.at_s, self._join, slot)
            else:
                self.heap.call_at(event.at_s, self._happens, event)
        founders = [slot for slot in self.slots if slot.number not in late]
        within_s = experiment.peers.starts_within_s
        at_once = founders if not within_s else founders[:1]
        self.membership.founded([slot.seen for slot in at_once])
        for slot in at_once:
            # Everybody makes the first state of the run's seed, and so has it.
            own = self._begins_at
            self._start(slot, self.origin if own is None else self._founded(own(slot.number)))
        for slot in founders[len(at_once) :]:
            self.heap.call_at(within_s * self._rng.random(), self._join, slot)
        if experiment.churn.share_per_cycle:
            self.heap.call_in(self._until_churn(), self._churn)
        self.heap.call_at(0.0, self._measure)

    def _meant(self, event: Event) -> list[_Slot]:
        if isinstance(event.peers, list):
            unknown = [number for number in event.peers if not 0 <= number < len(self.slots)]
            if unknown:
                raise BadExperiment(
                    f"event.peers names peer {unknown[0]}; there are 0 to {len(self.slots) - 1}"
                )
            return [self.slots[number] for number in event.peers]
        return self.slots[: max(1, round(event.peers * len(self.slots)))]

    def _happens(self, event: Event) -> None:
        meant = self._meant(event)
        self.record(event.kind, peers=len(meant), lasts_s=event.lasts_s)
        if event.kind == "crash":
            for slot in meant:
                self.crash(slot, event.lasts_s)
        elif event.kind == "pause":
            for slot in meant:
                self.pause(slot)
            self.heap.call_in(event.lasts_s, self._wake, meant)
        elif event.kind == "partition":
            self.partition(meant)
            if event.lasts_s:
                self.heap.call_in(event.lasts_s, self.heal)
        if event.every_s:
            self.heap.call_in(event.every_s, self._happens, event)

    def _until_churn(self) -> float:
        """To the next peer that leaves: their number makes up the share in a cycle."""
        churn = self.experiment.churn
        mean_s = self.experiment.cycle_s / (churn.share_per_cycle * len(self.slots))
        return float(self._rng.exponential(mean_s))

    def _churn(self) -> None:
        there = [slot for slot in self.slots if slot.peer is not None and slot.peer.alive]
        if len(there) > 2:
            slot = there[int(self._rng.integers(len(there)))]
            away_s = float(self._rng.exponential(self.experiment.churn.away_s))
            self.crash(slot, away_s)
        self.heap.call_in(self._until_churn(), self._churn)

    def crash(self, slot: _Slot, away_s: float) -> None:
        peer = slot.peer
        if peer is None or not peer.alive:
            return
        self.record("crash", peer=slot.name)
        peer.crash()
        self._live -= 1
        slot.saved = peer.states
        slot.past.append(
            _Life(
                peer.trainee.step,
                [seat.own.merged_step for seat in peer.seats],
                [seat.own.discarded_steps for seat in peer.seats],
            )
        )
        slot.blocked_s += peer.blocked_s
        slot.up_s += peer.up_s()
        self.network.crash(slot.name)
        self.heap.call_in(self.network.weather.silence_s, self.wires.streams_to, slot.name)
        if self.experiment.churn.returns != "never" and away_s:
            self.heap.call_in(away_s, self._return, slot)

    def _return(self, slot: _Slot) -> None:
        self.network.restart(slot.name)
        self.record("return", peer=slot.name)
        if self.experiment.churn.returns == "checkpoint" and slot.saved:
            self._start(slot, slot.saved)
        else:
            self._join(slot)

    def pause(self, slot: _Slot) -> None:
        if slot.peer is not None:
            slot.peer.pause()
        self.network.pause(slot.name)

    def _wake(self, slots: list[_Slot]) -> None:
        for slot in slots:
            self.network.resume(slot.name)
            if slot.peer is not None:
                slot.peer.resume()

    def partition(self, apart: list[_Slot]) -> None:
        """Cut these off from the others."""
        self.network.partition([[slot.name for slot in apart]])
        self.membership.part([1])
        self._take_sides({slot.number for slot in apart})

    def heal(self) -> None:
        self.record("heal")
        self.network.heal()
        self.membership.heal()
        self._take_sides(set())

    def _take_sides(self, apart: set[int]) -> None:
        for slot in self.slots:
            slot.side = int(slot.number in apart)
            if slot.peer is not None:
                view = self.membership.view(slot.number, slot.side)
                for node in slot.peer.nodes:
                    node.machine.around.view = node.machine.around.crowd = view

    def _present(self, side: int) -> list[Seen]:
        return [
            slot.seen
            for slot in self.slots
            if slot.side == side
            and slot.peer is not None
            and slot.peer.alive
            and not self.network.is_paused(slot.name)
        ]

    # Beginning

    def _join(self, slot: _Slot) -> None:
        """A newcomer with nothing: fetch every fragment from somebody, then begin."""
        life = slot.lives
        found: dict[int, FragmentState] = {}

        def ask(fragment: int) -> None:
            if slot.lives != life or fragment in found:
                return
            self.heap.call_in(self.policy.catch_up_s / 10, ask, fragment)
            source = self._source(slot)
            if source is None:
                return
            self.network.transfer(
                slot.name, source, REQUEST_BYTES, lambda: asked(fragment, source), lambda: None
            )

        def asked(fragment: int, source: PeerId) -> None:
            node = self.wires.node(source, fragment)
            if node is None or node.state is None:
                return
            state = node.state
            size = state.theta.nbytes + state.momentum.nbytes + MARK_BYTES * len(state.merged)
            self._fetched_bytes += size
            self.network.transfer(
                source, slot.name, size, lambda: arrived(fragment, state), lambda: None
            )

        def arrived(fragment: int, state: FragmentState) -> None:
            if slot.lives != life:
                return
            found[fragment] = state
            if len(found) == len(self.layout.fragments):
                self._start(slot, [found[index] for index in range(len(found))])

        for fragment in range(len(self.layout.fragments)):
            ask(fragment)

    def _source(self, slot: _Slot) -> PeerId | None:
        there = [
            other.name
            for other in self.slots
            if other is not slot
            and other.peer is not None
            and other.peer.alive
            and other.side == slot.side
            and not self.network.is_paused(other.name)
        ]
        return there[int(self._rng.integers(len(there)))] if there else None

    def _start(self, slot: _Slot, states: list[FragmentState]) -> None:
        slot.lives += 1
        trainee = Trainee(
            slot.training,
            self.places,
            step_tokens=self.problem.step_tokens,
            rate=self._rate,
        )
        for state in states:
            self.places.write(state.fragment, slot.training.values, state.theta)
        peer = SimulatedPeer(
            slot.name,
            slot.number,
            slot.lives,
            heap=self.heap,
            network=self.network,
            trainee=trainee,
            pace=slot.pace,
            rng=np.random.default_rng([self.seed, 2, slot.number, slot.lives]),
        )
        view = self.membership.view(slot.number, slot.side)
        outer = self.experiment.outer
        for state in states:
            # Each has momentum of its own: the outer step moves it in place.
            own = replace(state, momentum=state.momentum.copy())
            seat = Seat(
                trainee,
                own,
                rule=outer.adoption,
                alpha=outer.blend_alpha,
                missed_kept={"keep": 1.0, "damp": 0.5, "drop": 0.0}[outer.missed],
            )
            machine = self._machine(slot, own, view)
            node = FragmentNode(
                peer,
                self.wires,
                self.layout.fragments[state.fragment],
                machine,
                own,
                seat,
                replay_bytes_max=REPLAY_BYTES_MAX,
            )
            peer.nodes.append(node)
            peer.seats.append(seat)
        slot.peer = peer
        self._live += 1
        self.record("start", peer=slot.name)
        peer.begin()

    def _machine(self, slot: _Slot, state: FragmentState, view: Table) -> FragmentRounds:
        fragment = self.layout.fragments[state.fragment]
        name = slot.name
        machine = FragmentRounds(
            fragment=fragment.index,
            me=name,
            incarnation=slot.lives,
            topic=self.topic,
            policy=self.policy,
            view=view,
            standing=Standing.of(state),
            sign=lambda data: _signature(name, data),
            verify=lambda peer, data, signature: _signature(peer, data) == signature,
            encoded_bytes=lambda codec: encoded_size(codec, fragment.unit_sizes),
            codecs=codec_names(),
            founder=slot.number == 0,
            site=slot.seen.site,
            now=self.heap.now,
        )
        machine.around.crowd = view
        if self.heap.now == 0.0:
            machine.around.started_at = -1e6  # has been here for long
        return machine

    def _site(self, number: int) -> str | None:
        size = self.experiment.network.site_size
        if size == 1 or not self.experiment.rounds.by_site:
            return None
        return f"site-{number // size}"

    def _rate(self) -> float:
        """The share of the peak learning rate, from the tokens so far."""
        return self.experiment.problem.rate_at(self._tokens_done / self.tokens_end)

    # Watching

    def record(self, event: str, **fields: Any) -> None:
        """An accident: into the trace and the event log."""
        self.trace.update(f"{self.heap.now!r} {event} {fields}\n".encode())
        if self._on_event is not None:
            self._on_event({"time_s": self.heap.now, "event": event, **fields})

    def noted(self, node: FragmentNode, note: Note) -> None:
        self.notes[note.event] += 1
        what = self.heap.now, node.name, node.fragment.index, note.event, note.fields
        self.trace.update(_encoder.encode(what))  # as text it takes five times as long

    def merged(self, node: FragmentNode, after: FragmentState, apply: Apply) -> None:
        if apply.round in self._seen_rounds:
            return
        self._seen_rounds.add(apply.round)
        commit = apply.commit
        entries = [commit.members[index] for index in apply.seal]
        fragment = node.fragment.index
        best = self._best[fragment]
        covered = self._covered[fragment]
        for entry in entries:
            # Not what ``after.merged`` says: on a lineage of its own it lacks what others have.
            life = (entry.peer, entry.incarnation)
            if commit.kind != "mix" and entry.mark > covered.get(life, 0):
                covered[life] = entry.mark
                best[entry.peer] = best.get(entry.peer, 0) + entry.tokens
                self._best_total[fragment] += entry.tokens
        if commit.kind != "mix":
            self.staleness.update(entry.staleness for entry in entries)
        record = RoundRecord(
            time_s=self.heap.now,
            fragment=fragment,
            version=commit.version,
            kind=commit.kind,
            members=len(commit.members),
            contributors=len(entries),
            live=self._live,
            staleness_mean=sum(entry.staleness for entry in entries) / max(1, len(entries)),
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
    def merged_tokens(self) -> float:
        """Of all peers, in whatever lineage: the size-weighted mean of the fragments."""
        return float(np.dot(self._best_total, self._sizes) / self._sizes.sum())

    @property
    def _tokens_done(self) -> float:
        """Of those that the end counts."""
        processed = self.experiment.end.counts == "processed"
        return self.processed_tokens if processed else self.merged_tokens

    @property
    def processed_tokens(self) -> float:
        steps = sum(
            sum(life.steps for life in slot.past)
            + (slot.peer.trainee.step if slot.peer is not None and slot.peer.alive else 0)
            for slot in self.slots
        )
        return float(steps * self.problem.step_tokens)

    @property
    def alive(self) -> list[SimulatedPeer]:
        return [slot.peer for slot in self.slots if slot.peer is not None and slot.peer.alive]

    def _measure(self) -> None:
        self.points.append(self.look())
        every_s = self.experiment.measure.every_cycles * self.experiment.cycle_s
        self.heap.call_in(every_s, self._measure)

    def look(self) -> Point:
        """How it stands now."""
        peers = self.alive
        for peer in peers:
            peer.now()
        thetas = [[state.theta for state in peer.states] for peer in peers]
        mean, dispersion = spread(thetas)
        sample = thetas[:: max(1, len(thetas) // max(1, self.experiment.measure.peers_max))]
        sample = sample[: self.experiment.measure.peers_max]
        loss = self.problem.evaluate(self.places.join(mean))
        if dispersion == 0.0 or not sample:
            peer_loss = loss
        else:
            peer_loss = float(
                np.mean([self.problem.evaluate(self.places.join(theta)) for theta in sample])
            )
        lineages = [len({peer.states[i].lineage for peer in peers}) for i in range(len(mean))]
        versions = [state.version for peer in peers for state in peer.states]
        return Point(
            time_s=self.heap.now,
            processed_tokens=self.processed_tokens,
            merged_tokens=self.merged_tokens,
            bytes_sent=self.network.bytes_sent,
            loss=loss,
            peer_loss=peer_loss,
            dispersion=dispersion,
            live=len(peers),
            lineages=float(np.mean(lineages)),
            version=float(np.mean(versions)),
        )

    def fate(self) -> Fate:
        """Where every token is that was ever processed."""
        tokens = self.problem.step_tokens
        merged_now = self._merged_now()
        share = self._sizes / self._sizes.sum()
        merged = pending = given_up = lost = apart = 0.0
        for fragment, weight in enumerate(share):
            best, now = self._best[fragment], merged_now[fragment]
            for slot in self.slots:
                mine = best.get(slot.name, 0)
                mark = now.get(slot.name)
                held = mark.tokens if mark is not None else 0
                merged += float(weight) * held
                apart += float(weight) * (mine - held)
                for number, life in enumerate(slot.past, start=1):
                    # A round may have ended well after its contributor's death.
                    done = self._covered[fragment].get((slot.name, number), 0)
                    done = max(done, life.merged_steps[fragment])
                    given_up += float(weight) * tokens * life.discarded_steps[fragment]
                    lost += float(weight) * tokens * (life.steps - done)
                if slot.peer is not None and slot.peer.alive:
                    seat = slot.peer.seats[fragment]
                    pending += float(weight) * tokens * seat.pending_steps
                    given_up += float(weight) * tokens * seat.own.discarded_steps
        return Fate(
            processed=self.processed_tokens,
            merged=merged,
            pending=pending,
            discarded={"given up": given_up, "crash": lost, "apart": apart},
        )

    def _merged_now(self) -> list[MergedMap]:
        united = [MergedMap() for _ in self.layout.fragments]
        done: list[set[bytes]] = [set() for _ in self.layout.fragments]
        for peer in self.alive:
            for state in peer.states:
                if state.lineage not in done[state.fragment]:
                    done[state.fragment].add(state.lineage)
                    united[state.fragment] = united[state.fragment].united(state.merged)
        return united

    # Running

    @property
    def _is_over(self) -> bool:
        if self._tokens_done < self.tokens_end:
            return False
        return not self.experiment.end.together or self.is_agreed

    def _show_standing(self) -> None:
        """Whoever is at its end shows others where, as a live peer does while it lingers."""
        peers = self.alive
        for peer in peers:
            for node in peer.nodes:
                if node.machine.is_final and node.state is not None:
                    other = peers[int(self._rng.integers(len(peers)))]
                    head = Standing.of(node.state).head()
                    if other is not peer:
                        self.wires.send(node, other.name, Compare(node.fragment.index, head))
        self.heap.call_in(SHOWS_EVERY_S, self._show_standing)

    @property
    def is_agreed(self) -> bool:
        """Whether everybody stands on one final version of each fragment."""
        nodes = [node for peer in self.alive for node in peer.nodes]
        lineages = {(node.fragment.index, node.state.lineage) for node in nodes if node.state}
        final = all(node.machine.is_final for node in nodes)
        return final and len(lineages) == len(self.layout.fragments)

    def run(self, progress: Callable[[float], None] = lambda share: None) -> Result:
        end_s = self.time_end_s
        step_s = self.experiment.cycle_s / 4
        with _collecting_seldom():
            while not self._is_over and self.heap.now < end_s:
                self.heap.run(min(end_s, self.heap.now + step_s))
                progress(min(1.0, max(self._tokens_done / self.tokens_end, self.heap.now / end_s)))
        if self.points[-1].time_s < self.heap.now:
            self.points.append(self.look())
        return self._result()

    def _result(self) -> Result:
        for peer in self.alive:
            for state in peer.states:
                self.trace.update(state.digest())
        up_s = sum(slot.up_s + (p.up_s() if (p := _living(slot)) else 0.0) for slot in self.slots)
        blocked_s = sum(
            slot.blocked_s + (p.blocked_s if (p := _living(slot)) else 0.0) for slot in self.slots
        )
        possible = sum(self.heap.now / slot.pace.step_time_s for slot in self.slots)
        nodes = [node for peer in self.alive for node in peer.nodes]
        return Result(
            experiment=self.experiment,
            seed=self.seed,
            points=self.points,
            rounds=self.rounds,
            fate=self.fate(),
            staleness=dict(sorted(self.staleness.items())),
            goodput=self.processed_tokens / max(1.0, possible * self.problem.step_tokens),
            blocked_share=blocked_s / max(1e-9, up_s),
            fetched_bytes=self._fetched_bytes + sum(node.fetched_bytes for node in nodes),
            bytes_sent=self.network.bytes_sent,
            duration_s=self.heap.now,
            events=self.heap.events,
            notes=dict(sorted(self.notes.items())),
            trace=self.trace.hexdigest(),
        )


@contextmanager
def _collecting_seldom() -> Iterator[None]:
    """Next to nothing in a swarm is garbage in a cycle, and looking for it goes through all of a
    million objects again and again."""
    before = gc.get_threshold()
    gc.set_threshold(GARBAGE_MIN, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _check_names(experiment: Experiment) -> None:
    """Whether all that goes by name is registered. Raises ``BadExperiment``."""
    outer, mixing = experiment.outer, experiment.mixing
    checks: tuple[tuple[str, Callable[[str], object], str], ...] = (
        ("outer.merge", rule_named, outer.merge),
        ("outer.codec", codec_named, outer.codec),
        ("mixing.theta", codec_named, mixing.theta),
        ("mixing.momentum", codec_named, mixing.momentum),
        ("rounds.grouping", grouping_named, experiment.rounds.grouping),
    )
    for setting, check, name in checks:
        try:
            check(name)
        except ValueError as error:
            raise BadExperiment(f"{setting}: {error}") from error


def spread(thetas: list[list[Float32s]]) -> tuple[list[Float32s], float]:
    """The mean of several peers' fragments, and their dispersion about it."""
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


def _living(slot: _Slot) -> SimulatedPeer | None:
    return slot.peer if slot.peer is not None and slot.peer.alive else None


def _signature(peer: PeerId, data: bytes) -> bytes:
    """Stands for a signature: the machine only asks whether it holds."""
    return blake3.blake3(peer.encode() + b"/" + data).digest()
