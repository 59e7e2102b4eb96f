"""Admitted members that lie, in whole swarms: what they do, and a swarm that counts the honest."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np

from averaging import messages as said
from averaging.history.chain import ChainLink
from averaging.history.lineage import bound
from averaging.history.merged_map import Mark
from averaging.history.parent_maps import ParentMap
from averaging.history.replay import ReplayEntry
from averaging.history.standing import Standing
from averaging.history.state import FragmentState
from averaging.messages import OWN, Head, Link, Message, decode_commit, digest
from averaging.round.interface.effects import Apply, Enter, Fold
from averaging.round.interface.phase import Phase
from averaging.round.traffic import Route
from averaging.rules.usual_norms import UploadNorm
from averaging.simulated.exchange import Exchange
from averaging.simulated.node import FragmentNode
from dht.identity import PeerId
from tests.averaging.simulated.strangers import Chatterers
from tests.averaging.simulated.swarm import Node, PeerPlan, Swarm

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
        self.forge_state: Callable[[FragmentNode, FragmentState], FragmentState] | None = None
        self.forge_rounds: Callable[[ReplayEntry], ReplayEntry] | None = None
        self.liars = frozenset(self.names[number] for number in numbers) if count else frozenset()
        self.lies: Counter[PeerId] = Counter()
        """Number of lies that can be proved, by peer, where somebody counts them."""
        self.rounds_of_lies: defaultdict[PeerId, set[bytes]] = defaultdict(set)
        """The rounds in which each peer merged falsely."""

    @property
    def alive(self) -> list[Node]:
        return [node for node in super().alive if node.name not in self.liars]

    def check_fate(self, node: Node) -> None:
        if node.name not in self.liars:
            super().check_fate(node)

    def stands(self, node: FragmentNode, state: FragmentState) -> None:
        """The bits of a liar's state are its own affair: it may send itself a message that takes
        it into two rounds at once (seed 86524 of ``OF_VOTERS``)."""
        if node.name in self.liars:
            self.save(node.name, state)
        else:
            super().stands(node, state)

    # What a liar makes of a state that it invented is nobody's version.

    def merged(self, node: FragmentNode, after: FragmentState, apply: Apply) -> None:
        if not self._stands_on_an_invention(node):
            super().merged(node, after, apply)

    def folded(self, node: FragmentNode, after: FragmentState, fold: Fold) -> None:
        if not self._stands_on_an_invention(node):
            super().folded(node, after, fold)

    # What they serve

    def serves(self, node: FragmentNode, to: PeerId, state: FragmentState) -> FragmentState | None:
        if self._stands_on_an_invention(node) and not (to in self.liars or self._may_lie(node, to)):
            return None  # the reader counted others when it was told of it (seed 56683)
        if self.forge_state is not None and self._may_lie(node, to):
            return self.forge_state(node, state)
        return state

    def serves_rounds(
        self, node: FragmentNode, to: PeerId, entries: tuple[ReplayEntry, ...]
    ) -> tuple[ReplayEntry, ...]:
        if self.forge_rounds is not None and self._may_lie(node, to):
            return tuple(map(self.forge_rounds, entries))
        return entries

    def _may_lie(self, node: FragmentNode, to: PeerId) -> bool:
        """A peer that counts nobody but the one that it asks has nothing to compare its bits
        with."""
        reader = self.nodes.get(to)
        return (
            node.name in self.liars
            and to not in self.liars
            and reader is not None
            and reader.machine.catching_up.holders_min(reader.now()) > 1
        )

    def _stands_on_an_invention(self, node: FragmentNode) -> bool:
        known = node.state is not None and node.state.lineage in self.truth.covered
        return node.name in self.liars and not known


Behaviour = Callable[[SwarmWithLiars, Chatterers], None]


def forge_heads(swarm: SwarmWithLiars, chatter: Chatterers) -> None:
    """The liars show heads far ahead that grew out of true ones, signed by all of them."""

    def show(liar: PeerId) -> None:
        swarm.heap.call_in(chatter.rng.expovariate(0.5), show, liar)
        node = swarm.nodes.get(liar)
        standing = node.machine.standing if node is not None and node.alive else None
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
            messages.append(said.Behind(0, head, liar, asked.lineage))
        swarm.wires.deliver(liar, to, 0, chatter.rng.choice(messages))

    for liar in sorted(swarm.liars):
        swarm.heap.call_at(5.0, show, liar)


def say_void(swarm: SwarmWithLiars, chatter: Chatterers) -> None:
    """The liars tell everybody of each round that they are in that it is void, or forsworn."""
    overhear = swarm.on_send
    assert overhear is not None

    def tell(sender: PeerId, to: PeerId, message: Message) -> bool:
        if isinstance(message, said.Committed) and to in swarm.liars:
            round_id = digest(message.commit)
            void = said.Void(0, round_id, "because", forsworn=chatter.rng.random() < 0.5)
            for entry in decode_commit(message.commit).members:
                swarm.wires.deliver(to, entry.peer, 0, void)
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
    def lie(node: Node) -> None:
        if node.name in swarm.liars and node.learner is not None:
            honest = node.learner.offer
            more = partial(msgspec.structs.replace, steps=INVENTED_STEPS, tokens=INVENTED_STEPS)
            node.learner.offer = lambda: more(honest())

    on_start(swarm, lie)


def on_enter(node: FragmentNode, act: Callable[[Exchange], None]) -> None:
    """Have ``act`` change each exchange of a node, once its contribution is made."""
    enters = node._enter

    def entered(enter: Enter) -> None:
        enters(enter)
        act(node.exchanges[enter.round])

    node._enter = entered


def invent_marks(swarm: SwarmWithLiars, chatter: Chatterers) -> None:
    """The maps that the liars bring into a mix or a meld name work of others that is not merged."""

    def lie(node: Node) -> None:
        if node.name not in swarm.liars:
            return
        on_enter(node.part, invent)

    def invent(exchange: Exchange) -> None:
        if exchange.own_map is not None:
            own, victim = exchange.own_map, swarm.names[0]
            merged = own.merged.with_work(victim, 1, 10**6, INVENTED_TOKENS)
            exchange.own_map = ParentMap(merged, own.history)
            swarm.truth.coverage["invented a mark"] += 1

    on_start(swarm, lie)


def join_on_inventions(swarm: SwarmWithLiars, chatter: Chatterers) -> None:
    """The liars stand on states of their own making, with maps that fit them, and take part from
    there.

    Each signs its invention alone: of as many as can certify a version together nobody is safe. And
    it says nothing of it to peers that count nobody else: such a peer takes the word of one.
    """
    overhear = swarm.on_send
    assert overhear is not None

    def say(sender: PeerId, to: PeerId, message: Message) -> bool:
        liar = swarm.nodes.get(sender)
        invents = liar is not None and swarm._stands_on_an_invention(liar.part)
        told = not invents or liar is None or swarm._may_lie(liar.part, to)
        return overhear(sender, to, message) and told

    swarm.on_send = say

    def invent(liar: PeerId) -> None:
        swarm.heap.call_in(chatter.rng.uniform(3.0, 12.0), invent, liar)
        node = swarm.nodes.get(liar)
        state = node.state if node is not None and node.alive else None
        if state is None or node is None or node.machine.phase is not Phase.IDLE:
            return
        invention = _invented(state, chatter, liar, node.incarnation)
        node.part.state = invention
        node.part._restart_replay(invention)
        node.machine.standing = node.machine.certificates.standing = Standing.of(invention)
        swarm.truth.coverage["invented a state"] += 1

    for liar in sorted(swarm.liars):
        swarm.heap.call_at(10.0, invent, liar)


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
        chain=state.chain.extended(ChainLink(version, lineage, merged.tokens)),
        theta=state.theta + np.float32(7.0),
        merged=merged,
        history=history,
    )


def serve_forgeries(swarm: SwarmWithLiars, chatter: Chatterers) -> None:
    """The liars serve states and rounds with other bits, of lineages that all have signed, and
    their own inventions in their place. Each forges alone: two that serve the same bits confirm
    each other, and are believed where no more peers hold the true ones (``HOLDERS_MIN``).
    """

    def state(node: FragmentNode, true: FragmentState) -> FragmentState:
        swarm.truth.coverage["served a forged state"] += 1
        match chatter.rng.randrange(4):
            case 0:
                return replace(true, theta=true.theta + np.float32(chatter.rng.random()))
            case 1:
                return replace(true, momentum=np.full_like(true.momentum, np.nan))
            case 2:
                invented = _invented(true, chatter, node.name, node.owner.incarnation)
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
    """The uploads of the liars, and their answers as reducers, are cut short or not finite.

    Other numbers are not lied about here. Those of a contribution are its author's, within the
    bound on its norm. Those of a reducer, whether wrong or different for each member, pass for a
    merge until somebody computes it again, which is for audits: no certificate speaks of them.
    """

    def spoilt(data: bytes) -> bytes:
        swarm.truth.coverage["forged a slice"] += 1
        return data[: len(data) // 2] if chatter.rng.random() < 0.5 else b"\xff" * len(data)

    def forge(exchange: Exchange) -> None:
        go, answer = exchange.go, exchange.answer_one

        def goes(route: Route) -> None:
            true = exchange.payload
            if true is not None and route.what == OWN and chatter.rng.random() < 0.5:
                exchange.payload = spoilt(true)
            go(route)
            exchange.payload = true

        def answers(index: int, peer: PeerId, stream: int) -> None:
            true = exchange.merged[index]
            if chatter.rng.random() < 0.5:
                exchange.merged[index] = replace(true, data=spoilt(true.data))
            answer(index, peer, stream)
            exchange.merged[index] = true

        exchange.go, exchange.answer_one = goes, answers

    def lie(node: Node) -> None:
        if node.name in swarm.liars:
            on_enter(node.part, forge)

    on_start(swarm, lie)


def censor(swarm: SwarmWithLiars, chatter: Chatterers) -> None:
    """As reducers they refuse the uploads of one honest peer, and as leaders its joins."""
    victim = next(name for name in swarm.names if name not in swarm.liars)
    overhear = swarm.on_send
    assert overhear is not None

    def lose(sender: PeerId, to: PeerId, message: Message) -> bool:
        ignored = sender == victim and to in swarm.liars and isinstance(message, said.Join)
        swarm.truth.coverage["ignored a join"] += ignored
        return overhear(sender, to, message) and not ignored

    swarm.on_send = lose

    def censor_uploads(exchange: Exchange) -> None:
        arrived = exchange._arrived

        def refuses(
            index: int,
            entry: int,
            problem: str | None,
            riders: tuple[int, ...],
            norm: UploadNorm | None = None,
        ) -> None:
            if problem is None and exchange.commit.members[entry].peer == victim:
                problem = "I do not like it"
                exchange.traffic.left_out(index, entry, problem)
                swarm.truth.coverage["refused an upload"] += 1
            arrived(index, entry, problem, riders, norm)

        exchange._arrived = refuses

    def lie(node: Node) -> None:
        if node.name in swarm.liars:
            on_enter(node.part, censor_uploads)

    on_start(swarm, lie)


def withhold_slices(swarm: SwarmWithLiars, chatter: Chatterers) -> None:
    """The liars merge and never answer."""

    def answers(node: Node, round_id: bytes, index: int, to: PeerId) -> bool:
        withheld = node.name in swarm.liars
        swarm.truth.coverage["withheld a slice"] += withheld
        return not withheld

    swarm.answer_filter = answers


def poison_slowly(swarm: SwarmWithLiars, chatter: Chatterers) -> None:
    """The liars train away from where the others want to go, by steps as large as theirs."""

    def lie(node: Node) -> None:
        if node.name in swarm.liars and node.learner is not None:
            others = [swarm.goal(name) for name in swarm.names if name not in swarm.liars]
            node.learner.goal = np.negative(np.mean(others, axis=0, dtype=np.float32))
            swarm.truth.coverage["poisoned"] += 1

    on_start(swarm, lie)


def on_start(swarm: SwarmWithLiars, act: Callable[[Node], None]) -> None:
    before = swarm.on_start

    def both(node: Node) -> None:
        if before is not None:
            before(node)
        act(node)

    swarm.on_start = both


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
