"""One fragment at one simulated peer: carries out the effects of its round machine in virtual time.

It does the work of ``averaging.live.fragment`` and ``averaging.live.exchange`` without sockets and
threads: the machine, the routes, the codecs, the merge, the outer step and the replay are the same
code, only the bytes travel over ``dht.memory.network``. A simulator gives each node a machine, a
state and a learner, watches it through a ``Watch``, and owns the peer that the node belongs to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from averaging.audit.proofs import Guilty
from averaging.errors import BadPayload
from averaging.history.adoption import Parting
from averaging.history.lineage import Lineage
from averaging.history.parent_maps import ParentMap, parents_of, problem_of
from averaging.history.replay import ReplayEntry, ReplayHead, ReplayLog, advance
from averaging.history.rewind import rewound
from averaging.history.standing import Standing, with_merged_map
from averaging.history.state import FragmentState
from averaging.messages import (
    MERGED,
    OWN,
    Commit,
    Directed,
    Head,
    Link,
    Message,
    Opening,
    Signatures,
)
from averaging.numbers.arithmetic import (
    MeldNumbers,
    Numbers,
    numbers_of,
)
from averaging.numbers.arrays import Float32s, Float64s
from averaging.numbers.chunks import Cutting
from averaging.numbers.codec import Scratch
from averaging.numbers.layout import Fragment
from averaging.numbers.norm_bounds import norm_at_most
from averaging.round import effects, inputs, taking_over
from averaging.round.contributing import contribution
from averaging.round.effects import Apply, CatchUp, Effect, Fold, Note, Rebase, refusal
from averaging.round.inputs import Offer
from averaging.round.machine import FragmentRounds
from averaging.round.reducer import Length, too_long
from averaging.round.taking_over import (
    Life,
    hand_over,
    is_newer,
    parting_at,
    shared_version,
    unfit,
)
from averaging.round.traffic import (
    NOTHING_TO_GIVE,
    BundleRoster,
    Incoming,
    Route,
    Traffic,
)
from averaging.rules.sites import SITE_SHARE, riders_of
from averaging.rules.usual_norms import UsualNorms
from averaging.rules.weights import weights_of
from averaging.simulated.auditing import NodeAudits
from averaging.simulated.fetching import Fetching
from averaging.simulated.wires import Part, Wires
from dht.identity import PeerId
from dht.memory.event_heap import Timer
from dht.protocol import NEWEST, OLDEST

HELD_MAX = 64
"""Events that wait for a sleeping peer to wake; what comes after is lost, as in a full queue."""

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
        """The time on the peer's own clock. The machines know the learner's steps up to then."""
        ...

    def global_time(self, own_time: float) -> float: ...

    def when_awake(self, action: Callable[[], None]) -> None:
        """Run ``action`` now, or when the peer wakes up; never if it is dead."""
        ...

    def wants_snapshot(self, node: FragmentNode) -> bool:
        """The fragment is offered at the next safe point, by ``node.offer()``, unless it has its
        turn later (``averaging.round.turns``). ``False``: there is nothing to offer."""
        ...

    def heard(self, peer: PeerId) -> None:
        """Something came from this peer, about any fragment."""
        ...

    def directed(self, node: FragmentNode, sender: PeerId, directive: bytes) -> None:
        """Another peer sent a directive of the run's owner (``averaging.rules.orders``)."""
        ...

    def silent(self, peer: PeerId, since: float) -> None:
        """One node waited for its leader's answer in vain (``averaging.round.silence``)."""
        ...

    def ran(self, node: FragmentNode) -> None:
        """The node's machine has had an input: its due time may have moved."""
        ...


class Watch:
    """Observer of nodes. These methods do nothing; simulators and tests override some of them."""

    def offered(self, node: FragmentNode, offer: Offer) -> None: ...

    def uploaded(self, node: FragmentNode, round_id: bytes, entry: int, payload: bytes) -> None: ...

    def vowed(self, node: FragmentNode, round_id: bytes) -> None: ...

    def applies(self, node: FragmentNode, apply: Apply) -> None: ...

    def merged(self, node: FragmentNode, after: FragmentState, apply: Apply) -> None:
        """A round is over at this peer, which is about to stand on ``after``."""

    def folded(self, node: FragmentNode, after: FragmentState, fold: Fold) -> None: ...

    def convicted(self, node: FragmentNode, guilty: Guilty) -> None:
        """A peer has been proved to lie, to this node."""

    def stands(self, node: FragmentNode, state: FragmentState) -> None: ...

    def gave_way(self, node: FragmentNode, before: FragmentState, after: FragmentState) -> None:
        """A lighter side took a heavier one's state."""

    def discarded(self, node: FragmentNode, reason: str) -> None: ...

    def noted(self, node: FragmentNode, note: Note) -> None: ...

    def effect(self, node: FragmentNode, effect: Effect) -> None:
        """Before an effect of the machine is carried out."""

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

    def serves(self, node: FragmentNode, to: PeerId, state: FragmentState) -> FragmentState:
        """The state that a node serves to another, which is its own."""
        return state

    def serves_rounds(
        self, node: FragmentNode, to: PeerId, entries: tuple[ReplayEntry, ...]
    ) -> tuple[ReplayEntry, ...]:
        return entries

    def fault_of(self, node: FragmentNode, sender: PeerId) -> str | None:
        """The reason for which a node refuses this peer's uploads, if it does."""
        return None


@dataclass(slots=True)
class Buffers:
    """The bytes that a node keeps of a round until ``Forget``."""

    traffic: Traffic
    numbers: Numbers
    cutting: Cutting
    roster: BundleRoster | None
    """The members of the bundle, if this peer is a delegate."""
    payload: bytes | None = None
    """The own contribution."""
    own_map: ParentMap | None = None
    uploads: dict[tuple[int, int], Part] = field(default_factory=dict)
    """Uploads by slice and roster index; at a delegate also those of its riders."""
    merged: dict[int, Part] = field(default_factory=dict)
    waiters: dict[int, dict[PeerId, int]] = field(default_factory=dict)
    """Streams that wait for the merged slice, by slice and peer."""
    streams: dict[int, tuple[int, Route]] = field(default_factory=dict)
    """The newest stream that was opened for each slice, and its route."""
    held: dict[int, Route] = field(default_factory=dict)
    """Uploads that wait for the bundle."""
    bundle: list[Part] | None = None
    alone: dict[int, Part] = field(default_factory=dict)
    """The own contribution by slice, with the claim about it."""

    @property
    def commit(self) -> Commit:
        return self.traffic.commit

    def own_part(self, index: int) -> Part:
        assert self.payload is not None
        maps, entry = None, self.traffic.entry
        if self.traffic.has_maps(index) and self.own_map is not None and entry is not None:
            maps = {self.commit.members[entry].parent: self.own_map}
        return Part(self.payload[self.cutting.data_of(index)], maps)


class FragmentNode:
    """One incarnation of one peer, for one fragment."""

    def __init__(
        self,
        owner: Owner,
        wires: Wires[Watch],
        fragment: Fragment,
        machine: FragmentRounds,
        state: FragmentState | None,
        learner: FragmentLearner | None,
        *,
        replay_bytes_max: int = 0,
        audits: NodeAudits | None = None,
    ) -> None:
        self.owner = owner
        self.name = owner.name
        self.wires = wires
        self.fragment = fragment
        self.machine = machine
        self.state: FragmentState | None = None
        self.learner = learner
        self.audits = audits
        self.buffers: dict[bytes, Buffers] = {}
        self.replay: ReplayLog | None = None
        self.fetched_bytes = 0
        """Bytes fetched for catching up."""
        self._replay_bytes_max = replay_bytes_max
        self._usual = UsualNorms()
        self._life = Life(owner.name, owner.incarnation)
        self._stream = 0
        self._timer: Timer | None = None
        self._fetching: Fetching | None = None
        wires.nodes[owner.name, fragment.index] = self
        self._earlier_tokens = 0
        """Tokens of the peer's earlier incarnations in the state."""
        if state is not None:
            self.state = state
            self._earlier_tokens = self._life.earlier_tokens(state.merged)
            self._restart_replay(state)

    def __repr__(self) -> str:
        return f"FragmentNode({self.name}, {self.fragment.index}, {self.machine.phase})"

    @property
    def is_alive(self) -> bool:
        return self.owner.alive

    def speaks_to(self, peer: PeerId) -> int:
        seen = self.machine.peers.view.get(peer)
        return OLDEST if seen is None else min(seen.protocol, NEWEST)

    def reads(self, number: int) -> bool:
        oldest, newest = self.machine.speaks
        return oldest <= number <= newest

    @property
    def is_busy(self) -> bool:
        """A snapshot or a round is under way."""
        outstanding = self.learner is not None and self.learner.snapshot is not None
        return outstanding or self.machine.own_round is not None

    # Inputs

    def run(self, wanted: list[Effect]) -> None:
        """Carry out what the machine wants, in order."""
        if not self.owner.alive:
            return
        queue = list(wanted)
        for effect in queue:
            queue += self._carry_out(effect)
        self.reschedule()
        self.owner.ran(self)
        self.wires.watch.checked(self)

    def take(self, given: inputs.Input) -> None:
        """Give the machine an input and carry out what it wants."""
        self.run(self.machine.handle(given, self.owner.now()))

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
        self.owner.when_awake(lambda: self.take(inputs.Tick()))

    def stop(self) -> None:
        """The peer has crashed."""
        if self._timer is not None:
            self._timer.cancel()

    def hear(self, sender: PeerId, message: Message) -> None:
        self.wires.watch.heard(self, sender, message)
        self.owner.heard(sender)
        if self.audits is not None:
            self.audits.sees(sender, message)
        if isinstance(message, Directed):
            self.owner.directed(self, sender, message.directive)
            return
        self.take(inputs.Received(sender, message))

    def lost(self, peer: PeerId) -> None:
        if self.owner.alive:
            self.take(inputs.LinkLost(peer))

    def convict(self, guilty: Guilty) -> None:
        """A peer has been proved to lie: it is as good as gone."""
        self.wires.watch.convicted(self, guilty)
        self.wires.heap.call_in(0.0, self.lost, guilty.peer)

    def offer(self) -> list[Effect]:
        """Offer the fragment at a safe point, after ``Owner.wants_snapshot``."""
        if self.learner is None:
            return self.machine.handle(inputs.Offered(None), self.owner.now())
        offer = self.learner.offer()
        self.wires.watch.offered(self, offer)
        return self.machine.handle(inputs.Offered(offer), self.owner.now())

    # Carrying out effects

    def _carry_out(self, effect: Effect) -> list[Effect]:
        wires, learner = self.wires, self.learner
        wires.watch.effect(self, effect)
        match effect:
            case effects.Send(to, message):
                wires.send(self, to, message)
            case effects.Silent(peer, since):
                wires.heap.call_in(0.0, self.owner.silent, peer, since)
            case Note():
                if effect.event == "withheld" and self.audits is not None:
                    self.audits.doubt(PeerId(str(effect.fields["peer"])))
                wires.watch.noted(self, effect)
            case effects.TakeSnapshot():
                if learner is None or not self.owner.wants_snapshot(self):
                    return self.machine.handle(inputs.Offered(None), self.owner.now())
            case effects.Enter():
                self._enter(effect)
            case effects.Reduce():
                pass
            case effects.Upload():
                self._upload(effect)
            case effects.Merge():
                self._later(lambda: self._merge(effect))
            case effects.Answer():
                self._answer(effect)
            case Apply():
                wires.watch.applies(self, effect)
                self._later(lambda: self._apply(effect))
            case effects.GiveUp(round_id, _, in_doubt):
                if round_id is not None:
                    wires.watch.vowed(self, round_id)
                if not in_doubt and learner is not None:
                    learner.release()
            case effects.Presume(_, mark, _):
                assert learner is not None and self.state is not None
                learner.adopt(self.state, contained=mark)
            case effects.Settle():
                if learner is not None:
                    learner.release()
            case effects.Discard(reason):
                assert learner is not None and self.state is not None
                wires.watch.discarded(self, reason)
                learner.discard(self.state)
            case effects.Forget(round_id):
                self.buffers.pop(round_id, None)
            case CatchUp() | Rebase():
                self._catch_up(effect)
            case Fold():
                self._later(lambda: self._fold(effect))
        return []

    def _later(self, action: Callable[[], None]) -> None:
        self.wires.heap.call_in(self.wires.merge_s, self.owner.when_awake, action)

    def _enter(self, enter: effects.Enter) -> None:
        commit, learner = enter.commit, self.learner
        numbers = numbers_of(commit)
        cutting = self.wires.cutting(self.fragment, numbers, commit)
        traffic = Traffic(enter, me=self.name)
        buffers = self.buffers[enter.round] = Buffers(traffic, numbers, cutting, None)
        if self.audits is not None:
            self.audits.begin(enter.encoded, enter.round, commit, cutting)
            self.audits.sees_commit(enter.encoded, enter.signature)
        if enter.entry is None:
            return
        if traffic.riders:
            buffers.roster = BundleRoster(
                enter.entry,
                traffic.riders,
                len(cutting.slices),
                norm_ratio_max=self.wires.norm_ratio_max,
            )
            wait_s = SITE_SHARE * commit.upload_s
            self.wires.heap.call_in(
                wait_s, self.owner.when_awake, lambda: self._bundle(enter.round)
            )
        offered = None
        if learner is not None and learner.snapshot is not None:
            offered = learner.base, learner.snapshot
        feedback = self.machine.policy_at(commit.version).feedback
        given = contribution(enter, self.state, offered, feedback=feedback)
        traffic.gives = given is not None
        if given is None:
            assert commit.kind == "mix" or learner is None, "entered without an offer"
            return
        if isinstance(numbers, MeldNumbers):
            assert given.carried is not None
            numbers.carry(*given.carried)
        buffers.own_map = given.own_map
        buffers.payload = self._encoded(buffers, given.base, given.values)
        if given.feedback:
            for chunk in cutting.all_chunks:
                part = memoryview(buffers.payload)[chunk.data]
                numbers.leave_rest(chunk, given.base, given.values, part, _scratch)
        if commit.kind != "mix":
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

    def _upload(self, upload: effects.Upload) -> None:
        buffers = self.buffers.get(upload.round)
        if buffers is not None:
            route = buffers.traffic.upload(upload.slice, upload.to, upload.what)
            if route is not None:
                self._go(buffers, route)

    def _go(self, buffers: Buffers, route: Route) -> None:
        buffers.held.pop(route.slice, None)
        if route.to == self.name and route.what != OWN:
            buffers.streams.pop(route.slice, None)
            return
        part: Part | None = None
        if route.what == MERGED:
            part = buffers.merged[route.slice]
        elif route.what == OWN and buffers.roster is None:
            part = self._signed(buffers, route.slice)
        elif route.what == OWN and buffers.bundle is None:
            buffers.held[route.slice] = route
            return
        elif route.what == OWN:
            assert buffers.bundle is not None
            part = buffers.bundle[route.slice]
        self._stream += 1
        buffers.streams[route.slice] = self._stream, route
        opening = buffers.traffic.opening(route)
        self.wires.open_upload(self, route.to, opening, part, self._stream)

    # A site's delegate

    def _bundle(self, round_id: bytes) -> None:
        """Decide who of the site is in the bundle, once; make it and send it."""
        buffers = self.buffers.get(round_id)
        if buffers is None or buffers.bundle is not None:
            return
        roster, me = buffers.roster, buffers.traffic.entry
        assert roster is not None and me is not None
        slices = range(len(buffers.cutting.slices))
        own = [self._signed(buffers, index, alone=True) for index in slices]
        for index, part in enumerate(own):
            roster.measured(me, index, self._length(buffers, index, part))
        buffers.traffic.inside = roster.decide()
        inside = sorted([me, *buffers.traffic.inside])
        parts = {**buffers.uploads, **{(index, me): part for index, part in enumerate(own)}}
        if inside[1:]:
            weights = weights_of(buffers.commit, inside)
            own = [
                self._merged(
                    buffers,
                    index,
                    [parts[index, who] for who in inside],
                    weights,
                    inside,
                    again=True,
                )
                for index in slices
            ]
        if self.audits is not None:
            riders = buffers.traffic.inside
            own = [
                self.audits.signed_upload(
                    round_id, index, replace(part, claim=None), riders,
                    [said for who in inside if (said := parts[index, who].claim)] if riders else (),
                )
                for index, part in enumerate(own)
            ]  # fmt: skip
        buffers.bundle = own
        for _, route in sorted(buffers.held.items()):
            self._go(buffers, route)

    def _signed(self, buffers: Buffers, index: int, *, alone: bool = False) -> Part:
        """The own contribution to a slice, with the claim about it."""
        part = buffers.own_part(index)
        if self.audits is None:
            return part
        return self.audits.signed_upload(buffers.traffic.enter.round, index, part, alone=alone)

    def stream_broke(self, round_id: bytes, index: int, stream: int, reason: str) -> None:
        buffers = self.buffers.get(round_id)
        if not self.owner.alive or buffers is None or index in buffers.merged:
            return
        newest, route = buffers.streams.get(index, (None, None))
        if newest != stream or route is None:
            return
        instead = buffers.traffic.broke(route)
        if instead is None:
            self.take(inputs.UploadFailed(round_id, index, reason))
            return
        for each in instead:
            self._go(buffers, each)

    def lost_reducer(self, dead: PeerId) -> None:
        for round_id, buffers in list(self.buffers.items()):
            for index, (stream, route) in list(buffers.streams.items()):
                if route.to == dead:
                    self.stream_broke(round_id, index, stream, "its host is gone")

    def take_upload(self, sender: PeerId, opening: Opening, part: Part | None, stream: int) -> None:
        """A stream has opened and brought all that it brings."""
        problem: str | None = None
        if sender != self.name:
            if self.audits is not None:
                self.audits.sees_commit(opening.commit, opening.signature)
            wanted = self.machine.handle(inputs.StreamOpened(sender, opening), self.owner.now())
            problem = refusal(wanted)
            self.run(wanted)
        buffers = self.buffers.get(opening.round)
        if problem is not None or buffers is None:
            self.wires.refuse_upload(self, sender, opening, stream, problem or "no buffers")
            return
        traffic, index = buffers.traffic, opening.slice
        entry = traffic.commit.index(sender)
        assert entry is not None
        if sender == self.name:
            assert part is not None
            self._own_upload(buffers, index, entry, part, traffic.handed_over(index))
            return
        buffers.waiters.setdefault(index, {})[sender] = stream
        match traffic.arriving(opening, entry):
            case Incoming.MERGED:
                assert part is not None
                self._have_merged(opening.round, buffers, index, part)
            case Incoming.RIDER | Incoming.EMPTY_RIDER as incoming:
                self._rider(buffers, index, entry, part if incoming is Incoming.RIDER else None)
            case Incoming.OWN:
                assert part is not None
                self._own_upload(buffers, index, entry, part, opening.riders)
            case Incoming.EMPTY:
                riders = riders_of(traffic.commit, entry)
                self._arrived(buffers, index, entry, NOTHING_TO_GIVE, riders)
        if traffic.may_answer(index, entry):
            self._answer_one(opening.round, buffers, index, sender, stream)

    def _rider(self, buffers: Buffers, index: int, entry: int, part: Part | None) -> None:
        roster = buffers.roster
        assert roster is not None
        if part is None or self._problem_of_claim(buffers, index, part, [entry]):
            roster.leave_out(entry)
        elif roster.wants(entry, index):
            buffers.uploads[index, entry] = part
            roster.take(entry, index, self._length(buffers, index, part))
        if roster.is_settled:
            self._later(lambda: self._bundle(buffers.traffic.enter.round))

    def _own_upload(
        self, buffers: Buffers, index: int, entry: int, part: Part, riders: tuple[int, ...]
    ) -> None:
        fault = self.wires.watch.fault_of(self, buffers.commit.members[entry].peer)
        fault = fault or self._malformed(buffers, index, part)
        if fault is None and part.maps is not None:
            fault = problem_of(part.maps, buffers.commit, [entry, *riders])
        fault = fault or self._problem_of_claim(buffers, index, part, [entry, *riders])
        length: Length | None = None
        if fault is None:
            buffers.uploads[index, entry] = part
            length = self._length(buffers, index, part)
        else:
            buffers.traffic.left_out(index, entry, fault)
        self._arrived(buffers, index, entry, fault, riders, length)

    def _problem_of_claim(
        self, buffers: Buffers, index: int, part: Part, members: Sequence[int]
    ) -> str | None:
        if self.audits is None:
            return None
        round_id = buffers.traffic.enter.round
        return self.audits.problem_of_upload(round_id, index, part, members)

    def _arrived(
        self,
        buffers: Buffers,
        index: int,
        entry: int,
        problem: str | None,
        riders: tuple[int, ...],
        length: Length | None = None,
    ) -> None:
        round_id, sender = buffers.traffic.enter.round, buffers.commit.members[entry].peer
        self.take(inputs.UploadArrived(round_id, index, sender, problem, length, riders))

    def _malformed(
        self, buffers: Buffers, index: int, part: Part, *, merged: bool = False
    ) -> str | None:
        """The reason why these bytes are no slice of this round; ``None``: they are."""
        if self.wires.shortcuts:
            return None
        pieces = buffers.cutting.pieces(index, merged=merged)
        size = pieces[-1][1].stop if pieces else 0
        if len(part.data) != size:
            return f"a slice of {len(part.data)} bytes; it has {size}"
        numbers = buffers.numbers.down if merged else buffers.numbers.up
        try:
            for chunk, place in pieces:
                numbers.check(chunk, memoryview(part.data)[place], _scratch)
        except BadPayload as error:
            return str(error)
        return None

    def _length(self, buffers: Buffers, index: int, part: Part) -> Length | None:
        """The length of a displacement, where somebody may be refused for it."""
        if buffers.commit.kind == "mix" or math.isinf(self.wires.norm_ratio_max):
            return None
        cutting, data = buffers.cutting, memoryview(part.data)
        piece = cutting.slices[index]
        squares = sum(
            float(buffers.numbers.up.squares(chunk, data[place]).sum())
            for chunk, place in cutting.pieces(index)
        )
        usual, harmless = self._usual.norm(piece.units), 0.0
        if usual is None and self.state is not None:
            sizes = cutting.fragment.unit_sizes[piece.units]
            harmless = norm_at_most(self.state.theta[piece.values], sizes)
        return Length(math.sqrt(squares), usual, harmless)

    def _merge(self, merge: effects.Merge) -> None:
        buffers = self.buffers.get(merge.round)
        if buffers is None:
            return
        taken = buffers.traffic.merge(merge.slice, merge.contributors, merge.weights)
        merged = self._merged(
            buffers,
            merge.slice,
            [buffers.uploads[merge.slice, carrier] for carrier in taken.carriers],
            taken.weights,
            merge.contributors,
            taken.members,
        )
        if self.audits is not None:
            uploads = [buffers.uploads[merge.slice, carrier] for carrier in taken.carriers]
            members = merge.contributors
            merged = self.audits.signed_merge(merge.round, merge.slice, merged, members, uploads)
        buffers.merged[merge.slice] = merged
        buffers.traffic.merged.add(merge.slice)
        self.take(inputs.SliceMerged(merge.round, merge.slice, merged.digest))

    def _merged(
        self,
        buffers: Buffers,
        index: int,
        parts: Sequence[Part],
        weights: Sequence[float],
        inside: Sequence[int],
        members: Sequence[int] | None = None,
        *,
        again: bool = False,
    ) -> Part:
        """``inside``: the roster indices of all whose work is in the parts. ``again``: the result
        is a contribution, which other reducers merge.
        """
        cutting = buffers.cutting
        given = cutting.pieces(index)
        made = given if again else cutting.pieces(index, merged=True)
        out = bytearray(made[-1][1].stop if made else 0)
        for (chunk, piece), (_, place) in zip(given, made, strict=True):
            buffers.numbers.merge(
                chunk,
                [memoryview(part.data)[piece] for part in parts],
                weights,
                memoryview(out)[place],
                _scratch,
                members=members,
                again=again,
            )
        if not buffers.traffic.has_maps(index):
            return Part(bytes(out), None)
        there = {parent: each for part in parts for parent, each in (part.maps or {}).items()}
        return Part(
            bytes(out), {parent: there[parent] for parent in parents_of(buffers.commit, inside)}
        )

    def _answer(self, answer: effects.Answer) -> None:
        buffers = self.buffers.get(answer.round)
        if buffers is None:
            return
        buffers.traffic.answerable.add(answer.slice)
        self._answer_waiters(answer.round, buffers, answer.slice)

    def _answer_waiters(self, round_id: bytes, buffers: Buffers, index: int) -> None:
        for peer, stream in sorted(buffers.waiters.get(index, {}).items()):
            if buffers.traffic.may_answer(index, buffers.commit.index(peer)):
                self._answer_one(round_id, buffers, index, peer, stream)

    def _answer_one(
        self, round_id: bytes, buffers: Buffers, index: int, peer: PeerId, stream: int
    ) -> None:
        buffers.waiters.get(index, {}).pop(peer, None)
        self.wires.answer(self, peer, round_id, index, buffers.merged[index], stream)

    def take_merged(self, round_id: bytes, index: int, part: Part) -> None:
        buffers = self.buffers.get(round_id)
        if buffers is not None:
            self._have_merged(round_id, buffers, index, part)

    def _have_merged(self, round_id: bytes, buffers: Buffers, index: int, part: Part) -> None:
        problem = self._malformed(buffers, index, part, merged=True)
        if problem is None and part.maps is not None:
            problem = problem_of(part.maps, buffers.commit)
        problem = problem or self._too_long(buffers, index, part)
        if problem is None and self.audits is not None:
            problem = self.audits.problem_of_merge(round_id, index, part)
        if problem is not None:
            self.take(inputs.UploadFailed(round_id, index, problem))
        elif index not in buffers.merged:
            buffers.merged[index] = part
            buffers.traffic.merged.add(index)
            self._answer_waiters(round_id, buffers, index)
            members = None if part.claim is None else part.claim.members
            self.take(inputs.MergedArrived(round_id, index, part.digest, part.parents, members))

    def _too_long(self, buffers: Buffers, index: int, part: Part) -> str | None:
        """The reason not to take a slice that another peer merged."""
        ratio = self.wires.norm_ratio_max
        if buffers.commit.kind == "mix" or math.isinf(ratio) or self.state is None:
            return None
        piece, data = buffers.cutting.slices[index], memoryview(part.data)
        squares = sum(
            float(buffers.numbers.down.squares(chunk, data[place]).sum())
            for chunk, place in buffers.cutting.pieces(index, merged=True)
        )
        usual = self._usual.norm(piece.units)
        own = 0.0
        if buffers.payload is not None:
            length = self._length(buffers, index, buffers.own_part(index))
            own = 0.0 if length is None else length.norm
        theta, sizes = self.state.theta, buffers.cutting.fragment.unit_sizes
        if usual is None:
            theta_norm = norm_at_most(theta, sizes)
        else:
            theta_norm = norm_at_most(theta[piece.values], sizes[piece.units])
        norm = math.sqrt(squares)
        return too_long(norm, usual=usual, own=own, theta=theta_norm, norm_ratio_max=ratio)

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
                part = data[chunk.merged]
                buffers.numbers.step(chunk, part, state.theta, theta, momentum, _scratch)
        if commit.kind != "mix" and not math.isinf(self.wires.norm_ratio_max):
            self._usual.merged(_squares(buffers, data))
        standing = apply.standing
        merged = None
        if parts[0].maps is not None:
            merged = self.wires.merged_after(apply.round, parts[0], commit, apply.seal)
        dispersion: float | None = None
        if isinstance(buffers.numbers, MeldNumbers):
            dispersion = buffers.numbers.dispersion
        if merged is not None:
            standing = with_merged_map(standing, commit, merged)
        after = standing.state(self.fragment.index, theta, momentum)
        self.wires.watch.merged(self, after, apply)
        self._take(after)
        if self.replay is not None:
            if commit.kind != "merge":
                self.replay.restart(after.version, after.lineage)
            else:
                head = ReplayHead(buffers.traffic.enter.encoded, apply.seal, apply.digests)
                self.replay.append(ReplayEntry(head, data), after.lineage)
        contained = self._life.contained_by(apply, after.merged, state.merged)
        learner.adopt(after, contained=contained)
        self.take(inputs.Applied(apply.round, merged, dispersion))
        if self.audits is not None:
            self.audits.audit(apply.round, after.lineage, dict(enumerate(parts)))

    def _take(self, state: FragmentState) -> None:
        self.wires.watch.stands(self, state)
        self.state = state
        self._earlier_tokens = self._life.earlier_tokens(state.merged, self._earlier_tokens)

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
        self.take(inputs.Folded())

    # Catching up: by replay where that is possible and smaller, else a whole state

    def _catch_up(self, effect: CatchUp | Rebase) -> None:
        assert self.state is not None
        if self._fetching is not None:
            self._fetching.abandon()
        self._fetching = Fetching(self, effect, self.state)
        self._fetching.begin()

    def now(self) -> float:
        return self.owner.now()

    def when_awake(self, action: Callable[[], None]) -> None:
        self.owner.when_awake(action)

    def served(self, to: PeerId) -> FragmentState | None:
        return None if self.state is None else self.wires.watch.serves(self, to, self.state)

    def served_rounds(self, to: PeerId, version: int, lineage: Lineage) -> tuple[ReplayEntry, ...]:
        since = self.replay.since(version, lineage) if self.replay is not None else None
        return self.wires.watch.serves_rounds(self, to, since or ())

    def fetch_failed(self) -> None:
        self._fetching = None
        self.take(inputs.CaughtUp(None))

    def shown(self, state: FragmentState) -> Head:
        return self.machine.certificates.show(Standing.of(state).head(), self.owner.now())

    def replayed(self, before: FragmentState, entries: tuple[ReplayEntry, ...]) -> None:
        assert self.replay is not None
        self._fetching = None  # it holds the state before it
        state = before
        sizes = self.fragment.unit_sizes
        for entry in entries:
            state = advance(state, entry, sizes, _scratch)
            self.replay.append(entry, state.lineage)
        self._taken(state, before, None)

    def fetched(
        self, state: FragmentState, signatures: Signatures, effect: CatchUp | Rebase
    ) -> None:
        self._fetching = None
        before, machine = self.state, self.machine
        assert before is not None
        link, now = Link(*state.chain.tip), self.owner.now()
        machine.certificates.hear(link, signatures, now)
        usual = self._usual.norm(slice(None))
        ratio = self.wires.norm_ratio_max
        newer = is_newer(
            Standing.of(before), Standing.of(state), end=machine.end(now), effect=effect
        )
        fits = unfit(state, before, usual=usual, norm_ratio_max=ratio) is None
        if not (newer and fits and machine.catching_up.takes(link, now)):
            self.fetch_failed()
            return
        parting = self._parted(effect, before, state)
        self._restart_replay(state)
        if state.chain.find(before.version, before.lineage) is None:
            self.wires.watch.gave_way(self, before, state)
        self._taken(state, before, parting)

    def _parted(
        self, effect: CatchUp | Rebase, before: FragmentState, state: FragmentState
    ) -> Parting | None:
        """The parting of this side of a fork from the one taken, if the work since is offered."""
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
        """Take a state that others made: tell the learner and the machine."""
        now, earlier = self.owner.now(), self._earlier_tokens
        self._take(state)
        since = None
        if self.learner is not None:
            presumed = self.machine.doubting.presumed(now)
            since = hand_over(
                self.learner,
                state,
                before,
                self._life,
                parting=parting,
                presumed=presumed,
                earlier=earlier,
            ).since
        self.take(inputs.CaughtUp(Standing.of(state), since))


def _squares(buffers: Buffers, data: memoryview) -> Float64s:
    """The squared norm of the merged displacement of each unit."""
    cutting = buffers.cutting
    squares = np.zeros(len(cutting.fragment.units))
    for chunk in cutting.all_chunks:
        squares[chunk.first_unit : chunk.end_unit] = buffers.numbers.down.squares(
            chunk, data[chunk.merged]
        )
    return squares
