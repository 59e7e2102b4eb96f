"""The end of a run, and when a peer may leave."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from dht.membership.clock_offset import ClockEstimate
from peer.rules.ending import (
    Ending,
    LastRounds,
    Stay,
    ended,
    seconds_left,
    stay,
    who_differs,
    who_leaves_too,
)
from peer.run_file.sections import End
from peer.status import PeerStatus
from tests.peer.statuses import a_status

NOON = datetime(2027, 3, 31, 12, tzinfo=UTC)
BY_DATE = End(tokens="unlimited", date=NOON)


def test_the_date_follows_the_own_clock_until_another_peer_is_asked() -> None:
    assert seconds_left(BY_DATE, None, now=NOON - timedelta(seconds=8)) == 8
    assert seconds_left(End(tokens=5), None, now=NOON) is None


def test_two_peers_whose_clocks_differ_agree_on_the_mean() -> None:
    behind = ClockEstimate(offset_s=10.0, error_s=0.0, peers=1)
    ahead = ClockEstimate(offset_s=-10.0, error_s=0.0, peers=1)
    now = NOON - timedelta(seconds=20)
    assert seconds_left(BY_DATE, behind, now=now) == 15
    assert seconds_left(BY_DATE, ahead, now=now + timedelta(seconds=10)) == 15


def test_a_peer_with_a_wrong_clock_follows_the_others() -> None:
    estimate = ClockEstimate(offset_s=-3600.0, error_s=0.0, peers=9)
    left = seconds_left(BY_DATE, estimate, now=NOON + timedelta(hours=1))
    assert left is not None
    assert left == pytest.approx(-360.0)


def test_the_last_rounds_are_over_when_each_fragment_has_a_version_or_a_void_round() -> None:
    rounds = LastRounds((4, 7, 7))
    assert rounds.missing((4, 7, 7)) == (0, 1, 2)
    rounds.came_to_nothing(1)
    assert rounds.missing((5, 7, 7)) == (2,)
    assert rounds.missing((5, 7, 8)) == ()


def seen(versions: tuple[int, ...], phase: str = "leaving") -> PeerStatus:
    return a_status(name="boris", versions=versions, phase=phase)


@pytest.mark.parametrize("by_date", [True, False])
def test_a_peer_leaves_when_the_others_have_its_versions(by_date: bool) -> None:
    assert who_differs((3, 4), [seen((3, 4)), seen((3, 4))], by_date=by_date) == []
    assert who_differs((3, 4), [], by_date=by_date) == []


@pytest.mark.parametrize("by_date", [True, False])
@pytest.mark.parametrize("versions", [(), (3, 3)])
def test_a_peer_stays_for_a_peer_that_is_behind(by_date: bool, versions: tuple[int, ...]) -> None:
    assert len(who_differs((3, 4), [seen(versions)], by_date=by_date)) == 1


def test_by_date_a_peer_also_stays_for_versions_it_lacks() -> None:
    assert who_differs((3, 4), [seen((3, 5))], by_date=True)
    assert who_differs((3, 4), [seen((3, 4), "ready")], by_date=True)
    assert who_differs((3, 4), [seen((3, 5), "ready")], by_date=False) == []


@pytest.mark.parametrize("by_date", [True, False])
def test_equal_versions_on_two_sides_of_a_fork_differ(by_date: bool) -> None:
    def other(model: str) -> PeerStatus:
        return a_status(name="boris", versions=(3, 4), phase="leaving", model=model)

    assert who_differs((3, 4), [other("ab")], by_date=by_date, model="ab") == []
    assert who_differs((3, 4), [other("cd")], by_date=by_date, model="ab") == [
        "boris: at these versions with other parameters"
    ]
    assert who_differs((3, 4), [other("")], by_date=by_date, model="ab") == []


GOAL = End(tokens=1000)


def test_a_run_has_ended_when_all_who_have_its_state_say_so_and_its_tokens_bear_it_out() -> None:
    now = datetime(2026, 11, 22, tzinfo=UTC)
    over = a_status(ended_at=7.0, global_tokens=1000)
    later = a_status(ended_at=9.0, global_tokens=1001)
    assert ended(GOAL, [over, later, a_status(versions=())], now=now) == (7.0, 1001)
    assert ended(GOAL, [over, a_status(global_tokens=1000)], now=now) is None
    assert ended(GOAL, [a_status(ended_at=7.0, global_tokens=999)], now=now) is None
    assert ended(GOAL, [], now=now) is None


def test_a_run_with_a_date_has_not_ended_before_it_whoever_says_so() -> None:
    date = datetime(2026, 11, 22, 12, tzinfo=UTC)
    over = [a_status(ended_at=7.0, global_tokens=5)]
    assert ended(End(tokens="unlimited", date=date), over, now=date - timedelta(seconds=1)) is None
    assert ended(End(tokens="unlimited", date=date), over, now=date) == (7.0, 5)


def test_nobody_waits_for_a_keeper_that_stays_after_the_end() -> None:
    keeper = a_status(name="keeper", role="keeper", phase="ready", versions=(3, 4))
    assert who_differs((3, 4), [keeper], by_date=True) == ["keeper: still ready"]
    stays = msgspec.structs.replace(keeper, ended_at=7.0)
    assert who_differs((3, 4), [stays], by_date=True) == []


def test_merging_and_handing_over_share_the_patience_that_a_leaving_peer_has() -> None:
    ending = Ending("its owner asked it to leave", 0, False, timeout_s=30.0, patience_s=300.0)
    assert ending.patience_left_s(5.0) == 300.0
    assert ending.patience_left_s(130.0) == 200.0
    assert ending.patience_left_s(331.0) == 0.0


def test_leaving_takes_no_longer_than_its_patience_and_the_end_of_it_is_for_saving() -> None:
    assert stay(300.0, drain_s=30.0) == Stay(30.0, 260.0, last_words_s=10.0)
    assert stay(30.0, drain_s=30.0) == Stay(20.0, 0.0, last_words_s=10.0)
    assert stay(6.0, drain_s=30.0) == Stay(4.0, 0.0, last_words_s=2.0)
    assert stay(300.0, drain_s=30.0).longest_s == 300.0


def leaver(versions: tuple[int, ...], pending: float = 0.0, model: str = "ab") -> PeerStatus:
    fates = {"pending": pending}
    return a_status(name="boris", phase="leaving", versions=versions, fates=fates, model=model)


def test_peers_that_leave_together_wait_for_work_and_for_one_model() -> None:
    """Of five that left at once three kept other models than the last."""
    same, keeper = leaver((3, 4)), a_status(role="keeper", versions=(3, 4), model="ab")
    assert who_leaves_too((3, 4), [same, keeper], model="ab") == []
    for other in (leaver((3, 4), pending=11.0), leaver((3, 5)), leaver((2, 4))):
        assert len(who_leaves_too((3, 4), [same, other], model="ab")) == 1
    assert who_leaves_too((3, 4), [leaver((3, 4), model="cd")], model="ab")
    behind = a_status(role="keeper", versions=(3, 3), model="cd")
    assert who_leaves_too((3, 4), [same, behind], model="ab")


def test_nobody_stays_for_those_that_leave_while_another_trains_on() -> None:
    stays = a_status(name="clara", phase="ready", versions=(3, 4))
    assert who_leaves_too((3, 4), [leaver((3, 5)), stays], model="ab") == []
    newcomer = a_status(name="dora", phase="fetching", versions=())
    assert who_leaves_too((3, 4), [leaver((3, 5)), newcomer], model="ab")
