"""Limits of what each author may have, over time and at once."""

from __future__ import annotations

import math

import pytest

from dht.limits import FairQueue, Place, Places, Rate


def test_an_author_has_so_many_at_once_which_come_back_within_a_minute() -> None:
    rate = Rate[str].in_a_minute(2)
    times = (0.0, 0.0, 29.9, 30.0, 30.1, 89.9, 90.1, 90.1)
    assert [rate.spend("anna", now) for now in times] == [
        *(True, True, False),
        *(True, False),
        *(True, True, False),
    ]
    assert rate.spend("boris", 90.1), "another author has its own"


def test_without_debt_what_is_refused_costs_nothing() -> None:
    rate, indebted = Rate[str](1.0, 1.0), Rate[str](1.0, 1.0, debt=1.0)
    for each in (rate, indebted):
        assert each.spend("anna", 0.0)
        for tenth in range(1, 10):
            assert not each.spend("anna", tenth / 10)
    assert rate.spend("anna", 1.0)
    assert not indebted.spend("anna", 1.0), "who goes on calling is not heard meanwhile"
    assert indebted.left("anna", 1.0) == -1.0 and indebted.wait_s("anna", 1.0) == 1.0
    assert indebted.spend("anna", 3.0)


def test_a_rate_lets_a_burst_pass_and_then_so_many_a_second() -> None:
    rate = Rate[str](2.0, 4.0, debt=2.0)
    assert [rate.spend("anna", 0.0) for _ in range(6)] == [True] * 4 + [False] * 2
    assert rate.spend("boris", 0.0)
    assert [rate.spend("anna", 10.0) for _ in range(5)] == [True] * 4 + [False]
    rate.spend("boris", 0.0, tokens=100.0)
    assert not rate.spend("boris", 0.9)
    assert rate.spend("boris", 3.0), "a large reply costs a second at most"


def test_half_of_a_burst_is_regained_in_its_time() -> None:
    rate = Rate[str](2.0, 8.0)
    assert rate.left("anna", 0.0) == 8.0, "one that never called"
    for _ in range(5):
        rate.spend("anna", 0.0)
    assert rate.left("anna", 0.4) < 4.0 <= rate.left("anna", 0.5)
    assert rate.left("anna", 1e9) == 8.0


def test_a_share_of_bytes_is_regained_with_time_after_twice_the_share_at_most() -> None:
    rate = Rate[str](10.0, 1000.0, debt=1000.0)
    rate.spend("anna", 0.0, 1000)
    assert rate.left("anna", 0.0) == 0.0
    rate.spend("anna", 0.0, 100)
    assert rate.left("anna", 9.9) < 0.0 <= rate.left("anna", 10.0)
    rate.spend("anna", 10.0, 10**9)
    assert rate.left("anna", 109.0) < 0.0 <= rate.left("anna", 110.0)


def test_a_debt_without_a_limit_is_waited_for() -> None:
    rate = Rate[str](10.0, 5.0, debt=math.inf)
    for _ in range(25):
        rate.spend("anna", 0.0)
    assert rate.wait_s("anna", 0.0) == 2.0 and rate.wait_s("anna", 2.0) == 0.0
    assert rate.wait_s("boris", 0.0) == 0.0


def test_a_rate_forgets_who_has_used_the_least() -> None:
    rate = Rate[str](1.0, 1.0, authors_max=2)
    for author in ("anna", "boris", "clara"):
        assert rate.spend(author, 0.0)
    assert rate.spend("anna", 0.0) and not rate.spend("clara", 0.0)
    used = Rate[str](1.0, 10.0, authors_max=2)
    for author in ("anna", "anna", "boris", "clara"):
        used.spend(author, 0.0)
    assert used.left("anna", 0.0) == 8.0 and used.left("boris", 0.0) == 10.0


# --- places -------------------------------------------------------------------------------------


class Held:
    """Places of which each author is told when it loses one."""

    def __init__(
        self, in_all: int, of_each: float, *preferred: str, newest_first: bool = False
    ) -> None:
        self.lost: list[str] = []
        self.places = Places[Place[str]](
            in_all, of_each, prefers=lambda author: author in preferred, newest_first=newest_first
        )

    def take(self, author: str, name: str = "", *, in_use: bool = False) -> Place[str] | None:
        end = None if in_use else lambda: self.lost.append(name or author)
        place = Place(author, end)
        return place if self.places.take(place) else None


def test_each_has_so_many_and_the_one_with_the_most_makes_room() -> None:
    held = Held(4, 3)
    for number in range(3):
        assert held.take("anna", f"anna {number}") is not None
    assert held.take("anna") is None and held.places.held("anna") == 3
    assert held.take("boris") is not None
    assert held.take("clara") is not None and held.lost == ["anna 0"]
    assert held.take("clara") is None, "it would have as many itself"
    assert len(held.places) == 4 and held.places.held("anna") == 2


def test_what_was_not_used_for_longest_makes_room_and_what_is_in_use_does_not() -> None:
    held = Held(4, 4)
    first, _, busy = (held.take("anna", str(number), in_use=number == 2) for number in range(3))
    held.take("anna", "3")
    assert first is not None and busy is not None
    held.places.used(first)
    for author in ("boris", "clara"):
        assert held.take(author) is not None
    assert held.lost == ["1", "3"]
    assert held.take("dora") is not None and held.lost == ["1", "3", "0"]
    assert held.take("emma") is None and busy in list(held.places)


def test_a_place_that_was_lost_is_not_given_up_again() -> None:
    held = Held(2, 2)
    lost = held.take("anna")
    held.take("anna")
    held.take("boris")
    assert lost is not None and held.lost == ["anna"]
    held.places.leave(lost)
    held.places.used(lost)
    assert len(held.places) == 2 and held.places.held("anna") == 1


def test_preferred_authors_make_room_for_one_another_only_and_after_all_others() -> None:
    held = Held(3, 3, "anna", "boris")
    for author in ("anna", "anna", "clara"):
        assert held.take(author) is not None
    assert held.take("dora") is None and held.take("clara") is None
    assert held.take("boris") is not None and held.lost == ["clara"]
    assert held.take("boris") is None
    held = Held(3, 3, "anna", "boris")
    for author in ("anna", "anna", "anna", "boris"):
        assert held.take(author) is not None
    assert held.lost == ["anna"]


def test_where_the_newest_goes_first_an_author_makes_room_for_itself() -> None:
    held = Held(3, math.inf, newest_first=True)
    for author in ("boris", "anna", "anna", "anna", "clara"):
        assert held.take(author) is not None
    assert held.lost == ["anna", "anna"] and held.places.held("boris") == 1
    alone = Held(1, math.inf, newest_first=True)
    assert alone.take("anna") is not None and alone.take("anna") is not None
    assert alone.lost == ["anna"]


# --- turns --------------------------------------------------------------------------------------


def test_authors_get_equal_shares_whatever_number_of_items_they_have() -> None:
    queue = FairQueue[str, str]()
    for index in range(6):
        queue.push("boris", f"many{index}", 100)
    queue.push("clara", "few0", 100)
    queue.push("clara", "few1", 100)
    assert len(queue) == 8
    order = [queue.pop()[1] for _ in range(len(queue))]
    assert order[:4] == ["many0", "few0", "many1", "few1"]
    with pytest.raises(IndexError):
        queue.pop()


def test_a_share_is_counted_in_bytes_and_an_author_that_paused_saves_none_up() -> None:
    queue = FairQueue[str, str]()
    for _ in range(3):
        queue.push("boris", "large", 300)
    for _ in range(9):
        queue.push("clara", "small", 100)
    assert [queue.pop()[1] for _ in range(8)].count("small") == 6
    while queue:
        queue.pop()
    for _ in range(100):
        queue.push("boris", "busy", 300)
        queue.pop()
    for _ in range(4):
        queue.push("boris", "busy", 300)
        queue.push("clara", "back", 300)
    assert [queue.pop()[1] for _ in range(4)].count("back") == 2


def test_calls_of_one_author_each_in_turn() -> None:
    queue = FairQueue[str, int]()
    for number in range(3):
        queue.push("flood", number)
    queue.push("flood too", 3)
    assert [queue.pop() for _ in range(4)] == [
        ("flood", 0, 1),
        ("flood too", 3, 1),
        ("flood", 1, 1),
        ("flood", 2, 1),
    ]
