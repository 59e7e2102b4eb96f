"""Quantities as texts for people."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from peer.quantities import (
    bar_text,
    bytes_text,
    count_text,
    duration_text,
    fates_text,
    listed,
    plural,
    rounded_shares,
)


def test_quantities_are_short() -> None:
    assert [bytes_text(n) for n in (0, 999, 1_000, 1_234_567)] == [
        "0 B",
        "999 B",
        "1 kB",
        "1.23 MB",
    ]
    assert [duration_text(s) for s in (5, 65, 3_725)] == ["0:05", "1:05", "1:02:05"]
    assert [count_text(n) for n in (12, 1_500, 2_000_000)] == ["12", "1.5 k", "2 M"]


def test_a_list_is_in_words_and_a_long_one_is_cut() -> None:
    assert [listed("0134"[:count]) for count in (0, 1, 2, 4)] == [
        "",
        "0",
        "0 and 1",
        "0, 1, 3 and 4",
    ]
    assert listed("abcd", most=4) == "a, b, c and d"
    assert listed("abcde", most=4) == "a, b, c and 2 more"


def test_a_bar_is_full_when_all_is_there() -> None:
    assert [bar_text(share) for share in (0.0, 0.42, 0.99, 1.0)] == [
        "[          ] 0%",
        "[####      ] 42%",
        "[######### ] 99%",
        "[##########] 100%",
    ]


def test_a_noun_follows_its_number() -> None:
    assert [plural(n, "round") for n in (0, 1, 2)] == ["0 rounds", "1 round", "2 rounds"]


@given(st.lists(st.floats(0.0, 1e12), max_size=20))
def test_rounded_shares_sum_to_the_whole_and_are_less_than_one_off(amounts: list[float]) -> None:
    shares = rounded_shares(amounts)
    total = sum(amounts)
    assert sum(shares) == (100 if total > 0 else 0)
    for share, amount in zip(shares, amounts, strict=True):
        assert total <= 0 or abs(share - 100 * amount / total) < 1 + 1e-9


def test_thirds_are_rounded_to_a_hundred() -> None:
    assert rounded_shares([1, 1, 1]) == [34, 33, 33]


def test_the_fates_of_tokens_are_said_in_words() -> None:
    fates = {"processed": 100.0, "merged": 90.0, "pending": 6.0}
    assert fates_text(fates) == "100 trained: 90 merged, 6 pending, 0 discarded"
    fates |= {"discarded.stale": 3.0, "discarded.crash": 1.0, "discarded.left": 0.0}
    assert fates_text(fates).endswith("6 pending, 4 discarded (too old, crash)")
