"""Members that lie in the arithmetic, or sign two different things, in whole swarms.

A delegate that bundles falsely, uploads that are shown to no auditor, and claims of others that are
made up are lied about in ``tests/averaging/guard/test_audits.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from averaging import messages as said
from averaging.messages import Message
from averaging.round.gathering.roster import recomposed
from averaging.round.interface.effects import Effect, Merge
from averaging.virtual.swarm import Peer
from dht.identity import PeerId
from tests.averaging.virtual.liars import Behaviour, SwarmWithLiars, on_effect
from tests.averaging.virtual.strangers import Chatterers

Lie = Callable[[SwarmWithLiars], None]


def first_for_all(swarm: SwarmWithLiars) -> None:
    """As reducers they take the first contribution for the mean: within any norm.

    ``swarm.lies`` counts how often each did so and it made a difference.
    """

    def lie(peer: Peer, effect: Effect) -> Effect | None:
        if peer.name not in swarm.liars or not isinstance(effect, Merge):
            return effect
        uploads = peer.averager.uploads_of(effect.round)
        if uploads is None or not uploads.cutting.slices[effect.slice].size:
            return effect
        if len(effect.contributors) < 2:
            return effect
        swarm.truth.lies.add(effect.round)
        swarm.truth.coverage["merged falsely"] += 1
        swarm.lies[peer.name] += 1
        swarm.rounds_of_lies[peer.name].add(effect.round)
        weights = (1.0, *[0.0] * (len(effect.weights) - 1))
        return msgspec.structs.replace(effect, weights=weights)

    on_effect(swarm, lie)


def _tell_two_things(
    swarm: SwarmWithLiars, kind: type[Message], alter: Callable[[PeerId, Any], Message | None]
) -> None:
    """Every other message of this kind of a liar is altered; ``None``: it is not."""
    count: Counter[PeerId] = Counter()
    before = swarm.on_say

    def tell(peer: Peer, to: PeerId, message: Message) -> Message | None:
        first = message if before is None else before(peer, to, message)
        if first is None or not isinstance(first, kind) or peer.name not in swarm.liars:
            return first
        count[peer.name] += 1
        other = None if count[peer.name] % 2 else alter(peer.name, first)
        if other is None:
            return first
        swarm.lies[peer.name] += 1
        return other

    swarm.on_say = tell


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
    """As leaders they send every other member another commit under the same number: the same roster
    without its last member."""

    def alter(sender: PeerId, message: said.Committed) -> Message | None:
        commit = said.decode_commit(message.commit)
        if len(commit.members) < 3:
            return None
        last = len(commit.members) - 1
        fewer = msgspec.structs.replace(
            commit,
            members=commit.members[:last],
            on_probation=tuple(index for index in commit.on_probation if index < last),
        )
        machine = swarm.nodes[sender].machine
        policy = machine.identity.policy_at(commit.version)
        encoded_bytes = machine.identity.encoded_bytes
        encoded = said.encode_commit(recomposed(fewer, policy, encoded_bytes=encoded_bytes))
        signature = swarm.sign(sender, encoded)
        return msgspec.structs.replace(message, commit=encoded, signature=signature)

    _tell_two_things(swarm, said.Committed, alter)


PROVABLE: tuple[Lie, ...] = (first_for_all, propose_twice, commit_twice)


def _beside_chatter(lie: Lie) -> Behaviour:
    def behaves(swarm: SwarmWithLiars, chatter: Chatterers) -> None:
        lie(swarm)

    behaves.__name__ = lie.__name__
    return behaves


BEHAVIOURS: tuple[Behaviour, ...] = tuple(map(_beside_chatter, PROVABLE))
"""The same for storms in which other members that lie chatter as well."""
