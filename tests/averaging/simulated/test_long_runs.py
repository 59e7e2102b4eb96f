"""A day of a simulated swarm: rounds go on in every hour, and what a peer keeps is bounded."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest

from averaging.round.interface.inputs import Applied
from averaging.round.machine import FragmentRounds
from tests.averaging.simulated.lasting import NOT_FULL, LastingSwarm
from tests.growth import growing


def hours_of(swarm: LastingSwarm, hours: int) -> dict[str, tuple[float, float]]:
    """The containers that grow while hours pass."""
    measured = swarm.last(hours)
    assert swarm.happened["crash"] and swarm.happened["partition"]
    return growing(measured, each_of=len(swarm.settled), allowed=NOT_FULL)


def swarm_of(peers: int, seed: int = 1) -> LastingSwarm:
    return LastingSwarm(seed, peers, 2, crash_every_s=900.0, new_at_h=(1.5, 3.5))


def test_the_memory_of_a_peer_is_bounded_over_hours_of_churn() -> None:
    assert not hours_of(swarm_of(4), 12)


def test_a_leak_is_named_by_the_container_that_leaks() -> None:
    handle: Callable[..., object] = FragmentRounds.handle

    def leaks(machine: FragmentRounds, given: object, now: float) -> object:
        if isinstance(given, Applied):
            machine.counters[f"applied at {now}"] += 1
        return handle(machine, given, now)

    with patch.object(FragmentRounds, "handle", leaks):
        found = hours_of(swarm_of(3, seed=2), 12)
    assert set(found) == {"machine.counters"}, found


@pytest.mark.soak
def test_the_memory_of_a_peer_is_bounded_over_a_day_of_sixty_four() -> None:
    swarm = LastingSwarm(1, 64, 12, crash_every_s=180.0, new_at_h=range(1, 24, 2))
    assert not hours_of(swarm, 24)
