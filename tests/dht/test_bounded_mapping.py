"""Tables that forget what is worth the least, and what cheap keys can do to them: nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dht.bounded_mapping import ENTRY_BYTES, BoundedMapping, Tables, by_age


def test_among_entries_of_equal_worth_a_new_key_drops_the_oldest_and_a_known_one_nothing() -> None:
    table = BoundedMapping[str, int]("letters", 2, worth=by_age)
    table["a"], table["b"] = 1, 2
    table["a"] = 3
    assert dict(table) == {"a": 3, "b": 2}
    table["c"] = 4
    assert dict(table) == {"b": 2, "c": 4}
    table.renew("b", 5)
    table["d"] = 6
    assert dict(table) == {"b": 5, "d": 6}


def test_no_way_of_setting_a_key_passes_the_limit() -> None:
    table = BoundedMapping[int, int]("numbers", 2, worth=by_age)
    assert [table.setdefault(key, 10 * key) for key in (1, 2, 1, 3)] == [10, 20, 10, 30]
    assert dict(table) == {2: 20, 3: 30}
    table.update({4: 40, 5: 50})
    assert dict(table) == {4: 40, 5: 50}
    table |= {6: 60}
    assert dict(table) == {5: 50, 6: 60}


def test_a_mapping_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="limit is 0"):
        BoundedMapping("none", 0, worth=by_age)


def test_a_new_entry_that_is_worth_less_than_all_others_is_not_kept() -> None:
    table = BoundedMapping[str, int]("work", 2, worth=lambda _, rounds: rounds)
    table["founder"], table["member"] = 20_000, 9
    table["newcomer"] = 1
    assert dict(table) == {"founder": 20_000, "member": 9}
    assert table.setdefault("another", 3) == 3
    table["worker"] = 10
    assert dict(table) == {"founder": 20_000, "worker": 10}


def test_a_flood_of_cheap_keys_costs_entries_that_are_worth_more_nothing() -> None:
    table = BoundedMapping[int, int]("work", 64, worth=lambda _, rounds: rounds)
    honest = {-1 - number: 2 + number for number in range(40)}
    table |= honest
    for key in range(10 * table.limit):
        table[key] = 1
        assert len(table) <= table.limit
    assert honest.items() <= table.items()
    # Of equal worth the newest stay: those who came before keep no newcomer out.
    assert 10 * table.limit - 1 in table


def test_an_author_that_has_the_most_entries_drops_only_its_own() -> None:
    table = BoundedMapping[tuple[str, int], None](
        "statements", 8, worth=by_age, author=lambda key, _: key[0]
    )
    honest = [("anna", 0), ("boris", 0), ("boris", 1)]
    for key in honest:
        table[key] = None
    for number in range(100):
        table["mallory", number] = None
    assert [key for key in table if key[0] != "mallory"] == honest
    assert [key for key in table if key[0] == "mallory"] == [("mallory", n) for n in range(95, 100)]


def test_bytes_are_counted_and_bounded() -> None:
    table = BoundedMapping[str, bytes](
        "proofs",
        10,
        worth=lambda key, _: key.isupper(),
        size=lambda _, data: len(data),
        bytes_max=100,
    )
    table["A"], table["b"], table["c"] = bytes(50), bytes(30), bytes(20)
    assert table.bytes_held == 100
    table["b"] = bytes(10)
    assert table.bytes_held == 80
    table["d"] = bytes(40)  # the oldest ones that are worth no more give way
    assert list(table) == ["A", "d"]
    table["e"] = bytes(60)  # does not fit beside one that is worth more
    assert list(table) == ["A"]
    assert table.pop("A") == bytes(50)
    assert table.bytes_held == 0
    assert table.pop("A", None) is None
    table["f"] = bytes(5)
    table.clear()
    assert table.bytes_held == 0


def test_tables_share_a_budget_and_the_largest_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    together = Tables()
    together.bytes_max = 100
    monkeypatch.setattr("dht.bounded_mapping.ALL", together)

    def sized(name: str) -> BoundedMapping[int, bytes]:
        return BoundedMapping(name, 100, worth=by_age, size=lambda _, data: len(data))

    small, large = sized("small"), sized("large")
    small[0] = bytes(20)
    for key in range(20):
        large[key] = bytes(10)
    assert (list(small), list(large)) == ([0], list(range(12, 20)))
    use = together.use()["large"]
    assert (use.tables, use.places, use.entries, use.bytes) == (1, 100, 8, 80)
    assert (use.dropped, together.use()["small"].dropped) == (12, 0)


def test_tables_that_measure_nothing_count_a_fixed_size() -> None:
    table = BoundedMapping[int, int]("fixed", 4, worth=by_age)
    table |= {1: 1, 2: 2}
    assert table.bytes_held == 2 * ENTRY_BYTES


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5), st.integers(1, 40)), max_size=60),
    st.integers(1, 40),
)
def test_whatever_is_done_the_bounds_hold_and_nothing_gives_way_to_what_is_worth_less(
    steps: list[tuple[int, int, int]], limit: int
) -> None:
    table = BoundedMapping[int, tuple[int, int]](
        "any", limit, worth=lambda _, value: value[0], size=lambda _, value: value[1], bytes_max=90
    )
    for key, worth, size in steps:
        before = dict(table)
        table[key] = (worth, size)
        assert len(table) <= limit
        assert table.bytes_held == sum(size for _, size in table.values()) <= 90
        for dropped in before.keys() - table.keys() - {key}:
            assert before[dropped][0] <= worth
