"""One fragment at one simulated peer: carries out what its round machine decides, in virtual time.

What ``averaging.live.averager`` and ``averaging.live.exchange`` are in a live peer, without sockets
and threads: the machine, the codecs, the merge, the outer step and the replay are the same code,
only the bytes travel over ``dht.memory.network``. Whoever simulates gives each node a machine, a
state and a learner, watches it through a ``Watch``, and owns the peer that the node belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Protocol

import blake3
import numpy as np

from averaging import messages as said
from averaging.history.adoption import Parting
from averaging.history.lineage import MergedMap
from averaging.history.replay import ReplayEntry, ReplayHead, ReplayLog, advance
from averaging.history.rewind import rewound
from averaging.history.standing import Standing, melded, told
from averaging.history.state import FragmentState
from averaging.messages import MERGED, NOTHING, OWN, Commit, Message, Opening
from averaging.numbers.arithmetic import Cutting, MeldNumbers, Numbers, encoded_size, numbers_of
from averaging.numbers.arrays import Float32s
from averaging.numbers.codec import Scratch
from averaging.numbers.layout import Fragment
from averaging.round import taking_over
from averaging.round.catching_up import patience_s
from averaging.round.effects import (
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
    Presume,
    Rebase,
    Reduce,
    Send,
    Settle,
    Silent,
    TakeSnapshot,
    Upload,
)
from averaging.round.joining import Offer
from averaging.round.machine import FragmentRounds
from averaging.round.taking_over import (
    Life,
    hand_over,
    is_newer,
    parting_at,
    prefers_replay,
    shared_version,
)
from averaging.rules.sites import SITE_SHARE, riders_of
from averaging.rules.sites import shares as site_shares
from averaging.rules.weights import weights_of
from averaging.simulated.correction import CorrectedNumbers
from dht.identity import PeerId
from dht.memory.network import EventHeap, SimulatedNetwork, Timer

HELD_MAX = 64
"""Events that wait for a sleeping peer to wake; what comes after is lost, as in a full queue."""
STREAM_OVERHEAD_BYTES = 1000
"""An opening with its commit, roughly."""
MARK_BYTES = 48
"""One peer's entry of a merged map on the wire, roughly."""
REQUEST_BYTES = 200
MELDS_KEPT = 256

_scratch = Scratch()


class FragmentLearner(taking_over.Learner, Protocol):
    """One fragment of a learner's parameters, and the own work that is in each version."""

    @property
    def base(self) -> Float32s:
        """Theta that the parameters grew from."""
        ...

    @property
    def snapshot(self) -> Float32s | None:
        """The values that were offered, until they are adopted or released."""
        ...

    def offer(self) -> Offer: ...

    def release(self) -> None: ...

    def discard(self, state: FragmentState) -> None:
        """Give up pending work: go on from ``state.theta``."""
        ...


class Owner(Protocol):
    """The peer that a node belongs to."""

    @property
    def name(self) -> PeerId: ...

    @property
    def incarnation(self) -> int: ...

    @property
    def alive(self) -> bool: ...

    def now(self) -> float:
        """On the peer's own clock. The machines know of the learner's steps up to then."""
        ...

    def global_time(self, own_time: float) -> float: ...

    def when_awake(self, action: Callable[[], None]) -> None:
        """Now, or when the peer wakes up; never if it is dead."""
        ...

    def wants_snapshot(self, node: FragmentNode) -> bool:
        """The fragment is offered at the next safe point, by ``node.offer()``, unless it has its
        turn later (``averaging.round.turns``). ``False``: there is nothing to offer."""
        ...

    def heard(self, peer: PeerId) -> None:
        """Something came from this peer, about whatever fragment."""
        ...

    def silent(self, peer: PeerId, since: float) -> None:
        """One node waited for its leader's answer in vain (``averaging.round.silence``)."""
        ...

    def ran(self, node: FragmentNode) -> None:
        """The node's machine has had an input: its due time may have moved."""
        ...


class Watch:
    """Sees what nodes do. These do nothing; simulators and tests override what they care for."""

    def offered(self, node: FragmentNode, offer: Offer) -> None: ...

    def uploaded(self, node: FragmentNode, round_id: bytes, entry: int, payload: bytes) -> None: ...

    def vowed(self, node: FragmentNode, round_id: bytes) -> None: ...

    def applies(self, node: FragmentNode, apply: Apply) -> None: ...

    def merged(self, node: FragmentNode, after: FragmentState, apply: Apply) -> None:
        """A round is over at this peer, which is about to stand on ``after``."""

    def folded(self, node: FragmentNode, after: FragmentState, fold: Fold) -> None: ...

    def stands(self, node: FragmentNode, state: FragmentState) -> None: ...

    def gave_way(self, node: FragmentNode, before: FragmentState, after: FragmentState) -> None:
        """A lighter side took a heavier one's state."""

    def discarded(self, node: FragmentNode, reason: str) -> None: ...

    def noted(self, node: FragmentNode, note: Note) -> None: ...

    def checked(self, node: FragmentNode) -> None:
        """After each input of the machine, when all effects are carried out."""

    def heard(self, node: FragmentNode, sender: PeerId, message: Message) -> None: ...

    def refused(self, node: FragmentNode, sender: PeerId, reason: str) -> None: ...

    # Bad luck, on purpose

    def lets_through(self, sender: PeerId, to: PeerId, message: Message) -> bool:
        return True

    def lets_answer(
        self, node: FragmentNode, round_id: bytes, slice_index: int, to: PeerId
    ) -> bool:
        return True

    def fault_of(self, sender: PeerId) -> str | None:
        """Why this peer's uploads are refused, if they are."""
        return None


@dataclass(frozen=True, slots=True)
class Part:
    """A slice as it travels."""

    data: bytes
    marks: MergedMap | None
    """A mix's merged map, with the first slice."""

    @property
    def size_bytes(self) -> int:
        return len(self.data) + (MARK_BYTES * len(self.marks) if self.marks is not None else 0)

    @property
    def digest(self) -> bytes:
        hasher = blake3.blake3(self.data)
        if self.marks is not None:
            hasher.update(self.marks.digest())
        return hasher.digest()


@dataclass(slots=True)
class Buffers:
    """What a node keeps of a round until ``Forget``."""

    commit: Commit
    encoded: bytes
    signature: bytes
    numbers: Numbers
    cutting: Cutting
    payload: bytes | None = None
    """My own contribution."""
    marks: MergedMap | None = None
    uploads: dict[int, dict[int, Part]] = field(default_factory=dict)
    merged: dict[int, Part] = field(default_factory=dict)
    answering: set[int] = field(default_factory=set)
    bundles: dict[int, dict[int, tuple[int, ...]]] = field(default_factory=dict)
    """By slice and delegate, the riders whose contributions its upload holds."""
    waiters: dict[int, dict[PeerId, int]] = field(default_factory=dict)
    streams: dict[int, int] = field(default_factory=dict)
    """By slice, the number of my newest stream for it."""
    reducer: dict[int, PeerId] = field(default_factory=dict)
    """By slice, to whom that stream goes."""
    wanted: dict[int, Upload] = field(default_factory=dict)
    """By slice, the machine's last word on where mine goes."""
    delegate: PeerId | None = None
    """Whom my uploads go to instead, as long as it is there (``averaging.rules.sites``)."""
    riders: tuple[int, ...] = ()
    """Whose uploads come to me ..."""
    site_parts: dict[int, dict[int, Part]] = field(default_factory=dict)
    """... by rider and slice ..."""
    bundle: dict[int, Part] | None = None
    """... and what they made with mine, by slice, once that is decided ..."""
    bundled: tuple[int, ...] = ()
    """... with the riders who are in it."""

    def own_part(self, index: int) -> Part:
        assert self.payload is not None
        marks = self.marks if index == 0 else None
        return Part(self.payload[self.cutting.data_of(index)], marks)


@dataclass(frozen=True, slots=True, eq=False)
class Stepped:
    """What all members of a meld come to. Nobody writes to it."""

    data: memoryview
    mean: Float32s
    """Theta before the step."""
    norm: float
    """Its own, squared."""
    theta: Float32s
    momentum: Float32s


@dataclass(frozen=True, slots=True, eq=False)
class Carried:
    """What everybody who stands on a state brings of it into a meld: all but the displacement."""

    codec: str
    theta: Float32s
    momentum: Float32s
    payload: bytes
    """With room for the displacement."""


@dataclass(slots=True)
class Wires:
    """The way from node to node: one network for all, and everybody's nodes by name."""

    heap: EventHeap
    network: SimulatedNetwork
    watch: Watch
    merge_s: float = 0.05
    """What merging a slice takes, and the outer step."""
    bulk_factor: float = 1.0
    """Slices travel as if they were so many times as large."""
    shortcuts: bool = False
    """Whether what comes out the same at all is made once: a message is heard as it was said,
    without being decoded, the step of a meld is taken for all of its members, and a state is
    encoded for all who stand on it."""
    numbers_of: Callable[[Commit], Numbers] = numbers_of
    """The arithmetic of a round. Another one than the live peers' is there to be compared."""
    nodes: dict[tuple[PeerId, int], FragmentNode] = field(default_factory=dict)
    _melded: dict[bytes, tuple[MergedMap, MergedMap]] = field(default_factory=dict)
    _stepped: dict[bytes, Stepped] = field(default_factory=dict)
    _carried: dict[bytes, Carried] = field(default_factory=dict)
    """By the lineage of the state."""
    _cuttings: dict[tuple[int, str, str, tuple[int, ...]], Cutting] = field(default_factory=dict)
    _said: tuple[Message, int, Message] | None = None
    """The last message, how long it is and as it is heard: many are said to all of a roster."""

    def node(self, peer: PeerId, fragment: int) -> FragmentNode | None:
        """The node, if its peer is alive."""
        node = self.nodes.get((peer, fragment))
        return node if node is not None and node.owner.alive else None

    def melded(
        self, round_id: bytes, united: MergedMap, commit: Commit, seal: tuple[int, ...]
    ) -> MergedMap:
        """What is merged after a meld. All members compute the same; here once is enough."""
        known = self._melded.get(round_id)
        if known is None or known[0] is not united:
            known = self._melded[round_id] = (united, melded(united, commit, seal))
            while len(self._melded) > MELDS_KEPT:
                del self._melded[next(iter(self._melded))]
        return known[1]

    def stepped(
        self, round_id: bytes, data: memoryview, numbers: MeldNumbers, cutting: Cutting
    ) -> Stepped:
        """What a meld's merged bytes make of theta and momentum."""
        known = self._stepped.get(round_id)
        if known is None or known.data != data:
            theta = np.empty(cutting.fragment.size, np.float32)
            momentum = np.empty_like(theta)
            chunks = cutting.all_chunks
            for chunk in chunks:
                numbers.decode(chunk, data[chunk.data], theta, momentum, _scratch)
                numbers.measure_mean(chunk, theta)
            mean = theta.copy()
            for chunk in chunks:
                numbers.move(chunk, data[chunk.data], theta, momentum, _scratch)
            known = Stepped(data, mean, numbers.norm, theta, momentum)
            self._stepped[round_id] = known
            while len(self._stepped) > MELDS_KEPT:
                del self._stepped[next(iter(self._stepped))]
        return known

    def carried(
        self, state: FragmentState, codec: str, numbers: MeldNumbers, cutting: Cutting
    ) -> bytes:
        """What a meld's payload holds of a state."""
        known = self._carried.get(state.lineage)
        if (
            known is None
            or known.theta is not state.theta
            or known.momentum is not state.momentum
            or known.codec != codec
        ):
            out = bytearray(cutting.data_size)
            view = memoryview(out)
            for chunk in cutting.all_chunks:
                numbers.encode_own(chunk, view[chunk.data], _scratch)
            known = Carried(codec, state.theta, state.momentum, bytes(out))
            self._carried[state.lineage] = known
            while len(self._carried) > MELDS_KEPT:
                del self._carried[next(iter(self._carried))]
        return known.payload

    def cutting(self, fragment: Fragment, numbers: Numbers, commit: Commit) -> Cutting:
        """How a round cuts the fragment: most do it alike."""
        alike = fragment.index, commit.kind, commit.codec, commit.shares
        known = self._cuttings.get(alike)
        if known is None:
            known = self._cuttings[alike] = Cutting(fragment, numbers, commit.shares)
            while len(self._cuttings) > MELDS_KEPT:
                del self._cuttings[next(iter(self._cuttings))]
        return known

    def send(self, sender: FragmentNode, to: PeerId, message: Message) -> None:
        if self._said is None or self._said[0] is not message:
            data = said.encode(message)
            self._said = message, len(data), message if self.shortcuts else said.decode(data)
        _, size, heard = self._said
        fragment = sender.fragment.index

        def deliver() -> None:
            node = self.node(to, fragment)
            if node is None:
                return
            if self.watch.lets_through(sender.name, to, heard):
                node.hear(sender.name, heard)

        self.network.transfer(sender.name, to, size, deliver, lambda: sender.lost(to))

    def open_upload(
        self, sender: FragmentNode, to: PeerId, opening: Opening, part: Part | None, stream: int
    ) -> None:
        fragment = sender.fragment.index

        def deliver() -> None:
            node = self.node(to, fragment)
            if node is not None:
                node.take_upload(sender.name, opening, part, stream)

        def broke() -> None:
            sender.stream_broke(opening.round, opening.slice, stream, "the stream broke")

        if to == sender.name:
            self.heap.call_in(0.0, deliver)
            return
        size = STREAM_OVERHEAD_BYTES + (self._bulk(part) if part is not None else 0)
        self.network.transfer(sender.name, to, size, deliver, broke)

    def refuse_upload(
        self, at: FragmentNode, sender: PeerId, opening: Opening, stream: int, reason: str
    ) -> None:
        self.watch.refused(at, sender, reason)
        node = self.nodes.get((sender, at.fragment.index))
        if node is None:
            return
        self.network.transfer(
            at.name,
            sender,
            100,
            lambda: node.stream_broke(opening.round, opening.slice, stream, reason),
            lambda: None,
        )

    def answer(
        self, at: FragmentNode, to: PeerId, round_id: bytes, index: int, part: Part, stream: int
    ) -> None:
        fragment = at.fragment.index
        if not self.watch.lets_answer(at, round_id, index, to):
            return

        def deliver() -> None:
            node = self.node(to, fragment)
            if node is not None:
                node.take_merged(round_id, index, part)

        def broke() -> None:
            # An answer was lost on its way: the member's side of the stream notices.
            node = self.node(to, fragment)
            if node is not None:
                node.stream_broke(round_id, index, stream, "the stream broke")

        self.network.transfer(at.name, to, self._bulk(part) + 100, deliver, broke)

    def _bulk(self, part: Part) -> int:
        return int(self.bulk_factor * part.size_bytes)

    def streams_to(self, dead: PeerId) -> None:
        """Everybody who has a stream open to a dead peer notices now."""
        for node in list(self.nodes.values()):
            if node.owner.alive and node.name != dead:
                node.lost_reducer(dead)


class FragmentNode:
    """One incarnation of one peer, for one fragment."""

    def __init__(
        self,
        owner: Owner,
        wires: Wires,
        fragment: Fragment,
        machine: FragmentRounds,
        state: FragmentState | None,
        learner: FragmentLearner | None,
        *,
        replay_bytes_max: int = 0,
    ) -> None:
        self.owner = owner
        self.name = owner.name
        self.wires = wires
        self.fragment = fragment
        self.machine = machine
        self.state: FragmentState | None = None
        self.learner = learner
        self.buffers: dict[bytes, Buffers] = {}
        self.replay: ReplayLog | None = None
        self.fetched_bytes = 0
        """For catching up."""
        self._replay_bytes_max = replay_bytes_max
        self._life = Life(owner.name, owner.incarnation)
        self._stream = 0
        self._timer: Timer | None = None
        self._fetch = 0
        wires.nodes[owner.name, fragment.index] = self
        if state is not None:
            self.state = state
            self._restart_replay(state)

    def __repr__(self) -> str:
        return f"FragmentNode({self.name}, {self.fragment.index}, {self.machine.phase})"

    @property
    def is_busy(self) -> bool:
        """A snapshot or a round is under way."""
        outstanding = self.learner is not None and self.learner.snapshot is not None
        return outstanding or self.machine.mine is not None

    # Inputs

    def run(self, effects: list[Effect]) -> None:
        """Carry out what the machine wants, in order."""
        if not self.owner.alive:
            return
        queue = list(effects)
        for effect in queue:
            queue += self._carry_out(effect)
        self.reschedule()
        self.owner.ran(self)
        self.wires.watch.checked(self)

    def reschedule(self) -> None:
        """Have the machine ticked when it wants to be."""
        at = self._ticks_at()
        if self._timer is not None:
            if at is not None and self._timer.when <= at:
                return  # it rings too early, and looks again
            self._timer.cancel()
            self._timer = None
        if at is not None:
            self._timer = self.wires.heap.call_at(at, self._tick)

    def _ticks_at(self) -> float | None:
        deadline = self.machine.deadline
        return None if deadline is None else self.owner.global_time(deadline) + 1e-6

    def _tick(self) -> None:
        self._timer = None
        at = self._ticks_at()
        if at is None or at > self.wires.heap.now:
            self.reschedule()
            return
        self.owner.when_awake(lambda: self.run(self.machine.tick(self.owner.now())))

    def stop(self) -> None:
        """The peer has crashed."""
        if self._timer is not None:
            self._timer.cancel()

    def hear(self, sender: PeerId, message: Message) -> None:
        self.wires.watch.heard(self, sender, message)
        self.owner.heard(sender)
        self.run(self.machine.receive(sender, message, self.owner.now()))

    def lost(self, peer: PeerId) -> None:
        if self.owner.alive:
            self.run(self.machine.lost(peer, self.owner.now()))

    def offer(self) -> list[Effect]:
        """At a safe point, after ``Owner.wants_snapshot``."""
        if self.learner is None:
            return self.machine.offered(None, self.owner.now())
        offer = self.learner.offer()
        self.wires.watch.offered(self, offer)
        return self.machine.offered(offer, self.owner.now())

    # Carrying out effects

    def _carry_out(self, effect: Effect) -> list[Effect]:
        wires, learner = self.wires, self.learner
        match effect:
            case Send(to, message):
                wires.send(self, to, message)
            case Silent(peer, since):
                wires.heap.call_in(0.0, self.owner.silent, peer, since)
            case Note():
                wires.watch.noted(self, effect)
            case TakeSnapshot():
                if learner is None or not self.owner.wants_snapshot(self):
                    return self.machine.offered(None, self.owner.now())
            case Enter():
                self._enter(effect)
            case Reduce():
                pass
            case Upload():
                self._upload(effect)
            case Merge():
                self._later(lambda: self._merge(effect))
            case Answer():
                self._answer(effect)
            case Apply():
                wires.watch.applies(self, effect)
                self._later(lambda: self._apply(effect))
            case GiveUp(round_id, _, in_doubt):
                if round_id is not None:
                    wires.watch.vowed(self, round_id)
                if not in_doubt and learner is not None:
                    learner.release()
            case Presume(_, mark, _):
                assert learner is not None and self.state is not None
                learner.adopt(self.state, contained=mark)
            case Settle():
                if learner is not None:
                    learner.release()
            case Discard(reason):
                assert learner is not None and self.state is not None
                wires.watch.discarded(self, reason)
                learner.discard(self.state)
            case Forget(round_id):
                self.buffers.pop(round_id, None)
            case CatchUp() | Rebase():
                self._catch_up(effect)
            case Fold():
                self._later(lambda: self._fold(effect))
        return []

    def _later(self, action: Callable[[], None]) -> None:
        self.wires.heap.call_in(self.wires.merge_s, self.owner.when_awake, action)

    def _enter(self, enter: Enter) -> None:
        commit, learner = enter.commit, self.learner
        numbers = self.wires.numbers_of(commit)
        cutting = self.wires.cutting(self.fragment, numbers, commit)
        buffers = Buffers(commit, enter.encoded, enter.signature, numbers, cutting)
        self.buffers[enter.round] = buffers
        if enter.entry is None:
            return
        delegate = commit.members[enter.entry].delegate
        if delegate is not None:
            buffers.delegate = commit.members[delegate].peer
        buffers.riders = riders_of(commit, enter.entry)
        if buffers.riders:
            wait_s = SITE_SHARE * commit.upload_s
            self.wires.heap.call_in(
                wait_s, self.owner.when_awake, lambda: self._bundle(enter.round)
            )
        if isinstance(numbers, MeldNumbers):
            assert self.state is not None
            numbers.carry(self.state.theta, self.state.momentum)
            buffers.marks = self.state.merged
        elif isinstance(numbers, CorrectedNumbers):
            assert self.state is not None
            numbers.carry(self.state.theta)
        if commit.kind == "mix":
            if enter.entry not in commit.carriers:
                return
            assert self.state is not None
            buffers.marks = self.state.merged
            buffers.payload = self._encoded(buffers, self.state.momentum, self.state.theta)
        elif learner is not None:
            assert learner.snapshot is not None, "entered without an offer"
            buffers.payload = self._encoded(buffers, learner.base, learner.snapshot)
            self.wires.watch.uploaded(self, enter.round, enter.entry, buffers.payload)

    def _encoded(self, buffers: Buffers, base: Float32s, values: Float32s) -> bytes:
        numbers, cutting = buffers.numbers, buffers.cutting
        if self.wires.shortcuts and isinstance(numbers, MeldNumbers):
            assert self.state is not None
            codec = buffers.commit.codec
            out = bytearray(self.wires.carried(self.state, codec, numbers, cutting))
            encode = numbers.encode_moved
        else:
            out = bytearray(cutting.data_size)
            encode = numbers.encode
        view = memoryview(out)
        for chunk in cutting.all_chunks:
            encode(chunk, base, values, view[chunk.data], _scratch)
        return bytes(out)

    def _upload(self, upload: Upload) -> None:
        buffers = self.buffers.get(upload.round)
        if buffers is None:
            return
        buffers.wanted[upload.slice] = upload
        what, to = upload.what, upload.to
        riders: tuple[int, ...] = ()
        part: Part | None = None
        if what == OWN and buffers.delegate is not None:
            if upload.slice in buffers.reducer:
                return  # the delegate has it, and sends it wherever it is wanted
            part, to = buffers.own_part(upload.slice), buffers.delegate
        elif what == OWN and buffers.riders:
            if buffers.bundle is None:
                return  # not before everybody of the site is in it
            part, riders = buffers.bundle[upload.slice], buffers.bundled
        elif what == OWN and self._is_rider(buffers.commit):
            what = NOTHING  # in a bundle or not at all: nobody may have it twice
        elif what == OWN:
            part = buffers.own_part(upload.slice)
        elif what == MERGED:
            part = buffers.merged[upload.slice]
        opening = Opening(
            fragment=self.fragment.index,
            round=upload.round,
            slice=upload.slice,
            what=what,
            commit=buffers.encoded,
            signature=buffers.signature,
            riders=riders,
        )
        self._stream += 1
        buffers.streams[upload.slice] = self._stream
        buffers.reducer[upload.slice] = to
        self.wires.open_upload(self, to, opening, part, self._stream)

    def _is_rider(self, commit: Commit) -> bool:
        index = commit.index(self.name)
        return index is not None and commit.members[index].delegate is not None

    def _go_alone(self, buffers: Buffers) -> None:
        """My delegate is gone: fetch merged slices where they are made."""
        buffers.delegate = None
        for index, upload in sorted(buffers.wanted.items()):
            if index not in buffers.merged:
                self._upload(upload)

    # A site's delegate

    def _site_upload(
        self, round_id: bytes, buffers: Buffers, index: int, rider: int, part: Part
    ) -> None:
        buffers.site_parts.setdefault(rider, {})[index] = part
        slices = len(buffers.cutting.slices)
        if all(len(buffers.site_parts.get(each, ())) == slices for each in buffers.riders):
            self._later(lambda: self._bundle(round_id))

    def _bundle(self, round_id: bytes) -> None:
        """Decide who of the site is in the bundle, once; make it and send it."""
        buffers = self.buffers.get(round_id)
        if buffers is None or buffers.bundle is not None:
            return
        commit, cutting = buffers.commit, buffers.cutting
        slices = len(cutting.slices)
        here = [r for r in buffers.riders if len(buffers.site_parts.get(r, ())) == slices]
        me = commit.index(self.name)
        assert me is not None
        own = {index: buffers.own_part(index) for index in range(slices)}
        if here:
            inside = sorted([me, *here])
            weights = weights_of(commit, inside)
            parts = {me: own, **buffers.site_parts}
            own = {
                index: self._merged(
                    buffers, index, [parts[member][index] for member in inside], weights, None
                )
                for index in range(slices)
            }
        buffers.bundle = own
        buffers.bundled = tuple(here)
        for _, upload in sorted(buffers.wanted.items()):
            self._upload(upload)

    def stream_broke(self, round_id: bytes, index: int, stream: int, reason: str) -> None:
        buffers = self.buffers.get(round_id)
        if not self.owner.alive or buffers is None or buffers.streams.get(index) != stream:
            return
        if index in buffers.merged:
            return
        if buffers.delegate is not None and buffers.reducer[index] == buffers.delegate:
            self._go_alone(buffers)
            return
        self.run(self.machine.upload_failed(round_id, index, reason, self.owner.now()))

    def lost_reducer(self, dead: PeerId) -> None:
        for round_id, buffers in list(self.buffers.items()):
            for index, to in list(buffers.reducer.items()):
                if to == dead:
                    stream = buffers.streams[index]
                    self.stream_broke(round_id, index, stream, "its host is gone")

    def take_upload(self, sender: PeerId, opening: Opening, part: Part | None, stream: int) -> None:
        """A stream has opened and brought all that it brings."""
        problem: str | None = None
        if sender != self.name:
            problem, effects = self.machine.opening(sender, opening, self.owner.now())
            self.run(effects)
        buffers = self.buffers.get(opening.round)
        if problem is not None or buffers is None:
            self.wires.refuse_upload(self, sender, opening, stream, problem or "no buffers")
            return
        index = opening.slice
        buffers.waiters.setdefault(index, {})[sender] = stream
        if opening.what == MERGED:
            assert part is not None
            self._have_merged(opening.round, buffers, index, part)
        elif opening.what == OWN:
            member = buffers.commit.index(sender)
            assert member is not None and part is not None
            if member in buffers.riders:
                self._site_upload(opening.round, buffers, index, member, part)
            else:
                fault = self.wires.watch.fault_of(sender)
                if fault is None:
                    buffers.uploads.setdefault(index, {})[member] = part
                    if opening.riders:
                        buffers.bundles.setdefault(index, {})[member] = opening.riders
                now = self.owner.now()
                self.run(
                    self.machine.upload_arrived(
                        opening.round, index, sender, fault, now, riders=opening.riders
                    )
                )
        if self._may_answer(buffers, index, sender):
            self._answer_one(opening.round, buffers, index, sender, stream)

    def _may_answer(self, buffers: Buffers, index: int, peer: PeerId) -> bool:
        """Whether a merged slice may go out to this peer: a rider's may as soon as it is here."""
        if index not in buffers.merged:
            return False
        return index in buffers.answering or buffers.commit.index(peer) in buffers.riders

    def _merge(self, merge: Merge) -> None:
        buffers = self.buffers.get(merge.round)
        if buffers is None:
            return
        uploads = buffers.uploads.get(merge.slice, {})
        bundles = buffers.bundles.get(merge.slice, {})
        shares = site_shares(merge.contributors, merge.weights, bundles)
        merged = self._merged(
            buffers,
            merge.slice,
            [uploads[share.carrier] for share in shares],
            [share.weight for share in shares],
            [share.members for share in shares] if bundles else None,
        )
        buffers.merged[merge.slice] = merged
        now = self.owner.now()
        self.run(self.machine.slice_merged(merge.round, merge.slice, merged.digest, now))

    def _merged(
        self,
        buffers: Buffers,
        index: int,
        parts: Sequence[Part],
        weights: Sequence[float],
        members: Sequence[int] | None,
    ) -> Part:
        cutting = buffers.cutting
        where = cutting.data_of(index)
        out = bytearray(where.stop - where.start)
        for chunk in cutting.chunks[index]:
            piece = slice(chunk.data.start - where.start, chunk.data.stop - where.start)
            buffers.numbers.merge(
                chunk,
                [memoryview(part.data)[piece] for part in parts],
                weights,
                memoryview(out)[piece],
                _scratch,
                members=members,
            )
        return Part(bytes(out), _united([part.marks for part in parts]))

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
        if peer != self.name:
            self.wires.answer(self, peer, round_id, index, buffers.merged[index], stream)

    def take_merged(self, round_id: bytes, index: int, part: Part) -> None:
        buffers = self.buffers.get(round_id)
        if buffers is not None:
            self._have_merged(round_id, buffers, index, part)

    def _have_merged(self, round_id: bytes, buffers: Buffers, index: int, part: Part) -> None:
        if index not in buffers.merged:
            buffers.merged[index] = part
            for peer, stream in sorted(buffers.waiters.get(index, {}).items()):
                if self._may_answer(buffers, index, peer):
                    self._answer_one(round_id, buffers, index, peer, stream)
            now = self.owner.now()
            self.run(self.machine.merged_arrived(round_id, index, part.digest, now))

    def merged_parts(self, round_id: bytes) -> list[Part]:
        """All merged slices, in order. Complete once the machine says ``Apply``."""
        buffers = self.buffers[round_id]
        return [buffers.merged[index] for index in range(len(buffers.cutting.slices))]

    def _apply(self, apply: Apply) -> None:
        state, learner, commit = self.state, self.learner, apply.commit
        assert state is not None and learner is not None
        buffers = self.buffers[apply.round]
        parts = self.merged_parts(apply.round)
        data = memoryview(b"".join(part.data for part in parts))
        chunks = buffers.cutting.all_chunks
        if self.wires.shortcuts and isinstance(buffers.numbers, MeldNumbers):
            stepped = self.wires.stepped(apply.round, data, buffers.numbers, buffers.cutting)
            theta, momentum = stepped.theta, stepped.momentum
            buffers.numbers.norm = stepped.norm
            for chunk in chunks:
                buffers.numbers.measure(chunk, state.theta, stepped.mean)
        else:
            theta, momentum = state.theta.copy(), state.momentum.copy()
            for chunk in chunks:
                part = data[chunk.data]
                buffers.numbers.step(chunk, part, state.theta, theta, momentum, _scratch)
        standing = apply.standing
        merged = parts[0].marks
        dispersion: float | None = None
        if isinstance(buffers.numbers, MeldNumbers):
            assert merged is not None
            merged = self.wires.melded(apply.round, merged, commit, apply.seal)
            dispersion = buffers.numbers.dispersion
        if merged is not None:
            standing = told(standing, commit, merged)
        after = standing.state(self.fragment.index, theta, momentum)
        self.wires.watch.merged(self, after, apply)
        self._take(after)
        if self.replay is not None:
            if commit.kind != "merge" or isinstance(buffers.numbers, CorrectedNumbers):
                self.replay.restart(after.version, after.lineage)
            else:
                head = ReplayHead(buffers.encoded, apply.seal, apply.digests)
                self.replay.append(ReplayEntry(head, data), after.lineage)
        contained = apply.contained
        if merged is not None and contained is None:
            # Another side of the fork may have merged more of this peer's work.
            contained = self._life.newly_contained(after.merged, state.merged)
        learner.adopt(after, contained=contained)
        now = self.owner.now()
        self.run(self.machine.finished(apply.round, now, merged=merged, dispersion=dispersion))

    def _take(self, state: FragmentState) -> None:
        self.wires.watch.stands(self, state)
        self.state = state

    def _restart_replay(self, state: FragmentState) -> None:
        if self._replay_bytes_max:
            self.replay = ReplayLog(
                bytes_max=self._replay_bytes_max, version=state.version, lineage=state.lineage
            )

    def _fold(self, fold: Fold) -> None:
        state, learner = self.state, self.learner
        assert state is not None and learner is not None and learner.snapshot is not None
        standing = fold.standing
        after = standing.state(self.fragment.index, learner.snapshot.copy(), state.momentum)
        self.wires.watch.folded(self, after, fold)
        self._take(after)
        self._restart_replay(after)
        learner.adopt(after, contained=fold.contained)
        self.run(self.machine.folded(self.owner.now()))

    # Catching up: by replay where that is possible and smaller, else a whole state

    def _catch_up(self, effect: CatchUp | Rebase) -> None:
        self._fetch += 1
        number, source, before = self._fetch, effect.source, self.state
        network, fragment = self.wires.network, self.fragment.index
        assert before is not None

        def is_current() -> bool:
            if not self.owner.alive or self._fetch != number:
                return False
            self._fetch += 1
            return True

        def failed() -> None:
            if is_current():
                self.run(self.machine.caught_up(None, self.owner.now()))

        def replayed(entries: tuple[ReplayEntry, ...]) -> None:
            if is_current():
                self._replayed(before, entries)

        def arrived(state: FragmentState) -> None:
            if is_current():
                self._fetched(state, effect)

        sizes = self.fragment.unit_sizes
        payload_bytes = encoded_size(self.machine.policy.codec, sizes)
        replays = self.replay is not None and prefers_replay(
            effect, before, payload_bytes=payload_bytes, needs_way=False
        )

        def asked() -> None:
            other = self.wires.node(source, fragment)
            if other is None or other.state is None:
                return
            state, log = other.state, other.replay
            if replays and log is not None:
                since = log.since(before.version, before.lineage) or ()
                entries = tuple(takewhile(lambda entry: entry.version <= effect.version, since))
                if entries:
                    size = sum(entry.size_bytes for entry in entries)
                    self.fetched_bytes += size
                    network.transfer(
                        source, self.name, size, lambda: replayed(entries), lambda: None
                    )
                    return
            size = state.theta.nbytes + state.momentum.nbytes + MARK_BYTES * len(state.merged)
            self.fetched_bytes += size
            network.transfer(source, self.name, size, lambda: arrived(state), lambda: None)

        network.transfer(self.name, source, REQUEST_BYTES, asked, failed)
        wait_s = patience_s(self.machine.policy, before.theta.nbytes + before.momentum.nbytes)
        self.wires.heap.call_in(wait_s, self.owner.when_awake, failed)

    def _replayed(self, before: FragmentState, entries: tuple[ReplayEntry, ...]) -> None:
        assert self.replay is not None
        state = before
        sizes = self.fragment.unit_sizes
        for entry in entries:
            state = advance(state, entry, sizes, _scratch)
            self.replay.append(entry, state.lineage)
        self._taken(state, before, None)

    def _fetched(self, state: FragmentState, effect: CatchUp | Rebase) -> None:
        before, machine = self.state, self.machine
        assert before is not None
        tokens_end = machine.policy.tokens_end if machine.closed_ranks else None
        if not is_newer(Standing.of(before), Standing.of(state), tokens_end=tokens_end):
            self.run(self.machine.caught_up(None, self.owner.now()))
            return
        parting = self._parted(effect, before, state)
        self._restart_replay(state)
        if state.chain.find(before.version, before.lineage) is None:
            self.wires.watch.gave_way(self, before, state)
        self._taken(state, before, parting)

    def _parted(
        self, effect: CatchUp | Rebase, before: FragmentState, state: FragmentState
    ) -> Parting | None:
        """Where this side of a fork parted from the one taken, if the work since is offered."""
        stale_max = self.machine.policy.stale_max
        shared = shared_version(effect, before, state, self._life, stale_max=stale_max)
        if shared is None or self.replay is None or self.learner is None:
            return None
        entries = self.replay.since(shared.version, shared.lineage)
        if entries is None:
            return None
        theta = rewound(before, entries, self.fragment.unit_sizes, _scratch)
        return None if theta is None else parting_at(shared, theta, before, state, self._life)

    def _taken(self, state: FragmentState, before: FragmentState, parting: Parting | None) -> None:
        """A state that others made is this peer's now: tell the learner and the machine."""
        now = self.owner.now()
        self._take(state)
        since = None
        if self.learner is not None:
            presumed = self.machine.doubting.presumed(now)
            since = hand_over(
                self.learner, state, before, self._life, parting=parting, presumed=presumed
            ).since
        self.run(self.machine.caught_up(Standing.of(state), self.owner.now(), since=since))


def _united(maps: list[MergedMap | None]) -> MergedMap | None:
    there = {id(marks): marks for marks in maps if marks is not None}
    if not there:
        return None
    first, *others = there.values()
    return first.united(*others)
