from __future__ import annotations

import pytest

from averaging.live.streams.fair_shares import (
    SERVED_LATELY_S,
    SHARES_MAX,
    ByteBudget,
    Place,
    Places,
    Shares,
)
from dht.identity import PeerId

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
        self.places = Places(
            2, 1, 10.0, 100.0, lambda peer: peer in preferred, Shares(1000.0, regained_s=100.0)
        )

    def take(self, peer: PeerId, now: float) -> Place | None:
        return self.places.take(peer, now=now, end=lambda: self.lost.append(peer))


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


def test_a_share_is_regained_with_time() -> None:
    shares = Shares(1000.0, regained_s=100.0)
    shares.use(ANNA, 1000, 0.0)
    assert not shares.is_used_up(ANNA, 0.0)
    shares.use(ANNA, 100, 0.0)
    assert shares.is_used_up(ANNA, 9.9) and not shares.is_used_up(ANNA, 10.0)
    assert not shares.is_used_up(BORIS, 0.0)
    shares.use(ANNA, 10**9, 10.0)
    assert shares.is_used_up(ANNA, 109.0) and not shares.is_used_up(ANNA, 110.0)


def test_shares_of_many_identities_take_bounded_memory() -> None:
    shares = Shares(10.0)
    for number in range(2 * SHARES_MAX):
        shares.use(PeerId(str(number)), 20, 0.0)
    assert len(shares._used) == SHARES_MAX
    assert shares.is_used_up(PeerId(str(2 * SHARES_MAX - 1)), 0.0)


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
