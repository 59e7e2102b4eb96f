"""A whole swarm of round machines in one thread, from one seed, with real arithmetic.

Each ``Node`` owns a node of the shipped simulator, which runs the real ``FragmentRounds`` of one
fragment with the real codec, merge and outer step; it has a clock of its own and a learner that
trains a handful of values. So bits can be compared. ``Truth`` sees everything and checks the
invariants after every event; nobody in the swarm sees ``Truth``.

Weather and accidents are chosen by whoever makes the swarm: ``storm`` draws them from the seed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import blake3
import msgspec
import numpy as np

from averaging.audit.proofs import Court, Guilty, Proof
from averaging.history.standing import Standing, sealed_parents
from averaging.history.state import FragmentState
from averaging.messages import Directed, Message
from averaging.numbers.arrays import Float32s
from averaging.numbers.codecs import codec_names
from averaging.round.fetched_states import Life
from averaging.round.interface.effects import Apply, Effect, Fold, Note
from averaging.round.interface.identity import Circumstances, Identity
from averaging.round.interface.inputs import (
    GiveWay,
    LineMeasured,
    Offer,
    OrdersChanged,
    Progressed,
    StepsCounted,
)
from averaging.round.interface.phase import Phase
from averaging.round.machine import FragmentRounds
from averaging.round.sealing.outcomes import OUTCOMES_MAX, VOWS_MAX
from averaging.rules.due import DuePolicy
from averaging.rules.line_levels import Level
from averaging.rules.mixing import MixingPolicy
from averaging.rules.orders import OrderBook, RoundOrders
from averaging.rules.peer_view import PeerView
from averaging.rules.policy import RoundPolicy
from averaging.rules.probation import Probation, ProbationPolicy
from averaging.rules.quorum import QuorumPolicy
from averaging.rules.sites import site_pass
from averaging.simulated.auditing import Means, NodeAudits
from averaging.simulated.node import HELD_MAX, FragmentNode, Watch
from averaging.simulated.wires import Wires
from dht.identity import PeerId
from dht.memory.event_heap import EventHeap
from dht.memory.network import CALM, SimulatedNetwork, Weather
from dht.protocol import OLDEST, SPOKEN, Range, common
from tests.averaging.virtual.truth import FRAGMENT, LAYOUT, Broken, Learner, Truth, Work

TOPIC = bytes(range(16))
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


# One peer


class Node:
    """One incarnation of one peer: the ``Owner`` of one node of the shipped simulator."""

    def __init__(
        self,
        swarm: Swarm,
        name: PeerId,
        *,
        incarnation: int,
        state: FragmentState | None,
        plan: PeerPlan,
    ) -> None:
        self.swarm = swarm
        self.name = name
        self.plan = plan
        self.incarnation = incarnation
        self.life = Life(name, incarnation)
        self.alive = True
        self.learner: Learner | None = None
        if state is not None and plan.trains:
            self.learner = Learner(state, swarm.goal(name), plan.tokens_per_step)
        self.view: dict[PeerId, PeerView] = {}
        self.absent: dict[PeerId, float | None] = {}
        self.held: list[Callable[[], None]] = []
        self.fate_of: tuple[Standing | None, tuple[int, ...]] = (None, ())
        """The standing and the counts of the learner for which every token had a fate."""
        self.phase, self.phase_since = Phase.IDLE, 0.0
        """The phase of the machine when it was last checked, and since when."""
        self._offers_next = False
        self.book = OrderBook()
        self.book.orders = swarm.orders_known.get(name, self.book.orders)
        identity = Identity(
            me=name,
            incarnation=incarnation,
            fragment=0,
            topic=plan.topic or swarm.topic,
            policy=swarm.policy,
            codecs=codec_names(),
            encoded_bytes=swarm.encoded_bytes,
            sign=lambda data: swarm.sign(name, data),
            verify=swarm.verify,
            founder=plan.founder,
            site=site_pass(plan.site, name),
            norm_ratio_max=swarm.wires.norm_ratio_max,
            book=self.book,
            speaks=plan.speaks,
        )
        self.audits = swarm.audits_of(self) if swarm.policy.audit_rate else None
        struck = self.audits.strikes.is_out if self.audits else None
        machine = FragmentRounds(
            identity,
            Circumstances(plan.trains, reachable=not plan.dial_out_only, absent=self.absent),
            view=self.view,
            standing=Standing.of(state) if state is not None else None,
            probation=Probation(swarm.policy.probation, struck=struck),
            now=self.now(),
        )
        if not swarm.young and plan.starts_at == 0.0 and incarnation == 1:
            machine.peers.started_at = self.now() - 1e6
        self.machine = machine
        self.part = FragmentNode(
            self,
            swarm.wires,
            FRAGMENT,
            machine,
            state,
            self.learner,
            replay_bytes_max=swarm.replay_bytes_max,
            audits=self.audits,
        )

    def __repr__(self) -> str:
        return f"Node({self.name}, {self.incarnation}, {self.machine.phase})"

    @property
    def state(self) -> FragmentState | None:
        return self.part.state

    # Owner

    def now(self) -> float:
        """My own clock: everybody's is wrong by another amount."""
        return self.swarm.heap.now + self.plan.clock_offset_s

    def global_time(self, own_time: float) -> float:
        return own_time - self.plan.clock_offset_s

    def when_awake(self, action: Callable[[], None]) -> None:
        if not self.alive:
            return
        if self.swarm.network.is_paused(self.name):
            if len(self.held) < HELD_MAX:
                self.held.append(action)
        else:
            action()

    def wants_snapshot(self, node: FragmentNode) -> bool:
        self._offers_next = True
        return True

    def heard(self, peer: PeerId) -> None:
        return

    def directed(self, node: FragmentNode, sender: PeerId, directive: bytes) -> None:
        theirs, mine = self.swarm.orders_issued.get(directive), self.book.orders
        if theirs is not None and self.follow(theirs):
            return
        if mine.stamp is not None and theirs is not mine:
            self.swarm.wires.send(self.part, sender, Directed(0, mine.encoded))

    def follow(self, orders: RoundOrders) -> bool:
        """Follow a directive of the run's owner if it is newer than the one known."""
        assert orders.stamp is not None
        known = self.book.orders.stamp
        if known is not None and known.number >= orders.stamp.number:
            return False
        self.book.orders = self.swarm.orders_known[self.name] = orders
        self.part.run(self.machine.handle(OrdersChanged(), self.now()))
        return True

    def silent(self, peer: PeerId, since: float) -> None:
        return  # there is no other fragment to tell

    def ran(self, node: FragmentNode) -> None:
        return

    # Running

    def start(self) -> None:
        if self.learner is not None:
            self.swarm.heap.call_in(self.plan.step_time_s, self._step)
        self.part.reschedule()

    def wake(self) -> None:
        held, self.held = self.held, []
        for action in held:
            self.when_awake(action)

    def _step(self) -> None:
        self.when_awake(self._step_now)

    def _step_now(self) -> None:
        learner = self.learner
        assert learner is not None
        learner.train()
        effects: list[Effect] = []
        if self._offers_next:
            self._offers_next = False
            self.machine.handle(StepsCounted(learner.step), self.now())
            effects += self.part.offer()
        effects += self.machine.handle(Progressed(learner.step, self.plan.step_time_s), self.now())
        self.part.run(effects)
        if self.swarm.gives_way(self):
            self.part.run(self.machine.handle(GiveWay("another fragment goes first"), self.now()))
        self.swarm.heap.call_in(self.plan.step_time_s, self._step)

    def crash(self) -> None:
        self.alive = False
        self.part.stop()


# Everybody


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerPlan:
    """The properties of a peer."""

    step_time_s: float = 1.0
    tokens_per_step: int = 100
    clock_offset_s: float = 0.0
    starts_at: float = 0.0
    dial_out_only: bool = False
    trains: bool = True
    founder: bool = False
    site: str | None = None
    topic: bytes | None = None
    speaks: Range = SPOKEN


class Swarm(Watch):
    """Peers, their network, and the truth about them."""

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
        sees: Callable[[Node, Node], bool] | None = None,
        names: Sequence[PeerId] | None = None,
    ) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.policy = policy
        self.slices = slices
        self.topic = TOPIC
        self.heartbeat_s = heartbeat_s
        self.replay_bytes_max = 1 << 20
        self.heap = EventHeap()
        self.network = SimulatedNetwork(self.heap, weather, seed)
        self.wires = Wires(self.heap, self.network, self)
        self.truth = Truth()
        self.nodes: dict[PeerId, Node] = {}
        self.disk: dict[PeerId, FragmentState] = {}
        self.plans: dict[PeerId, PeerPlan] = {}
        self.lives: Counter[PeerId] = Counter()
        self.proofs: dict[PeerId, dict[PeerId, Proof]] = {}
        """The proofs that peers have kept, by the peer that keeps them."""
        self.liars: frozenset[PeerId] = frozenset()
        """Only these may be convicted."""
        self.tokens_before: Counter[PeerId] = Counter()
        """Processed by former incarnations."""
        self.crashed: dict[PeerId, dict[int, tuple[int, int]]] = {}
        self.let_go: Counter[PeerId] = Counter()
        self.faulty: dict[PeerId, str] = {}
        self.trace = blake3.blake3()
        self.events: list[tuple[float, PeerId, Note]] = []
        self.keep_events = False
        self.on_start: Callable[[Node], None] | None = None
        self.on_note: Callable[[Node, Note], None] | None = None
        self.orders_issued: dict[bytes, RoundOrders] = {}
        """Directives of the run's owner, by their bytes."""
        self.orders_known: dict[PeerId, RoundOrders] = {}
        """The directive that each peer has on its disk."""
        self.on_apply: Callable[[Node, Apply], None] | None = None
        self.on_send: Callable[[PeerId, PeerId, Message], bool] | None = None
        self.answer_filter: Callable[[Node, bytes, int, PeerId], bool] | None = None
        self.gives_way: Callable[[Node], bool] = lambda node: False
        self._goals: dict[PeerId, Float32s] = {}
        theta = np.linspace(-1, 1, FRAGMENT.size, dtype=np.float32)
        self.origin = FragmentState.founded(LAYOUT.hash, 0, theta)
        self.truth.founded(self.origin)
        self.young = young
        self.sees = sees
        width = len(str(len(plans)))
        for number, plan in enumerate(plans):
            name = names[number] if names else PeerId(f"p{number:0{width}}")
            self.plans[name] = plan
            if plan.dial_out_only:
                self.network.dial_out_only([name])
            self.heap.call_at(plan.starts_at, self.start, name)
        self.heap.call_in(0.0, self._heartbeat)

    @property
    def names(self) -> list[PeerId]:
        return list(self.plans)

    def encoded_bytes(self, codec: str) -> int:
        """Said to be so large that it is cut into so many slices."""
        return self.slices * self.policy.slice_bytes_min

    def goal(self, name: PeerId) -> Float32s:
        if name not in self._goals:
            rng = np.random.default_rng([self.seed, len(self._goals)])
            self._goals[name] = rng.normal(size=FRAGMENT.size).astype(np.float32)
        return self._goals[name]

    def sign(self, peer: PeerId, data: bytes) -> bytes:
        """Stands for a signature: the round machine only asks whether it holds."""
        return blake3.blake3(peer.encode() + b"/" + data).digest()

    def audits_of(self, node: Node) -> NodeAudits:
        """The audits of a peer that begins, with the proofs that it has kept."""
        court = Court(self.topic, LAYOUT, self.verify)
        means = Means(
            me=node.name,
            court=court,
            sign=lambda data: self.sign(node.name, data),
            rate=self.policy.audit_rate,
            now=node.now,
        )
        audits = NodeAudits(means, self.wires, FRAGMENT.index)
        for proof in self.proofs.get(node.name, {}).values():
            assert audits.take_proof(proof)
        return audits

    def verify(self, peer: PeerId, data: bytes, signature: bytes) -> bool:
        return self.sign(peer, data) == signature

    # What happens to peers

    def start(self, name: PeerId) -> Node:
        plan = self.plans[name]
        self.lives[name] += 1
        state = self.disk.get(name, self.origin) if plan.trains else None
        if name in self.nodes or name in self.disk:
            self.network.restart(name)
        if (before := self.nodes.get(name)) is not None and before.audits is not None:
            self.proofs[name] = dict(before.audits.proofs)
        node = Node(self, name, incarnation=self.lives[name], state=state, plan=plan)
        self.nodes[name] = node
        self._introduce(node)
        if self.on_start is not None:
            self.on_start(node)
        node.start()
        return node

    def crash(self, name: PeerId) -> None:
        node = self.nodes[name]
        if not node.alive:
            return
        node.crash()
        self.network.crash(name)
        learner = node.learner
        if learner is not None:
            self.crashed.setdefault(name, {})[node.incarnation] = (
                learner.step,
                learner.tokens_per_step,
            )
            self.let_go[name] += learner.discarded
        self.heap.call_in(self.network.weather.silence_s, self.wires.streams_to, name)
        self.record("crash", name)

    def say_goodbye(self, name: PeerId) -> None:
        """A peer leaves in order: everybody hears that it trains no more."""
        for other in self.nodes.values():
            other.view.pop(name, None)
            other.absent[name] = None
        self.crash(name)

    def restart(self, name: PeerId) -> None:
        if not self.nodes[name].alive:
            self.start(name)
            self.record("restart", name)

    def pause(self, name: PeerId) -> None:
        self.network.pause(name)

    def resume(self, name: PeerId) -> None:
        self.network.resume(name)
        self.nodes[name].wake()

    def save(self, name: PeerId, state: FragmentState) -> None:
        """A checkpoint, not of every version: a restart may come back with an older one."""
        if name not in self.disk or self.rng.random() < 0.7:
            self.disk[name] = state

    # Membership, as the table of dht would see it

    def _introduce(self, node: Node) -> None:
        is_old = not self.young and node.plan.starts_at == 0.0 and node.incarnation == 1
        since = -1e6 if is_old else 0.0
        for other in self.nodes.values():
            if other is not node and other.alive:
                if self.sees is None or self.sees(node, other):
                    self._sees(node, other, since)
                if self.sees is None or self.sees(other, node):
                    self._sees(other, node, since)

    def _sees(self, node: Node, other: Node, since: float = 0.0) -> None:
        if node.audits is not None and other.name in node.audits.convicted:
            return
        known = node.view.get(other.name)
        if known is not None and known.incarnation != other.incarnation:
            known = None  # a restarted peer is a new one
        node.view[other.name] = PeerView(
            first_seen=known.first_seen if known else node.now() + since,
            heard_at=node.now(),
            failed_at=None,
            reachable=not other.plan.dial_out_only,
            trains=other.plan.trains,
            step_time_s=other.plan.step_time_s,
            protocol=common(other.plan.speaks, node.plan.speaks) or OLDEST,
            incarnation=other.incarnation,
        )

    def _heartbeat(self) -> None:
        up = [
            node
            for node in self.nodes.values()
            if node.alive and not self.network.is_paused(node.name)
        ]
        for node in up:
            for other in up:
                if other is node or not self.network.connected(node.name, other.name):
                    continue
                if self.sees is None or self.sees(node, other):
                    self._sees(node, other)
            if node.plan.dial_out_only:
                for other in up:
                    if not other.plan.dial_out_only:
                        self.network.transfer(node.name, other.name, 50, lambda: None, lambda: None)
        self.heap.call_in(self.heartbeat_s, self._heartbeat)

    # What nodes tell, and what may befall them

    def offered(self, node: FragmentNode, offer: Offer) -> None:
        begin = offer.mark - offer.steps
        self.truth.offered(Work(node.name, node.owner.incarnation, begin, offer.mark, offer.tokens))

    def uploaded(self, node: FragmentNode, round_id: bytes, entry: int, payload: bytes) -> None:
        self.truth.uploaded(round_id, entry, payload)

    def vowed(self, node: FragmentNode, round_id: bytes) -> None:
        self.truth.vowed(self._owner(node).life, round_id)

    def applies(self, node: FragmentNode, apply: Apply) -> None:
        parts = node.exchanges[apply.round].merged_parts()
        data = b"".join(part.data for part in parts)
        self.truth.applies(self._owner(node).life, apply, data, parts[0].maps)
        if self.on_apply is not None:
            self.on_apply(self._owner(node), apply)

    def merged(self, node: FragmentNode, after: FragmentState, apply: Apply) -> None:
        commit = apply.commit
        works = []
        if commit.kind != "mix":
            entries = [commit.members[index] for index in apply.seal]
            offers = self.truth.offers
            works = [offers[entry.peer, entry.incarnation, entry.mark] for entry in entries]
        parents = sealed_parents(commit, apply.seal)
        if commit.kind == "merge":
            assert node.state is not None
            parents = (node.state.lineage,)
        self.truth.made(after, parents, works, commit.kind != "merge")

    def folded(self, node: FragmentNode, after: FragmentState, fold: Fold) -> None:
        assert node.state is not None
        work = self.truth.offers[node.name, node.owner.incarnation, fold.contained]
        self.truth.made(after, [node.state.lineage], [work], False)

    def wrote_off(self, node: FragmentNode, tokens: int) -> None:
        if tokens and isinstance(node.learner, Learner):
            node.learner.write_off(tokens)

    def stands(self, node: FragmentNode, state: FragmentState) -> None:
        self.truth.stands(node.name, state)
        self.save(node.name, state)

    def convicted(self, node: FragmentNode, guilty: Guilty) -> None:
        if guilty.peer not in self.liars:
            raise Broken(f"{node.name} convicts {guilty.peer}, which is honest: {guilty.what}")
        self._owner(node).view.pop(guilty.peer, None)
        self.truth.coverage["convicted"] += 1

    def discarded(self, node: FragmentNode, reason: str) -> None:
        self.truth.coverage["discarded"] += 1

    def noted(self, node: FragmentNode, note: Note) -> None:
        self.heard_note(self._owner(node), note)

    def checked(self, node: FragmentNode) -> None:
        self.check(self._owner(node))

    def heard(self, node: FragmentNode, sender: PeerId, message: Message) -> None:
        owner = self._owner(node)
        seen = owner.view.get(sender)
        if seen is not None:
            owner.view[sender] = msgspec.structs.replace(seen, heard_at=owner.now())
        self.truth.coverage[f"heard {type(message).__name__}"] += 1

    def refused(self, node: FragmentNode, sender: PeerId, reason: str) -> None:
        self.truth.coverage[f"refused stream: {reason}"] += 1

    def lets_through(self, sender: PeerId, to: PeerId, message: Message) -> bool:
        return self.on_send is None or self.on_send(sender, to, message)

    def lets_answer(
        self, node: FragmentNode, round_id: bytes, slice_index: int, to: PeerId
    ) -> bool:
        judge = self.answer_filter
        return judge is None or judge(self._owner(node), round_id, slice_index, to)

    def fault_of(self, node: FragmentNode, sender: PeerId) -> str | None:
        return self.faulty.get(sender)

    def _owner(self, node: FragmentNode) -> Node:
        assert isinstance(node.owner, Node)
        return node.owner

    # Watching

    def record(self, event: str, name: PeerId) -> None:
        self.trace.update(f"{self.heap.now!r} {name} {event}\n".encode())

    def heard_note(self, node: Node, note: Note) -> None:
        self.truth.note(note)
        self.trace.update(f"{self.heap.now!r} {node.name} {note.event} {note.fields}\n".encode())
        if self.keep_events:
            self.events.append((self.heap.now, node.name, note))
        if self.on_note is not None:
            self.on_note(node, note)

    def check(self, node: Node) -> None:
        """The invariants that can be seen at one peer, after each of its events."""
        machine = node.machine
        now = node.now()
        if (
            machine.phase is not Phase.IDLE
            or machine.rounds
            or machine.open_roster
            or machine.doubt
        ):
            deadline = machine.deadline
            if deadline is None or deadline > now + 2 * self.policy.round_s:
                raise Broken(f"{node} waits without a deadline")
        phase = machine.phase
        if phase is not node.phase:
            node.phase, node.phase_since = phase, now
        elif phase is not Phase.IDLE and now - node.phase_since > 3 * self.policy.round_s:
            raise Broken(f"{node} has been {phase} for {now - node.phase_since:.0f} s")
        if node.learner is not None:
            self.check_fate(node)
        if (
            len(machine.rounds) > 32
            or len(machine.outcomes) > OUTCOMES_MAX + VOWS_MAX * len(self.names)
            or len(machine.peers.failed) > 256
        ):
            raise Broken(f"{node} grows without bound")

    def check_fate(self, node: Node) -> None:
        """processed = merged + pending + discarded, of all of a peer's incarnations."""
        learner, standing = node.learner, node.machine.standing
        assert learner is not None and standing is not None
        if node.state is None or node.state.lineage != standing.lineage:
            return  # between applying and saying so
        own = learner.own
        counts = (learner.step, own.merged_step, own.discarded_steps, learner.written_off)
        if node.fate_of[0] is standing and node.fate_of[1] == counts:
            return  # most events leave them as they were
        node.fate_of = standing, counts
        dealt = len(self.plans) > self.policy.group_size
        self.truth.check_fate(
            node.life,
            standing,
            learner,
            self.crashed.get(node.name, {}),
            forked=dealt or bool(self.let_go[node.name]),
        )

    # Running

    def run(self, until: float) -> None:
        self.heap.run(until)

    @property
    def alive(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.alive]

    def trainers(self) -> list[Node]:
        return [node for node in self.alive if node.learner is not None]

    def lineages(self) -> set[bytes]:
        return {node.state.lineage for node in self.trainers() if node.state is not None}

    def versions(self) -> list[int]:
        return [node.state.version for node in self.trainers() if node.state is not None]


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
    mixing: MixingPolicy = field(default_factory=MixingPolicy)
    tokens_end: int | None = None
    """The run's; ``None``: it goes on."""
    sites: int | None = None
    """Peers are at so many places, in turn."""
    probation: ProbationPolicy = field(default_factory=ProbationPolicy)
    speeds: tuple[float, ...] = ()
    """Step times that peers have by chance."""
    audit_rate: float = 0.0
    gives_way: float = 0.0
    """Chance that another fragment of the peer goes first, after every step."""
    smaller_levels: tuple[Level, ...] = ()
    """Levels below the first one. Lines are measured as fast or slow by chance."""


def storm(seed: int, how: Storm | None = None) -> Swarm:
    """A simulated swarm with everything that can happen to it drawn from the seed."""
    return cause_storm(Swarm, seed, how or Storm())


def _codecs(seed: int, drawn: str) -> dict[str, Any]:
    """Settings of the codecs: in some storms one for each way, and error feedback."""
    up, down = (drawn, None) if drawn != "int4" or seed % 2 else ("int2", "int4")
    return {"codec": up, "codec_down": down, "feedback": frozenset({"int2"})}


def cause_storm(make: Callable[..., Any], seed: int, how: Storm) -> Any:
    """A swarm, simulated or live, with everything that can happen to it drawn from the seed.

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
        duplicate=rng.choice([0.0, 0.1]),
        reorder=rng.choice([0.0, 0.1]),
        silence_s=rng.choice([2.0, 5.0]),
    )
    policy = replace(
        POLICY,
        quorum=replace(
            POLICY.quorum, required=rng.choice([None, None, None, 2, 0.75, "all"]), wait_s=8.0
        ),
        **_codecs(seed, rng.choice(["f32", "int8", "int4", "f16"])),
        group_size=how.group_size,
        mixing=how.mixing,
        tokens_end=how.tokens_end,
        probation=how.probation,
        audit_rate=how.audit_rate,
        late_work="per_cycle" if seed % 2 else "whole",
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
    for _ in range(rng.randint(*how.accidents)):
        _accident(swarm, rng, how)
    if how.gives_way:
        swarm.gives_way = lambda node: (
            swarm.heap.now < how.rough_s and swarm.rng.random() < how.gives_way
        )
    if how.smaller_levels:
        _measure_lines(swarm, random.Random(f"lines {seed}"), how)
    swarm.heap.call_at(how.rough_s, mend, swarm)
    return swarm


def weather_out(swarm: Swarm, how: Storm | None = None) -> None:
    """Run through the storm, then until everybody agrees, on more than there was before.

    ``Broken`` when they do not within the calm.
    """
    how = how or Storm()
    swarm.run(how.rough_s)
    before = max(swarm.versions(), default=0)
    end = how.rough_s + how.calm_s
    while swarm.heap.now < end:
        swarm.run(swarm.heap.now + 1.0)
        if has_recovered(swarm, how, before):
            return
    raise not_recovered(swarm, how, before)


def reach_one_final_lineage(swarm: Swarm, *, within_s: float) -> None:
    """Run until all peers with a state stand on one that is final, and the same. Asserts that they
    do within this time."""
    end = swarm.heap.now + within_s
    while swarm.heap.now < end:
        swarm.run(swarm.heap.now + 2.0)
        there = [node for node in swarm.alive if node.state is not None]
        if all(node.machine.ending.is_final(node.now()) for node in there) and (
            len(swarm.lineages()) == 1
        ):
            return
    raise AssertionError(f"{swarm.lineages()} after {within_s:g} s")


def has_recovered(swarm: Any, how: Storm, before: int) -> bool:
    """True if all peers agree on more than there was ``before``, and none is in doubt."""
    one_group = len(swarm.trainers()) <= how.group_size
    return (
        (len(swarm.lineages()) == 1 or not one_group)
        and min(swarm.versions()) >= before + 2
        and not any(node.machine.doubt for node in swarm.alive)
    )


def not_recovered(swarm: Any, how: Storm, before: int) -> Broken:
    return Broken(
        f"{how.calm_s:g} s after the storm: versions {swarm.versions()}, {before} before, "
        f"{len(swarm.lineages())} lineages, {[node for node in swarm.alive if node.machine.doubt]}"
    )


def _accident(swarm: Swarm, rng: random.Random, how: Storm) -> None:
    heap = swarm.heap
    at = rng.uniform(5.0, how.rough_s - 5.0)
    name = rng.choice(swarm.names)
    kind = rng.choice(
        ["crash", "crash", "moment", "moment", "pause", "partition", "partition", "line", "fault"]
    )
    if kind == "crash":
        heap.call_at(at, _crash, swarm, name, rng.choice([0.5, 5.0, 30.0, 300.0]))
    elif kind == "moment":
        # Crash somebody exactly when it has got to a certain point.
        event = rng.choice(
            ["gathering", "entered", "sealed", "learned_seal", "applying", "finished", "took_over"]
        )
        lasts = rng.choice([0.5, 5.0, 30.0])
        heap.call_at(at, _arm, swarm, event, lasts, rng.choice([0.0, 0.0, 0.03, 0.1]))
    elif kind == "pause":
        heap.call_at(at, _pause, swarm, name, rng.choice([1.0, 6.0, 25.0]))
    elif kind == "partition":
        some = [peer for peer in swarm.names if rng.random() < 0.5]
        heap.call_at(at, swarm.network.partition, [some])
        heap.call_at(at + rng.choice([2.0, 10.0, 60.0, 90.0]), swarm.network.heal)
    elif kind == "line":
        heap.call_at(at, _slow_line, swarm, name, rng.choice([300.0, 2000.0]))
    else:
        heap.call_at(at, swarm.faulty.__setitem__, name, "the norm is out of bound")
        heap.call_at(at + 15.0, swarm.faulty.pop, name, None)


def _measure_lines(swarm: Swarm, rng: random.Random, how: Storm) -> None:
    """Every few seconds, somebody's line is another one; all are fast after the storm."""
    rough = swarm.heap.now < how.rough_s
    names = [rng.choice(swarm.names)] if rough else swarm.names
    for node in (swarm.nodes[name] for name in names if name in swarm.nodes):
        measured = LineMeasured(rng.choice([0.0, 20.0, 100.0, 1e6]) if rough else 1e6)
        if node.alive:
            node.part.run(node.machine.handle(measured, node.now()))
    swarm.heap.call_in(rng.uniform(1.0, 9.0), _measure_lines, swarm, rng, how)


def _crash(swarm: Swarm, name: PeerId, lasts_s: float) -> None:
    if name in swarm.nodes:
        swarm.crash(name)
        swarm.heap.call_in(lasts_s, swarm.restart, name)


def _arm(swarm: Swarm, event: str, lasts_s: float, delay_s: float) -> None:
    armed = [event]

    def watch(node: Node, note: Note) -> None:
        if armed and note.event == armed[0]:
            armed.clear()
            swarm.heap.call_in(delay_s, _crash, swarm, node.name, lasts_s)

    swarm.on_note = watch


def _pause(swarm: Swarm, name: PeerId, lasts_s: float) -> None:
    if name in swarm.nodes:
        swarm.pause(name)
        swarm.heap.call_in(lasts_s, swarm.resume, name)


def _slow_line(swarm: Swarm, name: PeerId, bytes_s: float) -> None:
    swarm.network.set_link(name, up_bytes_s=bytes_s)


def mend(swarm: Swarm) -> None:
    """The storm is over: everybody is up and can hear everybody."""
    swarm.on_note = None
    swarm.faulty.clear()
    swarm.network.heal()
    swarm.network.weather = CALM
    for name in swarm.names:
        swarm.network.set_link(name, up_bytes_s=1e6, down_bytes_s=1e6)
        if name in swarm.nodes:
            swarm.resume(name)
            swarm.restart(name)
