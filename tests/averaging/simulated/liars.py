"""Admitted members that lie, in whole swarms: what they do, and a swarm that counts the honest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from averaging import messages as said
from averaging.history.parent_maps import ParentMap
from averaging.messages import Head, Link, Message, decode_commit, digest
from averaging.round.effects import Enter
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
        self.liars = frozenset(self.names[number] for number in numbers) if count else frozenset()

    @property
    def alive(self) -> list[Node]:
        return [node for node in super().alive if node.name not in self.liars]

    def check_fate(self, node: Node) -> None:
        if node.name not in self.liars:
            super().check_fate(node)


Behaviour = Callable[[SwarmWithLiars, Chatterers], None]


def forge_heads(swarm: SwarmWithLiars, chatter: Chatterers) -> None:
    """They show heads far ahead that grew out of true ones, signed by all of them."""

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
    """They tell everybody of each round that they are in that it is void, or forsworn."""
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
    """They join and upload, and say nothing more in any round."""
    silent = (said.Accepted, said.Promise, said.Report, said.Propose, said.Prepare, said.Sealed)
    _lose((*silent, said.Finished, said.Forsworn, said.Declined), swarm, chatter)


def overstate_steps(swarm: SwarmWithLiars, chatter: Chatterers) -> None:
    def lie(node: Node) -> None:
        if node.name in swarm.liars and node.learner is not None:
            honest = node.learner.offer
            more = partial(replace, steps=INVENTED_STEPS, tokens=INVENTED_STEPS)
            node.learner.offer = lambda: more(honest())  # type: ignore[method-assign]

    _on_start(swarm, lie)


def invent_marks(swarm: SwarmWithLiars, chatter: Chatterers) -> None:
    """What they bring into a mix or a meld says that work of others is merged, which is not."""

    def lie(node: Node) -> None:
        if node.name not in swarm.liars:
            return
        part = node.part
        enter = part._enter

        def entered(effect: Enter) -> None:
            enter(effect)
            buffers = part.buffers.get(effect.round)
            if buffers is not None and buffers.own_map is not None:
                own, victim = buffers.own_map, swarm.names[0]
                merged = own.merged.with_work(victim, 1, 10**6, INVENTED_TOKENS)
                buffers.own_map = ParentMap(merged, own.history)
                swarm.truth.coverage["invented a mark"] += 1

        part._enter = entered  # type: ignore[method-assign]

    _on_start(swarm, lie)


def _on_start(swarm: SwarmWithLiars, act: Callable[[Node], None]) -> None:
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
)
