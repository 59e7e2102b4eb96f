from __future__ import annotations

import math

from peer.rules.given_up import CYCLES, QUIET_S, GivenUpWork


def look(work: GivenUpWork, tokens: float, *, now: float) -> int | None:
    """A look of a peer whose cycle is short."""
    return work.look(tokens, now=now, cycle_s=1.0)


def test_work_that_fragments_give_up_in_a_long_cycle_is_told_once() -> None:
    """It was told in two parts: the second fragment was due three minutes after the first one."""
    work, cycle_s = GivenUpWork(0.0), 200.0
    assert work.look(50.0, now=0.0, cycle_s=cycle_s) is None
    assert work.look(50.0, now=180.0, cycle_s=cycle_s) is None
    assert work.look(90.0, now=190.0, cycle_s=cycle_s) is None
    assert work.look(90.0, now=189.0 + CYCLES * cycle_s, cycle_s=cycle_s) is None
    assert work.look(90.0, now=190.0 + CYCLES * cycle_s, cycle_s=cycle_s) == 90


def test_work_that_is_given_up_shortly_before_the_end_is_told_at_the_end() -> None:
    """The next life of the peer counts it as told."""
    work = GivenUpWork(0.0)
    assert look(work, 50.0, now=5.0) is None
    assert look(work, 50.0, now=math.inf) == 50
    assert look(GivenUpWork(50.0), 50.0, now=math.inf) is None
    assert look(GivenUpWork(0.0), 50.0, now=math.inf) == 50


def test_work_that_fragments_give_up_one_by_one_is_told_once() -> None:
    work = GivenUpWork(100.0)
    assert look(work, 100.0, now=0.0) is None
    assert look(work, 130.0, now=50.0) is None
    assert look(work, 160.0, now=55.0) is None, "the next fragment follows"
    assert look(work, 160.0, now=55.0 + QUIET_S - 0.1) is None
    assert look(work, 160.0, now=55.0 + QUIET_S) == 60
    assert look(work, 160.0, now=200.0) is None
    assert look(work, 161.0, now=201.0) is None
    assert look(work, 161.0, now=201.0 + QUIET_S) == 1


def test_work_that_was_merged_after_all_is_not_told() -> None:
    work = GivenUpWork(0.0)
    assert look(work, 50.0, now=1.0) is None
    assert look(work, 0.0, now=2.0) is None
    assert look(work, 0.0, now=2.0 + QUIET_S) is None


def test_work_that_is_lost_again_is_told_again() -> None:
    work = GivenUpWork(0.0)
    look(work, 50.0, now=0.0)
    assert look(work, 50.0, now=QUIET_S) == 50
    assert look(work, 20.0, now=100.0) is None
    look(work, 45.0, now=110.0)
    assert look(work, 45.0, now=110.0 + QUIET_S) == 25


def test_losses_of_less_than_a_token_are_not_told() -> None:
    work = GivenUpWork(0.0)
    look(work, 0.4, now=0.0)
    assert look(work, 0.4, now=QUIET_S) is None
