from __future__ import annotations

import pytest

from averaging.live.streams.fair_shares import (
    SERVED_LATELY_S,
    ByteBudget,
    ServedPlace,
    ServedPlaces,
)
from dht.identity import PeerId
from dht.limits import Rate

ANNA, BORIS, CLARA = (PeerId(name) for name in ("anna", "boris", "clara"))


def test_one_peer_has_half_of_a_budget_and_all_together_no_more_than_the_whole() -> None:
    budget = ByteBudget(100)
    assert budget.take(ANNA, 30) and budget.take(ANNA, 20)
    assert not budget.take(ANNA, 1)
    assert budget.take(BORIS, 40) and budget.take(CLARA, 10)
    assert not budget.take(CLARA, 1)
    budget.give_back(ANNA, 30)
    assert budget.take(CLARA, 30) and budget.held_bytes == 100
    with pytest.raises(AssertionError):
        budget.give_back(BORIS, 41)


class Served:
    """Places of which each peer is told when it loses its own."""

    def __init__(self, *preferred: PeerId) -> None:
        self.lost: list[PeerId] = []
        self.places = ServedPlaces(
            2,
            1,
            grace_s=10.0,
            slow_bytes_s=100.0,
            shares=Rate(10.0, 1000.0, debt=1000.0),
            preferred=lambda peer: peer in preferred,
        )

    def take(self, peer: PeerId, now: float) -> ServedPlace | None:
        return self.places.admit(peer, now=now, end=lambda: self.lost.append(peer))


def test_a_peer_that_is_served_slowly_loses_its_place_to_a_newcomer_after_the_grace() -> None:
    served = Served()
    slow, fast = served.take(ANNA, 0.0), served.take(BORIS, 0.0)
    assert slow is not None and fast is not None
    assert served.take(BORIS, 0.0) is None, "one place for each peer"
    slow.served_bytes, fast.served_bytes = 999, 1000
    assert served.take(CLARA, 9.9) is None
    assert served.take(CLARA, 10.0) is not None
    assert served.lost == [ANNA] and len(served.places) == 2
    served.places.leave(slow)
    assert len(served.places) == 2, "a place that was lost is not given up again"
    served.places.leave(fast)
    assert len(served.places) == 1


def test_a_preferred_peer_takes_any_others_place_and_keeps_its_own() -> None:
    served = Served(BORIS, CLARA)
    for peer in (ANNA, BORIS):
        assert served.take(peer, 0.0) is not None
    assert served.take(CLARA, 0.0) is not None
    assert served.lost == [ANNA]
    assert served.take(ANNA, 1000.0) is None


def test_a_peer_that_had_its_share_loses_its_place_at_once_and_takes_none() -> None:
    served = Served()
    greedy, other = served.take(ANNA, 0.0), served.take(BORIS, 0.0)
    assert greedy is not None and other is not None
    served.places.served(greedy, 1500, 0.5)
    served.places.served(other, 999, 0.5)
    assert served.take(CLARA, 1.0) is not None
    assert served.lost == [ANNA]
    # The others have been served slowly for long, and had no share yet.
    served.places.served(greedy, 1500, 99.0)
    assert served.take(ANNA, 99.0) is None


def test_a_newcomer_takes_no_place_of_an_established_peer_that_had_its_share() -> None:
    served = Served(BORIS)
    for peer in (ANNA, BORIS):
        place = served.take(peer, 0.0)
        assert place is not None
        served.places.served(place, 2000, 0.0)
    assert served.take(CLARA, 0.0) is not None
    assert served.lost == [ANNA]


def test_a_peer_that_had_its_share_gives_way_while_another_one_is_being_served() -> None:
    served = Served()
    greedy, newcomer = served.take(ANNA, 0.0), served.take(BORIS, 0.0)
    assert greedy is not None and newcomer is not None
    assert not served.places.gives_way(greedy, 1.0)
    served.places.served(greedy, 1500, 1.0)
    assert served.places.gives_way(greedy, 1.0)
    assert not served.places.gives_way(newcomer, 1.0)
    served.places.served(newcomer, 10, 2.0)
    assert served.places.gives_way(greedy, 2.0 + 0.99 * SERVED_LATELY_S)
    assert not served.places.gives_way(greedy, 2.0 + SERVED_LATELY_S)
