"""One fragment at one simulated peer: carries out the effects of its round machine in virtual time.

It does the work of ``averaging.live.fragment`` without sockets and threads: the machine, the outer
step and the replay are the same code. The bytes of a round are an ``Exchange``. A simulator gives
each node a machine, a state and a learner, watches it through a ``Watch``, and owns the peer that
the node belongs to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from averaging.history.adoption import Parting
from averaging.history.attested import numbers_digest
from averaging.history.lineage import Lineage
from averaging.history.replay import ReplayEntry, ReplayHead, ReplayLog, advance
from averaging.history.standing import Standing, with_merged_map
from averaging.history.state import FragmentState
from averaging.messages import Head, Link, Message, Opening, Signatures
from averaging.numbers.arithmetic import MeldNumbers
from averaging.numbers.arrays import Float32s
from averaging.numbers.codec import Scratch
from averaging.numbers.layout import Fragment
from averaging.numbers.outer import Step
from averaging.round import fetched_states
from averaging.round.contributing import contribution
from averaging.round.fetched_states import Life, fork_of, hand_over, is_newer, unfit
from averaging.round.interface import effects, inputs
from averaging.round.interface.effects import Apply, CatchUp, Effect, Fold, Note, Rebase, refusal
from averaging.round.interface.inputs import Offer
from averaging.round.machine import FragmentRounds
from averaging.rules.usual_norms import UsualNorms
from averaging.simulated.exchange import Exchange
from averaging.simulated.fetching import Fetching
from averaging.simulated.wires import Part, Wires
from dht.identity import PeerId
from dht.memory.event_heap import Timer

HELD_MAX = 64
"""Events that wait for a sleeping peer to wake; later ones are lost, as in a full queue."""

_scratch = Scratch()


class FragmentLearner(fetched_states.Learner, Protocol):
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

    def silent(self, peer: PeerId, since: float) -> None:
        """One node waited in vain for an answer of its leader."""
        ...

    def ran(self, node: FragmentNode) -> None:
        """The node's machine has had an input: its due time may have moved."""
        ...


class Watch:
    """Observer of nodes. These methods do nothing."""

    def uploaded(self, node: FragmentNode, round_id: bytes) -> None:
        """A member has encoded its contribution."""

    def merged(self, node: FragmentNode, after: FragmentState, apply: Apply) -> None:
        """A round is over at this peer, which is about to stand on ``after``."""

    def noted(self, node: FragmentNode, note: Note) -> None: ...

    def fault_of(self, node: FragmentNode, sender: PeerId) -> str | None:
        """The reason for which a node refuses this peer's uploads, if it does."""
        return None


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
    ) -> None:
        self.owner = owner
        self.name = owner.name
        self.wires = wires
        self.fragment = fragment
        self.machine = machine
        self.state: FragmentState | None = None
        self.learner = learner
        self.exchanges: dict[bytes, Exchange] = {}
        self.replay: ReplayLog | None = None
        self.fetched_bytes = 0
        """Bytes fetched for catching up."""
        self._replay_bytes_max = replay_bytes_max
        self.usual = UsualNorms()
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
        return None if deadline is None else deadline + 1e-6

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
        self.owner.heard(sender)
        self.take(inputs.Received(sender, message))

    def lost(self, peer: PeerId) -> None:
        if self.owner.alive:
            self.take(inputs.LinkLost(peer))

    def offer(self) -> list[Effect]:
        """Offer the fragment at a safe point, after ``Owner.wants_snapshot``."""
        if self.learner is None:
            return self.machine.handle(inputs.Offered(None), self.owner.now())
        return self.machine.handle(inputs.Offered(self.learner.offer()), self.owner.now())

    # Carrying out effects

    def _carry_out(self, effect: Effect) -> list[Effect]:
        wires, learner = self.wires, self.learner
        match effect:
            case effects.Send(to, message):
                wires.send(self, to, message)
            case effects.Silent(peer, since):
                wires.heap.call_in(0.0, self.owner.silent, peer, since)
            case Note():
                wires.watch.noted(self, effect)
            case effects.TakeSnapshot():
                if learner is None or not self.owner.wants_snapshot(self):
                    return self.machine.handle(inputs.Offered(None), self.owner.now())
            case effects.Enter():
                self._enter(effect)
            case effects.Reduce():
                pass
            case effects.Upload():
                if (exchange := self.exchanges.get(effect.round)) is not None:
                    exchange.upload(effect)
            case effects.Merge():
                self.later(lambda: self._merge(effect))
            case effects.Answer():
                if (exchange := self.exchanges.get(effect.round)) is not None:
                    exchange.answer(effect.slice)
            case Apply():
                self.later(lambda: self._apply(effect))
            case effects.GiveUp(_, _, in_doubt):
                if not in_doubt and learner is not None:
                    learner.release()
            case effects.Presume(mark, _):
                assert learner is not None and self.state is not None
                learner.adopt(self.state, contained=mark)
            case effects.Settle():
                if learner is not None:
                    learner.release()
            case effects.Discard():
                assert learner is not None and self.state is not None
                learner.discard(self.state)
            case effects.Forget(round_id):
                if (exchange := self.exchanges.pop(round_id, None)) is not None:
                    exchange.close()
            case CatchUp() | Rebase():
                self._catch_up(effect)
            case Fold():
                self.later(lambda: self._fold(effect))
        return []

    def later(self, action: Callable[[], None]) -> None:
        self.wires.heap.call_in(self.wires.merge_s, self.owner.when_awake, action)

    def next_stream(self) -> int:
        self._stream += 1
        return self._stream

    def _enter(self, enter: effects.Enter) -> None:
        commit, learner = enter.commit, self.learner
        exchange = self.exchanges[enter.round] = Exchange(enter, self)
        if enter.entry is None:
            return
        offered = None
        if learner is not None and learner.snapshot is not None:
            offered = learner.base, learner.snapshot
        given = contribution(enter, self.state, offered, self.machine.policy_at(commit.version))
        if given is None:
            assert commit.kind == "mix" or learner is None, "entered without an offer"
            return
        exchange.contribute(given)
        if commit.kind != "mix":
            self.wires.watch.uploaded(self, enter.round)

    def _merge(self, merge: effects.Merge) -> None:
        exchange = self.exchanges.get(merge.round)
        if exchange is not None:
            exchange.merge(merge)

    def stream_broke(self, round_id: bytes, index: int, stream: int, reason: str) -> None:
        exchange = self.exchanges.get(round_id)
        if self.owner.alive and exchange is not None:
            exchange.stream_broke(index, stream, reason)

    def lost_reducer(self, dead: PeerId) -> None:
        if self.owner.alive:
            for exchange in list(self.exchanges.values()):
                exchange.lost_reducer(dead)

    def take_upload(self, sender: PeerId, opening: Opening, part: Part | None, stream: int) -> None:
        """A stream has opened and brought all that it brings."""
        problem: str | None = None
        if sender != self.name:
            wanted = self.machine.handle(inputs.StreamOpened(sender, opening), self.owner.now())
            problem = refusal(wanted)
            self.run(wanted)
        exchange = self.exchanges.get(opening.round)
        if problem is not None or exchange is None:
            self.wires.refuse_upload(self, sender, opening, stream, problem or "no buffers")
            return
        exchange.take_upload(sender, opening, part, stream)

    def take_merged(self, round_id: bytes, index: int, part: Part) -> None:
        exchange = self.exchanges.get(round_id)
        if exchange is not None:
            exchange.take_merged(index, part)

    def _apply(self, apply: Apply) -> None:
        state, learner, commit = self.state, self.learner, apply.commit
        assert state is not None and learner is not None
        exchange = self.exchanges[apply.round]
        left = numbers_digest(state) if commit.kind == "mix" else None
        numbers, parts = exchange.numbers, exchange.merged_parts()
        data = memoryview(b"".join(part.data for part in parts))
        chunks = exchange.cutting.all_chunks
        if self.wires.shortcuts and isinstance(numbers, MeldNumbers):
            stepped = self.wires.stepped(apply.round, data, numbers, exchange.cutting)
            theta, momentum = stepped.theta, stepped.momentum
            numbers.norm = stepped.norm
            for chunk in chunks:
                numbers.measure(chunk, state.theta, stepped.mean)
        else:
            theta, momentum = state.theta.copy(), state.momentum.copy()
            made = Step(state.theta, theta, momentum)
            for chunk in chunks:
                numbers.step(chunk, data[chunk.merged], made, _scratch)
        if (squares := exchange.merged_squares(data)) is not None:
            self.usual.merged(squares)
        standing = apply.standing
        if parts[0].maps is not None:
            merged = self.wires.merged_after(apply.round, parts[0], commit, apply.seal)
            standing = with_merged_map(standing, commit, merged)
        dispersion = numbers.dispersion if isinstance(numbers, MeldNumbers) else None
        after = standing.state(self.fragment.index, theta, momentum)
        self.wires.watch.merged(self, after, apply)
        self._take(after)
        if self.replay is not None:
            if commit.kind != "merge":
                self.replay.restart(after.version, after.lineage)
            else:
                head = ReplayHead(exchange.traffic.enter.encoded, apply.seal, apply.digests)
                self.replay.append(ReplayEntry(head, data), after.lineage)
        contained = self._life.contained_by(apply, after.merged, state.merged)
        if exchange.rests is not None and learner.snapshot is not None:
            exchange.rests.leave(apply, learner.snapshot)
        learner.adopt(after, contained=contained)
        self.take(inputs.Applied(apply.round, standing, dispersion, left))

    def _take(self, state: FragmentState) -> None:
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
        self._take(after)
        if self.replay is not None:
            self.replay.fold(state, after, versions_max=self.machine.policy.stale_max)
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
        return self.state

    def served_rounds(self, to: PeerId, version: int, lineage: Lineage) -> tuple[ReplayEntry, ...]:
        since = self.replay.since(version, lineage) if self.replay is not None else None
        return since or ()

    def fetch_failed(self) -> None:
        self._fetching = None
        self.take(inputs.CaughtUp(None, reason="no state came that can be taken"))

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
        usual = self.usual.norm(slice(None))
        ratio = self.wires.norm_ratio_max
        newer = is_newer(
            Standing.of(before), Standing.of(state), end=machine.ending.end(now), effect=effect
        )
        fits = unfit(state, before, usual=usual, norm_ratio_max=ratio) is None
        if not (newer and fits and machine.catching_up.may_take(link, now)):
            self.fetch_failed()
            return
        parting = self._parted(effect, before, state)
        self._restart_replay(state)
        self._taken(state, before, parting)

    def _parted(
        self, effect: CatchUp | Rebase, before: FragmentState, state: FragmentState
    ) -> Parting | None:
        """The parting of this side of a fork from the one taken, if the work since is offered."""
        stale_max = self.machine.policy.stale_max
        fork = fork_of(effect, before, state, self._life, self.replay, stale_max=stale_max)
        if fork is None or self.learner is None:
            return None
        return fork.parting(self.fragment.unit_sizes, _scratch)

    def _taken(self, state: FragmentState, before: FragmentState, parting: Parting | None) -> None:
        """Take a state that others made: tell the learner and the machine."""
        now, earlier = self.owner.now(), self._earlier_tokens
        self._take(state)
        since = None
        if self.learner is not None:
            presumed = self.machine.doubting.presumed(now)
            taken = hand_over(
                self.learner,
                state,
                before,
                self._life,
                parting=parting,
                presumed=presumed,
                earlier=earlier,
            )
            since = taken.since
        self.take(inputs.CaughtUp(Standing.of(state), since))
