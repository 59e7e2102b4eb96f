"""Settings that the daemon gets at its start."""

from __future__ import annotations

import pytest

from dht.libp2p.hivemind_daemon import processors


@pytest.mark.parametrize(("has", "may_use"), [(1, 1), (2, 1), (3, 1), (4, 2), (64, 2)])
def test_the_daemon_leaves_processors_to_whoever_trains(has: int, may_use: int) -> None:
    assert processors(has) == may_use
