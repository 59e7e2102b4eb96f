"""The contribution of a member to a round that it has entered."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from averaging.history.state import FragmentState
from averaging.messages import encode_commit
from averaging.round.contributing import Contribution, contribution
from averaging.round.interface.effects import Enter
from averaging.rules.policy import RoundPolicy
from tests.averaging.message_examples import COMMIT

BASE, VALUES = np.zeros(4, np.float32), np.ones(4, np.float32)
FRESH, LATE = 0, 1
"""Entries of the commit: the work of the second one began a version earlier."""


def given_by(
    entry: int, policy: RoundPolicy, *, parents: int = 1, codec_down: str | None = None
) -> Contribution:
    links = COMMIT.parents * parents
    commit = msgspec.structs.replace(COMMIT, parents=links, codec_down=codec_down)
    enter = Enter(bytes(32), commit, encode_commit(commit), b"", entry, ())
    state = FragmentState.founded(bytes(32), 0, BASE)
    given = contribution(enter, state, (BASE, VALUES), policy)
    assert given is not None
    return given


@pytest.mark.parametrize("parents", [1, 2])
def test_late_work_is_shortened_where_the_run_says_so(parents: int) -> None:
    assert [entry.staleness for entry in COMMIT.members[:2]] == [0, 1]
    shortens = RoundPolicy(late_work="per_cycle")

    assert given_by(FRESH, shortens, parents=parents).share == 1.0
    assert given_by(LATE, shortens, parents=parents).share == 0.5
    assert given_by(LATE, RoundPolicy(), parents=parents).share == 1.0


def test_statistics_are_never_shortened() -> None:
    assert given_by(LATE, RoundPolicy(late_work="per_cycle").of_statistics()).share == 1.0


def test_the_loss_of_the_commits_codec_is_fed_back() -> None:
    fed_back = replace(RoundPolicy(), feedback=frozenset({COMMIT.displacement_codec}))

    assert given_by(FRESH, fed_back).feedback
    assert not given_by(FRESH, RoundPolicy()).feedback


@pytest.mark.parametrize("parents", [1, 2])
def test_the_loss_of_merged_slices_is_fed_back_if_a_codec_of_either_way_is(parents: int) -> None:
    def given(*fed_back: str) -> Contribution:
        policy = RoundPolicy(feedback=frozenset(fed_back))
        return given_by(FRESH, policy, parents=parents, codec_down="int2")

    up = COMMIT.displacement_codec
    assert up != "int2"
    assert given(up).feedback and given(up).keeps_rests
    assert not given("int2").feedback and given("int2").keeps_rests
    assert not given().keeps_rests
    uploads = RoundPolicy(feedback=frozenset({up}), feeds_back_merged=False)
    assert not given_by(FRESH, uploads, parents=parents).keeps_rests
