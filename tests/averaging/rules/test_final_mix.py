"""A swarm of several groups that ends by tokens ends with one model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from averaging.history.chain import Chain
from averaging.history.standing import LINKS_SHOWN
from averaging.messages import Head, Link
from averaging.rules.final_mix import Goal, RunsEnd, grew_from, shows_final
from tests.averaging.virtual.swarm import SEVERAL_GROUPS, Storm, reach_one_final_lineage, storm

GOAL = Goal(tokens=100)


def chain(*tokens: int, side: int = 0) -> Chain:
    """Return a chain with these counts of merged tokens."""
    return Chain(
        Link(version, bytes([version, side]) * 16, merged) for version, merged in enumerate(tokens)
    )


def head(of: Chain) -> Head:
    links = of.thinned(LINKS_SHOWN)
    return Head(of.tip.version, of.tip.lineage, links)


def test_a_version_is_final_when_it_grew_from_one_with_the_runs_tokens() -> None:
    assert not grew_from(chain(0, 50, 99, 120), GOAL)
    assert grew_from(chain(0, 50, 100, 120), GOAL)
    assert not shows_final(head(chain(0, 50, 99, 120)), GOAL)
    assert shows_final(head(chain(0, 50, 100, 120)), GOAL)


def test_a_peer_gives_way_to_a_final_state_and_to_a_heavier_final_one() -> None:
    early, final = head(chain(0, 90, 110)), head(chain(0, 100, 120, side=1))
    heavier, twin = head(chain(0, 100, 121, side=2)), head(chain(0, 100, 120, side=3))

    end = RunsEnd(GOAL, melds=True)
    assert end.gives_way(early, final) and not end.gives_way(final, early)
    assert end.gives_way(final, heavier) and not end.gives_way(heavier, final)
    assert end.gives_way(final, twin) != end.gives_way(twin, final), "one of them does"
    assert end.settles(final, early) and end.settles(early, final)
    assert not end.settles(early, head(chain(0, 90, 130, side=1))), "neither is final: they meld"


def test_of_two_sides_of_one_group_that_have_ended_the_lighter_gives_way() -> None:
    """Each had the run's tokens before the partition healed, and joins no round any more."""
    mine, heavier = head(chain(0, 90, 110)), head(chain(0, 90, 130, side=1))
    twin, late = head(chain(0, 90, 110, side=2)), head(chain(0, 50, 99, side=3))
    mixed = head(chain(0, 100, 105, side=4))
    end = RunsEnd(GOAL, melds=False)

    assert end.gives_way(mine, heavier) and not end.gives_way(heavier, mine)
    assert end.gives_way(mine, twin) != end.gives_way(twin, mine)
    assert end.gives_way(heavier, mixed), "also for a peer that sees several groups this is final"
    assert end.settles(mine, late) and end.gives_way(late, mine), "it has not ended"
    assert not end.settles(late, head(chain(0, 50, 99, side=5))), "neither has ended: they meld"


def test_a_run_ends_at_its_last_version_whatever_its_tokens() -> None:
    goal = Goal(tokens=None, version=2)
    before, at, after = chain(0, 500), chain(0, 10, 20, side=1), chain(0, 10, 20, 30, side=2)
    assert [goal.is_reached_by(head(each)) for each in (before, at, after)] == [False, True, True]
    assert not grew_from(at, goal) and grew_from(after, goal)
    end = RunsEnd(goal, melds=False)
    assert end.gives_way(head(before), head(at)), "though it is the heavier one"
    assert not end.gives_way(head(at), head(before))
    assert Goal(tokens=20, version=3).is_reached(2, 20), "whichever comes first"


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))]
)
def test_after_a_storm_several_groups_end_on_one_lineage(seed: int) -> None:
    """Invariants of storms are checked after each event; this test adds that the run ends, and that
    nothing follows."""
    ends_on_one_lineage(seed, replace(SEVERAL_GROUPS[seed % 2], tokens_end=3_000))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_sides_of_one_group_that_have_both_ended_end_on_one_lineage(seed: int) -> None:
    ends_on_one_lineage(seed, Storm(peers=(4, 8), accidents=(2, 5), tokens_end=25_000))


def ends_on_one_lineage(seed: int, how: Storm) -> None:
    weather = storm(seed, how)
    weather.run(how.rough_s)
    reach_one_final_lineage(weather, within_s=120.0)
    before = weather.versions()
    weather.run(weather.now + 60.0)
    assert weather.versions() == before
