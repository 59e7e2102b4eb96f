"""Admitted members that lie, in whole swarms: what they do, and a swarm that counts the honest."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np

from averaging import messages as said
from averaging.history.lineage import bound
from averaging.history.merged_map import Mark
from averaging.history.parent_maps import ParentMap
from averaging.history.replay import ReplayEntry
from averaging.history.state import FragmentState
from averaging.messages import Commit, Head, Link, Message, decode_commit, digest
from averaging.round.contributing import Contribution
from averaging.round.interface.effects import Apply, Effect, Fold, Merge
from averaging.round.interface.inputs import UploadArrived
from averaging.round.interface.phase import Phase
from averaging.virtual.swarm import Peer, PeerPlan
from dht.identity import PeerId
from tests.averaging.virtual.strangers import Chatterers
from tests.averaging.virtual.swarm import Swarm, learner_of

INVENTED_STEPS = 10**12
INVENTED_TOKENS = 10**6


class SwarmWithLiars(Swarm):
    """A swarm of which the last peers lie: fewer than a third. Only the others are judged."""

    def __init__(self, seed: int, plans: Sequence[PeerPlan], **rest: Any) -> None:
        trainers = sum(plan.trains for plan in plans)
        count = (trainers - 1) // 3
        # Whoever trains is listed first, and the founder is the first of all.
        numbers = [number for number, plan in enumerate(plans) if plan.trains][-count:]
        policy = rest.pop("policy")
        # Of a quorum of two a liar is half, and a larger one than most cannot do without the liars.
        policy = replace(policy, quorum=replace(policy.quorum, required=None))
        super().__init__(seed, plans, policy=policy, **rest)
        self.forge_state: Callable[[Peer, FragmentState], FragmentState] | None = None
        self.forge_rounds: Callable[[ReplayEntry], ReplayEntry] | None = None
        self.forge_contribution: Callable[[Contribution], Contribution] | None = None
        self.forge_upload: Callable[[memoryview], None] | None = None
        self.judge_upload: Callable[[Peer, UploadArrived], UploadArrived] | None = None
        self.liars = frozenset(self.names[number] for number in numbers) if count else frozenset()
        self.lies: Counter[PeerId] = Counter()
        """Number of lies that can be proved, by peer, where somebody counts them."""
        self.rounds_of_lies: defaultdict[PeerId, set[bytes]] = defaultdict(set)
        """The rounds in which each peer merged falsely."""

    @property
    def alive(self) -> list[Peer]:
        return [peer for peer in super().alive if peer.name not in self.liars]

    def liars_alive(self) -> list[Peer]:
        return [peer for peer in super().alive if peer.name in self.liars]

    def check_fate(self, peer: Peer) -> None:
        if peer.name not in self.liars:
            super().check_fate(peer)

    def stands(self, peer: Peer, state: FragmentState) -> None:
        """The bits of a liar's state are its own affair: it may send itself a message that takes
        it into two rounds at once."""
        if peer.name in self.liars:
            self.save(peer, state)
        else:
            super().stands(peer, state)

    # What a liar makes of a state or a map that it invented is nobody's version.

    def applied(
        self,
        peer: Peer,
        apply: Apply,
        before: FragmentState,
        after: FragmentState,
        merged: memoryview,
        maps: Mapping[int, ParentMap],
    ) -> None:
        parents = apply.commit.parents
        true = all(each.belongs_to(parents[index].lineage) for index, each in maps.items())
        if peer.name in self.liars and not true:
            return  # it reduced slice 0 itself, and has heard no objection
        if not self._is_invented(peer, before):
            super().applied(peer, apply, before, after, merged, maps)

    def folded(self, peer: Peer, fold: Fold, before: FragmentState, after: FragmentState) -> None:
        if not self._is_invented(peer, before):
            super().folded(peer, fold, before, after)

    # What they contribute and serve

    def contributes(
        self, peer: Peer, commit: Commit, given: Contribution | None
    ) -> Contribution | None:
        if peer.name in self.liars and given is not None and self.forge_contribution is not None:
            return self.forge_contribution(given)
        if peer.name in self.liars:
            return given
        return super().contributes(peer, commit, given)

    def encoded(
        self, peer: Peer, commit: Commit, round_id: bytes, slices: Sequence[memoryview]
    ) -> None:
        if peer.name in self.liars and self.forge_upload is not None:
            for data in slices:
                self.forge_upload(data)
        super().encoded(peer, commit, round_id, slices)

    def arrived(self, peer: Peer, upload: UploadArrived) -> UploadArrived:
        upload = super().arrived(peer, upload)
        if peer.name in self.liars and self.judge_upload is not None:
            return self.judge_upload(peer, upload)
        return upload

    def serves(self, peer: Peer, state: FragmentState) -> FragmentState | None:
        if peer.name not in self.liars:
            return state
        if self._is_invented(peer, state) and not self._may_lie():
            return None
        if self.forge_state is not None and self._may_lie():
            return self.forge_state(peer, state)
        return state

    def serves_rounds(self, peer: Peer, entries: Sequence[ReplayEntry]) -> Sequence[ReplayEntry]:
        if peer.name in self.liars and self.forge_rounds is not None and self._may_lie():
            return tuple(map(self.forge_rounds, entries))
        return entries

    def _may_lie(self) -> bool:
        """A peer that counts nobody but the one that it asks has nothing to compare its bits
        with."""
        return all(self.has_others_to_ask(reader) for reader in self.alive)

    @staticmethod
    def has_others_to_ask(reader: Peer) -> bool:
        return reader.machine.catching_up.holders_min(reader.now()) > 1

    def _is_invented(self, peer: Peer, state: FragmentState | None) -> bool:
        known = state is not None and state.lineage in self.truth.covered
        return peer.name in self.liars and not known


Behaviour = Callable[[SwarmWithLiars, Chatterers], None]


def forge_heads(swarm: SwarmWithLiars, chatter: Chatterers) -> None:
    """The liars show heads far ahead that grew out of true ones, signed by all of them."""

    def show(liar: PeerId) -> None:
        swarm.call_in(chatter.rng.expovariate(0.5), show, liar)
        peer = swarm.nodes.get(liar)
        standing = peer.machine.standing if peer is not None and peer.alive else None
        if standing is None:
            return
        true = standing.head()
        tip = Link(
            true.version + chatter.rng.randint(1, 50),
            chatter.rng.randbytes(32),
            standing.merged.tokens + chatter.rng.randint(1, INVENTED_TOKENS),
        )
        claim = said.link_claim(swarm.topic, 0, tip)
        signatures = tuple((peer, swarm.sign(peer, claim)) for peer in sorted(swarm.liars))
        head = Head(tip.version, tip.lineage, (tip, *true.links[:20]), signatures)
        to = chatter.rng.choice(swarm.names)
        asked = swarm.nodes[to].machine.standing if to in swarm.nodes else None
        messages: list[Message] = [said.Compare(0, head), said.Call(0, head, 5.0)]
        if asked is not None:
            messages.append(said.Behind(0, head, asked.lineage))
        swarm.say(liar, to, chatter.rng.choice(messages))

    for liar in sorted(swarm.liars):
        swarm.call_at(5.0, show, liar)


def say_void(swarm: SwarmWithLiars, chatter: Chatterers) -> None:
    """The liars tell everybody of each round that they are in that it is void, or forsworn."""
    overhear = swarm.on_send
    assert overhear is not None

    def tell(sender: PeerId, to: PeerId, message: Message) -> bool:
        if isinstance(message, said.Committed) and to in swarm.liars:
            round_id = digest(message.commit)
            void = said.Void(0, round_id, "because", forsworn=chatter.rng.random() < 0.5)
            for entry in decode_commit(message.commit).members:
                swarm.say(to, entry.peer, void)
        return overhear(sender, to, message)

    swarm.on_send = tell


def _lose(kinds: tuple[type[Message], ...], swarm: SwarmWithLiars, chatter: Chatterers) -> None:
    overhear = swarm.on_send
    assert overhear is not None

    def lose(sender: PeerId, to: PeerId, message: Message) -> bool:
        lost = sender in swarm.liars and isinstance(message, kinds)
        return overhear(sender, to, message) and not lost

    swarm.on_send = lose


def withhold_votes(swarm: SwarmWithLiars, chatter: Chatterers) -> None:
    _lose((said.Accepted, said.Promise), swarm, chatter)


def fall_silent_after_joining(swarm: SwarmWithLiars, chatter: Chatterers) -> None:
    """The liars join and upload, and say nothing more in any round."""
    silent = (said.Accepted, said.Promise, said.Report, said.Propose, said.Prepare, said.Sealed)
    _lose((*silent, said.Finished, said.Forsworn, said.Declined), swarm, chatter)


def overstate_steps(swarm: SwarmWithLiars, chatter: Chatterers) -> None:
    def lie(peer: Peer) -> None:
        learner = learner_of(peer)
        if peer.name in swarm.liars and learner is not None:
            honest = learner.offer
            more = partial(msgspec.structs.replace, steps=INVENTED_STEPS, tokens=INVENTED_STEPS)
            learner.offer = lambda: more(honest())

    on_start(swarm, lie)


def invent_marks(swarm: SwarmWithLiars, chatter: Chatterers) -> None:
    """The maps that the liars bring into a meld name work of others that is not merged."""

    def invent(given: Contribution) -> Contribution:
        if given.own_map is None:
            return given
        own, victim = given.own_map, swarm.names[0]
        merged = own.merged.with_work(victim, 1, 10**6, INVENTED_TOKENS)
        swarm.truth.coverage["invented a mark"] += 1
        return replace(given, own_map=ParentMap(merged, own.history))

    swarm.forge_contribution = invent


def join_on_inventions(swarm: SwarmWithLiars, chatter: Chatterers) -> None:
    """The liars stand on states of their own making, with maps that fit them, and take part from
    there: each starts again from a checkpoint that it made up.

    Each signs its invention alone: of as many as can certify a version together nobody is safe. And
    it says nothing of it to peers that count nobody else: such a peer takes the word of one.
    """
    overhear = swarm.on_send
    assert overhear is not None

    def say(sender: PeerId, to: PeerId, message: Message) -> bool:
        liar = swarm.nodes.get(sender)
        invents = liar is not None and swarm._is_invented(liar, liar.state)
        told = not invents or to in swarm.liars or swarm.has_others_to_ask(swarm.nodes[to])
        return overhear(sender, to, message) and told

    swarm.on_send = say

    def invent(liar: PeerId) -> None:
        swarm.call_in(chatter.rng.uniform(15.0, 40.0), invent, liar)
        peer = swarm.nodes.get(liar)
        state = peer.state if peer is not None and peer.alive else None
        if state is None or peer is None or peer.machine.phase is not Phase.IDLE:
            return
        invention = _invented(state, chatter, liar, peer.incarnation)
        swarm.crash(liar)
        swarm.disks[liar] = {0: invention}
        swarm.restart(liar)
        swarm.truth.coverage["invented a state"] += 1

    for liar in sorted(swarm.liars):
        swarm.call_at(20.0, invent, liar)


def _invented(
    state: FragmentState, chatter: Chatterers, liar: PeerId, incarnation: int
) -> FragmentState:
    """A state that grew out of a true one, with other numbers."""
    mark = state.merged.get(liar)
    step = 0 if mark is None or mark.incarnation != incarnation else mark.step
    merged = state.merged.with_work(liar, incarnation, step, chatter.rng.randint(1, 10**4))
    history = chatter.rng.randbytes(32)
    version, lineage = state.version + 1, bound(history, merged.digest())
    return replace(
        state,
        version=version,
        lineage=lineage,
        chain=state.chain.extended(Link(version, lineage, merged.tokens)),
        theta=state.theta + np.float32(7.0),
        merged=merged,
        history=history,
    )


def serve_forgeries(swarm: SwarmWithLiars, chatter: Chatterers) -> None:
    """The liars serve states and rounds with other bits, of lineages that all have signed, and
    their own inventions in their place. Each forges alone: two that serve the same bits confirm
    each other, and are believed where no more peers hold the true ones (``HOLDERS_MIN``).
    """

    def state(peer: Peer, true: FragmentState) -> FragmentState:
        swarm.truth.coverage["served a forged state"] += 1
        match chatter.rng.randrange(4):
            case 0:
                return replace(true, theta=true.theta + np.float32(chatter.rng.random()))
            case 1:
                return replace(true, momentum=np.full_like(true.momentum, np.nan))
            case 2:
                invented = _invented(true, chatter, peer.name, peer.incarnation)
                return replace(invented, theta=true.theta)
            case _:
                mark = true.merged.get(swarm.names[0], Mark(1, 0, 0))
                merged = true.merged.with_work(swarm.names[0], mark.incarnation, mark.step + 5, 500)
                return replace(true, merged=merged)

    def rounds(true: ReplayEntry) -> ReplayEntry:
        swarm.truth.coverage["served a forged round"] += 1
        payload = bytearray(true.payload)
        payload[chatter.rng.randrange(len(payload))] ^= 1
        return replace(true, payload=bytes(payload))

    swarm.forge_state, swarm.forge_rounds = state, rounds


def forge_slices(swarm: SwarmWithLiars, chatter: Chatterers) -> None:
    """The uploads of the liars are not finite.

    Other numbers are not lied about here. Those of a contribution are its author's, within the
    bound on its norm. Those of a reducer, whether wrong or different for each member, pass for a
    merge until somebody computes it again, which is for audits: no certificate speaks of them.
    """

    def spoil(data: memoryview) -> None:
        if chatter.rng.random() < 0.5:
            data[:] = b"\xff" * len(data)
            swarm.truth.coverage["forged a slice"] += 1

    swarm.forge_upload = spoil


def censor(swarm: SwarmWithLiars, chatter: Chatterers) -> None:
    """As reducers they refuse the uploads of one honest peer, and as leaders its joins."""
    victim = next(name for name in swarm.names if name not in swarm.liars)
    overhear = swarm.on_send
    assert overhear is not None

    def lose(sender: PeerId, to: PeerId, message: Message) -> bool:
        ignored = sender == victim and to in swarm.liars and isinstance(message, said.Join)
        swarm.truth.coverage["ignored a join"] += ignored
        return overhear(sender, to, message) and not ignored

    def refuse(peer: Peer, upload: UploadArrived) -> UploadArrived:
        if upload.problem is not None or upload.sender != victim:
            return upload
        swarm.truth.coverage["refused an upload"] += 1
        return msgspec.structs.replace(upload, problem="I do not like it", norm=None)

    swarm.on_send, swarm.judge_upload = lose, refuse


def withhold_slices(swarm: SwarmWithLiars, chatter: Chatterers) -> None:
    """The liars reduce and never answer."""

    def withhold(peer: Peer, effect: Effect) -> Effect | None:
        withheld = peer.name in swarm.liars and isinstance(effect, Merge)
        swarm.truth.coverage["withheld a slice"] += withheld
        return None if withheld else effect

    on_effect(swarm, withhold)


def poison_slowly(swarm: SwarmWithLiars, chatter: Chatterers) -> None:
    """The liars train away from where the others want to go, by steps as large as theirs."""

    def lie(peer: Peer) -> None:
        learner = learner_of(peer)
        if peer.name in swarm.liars and learner is not None:
            others = [swarm.goal(name) for name in swarm.names if name not in swarm.liars]
            learner.goal = np.negative(np.mean(others, axis=0, dtype=np.float32))
            swarm.truth.coverage["poisoned"] += 1

    on_start(swarm, lie)


def on_start(swarm: SwarmWithLiars, act: Callable[[Peer], None]) -> None:
    before = swarm.on_start

    def both(peer: Peer) -> None:
        if before is not None:
            before(peer)
        act(peer)

    swarm.on_start = both


def on_effect(swarm: SwarmWithLiars, act: Callable[[Peer, Effect], Effect | None]) -> None:
    """Have ``act`` change effects, after those that do so already."""
    before = swarm.on_effect

    def both(peer: Peer, effect: Effect) -> Effect | None:
        instead = effect if before is None else before(peer, effect)
        return None if instead is None else act(peer, instead)

    swarm.on_effect = both


BEHAVIOURS: tuple[Behaviour, ...] = (
    forge_heads,
    say_void,
    withhold_votes,
    fall_silent_after_joining,
    overstate_steps,
    invent_marks,
    join_on_inventions,
    serve_forgeries,
    forge_slices,
    censor,
    withhold_slices,
    poison_slowly,
)
