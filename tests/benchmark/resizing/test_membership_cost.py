"""The cost of membership while a swarm changes its size."""

from __future__ import annotations

import pytest

from tests.benchmark.resizing.membership_cost import membership_cost
from tests.swarms.sizes import parse

pytestmark = (
    pytest.mark.slow
)  # figures of docs/research/results-groups.md; what members see is tested in dht/presence

EXPIRY_S = 30.0
BEAT_S = 10.0


def test_a_swarm_that_shrinks_politely_is_seen_right_nearly_all_the_time() -> None:
    """Views are wrong for 3% of the time, mean of ten seeds. A goodbye reaches the connected peers
    alone."""
    sizes, seeds = parse("2,8,2", over_s=120.0), range(10)
    costs = [
        cost
        for seed in seeds
        for cost in membership_cost(sizes, [60.0, 120.0], politely=True, seed=seed)
    ]

    assert sum(cost.wrong_s for cost in costs) < BEAT_S / 2 * len(seeds)
    assert all(0 < cost.bytes_per_s < 5e3 for cost in costs)


def test_the_dead_are_missed_within_the_expiry_and_no_storm_of_hellos_follows() -> None:
    sizes = parse("20,20/2,2", over_s=160.0)
    before, after, late = membership_cost(sizes, [80.0, 120.0, 160.0], politely=False)

    assert 0 < after.wrong_s <= EXPIRY_S + BEAT_S
    assert late.wrong_s == 0
    assert after.hellos_per_beat < 2 * before.hellos_per_beat
    assert late.bytes_per_s < before.bytes_per_s


def test_a_flash_crowd_is_seen_by_all_in_a_few_seconds() -> None:
    sizes = parse("10,10/20,20", over_s=120.0)
    before, after = membership_cost(sizes, [60.0, 120.0], politely=False)

    assert after.wrong_s <= BEAT_S
    assert after.hellos_per_beat < 3 * before.hellos_per_beat
    assert membership_cost(sizes, [60.0, 120.0], politely=False) == [before, after]
