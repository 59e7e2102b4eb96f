"""Swarms of live averagers that train a handful of values, so that bits can be compared.

``Truth`` sees everything and checks the invariants after every event; nobody in the swarm sees
``Truth``. Weather and accidents are chosen by whoever makes the swarm: ``storm`` draws them from
the seed.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import blake3
import msgspec
import numpy as np

from averaging.guard.door import Defences
from averaging.guard.kept_proofs import Verdict
from averaging.guard.rules.proofs import Proof
from averaging.history.parent_maps import ParentMap
from averaging.history.standing import Standing, sealed_parents
from averaging.history.state import FragmentState, Pieces
from averaging.live.learner_port import Snapshot
from averaging.live.settings import RunTerms, topic_of
from averaging.messages import Commit, Message
from averaging.numbers.arrays import Float32s
from averaging.numbers.layout import Layout, TensorSpec
from averaging.round.contributing import Contribution
from averaging.round.interface.effects import Apply, Effect, Fold, GiveUp, Note
from averaging.round.interface.inputs import GiveWay, LineMeasured, UploadArrived
from averaging.round.interface.phase import Phase
from averaging.rules.due import DuePolicy
from averaging.rules.line_levels import Level
from averaging.rules.orders import RoundOrders
from averaging.rules.policy import ProbationPolicy, RoundPolicy
from averaging.rules.quorum import QuorumPolicy
from averaging.virtual import swarm as virtual
from averaging.virtual.keys import Keys
from averaging.virtual.swarm import Peer, PeerPlan, Watch
from dht.identity import PeerId
from dht.memory.network import CALM, Weather
from tests.averaging.virtual.membership import Everybody
from tests.averaging.virtual.truth import FRAGMENT, LAYOUT, Broken, Learner, Port, Truth, Work

POLICY = RoundPolicy(
    quorum=QuorumPolicy(wait_s=10.0, gamma=0.5, tau=3.0),
    due=DuePolicy(cycle_steps=10, fragments=1),
    codec="int8",
    snapshot_s=8.0,
    answer_s=3.0,
    upload_s=6.0,
    margin_s=2.0,
    resend_s=1.5,
    suspect_s=0.8,
    round_s=40.0,
    catch_up_s=15.0,
    doubt_s=60.0,
    alone_s=60.0,
    slow_link_bytes_s=1e9,
    stale_s=20.0,
)
"""Short cycles and deadlines: many rounds, and many ends of rounds, in little virtual time."""


OTHER_LAYOUT = Layout.build(
    [TensorSpec("e", (5, 3)), TensorSpec("f", (11,)), TensorSpec("g", (2, 2)), TensorSpec("h", ())],
    1,
)
"""Another model of the same size. Who has it is of another run, as a round with others shows."""


class ExactLearner(Port):
    """A ``Learner`` of ``truth`` as an averager sees it: one fragment, a safe point per step."""

    def __init__(self, swarm: Swarm, plan: PeerPlan, learner: Learner) -> None:
        super().__init__(step_time_s=plan.step_time_s, batch_tokens=learner.tokens_per_step)
        self.learner = self.parts[0] = learner
        self._swarm = swarm
        self._peer: Peer | None = None

    def begin(self, peer: Peer) -> None:
        self._peer = peer
        self._swarm.call_in(self.step_time_s, self._step)

    def end(self) -> None:
        self._peer = None

    def _step(self) -> None:
        peer = self._peer
        if peer is None:
            return
        if self.rests:
            self.stepped()
        elif not peer.sleeps:
            self.learner.train()
            self.step = self.learner.step
            self.stepped()
            peer.stepped()
            if self._swarm.gives_way(peer):
                peer.take(GiveWay("another fragment goes first"))
        self._swarm.call_in(self.step_time_s, self._step)

    async def snapshot(self, fragment: int, *, timeout_s: float) -> Snapshot | None:
        made, peer = await super().snapshot(fragment, timeout_s=timeout_s), self._peer
        if made is None or peer is None:
            return None
        begin = made.mark - made.steps
        work = Work(peer.name, peer.incarnation, begin, made.mark, made.tokens)
        self._swarm.truth.offered(work)
        return made

    def discard(self, fragment: int, state: FragmentState, *, reason: str) -> None:
        self._swarm.truth.coverage["discarded"] += 1
        super().discard(fragment, state, reason=reason)


class ProofsOnDisk:
    """A ``ProofShelf``: what a peer has proved outlives its crashes."""

    def __init__(self) -> None:
        self._verdicts: list[Verdict] = []
        self._proofs: dict[bytes, Proof] = {}

    def verdicts(self) -> list[Verdict]:
        return self._verdicts

    def sizes(self) -> Mapping[bytes, int]:
        return {name: len(proof.data) for name, proof in self._proofs.items()}

    def write(
        self, verdicts: Iterable[Verdict], kept: Set[bytes], new: Mapping[bytes, Proof]
    ) -> None:
        self._verdicts = list(verdicts)
        self._proofs = {name: each for name, each in self._proofs.items() if name in kept}
        self._proofs.update(new)

    def read(self, name: bytes) -> Proof | None:
        return self._proofs.get(name)


def orders_of(peer: Peer) -> RoundOrders:
    """The directive that a peer follows."""
    return peer.averager.terms.book.orders


def learner_of(peer: Peer) -> Learner | None:
    """The learner of a peer that trains."""
    port = peer.learner
    return port.learner if isinstance(port, ExactLearner) else None


class Swarm(virtual.Swarm, Watch):
    """A virtual swarm, and the truth about it."""

    def __init__(
        self,
        seed: int,
        plans: Sequence[PeerPlan],
        *,
        weather: Weather = CALM,
        policy: RoundPolicy = POLICY,
        slices: int = 3,
        heartbeat_s: float = 4.0,
        young: bool = False,
        sees: Callable[[Peer, Peer], bool] = lambda one, other: True,
        keys: Keys | None = None,
    ) -> None:
        """``slices``: of a contribution in f32; smaller ones have fewer."""
        self.rng = random.Random(seed)
        self.truth = Truth()
        self.crashed: dict[PeerId, dict[int, tuple[int, int]]] = {}
        """Steps and tokens per step of former lives."""
        self.let_go: Counter[PeerId] = Counter()
        self.presumed: set[PeerId] = set()
        """Peers that called work merged which may be merged on another side."""
        self.faulty: dict[PeerId, str] = {}
        self.liars: frozenset[PeerId] = frozenset()
        """Only these may be convicted."""
        self.trace = blake3.blake3()
        self.events: list[tuple[float, PeerId, Note]] = []
        self.keep_events = False
        self.guarded = True
        self.on_start: Callable[[Peer], None] | None = None
        self.on_note: Callable[[Peer, Note], None] | None = None
        self.on_apply: Callable[[Peer, Apply], None] | None = None
        self.on_effect: Callable[[Peer, Effect], Effect | None] | None = None
        self.on_send: Callable[[PeerId, PeerId, Message], bool] | None = None
        self.on_say: Callable[[Peer, PeerId, Message], Message | None] | None = None
        self.orders_issued: dict[bytes, RoundOrders] = {}
        """Directives of the run's owner, by their bytes."""
        self.orders_known: dict[PeerId, RoundOrders] = {}
        """The directive that each peer has on its disk."""
        self.other_runs: set[PeerId] = set()
        """Peers that take part in another run by mistake."""
        self.lines: dict[PeerId, float] = {}
        """Speeds of lines in bytes a second that peers are told; where none is, they measure."""
        self.uploads: list[tuple[Peer, bytes, Sequence[memoryview]]] = []
        """Own contributions, as they are in the memory of the peers."""
        self.shelves: defaultdict[PeerId, ProofsOnDisk] = defaultdict(ProofsOnDisk)
        self.gives_way: Callable[[Peer], bool] = lambda peer: False
        self._goals: dict[PeerId, Float32s] = {}
        self._fates: dict[PeerId, tuple[Standing, tuple[int, ...]]] = {}
        """The standing and the counts of a learner for which every token had a fate."""
        self._phases: dict[PeerId, tuple[Phase, float]] = {}
        theta = np.linspace(-1, 1, FRAGMENT.size, dtype=np.float32)
        self.origin = FragmentState.founded(
            LAYOUT.hash, 0, theta, Pieces.of(FRAGMENT, policy.mu).momentum
        )
        self.truth.founded(self.origin)
        encoded = sum(4 * size for size in FRAGMENT.unit_sizes)
        policy = replace(policy, slice_bytes_min=max(1, encoded // (4 * slices)))
        self.everybody = Everybody(beat_s=heartbeat_s, young=young, sees=sees)
        super().__init__(
            plans,
            virtual.VirtualRun(LAYOUT, policy, [self.origin]),
            learner=self._exact_learner,
            seed=seed,
            weather=weather,
            membership=self.everybody,
            watch=self,
            keys=keys,
        )
        open_swarms.append(self)

    def close(self) -> None:
        super().close()
        if self in open_swarms:
            open_swarms.remove(self)

    def _exact_learner(
        self,
        swarm: virtual.Swarm,
        name: PeerId,
        plan: PeerPlan,
        states: Sequence[FragmentState],
    ) -> ExactLearner:
        return ExactLearner(self, plan, Learner(states[0], self.goal(name), plan.tokens_per_step))

    def goal(self, name: PeerId) -> Float32s:
        if name not in self._goals:
            rng = np.random.default_rng([self.seed, len(self._goals)])
            self._goals[name] = rng.normal(size=FRAGMENT.size).astype(np.float32)
        return self._goals[name]

    # What happens to peers

    def _start(self, name: PeerId) -> Peer:
        peer = super()._start(name)
        if self.on_start is not None:
            self.on_start(peer)
        return peer

    def _crash(self, peer: Peer) -> None:
        super()._crash(peer)
        learner = learner_of(peer)
        if learner is not None:
            steps = learner.step, learner.tokens_per_step
            self.crashed.setdefault(peer.name, {})[peer.incarnation] = steps
            self.let_go[peer.name] += learner.discarded
        self._phases.pop(peer.name, None)
        self.record("crash", peer.name)

    def save(self, peer: Peer, state: FragmentState) -> None:
        """A checkpoint, not of every version: a restart may come back with an older one."""
        if peer.name not in self.disks or self.rng.random() < 0.7:
            super().save(peer, state)

    def terms_of(self, name: PeerId) -> RunTerms:
        terms = super().terms_of(name)
        if name in self.other_runs:
            terms = replace(terms, layout=OTHER_LAYOUT)
        terms.book.orders = self.orders_known.get(name, terms.book.orders)
        return terms

    def around(self, name: PeerId) -> Mapping[str, Any]:
        return {
            "take_directive": partial(self._take_directive, name),
            "line_max": lambda: self.lines.get(name, math.inf),
        }

    def defences(self, name: PeerId) -> Defences | None:
        return Defences(shelf=self.shelves[name]) if self.guarded else None

    def _take_directive(self, name: PeerId, directive: bytes) -> bool:
        theirs = self.orders_issued.get(directive)
        if theirs is not None and self.follow(name, theirs):
            return True
        mine = orders_of(self.nodes[name])
        return mine.stamp is None or theirs is mine

    def follow(self, name: PeerId, orders: RoundOrders) -> bool:
        """Have a peer follow a directive of the run's owner, if it is newer than the one known."""
        assert orders.stamp is not None
        peer = self.nodes[name]
        known = orders_of(peer).stamp
        if known is not None and known.number >= orders.stamp.number:
            return False
        self.orders_known[name] = orders
        self.within(lambda: peer.averager.follow(orders))
        return True

    def say(self, sender: PeerId, to: PeerId, message: Message) -> None:
        """Have a peer that is up say something, whatever its machine thinks of it."""
        peer = self.nodes.get(sender)
        if peer is not None and peer.alive and not peer.sleeps and to != sender:
            peer.send(to, message)

    def sign(self, peer: PeerId, data: bytes) -> bytes:
        return self.keys[peer].sign(data)

    @property
    def topic(self) -> bytes:
        return topic_of(self.of.run_id, self.layout)

    # ``Watch``

    def effect(self, peer: Peer, fragment: int, effect: Effect) -> Effect | None:
        if isinstance(effect, GiveUp) and effect.round is not None:
            self.truth.vowed(peer.life, effect.round)
        return effect if self.on_effect is None else self.on_effect(peer, effect)

    def noted(self, peer: Peer, fragment: int, note: Note) -> None:
        self.truth.note(note)
        if note.event == "presumed":
            self.presumed.add(peer.name)
        self.trace.update(f"{self.now!r} {peer.name} {note.event} {note.fields}\n".encode())
        if self.keep_events:
            self.events.append((self.now, peer.name, note))
        if self.on_note is not None:
            self.on_note(peer, note)

    def told(self, peer: Peer, event: str, fields: Mapping[str, Any]) -> None:
        learner = learner_of(peer)
        if event == "written_off" and learner is not None:
            learner.write_off(fields["tokens"])

    def applied(
        self,
        peer: Peer,
        apply: Apply,
        before: FragmentState,
        after: FragmentState,
        merged: memoryview,
        maps: Mapping[int, ParentMap],
    ) -> None:
        self.truth.applies(peer.life, apply, bytes(merged), dict(maps) or None)
        commit = apply.commit
        entries = [commit.members[index] for index in apply.seal]
        works = [self.truth.offers[each.peer, each.incarnation, each.mark] for each in entries]
        self.truth.made(after, sealed_parents(commit, apply.seal), works, commit.melds)
        if self.on_apply is not None:
            self.on_apply(peer, apply)

    def folded(self, peer: Peer, fold: Fold, before: FragmentState, after: FragmentState) -> None:
        work = self.truth.offers[peer.name, peer.incarnation, fold.contained]
        self.truth.made(after, [before.lineage], [work], False)

    def stands(self, peer: Peer, state: FragmentState) -> None:
        self.truth.stands(peer.name, state)
        self.save(peer, state)

    def sends(self, peer: Peer, to: PeerId, message: Message) -> Message | None:
        return message if self.on_say is None else self.on_say(peer, to, message)

    def heard(self, peer: Peer, sender: PeerId, message: Message) -> Message | None:
        if self.on_send is not None and not self.on_send(sender, peer.name, message):
            return None
        self.everybody.heard(peer, sender)
        self.truth.coverage[f"heard {type(message).__name__}"] += 1
        return message

    def contributes(
        self, peer: Peer, commit: Commit, given: Contribution | None
    ) -> Contribution | None:
        if given is None:
            raise Broken(f"{peer} entered a round without an offer")
        return given

    def encoded(
        self, peer: Peer, commit: Commit, round_id: bytes, slices: Sequence[memoryview]
    ) -> None:
        entry = commit.index(peer.name)
        assert entry is not None
        self.truth.uploaded(round_id, entry, b"".join(slices))
        self.uploads.append((peer, round_id, slices))

    def arrived(self, peer: Peer, upload: UploadArrived) -> UploadArrived:
        problem = self.faulty.get(upload.sender)
        return (
            upload
            if problem is None
            else msgspec.structs.replace(upload, problem=problem, norm=None)
        )

    def convicted(self, peer: Peer, guilty: PeerId, what: str) -> None:
        if guilty not in self.liars:
            raise Broken(f"{peer.name} convicts {guilty}, which is honest: {what}")
        self.truth.coverage["convicted"] += 1

    def handled(self, peer: Peer, fragment: int) -> None:
        self.check(peer)

    # Watching

    def record(self, event: str, name: PeerId) -> None:
        self.trace.update(f"{self.now!r} {name} {event}\n".encode())

    def check(self, peer: Peer) -> None:
        """The invariants that can be seen at one peer, after each of its events."""
        machine = peer.machine
        now = peer.now()
        if (
            machine.phase is not Phase.IDLE
            or machine.rounds
            or machine.open_roster
            or machine.doubt
        ):
            deadline = machine.deadline
            if deadline is None or deadline > now + 2 * self.policy.round_s:
                raise Broken(f"{peer} waits without a deadline")
        phase = machine.phase
        before, since = self._phases.get(peer.name, (None, now))
        if phase is not before:
            self._phases[peer.name] = phase, now
        elif phase is not Phase.IDLE and now - since > 3 * self.policy.round_s:
            raise Broken(f"{peer} has been {phase} for {now - since:.0f} s")
        if learner_of(peer) is not None:
            self.check_fate(peer)
        if len(machine.rounds) > 32 or len(machine.peers.failed) > 256:
            raise Broken(f"{peer} grows without bound")

    def check_fate(self, peer: Peer) -> None:
        """processed = merged + pending + discarded, of all of a peer's lives."""
        learner, standing = learner_of(peer), peer.machine.standing
        assert learner is not None and standing is not None
        if peer.state is None or peer.state.lineage != standing.lineage:
            return  # between applying and saying so
        own = learner.own
        counts = (learner.step, own.merged_step, own.discarded_steps, learner.written_off)
        known = self._fates.get(peer.name)
        if known is not None and known[0] is standing and known[1] == counts:
            return  # most events leave them as they were
        self._fates[peer.name] = standing, counts
        dealt = len(self.keys) > self.policy.group_size
        self.truth.check_fate(
            peer.life,
            standing,
            learner,
            self.crashed.get(peer.name, {}),
            forked=dealt or bool(self.let_go[peer.name]) or peer.name in self.presumed,
        )

    def lineages(self) -> set[bytes]:
        return {peer.state.lineage for peer in self.trainers() if peer.state is not None}

    def versions(self) -> list[int]:
        return [peer.state.version for peer in self.trainers() if peer.state is not None]


open_swarms: list[Swarm] = []
"""Swarms that are not closed: ``tests/conftest.py`` closes those that a test leaves."""


# Weather from a seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Storm:
    """The severity of a storm."""

    peers: tuple[int, int] = (2, 7)
    accidents: tuple[int, int] = (2, 7)
    rough_s: float = 110.0
    calm_s: float = 200.0
    """The slowest of 780 storms with and without probation and groups took 141 s."""
    group_size: int = 16
    tokens_end: int | None = None
    """The run's; ``None``: it goes on."""
    sites: int | None = None
    """Peers are at so many places, in turn."""
    probation: ProbationPolicy = field(default_factory=ProbationPolicy)
    guarded: bool = True
    """False: the peers trust each other, and have no guard."""
    speeds: tuple[float, ...] = ()
    """Step times that peers have by chance."""
    audit_rate: float = 0.0
    gives_way: float = 0.0
    """Chance that another fragment of the peer goes first, after every step."""
    smaller_levels: tuple[Level, ...] = ()
    """Levels below the first one. Lines are measured as fast or slow by chance."""


SEVERAL_GROUPS = (
    Storm(peers=(9, 14), group_size=4),
    Storm(peers=(6, 12), group_size=3),
)
"""Storms over a swarm that is dealt into several groups."""


def storm(seed: int, how: Storm | None = None) -> Swarm:
    """A swarm with everything that can happen to it drawn from the seed."""
    return cause_storm(Swarm, seed, how or Storm())


def _codecs(seed: int, drawn: str) -> dict[str, Any]:
    """Settings of the codecs: in some storms one for each way, and error feedback."""
    up, down = (drawn, None) if drawn != "int4" or seed % 2 else ("int2", "int4")
    return {"codec": up, "codec_down": down, "feedback": frozenset({"int2"})}


def cause_storm(make: Callable[..., Any], seed: int, how: Storm) -> Any:
    """A swarm with everything that can happen to it drawn from the seed.

    The weather is bad for ``rough_s``; whatever is still broken then is mended.
    """
    rng = random.Random(seed * 7919 + 17)
    count = rng.randint(*how.peers)
    slow = rng.choice([1.0, 1.0, 1.18, 2.5])
    plans = []
    for number in range(count):
        plans.append(
            PeerPlan(
                step_time_s=slow if rng.random() < 0.4 else 1.0,
                clock_offset_s=rng.uniform(-1e5, 1e5),
                starts_at=0.0 if number < 2 or rng.random() < 0.7 else rng.uniform(1.0, 60.0),
                dial_out_only=number > 1 and rng.random() < 0.15,
                founder=number == 0,
                site=None if how.sites is None else f"site-{number % how.sites}",
            )
        )
    if rng.random() < 0.25:
        plans.append(PeerPlan(trains=False, clock_offset_s=rng.uniform(-1e5, 1e5)))
    rough = Weather(
        latency_s=rng.choice([(0.01, 0.05), (0.05, 0.5)]),
        jitter_s=rng.choice([0.0, 0.1]),
        bandwidth_bytes_s=rng.choice([1e6, 20e3, 2e3]),
        connection_loss=rng.choice([0.0, 0.0, 0.01, 0.04]),
        duplicate=max(rng.choice([0.0, 0.1]), rng.choice([0.0, 0.1])),
        silence_s=rng.choice([2.0, 5.0]),
    )
    policy = replace(
        POLICY,
        quorum=replace(
            POLICY.quorum, required=rng.choice([None, None, None, 2, 0.75, "all"]), wait_s=8.0
        ),
        **_codecs(seed, rng.choice(["f32", "int8", "int4", "f16"])),
        group_size=how.group_size,
        tokens_end=how.tokens_end,
        probation=how.probation,
        audit_rate=how.audit_rate,
        late_work="per_cycle" if seed % 2 else "whole",
        mu=0.5 if seed % 3 == 1 else 0.0,
        smaller_levels=how.smaller_levels,
    )
    if how.speeds:
        speed = random.Random(f"speeds {seed}")
        plans = [replace(plan, step_time_s=speed.choice(how.speeds)) for plan in plans]
    swarm = make(
        seed,
        plans,
        weather=rough,
        policy=policy,
        slices=rng.randint(1, 4),
        young=rng.random() < 0.2,
    )
    swarm.guarded = how.guarded
    for _ in range(rng.randint(*how.accidents)):
        _accident(swarm, rng, how)
    if how.gives_way:
        swarm.gives_way = lambda peer: (
            swarm.now < how.rough_s and swarm.rng.random() < how.gives_way
        )
    if how.smaller_levels:
        _measure_lines(swarm, random.Random(f"lines {seed}"), how)
    swarm.call_at(how.rough_s, mend, swarm)
    return swarm


def weather_out(swarm: Swarm, how: Storm | None = None) -> None:
    """Run through the storm, then until everybody agrees, on more than there was before.

    ``Broken`` when they do not within the calm.
    """
    how = how or Storm()
    swarm.run(how.rough_s)
    before = max(swarm.versions(), default=0)
    end = how.rough_s + how.calm_s
    while swarm.now < end:
        swarm.run(swarm.now + 1.0)
        if has_recovered(swarm, how, before):
            return
    raise not_recovered(swarm, how, before)


def reach_one_final_lineage(swarm: Swarm, *, within_s: float) -> None:
    """Run until all peers with a state stand on one that is final, and the same. Asserts that they
    do within this time."""
    end = swarm.now + within_s
    while swarm.now < end:
        swarm.run(swarm.now + 2.0)
        there = [peer for peer in swarm.alive if peer.state is not None]
        if all(peer.machine.ending.is_final(peer.now()) for peer in there) and (
            len(swarm.lineages()) == 1
        ):
            return
    raise AssertionError(f"{swarm.lineages()} after {within_s:g} s")


def has_recovered(swarm: Swarm, how: Storm, before: int) -> bool:
    """True if all peers agree on more than there was ``before``, and none is in doubt."""
    one_group = len(swarm.trainers()) <= how.group_size
    return (
        (len(swarm.lineages()) == 1 or not one_group)
        and min(swarm.versions()) >= before + 2
        and not any(peer.machine.doubt for peer in swarm.alive)
    )


def not_recovered(swarm: Swarm, how: Storm, before: int) -> Broken:
    return Broken(
        f"{how.calm_s:g} s after the storm: versions {swarm.versions()}, {before} before, "
        f"{len(swarm.lineages())} lineages, {[peer for peer in swarm.alive if peer.machine.doubt]}"
    )


def _accident(swarm: Swarm, rng: random.Random, how: Storm) -> None:
    at = rng.uniform(5.0, how.rough_s - 5.0)
    name = rng.choice(swarm.names)
    kind = rng.choice(
        ["crash", "crash", "moment", "moment", "pause", "partition", "partition", "line", "fault"]
    )
    if kind == "crash":
        swarm.call_at(at, _crash, swarm, name, rng.choice([0.5, 5.0, 30.0, 300.0]))
    elif kind == "moment":
        # Crash somebody exactly when it has got to a certain point.
        event = rng.choice(
            ["gathering", "entered", "sealed", "learned_seal", "applying", "finished", "took_over"]
        )
        lasts = rng.choice([0.5, 5.0, 30.0])
        swarm.call_at(at, _arm, swarm, event, lasts, rng.choice([0.0, 0.0, 0.03, 0.1]))
    elif kind == "pause":
        swarm.call_at(at, _pause, swarm, name, rng.choice([1.0, 6.0, 25.0]))
    elif kind == "partition":
        some = [peer for peer in swarm.names if rng.random() < 0.5]
        swarm.call_at(at, swarm.partition, [some])
        swarm.call_at(at + rng.choice([2.0, 10.0, 60.0, 90.0]), swarm.heal)
    elif kind == "line":
        swarm.call_at(at, _slow_line, swarm, name, rng.choice([300.0, 2000.0]))
    else:
        swarm.call_at(at, swarm.faulty.__setitem__, name, "the norm is out of bound")
        swarm.call_at(at + 15.0, swarm.faulty.pop, name, None)


def _measure_lines(swarm: Swarm, rng: random.Random, how: Storm) -> None:
    """Every few seconds, somebody's line is another one; all are fast after the storm."""
    rough = swarm.now < how.rough_s
    names = [rng.choice(swarm.names)] if rough else swarm.names
    for peer in (swarm.nodes[name] for name in names if name in swarm.nodes):
        swarm.lines[peer.name] = rng.choice([20.0, 100.0, 1e6]) if rough else 1e6
        if peer.alive:
            peer.take(LineMeasured(peer.averager.bytes_per_s))
    swarm.call_in(rng.uniform(1.0, 9.0), _measure_lines, swarm, rng, how)


def _crash(swarm: Swarm, name: PeerId, lasts_s: float) -> None:
    if name in swarm.nodes:
        swarm.crash(name)
        swarm.call_in(lasts_s, swarm.restart, name)


def _arm(swarm: Swarm, event: str, lasts_s: float, delay_s: float) -> None:
    armed = [event]

    def watch(peer: Peer, note: Note) -> None:
        if armed and note.event == armed[0]:
            armed.clear()
            swarm.call_in(delay_s, _crash, swarm, peer.name, lasts_s)

    swarm.on_note = watch


def _pause(swarm: Swarm, name: PeerId, lasts_s: float) -> None:
    if name in swarm.nodes:
        swarm.pause(name)
        swarm.call_in(lasts_s, swarm.resume, name)


def _slow_line(swarm: Swarm, name: PeerId, bytes_s: float) -> None:
    swarm.network.set_link(name, up_bytes_s=bytes_s)


def mend(swarm: Swarm) -> None:
    """The storm is over: everybody is up and can hear everybody."""
    swarm.on_note = None
    swarm.faulty.clear()
    swarm.heal()
    swarm.network.weather = CALM
    for name in swarm.names:
        swarm.network.set_link(name, up_bytes_s=1e6, down_bytes_s=1e6)
        if name in swarm.nodes:
            swarm.resume(name)
            swarm.restart(name)
