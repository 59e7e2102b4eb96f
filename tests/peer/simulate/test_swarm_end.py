"""The end of a simulated swarm of more peers than a roster holds: with one model."""

from __future__ import annotations

import pytest

from peer.simulate.settings import parse
from peer.simulate.simulation import SimulatedSwarm

SEVERAL_GROUPS = """
[peers]
count = 90
step_jitter = 0.05
speed_spread = 0.2
[problem]
size = 2
[outer]
fragments = 2
[rounds]
group_size = 16
[weather]
crash_share = 0.05
away_s = 30.0
[end]
cycles = 6.0
together = true
"""


@pytest.mark.slow  # several groups in one roster: averaging/rules/test_mixing.py
def test_more_peers_than_a_roster_holds_end_with_one_model() -> None:
    """Several groups make a last round each: the lighter ones give way."""
    with SimulatedSwarm(parse(SEVERAL_GROUPS), 0) as swarm:
        result = swarm.run()
        assert swarm.is_agreed
    assert result.final.lineages == 1.0
    # All tokens are merged after 175 to 190 s; two of five seeds once took 348 s.
    assert result.duration_s < 190.0 + 4 * 24.0
