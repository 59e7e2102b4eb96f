"""A machine that wants to be led, or is alone: when it offers, and when it keeps still."""

from __future__ import annotations

from dataclasses import replace

import pytest

from averaging.effects import Effect, TakeSnapshot
from averaging.grouping import PeerView
from averaging.round import FragmentRounds
from tests.averaging.test_round import ANNA, POLICY, machine


def wanted(effects: list[Effect]) -> list[str]:
    return [effect.reason for effect in effects if isinstance(effect, TakeSnapshot)]


def founder_beside(anna: PeerView) -> FragmentRounds:
    rounds = machine(others=(), founder=True)
    rounds.around.view = {ANNA: anna}
    return rounds


ARRIVING = PeerView(first_seen=0.0, heard_at=0.0, trains=False, arrives=True)


def test_a_founder_keeps_the_state_that_a_newcomer_is_fetching() -> None:
    assert wanted(founder_beside(ARRIVING).due(1.0)) == []


@pytest.mark.parametrize("at", [31.0, 1000.0])
def test_it_folds_on_when_the_newcomer_is_not_heard_of_any_more(at: float) -> None:
    assert wanted(founder_beside(ARRIVING).due(at)) == ["alone, so I fold"]


def test_a_keeper_beside_a_founder_changes_nothing() -> None:
    keeper = replace(ARRIVING, arrives=False)
    assert wanted(founder_beside(keeper).due(1.0)) == ["alone, so I fold"]


def test_a_newcomer_that_never_comes_to_train_stops_nobody_for_good() -> None:
    rounds = founder_beside(ARRIVING)
    rounds.due(1.0)
    late = 1.0 + POLICY.alone_s
    rounds.around.view = {ANNA: replace(ARRIVING, heard_at=late)}
    assert wanted(rounds.due(late)) == ["alone, so I fold"]
