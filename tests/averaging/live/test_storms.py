"""Averagers in the simulator's storms: the same accidents, the same promises, the shipped streams.

``make soak`` goes on from where these seeds stop, for 10 000 of them.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from dht.memory.virtual_loop import run
from tests.averaging.live.stormy import LiveSwarm, weather_out
from tests.averaging.simulated.swarm import Storm, cause_storm
from tests.seeds import seeds

SEEDS = 100
CHUNK = 10
SOAK_SEEDS = 10_000

LIVE = Storm(peers=(2, 6), rough_s=60.0)
"""Shorter and smaller than the simulator's storms: a second of it costs twenty times as much."""

REACHED = frozenset(
    [
        "alone",
        "behind",
        "caught_up",
        "declined",
        "finished mix",
        "in_doubt",
        "leader_silent",
        "merged_slice_handed_over",
        "no_quorum",
        "reassigned",
        "rebase",
        "sealed_void",
        "settled",
        "too_late",
        "took_over",
        "upload_failed",
        "upload_refused",
        "void",
    ]
)
"""Events that live storms must meet. The rarest one is in the 18th storm for the first time."""


def weather(seed: int) -> Counter[str]:
    async def main() -> Counter[str]:
        swarm = cause_storm(LiveSwarm, seed, LIVE)
        await weather_out(swarm, LIVE)
        coverage: Counter[str] = swarm.truth.coverage
        return coverage

    return run(main(), seed=seed)


@cache
def weathered(first: int) -> tuple[Counter[str], dict[int, str]]:
    """Events of the storms of one chunk, and failures by seed."""
    coverage: Counter[str] = Counter()
    broken: dict[int, str] = {}
    for seed in range(first, first + CHUNK):
        try:
            coverage += weather(seed)
        except Exception as error:  # any failure at all is a finding; each is reported below
            broken[seed] = f"{type(error).__name__}: {error}"
    return coverage, broken


@pytest.mark.parametrize("first", seeds(SEEDS, soak=SOAK_SEEDS, step=CHUNK))
def test_no_storm_breaks_a_promise_of_live_averagers(first: int) -> None:
    _, broken = weathered(first)
    assert not broken, broken


def test_live_storms_reach_the_states_that_matter() -> None:
    coverage: Counter[str] = Counter()
    for first in range(0, SEEDS, CHUNK):
        coverage += weathered(first)[0]
    assert not [event for event in sorted(REACHED) if not coverage[event]]


def test_an_averager_that_is_cancelled_as_a_link_breaks_begins_nothing_more() -> None:
    """Seed 733: the loss was told after the cancelling, and its effects found no task group."""
    weather(733)
