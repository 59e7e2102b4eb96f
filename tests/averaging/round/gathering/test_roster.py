"""Rosters that a leader makes of its joins."""

from __future__ import annotations

from averaging.round.gathering.roster import without_carrier
from tests.averaging.round.machines import ANNA, BORIS, ME, join, standing


def test_a_mix_leaves_out_newcomers_where_nobody_else_stands() -> None:
    """Newcomers may stand where the leader stood before; its commit had no carrier, and was
    none."""
    joins = {
        ME: join(standing("start", "one")),
        ANNA: join(standing("start", "one")),
        BORIS: join(standing("start")),
    }
    assert without_carrier(joins, {BORIS}) == {BORIS}
    assert without_carrier(joins, {ANNA}) == set()
    assert without_carrier(joins, set()) == set()


def test_where_all_are_newcomers_nobody_is_left_out() -> None:
    joins = {ANNA: join(standing("start", "one")), BORIS: join(standing("start"))}
    assert without_carrier(joins, {ANNA, BORIS}) == set()
