"""The loss gate's decisions, on both sides of each boundary."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest

from averaging.guard.rules.loss_gate import (
    PATIENCE_VERSIONS,
    REFUSALS_MAX,
    REMEMBERED_MAX,
    RISE_HARMLESS,
    GivesWay,
    Passed,
    Refusals,
    Refused,
    Undo,
    judge,
)
from averaging.history.chain import Chain
from averaging.messages import Link


class Owners(NamedTuple):
    version: int
    lineage: bytes


def lineage(version: int, side: int = 0) -> bytes:
    return bytes([side]) + version.to_bytes(31, "big")


def chain(tip: int, *, parts_at: int = 0) -> Chain:
    """A history of versions 0 to ``tip``; from ``parts_at`` on another one than usual, if set."""
    return Chain(
        Link(version, lineage(version, int(0 < parts_at <= version)), version)
        for version in range(tip + 1)
    )


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        (4.0, 5.0, Passed),
        (4.0, 5.001, Undo),
        (4.0, 1.0, Passed),
        (0.02, 0.02 + RISE_HARMLESS - 1e-9, Passed),  # six times the loss, and only noise
        (0.02, 0.02 + RISE_HARMLESS + 1e-6, Undo),
        (-2.0, -1.5, Passed),
        (-2.0, -1.49, Undo),
        (4.0, math.nan, Undo),
        (4.0, math.inf, Undo),
        (math.nan, 9.0, Passed),
        (math.inf, math.nan, Passed),
        (None, 9.0, Passed),
        (4.0, None, Passed),
    ],
)
def test_a_jump_is_undone_if_the_loss_rises_beyond_the_bound(
    before: float | None, after: float | None, kind: type
) -> None:
    assert type(judge(before, after, rise_max=0.25)) is kind


def test_after_some_refusals_in_a_row_a_jump_is_taken_and_said_to_be() -> None:
    last = judge(4.0, 9.0, rise_max=0.25, refused=REFUSALS_MAX - 1)
    taken = judge(4.0, 9.0, rise_max=0.25, refused=REFUSALS_MAX)
    assert isinstance(last, Undo) and isinstance(taken, GivesWay)
    assert "rose from 4 to 9" in last.reason and "3 jumps were refused" in taken.reason
    assert isinstance(judge(4.0, 4.1, rise_max=0.25, refused=REFUSALS_MAX), Passed)


def test_states_that_the_owner_attests_are_taken_whatever_the_loss_says() -> None:
    assert isinstance(judge(4.0, 9.0, rise_max=0.25, attested=True), GivesWay)
    assert isinstance(judge(4.0, 4.0, rise_max=0.25, attested=True), Passed)


def test_a_history_is_refused_from_the_refused_state_until_the_others_have_gone_on() -> None:
    refusals = Refusals()
    assert refusals.why_not(1, chain(30)) is None and not refusals.of(1)
    refusals.refuse([(1, 20, lineage(20))])

    assert refusals.of(1) and not refusals.of(0)
    assert refusals.why_not(1, chain(19)) is None  # before it
    reason = refusals.why_not(1, chain(20))
    assert reason is not None and "version 20" in reason and "version 28" in reason
    assert refusals.why_not(1, chain(20 + PATIENCE_VERSIONS - 1)) is not None
    assert refusals.why_not(1, chain(20 + PATIENCE_VERSIONS)) is None
    assert refusals.why_not(1, chain(22, parts_at=20)) is None  # another one since
    assert refusals.why_not(0, chain(20)) is None


def test_each_refusal_in_a_row_doubles_the_patience_and_a_kept_jump_ends_the_row() -> None:
    refusals = Refusals()
    for version in (20, 40, 60):
        refusals.refuse([(0, version, lineage(version))])
    assert refusals.row([0, 1]) == 3 and refusals.row([1]) == refusals.row([]) == 0
    waits = [each.until_version - each.version for each in refusals.all]
    assert waits == [PATIENCE_VERSIONS, 2 * PATIENCE_VERSIONS, 4 * PATIENCE_VERSIONS]

    refusals.kept([1])
    assert refusals.row([0]) == 3
    refusals.kept([0, 1])
    refusals.refuse([(0, 80, lineage(80))])
    assert refusals.row([0]) == 1
    assert refusals.all[-1].until_version == 80 + PATIENCE_VERSIONS


def test_the_states_of_one_jump_are_one_refusal_and_each_fragment_has_its_own_row() -> None:
    refusals = Refusals()
    refusals.refuse([(0, 20, lineage(20)), (0, 22, lineage(22)), (1, 21, lineage(21))])
    refusals.refuse([(1, 40, lineage(40))])
    assert refusals.in_a_row == {0: 1, 1: 2}
    assert [each.times for each in refusals.all] == [1, 1, 1, 2]


@pytest.mark.parametrize(("attested", "refused"), [(19, True), (20, False), (22, False)])
def test_the_owners_word_ends_the_refusal_of_what_its_state_goes_on_from(
    attested: int, refused: bool
) -> None:
    refusals = Refusals([Refused(0, 20, lineage(20), 1)])
    owners = Owners(attested, lineage(attested))
    assert (refusals.why_not(0, chain(23), owners) is not None) is refused


def test_the_owners_word_about_another_history_ends_nothing() -> None:
    refusals = Refusals([Refused(0, 20, lineage(20), 1)])
    assert refusals.why_not(0, chain(23), Owners(22, lineage(22, side=1))) is not None


def test_a_peer_that_goes_with_the_others_refuses_nothing_of_any_fragment() -> None:
    refusals = Refusals([Refused(0, 20, lineage(20), 1)], in_a_row={0: 3, 1: 1})
    refusals.forget()
    assert refusals.why_not(0, chain(20)) is None
    assert not refusals.of(0) and refusals.row([0, 1]) == 0


def test_the_oldest_refused_states_are_forgotten() -> None:
    refusals = Refusals()
    for version in range(1, REMEMBERED_MAX + 2):
        refusals.refuse([(0, version, lineage(version))])
        refusals.kept([0])
    assert len(refusals) == REMEMBERED_MAX
    assert refusals.why_not(0, chain(1)) is None and refusals.why_not(0, chain(2)) is not None
