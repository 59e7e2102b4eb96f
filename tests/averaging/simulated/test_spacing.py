"""Rounds that begin in one moment are spread over a cycle again."""

from __future__ import annotations

from statistics import fmean

import pytest

from tests.averaging.simulated.spacing_experiment import look, servers_and_homes, split_up


@pytest.mark.slow  # the rule is tested in tests/averaging/rules
def test_after_a_time_in_which_nobody_merged_the_rounds_of_the_fragments_are_spread_again() -> None:
    """Without ``averaging.rules.spacing`` over half of a cycle (0.49) in these three seeds."""
    rows = [look(split_up(servers_and_homes()), seed) for seed in range(3)]

    assert fmean(row.spread for row in rows) > 0.55, rows
    assert fmean(row.latency_s for row in rows) < 3.4, rows
    assert fmean(row.missed for row in rows) < 0.01, rows
