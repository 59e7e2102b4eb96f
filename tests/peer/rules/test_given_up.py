from __future__ import annotations

from peer.rules.given_up import QUIET_S, GivenUpWork


def test_work_that_fragments_give_up_one_by_one_is_told_once() -> None:
    work = GivenUpWork(100.0)
    assert work.look(100.0, now=0.0) is None
    assert work.look(130.0, now=50.0) is None
    assert work.look(160.0, now=55.0) is None, "the next fragment follows"
    assert work.look(160.0, now=55.0 + QUIET_S - 0.1) is None
    assert work.look(160.0, now=55.0 + QUIET_S) == 60
    assert work.look(160.0, now=200.0) is None
    assert work.look(161.0, now=201.0) is None
    assert work.look(161.0, now=201.0 + QUIET_S) == 1


def test_work_that_was_merged_after_all_is_not_told() -> None:
    work = GivenUpWork(0.0)
    assert work.look(50.0, now=1.0) is None
    assert work.look(0.0, now=2.0) is None
    assert work.look(0.0, now=2.0 + QUIET_S) is None


def test_work_that_is_lost_again_is_told_again() -> None:
    work = GivenUpWork(0.0)
    work.look(50.0, now=0.0)
    assert work.look(50.0, now=QUIET_S) == 50
    assert work.look(20.0, now=100.0) is None
    work.look(45.0, now=110.0)
    assert work.look(45.0, now=110.0 + QUIET_S) == 25


def test_losses_of_less_than_a_token_are_not_told() -> None:
    work = GivenUpWork(0.0)
    work.look(0.4, now=0.0)
    assert work.look(0.4, now=QUIET_S) is None
