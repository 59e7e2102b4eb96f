"""Members that lie in the arithmetic, sign two different things, or hide, in whole swarms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from averaging import messages as said
from averaging.audit.claims import Subject, claim, digest_of_pieces
from averaging.messages import Message
from averaging.simulated.exchange import Exchange
from averaging.simulated.node import FragmentNode
from averaging.simulated.wires import Part
from dht.identity import PeerId
from tests.averaging.simulated.liars import Behaviour, SwarmWithLiars, on_enter, on_start
from tests.averaging.simulated.strangers import Chatterers
from tests.averaging.simulated.swarm import Node

Lie = Callable[[SwarmWithLiars], None]


def first_for_all(swarm: SwarmWithLiars) -> None:
    """As reducers and as delegates they take the first contribution for the mean: within any norm.

    ``swarm.lies`` counts how often each did so and it made a difference.
    """

    def lie(node: Node) -> None:
        if node.name in swarm.liars:
            _merge_falsely(swarm, node.part)

    on_start(swarm, lie)


def _merge_falsely(swarm: SwarmWithLiars, node: FragmentNode) -> None:
    def lie(exchange: Exchange) -> None:
        honest = exchange._merged

        def merged(
            index: int, parts: Sequence[Part], weights: Sequence[float], *rest: Any, **more: Any
        ) -> Part:
            right = honest(index, parts, weights, *rest, **more)
            false = honest(index, parts, [1.0, *[0.0] * (len(parts) - 1)], *rest, **more)
            if false.data != right.data:
                what = "bundled falsely" if more.get("again") else "merged falsely"
                swarm.truth.lies.add(exchange.round)
                swarm.truth.coverage[what] += 1
                swarm.lies[node.name] += 1
                swarm.rounds_of_lies[node.name].add(exchange.round)
            return false

        exchange._merged = merged

    on_enter(node, lie)


def forge_sources(swarm: SwarmWithLiars) -> None:
    """The liars put uploads of their own making in the place of others'."""

    def lie(node: Node) -> None:
        audits = node.audits
        if node.name not in swarm.liars or audits is None:
            return
        sign = audits.signed_merge

        def signed(
            round_id: bytes, index: int, part: Part, members: Sequence[int], uploads: list[Part]
        ) -> Part:
            forged = [
                each
                if each.claim is None or number
                else replace(each, claim=msgspec.structs.replace(each.claim, made=bytes(32)))
                for number, each in enumerate(uploads)
            ]
            swarm.lies[node.name] += 1
            return sign(round_id, index, part, members, forged)

        audits.signed_merge = signed

    on_start(swarm, lie)


def show_other_uploads(swarm: SwarmWithLiars) -> None:
    """Auditors are shown another upload, signed as well, than the one that was merged."""

    def lie(node: Node) -> None:
        audits = node.audits
        if node.name not in swarm.liars or audits is None:
            return
        show = audits.show_upload

        def other(round_id: bytes, index: int, *, alone: bool) -> Any:
            found = show(round_id, index, alone=alone)
            kept = audits._kept.get(round_id)
            if found is None or kept is None or found[0].claim is None:
                return found
            part = Part(bytes(len(found[0].data)), None)
            if part.data == found[0].data:
                return found
            leaves = kept.leaves(index, part)
            subject = Subject(round_id, index, merged=False)
            members = found[0].claim.members
            made, means = digest_of_pieces(leaves), audits._means
            signed = claim(subject, kept.commit, node.name, members, made, sign=means.sign)
            swarm.lies[node.name] += 1
            return replace(part, claim=signed), leaves

        audits.show_upload = other

    on_start(swarm, lie)


def withhold_uploads(swarm: SwarmWithLiars) -> None:
    """Auditors are shown nothing."""

    def lie(node: Node) -> None:
        if node.name in swarm.liars and node.audits is not None:
            node.audits.show_upload = lambda *_, **__: None
            node.audits.show_sources = lambda *_, **__: None

    on_start(swarm, lie)


def _say(sender: PeerId, to: PeerId, message: Message) -> bool:
    return True


def _tell_two_things(
    swarm: SwarmWithLiars, kind: type[Message], alter: Callable[[PeerId, Any], Message | None]
) -> None:
    """Every other message of this kind of a liar is altered on its way; ``None``: it is not."""
    count: Counter[PeerId] = Counter()
    before = swarm.on_send or _say

    def tell(sender: PeerId, to: PeerId, message: Message) -> bool:
        if not before(sender, to, message):
            return False
        if not isinstance(message, kind) or sender not in swarm.liars:
            return True
        count[sender] += 1
        other = None if count[sender] % 2 else alter(sender, message)
        if other is None:
            return True
        swarm.lies[sender] += 1
        node = swarm.nodes.get(to)
        if node is not None and node.alive:
            node.part.hear(sender, other)
        return False

    swarm.on_send = tell


def propose_twice(swarm: SwarmWithLiars) -> None:
    """As coordinators they propose a seal without one contributor to every other voter."""

    def alter(sender: PeerId, message: said.Propose) -> Message | None:
        if len(message.seal) < 3:
            return None
        seal = message.seal[:-1]
        signature = swarm.sign(sender, said.vote(message.round, message.ballot, seal))
        return msgspec.structs.replace(message, seal=seal, signature=signature)

    _tell_two_things(swarm, said.Propose, alter)


def commit_twice(swarm: SwarmWithLiars) -> None:
    """As leaders they send every other member another commit under the same number."""

    def alter(sender: PeerId, message: said.Committed) -> Message:
        commit = said.decode_commit(message.commit)
        encoded = said.encode_commit(msgspec.structs.replace(commit, round_s=commit.round_s - 0.5))
        signature = swarm.sign(sender, encoded)
        return msgspec.structs.replace(message, commit=encoded, signature=signature)

    _tell_two_things(swarm, said.Committed, alter)


PROVABLE: tuple[Lie, ...] = (
    first_for_all,
    forge_sources,
    show_other_uploads,
    propose_twice,
    commit_twice,
)


def _beside_chatter(lie: Lie) -> Behaviour:
    def behaves(swarm: SwarmWithLiars, chatter: Chatterers) -> None:
        lie(swarm)

    behaves.__name__ = lie.__name__
    return behaves


BEHAVIOURS: tuple[Behaviour, ...] = tuple(map(_beside_chatter, (*PROVABLE, withhold_uploads)))
"""The same for storms in which other members that lie chatter as well."""
