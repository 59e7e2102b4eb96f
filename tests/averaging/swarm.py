"""A whole swarm of round machines in one thread, from one seed, with real arithmetic.

Each ``Node`` runs the real ``FragmentRounds`` of one fragment on the simulated network of
``dht.memory``, with a clock of its own, a learner that trains a handful of values, and an executor
that encodes, merges and applies them with the real codec, merge and outer step. So bits can be
compared. ``Truth`` sees everything and checks the invariants after every event (DESIGN 6); nobody
in the swarm sees ``Truth``.

Weather and accidents are chosen by whoever makes the swarm: ``storm`` draws them from the seed.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import blake3
import msgspec
import numpy as np

from averaging import messages as said
from averaging import outer
from averaging.arrays import Float32s
from averaging.codec import Scratch, codec_named, codec_names
from averaging.due import DuePolicy
from averaging.effects import (
    Answer,
    Apply,
    CatchUp,
    Discard,
    Effect,
    Enter,
    Fold,
    Forget,
    GiveUp,
    Merge,
    Note,
    Rebase,
    Reduce,
    Send,
    Settle,
    TakeSnapshot,
    Upload,
)
from averaging.grouping import PeerView
from averaging.joining import Offer
from averaging.layout import Layout, TensorSpec
from averaging.lineage import Mark, MergedMap
from averaging.merge import merge_encoded, rule_named
from averaging.messages import MERGED, NOTHING, OWN, Commit, Message, Opening
from averaging.phase import Phase
from averaging.policy import RoundPolicy
from averaging.quorum import QuorumPolicy
from averaging.round import FragmentRounds
from averaging.standing import Standing
from averaging.state import FragmentState
from dht.identity import PeerId
from dht.memory import CALM, EventHeap, SimulatedNetwork, Timer, Weather

TOPIC = bytes(range(16))
LAYOUT = Layout.build(
    [TensorSpec("a", (5, 3)), TensorSpec("b", (11,)), TensorSpec("c", (2, 2)), TensorSpec("d", ())],
    1,
)
FRAGMENT = LAYOUT.fragments[0]

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
)
"""Short cycles and deadlines: many rounds, and many ends of rounds, in little virtual time."""

_scratch = Scratch()


class Broken(AssertionError):
    """An invariant does not hold. The message says which, when, and for whom."""


# What everybody must keep to


@dataclass(slots=True)
class Work:
    """An interval of one incarnation's steps, as it was offered."""

    peer: PeerId
    incarnation: int
    begin: int
    end: int
    tokens: int


class Truth:
    """Sees all, says nothing to the swarm, and breaks the test when promises are broken."""

    def __init__(self) -> None:
        self.bits: dict[bytes, bytes] = {}
        self.covered: dict[bytes, dict[tuple[PeerId, int], int]] = {}
        self.mixed: dict[bytes, bool] = {}
        self.seals: dict[bytes, tuple[int, ...]] = {}
        self.void: set[bytes] = set()
        self.payloads: dict[tuple[bytes, int], bytes] = {}
        self.merged: dict[tuple[bytes, int], bytes] = {}
        self.offers: dict[tuple[PeerId, int, int], Work] = {}
        self.vows: set[tuple[PeerId, int, bytes]] = set()
        self.finishers: dict[bytes, list[PeerId]] = {}
        self.coverage: Counter[str] = Counter()
        self.versions_made = 0

    def founded(self, state: FragmentState) -> None:
        self.bits[state.lineage] = state.digest()
        self.covered[state.lineage] = {}
        self.mixed[state.lineage] = False

    def offered(self, work: Work) -> None:
        self.offers[work.peer, work.incarnation, work.end] = work

    def uploaded(self, round_id: bytes, member: int, payload: bytes) -> None:
        known = self.payloads.setdefault((round_id, member), payload)
        if known != payload:
            raise Broken(f"member {member} uploaded two different payloads in one round")

    def sealed(self, round_id: bytes, seal: tuple[int, ...]) -> None:
        known = self.seals.setdefault(round_id, seal)
        if known != seal:
            raise Broken(f"two seals were chosen in round {round_id.hex()[:8]}: {known} and {seal}")

    def vowed(self, node: Node, round_id: bytes) -> None:
        self.vows.add((node.name, node.incarnation, round_id))

    def applies(self, node: Node, apply: Apply) -> None:
        round_id, commit = apply.round, apply.commit
        self.sealed(round_id, apply.seal)
        if not apply.seal:
            raise Broken(f"{node.name} applies a void round")
        if (node.name, node.incarnation, round_id) in self.vows:
            raise Broken(f"{node.name} applies a round that it has forsworn")
        self.finishers.setdefault(round_id, []).append(node.name)
        for index, data in enumerate(node.merged_bytes(apply)):
            known = self.merged.setdefault((round_id, index), data)
            if known != data:
                raise Broken(f"slice {index} of {round_id.hex()[:8]} differs at {node.name}")
        if commit.kind == "merge":
            self._check_all_slices(round_id, commit, apply, node)

    def _check_all_slices(self, round_id: bytes, commit: Commit, apply: Apply, node: Node) -> None:
        """What is applied is the merge of exactly the sealed contributions, in every slice."""
        codec = codec_named(commit.codec)
        payloads = [self.payloads[round_id, index] for index in apply.seal]
        expected = bytearray(codec.encoded_size(FRAGMENT.unit_sizes))
        merge_encoded(
            rule_named(commit.merge),
            codec,
            payloads,
            apply.weights,
            FRAGMENT.unit_sizes,
            FRAGMENT.kinds,
            expected,
            _scratch,
        )
        if b"".join(node.merged_bytes(apply)) != bytes(expected):
            raise Broken(f"{node.name} applies something else than the sealed contributions")

    def stands(self, node: Node, state: FragmentState) -> None:
        """A peer has taken this state. Equal lineage, equal bits."""
        digest = state.digest()
        known = self.bits.setdefault(state.lineage, digest)
        if known != digest:
            raise Broken(f"{node.name}: lineage {state.lineage.hex()[:8]} has two states")

    def made(
        self, state: FragmentState, parents: Sequence[bytes], works: Sequence[Work], mix: bool
    ) -> None:
        """A version of a lineage: which work is in it that was not in its parents."""
        if state.lineage in self.covered:
            return
        self.versions_made += 1
        covered: dict[tuple[PeerId, int], int] = {}
        for parent in parents:
            for key, end in self.covered[parent].items():
                covered[key] = max(end, covered.get(key, 0))
        for work in works:
            key = (work.peer, work.incarnation)
            if work.begin < covered.get(key, 0):
                raise Broken(
                    f"work of {work.peer} from step {work.begin} to {work.end} is merged a second "
                    f"time: {covered[key]} was covered"
                )
            covered[key] = work.end
        self.covered[state.lineage] = covered
        self.mixed[state.lineage] = mix or any(self.mixed[parent] for parent in parents)
        for peer, mark in state.merged.items():
            if (peer, mark.incarnation) not in covered:
                raise Broken(f"merged names work of {peer} that was never merged")
            if covered[peer, mark.incarnation] != mark.step:
                raise Broken(f"merged says step {mark.step} of {peer}, which is not so")

    def note(self, node: Node, note: Note) -> None:
        self.coverage[note.event] += 1
        if note.event in ("closed", "finished"):
            self.coverage[f"{note.event} {note.fields['kind']}"] += 1


# The learner


class Learner:
    """Trains a few values towards a goal of its own, counts steps and tokens, never waits."""

    __slots__ = (
        "base",
        "base_lineage",
        "base_version",
        "discarded",
        "from_step",
        "goal",
        "let_go_step",
        "snap",
        "snap_step",
        "step",
        "tokens_per_step",
        "values",
    )

    def __init__(self, state: FragmentState, goal: Float32s, tokens_per_step: int) -> None:
        self.goal = goal
        self.tokens_per_step = tokens_per_step
        self.step = 0
        self.from_step = 0
        """My steps up to this one are merged (or discarded)."""
        self.discarded = 0
        self.let_go_step = 0
        """My steps up to this one that were not merged are gone, whatever state I take."""
        self.values = state.theta.copy()
        self.base = state.theta
        self.base_version = state.version
        self.base_lineage = state.lineage
        self.snap: Float32s | None = None
        self.snap_step = 0

    def train(self) -> None:
        self.step += 1
        self.values += np.float32(0.05) * (self.goal - self.values)

    @property
    def pending(self) -> int:
        return (self.step - self.from_step) * self.tokens_per_step

    def offer(self) -> Offer:
        self.snap = self.values.copy()
        self.snap_step = self.step
        return Offer(
            mark=self.step,
            steps=self.step - self.from_step,
            tokens=self.pending,
            base_version=self.base_version,
            base_lineage=self.base_lineage,
            batch_tokens_max=self.tokens_per_step,
        )

    def adopt(self, state: FragmentState, contained: int | None) -> None:
        if contained is not None and self.snap is not None and contained == self.snap_step:
            self.values += state.theta - self.snap
            self.from_step = contained
        else:
            self.values += state.theta - self.base
            if contained is not None:
                self.from_step = max(self.from_step, contained)
        self._on(state)

    def rebase(self, state: FragmentState, ancestor: Float32s | None, merged_step: int) -> None:
        """Take another side's state; what I moved since the ancestor stays mine to offer."""
        self.values = state.theta + (self.values - (self.base if ancestor is None else ancestor))
        self.from_step = max(merged_step, self.let_go_step)
        self._on(state)

    def let_go(self, theta: Float32s) -> None:
        self.discarded += self.pending
        self.from_step = self.let_go_step = self.step
        self.values = theta.copy()

    def _on(self, state: FragmentState) -> None:
        self.base = state.theta
        self.base_version = state.version
        self.base_lineage = state.lineage
        self.snap = None


# One peer


@dataclass(slots=True)
class Buffers:
    """What an executor keeps of a round until ``Forget``."""

    commit: Commit
    encoded: bytes
    signature: bytes
    bounds: list[tuple[int, int]]
    payload: bytes | None
    uploads: dict[int, dict[int, bytes]] = field(default_factory=dict)
    merged: dict[int, bytes] = field(default_factory=dict)
    answering: set[int] = field(default_factory=set)
    waiters: dict[int, dict[PeerId, int]] = field(default_factory=dict)
    streams: dict[int, int] = field(default_factory=dict)
    """By slice, the number of my newest stream for it, and to whom."""
    reducer: dict[int, PeerId] = field(default_factory=dict)


class Node:
    """One incarnation of one peer."""

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
        self.alive = True
        self.state = state
        self.history: OrderedDict[bytes, Float32s] = OrderedDict()
        self.learner: Learner | None = None
        if state is not None and plan.trains:
            self.learner = Learner(state, swarm.goal(name), plan.tokens_per_step)
        self.view: dict[PeerId, PeerView] = {}
        self.buffers: dict[bytes, Buffers] = {}
        self.wants_snapshot = False
        self.held: list[Callable[[], None]] = []
        self._stream = 0
        self._timer: Timer | None = None
        self._fetch = 0
        self.machine = FragmentRounds(
            fragment=0,
            me=name,
            incarnation=incarnation,
            topic=TOPIC,
            policy=swarm.policy,
            view=self.view,
            standing=Standing.of(state) if state is not None else None,
            sign=lambda data: swarm.sign(name, data),
            verify=lambda peer, data, signature: swarm.sign(peer, data) == signature,
            encoded_bytes=lambda codec: swarm.slices * swarm.policy.slice_bytes_min,
            codecs=codec_names(),
            trains=plan.trains,
            reachable=not plan.dial_out_only,
            founder=plan.founder,
            now=self.now,
        )
        if not swarm.young and plan.starts_at == 0.0 and incarnation == 1:
            self.machine.around.started_at = self.now - 1e6
        if state is not None:
            self._remember_theta(state)

    def __repr__(self) -> str:
        return f"Node({self.name}, {self.incarnation}, {self.machine.phase})"

    @property
    def now(self) -> float:
        """My own clock: everybody's is wrong by another amount."""
        return self.swarm.heap.now + self.plan.clock_offset_s

    # Running

    def start(self) -> None:
        if self.learner is not None:
            self.swarm.heap.call_in(self.plan.step_time_s, self._step)
        self._reschedule()

    def _when_awake(self, action: Callable[[], None]) -> None:
        if not self.alive:
            return
        if self.swarm.network.is_paused(self.name):
            if len(self.held) < 64:
                self.held.append(action)
        else:
            action()

    def wake(self) -> None:
        held, self.held = self.held, []
        for action in held:
            self._when_awake(action)

    def _step(self) -> None:
        self._when_awake(self._step_now)

    def _step_now(self) -> None:
        learner = self.learner
        assert learner is not None
        learner.train()
        effects: list[Effect] = []
        if self.wants_snapshot:
            self.wants_snapshot = False
            effects += self._offer(learner)
        effects += self.machine.progressed(learner.step, self.plan.step_time_s, self.now)
        self.run(effects)
        self.swarm.heap.call_in(self.plan.step_time_s, self._step)

    def _offer(self, learner: Learner) -> list[Effect]:
        offer = learner.offer()
        self.swarm.truth.offered(
            Work(self.name, self.incarnation, learner.from_step, learner.step, offer.tokens)
        )
        self.machine.step = learner.step
        return self.machine.offered(offer, self.now)

    def _tick(self) -> None:
        self._timer = None
        self._when_awake(lambda: self.run(self.machine.tick(self.now)))

    def _reschedule(self) -> None:
        deadline = self.machine.deadline
        if self._timer is not None:
            if deadline is not None and abs(self._timer.when - self._at(deadline)) < 1e-9:
                return
            self._timer.cancel()
            self._timer = None
        if deadline is not None:
            self._timer = self.swarm.heap.call_at(self._at(deadline) + 1e-6, self._tick)

    def _at(self, own_time: float) -> float:
        return own_time - self.plan.clock_offset_s

    def crash(self) -> None:
        self.alive = False
        if self._timer is not None:
            self._timer.cancel()

    # What the network brings

    def hear(self, sender: PeerId, data: bytes) -> None:
        if not self.alive:
            return
        seen = self.view.get(sender)
        if seen is not None:
            self.view[sender] = replace(seen, heard_at=self.now)
        try:
            message = said.decode(data)
        except said.BadMessage:
            self.machine.counters["bad_message"] += 1
            return
        self.swarm.truth.coverage[f"heard {type(message).__name__}"] += 1
        self.run(self.machine.receive(sender, message, self.now))

    def _lost(self, peer: PeerId) -> None:
        if self.alive:
            self.run(self.machine.lost(peer, self.now))

    # Carrying out effects

    def run(self, effects: list[Effect]) -> None:
        if not self.alive:
            return
        queue = list(effects)
        while queue:
            effect = queue.pop(0)
            queue += self._carry_out(effect)
        self._reschedule()
        self.swarm.check(self)

    def _carry_out(self, effect: Effect) -> list[Effect]:
        swarm = self.swarm
        match effect:
            case Send(to, message):
                self._send(to, message)
            case Note():
                swarm.heard_note(self, effect)
            case TakeSnapshot():
                if self.learner is None:
                    return self.machine.offered(None, self.now)
                self.wants_snapshot = True
            case Enter():
                self._enter(effect)
            case Reduce():
                pass
            case Upload():
                self._upload(effect)
            case Merge():
                swarm.heap.call_in(swarm.merge_s, self._when_awake, lambda: self._merge(effect))
            case Answer():
                self._answer(effect)
            case Apply():
                swarm.truth.applies(self, effect)
                swarm.heap.call_in(swarm.merge_s, self._when_awake, lambda: self._apply(effect))
            case GiveUp(round_id, _, in_doubt):
                if round_id is not None:
                    swarm.truth.vowed(self, round_id)
                if not in_doubt and self.learner is not None:
                    self.learner.snap = None
            case Settle():
                if self.learner is not None:
                    self.learner.snap = None
            case Discard():
                assert self.learner is not None and self.state is not None
                self.learner.let_go(self.state.theta)
                swarm.truth.coverage["discarded"] += 1
            case Forget(round_id):
                self.buffers.pop(round_id, None)
            case CatchUp(source, _, lineage, _) | Rebase(source, _, lineage, _, _):
                self._fetch_state(source, lineage, effect)
            case Fold():
                swarm.heap.call_in(swarm.merge_s, self._when_awake, lambda: self._fold(effect))
        return []

    def _send(self, to: PeerId, message: Message) -> None:
        data = said.encode(message)
        sender = self.name
        swarm = self.swarm
        swarm.network.transfer(
            sender,
            to,
            len(data),
            lambda: swarm.deliver(sender, to, data),
            lambda: self._lost(to),
        )

    def _enter(self, enter: Enter) -> None:
        commit = enter.commit
        codec = codec_named(commit.codec)
        slices = FRAGMENT.slices(commit.shares)
        payload: bytes | None = None
        if commit.kind == "mix":
            bounds = [(part.offset, part.offset + part.size) for part in slices]
        else:
            ends = [0]
            for part in slices:
                ends.append(ends[-1] + codec.encoded_size(FRAGMENT.unit_sizes[part.units]))
            bounds = list(pairwise(ends))
            if enter.entry is not None and self.learner is not None:
                assert self.learner.snap is not None, "entered without an offer"
                out = bytearray(codec.encoded_size(FRAGMENT.unit_sizes))
                codec.encode_difference(
                    self.learner.base, self.learner.snap, FRAGMENT.unit_sizes, out, _scratch
                )
                payload = bytes(out)
                self.swarm.truth.uploaded(enter.round, enter.entry, payload)
        self.buffers[enter.round] = Buffers(commit, enter.encoded, enter.signature, bounds, payload)

    def _part(self, buffers: Buffers, index: int) -> bytes:
        begin, end = buffers.bounds[index]
        if buffers.commit.kind == "merge":
            assert buffers.payload is not None
            return buffers.payload[begin:end]
        assert self.state is not None
        marks = [
            (peer, mark.incarnation, mark.step, mark.tokens)
            for peer, mark in sorted(self.state.merged.items())
        ]
        return msgspec.msgpack.encode(
            (
                self.state.theta[begin:end].tobytes(),
                self.state.momentum[begin:end].tobytes(),
                marks if index == 0 else [],
            )
        )

    def _upload(self, upload: Upload) -> None:
        buffers = self.buffers.get(upload.round)
        if buffers is None:
            return
        if upload.what == OWN:
            data = self._part(buffers, upload.slice)
        elif upload.what == MERGED:
            data = buffers.merged[upload.slice]
        else:
            data = b""
        opening = Opening(
            fragment=0,
            round=upload.round,
            slice=upload.slice,
            what=upload.what,
            commit=buffers.encoded,
            signature=buffers.signature,
        )
        self._stream += 1
        stream = self._stream
        buffers.streams[upload.slice] = stream
        buffers.reducer[upload.slice] = upload.to
        sender, to, swarm = self.name, upload.to, self.swarm
        if to == sender:
            swarm.heap.call_in(0.0, swarm.deliver_upload, sender, to, opening, data, stream)
            return
        swarm.network.transfer(
            sender,
            to,
            len(data) + 1000,
            lambda: swarm.deliver_upload(sender, to, opening, data, stream),
            lambda: self.stream_broke(upload.round, upload.slice, stream, "the stream broke"),
        )

    def stream_broke(self, round_id: bytes, index: int, stream: int, reason: str) -> None:
        buffers = self.buffers.get(round_id)
        if not self.alive or buffers is None or buffers.streams.get(index) != stream:
            return
        if index in buffers.merged:
            return
        self.run(self.machine.upload_failed(round_id, index, reason, self.now))

    def take_upload(self, sender: PeerId, opening: Opening, data: bytes, stream: int) -> None:
        problem: str | None = None
        if sender != self.name:
            problem, effects = self.machine.opening(sender, opening, self.now)
            self.run(effects)
        buffers = self.buffers.get(opening.round)
        if problem is not None or buffers is None:
            self.swarm.refuse_upload(self.name, sender, opening, stream, problem or "no buffers")
            return
        index = opening.slice
        buffers.waiters.setdefault(index, {})[sender] = stream
        if opening.what == MERGED:
            if index not in buffers.merged:
                buffers.merged[index] = data
                self.run(self.machine.merged_arrived(opening.round, index, _digest(data), self.now))
        elif opening.what == OWN:
            member = buffers.commit.index(sender)
            assert member is not None
            fault = self.swarm.faulty.get(sender)
            if fault is None:
                buffers.uploads.setdefault(index, {})[member] = data
            self.run(self.machine.upload_arrived(opening.round, index, sender, fault, self.now))
        if index in buffers.answering and index in buffers.merged:
            self._answer_one(opening.round, buffers, index, sender, stream)

    def _merge(self, merge: Merge) -> None:
        buffers = self.buffers.get(merge.round)
        if buffers is None:
            return
        uploads = buffers.uploads.get(merge.slice, {})
        payloads = [uploads[member] for member in merge.contributors]
        if buffers.commit.kind == "mix":
            data = _mixed(payloads, merge.weights)
        else:
            part = FRAGMENT.slices(buffers.commit.shares)[merge.slice]
            codec = codec_named(buffers.commit.codec)
            sizes = FRAGMENT.unit_sizes[part.units]
            out = bytearray(codec.encoded_size(sizes))
            if out:
                merge_encoded(
                    rule_named(buffers.commit.merge),
                    codec,
                    payloads,
                    merge.weights,
                    sizes,
                    FRAGMENT.kinds[part.units],
                    out,
                    _scratch,
                )
            data = bytes(out)
        buffers.merged[merge.slice] = data
        self.run(self.machine.slice_merged(merge.round, merge.slice, _digest(data), self.now))

    def _answer(self, answer: Answer) -> None:
        buffers = self.buffers.get(answer.round)
        if buffers is None:
            return
        buffers.answering.add(answer.slice)
        for peer, stream in sorted(buffers.waiters.get(answer.slice, {}).items()):
            self._answer_one(answer.round, buffers, answer.slice, peer, stream)

    def _answer_one(
        self, round_id: bytes, buffers: Buffers, index: int, peer: PeerId, stream: int
    ) -> None:
        buffers.waiters.get(index, {}).pop(peer, None)
        if peer == self.name:
            return
        data = buffers.merged[index]
        swarm = self.swarm
        if not swarm.may_answer(self, round_id, index, peer):
            return
        swarm.network.transfer(
            self.name,
            peer,
            len(data) + 100,
            lambda: swarm.deliver_merged(peer, round_id, index, data),
            lambda: swarm.break_stream(peer, round_id, index, stream),
        )

    def take_merged(self, round_id: bytes, index: int, data: bytes) -> None:
        buffers = self.buffers.get(round_id)
        if not self.alive or buffers is None or index in buffers.merged:
            return
        buffers.merged[index] = data
        self.run(self.machine.merged_arrived(round_id, index, _digest(data), self.now))

    def merged_bytes(self, apply: Apply) -> list[bytes]:
        buffers = self.buffers[apply.round]
        return [buffers.merged[index] for index in range(len(buffers.bounds))]

    def _apply(self, apply: Apply) -> None:
        state, learner = self.state, self.learner
        assert state is not None and learner is not None
        standing, commit = apply.standing, apply.commit
        merged = standing.merged
        parts = self.merged_bytes(apply)
        if commit.kind == "mix":
            theta, momentum, merged = _unmixed(parts)
        else:
            theta, momentum = state.theta.copy(), state.momentum.copy()
            outer.step_encoded(
                theta,
                momentum,
                codec_named(commit.codec),
                b"".join(parts),
                FRAGMENT.unit_sizes,
                eta=commit.eta,
                mu=commit.mu,
                scratch=_scratch,
            )
        after = FragmentState(
            0, standing.version, standing.lineage, standing.chain, theta, momentum, merged
        )
        truth = self.swarm.truth
        works = []
        if commit.kind == "merge":
            entries = [commit.members[index] for index in apply.seal]
            works = [truth.offers[entry.peer, entry.incarnation, entry.mark] for entry in entries]
        parents = [parent.lineage for parent in commit.parents]
        truth.made(after, parents, works, commit.kind == "mix")
        self._take_state(after)
        contained = apply.contained
        if commit.kind == "mix":
            # Another side may have merged more of my work than mine has: its ``merged`` tells.
            mark = merged.get(self.name)
            if mark is not None and mark.incarnation == self.incarnation:
                contained = mark.step if mark.step > learner.from_step else None
        learner.adopt(after, contained)
        mixed = merged if commit.kind == "mix" else None
        self.run(self.machine.finished(apply.round, self.now, merged=mixed))

    def _take_state(self, state: FragmentState) -> None:
        self.swarm.truth.stands(self, state)
        self.state = state
        self._remember_theta(state)
        self.swarm.save(self)

    def _remember_theta(self, state: FragmentState) -> None:
        self.history[state.lineage] = state.theta
        while len(self.history) > 64:
            self.history.popitem(last=False)

    def _fold(self, fold: Fold) -> None:
        state, learner = self.state, self.learner
        assert state is not None and learner is not None and learner.snap is not None
        standing = fold.standing
        after = FragmentState(
            0,
            standing.version,
            standing.lineage,
            standing.chain,
            learner.snap.copy(),
            state.momentum,
            standing.merged,
        )
        work = self.swarm.truth.offers[self.name, self.incarnation, fold.contained]
        self.swarm.truth.made(after, [state.lineage], [work], False)
        self._take_state(after)
        learner.adopt(after, fold.contained)
        self.run(self.machine.folded(self.now))

    # Catching up: a whole state from one peer. Replaying is the driver's.

    def _fetch_state(self, source: PeerId, lineage: bytes, effect: CatchUp | Rebase) -> None:
        self._fetch += 1
        number = self._fetch
        swarm, me = self.swarm, self.name

        def failed() -> None:
            if self.alive and self._fetch == number:
                self._fetch += 1
                self.run(self.machine.caught_up(None, self.now))

        def arrived(state: FragmentState) -> None:
            if self.alive and self._fetch == number:
                self._fetch += 1
                self._caught_up(state, effect)

        def asked() -> None:
            other = swarm.nodes.get(source)
            if other is None or not other.alive or other.state is None:
                return
            state = other.state
            swarm.network.transfer(source, me, 2000, lambda: arrived(state), lambda: None)

        swarm.network.transfer(me, source, 200, asked, failed)
        swarm.heap.call_in(swarm.policy.catch_up_s * 0.8, self._when_awake, failed)

    def _caught_up(self, state: FragmentState, effect: CatchUp | Rebase) -> None:
        before = self.state
        assert before is not None
        ahead = state.chain.find(before.version, before.lineage) is not None
        if isinstance(effect, CatchUp) and (not ahead or state.lineage == before.lineage):
            self.run(self.machine.caught_up(None, self.now))
            return
        learner = self.learner
        mark = state.merged.get(self.name)
        mine = mark.step if mark is not None and mark.incarnation == self.incarnation else 0
        self._take_state(state)
        if learner is not None:
            if ahead:
                contained = mine if mine > learner.from_step else None
                learner.adopt(state, contained)
            else:
                assert isinstance(effect, Rebase)
                found = next(
                    (
                        self.history[link.lineage]
                        for link in reversed(state.chain)
                        if link.lineage in self.history and link.lineage != state.lineage
                    ),
                    None,
                )
                learner.rebase(state, found, mine)
        self.run(self.machine.caught_up(Standing.of(state), self.now))


def _digest(data: bytes) -> bytes:
    return blake3.blake3(data).digest()


def _mixed(payloads: Sequence[bytes], weights: Sequence[float]) -> bytes:
    theta: Float32s | None = None
    momentum: Float32s | None = None
    merged = MergedMap()
    for payload, weight in zip(payloads, weights, strict=True):
        theta_bytes, momentum_bytes, marks = msgspec.msgpack.decode(payload)
        one = np.frombuffer(theta_bytes, dtype="<f4") * np.float32(weight)
        two = np.frombuffer(momentum_bytes, dtype="<f4") * np.float32(weight)
        theta = one if theta is None else theta + one
        momentum = two if momentum is None else momentum + two
        merged = merged.united({PeerId(p): Mark(i, s, t) for p, i, s, t in marks})
    assert theta is not None and momentum is not None
    marks = [(p, m.incarnation, m.step, m.tokens) for p, m in sorted(merged.items())]
    return msgspec.msgpack.encode((theta.tobytes(), momentum.tobytes(), marks))


def _unmixed(parts: Sequence[bytes]) -> tuple[Float32s, Float32s, MergedMap]:
    decoded = [msgspec.msgpack.decode(part) for part in parts]
    theta = np.concatenate([np.frombuffer(part[0], dtype="<f4") for part in decoded])
    momentum = np.concatenate([np.frombuffer(part[1], dtype="<f4") for part in decoded])
    marks = {PeerId(p): Mark(i, s, t) for p, i, s, t in decoded[0][2]}
    return theta, momentum, MergedMap(marks)


# Everybody


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerPlan:
    """What a peer is like."""

    step_time_s: float = 1.0
    tokens_per_step: int = 100
    clock_offset_s: float = 0.0
    starts_at: float = 0.0
    dial_out_only: bool = False
    trains: bool = True
    founder: bool = False


class Swarm:
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
    ) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.policy = policy
        self.slices = slices
        self.merge_s = 0.05
        self.heartbeat_s = heartbeat_s
        self.heap = EventHeap()
        self.network = SimulatedNetwork(self.heap, weather, seed)
        self.truth = Truth()
        self.nodes: dict[PeerId, Node] = {}
        self.disk: dict[PeerId, FragmentState] = {}
        self.plans: dict[PeerId, PeerPlan] = {}
        self.lives: Counter[PeerId] = Counter()
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
        self.on_send: Callable[[PeerId, PeerId, Message], bool] | None = None
        self.answer_filter: Callable[[Node, bytes, int, PeerId], bool] | None = None
        self._goals: dict[PeerId, Float32s] = {}
        self._busy_since: dict[tuple[PeerId, int], tuple[Phase, float]] = {}
        theta = np.linspace(-1, 1, FRAGMENT.size, dtype=np.float32)
        self.origin = FragmentState.founded(LAYOUT.hash, 0, theta)
        self.truth.founded(self.origin)
        self.young = young
        self.sees = sees
        width = len(str(len(plans)))
        for number, plan in enumerate(plans):
            name = PeerId(f"p{number:0{width}}")
            self.plans[name] = plan
            if plan.dial_out_only:
                self.network.dial_out_only([name])
            self.heap.call_at(plan.starts_at, self.start, name)
        self.heap.call_in(0.0, self._heartbeat)

    @property
    def names(self) -> list[PeerId]:
        return list(self.plans)

    def goal(self, name: PeerId) -> Float32s:
        if name not in self._goals:
            rng = np.random.default_rng([self.seed, len(self._goals)])
            self._goals[name] = rng.normal(size=FRAGMENT.size).astype(np.float32)
        return self._goals[name]

    def sign(self, peer: PeerId, data: bytes) -> bytes:
        """Stands for a signature: the round machine only asks whether it holds."""
        return _digest(peer.encode() + b"/" + data)

    # What happens to peers

    def start(self, name: PeerId) -> Node:
        plan = self.plans[name]
        self.lives[name] += 1
        state = self.disk.get(name, self.origin) if plan.trains else None
        if name in self.nodes or name in self.disk:
            self.network.restart(name)
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
        self.heap.call_in(self.network.weather.silence_s, self._streams_to(name))
        self.record("crash", name)

    def restart(self, name: PeerId) -> None:
        if not self.nodes[name].alive:
            self.start(name)
            self.record("restart", name)

    def pause(self, name: PeerId) -> None:
        self.network.pause(name)

    def resume(self, name: PeerId) -> None:
        self.network.resume(name)
        self.nodes[name].wake()

    def save(self, node: Node) -> None:
        """A checkpoint, not of every version: a restart may come back with an older one."""
        if node.state is not None and (node.name not in self.disk or self.rng.random() < 0.7):
            self.disk[node.name] = node.state

    def _streams_to(self, name: PeerId) -> Callable[[], None]:
        dead = self.nodes[name]

        def broke() -> None:
            for other in list(self.nodes.values()):
                if other.alive and other is not dead:
                    for round_id, buffers in list(other.buffers.items()):
                        for index, to in list(buffers.reducer.items()):
                            if to == name:
                                stream = buffers.streams[index]
                                other.stream_broke(round_id, index, stream, "its host is gone")

        return broke

    # Membership, as the table of dht would see it

    def _introduce(self, node: Node) -> None:
        since = -1e6 if not self.young and node.plan.starts_at == 0.0 else 0.0
        for other in self.nodes.values():
            if other is not node and other.alive:
                if self.sees is None or self.sees(node, other):
                    self._sees(node, other, since)
                if self.sees is None or self.sees(other, node):
                    self._sees(other, node, since)

    def _sees(self, node: Node, other: Node, since: float = 0.0) -> None:
        known = node.view.get(other.name)
        node.view[other.name] = PeerView(
            first_seen=known.first_seen if known else node.now + since,
            heard_at=node.now,
            failed_at=None,
            reachable=not other.plan.dial_out_only,
            trains=other.plan.trains,
            step_time_s=other.plan.step_time_s,
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

    # Delivering

    def deliver(self, sender: PeerId, to: PeerId, data: bytes) -> None:
        node = self.nodes.get(to)
        if node is None or not node.alive:
            return
        if self.on_send is not None and not self.on_send(sender, to, said.decode(data)):
            return
        node.hear(sender, data)

    def deliver_upload(
        self, sender: PeerId, to: PeerId, opening: Opening, data: bytes, stream: int
    ) -> None:
        node = self.nodes.get(to)
        if node is not None and node.alive:
            node.take_upload(sender, opening, data, stream)

    def deliver_merged(self, to: PeerId, round_id: bytes, index: int, data: bytes) -> None:
        node = self.nodes.get(to)
        if node is not None and node.alive:
            node.take_merged(round_id, index, data)

    def refuse_upload(
        self, at: PeerId, sender: PeerId, opening: Opening, stream: int, reason: str
    ) -> None:
        self.truth.coverage[f"refused stream: {reason}"] += 1
        node = self.nodes.get(sender)
        if node is None:
            return
        self.network.transfer(
            at,
            sender,
            100,
            lambda: node.stream_broke(opening.round, opening.slice, stream, reason),
            lambda: None,
        )

    def break_stream(self, peer: PeerId, round_id: bytes, index: int, stream: int) -> None:
        """An answer was lost on its way: the member's side of the stream notices."""
        node = self.nodes.get(peer)
        if node is not None and node.alive:
            node.stream_broke(round_id, index, stream, "the stream broke")

    def may_answer(self, node: Node, round_id: bytes, index: int, peer: PeerId) -> bool:
        return self.answer_filter is None or self.answer_filter(node, round_id, index, peer)

    # Watching

    def record(self, event: str, name: PeerId) -> None:
        self.trace.update(f"{self.heap.now!r} {name} {event}\n".encode())

    def heard_note(self, node: Node, note: Note) -> None:
        self.truth.note(node, note)
        self.trace.update(f"{self.heap.now!r} {node.name} {note.event} {note.fields}\n".encode())
        if self.keep_events:
            self.events.append((self.heap.now, node.name, note))
        if self.on_note is not None:
            self.on_note(node, note)

    def check(self, node: Node) -> None:
        """The invariants that can be seen at one peer, after each of its events."""
        machine = node.machine
        now = node.now
        if machine.phase is not Phase.IDLE or machine.rounds or machine.gathering or machine.doubt:
            deadline = machine.deadline
            if deadline is None or deadline > now + 2 * self.policy.round_s:
                raise Broken(f"{node} waits without a deadline")
        life = (node.name, node.incarnation)
        phase, since = self._busy_since.get(life, (Phase.IDLE, now))
        if machine.phase is not phase:
            self._busy_since[life] = (machine.phase, now)
        elif phase is not Phase.IDLE and now - since > 3 * self.policy.round_s:
            raise Broken(f"{node} has been {phase} for {now - since:.0f} s")
        if node.learner is not None:
            self.check_fate(node)
        kept = (len(machine.rounds), len(machine._outcomes), len(machine.around.failed))
        if kept > (32,) or kept[1] > 64 or kept[2] > 256:
            raise Broken(f"{node} grows without bound")

    def check_fate(self, node: Node) -> None:
        """processed = merged + pending + discarded, of all of a peer's incarnations."""
        learner, standing = node.learner, node.machine.standing
        assert learner is not None and standing is not None
        if node.state is None or node.state.lineage != standing.lineage:
            return  # between applying and saying so
        covered = self.truth.covered[standing.lineage]
        mine = covered.get((node.name, node.incarnation), 0)
        if learner.from_step < mine:
            raise Broken(f"{node}: steps {learner.from_step} to {mine} would be offered again")
        mark = standing.merged.get(node.name)
        merged = mark.tokens if mark is not None else 0
        processed = learner.step * learner.tokens_per_step
        discarded = learner.discarded
        for incarnation, (steps, tokens_per_step) in self.crashed.get(node.name, {}).items():
            processed += steps * tokens_per_step
            lost = steps - covered.get((node.name, incarnation), 0)
            discarded += lost * tokens_per_step
        if processed == merged + learner.pending + discarded:
            return
        # After a mix the larger of two forks' token counts stands, so some work is called lost.
        forked = self.truth.mixed[standing.lineage] or bool(self.let_go[node.name])
        if forked and merged + learner.pending <= processed:
            return
        raise Broken(
            f"{node}: processed {processed}, merged {merged}, pending {learner.pending}, "
            f"discarded {discarded}"
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
    """How bad it gets."""

    peers: tuple[int, int] = (2, 7)
    accidents: tuple[int, int] = (2, 7)
    rough_s: float = 110.0
    calm_s: float = 130.0


def storm(seed: int, how: Storm | None = None) -> Swarm:
    """A swarm with everything that can happen to it drawn from the seed.

    The weather is bad for ``rough_s``; whatever is still broken then is mended.
    """
    how = how or Storm()
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
        codec=rng.choice(["f32", "int8", "int4", "f16"]),
    )
    swarm = Swarm(
        seed,
        plans,
        weather=rough,
        policy=policy,
        slices=rng.randint(1, 4),
        young=rng.random() < 0.2,
    )
    for _ in range(rng.randint(*how.accidents)):
        _accident(swarm, rng, how)
    swarm.heap.call_at(how.rough_s, _mend, swarm)
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
        if (
            len(swarm.lineages()) == 1
            and min(swarm.versions()) >= before + 2
            and not any(node.machine.doubt for node in swarm.alive)
        ):
            return
    raise Broken(
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


def _mend(swarm: Swarm) -> None:
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


__all__ = ["NOTHING", "POLICY", "Broken", "Node", "PeerPlan", "Swarm", "Truth", "Work"]
