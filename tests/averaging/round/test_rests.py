"""What encoding loses of merged slices, and in whose next contribution it is."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from averaging.history.standing import Standing
from averaging.history.state import FragmentState
from averaging.numbers.arithmetic import cutting_of, numbers_of
from averaging.numbers.layout import Layout, TensorSpec
from averaging.round.interface.effects import Apply
from averaging.round.rests import Rests
from tests.averaging.message_examples import COMMIT

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
    standing = Standing.of(FragmentState.founded(bytes(32), 0, np.zeros(6, np.float32)))
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
