"""Two peers whose link breaks while they gather merge again within three seconds of its return."""

from __future__ import annotations

import pytest

from tests.averaging.virtual.broken_links import CYCLE_S, Links, break_again_and_again, meet
from tests.seeds import seeds

SETTLED_S = 3.0
"""Two leaders settle it with the first call after the link is back; calls are repeated every two
seconds."""
MEETINGS, STEP = 200, 5
OFFSET_MAX_S = 2.3
"""Before both are in the round."""


def goes_on(links: Links) -> bool:
    """True if two never led one version for long, and no merge was late by more than that."""
    return links.two_leaders_s <= SETTLED_S and links.gap_s <= CYCLE_S + SETTLED_S


@pytest.mark.parametrize(
    "lasts_s",
    [pytest.param(0.2, marks=pytest.mark.slow), 1.5, pytest.param(4.0, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("first", seeds(3, soak=300, step=3))
def test_no_two_peers_wait_for_one_another_once_their_link_is_back(
    first: int, lasts_s: float
) -> None:
    """Of 24 such runs on averagers, whose links broke for 1.5 s, all 24 stood still for 30 s."""
    for seed in range(first, first + 3):
        links = break_again_and_again(seed, lasts_s=lasts_s)
        assert goes_on(links), f"seed {seed}: {links}"


@pytest.mark.parametrize("peers", [3, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", seeds(1, soak=100))
def test_no_peers_of_several_wait_for_one_another_either(seed: int, peers: int) -> None:
    links = break_again_and_again(seed, lasts_s=1.5, peers=peers, breaks=20, every_s=3.0)
    assert goes_on(links), f"{links}"


@pytest.mark.parametrize("first", seeds(STEP, soak=MEETINGS, step=STEP))
def test_no_meeting_of_two_waits_for_long_whenever_their_link_breaks(first: int) -> None:
    """The offsets of each test are spread over the whole range."""
    for number in range(first, first + STEP):
        place = (number % STEP) * (MEETINGS // STEP) + number // STEP
        offset_s = OFFSET_MAX_S * place / MEETINGS
        links = meet(offset_s, lasts_s=1.5, seed=number)
        assert goes_on(links), f"link broken {offset_s:g} s after they met: {links}"


def test_a_leader_whose_only_partner_has_given_the_round_up_gives_it_up_as_well() -> None:
    """The link of two breaks when both have entered. The partner finds nobody there, gives up, and
    joins the leader again, which tells it that the roster is closed."""
    links = meet(2.4, lasts_s=1.5, seed=4)
    assert goes_on(links), links
