"""Rounds that begin in one moment are spread over a cycle again."""

from __future__ import annotations

import pytest

from tests.averaging.simulated.spacing_experiment import look, servers_and_homes, split_up


@pytest.mark.slow  # the rule is tested in tests/averaging/rules
def test_after_a_time_in_which_nobody_merged_the_rounds_of_the_fragments_are_spread_again() -> None:
    """Without ``averaging.rules.spacing`` they stay in a sixth of a cycle, and each takes 3.5 s."""
    row = look(split_up(servers_and_homes()), seed=1)

    assert row.spread > 0.5, row
    assert row.latency_s < 3.2, row
    assert row.missed < 0.02, row
