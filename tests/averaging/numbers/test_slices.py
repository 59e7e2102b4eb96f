"""Cutting a fragment into slices by shares."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from averaging.numbers.slices import ENCODED_MIN_BYTES, cut, reducers_count

shares = st.lists(st.integers(0, 10**10), min_size=1, max_size=20).filter(any)


@given(st.lists(st.integers(1, 5000), max_size=60), shares)
def test_slices_cover_all_units_once_and_end_at_units(sizes: list[int], shares: list[int]) -> None:
    slices = cut(sizes, shares)

    assert len(slices) == len(shares)
    unit = offset = 0
    for index, (piece, share) in enumerate(zip(slices, shares, strict=True)):
        assert (piece.index, piece.first_unit, piece.offset) == (index, unit, offset)
        assert piece.size == sum(sizes[piece.units])
        assert share or not piece.size, "who has no share gets no values"
        unit, offset = piece.end_unit, piece.values.stop
    assert unit == len(sizes)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=60), shares)
def test_a_slice_is_as_near_to_its_share_as_its_units_allow(
    sizes: list[int], shares: list[int]
) -> None:
    largest = max(sizes)
    for piece, share in zip(cut(sizes, shares), shares, strict=True):
        ideal = Fraction(sum(sizes) * share, sum(shares))
        assert abs(piece.size - ideal) <= largest


def test_equal_shares_of_equal_units_are_equal() -> None:
    assert [piece.size for piece in cut([10] * 12, [1, 1, 1, 1])] == [30, 30, 30, 30]


def test_a_faster_link_gets_more() -> None:
    assert [piece.size for piece in cut([10] * 12, [1, 3, 2])] == [20, 60, 40]


def test_a_fragment_of_one_unit_goes_to_one_reducer() -> None:
    assert sorted(piece.size for piece in cut([1000], [1, 1, 1])) == [0, 0, 1000]


def test_halfway_between_two_unit_ends_the_earlier_is_taken() -> None:
    assert [piece.size for piece in cut([10], [1, 1])] == [0, 10]
    assert [piece.size for piece in cut([10, 10, 10], [1, 1])] == [10, 20]


@pytest.mark.parametrize("bad", [[], [0, 0], [1, -1]])
def test_impossible_shares_are_refused(bad: list[int]) -> None:
    with pytest.raises(ValueError, match="shares"):
        cut([1, 2, 3], bad)


def test_the_number_of_reducers_follows_the_encoded_bytes() -> None:
    assert reducers_count(8, 1) == 1
    assert reducers_count(8, ENCODED_MIN_BYTES) == 1
    assert reducers_count(8, ENCODED_MIN_BYTES + 1) == 2
    assert reducers_count(8, 100 * ENCODED_MIN_BYTES) == 8
    assert reducers_count(8, 0) == 1
