"""Storms with members that lie in the arithmetic or sign two different things: each is convicted,
and nobody who is honest ever is."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from averaging.rules.mixing import MixingPolicy
from tests.averaging.simulated.false_reducers import PROVABLE, Lie, first_for_all, withhold_uploads
from tests.averaging.simulated.liars import SwarmWithLiars
from tests.averaging.simulated.swarm import Storm, Swarm, cause_storm, storm, weather_out

RATE = 0.1
CALM = Storm(peers=(5, 8), accidents=(0, 0), rough_s=1.0, audit_rate=RATE)
"""Nothing but lies happens: rounds are quick, and many."""
WAYS = (
    CALM,
    replace(CALM, sites=3),
    replace(CALM, peers=(8, 10), group_size=4, mixing=MixingPolicy(every=1)),
)
ROUGH = Storm(peers=(4, 8), audit_rate=0.4)
OCCASION_S = 250.0
"""Whoever has not lied by then never does: it only dials out, so it neither reduces nor leads."""
QUICK, SOAK, CHUNK = 40, 10_000, 20


def swarm_of(seed: int, how: Storm, lie: Lie) -> SwarmWithLiars:
    swarm: SwarmWithLiars = cause_storm(SwarmWithLiars, seed, how)
    lie(swarm)
    return swarm


def lies_until_found(swarm: SwarmWithLiars, *, within_s: float) -> dict[str, int | None]:
    """How often each liar lied before anybody convicted it; ``None``: nobody did."""
    found: dict[str, int | None] = dict.fromkeys(sorted(swarm.liars))
    begin = swarm.heap.now

    def is_awaited(liar: str) -> bool:
        limit_s = within_s if swarm.lies[liar] else OCCASION_S
        return found[liar] is None and swarm.heap.now < begin + limit_s

    while any(is_awaited(liar) for liar in found):
        swarm.run(swarm.heap.now + 1.0)
        for node in swarm.alive:
            assert node.audits is not None
            for liar in node.audits.convicted:
                if found.get(liar, 0) is None:
                    found[liar] = swarm.lies[liar]
    return found


def test_a_reducer_that_lies_is_found_after_ten_lies_on_average_and_by_all() -> None:
    found: list[int] = []
    for seed in range(15):
        swarm = swarm_of(seed, WAYS[seed % len(WAYS)], first_for_all)
        for liar, lies in lies_until_found(swarm, within_s=450.0).items():
            if lies is None:  # not every one gets to reduce
                assert swarm.lies[liar] < 60, f"seed {seed}: {liar} lied {swarm.lies[liar]} times"
                continue
            found.append(lies)
        swarm.run(swarm.heap.now + 60.0)
        for node in swarm.trainers():
            assert node.audits is not None
            convicted = {liar for liar, lies in swarm.lies.items() if liar in node.audits.convicted}
            everybody = {liar for other in swarm.alive for liar in other.audits.convicted}  # type: ignore[union-attr]
            assert convicted == everybody, f"seed {seed}: {node} convicts {convicted}"
    mean = sum(found) / len(found)
    spread = {most: sum(lies <= most for lies in found) for most in (1, 5, 10, 20, 40)}
    print(f"{len(found)} liars, found after {mean:.1f} lies on average, by lies {spread}")  # noqa: T201
    assert len(found) > 12
    assert mean < 14.0


@pytest.mark.parametrize("lie", PROVABLE, ids=lambda lie: lie.__name__)
def test_every_provable_lie_is_proved_to_everybody(lie: Lie) -> None:
    liars = caught = 0
    for seed in range(6):
        swarm = swarm_of(seed, replace(WAYS[seed % len(WAYS)], audit_rate=0.5), lie)
        found = lies_until_found(swarm, within_s=600.0)
        liars += sum(swarm.lies[liar] > 0 for liar in found)
        caught += sum(lies is not None for lies in found.values())
    assert liars >= 3
    assert caught >= liars - 1, f"{caught} of {liars}"


def test_who_shows_nothing_is_not_convicted_and_loses_standing_where_it_was_asked() -> None:
    swarm = swarm_of(3, replace(CALM, audit_rate=0.5), withhold_uploads)
    swarm.run(400.0)
    assert swarm.liars
    strikes = [
        node.audits.strikes.count(liar, node.now())
        for node in swarm.alive
        for liar in swarm.liars
        if node.audits is not None
    ]
    assert max(strikes) > 1.0
    assert not any(node.audits.convicted for node in swarm.alive if node.audits is not None)


def audited(seed: int) -> Counter[str]:
    """A storm of honest peers that audit everything. Raises ``Broken`` if one is convicted."""
    how = replace(ROUGH, sites=2) if seed % 4 == 3 else ROUGH
    if seed % 5 == 4:
        how = replace(ROUGH, peers=(7, 9), group_size=4, mixing=MixingPolicy(every=1))
    swarm: Swarm = storm(seed, how)
    weather_out(swarm, how)
    for node in swarm.alive:
        assert node.audits is not None
        assert not node.audits.convicted
        swarm.truth.coverage["audited"] += node.audits.audited
        swarm.truth.coverage["inconclusive"] += node.audits.inconclusive
    return swarm.truth.coverage


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "first",
    [
        *range(0, QUICK, CHUNK),
        *(pytest.param(n, marks=pytest.mark.soak) for n in range(QUICK, SOAK, CHUNK)),
    ],
)
def test_no_honest_peer_is_convicted_in_any_weather(first: int) -> None:
    happened: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        try:
            happened += audited(seed)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    assert happened["audited"] > 10 * CHUNK
