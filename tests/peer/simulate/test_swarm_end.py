"""The end of a simulated swarm of more peers than a roster holds: with one model."""

from __future__ import annotations

import pytest

from peer.simulate.settings import parse
from peer.simulate.simulation import SimulatedSwarm

SEVERAL_GROUPS = """
[peers]
count = {count}
step_jitter = 0.05
speed_spread = 0.2
[problem]
size = 2
[outer]
fragments = 2
[rounds]
group_size = 16
[weather]
crash_share = {churn}
away_s = 30.0
[end]
{end}
"""


@pytest.mark.slow  # several groups in one roster: averaging/rules/test_mixing.py
@pytest.mark.parametrize(
    ("count", "churn", "end", "within_s"),
    [
        # All tokens are merged after 175 to 190 s; two of five seeds once took 348 s.
        (90, 0.05, "cycles = 6.0\ntogether = true", 190.0 + 4 * 24.0),
        (256, 0.0, "date_s = 144.0", 144.0 + 3 * 24.0),
    ],
    ids=["tokens", "date"],
)
def test_more_peers_than_a_roster_holds_end_with_one_model(
    count: int, churn: float, end: str, within_s: float
) -> None:
    """Several groups make a last round each: the lighter ones give way."""
    text = SEVERAL_GROUPS.format(count=count, churn=churn, end=end)
    with SimulatedSwarm(parse(text), 0) as swarm:
        result = swarm.run()
        assert swarm.is_agreed
    assert result.final.lineages == 1.0
    assert result.duration_s < within_s
