"""The closing of a roster: quorum, grace window and deadline."""

from dataclasses import replace

import pytest

from averaging.messages import Join
from averaging.round.opinions.fragment import OpenRoster
from averaging.rules.quorum import (
    Close,
    NoRound,
    QuorumPolicy,
    Required,
    Timings,
    Turnout,
    Wait,
    decide,
)
from dht.identity import PeerId
from tests.averaging.message_examples import EXAMPLES

POLICY = QuorumPolicy(wait_s=30.0)


def turnout(
    joined: int,
    live: int,
    *,
    passed: int = 0,
    opened: float = 100.0,
    quorum: float | None = None,
    expected_until: float | None = None,
) -> Turnout:
    return Turnout(
        live=live,
        joined=joined,
        passed=passed,
        opened_at=opened,
        quorum_at=quorum,
        expected_until=expected_until,
    )


@pytest.mark.parametrize(
    ("required", "live", "needed"),
    [
        (None, 1, 2),
        (None, 2, 2),
        (None, 3, 2),
        (None, 4, 3),
        (None, 16, 9),
        (5, 3, 5),
        (0.5, 8, 4),
        (0.5, 9, 5),
        (1.0, 7, 7),
        (0.1, 5, 2),
        ("all", 6, 6),
        ("all", 1, 2),
    ],
)
def test_the_quorum_follows_the_live_peers(required: Required, live: int, needed: int) -> None:
    assert QuorumPolicy(required=required).needed(live) == needed


def test_closes_at_once_when_everybody_is_here() -> None:
    verdict = decide(turnout(4, 4, quorum=101.0), POLICY, grace_s=9.0, now=101.0)

    assert verdict == Close("everybody is here: 4 of 4 live peers joined")


def test_does_not_wait_for_those_who_passed() -> None:
    verdict = decide(turnout(3, 4, passed=1, quorum=101.0), POLICY, grace_s=9.0, now=101.0)

    assert verdict == Close("everybody is here: 3 of 4 live peers joined, 1 passed")


def test_a_quorum_waits_out_its_grace_window_and_not_longer() -> None:
    here = turnout(3, 4, quorum=101.0)

    assert decide(here, POLICY, grace_s=2.0, now=102.9) == Wait(
        "quorum of 3 reached, grace for 1 more: 3 of 4 live peers joined", until=103.0
    )
    assert decide(here, POLICY, grace_s=2.0, now=103.0) == Close(
        "quorum of 3 reached and the grace window is over: 3 of 4 live peers joined"
    )


def test_the_deadline_ends_a_grace_window() -> None:
    here = turnout(3, 4, quorum=129.0)

    waiting = decide(here, POLICY, grace_s=5.0, now=129.5)
    assert isinstance(waiting, Wait)
    assert waiting.until == 130.0
    closed = decide(here, POLICY, grace_s=5.0, now=130.0)
    assert isinstance(closed, Close)
    assert "the deadline has come" in closed.reason


def test_a_peer_that_announced_its_join_is_waited_for_beyond_the_grace_window() -> None:
    here = turnout(3, 4, quorum=101.0, expected_until=105.0)

    waiting = decide(here, POLICY, grace_s=0.5, now=104.9)
    assert isinstance(waiting, Wait)
    assert waiting.until == 105.0
    assert isinstance(decide(here, POLICY, grace_s=0.5, now=105.0), Close)


def test_without_grace_a_roster_closes_at_the_quorum_whoever_comes() -> None:
    here = turnout(3, 4, quorum=101.0, expected_until=105.0)
    policy = QuorumPolicy(wait_s=30.0, gamma=0.0)

    assert isinstance(decide(here, policy, grace_s=0.0, now=101.0), Close)


def test_a_peer_that_announced_a_late_join_does_not_move_the_deadline() -> None:
    here = turnout(3, 4, quorum=101.0, expected_until=1e4)

    assert isinstance(decide(here, POLICY, grace_s=0.5, now=130.0), Close)


def test_without_a_quorum_the_round_is_void_at_the_deadline_and_not_before() -> None:
    here = turnout(2, 4)

    assert decide(here, POLICY, grace_s=0.0, now=129.9) == Wait(
        "quorum of 3 not reached: 2 of 4 live peers joined", until=130.0
    )
    assert decide(here, POLICY, grace_s=0.0, now=130.0) == NoRound(
        "no quorum of 3 within 30 s: 2 of 4 live peers joined"
    )


def test_one_peer_alone_never_makes_a_roster() -> None:
    assert isinstance(decide(turnout(1, 1), POLICY, grace_s=0.0, now=129.0), Wait)


def test_all_means_all_even_when_somebody_passes() -> None:
    policy = QuorumPolicy(required="all", wait_s=30.0)

    assert isinstance(decide(turnout(3, 4, passed=1), policy, grace_s=0.0, now=110.0), Wait)


def test_grace_is_a_share_of_the_time_that_training_hides() -> None:
    timings = Timings()
    policy = QuorumPolicy(gamma=0.5, tau=2.0)
    assert timings.grace_s(policy, step_time_s=3.0) == 3.0

    timings.quorum_took(1.0)
    timings.sync_took(2.0)
    assert timings.grace_s(policy, step_time_s=3.0) == 1.5

    timings.sync_took(22.0)  # an average of the last rounds, not the last one
    assert timings.sync_s == pytest.approx(6.0)
    assert timings.grace_s(policy, step_time_s=3.0) == 0.0


def test_a_called_peer_is_expected_until_it_answers_and_then_as_long_as_it_said() -> None:
    anna, boris = map(PeerId, ("anna", "boris"))
    roster = OpenRoster((anna, boris), decide_at=130.0, search_at=105.0, now=100.0)

    def expected_until() -> float | None:
        return roster.turnout(lambda peer: True, room=3, answer_s=1.0).expected_until

    assert expected_until() is None
    roster.called = {anna: 100.0, boris: 100.5}
    assert expected_until() == 101.5
    roster.coming[anna] = 104.0
    assert expected_until() == 104.0
    roster.passed |= {anna, boris}
    assert expected_until() is None


@pytest.mark.parametrize(("strangers", "closes"), [(1, True), (0, False)])
def test_a_roster_that_strangers_have_filled_waits_for_nobody(strangers: int, closes: bool) -> None:
    """Peers of other versions join as well, so not all of the group fit any more."""
    anna, boris, clara, stranger = map(PeerId, ("anna", "boris", "clara", "stranger"))
    roster = OpenRoster((anna, boris, clara), decide_at=130.0, search_at=105.0, now=100.0)
    join = next(message for message in EXAMPLES if isinstance(message, Join))
    roster.joins = dict.fromkeys([anna, boris, *[stranger] * strangers], join)

    here = roster.turnout(lambda peer: True, room=3, answer_s=1.0)
    verdict = decide(here, QuorumPolicy(required="all"), grace_s=0.0, now=101.0)
    assert isinstance(verdict, Close) == closes


def test_one_that_leaves_its_work_to_a_keeper_may_be_alone_where_no_other_is_live() -> None:
    policy = QuorumPolicy()
    one = Turnout(live=1, joined=1, passed=0, opened_at=0.0, quorum_at=None)
    assert isinstance(decide(one, policy, grace_s=0.0, now=1.0), Wait)
    to_keeper = replace(one, to_keeper=True)
    assert isinstance(decide(to_keeper, policy, grace_s=0.0, now=1.0), Close)
    assert isinstance(decide(replace(to_keeper, live=2), policy, grace_s=0.0, now=1.0), Wait)
    assert isinstance(decide(replace(to_keeper, joined=0), policy, grace_s=0.0, now=1.0), Wait)
