from __future__ import annotations

import pytest

from peer.rules.ending import LastOffers

MBIT = 125_000.0


def offers(megabytes: float, mbit: float, company_s: float = 0.0) -> LastOffers:
    return LastOffers(
        encoded_bytes=int(1e6 * megabytes), bytes_per_s=mbit * MBIT, company_s=company_s
    )


def test_it_takes_as_long_as_the_line_needs_for_the_bytes_and_the_others_for_steps() -> None:
    assert offers(5.0, 5.0).expected_s == pytest.approx(10.0)
    assert offers(5.0, 0.0).expected_s == pytest.approx(10.0), "an unknown line is of 5 Mbit/s"
    assert offers(5.0, 5.0, company_s=15.0).expected_s == pytest.approx(25.0)


def test_a_peer_stays_three_times_as_long_within_bounds() -> None:
    assert offers(5.0, 5.0).patience_s(least_s=12.0, most_s=300.0) == pytest.approx(30.0)
    assert offers(0.1, 50.0).patience_s(least_s=12.0, most_s=300.0) == 12.0
    assert offers(50.0, 1.0).patience_s(least_s=12.0, most_s=300.0) == 300.0
    assert offers(50.0, 1.0).patience_s(least_s=12.0, most_s=0.0) == 12.0
