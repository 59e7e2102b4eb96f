"""Strikes: what counts how much, and how it fades."""

from __future__ import annotations

import pytest

from averaging.audit.strikes import (
    DOUBTFUL,
    DOUBTFUL_EVERY_S,
    HALF_LIFE_S,
    LIMIT,
    MISSING_EVERY_S,
    PEERS_MAX,
    Strikes,
)
from dht.identity import PeerId

ANNA, BORIS = PeerId("anna"), PeerId("boris")


def test_a_peer_is_out_with_three_strikes_and_back_when_they_have_faded() -> None:
    strikes = Strikes()
    assert [strikes.add(ANNA, 0.0) for _ in range(3)] == [1.0, 2.0, 3.0]
    assert strikes.is_out(ANNA, 0.0) and not strikes.is_out(BORIS, 0.0)
    assert not strikes.is_out(ANNA, 1.0)
    assert strikes.count(ANNA, HALF_LIFE_S) == pytest.approx(LIMIT / 2)


def test_nobody_is_out_until_somebody_has_three_strikes_and_once_they_have_faded() -> None:
    strikes = Strikes()
    strikes.add(ANNA, 0.0, weight=2.0)
    assert not strikes.may_have_any_out(0.0)
    strikes.add(ANNA, 0.0, weight=2.0)
    strikes.add(BORIS, 0.0, weight=8.0)
    assert strikes.may_have_any_out(0.0)
    assert strikes.may_have_any_out(HALF_LIFE_S) and not strikes.is_out(ANNA, HALF_LIFE_S)
    assert not strikes.may_have_any_out(2 * HALF_LIFE_S)
    strikes.add(ANNA, 2 * HALF_LIFE_S, weight=3.0)
    assert strikes.may_have_any_out(2 * HALF_LIFE_S)


def test_a_strike_that_a_slow_line_may_explain_counts_half_and_once_in_a_while() -> None:
    strikes = Strikes()
    assert strikes.add_doubtful(ANNA, 0.0) == DOUBTFUL
    assert strikes.add_doubtful(ANNA, DOUBTFUL_EVERY_S - 0.1) is None
    assert strikes.add_doubtful(BORIS, 1.0) == DOUBTFUL
    assert strikes.add_doubtful(ANNA, DOUBTFUL_EVERY_S) == pytest.approx(1.0, rel=0.01)


def test_one_restart_counts_once_however_many_audits_find_nothing_of_it() -> None:
    strikes = Strikes()
    assert [strikes.add_missing(ANNA, 0.0) for _ in range(4)] == [1.0] * 4
    assert strikes.add_missing(ANNA, MISSING_EVERY_S - 0.1) < 1.0
    assert strikes.add_missing(BORIS, 1.0) == 1.0
    assert strikes.add_missing(ANNA, MISSING_EVERY_S) == pytest.approx(2.0, rel=0.01)


def test_a_peer_that_never_shows_anything_is_out_after_a_minute() -> None:
    strikes = Strikes()
    out_s = next(s for s in range(600) if strikes.add_missing(ANNA, float(s)) >= LIMIT)
    assert out_s == 3 * MISSING_EVERY_S == 60.0


def test_one_sleep_puts_nobody_out_and_silence_for_two_minutes_does() -> None:
    strikes = Strikes()
    for at_s in range(10):  # four fragments notice the same sleep, one after the other
        strikes.add_doubtful(ANNA, float(at_s))
    assert strikes.count(ANNA, 10.0) < 1.0
    out_s = next(at_s for at_s in range(600) if _silent_until(at_s).is_out(BORIS, float(at_s)))
    assert 50 < out_s < 120


def _silent_until(end_s: int) -> Strikes:
    strikes = Strikes()
    for at_s in range(end_s + 1):
        strikes.add_doubtful(BORIS, float(at_s))
    return strikes


def test_the_peers_remembered_are_bounded() -> None:
    strikes = Strikes()
    for number in range(2 * PEERS_MAX):
        strikes.add_doubtful(PeerId(f"p{number}"), 0.0)
        strikes.add_missing(PeerId(f"p{number}"), 0.0)
        assert len(strikes._records) <= PEERS_MAX
