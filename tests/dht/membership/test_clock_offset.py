"""The estimated difference between wall clocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dht.identity import Identity, PeerId
from dht.membership.clock_offset import SAMPLES_MAX, ClockOffsets, ClockSample, sample


def peer(number: int) -> PeerId:
    return Identity.from_seed(number.to_bytes(32, "big")).peer_id


@given(st.floats(-1e6, 1e6), st.floats(0, 1), st.floats(0, 1), st.floats(0, 5))
def test_an_offset_is_right_to_within_half_the_round_trip(
    offset_s: float, there_s: float, back_s: float, thinking_s: float
) -> None:
    sent_at = 1_000.0
    received_at = sent_at + there_s + offset_s
    measured = sample(
        sent_at=sent_at,
        received_at=received_at,
        replied_at=received_at + thinking_s,
        returned_at=sent_at + there_s + thinking_s + back_s,
        now=0.0,
    )
    assert abs(measured.offset_s - offset_s) <= (there_s + back_s) / 2 + 1e-6
    assert measured.round_trip_s == pytest.approx(there_s + back_s, abs=1e-6)


def exchange(offset_s: float, now: float, round_trip_s: float = 0.1) -> ClockSample:
    return sample(
        sent_at=0.0,
        received_at=round_trip_s / 2 + offset_s,
        replied_at=round_trip_s / 2 + offset_s,
        returned_at=round_trip_s,
        now=now,
    )


def test_a_minority_with_wrong_clocks_does_not_move_the_estimate() -> None:
    offsets = ClockOffsets()
    assert offsets.estimate(0.0) is None
    for number, offset_s in enumerate([0.1, 0.1, 0.1, 9999.0, -9999.0]):
        offsets.add(peer(number), exchange(offset_s, 0.0))
    estimate = offsets.estimate(0.0)
    assert estimate is not None
    assert estimate.offset_s == pytest.approx(0.1)
    assert estimate.error_s == pytest.approx(0.05)
    assert estimate.peers == 5


def test_only_those_that_count_are_counted() -> None:
    offsets = ClockOffsets()
    for number in range(5):
        offsets.add(PeerId(f"stranger{number}"), ClockSample(1e9, 0.1, 0.0))
    assert offsets.estimate(0.0, lambda peer: peer == "anna") is None
    offsets.add(PeerId("anna"), ClockSample(0.5, 0.1, 0.0))
    found = offsets.estimate(0.0, lambda peer: peer == "anna")
    assert found is not None and (found.offset_s, found.peers) == (0.5, 1)


def test_slow_old_and_too_many_samples_do_not_count() -> None:
    offsets = ClockOffsets()
    offsets.add(peer(0), exchange(5.0, 0.0, round_trip_s=3.0))
    assert offsets.estimate(0.0) is None
    for number in range(SAMPLES_MAX + 5):
        offsets.add(peer(number), exchange(1.0, 0.0))
    estimate = offsets.estimate(900.0)
    assert estimate is not None and estimate.peers == SAMPLES_MAX
    assert offsets.estimate(900.1) is None
