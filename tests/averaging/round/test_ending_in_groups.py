"""Several groups end a run: they meld as they stand, also where one state grew out of another."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from averaging import messages as said
from averaging.history.standing import Standing
from averaging.round.interface.inputs import Due, Offered, Received, Tick
from averaging.round.interface.phase import Phase
from averaging.round.machine import FragmentRounds
from averaging.rules.policy import RoundPolicy
from dht.identity import PeerId
from tests.averaging.round.machines import (
    ME,
    POLICY,
    beside,
    certified,
    committed_with,
    join,
    machine,
    offer,
    signed,
    standing,
)

NAMES = ("anna", "boris", "clara", "dora", "eve")
GROUPS = replace(POLICY, group_size=4, tokens_end=200)
"""Six peers are two groups."""
OLD, MINE = standing("start", tokens=150), standing("start", "mine", tokens=150)
DONE = standing("start", "other", tokens=200)
"""The state of another group, with the run's tokens."""
NEXT = standing("start", "mine", "next", tokens=150)
FINAL = standing("start", "mine", "done", "more", "final", tokens=150)


def peers(number: int = 0) -> tuple[PeerId, ...]:
    return tuple(PeerId(f"{name}{number}") for name in NAMES)


def hears_of_the_end(rounds: FragmentRounds, others: tuple[PeerId, ...]) -> None:
    rounds.handle(Received(others[0], said.Compare(0, certified(DONE, others[:2]))), 1.0)


def member_of_a_meld_with(
    theirs: Standing, policy: RoundPolicy, *, has_heard: bool = True
) -> FragmentRounds:
    """A machine that got a commit for itself and for its leader, which stands elsewhere."""
    for number in range(200):
        others = peers(number)
        rounds = machine(MINE, others, policy)
        if has_heard:
            hears_of_the_end(rounds, others)
        rounds.handle(Due(), 1.0)
        rounds.handle(Offered(offer(MINE)), 1.0)
        attempt = rounds.joining.attempt
        if attempt is None or attempt.leader == ME:
            continue
        leader = attempt.leader
        message = committed_with(rounds, leader, theirs, beside(theirs, 0, *others))
        rounds.handle(Received(leader, message), 1.0)
        return rounds
    raise AssertionError("no names found")


def test_a_member_of_the_last_meld_takes_in_a_state_that_its_own_grew_out_of() -> None:
    rounds = member_of_a_meld_with(OLD, GROUPS)

    assert rounds.ending.closed_ranks
    assert rounds.phase is Phase.ENTERED


def test_a_member_that_has_not_heard_of_the_end_is_in_the_last_meld_as_well() -> None:
    rounds = member_of_a_meld_with(OLD, GROUPS, has_heard=False)

    assert not rounds.ending.closed_ranks
    assert rounds.phase is Phase.ENTERED


def joined_by(
    where: Standing, *, signers: int, mine: Standing = MINE
) -> tuple[FragmentRounds, PeerId]:
    """A machine that leads the last meld, and a peer that has joined from where it stands."""
    for number in range(200):
        others = peers(number)
        rounds = machine(mine, others, GROUPS)
        hears_of_the_end(rounds, others)
        assert rounds.ending.closed_ranks
        rounds.pacemaker.comes_along(number % 8)  # each attempt has another order
        if rounds.pacemaker.leader(where.head(), 1.0) == ME:
            boris = others[1]
            plain = msgspec.structs.replace(join(where), head=certified(where, others[:signers]))
            rounds.handle(Received(boris, signed(boris, plain, leader=ME)), 1.0)
            return rounds, boris
    raise AssertionError("no names found")


def admits(where: Standing, *, signers: int) -> bool:
    rounds, peer = joined_by(where, signers=signers)
    return rounds.open_roster is not None and peer in rounds.open_roster.joins


def test_a_leader_of_the_last_meld_admits_a_peer_that_is_a_version_behind() -> None:
    assert admits(OLD, signers=2)


def test_a_leader_of_the_last_meld_admits_a_peer_that_is_a_version_ahead() -> None:
    assert admits(NEXT, signers=2)


def test_a_leader_of_the_last_meld_refuses_a_state_that_one_peer_has_signed() -> None:
    assert not admits(NEXT, signers=1)


def test_the_roster_of_the_last_meld_is_open_as_long_as_others_come() -> None:
    """Earlier, it was open until the quorum's deadline, longer than a cycle: somebody always was
    missing."""
    rounds, boris = joined_by(OLD, signers=2)
    others = [peer for peer in sorted(rounds.peers.view) if peer != boris]
    head = certified(OLD, tuple(others[:2]))
    for number, peer in enumerate(others[:3]):
        plain = msgspec.structs.replace(join(OLD), head=head)
        rounds.handle(Received(peer, signed(peer, plain, leader=ME)), 3.0 + 4.0 * number)

    rounds.handle(Tick(), 11.0 + 0.9 * POLICY.answer_s)
    assert rounds.open_roster is not None and len(rounds.open_roster.joins) == 4
    rounds.handle(Tick(), 11.0 + POLICY.answer_s)
    assert rounds.open_roster is None
    assert 11.0 + POLICY.answer_s < 1.0 + POLICY.quorum.wait_s


def test_a_final_state_is_taken_and_not_mixed() -> None:
    rounds, peer = joined_by(FINAL, signers=5, mine=standing("start", "mine", "done", tokens=150))

    assert rounds.open_roster is None or peer not in rounds.open_roster.joins
    assert rounds.phase is Phase.CATCHING
