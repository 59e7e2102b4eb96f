"""Storms with members that lie in the arithmetic or sign two different things: each is convicted,
and nobody who is honest ever is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest

from dht.identity import PeerId
from tests.averaging.virtual.false_reducers import (
    PROVABLE,
    Lie,
    first_for_all,
)
from tests.averaging.virtual.liars import SwarmWithLiars
from tests.averaging.virtual.swarm import Storm, Swarm, cause_storm, storm, weather_out
from tests.seeds import all_that_happens, seeds

RATE = 0.1
CALM = Storm(peers=(5, 8), accidents=(0, 0), rough_s=1.0, audit_rate=RATE)
"""Nothing but lies happens: rounds are quick, and many."""
WAYS = (
    CALM,
    replace(CALM, sites=3),
    replace(CALM, peers=(8, 10), group_size=4),
)
ROUGH = Storm(peers=(4, 8), audit_rate=0.4)
OCCASION_S = 250.0
"""Time in which a liar lies once, if it ever does."""
QUICK, SOAK, CHUNK = 2, 10_000, 2


def swarm_of(seed: int, how: Storm, lie: Lie) -> SwarmWithLiars:
    swarm: SwarmWithLiars = cause_storm(SwarmWithLiars, seed, how)
    lie(swarm)
    return swarm


@dataclass(frozen=True, slots=True)
class Found:
    """The deeds of a liar up to its first conviction by a peer, or to the end of the storm."""

    convicted: bool
    lies: int
    rounds: int
    """Rounds in which it merged falsely: it may reduce, or bundle, several slices of one."""


def until_found(swarm: SwarmWithLiars, *, within_s: float) -> dict[PeerId, Found]:
    """Let each liar lie until somebody convicts it.

    Those that only dial out neither reduce nor lead: no lie is theirs.
    """
    found: dict[PeerId, Found] = {}
    begin = swarm.now

    def count(liar: PeerId, *, convicted: bool) -> Found:
        return Found(convicted, swarm.lies[liar], len(swarm.rounds_of_lies[liar]))

    def is_awaited(liar: PeerId) -> bool:
        if liar in found or swarm.plans[liar].dial_out_only:
            return False
        return swarm.now < begin + (within_s if swarm.lies[liar] else OCCASION_S)

    while any(map(is_awaited, swarm.liars)):
        swarm.run(swarm.now + 1.0)
        for node in swarm.alive:
            for liar in swarm.liars.intersection(node.averager.guard.convicted) - found.keys():
                found[liar] = count(liar, convicted=True)
    rest = swarm.liars - found.keys()
    return {**found, **{liar: count(liar, convicted=False) for liar in sorted(rest)}}


def rounds_each(found: Iterable[Found]) -> float:
    """Return the mean number of rounds with lies until a liar is convicted.

    Liars that are not convicted when a storm ends count with what they did until then.
    """
    found = list(found)
    return sum(each.rounds for each in found) / sum(each.convicted for each in found)


def besieged(seed: int) -> list[Found]:
    """One storm with false reducers. Those that nobody convicts in the end nobody convicts."""
    swarm = swarm_of(seed, WAYS[seed % len(WAYS)], first_for_all)
    found = until_found(swarm, within_s=450.0)
    swarm.run(swarm.now + 60.0)
    for node in swarm.trainers():
        convicted = {
            liar for liar, lies in swarm.lies.items() if liar in node.averager.guard.convicted
        }
        everybody = {liar for other in swarm.alive for liar in other.averager.guard.convicted}
        assert convicted == everybody, f"seed {seed}: {node} convicts {convicted}"
    return list(found.values())


@pytest.mark.slow  # it measures; that each lie is proved to everybody is tested below
def test_a_reducer_that_lies_is_found_within_ten_rounds_on_average_and_by_all() -> None:
    found = [each for seed in range(15) for each in besieged(seed)]
    assert sum(each.convicted for each in found) > 12
    assert rounds_each(found) < 12.0


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_two_hundred_reducers_that_lie_are_found_within_ten_rounds_on_average() -> None:
    found = [each for seed in range(300) for each in besieged(seed)]
    convicted = sum(each.convicted for each in found)
    lies = sum(each.lies for each in found) / convicted
    mean = rounds_each(found)
    print(f"{convicted} liars, each found after {mean:.1f} rounds and {lies:.1f} lies")  # noqa: T201
    assert convicted >= 200
    assert mean <= 10.0


def test_every_provable_lie_is_proved_to_everybody() -> None:
    """Each in a swarm of another shape."""
    for seed, lie in enumerate(PROVABLE):
        swarm = swarm_of(seed, replace(WAYS[seed], audit_rate=0.5), lie)
        found = until_found(swarm, within_s=600.0)
        liars = [liar for liar, each in found.items() if each.lies]
        assert liars and all(found[liar].convicted for liar in liars), lie.__name__


def audited(seed: int) -> Counter[str]:
    """A storm of honest peers that audit everything. Raises ``Broken`` if one is convicted."""
    how = replace(ROUGH, sites=2) if seed % 4 == 3 else ROUGH
    if seed % 5 == 4:
        how = replace(ROUGH, peers=(7, 9), group_size=4)
    swarm: Swarm = storm(seed, how)
    weather_out(swarm, how)
    for peer in swarm.alive:
        swarm.truth.coverage["audited"] += peer.averager.guard.counters["audits"]
    swarm.close()
    return swarm.truth.coverage


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", seeds(QUICK, soak=SOAK, step=CHUNK))
def test_no_honest_peer_is_convicted_in_any_weather(first: int) -> None:
    happened = all_that_happens(audited, first=first, count=CHUNK)
    assert happened["audited"] > 3 * CHUNK
