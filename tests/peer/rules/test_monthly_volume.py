"""The volume of a month when the clock is set, changes its zone, or was never set."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.rules.monthly_volume import MonthlyVolume, decode, encode

NEW_YEARS = datetime(2027, 1, 1)
HOUR, DAY = timedelta(hours=1), timedelta(days=1)


def counted(*looks: tuple[datetime, int]) -> MonthlyVolume:
    """The volume after these looks, each of which finds so many bytes passed since the last."""
    volume = MonthlyVolume()
    for now, passed in looks:
        volume = volume.plus(passed).on(now)
    return volume


def test_a_month_begins_with_nothing_and_earlier_traffic_was_the_last_months() -> None:
    volume = counted((NEW_YEARS - HOUR, 10), (NEW_YEARS, 5), (NEW_YEARS + HOUR, 1))
    assert (volume.month, volume.bytes, volume.other) == ("2027-01", 1, ("2026-12", 15))


@pytest.mark.parametrize("back", [HOUR, DAY], ids=["hour", "day"])
def test_a_clock_that_is_set_back_over_the_begin_of_a_month_gives_neither_its_volume_twice(
    back: timedelta,
) -> None:
    looks = [(NEW_YEARS - HOUR, 100), (NEW_YEARS + HOUR / 2, 0), (NEW_YEARS + HOUR / 2, 7)]
    before = counted(*looks)
    assert (before.month, before.bytes) == ("2027-01", 7)
    again = before.on(NEW_YEARS + HOUR / 2 - back)
    assert (again.month, again.bytes) == ("2026-12", 107), "what was used in December is used"
    assert again.plus(1).on(NEW_YEARS).bytes == 7, "and so is what was used in January"


def test_a_clock_that_was_wrong_by_months_takes_nothing_from_the_months_to_come() -> None:
    later = datetime(2027, 3, 5)
    wrong = counted((datetime(2026, 11, 20), 3), (later, 0), (later, 50))
    right = wrong.on(datetime(2026, 11, 20, 1))
    assert (right.month, right.bytes) == ("2026-11", 53), "it has passed by now"
    assert right.on(datetime(2026, 12, 1)).bytes == 0
    assert right.on(datetime(2026, 12, 1)).on(datetime(2027, 3, 1)).bytes == 0


def test_a_clock_that_is_not_set_yet_leaves_the_count_as_it_is() -> None:
    before = counted((datetime(2026, 11, 20), 50))
    booted = before.on(datetime(1970, 1, 1)).plus(2)
    assert (booted.month, booted.bytes) == ("2026-11", 52)
    assert booted.on(datetime(2026, 11, 20)).bytes == 52


def test_the_file_is_read_back_and_that_of_the_release_before_is_read() -> None:
    volume = counted((NEW_YEARS - HOUR, 10), (NEW_YEARS, 5))
    assert decode(encode(volume)) == volume
    assert decode(b'{"month": "2026-11", "bytes": 12}').on(datetime(2026, 11, 9)).bytes == 12
    for bad in (b"", b"[]", b'{"month": 3}', b"\xff"):
        with pytest.raises(ValueError):
            decode(bad)


@given(
    st.lists(st.tuples(st.integers(-60, 120), st.floats(-1, 1), st.integers(0, 40)), max_size=40)
)
def test_however_a_clock_jumps_by_up_to_two_days_no_month_uses_more_than_its_volume(
    steps: Iterable[tuple[int, float, int]],
) -> None:
    """Bytes pass only while the month has some left, as ``limits.decide`` sees to."""
    quota, volume, right = 100, MonthlyVolume(), NEW_YEARS
    passed: dict[str, int] = {}
    for hours, wrong_days, wanted in steps:
        right += timedelta(hours=max(hours, 0))
        volume = volume.on(right + timedelta(days=wrong_days))
        wanted = min(wanted, max(0, quota - volume.bytes))
        volume = volume.plus(wanted)
        passed[volume.month] = passed.get(volume.month, 0) + wanted
    assert all(count <= quota for count in passed.values()), passed
