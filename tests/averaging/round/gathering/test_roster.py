"""The commit that follows from joins, and what members hold against another one."""

from __future__ import annotations

from collections.abc import Sequence

from averaging.round.gathering.roster import (
    SLACK,
    SLOWER_MAX,
    transfer_s,
)
from averaging.rules.policy import RoundPolicy
from dht.identity import PeerId

DEFAULTS = RoundPolicy()
MBIT = 1e6 / 8


def takes_s(encoded_bytes: int, *speeds: float, shares: Sequence[int] = ()) -> float:
    """The time for the transfers of members with lines of these speeds, the first of which reduce:
    equal slices, unless their sizes are given."""
    peers = [PeerId(f"p{number}") for number in range(len(speeds))]
    of = dict(zip(peers, shares or [1] * len(peers), strict=False))
    speed_of = dict(zip(peers, speeds, strict=True))
    return transfer_s(DEFAULTS, peers, of, speed_of, encoded_bytes=encoded_bytes)


def test_a_tiny_fragment_takes_hardly_any_time() -> None:
    assert 0.0 < takes_s(1000, 0.0, 0.0, 0.0, 0.0) < 0.025


def test_a_billion_parameters_over_ten_megabits_have_minutes() -> None:
    needed_s = (500 << 20) / (10 * MBIT)
    assert takes_s(500 << 20, 10 * MBIT, 10 * MBIT) == SLACK * needed_s


def test_the_slowest_member_sets_the_deadline_down_to_a_tenth_of_an_unknown_line() -> None:
    def with_one_of(bytes_per_s: float) -> float:
        return takes_s(10**7, 1e9, 1e9, bytes_per_s, shares=(1, 1))

    assert with_one_of(1e6) == SLACK * 10.0
    assert with_one_of(0.0) == SLACK * 1e7 / DEFAULTS.slow_link_bytes_s
    assert with_one_of(1.0) == SLACK * 1e7 / (DEFAULTS.slow_link_bytes_s / SLOWER_MAX)


def test_a_reducer_of_everything_receives_from_all_others() -> None:
    assert takes_s(200_000, *[1e6] * 16, shares=(1,)) == SLACK * 15 * 0.2
