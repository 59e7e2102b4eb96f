"""Voters that lie in ballots of their own, after the leader's: whoever votes may begin one."""

from __future__ import annotations

import msgspec

from averaging import messages as said
from averaging.messages import Commit, Message, decode_commit, digest
from averaging.round.sealing.seals import ballot_of
from averaging.virtual.swarm import Peer
from dht.identity import PeerId
from tests.averaging.virtual.liars import Behaviour, SwarmWithLiars
from tests.averaging.virtual.strangers import Chatterers

ATTEMPTS_MAX = 3


def _own_ballot(commit: Commit, liar: PeerId, chatter: Chatterers) -> int | None:
    """A ballot that only this voter may use; ``None``: it has no vote."""
    index, voters = commit.index(liar), commit.voters
    if index not in voters:
        return None
    above = chatter.rng.randrange(ATTEMPTS_MAX) * len(voters)
    return ballot_of(voters.index(index), voters=len(voters), above=above)


def _on_commit(swarm: SwarmWithLiars, chatter: Chatterers, lie: _Lie) -> None:
    """Have each liar do something in a ballot of its own, soon after it has entered a round."""
    overhear = swarm.on_send
    assert overhear is not None

    def see(sender: PeerId, to: PeerId, message: Message) -> bool:
        if isinstance(message, said.Committed) and to in swarm.liars and to != sender:
            commit, round_id = decode_commit(message.commit), digest(message.commit)
            ballot = _own_ballot(commit, to, chatter)
            if ballot is not None:
                after_s = chatter.rng.expovariate(1.0)
                swarm.call_in(after_s, lie, to, round_id, commit, ballot)
        return overhear(sender, to, message)

    swarm.on_send = see


class _Lie:
    """One way to lie in a ballot of one's own."""

    def __init__(self, swarm: SwarmWithLiars, chatter: Chatterers) -> None:
        self.swarm = swarm
        self.chatter = chatter

    def __call__(self, liar: PeerId, round_id: bytes, commit: Commit, ballot: int) -> None:
        raise NotImplementedError

    def tell(self, liar: PeerId, commit: Commit, message: Message, *, chance: float = 1.0) -> None:
        """Say something to the other members, or to some of them."""
        for entry in commit.members:
            if entry.peer != liar and self.chatter.rng.random() < chance:
                self.swarm.say(liar, entry.peer, message)


class _Void(_Lie):
    def __call__(self, liar: PeerId, round_id: bytes, commit: Commit, ballot: int) -> None:
        self.swarm.truth.coverage["said void"] += 1
        chance = self.chatter.rng.choice((0.3, 1.0))
        self.tell(
            liar,
            commit,
            said.Void(0, round_id, "because", forsworn=False, ballot=ballot),
            chance=chance,
        )


class _Usurp(_Lie):
    def __call__(self, liar: PeerId, round_id: bytes, commit: Commit, ballot: int) -> None:
        self.swarm.truth.coverage["usurped a round"] += 1
        rng = self.chatter.rng
        if rng.random() < 0.5:
            self.tell(liar, commit, said.Prepare(0, round_id, ballot))
        seal = tuple(i for i in range(len(commit.members)) if rng.random() < 0.7)
        seal = rng.choice(((), seal, (commit.voters[0],)))
        signature = self.swarm.sign(liar, said.vote(round_id, ballot, seal))
        propose = said.Propose(0, round_id, ballot, seal, signature)
        self.swarm.call_in(
            rng.expovariate(2.0), lambda: self.tell(liar, commit, propose, chance=0.7)
        )


class _Reassign(_Lie):
    def __call__(self, liar: PeerId, round_id: bytes, commit: Commit, ballot: int) -> None:
        self.swarm.truth.coverage["reassigned slices falsely"] += 1
        reducer = self.chatter.rng.choice(commit.members).peer
        index = self.chatter.rng.randrange(len(commit.reducers))
        self.tell(liar, commit, said.Reassign(0, round_id, ballot, index, reducer), chance=0.6)


class _Forswear(_Lie):
    def __call__(self, liar: PeerId, round_id: bytes, commit: Commit, ballot: int) -> None:
        self.swarm.truth.coverage["asked to forswear"] += 1
        self.tell(liar, commit, said.Forswear(0, round_id, ballot), chance=0.6)


def void_in_later_ballots(swarm: SwarmWithLiars, chatter: Chatterers) -> None:
    """The voters tell all or some members, as coordinators of later ballots, that a round is
    void."""
    _on_commit(swarm, chatter, _Void(swarm, chatter))


def void_rounds_of_their_own(swarm: SwarmWithLiars, chatter: Chatterers) -> None:
    """As leaders they tell all or some members that the round is void, and go on with the rest."""
    lie, overhear = _Void(swarm, chatter), swarm.on_send
    assert overhear is not None
    told: set[bytes] = set()

    def see(sender: PeerId, to: PeerId, message: Message) -> bool:
        if isinstance(message, said.Committed) and sender in swarm.liars:
            commit, round_id = decode_commit(message.commit), digest(message.commit)
            if round_id not in told:
                told.add(round_id)
                after_s = chatter.rng.expovariate(1.0)
                swarm.call_in(after_s, lie, sender, round_id, commit, 0)
        return overhear(sender, to, message)

    swarm.on_send = see


def usurp_rounds(swarm: SwarmWithLiars, chatter: Chatterers) -> None:
    """The voters propose seals of their own making in later ballots, with promises or without."""
    _on_commit(swarm, chatter, _Usurp(swarm, chatter))


def reassign_in_later_ballots(swarm: SwarmWithLiars, chatter: Chatterers) -> None:
    """The voters give slices to other reducers, and tell only some members."""
    _on_commit(swarm, chatter, _Reassign(swarm, chatter))


def have_rounds_forsworn(swarm: SwarmWithLiars, chatter: Chatterers) -> None:
    """The voters ask members to forswear rounds in which nothing is lost."""
    _on_commit(swarm, chatter, _Forswear(swarm, chatter))


def deny_votes(swarm: SwarmWithLiars, chatter: Chatterers) -> None:
    """The voters promise later coordinators to have accepted nothing, whatever they have voted
    for."""
    before = swarm.on_say

    def deny(peer: Peer, to: PeerId, message: Message) -> Message | None:
        first = message if before is None else before(peer, to, message)
        if peer.name not in swarm.liars or not isinstance(first, said.Promise):
            return first
        if first.accepted_ballot is None:
            return first
        swarm.truth.coverage["denied a vote"] += 1
        swarm.lies[peer.name] += 1
        text = said.promise_text(first.round, first.ballot, None, ())
        signature = swarm.sign(peer.name, text)
        return msgspec.structs.replace(
            first, accepted_ballot=None, accepted=(), signature=signature
        )

    swarm.on_say = deny


def coordinate_without_sealing(swarm: SwarmWithLiars, chatter: Chatterers) -> None:
    """As coordinators, in whatever ballot, they propose nothing and tell nobody of a seal."""
    overhear = swarm.on_send
    assert overhear is not None

    def lose(sender: PeerId, to: PeerId, message: Message) -> bool:
        lost = sender in swarm.liars and isinstance(message, said.Propose | said.Sealed)
        swarm.truth.coverage["did not seal"] += lost
        return overhear(sender, to, message) and not lost

    swarm.on_send = lose


BEHAVIOURS: tuple[Behaviour, ...] = (
    void_in_later_ballots,
    void_rounds_of_their_own,
    usurp_rounds,
    reassign_in_later_ballots,
    have_rounds_forsworn,
)
