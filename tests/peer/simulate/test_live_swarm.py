"""The simulator and whole averagers in virtual time come to the same, seed by seed."""

from __future__ import annotations

import pytest

from tests.peer.simulate.live_swarm import live, simulated, small


@pytest.mark.parametrize("peers", [6, pytest.param(24, marks=pytest.mark.slow)])
def test_the_simulator_trains_as_whole_averagers_do(peers: int) -> None:
    """Learners are the same. Learners adopt at once here, and after their next step there; bytes
    are without what streams and signatures add."""
    real, fast = live(small(peers), 72.0), simulated(small(peers), 72.0)

    assert fast.version == pytest.approx(real.version, abs=0.5)
    assert fast.contributors == pytest.approx(real.contributors, rel=0.1)
    assert fast.loss == pytest.approx(real.loss, rel=0.05)
    assert fast.merged_share == pytest.approx(real.merged_share, abs=0.03)
    assert fast.goodput == pytest.approx(real.goodput, abs=0.03)
    assert 0.4 * real.bytes_sent < fast.bytes_sent < real.bytes_sent
