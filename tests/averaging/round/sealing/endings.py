"""Two ways to end one round, as machines small enough to look at every state of them.

    python -m tests.averaging.round.sealing.endings

``SealFirst`` is what peers do (``averaging.round.sealing``): a majority agrees on the contributors,
then the slices are merged, and a majority may forswear a round whose slices are lost.
``VoteWhenHeld`` is what they might do instead: whoever has all merged slices votes for the version,
once, and a majority of equal votes decides. docs/develop/testing.md says what came of it.

One of the voters leads (the first), one reduces everything (the last). Any message may be lost or
late, so a step of a voter may come at any time or never: partitions are a case of that. A voter
that crashes comes back as another one, which is the same as never. Not in the model: uploads, time,
and peers without a vote.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Generic, NamedTuple, Protocol, TypeVar

State = TypeVar("State")

VOID, LEADERS, ANOTHER = 0, 1, 2
"""What can be decided: nothing is merged, the contributors that the leader names, or others."""


class Machine(Protocol[State]):
    """The states of one round at all voters together, and the steps between them."""

    def first(self) -> State: ...

    def steps(self, state: State) -> Iterator[State]:
        """Where one step leads that needs no fault."""
        ...

    def faults(self, state: State) -> Iterator[State]: ...

    def decided(self, state: State) -> frozenset[int]:
        """What was ever decided; the empty seal included."""
        ...

    def is_over(self, state: State) -> bool:
        """True if all voters that are up know the end, or can be told it by one that is."""
        ...

    def most_are_up(self, state: State) -> bool: ...


@dataclass(frozen=True, slots=True)
class Explored(Generic[State]):
    """All states that a machine can come to."""

    states: list[State]
    stuck: list[State]
    """Most voters are up, and not even the best weather leads to an end from here."""
    two_decided: list[State]


def explore(machine: Machine[State]) -> Explored[State]:
    first = machine.first()
    seen, waiting = {first}, [first]
    before: defaultdict[State, list[State]] = defaultdict(list)
    while waiting:
        state = waiting.pop()
        for after in machine.steps(state):
            before[after].append(state)
            if after not in seen:
                seen.add(after)
                waiting.append(after)
        for after in machine.faults(state):
            if after not in seen:
                seen.add(after)
                waiting.append(after)
    can_end = {state for state in seen if machine.is_over(state)}
    waiting = list(can_end)
    while waiting:
        for state in before[waiting.pop()]:
            if state not in can_end:
                can_end.add(state)
                waiting.append(state)
    stuck = [state for state in seen - can_end if machine.most_are_up(state)]
    two = [state for state in seen if len(machine.decided(state)) > 1]
    return Explored(list(seen), stuck, two)


# What peers do


class Sealer(NamedTuple):
    """One voter of a round that is sealed first."""

    up: bool = True
    promised: int = 0
    ballot: int = -1
    """The ballot in which it accepted last."""
    accepted: int = VOID
    vowed: bool = False
    """It never finishes the round, and accepts no seal but the empty one."""
    applied: int = VOID


class Sealing(NamedTuple):
    voters: tuple[Sealer, ...]
    proposed: tuple[int | None, ...]
    """The seal of each ballot, once one is proposed."""
    chosen: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class SealFirst:
    """A seal by single-decree Paxos, then the bytes, then vows if they are lost."""

    voters: int
    crashes: int
    ballots: int
    """Ballots after the leader's, of the voters in turn."""
    leader_lies: bool = False
    """It proposes two seals in its ballot, and votes for both."""

    @property
    def majority(self) -> int:
        return self.voters // 2 + 1

    def first(self) -> Sealing:
        return Sealing((Sealer(),) * self.voters, (None,) * (self.ballots + 1))

    def steps(self, state: Sealing) -> Iterator[Sealing]:
        yield from self._begin(state)
        for place, voter in enumerate(state.voters):
            if voter.up:
                yield from self._accept(state, place, late=False)
                yield from self._apply(state, place)
                if not (voter.vowed or voter.applied):
                    yield _with(state, place, voter._replace(vowed=True))

    def _begin(self, state: Sealing) -> Iterator[Sealing]:
        """Propose in a ballot: any seal, or that of the highest ballot which its majority knows."""
        if state.proposed[0] is None and state.voters[0].up:
            for seal in (VOID, LEADERS):
                yield state._replace(proposed=(seal, *state.proposed[1:]))
        up = [place for place, voter in enumerate(state.voters) if voter.up]
        for ballot in range(1, len(state.proposed)):
            if state.proposed[ballot] is not None or ballot % self.voters not in up:
                continue
            for promise in combinations(up, self.majority):
                if any(state.voters[place].promised >= ballot for place in promise):
                    continue
                voters = list(state.voters)
                for place in promise:
                    voters[place] = voters[place]._replace(promised=ballot)
                known = self.known([voters[place] for place in promise])
                for seal in (VOID, ANOTHER) if known[0] < 0 else (known[1],):
                    proposed = list(state.proposed)
                    proposed[ballot] = seal
                    yield state._replace(voters=tuple(voters), proposed=tuple(proposed))

    def known(self, promise: Sequence[Sealer]) -> tuple[int, int]:
        """The highest ballot in which one of these has accepted a seal, and the seal."""
        return max((voter.ballot, voter.accepted) for voter in promise)

    def _accept(self, state: Sealing, place: int, *, late: bool) -> Iterator[Sealing]:
        """Accept a proposal. ``late``: of a voter that is down by now, and sends it no more."""
        voter = state.voters[place]
        for ballot, seal in enumerate(state.proposed):
            if seal is None or ballot < voter.promised or ballot <= voter.ballot:
                continue
            if late == state.voters[ballot % self.voters].up:
                continue
            lies = self.leader_lies and ballot == 0
            for told in (seal, ANOTHER) if lies else (seal,):
                if not (voter.vowed and told != VOID):
                    accepted = voter._replace(promised=ballot, ballot=ballot, accepted=told)
                    yield self._counted(_with(state, place, accepted), ballot, told)

    def _counted(self, state: Sealing, ballot: int, seal: int) -> Sealing:
        votes = {
            place
            for place, voter in enumerate(state.voters)
            if (voter.ballot, voter.accepted) == (ballot, seal)
        }
        if self.leader_lies and ballot == 0:
            votes.add(0)
        if len(votes) < self.majority:
            return state
        return state._replace(chosen=state.chosen | {seal})

    def _apply(self, state: Sealing, place: int) -> Iterator[Sealing]:
        """Finish with the merged slices of the reducer, or of a member that has finished."""
        voter = state.voters[place]
        if voter.vowed or voter.applied:
            return
        for seal in state.chosen - {VOID}:
            if state.voters[-1].up or any(
                each.up and each.applied == seal for each in state.voters
            ):
                yield _with(state, place, voter._replace(applied=seal))

    def faults(self, state: Sealing) -> Iterator[Sealing]:
        may_crash = sum(not voter.up for voter in state.voters) < self.crashes
        for place, voter in enumerate(state.voters):
            if voter.up:
                yield from self._accept(state, place, late=True)
                if may_crash:
                    yield _with(state, place, voter._replace(up=False))

    def decided(self, state: Sealing) -> frozenset[int]:
        return state.chosen

    def is_over(self, state: Sealing) -> bool:
        """One that has given the round up takes the state of one that has finished."""
        up = [voter for voter in state.voters if voter.up]
        if VOID in state.chosen or all(voter.vowed for voter in up):
            return True
        return all(voter.applied or voter.vowed for voter in up)

    def most_are_up(self, state: Sealing) -> bool:
        return sum(voter.up for voter in state.voters) >= self.majority

    def is_apart(self, state: Sealing) -> bool:
        """True if somebody has finished a round that a majority has forsworn."""
        vows = sum(voter.vowed for voter in state.voters)
        return vows >= self.majority and any(voter.applied for voter in state.voters)


def _with(state: Sealing, place: int, voter: Sealer) -> Sealing:
    voters = state.voters
    return state._replace(voters=(*voters[:place], voter, *voters[place + 1 :]))


# What they might do instead

NO_VOTE = -1


class Holder(NamedTuple):
    """One voter that votes when it holds the version."""

    up: bool = True
    vote: int = NO_VOTE
    """The version that it holds; ``VOID``: it found the bytes at nobody."""
    is_heard: bool = True
    """Its vote is known to somebody who is up."""


class Held(NamedTuple):
    voters: tuple[Holder, ...]
    announced: bool = False


@dataclass(frozen=True, slots=True)
class VoteWhenHeld:
    """One vote each, for the version that a voter holds or for none."""

    voters: int
    crashes: int
    knows: str = "nothing"
    """When a voter gives the bytes up: at any time, as messages are lost; when no voter that is up
    has them (``"voters"``); or when they can never come (``"all"``)."""
    leader_lies: bool = False
    """It announces two sets of contributors, and votes for both."""

    @property
    def majority(self) -> int:
        return self.voters // 2 + 1

    def first(self) -> Held:
        return Held((Holder(),) * self.voters)

    def steps(self, state: Held) -> Iterator[Held]:
        if not state.announced and state.voters[0].up:
            yield state._replace(announced=True)
        reduces = state.announced and state.voters[-1].up
        to_come = state.voters[-1].up and (state.announced or state.voters[0].up)
        held = {voter.vote for voter in state.voters if voter.up} - {NO_VOTE, VOID}
        got = held | ({LEADERS, ANOTHER} if self.leader_lies else {LEADERS}) if reduces else held
        for place, voter in enumerate(state.voters):
            if not voter.up or voter.vote != NO_VOTE:
                continue
            for version in got:
                yield _voted(state, place, version)
            may_come = {"nothing": False, "voters": bool(held), "all": bool(held) or to_come}
            if not may_come[self.knows]:
                yield _voted(state, place, VOID)

    def faults(self, state: Held) -> Iterator[Held]:
        """A voter that crashes may have told nobody, and with it goes what only it had heard."""
        if sum(not voter.up for voter in state.voters) >= self.crashes:
            return
        for place, voter in enumerate(state.voters):
            for is_heard, remembers in product((True, False), repeat=2) if voter.up else ():
                others = [each._replace(is_heard=each.up or remembers) for each in state.voters]
                others[place] = voter._replace(up=False, is_heard=is_heard)
                yield state._replace(voters=tuple(others))

    def _votes(self, state: Held, version: int, *, heard: bool) -> int:
        return sum(
            voter.vote == version or (self.leader_lies and place == 0 and version != VOID)
            for place, voter in enumerate(state.voters)
            if voter.is_heard or not heard
        )

    def decided(self, state: Held) -> frozenset[int]:
        return frozenset(
            version
            for version in (VOID, LEADERS, ANOTHER)
            if self._votes(state, version, heard=False) >= self.majority
        )

    def is_over(self, state: Held) -> bool:
        """The equal votes of a majority are known; or those of so many that no version has one."""
        best = max(self._votes(state, each, heard=True) for each in (LEADERS, ANOTHER))
        if best >= self.majority or self._votes(state, VOID, heard=True) >= self.majority:
            return True
        # What a voter that is down has voted, if it has, only those know that have heard it.
        unknown = sum(voter.vote == NO_VOTE or not voter.is_heard for voter in state.voters)
        return best + unknown < self.majority

    def most_are_up(self, state: Held) -> bool:
        return sum(voter.up for voter in state.voters) >= self.majority


def _voted(state: Held, place: int, vote: int) -> Held:
    voters = list(state.voters)
    voters[place] = voters[place]._replace(vote=vote)
    return state._replace(voters=tuple(voters))


def main() -> None:
    print("voters crashes machine                          states    stuck two decided  apart")  # noqa: T201
    for voters, crashes in ((3, 1), (4, 1), (5, 2)):
        for knows in ("nothing", "voters", "all"):
            held = explore(VoteWhenHeld(voters, crashes, knows=knows))
            _show(voters, crashes, f"vote when held, knows {knows}", held, 0)
    for voters, crashes, ballots in ((3, 1, 1), (3, 1, 2), (4, 1, 1)):
        machine = SealFirst(voters, crashes, ballots)
        sealed = explore(machine)
        apart = sum(map(machine.is_apart, sealed.states))
        _show(voters, crashes, f"seal first, {ballots} later ballots", sealed, apart)
    for lying in (VoteWhenHeld(3, 1, leader_lies=True), SealFirst(3, 1, 1, leader_lies=True)):
        _show(3, 1, f"{type(lying).__name__}, the leader lies", explore(lying), 0)


def _show(voters: int, crashes: int, name: str, found: Explored[State], apart: int) -> None:
    counts = f"{len(found.states):9} {len(found.stuck):8} {len(found.two_decided):11} {apart:6}"
    print(f"{voters:6} {crashes:7} {name:30} {counts}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
