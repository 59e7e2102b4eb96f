"""Checking contributions on their authors' data: whom, when, and what follows."""

from __future__ import annotations

import random

import pytest

from averaging.audit.spot_checks import FALL_MIN, SpotChecks
from averaging.audit.strikes import Strikes
from dht.identity import PeerId

ANNA, BORIS, CLARA = PeerId("anna"), PeerId("boris"), PeerId("clara")
ALL = (ANNA, BORIS, CLARA)


def checks(seed: int = 0) -> tuple[SpotChecks, Strikes]:
    strikes = Strikes()
    return SpotChecks(strikes, every_steps=10, random=random.Random(seed).random), strikes


def test_one_contribution_is_drawn_in_so_many_steps_and_each_author_in_time() -> None:
    made, _ = checks()
    drawn = [made.draw(ALL, step) for step in range(0, 600, 5)]
    assert [peer for peer in drawn[1::2] if peer is not None] == []
    assert set(drawn[::2]) == set(ALL)
    assert made.draw((), 1000) is None


def test_a_peer_that_failed_is_checked_again_at_once_and_then_refused_for_a_while() -> None:
    made, _ = checks()
    assert made.draw((BORIS,), 0) == BORIS
    assert not made.checked(BORIS, 2.0, 2.3, 0.0)
    assert not made.refuses(BORIS, 0.0), "one failure has no consequence"
    assert made.draw(ALL, 1) == BORIS
    assert not made.checked(BORIS, 2.0, 2.0, 1.0)
    assert made.refuses(BORIS, 1.0)
    assert made.refuses(BORIS, 600.0)
    assert not made.refuses(BORIS, 1200.0), "strikes fade"
    assert made.draw(ALL, 2) is None, "it is no suspect any more"


def test_a_peer_that_passes_the_second_time_is_no_suspect() -> None:
    made, strikes = checks()
    made.checked(BORIS, 2.0, 2.3, 0.0)
    assert made.checked(BORIS, 2.0, 1.7, 1.0)
    assert not made.refuses(BORIS, 1.0)
    assert strikes.count(BORIS, 1.0) > 0.0, "it is remembered for a while"


@pytest.mark.parametrize(("after", "passes"), [(1.98, True), (1.9999, False), (2.001, False)])
def test_a_contribution_has_to_lower_the_loss_by_more_than_nothing(
    after: float, passes: bool
) -> None:
    assert 1.98 <= (1 - FALL_MIN) * 2.0 < 1.9999
    assert checks()[0].checked(ANNA, 2.0, after, 0.0) is passes


def test_checks_want_a_distance() -> None:
    with pytest.raises(ValueError, match="every_steps is 0"):
        SpotChecks(Strikes(), every_steps=0, random=random.Random(0).random)
