"""Reputation: what counts how much, what follows, and how it fades."""

from __future__ import annotations

import pytest

from averaging.rules.policy import RETRY_MARGINS, RoundPolicy
from averaging.rules.reputation import (
    ENTRIES_MAX,
    HALF_LIFE_S,
    LIMIT,
    PASSED_OVER_MAX,
    Deed,
    Ground,
    Reputation,
)
from dht.identity import PeerId

ANNA, BORIS = PeerId("anna"), PeerId("boris")
POLICY = RoundPolicy()
SHORTEST_S = RETRY_MARGINS * POLICY.margin_s


def after(*deeds: Deed, peer: PeerId = ANNA, now: float = 0.0) -> Reputation:
    reputation = Reputation()
    for deed in deeds:
        reputation.saw(peer, deed, now)
    return reputation


def strikes(reputation: Reputation, peer: PeerId, now: float) -> float:
    return reputation.count(peer, Ground.CONDUCT, now)


def test_a_peer_has_no_power_with_three_strikes_and_again_when_they_have_faded() -> None:
    reputation = after(Deed.LIES, Deed.LIES)
    assert strikes(reputation, ANNA, 0.0) == 2.0 and reputation.has_power(ANNA, 0.0)
    reputation.saw(ANNA, Deed.LIES, 0.0)
    assert not reputation.has_power(ANNA, 0.0) and reputation.has_power(BORIS, 0.0)
    assert reputation.has_power(ANNA, 1.0)
    assert strikes(reputation, ANNA, HALF_LIFE_S) == pytest.approx(LIMIT / 2)


def test_all_have_power_until_somebody_has_three_strikes_and_once_they_have_faded() -> None:
    reputation = after(Deed.LIES, Deed.LIES)
    assert reputation.all_have_power(0.0)
    for _ in range(4):
        reputation.saw(ANNA, Deed.LIES, 0.0)
    assert not reputation.all_have_power(0.0)
    soon = HALF_LIFE_S + 0.5
    assert not reputation.all_have_power(soon) and reputation.has_power(ANNA, soon)
    assert reputation.all_have_power(HALF_LIFE_S + 2.0)


def test_poor_work_is_refused_and_costs_power_for_longer() -> None:
    reputation = after(Deed.HARMS, Deed.HARMS)
    assert not reputation.refuses_work(ANNA, 0.0) and reputation.has_power(ANNA, 0.0)
    reputation.saw(ANNA, Deed.HARMS, 0.0)
    assert reputation.refuses_work(ANNA, 0.0) and not reputation.has_power(ANNA, 0.0)
    assert not reputation.refuses_work(ANNA, 540.0) and not reputation.has_power(ANNA, 540.0)
    assert not reputation.all_have_power(2000.0)
    assert reputation.has_power(ANNA, 2500.0) and reputation.all_have_power(2500.0)


def test_good_work_pays_for_poor_work_and_for_no_lie() -> None:
    deeds = (Deed.LIES,) * 3 + (Deed.HARMS,) * 3 + (Deed.HELPS,) * 9
    reputation = after(*deeds)
    assert reputation.count(ANNA, Ground.WORK, 0.0) == 0.0
    assert not reputation.has_power(ANNA, 0.0)
    assert not reputation.refuses_work(ANNA, 0.0)


def test_what_a_slow_line_may_explain_counts_half_and_once_in_a_while() -> None:
    reputation = Reputation()
    every_s = Deed.IS_LATE.every_s
    assert reputation.saw(ANNA, Deed.IS_LATE, 0.0) and strikes(reputation, ANNA, 0.0) == 0.5
    assert not reputation.saw(ANNA, Deed.IS_LATE, every_s - 0.1)
    assert reputation.saw(BORIS, Deed.IS_LATE, 1.0)
    assert reputation.saw(ANNA, Deed.LIES, 1.0), "another deed counts all the same"
    assert reputation.saw(ANNA, Deed.IS_LATE, every_s)
    assert strikes(reputation, ANNA, every_s) == pytest.approx(2.0, rel=0.01)


def test_one_restart_counts_once_however_many_audits_find_nothing_of_it() -> None:
    reputation = after(*[Deed.HIDES] * 4)
    assert strikes(reputation, ANNA, 0.0) == 1.0
    assert not reputation.saw(ANNA, Deed.HIDES, Deed.HIDES.every_s - 0.1)
    assert reputation.saw(ANNA, Deed.HIDES, Deed.HIDES.every_s)
    assert strikes(reputation, ANNA, Deed.HIDES.every_s) == pytest.approx(2.0, rel=0.01)


def out_after_s(deed: Deed) -> int:
    reputation = Reputation()
    for second in range(600):
        reputation.saw(ANNA, deed, float(second))
        if not reputation.has_power(ANNA, float(second)):
            return second
    raise AssertionError("never")


def test_a_peer_that_never_shows_anything_is_out_after_a_minute() -> None:
    assert out_after_s(Deed.HIDES) == 60


def test_one_sleep_puts_nobody_out_and_silence_for_two_minutes_does() -> None:
    reputation = Reputation()
    for second in range(10):  # four fragments notice the same sleep, one after the other
        reputation.saw(ANNA, Deed.IS_LATE, float(second))
    assert strikes(reputation, ANNA, 10.0) < 1.0
    assert 50 < out_after_s(Deed.IS_LATE) < 120


def test_a_peer_whose_alarms_are_false_is_not_heeded_until_one_is_right() -> None:
    reputation = after(Deed.ALARMS_FALSELY)
    assert not reputation.is_over(ANNA, Ground.WORD, 0.0)
    reputation.saw(ANNA, Deed.ALARMS_FALSELY, 0.0)
    assert reputation.is_over(ANNA, Ground.WORD, 0.0) and reputation.has_power(ANNA, 0.0)
    reputation.saw(ANNA, Deed.ALARMS_RIGHTLY, 0.0)
    assert not reputation.is_over(ANNA, Ground.WORD, 0.0)


def test_a_source_that_wastes_time_again_and_again_is_left_alone_twice_as_long_each_time() -> None:
    sources = POLICY.reputation()
    now = 0.0
    for wait_s in (30.0, 60.0, 120.0, 240.0, 480.0, POLICY.catch_up_s, POLICY.catch_up_s):
        assert sources.may_ask(ANNA, now)
        sources.wasted(ANNA, held_s=30.0, now=now)
        assert not sources.may_ask(ANNA, now + wait_s - 0.1)
        now += wait_s
    assert sources.may_ask(BORIS, 0.0)


def test_a_source_that_cannot_be_reached_is_tried_again_soon_each_time() -> None:
    sources = POLICY.reputation()
    for attempt in range(10):
        now = attempt * SHORTEST_S
        assert sources.may_ask(ANNA, now)
        sources.wasted(ANNA, held_s=SHORTEST_S, now=now)
        assert not sources.may_ask(ANNA, now)


def test_reports_of_several_fragments_about_one_source_count_once() -> None:
    sources = POLICY.reputation()
    for _ in range(5):
        sources.wasted(ANNA, held_s=30.0, now=0.0)

    assert sources.may_ask(ANNA, 30.0)


def test_a_source_that_delivers_starts_with_a_clean_record() -> None:
    sources = POLICY.reputation()
    for now in (0.0, 30.0):
        sources.wasted(ANNA, held_s=30.0, now=now)
    sources.forgive(ANNA, Ground.STATES)
    sources.wasted(ANNA, held_s=30.0, now=100.0)

    assert sources.may_ask(ANNA, 130.0)


def test_a_leader_that_leads_nowhere_is_passed_over_for_longer_each_time_in_its_fragment() -> None:
    reputation = Reputation()
    for versions in (1, 2, 4, 8, PASSED_OVER_MAX, PASSED_OVER_MAX):
        assert reputation.led_nowhere(ANNA, 0.0, fragment=1, version=5) == versions
        assert reputation.passed_over(1, 5 + versions - 1) == {ANNA}
        assert not reputation.passed_over(1, 5 + versions)
    assert not reputation.passed_over(0, 5)
    assert reputation.led_nowhere(BORIS, 0.0, fragment=0, version=5) == 1
    reputation.forgive_leaders(1)
    assert not reputation.passed_over(1, 5) and reputation.passed_over(0, 5) == {BORIS}


def test_a_peer_that_stays_away_is_waited_for_when_it_has_come() -> None:
    reputation = Reputation()
    reputation.saw(ANNA, Deed.STAYS_AWAY, 0.0, fragment=1)
    assert reputation.is_over(ANNA, Ground.COMES, 9e9, fragment=1)
    assert not reputation.is_over(ANNA, Ground.COMES, 0.0, fragment=0)
    reputation.forgive(ANNA, Ground.COMES, fragment=1)
    assert not reputation.is_over(ANNA, Ground.COMES, 0.0, fragment=1)


def test_who_has_done_the_most_is_remembered_the_longest() -> None:
    reputation = after(*[Deed.LIES] * 3, peer=BORIS)
    for number in range(ENTRIES_MAX + 1):
        reputation.saw(PeerId(f"p{number}"), Deed.LIES, 1.0)
    assert strikes(reputation, BORIS, 0.0) == LIMIT
    assert sum(strikes(reputation, PeerId(f"p{n}"), 1.0) for n in range(ENTRIES_MAX + 1)) < (
        ENTRIES_MAX
    )
