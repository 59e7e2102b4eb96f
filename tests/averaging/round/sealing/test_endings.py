"""All states of one round at three and four voters: what today's order keeps, and another would."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.averaging.round.sealing.endings import VOID, Sealer, SealFirst, VoteWhenHeld, explore

SLOW = pytest.mark.slow  # 150 000 states each


@pytest.mark.parametrize(
    ("voters", "ballots"),
    [(3, 1), pytest.param(3, 2, marks=SLOW), pytest.param(4, 1, marks=SLOW)],
)
def test_a_sealed_round_decides_one_set_of_contributors_and_ends_with_any_one_voter_dead(
    voters: int, ballots: int
) -> None:
    """The price: one may finish what a majority has forsworn, and is apart."""
    machine = SealFirst(voters, crashes=1, ballots=ballots)
    found = explore(machine)

    assert len(found.states) > 10_000
    assert not found.two_decided
    assert not found.stuck
    assert any(map(machine.is_apart, found.states))


class Forgetful(SealFirst):
    """Later ballots do not continue what was accepted before."""

    def known(self, promise: Sequence[Sealer]) -> tuple[int, int]:
        return -1, VOID


def test_ballots_that_forget_what_was_accepted_decide_two() -> None:
    assert explore(Forgetful(3, crashes=1, ballots=1)).two_decided


def test_a_leader_that_votes_twice_has_two_sets_decided_in_either_order() -> None:
    """Two votes of one voter are a proof against it (``averaging.guard.rules.proofs``)."""
    assert explore(SealFirst(3, crashes=0, ballots=0, leader_lies=True)).two_decided
    assert explore(VoteWhenHeld(3, crashes=0, leader_lies=True)).two_decided


@pytest.mark.parametrize("voters", [3, 4])
@pytest.mark.parametrize("knows", ["nothing", "voters", "all"])
def test_one_vote_each_for_what_is_held_ends_only_where_nobody_is_taken_for_dead_wrongly(
    voters: int, knows: str
) -> None:
    """The votes of those that are up differ, and that of the dead one would decide."""
    found = explore(VoteWhenHeld(voters, crashes=1, knows=knows))

    assert not found.two_decided
    assert bool(found.stuck) == (knows != "all")
