"""The contribution of a member to a round that it has entered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from averaging.history.standing import Standing
from averaging.history.state import FragmentState
from averaging.messages import encode_commit
from averaging.numbers.arithmetic import cutting_of, numbers_of
from averaging.numbers.layout import Layout, TensorSpec
from averaging.round.contributing import Contribution, Rests, contribution
from averaging.round.interface.effects import Apply, Enter
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
    state = FragmentState.founded(bytes(32), 0, BASE, BASE.size)
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


FRAGMENT = Layout.build([TensorSpec(f"block.{i}", (3,)) for i in range(2)], 1).fragments[0]
COMMIT_OF_TWO = msgspec.structs.replace(
    COMMIT,
    shares=(1, 1),
    members=tuple(
        msgspec.structs.replace(member, staleness=0, steps=10, tokens=tokens)
        for member, tokens in zip(COMMIT.members[:2], (100, 300), strict=True)
    ),
    batch_tokens_max=30,
    on_probation=(),
)


def left(
    entry: int | None,
    *,
    inside: Sequence[int] = (0, 1),
    seal: tuple[int, ...] = (0, 1),
    contained: int | None = 7,
) -> list[float]:
    """What is left of the rest of the second slice, 1 in each value, at a member of the round."""
    cutting = cutting_of(COMMIT_OF_TWO, FRAGMENT, numbers_of(COMMIT_OF_TWO))
    rests, offered = Rests(COMMIT_OF_TWO, entry, cutting), np.zeros(FRAGMENT.size, np.float32)
    rest = rests.room(1)
    rest.values.fill(1)
    rests.keep(rest, inside)
    standing = Standing.of(FragmentState.founded(bytes(32), 0, np.zeros(6, np.float32), 0))
    weights = tuple(1 / len(seal) for _ in seal)
    rests.leave(
        Apply(bytes(32), COMMIT_OF_TWO, seal, (), weights, standing, contained, ""), offered
    )
    return offered.tolist()


def test_the_next_contribution_has_the_rest_by_the_weight_of_this_one() -> None:
    """Weights are 1/10 and 9/10; a weight below the mean counts as the mean."""
    assert left(1) == pytest.approx([0, 0, 0, *[10 / 9] * 3])
    assert left(0) == pytest.approx([0, 0, 0, 2, 2, 2])


def test_a_rest_is_not_left_where_the_own_work_is_not_in_the_version() -> None:
    nothing = [0.0] * FRAGMENT.size
    assert left(1, inside=(0,), seal=(0,), contained=None) == nothing
    assert left(1, contained=None) == nothing, "the learner was released meanwhile"
    assert left(None) == nothing, "a keeper has no learner"
